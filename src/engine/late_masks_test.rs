//! Engines whose masks are late at random, or until a test releases them. The device is scripted:
//! its logits follow from the last token and its position.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::journal::{self, JournalFile, Recording, Replay};
use super::load::EngineParts;
use super::step_inputs::{EndedStep, Inputs, StepInputs};
use super::{Clock, Decorate, Engine, Fork, Prompt, Request, SystemClock};
use crate::error::{Error, Result};
use crate::executor::{Executor, InFlightStep, StepOutput};
use crate::generation::grammar::{MaskId, Masker};
use crate::generation::sampler::{Lane, uniform};
use crate::memory::budget::Need;
use crate::observability::journal::writer::JournalWriter;
use crate::observability::stats::StepReport;
use crate::scheduler::Costs;
use crate::types::batch::Batch;
use crate::types::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits, MAX_TOPS, NO_MASK, SampleStatus};
use crate::types::options::{EngineOptions, Grammar, Preemption, SamplingParams};
use crate::types::outputs::FinishReason;
use crate::types::outputs::Output;
use crate::types::{RequestId, SeqId};

/// Which masks are late.
#[derive(Default)]
struct Lateness {
    /// Share of late masks. Half of these are finished at each step.
    share: f64,
    seed: u64,
    drawn: u64,
    /// Whether all masks are late from now on, and none finishes.
    holds: bool,
    /// Number of late masks so far.
    count: usize,
}

impl Lateness {
    fn chance(&mut self, share: f64) -> bool {
        self.drawn += 1;
        uniform(self.seed, self.drawn, Lane::Token) < share
    }

    fn is_late(&mut self) -> bool {
        let share = self.share;
        let is_late = self.holds || self.chance(share);
        self.count += is_late as usize;
        is_late
    }
}

/// Inputs that decide by `Lateness` instead of the time.
struct LateInputs {
    inner: Box<dyn Inputs>,
    lateness: Arc<Mutex<Lateness>>,
}

impl Inputs for LateInputs {
    fn collect(&mut self, costs: Option<Costs>, inputs: &mut StepInputs) {
        self.inner.collect(costs, inputs);
    }

    fn await_masks(&mut self, masker: &mut Masker, ids: &[MaskId], late: &mut Vec<MaskId>) {
        let mut lateness = self.lateness.lock().unwrap();
        late.extend(ids.iter().filter(|_| lateness.is_late()));
        ids.iter().filter(|id| !late.contains(id)).for_each(|&id| masker.wait(&[id], None));
    }

    fn is_late(&mut self, _: MaskId, takes_long: bool) -> bool {
        takes_long || self.lateness.lock().unwrap().is_late()
    }

    fn finished_masks(&mut self, masker: &mut Masker, late: &[MaskId], finished: &mut Vec<MaskId>) {
        let mut lateness = self.lateness.lock().unwrap();
        finished.extend(late.iter().filter(|_| !lateness.holds && lateness.chance(0.5)));
        masker.wait(finished, None);
    }

    fn await_completion(&mut self, _: Option<Duration>) -> bool {
        !self.lateness.lock().unwrap().holds
    }

    fn pool_blocks(&mut self, need: Need) -> usize {
        self.inner.pool_blocks(need)
    }

    fn end_step(&mut self, step: &EndedStep) {
        self.inner.end_step(step);
    }
}

/// A device that samples the most probable allowed token. Some of its steps fail.
struct Device {
    depth: usize,
    vocab: usize,
    /// Number of launches and waits until one fails. 0: none fails.
    until_failure: Arc<AtomicU32>,
    steps: Vec<Vec<f32>>,
    samples: Vec<DeviceSample>,
    read: (Vec<f32>, Vec<DeviceSample>),
}

impl Device {
    fn check(&self) -> Result<()> {
        let fails = self.until_failure.load(SeqCst) == 1;
        let _ = self.until_failure.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        if fails { Err(Error::internal("a failure of the test")) } else { Ok(()) }
    }
}

impl Executor for Device {
    fn depth(&self) -> usize {
        self.depth
    }

