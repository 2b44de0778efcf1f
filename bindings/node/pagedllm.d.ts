/** Why a call was refused. A newer library may have codes without a name here: `PLLM_E_` and a number. */
export type Code =
  | 'PLLM_E_INVALID_ARGUMENT' | 'PLLM_E_NOT_FOUND' | 'PLLM_E_IO' | 'PLLM_E_MODEL' | 'PLLM_E_UNSUPPORTED' | 'PLLM_E_CAPACITY'
  | 'PLLM_E_BUSY' | 'PLLM_E_OUT_OF_MEMORY' | 'PLLM_E_INTERNAL' | 'PLLM_E_CLOSED' | 'PLLM_E_CANCELLED' | (string & {});

/** What the library refused: a stable code, and a message with the numbers and the remedy. What was closed is PLLM_E_CLOSED. */
export class PagedllmError extends Error {
  readonly code: Code;
}

/** How an engine is made. What is left out is the library's default. */
export interface Options {
  /** A model directory as Hugging Face ships it. */
  modelPath: string | Uint8Array;
  /** Where to run: 'cpu'. */
  device?: string | Uint8Array;
  /** Bytes of the KV pool. */
  kvBytes?: number | bigint;
  /** How K and V are stored. */
  kvDtype?: 'auto' | 'f32' | 'bf16';
  /** Tokens per KV block. */
  blockSize?: number;
  /** Longest sequence, prompt and output together. */
  maxModelLen?: number;
  /** Most rows (prompt and decode tokens of all sequences) in one step. */
  maxBatchTokens?: number;
  /** Most sequences running at once. */
  maxSeqs?: number;
  /** Most prompt tokens of one sequence in one step. */
  prefillChunk?: number;
  /** Threads that compute. */
  threads?: number;
  /** An instruction path to force. Bits are the same within one path, not across paths. */
  isa?: 'auto' | 'portable' | 'avx2' | 'avx512';
  /** Seeds the requests that bring no seed of their own. */
  seed?: number | bigint;
  /** Outputs that may wait in Engine.queue before its requests pause. */
  queueCapacity?: number | bigint;
  /** Serve token ids only. */
  skipTokenizer?: boolean;
}

export interface OpenOptions extends Options {
  /** You call step(), or start() later on. Otherwise the library's own thread steps from the start. */
  hostSteps?: boolean;
  /** Told how many bytes of weights are read, of how many. The loading waits for it; what it throws stops it, and rejects. */
  progress?: (done: number, total: number) => void;
  /** Stops the loading; means nothing to the engine once it is open. */
  signal?: AbortSignal;
}

/** A prompt, and what to make of it. What is left out is the library's default. */
export interface Request {
  /** The prompt as text; a Uint8Array is UTF-8. */
  prompt?: string | Uint8Array;
  /** Or as token ids. */
  promptTokens?: ArrayLike<number> & Iterable<number>;
  /** Let the tokenizer add its special tokens, such as BOS; false for a prompt that renderChat wrote. */
  addSpecial?: boolean;
  /** Leave special tokens out of the text. */
  skipSpecial?: boolean;
  /** 0 is greedy. */
  temperature?: number;
  /** Keep the most probable tokens that together reach this probability. */
  topP?: number;
  /** Keep tokens at least this share as probable as the most probable one. */
  minP?: number;
  /** Keep the k most probable tokens. */
  topK?: number;
  maxTokens?: number;
  /** Neither end-of-sequence tokens nor stops count before this many tokens. */
  minTokens?: number;
  /** With one, the same tokens come whatever runs beside it. */
  seed?: number | bigint;
  /** Strings that end it, also across tokens; they do not appear in the text. */
  stop?: string | Uint8Array | (string | Uint8Array)[];
  /** Tokens that end it; reported, their text is not. */
  stopTokenIds?: ArrayLike<number> & Iterable<number>;
  /** Go on past end-of-sequence tokens. */
  ignoreEos?: boolean;
  /** Report the log probability of every sampled token. */
  logprobs?: boolean;
  /** Comes back in every output. */
  userData?: number | bigint;
  /** Sequences to generate. */
  n?: number;
}

/** Why a request ended; null: it has not. 'other': a reason that only a newer library knows. */
export type FinishReason = 'stop' | 'length' | 'abort' | 'error' | 'other' | null;

/** News of one request: new tokens, new text, or its end. The text may lag behind the tokens. */
export interface Output {
  request: number | bigint;
  text: string;
  tokens: number[];
  /** One per token, where the request asked for them. */
  logprobs: number[] | null;
  /** Anything but null makes this the last one. */
  finishReason: FinishReason;
  /** With 'error'. */
  error: PagedllmError | null;
  promptTokens: number;
  /** So far. */
  generatedTokens: number;
  userData: number | bigint;
  sequence: number | bigint;
  index: number;
}

/** All that a request generated. 'abort': it was cut short by Engine.abort. */
export interface Completion {
  request: number | bigint;
  text: string;
  tokens: number[];
  logprobs: number[] | null;
  finishReason: FinishReason;
  promptTokens: number;
}

