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
  /** Where to run: 'cpu', or 'cuda:0' for the first CUDA device. */
  device?: string | Uint8Array;
  /** Bytes of the KV pool. */
  kvBytes?: number | bigint;
  /** The budget from which the KV pool takes its bytes instead; engines may share it. */
  arena?: Arena;
  /** How weights are kept: as the model's files have them, or in another format. Fewer bits are faster to read and take less memory, and
   * cost quality. 'int8' has a scale for each output, 'int4' one for each group of its inputs; 'int4Asymmetric' lets a group begin at
   * its least weight. 'fp8', for CUDA devices, is floating point with a scale for each output. */
  weightFormat?: 'asStored' | 'f32' | 'f16' | 'bf16' | 'int8' | 'int4' | 'int4Asymmetric' | 'fp8';
  /** Inputs of an output that share a scale in 4 bits: 32, 64 or 128. */
  weightGroup?: number;
  /** A directory that keeps weights in their packed form, so that the next engine reads them as fast as the disk; info().packed tells what
   * became of it. Left out: they are packed each time. */
  packedPath?: string | Uint8Array;
  /** How K and V are stored. 'int8' has a scale for each head of each token: about half the bytes of 'bf16', at a small cost in
   * quality; 'fp8' is as that, in floating point (OCP E4M3). In 'f16' numbers beyond 65504 become 65504, with their sign. */
  kvDtype?: 'auto' | 'f32' | 'bf16' | 'int8' | 'f16' | 'fp8';
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
  /** The CPUs to which they are pinned, as taskset -c takes them, such as '0-3,8': the stepping one's first. Left out: the system places
   * them. */
  cpus?: string;
  /** An instruction path to force: 'auto' takes the widest that the machine has. Bits are the same within one path, not across paths. With
   * 'avx512_bf16' what is kept in bf16, weights or K and V, is multiplied by numbers that are rounded to it. */
  isa?: 'auto' | 'portable' | 'avx2' | 'avx512' | 'avx512_bf16' | 'avx_vnni' | 'avx512_vnni';
  /** Seeds the requests that bring no seed of their own. */
  seed?: number | bigint;
  /** Requests that may wait for their first step before others are refused (PLLM_E_CAPACITY); one may always wait. */
  maxWaitingRequests?: number | bigint;
  /** Tokens that those may have to compute. */
  maxWaitingTokens?: number | bigint;
  /** Maximum length in bytes of a text prompt, a chat or a text to tokenize. Default: 64 for each token of the engine's
   * maxModelLen, at least 1 MiB. */
  maxPromptBytes?: number | bigint;
  /** Who comes first: who came first; the higher priority; or whoever is likely to generate the fewest tokens, as many as those
   * before that were allowed about as many. */
  order?: 'firstCome' | 'priority' | 'shortestPredicted';
  /** The more, the longer who stands behind has to wait: who has waited so long comes before those one priority above, or with
   * a hundred tokens less, that come then. */
  ageingMs?: number;
  /** What a step is made of: prompts, in chunks, and decodes together; prompts alone while there are any, with a step of
   * decodes after prefillBudget prompt tokens; every decode in every step, beside at most prefillBudget prompt tokens; or, to
   * compare with, nobody joins until all that run have ended. */
  batching?: 'mixed' | 'prefillFirst' | 'decodeFirst' | 'static';
  /** Prompt tokens, for the two batchings that have a use for it. */
  prefillBudget?: number;
  /** For how many of its tokens a request needs room before it begins: those that it has, so that whoever comes last is
   * preempted where the pool is full; or all that it may come to have. */
  allocation?: 'onDemand' | 'maxTokens';
  /** What becomes of who has to give way: computed again; their K and V wait in the host tier; or whichever costs less. */
  preemption?: 'recompute' | 'swap' | 'auto';
  /** Bytes of the host tier. */
  swapBytes?: number | bigint;
  /** A directory: the host tier is a file there that has no name and is gone with the engine. Left out: it is memory. */
  swapPath?: string | Uint8Array;
  /** A file to draw every step into, for Perfetto or chrome://tracing. It is begun anew; where the disk fails it ends, and no step
   * does. */
  tracePath?: string | Uint8Array;
  /** A file to write down all that steps depend on, prompts included, so that pagedllm-replay can run them again bit for bit. It is
   * begun anew; where the disk fails it ends, and no step does. */
  journalPath?: string | Uint8Array;
  /** The label model_name of metrics(). Left out: the model directory's name. */
  modelName?: string | Uint8Array;
  /** Outputs that may wait in Engine.queue before its requests pause. */
  queueCapacity?: number | bigint;
  /** Serve token ids only. */
  skipTokenizer?: boolean;
  /** false: do not keep what was computed for requests that begin with the same tokens. */
  prefixCache?: boolean;
  /** A CUDA device gives a sequence the same bits whatever the batch, as the CPU always does. It costs speed. */
  batchInvariant?: boolean;
  /** The part of a CUDA device's memory that the KV pool takes, of what weights and working memory leave: from 0.01 to 1, in place of kvBytes. */
  memoryFraction?: number;
}

