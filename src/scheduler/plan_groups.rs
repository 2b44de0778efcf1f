//! The tokens that the members of a group compute in a step.

use super::allocation::AllocationResult;
use super::slab::Slot;
use super::{Branching, GroupId, ScheduledTokens, Scheduler, SequenceKv, StepPlan};

/// A member that waits until another one has computed their `common` first tokens.
struct PrefixWait {
    on: Slot,
    common: usize,
}

impl Scheduler {
    /// Plans the tokens of `running[place]` within the limits of the step. The group may be
    /// preempted instead.
    pub(super) fn plan_group(&mut self, place: usize, plan: &mut StepPlan) {
        let id = self.queues.running[place];
        // After the group has lost a member, the others may fit.
        while self.queues.running.get(place) == Some(&id) && !self.try_plan(id, plan) {}
    }

    /// Returns false if the group was preempted or lost a member, so that it must be planned again.
    fn try_plan(&mut self, id: GroupId, plan: &mut StepPlan) -> bool {
        // In most steps, all tables are on the device.
        if self.blocks.tables_off_device() > 0 {
            match self.allocate_or_preempt(id, |s| s.swap_in_group(id)) {
                AllocationResult::Done => {}
                AllocationResult::Preempted => return false,
                AllocationResult::Pending => return true,
            }
            if !self.continue_swap_in_group(id) {
                self.planning.waits_for_moves = true;
                return true;
            }
        }
        if !self.can_be_planned(id) || self.is_left_to_next_step(id, plan) {
            return true;
        }
        match self.queues.groups[id].members[..] {
            [slot] => self.plan_single(id, slot, plan),
            _ => self.plan_members(id, plan),
        }
    }

    /// Returns whether the group can be planned before the steps in flight are committed. Several
    /// members must be decoding, since they wait for each other and share prefixes otherwise.
    fn can_be_planned(&self, id: GroupId) -> bool {
        let members = || self.queues.groups[id].members.iter().map(|&slot| &self.sequences[slot]);
        members().all(SequenceKv::can_be_planned)
            && (members().len() == 1 || members().all(|s| s.in_flight.tokens == 0) || members().all(|s| s.pending() == 1))
    }

    /// Returns whether the decodes of the group are left to the next step in flight.
    fn is_left_to_next_step(&self, id: GroupId, plan: &StepPlan) -> bool {
        plan.sequences.len() >= self.planning.max_decodes
            && self.queues.groups[id].members.iter().all(|&slot| self.sequences[slot].pending() == 1)
    }

    /// Plans the only member of a group, with as many tokens as the step allows.
    fn plan_single(&mut self, id: GroupId, slot: Slot, plan: &mut StepPlan) -> bool {
        plan.has_beams |= matches!(self.queues.groups[id].branching, Branching::Beams(_));
        let Some(chunk) = self.schedule_single(slot, plan) else { return true };
        let allocated = self.allocate_or_preempt(id, |s| s.prepare(&[chunk], plan));
        if allocated == AllocationResult::Done {
            self.write(chunk, plan);
        }
        allocated != AllocationResult::Preempted
    }

    /// Plans several members. They sample in the same step, one row each, when each has computed
    /// all other tokens. After a preemption, the members share their common prefix again.
    fn plan_members(&mut self, id: GroupId, plan: &mut StepPlan) -> bool {
        plan.has_beams |= matches!(self.queues.groups[id].branching, Branching::Beams(_));
        let (members, mut chunks) = (self.queues.groups.take_members(id), std::mem::take(&mut self.planning.scheduled));
        chunks.clear();
        self.schedule_together(&members, plan, &mut chunks);
        self.queues.groups.return_members(id, members);
        let allocated = match chunks.is_empty() {
            true => AllocationResult::Done,
            false => self.allocate_or_preempt(id, |s| s.prepare(&chunks, plan)),
        };
        if allocated == AllocationResult::Done {
            chunks.iter().for_each(|chunk| self.write(*chunk, plan));
        }
        self.planning.scheduled = chunks;
        allocated != AllocationResult::Preempted
    }

    fn schedule_single(&self, slot: Slot, plan: &StepPlan) -> Option<ScheduledTokens> {
        let sequence = &self.sequences[slot];
        let pending = sequence.pending();
        let tokens = match pending {
            1 => (self.planning.budget.decodes && plan.batch.token_count() < self.options.max_batch_tokens) as usize,
            _ => self.tokens_for(sequence, self.prompt_budget(plan), plan),
        };
        let samples = tokens == pending && !sequence.request.pinned;
        (tokens > 0 && (!samples || plan.batch.logit_rows.len() < self.options.max_seqs)).then_some(ScheduledTokens {
            slot,
            tokens,
            samples,
        })
    }

