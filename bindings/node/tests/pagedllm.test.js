'use strict';
// The Node module against the library and the bundled model.
// usage: node --test bindings/node/tests/pagedllm.test.js   (npm ci in bindings/node first; PAGEDLLM_LIBRARY names another library)
const assert = require('node:assert/strict');
const { execFile } = require('node:child_process');
const fs = require('node:fs');
const os = require('node:os');
const path = require('node:path');
const { describe, it, beforeEach, afterEach } = require('node:test');
const { setTimeout: sleep } = require('node:timers/promises');
const { promisify } = require('node:util');
const { Worker } = require('node:worker_threads');

const MODULE = path.join(__dirname, '../pagedllm.js');
const MODEL = path.join(__dirname, '../../../examples/model');
const { Budget, Engine, PagedllmError, version, buildInfo } = require(MODULE);

const SMALL = { modelPath: MODEL, threads: 1, kvBytes: 16 << 20 };
const EXPECTED = JSON.parse(fs.readFileSync(path.join(MODEL, 'expected.json')))
  .map((known) => ({ ...known, request: { prompt: known.prompt, addSpecial: false, temperature: 0 } }));
const ANSWERS = EXPECTED.map(({ answer }) => answer);
const STORY = EXPECTED.find((known) => known.token_ids.length > 60);
const ENDLESS = { prompt: 'Hello', temperature: 0, ignoreEos: true }; // until the sequence is as long as the engine allows

const entries = (folder) => fs.readdirSync(folder).length;
const threads = () => entries('/proc/self/task');
const descriptors = () => entries('/proc/self/fd');

