// Generated from src/ffi by `make header`. Do not edit.
// An option that is left out has the library's default. A text as a Uint8Array is UTF-8.
import type { Budget, PagedllmError, Queue } from './pagedllm.js';

/**
 * Code of an error. A newer library can have codes without a name here: PLLM_E_ and a number.
 *
 * - 'PLLM_E_INVALID_ARGUMENT': An argument is invalid: a value, a range, a text encoding.
 * - 'PLLM_E_NOT_FOUND': No live request, sequence or pin has this id.
 * - 'PLLM_E_IO': A file cannot be opened, read or written.
 * - 'PLLM_E_MODEL': The model's files are damaged, incomplete or contradictory, or its weights are
 *   not finite.
 * - 'PLLM_E_UNSUPPORTED': This build, model or machine does not support the request.
 * - 'PLLM_E_CAPACITY': A limit of memory, blocks, requests or queues does not allow it.
 * - 'PLLM_E_BUSY': Another thread is stepping this engine.
 * - 'PLLM_E_OUT_OF_MEMORY': The system has no memory left.
 * - 'PLLM_E_INTERNAL': A defect of the library. If it occurs in a step, the engine has failed: each
 *   request ends with 'error', later calls throw the same error, and close() still works.
 * - 'PLLM_E_CLOSED': The engine that owns this object has been freed.
 * - 'PLLM_E_CANCELLED': The host's progress callback cancelled the call.
 */
export type Code =
  | 'PLLM_E_INVALID_ARGUMENT'
  | 'PLLM_E_NOT_FOUND'
  | 'PLLM_E_IO'
  | 'PLLM_E_MODEL'
  | 'PLLM_E_UNSUPPORTED'
  | 'PLLM_E_CAPACITY'
  | 'PLLM_E_BUSY'
  | 'PLLM_E_OUT_OF_MEMORY'
  | 'PLLM_E_INTERNAL'
  | 'PLLM_E_CLOSED'
  | 'PLLM_E_CANCELLED'
  | (string & {});

/**
 * Data type of KV blocks.
 *
 * - 'auto': Selected by the library.
 * - 'f32': 32-bit floating point.
 * - 'bf16': bfloat16.
 * - 'int8': 8-bit integers with a scale in f32 for each head of each token: about half the bytes of
 *   bf16, at a small cost in quality.
 * - 'f16': 16-bit floating point. Values beyond 65504 are clamped.
 * - 'fp8': 8-bit floating point (OCP E4M3) with the scales of 'int8'. More precise for small values
 *   beside large ones, less precise for large values.
 */
export type Dtype = 'auto' | 'f32' | 'bf16' | 'int8' | 'f16' | 'fp8';

/**
 * Instruction path.
 *
 * - 'auto': The widest instruction path of the machine: AVX512_BF16, AVX512_VNNI, AVX512, AVX_VNNI,
 *   AVX2, PORTABLE.
 * - 'portable': Any CPU.
 * - 'avx2': AVX2, FMA and F16C.
 * - 'avx512': AVX-512 F, BW, DQ and VL.
 * - 'avx512_bf16': As 'avx512_vnni', with AVX-512 BF16: activations that are multiplied by weights
 *   or KV in bf16 are rounded to bf16, and the products are summed in f32. Up to twice as fast for
 *   prompts.
 * - 'avx_vnni': As 'avx2', with AVX-VNNI: products with integer weights are faster, with the same
 *   bits.
 * - 'avx512_vnni': As 'avx512', with AVX-512 VNNI: products with integer weights are faster, with
 *   the same bits.
 */
export type Isa =
  | 'auto'
  | 'portable'
  | 'avx2'
  | 'avx512'
  | 'avx512_bf16'
  | 'avx_vnni'
  | 'avx512_vnni';

/**
 * Format of the weights in memory.
 *
 * - 'asStored': As in the model's files. Infinities and NaNs are kept.
 * - 'f32': 32-bit floating point.
 * - 'f16': 16-bit floating point.
 * - 'bf16': bfloat16.
 * - 'int8': 8-bit integers with a scale for each output. The CPU multiplies them by 8-bit
 *   activations, which have a scale for every 128 values of a row. CUDA devices multiply them by
 *   activations in bf16.
 * - 'int4': 4-bit integers with a scale for each group of weightGroup inputs of an output. The
 *   embedding and the head are in 8 bits. Activations are as for 'int8'.
 * - 'int4Asymmetric': As 'int4', with an offset for each group, for 16 more bits a group. With
 *   groups of the same size, it is the more precise of the two formats.
 * - 'fp8': CUDA only: 8-bit floating point (OCP E4M3) with a scale for each output. The embedding
 *   and the head are as stored. Products of many rows multiply by fp8 activations with a scale for
 *   each row, if the device supports it. All other products, those of experts and those with
 *   batchInvariant multiply by bf16 activations.
 */
export type WeightFormat =
  | 'asStored'
  | 'f32'
  | 'f16'
  | 'bf16'
  | 'int8'
  | 'int4'
  | 'int4Asymmetric'
  | 'fp8';

/**
 * Result of packedPath.
 *
 * - 'unused': packedPath was not set.
 * - 'read': The packed weights were read from packedPath.
 * - 'saved': The weights were packed from the model's files and written to packedPath.
 * - 'unsaved': The weights were packed from the model's files and could not be written to
 *   packedPath.
 */
export type Packed = 'unused' | 'read' | 'saved' | 'unsaved';

/**
 * Treatment of preempted requests.
 *
 * - 'recompute': Preempted requests lose their KV blocks and are recomputed when they are
 *   rescheduled.
 * - 'swap': Preempted requests are swapped to host memory. If it is full, they are recomputed.
 * - 'auto': Swap or recompute, whichever costs less by the measured times.
 */
export type Preemption = 'recompute' | 'swap' | 'auto';

