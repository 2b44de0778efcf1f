//! Two steps in flight: the executor starts a step before the host knows the tokens of the previous
//! one. A scripted device stands in for a real one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use crate::support::{Random, TempDir, model_info};
use pagedllm::engine::journal::{JournalFile, Replay};
use pagedllm::engine::{Engine, Executor, InFlightStep, Prompt, Request, StepOutput};
use pagedllm::error::{Error, Result};
use pagedllm::types::batch::Batch;
use pagedllm::types::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits, MAX_TOPS, SampleStatus};
use pagedllm::types::options::{EngineOptions, SamplingParams};

const VOCAB: usize = 50;
const EOS: u32 = 49;

/// What the device does, and what it has seen.
#[derive(Default)]
struct Script {
    /// Numbers of the launch and of the wait that fail, counted from 1.
    fails_to_launch: AtomicU32,
    fails_to_wait: AtomicU32,
    launches: AtomicU32,
    waits: AtomicU32,
    /// Largest number of steps in flight, and the number of placeholders.
    most_in_flight: AtomicUsize,
    placeholders: AtomicUsize,
}

/// A device whose next token follows from the last token and its position.
struct Device {
    depth: usize,
    script: Arc<Script>,
    /// Logits of the launched steps, the oldest first.
    steps: Vec<Vec<f32>>,
    /// Samples of the last step, and those that the host reads.
    samples: Vec<DeviceSample>,
    read: (Vec<f32>, Vec<DeviceSample>),
}

fn next_token(token: u32, position: u32) -> u32 {
    (token * 7 + position * 3 + 1) % VOCAB as u32
}

impl Executor for Device {
    fn depth(&self) -> usize {
        self.depth
    }

    fn sampling_limits(&self) -> Option<DeviceSamplingLimits> {
        Some(DeviceSamplingLimits::for_rows(8, VOCAB))
    }

    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        if self.script.launches.fetch_add(1, SeqCst) + 1 == self.script.fails_to_launch.load(SeqCst) {
            return Err(Error::out_of_memory());
        }
        let mut tokens = batch.tokens.clone();
        for placeholder in &batch.placeholders {
            tokens[placeholder.token as usize] = self.samples[placeholder.sample as usize].token;
        }
        self.script.placeholders.fetch_add(batch.placeholders.len(), SeqCst);
        let mut logits = vec![0.0; batch.logit_rows.len() * VOCAB];
        for (row, &at) in batch.logit_rows.iter().enumerate() {
            logits[row * VOCAB + next_token(tokens[at as usize], batch.positions[at as usize]) as usize] = 9.0;
        }
        self.steps.push(logits);
        self.script.most_in_flight.fetch_max(self.steps.len(), SeqCst);
        Ok(InFlightStep::new(batch.logit_rows.len()))
    }

    fn sample(&mut self, _: &mut InFlightStep, sampling: &DeviceSampling) -> Result<()> {
        assert_eq!(self.steps.len(), 1, "only the oldest step is sampled");
        let token = |row: u32| self.steps[0][row as usize * VOCAB..].iter().position(|logit| *logit > 0.0).unwrap() as u32;
        self.samples = sampling.rows.iter().map(|draw| sample(token(draw.row))).collect();
        Ok(())
    }

    fn wait(&mut self, _: InFlightStep) -> Result<StepOutput<'_>> {
        if self.script.waits.fetch_add(1, SeqCst) + 1 == self.script.fails_to_wait.load(SeqCst) {
            return Err(Error::out_of_memory());
        }
        self.read = (self.steps.remove(0), self.samples.clone());
        Ok(StepOutput { logits: &self.read.0, device_samples: &self.read.1 })
    }

    fn discard(&mut self, _: Option<&Error>) {
        self.steps.clear();
    }
}

fn sample(token: u32) -> DeviceSample {
    DeviceSample { outcome: SampleStatus::TOKEN, token, logit: 9.0, greatest: 9.0, powers: 0, tops: [Default::default(); MAX_TOPS] }
}

fn device(depth: usize, script: &Arc<Script>) -> Box<dyn Executor> {
    Box::new(Device { depth, script: script.clone(), steps: vec![], samples: vec![], read: Default::default() })
}

fn engine(depth: usize, options: EngineOptions) -> (Engine, Arc<Script>) {
    let script = Arc::new(Script::default());
    let options = EngineOptions { max_batch_tokens: 16, max_seqs: 4, ..options };
    let info = model_info(VOCAB, 60, 64, vec![EOS]);
    (Engine::with_executor(&options, info, None, device(depth, &script)).unwrap(), script)
}

/// Request `number` of a random trace. Some requests are sampled by the host.
fn request(number: u64) -> Request {
    let mut random = Random(number + 9);
    let prompt = (0..1 + random.below(30)).map(|_| random.below(VOCAB - 1) as u32).collect();
    let ignore_eos = random.below(2) == 0;
    // A device reports fewer top tokens, so the host samples these requests.
    let logprobs = (random.below(4) == 0).then_some(MAX_TOPS as u32 + 1);
    let sampling = SamplingParams { max_tokens: Some(1 + random.below(20)), ignore_eos, logprobs, ..SamplingParams::greedy() };
    Request { user_data: number, n: 1 + (random.below(5) == 0) as u32, ..Request::new(Prompt::Tokens(prompt), sampling) }
}

