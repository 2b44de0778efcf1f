//! Steps in flight: what launched steps, which are not committed yet, compute of a sequence. The
//! next step is planned as if they had succeeded, with placeholders for the tokens that they
//! sample.

use super::slab::Slot;
use super::{ScheduledSequence, Scheduler, SequenceKv, StepPlan};
use crate::error::Result;
use crate::types::SeqId;

/// What the steps in flight compute of a sequence.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct InFlight {
    /// Number of tokens that they compute, after the computed ones.
    pub tokens: usize,
    /// Number of tokens that they sample. Their values are not known yet.
    pub sampled: usize,
    /// Index of the device sample of the last launched step that is the next token. `None` if the
    /// host samples it, so that no further step can be planned before the commit.
    pub device_sample: Option<u32>,
    /// Number of changes that invalidated steps in flight. They compute nothing for a sequence that
    /// has changed since.
    pub version: u32,
}

impl SequenceKv {
    /// Returns the length after the steps in flight.
    pub(super) fn expected_len(&self) -> usize {
        self.tokens.len() + self.in_flight.sampled
    }

    /// Returns the number of tokens that are computed after the steps in flight.
    pub(super) fn scheduled(&self) -> usize {
        self.computed + self.in_flight.tokens
    }

    /// Returns whether a step can be planned before the steps in flight are committed: the device
    /// knows the next token, and the sequence does not end with it for its length.
    pub(super) fn can_be_planned(&self) -> bool {
        let InFlight { sampled, device_sample, .. } = self.in_flight;
        sampled == 0 || (device_sample.is_some() && self.expected_len() < self.max_len())
    }
}

impl Scheduler {
    /// Reserves memory for `steps` steps in flight. With 2, a step is planned before the tokens of
    /// the previous one are known.
    pub fn reserve_steps(&mut self, steps: usize) -> Result<()> {
        self.planning.reserve(steps, &self.options, &self.blocks)
    }

    /// Divides the decodes among `stages` steps in flight: the host samples their tokens, so a
    /// sequence takes part in one of them.
    pub fn divide_decodes(&mut self, stages: usize) {
        self.planning.stages = stages;
    }

    /// Records that the plan is launched.
    pub(super) fn launch(&mut self, plan: &mut StepPlan) {
        self.planning.launched += 1;
        for scheduled in &mut plan.sequences {
            let InFlight { tokens, sampled, version, .. } = &mut self.sequences[scheduled.slot].in_flight;
            *tokens += scheduled.tokens;
            *sampled += scheduled.samples as usize;
            scheduled.version = *version;
        }
    }

    /// Records which tokens of the oldest step in flight the device samples. The next step can be
    /// planned with placeholders for them.
    pub fn set_device_samples(&mut self, plan: &StepPlan) {
        for scheduled in &plan.sequences {
            if self.is_current(scheduled) {
                self.sequences[scheduled.slot].in_flight.device_sample = scheduled.device_sample;
            }
        }
    }

    /// Marks the scheduled sequences that have ended or changed since the plan was launched. Their
    /// results are ignored.
    pub fn mark_stale(&self, plan: &mut StepPlan) {
        for scheduled in &mut plan.sequences {
            scheduled.is_stale = !self.is_current(scheduled);
        }
    }

    /// Makes the steps in flight compute nothing for a sequence whose next token cannot be sampled
    /// yet.
    pub fn invalidate(&mut self, id: SeqId) {
        if let Some(slot) = self.sequences.find(id) {
            self.invalidate_in_flight(slot);
        }
    }

    fn is_current(&self, scheduled: &ScheduledSequence) -> bool {
        let sequence = self.sequences.in_slot(scheduled.slot);
        sequence.is_some_and(|sequence| sequence.id == scheduled.seq && sequence.in_flight.version == scheduled.version)
    }

    /// Makes the steps in flight compute nothing for the sequence, because it changes. The device
    /// still writes to its blocks, but before any later step.
    pub(super) fn invalidate_in_flight(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        if sequence.in_flight.tokens == 0 {
            return;
        }
        sequence.in_flight = InFlight { version: sequence.in_flight.version + 1, ..InFlight::default() };
        // Releases the blocks that only the steps in flight would have filled.
        let computed = sequence.computed;
        self.truncate(slot, computed);
    }

    /// Records that a step is no longer in flight: it was committed, or it is rolled back.
    pub(super) fn land(&mut self, slot: Slot, tokens: usize, samples: bool) {
        let in_flight = &mut self.sequences[slot].in_flight;
        in_flight.tokens -= tokens;
        in_flight.sampled -= samples as usize;
    }
}