export interface OpenOptions extends Options {
  /** You call step(), or start() later on. Otherwise the library's own thread steps from the start. */
  hostSteps?: boolean;
  /** Told how many bytes of weights are read, of how many. The loading waits for it; what it throws stops it, and rejects. */
  progress?: (done: number, total: number) => void;
  /** Stops the loading; means nothing to the engine once it is open. */
  signal?: AbortSignal;
}

/** What the output must be: one of these. */
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

/** DRY: a token that would make a repetition one longer than length tokens loses multiplier * base ** (length - allowedLength). */
export interface Dry {
  multiplier?: number;
  base?: number;
  /** Shorter repetitions are free. */
  allowedLength?: number;
  /** How many tokens back repetitions are looked for. 0: to the beginning. */
  penaltyLastN?: number;
  /** Texts that end a repetition. Left out: the library's; empty: none do. */
  sequenceBreakers?: (string | Uint8Array)[];
}

/** Beam search, as generate of Hugging Face transformers does it. */
export interface Beam {
  /** Beams side by side. */
  width?: number;
  /** Groups into which they are divided, each with a search of its own. */
  groups?: number;
  /** Taken off a token's log probability for every beam of an earlier group that chose it in the same step. */
  diversityPenalty?: number;
  /** Scores are sums of log probabilities divided by the length to this power. */
  lengthPenalty?: number;
  /** 'no': when no running beam, ended now, would be better than the worst finished one; 'yes': as soon as `width` beams are
   * finished; 'never': when no running beam can become better than the worst finished one. */
  earlyStopping?: 'no' | 'yes' | 'never';
}

