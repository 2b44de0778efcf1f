'use strict';
/*
 * libpagedllm for Node: LLM serving inside your own process. One file over koffi. pagedllm.d.ts
 * documents each call.
 *
 *     const { Engine } = require('pagedllm');
 *     const engine = await Engine.open({ modelPath: 'models/mine' });
 *     const request = { prompt: 'Once upon a time', maxTokens: 100 };
 *     for await (const output of engine.stream(request)) process.stdout.write(output.text);
 *     await engine.close();
 *
 * Waiting. A thread of the engine steps it. Each stream has a queue, so that a slow reader pauses
 * only its own request. libuv watches the eventfd of the queue (koffi.node.poll), and polling the
 * queue takes its outputs without waiting. A stream needs a descriptor and no thread, and the event
 * loop never blocks.
 *
 * Limits. koffi.node.poll is new and not yet in the manual of koffi, so its version is pinned. If a
 * worker thread is terminated while koffi polls, the process crashes, so engines are for the main
 * thread. eventfd exists only on Linux.
 *
 * Thread pool. Loading, tokenizing, a host's own steps and closing run on libuv's thread pool.
 * Requests are added one after the other, in the order of the calls, so that they use only one
 * thread of the pool.
 *
 * Logits hooks are not available. The stepping thread would call the hook for every token, and
 * JavaScript runs on another thread, so each token of all requests would wait for the event loop.
 */
const fs = require('node:fs');
const path = require('node:path');
const util = require('node:util');
const { isMainThread } = require('node:worker_threads');
const koffi = require('koffi');

const ABI_VERSION = 1;
const QUEUE_CAPACITY = 64; // PLLM_QUEUE_CAPACITY
const CODES = ['', 'INVALID_ARGUMENT', 'NOT_FOUND', 'IO', 'MODEL', 'UNSUPPORTED', 'CAPACITY', 'BUSY', 'OUT_OF_MEMORY', 'INTERNAL',
  'CLOSED', 'CANCELLED'];
const FINISH_REASONS = [null, 'stop', 'length', 'abort', 'error', 'deadline'];
const DTYPES = ['auto', 'f32', 'bf16', 'int8', 'f16', 'fp8'];
const ISAS = ['auto', 'portable', 'avx2', 'avx512', 'avx512_bf16', 'avx_vnni', 'avx512_vnni'];
const WEIGHTS = ['asStored', 'f32', 'f16', 'bf16', 'int8', 'int4', 'int4Asymmetric', 'fp8'];
const PACKED = ['unused', 'read', 'saved', 'unsaved'];
const PREEMPTIONS = ['recompute', 'swap', 'auto'];
const ORDERS = ['fcfs', 'priority', 'shortestPredicted'];
const BATCHINGS = ['mixed', 'prefillFirst', 'decodeFirst', 'static'];
const ALLOCATIONS = ['onDemand', 'maxTokens'];
const OUTPUT_KINDS = ['delta', 'cumulative', 'final'];
const GRAMMARS = ['none', 'jsonSchema', 'jsonObject', 'regex', 'choice', 'lark'];
const EARLY_STOPPINGS = ['no', 'yes', 'never'];
const ENGINE_SKIP_TOKENIZER = 1, ENGINE_NO_PREFIX_CACHE = 2, ENGINE_BATCH_INVARIANT = 4;
const SAMPLING_SEED = 1, SAMPLING_IGNORE_EOS = 2, SAMPLING_LOGPROBS = 4, SAMPLING_PROMPT_LOGPROBS = 8, SAMPLING_ECHO = 16,
  SAMPLING_INCLUDE_STOP = 32;
const TEXT_ADD_SPECIAL = 1, TEXT_SKIP_SPECIAL = 2;
const REQUEST_KEEP = 1, RESUME_USER_DATA = 2, RESUME_CONTINUE = 4;
const FORK_SEED = 1, FORK_IDLE = 2, FORK_USER_DATA = 4;

class PagedllmError extends Error {
  constructor(code, message) {
    super(message);
    this.name = 'PagedllmError';
    this.code = `PLLM_E_${CODES[code] ?? code}`;
  }
}
const [INVALID_ARGUMENT, UNSUPPORTED, CLOSED] = ['INVALID_ARGUMENT', 'UNSUPPORTED', 'CLOSED'].map((name) => CODES.indexOf(name));

// ---- library ------------------------------------------------------------------------------------

// A struct of pagedllm.h: 'type: names', in the order of its fields.
function struct(...fields) {
  const members = { structSize: 'uint64_t' };
  for (const [type, names] of fields) for (const name of names.split(' ')) members[name] = type;
  return koffi.struct(members);
}

const u32 = 'uint32_t', u64 = 'uint64_t', i32 = 'int32_t', i64 = 'int64_t', pointer = 'void *';
const texts = koffi.pointer(pointer), lengths = koffi.pointer(u64);
const Progress = koffi.pointer(koffi.proto('int32_t', [pointer, u64, u64]));
const Options = struct(
  [pointer, 'modelPath'], [u64, 'modelPathLen'], [pointer, 'device'], [u64, 'deviceLen kvBytes seed'],
  [u32, 'blockSize kvDtype maxModelLen maxBatchTokens maxSeqs prefillChunk threads isa flags reserved'], [u64, 'queueCapacity'],
  [Progress, 'progress'], [pointer, 'progressData'], [u64, 'maxWaitingRequests maxWaitingTokens'], [pointer, 'budget'],
  [u64, 'swapBytes'], [pointer, 'swapPath'], [u64, 'swapPathLen'],
  [u32, 'preemption order ageingMs batching prefillBudget allocation'], [pointer, 'tracePath'], [u64, 'tracePathLen'],
  [pointer, 'journalPath'], [u64, 'journalPathLen'], [pointer, 'modelName'], [u64, 'modelNameLen'],
  [u32, 'weightFormat weightGroup'], [pointer, 'packedPath'], [u64, 'packedPathLen'],
  [pointer, 'cpus'], [u64, 'cpusLen'], ['float', 'memoryFraction'], [u32, 'reserved2'], [u64, 'maxPromptBytes']);
