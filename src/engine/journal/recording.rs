//! Decorators of the two seams of the core. They record all inputs of the steps and all failures of
//! the executor. In a replay they repeat the recorded ones.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::replayed::{Replayed, ReplayedInputs, ReplayedStep};
use super::step_recorder::StepRecorder;
use crate::engine::command::{Command, ForkedSequence};
use crate::engine::sequence::Generation;
use crate::engine::step_inputs::{EndedStep, Inputs, StepInputs};
use crate::error::{Error, Result};
use crate::executor::{Executor, InFlightStep, StepOutput};
use crate::generation::grammar::MaskId;
use crate::generation::grammar::Masker;
use crate::kv::BlockId;
use crate::memory::budget::Need;
use crate::observability::journal::records::{RecordedCommand, RecordedFork, RecordedResume};
use crate::observability::journal::writer::JournalWriter;
use crate::scheduler::Costs;
use crate::types::batch::Batch;
use crate::types::batch::device_sampling::{DeviceSampling, DeviceSamplingLimits};
use crate::types::batch::{BlockCopy, BlockMove, Tail};

/// The record of the current step, to which both decorators write.
#[derive(Clone)]
pub struct Recording(Arc<Mutex<StepRecorder>>);

impl Recording {
    /// Creates the record of an engine that runs up to `seqs` sequences at once.
    pub fn new(seqs: usize) -> Result<Recording> {
        Ok(Recording(Arc::new(Mutex::new(StepRecorder::new(seqs)?))))
    }

    pub fn lock(&self) -> MutexGuard<'_, StepRecorder> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `inputs` and `executor` with a recorder around each, for an engine that writes a
    /// journal.
    pub fn around(
        self,
        inputs: Box<dyn Inputs>,
        executor: Box<dyn Executor>,
        writer: JournalWriter,
    ) -> (Box<dyn Inputs>, Box<dyn Executor>) {
        self.decorate(inputs, executor, Some(writer), None)
    }

    /// Returns `inputs` and `executor` with decorators that repeat a journal and record the
    /// repetition.
    pub fn around_replay(
        self,
        inputs: Box<dyn Inputs>,
        executor: Box<dyn Executor>,
        replayed: Replayed,
    ) -> (Box<dyn Inputs>, Box<dyn Executor>) {
        self.decorate(Box::new(ReplayedInputs::new(inputs, replayed.clone())), executor, None, Some(replayed))
    }

    fn decorate(
        self,
        inputs: Box<dyn Inputs>,
        executor: Box<dyn Executor>,
        writer: Option<JournalWriter>,
        replayed: Option<Replayed>,
    ) -> (Box<dyn Inputs>, Box<dyn Executor>) {
        let recording = self.clone();
        let executor = RecordedExecutor { inner: executor, recording, replayed };
        (Box::new(RecordedInputs { inner: inputs, recording: self, writer }), Box::new(executor))
    }
}

/// Inputs that are recorded.
struct RecordedInputs {
    inner: Box<dyn Inputs>,
    recording: Recording,
    writer: Option<JournalWriter>,
}

impl Inputs for RecordedInputs {
    fn collect(&mut self, costs: Option<Costs>, inputs: &mut StepInputs) {
        self.inner.collect(costs, inputs);
        let mut recorder = self.recording.lock();
        recorder.begin(inputs);
        self.writer.iter_mut().for_each(|writer| inputs.lookup_progress.iter().for_each(|lookup| writer.lookup(lookup)));
        for command in &inputs.commands {
            recorder.require();
            if let Some(writer) = &mut self.writer {
                writer.command(&RecordedCommand::from_command(command));
            }
        }
    }

    fn await_masks(&mut self, masker: &mut Masker, ids: &[MaskId], late: &mut Vec<MaskId>) {
        self.inner.await_masks(masker, ids, late);
        late.iter().for_each(|&id| self.recording.lock().record_late_mask(id));
    }

    fn is_late(&mut self, id: MaskId, takes_long: bool) -> bool {
        let is_late = self.inner.is_late(id, takes_long);
        if is_late {
            self.recording.lock().record_late_mask(id);
        }
        is_late
    }