/** How tokens are chosen, what is reported and when it ends. What is left out is the library's default. */
export interface Sampling {
  /** 0 is greedy. */
  temperature?: number;
  /** Keep the most probable tokens that together reach this probability. */
  topP?: number;
  /** Keep tokens at least this share as probable as the most probable one. */
  minP?: number;
  /** Keep the k most probable tokens. */
  topK?: number;
  /** Keep the tokens of the most typical surprise that together reach this probability. */
  typicalP?: number;
  /** Keep tokens whose logit is within so many standard deviations of the largest. */
  topNSigma?: number;
  /** How often XTC takes the most probable tokens away. */
  xtcProbability?: number;
  /** From which probability on a token counts as a top choice for XTC. */
  xtcThreshold?: number;
  /** Mirostat 2: the surprise to keep to, in bits per token. */
  mirostatTau?: number;
  /** How fast mirostat corrects. */
  mirostatEta?: number;
  /** Taken from the logit of every token that has been generated. */
  presencePenalty?: number;
  /** Taken from a token's logit for every time it has been generated. */
  frequencyPenalty?: number;
  /** Divides the logits of all tokens of prompt and output. */
  repetitionPenalty?: number;
  /** No run of so many tokens comes twice. */
  noRepeatNgramSize?: number;
  dry?: Dry;
  /** Added to the logits of these token ids. */
  logitBias?: Record<number, number>;
  /** Texts that the output must not contain. */
  badWords?: string | Uint8Array | (string | Uint8Array)[];
  /** Runs of tokens that it must not contain. */
  badWordsIds?: (ArrayLike<number> & Iterable<number>)[];
  /** The only tokens that may be chosen. None: all. */
  allowedTokenIds?: ArrayLike<number> & Iterable<number>;
  /** What the output must be. */
  grammar?: Grammar;
  maxTokens?: number;
  /** Neither end-of-sequence tokens nor stops count before this many tokens. */
  minTokens?: number;
  /** With one, the same tokens come whatever runs beside it. */
  seed?: number | bigint;
  /** Strings that end it, also across tokens; they do not appear in the text. */
  stop?: string | Uint8Array | (string | Uint8Array)[];
  /** Tokens that end it; reported, their text is not. */
  stopTokenIds?: ArrayLike<number> & Iterable<number>;
  /** The stop string, or the text of the token that ends it, stays in the text. */
  includeStop?: boolean;
  /** Go on past end-of-sequence tokens. */
  ignoreEos?: boolean;
  /** Report the log probability of every chosen token. */
  logprobs?: boolean;
  /** And of so many of the most probable ones beside it. */
  topLogprobs?: number;
  /** The same of the prompt's tokens but the first. */
  promptLogprobs?: boolean;
  promptTopLogprobs?: number;
  /** The output begins with the prompt. */
  echo?: boolean;
  /** Each output holds what is new ('delta'), or everything so far; or there is one, at the end, that holds everything. */
  outputKind?: 'delta' | 'cumulative' | 'final';
  /** Leave special tokens out of the text. */
  skipSpecial?: boolean;
  /** Comes back in every output. */
  userData?: number | bigint;
  /** The sequences stay when they end, whatever ended them, until free(). By default a request's are not kept, a resumed one is. */
  keep?: boolean;
  /** Milliseconds from now, after which it ends with 'deadline' and what it has by then, wherever it is. */
  deadlineMs?: number;
}

/** A prompt, and what to make of it. What is left out is the library's default. */
export interface Request extends Sampling {
  /** The prompt as text; a Uint8Array is UTF-8. */
  prompt?: string | Uint8Array;
  /** Or as token ids. */
  promptTokens?: ArrayLike<number> & Iterable<number>;
  /** Let the tokenizer add its special tokens, such as BOS; false for a prompt that renderChat wrote. */
  addSpecial?: boolean;
  /** Keep only so many of the prompt's last tokens. */
  truncatePromptTokens?: number;
  /** Results, each with its index and its own last output; result i is sequence request + i. */
  n?: number;
  /** Samples to draw, of which the n with the highest log probability are returned, best first, at the end. */
  bestOf?: number;
  /** Return the n best beams instead, at the end. */
  beam?: Beam;
  /** Only requests with the same one share what the prefix cache holds, so that tenants cannot probe each other. */
  cacheSalt?: string | Uint8Array;
  /** With order: 'priority' the higher comes first. -100 to 100, by default 0. */
  priority?: number;
}

/** How an idle sequence goes on as if it had never been idle: with its own sampling, counts and grammar. It need not have ended: an
 * idle fork, or one that was imported, goes on in the middle. */
export interface GoOn extends Pick<Sampling, 'userData' | 'keep' | 'deadlineMs'> {
  goOn: true;
}

/** A prompt to keep in the prefix cache. */
export interface Pin extends Pick<Request, 'prompt' | 'promptTokens' | 'addSpecial' | 'cacheSalt'> {
  /** How long it is kept, in milliseconds. By default until it is unpinned. */
  timeToLiveMs?: number | bigint;
  /** Where a sequence could not go on otherwise, pins with the lowest priority give way. */
  priority?: number;
}

export interface ForkOptions {
  /** Children; by default one. */
  n?: number;
  /** The tokens that they share with their parent; by default all. */
  at?: number | bigint;
  /** Each draws other random numbers. Without it, all draw the same as their parent. */
  seed?: number | bigint;
  /** They wait to be resumed, even where the parent runs. */
  idle?: boolean;
  /** By default the parent's. */
  userData?: number | bigint;
  /** Where their outputs go, by default where the parent's go. A queue that is closed, as a stream's is when it has ended, takes
   * none. */
  queue?: Queue;
}

