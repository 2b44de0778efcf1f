'use strict';
// Generated from src/ffi by `make header`. Do not edit.
// The constants, structs and functions of C, and the conversion of options and results.
const {
  PagedllmError, alternatives, array, arrayOrNull, hash, koffi, loadLibrary, nameOf, reasonOf, set,
  struct, text,
} = require('./runtime.js');

const ABI_VERSION = 1;
const NUL_TERMINATED = 18446744073709551615n;
const UNLIMITED_TOKENS = 4294967295;
const QUEUE_CAPACITY = 64;
const FORK_AT_END = 18446744073709551615n;

const E = {
  INVALID_ARGUMENT: 1, NOT_FOUND: 2, IO: 3, MODEL: 4, UNSUPPORTED: 5, CAPACITY: 6, BUSY: 7,
  OUT_OF_MEMORY: 8, INTERNAL: 9, CLOSED: 10, CANCELLED: 11,
};
const DTYPE = { auto: 0, f32: 1, bf16: 2, int8: 3, f16: 4, fp8: 5 };
const ISA = {
  auto: 0, portable: 1, avx2: 2, avx512: 3, avx512_bf16: 4, avx_vnni: 5, avx512_vnni: 6,
};
const WEIGHTS = {
  asStored: 0, f32: 1, f16: 2, bf16: 3, int8: 4, int4: 5, int4Asymmetric: 6, fp8: 7,
};
const PACKED = { unused: 0, read: 1, saved: 2, unsaved: 3 };
const ENGINE = { skipTokenizer: 1, noPrefixCache: 2, batchInvariant: 4 };
const PREEMPTION = { recompute: 0, swap: 1, auto: 2 };
const ORDER = { fcfs: 0, priority: 1, shortestPredicted: 2 };
const BATCHING = { mixed: 0, prefillFirst: 1, decodeFirst: 2, static: 3 };
const ALLOCATION = { onDemand: 0, maxTokens: 1 };
const SAMPLING = {
  seed: 1, ignoreEos: 2, logprobs: 4, promptLogprobs: 8, echo: 16, includeStop: 32, modelDefaults:
  64, prefillProgress: 128,
};
const OUTPUT = { delta: 0, cumulative: 1, final: 2 };
const GRAMMAR = { none: 0, jsonSchema: 1, jsonObject: 2, regex: 3, choice: 4, lark: 5 };
const TEXT = { addSpecial: 1, skipSpecial: 2 };
const REQUEST = { keep: 1 };
const EARLY_STOPPING = { no: 0, yes: 1, never: 2 };
const FINISH = { none: 0, stop: 1, length: 2, abort: 3, error: 4, deadline: 5 };
const STOP = { none: 0, eos: 1, token: 2, string: 3, grammar: 4 };
const FORK = { seed: 1, idle: 2, userData: 4 };
const RESUME = { userData: 2, continue: 4 };
const KV_EVENT = { stored: 0, removed: 1, cleared: 2 };
const KV_MEDIUM = { pool: 0 };

// ---- structs and callbacks

