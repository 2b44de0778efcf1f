//! Journals: a session is replayed bit for bit, a torn journal up to its last whole record, and a
//! foreign file is refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use crate::support::faulty::{Faults, Faulty};
use crate::support::{Random, TempDir, bundled_model, configs, model_info, write_random_model};
use pagedllm::backend::cpu::CpuBackend;
use pagedllm::engine::journal::{Ending, JournalFile, Replay, Summary};
use pagedllm::engine::{Continue, Engine, Executor, Fork, ModelExecutor, ModelInfo, Output, Prompt, Queue, Request, Resume, Stats};
use pagedllm::error::Code;
use pagedllm::model::{BatchLimits, KvCache, KvPool, ModelFiles};
use pagedllm::types::SeqId;
use pagedllm::types::options::{BeamParams, EngineOptions, Grammar, Isa, KvDtype, Preemption, SamplingParams};

const BLOCKS: usize = 40;
const HOST_BLOCKS: usize = 12;

fn model(seed: u64) -> TempDir {
    let dir = TempDir::new();
    let (_, config) = configs(512).pop().unwrap();
    write_random_model(&dir.0, &config, false, seed);
    dir
}

/// Creates a small LLaMA on a device whose faults the test controls.
fn device(model: &Path) -> (ModelInfo, Box<dyn Executor>, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let files = ModelFiles::open(model).unwrap();
    let backend = Faulty { cpu: CpuBackend::new(1, None).unwrap(), faults: faults.clone() };
    let pool = KvPool { blocks: BLOCKS, block_size: 8, dtype: KvDtype::F32 };
    let mut kv = KvCache::new(&backend, &files.spec, pool).unwrap();
    let block_bytes = pool.block_bytes(&backend, &files.spec);
    kv.add_host_tier(&backend, HOST_BLOCKS, block_bytes).unwrap();
    let decoder = files.load(backend, BatchLimits { tokens: 32, logits: 16 }, &mut |_, _| true).unwrap();
    let mut info = model_info(files.spec.vocab_size, BLOCKS, 128, vec![2]);
    (info.memory.block_bytes, info.memory.swap_blocks) = (block_bytes, HOST_BLOCKS);
    // Most exports and imports need several steps.
    let executor = ModelExecutor::new(decoder, kv).with_max_transfer_bytes(2 * block_bytes as usize);
    (info, Box::new(executor), faults)
}

fn engine(model: &Path, journal: PathBuf, preemption: Preemption, swap_dir: Option<PathBuf>) -> (Engine, Arc<Faults>) {
    let options = EngineOptions {
        max_batch_tokens: 32,
        max_seqs: 16,
        seed: 7,
        journal_path: Some(journal),
        preemption,
        swap_dir,
        ..Default::default()
    };
    let (info, executor, faults) = device(model);
    (Engine::with_executor(&options, info, None, executor).unwrap(), faults)
}

fn request(random: &mut Random) -> Request {
    let prompt = (0..1 + random.below(40)).map(|i| (i * 7 % 120) as u32 + (random.below(3) == 0) as u32).collect();
    let beam = (random.below(6) == 0).then(|| BeamParams { width: 3, ..Default::default() });
    let temperature = if beam.is_some() || random.below(3) == 0 { 0.0 } else { 0.8 };
    let logprobs = (random.below(4) == 0).then_some(0);
    let sampling = SamplingParams { max_tokens: Some(1 + random.below(40)), temperature, logprobs, ..Default::default() };
    let n = if beam.is_none() { 1 + random.below(2) as u32 } else { 1 };
    let best_of = (n == 2 && random.below(3) == 0).then_some(3);
    let keep = beam.is_none() && random.below(2) == 0;
    let salt = vec![random.below(2) as u8];
    let priority = random.below(5) as i32;
    let deadline = (random.below(8) == 0).then(|| Duration::from_millis(1 + random.below(20) as u64));
    Request { n, best_of, beam, keep, salt, priority, deadline, ..Request::new(Prompt::Tokens(prompt), sampling) }
}

