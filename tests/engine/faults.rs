//! A step is a transaction. If any op in it fails, no state is lost and only the failing requests
//! end. The tokens of all other requests equal those of a run without the fault, bit for bit.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use crate::support::faulty::{Faults, Faulty, POISON};
use crate::support::{TempDir, configs, model_info, write_random_model};
use pagedllm::backend::cpu::CpuBackend;
use pagedllm::engine::{Engine, ModelExecutor, Output, Prompt, Request, Resume};
use pagedllm::error::{Code, Error, Result};
use pagedllm::kv::Paging;
use pagedllm::model::{BatchLimits, KvCache, KvLayout, KvPool, ModelFiles, PackedForm};
use pagedllm::types::options::{BeamParams, EngineOptions, KvDtype, Preemption, SamplingParams};
use pagedllm::types::outputs::FinishReason;
use serde_json::Value;

const BLOCK: usize = 8;
const BLOCKS: usize = 48;

/// A pool so small that some requests are preempted.
const FEW_BLOCKS: usize = 18;

fn engine(dir: &TempDir) -> (Engine, Arc<Faults>) {
    engine_with(dir, BLOCKS, Preemption::Recompute)
}

/// Creates an engine with a small LLaMA on a device whose faults the test controls.
fn engine_with(dir: &TempDir, blocks: usize, preemption: Preemption) -> (Engine, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    (engine_on(&faults, dir, blocks, preemption).unwrap(), faults)
}

fn engine_on(faults: &Arc<Faults>, dir: &TempDir, blocks: usize, preemption: Preemption) -> Result<Engine> {
    let options = EngineOptions { max_batch_tokens: 32, max_seqs: 16, preemption, ..Default::default() };
    let files = ModelFiles::open(&dir.0)?;
    let paging = Paging::new(BLOCK, &KvLayout::for_spec(&files.spec).windows);
    let (blocks, host_blocks) = (blocks * paging.groups(), BLOCKS * paging.groups());
    let backend = Faulty { cpu: CpuBackend::new(1, None)?, faults: faults.clone() };
    let pool = KvPool { blocks, block_size: BLOCK, dtype: KvDtype::F32 };
    let block_bytes = pool.block_bytes(&backend, &files.spec);
    let mut kv = KvCache::new(&backend, &files.spec, pool)?;
    kv.add_host_tier(&backend, host_blocks, block_bytes)?;
    let decoder = files.load(backend, BatchLimits { tokens: 32, logits: 16 }, &mut |_, _| true)?;
    let mut info = model_info(files.spec.vocab_size, blocks, 128, vec![]);
    info.memory.swap_blocks = host_blocks;
    info.memory.block_bytes = block_bytes;
    info.paging = paging;
    Engine::with_executor(&options, info, None, Box::new(ModelExecutor::new(decoder, kv)))
}

fn model() -> TempDir {
    model_of(&configs(512).pop().unwrap().1)
}

fn model_of(config: &Value) -> TempDir {
    let dir = TempDir::new();
    write_random_model(&dir.0, config, false, 5);
    dir
}

/// Requests with prompts of many lengths, samples and beams. Together they exceed the KV pool.
fn requests() -> Vec<Request> {
    let request = |i: usize| {
        let prompt = (0..[3, 40, 9, 17, 64, 1, 25, 33][i]).map(|k| ((k * 37 + i * 11) % 120) as u32).collect();
        let beam = (i == 5).then(|| BeamParams { width: 3, ..Default::default() });
        let sampling = SamplingParams {
            temperature: if i.is_multiple_of(2) || beam.is_some() { 0.0 } else { 0.9 },
            seed: beam.is_none().then_some(i as u64),
            max_tokens: Some(12 + i),
            ignore_eos: beam.is_none(),
            logprobs: beam.is_none().then_some(0),
            // A request that generated this token would fail, too.
            bad_words_ids: vec![vec![POISON]],
            ..Default::default()
        };
        Request { n: if i == 3 { 3 } else { 1 }, beam, user_data: i as u64, ..Request::new(Prompt::Tokens(prompt), sampling) }
    };
    (0..8).map(request).collect()
}

