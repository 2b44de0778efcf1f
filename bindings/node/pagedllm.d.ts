/** Code of an error. A newer library can have codes without a name here: `PLLM_E_` and a number. */
export type Code =
  | 'PLLM_E_INVALID_ARGUMENT' | 'PLLM_E_NOT_FOUND' | 'PLLM_E_IO' | 'PLLM_E_MODEL' | 'PLLM_E_UNSUPPORTED' | 'PLLM_E_CAPACITY'
  | 'PLLM_E_BUSY' | 'PLLM_E_OUT_OF_MEMORY' | 'PLLM_E_INTERNAL' | 'PLLM_E_CLOSED' | 'PLLM_E_CANCELLED' | (string & {});

/**
 * An error of the library: a stable code, and a message with the numbers and the remedy. A call on
 * a closed object throws PLLM_E_CLOSED.
 */
export class PagedllmError extends Error {
  readonly code: Code;
}

/** Options of an engine. An option that is left out has the library's default. */
export interface Options {
  /** Model directory in the layout of Hugging Face. */
  modelPath: string | Uint8Array;
  /** Device: 'cpu', or 'cuda:0' for the first CUDA device. */
  device?: string | Uint8Array;
  /** Size of the KV pool in bytes. */
  kvBytes?: number | bigint;
  /** Budget from which the KV pool takes its bytes, instead of kvBytes. Engines can share it. */
  budget?: Budget;
  /**
   * Format of the weights in memory. Fewer bits take less memory and time, and cost quality. 'int8'
   * has a scale for each output, and 'int4' a scale for each group of its inputs. 'int4Asymmetric'
   * also has an offset for each group. 'fp8' is for CUDA only and has a scale for each output.
   */
  weightFormat?: 'asStored' | 'f32' | 'f16' | 'bf16' | 'int8' | 'int4' | 'int4Asymmetric' | 'fp8';
  /** Number of inputs that share a scale in 4-bit formats: 32, 64 or 128. */
  weightGroup?: number;
  /**
   * Directory for packed weights, from which a later engine reads them as fast as the disk.
   * info().packed has the result. By default, weights are packed each time.
   */
  packedPath?: string | Uint8Array;
  /**
   * Data type of KV blocks. 'int8' has a scale for each head of each token: about half the bytes of
   * 'bf16', at a small cost in quality. 'fp8' (OCP E4M3) has the same scales. 'f16' clamps values
   * beyond 65504.
   */
  kvDtype?: 'auto' | 'f32' | 'bf16' | 'int8' | 'f16' | 'fp8';
  /** Tokens per KV block. */
  blockSize?: number;
  /** Maximum length of a sequence in tokens, prompt and output together. */
  maxModelLen?: number;
  /** Maximum number of tokens in one step, prompt and decode tokens of all sequences together. */
  maxBatchTokens?: number;
  /** Maximum number of running sequences. */
  maxSeqs?: number;
  /** Maximum number of prompt tokens of one sequence in one step. */
  prefillChunk?: number;
  /** Number of threads, including the stepping thread. */
  threads?: number;
  /**
   * List of CPUs in the syntax of taskset -c, such as '0-3,8', to which the threads are pinned, in
   * this order. The first is for the stepping thread. By default, threads are not pinned.
   */
  cpus?: string;
  /**
   * Instruction path. 'auto' is the widest of the machine. Results have the same bits within a
   * path, not across paths. With 'avx512_bf16', activations that are multiplied by weights or KV in
   * bf16 are rounded to bf16.
   */
  isa?: 'auto' | 'portable' | 'avx2' | 'avx512' | 'avx512_bf16' | 'avx_vnni' | 'avx512_vnni';
  /** Seed for requests without a seed of their own. */
  seed?: number | bigint;
  /**
   * Maximum number of requests that wait for their first step. More are refused with
   * PLLM_E_CAPACITY; one can always wait.
   */
  maxWaitingRequests?: number | bigint;
  /** Maximum number of tokens that the waiting requests have to compute. */
  maxWaitingTokens?: number | bigint;
  /**
   * Maximum length in bytes of a text prompt, of a chat's JSON and the prompt it renders to, and of
   * a text to tokenize. Default: 64 for each token of maxModelLen, at least 1048576.
   */
  maxPromptBytes?: number | bigint;
  /**
   * Order of the waiting requests: first come, first served; highest priority first; or shortest
   * predicted output first. The prediction uses recent requests with a similar maxTokens.
   */
  order?: 'fcfs' | 'priority' | 'shortestPredicted';
  /**
   * Waiting time in milliseconds after which a request is preferred. It then goes before new
   * requests of the next higher priority, or that are predicted to be up to 100 tokens shorter.
   */
  ageingMs?: number;
  /**
   * Composition of a step.
   *
   * - 'mixed': prompt chunks and decodes, in the order of the requests.
   * - 'prefillFirst': either prompts or decodes, and prompts go first. After prefillBudget prompt
   *   tokens, the decodes get one step.
   * - 'decodeFirst': every decode and at most prefillBudget prompt tokens.
   * - 'static': no request is admitted until the running batch has finished. For baselines.
   */
  batching?: 'mixed' | 'prefillFirst' | 'decodeFirst' | 'static';
  /** Prompt tokens for 'prefillFirst' and 'decodeFirst'. */
  prefillBudget?: number;
  /**
   * Number of blocks that a request needs to start. 'onDemand': blocks are allocated as a sequence
   * grows; if the pool is full, the last request in the order is preempted. 'maxTokens': a request
   * starts when the pool has blocks for its maxTokens.
   */
  allocation?: 'onDemand' | 'maxTokens';
  /**
   * Treatment of preempted requests: they are recomputed, swapped to host memory, or whichever
   * costs less.
   */
  preemption?: 'recompute' | 'swap' | 'auto';
  /** Size in bytes of the host tier, which holds the KV of swapped requests and idle sequences. */
  swapBytes?: number | bigint;
  /**
   * Directory for the host tier, an unnamed file that disappears with the engine. By default, the
   * host tier is in memory.
   */
  swapPath?: string | Uint8Array;
  /**
   * File for a trace of every step, in the format of Perfetto and chrome://tracing. An existing
   * file is replaced. If the disk fails, the trace ends.
   */
  tracePath?: string | Uint8Array;
  /**
   * File for a journal of all inputs of the engine. pagedllm-replay repeats its steps bit for bit.
   * It contains prompts. An existing file is replaced. If the disk fails, the journal ends.
   */
  journalPath?: string | Uint8Array;
  /** Value of the label model_name in metrics(). Default: the name of the model directory. */
  modelName?: string | Uint8Array;
  /** Capacity, in outputs, of Engine.queue. While it is full, its requests pause. */
  queueCapacity?: number | bigint;
  /** Serve token ids only. */
  skipTokenizer?: boolean;
  /** false disables the prefix cache. */
  prefixCache?: boolean;
  /**
   * Makes the results of a sequence on a CUDA device independent of the batch, as on the CPU. It is
   * slower.
   */
  batchInvariant?: boolean;
  /**
   * CUDA only: fraction, 0.01 to 1, of the device memory that is free after weights and working
   * memory, for the KV pool. Replaces kvBytes.
   */
  memoryFraction?: number;
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

/** A constraint on the output: one of these. */
export type Grammar =
  /** A JSON text that the schema describes. */
  | { jsonSchema: object | boolean | string | Uint8Array }
  /** Any JSON object. */
  | { jsonObject: true }
  /** A text that the regular expression matches as a whole. */
  | { regex: string | Uint8Array }
  /** One of these texts. */
  | { choice: (string | Uint8Array)[] }
  /** A text that the Lark grammar describes. */
  | { lark: string | Uint8Array };

/**
 * The DRY penalty: a token that would extend a repetition of length tokens loses multiplier * base
 * ** (length - allowedLength).
 */
export interface Dry {
  multiplier?: number;
  base?: number;
  /** Length of the longest repetition without a penalty. */
  allowedLength?: number;
  /** Number of last tokens that are searched for repetitions. 0: all. */
  penaltyLastN?: number;
  /** Texts that end a repetition. Default: those of the library. Empty: none. */
  sequenceBreakers?: (string | Uint8Array)[];
}

/** Parameters of a beam search, as in generate of Hugging Face transformers. */
export interface Beam {
  /** Number of beams. */
  width?: number;
  /** Number of groups of beams, each with its own search. */
  groups?: number;
  /**
   * Subtracted from the log probability of a token for each beam of an earlier group that chose it
   * in the same step.
   */
  diversityPenalty?: number;
  /**
   * The score of a beam is the sum of its log probabilities divided by its length to this power.
   */
  lengthPenalty?: number;
  /**
   * When the search ends. 'no': when the best running beam, if it ended now, would not score higher
   * than the worst finished beam. 'yes': as soon as `width` beams are finished. 'never': when no
   * running beam can reach a higher score than the worst finished beam.
   */
  earlyStopping?: 'no' | 'yes' | 'never';
}

/**
 * How a request samples its tokens, what it reports and when it ends. A parameter that is left out
 * has the library's default.
 */
export interface Sampling {
  /** 0 selects greedy sampling. */
  temperature?: number;
  /** Keeps the most probable tokens whose probabilities sum to at least this value. */
  topP?: number;
  /** Keeps tokens whose probability is at least this fraction of the largest. */
  minP?: number;
  /** Keeps the k most probable tokens. */
  topK?: number;
  /**
   * Keeps the tokens with the most typical surprise whose probabilities sum to at least this value.
   */
  typicalP?: number;
  /** Keeps tokens whose logit is within this many standard deviations of the largest. */
  topNSigma?: number;
  /** Probability with which XTC removes the most probable tokens. */
  xtcProbability?: number;
  /** Probability from which on a token counts as a top choice for XTC. */
  xtcThreshold?: number;
  /** Mirostat 2: target surprise in bits per token. */
  mirostatTau?: number;
  /** Mirostat 2: learning rate. */
  mirostatEta?: number;
  /** Subtracted from the logit of each token that has been generated. */
  presencePenalty?: number;
  /** Subtracted from the logit of a token for each time it has been generated. */
  frequencyPenalty?: number;
  /**
   * Divides positive logits, and multiplies negative logits, of all tokens of the prompt and the
   * output.
   */
  repetitionPenalty?: number;
  /** No n-gram of this many tokens occurs twice. */
  noRepeatNgramSize?: number;
  dry?: Dry;
  /** Values that are added to the logits of these token ids. */
  logitBias?: Record<number, number>;
  /** Texts that the output must not contain. */
  badWords?: string | Uint8Array | (string | Uint8Array)[];
  /** Token sequences that the output must not contain. */
  badWordsIds?: (ArrayLike<number> & Iterable<number>)[];
  /** The only tokens that may be sampled. Default: all. */
  allowedTokenIds?: ArrayLike<number> & Iterable<number>;
  /** Constraint on the output. */
  grammar?: Grammar;
  maxTokens?: number;
  /** Number of tokens before which neither end-of-sequence tokens nor stops end the sequence. */
  minTokens?: number;
  /** A request with a seed generates the same tokens in any batch. */
  seed?: number | bigint;
  /**
   * Strings that end the sequence, within a token or across tokens. They do not appear in the text.
   */
  stop?: string | Uint8Array | (string | Uint8Array)[];
  /** Tokens that end the sequence. They are reported in tokens, but not in the text. */
  stopTokenIds?: ArrayLike<number> & Iterable<number>;
  /** Keeps the stop string, or the text of the token that ends the sequence, in the text. */
  includeStop?: boolean;
  /** Does not stop at end-of-sequence tokens. */
  ignoreEos?: boolean;
  /** Reports the log probability of each generated token. */
  logprobs?: boolean;
  /** Reports that of this number of most probable tokens as well. */
  topLogprobs?: number;
  /** Reports the log probability of each prompt token except the first. */
  promptLogprobs?: boolean;
  promptTopLogprobs?: number;
  /** The output begins with the prompt. */
  echo?: boolean;
  /**
   * Content of each output: the new tokens and text, everything so far, or one output at the end
   * with everything.
   */
  outputKind?: 'delta' | 'cumulative' | 'final';
  /** Leaves special tokens out of the text. */
  skipSpecial?: boolean;
  /** Returned in each output. */
  userData?: number | bigint;
  /**
   * The sequences are kept when they end, for any reason, until free(). Default: false for a new
   * request, true for a resumed sequence.
   */
  keep?: boolean;
  /** Milliseconds from now after which the sequence ends with 'deadline' and the tokens it has. */
  deadlineMs?: number;
}

/** A prompt with its parameters. A parameter that is left out has the library's default. */
export interface Request extends Sampling {
  /** Prompt as text; a Uint8Array is UTF-8. */
  prompt?: string | Uint8Array;
  /** Prompt as token ids. */
  promptTokenIds?: ArrayLike<number> & Iterable<number>;
  /**
   * The tokenizer adds its special tokens, such as BOS. Set it to false for a prompt that
   * renderChat rendered.
   */
  addSpecial?: boolean;
  /** Number of tokens at the end of the prompt that are kept. */
  truncatePromptTokens?: number;
  /**
   * Number of results, each with its index and its own last output. Result i has the sequence id
   * request + i.
   */
  n?: number;
  /**
   * Number of samples to generate. The n samples with the highest log probability are returned at
   * the end, best first.
   */
  bestOf?: number;
  /** Beam search instead of sampling. The n best beams are returned at the end, best first. */
  beam?: Beam;
  /**
   * Requests share blocks of the prefix cache only if their salts are equal, so that tenants cannot
   * probe the prompts of other tenants.
   */
  cacheSalt?: string | Uint8Array;
  /** With order: 'priority': -100 to 100, default 0; higher runs first. */
  priority?: number;
}

/**
 * Continues an idle sequence as if it had never been idle, with its own sampling, counts and
 * grammar. The sequence need not have ended: idle forks and imported sequences continue where they
 * are.
 */
export interface ResumeContinue extends Pick<Sampling, 'userData' | 'keep' | 'deadlineMs'> {
  continueGeneration: true;
}

/** A prompt that is kept in the prefix cache. */
export interface Pin extends Pick<Request, 'prompt' | 'promptTokenIds' | 'addSpecial' | 'cacheSalt'> {
  /** Time in milliseconds for which the prompt is kept. Default: until it is unpinned. */
  timeToLiveMs?: number | bigint;
  /**
   * If a sequence cannot continue otherwise, pins are dropped, those with the lowest priority
   * first.
   */
  priority?: number;
}

export interface ForkOptions {
  /** Number of children. Default 1. */
  n?: number;
  /** Number of tokens that the children share with their parent. Default: all. */
  at?: number | bigint;
  /**
   * Each child draws from its own random stream of this seed. Without a seed, the children draw the
   * same random numbers as their parent.
   */
  seed?: number | bigint;
  /** The children are idle until they are resumed, even if the parent runs. */
  idle?: boolean;
  /** Returned in the outputs of the children. Default: that of the parent. */
  userData?: number | bigint;
  /**
   * Queue for the outputs of the children. Default: the queue of the parent, which must be open;
   * the queue of a stream is closed at its end.
   */
  queue?: Queue;
}

/**
 * Why a sequence ended. null: it has not ended. 'other': a reason that only a newer library knows.
 */
export type FinishReason = 'stop' | 'length' | 'abort' | 'error' | 'deadline' | 'other' | null;

/** A token and its log probability in the model's own distribution. */
export interface Logprob {
  token: number;
  logprob: number;
}

/** The tokens and text of a sequence: all of them, or the new ones. */
export interface Generated {
  request: number | bigint;
  text: string;
  tokens: number[];
  /** One for each token. null if the request did not ask for them. */
  logprobs: number[] | null;
  finishReason: FinishReason;
  promptTokens: number;
  sequence: number | bigint;
  /** Index of the sequence in its request, from 0. */
  index: number;
  /**
   * Sum of the log probabilities of all generated tokens, with logprobs or bestOf. For a beam: its
   * score after the length penalty. Else 0.
   */
  score: number;
  /**
   * The most probable tokens at the position of each token, most probable first. null if the
   * request did not ask for them.
   */
  topLogprobs: Logprob[][] | null;
  /**
   * Log probabilities of the prompt tokens except the first. They come before the first generated
   * token, possibly in several outputs.
   */
  promptLogprobs: number[] | null;
  promptTopLogprobs: Logprob[][] | null;
  /**
   * Time from the call that added, resumed or forked the sequence to its first step. This and the
   * next fields are set in the last output of a sequence. They are 0 in all others, and if the
   * event did not occur.
   */
  queuedMs: number;
  /** Time to its first token. */
  firstTokenMs: number;
  /** Time to its last token. */
  lastTokenMs: number;
  /** Number of times it was preempted. */
  preemptions: number;
  /** Number of its first tokens that were found in the prefix cache. */
  cachedTokens: number;
}

/**
 * An output of one sequence: new tokens, new text, or its end. A finishReason other than null marks
 * the last output. The text can lag behind the tokens.
 */
export interface Output extends Generated {
  /** Set with 'error', or if the engine was closed. */
  error: PagedllmError | null;
  /** Tokens generated so far. */
  generatedTokens: number;
  userData: number | bigint;
}

/** Everything that one sequence generated, until its end, an abort or its deadline. */
export interface Completion extends Generated {}

/** A sequence as of the last step and the calls since. */
export interface SequenceInfo {
  /** Id of the request that created it. */
  request: number | bigint;
  /** Number of its tokens, prompt and output. */
  length: number;
  /** Index of the sequence in its request, from 0. */
  index: number;
  /** true if it waits to be resumed or freed, false if it runs or waits to run. */
  idle: boolean;
  /**
   * true if it was imported from a machine or an instruction path that does not compute the same
   * bits.
   */
  inexact: boolean;
}

/** Result of one step. */
export interface Step {
  /** Number of requests, exports and imports that have not ended. While it is not 0, step again. */
  unfinished: number;
  prefillTokens: number;
  decodeTokens: number;
  sequences: number;
  /** Number of sequences that were skipped: their queue is full, or their grammar is slow. */
  paused: number;
}

/** Counters since the creation of the engine, and its state after the last step. */
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
  /** Kept sequences that wait to be resumed or freed. */
  idle: number;
  /** Blocks copied because a sequence wrote to a shared block. */
  blocksCopied: number;
  /**
   * Prompt tokens looked up in the prefix cache, and those found there, which were not computed.
   */
  prefixQueries: number;
  prefixHits: number;
  finishedDeadline: number;
  /** Requests refused because of maxWaitingRequests, maxWaitingTokens or a full queue. */
  admissionRejections: number;
  /** Steps that failed and were tried again, in part or as a whole. */
  stepsFailed: number;
  /** Preemptions that swapped the request to the host tier. The others were recomputed. */
  preemptionsSwapped: number;
  /** Sequences whose KV is in the host tier. */
  swapped: number;
  swapBlocksTotal: number;
  swapBlocksUsed: number;
  /** Blocks moved to the host tier, and blocks moved back. */
  blocksSwappedOut: number;
  blocksSwappedIn: number;
  /** Moves that failed, as on a full disk. Their sequences were recomputed. */
  swapFailures: number;
  /** Tokens at the start of sequences that were found in the prefix cache. */
  promptTokensCached: number;
  /** 1 if the trace, or the journal, has ended because the disk failed. */
  tracesStopped: number;
  journalsStopped: number;
  /** Times that the KV pool shrank and the system did not take the memory back. */
  discardFailures: number;
  /** Blocks that sequences do not hold because they are outside the windows of their layers. */
  blocksOutOfWindow: number;
}