/// Makes one random call of the API, on an id whose sequence may have ended.
fn act(engine: &Engine, queue: &Queue, random: &mut Random, ids: &mut Vec<SeqId>, states: &mut Vec<Vec<u8>>) {
    let id = if ids.is_empty() { SeqId::from_raw(1) } else { ids[random.below(ids.len())] };
    let tokens = vec![random.below(120) as u32; 1 + random.below(12)];
    let sampling = SamplingParams { max_tokens: Some(1 + random.below(12)), ..Default::default() };
    let _ = match random.below(16) {
        0..=4 => engine.add_request_to(queue, request(random)).map(|id| ids.push(id.sequence(0))),
        5 => engine.abort(id.own_request()),
        6 => engine
            .fork(id, 1 + random.below(2), &Fork { queue: Some(queue), seed: Some(3), ..Default::default() })
            .map(|new| ids.extend(new)),
        7 => engine
            .fork(id, 1, &Fork { queue: Some(queue), idle: true, at: Some(1 + random.below(9)), ..Default::default() })
            .map(|new| ids.extend(new)),
        8 => engine.append(id, tokens),
        9 => engine.rewind(id, 1 + random.below(30)),
        10 => engine.resume(id, Resume { queue: Some(queue), ..Resume::new(sampling) }),
        11 => engine.continue_sequence(id, Continue { queue: Some(queue), keep: true, ..Default::default() }),
        12 => engine.free(id),
        13 => engine.export(id, Some(queue)),
        14 => states.pop().map_or(Ok(()), |state| engine.import(queue, &state).map(|id| ids.push(id))),
        _ => engine.pin(Prompt::Tokens(tokens), true, b"", 0, Some(Duration::from_millis(3))).map(|pin| {
            if random.below(2) == 0 {
                let _ = engine.unpin(pin);
            }
        }),
    };
}

/// Runs one thread of a host, which polls a small queue slowly.
fn host(engine: &Engine, seed: u64) {
    let mut random = Random(seed);
    let queue = engine.create_queue(3).unwrap();
    let (mut ids, mut states) = (Vec::new(), Vec::new());
    for _ in 0..400 {
        act(engine, &queue, &mut random, &mut ids, &mut states);
        std::thread::sleep(Duration::from_micros(200));
        if random.below(2) == 0 {
            let outputs = queue.poll(Some(Duration::from_millis(random.below(3) as u64))).unwrap();
            states.extend(outputs.into_iter().map(|output| output.sequence_state).filter(|state| !state.is_empty()));
        }
    }
}

