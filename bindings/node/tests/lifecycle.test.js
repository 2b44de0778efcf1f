'use strict';
// Loading and closing.
const assert = require('node:assert/strict');
const { execFile } = require('node:child_process');
const { describe, it, beforeEach, afterEach } = require('node:test');
const { promisify } = require('node:util');
const { Worker } = require('node:worker_threads');
const { Engine, PagedllmError } = require('../pagedllm.js');
const { lib } = require('../abi.js');
const {
  LONG_CASE, ENDLESS, MODULE, SMALL, collect, descriptors, refused, eventually, threads, withEngine,
} = require('./support.js');

let engine;
beforeEach(async () => { engine = await Engine.open(SMALL); });
afterEach(() => engine.close());

describe('loading', () => {
  it('reports progress up to the total', async () => {
    const calls = [];
    await withEngine({ progress: (...progress) => calls.push(progress) }, () => {});
    assert.ok(calls.length > 2);
    assert.deepEqual(calls, [...calls].sort(([a], [b]) => a - b));
    assert.equal(calls.at(-1)[0], calls.at(-1)[1]);
  });

  it('stops if progress throws or the signal aborts', async () => {
    let calls = 0;
    const fail = () => { calls++; throw new RangeError('enough'); };
    await assert.rejects(Engine.open({ ...SMALL, progress: fail }), { name: 'RangeError', message: 'enough' });
    assert.equal(calls, 1);
    const controller = new AbortController();
    const abort = () => { calls++; controller.abort(); };
    await assert.rejects(Engine.open({ ...SMALL, signal: controller.signal, progress: abort }), { name: 'AbortError' });
    assert.equal(calls, 2);
    await assert.rejects(Engine.open({ ...SMALL, signal: AbortSignal.abort() }), { name: 'AbortError' });
  });

  it('leaks no descriptor and no thread with fifty engines', async () => {
    const useAnEngine = () => withEngine({}, async (engine) => {
      const stream = engine.stream(ENDLESS);
      await stream.next();
      const woken = engine.queue.readable(); // resolves when the engine closes
      await engine.generate({ prompt: 'Hello', maxTokens: 2 });
      await stream.return();
      return { woken };
    });
    await (await useAnEngine()).woken;
    const before = [descriptors(), threads()];
    for (let i = 0; i < 50; i++) await useAnEngine();
    await eventually(() => descriptors() <= before[0] && threads() <= before[1], 'the engines have released their resources');
  });

  const run = (program, env = {}) =>
    promisify(execFile)(process.execPath, ['-e', program], { env: { ...process.env, ...env }, timeout: 600_000 });

  it('names the paths of a missing library', async () => {
    await assert.rejects(run(`require(${JSON.stringify(MODULE)})`, { PAGEDLLM_LIBRARY: '/nowhere/libpagedllm.so' }),
      /nowhere.*set PAGEDLLM_LIBRARY/s);
  });

  it('lets a process exit with a live engine and stream', async () => {
    const program = (end) => `
      const { Engine } = require(${JSON.stringify(MODULE)});
      (async () => {
        const engine = await Engine.open(${JSON.stringify(SMALL)});
        const stream = engine.stream(${JSON.stringify(ENDLESS)});
        await stream.next();
        console.log('alive');
        ${end}
      })();`;
    for (const end of ['', 'engine.queue.readable(); process.exit(0)', 'stream.next().then(() => process.exit(0))']) {
      assert.deepEqual(await run(program(end)), { stdout: 'alive\n', stderr: '' }, end);
    }
  });

  it('is refused in a worker thread', async () => {
    const worker = new Worker(`
      const { Engine } = require(${JSON.stringify(MODULE)});
      Engine.open(${JSON.stringify(SMALL)}).catch((error) => require('node:worker_threads').parentPort.postMessage(error.code));`,
    { eval: true });
    assert.equal(await new Promise((resolve) => worker.once('message', resolve)), 'PLLM_E_UNSUPPORTED');
    await worker.terminate();
  });
});

