//! KV stores: requests find the blocks of earlier engines, and a faulty store costs hits only.

use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use crate::support::store::{Fault, Memory};
use crate::support::{Random, TempDir, configs, model_info, write_random_model};
use pagedllm::backend::cpu::CpuBackend;
use pagedllm::engine::journal::{Ending, JournalFile, Replay};
use pagedllm::engine::{Engine, Executor, ModelExecutor, ModelInfo, Prompt, Request, Stats};
use pagedllm::error::Code;
use pagedllm::memory::plan;
use pagedllm::model::{BatchLimits, KvCache, KvPool, ModelFiles};
use pagedllm::types::RequestId;
use pagedllm::types::kv_store::{BlockKey, StoreSecret};
use pagedllm::types::options::{EngineOptions, KvDtype, KvStoreOptions, SamplingParams};

const BLOCK: usize = 8;
const BLOCKS: usize = 64;

/// A small model. Its layers attend to all positions, or some to a window.
pub struct Model {
    dir: TempDir,
    pub name: &'static str,
}

/// The tokens of a request with their log probabilities as bits.
pub type Bits = (Vec<u32>, Vec<u32>);

impl Model {
    pub fn all() -> Vec<Model> {
        let windowed = |name: &str| name.contains("windows");
        let configs = configs(512);
        let last = configs.len() - 1;
        let wanted = configs.into_iter().enumerate().filter(|(place, (name, _))| *place == last || windowed(name));
        let models = wanted.map(|(_, (name, config))| {
            let dir = TempDir::new();
            write_random_model(&dir.0, &config, false, 5);
            Model { dir, name }
        });
        models.collect()
    }

    pub fn new(seed: u64) -> Model {
        let dir = TempDir::new();
        let (name, config) = configs(512).pop().unwrap();
        write_random_model(&dir.0, &config, false, seed);
        Model { dir, name }
    }

    pub fn device(&self) -> (ModelInfo, Box<dyn Executor>) {
        let files = ModelFiles::open(&self.dir.0).unwrap();
        let backend = CpuBackend::new(1, None).unwrap();
        let pool = KvPool { blocks: BLOCKS, block_size: BLOCK, dtype: KvDtype::F32 };
        let block_bytes = pool.block_bytes(&backend, &files.spec);
        let kv = KvCache::new(&backend, &files.spec, pool).unwrap();
        let decoder = files.load(backend, BatchLimits { tokens: 64, logits: 16 }, &mut |_, _| true).unwrap();
        let mut info = model_info(files.spec.vocab_size, BLOCKS, 256, vec![]);
        info.memory.block_bytes = block_bytes;
        info.paging = plan::paging(&files, BLOCK);
        info.fingerprint = files.fingerprint().unwrap();
        (info, Box::new(ModelExecutor::new(decoder, kv)))
    }

    fn engine(&self, store: Option<KvStoreOptions>, journal: Option<&std::path::Path>) -> Engine {
        self.engine_with(EngineOptions { journal_path: journal.map(Into::into), kv_store: store, ..Default::default() })
    }

    pub fn engine_with(&self, options: EngineOptions) -> Engine {
        let options = EngineOptions { max_batch_tokens: 64, max_seqs: 16, ..options };
        let (info, executor) = self.device();
        Engine::with_executor(&options, info, None, executor).unwrap()
    }

    /// Computes the requests on a new engine, and frees it.
    fn run(&self, store: Option<KvStoreOptions>, prompts: &[Vec<u32>]) -> (Vec<Bits>, Stats) {
        let engine = self.engine(store, None);
        let bits = complete(&engine, prompts);
        (bits, engine.stats())
    }
}

/// Options for a store that answers, also on a busy machine.
pub fn options(memory: &Memory) -> KvStoreOptions {
    KvStoreOptions { timeout: Duration::from_secs(60), ..KvStoreOptions::new(memory.handle()) }
}

/// Options for a store that may not answer.
fn impatient(memory: &Memory) -> KvStoreOptions {
    KvStoreOptions { timeout: Duration::from_millis(200), ..options(memory) }
}

pub fn prompt(seed: usize, len: usize) -> Vec<u32> {
    (0..len).map(|place| ((place * 7 + seed * 31 + place / 5) % 120) as u32).collect()
}

