//! KV events: a reader that knows the events alone knows the prefix cache.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::kv_store::{Bits, Model, complete, options, prompt, request};
use crate::support::store::{Fault, Memory};
use crate::support::{Random, TempDir, bundled_model};
use pagedllm::engine::journal::{Ending, JournalFile, Replay};
use pagedllm::engine::{Engine, KvEventKind, KvEvents, Prompt, Request};
use pagedllm::error::{Code, Error};
use pagedllm::types::kv_store::BlockKey;
use pagedllm::types::options::{EngineOptions, KvStoreOptions, Preemption, SamplingParams};

const BLOCK: usize = 8;

fn with_events() -> EngineOptions {
    EngineOptions { kv_events_capacity: 10_000, ..Default::default() }
}

fn poll(engine: &Engine) -> KvEvents {
    engine.poll_kv_events(Duration::ZERO, |_| Ok(())).unwrap()
}

fn snapshot(engine: &Engine) -> KvEvents {
    engine.snapshot_kv_events(|_| Ok(())).unwrap()
}

/// A router's view of one engine.
#[derive(Default)]
struct Router {
    /// The tokens and the group of each block.
    blocks: BTreeMap<BlockKey, (Vec<u32>, u32)>,
    last: u64,
    cleared: usize,
}

impl Router {
    fn read(&mut self, engine: &Engine) {
        self.apply(&poll(engine));
    }

    fn of_snapshot(engine: &Engine) -> Router {
        let mut router = Router::default();
        router.apply(&snapshot(engine));
        router
    }

    fn apply(&mut self, events: &KvEvents) {
        for event in events.iter() {
            match event.kind {
                KvEventKind::Stored => {
                    assert_eq!((event.tokens.len(), event.first_token as usize % BLOCK), (BLOCK, 0));
                    let before = self.blocks.insert(*event.hash, (event.tokens.to_vec(), event.group));
                    assert!(before.is_none(), "a block is stored twice");
                }
                KvEventKind::Removed => assert!(self.blocks.remove(event.hash).is_some(), "an unknown block is removed"),
                KvEventKind::Cleared => {
                    self.blocks.clear();
                    self.cleared += 1;
                    self.last = event.sequence_number;
                }
            }
            assert!([self.last, self.last + 1].contains(&event.sequence_number), "a step is missing");
            self.last = event.sequence_number;
        }
    }

    /// Returns the number of blocks at the start of the prompt that the engine has.
    fn overlap(&self, hashes: &[BlockKey]) -> usize {
        hashes.iter().take_while(|hash| self.blocks.contains_key(*hash)).count()
    }
}

fn hashes(engine: &Engine, tokens: &[u32]) -> Vec<BlockKey> {
    engine.hash_prompt(request(tokens), 0).unwrap()
}

#[test]
fn events_name_the_blocks_of_a_prompt_as_every_equal_engine_does() {
    for model in Model::all() {
        let (engine, other) = (model.engine_with(with_events()), model.engine_with(Default::default()));
        let tokens = prompt(1, 61);
        let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        complete(&engine, std::slice::from_ref(&tokens));
        let events = poll(&engine);
        let known = hashes(&other, &tokens);
        assert_eq!(known.len(), 7);
        let of_prompt = events.iter().filter(|event| event.group == 0 && event.first_token < 56);
        for (place, event) in of_prompt.enumerate() {
            assert_eq!((event.kind, event.first_token), (KvEventKind::Stored, (place * BLOCK) as u64), "{}", model.name);
            assert_eq!((event.hash, event.tokens), (&known[place], &tokens[place * BLOCK..][..BLOCK]), "{}", model.name);
            assert_eq!(place == 0, !known.contains(event.parent), "{}", model.name);
            assert!(place == 0 || *event.parent == known[place - 1]);
            assert!(event.time >= before && event.time < before + 1000.0);
        }
        let mut router = Router::default();
        router.apply(&events);
        assert_eq!(router.overlap(&known), 7);
        let groups = events.iter().map(|event| event.group).max().unwrap() + 1;
        assert_eq!(groups > 1, model.name.contains("windows"), "{}", model.name);
        let has_all = |group| other.hash_prompt(request(&tokens), group).unwrap().iter().all(|hash| router.blocks.contains_key(hash));
        assert!((0..groups as usize).all(has_all));
        let error = other.hash_prompt(request(&tokens), groups as usize).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        // Another salt and another model.
        let salted = other.hash_prompt(Request { salt: b"tenant".to_vec(), ..request(&tokens) }, 0).unwrap();
        let model = Model::new(6).engine_with(Default::default());
        assert_eq!((router.overlap(&salted), router.overlap(&hashes(&model, &tokens))), (0, 0));
    }
}

