//! The end of a step: commit or rollback.

use super::group::SequenceGroup;
use super::slab::Slot;
use super::{Branching, Event, SampledToken, ScheduledSequence, Scheduler, StepPlan};
use crate::kv::blocks_for;
use crate::types::SeqId;
use crate::types::batch::BlockCopy;
use crate::types::outputs::FinishReason;

impl Scheduler {
    /// Applies a completed step: lengths advance, beams are dropped, sequences fork, tokens are
    /// appended, and finished sequences leave.
    pub fn commit(&mut self, plan: StepPlan, sampled: &[SampledToken], events: &mut Vec<Event>) {
        events.clear();
        self.blocks.release_copied(&plan.batch.copies);
        let mut decodes = 0;
        for scheduled in plan.sequences.iter().filter(|scheduled| !scheduled.is_stale) {
            self.advance(scheduled);
            decodes += scheduled.decodes() as usize;
        }
        self.policies.batching.record_step(plan.batch.token_count() - decodes, decodes);
        if plan.has_beams {
            self.drop_beams(&plan, sampled, events);
        }
        self.fork_chosen(sampled, events);
        // In most steps, sampled tokens are in the order of the scheduled sequences, and each
        // continues its own sequence. The slot of the scheduled sequence is therefore tried first.
        let guesses = plan.sampled().map(|scheduled| scheduled.slot).chain(std::iter::repeat(Slot::NONE));
        for ((sampled_token, SampledToken { child, outcome, .. }), guess) in sampled.iter().enumerate().zip(guesses) {
            let Some(slot) = self.sequences.find_near(guess, *child) else { continue };
            let sequence = &mut self.sequences[slot];
            let (finish, stats) = (sequence.apply(*outcome), sequence.stats);
            if let Some(why) = finish {
                self.finish(slot, why);
            }
            events.push(Event::Advanced { sampled_token, finish, stats });
        }
        self.planning.launched -= 1;
        self.planning.reuse(plan);
    }

    fn finish(&mut self, slot: Slot, why: FinishReason) {
        let sequence = &self.sequences[slot];
        if matches!(why, FinishReason::Stop | FinishReason::Length) && !sequence.request.prompt_only {
            self.length_predictor.observe(sequence.max_new_tokens(), sequence.generated);
        }
        self.end_slot(slot);
    }

    /// Records that the tokens of the scheduled sequence are computed, and inserts full blocks into
    /// the prefix cache.
    fn advance(&mut self, scheduled: &ScheduledSequence) {
        let block_size = self.blocks.block_size();
        let computed = scheduled.first + scheduled.tokens;
        self.land(scheduled.slot, scheduled.tokens, scheduled.samples);
        let sequence = &mut self.sequences[scheduled.slot];
        self.blocks.fill(&sequence.table, scheduled.first..computed);
        (sequence.computed, sequence.started) = (computed, true);
        // The placeholder of this step becomes a token. That of the next step has no sample yet.
        sequence.in_flight.device_sample = None;
        if let Some(from) = &mut sequence.logits_from {
            *from = computed.max(*from);
        }
        if scheduled.samples {
            // The log probabilities of the prompt are complete. Later tokens are sampled or
            // appended.
            sequence.logits_from = None;
        }
        let full = self.blocks.full(scheduled.first)..self.blocks.full(computed);
        if self.blocks.caches_prefixes() && !full.is_empty() {
            sequence.block_hashes(full.end, block_size);
            let (table, source) = sequence.table_and_hashes();
            full.for_each(|place| self.blocks.index(table, place, &source));
        }
        // A sequence with the same prompt as a pin continues after a full block before its last
        // token. The window at this point must therefore be kept.
        let limit = if sequence.request.pinned { (sequence.tokens.len() - 1) / block_size * block_size } else { computed };
        self.blocks.drop_out_of_window(&mut sequence.table, computed.min(limit));
        // A pin without pending tokens is complete. It samples nothing.
        if !scheduled.samples && sequence.computed == sequence.tokens.len() {
            let group = sequence.group.take();
            self.leave_group(scheduled.slot, group);
        }
    }

