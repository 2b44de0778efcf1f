'use strict';
// Kept sequences, forks, export and import, the prefix cache.
const assert = require('node:assert/strict');
const { describe, it, beforeEach, afterEach } = require('node:test');
const { setTimeout: sleep } = require('node:timers/promises');
const { Engine } = require('../pagedllm.js');
const {
  LONG_CASE, SMALL, collect, idle, refused, eventually, textOf, withEngine,
} = require('./support.js');

let engine;
beforeEach(async () => { engine = await Engine.open(SMALL); });
afterEach(() => engine.close());

describe('sequences', () => {
  const DRAWN = { ...LONG_CASE.request, temperature: 1.5, seed: 7, maxTokens: 12, ignoreEos: true };
  // The host steps, so that each test knows the length.
  let engine;
  beforeEach(async () => { engine = await Engine.open({ ...SMALL, hostSteps: true }); });
  afterEach(() => engine.close());

  // Adds a request and runs `steps` steps. Returns the sequence and its tokens.
  async function begin(steps, request = LONG_CASE.request) {
    const sequence = await engine.add(request);
    for (let i = 0; i < steps; i++) await engine.step();
    return [sequence, engine.queue.poll().flatMap((output) => output.tokens)];
  }

  // Steps until every sequence has finished. Returns their tokens.
  async function finish() {
    while ((await engine.step()).unfinished);
    const tokens = {};
    for (const output of engine.queue.poll()) {
      assert.equal(output.error, null);
      (tokens[output.sequence] ??= []).push(...output.tokens);
    }
    return tokens;
  }

  it('continue in forks with the same tokens, also from an earlier position', async () => {
    const [parent, prefix] = await begin(9);
    const { length } = engine.sequenceInfo(parent);
    const [one, other] = engine.fork(parent, { n: 2, userData: 4 });
    const [earlier] = engine.fork(parent, { at: length - 4 });
    assert.deepEqual(engine.sequenceInfo(other), { request: other, length, index: 0, idle: false, inexact: false });
    const { promptTokens } = engine.stats();
    const tokens = await finish();
    assert.equal(engine.stats().promptTokens, promptTokens);
    for (const sequence of [parent, one, other]) assert.deepEqual([...prefix, ...tokens[sequence]], LONG_CASE.token_ids);
    assert.deepEqual([...prefix.slice(0, 5), ...tokens[earlier]], LONG_CASE.token_ids);
  });

  it('sample in forks with the same choices, unless a seed is given', async () => {
    const [parent] = await begin(3, DRAWN);
    const forks = [{}, { seed: 1, n: 2 }, { seed: 1 }, { seed: 2n ** 64n - 1n }].map((how) => engine.fork(parent, how));
    const tokens = await finish();
    const [[same], [one, other], [again], [third]] = forks.map((ids) => ids.map((id) => tokens[id]));
    assert.deepEqual(same, tokens[parent]);
    assert.deepEqual(again, one);
    assert.equal(new Set([same, one, other, third].map(String)).size, 4);
  });

  it('stay idle until resumed, and compute only appended tokens', async () => {
    const [kept, prefix] = await begin(70, { ...LONG_CASE.request, keep: true });
    assert.deepEqual(prefix, LONG_CASE.token_ids);
    const queue = engine.createQueue(100);
    const [child] = engine.fork(kept, { idle: true, queue });
    const question = await engine.tokenize('\n<|user|>\nWhat is 7 + 5?<|end|>\n<|assistant|>\n');
    engine.append(kept, question);
    const { promptTokens } = engine.stats();
    await engine.resume(kept, { temperature: 0, maxTokens: 30, userData: 5 });
    const tokens = (await finish())[kept];
    assert.equal(engine.stats().promptTokens - promptTokens, question.length + 1); // and the last sampled token
    const whole = [...await engine.tokenize(LONG_CASE.prompt), ...prefix, ...question];
    const alone = await engine.add({ promptTokenIds: whole, temperature: 0, maxTokens: 30 });
    assert.deepEqual((await finish())[alone], tokens);
    assert.deepEqual([engine.stats().idle, queue.poll()], [2, []]);
    engine.free(kept);
    engine.free(child);
    await engine.step();
    assert.deepEqual([engine.stats().idle, engine.stats().blocksUsed], [0, 0]);
  });

  it('generate the same tokens after a rewind', async () => {
    const [running, prefix] = await begin(8, { ...DRAWN, keep: true });
    engine.rewind(running, engine.sequenceInfo(running).length - 5);
    const tokens = (await finish())[running];
    assert.deepEqual(tokens.slice(0, 5), prefix.slice(3));
    const prompt = (await engine.tokenize(LONG_CASE.prompt)).length;
    engine.rewind(running, prompt);
    const { prompt: _prompt, addSpecial: _addSpecial, ...sampling } = DRAWN;
    await engine.resume(running, { ...sampling, keep: false });
    assert.deepEqual((await finish())[running], [...prefix.slice(0, 3), ...tokens]);
    await refused('NOT_FOUND', 'not kept', () => engine.sequenceInfo(running));
  });

  it('can be resumed as streams', async () => {
    engine.start();
    const prefix = await engine.generate({ ...LONG_CASE.request, maxTokens: 5, keep: true });
    const forks = engine.fork(prefix.sequence, { n: 3, queue: engine.queue });
    const more = await collect(engine.streamResumed(prefix.sequence, { temperature: 0, maxTokens: 5 }, { capacity: 1 }));
    assert.deepEqual(more.flatMap((output) => output.tokens), LONG_CASE.token_ids.slice(5, 10));
    const rest = await engine.generateResumed(prefix.sequence, { temperature: 0, keep: false });
    assert.deepEqual(rest.tokens, LONG_CASE.token_ids.slice(10));
    const all = await Promise.all(forks.map((fork) => engine.generateResumed(fork, { temperature: 0, keep: false })));
    for (const { tokens } of all) assert.deepEqual(tokens, LONG_CASE.token_ids.slice(5));
    await assert.rejects(engine.generateResumed(prefix.sequence, {}, { signal: AbortSignal.abort() }), { name: 'AbortError' });
  });
});