#[test]
fn a_router_finds_the_engine_with_the_longest_prefix() {
    let model = Model::new(5);
    let engines = [model.engine_with(with_events()), model.engine_with(with_events())];
    complete(&engines[0], &[prompt(1, 40)]);
    complete(&engines[1], &[prompt(1, 61)[..20].to_vec(), prompt(2, 61)]);
    let routers = engines.each_ref().map(|engine| {
        let mut router = Router::default();
        router.read(engine);
        router
    });
    let overlaps = |tokens: &[u32]| routers.each_ref().map(|router| router.overlap(&hashes(&engines[0], tokens)));
    assert_eq!(overlaps(&prompt(1, 61)), [5, 2]);
    assert_eq!(overlaps(&prompt(2, 61)), [0, 7]);
    assert_eq!(overlaps(&prompt(3, 61)), [0, 0]);
    // The score is what the prefix cache gives.
    let cached = |engine: &Engine| engine.stats().prompt_tokens_cached;
    let before = engines.each_ref().map(cached);
    engines.iter().for_each(|engine| drop(complete(engine, &[prompt(1, 61)])));
    assert_eq!([0, 1].map(|place| cached(&engines[place]) - before[place]), [5 * 8, 2 * 8]);
}

#[test]
fn hashes_of_events_are_the_keys_of_a_store_and_loaded_blocks_have_events() {
    let model = Model::new(5);
    let memory = Memory::default();
    let store = || KvStoreOptions { timeout: Duration::from_secs(30), ..options(&memory) };
    let engine = || model.engine_with(EngineOptions { kv_store: Some(store()), ..with_events() });
    let mut routers = [Router::default(), Router::default()];
    for router in &mut routers {
        let engine = engine();
        complete(&engine, &[prompt(1, 61)]);
        router.read(&engine);
        assert_eq!(router.blocks, Router::of_snapshot(&engine).blocks);
    }
    let stored: BTreeSet<BlockKey> = memory.values.lock().unwrap().keys().copied().collect();
    assert_eq!(routers.each_ref().map(|router| router.blocks.keys().copied().collect::<BTreeSet<_>>()), [stored.clone(), stored]);
    assert!(memory.reads.load(std::sync::atomic::Ordering::SeqCst) >= 7, "the second engine has loaded blocks");
}

#[test]
fn a_slow_reader_gets_all_cached_blocks_instead_of_the_events_that_it_has_missed() {
    let model = Model::new(5);
    let engine = model.engine_with(EngineOptions { kv_events_capacity: 8, ..Default::default() });
    let mut router = Router::default();
    router.read(&engine);
    assert_eq!((router.last, router.cleared), (0, 0));
    for seed in 1..20 {
        complete(&engine, &[prompt(seed, 61)]);
    }
    router.read(&engine);
    assert!(router.cleared == 1 && router.last > 20);
    assert_eq!(router.blocks, Router::of_snapshot(&engine).blocks);
    assert_eq!(router.overlap(&hashes(&engine, &prompt(19, 61))), 7);
    assert_eq!(poll(&engine).len(), 0);
    // The next events follow without a gap. Two new blocks, and those that they replace, fit the
    // capacity.
    complete(&engine, &[prompt(30, 16)]);
    router.read(&engine);
    assert_eq!((router.cleared, router.overlap(&hashes(&engine, &prompt(30, 16)))), (1, 2));
}