/// A request that makes every step fail.
fn failing_request() -> Request {
    let sampling = SamplingParams { max_tokens: Some(30), ..Default::default() };
    Request { user_data: 100, ..Request::new(Prompt::Tokens(vec![1, 2, POISON, 3]), sampling) }
}

/// By user data and index: the tokens, the bits of their log probabilities and of the score, and
/// the finish reason.
type Answers = BTreeMap<(u64, u32), (Vec<u32>, Vec<u32>, Option<FinishReason>)>;

fn answers(outputs: &[Output]) -> Answers {
    let mut answers = Answers::new();
    for output in outputs {
        let (tokens, bits, finish) = answers.entry((output.user_data, output.index)).or_default();
        assert_eq!(*finish, None, "an output follows the last one of {}", output.user_data);
        tokens.extend(&output.tokens);
        bits.extend(
            output.logprobs.tokens.iter().map(|p| p.to_bits()).chain((output.finish.is_some()).then_some(output.score.to_bits() as u32)),
        );
        *finish = output.finish;
    }
    answers
}

fn drain(engine: &Engine) -> Answers {
    let mut outputs = Vec::new();
    for _ in 0..5000 {
        let report = engine.step();
        outputs.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
        if report.unwrap().unfinished == 0 {
            engine.check_invariants();
            let stats = engine.stats();
            assert_eq!((stats.waiting, stats.running, stats.idle, stats.blocks_used), (0, 0, 0, 0));
            return answers(&outputs);
        }
    }
    panic!("the requests do not end");
}

fn add_all(engine: &Engine, requests: Vec<Request>) {
    requests.into_iter().for_each(|request| assert!(engine.add_request(request).unwrap().get() > 0));
}

fn without_faults(dir: &TempDir) -> (Answers, u64) {
    let (engine, faults) = engine(dir);
    add_all(&engine, requests());
    (drain(&engine), faults.ops.seen.load(SeqCst))
}

#[test]
fn a_transient_fault_at_any_op_changes_no_output() {
    for (family, config) in configs(512) {
        let dir = model_of(&config);
        let (expected, ops) = without_faults(&dir);
        // Every op of the first steps, which contain all kinds of work, and a sample of the later
        // ones.
        let places = (1..120).chain((120..ops).step_by(61));
        for place in places {
            let (engine, faults) = engine(&dir);
            faults.ops.fails_at.store(place, SeqCst);
            add_all(&engine, requests());
            assert_eq!(drain(&engine), expected, "{family}: op {place} of {ops} failed");
            assert!(faults.reported.load(SeqCst) > 0 && engine.stats().steps_failed > 0, "{family}: op {place} did not fail");
        }
    }
}

#[test]
fn steps_allocate_no_device_memory() {
    for (family, config) in configs(512) {
        let (engine, faults) = engine_with(&model_of(&config), FEW_BLOCKS, Preemption::Swap);
        let made = faults.makes.seen.load(SeqCst);
        add_all(&engine, requests());
        drain(&engine);
        assert!(engine.stats().preemptions_swapped > 0);
        assert_eq!(faults.makes.seen.load(SeqCst), made, "{family}");
    }
}

#[test]
fn a_step_swaps_with_at_most_one_operation_in_each_direction() {
    let (engine, faults) = engine_with(&model(), FEW_BLOCKS, Preemption::Swap);
    add_all(&engine, requests());
    let operations = || faults.swaps.seen.load(SeqCst);
    let (mut before, mut unfinished) = (0, 1);
    while unfinished > 0 {
        unfinished = engine.step().unwrap().unfinished;
        assert!(operations() - before <= 2);
        before = operations();
        drop(engine.queue().poll(Some(Duration::ZERO)).unwrap());
    }
    let stats = engine.stats();
    let blocks = stats.blocks_swapped_out + stats.blocks_swapped_in;
    assert!(operations() > 0 && blocks > 2 * operations(), "{blocks} blocks in {} operations", operations());
}