describe('health', () => {
  it('is null while the engine works', async () => {
    assert.equal(engine.health(), null);
    await refused('INVALID_ARGUMENT', 'the prompt is empty', () => engine.generate({ promptTokenIds: [] }));
    assert.equal(engine.health(), null);
    await withEngine({ hostSteps: true }, (engine) => assert.equal(engine.health(), null));
  });

  it('is the error that has stopped the engine, not thrown', (t) => {
    // No call makes an engine fail, so the test takes the error of another call.
    t.mock.method(lib, 'engine_health', () => lib.engine_stop(null));
    const error = engine.health();
    assert.ok(error instanceof PagedllmError);
    assert.deepEqual([error.code, error.promptTokens], ['PLLM_E_INVALID_ARGUMENT', null]);
    assert.match(error.message, /NULL/);
  });
});

describe('closing', () => {
  it('makes every later call fail', async () => {
    const queue = engine.createQueue(1), own = engine.queue;
    await engine.close();
    await engine.close();
    for (const call of [
      () => engine.stats(), () => engine.modelInfo(), () => engine.step(), () => engine.start(), () => engine.stop(), () => own.poll(),
      () => own.readable(), () => engine.queue, () => engine.abort(1), () => engine.add({ prompt: 'x' }),
      () => engine.generate({ prompt: 'x' }), () => engine.stream({ prompt: 'x' }).next(), () => engine.createQueue(1),
      () => engine.tokenize('x'), () => engine.detokenize([1]), () => engine.renderChat([]),
      () => engine.fork(1), () => engine.append(1, [1]), () => engine.rewind(1, 1), () => engine.resume(1), () => engine.free(1),
      () => engine.sequenceInfo(1), () => engine.generateResumed(1), () => engine.pin({ prompt: 'x' }), () => engine.unpin(1),
      () => engine.exportSequence(1), () => engine.importSequence(Buffer.from('x')), () => engine.predictAdmission({ prompt: 'x' }),
      () => engine.metrics(), () => engine.snapshot(), () => engine.budget, () => engine.health(), () => engine.tokenBytes(1),
    ]) {
      await refused('CLOSED', 'the engine is closed', call);
    }
    await refused('CLOSED', '', () => queue.poll());
    queue.close();
  });

  it('ends streams and calls in progress', async () => {
    for (let i = 0; i < 5; i++) {
      await withEngine({}, async (engine) => {
        const streams = Array.from({ length: 8 }, () => engine.stream(ENDLESS, { capacity: 1 }));
        await Promise.all(streams.map((stream) => stream.next()));
        const ends = Promise.allSettled(streams.map(collect));
        const own = engine.queue.readable();
        const calls = Promise.allSettled([engine.tokenize('x'), engine.stop(), engine.generate({ prompt: 'x' })]);
        await Promise.all([engine.close(), engine.close()]);
        await own;
        for (const { reason } of await ends) assert.equal(reason?.code, 'PLLM_E_CLOSED');
        for (const { reason } of await calls) assert.ok(!reason || reason.code === 'PLLM_E_CLOSED', reason);
      });
    }
  });

  it('waits for a step in progress', () => withEngine({ hostSteps: true }, async (engine) => {
    await engine.add(ENDLESS);
    const step = engine.step();
    await engine.close();
    assert.equal((await step).sequences, 1);
  }));

  it('leaves the outputs in a queue', async () => {
    const queue = engine.createQueue(3);
    await engine.add({ ...LONG_CASE.request, queue });
    await eventually(() => engine.stats().paused === 1, 'the queue is full');
    await engine.close();
    const outputs = queue.poll();
    assert.deepEqual(outputs.flatMap((output) => output.tokens), LONG_CASE.token_ids.slice(0, 3));
    assert.equal(outputs.pop().finishReason, 'abort');
    await refused('CLOSED', '', () => queue.poll());
    queue.close();
  });

  const skip = !Symbol.asyncDispose && 'this Node has no Symbol.asyncDispose';
  it('happens at the end of an `await using`', { skip }, async () => {
    await engine[Symbol.asyncDispose]();
    await refused('CLOSED', '', () => engine.stats());
  });
});