pub fn request(prompt: &[u32]) -> Request {
    let sampling = SamplingParams { max_tokens: Some(6), temperature: 0.0, ignore_eos: true, logprobs: Some(0), ..Default::default() };
    Request::new(Prompt::Tokens(prompt.to_vec()), sampling)
}

/// Adds the requests and steps until all have ended and no full block waits.
pub fn complete(engine: &Engine, prompts: &[Vec<u32>]) -> Vec<Bits> {
    complete_waiting(engine, prompts, Duration::ZERO)
}

/// As `complete`. The requests wait for blocks that the store does not have yet.
fn complete_waiting(engine: &Engine, prompts: &[Vec<u32>], store_wait: Duration) -> Vec<Bits> {
    let ids: Vec<_> = prompts.iter().map(|prompt| engine.add_request(Request { store_wait, ..request(prompt) }).unwrap()).collect();
    let bits = finish(engine, &ids);
    while engine.step().unwrap().unfinished > 0 {}
    bits
}

/// Steps until the requests have ended.
fn finish(engine: &Engine, ids: &[RequestId]) -> Vec<Bits> {
    let mut bits = vec![Bits::default(); ids.len()];
    let mut rest = ids.len();
    loop {
        engine.step().unwrap();
        engine.check_invariants();
        for output in engine.queue().poll(Some(Duration::ZERO)).unwrap() {
            let Some(place) = ids.iter().position(|id| *id == output.request) else { continue };
            assert!(output.error.is_none(), "{:?}", output.error);
            bits[place].0.extend_from_slice(&output.tokens);
            bits[place].1.extend(output.logprobs.tokens.iter().map(|value| value.to_bits()));
            rest -= output.finish.is_some() as usize;
        }
        if rest == 0 {
            return bits;
        }
    }
}

#[test]
fn a_new_engine_finds_the_blocks_of_an_earlier_one_with_the_same_bits() {
    for model in Model::all() {
        let memory = Memory::default();
        let prompts = [prompt(1, 61), prompt(2, 40), prompt(1, 61)];
        let (expected, _) = model.run(None, &prompts);
        let (first, stats) = model.run(Some(options(&memory)), &prompts);
        assert_eq!(first, expected, "{}", model.name);
        assert_eq!(stats.store.hits, 0);
        assert!(memory.len() > 0 && memory.closed.load(std::sync::atomic::Ordering::SeqCst) == 1, "{}", model.name);
        let (second, stats) = model.run(Some(options(&memory)), &prompts);
        assert_eq!(second, expected, "{}", model.name);
        // The last block of a prompt is always computed.
        assert!(stats.store.hits >= 11 && stats.prompt_tokens == 5 + 8 + 5, "{}: {stats:?}", model.name);
        assert_eq!(stats.store.failures, 0);
    }
}

#[test]
fn a_faulty_store_costs_hits_and_changes_no_bits() {
    let model = Model::new(5);
    let prompts = [prompt(1, 61), prompt(2, 40)];
    let (expected, _) = model.run(None, &prompts);
    for fault in Fault::SINGLE {
        let memory = Memory::default();
        model.run(Some(options(&memory)), &prompts);
        memory.set(fault);
        let limits = if fault == Fault::Hangs { impatient(&memory) } else { options(&memory) };
        let (bits, stats) = model.run(Some(limits), &prompts);
        assert_eq!(bits, expected, "{fault:?}");
        let has_hits = matches!(fault, Fault::None | Fault::Slow(_) | Fault::Claims);
        assert_eq!((stats.store.hits > 0, stats.store.failures > 0), (has_hits, !has_hits), "{fault:?}: {stats:?}");
        if fault == Fault::Damages {
            memory.set(Fault::None);
            let (bits, stats) = model.run(Some(options(&memory)), &prompts);
            assert_eq!((bits, stats.store.failures), (expected.clone(), 0), "damaged blocks are replaced");
            assert!(stats.store.hits > 0);
        }
    }
}