#[test]
fn events_change_no_decision_and_no_bit() {
    let model = Model::new(5);
    let mut random = Random(3);
    let prompts: Vec<_> = (0..12).map(|_| prompt(random.below(4), 9 + random.below(80))).collect();
    let run = |options| {
        let engine = model.engine_with(options);
        let bits: Vec<Bits> = (0..3).flat_map(|_| complete(&engine, &prompts)).collect();
        (bits, engine.stats())
    };
    assert_eq!(run(with_events()), run(Default::default()));
}

/// Requests with common prefixes on a pool that is too small for them, with idle sequences, forks,
/// exports and imports, swaps, and resizes of the pool.
#[test]
fn the_events_of_random_hosts_give_the_prefix_cache_after_every_step() {
    for preemption in [Preemption::Recompute, Preemption::Swap, Preemption::Auto] {
        let mut random = Random(preemption as u64 + 1);
        let engine = Engine::create(&EngineOptions {
            model_dir: bundled_model(),
            threads: Some(1),
            max_seqs: 8,
            max_model_len: Some(128),
            block_size: 8,
            kv_bytes: Some(1 << 19),
            swap_bytes: if preemption == Preemption::Recompute { 0 } else { 1 << 19 },
            preemption,
            kv_events_capacity: 10,
            ..Default::default()
        })
        .unwrap();
        let mut host = Host { idle: Vec::new(), states: Vec::new(), random: Random(7) };
        let mut router = Router::default();
        let bytes = engine.budget().info().bytes;
        for step in 0..400 {
            host.act(&engine);
            if random.below(20) == 0 {
                let _ = engine.budget().resize(bytes / 2 + random.below(bytes as usize / 2) as u64);
            }
            engine.step().unwrap();
            engine.check_invariants();
            host.read(&engine);
            if random.below(4) == 0 {
                router.read(&engine);
                assert_eq!(router.blocks, Router::of_snapshot(&engine).blocks, "step {step}");
            }
        }
        let stats = engine.stats();
        assert!(router.cleared > 0 && router.last > 100, "{} batches, {} losses", router.last, router.cleared);
        assert!(preemption != Preemption::Swap || stats.blocks_swapped_in > 0, "{stats:?}");
        assert!(!host.states.is_empty() && stats.preemptions > 0, "{stats:?}");
    }
}

struct Host {
    idle: Vec<pagedllm::types::SeqId>,
    states: Vec<Vec<u8>>,
    random: Random,
}

impl Host {
    fn act(&mut self, engine: &Engine) {
        if engine.stats().waiting + engine.stats().running < 10 {
            let tokens = (0..20 + self.random.below(60) as u32).map(|place| 10 + place % 7).chain([self.random.below(3) as u32]);
            let sampling = SamplingParams { max_tokens: Some(1 + self.random.below(40)), ignore_eos: true, ..Default::default() };
            let keep = self.random.below(2) == 0;
            engine.add_request(Request { keep, ..Request::new(Prompt::Tokens(tokens.collect()), sampling) }).unwrap();
        }
        let Some(&sequence) = self.idle.get(self.random.below(self.idle.len().max(1))) else { return };
        match self.random.below(4) {
            0 => drop(engine.export(sequence, None)),
            1 => drop(engine.rewind(sequence, 1 + self.random.below(20))),
            2 => drop(engine.free(sequence)),
            _ if !self.states.is_empty() => {
                let state = &self.states[self.random.below(self.states.len())];
                let imported = engine.import(engine.queue(), state).unwrap();
                let more: Vec<u32> = (0..20).collect();
                let _ = engine.append(imported, more);
                let sampling = SamplingParams { max_tokens: Some(10), ..Default::default() };
                let _ = engine.resume(imported, pagedllm::engine::Resume { keep: true, ..pagedllm::engine::Resume::new(sampling) });
                self.idle.push(imported);
            }
            _ => {}
        }
    }

