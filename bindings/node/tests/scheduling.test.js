'use strict';
// Scheduling options, admission, memory budgets, telemetry.
const assert = require('node:assert/strict');
const fs = require('node:fs');
const os = require('node:os');
const path = require('node:path');
const { describe, it, beforeEach, afterEach } = require('node:test');
const { setTimeout: sleep } = require('node:timers/promises');
const { Budget, Engine } = require('../pagedllm.js');
const {
  LONG_CASE, ANSWERS, ENDLESS, EXPECTED, LAST_RESORT_MS, SMALL, collect, refused, eventually, withEngine,
} = require('./support.js');

let engine;
beforeEach(async () => { engine = await Engine.open(SMALL); });
afterEach(() => engine.close());

describe('workers', () => {
  it('of a list of devices have the tokens of one', async () => {
    for (const division of [{}, { tensorParallel: 2 }, { pipelineParallel: 2 }]) {
      await withEngine({ device: 'cpu,cpu', workerTimeoutMs: LAST_RESORT_MS, ...division }, async (divided) => {
        for (const { request, answer } of EXPECTED.slice(0, 3)) {
          const { tokens, text } = await divided.generate(request);
          assert.deepEqual(tokens, (await engine.generate(request)).tokens);
          assert.equal(text, answer);
        }
      });
    }
    await refused('INVALID_ARGUMENT', 'tensor_parallel', () => Engine.open({ ...SMALL, device: 'cpu,cpu', tensorParallel: 3 }));
  });
});

