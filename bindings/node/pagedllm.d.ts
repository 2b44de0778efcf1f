import type {
  Admission, BudgetInfo, Code, ForkOptions, Generated, KvEvent, ModelInfo, Options, Output, Pin, Plan, Request, Sampling, SequenceInfo,
  Stats, Step,
} from './abi.js';

export * from './abi.js';

/**
 * An error of the library: a stable code, and a message with the numbers and the remedy. A call on
 * a closed object throws PLLM_E_CLOSED.
 */
export class PagedllmError extends Error {
  readonly code: Code;
  /** Number of tokens of the prompt, if it is too long for maxModelLen. Else null. */
  readonly promptTokens: number | null;
  /** maxModelLen of the engine, if a prompt is too long for it. Else null. */
  readonly maxModelLen: number | null;
  /** Whether the same call can succeed later without a change, for example when fewer requests wait. */
  readonly isTemporary: boolean;
}

export interface OpenOptions extends Options {
  /**
   * If true, call step(), or start() later. By default, a thread of the engine steps it from the
   * start.
   */
  hostSteps?: boolean;
  /**
   * Reports the bytes of weights that have been read, out of total. The loading waits for it. An
   * exception cancels the loading and rejects the promise.
   */
  progress?: (done: number, total: number) => void;
  /** Cancels the loading. It has no effect on the engine after that. */
  signal?: AbortSignal;
}

/**
 * Continues an idle sequence as if it had never been idle, with its own sampling, counts and
 * grammar. The sequence need not have ended: idle forks and imported sequences continue where they
 * are.
 */
export interface ResumeContinue extends Pick<Sampling, 'userData' | 'keep' | 'deadlineMs'> {
  continueGeneration: true;
}

/** Everything that one sequence generated, until its end, an abort or its deadline. */
export interface Completion extends Generated {}

/** A queue of outputs. */
export class Queue {
  private constructor();
  /**
   * Takes all outputs from the queue, in the order in which they were generated, without waiting.
   * Once the engine has failed or is closed, and all outputs have been taken, it throws that error.
   */
  poll(): Output[];
  /**
   * Fulfilled when poll() may return outputs or throw an error. It waits on the event loop, without
   * a thread.
   */
  readable(): Promise<void>;
  /**
   * Closes the queue and aborts the requests that write to it; readable() is fulfilled. Do not call
   * it on Engine.queue, which is closed with its engine.
   */
  close(): void;
}

/** A memory budget for KV pools. Engines can share it, and its size can change while they run. */
export class Budget {
  private constructor();
  /**
   * Creates a budget. resize() can later raise it to at most maxBytes (default: bytes). Nothing is
   * allocated now: engines reserve address space for maxBytes and use memory for the blocks they
   * fill. The budget must hold one sequence of maxModelLen tokens for each engine.
   */
  static create(bytes: number | bigint, maxBytes?: number | bigint): Budget;
  /**
   * Changes the size of the budget, on libuv's thread pool. No request ends, and results do not
   * change. A larger size takes effect at once. For a smaller size, the engines first drop cached
   * blocks, then the KV blocks of idle sequences, then preempt the youngest running requests.
   * Engines that are not in a step shrink before the promise is fulfilled, the others before their
   * next step. The memory is returned to the system. A size below minBytes or above maxBytes is
   * PLLM_E_CAPACITY.
   */
  resize(bytes: number | bigint): Promise<void>;
  /** Returns the size of the budget and the bytes that its engines hold. */
  info(): BudgetInfo;
  /** Frees the handle. Its engines keep the budget. No effect on Engine.budget. */
  close(): void;
}

/** The settings of a ResponseParser. */
export interface ResponseSettings {
  /**
   * How the model writes reasoning and tool calls: one of response_formats of buildInfo(). Default
   * "auto": the format that the model's chat template shows.
   */
  format?: string;
  /**
   * The rendered prompt. If it ends with the opening tag of the reasoning, the response begins
   * inside of the reasoning.
   */
  prompt?: string;
  /**
   * The tools that the prompt contains, as OpenAI's API defines them. Formats whose arguments have
   * no quotes take from them which arguments are strings.
   */
  tools?: object[];
  /** Precedes the index of a call in its id, unless the model writes an id. Default "call_". */
  toolCallIdPrefix?: string;
}