const u32 = 'uint32_t';
const i32 = 'int32_t';
const u64 = 'uint64_t';
const i64 = 'int64_t';
const f32 = 'float';
const f64 = 'double';
const pointer = 'void *';
const to = koffi.pointer;
const pointers = to(pointer);
const lengths = to(u64);
const Progress = to(koffi.proto(i32, [pointer, u64, u64]));
const LogitsHook = to(koffi.proto('void', [pointer, u64, pointer, u64, pointer, u64]));
const BudgetInfo = struct('pllm_budget_info', 48, {
  structSize: u64,
  bytes: u64,
  minBytes: u64,
  maxBytes: u64,
  heldBytes: u64,
  engines: u64,
});
const EngineOptions = struct('pllm_engine_options', 368, {
  structSize: u64,
  modelPath: pointer,
  modelPathLen: u64,
  device: pointer,
  deviceLen: u64,
  kvBytes: u64,
  seed: u64,
  blockSize: u32,
  kvDtype: u32,
  maxModelLen: u32,
  maxBatchTokens: u32,
  maxSeqs: u32,
  prefillChunk: u32,
  threads: u32,
  isa: u32,
  flags: u32,
  reserved: u32,
  queueCapacity: u64,
  progress: Progress,
  progressData: pointer,
  maxWaitingRequests: u64,
  maxWaitingTokens: u64,
  budget: pointer,
  swapBytes: u64,
  swapPath: pointer,
  swapPathLen: u64,
  preemption: u32,
  order: u32,
  ageingMs: u32,
  batching: u32,
  prefillBudget: u32,
  allocation: u32,
  tracePath: pointer,
  tracePathLen: u64,
  journalPath: pointer,
  journalPathLen: u64,
  modelName: pointer,
  modelNameLen: u64,
  weightFormat: u32,
  weightGroup: u32,
  packedPath: pointer,
  packedPathLen: u64,
  cpus: pointer,
  cpusLen: u64,
  memoryFraction: f32,
  reserved2: u32,
  maxPromptBytes: u64,
  kvStore: pointer,
  kvStoreMaxBytes: u64,
  kvStoreMaxOperations: u32,
  kvStoreTimeoutMs: u32,
  kvStoreSecret: pointer,
  kvStoreSecretLen: u64,
  kvEventsCapacity: u64,
  communicator: pointer,
  tensorParallel: u32,
  pipelineParallel: u32,
  workerTimeoutMs: u64,
});
const Plan = struct('pllm_plan', 112, {
  structSize: u64,
  weightBytes: u64,
  kvBytes: u64,
  workBytes: u64,
  blocks: u64,
  blockSize: u64,
  blockBytes: u64,
  maxModelLen: u64,
  fullSequences: u64,
  kvDtype: u64,
  maxBlocks: u64,
  swapBytes: u64,
  swapBlocks: u64,
  kvGroups: u64,
});
const ModelInfo = struct('pllm_model_info', 136, {
  structSize: u64,
  architecture: pointer,
  architectureLen: u64,
  isa: pointer,
  isaLen: u64,
  eosTokenIds: pointer,
  eosTokenIdsLen: u64,
  vocabSize: u64,
  layers: u64,
  maxPositions: u64,
  maxModelLen: u64,
  threads: u64,
  packed: u64,
  packedReason: pointer,
  packedReasonLen: u64,
  blasLibrary: pointer,
  blasLibraryLen: u64,
});
const Admission = struct('pllm_admission', 48, {
  structSize: u64,
  admits: u64,
  fitsNow: u64,
  firstTokenSeconds: f64,
  waitingRequests: u64,
  waitingTokens: u64,
});
const Step = struct('pllm_step', 48, {
  structSize: u64,
  unfinished: u64,
  prefillTokens: u64,
  decodeTokens: u64,
  sequences: u64,
  paused: u64,
});
const Stats = struct('pllm_stats', 344, {
  structSize: u64,
  waiting: u64,
  running: u64,
  blocksTotal: u64,
  blocksUsed: u64,
  blocksCached: u64,
  blocksFree: u64,
  slotUtilization: f64,
  steps: u64,
  promptTokens: u64,
  generatedTokens: u64,
  preemptions: u64,
  finishedStop: u64,
  finishedLength: u64,
  finishedAbort: u64,
  finishedError: u64,
  paused: u64,
  idle: u64,
  blocksCopied: u64,
  prefixQueries: u64,
  prefixHits: u64,
  finishedDeadline: u64,
  admissionRejections: u64,
  stepsFailed: u64,
  preemptionsSwapped: u64,
  swapped: u64,
  swapBlocksTotal: u64,
  swapBlocksUsed: u64,
  blocksSwappedOut: u64,
  blocksSwappedIn: u64,
  swapFailures: u64,
  promptTokensCached: u64,
  tracesStopped: u64,
  journalsStopped: u64,
  discardFailures: u64,
  blocksOutOfWindow: u64,
  kvStoreQueries: u64,
  kvStoreHits: u64,
  kvStoreStored: u64,
  kvStoreDropped: u64,
  kvStoreFailures: u64,
  kvStoreBytesRead: u64,
  kvStoreBytesWritten: u64,
});
const LogitBias = struct('pllm_logit_bias', 8, {
  token: u32,
  bias: f32,
});
const TokenList = struct('pllm_token_list', 16, {
  tokens: pointer,
  tokensLen: u64,
});
const Dry = struct('pllm_dry', 48, {
  structSize: u64,
  multiplier: f32,
  base: f32,
  allowedLength: u32,
  penaltyLastN: u32,
  sequenceBreakers: pointers,
  sequenceBreakerLens: lengths,
  sequenceBreakerCount: u64,
});
const Sampling = struct('pllm_sampling', 272, {
  structSize: u64,
  seed: u64,
  stopTokenIds: pointer,
  stopTokenIdsLen: u64,
  stop: pointers,
  stopLens: lengths,
  stopCount: u64,
  temperature: f32,
  topP: f32,
  minP: f32,
  topK: u32,
  maxTokens: u32,
  minTokens: u32,
  flags: u32,
  reserved: u32,
  typicalP: f32,
  topNSigma: f32,
  xtcProbability: f32,
  xtcThreshold: f32,
  mirostatTau: f32,
  mirostatEta: f32,
  presencePenalty: f32,
  frequencyPenalty: f32,
  repetitionPenalty: f32,
  noRepeatNgramSize: u32,
  topLogprobs: u32,
  promptTopLogprobs: u32,
  outputKind: u32,
  grammarKind: u32,
  grammar: pointer,
  grammarLen: u64,
  choices: pointers,
  choiceLens: lengths,
  choiceCount: u64,
  dry: to(Dry),
  logitBias: to(LogitBias),
  logitBiasLen: u64,
  badWords: pointers,
  badWordLens: lengths,
  badWordCount: u64,
  badWordsIds: to(TokenList),
  badWordsIdsLen: u64,
  allowedTokenIds: pointer,
  allowedTokenIdsLen: u64,
  promptLogprobsStart: u64,
});
const Beam = struct('pllm_beam', 32, {
  structSize: u64,
  width: u32,
  groups: u32,
  diversityPenalty: f32,
  lengthPenalty: f32,
  earlyStopping: u32,
  reserved: u32,
});
const Request = struct('pllm_request', 152, {
  structSize: u64,
  prompt: pointer,
  promptLen: u64,
  promptTokenIds: pointer,
  promptTokenIdsLen: u64,
  sampling: to(Sampling),
  userData: u64,
  n: u32,
  textFlags: u32,
  queue: pointer,
  bestOf: u32,
  truncatePromptTokens: u32,
  flags: u32,
  reserved: u32,
  beam: to(Beam),
  cacheSalt: pointer,
  cacheSaltLen: u64,
  logitsHook: LogitsHook,
  hookData: pointer,
  deadlineMs: i64,
  priority: i32,
  reserved2: u32,
  kvStoreWaitMs: u32,
  reserved3: u32,
});
const Logprob = struct('pllm_logprob', 8, {
  token: u32,
  logprob: f32,
});
const Output = struct('pllm_output', 264, {
  structSize: u64,
  request: u64,
  sequence: u64,
  userData: u64,
  tokens: pointer,
  tokensLen: u64,
  logprobs: pointer,
  text: pointer,
  textLen: u64,
  error: pointer,
  errorLen: u64,
  promptTokens: u64,
  generatedTokens: u64,
  index: u32,
  finishReason: u32,
  errorCode: i32,
  reserved: u32,
  score: f64,
  topLogprobs: to(Logprob),
  topLogprobsLen: u64,
  promptLogprobs: pointer,
  promptLogprobsLen: u64,
  promptTopLogprobs: to(Logprob),
  promptTopLogprobsLen: u64,
  sequenceState: pointer,
  sequenceStateLen: u64,
  queuedSeconds: f64,
  firstTokenSeconds: f64,
  lastTokenSeconds: f64,
  preemptions: u64,
  cachedTokens: u64,
  stopReason: u32,
  stopToken: u32,
  stopString: pointer,
  stopStringLen: u64,
  computedTokens: u64,
});
const Fork = struct('pllm_fork', 48, {
  structSize: u64,
  at: u64,
  seed: u64,
  userData: u64,
  queue: pointer,
  n: u32,
  flags: u32,
});
const Resume = struct('pllm_resume', 64, {
  structSize: u64,
  sampling: to(Sampling),
  queue: pointer,
  userData: u64,
  flags: u32,
  textFlags: u32,
  logitsHook: LogitsHook,
  hookData: pointer,
  deadlineMs: i64,
});
const SequenceInfo = struct('pllm_sequence_info', 40, {
  structSize: u64,
  request: u64,
  len: u64,
  index: u32,
  idle: u32,
  inexact: u64,
});
const Pin = struct('pllm_pin', 72, {
  structSize: u64,
  prompt: pointer,
  promptLen: u64,
  promptTokenIds: pointer,
  promptTokenIdsLen: u64,
  cacheSalt: pointer,
  cacheSaltLen: u64,
  timeToLiveMs: u64,
  priority: u32,
  textFlags: u32,
});
const KvEvent = struct('pllm_kv_event', 80, {
  structSize: u64,
  sequenceNumber: u64,
  timeSeconds: f64,
  hash: pointer,
  parentHash: pointer,
  tokens: pointer,
  tokensLen: u64,
  firstToken: u64,
  kind: u32,
  medium: u32,
  group: u32,
  reserved: u32,
});

