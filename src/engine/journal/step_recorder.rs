//! The record of the current step.

use crate::engine::step_inputs::StepInputs;
use crate::error::{Error, Result};
use crate::generation::grammar::MaskId;
use crate::observability::journal::digests::OutputDigests;
use crate::observability::journal::records::{Failure, RecordedEnd, Resized, Step};
use crate::types::QueueId;

/// The inputs of the current step, the failures in it, and the digests of its outputs.
#[derive(Default)]
pub struct StepRecorder {
    step: Step,
    ended: Vec<RecordedEnd>,
    /// Whether a command, a resize or a failed transfer makes the step worth writing.
    must_record: bool,
    is_in_step: bool,
    /// Number of launches and of waits in this step.
    launches: u32,
    waits: u32,
    /// Number of blocks that exports and imports have copied in this step.
    exchanges: u32,
    /// Number of transfers between the tiers since the last step.
    moves: u32,
    /// Failed transfers and resizes since the last step. They are recorded with the next one.
    failed_moves: Vec<u32>,
    resized: Vec<Resized>,
    /// Whether the result of the last resize is not known yet.
    is_resizing: bool,
    /// Number of steps worth writing.
    steps: u64,
    /// Full queues of the last step, and whether that step did nothing.
    full_queues_before: Vec<QueueId>,
    was_quiet: bool,
}

impl StepRecorder {
    /// Reserves space for the ends of `seqs` sequences, so that no step allocates.
    pub fn new(seqs: usize) -> Result<StepRecorder> {
        let mut recorder = StepRecorder::default();
        recorder.ended.try_reserve(seqs)?;
        Ok(recorder)
    }

    pub fn begin(&mut self, inputs: &StepInputs) {
        self.step.late_masks.clear();
        self.step.finished_masks.clear();
        let Step { full_queues, finished_transfers, failed_launches, failed_waits, failed_exchanges, resized, .. } = &mut self.step;
        full_queues.clear();
        full_queues.extend_from_slice(inputs.full_queues());
        finished_transfers.clear();
        finished_transfers.extend(inputs.finished_transfers.iter().map(|id| id.0));
        failed_launches.clear();
        failed_waits.clear();
        failed_exchanges.clear();
        resized.clear();
        resized.append(&mut self.resized);
        self.step.store_room = inputs.store_room;
        self.step.disk_transfers.clear();
        self.step.disk_transfers.extend(inputs.disk_transfers.iter().map(|ended| (ended.id, ended.succeeded)));
        (self.step.now, self.step.costs) = (inputs.now, inputs.costs.map(|costs| (costs.block.to_bits(), costs.token.to_bits())));
        self.must_record = !self.step.resized.is_empty() || !self.failed_moves.is_empty() || !inputs.finished_transfers.is_empty();
        self.must_record |= !inputs.lookup_progress.is_empty() || !inputs.disk_transfers.is_empty();
        (self.is_in_step, self.launches, self.waits, self.exchanges) = (true, 0, 0, 0);
    }

    /// Makes the step worth writing.
    pub fn require(&mut self) {
        self.must_record = true;
    }

    /// Records a mask for which the step does not wait.
    pub fn record_late_mask(&mut self, id: MaskId) {
        self.step.late_masks.push(id.0);
    }

    /// Records the late masks that have been computed.
    pub fn record_finished_masks(&mut self, ids: &[MaskId]) {
        self.step.finished_masks.extend(ids.iter().map(|id| id.0));
        self.must_record |= !ids.is_empty();
    }

    /// Records a launch.
    pub fn record_launch(&mut self, error: Option<&Error>) {
        self.launches += 1;
        self.step.failed_launches.extend(error.map(|error| Failure::new(self.launches, error)));
    }

    pub fn begin_wait(&mut self) {
        self.waits += 1;
    }

    /// Records that the results of the last wait could not be used.
    pub fn fail_wait(&mut self, error: Option<&Error>) {
        self.step.failed_waits.extend(error.map(|error| Failure::new(self.waits, error)));
    }

    /// Records the transfer of a block of an export or import.
    pub fn record_exchange(&mut self, result: &Result<()>) {
        // Each portion of a transfer belongs to its step, also if the step does nothing else.
        self.must_record = true;
        self.exchanges += 1;
        self.step.failed_exchanges.extend(result.as_ref().err().map(|error| Failure::new(self.exchanges, error)));
    }

    /// Records a transfer between the tiers.
    pub fn record_move(&mut self, failed: bool) {
        self.moves += 1;
        self.failed_moves.extend(failed.then_some(self.moves));
        self.must_record |= failed;
    }