    fn sampling_limits(&self) -> Option<DeviceSamplingLimits> {
        (self.depth > 1).then(|| DeviceSamplingLimits::for_rows(16, self.vocab))
    }

    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        self.check()?;
        let mut tokens = batch.tokens.clone();
        for placeholder in &batch.placeholders {
            tokens[placeholder.token as usize] = self.samples[placeholder.sample as usize].token;
        }
        let mut logits = Vec::new();
        for &at in &batch.logit_rows {
            let (token, position) = (u64::from(tokens[at as usize]), u64::from(batch.positions[at as usize]));
            logits.extend((0..self.vocab as u64).map(|next| ((token * 31 + position * 17 + next * 7919) % 1009) as f32 / 200.0));
        }
        self.steps.push(logits);
        Ok(InFlightStep::new(batch.logit_rows.len()))
    }

    fn sample(&mut self, _: &mut InFlightStep, sampling: &DeviceSampling) -> Result<()> {
        let vocab = self.vocab;
        let logits = &self.steps[0];
        let sample = |row: u32, mask: u32| {
            let allows = |token: usize| mask == NO_MASK || sampling.masks[mask as usize + token / 32] >> (token % 32) & 1 == 1;
            let logit = |token: usize| logits[row as usize * vocab + token];
            let best = (0..vocab).filter(|&token| allows(token)).max_by(|&a, &b| logit(a).total_cmp(&logit(b)).then(b.cmp(&a)));
            let token = best.expect("the mask allows a token") as u32;
            DeviceSample { outcome: SampleStatus::TOKEN, token, logit: 9.0, greatest: 9.0, powers: 0, tops: [Default::default(); MAX_TOPS] }
        };
        self.samples = sampling.rows.iter().map(|draw| sample(draw.row, draw.mask)).collect();
        Ok(())
    }

    fn wait(&mut self, _: InFlightStep) -> Result<StepOutput<'_>> {
        self.check()?;
        self.read = (self.steps.remove(0), self.samples.clone());
        Ok(StepOutput { logits: &self.read.0, device_samples: &self.read.1 })
    }

    fn discard(&mut self, _: Option<&Error>) {
        self.steps.clear();
    }
}

/// An engine, and what the tests change of it.
struct Setup {
    engine: Engine,
    lateness: Arc<Mutex<Lateness>>,
    until_failure: Arc<AtomicU32>,
    clock: Arc<TestClock>,
}

/// The clock of the system, which a test can advance.
#[derive(Default)]
struct TestClock {
    system: SystemClock,
    ahead: Mutex<Duration>,
}

impl Clock for TestClock {
    fn now(&self) -> Duration {
        self.system.now() + *self.ahead.lock().unwrap()
    }
}

/// The bundled model with its tokenizer, on the scripted device.
fn parts(options: &EngineOptions, depth: usize, until_failure: &Arc<AtomicU32>) -> EngineParts {
    let parts = EngineParts::load_on_device(options, &mut |_, _| true).unwrap();
    let (vocab, until_failure) = (parts.info.vocab_size, until_failure.clone());
    let device = Device { depth, vocab, until_failure, steps: vec![], samples: vec![], read: Default::default() };
    EngineParts { executor: Box::new(device), ..parts }
}

fn options(preemption: Preemption) -> EngineOptions {
    let model_dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/model");
    let swap_bytes = if preemption == Preemption::Swap { 1 << 20 } else { 0 };
    EngineOptions { model_dir, threads: Some(1), max_seqs: 12, max_model_len: Some(128), preemption, swap_bytes, ..Default::default() }
}

fn setup(share: f64, seed: u64, depth: usize, options: &EngineOptions, journal: Option<&Path>) -> Setup {
    let until_failure = Arc::new(AtomicU32::new(0));
    let EngineParts { info, text, executor, .. } = parts(options, depth, &until_failure);
    let lateness = Arc::new(Mutex::new(Lateness { share, seed, ..Lateness::default() }));
    let late = lateness.clone();
    let writer = journal.map(|path| JournalWriter::create(path, &journal::header(options, &info, &executor.layout())).unwrap());
    let max_seqs = options.max_seqs;
    let decorate: Decorate = Box::new(move |inputs, executor| {
        let inputs: Box<dyn Inputs> = Box::new(LateInputs { inner: inputs, lateness: late });
        match writer {
            Some(writer) => Recording::new(max_seqs).unwrap().around(inputs, executor, writer),
            None => (inputs, executor),
        }
    });
    let clock = Arc::new(TestClock::default());
    let engine = Engine::build(options, info, text, executor, clock.clone(), Some(decorate)).unwrap();
    Setup { engine, lateness, until_failure, clock }
}