/**
 * Order of the waiting requests.
 *
 * - 'fcfs': First come, first served.
 * - 'priority': Highest priority of Request first. It can preempt running requests of lower
 *   priority. To prevent starvation, a request that has waited for ageingMs goes before new
 *   requests of the next higher priority.
 * - 'shortestPredicted': Shortest predicted output first. The prediction uses recent requests with
 *   a similar maxTokens. To prevent starvation, a request that has waited for ageingMs goes before
 *   new requests that are predicted to be up to 100 tokens shorter.
 */
export type Order = 'fcfs' | 'priority' | 'shortestPredicted';

/**
 * Composition of a step.
 *
 * - 'mixed': Each step mixes prompt chunks and decodes, in the order of the requests.
 * - 'prefillFirst': Each step has either prompts or decodes, and prompts go first. After
 *   prefillBudget prompt tokens, the decodes get one step.
 * - 'decodeFirst': Each step has every decode and at most prefillBudget prompt tokens: bounds the
 *   time between tokens.
 * - 'static': Static batching: no request is admitted until the running batch has finished. For
 *   baselines.
 */
export type Batching = 'mixed' | 'prefillFirst' | 'decodeFirst' | 'static';

/**
 * Number of blocks that a request needs to start.
 *
 * - 'onDemand': Blocks are allocated as a sequence grows. If the pool is full, the last request in
 *   the order is preempted.
 * - 'maxTokens': A request starts when the pool has blocks for its maxTokens, so that growing
 *   sequences cause no preemption. Forks and appended tokens of running sequences are not included.
 */
export type Allocation = 'onDemand' | 'maxTokens';

/**
 * Content of the outputs.
 *
 * - 'delta': Each output has the new tokens and the new text only.
 * - 'cumulative': Each output has all tokens and the whole text so far.
 * - 'final': One output at the end of the sequence has all tokens and the whole text.
 */
export type OutputKind = 'delta' | 'cumulative' | 'final';

/**
 * When a beam search ends.
 *
 * - 'no': Stop when the best running beam, if it ended now, would not score higher than the worst
 *   finished beam.
 * - 'yes': Stop as soon as width beams are finished.
 * - 'never': Stop when no running beam can reach a higher score than the worst finished beam.
 */
export type EarlyStopping = 'no' | 'yes' | 'never';

/**
 * Why a sequence ended. null: it has not ended. 'other': a reason that only a newer library knows.
 *
 * - 'stop': An end-of-sequence token, a stop token or a stop string.
 * - 'length': maxTokens or maxModelLen was reached.
 * - 'abort': The host aborted the request.
 * - 'error': The computation failed. See the property error.
 * - 'deadline': The deadline passed. The outputs have the tokens generated by then.
 */
export type FinishReason = 'stop' | 'length' | 'abort' | 'error' | 'deadline' | 'other' | null;

/**
 * What ended a sequence. null: it has not ended, or finishReason is not 'stop'. 'other': a reason
 * that only a newer library knows.
 *
 * - 'eos': An end-of-sequence token of the model.
 * - 'token': A token of stopTokenIds.
 * - 'string': A string of stop.
 * - 'grammar': The grammar was complete.
 */
export type StopReason = 'eos' | 'token' | 'string' | 'grammar' | 'other' | null;

/**
 * What has happened to a block of the prefix cache.
 *
 * - 'stored': The block is in the cache from now on.
 * - 'removed': The block is no longer in the cache.
 * - 'cleared': No block is in the cache. 'stored' of each block that is there follows.
 */
export type KvEventKind = 'stored' | 'removed' | 'cleared';

/**
 * Place of a KV block.
 *
 * - 'pool': The KV pool of the engine, in the memory of its device.
 */
export type KvMedium = 'pool';

/** A constraint on the output: one of these. */
export type Grammar =
  /**
   * A JSON text that the schema describes. Properties come in the order of "properties".
   * - "pattern" and the names of "patternProperties" are regular expressions of ECMA-262, in
   *   Unicode mode if they are valid there, otherwise by annex B. Lookarounds, backreferences and
   *   word boundaries are errors.
   * - A "format" that cannot be generated is an annotation.
   * - "propertyNames" has one of "enum", "const", "pattern" and the lengths, or a "$ref" to such a
   *   schema, in a schema without "properties" and "patternProperties". Otherwise it is an error.
   * - Keywords that cannot be generated are errors: among others "uniqueItems", "contains", "not",
   *   "if" and "dependentRequired".
   * - A grammar has at most 64 members of "patternProperties". An object has at most about 500
   *   optional properties, or 3,000 required ones. Objects with more properties of both kinds
   *   together can be refused.
   *
   * The object "x-guidance" at the root of the schema has these options:
   * - "strict_formats" (default false): if true, the formats of JSON Schema that cannot be
   *   generated are errors: idn-email, idn-hostname, iri, iri-reference, json-pointer, regex,
   *   relative-json-pointer, uri-reference and uri-template.
   * - "lenient" (default false): if true, keywords that cannot be generated are ignored, such as
   *   "uniqueItems" in the schema of a set. The output may then violate them: check it.
   * - "coerce_one_of" (default false): if true, "oneOf" means "anyOf" if its schemas may overlap.
   *   If false, such a "oneOf" is an error.
   * - "whitespace_flexible" (default true): if false, there is no white space between the parts of
   *   the text.
   * - "whitespace_pattern" (default: one space or tab, or a line break and at most 40 of these):
   *   the text between two parts, as a regular expression of Rust.
   * - "item_separator" (default ","): a regular expression of Rust.
   * - "key_separator" (default ":"): a regular expression of Rust.
   * - "json_allowed_escapes" (default "nrbtf\\\"", with "u" if the schema has no names of
   *   properties or demands other control characters): the characters that may follow a backslash
   *   in strings.
   * - "json_allow_general_unicode_escapes" (default false): if true, strings without a pattern may
   *   write any character as \u and digits.
   */
  | { jsonSchema: object | boolean | string | Uint8Array }
  /** Any JSON object. */
  | { jsonObject: true }
  /**
   * A text that the regular expression matches as a whole: a pattern of Python's re for str.
   * Lookarounds, backreferences, word boundaries, atomic groups, possessive quantifiers,
   * conditions, \N and the anchors of lines are errors.
   */
  | { regex: string | Uint8Array }
  /** One of the texts. */
  | { choice: (string | Uint8Array)[] }
  /**
   * A text that the Lark grammar describes. Its regular expressions are those of Python's re, with
   * \p{Name} for Unicode properties. A schema after %json is read like that of jsonSchema, with
   * options of its own.
   */
  | { lark: string | Uint8Array };