#[test]
fn a_failed_swap_falls_back_to_recomputation_without_other_effects() {
    let dir = model();
    let (expected, _) = without_faults(&dir);
    let mut failures = 0;
    for place in 1.. {
        let (engine, faults) = engine_with(&dir, FEW_BLOCKS, Preemption::Swap);
        faults.swaps.fails_at.store(place, SeqCst);
        add_all(&engine, requests());
        assert_eq!(drain(&engine), expected, "move {place} failed");
        let stats = engine.stats();
        assert_eq!((stats.steps_failed, stats.swapped, stats.swap_blocks_used), (0, 0, 0));
        if faults.swaps.seen.load(SeqCst) < place {
            break;
        }
        assert_eq!(stats.swap_failures, 1, "a failed swap is counted once");
        failures += 1;
    }
    assert!(failures >= 2, "one swap-out and one swap-in");
}

/// Exports a kept sequence while other requests run and imports it again. Returns the outputs of
/// all sequences, among them those of the original and of the copy, and the number of failed
/// transfers.
fn export_and_import(engine: &Engine) -> (Answers, u64) {
    let sampling = SamplingParams { max_tokens: Some(9), seed: Some(3), ignore_eos: true, logprobs: Some(0), ..Default::default() };
    let prompt = Prompt::Tokens((0..21).map(|k| k * 5 % 120).collect());
    let kept = engine.add_request(Request { keep: true, user_data: 50, ..Request::new(prompt, sampling.clone()) }).unwrap().sequence(0);
    add_all(engine, requests());
    let (mut outputs, mut failures) = (Vec::new(), 0);
    let step = || -> Vec<Output> {
        engine.step().unwrap();
        engine.check_invariants();
        engine.queue().poll(Some(Duration::ZERO)).unwrap().into()
    };
    while !engine.sequence(kept).unwrap().idle {
        outputs.extend(step());
    }
    let mut transfer_output = |outputs: &mut Vec<Output>| {
        let (transfers, others) = step().into_iter().partition(|output| !output.sequence_state.is_empty() || output.error.is_some());
        outputs.extend::<Vec<Output>>(others);
        let transfers: Vec<Output> = transfers;
        transfers.iter().filter_map(|output| output.error.as_ref()).for_each(|error| {
            assert_eq!(error.message(), "the device is lost");
            failures += 1;
        });
        transfers.into_iter().next()
    };
    let state = loop {
        engine.export(kept, None).unwrap();
        let output = transfer_output(&mut outputs).unwrap();
        assert_eq!((output.sequence, output.finish), (kept, None), "an export does not end the sequence");
        if output.error.is_none() {
            break output.sequence_state;
        }
    };
    let copy = loop {
        let id = engine.import(engine.queue(), &state).unwrap();
        match transfer_output(&mut outputs) {
            None => break id,
            Some(output) => assert_eq!((output.sequence, engine.sequence(id).unwrap_err().code()), (id, Code::NotFound)),
        }
    };
    for (seq, user_data) in [(kept, 51), (copy, 52)] {
        engine.resume(seq, Resume { keep: false, user_data: Some(user_data), ..Resume::new(sampling.clone()) }).unwrap();
    }
    let mut all = answers(&outputs);
    for (key, (tokens, bits, finish)) in drain(engine) {
        let answer = all.entry(key).or_default();
        answer.0.extend(tokens);
        answer.1.extend(bits);
        assert_eq!(answer.2, None);
        answer.2 = finish;
    }
    (all, failures)
}