// For what another thread does in its own time.
async function soon(holds, what) {
  const end = Date.now() + 10_000;
  while (!holds()) {
    assert.ok(Date.now() < end, `still not after 10 seconds: ${what}`);
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

let engine;
beforeEach(async () => { engine = await Engine.open(SMALL); });
afterEach(() => engine.close());

async function idle() {
  await soon(() => {
    const { waiting, running, blocksUsed } = engine.stats();
    return waiting + running + blocksUsed === 0;
  }, 'no request, no block in use');
}
async function aborted(count) {
  await soon(() => engine.stats().finishedAbort === count, `${count} requests are aborted`);
  await idle();
}

describe('generating', () => {
  it('gives every answer that the model was trained to give', async () => {
    for (const { messages, prompt, request, answer, token_ids: tokens } of EXPECTED) {
      assert.equal(await engine.renderChat(messages), prompt);
      const completion = await engine.generate(request);
      assert.deepEqual([completion.text, completion.tokens, completion.finishReason], [answer, tokens, 'stop']);
    }
  });

  it('streams the same answer piece by piece', async () => {
    const outputs = await collect(engine.stream(STORY.request));
    assert.equal(textOf(outputs), STORY.answer);
    assert.deepEqual(outputs.flatMap((output) => output.tokens), STORY.token_ids);
    assert.ok(outputs.length > 10);
    const last = outputs.pop();
    assert.deepEqual([last.finishReason, last.generatedTokens], ['stop', STORY.token_ids.length]);
    assert.ok(outputs.every((output) => output.finishReason === null));
  });

  it('takes a prompt as token ids and as bytes', async () => {
    const promptTokens = await engine.tokenize(STORY.prompt);
    assert.equal(await engine.detokenize(promptTokens), STORY.prompt);
    for (const prompt of [{ promptTokenIds: promptTokens }, { promptTokenIds: Uint32Array.from(promptTokens) },
      { prompt: Buffer.from(STORY.prompt), addSpecial: false }]) {
      const completion = await engine.generate({ ...prompt, temperature: 0 });
      assert.deepEqual([completion.text, completion.promptTokens], [STORY.answer, promptTokens.length]);
    }
  });

  it('takes a NUL byte for text like any other', async () => {
    const tokens = await engine.tokenize('a\0b');
    assert.equal(await engine.detokenize(tokens), 'a\0b');
    assert.equal((await engine.generate({ prompt: 'a\0b', addSpecial: false, maxTokens: 1 })).promptTokens, tokens.length);
  });

  it('adds and shows special tokens as asked', async () => {
    const promptTokens = async (flags) => (await engine.generate({ prompt: 'Hello', maxTokens: 1, ...flags })).promptTokens;
    assert.equal(await promptTokens({}), await promptTokens({ addSpecial: true }));
    assert.equal(await promptTokens({ addSpecial: false }) + 1, await promptTokens({ addSpecial: true }));
    assert.equal(await engine.detokenize(STORY.token_ids, { skipSpecial: true }), STORY.answer);
    assert.notEqual(await engine.detokenize(STORY.token_ids), STORY.answer);
  });

  it('samples as it says', async () => {
    const ask = (sampling) => engine.generate({ ...STORY.request, ...sampling });
    const { answer, token_ids: tokens } = STORY;
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

  it('makes the same choices with the same seed, and leaves what is left out to the library', async () => {
    const ask = async (sampling) =>
      (await engine.generate({ prompt: 'Once', maxTokens: 20, ignoreEos: true, ...sampling })).tokens;
    assert.deepEqual(await ask({ seed: 2n ** 64n - 1n }), await ask({ seed: 2n ** 64n - 1n }));
    assert.notDeepEqual(await ask({ seed: 1 }), await ask({ seed: 2 }));
    assert.deepEqual(await ask({ seed: 1 }), await ask({ seed: 1, temperature: 1, topP: 1, minP: 0, topK: 0 }));
    assert.notDeepEqual(await ask({ seed: 1 }), await ask({ seed: 1, temperature: 0 }));
  });

  it('tells requests apart that share a queue', async () => {
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

  it('adds requests in the order of the calls, however long one takes to tokenize', async () => {
    const prompts = ['The quick brown fox. '.repeat(40), 'a', 'b', 'c', 'd'];
    const ids = await Promise.all(prompts.map((prompt) => engine.add({ prompt, maxTokens: 1 })));
    assert.deepEqual(ids, [1, 2, 3, 4, 5]);
  });

  it('answers from two engines at once', () => withEngine({ kvDtype: 'f32' }, async (other) => {
    const ask = (engine) => Promise.all(EXPECTED.map(async ({ request }) => (await engine.generate(request)).text));
    assert.deepEqual(await Promise.all([ask(engine), ask(other)]), [ANSWERS, ANSWERS]);
    await other.close();
    assert.equal((await engine.generate(STORY.request)).text, STORY.answer);
  }));

  it('lets the host step', () => withEngine({ hostSteps: true }, async (engine) => {
    const request = await engine.add(STORY.request);
    assert.deepEqual(engine.queue.poll(), []);
    const outputs = [];
    while ((await engine.step()).unfinished) outputs.push(...engine.queue.poll());
    outputs.push(...engine.queue.poll());
    assert.equal(textOf(outputs), STORY.answer);
    assert.ok(outputs.every((output) => output.request === request));
    const both = await Promise.allSettled([engine.generate(STORY.request), engine.start()]);
    assert.equal(both[0].value.text, STORY.answer);
    await refused('BUSY', 'one at a time', () => engine.step());
    await refused('BUSY', 'one at a time', () => engine.start());
    await engine.stop();
    await engine.stop();
    assert.equal((await engine.step()).sequences, 0);
  }));

  it('tells what is known of engine and library', async () => {
    const info = engine.modelInfo(), plan = await Engine.plan(SMALL), stats = engine.stats();
    assert.deepEqual([info.architecture, info.vocabSize, info.layers, info.threads, info.eosTokenIds],
      ['LlamaForCausalLM', 1024, 4, 1, [5, 1]]);
    assert.deepEqual([plan.kvBytes, plan.blockSize, plan.maxModelLen, plan.kvDtype], [16 << 20, 16, info.maxModelLen, 'bf16']);
    assert.deepEqual([stats.blocksTotal, stats.blocksFree, stats.slotUtilization], [plan.blocks, plan.blocks, 1]);
    assert.equal(buildInfo().version, version());
    await engine.generate({ prompt: 'Hello', maxTokens: 3, ignoreEos: true });
    await soon(() => engine.stats().finishedLength === 1, 'the request is counted');
    assert.equal(engine.stats().generatedTokens, 3);
  });
});

describe('choosing', () => {
  const ask = (sampling) => engine.generate({ ...STORY.request, maxTokens: 12, ignoreEos: true, ...sampling });

  it('keeps to the tokens that are allowed, and from bad words', async () => {
    assert.deepEqual(new Set((await ask({ allowedTokenIds: [70] })).tokens), new Set([70]));
    const plain = await ask({});
    assert.ok(plain.text.includes('time'));
    assert.ok(!(await ask({ badWords: ['time', ' time'] })).text.includes('time'));
    assert.ok(!(await ask({ badWordsIds: [[1, 2], [plain.tokens[3]]] })).tokens.includes(plain.tokens[3]));
  });

  it('takes every parameter to its place', async () => {
    const { tokens } = await ask({});
    const seventies = async (sampling) =>
      (await ask({ logitBias: { 70: 90 }, ...sampling })).tokens.filter((token) => token === 70).length;
    assert.equal(await seventies({}), 12);
    assert.equal(await seventies({ noRepeatNgramSize: 1 }), 1);
    assert.ok(await seventies({ repetitionPenalty: 100 }) < 12);
    assert.ok(await seventies({ dry: { multiplier: 100, base: 4, allowedLength: 1 } }) < 12);
    assert.equal(await seventies({ dry: { multiplier: 0, penaltyLastN: 3, sequenceBreakers: ['x', 'y'] } }), 12);
    const [colon] = await engine.tokenize(':', { addSpecial: false });
    for (const [sequenceBreakers, punished] of [[undefined, false], [[], true], [['?'], true], [['?', ':'], false]]) {
      const dry = { multiplier: 100, base: 4, allowedLength: 1, sequenceBreakers };
      const { tokens } = await ask({ logitBias: { [colon]: 90 }, dry });
      assert.equal(tokens.filter((token) => token === colon).length < 12, punished, String(sequenceBreakers));
    }
    const two = { allowedTokenIds: [70, 71], logitBias: { 70: 1, 71: 0.5 } };
    assert.deepEqual(new Set((await ask({ ...two, presencePenalty: 2, frequencyPenalty: 2 })).tokens), new Set([70, 71]));
    const drawn = { temperature: 1, seed: 1 };
    for (const cut of [{ topNSigma: 0.001 }, { mirostatTau: 0.0001, mirostatEta: 1 }]) {
      assert.deepEqual((await ask({ ...drawn, ...cut })).tokens, tokens);
    }
    const typical = async (seed) => (await ask({ ...drawn, seed, typicalP: 0.0001 })).tokens;
    assert.deepEqual(await typical(1), await typical(2));
    assert.notDeepEqual((await ask({ ...drawn, xtcProbability: 1, xtcThreshold: 0.0001 })).tokens, tokens);
    const cut = await engine.generate({ ...STORY.request, truncatePromptTokens: 4, maxTokens: 1 });
    assert.equal(cut.promptTokens, 4);
  });

  it('gives log probabilities their shapes', async () => {
    const prompt = await engine.tokenize(STORY.prompt);
    const answer = await ask({ maxTokens: 5, topLogprobs: 3, promptTopLogprobs: 2 });
    assert.deepEqual([answer.logprobs.length, answer.topLogprobs.length], [5, 5]);
    assert.deepEqual([answer.promptLogprobs.length, answer.promptTopLogprobs.length], [prompt.length - 1, prompt.length - 1]);
    answer.topLogprobs.forEach((top, i) => {
      assert.deepEqual(top[0], { token: answer.tokens[i], logprob: answer.logprobs[i] }); // greedy
      assert.deepEqual(top, [...top].sort((a, b) => b.logprob - a.logprob));
      assert.equal(top.length, 3);
    });
    assert.ok(answer.promptTopLogprobs.every((top) => top.length === 2));
    assert.ok(Math.abs(answer.score - answer.logprobs.reduce((a, b) => a + b)) < 1e-6);
    const plain = await ask({ maxTokens: 5, logprobs: true, promptLogprobs: true });
    assert.deepEqual([plain.logprobs, plain.promptLogprobs], [answer.logprobs, answer.promptLogprobs]);
    assert.deepEqual([plain.topLogprobs, plain.promptTopLogprobs], [null, null]);
  });

  it('puts the prompt before the answer, and leaves a stop in, where that is asked for', async () => {
    const hello = { prompt: 'Hello', temperature: 0, maxTokens: 3 };
    assert.equal((await engine.generate({ ...hello, echo: true })).text, `Hello${(await engine.generate(hello)).text}`);
    const { text } = await ask({ maxTokens: 60, stop: 'village', includeStop: true });
    assert.equal(text, STORY.answer.slice(0, STORY.answer.indexOf('village') + 7));
  });

  it('tells what is new, or everything, or everything once', async () => {
    const request = { ...STORY.request, maxTokens: 6, topLogprobs: 1, promptLogprobs: true };
    const streams = {};
    for (const outputKind of ['delta', 'cumulative', 'final']) {
      streams[outputKind] = await collect(engine.stream({ ...request, outputKind }));
    }
    const tokens = STORY.token_ids.slice(0, 6);
    const told = (kind) => streams[kind].map((output) => output.tokens).filter((tokens) => tokens.length);
    assert.deepEqual(told('delta'), tokens.map((token) => [token]));
    assert.deepEqual(told('cumulative'), tokens.map((_, i) => tokens.slice(0, i + 1)));
    assert.deepEqual(told('final'), [tokens]);
    assert.equal(streams.final.length, 1);
    const answers = await Promise.all(Object.keys(streams).map((outputKind) => engine.generate({ ...request, outputKind })));
    const said = ({ request, sequence, queuedMs, firstTokenMs, lastTokenMs, ...answer }) => answer;
    for (const answer of answers) assert.deepEqual(said(answer), said(answers[0]));
  });
});

describe('structured output', () => {
  const ask = (grammar, sampling) =>
    engine.generate({ prompt: 'Give JSON for Anna, 31, Paris.', temperature: 0, maxTokens: 100, grammar, ...sampling });

  it('is JSON as its schema says', async () => {
    const properties = {
      name: { type: 'string', maxLength: 8 }, age: { type: 'integer', minimum: 0, maximum: 120 }, home: { enum: ['Paris', 'Rome'] },
    };
    const schema = { type: 'object', additionalProperties: false, required: Object.keys(properties), properties };
    const given = [schema, JSON.stringify(schema), Buffer.from(JSON.stringify(schema))];
    for (const jsonSchema of given) {
      const { text, finishReason } = await ask({ jsonSchema });
      const person = JSON.parse(text);
      assert.deepEqual([Object.keys(person), finishReason], [['name', 'age', 'home'], 'stop']);
      assert.ok(Number.isInteger(person.age) && ['Paris', 'Rome'].includes(person.home), text);
    }
    const drawn = (seed) => ask({ jsonSchema: schema }, { temperature: 1.5, seed });
    for (const { text } of await Promise.all([1, 2, 3, 4, 5].map(drawn))) JSON.parse(text);
    assert.equal(typeof JSON.parse((await ask({ jsonObject: true })).text), 'object');
  });

  it('is what a regular expression, a choice or a Lark grammar says', async () => {
    for (const seed of [1, 2, 3, 4, 5]) {
      const drawn = { temperature: 1.5, seed };
      assert.match((await ask({ regex: '[0-9]{3}-[a-c]x' }, drawn)).text, /^[0-9]{3}-[a-c]x$/);
      assert.ok(['cow', 'a dog', 'été'].includes((await ask({ choice: ['cow', 'a dog', Buffer.from('été')] }, drawn)).text));
      assert.match((await ask({ lark: 'start: "a" NUMBER\nNUMBER: /[0-9]{2}/' }, drawn)).text, /^a[0-9]{2}$/);
    }
  });
});

describe('several results', () => {
  const DRAWN = { prompt: 'Hello', temperature: 1.5, seed: 3, maxTokens: 8, ignoreEos: true, logprobs: true };

  it('have their index and their end each', async () => {
    const outputs = await collect(engine.stream({ ...DRAWN, n: 3 }));
    assert.deepEqual(outputs.filter((output) => output.finishReason).map((output) => output.index).sort(), [0, 1, 2]);
    assert.ok(outputs.every(({ sequence, request, index }) => sequence === request + index));
    const samples = await engine.generateAll({ ...DRAWN, n: 3 });
    assert.deepEqual(samples.map(({ index }) => index), [0, 1, 2]);
    assert.equal(new Set(samples.map(({ tokens }) => String(tokens))).size, 3);
    for (const { index, tokens } of samples) {
      assert.deepEqual(tokens, outputs.filter((output) => output.index === index).flatMap((output) => output.tokens));
    }
    assert.deepEqual((await engine.generate({ ...DRAWN, n: 3 })).tokens, samples[0].tokens);
    await idle();
  });

  it('are the best of more, best first', async () => {
    const drawn = await engine.generateAll({ ...DRAWN, n: 5 });
    const best = await engine.generateAll({ ...DRAWN, n: 2, bestOf: 5 });
    drawn.sort((a, b) => b.score - a.score);
    assert.deepEqual(best.map(({ index, tokens }) => [index, tokens]), [[0, drawn[0].tokens], [1, drawn[1].tokens]]);
  });

  it('are beams by their scores', async () => {
    const search = { prompt: 'Hello', maxTokens: 10 };
    const beams = await engine.generateAll({ ...search, n: 3, beam: { width: 4 } });
    assert.deepEqual(beams.map(({ index }) => index), [0, 1, 2]);
    assert.ok(beams[0].score >= beams[1].score && beams[1].score >= beams[2].score);
    const ways = [{ groups: 2, diversityPenalty: 1 }, { lengthPenalty: 0 }, { earlyStopping: 'yes' }, { earlyStopping: 'never' }];
    for (const beam of ways) {
      assert.equal((await engine.generate({ ...search, beam })).index, 0);
    }
    await idle();
  });

  it('end all when their loop is left, their signal aborted or their request', async () => {
    for await (const output of engine.stream({ ...ENDLESS, n: 4 })) if (output.index === 3) break;
    await idle();
    await assert.rejects(engine.generateAll({ ...ENDLESS, n: 4 }, { signal: AbortSignal.timeout(20) }), { name: 'TimeoutError' });
    await idle();
    const stream = engine.stream({ ...ENDLESS, n: 4 });
    engine.abort((await stream.next()).value.request);
    const ends = (await collect(stream)).filter((output) => output.finishReason);
    assert.deepEqual(ends.map(({ index, finishReason }) => `${index} ${finishReason}`).sort(),
      ['0 abort', '1 abort', '2 abort', '3 abort']);
  });
});

describe('sequences', () => {
  const DRAWN = { ...STORY.request, temperature: 1.5, seed: 7, maxTokens: 12, ignoreEos: true };
  // The host steps, so that every token is where the test says.
  let engine;
  beforeEach(async () => { engine = await Engine.open({ ...SMALL, hostSteps: true }); });
  afterEach(() => engine.close());

  // A sequence after so many tokens.
  async function begin(steps, request = STORY.request) {
    const sequence = await engine.add(request);
    for (let i = 0; i < steps; i++) await engine.step();
    return [sequence, engine.queue.poll().flatMap((output) => output.tokens)];
  }

  // All tokens that come, by sequence.
  async function finish() {
    while ((await engine.step()).unfinished);
    const tokens = {};
    for (const output of engine.queue.poll()) {
      assert.equal(output.error, null);
      (tokens[output.sequence] ??= []).push(...output.tokens);
    }
    return tokens;
  }

  it('go on in forks as they do themselves, also from an earlier place', async () => {
    const [parent, begun] = await begin(9);
    const { length } = engine.sequenceInfo(parent);
    const [one, other] = engine.fork(parent, { n: 2, userData: 4 });
    const [earlier] = engine.fork(parent, { at: length - 4 });
    assert.deepEqual(engine.sequenceInfo(other), { request: other, length, index: 0, idle: false, inexact: false });
    const { promptTokens } = engine.stats();
    const tokens = await finish();
    assert.equal(engine.stats().promptTokens, promptTokens);
    for (const sequence of [parent, one, other]) assert.deepEqual([...begun, ...tokens[sequence]], STORY.token_ids);
    assert.deepEqual([...begun.slice(0, 5), ...tokens[earlier]], STORY.token_ids);
  });

  it('draw in forks as they do themselves, unless there is a seed', async () => {
    const [parent] = await begin(3, DRAWN);
    const forks = [{}, { seed: 1, n: 2 }, { seed: 1 }, { seed: 2n ** 64n - 1n }].map((how) => engine.fork(parent, how));
    const tokens = await finish();
    const [[same], [one, other], [again], [third]] = forks.map((ids) => ids.map((id) => tokens[id]));
    assert.deepEqual(same, tokens[parent]);
    assert.deepEqual(again, one);
    assert.equal(new Set([same, one, other, third].map(String)).size, 4);
  });

  it('wait where they are idle, and go on with what was appended alone', async () => {
    const [kept, begun] = await begin(70, { ...STORY.request, keep: true });
    assert.deepEqual(begun, STORY.token_ids);
    const queue = engine.createQueue(100);
    const [child] = engine.fork(kept, { idle: true, queue });
    const question = await engine.tokenize('\n<|user|>\nWhat is 7 + 5?<|end|>\n<|assistant|>\n');
    engine.append(kept, question);
    const { promptTokens } = engine.stats();
    await engine.resume(kept, { temperature: 0, maxTokens: 30, userData: 5 });
    const tokens = (await finish())[kept];
    assert.equal(engine.stats().promptTokens - promptTokens, question.length + 1); // and the last token, which nothing came after
    const whole = [...await engine.tokenize(STORY.prompt), ...begun, ...question];
    const alone = await engine.add({ promptTokenIds: whole, temperature: 0, maxTokens: 30 });
    assert.deepEqual((await finish())[alone], tokens);
    assert.deepEqual([engine.stats().idle, queue.poll()], [2, []]);
    engine.free(kept);
    engine.free(child);
    await engine.step();
    assert.deepEqual([engine.stats().idle, engine.stats().blocksUsed], [0, 0]);
  });

  it('say the same again when they are rewound', async () => {
    const [running, begun] = await begin(8, { ...DRAWN, keep: true });
    engine.rewind(running, engine.sequenceInfo(running).length - 5);
    const tokens = (await finish())[running];
    assert.deepEqual(tokens.slice(0, 5), begun.slice(3));
    const prompt = (await engine.tokenize(STORY.prompt)).length;
    engine.rewind(running, prompt);
    const { prompt: _prompt, addSpecial: _addSpecial, ...sampling } = DRAWN;
    await engine.resume(running, { ...sampling, keep: false });
    assert.deepEqual((await finish())[running], [...begun.slice(0, 3), ...tokens]);
    await refused('NOT_FOUND', 'not kept', () => engine.sequenceInfo(running));
  });

  it('go on in streams after streams', async () => {
    engine.start();
    const begun = await engine.generate({ ...STORY.request, maxTokens: 5, keep: true });
    const forks = engine.fork(begun.sequence, { n: 3, queue: engine.queue });
    const more = await collect(engine.streamResumed(begun.sequence, { temperature: 0, maxTokens: 5 }, { capacity: 1 }));
    assert.deepEqual(more.flatMap((output) => output.tokens), STORY.token_ids.slice(5, 10));
    const rest = await engine.generateResumed(begun.sequence, { temperature: 0, keep: false });
    assert.deepEqual(rest.tokens, STORY.token_ids.slice(10));
    const all = await Promise.all(forks.map((fork) => engine.generateResumed(fork, { temperature: 0, keep: false })));
    for (const { tokens } of all) assert.deepEqual(tokens, STORY.token_ids.slice(5));
    await assert.rejects(engine.generateResumed(begun.sequence, {}, { signal: AbortSignal.abort() }), { name: 'AbortError' });
  });
});

describe('moving', () => {
  const DRAWN = { ...STORY.request, temperature: 1.2, seed: 7, maxTokens: 200, ignoreEos: true };
  let other, whole;
  beforeEach(async () => {
    other = await Engine.open(SMALL);
    whole = await other.generate(DRAWN);
  });
  afterEach(() => other.close());

  // A stream in the middle, its sequence, and what was read of it.
  async function begin(request = DRAWN) {
    const stream = engine.stream(request, { capacity: 1 }), begun = [];
    while (begun.length < 5) begun.push((await stream.next()).value);
    return [stream, begun[0].sequence, begun];
  }

  // A stream of what it says in the other engine, from when it is first read.
  async function* moved(state, options) {
    yield* other.streamResumed(await other.importSequence(state), { continueGeneration: true, keep: false }, options);
  }

  // What never moved said it too, from some place on to its end.
  function isTheRest(outputs) {
    const tokens = outputs.flatMap((output) => output.tokens);
    assert.ok(tokens.length > 0);
    assert.deepEqual(tokens, whole.tokens.slice(-tokens.length));
    assert.ok(whole.text.endsWith(textOf(outputs)));
    const { finishReason, generatedTokens } = outputs.at(-1);
    assert.deepEqual([finishReason, generatedTokens], ['length', whole.tokens.length]);
  }

  it('lets a sequence go on elsewhere with the same tokens', async () => {
    const [stream, sequence] = await begin();
    const state = await engine.exportSequence(sequence);
    await stream.return();
    await idle();
    for (const copy of [state, Buffer.from(state)]) {
      const moving = moved(copy, { capacity: 1 });
      const first = (await moving.next()).value;
      copy.fill(0); // it is read no more
      isTheRest([first, ...await collect(moving)]);
    }
    await soon(() => other.stats().idle === 0, 'nothing stays');
  });

  it('is noticed by nobody who reads meanwhile', async () => {
    const [stream, sequence, begun] = await begin();
    const states = await Promise.all([1, 2, 3].map(() => engine.exportSequence(sequence)));
    const outputs = [...begun, ...await collect(stream)];
    assert.deepEqual(outputs.flatMap((output) => output.tokens), whole.tokens);
    assert.equal(textOf(outputs), whole.text);
    for (const outputs of await Promise.all(states.map((state) => collect(moved(state))))) isTheRest(outputs);
    await idle();
    const { finishedAbort, finishedError } = engine.stats();
    assert.deepEqual([finishedAbort, finishedError], [0, 0]);
  });

  it('takes a kept sequence whose stream has ended', async () => {
    const kept = await engine.generate({ ...STORY.request, maxTokens: 9, keep: true });
    const state = await engine.exportSequence(kept.sequence);
    assert.deepEqual(await engine.exportSequence(kept.sequence), state);
    const copy = await other.importSequence(state);
    assert.deepEqual(other.sequenceInfo(copy),
      { request: copy, length: kept.promptTokens + 9, index: 0, idle: true, inexact: false });
    const { promptTokens } = other.stats();
    const rest = await other.generateResumed(copy, { temperature: 0, keep: false });
    assert.deepEqual([...kept.tokens, ...rest.tokens], STORY.token_ids);
    assert.equal(other.stats().promptTokens - promptTokens, 1); // the last token, which nothing came after yet
    await refused('INVALID_ARGUMENT', 'rewind', () => collect(moved(state))); // it may not become longer
  });

  it('keeps what goes on unless that is not wanted', async () => {
    const [, sequence] = await begin();
    const state = await engine.exportSequence(sequence);
    const kept = await other.importSequence(state), gone = await other.importSequence(state);
    isTheRest(await collect(other.streamResumed(kept, { continueGeneration: true })));
    isTheRest(await collect(other.streamResumed(gone, { continueGeneration: true, keep: false })));
    assert.equal(other.sequenceInfo(kept).idle, true);
    await soon(() => other.stats().idle === 1, 'the other is gone');
    await assert.rejects(collect(moved(state, { signal: AbortSignal.abort() })), { name: 'AbortError' });
  });

  it('lets an idle fork go on as if it had never been idle', async () => {
    const [, sequence] = await begin({ ...DRAWN, userData: 3 });
    const { queue } = engine;
    for (const [how, userData] of [[{}, 3], [{ userData: 4 }, 4]]) {
      const [fork] = engine.fork(sequence, { idle: true, queue });
      const outputs = await collect(engine.streamResumed(fork, { continueGeneration: true, keep: false, ...how }));
      isTheRest(outputs);
      assert.ok(outputs.every((output) => output.userData === userData));
    }
    assert.deepEqual(queue.poll(), []);
  });

  it('lets a sequence go on into the queue that is named, or its own', async () => {
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
      isTheRest(outputs);
    }
    own.close();
    named.close();
  });

  it('leaves to what goes on its own sampling', async () => {
    const [, sequence] = await begin();
    const copy = await other.importSequence(await engine.exportSequence(sequence));
    for (const wrong of [{ temperature: 0 }, { grammar: { regex: 'a' } }, { skipSpecial: true }, { maxTokn: 1 }]) {
      await assert.rejects(other.resume(copy, { continueGeneration: true, ...wrong }), TypeError);
    }
    await assert.rejects(other.generateResumed(copy, { continueGeneration: true }), TypeError);
    isTheRest(await collect(other.streamResumed(copy, { continueGeneration: true, temperature: undefined })));
  });

  it('says what cannot be exact', async () => {
    const [, sequence] = await begin();
    const state = await engine.exportSequence(sequence);
    await withEngine({ isa: 'portable' }, async (portable) => {
      const copy = await portable.importSequence(state);
      assert.equal(portable.sequenceInfo(copy).inexact, portable.modelInfo().isa !== engine.modelInfo().isa);
      assert.equal((await portable.generateResumed(copy, { maxTokens: 3, ignoreEos: true })).finishReason, 'length');
    });
  });

  it('happens at the next step of a host that steps', () => withEngine({ hostSteps: true }, async (engine) => {
    const sequence = await engine.add(DRAWN); // which no step has seen yet
    for (let i = 0; i < 2; i++) {
      const exported = engine.exportSequence(sequence);
      await engine.step();
      isTheRest(await collect(moved(await exported)));
    }
    engine.abort(sequence);
    const message = `sequence ${sequence} has ended before it could be exported`;
    const lost = refused('NOT_FOUND', message, () => engine.exportSequence(sequence));
    await engine.step();
    await lost;
    const next = await engine.add(DRAWN);
    const waiting = refused('CLOSED', '', () => engine.exportSequence(next));
    await engine.close();
    await waiting;
  }));

  it('refuses what is damaged, and the engine goes on', async () => {
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
    isTheRest(await collect(moved(state)));
  });

  it('takes along what was said of the prompt, and what was still to be said of it', async () => {
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
          const said = outputKind === 'delta' ? [...before, ...after] : after.slice(-1);
          for (const name of ['tokens', 'promptLogprobs', 'promptTopLogprobs']) {
            assert.deepEqual(said.flatMap((output) => output[name] ?? []), whole[name]);
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

  it('gives what was computed to those with the same salt', async () => {
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

  it('keeps what is pinned until it is unpinned, or expires', async () => {
    const pin = await engine.pin({ prompt: request.prompt, priority: 1, cacheSalt: 'mine' });
    await soon(() => engine.stats().blocksUsed > 5, 'the prompt is computed');
    assert.ok((await cost({ cacheSalt: 'mine' }))[1] > 100);
    assert.equal((await cost({ cacheSalt: 'not mine' }))[1], 0);
    engine.unpin(pin);
    await refused('NOT_FOUND', 'pin', () => engine.unpin(pin));
    await idle();
    const short = await engine.pin({ prompt: request.prompt, timeToLiveMs: 20 });
    await sleep(30);
    await engine.generate({ prompt: 'Hello', maxTokens: 1 });
    await refused('NOT_FOUND', 'expired', () => engine.unpin(short));
    await idle();
  });
});

describe('scheduling', () => {
  // Whose tokens come first: the index into `waiting`, of requests that all wait for one place.
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

  it('takes who comes first by the order', async () => {
    const urgent = [{}, { priority: 1 }];
    assert.equal(await firstOf(urgent, {}), 0);
    assert.equal(await firstOf(urgent, { order: 'priority' }), 1);
    assert.equal(await firstOf(urgent, { order: 'priority', ageingMs: 1 }), 0);
    const short = [{}, { maxTokens: 5 }];
    assert.equal(await firstOf(short, {}), 0);
    assert.equal(await firstOf(short, { order: 'shortestPredicted' }), 1);
    assert.equal(await firstOf([{ priority: -1 }, {}], { order: 'priority' }), 1);
  });

  it('makes steps of what the batching says', async () => {
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

  it('sets aside what the allocation says', async () => {
    for (const [allocation, least, most] of [['onDemand', 0.1, 1], ['maxTokens', 0, 0.02]]) {
      await withEngine({ hostSteps: true, allocation }, async (engine) => {
        await engine.add({ prompt: 'Hello', maxTokens: 200 });
        await engine.step();
        const { slotUtilization } = engine.stats();
        assert.ok(least < slotUtilization && slotUtilization < most, String(slotUtilization));
      });
    }
  });

  it('lets who has to give way wait in the host tier and say the same', async () => {
    const { blockBytes } = await Engine.plan(SMALL);
    const request = { ...STORY.request, maxTokens: 150, ignoreEos: true };
    const alone = await engine.generate(request);
    for (const swapPath of [undefined, os.tmpdir(), Buffer.from(os.tmpdir())]) {
      const options = { kvBytes: 24 * blockBytes, maxModelLen: 256, preemption: 'swap', swapBytes: 200 * blockBytes, swapPath };
      const plan = await Engine.plan({ ...SMALL, ...options });
      assert.deepEqual([plan.swapBytes, plan.swapBlocks], [200 * blockBytes, 200]);
      await withEngine({ hostSteps: true, ...options }, async (engine) => {
        const asked = Promise.all(Array.from({ length: 8 }, (_, i) => engine.generate({ ...request, cacheSalt: `${i}` })));
        while ((await engine.predictAdmission(ENDLESS)).waitingRequests < 8) await sleep(1);
        engine.start();
        const answers = await asked;
        for (const { tokens, text } of answers) assert.deepEqual([tokens, text], [alone.tokens, alone.text]);
        await soon(() => engine.stats().finishedLength === 8, 'all are counted');
        const stats = engine.stats();
        assert.ok(stats.preemptionsSwapped > 0);
        assert.equal(answers.reduce((sum, { preemptions }) => sum + preemptions, 0), stats.preemptions);
        assert.deepEqual([stats.swapBlocksTotal, stats.swapBlocksUsed, stats.swapped, stats.swapFailures], [200, 0, 0, 0]);
        assert.ok(stats.blocksSwappedOut >= stats.blocksSwappedIn && stats.blocksSwappedIn > 0);
      });
    }
  });

  it('stores K and V in about half the bytes as int8', async () => {
    const [int8, bf16] = await Promise.all(['int8', 'bf16'].map((kvDtype) => Engine.plan({ ...SMALL, kvDtype })));
    assert.equal(int8.kvDtype, 'int8');
    assert.ok(int8.blockBytes < 0.6 * bf16.blockBytes);
    await withEngine({ kvDtype: 'int8' }, async (engine) => {
      assert.equal(engine.stats().blocksTotal, int8.blocks);
      assert.ok((await engine.generate(STORY.request)).text.includes('upon a time'));
    });
  });

  it('keeps weights in fewer bytes as whole numbers', async () => {
    const [bf16, int8, int4] = await Promise.all(['bf16', 'int8', 'int4'].map((weightFormat) => Engine.plan({ ...SMALL, weightFormat })));
    assert.ok(int8.weightBytes < 0.55 * bf16.weightBytes && int4.weightBytes < int8.weightBytes);
    for (const options of [{ weightFormat: 'int8' }, { weightFormat: 'int4Asymmetric', weightGroup: 64 }]) {
      await withEngine(options, async (engine) => {
        assert.ok((await engine.generate(STORY.request)).text.includes('upon a time'));
      });
    }
  });

  it('keeps packed weights and reads them again', async () => {
    const packedPath = fs.mkdtempSync(path.join(os.tmpdir(), 'pagedllm-packed-'));
    for (const [packed, packedReason] of [['saved', 'there was none yet'], ['read', '']]) {
      await withEngine({ packedPath }, async (engine) => {
        const info = engine.modelInfo();
        assert.deepEqual([info.packed, info.packedReason], [packed, packedReason]);
        assert.ok((await engine.generate(STORY.request)).text.includes('upon a time'));
      });
    }
    fs.rmSync(packedPath, { recursive: true });
    assert.deepEqual([engine.modelInfo().packed, engine.modelInfo().packedReason], ['unused', '']);
    await assert.rejects(Engine.open({ ...SMALL, packedPath }), { code: 'PLLM_E_IO' });
  });

  it('ends what its deadline ends with what it has', () => withEngine({ hostSteps: true }, async (engine) => {
    const request = await engine.add({ ...ENDLESS, deadlineMs: 299.5, keep: true });
    await engine.step();
    await sleep(310);
    assert.equal((await engine.step()).unfinished, 0);
    const outputs = engine.queue.poll();
    assert.deepEqual(outputs.map(({ tokens, finishReason }) => [tokens.length, finishReason]), [[1, null], [0, 'deadline']]);
    for (const how of [{ ignoreEos: true }, { continueGeneration: true }]) {
      await engine.resume(request, { ...how, deadlineMs: 50 });
      await sleep(60);
      await engine.step();
      assert.equal(engine.queue.poll().pop().finishReason, 'deadline');
    }
    assert.equal(engine.stats().finishedDeadline, 3);
  }));
});

describe('admitting', () => {
  it('refuses texts beyond maxPromptBytes', () => withEngine({ hostSteps: true, maxPromptBytes: 100 }, async (engine) => {
    const chat = [{ role: 'user', content: 'x'.repeat(100) }];
    for (const call of [() => engine.tokenize('x'.repeat(101)), () => engine.renderChat(chat),
      () => engine.add({ ...ENDLESS, prompt: 'x'.repeat(101) })]) {
      await refused('INVALID_ARGUMENT', 'max_prompt_bytes 100', call);
    }
    await engine.tokenize('x'.repeat(100));
  }));

  it('refuses what would only wait', async () => {
    for (const [limit, waits] of [[{ maxWaitingRequests: 1 }, '1 requests wait'], [{ maxWaitingTokens: 5 }, '2 tokens wait']]) {
      await withEngine({ hostSteps: true, ...limit }, async (engine) => {
        const other = { promptTokenIds: [70, 70, 70, 70] };
        await engine.add(ENDLESS);
        await refused('CAPACITY', waits, () => engine.add(other));
        assert.equal(engine.stats().admissionRejections, 1);
        await engine.step();
        await engine.add(other);
      });
    }
  });

  const narrow = { hostSteps: true, maxSeqs: 1, maxWaitingRequests: 1 };
  it('tells what would become of a request, without adding it', () => withEngine(narrow, async (engine) => {
    assert.deepEqual(await engine.predictAdmission(ENDLESS),
      { admits: true, fitsNow: true, firstTokenMs: null, waitingRequests: 0, waitingTokens: 0 });
    const [, told] = await Promise.all([engine.add(ENDLESS), engine.predictAdmission({ ...ENDLESS, userData: 1, keep: true })]);
    assert.deepEqual(told, { admits: false, fitsNow: false, firstTokenMs: null, waitingRequests: 1, waitingTokens: 2 });
    for (let i = 0; i < 3; i++) await engine.step();
    const later = await engine.predictAdmission(STORY.request);
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

  it('change while answers are made, and change none', () => withBudget(budget, async (engine) => {
    const answers = Promise.all([...EXPECTED, ...EXPECTED, ...EXPECTED].map(({ request }) => engine.generate(request)));
    for (const blocks of [64, 400, 100, 64, 300]) {
      await budget.resize(blocks * block);
      await sleep(20);
    }
    assert.deepEqual((await answers).map(({ text }) => text), [...ANSWERS, ...ANSWERS, ...ANSWERS]);
    assert.equal(budget.info().bytes, 300 * block);
    await soon(() => engine.stats().blocksTotal === 300, 'the engine has what there is');
  }));

  it('are there in every engine, and end with it', async () => {
    const own = engine.budget;
    own.close();
    await own.resize(SMALL.kvBytes / 2);
    await soon(() => engine.stats().blocksTotal === 256, 'the pool has become smaller');
    await withBudget(own, (other) => assert.equal(other.budget.info().engines, 2));
    await engine.close();
    await refused('CLOSED', 'the engine is closed', () => own.info());
    await refused('CLOSED', 'the engine is closed', () => own.resize(1));
  });

  it('live on in their engines when they are closed', () => withBudget(budget, async (engine) => {
    budget.close();
    budget.close();
    for (const call of [() => budget.info(), () => budget.resize(1), () => withBudget(budget, () => {}),
      () => Engine.plan({ ...SMALL, budget })]) {
      await refused('CLOSED', 'the budget is closed', call);
    }
    assert.equal((await engine.generate(STORY.request)).text, STORY.answer);
    assert.equal(engine.budget.info().bytes, 200 * block);
  }));

  it('are refused where they cannot be', () => withBudget(budget, async () => {
    for (const [code, message, call] of [
      ['INVALID_ARGUMENT', '0 bytes', () => Budget.create(0)],
      ['INVALID_ARGUMENT', 'may have up to 4', () => Budget.create(5, 4)],
      ['INVALID_ARGUMENT', 'bytes is -1', () => Budget.create(-1)],
      ['INVALID_ARGUMENT', 'maxBytes is', () => Budget.create(1, 2n ** 64n)],
      ['CAPACITY', 'made for up to', () => budget.resize(401 * block)],
      ['CAPACITY', `need ${64 * block} bytes to go on`, () => budget.resize(63 * block)],
      ['INVALID_ARGUMENT', 'bytes is -1', () => budget.resize(-1)],
      ['INVALID_ARGUMENT', 'both given', () => Engine.open({ ...SMALL, budget })],
    ]) {
      await refused(code, message, call);
    }
    await assert.rejects(Engine.open({ ...SMALL, budget: {} }), TypeError);
    const { bytes, engines } = budget.info();
    assert.deepEqual([bytes, engines], [200 * block, 1]);
  }));
});

describe('insight', () => {
  it('says in the last output how long what took', async () => {
    const begun = performance.now();
    const outputs = await collect(engine.stream({ prompt: 'Hello', maxTokens: 20, ignoreEos: true }));
    const took = performance.now() - begun;
    const { queuedMs, firstTokenMs, lastTokenMs } = outputs.pop();
    assert.ok(queuedMs > 0 && queuedMs < firstTokenMs && firstTokenMs < lastTokenMs && lastTokenMs < took, String(lastTokenMs));
    assert.ok(lastTokenMs > took / 1000, 'milliseconds');
    for (const output of outputs) assert.deepEqual([output.queuedMs, output.firstTokenMs, output.lastTokenMs], [0, 0, 0]);
    const long = { promptTokenIds: new Uint32Array(40).fill(70), maxTokens: 1 };
    assert.equal((await engine.generate(long)).cachedTokens, 0);
    assert.equal((await engine.generate(long)).cachedTokens, 32);
    await soon(() => engine.stats().promptTokensCached === 32, 'they are counted');
  });

  it('gives metrics in the format that Prometheus scrapes', async () => {
    await engine.generate({ prompt: 'Hello', maxTokens: 3, ignoreEos: true });
    await soon(() => engine.stats().finishedLength === 1, 'the request is counted');
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

describe('waiting', () => {
  it('reads two hundred streams at once without a thread for them', () => withEngine({ hostSteps: true }, async (engine) => {
    let maxThreads = 0;
    const stepUntil = async (done) => {
      for (let steps = 0; !done(); steps++) {
        assert.ok(steps < 10_000, 'it does not end');
        await engine.step();
        maxThreads = Math.max(maxThreads, threads());
      }
    };
    const first = engine.generate(EXPECTED[0].request).then(() => true);
    await stepUntil(() => engine.stats().finishedStop === 1); // libuv's pool is up
    assert.ok(await first);
    const threadsBefore = threads(), descriptorsBefore = descriptors();
    const texts = Promise.all(Array.from({ length: 200 }, async (_, i) => textOf(await collect(engine.stream(EXPECTED[i % EXPECTED.length].request)))));
    await soon(() => descriptors() >= descriptorsBefore + 200, 'each is waited for by its own descriptor'); // nobody steps: none can end
    maxThreads = threads();
    await stepUntil(() => engine.stats().finishedStop === 201);
    assert.deepEqual(await texts, Array.from({ length: 200 }, (_, i) => ANSWERS[i % ANSWERS.length]));
    assert.equal(maxThreads, threadsBefore);
    await soon(() => descriptors() <= descriptorsBefore, 'the step under way has let go of the last queue');
  }));

  it('leaves the event loop and the thread pool to others', () => withEngine({ hostSteps: true }, async (engine) => {
    let left = 50;
    const waiting = Array.from({ length: left }, async () => { // nobody steps
      const { finishReason } = await engine.generate({ ...ENDLESS, maxTokens: 1 });
      assert.equal(finishReason, 'length');
      left--;
    });
    await Promise.all(Array.from({ length: 50 }, () => fs.promises.readFile(path.join(MODEL, 'config.json'))));
    const before = process.cpuUsage();
    await sleep(300);
    const { user, system } = process.cpuUsage(before);
    assert.ok(user + system < 100_000, `waiting took ${user + system} microseconds of the processor`);
    assert.equal(left, 50);
    while (left) await engine.step();
    await Promise.all(waiting);
  }));

  it('lets a slow reader hold up nobody but itself', async () => {
    const slow = engine.stream(STORY.request, { capacity: 1 });
    const first = (await slow.next()).value;
    assert.deepEqual(await Promise.all(EXPECTED.map(async ({ request }) => (await engine.generate(request)).text)), ANSWERS);
    await soon(() => engine.stats().finishedStop === EXPECTED.length, 'the others are done');
    assert.deepEqual([engine.stats().paused, engine.stats().waiting], [1, 1]);
    assert.equal(textOf([first, ...await collect(slow)]), STORY.answer);
  });
});

describe('cancelling', () => {
  it('aborts the request when its loop is left', async () => {
    for await (const output of engine.stream(ENDLESS)) {
      assert.ok(output.request);
      break;
    }
    await aborted(1);
  });

  it('aborts the request when its signal is, also while nobody reads', async () => {
    const controller = new AbortController();
    const stream = engine.stream(ENDLESS, { signal: controller.signal, capacity: 1 });
    await stream.next();
    controller.abort();
    await aborted(1);
    await assert.rejects(collect(stream), { name: 'AbortError' });
    await assert.rejects(engine.generate(ENDLESS, { signal: AbortSignal.timeout(20) }), { name: 'TimeoutError' });
    await aborted(2);
    const reason = new Error('the client is gone');
    const gone = new AbortController();
    const generating = assert.rejects(engine.generate(ENDLESS, { signal: gone.signal }), (error) => error === reason);
    gone.abort(reason); // before the request is added
    await generating;
    await idle();
  });

  it('adds no request for a signal that is aborted already', async () => {
    const signal = AbortSignal.abort();
    await assert.rejects(engine.generate(ENDLESS, { signal }), { name: 'AbortError' });
    await assert.rejects(collect(engine.stream(ENDLESS, { signal })), { name: 'AbortError' });
    assert.equal(await engine.add({ prompt: 'Hello', maxTokens: 1 }), 1, 'the first one that gets an id');
  });

  it('lets go of a signal that outlives its requests', async () => {
    const { signal } = new AbortController();
    let listeners = 0;
    const { addEventListener, removeEventListener } = signal;
    signal.addEventListener = (...args) => { listeners++; addEventListener.apply(signal, args); };
    signal.removeEventListener = (...args) => { listeners--; removeEventListener.apply(signal, args); };
    await engine.generate({ prompt: 'Hello', maxTokens: 1 }, { signal });
    await refused('INVALID_ARGUMENT', '', () => engine.generate({ prompt: '', addSpecial: false }, { signal }));
    assert.equal(listeners, 0);
  });

  it('says so when a request is aborted by its id', async () => {
    const stream = engine.stream(ENDLESS);
    const { request } = (await stream.next()).value;
    engine.abort(request);
    assert.equal((await collect(stream)).pop().finishReason, 'abort');
    await aborted(1);
    await refused('NOT_FOUND', `request ${request} is unknown or has ended`, () => engine.abort(request));
  });

  it('aborts what writes to a queue that is closed, and wakes who waits for it', async () => {
    const queue = engine.createQueue(2), empty = engine.createQueue(2);
    await engine.add({ ...ENDLESS, queue });
    const waiting = empty.readable();
    empty.close();
    await waiting;
    queue.close();
    queue.close();
    await aborted(1);
    for (const call of [() => queue.poll(), () => queue.readable(), () => engine.add({ ...ENDLESS, queue })]) {
      await refused('CLOSED', 'the queue is closed', call);
    }
  });
});

describe('loading', () => {
  it('tells its progress up to the end', async () => {
    const told = [];
    await withEngine({ progress: (...now) => told.push(now) }, () => {});
    assert.ok(told.length > 2);
    assert.deepEqual(told, [...told].sort(([a], [b]) => a - b));
    assert.equal(told.at(-1)[0], told.at(-1)[1]);
  });

  it('stops for what progress throws, and for its signal', async () => {
    let calls = 0;
    const giveUp = () => { calls++; throw new RangeError('enough'); };
    await assert.rejects(Engine.open({ ...SMALL, progress: giveUp }), { name: 'RangeError', message: 'enough' });
    assert.equal(calls, 1);
    const controller = new AbortController();
    const abort = () => { calls++; controller.abort(); };
    await assert.rejects(Engine.open({ ...SMALL, signal: controller.signal, progress: abort }), { name: 'AbortError' });
    assert.equal(calls, 2);
    await assert.rejects(Engine.open({ ...SMALL, signal: AbortSignal.abort() }), { name: 'AbortError' });
  });

  it('leaves no descriptor and no thread of fifty engines', async () => {
    const live = () => withEngine({}, async (engine) => {
      const stream = engine.stream(ENDLESS);
      await stream.next();
      const woken = engine.queue.readable(); // by closing the engine
      await engine.generate({ prompt: 'Hello', maxTokens: 2 });
      await stream.return();
      return { woken };
    });
    await (await live()).woken;
    const before = [descriptors(), threads()];
    for (let i = 0; i < 50; i++) await live();
    await soon(() => descriptors() <= before[0] && threads() <= before[1], 'what the engines had is gone');
  });

  const run = (program, env = {}) =>
    promisify(execFile)(process.execPath, ['-e', program], { env: { ...process.env, ...env }, timeout: 30_000 });

  it('says where the library is looked for when it is not there', async () => {
    await assert.rejects(run(`require(${JSON.stringify(MODULE)})`, { PAGEDLLM_LIBRARY: '/nowhere/libpagedllm.so' }),
      /nowhere.*set PAGEDLLM_LIBRARY/s);
  });

  it('lets a process end with a live engine in the middle of a stream', async () => {
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

describe('bad input', () => {
  it('is refused in options, with code and reason', async () => {
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

  it('is refused in requests, with code and reason, and the engine goes on', async () => {
    const hello = { prompt: 'Hello' };
    for (const [code, message, request, options] of [
      ['INVALID_ARGUMENT', 'the prompt is empty', { prompt: '', addSpecial: false }],
      ['INVALID_ARGUMENT', 'the prompt is empty', { promptTokenIds: [] }],
      ['INVALID_ARGUMENT', 'give one of them', {}],
      ['INVALID_ARGUMENT', '', { prompt: 'Hello', promptTokenIds: [70] }],
      ['INVALID_ARGUMENT', '5000 tokens', { promptTokenIds: new Uint32Array(5000).fill(70) }],
      ['INVALID_ARGUMENT', 'not UTF-8: byte 2', { prompt: Buffer.from('ab\xff', 'latin1') }],
      ['INVALID_ARGUMENT', '70000, beyond the vocabulary of 1024', { promptTokenIds: [70000] }],
      ['INVALID_ARGUMENT', '32 bits', { promptTokenIds: [2 ** 32] }],
      ['INVALID_ARGUMENT', '32 bits', { promptTokenIds: [-1] }],
      ['INVALID_ARGUMENT', '32 bits', { promptTokenIds: [1.5] }],
      ['INVALID_ARGUMENT', 'temperature is NaN', { ...hello, temperature: NaN }],
      ['INVALID_ARGUMENT', 'temperature', { ...hello, temperature: 1e300 }],
      ['INVALID_ARGUMENT', 'top_p', { ...hello, topP: -0.5 }],
      ['INVALID_ARGUMENT', 'maxTokens is 4294967296', { ...hello, maxTokens: 2 ** 32 }],
      ['INVALID_ARGUMENT', 'topK is -1', { ...hello, topK: -1 }],
      ['INVALID_ARGUMENT', 'seed is -1', { ...hello, seed: -1 }],
      ['INVALID_ARGUMENT', '1024', { ...hello, stopTokenIds: [1024] }],
      ['INVALID_ARGUMENT', 'stop', { ...hello, stop: [Buffer.from('\xff', 'latin1')] }],
      ['INVALID_ARGUMENT', 'stop', { ...hello, stop: '' }],
      ['INVALID_ARGUMENT', 'n is 0', { ...hello, n: 0 }],
      ['INVALID_ARGUMENT', 'n is 4294967297', { ...hello, n: 2 ** 32 + 1 }],
      ['INVALID_ARGUMENT', 'n is -1', { ...hello, n: -1 }],
      ['INVALID_ARGUMENT', 'max_seqs is 64', { ...hello, n: 2 ** 32 - 1 }],
      ['INVALID_ARGUMENT', 'best_of is 1 and n is 2', { ...hello, n: 2, bestOf: 1 }],
      ['INVALID_ARGUMENT', 'width is 1', { ...hello, beam: { width: 1 } }],
      ['INVALID_ARGUMENT', '3 groups', { ...hello, beam: { width: 4, groups: 3 } }],
      ['INVALID_ARGUMENT', 'length_penalty is NaN', { ...hello, beam: { lengthPenalty: NaN } }],
      ['INVALID_ARGUMENT', 'temperature', { ...hello, beam: {}, temperature: 0.5 }],
      ['INVALID_ARGUMENT', 'truncatePromptTokens is -1', { ...hello, truncatePromptTokens: -1 }],
      ['INVALID_ARGUMENT', 'typical_p', { ...hello, typicalP: 0 }],
      ['INVALID_ARGUMENT', 'mirostat', { ...hello, mirostatTau: -1 }],
      ['INVALID_ARGUMENT', 'repetition_penalty', { ...hello, repetitionPenalty: 0 }],
      ['INVALID_ARGUMENT', 'topLogprobs is -1', { ...hello, topLogprobs: -1 }],
      ['INVALID_ARGUMENT', 'flags lacks', { ...hello, logprobs: false, topLogprobs: 2 }],
      ['INVALID_ARGUMENT', '1024', { ...hello, logitBias: { 1024: 1 } }],
      ['INVALID_ARGUMENT', 'token is -1', { ...hello, logitBias: { '-1': 1 } }],
      ['INVALID_ARGUMENT', 'token is NaN', { ...hello, logitBias: { x: 1 } }],
      ['INVALID_ARGUMENT', 'a bad word', { ...hello, badWords: ['good', Buffer.from([255])] }],
      ['INVALID_ARGUMENT', 'a bad word is empty', { ...hello, badWordsIds: [[]] }],
      ['INVALID_ARGUMENT', '1024', { ...hello, badWordsIds: [[1], [2, 1024]] }],
      ['INVALID_ARGUMENT', '1024', { ...hello, allowedTokenIds: [1024] }],
      ['INVALID_ARGUMENT', 'dry', { ...hello, dry: { base: 0.5 } }],
      ['INVALID_ARGUMENT', 'sequence breaker', { ...hello, dry: { sequenceBreakers: [''] } }],
      ['INVALID_ARGUMENT', 'not valid JSON', { ...hello, grammar: { jsonSchema: '{' } }],
      ['INVALID_ARGUMENT', 'nonsense', { ...hello, grammar: { jsonSchema: { type: 'nonsense' } } }],
      ['INVALID_ARGUMENT', 'regular expression', { ...hello, grammar: { regex: '(' } }],
      ['INVALID_ARGUMENT', '0 texts', { ...hello, grammar: { choice: [] } }],
      ['INVALID_ARGUMENT', 'nope', { ...hello, grammar: { lark: 'start: nope' } }],
      ['INVALID_ARGUMENT', 'userData', { ...hello, userData: 2n ** 64n }],
      ['INVALID_ARGUMENT', 'capacity is 0', hello, { capacity: 0 }],
      ['INVALID_ARGUMENT', 'capacity is -1', hello, { capacity: -1 }],
      ['INVALID_ARGUMENT', 'deadlineMs is 0', { ...hello, deadlineMs: 0 }],
      ['INVALID_ARGUMENT', 'deadlineMs is -0.5', { ...hello, deadlineMs: -0.5 }],
      ['INVALID_ARGUMENT', 'deadlineMs is NaN', { ...hello, deadlineMs: NaN }],
      ['INVALID_ARGUMENT', 'deadlineMs is Infinity', { ...hello, deadlineMs: Infinity }],
      ['INVALID_ARGUMENT', 'deadlineMs is 1e+300', { ...hello, deadlineMs: 1e300 }],
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
    await withEngine({}, (other) =>
      refused('INVALID_ARGUMENT', 'queue', () => engine.add({ ...hello, queue: other.createQueue(1) })));
    await idle();
    assert.equal((await engine.generate(STORY.request)).text, STORY.answer);
  });

  it('is refused in calls on sequences, with code and reason', async () => {
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
      ['CAPACITY', '4294967295 children', () => engine.fork(sequence, { n: 2 ** 32 - 1 })],
      ['INVALID_ARGUMENT', 'n is 4294967296', () => engine.fork(sequence, { n: 2 ** 32 })],
      ['INVALID_ARGUMENT', 'at is -1', () => engine.fork(sequence, { at: -1, queue })],
      ['INVALID_ARGUMENT', 'cannot fork at 0', () => engine.fork(sequence, { at: 0, queue })],
      ['INVALID_ARGUMENT', 'cannot fork at 6', () => engine.fork(sequence, { at: 6, queue })],
      ['INVALID_ARGUMENT', 'queue has been freed', () => engine.fork(sequence)],
      ['INVALID_ARGUMENT', 'queue has been freed', () => engine.resume(sequence)],
      ['INVALID_ARGUMENT', 'queue has been freed', () => engine.resume(sequence, { continueGeneration: true })],
      ['INVALID_ARGUMENT', '1024', () => engine.append(sequence, [1024])],
      ['INVALID_ARGUMENT', '2000 more do not fit', () => engine.append(sequence, new Uint32Array(2000))],
      ['INVALID_ARGUMENT', 'not to 0', () => engine.rewind(sequence, 0)],
      ['INVALID_ARGUMENT', 'not to 6', () => engine.rewind(sequence, 6)],
      ['INVALID_ARGUMENT', 'length is -1', () => engine.rewind(sequence, -1)],
      ['INVALID_ARGUMENT', 'regular expression', () => engine.generateResumed(sequence, { grammar: { regex: '(' } })],
      ['INVALID_ARGUMENT', 'echo', () => engine.generateResumed(sequence, { echo: true })],
      ['INVALID_ARGUMENT', 'empty', () => engine.pin({ promptTokenIds: [] })],
      ['INVALID_ARGUMENT', 'give one of them', () => engine.pin({})],
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
    await idle();
    assert.equal((await engine.generate(STORY.request)).text, STORY.answer);
  });

  it('is refused by the other calls', async () => {
    await refused('NOT_FOUND', '4711', () => engine.abort(4711));
    await refused('INVALID_ARGUMENT', 'request is -1', () => engine.abort(-1));
    await refused('INVALID_ARGUMENT', '1024', () => engine.detokenize([1024]));
    await refused('INVALID_ARGUMENT', 'UTF-8', () => engine.tokenize(Buffer.from([255])));
    await refused('INVALID_ARGUMENT', '', () => engine.renderChat(7));
    await assert.rejects(engine.renderChat(undefined), TypeError);
    assert.equal(await engine.detokenize([]), '');
    assert.deepEqual(await engine.tokenize(''), []);
    await withEngine({ skipTokenizer: true }, (engine) => refused('UNSUPPORTED', '', () => engine.tokenize('Hello')));
  });
});

describe('closing', () => {
  it('refuses every later use', async () => {
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
      () => engine.metrics(), () => engine.budget,
    ]) {
      await refused('CLOSED', 'the engine is closed', call);
    }
    await refused('CLOSED', '', () => queue.poll());
    queue.close();
  });

  it('ends streams and calls that are under way', async () => {
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

  it('waits for a step under way', () => withEngine({ hostSteps: true }, async (engine) => {
    await engine.add(ENDLESS);
    const step = engine.step();
    await engine.close();
    assert.equal((await step).sequences, 1);
  }));

  it('leaves to a queue what it holds', async () => {
    const queue = engine.createQueue(3);
    await engine.add({ ...STORY.request, queue });
    await soon(() => engine.stats().paused === 1, 'the queue is full');
    await engine.close();
    const outputs = queue.poll();
    assert.deepEqual(outputs.flatMap((output) => output.tokens), STORY.token_ids.slice(0, 3));
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