/** Options of an engine. */
export interface Options {
  /** Model directory in the layout of Hugging Face, or a GGUF file. */
  modelPath: string | Uint8Array;
  /**
   * Device: "cpu" (default), or "cuda:0" (also "cuda") for the first CUDA device. CUDA needs an
   * NVIDIA driver for CUDA 12.0 or newer (525) and compute capability 8.0 or newer. Prompts are
   * faster with NVIDIA's cuBLAS for CUDA 12 or 13 (libcublasLt.so.12 or .13), which blasLibrary of
   * modelInfo() reports. A list such as "cuda:0,cuda:1" divides the model among up to 64 devices of
   * one kind, which needs NCCL (libnccl.so.2). Lists have not been tested on GPUs yet.
   */
  device?: string | Uint8Array;
  /**
   * KV pool size in bytes. 0 (default): enough for maxSeqs sequences of maxModelLen tokens, at most
   * 1 GiB.
   */
  kvBytes?: number | bigint;
  /** Seed for requests without a seed of their own. Default 0. */
  seed?: number | bigint;
  /** Tokens per KV block: 8, 16 (default), 32, 64, 128 or 256. */
  blockSize?: number;
  /** Data type of KV blocks. Default 'auto': f32 for models in f32, else bf16. */
  kvDtype?: Dtype;
  /**
   * Maximum length of a sequence in tokens, prompt and output together. 0 (default): the model's
   * own maximum, or what the pool holds.
   */
  maxModelLen?: number;
  /**
   * Maximum number of tokens in one step, prompt and decode tokens of all sequences together.
   * Default 512.
   */
  maxBatchTokens?: number;
  /** Maximum number of running sequences, at most maxBatchTokens. Default 64. */
  maxSeqs?: number;
  /** Maximum number of prompt tokens of one sequence in one step. 0 (default): maxBatchTokens. */
  prefillChunk?: number;
  /**
   * Number of threads, including the stepping thread. 0 (default): the number of CPUs in cpus, or
   * of CPUs on which the process may run, within the quota of its container.
   */
  threads?: number;
  /**
   * Instruction path. Default 'auto'. Results have the same bits within a path, not across paths.
   */
  isa?: Isa;
  /**
   * Capacity, in outputs, of Engine.queue. While it is full, its requests pause. 0 (default):
   * 65536.
   */
  queueCapacity?: number | bigint;
  /**
   * Maximum number of requests, including resumed and forked sequences, that wait for their first
   * step. More are refused with PLLM_E_CAPACITY; one can always wait. 0 (default): no limit.
   */
  maxWaitingRequests?: number | bigint;
  /** Maximum number of tokens that the waiting requests have to compute. 0 (default): no limit. */
  maxWaitingTokens?: number | bigint;
  /**
   * Budget from which the KV pool takes its bytes, instead of kvBytes. Default: a budget of its
   * own.
   */
  budget?: Budget;
  /**
   * Size in bytes of the host tier, which holds the KV of swapped requests and idle sequences. 0
   * (default): none.
   */
  swapBytes?: number | bigint;
  /**
   * Directory for the host tier. The tier is an unnamed file there, which grows as it is written
   * and disappears with the engine. A thread of the engine reads and writes it. A slow disk delays
   * only the sequences that return from it; while it is behind, others are recomputed. Default: the
   * tier is in memory. If the file cannot be written or read, as on a full disk, the sequence is
   * recomputed when it returns and swapFailures of stats() counts it.
   */
  swapPath?: string | Uint8Array;
  /**
   * Treatment of preempted requests. Default 'recompute'. The others need swapBytes, and swapBytes
   * needs one of the others.
   */
  preemption?: Preemption;
  /** Order of the waiting requests. Default 'fcfs'. */
  order?: Order;
  /**
   * Waiting time in milliseconds after which a request is preferred; see Order. 0 (default):
   * 10,000.
   */
  ageingMs?: number;
  /** Composition of a step. Default 'mixed'. */
  batching?: Batching;
  /** Prompt tokens for 'decodeFirst' and 'prefillFirst'. 0 (default): 256 and 2048. */
  prefillBudget?: number;
  /** Number of blocks that a request needs to start. Default 'onDemand'. */
  allocation?: Allocation;
  /**
   * File for a trace of every step, in the format of Perfetto and chrome://tracing: the batch, the
   * times of its phases, and the phases of each sequence. An existing file is replaced. A thread of
   * the engine writes it, at most about one second late. If the disk fails or falls behind by 256
   * MiB, the trace ends and tracesStopped of stats() is 1. Default: none.
   */
  tracePath?: string | Uint8Array;
  /**
   * File for a journal of all calls and of everything else on which steps depend. pagedllm-replay
   * repeats them bit for bit on a machine with the same instruction path. It contains prompts, as
   * tokens, and cache salts. An existing file is replaced. A thread of the engine writes it, at
   * most about one second late. If the disk fails or falls behind by 256 MiB, the journal ends and
   * journalsStopped of stats() is 1. Default: none.
   */
  journalPath?: string | Uint8Array;
  /** Value of the label model_name in metrics(). Default: the name of the model directory. */
  modelName?: string | Uint8Array;
  /**
   * Format of the weights in memory. Fewer bits take less memory and time, and cost quality. Small
   * tensors that affect quality (routers of experts, learned positions) and the projections of
   * latents stay as stored. Default 'asStored'.
   */
  weightFormat?: WeightFormat;
  /**
   * Number of inputs that share a scale in 4-bit formats: 32, 64 or 128. Smaller is more precise. 0
   * (default): 32.
   */
  weightGroup?: number;
  /**
   * Directory for packed weights. If it has the packed form of this model, weightFormat and
   * library, the form is checked and read as fast as the disk. Otherwise the weights are packed and
   * the form is written, or replaced. Several models and processes can share the directory; unused
   * files are not removed. It contains weights: protect it against writing as the model is
   * protected. If it cannot be written, the engine works and packed of modelInfo() reports it.
   * Default: weights are packed each time.
   */
  packedPath?: string | Uint8Array;
  /**
   * List of CPUs in the syntax of taskset -c, such as "0-3,8", one for each of threads. Each thread
   * of the engine is pinned to one of them, in this order. The first is for the stepping thread:
   * the engine's own thread (start()) is pinned, a thread of the program is not. Default: threads
   * are not pinned.
   */
  cpus?: string | Uint8Array;
  /**
   * CUDA only: fraction, 0.01 to 1, of the device memory that is free after weights and working
   * memory, for the KV pool. Cannot be combined with kvBytes. 0 (default): kvBytes is used.
   */
  memoryFraction?: number;
  /**
   * Maximum length in bytes of a text prompt, of a chat's JSON and the prompt it renders to, and of
   * a text to tokenize. A longer one is PLLM_E_INVALID_ARGUMENT. 0 (default): 64 for each token of
   * maxModelLen, at least 1048576. Tokenization takes up to 16 bytes of memory for each byte of
   * text, and up to 512 for each byte of a stretch of at most 2 MiB without a place to cut
   * (docs/models.md).
   */
  maxPromptBytes?: number | bigint;
  /**
   * Maximum number of KV events that wait for pollKvEvents(), at most 1048576. 0 (default): no
   * events are recorded. 16384 suits most hosts. Needs the prefix cache. Events take memory of the
   * host: about 100 bytes and 4 for each token of a block, for each event and twice for each block
   * of the pool.
   */
  kvEventsCapacity?: number | bigint;
  /**
   * Number of workers that divide each layer. 0 (default): 1, or with a list of devices their
   * number divided by pipelineParallel. The number of attention heads and the widths of MLPs must
   * be multiples of it, and so must the number of KV heads, unless it is a multiple of that.
   */
  tensorParallel?: number;
  /** Number of groups of workers, each with some of the layers. 0 (default): 1. */
  pipelineParallel?: number;
  /**
   * Time in milliseconds after which a wait for another worker fails. It must be longer than any
   * step, and than the difference between the times in which the workers load their parts of the
   * model. 0 (default): 60000.
   */
  workerTimeoutMs?: number | bigint;
  /** Serve token ids only: no tokenizer is loaded, and text calls throw PLLM_E_UNSUPPORTED. */
  skipTokenizer?: boolean;
  /** false disables the prefix cache. Default true. */
  prefixCache?: boolean;
  /**
   * On a CUDA device: the results of a sequence do not depend on the batch, as on the CPU. Slower:
   * products of many rows do not use cuBLASLt, and attention over long sequences is not split.
   */
  batchInvariant?: boolean;
}