// ---- functions

const library = loadLibrary(ABI_VERSION);
const lib = {};
function declare(name, result, ...args) {
  lib[name] = library.func(`pllm_${name}`, result, args);
}
declare('abi_version', u32);
declare('version', 'str');
declare('build_info', 'str');
declare('error_code', i32, pointer);
declare('error_message', 'str', pointer);
declare('error_prompt_tokens', u64, pointer);
declare('error_max_model_len', u64, pointer);
declare('error_is_temporary', i32, pointer);
declare('error_free', 'void', pointer);
declare('budget_create', pointer, u64, u64, koffi.out(to(pointer)));
declare('budget_free', 'void', pointer);
declare('budget_resize', pointer, pointer, u64);
declare('budget_get_info', pointer, pointer, koffi.inout(to(BudgetInfo)));
declare('engine_budget', pointer, pointer);
declare('dry_init', 'void', koffi.inout(to(Dry)), u64);
declare('beam_init', 'void', koffi.inout(to(Beam)), u64);
declare('engine_options_init', 'void', koffi.inout(to(EngineOptions)), u64);
declare('engine_plan', pointer, to(EngineOptions), koffi.inout(to(Plan)));
declare('engine_create', pointer, to(EngineOptions), koffi.out(to(pointer)));
declare('worker_run', pointer, to(EngineOptions));
declare('engine_free', 'void', pointer);
declare('engine_health', pointer, pointer);
declare('engine_get_model_info', pointer, pointer, koffi.inout(to(ModelInfo)));
declare('request_init', 'void', koffi.inout(to(Request)), u64);
declare('sampling_init', 'void', koffi.inout(to(Sampling)), u64);
declare('engine_add_request', pointer, pointer, to(Request), koffi.out(to(u64)));
declare('engine_predict_admission', pointer, pointer, to(Request), koffi.inout(to(Admission)));
declare('engine_abort', pointer, pointer, u64);
declare('engine_step', pointer, pointer, koffi.inout(to(Step)));
declare('engine_start', pointer, pointer);
declare('engine_stop', pointer, pointer);
declare('engine_queue', pointer, pointer);
declare('engine_get_stats', pointer, pointer, koffi.inout(to(Stats)));
declare('engine_snapshot', pointer, pointer, u64, u64, koffi.out(to(pointer)));
declare('engine_get_metrics', pointer, pointer, koffi.out(to(pointer)));
declare('queue_create', pointer, pointer, u64, koffi.out(to(pointer)));
declare('queue_free', 'void', pointer);
declare('queue_get_event_fd', pointer, pointer, koffi.out(to(i32)));
declare('queue_poll', pointer, pointer, i64, koffi.out(to(pointer)));
declare('outputs_len', u64, pointer);
declare('outputs_get', pointer, pointer, u64);
declare('outputs_free', 'void', pointer);
declare('fork_init', 'void', koffi.inout(to(Fork)), u64);
declare('resume_init', 'void', koffi.inout(to(Resume)), u64);
declare('pin_init', 'void', koffi.inout(to(Pin)), u64);
declare('sequence_fork', pointer, pointer, u64, to(Fork), koffi.out(to(u64)));
declare('sequence_append', pointer, pointer, u64, pointer, u64);
declare('sequence_rewind', pointer, pointer, u64, u64);
declare('sequence_resume', pointer, pointer, u64, to(Resume));
declare('sequence_free', pointer, pointer, u64);
declare('sequence_get_info', pointer, pointer, u64, koffi.inout(to(SequenceInfo)));
declare('sequence_export', pointer, pointer, u64, pointer);
declare('sequence_import', pointer, pointer, pointer, u64, pointer, koffi.out(to(u64)));
declare('prefix_pin', pointer, pointer, to(Pin), koffi.out(to(u64)));
declare('prefix_unpin', pointer, pointer, u64);
declare('engine_tokenize', pointer, pointer, pointer, u64, u32, koffi.out(to(pointer)));
declare('engine_detokenize', pointer, pointer, pointer, u64, u32, koffi.out(to(pointer)));
declare('engine_get_token_bytes', pointer, pointer, u32, koffi.out(to(pointer)), koffi.out(to(u64)));
declare('engine_render_chat', pointer, pointer, pointer, u64, koffi.out(to(pointer)));
declare('tokens_data', pointer, pointer);
declare('tokens_len', u64, pointer);
declare('tokens_free', 'void', pointer);
declare('bytes_data', pointer, pointer);
declare('bytes_len', u64, pointer);
declare('bytes_free', 'void', pointer);
declare('response_parser_create', pointer, pointer, pointer, u64, koffi.out(to(pointer)));
declare('response_parser_feed', pointer, pointer, pointer, u64, koffi.out(to(pointer)));
declare('response_parser_finish', pointer, pointer, koffi.out(to(pointer)));
declare('response_parser_free', 'void', pointer);
declare('engine_poll_kv_events', pointer, pointer, u32, koffi.out(to(pointer)));
declare('engine_snapshot_kv_events', pointer, pointer, koffi.out(to(pointer)));
declare('engine_hash_prompt', pointer, pointer, to(Request), u32, koffi.out(to(pointer)));
declare('kv_events_len', u64, pointer);
declare('kv_events_get', pointer, pointer, u64);
declare('kv_events_free', 'void', pointer);