fn grammars() -> Vec<Option<Grammar>> {
    let schema = r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0,
        "maximum": 150}}, "required": ["name", "age"], "additionalProperties": false}"#;
    vec![
        Some(Grammar::JsonSchema(schema.into())),
        Some(Grammar::Choice(vec!["yes".into(), "no, never".into(), "perhaps".into()])),
        None,
        Some(Grammar::Regex("(ab|cd)*[0-9]{1,6}x?".into())),
        Some(Grammar::Lark("start: w \"!\" w\nw[stop=\".\"]: /[a-z]{0,9}/".into())),
    ]
}

/// Request `number` of a fixed list: with and without grammars, several samples, stop strings, and
/// limits of the length within and beyond the grammar.
fn request(number: u64) -> Request {
    let grammar = grammars()[number as usize % grammars().len()].clone();
    let random = |lane: u64, n: usize| (uniform(number, lane, Lane::Token) * n as f64) as usize;
    let prompt = (0..1 + random(0, 20)).map(|i| 40 + ((number as usize * 7 + i * 3) % 60) as u32).collect();
    let sampling = SamplingParams {
        grammar,
        seed: Some(number),
        temperature: if random(1, 2) == 0 { 0.0 } else { 0.9 },
        max_tokens: Some(1 + random(2, 40)),
        stop: if random(3, 4) == 0 { vec!["7".into()] } else { vec![] },
        logprobs: (random(4, 4) == 0).then_some(2),
        ..Default::default()
    };
    let n = 1 + 2 * (random(5, 4) == 0) as u32;
    Request { user_data: number, n, best_of: (random(6, 9) == 0).then_some(n + 1), ..Request::new(Prompt::Tokens(prompt), sampling) }
}

/// The outputs of a result, one after the other.
#[derive(Debug, Default, PartialEq)]
struct Found {
    tokens: Vec<u32>,
    logprobs: Vec<u32>,
    text: String,
    end: Option<(FinishReason, Option<String>, u64)>,
}

type Results = BTreeMap<(u64, u32), Found>;

fn read(engine: &Engine, results: &mut Results) {
    for output in engine.queue().poll(Some(Duration::ZERO)).unwrap() {
        let Output { user_data, index, tokens, logprobs, text, finish, error, score, .. } = output;
        let found = results.entry((user_data, index)).or_default();
        assert!(found.end.is_none(), "an output follows the last one");
        found.tokens.extend(tokens);
        found.logprobs.extend(logprobs.tokens.iter().map(|logprob| logprob.to_bits()));
        found.text.push_str(&text);
        found.end = finish.map(|finish| (finish, error.map(|error| error.to_string()), score.to_bits()));
    }
}

/// Runs `requests` requests, of which a few arrive in each step.
fn run(setup: &Setup, requests: u64) -> Results {
    let (mut added, mut results) = (0, Results::new());
    for _ in 0..20_000 {
        for _ in 0..2 {
            if added < requests {
                setup.engine.add_request(request(added)).unwrap();
                added += 1;
            }
        }
        let report = setup.engine.step();
        setup.engine.check_invariants();
        read(&setup.engine, &mut results);
        if added == requests && report.is_ok_and(|report| report.unfinished == 0) {
            return results;
        }
    }
    panic!("the requests do not end");
}

const REQUESTS: u64 = 40;

#[test]
fn outputs_do_not_depend_on_late_masks() {
    let options = options(Preemption::Recompute);
    let expected = run(&setup(0.0, 0, 1, &options, None), REQUESTS);
    assert!(expected.values().all(|found| found.end.as_ref().is_some_and(|(_, error, _)| error.is_none())), "{expected:?}");
    for (seed, share) in [(1, 0.1), (2, 0.5), (3, 0.9), (4, 1.0)] {
        let late = setup(share, seed, 1, &options, None);
        assert_eq!(run(&late, REQUESTS), expected, "share {share}");
        let count = late.lateness.lock().unwrap().count;
        assert!(count > 20, "{count}");
    }
}