#[test]
fn a_failed_export_or_import_leaves_the_sequence_intact_and_can_be_retried() {
    let dir = model();
    let (alone, _) = without_faults(&dir);
    let (expected, failures) = export_and_import(&engine(&dir).0);
    assert_eq!((expected[&(51, 0)].clone(), failures), (expected[&(52, 0)].clone(), 0));
    assert!(alone.iter().all(|(key, answer)| expected[key] == *answer));
    let mut failures = 0;
    for place in 1.. {
        let (engine, faults) = engine(&dir);
        faults.exports.fails_at.store(place, SeqCst);
        let (answers, failed) = export_and_import(&engine);
        assert_eq!(answers, expected, "transfer {place} failed");
        assert_eq!(engine.stats().steps_failed, 0);
        if faults.exports.seen.load(SeqCst) < place {
            break;
        }
        assert_eq!(failed, 1, "a failed transfer is reported once");
        failures += 1;
    }
    assert!(failures >= 4, "an export and an import of each of two layers");
}

/// Shrinks the pool while requests run and `fail` injects faults. Returns the number of ops and of
/// swaps that this took.
fn shrink(dir: &TempDir, preemption: Preemption, expected: &Answers, fail: impl Fn(&Faults)) -> (u64, u64) {
    let (engine, faults) = engine_with(dir, BLOCKS, preemption);
    let block_bytes = engine.info().memory.block_bytes;
    add_all(&engine, requests());
    for _ in 0..9 {
        engine.step().unwrap();
    }
    let seen = || (faults.ops.seen.load(SeqCst), faults.swaps.seen.load(SeqCst));
    let before = seen();
    fail(&faults);
    engine.budget().resize(FEW_BLOCKS as u64 * block_bytes).unwrap();
    let after = seen();
    engine.check_invariants();
    assert_eq!(drain(&engine), *expected);
    let stats = engine.stats();
    assert_eq!((stats.blocks_total, stats.swapped, stats.swap_blocks_used), (FEW_BLOCKS as u64, 0, 0));
    assert!(stats.preemptions > 0 && engine.budget().info().held_bytes == FEW_BLOCKS as u64 * block_bytes);
    (after.0 - before.0, after.1 - before.1)
}

#[test]
fn a_failed_shrink_of_the_pool_is_retried_without_other_effects() {
    let dir = model();
    let (expected, _) = without_faults(&dir);
    for preemption in [Preemption::Recompute, Preemption::Swap] {
        let (ops, swaps) = shrink(&dir, preemption, &expected, |_| {});
        assert!(ops >= 4 && (swaps > 0) == (preemption == Preemption::Swap), "{ops} ops, {swaps} swaps");
        for place in 1..=ops + 5 {
            shrink(&dir, preemption, &expected, |faults| faults.ops.fails_at.store(faults.ops.seen.load(SeqCst) + place, SeqCst));
        }
        for place in 1..=swaps + 2 {
            shrink(&dir, preemption, &expected, |faults| faults.swaps.fails_at.store(faults.swaps.seen.load(SeqCst) + place, SeqCst));
        }
    }
}

#[test]
fn a_failed_device_allocation_fails_engine_creation() {
    let dir = model();
    for place in 1.. {
        let faults = Arc::new(Faults::default());
        faults.makes.fails_at.store(place, SeqCst);
        match engine_on(&faults, &dir, BLOCKS, Preemption::Swap) {
            Err(error) => assert_eq!(error.code(), Code::OutOfMemory),
            Ok(_) if faults.makes.seen.load(SeqCst) < place => {
                assert!(place > 20);
                break;
            }
            Ok(_) => panic!("the failure of allocation {place} was not reported"),
        }
    }
}

