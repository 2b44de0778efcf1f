'use strict';
// Text generation: one request, waiting, cancellation.
const assert = require('node:assert/strict');
const fs = require('node:fs');
const path = require('node:path');
const { describe, it, beforeEach, afterEach } = require('node:test');
const { setTimeout: sleep } = require('node:timers/promises');
const { Engine, version, buildInfo } = require('../pagedllm.js');
const {
  LONG_CASE, ANSWERS, ENDLESS, EXPECTED, MODEL, SMALL, aborted, collect, descriptors, idle, refused,
  eventually, textOf, threads, withEngine,
} = require('./support.js');

let engine;
beforeEach(async () => { engine = await Engine.open(SMALL); });
afterEach(() => engine.close());

describe('generation', () => {
  it('gives the answers of the training data', async () => {
    for (const { messages, prompt, request, answer, token_ids: tokens } of EXPECTED) {
      assert.equal(await engine.renderChat(messages), prompt);
      const completion = await engine.generate(request);
      assert.deepEqual([completion.text, completion.tokens, completion.finishReason], [answer, tokens, 'stop']);
    }
  });

  it('streams the answer in pieces', async () => {
    const outputs = await collect(engine.stream(LONG_CASE.request));
    assert.equal(textOf(outputs), LONG_CASE.answer);
    assert.deepEqual(outputs.flatMap((output) => output.tokens), LONG_CASE.token_ids);
    assert.ok(outputs.length > 10);
    const last = outputs.pop();
    assert.deepEqual([last.finishReason, last.generatedTokens], ['stop', LONG_CASE.token_ids.length]);
    assert.ok(outputs.every((output) => output.finishReason === null));
  });

  it('reports what ended a sequence', async () => {
    const { request, token_ids: tokens } = LONG_CASE;
    const reasonOf = ({ finishReason, stopReason, stopToken, stopString }) => [finishReason, stopReason, stopToken, stopString];
    for (const [sampling, ...reason] of [
      [{}, 'stop', 'eos', tokens.at(-1), null],
      [{ stopTokenIds: [tokens[7]] }, 'stop', 'token', tokens[7], null],
      [{ stopTokenIds: [0], allowedTokenIds: [0] }, 'stop', 'token', 0, null],
      [{ stop: ['never', 'Hugo'] }, 'stop', 'string', null, 'Hugo'],
      [{ stop: Buffer.from('vill') }, 'stop', 'string', null, 'vill'],
      [{ maxTokens: 5 }, 'length', null, null, null],
    ]) {
      for (const outputKind of ['delta', 'cumulative', 'final']) {
        const outputs = await collect(engine.stream({ ...request, ...sampling, outputKind }));
        assert.deepEqual(reasonOf(outputs.pop()), reason);
        for (const output of outputs) assert.deepEqual(reasonOf(output), [null, null, null, null]);
        assert.deepEqual(reasonOf(await engine.generate({ ...request, ...sampling, outputKind })), reason);
      }
    }
    assert.deepEqual(reasonOf(await engine.generate({ ...request, grammar: { regex: 'ab' } })), ['stop', 'grammar', null, null]);
    const stream = engine.stream(ENDLESS);
    engine.abort((await stream.next()).value.request);
    assert.deepEqual(reasonOf((await collect(stream)).pop()), ['abort', null, null, null]);
  });

  it('accepts a prompt as token ids and as bytes', async () => {
    const promptTokens = await engine.tokenize(LONG_CASE.prompt);
    assert.equal(await engine.detokenize(promptTokens), LONG_CASE.prompt);
    for (const prompt of [{ promptTokenIds: promptTokens }, { promptTokenIds: Uint32Array.from(promptTokens) },
      { prompt: Buffer.from(LONG_CASE.prompt), addSpecial: false }]) {
      const completion = await engine.generate({ ...prompt, temperature: 0 });
      assert.deepEqual([completion.text, completion.promptTokens], [LONG_CASE.answer, promptTokens.length]);
    }
  });

  it('treats a NUL byte as ordinary text', async () => {
    const tokens = await engine.tokenize('a\0b');
    assert.equal(await engine.detokenize(tokens), 'a\0b');
    assert.equal((await engine.generate({ prompt: 'a\0b', addSpecial: false, maxTokens: 1 })).promptTokens, tokens.length);
  });

  it('returns the bytes of each token', async () => {
    for (const { token_ids: tokens, answer } of EXPECTED) {
      const bytes = tokens.slice(0, -1).map((token) => engine.tokenBytes(token));
      assert.ok(bytes.every((bytes) => Buffer.isBuffer(bytes)));
      assert.equal(Buffer.concat(bytes).toString(), answer);
    }
    const eos = engine.tokenBytes(LONG_CASE.token_ids.at(-1)); // a special token
    assert.equal(eos.toString(), '<|end|>');
    eos.fill(0); // a copy
    assert.equal(engine.tokenBytes(LONG_CASE.token_ids.at(-1)).toString(), '<|end|>');
  });

  it('adds and skips special tokens by flags', async () => {
    const promptTokens = async (flags) => (await engine.generate({ prompt: 'Hello', maxTokens: 1, ...flags })).promptTokens;
    assert.equal(await promptTokens({}), await promptTokens({ addSpecial: true }));
    assert.equal(await promptTokens({ addSpecial: false }) + 1, await promptTokens({ addSpecial: true }));
    assert.equal(await engine.detokenize(LONG_CASE.token_ids, { skipSpecial: true }), LONG_CASE.answer);
    assert.notEqual(await engine.detokenize(LONG_CASE.token_ids), LONG_CASE.answer);
  });

  it('applies the basic sampling parameters', async () => {
    const ask = (sampling) => engine.generate({ ...LONG_CASE.request, ...sampling });
    const { answer, token_ids: tokens } = LONG_CASE;
    assert.equal((await ask({ stop: 'village' })).text, answer.slice(0, answer.indexOf('village')));
    assert.equal((await ask({ stop: ['never', 'Hugo'] })).text, answer.slice(0, answer.indexOf('Hugo')));
    assert.deepEqual((await ask({ stopTokenIds: [tokens[7]] })).tokens, tokens.slice(0, tokens.indexOf(tokens[7]) + 1));
    assert.ok((await ask({ minTokens: tokens.length + 1 })).tokens.length > tokens.length);
    const short = await ask({ maxTokens: 5 });
    assert.deepEqual([short.tokens, short.finishReason, short.logprobs], [tokens.slice(0, 5), 'length', null]);
    const { logprobs } = await ask({ maxTokens: 5, logprobs: true });
    assert.equal(logprobs.length, 5);
    assert.ok(logprobs.every((p) => p > -1 && p <= 0), logprobs);
  });

  it('repeats its choices with the same seed, and has defaults', async () => {
    const ask = async (sampling) =>
      (await engine.generate({ prompt: 'Once', maxTokens: 20, ignoreEos: true, ...sampling })).tokens;
    assert.deepEqual(await ask({ seed: 2n ** 64n - 1n }), await ask({ seed: 2n ** 64n - 1n }));
    assert.notDeepEqual(await ask({ seed: 1 }), await ask({ seed: 2 }));
    assert.deepEqual(await ask({ seed: 1 }), await ask({ seed: 1, temperature: 1, topP: 1, minP: 0, topK: 0 }));
    assert.notDeepEqual(await ask({ seed: 1 }), await ask({ seed: 1, temperature: 0 }));
  });

  it('names the request of each output in a shared queue', async () => {
    const queue = engine.createQueue(1000);
    const ids = await Promise.all(EXPECTED.map(({ request }, i) => engine.add({ ...request, queue, userData: i })));
    const texts = new Map(ids.map((id) => [id, '']));
    for (let ended = 0; ended < ids.length; await queue.readable()) {
      for (const output of queue.poll()) {
        assert.equal(ids[output.userData], output.request);
        texts.set(output.request, texts.get(output.request) + output.text);
        if (output.finishReason) ended++;
      }
      if (ended === ids.length) break;
    }
    queue.close();
    assert.deepEqual([...texts.values()], ANSWERS);
  });

  it('adds requests in the order of the calls', async () => {
    const prompts = ['The quick brown fox. '.repeat(40), 'a', 'b', 'c', 'd'];
    const ids = await Promise.all(prompts.map((prompt) => engine.add({ prompt, maxTokens: 1 })));
    assert.deepEqual(ids, [1, 2, 3, 4, 5]);
  });

  it('runs in two engines at the same time', () => withEngine({ kvDtype: 'f32' }, async (other) => {
    const ask = (engine) => Promise.all(EXPECTED.map(async ({ request }) => (await engine.generate(request)).text));
    assert.deepEqual(await Promise.all([ask(engine), ask(other)]), [ANSWERS, ANSWERS]);
    await other.close();
    assert.equal((await engine.generate(LONG_CASE.request)).text, LONG_CASE.answer);
  }));

  it('runs with the steps of the host', () => withEngine({ hostSteps: true }, async (engine) => {
    const request = await engine.add(LONG_CASE.request);
    assert.deepEqual(engine.queue.poll(), []);
    const outputs = [];
    while ((await engine.step()).unfinished) outputs.push(...engine.queue.poll());
    outputs.push(...engine.queue.poll());
    assert.equal(textOf(outputs), LONG_CASE.answer);
    assert.ok(outputs.every((output) => output.request === request));
    const both = await Promise.allSettled([engine.generate(LONG_CASE.request), engine.start()]);
    assert.equal(both[0].value.text, LONG_CASE.answer);
    await refused('BUSY', 'one thread at a time', () => engine.step());
    await refused('BUSY', 'one thread at a time', () => engine.start());
    await engine.stop();
    await engine.stop();
    assert.equal((await engine.step()).sequences, 0);
  }));

  it('agrees with model info, plan and statistics', async () => {
    const info = engine.modelInfo(), plan = await Engine.plan(SMALL), stats = engine.stats();
    assert.deepEqual([info.architecture, info.vocabSize, info.layers, info.threads, info.eosTokenIds],
      ['LlamaForCausalLM', 1024, 4, 1, [5, 1]]);
    assert.deepEqual([plan.kvBytes, plan.blockSize, plan.maxModelLen, plan.kvDtype], [16 << 20, 16, info.maxModelLen, 'bf16']);
    assert.deepEqual([stats.blocksTotal, stats.blocksFree, stats.slotUtilization], [plan.blocks, plan.blocks, 1]);
    assert.equal(buildInfo().version, version());
    await engine.generate({ prompt: 'Hello', maxTokens: 3, ignoreEos: true });
    await eventually(() => engine.stats().finishedLength === 1, 'the request is counted');
    assert.equal(engine.stats().generatedTokens, 3);
  });
});