    /// Drops the sampled beams that no sampled token continues in place. New beams reuse their
    /// memory.
    fn drop_beams(&mut self, plan: &StepPlan, sampled: &[SampledToken], events: &mut Vec<Event>) {
        for sampled_token in sampled.iter().filter(|sampled_token| sampled_token.parent == sampled_token.child) {
            if let Some(slot) = self.sequences.find(sampled_token.child) {
                self.sequences[slot].chosen = true;
            }
        }
        for ScheduledSequence { seq, slot, .. } in plan.sampled() {
            let continues = std::mem::take(&mut self.sequences[*slot].chosen);
            let Some(group) = self.sequences[*slot].group else { continue };
            if !matches!(self.queues.groups[group].branching, Branching::Beams(_)) || continues {
                continue;
            }
            let last = self.queues.groups[group].members.len() == 1;
            let dropped = self.take_out(*slot);
            if !last {
                self.queues.groups.change(group, |group| group.shells.push(dropped));
            }
            events.push(Event::Dropped { seq: *seq });
        }
    }

    /// Forks sequences before any token is appended.
    fn fork_chosen(&mut self, sampled: &[SampledToken], events: &mut Vec<Event>) {
        for (sampled_token, SampledToken { parent, child, .. }) in
            sampled.iter().enumerate().filter(|(_, sampled_token)| sampled_token.parent != sampled_token.child)
        {
            events.push(match self.fork_member(*parent, *child) {
                Some(()) => Event::Forked { sampled_token },
                None => Event::Failed { sampled_token },
            });
        }
    }

    /// Adds a fork of `parent` to its group. Returns `None` if there is no memory for it.
    fn fork_member(&mut self, parent: SeqId, child: SeqId) -> Option<()> {
        let slot = self.sequences.find(parent)?;
        let group = self.sequences[slot].group?;
        let shell = self.queues.groups.change(group, |group| group.shells.pop())?;
        let mut forked = self.branch(slot, self.sequences[slot].tokens.len(), child, shell).ok()?;
        (forked.group, forked.started) = (Some(group), true);
        let slot = self.sequences.insert(forked);
        self.queues.groups.change(group, |SequenceGroup { members, branching, .. }| {
            members.push(slot);
            if let Branching::Samples(_) = branching {
                *branching = Branching::One;
            }
        });
        Some(())
    }

    /// Takes the blocks of the sequences that have shared a copied block since the launch, since
    /// the copy may not have been made. They are recomputed.
    fn take_copied_blocks(&mut self, plan: &StepPlan, copies: &[BlockCopy]) {
        for BlockCopy { to, .. } in copies {
            let holds = |s: &Scheduler, slot: Slot| s.sequences.in_slot(slot).is_some_and(|sequence| sequence.table.blocks().contains(to));
            let is_planned = |slot| plan.sequences.iter().any(|scheduled| scheduled.slot == slot && !scheduled.is_stale);
            while let Some(slot) = self.sequences.slots().find(|&slot| !is_planned(slot) && holds(self, slot)) {
                self.take_blocks(slot);
            }
        }
    }

    /// Takes the blocks of the sequences that cannot return to the block from which theirs was
    /// copied, since another sequence has computed its tokens there. They are recomputed.
    fn take_overwritten_blocks(&mut self, plan: &mut StepPlan, copies: &[BlockCopy]) {
        let block_size = self.blocks.block_size() as u32;
        let StepPlan { batch, sequences, .. } = plan;
        for BlockCopy { to, .. } in copies.iter().filter(|copy| batch.slots.iter().any(|slot| slot / block_size == copy.from)) {
            for scheduled in sequences.iter_mut().filter(|scheduled| !scheduled.is_stale) {
                if self.sequences[scheduled.slot].table.blocks().contains(to) {
                    self.take_blocks(scheduled.slot);
                    scheduled.is_stale = true;
                }
            }
        }
    }

    /// Reverts the newest step in flight, which has failed. No length has changed. Reserved blocks
    /// stay with their sequences for the next attempt, except those for placeholders.
    pub fn rollback(&mut self, mut plan: StepPlan) {
        self.mark_stale(&mut plan);
        let mut copies = std::mem::take(&mut plan.batch.copies);
        self.take_copied_blocks(&plan, &copies);
        self.take_overwritten_blocks(&mut plan, &copies);
        let current = plan.sequences.iter().filter(|scheduled| !scheduled.is_stale).map(|scheduled| scheduled.slot);
        self.undo_copies(0, current, &mut copies);
        plan.batch.copies = copies;
        for scheduled in plan.sequences.iter().filter(|scheduled| !scheduled.is_stale) {
            self.land(scheduled.slot, scheduled.tokens, scheduled.samples);
            let sequence = &mut self.sequences[scheduled.slot];
            if sequence.table.places() > blocks_for(sequence.expected_len(), self.blocks.block_size()) {
                let len = sequence.expected_len();
                self.blocks.truncate(&mut sequence.table, len);
            }
        }
        self.planning.launched -= 1;
        self.planning.reuse(plan);
    }
}
