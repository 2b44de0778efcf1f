//! What the next step will be, where that can be known before this one's tokens are: a device that works ahead begins with it.

use super::plan::push_table;
use super::slab::Slot;
use super::{Scheduler, StepPlan};
use crate::batch::NOWHERE;
use crate::kv::blocks_for;

impl Scheduler {
    /// Says of a plan where the tokens go that will be chosen in it, if all that comes next is one more row of each sequence, and there is
    /// room: their blocks are taken one step early.
    pub fn foresee(&mut self, plan: &mut StepPlan) {
        if !self.goes_on_alike(plan) {
            return;
        }
        let mut grown = false;
        for part in &plan.parts {
            let sequence = &mut self.sequences[part.slot];
            let next = sequence.tokens.len();
            if next + 1 >= sequence.max_len {
                plan.batch.next_slots.extend(std::iter::repeat_n(NOWHERE, self.blocks.paging().groups()));
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
        if plan.batch.next_slots.iter().all(|&slot| slot == NOWHERE) {
            plan.batch.next_slots.clear();
        }
    }

    /// Whether the next step has the same sequences as this one, as far as they do not end, and each goes on by a row.
    fn goes_on_alike(&mut self, plan: &StepPlan) -> bool {
        let StepPlan { batch, parts, has_beams, is_closed } = plan;
        let one_row_each = parts.iter().all(|part| part.rows == 1 && part.samples && part.logits == 1);
        let all = one_row_each && !has_beams && batch.copies.is_empty() && parts.len() == self.running();
        // Who could have joined an open step is in it.
        all && (!is_closed || !self.somebody_may_join())
    }

    /// Whether an open step would have to be planned for those that do not run.
    fn somebody_may_join(&mut self) -> bool {
        let Some(first) = self.waiting.first() else { return self.looks_again };
        if self.looks_again || self.running.last().is_some_and(|&youngest| first < youngest) {
            return true;
        }
        let has_seat = self.width() + self.groups[first].width() <= self.options.max_seqs;
        has_seat && self.may_join(first) && self.fits(first, self.running.len(), self.promised())
    }

    /// Once more, for there are more blocks.
    fn write_tables(&self, plan: &mut StepPlan) {
        let StepPlan { batch, parts, .. } = plan;
        batch.tables.clear();
        for (span, part) in batch.spans.iter_mut().zip(parts) {
            span.table = batch.tables.len() as u32;
            push_table(&mut batch.tables, self.sequences[part.slot].table.blocks(), self.blocks.paging());
        }
    }

    /// A token that was foreseen did not come: its block is nobody's.
    pub(super) fn give_back_foreseen(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        let len = sequence.tokens.len();
        if sequence.table.places() > blocks_for(len, self.blocks.block_size()) {
            self.blocks.truncate(&mut sequence.table, len);
        }
    }
}