// ---- options: setters in the order in which they apply

const engineOptions = {
  type: EngineOptions,
  init: lib.engine_options_init,
  required: ['modelPath'],
  set: {
    modelPath: set.text,
    device: set.text,
    kvBytes: set.u64,
    seed: set.u64,
    blockSize: set.u32,
    kvDtype: set.choice(DTYPE),
    maxModelLen: set.u32,
    maxBatchTokens: set.u32,
    maxSeqs: set.u32,
    prefillChunk: set.u32,
    threads: set.u32,
    isa: set.choice(ISA),
    queueCapacity: set.u64,
    maxWaitingRequests: set.u64,
    maxWaitingTokens: set.u64,
    swapBytes: set.u64,
    swapPath: set.text,
    preemption: set.choice(PREEMPTION),
    order: set.choice(ORDER),
    ageingMs: set.u32,
    batching: set.choice(BATCHING),
    prefillBudget: set.u32,
    allocation: set.choice(ALLOCATION),
    tracePath: set.text,
    journalPath: set.text,
    modelName: set.text,
    weightFormat: set.choice(WEIGHTS),
    weightGroup: set.u32,
    packedPath: set.text,
    cpus: set.text,
    memoryFraction: set.f32,
    maxPromptBytes: set.u64,
    kvEventsCapacity: set.u64,
    tensorParallel: set.u32,
    pipelineParallel: set.u32,
    workerTimeoutMs: set.u64,
    skipTokenizer: set.flag('flags', ENGINE.skipTokenizer),
    prefixCache: set.notFlag('flags', ENGINE.noPrefixCache),
    batchInvariant: set.flag('flags', ENGINE.batchInvariant),
  },
};
const dry = {
  type: Dry,
  init: lib.dry_init,
  set: {
    multiplier: set.f32,
    base: set.f32,
    allowedLength: set.u32,
    penaltyLastN: set.u32,
    sequenceBreakers: set.texts('sequenceBreakerLens', 'sequenceBreakerCount'),
  },
};
const sampling = {
  type: Sampling,
  init: lib.sampling_init,
  set: {
    seed: set.withFlag(set.u64, 'flags', SAMPLING.seed),
    stopTokenIds: set.tokens,
    stop: set.texts('stopLens', 'stopCount'),
    temperature: set.f32,
    topP: set.f32,
    minP: set.f32,
    topK: set.u32,
    maxTokens: set.u32,
    minTokens: set.u32,
    typicalP: set.f32,
    topNSigma: set.f32,
    xtcProbability: set.f32,
    xtcThreshold: set.f32,
    mirostatTau: set.f32,
    mirostatEta: set.f32,
    presencePenalty: set.f32,
    frequencyPenalty: set.f32,
    repetitionPenalty: set.f32,
    noRepeatNgramSize: set.u32,
    topLogprobs: set.withFlag(set.u32, 'flags', SAMPLING.logprobs),
    promptTopLogprobs: set.withFlag(set.u32, 'flags', SAMPLING.promptLogprobs),
    outputKind: set.choice(OUTPUT),
    grammar: set.grammar(GRAMMAR, set.texts('choiceLens', 'choiceCount')),
    dry: set.record(dry),
    logitBias: set.logitBiases,
    badWords: set.texts('badWordLens', 'badWordCount'),
    badWordsIds: set.tokenLists,
    allowedTokenIds: set.tokens,
    promptLogprobsStart: set.u64,
    ignoreEos: set.flag('flags', SAMPLING.ignoreEos),
    logprobs: set.flag('flags', SAMPLING.logprobs),
    promptLogprobs: set.flag('flags', SAMPLING.promptLogprobs),
    echo: set.flag('flags', SAMPLING.echo),
    includeStop: set.flag('flags', SAMPLING.includeStop),
    modelDefaults: set.flag('flags', SAMPLING.modelDefaults),
    prefillProgress: set.flag('flags', SAMPLING.prefillProgress),
  },
};
const beam = {
  type: Beam,
  init: lib.beam_init,
  set: {
    width: set.u32,
    groups: set.u32,
    diversityPenalty: set.f32,
    lengthPenalty: set.f32,
    earlyStopping: set.choice(EARLY_STOPPING),
  },
};
const request = {
  type: Request,
  init: lib.request_init,
  set: {
    prompt: set.text,
    promptTokenIds: set.tokens,
    userData: set.u64,
    n: set.u32,
    bestOf: set.u32,
    truncatePromptTokens: set.u32,
    beam: set.record(beam),
    cacheSalt: set.text,
    deadlineMs: set.deadline,
    priority: set.i32,
    kvStoreWaitMs: set.u32,
    addSpecial: set.flag('textFlags', TEXT.addSpecial),
    skipSpecial: set.flag('textFlags', TEXT.skipSpecial),
    keep: set.flag('flags', REQUEST.keep),
  },
};
const fork = {
  type: Fork,
  init: lib.fork_init,
  set: {
    at: set.u64,
    seed: set.withFlag(set.u64, 'flags', FORK.seed),
    userData: set.withFlag(set.u64, 'flags', FORK.userData),
    n: set.u32,
    idle: set.flag('flags', FORK.idle),
  },
};
const resume = {
  type: Resume,
  init: lib.resume_init,
  set: {
    userData: set.withFlag(set.u64, 'flags', RESUME.userData),
    deadlineMs: set.deadline,
    keep: set.flag('flags', REQUEST.keep),
    continueGeneration: set.flag('flags', RESUME.continue),
    skipSpecial: set.flag('textFlags', TEXT.skipSpecial),
  },
};
const pin = {
  type: Pin,
  init: lib.pin_init,
  set: {
    prompt: set.text,
    promptTokenIds: set.tokens,
    cacheSalt: set.text,
    timeToLiveMs: set.u64,
    priority: set.u32,
    addSpecial: set.flag('textFlags', TEXT.addSpecial),
  },
};