#[test]
fn outputs_do_not_depend_on_late_masks_with_two_steps_in_flight() {
    let options = options(Preemption::Recompute);
    let expected = run(&setup(0.0, 0, 2, &options, None), REQUESTS);
    for (seed, share) in [(1, 0.1), (2, 0.5), (3, 1.0)] {
        assert_eq!(run(&setup(share, seed, 2, &options, None), REQUESTS), expected, "share {share}");
    }
}

#[test]
fn outputs_do_not_depend_on_late_masks_beside_preemptions() {
    let expected = run(&setup(0.0, 0, 1, &options(Preemption::Recompute), None), REQUESTS);
    for preemption in [Preemption::Recompute, Preemption::Swap] {
        let block = parts(&options(preemption), 1, &Arc::default()).info.memory.block_bytes;
        let small = EngineOptions { kv_bytes: Some(14 * block), ..options(preemption) };
        let late = setup(0.3, 5, 1, &small, None);
        assert_eq!(run(&late, REQUESTS), expected);
        assert!(late.engine.stats().preemptions > 0);
    }
}

#[test]
fn outputs_do_not_depend_on_failed_steps_beside_late_masks() {
    for depth in [1, 2] {
        let options = options(Preemption::Recompute);
        let expected = run(&setup(0.0, 0, depth, &options, None), REQUESTS);
        for failure in (2..40).step_by(3) {
            let late = setup(0.4, failure, depth, &options, None);
            late.until_failure.store(failure as u32, SeqCst);
            assert_eq!(run(&late, REQUESTS), expected, "failure {failure}, depth {depth}");
            assert_eq!(late.until_failure.load(SeqCst), 0);
        }
    }
}

fn long_request(user_data: u64, grammar: Option<Grammar>) -> Request {
    let sampling = SamplingParams { grammar, max_tokens: Some(60), ignore_eos: true, ..SamplingParams::greedy() };
    Request { user_data, keep: true, ..Request::new(Prompt::Tokens(vec![50, 51, 52]), sampling) }
}

/// Starts two requests, one with a grammar, holds the masks back, and steps until one is late.
fn held(depth: usize) -> (Setup, RequestId, Results) {
    let setup = setup(0.0, 0, depth, &options(Preemption::Recompute), None);
    let id = setup.engine.add_request(long_request(1, Some(Grammar::Regex("[a-z]{50}[0-9]{100}".into())))).unwrap();
    setup.engine.add_request(long_request(2, None)).unwrap();
    let mut results = Results::new();
    for _ in 0..5 {
        step(&setup, &mut results);
    }
    setup.lateness.lock().unwrap().holds = true;
    for _ in 0..3 {
        step(&setup, &mut results);
    }
    assert!(setup.lateness.lock().unwrap().count > 0);
    (setup, id, results)
}

fn step(setup: &Setup, results: &mut Results) -> StepReport {
    let report = setup.engine.step().unwrap();
    setup.engine.check_invariants();
    read(&setup.engine, results);
    report
}

#[test]
fn others_get_a_token_in_each_step_while_a_mask_is_late() {
    for depth in [1, 2] {
        let (setup, _, mut results) = held(depth);
        let before = (results[&(1, 0)].tokens.len(), results[&(2, 0)].tokens.len());
        for i in 1..=10 {
            step(&setup, &mut results);
            assert_eq!((results[&(1, 0)].tokens.len(), results[&(2, 0)].tokens.len()), (before.0, before.1 + i));
        }
        setup.lateness.lock().unwrap().holds = false;
        while step(&setup, &mut results).unfinished > 0 {}
        assert!(results[&(1, 0)].text.len() >= 50, "{results:?}");
    }
}

#[test]
fn an_abort_of_a_sequence_with_a_late_mask_takes_effect_in_the_next_step() {
    for depth in [1, 2] {
        let (setup, id, mut results) = held(depth);
        setup.engine.abort(id).unwrap();
        step(&setup, &mut results);
        let Found { tokens, end, .. } = &results[&(1, 0)];
        assert_eq!(end.as_ref().unwrap().0, FinishReason::Abort);
        // All tokens of the sequence have been delivered.
        assert_eq!(setup.engine.sequence(id.sequence(0)).unwrap().len, 3 + tokens.len());
        setup.engine.free(id.sequence(0)).unwrap();
        step(&setup, &mut results);
        setup.lateness.lock().unwrap().holds = false;
        while step(&setup, &mut results).unfinished > 0 {}
    }
}