/** Why a sequence ended; null: it has not. 'other': a reason that only a newer library knows. */
export type FinishReason = 'stop' | 'length' | 'abort' | 'error' | 'deadline' | 'other' | null;

/** A token and its log probability under the model's own distribution. */
export interface Logprob {
  token: number;
  logprob: number;
}

/** What a sequence generated: all of it, or what is new. */
export interface Generated {
  request: number | bigint;
  text: string;
  tokens: number[];
  /** One per token, where the request asked for them. */
  logprobs: number[] | null;
  finishReason: FinishReason;
  promptTokens: number;
  sequence: number | bigint;
  /** Which of the request's sequences, from 0. */
  index: number;
  /** The sum of the log probabilities, where they or bestOf were asked for; of a beam, its score. */
  score: number;
  /** For each token, most probable first, where the request asked for them. */
  topLogprobs: Logprob[][] | null;
  /** Of the prompt's tokens but the first, before the first token; in one output or more. */
  promptLogprobs: number[] | null;
  promptTopLogprobs: Logprob[][] | null;
  /** In a sequence's last output, and so is what follows; 0 in all others, and where it never came to that. From the call that
   * asked for it (added, resumed or forked it) until its first step began. */
  queuedMs: number;
  /** Until its first token was there. */
  firstTokenMs: number;
  /** Until its last token was there. */
  lastTokenMs: number;
  /** How often its blocks were taken from it. */
  preemptions: number;
  /** With how many of its first tokens the prefix cache helped. */
  cachedTokens: number;
}

/** News of one sequence: new tokens, new text, or its end, which is the one whose finishReason is not null. The text may lag behind
 * the tokens. */
export interface Output extends Generated {
  /** With 'error'. */
  error: PagedllmError | null;
  /** So far. */
  generatedTokens: number;
  userData: number | bigint;
}

/** All that a sequence generated. Engine.abort cuts it short with 'abort', a deadline with 'deadline'. */
export interface Completion extends Generated {}

/** A sequence as of the last step and of the calls since. */
export interface SequenceInfo {
  /** The request it came from. */
  request: number | bigint;
  /** Its tokens. */
  length: number;
  /** Which of the request's sequences, from 0. */
  index: number;
  /** It waits to be resumed or freed. Otherwise it runs, or waits to. */
  idle: boolean;
  /** It was imported from a machine or an instruction path that cannot give the same bits. */
  inexact: boolean;
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
  /** Sequences that were kept, and wait to be resumed or freed. */
  idle: number;
  /** Because a sequence wrote to one that others share. */
  blocksCopied: number;
  /** Prompt tokens looked for in the prefix cache, and those of them that did not have to be computed. */
  prefixQueries: number;
  prefixHits: number;
  finishedDeadline: number;
  /** Requests that were refused because too much waits. */
  admissionRejections: number;
  /** Steps that could not be computed and were tried again, in part or as a whole. */
  stepsFailed: number;
  /** Of the preemptions: those to the host tier. */
  preemptionsSwapped: number;
  /** Sequences whose K and V are in the host tier. */
  swapped: number;
  swapBlocksTotal: number;
  swapBlocksUsed: number;
  /** Blocks that moved to the host tier, and back. */
  blocksSwappedOut: number;
  blocksSwappedIn: number;
  /** Moves that failed, as on a full disk: who was to move is computed again. */
  swapFailures: number;
  /** Tokens that sequences began with and that were found in the prefix cache. */
  promptTokensCached: number;
  /** 1: the disk has failed, and the trace, or the journal, has ended. */
  tracesStopped: number;
  journalsStopped: number;
  /** Times that the KV pool became smaller and the system did not take the memory back. */
  discardFailures: number;
  /** Blocks that the sequences would have besides, did every layer look back on all tokens. */
  blocksOutOfWindow: number;
}

/** What would become of a request that was added now. */
export interface Admission {
  /** It would be taken. Otherwise too much waits, or its queue is not read. */
  admits: boolean;
  /** Nobody is before it, and there is room for it: the next step would begin it. */
  fitsNow: boolean;
  /** Until its first token is expected; null: no step has shown yet how long steps take. */
  firstTokenMs: number | null;
  /** Requests before it, and the tokens that these have to compute. */
  waitingRequests: number;
  waitingTokens: number;
}