describe('export and import', () => {
  const DRAWN = { ...LONG_CASE.request, temperature: 1.2, seed: 7, maxTokens: 200, ignoreEos: true };
  let other, whole;
  beforeEach(async () => {
    other = await Engine.open(SMALL);
    whole = await other.generate(DRAWN);
  });
  afterEach(() => other.close());

  // Reads five outputs. Returns the stream, its sequence and the outputs.
  async function begin(request = DRAWN) {
    const stream = engine.stream(request, { capacity: 1 }), prefix = [];
    while (prefix.length < 5) prefix.push((await stream.next()).value);
    return [stream, prefix[0].sequence, prefix];
  }

  // Imports a state into the other engine and streams its continuation.
  async function* moved(state, options) {
    yield* other.streamResumed(await other.importSequence(state), { continueGeneration: true, keep: false }, options);
  }

  // The outputs are a suffix of the answer of an uninterrupted request.
  function assertIsSuffix(outputs) {
    const tokens = outputs.flatMap((output) => output.tokens);
    assert.ok(tokens.length > 0);
    assert.deepEqual(tokens, whole.tokens.slice(-tokens.length));
    assert.ok(whole.text.endsWith(textOf(outputs)));
    const { finishReason, generatedTokens } = outputs.at(-1);
    assert.deepEqual([finishReason, generatedTokens], ['length', whole.tokens.length]);
  }

  it('continues a sequence in another engine with the same tokens', async () => {
    const [stream, sequence] = await begin();
    const state = await engine.exportSequence(sequence);
    await stream.return();
    await idle(engine);
    for (const copy of [state, Buffer.from(state)]) {
      const moving = moved(copy, { capacity: 1 });
      const first = (await moving.next()).value;
      copy.fill(0); // importSequence has copied it
      assertIsSuffix([first, ...await collect(moving)]);
    }
    await eventually(() => other.stats().idle === 0, 'no imported sequence is left');
  });

  it('does not change the outputs of the exported stream', async () => {
    const [stream, sequence, prefix] = await begin();
    const states = await Promise.all([1, 2, 3].map(() => engine.exportSequence(sequence)));
    const outputs = [...prefix, ...await collect(stream)];
    assert.deepEqual(outputs.flatMap((output) => output.tokens), whole.tokens);
    assert.equal(textOf(outputs), whole.text);
    for (const outputs of await Promise.all(states.map((state) => collect(moved(state))))) assertIsSuffix(outputs);
    await idle(engine);
    const { finishedAbort, finishedError } = engine.stats();
    assert.deepEqual([finishedAbort, finishedError], [0, 0]);
  });

  it('accepts an idle sequence', async () => {
    const kept = await engine.generate({ ...LONG_CASE.request, maxTokens: 9, keep: true });
    const state = await engine.exportSequence(kept.sequence);
    assert.deepEqual(await engine.exportSequence(kept.sequence), state);
    const copy = await other.importSequence(state);
    assert.deepEqual(other.sequenceInfo(copy),
      { request: copy, length: kept.promptTokens + 9, index: 0, idle: true, inexact: false });
    const { promptTokens } = other.stats();
    const rest = await other.generateResumed(copy, { temperature: 0, keep: false });
    assert.deepEqual([...kept.tokens, ...rest.tokens], LONG_CASE.token_ids);
    assert.equal(other.stats().promptTokens - promptTokens, 1); // the last sampled token
    await refused('INVALID_ARGUMENT', 'rewind', () => collect(moved(state))); // at maxTokens
  });

  it('keeps a continued sequence unless keep is false', async () => {
    const [, sequence] = await begin();
    const state = await engine.exportSequence(sequence);
    const kept = await other.importSequence(state), freed = await other.importSequence(state);
    assertIsSuffix(await collect(other.streamResumed(kept, { continueGeneration: true })));
    assertIsSuffix(await collect(other.streamResumed(freed, { continueGeneration: true, keep: false })));
    assert.equal(other.sequenceInfo(kept).idle, true);
    await eventually(() => other.stats().idle === 1, 'the other sequence is freed');
    await assert.rejects(collect(moved(state, { signal: AbortSignal.abort() })), { name: 'AbortError' });
  });

  it('continues an idle fork as if it had never been idle', async () => {
    const [, sequence] = await begin({ ...DRAWN, userData: 3 });
    const { queue } = engine;
    for (const [how, userData] of [[{}, 3], [{ userData: 4 }, 4]]) {
      const [fork] = engine.fork(sequence, { idle: true, queue });
      const outputs = await collect(engine.streamResumed(fork, { continueGeneration: true, keep: false, ...how }));
      assertIsSuffix(outputs);
      assert.ok(outputs.every((output) => output.userData === userData));
    }
    assert.deepEqual(queue.poll(), []);
  });

  it('continues into the given queue or its own', async () => {
    const [, sequence] = await begin();
    const state = await engine.exportSequence(sequence);
    const own = other.createQueue(1000), named = other.createQueue(1000);
    for (const [queue, to] of [[undefined, own], [named, named]]) {
      const copy = await other.importSequence(state, { queue: own }), outputs = [];
      await other.resume(copy, { continueGeneration: true, queue });
      await refused('INVALID_ARGUMENT', 'runs already', () => other.resume(copy, { continueGeneration: true }));
      while (!outputs.at(-1)?.finishReason) {
        await to.readable();
        outputs.push(...to.poll());
      }
      assertIsSuffix(outputs);
    }
    own.close();
    named.close();
  });

  it('keeps the sampling of a continued sequence', async () => {
    const [, sequence] = await begin();
    const copy = await other.importSequence(await engine.exportSequence(sequence));
    for (const wrong of [{ temperature: 0 }, { grammar: { regex: 'a' } }, { skipSpecial: true }, { maxTokn: 1 }]) {
      await assert.rejects(
        other.resume(copy, { continueGeneration: true, ...wrong }),
        { name: 'TypeError', message: /pass only queue, userData, keep and deadlineMs$/ },
      );
    }
    await assert.rejects(
      other.generateResumed(copy, { continueGeneration: true }),
      { name: 'TypeError', message: 'continueGeneration needs streamResumed()' },
    );
    assertIsSuffix(await collect(other.streamResumed(copy, { continueGeneration: true, temperature: undefined })));
  });

  it('marks sequences of another instruction path as inexact', async () => {
    const [, sequence] = await begin();
    const state = await engine.exportSequence(sequence);
    await withEngine({ isa: 'portable' }, async (portable) => {
      const copy = await portable.importSequence(state);
      assert.equal(portable.sequenceInfo(copy).inexact, portable.modelInfo().isa !== engine.modelInfo().isa);
      assert.equal((await portable.generateResumed(copy, { maxTokens: 3, ignoreEos: true })).finishReason, 'length');
    });
  });

  it('happens in the next step of the host', () => withEngine({ hostSteps: true }, async (engine) => {
    const sequence = await engine.add(DRAWN); // before its first step
    for (let i = 0; i < 2; i++) {
      const exported = engine.exportSequence(sequence);
      await engine.step();
      assertIsSuffix(await collect(moved(await exported)));
    }
    engine.abort(sequence);
    const message = `sequence ${sequence} ended before the export`;
    const lost = refused('NOT_FOUND', message, () => engine.exportSequence(sequence));
    await engine.step();
    await lost;
    const next = await engine.add(DRAWN);
    const waiting = refused('CLOSED', '', () => engine.exportSequence(next));
    await engine.close();
    await waiting;
  }));

  it('refuses damaged states, and the engine continues', async () => {
    const [, sequence] = await begin();
    const state = Buffer.from(await engine.exportSequence(sequence));
    const flipped = (at) => { const copy = Buffer.from(state); copy[at] ^= 1; return copy; };
    const damaged = [Buffer.alloc(0), Buffer.alloc(1), state.subarray(0, -1), state.subarray(0, state.length / 2), state.subarray(1),
      Buffer.concat([state, Buffer.alloc(1)]), Buffer.alloc(state.length),
      ...[0, 12, 20, 100, state.length >> 1, state.length - 1].map(flipped)];
    for (const bad of damaged) {
      const message = `not an exported sequence (${bad.length} bytes)`;
      await refused('INVALID_ARGUMENT', message, () => other.importSequence(bad));
    }
    const newer = Buffer.from(state);
    newer[8] = 9;
    await refused('UNSUPPORTED', 'format 9', () => other.importSequence(newer));
    for (const wrong of [undefined, null, 7, 'state', [1, 2], new Uint16Array(2)]) {
      await assert.rejects(other.importSequence(wrong), TypeError);
    }
    for (const [options, message] of [[{ blockSize: 32 }, 'block_size'], [{ kvDtype: 'f32' }, 'kv_dtype'],
      [{ maxModelLen: 64 }, 'max_model_len is 64']]) {
      await withEngine(options, (different) => refused('INVALID_ARGUMENT', message, () => different.importSequence(state)));
    }
    await refused('INVALID_ARGUMENT', 'another engine', () => other.importSequence(state, { queue: engine.queue }));
    assert.equal(other.stats().idle, 0);
    assertIsSuffix(await collect(moved(state)));
  });

  it('includes the log probabilities of the prompt', async () => {
    for (const outputKind of ['delta', 'cumulative', 'final']) {
      const request = { ...DRAWN, maxTokens: 9, promptTopLogprobs: 1, outputKind };
      const whole = await other.generate(request);
      assert.equal(whole.promptLogprobs.length, whole.promptTokens - 1);
      for (const steps of [0, 2, 5]) {
        await withEngine({ hostSteps: true, prefillChunk: 8 }, async (engine) => {
          const sequence = await engine.add(request);
          for (let i = 0; i < steps; i++) await engine.step();
          const before = engine.queue.poll(), exported = engine.exportSequence(sequence);
          await engine.step();
          const after = await collect(moved(await exported));
          const outputs = outputKind === 'delta' ? [...before, ...after] : after.slice(-1);
          for (const name of ['tokens', 'promptLogprobs', 'promptTopLogprobs']) {
            assert.deepEqual(outputs.flatMap((output) => output[name] ?? []), whole[name]);
          }
        });
      }
    }
  });
});