/**
 * The DRY penalty: a token that would extend a repetition of length tokens loses multiplier * base
 * ** (length - allowedLength).
 */
export interface Dry {
  /** Strength of the penalty. Range 0 to 100. Default 0.8. 0 disables it. */
  multiplier?: number;
  /** Base of the exponential growth. Range 1 to 100. Default 1.75. */
  base?: number;
  /** Length in tokens of the longest repetition without a penalty. Default 2. */
  allowedLength?: number;
  /** Number of last tokens that are searched for repetitions. 0 (default): all. */
  penaltyLastN?: number;
  /**
   * Texts that end a repetition, within a token or across tokens. Default: newline, colon,
   * quotation mark and asterisk, or none with skipTokenizer. An empty list: none. At most 64 texts
   * of at most 128 bytes each.
   */
  sequenceBreakers?: string | Uint8Array | (string | Uint8Array)[];
}

/**
 * How a request samples its tokens, what it reports and when it ends.
 *
 * The parameters apply in this order: logit bias; repetition, frequency and presence penalty; DRY;
 * exclusions and the grammar; temperature; top-n-sigma, min-p, top-k, typical-p, top-p, XTC, or
 * mirostat in their place; the draw.
 */
export interface Sampling {
  /**
   * Seed. A request with a seed generates the same tokens in any batch. If it is left out, the seed
   * is derived from the engine's seed and the request id.
   */
  seed?: number | bigint;
  /**
   * Tokens that end the sequence. They are reported in tokens, but not in the text. At most 1024.
   */
  stopTokenIds?: ArrayLike<number> & Iterable<number>;
  /**
   * Strings that end the sequence, within a token or across tokens. They do not appear in the text.
   * At most 1024 strings of 16384 bytes in all.
   */
  stop?: string | Uint8Array | (string | Uint8Array)[];
  /** Temperature. 0 selects greedy sampling. Range 0 to 10,000. Default 1. */
  temperature?: number;
  /**
   * Keeps the most probable tokens whose probabilities sum to at least this value. Range above 0 to
   * 1. Default 1: all.
   */
  topP?: number;
  /**
   * Keeps tokens whose probability is at least this fraction of the largest. Range 0 to 1. Default
   * 0: all.
   */
  minP?: number;
  /** Keeps the k most probable tokens. Default 0: all. */
  topK?: number;
  /**
   * Maximum number of generated tokens. 0: only the prompt is computed and reported; n and bestOf
   * must be 1, without a beam search. Default: up to maxModelLen.
   */
  maxTokens?: number;
  /**
   * Number of tokens before which neither end-of-sequence tokens nor stops end the sequence.
   * Default 0.
   */
  minTokens?: number;
  /**
   * Keeps the tokens with the most typical surprise whose probabilities sum to at least this value.
   * Range above 0 to 1. Default 1: all.
   */
  typicalP?: number;
  /**
   * Keeps tokens whose logit is within this many standard deviations of the largest. Range 0 to
   * 100. Default 0: all.
   */
  topNSigma?: number;
  /**
   * Probability with which XTC removes the most probable tokens. Range 0 to 1. Default 0: never.
   */
  xtcProbability?: number;
  /**
   * Probability from which on a token counts as a top choice for XTC. Range 0 to 0.5. Default 0.1.
   */
  xtcThreshold?: number;
  /** Mirostat 2: target surprise in bits per token. Range 0 to 100. Default 0: off. */
  mirostatTau?: number;
  /** Mirostat 2: learning rate. Range above 0 to 1. Default 0.1. */
  mirostatEta?: number;
  /** Subtracted from the logit of each token that has been generated. Range -2 to 2. Default 0. */
  presencePenalty?: number;
  /**
   * Subtracted from the logit of a token for each time it has been generated. Range -2 to 2.
   * Default 0.
   */
  frequencyPenalty?: number;
  /**
   * Divides positive logits, and multiplies negative logits, of all tokens of the prompt and the
   * output. Range 0.01 to 100. Default 1: off.
   */
  repetitionPenalty?: number;
  /** No n-gram of this many tokens occurs twice. At most 256. Default 0: off. */
  noRepeatNgramSize?: number;
  /** Number of most probable tokens reported for each generated token. At most 128. Default 0. */
  topLogprobs?: number;
  /** Number of most probable tokens reported for each prompt token. At most 128. Default 0. */
  promptTopLogprobs?: number;
  /** Content of the outputs. Default 'delta'. */
  outputKind?: OutputKind;
  /** Constraint on the output. Default: none. */
  grammar?: Grammar;
  /** DRY penalty. Default: off. */
  dry?: Dry;
  /**
   * Values that are added to logits, from -100 to 100. Default: none. At most as many as the
   * vocabulary has tokens.
   */
  logitBias?: Record<number, number>;
  /**
   * Texts that the output must not contain, as the tokenizer encodes them at the beginning of a
   * text, after a space and within a word. Other token sequences that spell the same text are not
   * excluded. At most 1024 texts of 65536 bytes in all.
   */
  badWords?: string | Uint8Array | (string | Uint8Array)[];
  /**
   * Token sequences that the output must not contain. At most 1024 sequences of at most 256 tokens
   * each.
   */
  badWordsIds?: (ArrayLike<number> & Iterable<number>)[];
  /**
   * The only tokens that may be sampled. Default: all. At most as many as the vocabulary has
   * tokens.
   */
  allowedTokenIds?: ArrayLike<number> & Iterable<number>;
  /**
   * Position of the first prompt token whose log probability is reported, if promptLogprobs or both
   * echo and logprobs are set. Tokens before it can come from the prefix cache. It counts in the
   * truncated prompt, and must be below its length. Default 0: all except the first token.
   */
  promptLogprobsStart?: number | bigint;
  /** Do not stop at end-of-sequence tokens. */
  ignoreEos?: boolean;
  /**
   * Report the log probability of each generated token, and of the topLogprobs most probable
   * tokens.
   */
  logprobs?: boolean;
  /**
   * Report the log probability of each prompt token except the first, from promptLogprobsStart on,
   * and of the promptTopLogprobs most probable tokens. Of several samples, the first reports them.
   * A fork does not report them again.
   */
  promptLogprobs?: boolean;
  /**
   * The output begins with the prompt. With logprobs, the tokens of the prompt have log
   * probabilities, too: the prompt is computed from promptLogprobsStart on even if the prefix cache
   * has it, and its output follows then.
   */
  echo?: boolean;
  /** The stop string, or the text of the token that ends the sequence, stays in the text. */
  includeStop?: boolean;
  /**
   * Parameters that are left at their default take the values of the model's
   * generation_config.json, if it has them: temperature, topK, topP, minP, typicalP,
   * repetitionPenalty and noRepeatNgramSize. "do_sample": false selects temperature 0. Has no
   * effect on beam search.
   */
  modelDefaults?: boolean;
  /**
   * Until the first token is generated or appended, each step that computes a part of the prompt,
   * but not its end, has an output with computedTokens and without tokens or text, whatever
   * outputKind is. The other tokens of the prompt follow in later steps, because it is longer than
   * prefillChunk or maxBatchTokens, or because the step was full. These outputs count for the
   * capacity of the queue. After a preemption the numbers can be smaller again. Of several samples
   * or beams, the first sequence reports them.
   */
  prefillProgress?: boolean;
  /** Returned in each output of the request. */
  userData?: number | bigint;
  /**
   * Milliseconds from now after which the sequence ends with 'deadline' and the tokens it has.
   * Default: none.
   */
  deadlineMs?: number;
  /** Special tokens are left out of the text. Default true. */
  skipSpecial?: boolean;
  /**
   * The sequences are kept when they end, for any reason, and become idle. resume() continues one;
   * free() frees it. Default: false for a new request, true for a resumed sequence.
   */
  keep?: boolean;
}