const Dry = struct(
  ['float', 'multiplier base'], [u32, 'allowedLength penaltyLastN'], [texts, 'sequenceBreakers'], [lengths, 'sequenceBreakerLens'],
  [u64, 'sequenceBreakerCount']);
const Beam = struct([u32, 'width groups'], ['float', 'diversityPenalty lengthPenalty'], [u32, 'earlyStopping reserved']);
const LogitBias = koffi.struct({ token: u32, bias: 'float' });
const Logprob = koffi.struct({ token: u32, logprob: 'float' });
const TokenList = koffi.struct({ tokens: pointer, tokensLen: u64 });
const Sampling = struct(
  [u64, 'seed'], [pointer, 'stopTokenIds'], [u64, 'stopTokenIdsLen'], [texts, 'stop'], [lengths, 'stopLens'], [u64, 'stopCount'],
  ['float', 'temperature topP minP'], [u32, 'topK maxTokens minTokens flags reserved'],
  ['float', 'typicalP topNSigma xtcProbability xtcThreshold mirostatTau mirostatEta presencePenalty frequencyPenalty'],
  ['float', 'repetitionPenalty'], [u32, 'noRepeatNgramSize topLogprobs promptTopLogprobs outputKind grammarKind'],
  [pointer, 'grammar'], [u64, 'grammarLen'], [texts, 'choices'], [lengths, 'choiceLens'], [u64, 'choiceCount'],
  [koffi.pointer(Dry), 'dry'], [koffi.pointer(LogitBias), 'logitBias'], [u64, 'logitBiasLen'], [texts, 'badWords'],
  [lengths, 'badWordLens'], [u64, 'badWordCount'], [koffi.pointer(TokenList), 'badWordsIds'], [u64, 'badWordsIdsLen'],
  [pointer, 'allowedTokenIds'], [u64, 'allowedTokenIdsLen']);
const Request = struct(
  [pointer, 'prompt'], [u64, 'promptLen'], [pointer, 'promptTokenIds'], [u64, 'promptTokenIdsLen'],
  [koffi.pointer(Sampling), 'sampling'], [u64, 'userData'], [u32, 'n textFlags'], [pointer, 'queue'],
  [u32, 'bestOf truncatePromptTokens flags reserved'], [koffi.pointer(Beam), 'beam'], [pointer, 'cacheSalt'], [u64, 'cacheSaltLen'],
  [pointer, 'logitsHook hookData'], [i64, 'deadlineMs'], [i32, 'priority'], [u32, 'reserved2']);
const Output = struct(
  [u64, 'request sequence userData'], [pointer, 'tokens'], [u64, 'tokensLen'], [pointer, 'logprobs text'], [u64, 'textLen'],
  [pointer, 'error'], [u64, 'errorLen promptTokens generatedTokens'], [u32, 'index finishReason'], ['int32_t', 'errorCode'],
  [u32, 'reserved'], ['double', 'score'], [pointer, 'topLogprobs'], [u64, 'topLogprobsLen'], [pointer, 'promptLogprobs'],
  [u64, 'promptLogprobsLen'], [pointer, 'promptTopLogprobs'], [u64, 'promptTopLogprobsLen'], [pointer, 'sequenceState'], [u64, 'sequenceStateLen'],
  ['double', 'queuedSeconds firstTokenSeconds lastTokenSeconds'], [u64, 'preemptions cachedTokens']);
const Fork = struct([u64, 'at seed userData'], [pointer, 'queue'], [u32, 'n flags']);
const Resume = struct(
  [koffi.pointer(Sampling), 'sampling'], [pointer, 'queue'], [u64, 'userData'], [u32, 'flags textFlags'],
  [pointer, 'logitsHook hookData'], [i64, 'deadlineMs']);
const Pin = struct(
  [pointer, 'prompt'], [u64, 'promptLen'], [pointer, 'promptTokenIds'], [u64, 'promptTokenIdsLen'], [pointer, 'cacheSalt'],
  [u64, 'cacheSaltLen timeToLiveMs'], [u32, 'priority textFlags']);
const SequenceInfo = struct([u64, 'request len'], [u32, 'index idle'], [u64, 'inexact']);
const Step = struct([u64, 'unfinished prefillTokens decodeTokens sequences paused']);
const Stats = struct(
  [u64, 'waiting running blocksTotal blocksUsed blocksCached blocksFree'], ['double', 'slotUtilization'],
  [u64, 'steps promptTokens generatedTokens preemptions finishedStop finishedLength finishedAbort finishedError paused'],
  [u64, 'idle blocksCopied prefixQueries prefixHits finishedDeadline admissionRejections stepsFailed preemptionsSwapped swapped'],
  [u64, 'swapBlocksTotal swapBlocksUsed blocksSwappedOut blocksSwappedIn swapFailures promptTokensCached tracesStopped'],
  [u64, 'journalsStopped discardFailures blocksOutOfWindow']);
const Plan = struct(
  [u64, 'weightBytes kvBytes workBytes blocks blockSize blockBytes maxModelLen fullSequences kvDtype maxBlocks'],
  [u64, 'swapBytes swapBlocks kvGroups']);
const Admission = struct([u64, 'admits fitsNow'], ['double', 'firstTokenSeconds'], [u64, 'waitingRequests waitingTokens']);
const BudgetInfo = struct([u64, 'bytes minBytes maxBytes heldBytes engines']);
const ModelInfo = struct(
  [pointer, 'architecture'], [u64, 'architectureLen'], [pointer, 'isa'], [u64, 'isaLen'], [pointer, 'eosTokenIds'],
  [u64, 'eosTokenIdsLen vocabSize layers maxPositions maxModelLen threads packed'], [pointer, 'packedReason'], [u64, 'packedReasonLen']);

const lib = declare(load());