// ---- results

const codeOf = (code) => `PLLM_E_${nameOf(E, code) ?? code}`;
const errorOf = ({ errorCode, error, errorLen }) =>
  (errorCode ? new PagedllmError(codeOf(errorCode), text(error, errorLen)) : null);

function toBudgetInfo(c) {
  return {
    bytes: c.bytes,
    minBytes: c.minBytes,
    maxBytes: c.maxBytes,
    heldBytes: c.heldBytes,
    engines: c.engines,
  };
}

function toPlan(c) {
  return {
    weightBytes: c.weightBytes,
    kvBytes: c.kvBytes,
    workBytes: c.workBytes,
    blocks: c.blocks,
    blockSize: c.blockSize,
    blockBytes: c.blockBytes,
    maxModelLen: c.maxModelLen,
    fullSequences: c.fullSequences,
    kvDtype: nameOf(DTYPE, c.kvDtype),
    maxBlocks: c.maxBlocks,
    swapBytes: c.swapBytes,
    swapBlocks: c.swapBlocks,
    kvGroups: c.kvGroups,
  };
}

function toModelInfo(c) {
  return {
    architecture: text(c.architecture, c.architectureLen),
    isa: text(c.isa, c.isaLen),
    eosTokenIds: array(c.eosTokenIds, u32, c.eosTokenIdsLen),
    vocabSize: c.vocabSize,
    layers: c.layers,
    maxPositions: c.maxPositions,
    maxModelLen: c.maxModelLen,
    threads: c.threads,
    packed: nameOf(PACKED, c.packed),
    packedReason: text(c.packedReason, c.packedReasonLen),
    blasLibrary: text(c.blasLibrary, c.blasLibraryLen),
  };
}

