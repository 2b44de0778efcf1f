//! Prediction of the next step, so that a device can start it before the host has processed the
//! tokens of the current one.

use super::plan::push_table;
use super::slab::Slot;
use super::{Scheduler, StepPlan};
use crate::batch::NO_SLOT;
use crate::kv::blocks_for;

impl Scheduler {
    /// Writes the KV slots of the tokens that this step samples to the plan, and allocates their
    /// blocks one step early.
    ///
    /// The prediction requires that the next step computes one more token of each sequence, and
    /// enough blocks.
    pub fn reserve_lookahead(&mut self, plan: &mut StepPlan) {
        if !self.continues_unchanged(plan) {
            return;
        }
        let mut grown = false;
        for scheduled in &plan.sequences {
            let sequence = &mut self.sequences[scheduled.slot];
            let next = sequence.tokens.len();
            if next + 1 >= sequence.max_len() {
                plan.batch.next_slots.extend(std::iter::repeat_n(NO_SLOT, self.blocks.paging().groups()));
                continue;
            }
            let before = sequence.table.places();
            if self.blocks.prepare(&mut sequence.table, next..next + 1, &mut plan.batch.copies).is_err() {
                return plan.batch.next_slots.clear();
            }
            grown |= sequence.table.places() > before;
            plan.batch.next_slots.extend(self.blocks.slots(&sequence.table, next));
        }
        if grown {
            self.write_tables(plan);
        }
        if plan.batch.next_slots.iter().all(|&slot| slot == NO_SLOT) {
            plan.batch.next_slots.clear();
        }
    }

    /// Returns whether the next step has the same unfinished sequences, with one token each.
    fn continues_unchanged(&mut self, plan: &StepPlan) -> bool {
        let StepPlan { batch, sequences: all_scheduled, has_beams, is_closed } = plan;
        let one_row_each = all_scheduled.iter().all(|scheduled| scheduled.tokens == 1 && scheduled.samples && scheduled.logits == 1);
        let all = one_row_each && !has_beams && batch.copies.is_empty() && all_scheduled.len() == self.running();
        // An open step has already admitted the sequences that could join.
        all && (!is_closed || !self.may_admit_another())
    }

    /// Returns whether an open step could admit or resume another sequence.
    fn may_admit_another(&mut self) -> bool {
        let Some(first) = self.queues.waiting.first() else { return self.queues.recheck_paused };
        if self.queues.recheck_paused || self.queues.running.last().is_some_and(|&youngest| first < youngest) {
            return true;
        }
        let has_seat = self.queues.running_width() + self.queues.groups[first].width() <= self.options.max_seqs;
        has_seat && self.may_run(first) && self.fits(first, self.queues.running.len(), self.reserved_by_running())
    }

    /// Writes the block tables again, since they have grown.
    fn write_tables(&self, plan: &mut StepPlan) {
        let StepPlan { batch, sequences: all_scheduled, .. } = plan;
        batch.tables.clear();
        for (span, scheduled) in batch.spans.iter_mut().zip(all_scheduled) {
            span.table = batch.tables.len() as u32;
            push_table(&mut batch.tables, self.sequences[scheduled.slot].table.blocks(), self.blocks.paging());
        }
    }

    /// Releases the block of a predicted token that was not sampled.
    pub(super) fn release_lookahead(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        let len = sequence.tokens.len();
        if sequence.table.places() > blocks_for(len, self.blocks.block_size()) {
            self.blocks.truncate(&mut sequence.table, len);
        }
    }
}
