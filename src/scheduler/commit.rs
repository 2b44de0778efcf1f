//! The end of a step: commit or rollback.

use super::group::SequenceGroup;
use super::slab::Slot;
use super::{Branching, Event, FinishReason, SampledToken, ScheduledSequence, Scheduler, SeqId, StepPlan};

impl Scheduler {
    /// Applies a completed step: lengths advance, beams are dropped, sequences fork, tokens are
    /// appended, and finished sequences leave.
    pub fn commit(&mut self, plan: StepPlan, choices: &[SampledToken], events: &mut Vec<Event>) {
        events.clear();
        self.blocks.release_copied(&plan.batch.copies);
        let mut decodes = 0;
        for part in &plan.parts {
            self.advance(part);
            decodes += part.decodes() as usize;
        }
        self.policies.batching.record_step(plan.batch.rows() - decodes, decodes);
        if plan.has_beams {
            self.drop_beams(&plan, choices, events);
        }
        self.fork_chosen(choices, events);
        // In most steps, choices are in the order of the sampled parts, and each continues its own
        // sequence. The slot of the part is therefore tried first.
        let guesses = plan.sampled().map(|part| part.slot).chain(std::iter::repeat(Slot::NONE));
        for ((choice, SampledToken { child, verdict, .. }), guess) in choices.iter().enumerate().zip(guesses) {
            let Some(slot) = self.sequences.find_near(guess, *child) else { continue };
            let sequence = &mut self.sequences[slot];
            let (finish, past) = (sequence.apply(*verdict), sequence.past);
            if let Some(why) = finish {
                self.finish(slot, why);
            }
            events.push(Event::Advanced { choice, finish, past });
        }
        self.spare = plan;
    }

    fn finish(&mut self, slot: Slot, why: FinishReason) {
        let sequence = &self.sequences[slot];
        if matches!(why, FinishReason::Stop | FinishReason::Length) {
            self.lengths.observe(sequence.max_new_tokens(), sequence.generated);
        }
        self.end_slot(slot);
    }

    /// Records that the tokens of the part are computed, and inserts full blocks into the prefix
    /// cache.
    fn advance(&mut self, part: &ScheduledSequence) {
        let block_size = self.blocks.block_size();
        let computed = part.first + part.rows;
        let sequence = &mut self.sequences[part.slot];
        self.blocks.fill(&sequence.table, part.first..computed);
        (sequence.computed, sequence.begun) = (computed, true);
        if let Some(from) = &mut sequence.logits_from {
            *from = computed.max(*from);
        }
        if part.samples {
            // The log probabilities of the prompt are complete. Later tokens are sampled or
            // appended.
            sequence.logits_from = None;
        }
        let full = self.blocks.full(part.first)..self.blocks.full(computed);
        if self.blocks.caches_prefixes() && !full.is_empty() {
            sequence.block_hashes(full.end, block_size);
            let (table, chains) = sequence.table_and_hashes();
            full.for_each(|place| self.blocks.index(table, place, chains));
        }
        // A sequence with the same prompt as a pin continues after a full block before its last
        // token. The window at this point must therefore be kept.
        let least = if sequence.pinned { (sequence.tokens.len() - 1) / block_size * block_size } else { computed };
        self.blocks.drop_out_of_window(&mut sequence.table, computed.min(least));
        // A pin without pending tokens is complete. It samples nothing.
        if !part.samples && sequence.pending() == 0 {
            let group = sequence.group.take();
            self.leave_group(part.slot, group);
        }
    }

    /// Drops the sampled beams that no choice continues in place. New beams reuse their memory.
    fn drop_beams(&mut self, plan: &StepPlan, choices: &[SampledToken], events: &mut Vec<Event>) {
        for choice in choices.iter().filter(|choice| choice.parent == choice.child) {
            if let Some(slot) = self.sequences.find(choice.child) {
                self.sequences[slot].chosen = true;
            }
        }
        for ScheduledSequence { seq, slot, .. } in plan.sampled() {
            let goes_on = std::mem::take(&mut self.sequences[*slot].chosen);
            let Some(group) = self.sequences[*slot].group else { continue };
            if !matches!(self.groups[group].branching, Branching::Beams(_)) || goes_on {
                continue;
            }
            let last = self.groups[group].members.len() == 1;
            let dropped = self.take_out(*slot);
            if !last {
                self.groups.change(group, |group| group.shells.push(dropped));
            }
            events.push(Event::Dropped { seq: *seq });
        }
    }

    /// Forks sequences before any token is appended.
    fn fork_chosen(&mut self, choices: &[SampledToken], events: &mut Vec<Event>) {
        for (choice, SampledToken { parent, child, .. }) in choices.iter().enumerate().filter(|(_, choice)| choice.parent != choice.child) {
            events.push(match self.fork_member(*parent, *child) {
                Some(()) => Event::Forked { choice },
                None => Event::Failed { choice },
            });
        }
    }

    /// Adds a fork of `parent` to its group. Returns `None` if there is no memory for it.
    fn fork_member(&mut self, parent: SeqId, child: SeqId) -> Option<()> {
        let slot = self.sequences.find(parent)?;
        let group = self.sequences[slot].group?;
        let shell = self.groups.change(group, |group| group.shells.pop())?;
        let mut forked = self.branch(slot, self.sequences[slot].tokens.len(), child, shell).ok()?;
        (forked.group, forked.begun) = (Some(group), true);
        let slot = self.sequences.insert(forked);
        self.groups.change(group, |SequenceGroup { members, branching, .. }| {
            members.push(slot);
            if let Branching::Samples(_) = branching {
                *branching = Branching::One;
            }
        });
        Some(())
    }

    /// Reverts a failed step. No length has changed. Reserved blocks stay with their sequences for
    /// the next attempt, except those for predicted tokens.
    pub fn rollback(&mut self, mut plan: StepPlan) {
        plan.parts.iter().for_each(|part| self.release_lookahead(part.slot));
        let mut copies = std::mem::take(&mut plan.batch.copies);
        self.undo_copies(0, plan.parts.iter().map(|part| part.slot), &mut copies);
        plan.batch.copies = copies;
        self.spare = plan;
    }
}
