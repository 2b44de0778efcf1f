'use strict';
// Sampling parameters, structured output, several results.
const assert = require('node:assert/strict');
const { describe, it, beforeEach, afterEach } = require('node:test');
const { Engine } = require('../pagedllm.js');
const { LONG_CASE, ENDLESS, SMALL, collect, idle, withEngine } = require('./support.js');

let engine;
beforeEach(async () => { engine = await Engine.open(SMALL); });
afterEach(() => engine.close());

describe('sampling', () => {
  const ask = (sampling) => engine.generate({ ...LONG_CASE.request, maxTokens: 12, ignoreEos: true, ...sampling });

  it('allowed tokens and bad words restrict the choice', async () => {
    assert.deepEqual(new Set((await ask({ allowedTokenIds: [70] })).tokens), new Set([70]));
    const plain = await ask({});
    assert.ok(plain.text.includes('time'));
    assert.ok(!(await ask({ badWords: ['time', ' time'] })).text.includes('time'));
    assert.ok(!(await ask({ badWordsIds: [[1, 2], [plain.tokens[3]]] })).tokens.includes(plain.tokens[3]));
  });

  it('each parameter has its effect', async () => {
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
    const cut = await engine.generate({ ...LONG_CASE.request, truncatePromptTokens: 4, maxTokens: 1 });
    assert.equal(cut.promptTokens, 4);
  });

  it('log probabilities have one entry per token', async () => {
    const prompt = await engine.tokenize(LONG_CASE.prompt);
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

  it('echo and includeStop add the prompt and the stop string', async () => {
    const hello = { prompt: 'Hello', temperature: 0, maxTokens: 3 };
    assert.equal((await engine.generate({ ...hello, echo: true })).text, `Hello${(await engine.generate(hello)).text}`);
    const { text } = await ask({ maxTokens: 60, stop: 'village', includeStop: true });
    assert.equal(text, LONG_CASE.answer.slice(0, LONG_CASE.answer.indexOf('village') + 7));
  });

  it('log probabilities of an echoed prompt begin with NaN', async () => {
    const { promptTokens, promptLogprobs, tokens, logprobs } = await ask({ echo: true, logprobs: true, promptLogprobs: true });
    assert.equal(logprobs.length, tokens.length);
    assert.deepEqual(logprobs.slice(0, promptTokens), [NaN, ...promptLogprobs]);
    assert.ok(logprobs.slice(1).every((p) => p <= 0), logprobs);
  });

  it('a prompt is scored without a generated token', async () => {
    const { promptLogprobs } = await ask({ promptLogprobs: true });
    for (const promptLogprobsStart of [0, 5]) {
      const scored = await ask({ maxTokens: 0, promptLogprobs: true, promptLogprobsStart });
      assert.deepEqual([scored.finishReason, scored.tokens, scored.text], ['length', [], '']);
      assert.deepEqual(scored.promptLogprobs, promptLogprobs.slice(Math.max(promptLogprobsStart, 1) - 1));
    }
  });

  it('log probabilities of appended tokens are NaN', () => withEngine({ hostSteps: true }, async (engine) => {
    const sequence = await engine.add({ ...ENDLESS, maxTokens: 8, logprobs: true, outputKind: 'cumulative' });
    const outputs = [];
    while (!outputs.length) {
      await engine.step();
      outputs.push(...engine.queue.poll());
    }
    engine.append(sequence, [70, 71]);
    while ((await engine.step()).unfinished) outputs.push(...engine.queue.poll());
    const { tokens, logprobs } = [...outputs, ...engine.queue.poll()].pop();
    assert.equal(logprobs.length, tokens.length);
    assert.deepEqual(tokens.filter((_, i) => Number.isNaN(logprobs[i])), [70, 71]);
  }));

  it('outputKind selects delta, cumulative or final outputs', async () => {
    const request = { ...LONG_CASE.request, maxTokens: 6, topLogprobs: 1, promptLogprobs: true };
    const streams = {};
    for (const outputKind of ['delta', 'cumulative', 'final']) {
      streams[outputKind] = await collect(engine.stream({ ...request, outputKind }));
    }
    const tokens = LONG_CASE.token_ids.slice(0, 6);
    const tokensOf = (kind) => streams[kind].map((output) => output.tokens).filter((tokens) => tokens.length);
    assert.deepEqual(tokensOf('delta'), tokens.map((token) => [token]));
    assert.deepEqual(tokensOf('cumulative'), tokens.map((_, i) => tokens.slice(0, i + 1)));
    assert.deepEqual(tokensOf('final'), [tokens]);
    assert.equal(streams.final.length, 1);
    const answers = await Promise.all(Object.keys(streams).map((outputKind) => engine.generate({ ...request, outputKind })));
    const result = ({ request, sequence, queuedMs, firstTokenMs, lastTokenMs, ...answer }) => answer;
    for (const answer of answers) assert.deepEqual(result(answer), result(answers[0]));
  });
});

describe('structured output', () => {
  const ask = (grammar, sampling) =>
    engine.generate({ prompt: 'Give JSON for Anna, 31, Paris.', temperature: 0, maxTokens: 100, grammar, ...sampling });

  it('conforms to its JSON schema', async () => {
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

  it('matches a regular expression, a choice and a Lark grammar', async () => {
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

  it('have an index and a finish reason each', async () => {
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
    await idle(engine);
  });

  it('are the best of bestOf samples, best first', async () => {
    const drawn = await engine.generateAll({ ...DRAWN, n: 5 });
    const best = await engine.generateAll({ ...DRAWN, n: 2, bestOf: 5 });
    drawn.sort((a, b) => b.score - a.score);
    assert.deepEqual(best.map(({ index, tokens }) => [index, tokens]), [[0, drawn[0].tokens], [1, drawn[1].tokens]]);
  });

  it('are beams in the order of their scores', async () => {
    const search = { prompt: 'Hello', maxTokens: 10 };
    const beams = await engine.generateAll({ ...search, n: 3, beam: { width: 4 } });
    assert.deepEqual(beams.map(({ index }) => index), [0, 1, 2]);
    assert.ok(beams[0].score >= beams[1].score && beams[1].score >= beams[2].score);
    const ways = [{ groups: 2, diversityPenalty: 1 }, { lengthPenalty: 0 }, { earlyStopping: 'yes' }, { earlyStopping: 'never' }];
    for (const beam of ways) {
      assert.equal((await engine.generate({ ...search, beam })).index, 0);
    }
    await idle(engine);
  });

  it('are all aborted when the loop ends, the signal aborts, or by request id', async () => {
    for await (const output of engine.stream({ ...ENDLESS, n: 4 })) if (output.index === 3) break;
    await idle(engine);
    await assert.rejects(engine.generateAll({ ...ENDLESS, n: 4 }, { signal: AbortSignal.timeout(20) }), { name: 'TimeoutError' });
    await idle(engine);
    const stream = engine.stream({ ...ENDLESS, n: 4 });
    engine.abort((await stream.next()).value.request);
    const ends = (await collect(stream)).filter((output) => output.finishReason);
    assert.deepEqual(ends.map(({ index, finishReason }) => `${index} ${finishReason}`).sort(),
      ['0 abort', '1 abort', '2 abort', '3 abort']);
  });
});