function toAdmission(c) {
  return {
    admits: c.admits !== 0,
    fitsNow: c.fitsNow !== 0,
    firstTokenMs: c.firstTokenSeconds < 0 ? null : c.firstTokenSeconds * 1000,
    waitingRequests: c.waitingRequests,
    waitingTokens: c.waitingTokens,
  };
}

function toStep(c) {
  return {
    unfinished: c.unfinished,
    prefillTokens: c.prefillTokens,
    decodeTokens: c.decodeTokens,
    sequences: c.sequences,
    paused: c.paused,
  };
}

function toStats(c) {
  return {
    waiting: c.waiting,
    running: c.running,
    blocksTotal: c.blocksTotal,
    blocksUsed: c.blocksUsed,
    blocksCached: c.blocksCached,
    blocksFree: c.blocksFree,
    slotUtilization: c.slotUtilization,
    steps: c.steps,
    promptTokens: c.promptTokens,
    generatedTokens: c.generatedTokens,
    preemptions: c.preemptions,
    finishedStop: c.finishedStop,
    finishedLength: c.finishedLength,
    finishedAbort: c.finishedAbort,
    finishedError: c.finishedError,
    paused: c.paused,
    idle: c.idle,
    blocksCopied: c.blocksCopied,
    prefixQueries: c.prefixQueries,
    prefixHits: c.prefixHits,
    finishedDeadline: c.finishedDeadline,
    admissionRejections: c.admissionRejections,
    stepsFailed: c.stepsFailed,
    preemptionsSwapped: c.preemptionsSwapped,
    swapped: c.swapped,
    swapBlocksTotal: c.swapBlocksTotal,
    swapBlocksUsed: c.swapBlocksUsed,
    blocksSwappedOut: c.blocksSwappedOut,
    blocksSwappedIn: c.blocksSwappedIn,
    swapFailures: c.swapFailures,
    promptTokensCached: c.promptTokensCached,
    tracesStopped: c.tracesStopped,
    journalsStopped: c.journalsStopped,
    discardFailures: c.discardFailures,
    blocksOutOfWindow: c.blocksOutOfWindow,
    kvStoreQueries: c.kvStoreQueries,
    kvStoreHits: c.kvStoreHits,
    kvStoreStored: c.kvStoreStored,
    kvStoreDropped: c.kvStoreDropped,
    kvStoreFailures: c.kvStoreFailures,
    kvStoreBytesRead: c.kvStoreBytesRead,
    kvStoreBytesWritten: c.kvStoreBytesWritten,
  };
}