#[test]
fn stores_are_shared_only_by_engines_with_the_same_model_salt_and_secret() {
    let prompts = [prompt(1, 61)];
    let memory = Memory::default();
    let model = Model::new(5);
    model.run(Some(options(&memory)), &prompts);
    let other = Model::new(6);
    assert_eq!(other.run(Some(options(&memory)), &prompts).1.store.hits, 0, "another model");
    let secret = |byte: u8| KvStoreOptions { secret: Some(StoreSecret(vec![byte; 16])), ..options(&memory) };
    assert_eq!(model.run(Some(secret(1)), &prompts).1.store.hits, 0, "a secret");
    assert_eq!(model.run(Some(secret(2)), &prompts).1.store.hits, 0, "another secret");
    assert_eq!(model.run(Some(secret(1)), &prompts).1.store.hits, 7, "the same secret");
    let engine = model.engine(Some(options(&memory)), None);
    engine.add_request(Request { salt: b"tenant".to_vec(), ..request(&prompts[0]) }).unwrap();
    while engine.step().unwrap().unfinished > 0 {}
    assert_eq!(engine.stats().store.hits, 0, "another salt");
}

#[test]
fn requests_run_beside_one_that_waits_for_a_store() {
    let model = Model::new(5);
    let memory = Memory::default();
    memory.set(Fault::Hangs);
    let engine = model.engine(Some(KvStoreOptions { timeout: Duration::from_secs(1), ..options(&memory) }), None);
    let waiting = engine.add_request(request(&prompt(1, 61))).unwrap();
    // Too short for a full block before its last token, so it waits for nothing.
    let running = engine.add_request(request(&prompt(2, 8))).unwrap();
    let mut ended = Vec::new();
    while ended.len() < 2 {
        engine.step().unwrap();
        let outputs = engine.queue().poll(Some(Duration::ZERO)).unwrap();
        ended.extend(outputs.into_iter().filter(|output| output.finish.is_some()).map(|output| output.request));
    }
    assert_eq!(ended, [running, waiting]);
    // After a lookup without an answer, the store is not asked for a while.
    let asked = engine.stats().store.queries;
    complete(&engine, &[prompt(3, 61)]);
    assert_eq!(engine.stats().store.queries, asked);
    engine.add_request(request(&prompt(4, 61))).unwrap();
}

#[test]
fn a_request_that_waits_for_a_store_can_be_aborted() {
    let model = Model::new(5);
    let memory = Memory::default();
    memory.set(Fault::Hangs);
    let engine = model.engine(Some(impatient(&memory)), None);
    let id = engine.add_request(request(&prompt(1, 61))).unwrap();
    engine.abort(id).unwrap();
    while engine.step().unwrap().unfinished > 0 {}
    let outputs = engine.queue().poll(Some(Duration::ZERO)).unwrap();
    assert_eq!(outputs.len(), 1);
    assert_eq!(complete(&engine, &[prompt(2, 30)]).len(), 1);
}

#[test]
fn a_journal_with_a_store_is_replayed_without_it() {
    let model = Model::new(5);
    let memory = Memory::default();
    let prompts = [prompt(1, 61), prompt(2, 40), prompt(1, 50)];
    model.run(Some(options(&memory)), &prompts);
    for fault in [Fault::None, Fault::Random(3), Fault::Random(99)] {
        memory.set(fault);
        let folder = TempDir::new();
        let path = folder.0.join("journal");
        let limits = if fault == Fault::None { options(&memory) } else { impatient(&memory) };
        let engine = model.engine(Some(limits), Some(&path));
        complete(&engine, &prompts);
        complete(&engine, &[prompt(7, 70), prompt(2, 40)]);
        drop(engine);
        assert_eq!(replayed_sequences(&model, &path), 5, "{fault:?}");
    }
}

/// Replays a journal. Returns the number of its sequences.
fn replayed_sequences(model: &Model, journal: &Path) -> u64 {
    let (info, executor) = model.device();
    let summary = Replay::with_executor(JournalFile::open(journal).unwrap(), info, None, executor).unwrap().run().unwrap();
    assert_eq!((summary.difference, summary.ending), (None, Some(Ending::Closed)));
    summary.sequences
}

#[test]
fn random_traces_with_a_random_faulty_store_have_the_bits_of_an_engine_without_one() {
    let model = Model::new(5);
    for seed in 1..6 {
        let mut random = Random(seed);
        let memory = Memory::default();
        memory.set(Fault::Random(seed));
        for _ in 0..3 {
            // More prompts than the pool can cache, with common prefixes.
            let prompts: Vec<_> = (0..6).map(|_| prompt(random.below(4), 9 + random.below(80))).collect();
            let (expected, _) = model.run(None, &prompts);
            let limits = KvStoreOptions {
                timeout: Duration::from_millis(20 + random.below(40) as u64),
                max_bytes: [1, 1 << 16, 1 << 28][random.below(3)],
                max_operations: 1 + random.below(8),
                ..options(&memory)
            };
            let engine = model.engine(Some(limits), None);
            assert_eq!(complete(&engine, &prompts), expected, "seed {seed}");
            let wait = Duration::from_millis(random.below(30) as u64);
            assert_eq!(complete_waiting(&engine, &prompts, wait), expected, "seed {seed}");
        }
    }
}