/**
 * Parameters of a beam search, as in generate of Hugging Face transformers: release 5, and release
 * 4 for several groups.
 *
 * Logit bias, penalties and exclusions of Sampling apply to the log probabilities, in the order of
 * transformers. Frequency and presence penalties and DRY, which transformers lacks, follow the
 * repetition penalty. Bad words can forbid end tokens, which transformers ignores.
 */
export interface Beam {
  /** Number of beams, 2 to 64. Default 4. */
  width?: number;
  /** Number of groups of beams, each with its own search. Default 1. */
  groups?: number;
  /**
   * Subtracted from the log probability of a token for each beam of an earlier group that chose it
   * in the same step, before the repetition penalty. Range 0 to 1,000,000. Default 0.
   */
  diversityPenalty?: number;
  /**
   * The score of a beam is the sum of its log probabilities divided by its length to this power.
   * Range -5 to 5. Default 1.
   */
  lengthPenalty?: number;
  /** When a beam search ends. Default 'no'. */
  earlyStopping?: EarlyStopping;
}

/** A request. */
export interface Request extends Sampling {
  /** Prompt as UTF-8 text. */
  prompt?: string | Uint8Array;
  /** Prompt as token ids. */
  promptTokenIds?: ArrayLike<number> & Iterable<number>;
  /**
   * Number of results: samples, or best beams. Default 1. Result i has the sequence id request + i;
   * with bestOf, result i is one of the ids request to request + bestOf - 1. Each sequence has its
   * own last output.
   */
  n?: number;
  /**
   * Number of samples to generate. If it is larger than n, the n samples with the highest log
   * probability are returned at the end, best first. 0 (default) selects n.
   */
  bestOf?: number;
  /** Keeps only this many tokens at the end of the prompt. 0 (default) keeps all. */
  truncatePromptTokens?: number;
  /**
   * Beam search. Default: sampling. The n best beams are returned at the end, best first, whatever
   * outputKind is.
   *
   * PLLM_E_INVALID_ARGUMENT if it is combined with bestOf, keep, a temperature other than 0 or the
   * default, topK, topP, minP, typicalP, topNSigma, XTC, mirostat, a seed, stop strings,
   * topLogprobs, promptLogprobs, echo or a grammar.
   */
  beam?: Beam;
  /**
   * Requests share blocks of the prefix cache only if their salts are equal, so that tenants cannot
   * probe the prompts of other tenants. Default: the empty salt.
   */
  cacheSalt?: string | Uint8Array;
  /**
   * Priority, -100 to 100; higher runs first. Used if the order is 'priority'. Default 0. Forks
   * inherit it.
   */
  priority?: number;
  /**
   * Time in milliseconds for which the request waits for each next block of its prompt that the KV
   * store does not have yet, because another engine computes the prompt. The engine reads each
   * block when the store has it, and computes the prompt from the first block on that has not
   * appeared in this time. If no other request can run meanwhile, a step waits for these blocks,
   * too. 0 (default): the request waits only for blocks that the store has. PLLM_E_INVALID_ARGUMENT
   * if it is not 0 and the engine has no kvStore.
   */
  kvStoreWaitMs?: number;
  /**
   * The tokenizer adds its special tokens, such as BOS. Set it to false for a prompt that
   * renderChat() rendered. Default true.
   */
  addSpecial?: boolean;
}