describe('scheduling', () => {
  // Returns the index of the request in `waiting` that runs first. All wait for the only slot.
  const firstOf = (waiting, options) => withEngine({ hostSteps: true, maxSeqs: 1, ...options }, async (engine) => {
    const running = await engine.add({ ...ENDLESS, priority: 100 });
    const ids = [];
    for (const one of waiting) {
      ids.push(await engine.add({ ...ENDLESS, ...one }));
      await engine.step();
      await sleep(50);
    }
    engine.abort(running);
    for (let i = 0; i < 2; i++) await engine.step();
    return engine.queue.poll().map(({ request }) => ids.indexOf(request)).find((index) => index >= 0);
  });

  it('runs the first request by its order', async () => {
    const urgent = [{}, { priority: 1 }];
    assert.equal(await firstOf(urgent, {}), 0);
    assert.equal(await firstOf(urgent, { order: 'priority' }), 1);
    assert.equal(await firstOf(urgent, { order: 'priority', ageingMs: 1 }), 0);
    const short = [{}, { maxTokens: 5 }];
    assert.equal(await firstOf(short, {}), 0);
    assert.equal(await firstOf(short, { order: 'shortestPredicted' }), 1);
    assert.equal(await firstOf([{ priority: -1 }, {}], { order: 'priority' }), 1);
  });

  it('composes steps by batching', async () => {
    for (const [options, expected] of [[{}, [100, 1]], [{ batching: 'prefillFirst' }, [100, 0]], [{ batching: 'static' }, [0, 1]],
      [{ batching: 'decodeFirst', prefillBudget: 16 }, [16, 1]]]) {
      await withEngine({ hostSteps: true, ...options }, async (engine) => {
        await engine.add(ENDLESS);
        await engine.step();
        await engine.add({ promptTokenIds: new Uint32Array(100).fill(70) });
        const { prefillTokens, decodeTokens } = await engine.step();
        assert.deepEqual([prefillTokens, decodeTokens], expected);
      });
    }
  });

  it('reserves blocks by allocation', async () => {
    for (const [allocation, low, high] of [['onDemand', 0.1, 1], ['maxTokens', 0, 0.02]]) {
      await withEngine({ hostSteps: true, allocation }, async (engine) => {
        await engine.add({ prompt: 'Hello', maxTokens: 200 });
        await engine.step();
        const { slotUtilization } = engine.stats();
        assert.ok(low < slotUtilization && slotUtilization < high, String(slotUtilization));
      });
    }
  });

  it('swaps preempted requests and gives the same answers', async () => {
    const { blockBytes } = await Engine.plan(SMALL);
    const request = { ...LONG_CASE.request, maxTokens: 150, ignoreEos: true };
    const alone = await engine.generate(request);
    for (const swapPath of [undefined, os.tmpdir(), Buffer.from(os.tmpdir())]) {
      const options = { kvBytes: 24 * blockBytes, maxModelLen: 256, preemption: 'swap', swapBytes: 200 * blockBytes, swapPath };
      const plan = await Engine.plan({ ...SMALL, ...options });
      assert.deepEqual([plan.swapBytes, plan.swapBlocks], [200 * blockBytes, 200]);
      await withEngine({ hostSteps: true, ...options }, async (engine) => {
        const pending = Promise.all(Array.from({ length: 8 }, (_, i) => engine.generate({ ...request, cacheSalt: `${i}` })));
        while ((await engine.predictAdmission(ENDLESS)).waitingRequests < 8) await sleep(1);
        engine.start();
        const answers = await pending;
        for (const { tokens, text } of answers) assert.deepEqual([tokens, text], [alone.tokens, alone.text]);
        await eventually(() => engine.stats().finishedLength === 8, 'all requests are counted');
        const stats = engine.stats();
        assert.ok(stats.preemptionsSwapped > 0);
        assert.equal(answers.reduce((sum, { preemptions }) => sum + preemptions, 0), stats.preemptions);
        assert.deepEqual([stats.swapBlocksTotal, stats.swapBlocksUsed, stats.swapped, stats.swapFailures], [200, 0, 0, 0]);
        assert.ok(stats.blocksSwappedOut >= stats.blocksSwappedIn && stats.blocksSwappedIn > 0);
      });
    }
  });

  it('needs about half the bytes for an int8 KV cache', async () => {
    const [int8, bf16] = await Promise.all(['int8', 'bf16'].map((kvDtype) => Engine.plan({ ...SMALL, kvDtype })));
    assert.equal(int8.kvDtype, 'int8');
    assert.ok(int8.blockBytes < 0.6 * bf16.blockBytes);
    await withEngine({ kvDtype: 'int8' }, async (engine) => {
      assert.equal(engine.stats().blocksTotal, int8.blocks);
      assert.ok((await engine.generate(LONG_CASE.request)).text.includes('upon a time'));
    });
  });

  it('needs fewer bytes for quantized weights', async () => {
    const [bf16, int8, int4] = await Promise.all(['bf16', 'int8', 'int4'].map((weightFormat) => Engine.plan({ ...SMALL, weightFormat })));
    assert.ok(int8.weightBytes < 0.55 * bf16.weightBytes && int4.weightBytes < int8.weightBytes);
    for (const options of [{ weightFormat: 'int8' }, { weightFormat: 'int4Asymmetric', weightGroup: 64 }]) {
      await withEngine(options, async (engine) => {
        assert.ok((await engine.generate(LONG_CASE.request)).text.includes('upon a time'));
      });
    }
  });

  it('saves packed weights and reads them back', async () => {
    const packedPath = fs.mkdtempSync(path.join(os.tmpdir(), 'pagedllm-packed-'));
    for (const [packed, packedReason] of [['saved', 'no packed weights yet'], ['read', '']]) {
      await withEngine({ packedPath }, async (engine) => {
        const info = engine.modelInfo();
        assert.deepEqual([info.packed, info.packedReason], [packed, packedReason]);
        assert.ok((await engine.generate(LONG_CASE.request)).text.includes('upon a time'));
      });
    }
    fs.rmSync(packedPath, { recursive: true });
    assert.deepEqual([engine.modelInfo().packed, engine.modelInfo().packedReason], ['unused', '']);
    await assert.rejects(Engine.open({ ...SMALL, packedPath }), { code: 'PLLM_E_IO' });
  });

  it('ends a request at its deadline and keeps its tokens', () => withEngine({ hostSteps: true }, async (engine) => {
    // On a busy machine, the first step may begin after a short deadline.
    let request;
    let outputs = [];
    for (let deadlineMs = 299.5; outputs.length < 2 && deadlineMs < LAST_RESORT_MS; deadlineMs *= 2) {
      request = await engine.add({ ...ENDLESS, deadlineMs, keep: true });
      await engine.step();
      await sleep(deadlineMs + 11);
      assert.equal((await engine.step()).unfinished, 0);
      outputs = engine.queue.poll();
    }
    assert.deepEqual(outputs.map(({ tokens, finishReason }) => [tokens.length, finishReason]), [[1, null], [0, 'deadline']]);
    for (const how of [{ ignoreEos: true }, { continueGeneration: true }]) {
      await engine.resume(request, { ...how, deadlineMs: 50 });
      await sleep(60);
      await engine.step();
      assert.equal(engine.queue.poll().pop().finishReason, 'deadline');
    }
    assert.ok(engine.stats().finishedDeadline >= 3);
  }));
});