describe('waiting', () => {
  it('reads two hundred streams without a new thread', () => withEngine({ hostSteps: true }, async (engine) => {
    let maxThreads = 0;
    const stepUntil = async (done) => {
      for (let steps = 0; !done(); steps++) {
        assert.ok(steps < 10_000, 'the requests do not end');
        await engine.step();
        maxThreads = Math.max(maxThreads, threads());
      }
    };
    const first = engine.generate(EXPECTED[0].request).then(() => true);
    await stepUntil(() => engine.stats().finishedStop === 1); // libuv's thread pool has started
    assert.ok(await first);
    const threadsBefore = threads(), descriptorsBefore = descriptors();
    const texts = Promise.all(Array.from({ length: 200 }, async (_, i) => textOf(await collect(engine.stream(EXPECTED[i % EXPECTED.length].request)))));
    await eventually(() => descriptors() >= descriptorsBefore + 200, 'each stream waits on its own descriptor'); // no step runs: no stream can end
    maxThreads = threads();
    await stepUntil(() => engine.stats().finishedStop === 201);
    assert.deepEqual(await texts, Array.from({ length: 200 }, (_, i) => ANSWERS[i % ANSWERS.length]));
    assert.equal(maxThreads, threadsBefore);
    await eventually(() => descriptors() <= descriptorsBefore, 'the current step has released the last queue');
  }));

  it('uses no CPU time and no thread of the pool', () => withEngine({ hostSteps: true }, async (engine) => {
    let left = 50;
    const waiting = Array.from({ length: left }, async () => { // no step runs
      const { finishReason } = await engine.generate({ ...ENDLESS, maxTokens: 1 });
      assert.equal(finishReason, 'length');
      left--;
    });
    await Promise.all(Array.from({ length: 50 }, () => fs.promises.readFile(path.join(MODEL, 'config.json'))));
    const before = process.cpuUsage();
    await sleep(300);
    const { user, system } = process.cpuUsage(before);
    assert.ok(user + system < 100_000, `waiting used ${user + system} microseconds of CPU time`);
    assert.equal(left, 50);
    while (left) await engine.step();
    await Promise.all(waiting);
  }));

  it('of a slow reader delays no other request', async () => {
    const slow = engine.stream(LONG_CASE.request, { capacity: 1 });
    const first = (await slow.next()).value;
    assert.deepEqual(await Promise.all(EXPECTED.map(async ({ request }) => (await engine.generate(request)).text)), ANSWERS);
    await eventually(() => engine.stats().finishedStop === EXPECTED.length, 'the other requests have finished');
    assert.deepEqual([engine.stats().paused, engine.stats().waiting], [1, 1]);
    assert.equal(textOf([first, ...await collect(slow)]), LONG_CASE.answer);
  });
});

