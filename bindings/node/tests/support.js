'use strict';
// What the tests share: the model, expected answers, and assertions.
// usage: node --test bindings/node/tests/*.test.js   (first: npm ci in bindings/node)
// PAGEDLLM_LIBRARY: path of libpagedllm.so; default: target/release of this repository.
const assert = require('node:assert/strict');
const fs = require('node:fs');
const path = require('node:path');
const { setTimeout: sleep } = require('node:timers/promises');

const MODULE = path.join(__dirname, '../pagedllm.js');
const MODEL = path.join(__dirname, '../../../examples/model');
const { Engine, PagedllmError } = require(MODULE);

const SMALL = { modelPath: MODEL, threads: 1, kvBytes: 16 << 20 };
const EXPECTED = JSON.parse(fs.readFileSync(path.join(MODEL, 'expected.json'))).map((known) => (
  { ...known, request: { prompt: known.prompt, addSpecial: false, temperature: 0 } }));
const ANSWERS = EXPECTED.map(({ answer }) => answer);
const LONG_CASE = EXPECTED.find((known) => known.token_ids.length > 60);
const ENDLESS = { prompt: 'Hello', temperature: 0, ignoreEos: true }; // ends at maxModelLen

const entries = (folder) => fs.readdirSync(folder).length;
const threads = () => entries('/proc/self/task');
const descriptors = () => entries('/proc/self/fd');

// Bounds a test that fails. A busy machine may take long.
const LAST_RESORT_MS = 300_000;

// Waits until holds() is true.
async function eventually(holds, what) {
  const end = Date.now() + LAST_RESORT_MS;
  while (!holds()) {
    assert.ok(Date.now() < end, `still not after ${LAST_RESORT_MS / 1000} seconds: ${what}`);
    await sleep(1);
  }
}

const refused = (code, message, call) => assert.rejects(async () => call(), (error) => {
  assert.ok(error instanceof PagedllmError, error);
  assert.equal(error.code, `PLLM_E_${code}`, error.message);
  assert.ok(error.message.includes(message), error.message);
  return true;
});

async function withEngine(options, use) {
  const engine = await Engine.open({ ...SMALL, ...options });
  try {
    return await use(engine);
  } finally {
    await engine.close();
  }
}

async function collect(stream) {
  const outputs = [];
  for await (const output of stream) outputs.push(output);
  return outputs;
}
const textOf = (outputs) => outputs.map((output) => output.text).join('');

async function idle(engine) {
  await eventually(() => {
    const { waiting, running, blocksUsed } = engine.stats();
    return waiting + running + blocksUsed === 0;
  }, 'no request is left and no block is in use');
}
async function aborted(engine, count) {
  await eventually(() => engine.stats().finishedAbort === count, `${count} requests are aborted`);
  await idle(engine);
}

module.exports = {
  ANSWERS, ENDLESS, EXPECTED, LAST_RESORT_MS, LONG_CASE, MODEL, MODULE, SMALL,
  aborted, collect, descriptors, eventually, idle, refused, textOf, threads, withEngine,
};
