//! Exports and imports of large sequences: a step copies a bounded number of bytes, other requests
//! continue, and the bytes are those of an engine that copies everything at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use crate::support::faulty::{Faults, Faulty};
use crate::support::{ManualClock, TempDir, configs, model_info, write_random_model};
use pagedllm::backend::cpu::CpuBackend;
use pagedllm::engine::{Continue, Engine, Fork, ModelExecutor, Output, Prompt, Request, Resume};
use pagedllm::error::Code;
use pagedllm::model::{BatchLimits, KvCache, KvPool, ModelFiles};
use pagedllm::types::SeqId;
use pagedllm::types::options::{EngineOptions, KvDtype, Preemption, SamplingParams};
use pagedllm::types::outputs::FinishReason;

const BLOCK: usize = 8;
const BLOCKS: usize = 96;
/// Number of blocks that a step of the engines under test copies.
const STEP_BLOCKS: usize = 3;

/// A small LLaMA and its levels of KV. Each block that an export or import copies is one call of
/// the device for each level.
struct Model {
    dir: TempDir,
    levels: u64,
}

/// An engine on a device that counts the copied blocks.
struct Device {
    engine: Engine,
    faults: Arc<Faults>,
    levels: u64,
}

impl Model {
    fn new() -> Model {
        let dir = TempDir::new();
        write_random_model(&dir.0, &configs(512).pop().unwrap().1, false, 5);
        let levels = ModelFiles::open(&dir.0).unwrap().spec.layers.len() as u64;
        Model { dir, levels }
    }

    /// Creates an engine that copies `step_blocks` blocks in a step.
    fn engine(&self, blocks: usize, step_blocks: usize, preemption: Preemption) -> Device {
        let faults = Arc::new(Faults::default());
        let files = ModelFiles::open(&self.dir.0).unwrap();
        let backend = Faulty { cpu: CpuBackend::new(1, None).unwrap(), faults: faults.clone() };
        let pool = KvPool { blocks, block_size: BLOCK, dtype: KvDtype::F32 };
        let block_bytes = pool.block_bytes(&backend, &files.spec);
        let mut kv = KvCache::new(&backend, &files.spec, pool).unwrap();
        kv.add_host_tier(&backend, BLOCKS, block_bytes).unwrap();
        let decoder = files.load(backend, BatchLimits { tokens: 64, logits: 16 }, &mut |_, _| true).unwrap();
        let mut info = model_info(files.spec.vocab_size, blocks, 256, vec![]);
        (info.memory.block_bytes, info.memory.swap_blocks) = (block_bytes, BLOCKS);
        let executor = ModelExecutor::new(decoder, kv).with_max_transfer_bytes(step_blocks * block_bytes as usize);
        let options = EngineOptions { max_batch_tokens: 64, max_seqs: 16, preemption, ..Default::default() };
        // Steps that take no time, so that a busy machine does not limit what they copy.
        let engine = Engine::with_clock(&options, info, None, Box::new(executor), Arc::new(ManualClock::default())).unwrap();
        Device { engine, faults, levels: self.levels }
    }

    /// Creates an engine whose exports and imports take several steps.
    fn stepwise(&self) -> Device {
        self.engine(BLOCKS, STEP_BLOCKS, Preemption::Recompute)
    }

    /// Creates an engine that copies any sequence in one step.
    fn at_once(&self) -> Device {
        self.engine(BLOCKS, 100 * BLOCKS, Preemption::Recompute)
    }
}

impl Device {
    fn add(&self, len: usize, max_tokens: usize, keep: bool) -> SeqId {
        let prompt = Prompt::Tokens((0..len as u32).map(|k| k * 5 % 120).collect());
        self.engine.add_request(Request { keep, ..Request::new(prompt, sampling(max_tokens)) }).unwrap().sequence(0)
    }

    /// Runs a step. Returns its outputs and the number of blocks that exports and imports copied.
    fn step(&self) -> (Vec<Output>, u64) {
        let before = self.faults.exports.seen.load(SeqCst);
        self.engine.step().unwrap();
        self.engine.check_invariants();
        let copied = self.faults.exports.seen.load(SeqCst) - before;
        (self.engine.queue().poll(Some(Duration::ZERO)).unwrap().into(), copied.div_ceil(self.levels))
    }