/** A part of a response, as a chat completion streams it. It has one of its members. */
export interface ResponseDelta {
  content?: string;
  reasoning_content?: string;
  tool_calls?: { index: number; id?: string; type?: 'function'; function: { name?: string; arguments: string } }[];
}

/**
 * Separates reasoning, content and tool calls of one response while it is generated. Feed it the
 * texts of a request with skipSpecial false.
 */
export class ResponseParser {
  private constructor();
  /** Parses the next piece of the response. */
  feed(text: string): ResponseDelta[];
  /** Ends the response. Returns the deltas of the text that was held back. */
  finish(): ResponseDelta[];
  /** Frees the parser. */
  close(): void;
}

/**
 * One model, its KV pool and its requests. Any number of requests can be in progress at once.
 *
 * A call that fails rejects or throws a PagedllmError. An argument of the wrong type is a
 * TypeError. An engine that is not closed lives until the process ends. It does not keep the
 * process alive, but a stream that waits does.
 */
export class Engine {
  private constructor();

  /**
   * Loads a model on libuv's thread pool, creates an engine and, unless hostSteps is set, starts
   * it. On the main thread only.
   */
  static open(options: OpenOptions): Promise<Engine>;
  /** Computes what an engine with these options would allocate, without allocating it. */
  static plan(options: Options): Promise<Plan>;

  /**
   * Ends every request and frees the engine; fulfilled when its memory is returned. Streams in
   * progress and later calls end with PLLM_E_CLOSED. It may be called at any time, more than once.
   */
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;

  /**
   * Runs a request and returns its first result. Aborting the signal aborts the request and rejects
   * with the reason of the signal.
   */
  generate(request: Request, options?: { signal?: AbortSignal }): Promise<Completion>;
  /** Runs a request and returns all n results, by index. See generate(). */
  generateAll(request: Request, options?: { signal?: AbortSignal }): Promise<Completion[]>;
  /**
   * Adds a request when it is first read, and returns its outputs as they are generated. While
   * `capacity` outputs (default 64) are unread, the request pauses; other requests continue.
   * Leaving the loop aborts the request, and the forks of its sequences without a queue of their
   * own. The signal aborts them at once, and the next read rejects with its reason. If the
   * computation of the request fails, the stream rejects with its error.
   */
  stream(request: Request, options?: { signal?: AbortSignal; capacity?: number | bigint }): AsyncGenerator<Output, void, void>;
  /**
   * Adds a request and returns its id. `queue`, by default Engine.queue, receives its outputs.
   * Requests are tokenized on libuv's thread pool and added in the order of the calls.
   */
  add(request: Request & { queue?: Queue }): Promise<number | bigint>;
  /**
   * Predicts admission and time to first token for a request without adding it. The prediction uses
   * the measured step times and the lengths of recent outputs. It assumes that the prompt is not in
   * the prefix cache. It rejects with the errors of add(), except for grammars, which are not
   * compiled. Calls run in their order, together with those of add().
   */
  predictAdmission(request: Request & { queue?: Queue }): Promise<Admission>;
  /**
   * Takes the events of the prefix cache since the last call, in their order, without waiting. Needs
   * Options.kvEventsCapacity. If more events were not read, the result is that of snapshotKvEvents()
   * instead. A reader that applies the events in their order therefore always ends with the blocks
   * that are cached.
   */
  pollKvEvents(): KvEvent[];
  /**
   * Lists the blocks of the prefix cache as events: 'cleared', and 'stored' of each block. The events
   * of pollKvEvents() are not affected.
   */
  snapshotKvEvents(): KvEvent[];
  /**
   * Computes the hashes of the full blocks of a prompt, as events have them, in hexadecimal. Only the
   * prompt and the salt of the request are used, and nothing is added to the engine. `group` is a
   * layer group, below Plan.kvGroups; 0 (default) exists in every model.
   */
  hashPrompt(request: Request & { group?: number }): Promise<string[]>;
  /**
   * Aborts a request at the next step. Its last output has 'abort'. If it has ended:
   * PLLM_E_NOT_FOUND.
   */
  abort(request: number | bigint): void;