#[test]
fn a_failed_transfer_of_a_packed_form_is_an_error_or_leaves_it_unsaved() {
    let (dir, packed) = (model(), TempDir::new());
    let load = |fails_at: u64| {
        let faults = Arc::new(Faults::default());
        faults.makes.fails_at.store(fails_at, SeqCst);
        let backend = Faulty { cpu: CpuBackend::new(1, None)?, faults: faults.clone() };
        let limits = BatchLimits { tokens: 32, logits: 16 };
        let (_, report) = ModelFiles::open(&dir.0)?.load_packed(&packed.0, backend, limits, &mut |_, _| true)?;
        Ok::<_, Error>((report.form, faults.makes.seen.load(SeqCst) < fails_at))
    };
    let remove_forms = || std::fs::read_dir(&packed.0).unwrap().for_each(|form| std::fs::remove_file(form.unwrap().path()).unwrap());
    // The last saved form is read in the second iteration.
    for form in [PackedForm::Saved, PackedForm::Read] {
        let (mut refused, mut unsaved) = (0, 0);
        for place in 1.. {
            if form == PackedForm::Saved {
                remove_forms();
            }
            match load(place) {
                Err(error) if error.code() == Code::OutOfMemory => refused += 1,
                Ok((PackedForm::Unsaved, false)) => unsaved += 1,
                Ok((found, true)) => {
                    assert_eq!(found, form);
                    break;
                }
                other => panic!("{other:?} after a fault at {place}"),
            }
        }
        println!("{form:?}: {refused} loads failed, {unsaved} forms were not saved");
        assert!(refused > 20 && (unsaved > 5) == (form == PackedForm::Saved));
    }
}

#[test]
fn only_the_failing_request_ends_and_other_outputs_are_unchanged() {
    let dir = model();
    let (expected, _) = without_faults(&dir);
    for place in 0..=requests().len() {
        let (engine, faults) = engine(&dir);
        faults.poisoned.store(true, SeqCst);
        let mut requests = requests();
        requests.insert(place, failing_request());
        add_all(&engine, requests);
        let mut answers = drain(&engine);
        let (tokens, _, finish) = answers.remove(&(100, 0)).unwrap();
        assert_eq!((tokens, finish), (vec![], Some(FinishReason::Error)));
        assert_eq!(answers, expected, "the failing request is number {place}");
    }
}

#[test]
fn all_failing_requests_end_and_other_outputs_are_unchanged() {
    let dir = model();
    let (expected, _) = without_faults(&dir);
    let (engine, faults) = engine(&dir);
    faults.poisoned.store(true, SeqCst);
    // Failing requests come first, and between the others.
    let add_failing = |i: u64| engine.add_request(Request { user_data: 100 + i, n: 1 + i as u32 % 2, ..failing_request() }).unwrap();
    assert!((0..6).map(add_failing).all(|id| id.get() > 0));
    for (request, i) in requests().into_iter().zip(6..) {
        engine.add_request(request).unwrap();
        add_failing(i);
    }
    let mut answers = drain(&engine);
    let failed = answers.split_off(&(100, 0));
    assert!(failed.len() == 14 + 7 && failed.values().all(|(.., finish)| *finish == Some(FinishReason::Error)), "{failed:?}");
    assert_eq!(answers, expected);
}

#[test]
fn a_pinned_prompt_that_fails_every_step_is_unpinned() {
    let dir = model();
    let (engine, faults) = engine(&dir);
    faults.poisoned.store(true, SeqCst);
    let pin = engine.pin(Prompt::Tokens(vec![POISON; 20]), true, b"", 0, None).unwrap();
    let request = requests().swap_remove(0);
    engine.add_request(request).unwrap();
    drain(&engine);
    assert_eq!(engine.unpin(pin).unwrap_err().code(), Code::NotFound);
}