describe('cancellation', () => {
  it('aborts the request when the loop ends', async () => {
    for await (const output of engine.stream(ENDLESS)) {
      assert.ok(output.request);
      break;
    }
    await aborted(engine, 1);
  });

  it('aborts the request when its signal aborts, also between reads', async () => {
    const controller = new AbortController();
    const stream = engine.stream(ENDLESS, { signal: controller.signal, capacity: 1 });
    await stream.next();
    controller.abort();
    await aborted(engine, 1);
    await assert.rejects(collect(stream), { name: 'AbortError' });
    await assert.rejects(engine.generate(ENDLESS, { signal: AbortSignal.timeout(20) }), { name: 'TimeoutError' });
    await aborted(engine, 2);
    const reason = new Error('the client has disconnected');
    const disconnected = new AbortController();
    const generating = assert.rejects(engine.generate(ENDLESS, { signal: disconnected.signal }), (error) => error === reason);
    disconnected.abort(reason); // before the request is added
    await generating;
    await idle(engine);
  });

  it('adds no request if the signal is already aborted', async () => {
    const signal = AbortSignal.abort();
    await assert.rejects(engine.generate(ENDLESS, { signal }), { name: 'AbortError' });
    await assert.rejects(collect(engine.stream(ENDLESS, { signal })), { name: 'AbortError' });
    assert.equal(await engine.add({ prompt: 'Hello', maxTokens: 1 }), 1, 'no earlier request has an id');
  });

  it('removes its listeners from the signal', async () => {
    const { signal } = new AbortController();
    let listeners = 0;
    const { addEventListener, removeEventListener } = signal;
    signal.addEventListener = (...args) => { listeners++; addEventListener.apply(signal, args); };
    signal.removeEventListener = (...args) => { listeners--; removeEventListener.apply(signal, args); };
    await engine.generate({ prompt: 'Hello', maxTokens: 1 }, { signal });
    await refused('INVALID_ARGUMENT', '', () => engine.generate({ prompt: '', addSpecial: false }, { signal }));
    assert.equal(listeners, 0);
  });

  it('ends the stream of an aborted request with its finish reason', async () => {
    const stream = engine.stream(ENDLESS);
    const { request } = (await stream.next()).value;
    engine.abort(request);
    assert.equal((await collect(stream)).pop().finishReason, 'abort');
    await aborted(engine, 1);
    await refused('NOT_FOUND', `request ${request} is unknown or has ended`, () => engine.abort(request));
  });

  it('aborts the requests of a closed queue and resolves readable()', async () => {
    const queue = engine.createQueue(2), empty = engine.createQueue(2);
    await engine.add({ ...ENDLESS, queue });
    const waiting = empty.readable();
    empty.close();
    await waiting;
    queue.close();
    queue.close();
    await aborted(engine, 1);
    for (const call of [() => queue.poll(), () => queue.readable(), () => engine.add({ ...ENDLESS, queue })]) {
      await refused('CLOSED', 'the queue is closed', call);
    }
  });
});