describe('admission', () => {
  it('refuses texts longer than maxPromptBytes', () => withEngine({ hostSteps: true, maxPromptBytes: 100 }, async (engine) => {
    const chat = [{ role: 'user', content: 'x'.repeat(100) }];
    for (const call of [() => engine.tokenize('x'.repeat(101)), () => engine.renderChat(chat),
      () => engine.add({ ...ENDLESS, prompt: 'x'.repeat(101) })]) {
      await refused('INVALID_ARGUMENT', 'max_prompt_bytes 100', call);
    }
    await engine.tokenize('x'.repeat(100));
  }));

  it('refuses requests above the waiting limits', async () => {
    for (const [limit, waits] of [[{ maxWaitingRequests: 1 }, 'full (1 requests, 1 more'], [{ maxWaitingTokens: 5 }, 'full (2 tokens, ']]) {
      await withEngine({ hostSteps: true, ...limit }, async (engine) => {
        const other = { promptTokenIds: [70, 70, 70, 70] };
        await engine.add(ENDLESS);
        await refused('CAPACITY', waits, () => engine.add(other));
        await assert.rejects(engine.add(other), { isTemporary: true });
        assert.equal(engine.stats().admissionRejections, 2);
        await engine.step();
        await engine.add(other);
      });
    }
  });

  const narrow = { hostSteps: true, maxSeqs: 1, maxWaitingRequests: 1 };
  it('predicts admission without adding a request', () => withEngine(narrow, async (engine) => {
    assert.deepEqual(await engine.predictAdmission(ENDLESS),
      { admits: true, fitsNow: true, firstTokenMs: null, waitingRequests: 0, waitingTokens: 0 });
    const [, admission] = await Promise.all([engine.add(ENDLESS), engine.predictAdmission({ ...ENDLESS, userData: 1, keep: true })]);
    assert.deepEqual(admission, { admits: false, fitsNow: false, firstTokenMs: null, waitingRequests: 1, waitingTokens: 2 });
    for (let i = 0; i < 3; i++) await engine.step();
    const later = await engine.predictAdmission(LONG_CASE.request);
    assert.deepEqual([later.admits, later.fitsNow], [true, false]);
    assert.ok(later.firstTokenMs > 0);
    assert.deepEqual([engine.stats().waiting, engine.stats().admissionRejections], [0, 0]);
    await refused('INVALID_ARGUMENT', '5000 tokens', () => engine.predictAdmission({ promptTokenIds: new Uint32Array(5000).fill(70) }));
    await assert.rejects(engine.predictAdmission({ prompt: 'Hello', deadLine: 1 }), TypeError);
  }));
});

