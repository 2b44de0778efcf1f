// Checks a server with the official Node client of OpenAI. The variables SERVER_URL, SERVER_KEY and
// SERVER_MODEL select it; see ../conformance.py. SERVER_WITHOUT lists endpoints that a server lacks.
import assert from 'node:assert/strict';
import test from 'node:test';
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: `${process.env.SERVER_URL}/v1`, apiKey: process.env.SERVER_KEY ?? 'test', maxRetries: 0 });
const model = process.env.SERVER_MODEL ?? 'tiny';
const without = (process.env.SERVER_WITHOUT ?? '').split(',');
const messages = [{ role: 'user', content: 'What is 7 + 5?' }];
// A grammar makes the model write this response in the format of Hermes.
const reply = '<think>It adds.</think>I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 5}}\n</tool_call>';
const script = { structured_outputs: { choice: [reply] } };
const parameters = { type: 'object', properties: { a: { type: 'integer' }, b: { type: 'integer' } } };
const tools = [{ type: 'function', function: { name: 'add', parameters } }];

test('models are listed', async () => {
  const names = [];
  for await (const entry of client.models.list()) names.push(entry.id);
  assert.ok(names.includes(model));
});

test('a completion is the same streamed and whole', async () => {
  const request = { model, prompt: 'The capital of France is', temperature: 0 };
  const whole = await client.completions.create(request);
  let text = '';
  for await (const event of await client.completions.create({ ...request, stream: true })) text += event.choices[0].text;
  assert.equal(text, whole.choices[0].text);
  assert.match(text, /^ Paris/);
});

test('a streamed chat has its content, reasoning and calls', async () => {
  const final = await client.chat.completions.stream({ model, messages, tools, ...script }).finalChatCompletion();
  const { message, finish_reason } = final.choices[0];
  assert.equal(finish_reason, 'tool_calls');
  assert.equal(message.content.trim(), 'I add.');
  assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { a: 7, b: 5 });
});

test('the usage ends a stream', async () => {
  const options = { include_usage: true };
  let usage;
  for await (const event of await client.chat.completions.create({ model, messages, stream: true, stream_options: options })) usage = event.usage;
  assert.ok(usage.completion_tokens > 0);
});

test('errors have the classes of the client', async () => {
  await assert.rejects(client.completions.create({ model, prompt: 'a', top_p: 2 }), OpenAI.BadRequestError);
  await assert.rejects(client.completions.create({ model: 'none', prompt: 'a' }), OpenAI.NotFoundError);
  const stranger = new OpenAI({ baseURL: client.baseURL, apiKey: 'wrong', maxRetries: 0 });
  await assert.rejects(stranger.completions.create({ model, prompt: 'a' }), OpenAI.AuthenticationError);
});

test('a response has items', { skip: without.includes('responses') }, async () => {
  const request = { model, input: 'What is 7 + 5?', tools: [{ type: 'function', name: 'add', parameters, strict: false }], ...script };
  const kinds = ['reasoning', 'message', 'function_call'];
  const whole = await client.responses.create(request);
  assert.deepEqual(whole.output.map((item) => item.type), kinds);
  const final = await client.responses.stream(request).finalResponse();
  assert.deepEqual(final.output.map((item) => item.type), kinds);
  assert.deepEqual(JSON.parse(final.output[2].arguments), { a: 7, b: 5 });
});