    /// Records that the pool of `pool` blocks gets `blocks` blocks.
    pub fn begin_resize(&mut self, pool: usize, blocks: usize) {
        self.end_resize(pool);
        if pool != blocks {
            let resized = Resized { blocks, between: !self.is_in_step, succeeded: true };
            self.resizes().push(resized);
            (self.is_resizing, self.must_record) = (true, true);
        }
    }

    /// Records the result of the last resize, after which the pool has `pool` blocks.
    fn end_resize(&mut self, pool: usize) {
        if std::mem::take(&mut self.is_resizing)
            && let Some(resized) = self.resizes().last_mut()
        {
            resized.succeeded = resized.blocks == pool;
        }
    }

    fn resizes(&mut self) -> &mut Vec<Resized> {
        if self.is_in_step { &mut self.step.resized } else { &mut self.resized }
    }

    /// Ends the step. Returns whether it must be written: a step that did nothing and had the same
    /// full queues as the previous one is not.
    pub fn end(&mut self, is_idle: bool, pool: usize, outputs: Option<&OutputDigests>) -> bool {
        self.end_resize(pool);
        (self.is_in_step, self.moves) = (false, 0);
        self.step.failed_moves.clear();
        self.step.failed_moves.append(&mut self.failed_moves);
        self.ended.clear();
        self.step.digest = 0;
        if let Some(outputs) = outputs {
            self.ended.extend_from_slice(&outputs.ended);
            self.step.digest = outputs.step;
            self.must_record |= outputs.count > 0;
        }
        let is_quiet = is_idle && !self.must_record && self.step.failed_launches.is_empty() && self.step.failed_waits.is_empty();
        if is_quiet && self.was_quiet && self.full_queues_before == self.step.full_queues {
            return false;
        }
        self.was_quiet = is_quiet;
        self.full_queues_before.clone_from(&self.step.full_queues);
        self.steps += 1;
        self.step.number = self.steps;
        true
    }

    /// Returns the record of the last step, and the sequences that ended in it.
    pub fn last_step(&self) -> (&Step, &[RecordedEnd]) {
        (&self.step, &self.ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::transfers::EndedTransfer;

    fn step(recorder: &mut StepRecorder, act: impl FnOnce(&mut StepRecorder), pool: usize) -> Option<Step> {
        recorder.begin(&StepInputs::default());
        act(recorder);
        recorder.end(true, pool, None).then(|| recorder.last_step().0.clone())
    }

    #[test]
    fn a_resize_has_succeeded_if_the_pool_has_its_size_afterwards() {
        let mut recorder = StepRecorder::default();
        let resized = |blocks, between, succeeded| Resized { blocks, between, succeeded };
        let recorded = step(&mut recorder, |recorder| recorder.begin_resize(10, 8), 8).unwrap();
        assert_eq!(recorded.resized, [resized(8, false, true)]);
        let recorded = step(&mut recorder, |recorder| recorder.begin_resize(8, 6), 8).unwrap();
        assert_eq!(recorded.resized, [resized(6, false, false)]);
        // Two resizes between the steps, of which the first fails, and one in the step.
        recorder.begin_resize(8, 7);
        recorder.begin_resize(8, 5);
        let recorded = step(&mut recorder, |recorder| recorder.begin_resize(5, 4), 5).unwrap();
        assert_eq!(recorded.resized, [resized(7, true, false), resized(5, true, true), resized(4, false, false)]);
    }

    #[test]
    fn a_step_that_does_nothing_is_written_once() {
        let mut recorder = StepRecorder::default();
        assert!(step(&mut recorder, |_| {}, 8).is_some() && step(&mut recorder, |_| {}, 8).is_none());
        recorder.record_move(true);
        let recorded = step(&mut recorder, |recorder| recorder.record_move(true), 8).unwrap();
        assert_eq!((recorded.number, &recorded.failed_moves[..]), (2, &[1, 2][..]));
        let recorded = step(&mut recorder, |recorder| recorder.require(), 8).unwrap();
        assert_eq!((recorded.number, recorded.failed_moves.len()), (3, 0));
        // The end of a disk transfer changes what later steps may move.
        let mut inputs = StepInputs::default();
        inputs.disk_transfers.push(EndedTransfer { id: 4, succeeded: true });
        recorder.begin(&inputs);
        assert!(recorder.end(true, 8, None));
        assert_eq!(recorder.last_step().0.disk_transfers, [(4, true)]);
    }
}