describe('budgets', () => {
  let budget, block;
  beforeEach(async () => {
    block = (await Engine.plan(SMALL)).blockBytes;
    budget = Budget.create(200 * block, 400 * block);
  });
  afterEach(() => budget.close());
  const withBudget = (budget, use) => withEngine({ kvBytes: undefined, budget }, use);

  it('are shared by engines', async () => {
    const plan = await Engine.plan({ ...SMALL, kvBytes: undefined, budget });
    assert.deepEqual([plan.blocks, plan.maxBlocks, plan.kvBytes], [200, 400, 200 * block]);
    assert.deepEqual(budget.info(), { bytes: 200 * block, minBytes: 0, maxBytes: 400 * block, heldBytes: 0, engines: 0 });
    await withBudget(budget, async (first) => {
      await withBudget(budget, async (second) => {
        const ask = (engine) => Promise.all(EXPECTED.map(async ({ request }) => (await engine.generate(request)).text));
        assert.deepEqual(await Promise.all([ask(first), ask(second)]), [ANSWERS, ANSWERS]);
        const state = budget.info();
        assert.deepEqual([state.engines, state.minBytes], [2, 128 * block]);
        assert.deepEqual(second.budget.info(), state);
      });
      assert.equal(budget.info().engines, 1);
    });
  });

  it('can be resized without changing an answer', () => withBudget(budget, async (engine) => {
    const answers = Promise.all([...EXPECTED, ...EXPECTED, ...EXPECTED].map(({ request }) => engine.generate(request)));
    for (const blocks of [64, 400, 100, 64, 300]) {
      await budget.resize(blocks * block);
      await sleep(20);
    }
    assert.deepEqual((await answers).map(({ text }) => text), [...ANSWERS, ...ANSWERS, ...ANSWERS]);
    assert.equal(budget.info().bytes, 300 * block);
    await eventually(() => engine.stats().blocksTotal === 300, 'the engine uses the whole budget');
  }));

  it('exist in every engine, and close with it', async () => {
    const own = engine.budget;
    own.close();
    await own.resize(SMALL.kvBytes / 2);
    await eventually(() => engine.stats().blocksTotal === 256, 'the pool is smaller');
    await withBudget(own, (other) => assert.equal(other.budget.info().engines, 2));
    await engine.close();
    await refused('CLOSED', 'the engine is closed', () => own.info());
    await refused('CLOSED', 'the engine is closed', () => own.resize(1));
  });

  it('are kept by their engines after close', () => withBudget(budget, async (engine) => {
    budget.close();
    budget.close();
    for (const call of [() => budget.info(), () => budget.resize(1), () => withBudget(budget, () => {}),
      () => Engine.plan({ ...SMALL, budget })]) {
      await refused('CLOSED', 'the budget is closed', call);
    }
    assert.equal((await engine.generate(LONG_CASE.request)).text, LONG_CASE.answer);
    assert.equal(engine.budget.info().bytes, 200 * block);
  }));

  it('are refused if they are invalid', () => withBudget(budget, async () => {
    for (const [code, message, call] of [
      ['INVALID_ARGUMENT', 'bytes is 0', () => Budget.create(0)],
      ['INVALID_ARGUMENT', 'bytes is 5; must be 1 to 4', () => Budget.create(5, 4)],
      ['INVALID_ARGUMENT', 'bytes is -1', () => Budget.create(-1)],
      ['INVALID_ARGUMENT', 'maxBytes is', () => Budget.create(1, 2n ** 64n)],
      ['CAPACITY', 'created with max_bytes', () => budget.resize(401 * block)],
      ['CAPACITY', `need ${64 * block} bytes for their longest sequences`, () => budget.resize(63 * block)],
      ['INVALID_ARGUMENT', 'bytes is -1', () => budget.resize(-1)],
      ['INVALID_ARGUMENT', 'both set', () => Engine.open({ ...SMALL, budget })],
    ]) {
      await refused(code, message, call);
    }
    await assert.rejects(Engine.open({ ...SMALL, budget: {} }), TypeError);
    const { bytes, engines } = budget.info();
    assert.deepEqual([bytes, engines], [200 * block, 1]);
  }));
});