#[test]
fn a_deadline_of_a_sequence_with_a_late_mask_takes_effect_in_the_next_step() {
    let setup = setup(0.0, 0, 1, &options(Preemption::Recompute), None);
    setup.lateness.lock().unwrap().holds = true;
    let deadline = Duration::from_secs(3600);
    let request = Request { deadline: Some(deadline), ..long_request(1, grammars()[0].clone()) };
    setup.engine.add_request(request).unwrap();
    let mut results = Results::new();
    while setup.lateness.lock().unwrap().count == 0 {
        step(&setup, &mut results);
    }
    *setup.clock.ahead.lock().unwrap() += deadline;
    let report = step(&setup, &mut results);
    assert_eq!((results[&(1, 0)].end.as_ref().unwrap().0, report.unfinished), (FinishReason::Deadline, 0));
}

#[test]
fn a_slow_grammar_gives_the_same_text_as_a_quick_one() {
    let texts = |is_slow: bool| {
        let setup = setup(0.0, 0, 1, &options(Preemption::Recompute), None);
        let grammar = Grammar::Lark("start: s\ns: s s | \"a\" | \"b\"".into());
        // All constraints of the grammar share their pace.
        if is_slow {
            setup.engine.grammars().unwrap().compile(&grammar).unwrap().record_time(Duration::from_secs(1));
        }
        for i in 0..4 {
            setup.engine.add_request(long_request(i, Some(grammar.clone()))).unwrap();
        }
        let mut results = Results::new();
        while step(&setup, &mut results).unfinished > 0 {}
        results
    };
    assert_eq!(texts(true), texts(false));
}

#[test]
fn commands_for_a_sequence_with_a_late_mask_wait_in_their_order() {
    let (setup, id, mut results) = held(1);
    let seq = id.sequence(0);
    let len = setup.engine.sequence(seq).unwrap().len;
    let alone = setup_alone();
    let fork = Fork { at: Some(len), user_data: Some(3), ..Fork::default() };
    let child = setup.engine.fork(seq, 1, &fork).unwrap()[0];
    setup.engine.rewind(seq, len - 2).unwrap();
    setup.engine.append(seq, alone[len - 5..len - 3].to_vec()).unwrap();
    // The abort does not overtake the fork of the sequence, or the commands of the fork.
    setup.engine.fork(child, 1, &Fork { user_data: Some(4), ..fork }).unwrap();
    setup.engine.abort(id).unwrap();
    for _ in 0..3 {
        step(&setup, &mut results);
    }
    assert!(results[&(1, 0)].end.is_none() && !results.contains_key(&(3, 0)));
    setup.lateness.lock().unwrap().holds = false;
    while step(&setup, &mut results).unfinished > 0 {}
    assert_eq!(results[&(1, 0)].end.as_ref().unwrap().0, FinishReason::Abort);
    let whole = |number| [&results[&(1, 0)].tokens[..], &results[&(number, 0)].tokens].concat();
    assert_eq!((whole(3), whole(4)), (alone.clone(), alone));
}

#[test]
fn a_command_that_waits_for_a_mask_counts_as_unfinished() {
    let (setup, id, mut results) = held(1);
    setup.engine.abort(id).unwrap();
    step(&setup, &mut results);
    setup.engine.export(id.sequence(0), None).unwrap();
    // The other request has 60 tokens.
    for _ in 0..70 {
        assert!(step(&setup, &mut results).unfinished > 0, "the host must step again");
    }
    setup.lateness.lock().unwrap().holds = false;
    let mut states = 0;
    for _ in 0..1000 {
        let unfinished = setup.engine.step().unwrap().unfinished;
        states +=
            setup.engine.queue().poll(Some(Duration::ZERO)).unwrap().iter().filter(|output| !output.sequence_state.is_empty()).count();
        if unfinished == 0 {
            break;
        }
    }
    assert_eq!(states, 1);
}