    fn read(&mut self, engine: &Engine) {
        for output in engine.queue().poll(Some(Duration::ZERO)).unwrap() {
            if output.finish.is_some() {
                self.idle.push(output.sequence);
            }
            if !output.sequence_state.is_empty() {
                self.states.push(output.sequence_state.clone());
            }
        }
        let excess = self.idle.len().saturating_sub(12);
        self.idle.drain(..excess).for_each(|sequence| drop(engine.free(sequence)));
    }
}

#[test]
fn journals_of_engines_with_events_are_replayed() {
    let model = Model::new(5);
    let memory = Memory::default();
    memory.set(Fault::Random(5));
    let folder = TempDir::new();
    let path = folder.0.join("journal");
    let options = EngineOptions { journal_path: Some(path.clone()), kv_store: Some(options(&memory)), ..with_events() };
    let engine = model.engine_with(options);
    for _ in 0..2 {
        complete(&engine, &[prompt(1, 61), prompt(2, 40), prompt(1, 50)]);
        assert!(!poll(&engine).is_empty() || engine.stats().prefix_hits > 0);
    }
    drop(engine);
    let (info, executor) = model.device();
    let summary = Replay::with_executor(JournalFile::open(&path).unwrap(), info, None, executor).unwrap().run().unwrap();
    assert_eq!((summary.difference, summary.ending, summary.sequences), (None, Some(Ending::Closed), 6));
}

#[test]
fn a_poll_waits_for_events_until_its_time_has_passed() {
    let model = Model::new(5);
    let engine = model.engine_with(with_events());
    let began = Instant::now();
    assert!(engine.poll_kv_events(Duration::from_millis(50), |_| Ok(())).unwrap().is_empty());
    assert!(began.elapsed() >= Duration::from_millis(50));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| engine.poll_kv_events(Duration::from_secs(60), |_| Ok(())).unwrap());
        complete(&engine, &[prompt(1, 61)]);
        assert!(!reader.join().unwrap().is_empty());
    });
    assert!(began.elapsed() < Duration::from_secs(50));
}

#[test]
fn a_reader_without_memory_loses_no_event() {
    let model = Model::new(5);
    let engine = model.engine_with(with_events());
    complete(&engine, &[prompt(1, 61)]);
    let fails = |_| Err(Error::out_of_memory());
    assert_eq!(engine.poll_kv_events(Duration::ZERO, fails).unwrap_err().code(), Code::OutOfMemory);
    assert_eq!(engine.snapshot_kv_events(fails).unwrap_err().code(), Code::OutOfMemory);
    let mut router = Router::default();
    router.read(&engine);
    assert_eq!(router.overlap(&hashes(&engine, &prompt(1, 61))), 7);
}

#[test]
fn calls_without_events_and_wrong_capacities_are_refused() {
    let model = Model::new(5);
    let engine = model.engine_with(Default::default());
    for error in [engine.poll_kv_events(Duration::ZERO, |_| Ok(())).unwrap_err(), engine.snapshot_kv_events(|_| Ok(())).unwrap_err()] {
        assert_eq!(error.code(), Code::Unsupported);
        assert!(error.message().contains("kv_events_capacity is 0"), "{error}");
    }
    for (options, part) in [
        (EngineOptions { kv_events_capacity: (1 << 20) + 1, ..Default::default() }, "must be at most 1048576"),
        (EngineOptions { prefix_cache: false, ..with_events() }, "kv_events_capacity is set and the prefix cache is disabled"),
    ] {
        let error = options.validate().unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(part), "{error}");
    }
    assert_eq!(engine.hash_prompt(request(&[5000; 20]), 0).unwrap_err().code(), Code::InvalidArgument);
    assert!(engine.hash_prompt(request(&[1; 7]), 0).unwrap().is_empty());
}