    /// Runs steps until all requests and transfers have ended.
    fn drain(&self) -> Vec<Output> {
        let mut outputs = Vec::new();
        while self.engine.step().unwrap().unfinished > 0 {
            self.engine.check_invariants();
            outputs.extend(Vec::from(self.engine.queue().poll(Some(Duration::ZERO)).unwrap()));
        }
        outputs.extend(Vec::from(self.engine.queue().poll(Some(Duration::ZERO)).unwrap()));
        self.engine.check_invariants();
        outputs
    }

    /// Creates an idle sequence of 210 tokens.
    fn kept(&self) -> SeqId {
        let seq = self.add(200, 10, true);
        self.drain();
        seq
    }

    fn export(&self, seq: SeqId) -> Vec<u8> {
        self.engine.export(seq, None).unwrap();
        state_of(&self.drain(), seq)
    }

    fn assert_empty(&self) {
        let stats = self.engine.stats();
        assert_eq!((stats.running, stats.waiting, stats.idle, stats.blocks_used, stats.swap_blocks_used), (0, 0, 0, 0, 0), "{stats:?}");
    }
}

fn sampling(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), seed: Some(3), ignore_eos: true, logprobs: Some(0), ..Default::default() }
}

fn state_of(outputs: &[Output], seq: SeqId) -> Vec<u8> {
    let output = outputs.iter().find(|output| output.sequence == seq && !output.sequence_state.is_empty());
    output.expect("the export emits an output with the state").sequence_state.clone()
}

/// Tokens, bits of the log probabilities and finish reason by sequence.
type Answers = BTreeMap<SeqId, (Vec<u32>, Vec<u32>, Option<FinishReason>)>;

fn answers(outputs: &[Output]) -> Answers {
    let mut answers = Answers::new();
    for output in outputs.iter().filter(|output| output.sequence_state.is_empty()) {
        let answer = answers.entry(output.sequence).or_default();
        answer.0.extend(&output.tokens);
        answer.1.extend(output.logprobs.tokens.iter().map(|logprob| logprob.to_bits()));
        answer.2 = output.finish.or(answer.2);
    }
    answers
}

#[test]
fn a_large_export_takes_several_steps_and_other_requests_get_a_token_in_each() {
    let model = Model::new();
    let reference = model.at_once();
    let expected = reference.export(reference.kept());
    let device = model.stepwise();
    let kept = device.kept();
    let others = [20, 30, 40].map(|len| device.add(len, 40, false));
    while device.step().0.iter().filter(|output| !output.tokens.is_empty()).count() < others.len() {}
    device.engine.export(kept, None).unwrap();
    let (mut steps, mut copied) = (0, 0);
    let state = loop {
        let (outputs, blocks) = device.step();
        assert!(blocks <= STEP_BLOCKS as u64, "a step copied {blocks} blocks");
        let generated = answers(&outputs);
        // The thread that encodes the state may take longer than the other requests.
        let has_token = |seq| generated.get(seq).is_some_and(|answer| answer.0.len() == 1);
        assert!(blocks == 0 || others.iter().all(has_token), "a request got no token: {generated:?}");
        (steps, copied) = (steps + 1, copied + blocks);
        if let Some(output) = outputs.iter().find(|output| !output.sequence_state.is_empty()) {
            break output.sequence_state.clone();
        }
    };
    assert!(state == expected, "the bytes differ");
    // 209 tokens have K and V, since that of the last one is not computed.
    assert_eq!(copied, 27);
    assert!(steps >= 9, "{steps} steps");
    device.drain();
    device.engine.free(kept).unwrap();
    device.drain();
}

#[test]
fn an_engine_without_requests_completes_an_export_in_one_call_of_step() {
    let model = Model::new();
    let device = model.stepwise();
    let kept = device.kept();
    device.engine.export(kept, None).unwrap();
    assert_eq!(device.engine.step().unwrap().unfinished, 0);
    let outputs: Vec<Output> = device.engine.queue().poll(Some(Duration::ZERO)).unwrap().into();
    assert!(!state_of(&outputs, kept).is_empty());
}