    fn finished_masks(&mut self, masker: &mut Masker, late: &[MaskId], finished: &mut Vec<MaskId>) {
        self.inner.finished_masks(masker, late, finished);
        self.recording.lock().record_finished_masks(finished);
    }

    fn await_completion(&mut self, timeout: Option<Duration>) -> bool {
        self.inner.await_completion(timeout)
    }

    fn pool_blocks(&mut self, need: Need) -> usize {
        let blocks = self.inner.pool_blocks(need);
        self.recording.lock().begin_resize(need.pool, blocks);
        blocks
    }

    fn end_step(&mut self, step: &EndedStep) {
        let is_idle = step.result.as_ref().is_ok_and(|report| report.sequences == 0);
        let mut recorder = self.recording.lock();
        let must_write = recorder.end(is_idle, step.stats.blocks_total as usize, step.outputs);
        let Some(writer) = &mut self.writer else { return };
        let (recorded, ended) = recorder.last_step();
        if must_write {
            ended.iter().for_each(|ended| writer.ended(ended));
            writer.step(recorded);
        }
        writer.settle(recorded.now, is_idle);
    }

    fn has_stopped(&self) -> bool {
        self.writer.as_ref().is_some_and(JournalWriter::has_stopped)
    }

    fn close(&mut self) {
        self.writer.iter_mut().for_each(JournalWriter::close);
    }
}

/// An executor whose failures are recorded. In a replay it first fails where the recorded one
/// failed.
struct RecordedExecutor {
    inner: Box<dyn Executor>,
    recording: Recording,
    replayed: Option<Replayed>,
}

impl RecordedExecutor {
    /// Returns the recorded failure of an operation in a replay.
    fn repeated(&self, failure: impl FnOnce(&mut ReplayedStep) -> Result<()>) -> Result<()> {
        self.replayed.as_ref().map_or(Ok(()), |replayed| failure(&mut replayed.lock()))
    }

    fn recorded_move(&self, result: Result<()>) -> Result<()> {
        self.recording.lock().record_move(result.is_err());
        result
    }

    fn recorded_exchange(&self, result: Result<()>) -> Result<()> {
        self.recording.lock().record_exchange(&result);
        result
    }
}

impl Executor for RecordedExecutor {
    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        let result = self.repeated(ReplayedStep::begin_launch).and_then(|()| self.inner.submit(batch));
        self.recording.lock().record_launch(result.as_ref().err());
        result
    }

    fn sample(&mut self, step: &mut InFlightStep, sampling: &DeviceSampling) -> Result<()> {
        // An error is reported to `discard`.
        self.inner.sample(step, sampling)
    }

    fn wait(&mut self, step: InFlightStep) -> Result<StepOutput<'_>> {
        self.recording.lock().begin_wait();
        let repeated = self.repeated(ReplayedStep::begin_wait);
        let output = self.inner.wait(step);
        repeated.and(output)
    }

    fn discard(&mut self, error: Option<&Error>) {
        self.recording.lock().fail_wait(error);
        self.inner.discard(error);
    }

    fn sampling_limits(&self) -> Option<DeviceSamplingLimits> {
        self.inner.sampling_limits()
    }

    fn is_lost(&self) -> bool {
        self.inner.is_lost()
    }

    fn swap_out(&mut self, moves: &[BlockMove]) -> Result<()> {
        let result = self.repeated(ReplayedStep::begin_move).and_then(|()| self.inner.swap_out(moves));
        self.recorded_move(result)
    }

    fn swap_in(&mut self, moves: &[BlockMove]) -> Result<()> {
        let result = self.repeated(ReplayedStep::begin_move).and_then(|()| self.inner.swap_in(moves));
        self.recorded_move(result)
    }

    fn host_block(&mut self, block: usize) -> &mut [u8] {
        self.inner.host_block(block)
    }

    fn read_blocks(&mut self, blocks: &[BlockId], tail: Tail, out: &mut Vec<u8>) -> Result<()> {
        let repeated = self.repeated(ReplayedStep::begin_exchange);
        let result = repeated.and_then(|()| self.inner.read_blocks(blocks, tail, out));
        self.recorded_exchange(result)
    }

    fn write_blocks(&mut self, blocks: &[BlockId], bytes: &[u8]) -> Result<()> {
        let result = self.repeated(ReplayedStep::begin_exchange).and_then(|()| self.inner.write_blocks(blocks, bytes));
        self.recorded_exchange(result)
    }

    fn shrink(&mut self, moves: &[BlockCopy], blocks: usize) -> Result<()> {
        // Whether it has succeeded shows in the next size of the pool.
        self.repeated(|replayed| replayed.shrink()).and_then(|()| self.inner.shrink(moves, blocks))
    }

    fn discard_failures(&self) -> u64 {
        self.inner.discard_failures()
    }

    fn layout(&self) -> String {
        self.inner.layout()
    }

    fn max_transfer_bytes(&self) -> usize {
        self.inner.max_transfer_bytes()
    }

    fn kv_part_bytes(&self) -> Vec<usize> {
        self.inner.kv_part_bytes()
    }
}