/** An arena as it is now. */
export interface ArenaInfo {
  bytes: number;
  /** What it can be resized to: from leastBytes, for the engines and requests there are, to mostBytes. */
  leastBytes: number;
  mostBytes: number;
  /** By the engines: more than bytes while they are on their way down. */
  heldBytes: number;
  engines: number;
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
  kvDtype: 'f32' | 'bf16' | 'int8' | 'f16' | 'fp8';
  /** KV blocks that there can be, should the arena grow. */
  mostBlocks: number;
  /** Of the host tier, in memory or in its file, and the blocks it holds. */
  swapBytes: number;
  swapBlocks: number;
  /** Groups of layers whose K and V are in blocks of their own. */
  kvGroups: number;
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
  /** What became of packedPath: none was given; the weights were read in their packed form; or they were packed from the model's files,
   * and the form was written, or could not be. */
  packed: 'unused' | 'read' | 'saved' | 'unsaved';
  /** Why the packed form was not read, or not written. */
  packedReason: string;
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

/** A budget of KV bytes that engines of this process may share, and that may change while they run. */
export class Arena {
  private constructor();
  /** Makes one that may later be raised to mostBytes; by default no further. Nothing is allocated: engines map what mostBytes
   * would take, and touch only what they use. Each needs room for its longest sequence (maxModelLen). */
  static create(bytes: number | bigint, mostBytes?: number | bigint): Arena;
  /** Changes the budget, at any time, on libuv's pool. More is there at once. Where it becomes less, engines go down together:
   * those that nobody steps before this is fulfilled, others before their next step. First goes what is only cached, then idle
   * sequences lose their K and V, then the youngest that run are preempted: nothing ends, and the answers are the same. The
   * memory beyond goes back to the system. Less than leastBytes, or more than mostBytes, is PLLM_E_CAPACITY. */
  resize(bytes: number | bigint): Promise<void>;
  /** The budget, and what the engines hold of it. */
  state(): ArenaInfo;
  /** Lets go of it; engines that were made with it keep the budget. Not for Engine.arena, which ends with its engine. */
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

  /** All that the request gives; of several results the first. Aborting the signal aborts the request and rejects with the signal's
   * reason. */
  generate(request: Request, options?: { signal?: AbortSignal }): Promise<Completion>;
  /** generate() of all n results, by index. */
  generateAll(request: Request, options?: { signal?: AbortSignal }): Promise<Completion[]>;
  /** Adds a request when it is first read, and gives its outputs as they come. It pauses, and no other does, while `capacity`
   * outputs (64) wait to be read. Leaving the loop aborts the request, and forks of its sequences that were given no queue of
   * their own. So does the signal, at once; the next read rejects with its reason. A request whose computation fails rejects
   * with its error. */
  stream(request: Request, options?: { signal?: AbortSignal; capacity?: number | bigint }): AsyncGenerator<Output, void, void>;
  /** Adds a request whose outputs go to a queue, by default Engine.queue, and gives its id. Requests are tokenized on libuv's pool
   * and added in the order of the calls. */
  add(request: Request & { queue?: Queue }): Promise<number | bigint>;
  /** What would become of the request if it were added now, without adding it, judged by the steps so far, by how long answers
   * have been, and as if nothing of the prompt were in the prefix cache. What add() would refuse in any case is refused here
   * too. Calls are taken in their order, with those of add(). */
  admit(request: Request & { queue?: Queue }): Promise<Admission>;
  /** Ends a request at the next step; its last output says 'abort'. One that has ended is PLLM_E_NOT_FOUND. */
  abort(request: number | bigint): void;

