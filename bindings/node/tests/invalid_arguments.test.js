'use strict';
// Invalid arguments of every call.
const assert = require('node:assert/strict');
const { describe, it, beforeEach, afterEach } = require('node:test');
const { Engine } = require('../pagedllm.js');
const { LONG_CASE, ENDLESS, SMALL, collect, idle, refused, withEngine } = require('./support.js');

let engine;
beforeEach(async () => { engine = await Engine.open(SMALL); });
afterEach(() => engine.close());

describe('invalid arguments', () => {
  it('are refused in options with code and reason', async () => {
    for (const [code, message, options] of [
      ['IO', 'does not exist', { modelPath: '/nowhere' }],
      ['INVALID_ARGUMENT', 'model_path is empty', { modelPath: '' }],
      ['INVALID_ARGUMENT', 'UTF-8', { modelPath: Buffer.from('/\xff', 'latin1') }],
      ['UNSUPPORTED', '"tpu"', { device: 'tpu' }],
      ['UNSUPPORTED', 'cuda:99', { device: 'cuda:99' }],
      ['UNSUPPORTED', 'memory_fraction is 0.5', { memoryFraction: 0.5 }],
      ['INVALID_ARGUMENT', 'memory_fraction is 1.5', { device: 'cuda', memoryFraction: 1.5, kvBytes: 0 }],
      ['INVALID_ARGUMENT', 'block_size', { blockSize: 7 }],
      ['CAPACITY', 'kv_bytes', { kvBytes: 1 }],
      ['INVALID_ARGUMENT', 'threads is -1', { threads: -1 }],
      ['INVALID_ARGUMENT', 'threads is 10000', { threads: 10000 }],
      ['INVALID_ARGUMENT', 'cpus is "x"', { cpus: 'x' }],
      ['INVALID_ARGUMENT', 'threads is 4294967297', { threads: 2 ** 32 + 1 }],
      ['INVALID_ARGUMENT', 'kvBytes is 18446744073709551616', { kvBytes: 2n ** 64n }],
      ['INVALID_ARGUMENT', 'kvBytes is NaN', { kvBytes: NaN }],
      ['INVALID_ARGUMENT', 'swap_bytes is 0', { preemption: 'auto' }],
      ['INVALID_ARGUMENT', 'nothing would be swapped', { swapBytes: 1 << 20 }],
      ['INVALID_ARGUMENT', 'swap_path is /tmp', { swapPath: '/tmp' }],
      ['INVALID_ARGUMENT', 'trace_path is empty', { tracePath: '' }],
      ['INVALID_ARGUMENT', 'journal_path is empty', { journalPath: '' }],
      ['INVALID_ARGUMENT', 'ageingMs is -1', { ageingMs: -1 }],
    ]) {
      await refused(code, message, () => Engine.open({ ...SMALL, ...options }));
      await refused(code, message, () => Engine.plan({ ...SMALL, ...options }));
    }
    for (const wrong of [{ treads: 1 }, { modelPath: 7 }, { isa: 'sse' }, { threads: '1' }, { order: 'last' },
      { batching: 1 }, { allocation: 'none' }, { preemption: 'kill' }, { swapPath: 7 }]) {
      await assert.rejects(Engine.open({ ...SMALL, ...wrong }), TypeError);
    }
    for (const options of [{ tracePath: '/nowhere/trace' }, { journalPath: '/nowhere/journal' },
      { swapPath: '/nowhere', swapBytes: 1 << 20, preemption: 'swap' }]) {
      await refused('IO', '/nowhere', () => Engine.open({ ...SMALL, ...options }));
    }
  });

  it('are refused in requests with code and reason', async () => {
    const hello = { prompt: 'Hello' };
    for (const [code, message, request, options] of [
      ['INVALID_ARGUMENT', 'the prompt is empty', { prompt: '', addSpecial: false }],
      ['INVALID_ARGUMENT', 'the prompt is empty', { promptTokenIds: [] }],
      ['INVALID_ARGUMENT', 'set one of them', {}],
      ['INVALID_ARGUMENT', '', { prompt: 'Hello', promptTokenIds: [70] }],
      ['INVALID_ARGUMENT', '5000 tokens', { promptTokenIds: new Uint32Array(5000).fill(70) }],
      ['INVALID_ARGUMENT', 'not UTF-8: byte 2', { prompt: Buffer.from('ab\xff', 'latin1') }],
      ['INVALID_ARGUMENT', '70000, beyond the vocabulary of 1024', { promptTokenIds: [70000] }],
      ['INVALID_ARGUMENT', 'a token id of promptTokenIds is 4294967296;', { promptTokenIds: [2 ** 32] }],
      ['INVALID_ARGUMENT', 'a token id of promptTokenIds is -1;', { promptTokenIds: [-1] }],
      ['INVALID_ARGUMENT', 'a token id of promptTokenIds is 1.5;', { promptTokenIds: [1.5] }],
      ['INVALID_ARGUMENT', 'temperature is NaN', { ...hello, temperature: NaN }],
      ['INVALID_ARGUMENT', 'temperature', { ...hello, temperature: 1e300 }],
      ['INVALID_ARGUMENT', 'top_p', { ...hello, topP: -0.5 }],
      ['INVALID_ARGUMENT', 'maxTokens is 4294967296', { ...hello, maxTokens: 2 ** 32 }],
      ['INVALID_ARGUMENT', 'topK is -1', { ...hello, topK: -1 }],
      ['INVALID_ARGUMENT', 'seed is -1', { ...hello, seed: -1 }],
      ['INVALID_ARGUMENT', '1024', { ...hello, stopTokenIds: [1024] }],
      ['INVALID_ARGUMENT', 'stop', { ...hello, stop: [Buffer.from('\xff', 'latin1')] }],
      ['INVALID_ARGUMENT', 'stop', { ...hello, stop: '' }],
      ['INVALID_ARGUMENT', 'stop is too large (16385 bytes in all, at most 16384)', { ...hello, stop: ['x'.repeat(16385)] }],
      ['INVALID_ARGUMENT', 'n is 0', { ...hello, n: 0 }],
      ['INVALID_ARGUMENT', 'n is 4294967297', { ...hello, n: 2 ** 32 + 1 }],
      ['INVALID_ARGUMENT', 'n is -1', { ...hello, n: -1 }],
      ['INVALID_ARGUMENT', 'max_seqs is 64', { ...hello, n: 2 ** 32 - 1 }],
      ['INVALID_ARGUMENT', 'best_of is 1 and n is 2', { ...hello, n: 2, bestOf: 1 }],
      ['INVALID_ARGUMENT', 'width of pllm_beam is 1', { ...hello, beam: { width: 1 } }],
      ['INVALID_ARGUMENT', 'groups of pllm_beam is 3', { ...hello, beam: { width: 4, groups: 3 } }],
      ['INVALID_ARGUMENT', 'length_penalty is NaN', { ...hello, beam: { lengthPenalty: NaN } }],
      ['INVALID_ARGUMENT', 'temperature', { ...hello, beam: {}, temperature: 0.5 }],
      ['INVALID_ARGUMENT', 'truncatePromptTokens is -1', { ...hello, truncatePromptTokens: -1 }],
      ['INVALID_ARGUMENT', 'typical_p', { ...hello, typicalP: 0 }],
      ['INVALID_ARGUMENT', 'mirostat', { ...hello, mirostatTau: -1 }],
      ['INVALID_ARGUMENT', 'repetition_penalty', { ...hello, repetitionPenalty: 0 }],
      ['INVALID_ARGUMENT', 'topLogprobs is -1', { ...hello, topLogprobs: -1 }],
      ['INVALID_ARGUMENT', 'flags has no', { ...hello, logprobs: false, topLogprobs: 2 }],
      ['INVALID_ARGUMENT', '1024', { ...hello, logitBias: { 1024: 1 } }],
      ['INVALID_ARGUMENT', 'a token id of logitBias is -1;', { ...hello, logitBias: { '-1': 1 } }],
      ['INVALID_ARGUMENT', 'a token id of logitBias is NaN;', { ...hello, logitBias: { x: 1 } }],
      ['INVALID_ARGUMENT', 'a bad word', { ...hello, badWords: ['good', Buffer.from([255])] }],
      ['INVALID_ARGUMENT', 'an entry of bad_words_ids is empty', { ...hello, badWordsIds: [[]] }],
      ['INVALID_ARGUMENT', '1024', { ...hello, badWordsIds: [[1], [2, 1024]] }],
      ['INVALID_ARGUMENT', '1024', { ...hello, allowedTokenIds: [1024] }],
      ['INVALID_ARGUMENT', 'dry', { ...hello, dry: { base: 0.5 } }],
      ['INVALID_ARGUMENT', 'sequence breaker', { ...hello, dry: { sequenceBreakers: [''] } }],
      ['INVALID_ARGUMENT', 'not valid JSON', { ...hello, grammar: { jsonSchema: '{' } }],
      ['INVALID_ARGUMENT', 'nonsense', { ...hello, grammar: { jsonSchema: { type: 'nonsense' } } }],
      ['INVALID_ARGUMENT', 'regular expression', { ...hello, grammar: { regex: '(' } }],
      ['INVALID_ARGUMENT', 'choices is empty', { ...hello, grammar: { choice: [] } }],
      ['INVALID_ARGUMENT', 'nope', { ...hello, grammar: { lark: 'start: nope' } }],
      ['INVALID_ARGUMENT', 'userData', { ...hello, userData: 2n ** 64n }],
      ['INVALID_ARGUMENT', 'capacity is 0', hello, { capacity: 0 }],
      ['INVALID_ARGUMENT', 'capacity is -1', hello, { capacity: -1 }],
      ['INVALID_ARGUMENT', 'deadlineMs is 0', { ...hello, deadlineMs: 0 }],
      ['INVALID_ARGUMENT', 'deadlineMs is -0.5', { ...hello, deadlineMs: -0.5 }],
      ['INVALID_ARGUMENT', 'deadlineMs is NaN', { ...hello, deadlineMs: NaN }],
      ['INVALID_ARGUMENT', 'deadlineMs is Infinity', { ...hello, deadlineMs: Infinity }],
      ['INVALID_ARGUMENT', 'deadlineMs is 1e+300;', { ...hello, deadlineMs: 1e300 }],
      ['INVALID_ARGUMENT', 'priority is 101', { ...hello, priority: 101 }],
      ['INVALID_ARGUMENT', 'priority is -101', { ...hello, priority: -101 }],
      ['INVALID_ARGUMENT', 'priority is 2147483648', { ...hello, priority: 2 ** 31 }],
    ]) {
      await refused(code, message, () => collect(engine.stream(request, options)));
    }
    for (const wrong of [{ prompt: 7 }, { promptTokenIds: 'Hello' }, { ...hello, maxToken: 1 }, { ...hello, maxTokens: '1' },
      { ...hello, deadlineMs: '1' }, { ...hello, priority: 'high' },
      { ...hello, outputKind: 'all' }, { ...hello, grammar: {} }, { ...hello, grammar: { regexp: 'a' } },
      { ...hello, grammar: { regex: 'a', lark: 'b' } }, { ...hello, grammar: { regex: 7 } }, { ...hello, beam: { widht: 2 } },
      { ...hello, beam: { earlyStopping: 'maybe' } }, { ...hello, dry: { bass: 2 } }, { ...hello, badWordsIds: 'Hello' },
      { ...hello, logitBias: { 1: 'x' } }]) {
      await assert.rejects(engine.generate(wrong), TypeError);
    }
    for (const grammar of [{}, { regexp: 'a' }, { regex: 'a', lark: 'b' }, { none: 'a' }]) {
      await assert.rejects(engine.generate({ ...hello, grammar }), {
        name: 'TypeError',
        message: /^grammar is \{.*; it must have exactly one of the properties jsonSchema, jsonObject, regex, choice, lark$/,
      });
    }
    await withEngine({}, (other) =>
      refused('INVALID_ARGUMENT', 'queue', () => engine.add({ ...hello, queue: other.createQueue(1) })));
    await idle(engine);
    assert.equal((await engine.generate(LONG_CASE.request)).text, LONG_CASE.answer);
  });

  it('have both numbers in the error if a prompt is too long', async () => {
    const { maxModelLen } = engine.modelInfo();
    const long = { promptTokenIds: new Uint32Array(5000).fill(70) };
    const calls = [() => engine.add(long), () => engine.generate(long), () => engine.predictAdmission(long), () => engine.pin(long)];
    for (const call of calls) {
      await assert.rejects(call, { name: 'PagedllmError', code: 'PLLM_E_INVALID_ARGUMENT', promptTokens: 5000, maxModelLen });
    }
    for (const call of [() => engine.add({ promptTokenIds: [] }), () => engine.detokenize([1024]), async () => engine.abort(-1)]) {
      await assert.rejects(call, { name: 'PagedllmError', promptTokens: null, maxModelLen: null, isTemporary: false });
    }
  });

  it('are refused in sequence calls with code and reason', async () => {
    const calls = [(id) => engine.fork(id), (id) => engine.append(id, [1]), (id) => engine.rewind(id, 1), (id) => engine.resume(id),
      (id) => engine.free(id), (id) => engine.sequenceInfo(id), (id) => engine.unpin(id),
      (id) => engine.resume(id, { continueGeneration: true }), (id) => engine.exportSequence(id)];
    const ended = (await engine.generate({ prompt: 'Hello', maxTokens: 1 })).sequence;
    for (const call of calls) {
      for (const unknown of [0, ended, 4711, 2n ** 64n - 1n]) await refused('NOT_FOUND', String(unknown), () => call(unknown));
      await refused('INVALID_ARGUMENT', 'is -1', () => call(-1));
      await assert.rejects(async () => call('1'), TypeError);
    }
    const { request, sequence } = await engine.generate({ prompt: 'Hello', maxTokens: 3, ignoreEos: true, keep: true });
    assert.deepEqual(engine.sequenceInfo(sequence), { request, length: 5, index: 0, idle: true, inexact: false });
    const { queue } = engine;
    for (const [code, message, call] of [
      ['INVALID_ARGUMENT', 'n is 0', () => engine.fork(sequence, { n: 0 })],
      ['INVALID_ARGUMENT', 'n is -1', () => engine.fork(sequence, { n: -1 })],
      ['CAPACITY', 'too many children (4294967295', () => engine.fork(sequence, { n: 2 ** 32 - 1 })],
      ['INVALID_ARGUMENT', 'n is 4294967296', () => engine.fork(sequence, { n: 2 ** 32 })],
      ['INVALID_ARGUMENT', 'at is -1', () => engine.fork(sequence, { at: -1, queue })],
      ['INVALID_ARGUMENT', 'cannot be forked at 0', () => engine.fork(sequence, { at: 0, queue })],
      ['INVALID_ARGUMENT', 'cannot be forked at 6', () => engine.fork(sequence, { at: 6, queue })],
      ['INVALID_ARGUMENT', 'queue has been freed', () => engine.fork(sequence)],
      ['INVALID_ARGUMENT', 'queue has been freed', () => engine.resume(sequence)],
      ['INVALID_ARGUMENT', 'queue has been freed', () => engine.resume(sequence, { continueGeneration: true })],
      ['INVALID_ARGUMENT', '1024', () => engine.append(sequence, [1024])],
      ['INVALID_ARGUMENT', '2000 more do not fit', () => engine.append(sequence, new Uint32Array(2000))],
      ['INVALID_ARGUMENT', 'rewound to 0 tokens', () => engine.rewind(sequence, 0)],
      ['INVALID_ARGUMENT', 'rewound to 6 tokens', () => engine.rewind(sequence, 6)],
      ['INVALID_ARGUMENT', 'length is -1', () => engine.rewind(sequence, -1)],
      ['INVALID_ARGUMENT', 'regular expression', () => engine.generateResumed(sequence, { grammar: { regex: '(' } })],
      ['INVALID_ARGUMENT', 'echo', () => engine.generateResumed(sequence, { echo: true })],
      ['INVALID_ARGUMENT', 'empty', () => engine.pin({ promptTokenIds: [] })],
      ['INVALID_ARGUMENT', 'set one of them', () => engine.pin({})],
      ['INVALID_ARGUMENT', '9999', () => engine.pin({ promptTokenIds: [9999] })],
      ['INVALID_ARGUMENT', 'timeToLiveMs is -1', () => engine.pin({ prompt: 'x', timeToLiveMs: -1 })],
    ]) {
      await refused(code, message, call);
    }
    const stream = engine.stream({ ...ENDLESS, keep: true });
    const running = (await stream.next()).value.sequence;
    await refused('INVALID_ARGUMENT', 'runs already', () => engine.generateResumed(running));
    for (const one of [sequence, running]) {
      engine.free(one);
      await refused('NOT_FOUND', String(one), () => engine.free(one));
    }
    assert.equal((await collect(stream)).pop().finishReason, 'abort');
    await idle(engine);
    assert.equal((await engine.generate(LONG_CASE.request)).text, LONG_CASE.answer);
  });

  it('are refused by the other calls', async () => {
    await refused('NOT_FOUND', '4711', () => engine.abort(4711));
    await refused('INVALID_ARGUMENT', 'request is -1', () => engine.abort(-1));
    await refused('INVALID_ARGUMENT', '1024', () => engine.detokenize([1024]));
    await refused('INVALID_ARGUMENT', 'UTF-8', () => engine.tokenize(Buffer.from([255])));
    await refused('INVALID_ARGUMENT', '', () => engine.renderChat(7));
    await assert.rejects(engine.renderChat(undefined), TypeError);
    assert.equal(await engine.detokenize([]), '');
    assert.deepEqual(await engine.tokenize(''), []);
    await refused('INVALID_ARGUMENT', 'token 1024 is beyond the vocabulary of 1024 tokens', () => engine.tokenBytes(1024));
    await refused('INVALID_ARGUMENT', 'token 4294967295 is beyond', () => engine.tokenBytes(2 ** 32 - 1));
    for (const token of [-1, 1.5, NaN, 2 ** 32]) await refused('INVALID_ARGUMENT', `token is ${token};`, () => engine.tokenBytes(token));
    for (const token of ['1', undefined]) assert.throws(() => engine.tokenBytes(token), TypeError);
    await withEngine({ skipTokenizer: true }, async (engine) => {
      await refused('UNSUPPORTED', '', () => engine.tokenize('Hello'));
      await refused('UNSUPPORTED', '', () => engine.tokenBytes(70));
    });
  });

  it('are refused by parsers of responses', async () => {
    await refused('INVALID_ARGUMENT', 'the known ones are', () => engine.responseParser({ format: 'x' }));
    const parser = engine.responseParser({ format: 'hermes', prompt: '<think>', toolCallIdPrefix: 'a' });
    const text = 'Hm.</think>Yes <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>';
    const deltas = [...text].flatMap((character) => parser.feed(character)).concat(parser.finish());
    const joined = (pick) => deltas.map(pick).filter((part) => part !== undefined).join('');
    assert.equal(joined((delta) => delta.reasoning_content), 'Hm.');
    assert.equal(joined((delta) => delta.content), 'Yes');
    assert.equal(joined((delta) => delta.tool_calls?.[0].id), 'a0');
    assert.equal(joined((delta) => delta.tool_calls?.[0].function.arguments), '{"x": 1}');
    await refused('INVALID_ARGUMENT', 'has ended', () => parser.feed('x'));
    assert.throws(() => parser.feed(7), TypeError);
    parser.close();
    await refused('CLOSED', 'closed', () => parser.feed('x'));
  });
});