/// Steps a failing engine until all requests have ended, and returns their outputs.
fn step_until_all_fail(engine: &Engine) -> Answers {
    let start = std::time::Instant::now();
    let mut outputs = Vec::new();
    loop {
        assert_eq!(engine.step().unwrap_err(), Error::out_of_memory());
        outputs.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
        let stats = engine.stats();
        if stats.waiting + stats.running == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(start.elapsed() > Duration::from_millis(800), "the engine retries before it ends requests");
    let reasons = outputs.iter().filter_map(|output| output.error.as_ref());
    reasons.for_each(|error| assert!(error.message().contains("with this request could be computed for 1s: the system"), "{error}"));
    answers(&outputs)
}

#[test]
fn a_persistent_device_fault_ends_the_requests_and_the_engine_recovers() {
    let dir = model();
    let (expected, _) = without_faults(&dir);
    let (engine, faults) = engine(&dir);
    add_all(&engine, requests());
    for _ in 0..3 {
        engine.step().unwrap();
    }
    engine.queue().poll(Some(Duration::ZERO)).unwrap();
    faults.dead.store(true, SeqCst);
    let failed = step_until_all_fail(&engine);
    assert!(failed.values().all(|(.., finish)| *finish == Some(FinishReason::Error)), "{failed:?}");
    assert_eq!(failed.len(), requests().len() + 2, "each of three samples ends");
    faults.dead.store(false, SeqCst);
    add_all(&engine, requests());
    assert_eq!(drain(&engine), expected, "outputs after the fault equal those of a run without it");
}

#[test]
fn a_batch_of_failing_requests_ends_and_later_requests_succeed() {
    let dir = model();
    let (expected, _) = without_faults(&dir);
    let (engine, faults) = engine(&dir);
    faults.poisoned.store(true, SeqCst);
    add_all(&engine, vec![failing_request(), Request { user_data: 101, ..failing_request() }]);
    let ends: Vec<_> = step_until_all_fail(&engine).into_values().map(|(.., finish)| finish).collect();
    assert_eq!(ends, [Some(FinishReason::Error); 2]);
    add_all(&engine, requests());
    assert_eq!(drain(&engine), expected);
}

#[test]
fn a_request_added_during_a_fault_has_its_own_retry_timeout() {
    let dir = model();
    // A busy machine can delay the step that ends the first request by a second. Then the second
    // request has failed for a second too.
    let in_time = (0..20).any(|_| end_of_the_first_of_two_requests(&dir) < Duration::from_millis(900));
    assert!(in_time, "no step ran in time");
}

/// Adds the second request 0.8 s after the first one, and checks both if the first one ends soon
/// enough. Returns the time between the second request and the end of the first.
fn end_of_the_first_of_two_requests(dir: &TempDir) -> Duration {
    let (engine, faults) = engine(dir);
    let mut pair = requests().into_iter().take(2);
    let (early, late) = (pair.next().unwrap(), pair.next().unwrap());
    let (early_id, late_id) = (early.user_data, late.user_data);
    faults.dead.store(true, SeqCst);
    engine.add_request(early).unwrap();
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(800) {
        engine.step().unwrap_err();
        std::thread::sleep(Duration::from_millis(20));
    }
    let late_added = std::time::Instant::now();
    engine.add_request(late).unwrap();
    let mut outputs = Vec::new();
    while outputs.is_empty() {
        engine.step().unwrap_err();
        outputs.extend(engine.queue().poll(Some(Duration::from_millis(20))).unwrap());
    }
    let waited = late_added.elapsed();
    if waited >= Duration::from_millis(900) {
        return waited;
    }
    faults.dead.store(false, SeqCst);
    assert!(outputs.iter().all(|output| output.user_data == early_id && output.finish == Some(FinishReason::Error)), "{outputs:?}");
    let answers = drain(&engine);
    assert!(answers.iter().all(|((id, _), (.., finish))| *id == late_id && *finish != Some(FinishReason::Error)), "{answers:?}");
    waited
}

#[test]
fn a_short_device_fault_changes_no_output() {
    let dir = model();
    let (expected, _) = without_faults(&dir);
    let (engine, faults) = engine(&dir);
    let mut seen = Vec::new();
    add_all(&engine, requests());
    for step in 0.. {
        faults.dead.store(step % 3 == 0, SeqCst);
        let report = engine.step();
        seen.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
        match report {
            Ok(report) if report.unfinished == 0 => break,
            result => assert_eq!(result.is_err(), step % 3 == 0),
        }
    }
    assert_eq!(answers(&seen), expected);
}