    fn schedule_together(&mut self, members: &[Slot], plan: &StepPlan, chunks: &mut Vec<ScheduledTokens>) {
        let may_choose = |s: &Scheduler| members.iter().all(|&slot| s.sequences[slot].pending() == 1);
        if !may_choose(self) {
            self.schedule_members(members, self.prompt_budget(plan), plan, chunks);
        }
        let budget = self.options.max_batch_tokens - plan.batch.token_count();
        let logits = self.options.max_seqs - plan.batch.logit_rows.len();
        // Members may have caught up by sharing alone, without computing a token.
        if chunks.is_empty() && self.planning.budget.decodes && members.len() <= budget.min(logits) && may_choose(self) {
            chunks.extend(members.iter().map(|&slot| ScheduledTokens { slot, tokens: 1, samples: true }));
        }
    }

    /// Returns how many tokens the step can still hold for sequences that lack more than one token.
    pub(super) fn prompt_budget(&self, plan: &StepPlan) -> usize {
        self.planning.budget.max_prompt_tokens.min(self.options.max_batch_tokens - plan.batch.token_count())
    }

    /// Plans the missing tokens of the members, except their last ones.
    ///
    /// A member shares the blocks of the longest common prefix that another one has computed. It
    /// waits for an older one that will compute a longer prefix.
    fn schedule_members(&mut self, members: &[Slot], mut budget: usize, plan: &StepPlan, chunks: &mut Vec<ScheduledTokens>) {
        for (place, &slot) in members.iter().enumerate() {
            if let Err(PrefixWait { on, common }) = self.share_prefix(slot, &members[..place], &members[place + 1..]) {
                self.limit_to(common, on, chunks, &mut budget);
                continue;
            }
            let sequence = &self.sequences[slot];
            let tokens = self.tokens_for(sequence, budget, plan).min(sequence.pending() - 1);
            if tokens > 0 {
                chunks.push(ScheduledTokens { slot, tokens, samples: false });
                budget -= tokens;
            }
        }
    }

    /// Limits the chunk of `slot` to the first `common` tokens. Beyond them, its windows could
    /// release blocks that the waiting member needs.
    fn limit_to(&self, common: usize, slot: Slot, chunks: &mut [ScheduledTokens], budget: &mut usize) {
        if !self.blocks.paging().has_windows() {
            return;
        }
        for chunk in chunks.iter_mut().filter(|chunk| chunk.slot == slot) {
            let tokens = chunk.tokens.min(common - self.sequences[slot].computed);
            *budget += chunk.tokens - tokens;
            chunk.tokens = tokens;
        }
    }

    /// Shares the blocks of the longest prefix in common with an `older` member, or with a
    /// `younger` one that has computed it. Returns the wait if the older member has not
    /// computed it yet.
    fn share_prefix(&mut self, slot: Slot, older: &[Slot], younger: &[Slot]) -> Result<(), PrefixWait> {
        let sequence = &self.sequences[slot];
        if sequence.pending() == 1 {
            return Ok(());
        }
        let (mut common, mut best) = (sequence.computed, None);
        for &other in older {
            // Most members do not have the next token in common, so they cannot improve the result.
            if let Some(more) = sequence.common(&self.sequences[other], common) {
                (common, best) = (more, Some(other));
            }
        }
        // While the group waited, older members may have lost blocks that younger ones still have.
        for &other in younger.iter().filter(|&&other| self.sequences[other].computed > sequence.computed) {
            let more = sequence.common(&self.sequences[other], common).unwrap_or(0).min(self.sequences[other].computed);
            if more > common && !self.blocks.sees_null_block(&self.sequences[other].table, more) {
                (common, best) = (more, Some(other));
            }
        }
        let Some(best) = best else { return Ok(()) };
        if self.sequences[best].computed < common {
            return Err(PrefixWait { on: best, common });
        }
        if self.blocks.sees_null_block(&self.sequences[best].table, common) {
            return Ok(());
        }
        let (best, sequence) = self.sequences.two(best, slot);
        self.blocks.free(&mut sequence.table);
        self.blocks.fork(&best.table, common, &mut sequence.table);
        sequence.computed = common;
        Ok(())
    }

    /// Returns the number of tokens of the sequence in a step that can hold `budget` tokens.
    fn tokens_for(&self, sequence: &SequenceKv, budget: usize, plan: &StepPlan) -> usize {
        let tokens = sequence.pending().min(self.options.prefill_chunk).min(budget);
        let Some(from) = sequence.logits_from else { return tokens };
        // Each running sequence has one row of logits. Additional tokens go to sequences that want
        // the logits of their prompt.
        let taken: usize = plan.sequences.iter().map(|scheduled| scheduled.logits.saturating_sub(1)).sum();
        let logits = (self.options.max_seqs - self.queues.running_width() + 1)
            .saturating_sub(taken)
            .min(self.options.max_seqs - plan.batch.logit_rows.len());
        tokens.min(from.saturating_sub(sequence.scheduled()) + logits)
    }

    fn write(&mut self, chunk: ScheduledTokens, plan: &mut StepPlan) {
        let sequence = &self.sequences[chunk.slot];
        if sequence.pending() > 1 {
            self.planning.budget.max_prompt_tokens -= chunk.tokens;
        }
        let positions = sequence.scheduled()..sequence.scheduled() + chunk.tokens;
        plan.push(chunk.slot, sequence, positions, chunk.samples, &self.blocks);
    }
}
