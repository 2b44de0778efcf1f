'use strict';
/*
 * libpagedllm for Node: LLM serving inside your own process. A wrapper over koffi. pagedllm.d.ts
 * documents each call. abi.js declares the C API, and runtime.js has the conversions that it uses.
 *
 *     const { Engine } = require('pagedllm');
 *     const engine = await Engine.open({ modelPath: 'models/mine' });
 *     const request = { prompt: 'Once upon a time', maxTokens: 100 };
 *     for await (const output of engine.stream(request)) process.stdout.write(output.text);
 *     await engine.close();
 *
 * Waiting. A thread of the engine steps it. Each stream has a queue, so that a slow reader pauses
 * only its own request. libuv watches the eventfd of the queue (koffi.node.poll), and polling the
 * queue takes its outputs without waiting. A stream needs a descriptor and no thread, and the event
 * loop never blocks.
 *
 * Limits. koffi.node.poll is new and not yet in the manual of koffi, so its version is pinned. If a
 * worker thread is terminated while koffi polls, the process crashes, so engines are for the main
 * thread. eventfd exists only on Linux.
 *
 * Thread pool. Loading, tokenizing, a host's own steps and closing run on libuv's thread pool.
 * Requests are added one after the other, in the order of the calls, so that they use only one
 * thread of the pool.
 *
 * Logits hooks are not available. The stepping thread would call the hook for every token, and
 * JavaScript runs on another thread, so each token of all requests would wait for the event loop.
 */
const util = require('node:util');
const { isMainThread } = require('node:worker_threads');
const { PagedllmError, array, bytes, fill, flag, koffi, lengthOf, split, text, tokenIds, unsigned, utf8 } = require('./runtime.js');
const abi = require('./abi.js');
const { lib } = abi;

// Converts and frees the error of a call. Returns null if the call succeeded.
function takenError(error) {
  if (!error) return null;
  const numbers = {
    promptTokens: lib.error_prompt_tokens(error) || null,
    maxModelLen: lib.error_max_model_len(error) || null,
    isTemporary: lib.error_is_temporary(error) !== 0,
  };
  const taken = new PagedllmError(abi.codeOf(lib.error_code(error)), lib.error_message(error), numbers);
  lib.error_free(error);
  return taken;
}

function check(error) {
  const thrown = takenError(error);
  if (thrown) throw thrown;
}

// Makes a call on a thread of the pool. koffi passes buffers as bare pointers, so the arguments are
// kept until the call returns.
const inUse = new Set();
function onPool(call, ...args) {
  inUse.add(args);
  return new Promise((resolve, reject) => {
    call.async(...args, (failed, result) => {
      inUse.delete(args);
      if (failed) reject(failed);
      else resolve(result);
    });
  });
}

// ---- conversions between C and JavaScript -------------------------------------------------------

// Returns the struct that a call fills, as `read` converts it.
function filled(type, read, call, ...subject) {
  const c = { structSize: koffi.sizeof(type) };
  check(call(...subject, c));
  return read(c);
}

async function filledOnPool(type, read, call, ...subject) {
  const c = { structSize: koffi.sizeof(type) };
  check(await onPool(call, ...subject, c));
  return read(c);
}

function toRequest(given) {
  const [own, sampling] = split(abi.request, given);
  return { ...fill(abi.request, own), sampling: fill(abi.sampling, sampling) };
}

// Returns the text of a pllm_bytes and frees it.
function taken(bytes) {
  const result = text(lib.bytes_data(bytes), lib.bytes_len(bytes));
  lib.bytes_free(bytes);
  return result;
}

// Returns the state of an exported sequence.
function toState(c) {
  const error = abi.errorOf(c);
  if (error) throw error;
  return new Uint8Array(koffi.view(c.sequenceState, c.sequenceStateLen)).slice();
}

// Returns one completion for each sequence, by index.
async function completionsOf(stream, { outputKind }) {
  const byIndex = [];
  for await (const output of stream) (byIndex[output.index] ??= []).push(output);
  return byIndex.filter(Boolean).map((outputs) => completionOf(outputKind === 'cumulative' ? outputs.slice(-1) : outputs));
}

function completionOf(outputs) {
  const { error, generatedTokens, userData, computedTokens, ...completion } = outputs.at(-1);
  for (const name of Object.keys(completion)) {
    if (outputs.some((output) => Array.isArray(output[name]))) completion[name] = outputs.flatMap((output) => output[name] ?? []);
  }
  return { ...completion, text: outputs.map((output) => output.text).join('') };
}