/** What one step did. */
export interface Step {
  /** Requests that have not ended: step again while there are any. */
  unfinished: number;
  prefillTokens: number;
  decodeTokens: number;
  sequences: number;
  /** Sequences passed over because their queue is full. */
  paused: number;
}

/** Counts since the engine was made, and the state after its last step. */
export interface Stats {
  waiting: number;
  running: number;
  blocksTotal: number;
  blocksUsed: number;
  blocksCached: number;
  blocksFree: number;
  slotUtilization: number;
  steps: number;
  promptTokens: number;
  generatedTokens: number;
  preemptions: number;
  finishedStop: number;
  finishedLength: number;
  finishedAbort: number;
  finishedError: number;
  paused: number;
}

/** Where an engine's bytes go, known before any are taken. */
export interface Plan {
  weightBytes: number;
  kvBytes: number;
  workBytes: number;
  blocks: number;
  blockSize: number;
  blockBytes: number;
  maxModelLen: number;
  fullSequences: number;
  kvDtype: 'f32' | 'bf16';
}

/** The model and the limits it is served with. */
export interface Info {
  architecture: string;
  isa: string;
  eosTokenIds: number[];
  vocabSize: number;
  layers: number;
  /** The longest sequence that the model was made for. */
  maxPositions: number;
  /** The longest that this engine allows. */
  maxModelLen: number;
  threads: number;
}

/** Where the outputs of some requests arrive. */
export class Queue {
  private constructor();
  /** Takes everything that is in the queue, in the order it was made, without waiting. Once the engine is closed or has failed,
   * and the last outputs are taken, it throws. */
  poll(): Output[];
  /** Fulfilled when poll() may have something, or has an error to throw. Waits on the event loop, without a thread. */
  readable(): Promise<void>;
  /** Aborts what still writes to the queue, and closes it; readable() is fulfilled. Not for Engine.queue, which is closed with its
   * engine. */
  close(): void;
}

/**
 * One model, its KV pool and its requests. Any number of requests may be under way at once.
 *
 * What is refused rejects or throws a PagedllmError; arguments of the wrong type are a TypeError.
 * An engine that is not closed lives as long as the process. It does not keep the process alive; a stream that waits does.
 */
export class Engine {
  private constructor();

  /** Loads a model, on a thread of libuv's pool, and starts to serve it. On the main thread only. */
  static open(options: OpenOptions): Promise<Engine>;
  /** What an engine with these options would allocate. Reads the model's headers, and allocates nothing of it. */
  static plan(options: Options): Promise<Plan>;

  /** Ends every request and returns the engine's memory; fulfilled when it is back. Streams under way and later
   * calls end with PLLM_E_CLOSED. May be called at any time, and again. */
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;

  /** All that the request gives. Aborting the signal aborts the request and rejects with the signal's reason. */
  generate(request: Request, options?: { signal?: AbortSignal }): Promise<Completion>;
  /** Adds a request when it is first read, and gives its outputs as they come. It pauses, and no other does, while `capacity`
   * outputs (64) wait to be read. Leaving the loop aborts the request. So does the signal, at once; the
   * next read rejects with its reason. A request whose computation fails rejects with its error. */
  stream(request: Request, options?: { signal?: AbortSignal; capacity?: number | bigint }): AsyncGenerator<Output, void, void>;
  /** Adds a request whose outputs go to a queue, by default Engine.queue, and gives its id. Requests are tokenized on libuv's pool
   * and added in the order of the calls. */
  add(request: Request & { queue?: Queue }): Promise<number | bigint>;
  /** Ends a request at the next step; its last output says 'abort'. One that has ended is PLLM_E_NOT_FOUND. */
  abort(request: number | bigint): void;

  /** Runs one iteration, on libuv's pool. While another runs, or the library's own thread steps, it is PLLM_E_BUSY. */
  step(): Promise<Step>;
  /** From now on the library's own thread steps. Where it does already: PLLM_E_BUSY. */
  start(): void;
  /** Ends that thread after the step under way. Nothing is lost: requests wait until somebody steps again. */
  stop(): Promise<void>;

  /** The engine's own queue, for requests that were added without one. */
  get queue(): Queue;
  /** A queue for some of the requests. They pause, and no others do, while `capacity` outputs wait in it. */
  createQueue(capacity: number | bigint): Queue;

  /** The text's token ids. */
  tokenize(text: string | Uint8Array, options?: { addSpecial?: boolean }): Promise<number[]>;
  /** The tokens' text. */
  detokenize(tokens: ArrayLike<number> & Iterable<number>, options?: { skipSpecial?: boolean }): Promise<string>;
  /** Renders a conversation, [{ role: 'user', content: '...' }, ...], with the model's own template; or an object with `messages`
   * and what else the template reads. The result is a prompt for addSpecial: false. */
  renderChat(messages: object): Promise<string>;

  /** The model and the limits it is served with. */
  info(): Info;
  /** Counts since the engine was made, and the state after its last step. */
  stats(): Stats;
}

/** The version of the library that was loaded, such as "0.2.0". */
export function version(): string;
/** What it offers on this machine: version, backends, instruction paths, model architectures. */
export function buildInfo(): Record<string, unknown>;