#[test]
fn commands_that_waited_for_a_mask_are_applied_in_bounded_portions_and_in_order() {
    let (setup, id, mut results) = held(1);
    let seq = id.sequence(0);
    let len = setup.engine.sequence(seq).unwrap().len;
    for _ in 0..3000 {
        setup.engine.rewind(seq, len).unwrap();
    }
    setup.engine.rewind(seq, len - 1).unwrap();
    (0..4).for_each(|_| _ = step(&setup, &mut results));
    setup.lateness.lock().unwrap().holds = false;
    while setup.engine.core.lock().unwrap().released_commands() == 0 {
        step(&setup, &mut results);
    }
    let left = setup.engine.core.lock().unwrap().released_commands();
    assert!((1900..2000).contains(&left), "{left}");
    setup.engine.abort(id).unwrap();
    step(&setup, &mut results);
    assert!(results[&(1, 0)].end.is_none(), "the abort follows the commands before it");
    while step(&setup, &mut results).unfinished > 0 {}
    assert_eq!(results[&(1, 0)].end.as_ref().unwrap().0, FinishReason::Abort);
}

/// Returns the tokens of the request with a grammar of `held`, without late masks.
fn setup_alone() -> Vec<u32> {
    let setup = setup(0.0, 0, 1, &options(Preemption::Recompute), None);
    setup.engine.add_request(long_request(1, Some(Grammar::Regex("[a-z]{50}[0-9]{100}".into())))).unwrap();
    let mut results = Results::new();
    while step(&setup, &mut results).unfinished > 0 {}
    results.remove(&(1, 0)).unwrap().tokens
}

/// Calls of a host in a random order, for sequences with grammars.
fn host(setup: &Setup, seed: u64) {
    let engine = &setup.engine;
    let mut seqs: Vec<SeqId> = Vec::new();
    let mut results = Results::new();
    for i in 0..150u64 {
        let random = |lane: u64, n: usize| (uniform(seed, 20 * i + lane, Lane::Token) * n as f64) as usize;
        if random(0, 3) == 0 {
            let request = Request { keep: random(1, 2) == 0, user_data: i, deadline: None, ..request(i) };
            if let Ok(id) = engine.add_request(request) {
                seqs.push(id.sequence(0));
            }
        }
        if let Some(&seq) = seqs.get(random(2, seqs.len().max(1))) {
            let len = engine.sequence(seq).map_or(1, |info| info.len);
            // Most sequences have ended or run, so many of the calls are refused.
            let _ = match random(3, 8) {
                0 => engine.fork(seq, 1, &Fork { user_data: Some(1000 + i), ..Fork::default() }).map(|ids| seqs.extend(ids)),
                1 => engine.append(seq, vec![65, 66]),
                2 => engine.rewind(seq, len.saturating_sub(random(4, 3)).max(1)),
                3 => engine.export(seq, None),
                4 => engine.free(seq),
                5 => engine.abort(seq.own_request()),
                6 => engine.continue_sequence(seq, super::Continue { user_data: Some(2000 + i), ..Default::default() }),
                _ => engine.resume(seq, super::Resume { user_data: Some(3000 + i), ..super::Resume::new(request(i + 1).sampling) }),
            };
        }
        let _ = engine.step();
        engine.check_invariants();
        engine.queue().poll(Some(Duration::ZERO)).unwrap();
    }
    while engine.step().is_ok_and(|report| report.unfinished > 0) {
        read(engine, &mut results);
    }
}

#[test]
fn a_journal_with_late_masks_is_replayed_bit_for_bit() {
    for (seed, share, depth) in [(1, 0.0, 1), (2, 0.3, 1), (3, 0.8, 1), (4, 0.5, 2)] {
        let path = std::env::temp_dir().join(format!("pagedllm-late-masks-{}-{seed}", std::process::id()));
        let options = options(Preemption::Swap);
        let recorded = setup(share, seed, depth, &options, Some(&path));
        host(&recorded, seed);
        let count = recorded.lateness.lock().unwrap().count;
        assert!(share == 0.0 || count > 20, "{count}");
        drop(recorded);
        let EngineParts { info, text, executor, .. } = parts(&options, depth, &Arc::default());
        let replay = Replay::with_executor(JournalFile::open(&path).unwrap(), info, text, executor).unwrap();
        let summary = replay.run().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(summary.difference, None, "seed {seed}");
        assert!(summary.sequences > 20, "{summary:?}");
    }
}