describe('the prefix cache', () => {
  const request = { prompt: 'The quick brown fox jumps over the lazy dog. '.repeat(8), temperature: 0, maxTokens: 1 };
  async function cost(more, of = engine) {
    const before = of.stats();
    await of.generate({ ...request, ...more });
    const after = of.stats();
    return [after.promptTokens - before.promptTokens, after.prefixHits - before.prefixHits];
  }

  it('serves requests with the same salt', async () => {
    const { length } = await engine.tokenize(request.prompt, { addSpecial: true });
    assert.deepEqual(await cost(), [length, 0]);
    const [computed, found] = await cost();
    assert.ok(computed + found === length && found > length - 17);
    for (const cacheSalt of ['one', Buffer.from('other\0')]) {
      assert.deepEqual([await cost({ cacheSalt }), await cost({ cacheSalt })], [[length, 0], [computed, found]]);
    }
    await withEngine({ prefixCache: false }, async (without) => {
      assert.deepEqual([await cost({}, without), await cost({}, without)], [[length, 0], [length, 0]]);
      await refused('UNSUPPORTED', 'prefix cache', () => without.pin({ prompt: 'Hello' }));
    });
  });

  it('keeps pinned blocks until they are unpinned or expire', async () => {
    const pin = await engine.pin({ prompt: request.prompt, priority: 1, cacheSalt: 'mine' });
    await eventually(() => engine.stats().blocksUsed > 5, 'the prompt is computed');
    assert.ok((await cost({ cacheSalt: 'mine' }))[1] > 100);
    assert.equal((await cost({ cacheSalt: 'not mine' }))[1], 0);
    engine.unpin(pin);
    await refused('NOT_FOUND', 'pin', () => engine.unpin(pin));
    await idle(engine);
    const short = await engine.pin({ prompt: request.prompt, timeToLiveMs: 20 });
    await sleep(30);
    await engine.generate({ prompt: 'Hello', maxTokens: 1 });
    await refused('NOT_FOUND', 'expired', () => engine.unpin(short));
    await idle(engine);
  });
});
