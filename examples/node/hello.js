'use strict';
// Streams the answers to three prompts at once. The second request is aborted after a few tokens.
// usage: hello.js MODEL_DIR
// PAGEDLLM_LIBRARY: path of libpagedllm.so; default: target/release of this repository.
const { Engine } = require('../../bindings/node/pagedllm.js');

async function ask(engine, question) {
  const prompt = await engine.renderChat([{ role: 'user', content: question }]);
  // The template has written the special tokens.
  const request = await engine.add({ prompt, addSpecial: false, temperature: 0 });
  console.log(`[${request}] ${question}`);
  return request;
}

async function main(modelPath = 'examples/model') {
  const engine = await Engine.open({ modelPath, hostSteps: true });
  await ask(engine, 'What is the capital of France?');
  const story = await ask(engine, 'Tell me a short story.');
  await ask(engine, 'What is 7 + 5?');
  let unfinished;
  do {
    ({ unfinished } = await engine.step());
    for (const { request, text, finishReason, generatedTokens } of engine.queue.poll()) {
      console.log(`[${request}] ${text}${finishReason ? ` (${finishReason})` : ''}`);
      if (request === story && generatedTokens === 8 && !finishReason) engine.abort(story);
    }
  } while (unfinished);
  await engine.close();
}

main(process.argv[2]).catch((error) => {
  console.error(`error ${error.code}: ${error.message}`);
  process.exitCode = 1;
});