/** Predicted admission of a request. */
export interface Admission {
  /** false if too many requests wait or its queue is full. */
  admits: boolean;
  /**
   * true if no request is ahead of it and its blocks are free, so that it would start in the next
   * step.
   */
  fitsNow: boolean;
  /** Predicted time until its first token. null: no step has been measured yet. */
  firstTokenMs: number | null;
  /** Number of requests ahead of it, and of tokens that those requests have to compute. */
  waitingRequests: number;
  waitingTokens: number;
}

/** The state of a budget. */
export interface BudgetInfo {
  bytes: number;
  /**
   * Smallest and largest size to which the budget can be resized now. The smallest depends on its
   * engines and their requests.
   */
  minBytes: number;
  maxBytes: number;
  /** Bytes that the engines hold. More than bytes while engines are giving blocks back. */
  heldBytes: number;
  engines: number;
}

/** Memory that an engine would allocate. */
export interface Plan {
  weightBytes: number;
  kvBytes: number;
  workBytes: number;
  blocks: number;
  blockSize: number;
  blockBytes: number;
  maxModelLen: number;
  fullSequences: number;
  kvDtype: 'f32' | 'bf16' | 'int8' | 'f16' | 'fp8';
  /** Maximum number of KV blocks, if the budget grows to its maximum. */
  maxBlocks: number;
  /** Bytes of the host tier, in memory or in its file, and the KV blocks in it. */
  swapBytes: number;
  swapBlocks: number;
  /** Number of layer groups with KV blocks of their own. */
  kvGroups: number;
}

/** The model and the limits of its engine. */
export interface ModelInfo {
  architecture: string;
  isa: string;
  eosTokenIds: number[];
  vocabSize: number;
  layers: number;
  /** Maximum length of a sequence that the model supports. */
  maxPositions: number;
  /** Maximum length of a sequence in this engine. */
  maxModelLen: number;
  threads: number;
  /**
   * Result of packedPath: it was not set; the packed weights were read from it; or they were packed
   * from the model's files and were written to it, or could not be written.
   */
  packed: 'unused' | 'read' | 'saved' | 'unsaved';
  /** Why the packed weights were not read or not written. */
  packedReason: string;
}

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
   * Renders a chat, [{ role: 'user', content: '...' }, ...], with the model's chat template. An
   * object has `messages` and variables of the template. pllm_engine_render_chat documents the
   * members, such as `continue_final_message`. The result is a prompt for addSpecial: false.
   */
  renderChat(messages: object): Promise<string>;

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
}

/** Returns the version of the loaded library, such as "0.3.0". */
export function version(): string;
/**
 * Returns a description of this build and machine: version, backends, instruction paths, model
 * architectures.
 */
export function buildInfo(): Record<string, unknown>;