function load() {
  const places = ['libpagedllm.so', '../../target/release/libpagedllm.so', '../../../lib/libpagedllm.so.1'];
  const files = places.map((place) => path.join(__dirname, place));
  const file = process.env.PAGEDLLM_LIBRARY || files.find((file) => fs.existsSync(file)) || 'libpagedllm.so.1';
  let library;
  try {
    library = koffi.load(file);
  } catch (error) {
    throw new Error(`${file}: ${error.message}; set PAGEDLLM_LIBRARY to the path of the library`, { cause: error });
  }
  const abi = library.func('pllm_abi_version', u32, [])();
  if (abi !== ABI_VERSION) {
    throw new Error(`${file} has ABI version ${abi} (this module: ${ABI_VERSION}); use the module and the library of one release`);
  }
  return library;
}

function declare(library) {
  const functions = {};
  const declare = (result, args, ...names) => {
    for (const name of names) functions[name] = library.func(`pllm_${name}`, result, args);
  };
  const filled = (type) => koffi.inout(koffi.pointer(type));
  const out = (type) => koffi.out(koffi.pointer(type));
  declare('str', [], 'version', 'build_info');
  declare('int32_t', [pointer], 'error_code');
  declare('str', [pointer], 'error_message');
  declare('void', [filled(Options), u64], 'engine_options_init');
  declare('void', [filled(Sampling), u64], 'sampling_init');
  declare('void', [filled(Request), u64], 'request_init');
  declare('void', [filled(Dry), u64], 'dry_init');
  declare('void', [filled(Beam), u64], 'beam_init');
  declare('void', [filled(Fork), u64], 'fork_init');
  declare('void', [filled(Resume), u64], 'resume_init');
  declare('void', [filled(Pin), u64], 'pin_init');
  declare('void', [pointer], 'engine_free', 'queue_free', 'outputs_free', 'tokens_free', 'bytes_free', 'error_free',
    'budget_free');
  declare(pointer, [pointer], 'engine_queue', 'engine_budget', 'tokens_data', 'bytes_data');
  declare(u64, [pointer], 'outputs_len', 'tokens_len', 'bytes_len');
  declare(pointer, [pointer, u64], 'outputs_get');
  // The following functions return a pllm_error *.
  declare(pointer, [koffi.pointer(Options), filled(Plan)], 'engine_plan');
  declare(pointer, [koffi.pointer(Options), out(pointer)], 'engine_create');
  declare(pointer, [pointer, filled(ModelInfo)], 'engine_get_model_info');
  declare(pointer, [pointer, filled(Step)], 'engine_step');
  declare(pointer, [pointer, filled(Stats)], 'engine_get_stats');
  declare(pointer, [pointer, out(pointer)], 'engine_get_metrics');
  declare(pointer, [pointer], 'engine_start', 'engine_stop');
  declare(pointer, [pointer, u64], 'engine_abort', 'sequence_free', 'prefix_unpin', 'budget_resize');
  declare(pointer, [u64, u64, out(pointer)], 'budget_create');
  declare(pointer, [pointer, filled(BudgetInfo)], 'budget_get_info');
  declare(pointer, [pointer, u64, koffi.pointer(Fork), pointer], 'sequence_fork');
  declare(pointer, [pointer, u64, pointer, u64], 'sequence_append');
  declare(pointer, [pointer, u64, u64], 'sequence_rewind');
  declare(pointer, [pointer, u64, pointer], 'sequence_export');
  declare(pointer, [pointer, pointer, u64, pointer, out(u64)], 'sequence_import');
  declare(pointer, [pointer, u64, koffi.pointer(Resume)], 'sequence_resume');
  declare(pointer, [pointer, u64, filled(SequenceInfo)], 'sequence_get_info');
  declare(pointer, [pointer, koffi.pointer(Pin), out(u64)], 'prefix_pin');
  declare(pointer, [pointer, koffi.pointer(Request), out(u64)], 'engine_add_request');
  declare(pointer, [pointer, koffi.pointer(Request), filled(Admission)], 'engine_predict_admission');
  declare(pointer, [pointer, u64, out(pointer)], 'queue_create');
  declare(pointer, [pointer, out('int32_t')], 'queue_get_event_fd');
  declare(pointer, [pointer, 'int64_t', out(pointer)], 'queue_poll');
  declare(pointer, [pointer, pointer, u64, u32, out(pointer)], 'engine_tokenize', 'engine_detokenize');
  declare(pointer, [pointer, pointer, u64, out(pointer)], 'engine_render_chat');
  return functions;
}

function check(error) {
  if (!error) return;
  const thrown = new PagedllmError(lib.error_code(error), lib.error_message(error));
  lib.error_free(error);
  throw thrown;
}

// Makes a call on a thread of the pool. koffi passes buffers as bare pointers, so the arguments are
// kept until the call returns.
const inUse = new Set();
function onPool(call, ...args) {
  inUse.add(args);
  return new Promise((resolve, reject) => {
    call.async(...args, (failed, result) => {
      inUse.delete(args);
      if (failed) reject(failed);
      else resolve(result);
    });
  });
}

// ---- conversions between C and JavaScript -------------------------------------------------------

function defaultsOf(type, init) {
  const value = { structSize: koffi.sizeof(type) };
  init(value, value.structSize);
  return value;
}

// Returns the struct that a call fills, without its size.
function filled(type, call, ...subject) {
  const value = { structSize: koffi.sizeof(type) };
  check(call(...subject, value));
  return withoutSize(value);
}

async function filledOnPool(type, call, ...subject) {
  const value = { structSize: koffi.sizeof(type) };
  check(await onPool(call, ...subject, value));
  return withoutSize(value);
}

function withoutSize({ structSize, ...fields }) {
  return fields;
}

// Sets the numbers that are given. Without the check, koffi would truncate them.
function assign(value, type, numbers) {
  for (const [name, number] of Object.entries(numbers)) {
    if (number === undefined) continue;
    const kind = type.members[name]?.type.primitive;
    if (kind === 'Float32') {
      if (typeof number !== 'number') throw new TypeError(`${name} is ${util.inspect(number)}; it must be a number`);
      value[name] = number;
    } else if (/^UInt(32|64)$/.test(kind)) {
      value[name] = unsigned(name, number, Number(kind.slice(4)));
    } else if (/^Int(32|64)$/.test(kind)) {
      value[name] = signed(name, number, Number(kind.slice(3)));
    } else {
      throw new TypeError(`unknown option '${name}'`);
    }
  }
}