/** Parameters of a fork. */
export interface ForkOptions {
  /** Number of tokens that the children share with their parent: 1 to its length. Default: all. */
  at?: number | bigint;
  /**
   * Each child draws from its own random stream of this seed, until it is resumed with other
   * parameters. If it is left out, the children draw the same random numbers as their parent.
   */
  seed?: number | bigint;
  /**
   * Returned in the outputs of the children. If it is left out, the children have the userData of
   * the parent.
   */
  userData?: number | bigint;
  /** Queue for the outputs of the children. Default: the parent's queue. */
  queue?: Queue;
  /** Number of children. Default 1. */
  n?: number;
  /** The children are idle until they are resumed, even if the parent runs. */
  idle?: boolean;
}

/** A prompt that is kept in the prefix cache. */
export interface Pin {
  /** Prompt as UTF-8 text. */
  prompt?: string | Uint8Array;
  /** Prompt as token ids. */
  promptTokenIds?: ArrayLike<number> & Iterable<number>;
  /** As in Request. */
  cacheSalt?: string | Uint8Array;
  /** Time in milliseconds for which the prompt is kept. 0 (default): until it is unpinned. */
  timeToLiveMs?: number | bigint;
  /**
   * If a sequence cannot continue otherwise, pins are dropped, those with the lowest priority
   * first. Default 0.
   */
  priority?: number;
  /**
   * The tokenizer adds its special tokens, such as BOS. Set it to false for a prompt that
   * renderChat() rendered. Default true.
   */
  addSpecial?: boolean;
}

/** The state of a budget. */
export interface BudgetInfo {
  /** Size of the budget in bytes. */
  bytes: number;
  /**
   * Smallest size in bytes to which it can be resized now, given its engines and their requests.
   */
  minBytes: number;
  /** Largest size in bytes to which it can be resized. */
  maxBytes: number;
  /** Bytes that the engines hold. More than bytes while engines are giving blocks back. */
  heldBytes: number;
  /** Engines that use the budget. */
  engines: number;
}

/** Memory that an engine would allocate. */
export interface Plan {
  /** Bytes of the weights. */
  weightBytes: number;
  /** Bytes of the KV pool. */
  kvBytes: number;
  /** Bytes of activations, logits and working memory of kernels. Small tables are not included. */
  workBytes: number;
  /** Number of KV blocks. */
  blocks: number;
  /** Tokens per KV block. */
  blockSize: number;
  /** Bytes of one KV block: of all layers, or of the layers of one group. */
  blockBytes: number;
  /** Maximum length of a sequence in tokens, prompt and output together. */
  maxModelLen: number;
  /** Number of sequences of maxModelLen tokens that fit at the same time. */
  fullSequences: number;
  /** Data type of KV blocks. */
  kvDtype: Exclude<Dtype, 'auto'>;
  /** Maximum number of KV blocks, if the budget grows to its maximum. */
  maxBlocks: number;
  /** Bytes of the host tier, in memory or in its file. */
  swapBytes: number;
  /** Number of KV blocks in the host tier. */
  swapBlocks: number;
  /**
   * Number of layer groups with KV blocks of their own. A sequence has one block of each group for
   * every blockSize tokens. For a group of layers with a window it has only the blocks inside the
   * window.
   */
  kvGroups: number;
}