function toOutput(c) {
  return {
    request: c.request,
    sequence: c.sequence,
    userData: c.userData,
    tokens: array(c.tokens, u32, c.tokensLen),
    logprobs: arrayOrNull(c.logprobs, f32, c.tokensLen),
    text: text(c.text, c.textLen),
    error: errorOf(c),
    promptTokens: c.promptTokens,
    generatedTokens: c.generatedTokens,
    index: c.index,
    finishReason: reasonOf(FINISH, c.finishReason),
    score: c.score,
    topLogprobs: alternatives(c.topLogprobs, Logprob, c.topLogprobsLen, c.tokensLen),
    promptLogprobs: arrayOrNull(c.promptLogprobs, f32, c.promptLogprobsLen),
    promptTopLogprobs: alternatives(c.promptTopLogprobs, Logprob, c.promptTopLogprobsLen, c.promptLogprobsLen),
    queuedMs: c.queuedSeconds * 1000,
    firstTokenMs: c.firstTokenSeconds * 1000,
    lastTokenMs: c.lastTokenSeconds * 1000,
    preemptions: c.preemptions,
    cachedTokens: c.cachedTokens,
    stopReason: reasonOf(STOP, c.stopReason),
    stopToken: [STOP.eos, STOP.token].includes(c.stopReason) ? c.stopToken : null,
    stopString: c.stopReason === STOP.string ? text(c.stopString, c.stopStringLen) : null,
    computedTokens: c.computedTokens,
  };
}