  /** Makes sequences that begin with the same tokens; nothing is computed again. Each is a request of its own, whose id is the
   * sequence's. Those of a sequence that runs run, too; those of an idle one wait to be resumed. */
  fork(sequence: number | bigint, how?: ForkOptions): (number | bigint)[];
  /** Adds tokens to the end of a sequence. One that runs goes on after them, from the next step on; an idle one has them computed
   * when it is resumed. */
  append(sequence: number | bigint, tokens: ArrayLike<number> & Iterable<number>): void;
  /** Cuts a sequence to its first `length` tokens, also into the prompt. Everything is as it was then, the place in the random
   * stream included; outputs that were read stay read. One that runs goes on from there. */
  rewind(sequence: number | bigint, length: number | bigint): void;
  /** An idle sequence goes on: only tokens that were appended since are computed. Counts (maxTokens, minTokens) and penalties
   * begin anew, but with goOn. Its outputs go to `queue`, by default where they went before. Calls are taken in their order, with
   * those of add(). */
  resume(sequence: number | bigint, how?: (Sampling | GoOn) & { queue?: Queue }): Promise<void>;
  /** generate() for a sequence that was kept. */
  generateResumed(sequence: number | bigint, how?: Sampling, options?: { signal?: AbortSignal }): Promise<Completion>;
  /** stream() for a sequence that was kept, or imported. */
  streamResumed(sequence: number | bigint, how?: Sampling | GoOn, options?: { signal?: AbortSignal; capacity?: number | bigint }):
    AsyncGenerator<Output, void, void>;
  /** Forgets a sequence and gives back its memory. One that runs ends with 'abort'. */
  free(sequence: number | bigint): void;
  /** What is known of a sequence. One that has ended and was not kept is PLLM_E_NOT_FOUND. */
  sequenceInfo(sequence: number | bigint): SequenceInfo;

  /** Writes a sequence down as it is at the next step: its tokens, what was computed for them, its parameters, its place in the
   * random stream, grammar and text. It goes on, or stays idle, as before, and its readers notice nothing. The bytes hold the
   * conversation in the clear. One that ends before that step, and was not kept, is PLLM_E_NOT_FOUND. */
  exportSequence(sequence: number | bigint): Promise<Uint8Array>;
  /** Makes an idle sequence from what exportSequence() gave in this or another process, and gives its id. Resumed with goOn it says
   * what comes after that, with the same bits unless it is `inexact`. Its outputs go to `queue`, by default Engine.queue. What is
   * damaged, of another model, blockSize or kvDtype is refused. Calls are taken in their order, with those of add(). */
  importSequence(blob: Uint8Array, options?: { queue?: Queue }): Promise<number | bigint>;

  /** Computes a prompt, from the next step on, and keeps it for requests that begin with the same tokens. Gives the pin's id. */
  pin(prompt: Pin): Promise<number | bigint>;
  /** Lets the prompt go when others need its place. PLLM_E_NOT_FOUND: the pin has expired, or had to give way. */
  unpin(pin: number | bigint): void;

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
  /** The budget of the KV pool: the one that it was made with, or its own. */
  get arena(): Arena;

  /** The text's token ids. */
  tokenize(text: string | Uint8Array, options?: { addSpecial?: boolean }): Promise<number[]>;
  /** The tokens' text. */
  detokenize(tokens: ArrayLike<number> & Iterable<number>, options?: { skipSpecial?: boolean }): Promise<string>;
  /** Renders a conversation, [{ role: 'user', content: '...' }, ...], with the model's own template; or an object with `messages`
   * and what else the template reads. The manual lists the options, such as `continue_final_message`, at
   * pllm_engine_render_chat. The result is a prompt for addSpecial: false. */
  renderChat(messages: object): Promise<string>;

  /** The model and the limits it is served with. */
  info(): Info;
  /** Counts since the engine was made, and the state after its last step. */
  stats(): Stats;
  /** What dashboards ask for, as of the last step, in the OpenMetrics format, which Prometheus scrapes as
   * 'application/openmetrics-text; version=1.0.0; charset=utf-8': gauges, counters and histograms, with the names that vLLM
   * gave them after the prefix 'pagedllm_'. It waits for no step. */
  metrics(): string;
}

/** The version of the library that was loaded, such as "0.2.0". */
export function version(): string;
/** What it offers on this machine: version, backends, instruction paths, model architectures. */
export function buildInfo(): Record<string, unknown>;