describe('telemetry', () => {
  it('has the times of a request in its last output', async () => {
    const start = performance.now();
    const outputs = await collect(engine.stream({ prompt: 'Hello', maxTokens: 20, ignoreEos: true }));
    const elapsed = performance.now() - start;
    const { queuedMs, firstTokenMs, lastTokenMs } = outputs.pop();
    assert.ok(queuedMs > 0 && queuedMs < firstTokenMs && firstTokenMs < lastTokenMs && lastTokenMs < elapsed, String(lastTokenMs));
    assert.ok(lastTokenMs > elapsed / 1000, 'milliseconds');
    for (const output of outputs) assert.deepEqual([output.queuedMs, output.firstTokenMs, output.lastTokenMs], [0, 0, 0]);
    const long = { promptTokenIds: new Uint32Array(40).fill(70), maxTokens: 1 };
    assert.equal((await engine.generate(long)).cachedTokens, 0);
    assert.equal((await engine.generate(long)).cachedTokens, 32);
    await eventually(() => engine.stats().promptTokensCached === 32, 'the cached tokens are counted');
  });

  it('has snapshots of its blocks and steps', async () => {
    await engine.generate({ prompt: 'Hello '.repeat(20), maxTokens: 3, ignoreEos: true });
    await eventually(() => engine.stats().running === 0, 'the request has ended');
    const { pool, steps } = await engine.snapshot();
    assert.equal(pool.free + pool.cached + pool.used, pool.blocks);
    assert.equal(pool.runs.reduce((sum, [blocks]) => sum + blocks, 0), pool.blocks);
    assert.equal(pool.runs.some(([, state]) => state === 'cached'), true);
    assert.equal(steps.at(-1).decode_tokens, 1);
    assert.deepEqual((await engine.snapshot({ maxBlocks: 0 })).pool.runs, []);
  });

  it('has metrics in the Prometheus text format', async () => {
    await engine.generate({ prompt: 'Hello', maxTokens: 3, ignoreEos: true });
    await eventually(() => engine.stats().finishedLength === 1, 'the request is counted');
    const lines = engine.metrics().split('\n');
    assert.deepEqual(lines.splice(-2), ['# EOF', '']);
    const values = {}, sample = /^pagedllm_(\w+)\{model_name="model"((?:,\w+="[^"]*")*)\} (\S+)$/;
    for (const line of lines) {
      if (/^# (TYPE pagedllm_\w+ (gauge|counter|histogram|info)|(HELP|UNIT) pagedllm_\w+ .+)$/.test(line)) continue;
      const [, name, labels, value] = sample.exec(line) ?? assert.fail(line);
      values[name + labels] = Number(value);
    }
    assert.equal(values['request_success_total,finished_reason="length"'], 1);
    assert.deepEqual([values.generation_tokens_total, values.request_generation_tokens_sum, values.kv_cache_usage_perc], [3, 3, 0]);
  });

  it('writes a trace and a journal', async () => {
    const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'pagedllm-'));
    try {
      const [tracePath, journalPath] = ['trace', 'journal'].map((name) => path.join(folder, name));
      await withEngine({ hostSteps: true, tracePath, journalPath: Buffer.from(journalPath) }, async (engine) => {
        await engine.add({ prompt: 'Hello', maxTokens: 3, ignoreEos: true });
        while ((await engine.step()).unfinished);
        assert.deepEqual([engine.stats().tracesStopped, engine.stats().journalsStopped], [0, 0]);
      });
      const events = JSON.parse(fs.readFileSync(tracePath));
      assert.equal(events.filter(({ name }) => name === 'step').length, 3);
      assert.equal(fs.readFileSync(journalPath).toString('latin1', 0, 8), 'PLLMJRNL');
    } finally {
      fs.rmSync(folder, { recursive: true });
    }
  });
});

describe('KV events', () => {
  it('give the blocks of a prompt with the hashes of hashPrompt()', async () => {
    const promptTokenIds = Uint32Array.from({ length: 48 }, (_, i) => 10 + i);
    await withEngine({ kvEventsCapacity: 1000 }, async (engine) => {
      const hashes = await engine.hashPrompt({ promptTokenIds });
      assert.deepEqual(hashes.map((hash) => hash.length), [64, 64, 64]);
      await engine.generate({ promptTokenIds, maxTokens: 2 });
      const events = [];
      await eventually(() => events.push(...engine.pollKvEvents()) >= 3, 'the events come');
      assert.deepEqual(events.map(({ hash }) => hash), hashes);
      assert.deepEqual(events.slice(1).map(({ parentHash }) => parentHash), hashes.slice(0, 2));
      assert.deepEqual(events.map(({ kind, medium, firstToken }) => [kind, medium, firstToken]),
        [['stored', 'pool', 0], ['stored', 'pool', 16], ['stored', 'pool', 32]]);
      assert.deepEqual(events.flatMap(({ tokens }) => tokens), [...promptTokenIds]);
      assert.ok(Math.abs(Date.now() - events[0].timeMs) < 3_600_000);
      const [first, ...blocks] = engine.snapshotKvEvents();
      assert.deepEqual([first.kind, first.hash, first.parentHash, first.tokens], ['cleared', null, null, []]);
      assert.deepEqual(blocks.map(({ hash }) => hash).sort(), [...hashes].sort());
      const salted = await engine.hashPrompt({ promptTokenIds, cacheSalt: 'tenant' });
      assert.ok(!salted.includes(hashes[0]));
      await refused('INVALID_ARGUMENT', 'group', () => engine.hashPrompt({ promptTokenIds, group: 1 }));
    });
  });

  it('are refused by an engine without them', async () => {
    await refused('UNSUPPORTED', 'kv_events_capacity', () => engine.pollKvEvents());
    await refused('UNSUPPORTED', 'kv_events_capacity', () => engine.snapshotKvEvents());
  });
});