impl RecordedCommand<'_> {
    fn from_command(command: &Command) -> RecordedCommand<'_> {
        match command {
            Command::Add { id, prepared } => match &prepared.recorded {
                Some(request) => RecordedCommand::Add {
                    id: *id,
                    at: prepared.sequence.generation.timing.requested_at,
                    queue: prepared.sequence.generation.sender.id(),
                    request: Cow::Borrowed(request),
                },
                None => RecordedCommand::Lost { why: format!("request {id} was added before there was a journal") },
            },
            Command::Abort { request } => RecordedCommand::Abort { request: *request },
            Command::End { seq } => RecordedCommand::End { seq: *seq },
            Command::Fork { parent, len, children, idle } => match recorded_forks(children) {
                Ok(children) => RecordedCommand::Fork { parent: *parent, len: *len, children, idle: *idle },
                Err(error) => RecordedCommand::Lost { why: format!("sequence {parent} was forked: {error}") },
            },
            Command::Append { seq, tokens } => RecordedCommand::Append { seq: *seq, tokens: tokens.into() },
            Command::Rewind { seq, len } => RecordedCommand::Rewind { seq: *seq, len: *len },
            Command::Resume { seq, keep, generation, .. } => {
                let Generation { user_data, ref sender, deadline, timing, skip_special, ref sampling } = **generation;
                let resume = RecordedResume {
                    sampling: Cow::Borrowed(sampling.params()),
                    keep: *keep,
                    hooked: sampling.hook.is_some(),
                    user_data,
                    deadline: deadline.map(|at| at.saturating_sub(timing.requested_at)),
                    skip_special,
                };
                RecordedCommand::Resume { seq: *seq, at: timing.requested_at, queue: sender.id(), resume: Box::new(resume) }
            }
            Command::Continue { seq, keep, hook, deadline, pending, requested_at } => {
                let deadline = deadline.map(|at| at.saturating_sub(*requested_at));
                RecordedCommand::Continue {
                    seq: *seq,
                    at: *requested_at,
                    queue: pending.sender.id(),
                    deadline,
                    keep: *keep,
                    user_data: pending.last.user_data,
                    hooked: hook.is_some(),
                }
            }
            Command::Free { seq } => RecordedCommand::Free { seq: *seq },
            Command::Export { seq, pending } => RecordedCommand::Export { seq: *seq, queue: pending.sender.id() },
            Command::Import { id, imported } => match &imported.recorded {
                Some(sequence_state) => RecordedCommand::Import {
                    id: *id,
                    at: imported.sequence.generation.timing.requested_at,
                    queue: imported.sequence.generation.sender.id(),
                    sequence_state: sequence_state.into(),
                },
                None => RecordedCommand::Lost { why: format!("sequence {id} was imported before there was a journal") },
            },
            Command::Pin { id, group, priority, salt } => {
                RecordedCommand::Pin { id: *id, tokens: group.prompt().into(), priority: *priority, salt: salt.into() }
            }
            Command::Unpin { id } => RecordedCommand::Unpin { id: *id },
        }
    }
}

fn recorded_forks(children: &[ForkedSequence]) -> Result<Vec<RecordedFork>> {
    let mut forked = Vec::new();
    forked.try_reserve_exact(children.len())?;
    forked.extend(children.iter().map(|child| RecordedFork {
        id: child.id,
        seed: child.seed,
        user_data: child.user_data,
        at: child.requested_at,
        queue: child.sender.id(),
    }));
    Ok(forked)
}