const unsigned = (name, number, bits) => integer(name, number, 0n, 1n << BigInt(bits));
const signed = (name, number, bits) => integer(name, number, -1n << BigInt(bits - 1), 1n << BigInt(bits - 1));

// Checks that a number is an integer from low up to, but not including, end.
function integer(name, number, low, end) {
  const whole = typeof number === 'bigint' || Number.isInteger(number);
  if (!whole && typeof number !== 'number') throw new TypeError(`${name} is ${util.inspect(number)}; it must be a number or a bigint`);
  if (!whole || BigInt(number) < low || BigInt(number) >= end) {
    throw new PagedllmError(INVALID_ARGUMENT, `${name} is ${number}; it must be an integer from ${low} to ${end - 1n}`);
  }
  return number;
}

// Rounds up, because remaining times have fractions. In C, 0 means no deadline.
function deadline(ms) {
  if (ms === undefined) return undefined;
  if (typeof ms !== 'number') throw new TypeError(`deadlineMs is ${util.inspect(ms)}; it must be a number`);
  if (!(ms > 0)) {
    throw new PagedllmError(INVALID_ARGUMENT, `deadlineMs is ${ms}; pass the remaining milliseconds, or leave it out for no deadline`);
  }
  return Math.ceil(ms);
}

const flag = (flags, bit, on) => (on === undefined ? flags : on ? flags | bit : flags & ~bit);

function named(names, name, value) {
  const number = names.indexOf(value);
  if (number < 0) throw new TypeError(`${name} is ${util.inspect(value)}; it must be one of ${names.join(', ')}`);
  return number;
}

// Texts, states and token ids are copied, because a thread of the pool reads them. An uncounted
// zero follows them, because koffi passes an empty buffer as NULL.
function utf8(name, text) {
  if (typeof text === 'string') return Buffer.from(`${text}\0`);
  if (text instanceof Uint8Array) return copied(text);
  throw new TypeError(`${name} is ${util.inspect(text)}; it must be a string, or a Uint8Array of UTF-8`);
}

function bytes(name, given) {
  if (given instanceof Uint8Array) return copied(given);
  throw new TypeError(`${name} is ${util.inspect(given)}; it must be a Uint8Array`);
}

const copied = (given) => Buffer.concat([given, Buffer.alloc(1)]);

function tokenIds(name, tokens) {
  if (!Array.isArray(tokens) && !(tokens instanceof Uint32Array)) {
    throw new TypeError(`${name} is ${util.inspect(tokens)}; it must be an array or a Uint32Array`);
  }
  return Uint32Array.from([...tokens, 0], (token) => unsigned(`a token id of ${name}`, token, 32));
}

const lengthOf = (copied) => copied.length - 1;

function assignCopied(value, name, copied) {
  value[name] = copied;
  value[`${name}Len`] = lengthOf(copied);
}

// An uncounted element follows the texts: koffi passes an empty array as NULL, which means no list.
function assignTexts(value, name, singular, texts) {
  const copied = [texts].flat().map((text) => utf8(name, text));
  value[name] = [...copied, null];
  value[`${singular}Lens`] = copied.map(lengthOf);
  value[`${singular}Count`] = copied.length;
}

function assignPrompt(value, prompt, promptTokenIds) {
  if (prompt !== undefined) assignCopied(value, 'prompt', utf8('prompt', prompt));
  if (promptTokenIds !== undefined) assignCopied(value, 'promptTokenIds', tokenIds('promptTokenIds', promptTokenIds));
}

function toOptions({ modelPath, device, swapPath, tracePath, journalPath, packedPath, modelName, cpus, weightFormat, kvDtype, isa,
  preemption, order, batching, allocation, skipTokenizer, prefixCache, batchInvariant, ...numbers }) {
  const options = defaultsOf(Options, lib.engine_options_init);
  assignCopied(options, 'modelPath', utf8('modelPath', modelPath));
  for (const [name, text] of Object.entries({ device, swapPath, tracePath, journalPath, packedPath, modelName, cpus })) {
    if (text !== undefined) assignCopied(options, name, utf8(name, text));
  }
  for (const [name, names, value] of [['weightFormat', WEIGHTS, weightFormat], ['kvDtype', DTYPES, kvDtype], ['isa', ISAS, isa],
    ['preemption', PREEMPTIONS, preemption], ['order', ORDERS, order],
    ['batching', BATCHINGS, batching], ['allocation', ALLOCATIONS, allocation]]) {
    if (value !== undefined) options[name] = named(names, name, value);
  }
  options.flags = flag(options.flags, ENGINE_SKIP_TOKENIZER, skipTokenizer);
  options.flags = flag(options.flags, ENGINE_NO_PREFIX_CACHE, prefixCache === undefined ? undefined : !prefixCache);
  options.flags = flag(options.flags, ENGINE_BATCH_INVARIANT, batchInvariant);
  assign(options, Options, numbers);
  return options;
}

function toRequest({ prompt, promptTokenIds, userData, n, bestOf, beam, keep, truncatePromptTokens, cacheSalt, deadlineMs, priority,
  addSpecial, skipSpecial, ...sampling }) {
  const request = defaultsOf(Request, lib.request_init);
  assignPrompt(request, prompt, promptTokenIds);
  if (cacheSalt !== undefined) assignCopied(request, 'cacheSalt', utf8('cacheSalt', cacheSalt));
  if (beam !== undefined) request.beam = toBeam(beam);
  request.flags = flag(request.flags, REQUEST_KEEP, keep);
  request.textFlags = flag(flag(request.textFlags, TEXT_ADD_SPECIAL, addSpecial), TEXT_SKIP_SPECIAL, skipSpecial);
  request.sampling = toSampling(sampling);
  assign(request, Request, { userData, n, bestOf, truncatePromptTokens, deadlineMs: deadline(deadlineMs), priority });
  return request;
}