// ---- handles ------------------------------------------------------------------------------------

// An object of the library. It is freed after close() when no call on the pool uses it.
class Handle {
  #what;
  #pointer;
  #free;
  #uses = 0;
  #closed = false;
  #settle;
  #freed = new Promise((resolve) => { this.#settle = resolve; });

  constructor(what, pointer, free) {
    this.#what = what;
    this.#pointer = pointer;
    this.#free = free;
  }

  get pointer() {
    if (this.#closed) throw new PagedllmError('PLLM_E_CLOSED', `the ${this.#what} is closed`);
    return this.#pointer;
  }

  // Keeps the pointer alive until the promise of `use` is settled.
  async during(use) {
    const pointer = this.pointer;
    this.#uses++;
    try {
      return await use(pointer);
    } finally {
      this.#uses--;
      if (this.#closed) this.#freeWhenUnused();
    }
  }

  // Fulfilled when the object is freed.
  close() {
    if (!this.#closed) {
      this.#closed = true;
      this.#freeWhenUnused();
    }
    return this.#freed;
  }

  #freeWhenUnused() {
    if (this.#uses === 0) this.#settle(this.#free(this.#pointer));
  }
}

class Queue {
  #handle;
  #watch = null; // the koffi watcher, from the first wait on
  #readable = null; // the promise that readers await; #wake fulfils it
  #wake;

  // Internal: Engine.createQueue creates queues.
  constructor(what, pointer, free) {
    this.#handle = new Handle(what, pointer, free);
  }

  poll() {
    return this.take(abi.toOutput);
  }

  // Internal, for Engine: takes all outputs and reads each with `read`.
  take(read) {
    const batch = [null];
    check(lib.queue_poll(this.#handle.pointer, 0, batch));
    try {
      return Array.from({ length: lib.outputs_len(batch[0]) }, (_, i) => read(koffi.decode(lib.outputs_get(batch[0], i), abi.Output)));
    } finally {
      lib.outputs_free(batch[0]);
    }
  }

  readable() {
    const { pointer } = this.#handle;
    if (!this.#readable) {
      this.#startWatch(pointer);
      this.#readable = new Promise((resolve) => { this.#wake = resolve; });
    }
    return this.#readable;
  }

  close() {
    this.#watch?.close(); // before its descriptor is closed
    this.#watch = null;
    this.#woken();
    this.#handle.close();
  }

  // Internal, for Engine: keeps the pointer alive until the promise of `use` is settled.
  during(use) {
    return this.#handle.during(use);
  }

  // Internal, for Engine: the pointer, for synchronous calls.
  get pointer() {
    return this.#handle.pointer;
  }

  #startWatch(pointer) {
    // koffi calls back outside of Node's callback scopes, at whose end promise reactions run. An
    // immediate has such a scope.
    const onReadable = () => {
      this.#watch?.stop();
      setImmediate(() => this.#woken());
    };
    if (this.#watch) {
      this.#watch.start(onReadable);
    } else {
      const fd = [0];
      check(lib.queue_get_event_fd(pointer, fd));
      this.#watch = koffi.node.poll(fd[0], onReadable);
    }
  }

  #woken() {
    this.#readable = null;
    this.#wake?.();
  }
}

class Budget {
  #handle;
  #borrowed; // the budget of an engine, alive as long as the engine's handle; else null

  static create(bytes, maxBytes = bytes) {
    const pointer = [null];
    check(lib.budget_create(unsigned('bytes', bytes, 64), unsigned('maxBytes', maxBytes, 64), pointer));
    return new Budget(new Handle('budget', pointer[0], lib.budget_free));
  }

  // Internal: Budget.create and Engine.budget create budgets.
  constructor(handle, borrowed = null) {
    this.#handle = handle;
    this.#borrowed = borrowed;
  }

  async resize(bytes) {
    unsigned('bytes', bytes, 64);
    return this.during(async (budget) => check(await onPool(lib.budget_resize, budget, bytes)));
  }

  info() {
    const { pointer } = this.#handle;
    return filled(abi.BudgetInfo, abi.toBudgetInfo, lib.budget_get_info, this.#borrowed ?? pointer);
  }

  close() {
    if (!this.#borrowed) this.#handle.close();
  }

  // Internal, for Engine: keeps the pointer alive until the promise of `use` is settled.
  during(use) {
    return this.#handle.during((pointer) => use(this.#borrowed ?? pointer));
  }
}

function withBudget(budget, use) {
  if (budget === undefined) return use(null);
  if (!(budget instanceof Budget)) throw new TypeError(`budget is ${util.inspect(budget)}; it must be a Budget`);
  return budget.during(use);
}

// ---- engines ------------------------------------------------------------------------------------

class Engine {
  #handle;
  #queue;
  #lastAdded = Promise.resolve();

  static async open({ hostSteps = false, progress, signal, budget, ...given }) {
    if (!isMainThread) throw new PagedllmError('PLLM_E_UNSUPPORTED', 'Engine.open was called in a worker thread; open the engine on the main thread');
    signal?.throwIfAborted();
    const options = fill(abi.engineOptions, given);
    let thrown;
    if (progress || signal) {
      options.progress = (_data, done, total) => {
        try {
          signal?.throwIfAborted();
          progress?.(done, total);
          return 0;
        } catch (error) {
          thrown ??= { error };
          return 1;
        }
      };
    }
    const pointer = [null];
    const error = await withBudget(budget, (budget) => onPool(lib.engine_create, { ...options, budget }, pointer));
    if (error && thrown) {
      lib.error_free(error);
      throw thrown.error;
    }
    check(error);
    const engine = new Engine(pointer[0]);
    try {
      signal?.throwIfAborted();
      if (!hostSteps) engine.start();
    } catch (error) {
      await engine.close();
      throw error;
    }
    return engine;
  }

  static async plan({ budget, ...given }) {
    const options = fill(abi.engineOptions, given);
    return withBudget(budget, (budget) => filledOnPool(abi.Plan, abi.toPlan, lib.engine_plan, { ...options, budget }));
  }

  // Internal: Engine.open creates engines.
  constructor(pointer) {
    this.#handle = new Handle('engine', pointer, (pointer) => onPool(lib.engine_free, pointer));
    this.#queue = new Queue('engine', lib.engine_queue(pointer), () => {});
  }

  close() {
    this.#queue.close();
    return this.#handle.close();
  }

  async generate(request, options) {
    return (await this.generateAll(request, options))[0];
  }

  async generateAll(request, { signal } = {}) {
    return completionsOf(this.stream(request, { signal }), request);
  }

  async *stream(request, options = {}) {
    const { n = 1 } = request;
    yield* this.#outputs(options, Number(n), (queue) => this.add({ ...request, queue }));
  }

  // Yields the outputs of the request that `begin` adds, until the given number of its sequences
  // have ended. The outputs include those of forks that write to the same queue.
  async *#outputs({ signal, capacity = abi.QUEUE_CAPACITY }, sequences, begin) {
    signal?.throwIfAborted();
    const queue = this.createQueue(capacity);
    const close = () => queue.close();
    signal?.addEventListener('abort', close, { once: true });
    try {
      const request = await begin(queue);
      for (;;) {
        for (const output of queue.poll()) {
          if (output.error) throw output.error;
          signal?.throwIfAborted();
          yield output;
          if (output.finishReason && output.request === request) sequences--;
          if (!sequences) return;
        }
        await queue.readable();
      }
    } catch (error) {
      throw signal?.aborted ? signal.reason : error; // aborting the signal closes the queue
    } finally {
      signal?.removeEventListener('abort', close);
      queue.close();
    }
  }

  async add({ queue, ...request }) {
    return this.#inOrder(queue, toRequest(request), async (engine, c) => {
      const id = [0];
      check(await onPool(lib.engine_add_request, engine, c, id));
      return id[0];
    });
  }

  async predictAdmission({ queue, ...request }) {
    return this.#inOrder(queue, toRequest(request), (engine, c) =>
      filledOnPool(abi.Admission, abi.toAdmission, lib.engine_predict_admission, engine, c));
  }

  // Makes calls on the pool one after the other, with a struct that names the queue.
  #inOrder(queue, c, call) {
    const turn = () => this.#handle.during((engine) => {
      const called = (queue) => call(engine, { ...c, queue });
      return queue ? queue.during(called) : called(null);
    });
    const done = this.#lastAdded.then(turn);
    this.#lastAdded = done.catch(() => {});
    return done;
  }

  abort(request) {
    check(lib.engine_abort(this.#handle.pointer, unsigned('request', request, 64)));
  }

  fork(sequence, { queue, ...how } = {}) {
    const engine = this.#handle.pointer;
    const c = { ...fill(abi.fork, split(abi.fork, how)[0]), queue: queue ? queue.pointer : null };
    // The library rejects a larger n before it writes an id.
    const children = new BigUint64Array(Math.min(Number(c.n), this.stats().blocksTotal) || 1);
    check(lib.sequence_fork(engine, unsigned('sequence', sequence, 64), c, children));
    return Array.from(children, (id) => (id > Number.MAX_SAFE_INTEGER ? id : Number(id)));
  }

  append(sequence, tokens) {
    const ids = tokenIds('tokens', tokens);
    check(lib.sequence_append(this.#handle.pointer, unsigned('sequence', sequence, 64), ids, lengthOf(ids)));
  }

  rewind(sequence, length) {
    check(lib.sequence_rewind(this.#handle.pointer, unsigned('sequence', sequence, 64), unsigned('length', length, 64)));
  }

  async resume(sequence, { queue, ...how } = {}) {
    const [{ skipSpecial, ...own }, sampling] = split(abi.resume, how);
    if (own.continueGeneration && Object.values({ skipSpecial, ...sampling }).some((given) => given !== undefined)) {
      throw new TypeError('continueGeneration keeps the parameters of the sequence; pass only queue, userData, keep and deadlineMs');
    }
    const c = { ...fill(abi.resume, { skipSpecial, ...own }), sampling: fill(abi.sampling, sampling) };
    unsigned('sequence', sequence, 64);
    return this.#inOrder(queue, c, async (engine, c) => check(await onPool(lib.sequence_resume, engine, sequence, c)));
  }

  async *streamResumed(sequence, how = {}, options = {}) {
    yield* this.#outputs(options, 1, async (queue) => {
      const { request } = this.sequenceInfo(sequence);
      await this.resume(sequence, { ...how, queue });
      return request;
    });
  }

  async generateResumed(sequence, how = {}, { signal } = {}) {
    // Only the sequence knows the kind of its outputs.
    if (how.continueGeneration) throw new TypeError('continueGeneration needs streamResumed()');
    return (await completionsOf(this.streamResumed(sequence, how, { signal }), how))[0];
  }

  free(sequence) {
    check(lib.sequence_free(this.#handle.pointer, unsigned('sequence', sequence, 64)));
  }

  sequenceInfo(sequence) {
    const id = unsigned('sequence', sequence, 64);
    return filled(abi.SequenceInfo, abi.toSequenceInfo, lib.sequence_get_info, this.#handle.pointer, id);
  }

  async exportSequence(sequence) {
    const queue = this.createQueue(1); // receives only the state
    try {
      check(lib.sequence_export(this.#handle.pointer, unsigned('sequence', sequence, 64), queue.pointer));
      for (;;) {
        const [state] = queue.take(toState);
        if (state) return state;
        await queue.readable();
      }
    } finally {
      queue.close();
    }
  }

  async importSequence(state, { queue } = {}) {
    const data = bytes('state', state);
    return this.#inOrder(queue, {}, async (engine, { queue }) => {
      const id = [0];
      check(await onPool(lib.sequence_import, engine, data, lengthOf(data), queue, id));
      return id[0];
    });
  }

  async pin(prompt) {
    const c = fill(abi.pin, prompt);
    return this.#handle.during(async (engine) => {
      const id = [0];
      check(await onPool(lib.prefix_pin, engine, c, id));
      return id[0];
    });
  }

  unpin(pin) {
    check(lib.prefix_unpin(this.#handle.pointer, unsigned('pin', pin, 64)));
  }

  async step() {
    return this.#handle.during((engine) => filledOnPool(abi.Step, abi.toStep, lib.engine_step, engine));
  }

  start() {
    check(lib.engine_start(this.#handle.pointer));
  }

  async stop() {
    return this.#handle.during(async (engine) => check(await onPool(lib.engine_stop, engine)));
  }

  get queue() {
    this.#handle.pointer;
    return this.#queue;
  }

  get budget() {
    return new Budget(this.#handle, lib.engine_budget(this.#handle.pointer));
  }

  createQueue(capacity) {
    const pointer = [null];
    check(lib.queue_create(this.#handle.pointer, unsigned('capacity', capacity, 64), pointer));
    return new Queue('queue', pointer[0], lib.queue_free);
  }

  async tokenize(text, { addSpecial = false } = {}) {
    const bytes = utf8('text', text);
    return this.#handle.during(async (engine) => {
      const tokens = [null];
      check(await onPool(lib.engine_tokenize, engine, bytes, lengthOf(bytes), flag(0, abi.TEXT.addSpecial, addSpecial), tokens));
      const ids = array(lib.tokens_data(tokens[0]), 'uint32_t', lib.tokens_len(tokens[0]));
      lib.tokens_free(tokens[0]);
      return ids;
    });
  }

  async detokenize(tokens, { skipSpecial = false } = {}) {
    const ids = tokenIds('tokens', tokens);
    return this.#textOf(lib.engine_detokenize, ids, lengthOf(ids), flag(0, abi.TEXT.skipSpecial, skipSpecial));
  }

  tokenBytes(token) {
    const address = [null], length = [0];
    check(lib.engine_get_token_bytes(this.#handle.pointer, unsigned('token', token, 32), address, length));
    return Buffer.from(array(address[0], 'uint8_t', length[0]));
  }

  async renderChat(messages) {
    const json = utf8('messages', JSON.stringify(messages));
    return this.#textOf(lib.engine_render_chat, json, lengthOf(json));
  }

  responseParser({ format, prompt, tools, toolCallIdPrefix } = {}) {
    const settings = { format, prompt, tools, tool_call_id_prefix: toolCallIdPrefix };
    const json = utf8('settings', JSON.stringify(settings)), pointer = [null];
    check(lib.response_parser_create(this.#handle.pointer, json, lengthOf(json), pointer));
    return new ResponseParser(pointer[0]);
  }

  #textOf(call, ...args) {
    return this.#handle.during(async (engine) => {
      const bytes = [null];
      check(await onPool(call, engine, ...args, bytes));
      return taken(bytes[0]);
    });
  }

  pollKvEvents() {
    return this.#kvEvents(lib.engine_poll_kv_events, 0);
  }

  snapshotKvEvents() {
    return this.#kvEvents(lib.engine_snapshot_kv_events);
  }

  #kvEvents(call, ...args) {
    const batch = [null];
    check(call(this.#handle.pointer, ...args, batch));
    try {
      const read = (_, i) => abi.toKvEvent(koffi.decode(lib.kv_events_get(batch[0], i), abi.KvEvent));
      return Array.from({ length: lib.kv_events_len(batch[0]) }, read);
    } finally {
      lib.kv_events_free(batch[0]);
    }
  }

  async hashPrompt({ group = 0, ...request }) {
    const c = toRequest(request);
    return this.#handle.during(async (engine) => {
      const out = [null];
      check(await onPool(lib.engine_hash_prompt, engine, c, unsigned('group', group, 32), out));
      const all = array(lib.bytes_data(out[0]), 'uint8_t', lib.bytes_len(out[0]));
      lib.bytes_free(out[0]);
      return Array.from({ length: all.length / 32 }, (_, i) => Buffer.from(all.slice(32 * i, 32 * (i + 1))).toString('hex'));
    });
  }

  health() {
    return takenError(lib.engine_health(this.#handle.pointer));
  }

  modelInfo() {
    return filled(abi.ModelInfo, abi.toModelInfo, lib.engine_get_model_info, this.#handle.pointer);
  }

  stats() {
    return filled(abi.Stats, abi.toStats, lib.engine_get_stats, this.#handle.pointer);
  }

  metrics() {
    const bytes = [null];
    check(lib.engine_get_metrics(this.#handle.pointer, bytes));
    return taken(bytes[0]);
  }

  async snapshot({ maxBlocks = Number.MAX_SAFE_INTEGER, maxSequences = Number.MAX_SAFE_INTEGER } = {}) {
    const limits = [unsigned('maxBlocks', maxBlocks, 64), unsigned('maxSequences', maxSequences, 64)];
    return this.#handle.during(async (engine) => {
      const bytes = [null];
      check(await onPool(lib.engine_snapshot, engine, ...limits, bytes));
      return JSON.parse(taken(bytes[0]));
    });
  }
}

class ResponseParser {
  #handle;

  // Internal: Engine.responseParser creates parsers.
  constructor(pointer) {
    this.#handle = new Handle('parser', pointer, lib.response_parser_free);
  }

  feed(given) {
    const piece = utf8('text', given), deltas = [null];
    check(lib.response_parser_feed(this.#handle.pointer, piece, lengthOf(piece), deltas));
    return JSON.parse(taken(deltas[0]));
  }

  finish() {
    const deltas = [null];
    check(lib.response_parser_finish(this.#handle.pointer, deltas));
    return JSON.parse(taken(deltas[0]));
  }

  close() {
    this.#handle.close();
  }
}
if (Symbol.asyncDispose) Engine.prototype[Symbol.asyncDispose] = Engine.prototype.close;

const version = () => lib.version();
const buildInfo = () => JSON.parse(lib.build_info());

module.exports = { Budget, Engine, Queue, ResponseParser, PagedllmError, version, buildInfo };