#[test]
fn options_of_a_store_are_checked() {
    let model = Model::new(5);
    let refused = |options: EngineOptions, part: &str| {
        let error = options.validate().unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(part), "{error}");
    };
    let memory = Memory::default();
    let with = |store: KvStoreOptions| EngineOptions { kv_store: Some(store), ..Default::default() };
    refused(with(KvStoreOptions { max_operations: 0, ..options(&memory) }), "kv_store_max_operations is 0");
    refused(with(KvStoreOptions { timeout: Duration::ZERO, ..options(&memory) }), "kv_store_timeout_ms is 0");
    refused(with(KvStoreOptions { secret: Some(StoreSecret(vec![1; 15])), ..options(&memory) }), "kv_store_secret has 15 bytes");
    refused(EngineOptions { prefix_cache: false, ..with(options(&memory)) }, "prefix cache");
    let handle = options(&memory);
    let _first = model.engine(Some(handle.clone()), None);
    let (info, executor) = model.device();
    let error = Engine::with_executor(&with(handle), info, None, executor).map(drop).unwrap_err();
    assert!(error.message().contains("belongs to another engine"), "{error}");
}

/// The file of the trace is created when the thread of the store runs.
#[test]
fn a_store_stays_with_the_host_if_the_creation_of_the_engine_fails() {
    let model = Model::new(5);
    let memory = Memory::default();
    let trace_path = Some("no/such/directory/trace".into());
    let (info, executor) = model.device();
    let with = EngineOptions { kv_store: Some(options(&memory)), trace_path, ..Default::default() };
    assert_eq!(Engine::with_executor(&with, info, None, executor).map(drop).unwrap_err().code(), Code::Io);
    assert_eq!(memory.closed.load(SeqCst), 0);
    drop(model.engine(Some(options(&memory)), None));
    assert_eq!(memory.closed.load(SeqCst), 1);
}

/// A prompt that another engine computes: its blocks appear one after the other in an empty store.
struct Arriving {
    from: Memory,
    to: Memory,
    /// [places] The names of the blocks of all layer groups.
    names: Vec<Vec<BlockKey>>,
    arrived: usize,
}

impl Arriving {
    fn new(model: &Model, tokens: &[u32]) -> Arriving {
        let (from, to) = (Memory::default(), Memory::default());
        model.run(Some(options(&from)), &[tokens.to_vec()]);
        let engine = model.engine(Some(options(&from)), None);
        let groups = engine.info().paging.groups();
        let of_groups: Vec<_> = (0..groups).map(|group| engine.hash_prompt(request(tokens), group).unwrap()).collect();
        let names = (0..of_groups[0].len()).map(|place| of_groups.iter().map(|names| names[place]).collect()).collect();
        Arriving { from, to, names, arrived: 0 }
    }

    fn next(&mut self) {
        let from = self.from.values.lock().unwrap();
        self.to.values.lock().unwrap().extend(self.names[self.arrived].iter().map(|name| (*name, from[name].clone())));
        self.arrived += 1;
    }

    fn reads(&self) -> u64 {
        self.to.reads.load(SeqCst)
    }