/** The model and the limits of its engine. */
export interface ModelInfo {
  /** Name in config.json, such as "LlamaForCausalLM". */
  architecture: string;
  /** Instruction path, such as "avx512". */
  isa: string;
  /** Tokens that end a sequence. */
  eosTokenIds: number[];
  /** Number of tokens in the vocabulary. */
  vocabSize: number;
  /** Number of layers. */
  layers: number;
  /** Maximum length of a sequence for which the model was made. */
  maxPositions: number;
  /** Maximum length of a sequence in this engine. */
  maxModelLen: number;
  /** Number of threads. */
  threads: number;
  /** Result of packedPath. */
  packed: Packed;
  /**
   * Reason, as text, why the packed weights were not read or not written. Empty if there is nothing
   * to report.
   */
  packedReason: string;
  /**
   * On a CUDA device: the library that computes products of many rows, such as "cuBLASLt 12.9.1
   * (/usr/lib/libcublasLt.so.12)". If none does, "own kernels: " and the reason; prompts then take
   * longer. Empty on the CPU.
   */
  blasLibrary: string;
}

/** Predicted admission of a request. */
export interface Admission {
  /**
   * true if add() would accept the request, false if too many requests wait, its queue is full, or
   * a shared budget cannot reserve its blocks.
   */
  admits: boolean;
  /**
   * true if no request is ahead of it and its blocks are free, so that it would start in the next
   * step.
   */
  fitsNow: boolean;
  /** Predicted milliseconds until its first token. null if no step has been measured yet. */
  firstTokenMs: number | null;
  /** Number of requests ahead of it. */
  waitingRequests: number;
  /** Number of tokens that those requests have to compute. */
  waitingTokens: number;
}

/** Result of one step. */
export interface Step {
  /**
   * Number of requests, exports and imports that have not ended, and of commands left to the next
   * steps. While it is not 0, step again, and poll the queues: requests whose queue is full wait
   * for that.
   */
  unfinished: number;
  /** Number of prompt tokens computed. */
  prefillTokens: number;
  /** Number of decode tokens computed. */
  decodeTokens: number;
  /** Number of sequences in the step. */
  sequences: number;
  /**
   * Number of sequences that were skipped because their queue is full, or because they wait for a
   * slow grammar.
   */
  paused: number;
}

/** Counters since the creation of the engine, and its state after the last step. */
export interface Stats {
  /** Sequences that wait for their first or next step. */
  waiting: number;
  /** Sequences that run. */
  running: number;
  /** KV blocks of the pool. */
  blocksTotal: number;
  /** KV blocks in use. */
  blocksUsed: number;
  /** Unused KV blocks that are in the prefix cache. They are evicted when blocks are needed. */
  blocksCached: number;
  /** KV blocks that are neither in use nor cached. */
  blocksFree: number;
  /**
   * Fraction of the token slots of all used and reserved blocks that hold K and V of a token. 1 if
   * there are none.
   */
  slotUtilization: number;
  /** Steps. */
  steps: number;
  /** Prompt tokens computed. Tokens that are recomputed after a preemption count again. */
  promptTokens: number;
  /** Tokens generated. */
  generatedTokens: number;
  /** Preemptions. */
  preemptions: number;
  /** Results that ended with 'stop': one for each sequence of a request. */
  finishedStop: number;
  /** Results that ended with 'length': one for each sequence of a request. */
  finishedLength: number;
  /** Results that ended with 'abort': one for each sequence of a request. */
  finishedAbort: number;
  /** Results that ended with 'error': one for each sequence of a request. */
  finishedError: number;
  /**
   * Waiting sequences that the last step skipped because their queue is full, or because they wait
   * for a slow grammar.
   */
  paused: number;
  /** Kept sequences that wait to be resumed or freed. */
  idle: number;
  /** Blocks copied because a sequence wrote to a shared block. */
  blocksCopied: number;
  /** Prompt tokens looked up in the prefix cache. */
  prefixQueries: number;
  /** Prompt tokens found in the prefix cache, which were not computed. */
  prefixHits: number;
  /** Results that ended with 'deadline': one for each sequence of a request. */
  finishedDeadline: number;
  /** Requests refused because of maxWaitingRequests, maxWaitingTokens or a full queue. */
  admissionRejections: number;
  /** Steps that failed and were tried again, in part or as a whole. */
  stepsFailed: number;
  /** Preemptions that swapped the request to the host tier. The others were recomputed. */
  preemptionsSwapped: number;
  /** Sequences whose KV is in the host tier. */
  swapped: number;
  /** KV blocks of the host tier. */
  swapBlocksTotal: number;
  /** KV blocks in use in the host tier. */
  swapBlocksUsed: number;
  /** Blocks moved to the host tier. */
  blocksSwappedOut: number;
  /** Blocks moved back from the host tier. */
  blocksSwappedIn: number;
  /** Moves that failed, as on a full disk. Their sequences were recomputed. */
  swapFailures: number;
  /** Tokens at the start of sequences that were found in the prefix cache. */
  promptTokensCached: number;
  /** 1 if tracePath was set and the trace has ended because the disk failed or fell behind. */
  tracesStopped: number;
  /** 1 if journalPath was set and the journal has ended because the disk failed or fell behind. */
  journalsStopped: number;
  /**
   * Times that the KV pool shrank and the system did not take the memory back, as after mlockall.
   * The budget is kept, but the memory of the process does not shrink.
   */
  discardFailures: number;
  /**
   * Blocks that sequences do not hold because they are outside the windows of their layers. Blocks
   * of forks count once for each fork.
   */
  blocksOutOfWindow: number;
  /** KV blocks looked up in the KV store. */
  kvStoreQueries: number;
  /** KV blocks read from the KV store, with a valid checksum. */
  kvStoreHits: number;
  /** KV blocks written to the KV store. */
  kvStoreStored: number;
  /**
   * Full KV blocks that were not written to the KV store, because it was slow or the pool had
   * evicted them.
   */
  kvStoreDropped: number;
  /** Operations of the KV store that failed or took too long, and damaged blocks. */
  kvStoreFailures: number;
  /** Bytes read from the KV store. */
  kvStoreBytesRead: number;
  /** Bytes written to the KV store. */
  kvStoreBytesWritten: number;
}