/// Runs three host threads on a started engine while the pool size changes and the device fails at
/// times.
fn session(model: &Path, journal: PathBuf, seed: u64) -> Stats {
    let preemption = [Preemption::Recompute, Preemption::Swap, Preemption::Auto][seed as usize % 3];
    let swap_dir = (seed >= 3).then(std::env::temp_dir);
    let (engine, faults) = engine(model, journal, preemption, swap_dir);
    let done = AtomicBool::new(false);
    engine.start().unwrap();
    std::thread::scope(|scope| {
        let hosts: Vec<_> = (0..3).map(|i| (3 * seed + i, &engine)).map(|(seed, engine)| scope.spawn(move || host(engine, seed))).collect();
        let (done, faults, engine) = (&done, &faults, &engine);
        scope.spawn(move || {
            let mut random = Random(!seed);
            while !done.load(SeqCst) {
                for (point, others) in [(&faults.ops, 19), (&faults.swaps, 4), (&faults.exports, 2)] {
                    point.fail_after(others);
                }
                let _ = engine.budget().resize((BLOCKS - random.below(20)) as u64 * engine.info().memory.block_bytes);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        hosts.into_iter().for_each(|host| host.join().unwrap());
        done.store(true, SeqCst);
    });
    engine.stop();
    engine.check_invariants();
    engine.stats()
}

fn replay(model: &Path, journal: &Path) -> Summary {
    let (info, executor, _) = device(model);
    Replay::with_executor(JournalFile::open(journal).unwrap(), info, None, executor).unwrap().run().unwrap()
}

#[test]
fn a_concurrent_session_is_replayed_bit_for_bit() {
    let (model, dir) = (model(5), TempDir::new());
    let journal = dir.0.join("journal");
    let (mut steps, mut preemptions, mut faults, mut hits, mut late, mut swaps) = (0, 0, 0, 0, 0, (0, 0));
    // On a busy machine, a session may be too slow to swap, or have few steps. Further sessions
    // follow until everything has occurred.
    for seed in 0..60 {
        let has_all = steps > 30 && preemptions > 0 && faults > 0 && hits > 0 && late > 0 && swaps.0 > 0 && swaps.1 > 0;
        if seed >= 6 && has_all {
            break;
        }
        let stats = session(&model.0, journal.clone(), seed);
        let summary = replay(&model.0, &journal);
        assert_eq!((&summary.difference, &summary.ending), (&None, &Some(Ending::Closed)), "session {seed}");
        assert!(summary.requests > 100 && summary.sequences > 100, "{summary:?}");
        (steps, preemptions, faults) = (steps + summary.steps, preemptions + stats.preemptions, faults + stats.steps_failed);
        swaps = (swaps.0 + stats.blocks_swapped_in, swaps.1 + stats.swap_failures);
        (hits, late) = (hits + stats.prefix_hits, late + stats.finished_deadline);
    }
    assert!(steps > 30 && preemptions > 0 && faults > 0 && hits > 0 && late > 0, "{steps} {preemptions} {faults} {hits} {late}");
    assert!(swaps.0 > 0 && swaps.1 > 0, "{swaps:?}");
}

#[test]
fn a_replay_reports_the_first_difference() {
    let (model, other, dir) = (model(5), model(6), TempDir::new());
    let journal = dir.0.join("journal");
    session(&model.0, journal.clone(), 0);
    let difference = replay(&other.0, &journal).difference.unwrap();
    assert!(difference.step > 0 && !difference.what.is_empty(), "{difference:?}");
}

/// Runs ten requests one after the other.
fn short_session(model: &Path, journal: PathBuf) {
    let (engine, _) = engine(model, journal, Preemption::Recompute, None);
    for seed in 0..10 {
        engine.add_request(request(&mut Random(seed))).unwrap();
        while engine.step().unwrap().unfinished > 0 {}
    }
}

#[test]
fn a_journal_replays_exports_of_ended_and_freed_sequences() {
    let (model, dir) = (model(5), TempDir::new());
    let journal = dir.0.join("journal");
    let (engine, _) = engine(&model.0, journal.clone(), Preemption::Recompute, None);
    let greedy = || SamplingParams { max_tokens: Some(3), ignore_eos: true, ..SamplingParams::greedy() };
    let add = |keep| engine.add_request(Request { keep, ..Request::new(Prompt::Tokens(vec![3; 9]), greedy()) }).unwrap().sequence(0);
    let run = || while engine.step().unwrap().unfinished > 0 {};
    let (kept, ended) = (add(true), add(false));
    engine.step().unwrap();
    // The second sequence has ended when the step exports it.
    while engine.sequence(ended).unwrap().len < 11 {
        engine.step().unwrap();
    }
    engine.abort(ended.own_request()).unwrap();
    [kept, ended].into_iter().for_each(|seq| engine.export(seq, None).unwrap());
    run();
    engine.check_invariants();
    engine.export(kept, None).unwrap();
    engine.free(kept).unwrap();
    engine.step().unwrap();
    engine.check_invariants();
    drop(engine);
    assert_eq!(replay(&model.0, &journal).difference, None);
}

#[test]
fn a_torn_journal_is_replayed_up_to_its_last_whole_record() {
    let (model, dir) = (model(5), TempDir::new());
    let journal = dir.0.join("journal");
    short_session(&model.0, journal.clone());
    let whole = std::fs::read(&journal).unwrap();
    let all = replay(&model.0, &journal);
    assert_eq!((&all.difference, &all.ending), (&None, &Some(Ending::Closed)));
    for part in 5..10 {
        let cut = whole.len() * part / 10;
        std::fs::write(&journal, &whole[..cut]).unwrap();
        let summary = replay(&model.0, &journal);
        let bytes = match summary.ending {
            Some(Ending::Torn { bytes }) => bytes,
            // The cut can lie exactly between two records.
            ref ending => (*ending == Some(Ending::Open)).then_some(cut as u64).unwrap(),
        };
        assert!(summary.difference.is_none() && summary.steps < all.steps && summary.steps > all.steps / 10 && bytes <= cut as u64);
        // A journal cut at the end of a whole record is open, not torn.
        std::fs::write(&journal, &whole[..bytes as usize]).unwrap();
        let open = replay(&model.0, &journal);
        assert_eq!((open.steps, open.ending), (summary.steps, Some(Ending::Open)));
    }
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    std::fs::write(&journal, &damaged).unwrap();
    let summary = replay(&model.0, &journal);
    assert!(matches!(summary.ending, Some(Ending::Torn { .. })) && summary.difference.is_none() && summary.steps < all.steps);
}

#[test]
fn a_journal_of_another_engine_or_format_is_refused_with_the_mismatch() {
    let (model, dir) = (model(5), TempDir::new());
    let journal = dir.0.join("journal");
    short_session(&model.0, journal.clone());
    let assert_refused = |change: fn(&mut ModelInfo), message: &str| {
        let (mut info, executor, _) = device(&model.0);
        change(&mut info);
        let error = Replay::with_executor(JournalFile::open(&journal).unwrap(), info, None, executor).map(drop).unwrap_err();
        assert!(error.message().contains(message), "{error}, expected {message}");
    };
    assert_refused(|info| info.fingerprint = [1; 32], "another model (00000000..., this is 01010101...)");
    assert_refused(|info| info.isa = Some(Isa::Portable), "instruction path (\"\", this engine computes on \"portable\")");
    assert_refused(|info| info.memory.max_blocks = 41, "41");
    let whole = std::fs::read(&journal).unwrap();
    let open_error = |bytes: &[u8]| {
        std::fs::write(&journal, bytes).unwrap();
        JournalFile::open(&journal).map(drop).unwrap_err()
    };
    let mut newer = whole.clone();
    newer[8] = 9;
    let error = open_error(&newer);
    assert_eq!(error.code(), Code::Unsupported);
    assert!(error.message().contains("format 9") && error.message().contains(concat!("release ", env!("CARGO_PKG_VERSION"))), "{error}");
    for bytes in [&b""[..], b"PLLMJRNL", b"something else that is long enough to be one", &whole[..40]] {
        assert!(open_error(bytes).message().contains("not a journal"));
    }
    assert_eq!(JournalFile::open(Path::new("/nonexistent")).map(drop).unwrap_err().code(), Code::Io);
}

#[test]
fn a_replay_lists_the_requests_with_logits_hooks() {
    let (model, dir) = (model(5), TempDir::new());
    let journal = dir.0.join("journal");
    let (engine, _) = engine(&model.0, journal.clone(), Preemption::Recompute, None);
    let hook: pagedllm::engine::LogitsHook = Arc::new(|_, _, logits: &mut [f32]| logits[17] = 1e9);
    let plain = Request { n: 1, best_of: None, beam: None, keep: false, ..request(&mut Random(1)) };
    engine.add_request(plain.clone()).unwrap();
    let hooked = engine.add_request(Request { hook: Some(hook), ..plain }).unwrap().sequence(0);
    while engine.step().unwrap().unfinished > 0 {}
    drop(engine);
    let summary = replay(&model.0, &journal);
    assert_eq!(summary.hooked, [hooked]);
    assert!(summary.difference.is_some(), "the journal does not contain the edits of a logits hook");
}

#[test]
fn a_journal_with_text_and_grammars_is_replayed_from_the_model_directory() {
    let dir = TempDir::new();
    let journal = dir.0.join("journal");
    let options =
        EngineOptions { model_dir: bundled_model(), kv_bytes: Some(2 << 20), journal_path: Some(journal.clone()), ..Default::default() };
    let engine = Engine::create(&options).unwrap();
    let grammars = [None, Some(Grammar::JsonObject), Some(Grammar::Regex("[a-z ]{5,20}\\.".into()))];
    for (i, grammar) in grammars.into_iter().cycle().take(12).enumerate() {
        let sampling =
            SamplingParams { grammar, max_tokens: Some(20 + i), stop: vec!["the".into()], logprobs: Some(2), ..Default::default() };
        engine.add_request(Request::new(Prompt::Text(format!("Once upon a time {i}")), sampling)).unwrap();
        engine.step().unwrap();
    }
    while engine.step().unwrap().unfinished > 0 {}
    let outputs: Vec<Output> = engine.queue().poll(Some(Duration::ZERO)).unwrap().into();
    drop(engine);
    let summary = Replay::load(JournalFile::open(&journal).unwrap(), &bundled_model()).unwrap().run().unwrap();
    assert_eq!((summary.difference, summary.sequences, summary.ending), (None, 12, Some(Ending::Closed)));
    assert_eq!(summary.tokens as usize, outputs.iter().map(|output| output.tokens.len()).sum::<usize>());
}

#[test]
fn a_journal_file_that_cannot_be_created_is_an_error() {
    for path in ["/nonexistent/journal", "/dev/full"] {
        let (info, executor, _) = device(&model(5).0);
        let options = EngineOptions { journal_path: Some(path.into()), ..Default::default() };
        let error = Engine::with_executor(&options, info, None, executor).map(drop).unwrap_err();
        assert!(error.code() == Code::Io && error.message().contains(path), "{error}");
    }
}