function toBeam({ earlyStopping, ...numbers }) {
  const beam = defaultsOf(Beam, lib.beam_init);
  if (earlyStopping !== undefined) beam.earlyStopping = named(EARLY_STOPPINGS, 'earlyStopping', earlyStopping);
  assign(beam, Beam, numbers);
  return beam;
}

function toSampling({ stop, stopTokenIds, allowedTokenIds, badWords, badWordsIds, logitBias, dry, grammar, outputKind, ignoreEos,
  includeStop, echo, logprobs, promptLogprobs, ...numbers }) {
  const sampling = defaultsOf(Sampling, lib.sampling_init);
  const given = (number) => (number === undefined ? undefined : true); // a number implies its flag
  for (const [bit, on] of [
    [SAMPLING_SEED, given(numbers.seed)],
    [SAMPLING_IGNORE_EOS, ignoreEos],
    [SAMPLING_ECHO, echo],
    [SAMPLING_INCLUDE_STOP, includeStop],
    [SAMPLING_LOGPROBS, logprobs ?? given(numbers.topLogprobs)],
    [SAMPLING_PROMPT_LOGPROBS, promptLogprobs ?? given(numbers.promptTopLogprobs)],
  ]) {
    sampling.flags = flag(sampling.flags, bit, on);
  }
  if (outputKind !== undefined) sampling.outputKind = named(OUTPUT_KINDS, 'outputKind', outputKind);
  if (stopTokenIds !== undefined) assignCopied(sampling, 'stopTokenIds', tokenIds('stopTokenIds', stopTokenIds));
  if (allowedTokenIds !== undefined) assignCopied(sampling, 'allowedTokenIds', tokenIds('allowedTokenIds', allowedTokenIds));
  if (stop !== undefined) assignTexts(sampling, 'stop', 'stop', stop);
  if (badWords !== undefined) assignTexts(sampling, 'badWords', 'badWord', badWords);
  if (badWordsIds !== undefined) {
    const lists = badWordsIds.map((tokens) => tokenIds('badWordsIds', tokens));
    sampling.badWordsIds = lists.map((tokens) => ({ tokens, tokensLen: lengthOf(tokens) }));
    sampling.badWordsIdsLen = lists.length;
  }
  if (logitBias !== undefined) {
    sampling.logitBias = Object.entries(logitBias).map(([token, bias]) => {
      const one = { token: unsigned('a token id of logitBias', Number(token), 32) };
      assign(one, LogitBias, { bias });
      return one;
    });
    sampling.logitBiasLen = sampling.logitBias.length;
  }
  if (dry !== undefined) sampling.dry = toDry(dry);
  if (grammar !== undefined) assignGrammar(sampling, grammar);
  assign(sampling, Sampling, numbers);
  return sampling;
}

function toDry({ sequenceBreakers, ...numbers }) {
  const dry = defaultsOf(Dry, lib.dry_init);
  if (sequenceBreakers !== undefined) assignTexts(dry, 'sequenceBreakers', 'sequenceBreaker', sequenceBreakers);
  assign(dry, Dry, numbers);
  return dry;
}

function assignGrammar(sampling, grammar) {
  const [[kind, rule] = [], ...more] = Object.entries(grammar);
  const kinds = GRAMMARS.slice(1);
  if (more.length || !kinds.includes(kind)) {
    throw new TypeError(`grammar is ${util.inspect(grammar)}; it must have exactly one of the properties ${kinds.join(', ')}`);
  }
  sampling.grammarKind = GRAMMARS.indexOf(kind);
  if (kind === 'choice') assignTexts(sampling, 'choices', 'choice', rule);
  else if (kind === 'jsonSchema' && ['object', 'boolean'].includes(typeof rule) && !(rule instanceof Uint8Array)) {
    assignCopied(sampling, 'grammar', utf8('grammar', JSON.stringify(rule)));
  } else if (kind !== 'jsonObject') {
    assignCopied(sampling, 'grammar', utf8('grammar', rule));
  }
}

const text = (address, length) => (address ? koffi.decode.string(address, length) : '');
const numbers = (address, type, length) => (address ? Array.from(koffi.decode(address, type, length)) : []);

// Returns the alternatives, the same number for each of the tokens.
function logprobsOf(address, length, tokens) {
  if (!address) return null;
  const each = length / tokens, all = koffi.decode(address, Logprob, length);
  return Array.from({ length: tokens }, (_, i) => all.slice(i * each, (i + 1) * each));
}

// Returns the text of a pllm_bytes and frees it.
function taken(bytes) {
  const result = text(lib.bytes_data(bytes), lib.bytes_len(bytes));
  lib.bytes_free(bytes);
  return result;
}

const errorOf = (output) =>
  (output.errorCode ? new PagedllmError(output.errorCode, text(output.error, output.errorLen)) : null);

function toOutput(address) {
  const output = koffi.decode(address, Output);
  return {
    request: output.request,
    text: text(output.text, output.textLen),
    tokens: numbers(output.tokens, u32, output.tokensLen),
    logprobs: output.logprobs ? numbers(output.logprobs, 'float', output.tokensLen) : null,
    finishReason: output.finishReason in FINISH_REASONS ? FINISH_REASONS[output.finishReason] : 'other',
    error: errorOf(output),
    promptTokens: output.promptTokens,
    generatedTokens: output.generatedTokens,
    userData: output.userData,
    sequence: output.sequence,
    index: output.index,
    score: output.score,
    topLogprobs: logprobsOf(output.topLogprobs, output.topLogprobsLen, output.tokensLen),
    promptLogprobs: output.promptLogprobs ? numbers(output.promptLogprobs, 'float', output.promptLogprobsLen) : null,
    promptTopLogprobs: logprobsOf(output.promptTopLogprobs, output.promptTopLogprobsLen, output.promptLogprobsLen),
    queuedMs: output.queuedSeconds * 1000,
    firstTokenMs: output.firstTokenSeconds * 1000,
    lastTokenMs: output.lastTokenSeconds * 1000,
    preemptions: output.preemptions,
    cachedTokens: output.cachedTokens,
  };
}