/** The tokens and text of a sequence: all of them, or the new ones. */
export interface Generated {
  /** Id of the request. */
  request: number | bigint;
  /** Id of the sequence. */
  sequence: number | bigint;
  /** New tokens. Empty if there are none. */
  tokens: number[];
  /**
   * Log probability of each token. null if the request did not ask for them. NaN for tokens that
   * have none: those of an echoed prompt before promptLogprobsStart, its first one, and tokens that
   * the host appended.
   */
  logprobs: number[] | null;
  /**
   * New text, whole characters only. Empty if there is none. The text can lag behind the tokens.
   */
  text: string;
  /** Tokens of the prompt. */
  promptTokens: number;
  /** Index of the sequence in its request, from 0. */
  index: number;
  /** Why a sequence ended. Any value but null marks the last output of the sequence. */
  finishReason: FinishReason;
  /**
   * Sum of the log probabilities of all generated tokens, if the request enables log probabilities
   * or for the best of several samples. For a beam: its score after the length penalty. Else 0.
   */
  score: number;
  /**
   * The most probable tokens at the position of each token, most probable first. null if the
   * request did not ask for them.
   */
  topLogprobs: Logprob[][] | null;
  /**
   * Log probabilities of the prompt tokens except the first, from promptLogprobsStart on, if the
   * request enables them. They come in order, before the first generated token, possibly in several
   * outputs. null if the request did not ask for them.
   */
  promptLogprobs: number[] | null;
  /**
   * The most probable tokens at the position of each prompt token, as in topLogprobs. null if the
   * request did not ask for them.
   */
  promptTopLogprobs: Logprob[][] | null;
  /**
   * In the last output of a sequence: milliseconds from the call that added, resumed or forked it
   * to its first step. 0 if it never ran, and in all other outputs.
   */
  queuedMs: number;
  /** In the last output of a sequence: milliseconds from the same call to its first token, or 0. */
  firstTokenMs: number;
  /** In the last output of a sequence: milliseconds from the same call to its last token, or 0. */
  lastTokenMs: number;
  /** In the last output of a sequence: number of times it was preempted. */
  preemptions: number;
  /**
   * In the last output of a sequence: number of its first tokens that were found in the prefix
   * cache.
   */
  cachedTokens: number;
  /** What ended the sequence. null unless finishReason is 'stop'. */
  stopReason: StopReason;
  /** The token that ended the sequence, if stopReason is 'eos' or 'token'. Else null. */
  stopToken: number | null;
  /** The string that ended the sequence, if stopReason is 'string'. Else null. */
  stopString: string | null;
  /**
   * Number of tokens of the sequence that are computed, or that the prefix cache had. Only in
   * outputs of prefillProgress, otherwise 0.
   */
  computedTokens: number;
}

/** An output of one sequence: new tokens, new text, its end, or the progress of its prompt. */
export interface Output extends Generated {
  /** userData of the request. */
  userData: number | bigint;
  /**
   * The error if finishReason is 'error', if it is 'abort' because the engine was closed, or if an
   * export or a change of an idle sequence failed. Else null.
   */
  error: PagedllmError | null;
  /** Tokens generated so far. */
  generatedTokens: number;
}

/**
 * A token and its log probability in the model's own distribution, before sampling parameters
 * apply.
 */
export interface Logprob {
  token: number;
  logprob: number;
}

/** A sequence as of the last step and the calls since. */
export interface SequenceInfo {
  /** Id of the request that created it. */
  request: number | bigint;
  /** Number of its tokens, prompt and output. */
  length: number;
  /** Index of the sequence in its request, from 0. With bestOf it is not the rank of the result. */
  index: number;
  /** true if it waits to be resumed or freed, false if it runs or waits to run. */
  idle: boolean;
  /**
   * true if it was imported from a machine or an instruction path that does not compute the same
   * bits.
   */
  inexact: boolean;
}

/** An event of the prefix cache. */
export interface KvEvent {
  /**
   * Number of the step with this event. The first step with events has 1, and each further step
   * with events adds 1. All events of a step take effect together.
   */
  sequenceNumber: number;
  /** Time of the step in milliseconds since 1970 (UTC). */
  timeMs: number;
  /** Hash of the block, 32 bytes: its key in a KV store. null for 'cleared'. */
  hash: string | null;
  /**
   * Hash of the block before a stored block, 32 bytes. If firstToken is 0, a hash that differs
   * between salts. null unless kind is 'stored'.
   */
  parentHash: string | null;
  /** Tokens of a stored block. Empty if there are none. */
  tokens: number[];
  /** Position of the first token of the block in its sequence. */
  firstToken: number;
  /** Kind of the event. */
  kind: KvEventKind;
  /** Place of the block. Values can be added. */
  medium: KvMedium;
  /**
   * Layer group of the block. Models whose layers have different attention windows have a block in
   * each group for the same tokens. Group 0 has the longest window.
   */
  group: number;
}