#[test]
fn the_thread_of_an_engine_completes_exports_and_imports() {
    let model = Model::new();
    let reference = model.at_once();
    let expected = reference.export(reference.kept());
    let device = model.stepwise();
    let kept = device.kept();
    device.engine.start().unwrap();
    for _ in 0..5 {
        device.engine.export(kept, None).unwrap();
        let outputs: Vec<Output> = device.engine.queue().poll(None).unwrap().into();
        assert!(state_of(&outputs, kept) == expected);
        let copy = device.engine.import(device.engine.queue(), &expected).unwrap();
        device.engine.resume(copy, Resume { keep: false, ..Resume::new(sampling(1)) }).unwrap();
        let outputs: Vec<Output> = device.engine.queue().poll(None).unwrap().into();
        assert_eq!((outputs[0].sequence, outputs[0].tokens.len()), (copy, 1));
    }
    device.engine.stop();
    device.engine.check_invariants();
}

/// What happens to a sequence while it is exported.
type Disturbance = (&'static str, fn(&Engine, SeqId));

const DISTURBANCES: &[Disturbance] = &[
    ("it only generates", |_, _| {}),
    ("it is rewound", |engine, seq| engine.rewind(seq, 50).unwrap()),
    ("it is rewound and appended to", |engine, seq| {
        engine.rewind(seq, 100).unwrap();
        engine.append(seq, vec![7; 30]).unwrap();
    }),
    ("it is forked", |engine, seq| drop(engine.fork(seq, 3, &Fork { seed: Some(9), ..Default::default() }).unwrap())),
    ("it is freed", |engine, seq| engine.free(seq).unwrap()),
    ("it is aborted", |engine, seq| engine.abort(seq.own_request()).unwrap()),
    ("it is exported again", |engine, seq| {
        engine.rewind(seq, 40).unwrap();
        engine.export(seq, None).unwrap();
    }),
];

#[test]
fn an_export_has_the_state_of_its_command_whatever_happens_to_the_sequence_meanwhile() {
    let model = Model::new();
    let reference = model.at_once();
    let seq = reference.add(180, 60, true);
    for _ in 0..12 {
        reference.step();
    }
    reference.engine.export(seq, None).unwrap();
    let expected = state_of(&reference.step().0, seq);
    for preemption in [Preemption::Recompute, Preemption::Swap] {
        for (what, disturb) in DISTURBANCES {
            for delay in [0, 1, 4] {
                let device = model.engine(BLOCKS, STEP_BLOCKS, preemption);
                let seq = device.add(180, 60, true);
                for _ in 0..12 {
                    device.step();
                }
                device.engine.export(seq, None).unwrap();
                let mut outputs = Vec::new();
                for _ in 0..delay {
                    outputs.extend(device.step().0);
                }
                disturb(&device.engine, seq);
                outputs.extend(device.drain());
                assert!(state_of(&outputs, seq) == expected, "the state differs if {what} after {delay} steps");
                for seq in outputs.iter().map(|output| output.sequence) {
                    let _ = device.engine.free(seq);
                }
                device.drain();
                assert_eq!(device.engine.stats().idle, 0);
            }
        }
    }
}

#[test]
fn an_export_that_fails_in_the_middle_reports_the_error_and_can_be_repeated() {
    let model = Model::new();
    let reference = model.at_once();
    let expected = reference.export(reference.kept());
    let device = model.stepwise();
    let kept = device.kept();
    let blocks_used = device.engine.stats().blocks_used;
    for place in [1, 7, 20, 27 * model.levels] {
        let faults = &device.faults.exports;
        faults.fails_at.store(faults.seen.load(SeqCst) + place, SeqCst);
        device.engine.export(kept, None).unwrap();
        let outputs = device.drain();
        assert_eq!(outputs.len(), 1);
        let error = outputs[0].error.as_ref().unwrap();
        assert_eq!((outputs[0].sequence, outputs[0].finish, error.message()), (kept, None, "the device is lost"));
        assert!(outputs[0].sequence_state.is_empty());
        assert_eq!(device.engine.stats().blocks_used, blocks_used);
        assert!(device.export(kept) == expected);
    }
}

#[test]
fn an_export_whose_blocks_the_pool_needs_has_no_kv_and_continues_after_an_import() {
    let model = Model::new();
    let reference = model.at_once();
    let whole = reference.add(180, 70, false);
    let expected = answers(&reference.drain()).remove(&whole).unwrap();
    // The pool has the blocks of one sequence of maximum length.
    let device = model.engine(34, STEP_BLOCKS, Preemption::Recompute);
    let seq = device.add(180, 30, true);
    let mut first = answers(&device.drain()).remove(&seq).unwrap();
    device.engine.export(seq, None).unwrap();
    device.engine.free(seq).unwrap();
    device.add(230, 20, false);
    let state = state_of(&device.drain(), seq);
    assert!(state.len() < 8000, "{} bytes without K and V", state.len());
    device.assert_empty();
    let copy = device.engine.import(device.engine.queue(), &state).unwrap();
    // The sampling parameters of the copy end at 210 tokens.
    device.engine.resume(copy, Resume { keep: false, ..Resume::new(sampling(40)) }).unwrap();
    let rest = answers(&device.drain()).remove(&copy).unwrap();
    first.0.extend(rest.0);
    first.1.extend(rest.1);
    assert_eq!((first.0, first.1), (expected.0, expected.1));
    device.assert_empty();
}

/// Commands that follow an import at once. They return the sequences whose outputs matter.
type Commands = (&'static str, fn(&Engine, SeqId) -> Vec<SeqId>);

fn resume(engine: &Engine, seq: SeqId) {
    engine.resume(seq, Resume { keep: false, ..Resume::new(sampling(9)) }).unwrap();
}

const COMMANDS: &[Commands] = &[
    ("resume", |engine, seq| {
        resume(engine, seq);
        vec![seq]
    }),
    ("append, resume", |engine, seq| {
        engine.append(seq, vec![5; 9]).unwrap();
        resume(engine, seq);
        vec![seq]
    }),
    ("rewind, continue", |engine, seq| {
        engine.rewind(seq, 205).unwrap();
        engine.continue_sequence(seq, Continue::default()).unwrap();
        vec![seq]
    }),
    ("fork, resume of both", |engine, seq| {
        let child = engine.fork(seq, 1, &Fork { at: Some(90), ..Default::default() }).unwrap()[0];
        engine.append(child, vec![9; 3]).unwrap();
        resume(engine, child);
        resume(engine, seq);
        vec![seq, child]
    }),
    ("fork, free, resume of the fork", |engine, seq| {
        let child = engine.fork(seq, 1, &Fork::default()).unwrap()[0];
        engine.free(seq).unwrap();
        resume(engine, child);
        vec![child]
    }),
    ("free", |engine, seq| {
        engine.free(seq).unwrap();
        vec![]
    }),
    ("resume, free", |engine, seq| {
        resume(engine, seq);
        engine.free(seq).unwrap();
        vec![seq]
    }),
    ("resume, abort", |engine, seq| {
        resume(engine, seq);
        engine.abort(seq.own_request()).unwrap();
        vec![seq]
    }),
];

#[test]
fn commands_right_after_an_import_wait_for_its_blocks() {
    let model = Model::new();
    let reference = model.at_once();
    let state = reference.export(reference.kept());
    for (what, commands) in COMMANDS {
        let run = |device: Device, delay: usize| {
            let other = device.add(20, 30, false);
            device.step();
            let seq = device.engine.import(device.engine.queue(), &state).unwrap();
            let mut outputs = Vec::new();
            for _ in 0..delay {
                outputs.extend(device.step().0);
            }
            let wanted = commands(&device.engine, seq);
            loop {
                let (new, copied) = device.step();
                assert!(copied <= STEP_BLOCKS as u64 || delay == 0);
                let generates = |output: &Output| output.sequence == other && output.tokens.len() == 1;
                assert!(new.iter().any(generates), "{what}: the other request waits");
                let done = new.iter().any(|output| output.sequence == other && output.finish.is_some());
                outputs.extend(new);
                if done {
                    break;
                }
            }
            outputs.extend(device.drain());
            let all = answers(&outputs);
            let found = wanted.iter().map(|seq| all[seq].clone()).collect::<Vec<_>>();
            let _ = device.engine.free(seq);
            device.drain();
            device.assert_empty();
            (found, all[&other].clone())
        };
        let expected = run(model.at_once(), 0);
        for delay in [1, 3] {
            assert_eq!(run(model.stepwise(), delay), expected, "{what} after {delay} steps");
        }
    }
}

#[test]
fn an_import_spreads_over_steps_and_recomputes_nothing() {
    let model = Model::new();
    let reference = model.at_once();
    let state = reference.export(reference.kept());
    let device = model.stepwise();
    let other = device.add(20, 60, false);
    device.step();
    let seq = device.engine.import(device.engine.queue(), &state).unwrap();
    resume(&device.engine, seq);
    let mut copied = Vec::new();
    loop {
        let (outputs, blocks) = device.step();
        assert!(outputs.iter().any(|output| output.sequence == other));
        copied.push(blocks);
        if outputs.iter().any(|output| output.sequence == seq) {
            break;
        }
    }
    assert_eq!(copied, [3; 9], "the sequence generates in the step of its last portion");
    device.drain();
    // One token of each sequence beyond its prompt is computed at a time.
    assert_eq!(device.engine.stats().prompt_tokens, 20 + 1);
    // An export of the copy waits for the import and has the same bytes.
    let copy = device.engine.import(device.engine.queue(), &state).unwrap();
    let again = device.export(copy);
    device.engine.free(copy).unwrap();
    device.drain();
    assert_eq!(again.len(), state.len());
    device.assert_empty();
}

#[test]
fn an_import_that_fails_in_the_middle_fails_the_commands_that_wait_for_it() {
    let model = Model::new();
    let reference = model.at_once();
    let state = reference.export(reference.kept());
    let device = model.stepwise();
    let faults = &device.faults.exports;
    faults.fails_at.store(faults.seen.load(SeqCst) + 15, SeqCst);
    let seq = device.engine.import(device.engine.queue(), &state).unwrap();
    resume(&device.engine, seq);
    let outputs = device.drain();
    let errors: Vec<_> = outputs.iter().map(|output| (output.sequence, output.error.as_ref().unwrap().message())).collect();
    assert_eq!(errors[0], (seq, "the device is lost"));
    assert_eq!(errors[1], (seq, format!("sequence {seq} could not be created and cannot be resumed").as_str()));
    assert_eq!(errors.len(), 2);
    assert_eq!(device.engine.sequence(seq).unwrap_err().code(), Code::NotFound);
    device.assert_empty();
}

#[test]
fn an_import_whose_blocks_the_pool_needs_is_recomputed() {
    let model = Model::new();
    let reference = model.at_once();
    let state = reference.export(reference.kept());
    let seq = reference.engine.import(reference.engine.queue(), &state).unwrap();
    resume(&reference.engine, seq);
    let expected = answers(&reference.drain()).remove(&seq).unwrap();
    for preemption in [Preemption::Recompute, Preemption::Swap] {
        let device = model.engine(34, STEP_BLOCKS, preemption);
        let seq = device.engine.import(device.engine.queue(), &state).unwrap();
        let large = device.add(230, 20, false);
        device.step();
        resume(&device.engine, seq);
        let mut found = answers(&device.drain());
        assert_eq!(found.remove(&seq).unwrap(), expected);
        assert_eq!(found[&large].0.len(), 20);
        device.assert_empty();
    }
}

#[test]
fn a_freed_engine_cancels_its_transfers() {
    let model = Model::new();
    let reference = model.at_once();
    let state = reference.export(reference.kept());
    for steps in 0..12 {
        let device = model.stepwise();
        let kept = device.kept();
        device.add(20, 60, false);
        device.engine.export(kept, None).unwrap();
        let copy = device.engine.import(device.engine.queue(), &state).unwrap();
        resume(&device.engine, copy);
        for _ in 0..steps {
            device.step();
        }
        let queue = device.engine.queue().clone();
        drop(device);
        let last: Vec<Output> = queue.poll(Some(Duration::ZERO)).unwrap().into();
        assert!(last.iter().any(|output| output.sequence == copy && output.finish == Some(FinishReason::Abort)));
    }
}

#[test]
fn a_long_sequence_moves_to_the_host_tier_and_back_in_portions() {
    /// Blocks that one step of this engine moves in each direction: eight times those of an export.
    const MAX_MOVES: u64 = 8;
    let model = Model::new();
    // Returns the moves of each step and the outputs of all sequences.
    let run = |step_blocks: usize| {
        let device = model.engine(40, step_blocks, Preemption::Swap);
        let long = device.kept();
        let witness = device.add(4, 60, false);
        device.step();
        // The pool is too small for this request beside the idle sequence.
        let other_tokens = Prompt::Tokens((0..150).map(|k| (k * 7 + 1) % 120).collect());
        let short = device.engine.add_request(Request::new(other_tokens, sampling(5))).unwrap().sequence(0);
        let (mut moves, mut tokens) = (Vec::new(), BTreeMap::<SeqId, Vec<(u32, u32)>>::new());
        for phase in 0..2 {
            if phase == 1 {
                device.engine.resume(long, Resume { keep: false, ..Resume::new(sampling(5)) }).unwrap();
            }
            loop {
                let before = device.engine.stats();
                let (outputs, _) = device.step();
                let after = device.engine.stats();
                let moved = (after.blocks_swapped_out - before.blocks_swapped_out, after.blocks_swapped_in - before.blocks_swapped_in);
                assert!(outputs.iter().any(|output| output.sequence == witness), "a step has no token of the other sequence");
                moves.push(moved);
                let ended = |seq| outputs.iter().any(|output| output.sequence == seq && output.finish.is_some());
                let is_ended = ended(if phase == 0 { short } else { long });
                let bits = |output: &Output| output.logprobs.tokens[0].to_bits();
                outputs.iter().for_each(|output| tokens.entry(output.sequence).or_default().push((output.tokens[0], bits(output))));
                if is_ended {
                    break;
                }
            }
        }
        (moves, tokens)
    };
    let (moves, tokens) = run(1);
    let (moves_at_once, expected) = run(100);
    let count = |of: fn(&(u64, u64)) -> u64, moves: &[(u64, u64)]| moves.iter().map(of).filter(|&blocks| blocks > 0).count();
    assert!(moves.iter().all(|&(out, back)| out <= MAX_MOVES && back <= MAX_MOVES), "{moves:?}");
    assert_eq!((count(|m| m.0, &moves_at_once), count(|m| m.1, &moves_at_once)), (1, 1), "{moves_at_once:?}");
    // All 27 blocks leave, and those return that the other request has overwritten.
    assert_eq!((count(|m| m.0, &moves), count(|m| m.1, &moves)), (4, 2), "{moves:?}");
    for (seq, expected) in &expected {
        let common = expected.len().min(tokens[seq].len());
        assert_eq!(tokens[seq][..common], expected[..common], "sequence {seq}");
    }
}

#[test]
fn a_step_applies_a_limited_number_of_the_commands_that_waited_for_an_import() {
    let model = Model::new();
    let (from, to) = (model.at_once(), model.stepwise());
    let state = from.export(from.kept());
    let seq = to.engine.import(to.engine.queue(), &state).unwrap();
    (0..2500).for_each(|_| to.engine.rewind(seq, 200).unwrap());
    // A step takes 1,024 commands of the host, which wait for the import.
    let steps: Vec<u64> = (0..12).map(|_| to.engine.step().unwrap().unfinished).collect();
    let released = steps.windows(2).position(|pair| pair == [1476, 452]);
    assert!(released.is_some() && steps.ends_with(&[0]), "{steps:?}");
    assert_eq!(to.engine.sequence(seq).unwrap().len, 200);
}

#[test]
fn a_command_of_the_step_that_ends_an_import_follows_those_that_waited() {
    let model = Model::new();
    let (from, to) = (model.at_once(), model.stepwise());
    let state = from.export(from.kept());
    let expected = {
        let seq = from.engine.import(from.engine.queue(), &state).unwrap();
        from.engine.append(seq, vec![5; 9]).unwrap();
        resume(&from.engine, seq);
        answers(&from.drain()).remove(&seq).unwrap()
    };
    // A step returns although the import has not ended, since another request runs.
    to.add(4, 60, false);
    to.step();
    let seq = to.engine.import(to.engine.queue(), &state).unwrap();
    (0..7).for_each(|_| drop(to.step()));
    to.engine.append(seq, vec![5; 9]).unwrap();
    to.step();
    // The second import copies the last portion of the first one before the next command.
    let second = to.engine.import(to.engine.queue(), &state).unwrap();
    resume(&to.engine, seq);
    let outputs = to.drain();
    assert_eq!(answers(&outputs).remove(&seq).unwrap(), expected);
    to.engine.free(second).unwrap();
    to.drain();
    to.assert_empty();
}