function toSequenceInfo(c) {
  return {
    request: c.request,
    length: c.len,
    index: c.index,
    idle: c.idle !== 0,
    inexact: c.inexact !== 0,
  };
}

function toKvEvent(c) {
  return {
    sequenceNumber: c.sequenceNumber,
    timeMs: c.timeSeconds * 1000,
    hash: hash(c.hash),
    parentHash: hash(c.parentHash),
    tokens: array(c.tokens, u32, c.tokensLen),
    firstToken: c.firstToken,
    kind: nameOf(KV_EVENT, c.kind),
    medium: nameOf(KV_MEDIUM, c.medium),
    group: c.group,
  };
}

module.exports = {
  ABI_VERSION, NUL_TERMINATED, UNLIMITED_TOKENS, QUEUE_CAPACITY, FORK_AT_END, E, DTYPE, ISA,
  WEIGHTS, PACKED, ENGINE, PREEMPTION, ORDER, BATCHING, ALLOCATION, SAMPLING, OUTPUT, GRAMMAR, TEXT,
  REQUEST, EARLY_STOPPING, FINISH, STOP, FORK, RESUME, KV_EVENT, KV_MEDIUM, BudgetInfo,
  EngineOptions, Plan, ModelInfo, Admission, Step, Stats, LogitBias, TokenList, Dry, Sampling, Beam,
  Request, Logprob, Output, Fork, Resume, SequenceInfo, Pin, KvEvent, engineOptions, dry, sampling,
  beam, request, fork, resume, pin, toBudgetInfo, toPlan, toModelInfo, toAdmission, toStep, toStats,
  toOutput, toSequenceInfo, toKvEvent, codeOf, errorOf, lib,
};