// Returns the state of an exported sequence.
function toState(address) {
  const output = koffi.decode(address, Output), error = errorOf(output);
  if (error) throw error;
  return new Uint8Array(koffi.view(output.sequenceState, output.sequenceStateLen)).slice();
}

// Returns one completion for each sequence, by index.
async function completionsOf(stream, { outputKind }) {
  const byIndex = [];
  for await (const output of stream) (byIndex[output.index] ??= []).push(output);
  return byIndex.filter(Boolean).map((outputs) => completionOf(outputKind === 'cumulative' ? outputs.slice(-1) : outputs));
}

function completionOf(outputs) {
  const last = outputs.at(-1);
  const joined = (name) => {
    const lists = outputs.map((output) => output[name]).filter(Boolean);
    return lists.length ? lists.flat() : null;
  };
  return {
    request: last.request,
    text: outputs.map((output) => output.text).join(''),
    tokens: joined('tokens'),
    logprobs: joined('logprobs'),
    finishReason: last.finishReason,
    promptTokens: last.promptTokens,
    sequence: last.sequence,
    index: last.index,
    score: last.score,
    topLogprobs: joined('topLogprobs'),
    promptLogprobs: joined('promptLogprobs'),
    promptTopLogprobs: joined('promptTopLogprobs'),
    queuedMs: last.queuedMs,
    firstTokenMs: last.firstTokenMs,
    lastTokenMs: last.lastTokenMs,
    preemptions: last.preemptions,
    cachedTokens: last.cachedTokens,
  };
}

// ---- handles ------------------------------------------------------------------------------------

// An object of the library. It is freed after close() when no call on the pool uses it.
class Handle {
  #what;
  #pointer;
  #free;
  #uses = 0;
  #closed = false;
  #settle;
  #freed = new Promise((resolve) => { this.#settle = resolve; });

  constructor(what, pointer, free) {
    this.#what = what;
    this.#pointer = pointer;
    this.#free = free;
  }