  /**
   * Creates sequences with the first tokens of a sequence; they share its KV blocks. Each child is
   * a request of its own, whose id is its sequence id. Children of a running sequence run; children
   * of an idle one are idle.
   */
  fork(sequence: number | bigint, how?: ForkOptions): (number | bigint)[];
  /**
   * Appends tokens to a sequence. A running sequence continues after them from the next step on. An
   * idle sequence computes them when it is resumed.
   */
  append(sequence: number | bigint, tokens: ArrayLike<number> & Iterable<number>): void;
  /**
   * Truncates a sequence to its first `length` tokens, also into the prompt. Its state is as it was
   * then, including the random stream. Outputs that have been read are not taken back. A running
   * sequence continues from there.
   */
  rewind(sequence: number | bigint, length: number | bigint): void;
  /**
   * Continues an idle sequence. Only its last token and the tokens appended since are computed.
   * Without continueGeneration, counts (maxTokens, minTokens) and penalties start anew. `queue`
   * receives its outputs; by default its queue stays the same. Calls run in their order, together
   * with those of add().
   */
  resume(sequence: number | bigint, how?: (Sampling | ResumeContinue) & { queue?: Queue }): Promise<void>;
  /** Runs generate() for a kept sequence. */
  generateResumed(sequence: number | bigint, how?: Sampling, options?: { signal?: AbortSignal }): Promise<Completion>;
  /** Runs stream() for a kept or an imported sequence. */
  streamResumed(sequence: number | bigint, how?: Sampling | ResumeContinue, options?: { signal?: AbortSignal; capacity?: number | bigint }):
    AsyncGenerator<Output, void, void>;
  /** Frees a sequence and its blocks. A running sequence ends with 'abort'. */
  free(sequence: number | bigint): void;
  /** Reads the state of a sequence. If it ended without being kept: PLLM_E_NOT_FOUND. */
  sequenceInfo(sequence: number | bigint): SequenceInfo;

  /**
   * Returns the state of a sequence at the next step: tokens, KV blocks, sampling parameters,
   * random stream, grammar and text. It contains the conversation in plain text. The sequence is
   * not affected. If it ends before that step and is not kept: PLLM_E_NOT_FOUND.
   */
  exportSequence(sequence: number | bigint): Promise<Uint8Array>;
  /**
   * Creates an idle sequence from the state that exportSequence() returned, in this or another
   * process, and returns its id. Resumed with continueGeneration, it continues with the same bits
   * unless it is `inexact`. `queue`, by default Engine.queue, receives its outputs. A state that is
   * damaged, or exported with another model, blockSize or kvDtype, is refused. Calls run in their
   * order, together with those of add().
   */
  importSequence(state: Uint8Array, options?: { queue?: Queue }): Promise<number | bigint>;

  /**
   * Computes a prompt, from the next step on, and keeps its blocks in the prefix cache. Returns the
   * id of the pin.
   */
  pin(prompt: Pin): Promise<number | bigint>;
  /**
   * Unpins a prompt: its blocks can be evicted again. If the pin has expired or was dropped:
   * PLLM_E_NOT_FOUND.
   */
  unpin(pin: number | bigint): void;

  /**
   * Runs one iteration, on libuv's thread pool. If another step or the engine's own thread is
   * running: PLLM_E_BUSY.
   */
  step(): Promise<Step>;
  /** Starts the engine's own thread. If it is already running: PLLM_E_BUSY. */
  start(): void;
  /**
   * Stops the engine's own thread after the current step. Requests wait until the engine is stepped
   * again.
   */
  stop(): Promise<void>;