/// Runs requests that arrive in random steps. Returns the tokens of each result, and the number of
/// steps that were reported as failed.
fn run(engine: &Engine, requests: u64) -> (Vec<Vec<u32>>, usize) {
    let (mut random, mut added, mut failed) = (Random(3), 0, 0);
    let mut found = vec![Vec::new(); 2 * requests as usize];
    loop {
        if added < requests && random.below(3) == 0 {
            engine.add_request(request(added)).unwrap();
            added += 1;
        }
        let report = engine.step();
        engine.check_invariants();
        failed += report.is_err() as usize;
        for output in engine.queue().poll(Some(Duration::ZERO)).unwrap() {
            found[2 * output.user_data as usize + output.index as usize].extend(output.tokens);
        }
        if added == requests && report.is_ok_and(|report| report.unfinished == 0) {
            return (found, failed);
        }
    }
}

#[test]
fn outputs_do_not_depend_on_the_number_of_steps_in_flight() {
    let (expected, _) = run(&engine(1, EngineOptions::default()).0, 60);
    let (engine, script) = engine(2, EngineOptions::default());
    let (found, failed) = run(&engine, 60);
    assert_eq!((found, failed), (expected, 0));
    assert_eq!(script.most_in_flight.load(SeqCst), 2);
    assert!(script.placeholders.load(SeqCst) > 100, "{} placeholders", script.placeholders.load(SeqCst));
}

/// A failure of the older step also discards the newer one. Both are recomputed.
#[test]
fn a_failed_step_takes_the_step_behind_it_with_it() {
    let (expected, _) = run(&engine(1, EngineOptions::default()).0, 20);
    for nth in 1..60 {
        let (engine, script) = engine(2, EngineOptions::default());
        script.fails_to_wait.store(nth, SeqCst);
        let (found, failed) = run(&engine, 20);
        assert_eq!((found, failed), (expected.clone(), 0), "wait {nth} fails");
        assert_eq!(engine.stats().steps_failed, 1);
    }
}

/// An error at the launch of the newer step leaves the older one to finish.
#[test]
fn a_failed_launch_leaves_the_step_in_flight_to_finish() {
    let (expected, _) = run(&engine(1, EngineOptions::default()).0, 20);
    let mut waits_at_failures = 0;
    for nth in 1..60 {
        let (engine, script) = engine(2, EngineOptions::default());
        script.fails_to_launch.store(nth, SeqCst);
        let (found, failed) = run(&engine, 20);
        assert_eq!((found, failed), (expected.clone(), 0), "launch {nth} fails");
        assert_eq!(engine.stats().steps_failed, 1);
        waits_at_failures += (script.launches.load(SeqCst) - script.waits.load(SeqCst) == 1) as u32;
    }
    assert!(waits_at_failures > 50, "only the failed launch has no wait");
}

#[test]
fn a_sequence_that_changes_while_its_step_is_in_flight_ignores_the_result() {
    let (engine, script) = engine(2, EngineOptions::default());
    let sampling = SamplingParams { max_tokens: Some(30), ignore_eos: true, ..SamplingParams::greedy() };
    let seq = engine.add_request(Request::new(Prompt::Tokens(vec![1, 2, 3]), sampling)).unwrap().sequence(0);
    for _ in 0..4 {
        engine.step().unwrap();
    }
    assert_eq!(script.most_in_flight.load(SeqCst), 2);
    engine.append(seq, vec![40, 41]).unwrap();
    let child = engine.fork(seq, 1, &Default::default()).unwrap()[0];
    engine.rewind(seq, 8).unwrap();
    while engine.step().unwrap().unfinished > 0 {
        engine.check_invariants();
    }
    let outputs = engine.queue().poll(Some(Duration::ZERO)).unwrap();
    let of = |id| outputs.iter().filter(move |output| output.sequence == id).flat_map(|output| output.tokens.clone());
    let generate = |mut tokens: Vec<u32>, count: usize| {
        let first = tokens.len();
        (0..count).for_each(|_| tokens.push(next_token(*tokens.last().unwrap(), tokens.len() as u32 - 1)));
        tokens.split_off(first)
    };
    let four = generate(vec![1, 2, 3], 4);
    let before = [vec![1, 2, 3], four.clone()].concat();
    // The sequence was rewound to its first appended token, the fork has both.
    let expected: Vec<u32> = four.iter().copied().chain(generate([before.clone(), vec![40]].concat(), 26)).collect();
    assert_eq!(of(seq).collect::<Vec<_>>()[..20], expected[..20]);
    let expected = generate([before, vec![40, 41]].concat(), 10);
    assert_eq!(of(child).collect::<Vec<_>>()[..10], expected);
}

/// A journal with failures of launches and waits is replayed with the same steps in flight.
#[test]
fn a_journal_of_steps_in_flight_is_replayed() {
    let dir = TempDir::new();
    for (launch, wait) in [(0, 0), (7, 12), (12, 7), (1, 1)] {
        let journal = dir.0.join("journal");
        let (engine, script) = engine(2, EngineOptions { journal_path: Some(journal.clone()), ..Default::default() });
        script.fails_to_launch.store(launch, SeqCst);
        script.fails_to_wait.store(wait, SeqCst);
        run(&engine, 30);
        drop(engine);
        let info = model_info(VOCAB, 60, 64, vec![EOS]);
        let replay = Replay::with_executor(JournalFile::open(&journal).unwrap(), info, None, device(2, &Arc::default())).unwrap();
        let summary = replay.run().unwrap();
        assert_eq!(summary.difference, None, "launch {launch} and wait {wait} fail");
        assert!(summary.sequences >= 30);
    }
}