  get pointer() {
    if (this.#closed) throw new PagedllmError(CLOSED, `the ${this.#what} is closed`);
    return this.#pointer;
  }

  // Keeps the pointer alive until the promise of `use` is settled.
  async during(use) {
    const pointer = this.pointer;
    this.#uses++;
    try {
      return await use(pointer);
    } finally {
      this.#uses--;
      if (this.#closed) this.#freeWhenUnused();
    }
  }

  // Fulfilled when the object is freed.
  close() {
    if (!this.#closed) {
      this.#closed = true;
      this.#freeWhenUnused();
    }
    return this.#freed;
  }

  #freeWhenUnused() {
    if (this.#uses === 0) this.#settle(this.#free(this.#pointer));
  }
}

class Queue {
  #handle;
  #watch = null; // the koffi watcher, from the first wait on
  #readable = null; // the promise that readers await; #wake fulfils it
  #wake;

  // Internal: Engine.createQueue creates queues.
  constructor(what, pointer, free) {
    this.#handle = new Handle(what, pointer, free);
  }

  poll() {
    return this.take(toOutput);
  }

  // Internal, for Engine: takes all outputs and reads each with `read`.
  take(read) {
    const batch = [null];
    check(lib.queue_poll(this.#handle.pointer, 0, batch));
    try {
      return Array.from({ length: lib.outputs_len(batch[0]) }, (_, i) => read(lib.outputs_get(batch[0], i)));
    } finally {
      lib.outputs_free(batch[0]);
    }
  }

  readable() {
    const { pointer } = this.#handle;
    if (!this.#readable) {
      this.#startWatch(pointer);
      this.#readable = new Promise((resolve) => { this.#wake = resolve; });
    }
    return this.#readable;
  }

  close() {
    this.#watch?.close(); // before its descriptor is closed
    this.#watch = null;
    this.#woken();
    this.#handle.close();
  }

  // Internal, for Engine: keeps the pointer alive until the promise of `use` is settled.
  during(use) {
    return this.#handle.during(use);
  }

  // Internal, for Engine: the pointer, for synchronous calls.
  get pointer() {
    return this.#handle.pointer;
  }

  #startWatch(pointer) {
    // koffi calls back outside of Node's callback scopes, at whose end promise reactions run. An
    // immediate has such a scope.
    const onReadable = () => {
      this.#watch?.stop();
      setImmediate(() => this.#woken());
    };
    if (this.#watch) {
      this.#watch.start(onReadable);
    } else {
      const fd = [0];
      check(lib.queue_get_event_fd(pointer, fd));
      this.#watch = koffi.node.poll(fd[0], onReadable);
    }
  }

  #woken() {
    this.#readable = null;
    this.#wake?.();
  }
}

class Budget {
  #handle;
  #borrowed; // the budget of an engine, alive as long as the engine's handle; else null

  static create(bytes, maxBytes = bytes) {
    const pointer = [null];
    check(lib.budget_create(unsigned('bytes', bytes, 64), unsigned('maxBytes', maxBytes, 64), pointer));
    return new Budget(new Handle('budget', pointer[0], lib.budget_free));
  }

  // Internal: Budget.create and Engine.budget create budgets.
  constructor(handle, borrowed = null) {
    this.#handle = handle;
    this.#borrowed = borrowed;
  }

  async resize(bytes) {
    unsigned('bytes', bytes, 64);
    return this.during(async (budget) => check(await onPool(lib.budget_resize, budget, bytes)));
  }

  info() {
    const { pointer } = this.#handle;
    return filled(BudgetInfo, lib.budget_get_info, this.#borrowed ?? pointer);
  }

  close() {
    if (!this.#borrowed) this.#handle.close();
  }

  // Internal, for Engine: keeps the pointer alive until the promise of `use` is settled.
  during(use) {
    return this.#handle.during((pointer) => use(this.#borrowed ?? pointer));
  }
}

function withBudget(budget, use) {
  if (budget === undefined) return use(null);
  if (!(budget instanceof Budget)) throw new TypeError(`budget is ${util.inspect(budget)}; it must be a Budget`);
  return budget.during(use);
}

// ---- engines ------------------------------------------------------------------------------------

class Engine {
  #handle;
  #queue;
  #lastAdded = Promise.resolve();

  static async open({ hostSteps = false, progress, signal, budget, ...given }) {
    if (!isMainThread) throw new PagedllmError(UNSUPPORTED, 'Engine.open was called in a worker thread; open the engine on the main thread');
    signal?.throwIfAborted();
    const options = toOptions(given);
    let thrown;
    if (progress || signal) {
      options.progress = (_data, done, total) => {
        try {
          signal?.throwIfAborted();
          progress?.(done, total);
          return 0;
        } catch (error) {
          thrown ??= { error };
          return 1;
        }
      };
    }
    const pointer = [null];
    const error = await withBudget(budget, (budget) => onPool(lib.engine_create, { ...options, budget }, pointer));
    if (error && thrown) {
      lib.error_free(error);
      throw thrown.error;
    }
    check(error);
    const engine = new Engine(pointer[0]);
    try {
      signal?.throwIfAborted();
      if (!hostSteps) engine.start();
    } catch (error) {
      await engine.close();
      throw error;
    }
    return engine;
  }

  static async plan({ budget, ...given }) {
    const options = toOptions(given);
    const plan = await withBudget(budget, (budget) => filledOnPool(Plan, lib.engine_plan, { ...options, budget }));
    return { ...plan, kvDtype: DTYPES[plan.kvDtype] };
  }

  // Internal: Engine.open creates engines.
  constructor(pointer) {
    this.#handle = new Handle('engine', pointer, (pointer) => onPool(lib.engine_free, pointer));
    this.#queue = new Queue('engine', lib.engine_queue(pointer), () => {});
  }

  close() {
    this.#queue.close();
    return this.#handle.close();
  }

  async generate(request, options) {
    return (await this.generateAll(request, options))[0];
  }

  async generateAll(request, { signal } = {}) {
    return completionsOf(this.stream(request, { signal }), request);
  }

  async *stream(request, options = {}) {
    const { n = 1 } = request;
    yield* this.#outputs(options, Number(n), (queue) => this.add({ ...request, queue }));
  }

  // Yields the outputs of the request that `begin` adds, until the given number of its sequences
  // have ended. The outputs include those of forks that write to the same queue.
  async *#outputs({ signal, capacity = QUEUE_CAPACITY }, sequences, begin) {
    signal?.throwIfAborted();
    const queue = this.createQueue(capacity);
    const close = () => queue.close();
    signal?.addEventListener('abort', close, { once: true });
    try {
      const request = await begin(queue);
      for (;;) {
        for (const output of queue.poll()) {
          if (output.error) throw output.error;
          signal?.throwIfAborted();
          yield output;
          if (output.finishReason && output.request === request) sequences--;
          if (!sequences) return;
        }
        await queue.readable();
      }
    } catch (error) {
      throw signal?.aborted ? signal.reason : error; // aborting the signal closes the queue
    } finally {
      signal?.removeEventListener('abort', close);
      queue.close();
    }
  }

  async add({ queue, ...request }) {
    return this.#inOrder(queue, toRequest(request), async (engine, c) => {
      const id = [0];
      check(await onPool(lib.engine_add_request, engine, c, id));
      return id[0];
    });
  }

  async predictAdmission({ queue, ...request }) {
    const { admits, fitsNow, firstTokenSeconds, ...waiting } = await this.#inOrder(queue, toRequest(request), (engine, c) =>
      filledOnPool(Admission, lib.engine_predict_admission, engine, c));
    const firstTokenMs = firstTokenSeconds < 0 ? null : firstTokenSeconds * 1000;
    return { admits: admits !== 0, fitsNow: fitsNow !== 0, firstTokenMs, ...waiting };
  }

  // Makes calls on the pool one after the other, with a struct that names the queue.
  #inOrder(queue, c, call) {
    const turn = () => this.#handle.during((engine) => {
      const called = (queue) => call(engine, { ...c, queue });
      return queue ? queue.during(called) : called(null);
    });
    const done = this.#lastAdded.then(turn);
    this.#lastAdded = done.catch(() => {});
    return done;
  }

  abort(request) {
    check(lib.engine_abort(this.#handle.pointer, unsigned('request', request, 64)));
  }

  fork(sequence, { n = 1, at, seed, idle, userData, queue } = {}) {
    const engine = this.#handle.pointer;
    const how = defaultsOf(Fork, lib.fork_init);
    assign(how, Fork, { n, at, seed, userData });
    how.queue = queue ? queue.pointer : null;
    how.flags = flag(flag(how.flags, FORK_IDLE, idle), FORK_SEED, seed === undefined ? undefined : true);
    how.flags = flag(how.flags, FORK_USER_DATA, userData === undefined ? undefined : true);
    // The library rejects a larger n before it writes an id.
    const children = new BigUint64Array(Math.min(Number(n), this.stats().blocksTotal) || 1);
    check(lib.sequence_fork(engine, unsigned('sequence', sequence, 64), how, children));
    return Array.from(children, (id) => (id > Number.MAX_SAFE_INTEGER ? id : Number(id)));
  }

  append(sequence, tokens) {
    const ids = tokenIds('tokens', tokens);
    check(lib.sequence_append(this.#handle.pointer, unsigned('sequence', sequence, 64), ids, lengthOf(ids)));
  }

  rewind(sequence, length) {
    check(lib.sequence_rewind(this.#handle.pointer, unsigned('sequence', sequence, 64), unsigned('length', length, 64)));
  }

  async resume(sequence, { queue, userData, keep, deadlineMs, continueGeneration, skipSpecial, ...sampling } = {}) {
    if (continueGeneration && Object.values({ skipSpecial, ...sampling }).some((given) => given !== undefined)) {
      throw new TypeError('continueGeneration keeps the parameters of the sequence; pass only queue, userData, keep and deadlineMs');
    }
    const how = defaultsOf(Resume, lib.resume_init);
    how.sampling = toSampling(sampling);
    how.flags = flag(flag(how.flags, REQUEST_KEEP, keep), RESUME_USER_DATA, userData === undefined ? undefined : true);
    how.flags = flag(how.flags, RESUME_CONTINUE, continueGeneration);
    how.textFlags = flag(how.textFlags, TEXT_SKIP_SPECIAL, skipSpecial);
    assign(how, Resume, { userData, deadlineMs: deadline(deadlineMs) });
    unsigned('sequence', sequence, 64);
    return this.#inOrder(queue, how, async (engine, c) => check(await onPool(lib.sequence_resume, engine, sequence, c)));
  }

  async *streamResumed(sequence, how = {}, options = {}) {
    yield* this.#outputs(options, 1, async (queue) => {
      const { request } = this.sequenceInfo(sequence);
      await this.resume(sequence, { ...how, queue });
      return request;
    });
  }

  async generateResumed(sequence, how = {}, { signal } = {}) {
    // Only the sequence knows the kind of its outputs.
    if (how.continueGeneration) throw new TypeError('continueGeneration needs streamResumed()');
    return (await completionsOf(this.streamResumed(sequence, how, { signal }), how))[0];
  }

  free(sequence) {
    check(lib.sequence_free(this.#handle.pointer, unsigned('sequence', sequence, 64)));
  }

  sequenceInfo(sequence) {
    const id = unsigned('sequence', sequence, 64);
    const { len, idle, inexact, ...info } = filled(SequenceInfo, lib.sequence_get_info, this.#handle.pointer, id);
    return { ...info, length: len, idle: idle !== 0, inexact: inexact !== 0 };
  }

  async exportSequence(sequence) {
    const queue = this.createQueue(1); // receives only the state
    try {
      check(lib.sequence_export(this.#handle.pointer, unsigned('sequence', sequence, 64), queue.pointer));
      for (;;) {
        const [state] = queue.take(toState);
        if (state) return state;
        await queue.readable();
      }
    } finally {
      queue.close();
    }
  }

  async importSequence(state, { queue } = {}) {
    const data = bytes('state', state);
    return this.#inOrder(queue, {}, async (engine, { queue }) => {
      const id = [0];
      check(await onPool(lib.sequence_import, engine, data, lengthOf(data), queue, id));
      return id[0];
    });
  }

  async pin({ prompt, promptTokenIds, cacheSalt, addSpecial, ...numbers }) {
    const pin = defaultsOf(Pin, lib.pin_init);
    assignPrompt(pin, prompt, promptTokenIds);
    if (cacheSalt !== undefined) assignCopied(pin, 'cacheSalt', utf8('cacheSalt', cacheSalt));
    pin.textFlags = flag(pin.textFlags, TEXT_ADD_SPECIAL, addSpecial);
    assign(pin, Pin, numbers);
    return this.#handle.during(async (engine) => {
      const id = [0];
      check(await onPool(lib.prefix_pin, engine, pin, id));
      return id[0];
    });
  }

  unpin(pin) {
    check(lib.prefix_unpin(this.#handle.pointer, unsigned('pin', pin, 64)));
  }

  async step() {
    return this.#handle.during((engine) => filledOnPool(Step, lib.engine_step, engine));
  }

  start() {
    check(lib.engine_start(this.#handle.pointer));
  }

  async stop() {
    return this.#handle.during(async (engine) => check(await onPool(lib.engine_stop, engine)));
  }

  get queue() {
    this.#handle.pointer;
    return this.#queue;
  }

  get budget() {
    return new Budget(this.#handle, lib.engine_budget(this.#handle.pointer));
  }

  createQueue(capacity) {
    const pointer = [null];
    check(lib.queue_create(this.#handle.pointer, unsigned('capacity', capacity, 64), pointer));
    return new Queue('queue', pointer[0], lib.queue_free);
  }

  async tokenize(text, { addSpecial = false } = {}) {
    const bytes = utf8('text', text);
    return this.#handle.during(async (engine) => {
      const tokens = [null];
      check(await onPool(lib.engine_tokenize, engine, bytes, lengthOf(bytes), flag(0, TEXT_ADD_SPECIAL, addSpecial), tokens));
      const ids = numbers(lib.tokens_data(tokens[0]), u32, lib.tokens_len(tokens[0]));
      lib.tokens_free(tokens[0]);
      return ids;
    });
  }

  async detokenize(tokens, { skipSpecial = false } = {}) {
    const ids = tokenIds('tokens', tokens);
    return this.#textOf(lib.engine_detokenize, ids, lengthOf(ids), flag(0, TEXT_SKIP_SPECIAL, skipSpecial));
  }

  async renderChat(messages) {
    const json = utf8('messages', JSON.stringify(messages));
    return this.#textOf(lib.engine_render_chat, json, lengthOf(json));
  }

  #textOf(call, ...args) {
    return this.#handle.during(async (engine) => {
      const bytes = [null];
      check(await onPool(call, engine, ...args, bytes));
      return taken(bytes[0]);
    });
  }

  modelInfo() {
    const info = filled(ModelInfo, lib.engine_get_model_info, this.#handle.pointer);
    const { architectureLen, isaLen, eosTokenIdsLen, packedReasonLen, ...rest } = info;
    return {
      ...rest,
      architecture: text(info.architecture, architectureLen),
      isa: text(info.isa, isaLen),
      eosTokenIds: numbers(info.eosTokenIds, u32, eosTokenIdsLen),
      packed: PACKED[info.packed],
      packedReason: text(info.packedReason, packedReasonLen),
    };
  }

  stats() {
    return filled(Stats, lib.engine_get_stats, this.#handle.pointer);
  }

  metrics() {
    const bytes = [null];
    check(lib.engine_get_metrics(this.#handle.pointer, bytes));
    return taken(bytes[0]);
  }
}
if (Symbol.asyncDispose) Engine.prototype[Symbol.asyncDispose] = Engine.prototype.close;

const version = () => lib.version();
const buildInfo = () => JSON.parse(lib.build_info());

module.exports = { Budget, Engine, Queue, PagedllmError, version, buildInfo };