  /** The engine's own queue, for requests that are added without a queue. */
  get queue(): Queue;
  /**
   * Creates a queue for some requests. While it holds `capacity` outputs, they pause; others
   * continue.
   */
  createQueue(capacity: number | bigint): Queue;
  /** The budget of the KV pool: the budget of the options or the engine's own. */
  get budget(): Budget;

  /** Encodes text as token ids. */
  tokenize(text: string | Uint8Array, options?: { addSpecial?: boolean }): Promise<number[]>;
  /** Decodes token ids as text. */
  detokenize(tokens: ArrayLike<number> & Iterable<number>, options?: { skipSpecial?: boolean }): Promise<string>;
  /**
   * Returns the bytes that a token contributes to a text. They can be a part of a character. A
   * special token has its name, and an id that only the model knows has no bytes. The first call
   * reads the whole vocabulary. An id that is not below vocabSize of modelInfo():
   * PLLM_E_INVALID_ARGUMENT. An engine without a tokenizer: PLLM_E_UNSUPPORTED.
   */
  tokenBytes(token: number): Buffer;
  /**
   * Renders a chat, [{ role: 'user', content: '...' }, ...], with the model's chat template. An
   * object has `messages` and variables of the template. pllm_engine_render_chat documents the
   * members, such as `continue_final_message`. The result is a prompt for addSpecial: false.
   */
  renderChat(messages: object): Promise<string>;
  /**
   * Creates the parser of one response of the model. It does not need the engine later. An unknown
   * format is PLLM_E_INVALID_ARGUMENT.
   */
  responseParser(settings?: ResponseSettings): ResponseParser;

  /**
   * Returns null if the engine works, and the error that has stopped it if it has failed: after
   * PLLM_E_INTERNAL, or if its device was lost. Then all its requests have ended, and only a new
   * engine can serve. It does not throw that error. The call does not wait for a step.
   */
  health(): PagedllmError | null;
  /** Returns the model and the limits of the engine. */
  modelInfo(): ModelInfo;
  /** Returns counters since the creation of the engine, and its state after the last step. */
  stats(): Stats;
  /**
   * Returns gauges, counters and histograms, as of the last step, in the OpenMetrics text format
   * ('application/openmetrics-text; version=1.0.0; charset=utf-8'). The names are those of vLLM
   * with the prefix 'pagedllm_'. The call does not wait for a step.
   */
  metrics(): string;
  /**
   * Describes the engine after its current step: which sequences have which blocks, and what the
   * last steps computed. It has the first maxBlocks blocks of each tier and at most maxSequences
   * sequences. Default: as many as possible.
   */
  snapshot(limits?: { maxBlocks?: number; maxSequences?: number }): Promise<EngineSnapshot>;
}

/**
 * The state of an engine between two steps. pllm_engine_snapshot in the C header describes the
 * members, whose names are those of the JSON object.
 */
export interface EngineSnapshot {
  time: number;
  block_size: number;
  layer_groups: number;
  counts: Record<string, number>;
  pool: TierSnapshot;
  host_tier: TierSnapshot;
  sequences: {
    sequence: number;
    request: number;
    state: 'running' | 'waiting' | 'paused' | 'idle' | 'pinned';
    tokens: number;
    max_len: number;
    computed_tokens: number;
    cached_tokens: number;
    generated_tokens: number;
    blocks: number;
    tier: 'pool' | 'host';
  }[];
  sequences_omitted: number;
  steps: { start: number; seconds: number; prefill_tokens: number; decode_tokens: number; sequences: number }[];
}

/** The blocks of a tier. Each run has consecutive blocks with the same use. */
export interface TierSnapshot {
  blocks: number;
  free: number;
  cached: number;
  used: number;
  runs: ([blocks: number, state: 'free' | 'cached'] | [blocks: number, state: 'used', users: number, sequence: number])[];
}

/** Returns the version of the loaded library, such as "0.3.0". */
export function version(): string;
/**
 * Returns a description of this build and machine: version, backends, instruction paths, model
 * architectures.
 */
export function buildInfo(): Record<string, unknown>;