    fn await_reads(&self, count: u64) {
        while self.reads() < count {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn blocks_are_read_as_another_engine_computes_them() {
    for model in Model::all() {
        let tokens = prompt(1, 61);
        let (expected, _) = model.run(None, std::slice::from_ref(&tokens));
        let mut arriving = Arriving::new(&model, &tokens);
        let folder = TempDir::new();
        let path = folder.0.join("journal");
        let engine = model.engine(Some(options(&arriving.to)), Some(&path));
        let id = engine.add_request(Request { store_wait: LONG, ..request(&tokens) }).unwrap();
        engine.start().unwrap();
        while arriving.arrived < arriving.names.len() {
            // Nothing is computed before all blocks are there.
            assert_eq!(engine.stats().prompt_tokens, 0, "{}", model.name);
            let before = arriving.reads();
            arriving.next();
            arriving.await_reads(before + arriving.names[0].len() as u64);
        }
        engine.stop();
        assert_eq!(finish(&engine, &[id]), expected, "{}", model.name);
        let stats = engine.stats();
        assert_eq!((stats.prompt_tokens, stats.store.failures), (5, 0), "{}", model.name);
        drop(engine);
        assert_eq!(replayed_sequences(&model, &path), 1, "{}", model.name);
    }
}

#[test]
fn a_request_computes_what_does_not_arrive_in_its_time() {
    let (model, tokens) = (Model::new(5), prompt(1, 61));
    let (expected, _) = model.run(None, std::slice::from_ref(&tokens));
    let mut arriving = Arriving::new(&model, &tokens);
    (0..3).for_each(|_| arriving.next());
    let engine = model.engine(Some(options(&arriving.to)), None);
    assert_eq!(complete_waiting(&engine, &[tokens], Duration::from_millis(100)), expected);
    let stats = engine.stats();
    assert_eq!((stats.store.hits, stats.prompt_tokens, stats.store.failures), (3, 61 - 3 * BLOCK as u64, 0));
}

#[test]
fn a_request_that_does_not_wait_is_not_delayed_by_one_that_waits_for_the_same_blocks() {
    let (model, tokens) = (Model::new(5), prompt(1, 61));
    let [expected] = model.run(None, std::slice::from_ref(&tokens)).0.try_into().unwrap();
    let mut arriving = Arriving::new(&model, &tokens);
    arriving.next();
    let engine = model.engine(Some(options(&arriving.to)), None);
    let waiting = engine.add_request(Request { store_wait: LONG, ..request(&tokens) }).unwrap();
    let other = engine.add_request(request(&tokens)).unwrap();
    // The first request finds the blocks that the second one has computed.
    assert_eq!(finish(&engine, &[waiting, other]), [expected.clone(), expected]);
}

#[test]
fn a_damaged_block_and_a_store_that_hangs_end_the_wait() {
    let (model, tokens) = (Model::new(5), prompt(1, 61));
    let (expected, _) = model.run(None, std::slice::from_ref(&tokens));
    for fault in [Fault::Damages, Fault::Fails, Fault::Refuses, Fault::Hangs] {
        let mut arriving = Arriving::new(&model, &tokens);
        arriving.next();
        let limits = if fault == Fault::Hangs { impatient(&arriving.to) } else { options(&arriving.to) };
        let engine = model.engine(Some(limits), None);
        let id = engine.add_request(Request { store_wait: LONG, ..request(&tokens) }).unwrap();
        engine.start().unwrap();
        // A starved store may time out before its first read.
        while arriving.reads() == 0 && engine.stats().store.failures == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        arriving.to.set(fault);
        arriving.next();
        engine.stop();
        assert_eq!(finish(&engine, &[id]), expected, "{fault:?}");
        assert!(engine.stats().store.failures > 0, "{fault:?}");
    }
}

#[test]
fn a_wait_ends_with_its_request_and_with_its_engine() {
    let (model, tokens) = (Model::new(5), prompt(1, 61));
    let arriving = Arriving::new(&model, &tokens);
    let engine = model.engine(Some(options(&arriving.to)), None);
    let waiting = || engine.add_request(Request { store_wait: LONG, ..request(&tokens) }).unwrap();
    let [first, second] = [waiting(), waiting()];
    engine.start().unwrap();
    let asked = || arriving.to.questions.load(SeqCst);
    let await_question = |before| {
        while asked() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    await_question(0);
    engine.abort(first).unwrap();
    while engine.stats().finished_abort < 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The second request waits for the same lookup, which continues.
    await_question(asked());
    engine.abort(second).unwrap();
    let mut last = 0;
    while last != asked() {
        last = asked();
        std::thread::sleep(Duration::from_millis(400));
    }
    waiting();
    await_question(last);
    drop(engine);
    assert_eq!(arriving.to.closed.load(SeqCst), 1);
}

/// The buffers of one round could otherwise keep those of the next one from being read.
#[test]
fn rounds_with_little_memory_for_reads_end_however_slow_the_steps_are() {
    let (model, tokens) = (Model::new(5), prompt(1, 61));
    let (expected, _) = model.run(None, std::slice::from_ref(&tokens));
    let mut arriving = Arriving::new(&model, &tokens);
    (0..arriving.names.len()).for_each(|_| arriving.next());
    let value = arriving.to.values.lock().unwrap().values().next().unwrap().len() as u64;
    // Two blocks in each round, and half of the limit for reads.
    let limits = KvStoreOptions { max_bytes: 4 * value, ..options(&arriving.to) };
    let engine = model.engine(Some(limits), None);
    let id = engine.add_request(Request { store_wait: LONG, ..request(&tokens) }).unwrap();
    // While this request runs, a step returns, and the next one begins later.
    let other = engine.add_request(Request::new(
        Prompt::Tokens(vec![5; 3]),
        SamplingParams { max_tokens: Some(60), ignore_eos: true, ..SamplingParams::greedy() },
    ));
    for _ in 0..20 {
        engine.step().unwrap();
        std::thread::sleep(Duration::from_millis(30));
    }
    engine.abort(other.unwrap()).unwrap();
    assert_eq!(finish(&engine, &[id]), expected);
    let stats = engine.stats();
    assert_eq!((stats.store.hits, stats.store.queries, stats.store.failures), (7, 7, 0));
}

#[test]
fn a_store_that_hangs_between_two_rounds_ends_the_wait() {
    let (model, tokens) = (Model::new(5), prompt(1, 61));
    let (expected, _) = model.run(None, &[tokens.clone(), prompt(2, 61)]);
    let arriving = Arriving::new(&model, &tokens);
    let limits = KvStoreOptions { max_operations: 1, ..impatient(&arriving.to) };
    let engine = model.engine(Some(limits), None);
    let waiting = engine.add_request(Request { store_wait: LONG, ..request(&tokens) }).unwrap();
    engine.start().unwrap();
    while engine.stats().store.queries == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The operation of another request occupies the only slot.
    arriving.to.set(Fault::Hangs);
    let other = engine.add_request(request(&prompt(2, 61))).unwrap();
    engine.stop();
    assert_eq!(finish(&engine, &[waiting, other]), expected);
}

/// Whatever the lengths and waits are, no request waits for the blocks of another prompt.
#[test]
fn requests_with_different_blocks_do_not_wait_together() {
    let (model, tokens) = (Model::new(5), prompt(1, 61));
    let short = tokens[..20].to_vec();
    let (expected, _) = model.run(None, &[short.clone(), tokens.clone()]);
    let mut arriving = Arriving::new(&model, &tokens);
    (0..2).for_each(|_| arriving.next());
    let engine = model.engine(Some(options(&arriving.to)), None);
    let add = |prompt: &[u32], store_wait| engine.add_request(Request { store_wait, ..request(prompt) }).unwrap();
    let long = [add(&tokens, LONG), add(&tokens, LONG / 2)];
    assert_eq!(finish(&engine, &[add(&short, LONG)]), expected[..1]);
    engine.start().unwrap();
    (2..arriving.names.len()).for_each(|_| arriving.next());
    engine.stop();
    assert_eq!(finish(&engine, &long), [expected[1].clone(), expected[1].clone()]);
}

#[test]
fn an_abort_during_a_wait_is_replayed() {
    let (model, tokens) = (Model::new(5), prompt(1, 61));
    let mut arriving = Arriving::new(&model, &tokens);
    arriving.next();
    let folder = TempDir::new();
    let path = folder.0.join("journal");
    let engine = model.engine(Some(options(&arriving.to)), Some(&path));
    let id = engine.add_request(Request { store_wait: LONG, ..request(&tokens) }).unwrap();
    engine.start().unwrap();
    arriving.await_reads(1);
    engine.abort(id).unwrap();
    while engine.stats().finished_abort < 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
    engine.stop();
    complete(&engine, &[tokens]);
    drop(engine);
    assert_eq!(replayed_sequences(&model, &path), 2);
}

#[test]
fn an_engine_without_a_store_refuses_to_wait_for_one() {
    let engine = Model::new(5).engine(None, None);
    let error = engine.add_request(Request { store_wait: Duration::from_millis(5), ..request(&prompt(1, 9)) }).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert_eq!(error.message(), "kv_store_wait_ms is 5 and the engine has no kv_store; set kv_store or leave it 0");
    let engine = Model::new(5).engine(Some(options(&Memory::default())), None);
    let error = engine.add_request(Request { store_wait: Duration::MAX, ..request(&prompt(1, 9)) }).unwrap_err();
    assert!(error.message().ends_with("must be at most 4294967295"), "{error}");
}
