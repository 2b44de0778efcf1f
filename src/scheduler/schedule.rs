//! The composition of a step: older groups before younger ones, if they are ready.

use super::{Branching, GroupId, Running, Scheduler, StepBudget, StepPlan};
use crate::types::SeqId;

/// The running groups of the scheduler, for the batching policy.
struct RunningGroups<'a>(&'a Scheduler);

impl Running for RunningGroups<'_> {
    fn is_empty(&self) -> bool {
        self.0.queues.running.is_empty()
    }

    fn decodes(&self) -> usize {
        let Scheduler { queues, sequences, .. } = self.0;
        let decodes = queues
            .running
            .iter()
            .map(|&id| &queues.groups[id])
            .filter(|group| group.branching != Branching::Pin && group.members.iter().all(|&slot| sequences[slot].pending() == 1));
        decodes.map(|group| group.members.len()).sum()
    }

    fn max_tokens(&self) -> usize {
        self.0.options.max_batch_tokens
    }
}

impl Scheduler {
    /// Plans the next step and reserves its blocks. Returns `None` if there is nothing to do.
    ///
    /// `ready` is called with the first member of a group. Paused groups are checked only after
    /// `recheck_paused`.
    pub fn schedule(&mut self, ready: impl Fn(SeqId) -> bool) -> Option<StepPlan> {
        if std::mem::take(&mut self.queues.recheck_paused) {
            self.resume_paused(&ready);
        }
        self.write_step(&ready)
    }

    /// Makes the next step check the paused groups.
    pub fn recheck_paused(&mut self) {
        self.queues.recheck_paused = true;
    }

    /// Plans a step of the groups of these sequences only. All other groups wait and are not
    /// checked.
    pub fn schedule_among(&mut self, seqs: &[SeqId], ready: impl Fn(SeqId) -> bool) -> Option<StepPlan> {
        self.set_aside_others(seqs);
        let plan = self.write_step(&ready);
        self.queues.restore_waiting();
        plan
    }

    fn set_aside_others(&mut self, seqs: &[SeqId]) {
        self.queues.select(seqs.iter().filter_map(|&seq| self.sequences.get(seq)?.group));
        for place in 0..self.queues.running.len() {
            let id = self.queues.running[place];
            if !self.queues.is_selected(id) {
                self.mark_group_reclaimable(id);
            }
        }
        self.queues.set_aside_others();
    }

    fn write_step(&mut self, ready: &impl Fn(SeqId) -> bool) -> Option<StepPlan> {
        let mut plan = self.planning.take_plan();
        self.planning.waits_for_moves = false;
        self.pause_running(ready);
        self.limit_decodes();
        let first = self.policies.batching.step_budget(&RunningGroups(self));
        // If the limits of the policy leave the step empty, the second pass plans without them. If the
        // only running group preempts itself in that pass, the third pass starts it again.
        for budget in [first, StepBudget::UNLIMITED, StepBudget::UNLIMITED] {
            // If the policy allows no new group, a group that waits for moves must not change that.
            let new_groups = budget.new_groups && (first.new_groups || !self.planning.waits_for_moves);
            self.planning.budget = StepBudget { new_groups, ..budget };
            let before = self.preemptions();
            self.preempt_for_higher_rank(ready);
            self.plan_running(&mut plan);
            if self.preemptions() == before {
                self.admit(&mut plan, ready);
            }
            if !plan.sequences.is_empty() {
                break;
            }
            if self.planning.launched > 0 {
                break; // the groups wait for the steps in flight, not for the batching policy
            }
        }
        // After the groups that return before their blocks were copied.
        self.blocks.schedule_moves_out();
        if plan.sequences.is_empty() {
            self.planning.reuse(plan);
            return None;
        }
        self.launch(&mut plan);
        Some(plan)
    }

    /// Divides the running sequences among the steps in flight.
    fn limit_decodes(&mut self) {
        if self.planning.stages > 1 {
            let running: usize = self.queues.running.iter().map(|&id| self.queues.groups[id].members.len()).sum();
            self.planning.max_decodes = running.div_ceil(self.planning.stages).max(1);
        }
    }

    pub(super) fn is_ready(&self, id: GroupId, ready: &impl Fn(SeqId) -> bool) -> bool {
        ready(self.sequences[self.queues.groups[id].members[0]].id)
    }

    fn resume_paused(&mut self, ready: &impl Fn(SeqId) -> bool) {
        let mut paused = std::mem::take(&mut self.queues.paused);
        paused.retain(|id| {
            let ready = self.is_ready(id, ready);
            if ready {
                self.wait(id);
            }
            !ready
        });
        self.queues.paused = paused;
    }

    fn pause_running(&mut self, ready: &impl Fn(SeqId) -> bool) {
        let mut next = 0;
        while next < self.queues.running.len() {
            match self.is_ready(self.queues.running[next], ready) {
                true => next += 1,
                false => {
                    let id = self.queues.running.remove(next);
                    self.pause(id);
                }
            }
        }
    }

    pub(super) fn pause(&mut self, id: GroupId) {
        self.invalidate_group(id);
        self.queues.pause(id);
        self.mark_group_reclaimable(id);
    }

    /// Makes the steps in flight compute nothing for the members.
    fn invalidate_group(&mut self, id: GroupId) {
        let members = self.queues.groups.take_members(id);
        members.iter().for_each(|&slot| self.invalidate_in_flight(slot));
        self.queues.groups.return_members(id, members);
    }

    pub(super) fn wait(&mut self, id: GroupId) {
        self.invalidate_group(id);
        self.queues.wait(id);
        self.mark_group_reclaimable(id);
    }

    pub(super) fn start_group(&mut self, id: GroupId) -> usize {
        let place = self.queues.start(id);
        self.unmark_group_reclaimable(id);
        self.find_prefixes(id);
        place
    }

    /// Returns whether the step may start or continue the group.
    pub(super) fn may_run(&self, id: GroupId) -> bool {
        self.planning.budget.new_groups || self.queues.groups[id].started
    }

    /// Attaches cached blocks to the members, for tokens that are not computed.
    fn find_prefixes(&mut self, id: GroupId) {
        let block_size = self.blocks.block_size();
        for &slot in &self.queues.groups[id].members {
            let sequence = &mut self.sequences[slot];
            if !self.blocks.caches_prefixes() || !sequence.table.is_on_device() {
                continue;
            }
            // The last token is always computed, since its logits select the next one. So is every
            // token whose logits are wanted.
            let useful = sequence.logits_from.unwrap_or(usize::MAX).min(sequence.tokens.len() - 1);
            let (before, place) = (sequence.computed, sequence.computed / block_size);
            sequence.block_hashes(useful / block_size, block_size);
            let (table, source) = sequence.table_and_hashes();
            let found = self.blocks.reuse(table, place, &source.hashes[..useful / block_size]);
            sequence.computed = before.max((place + found) * block_size);
            let found = sequence.computed - before;
            self.prefix.count(useful.saturating_sub(before), found);
            if sequence.stats.preemptions == 0 {
                sequence.stats.cached += found as u64;
            }
        }
    }

    fn plan_running(&mut self, plan: &mut StepPlan) {
        let mut next = 0;
        while next < self.queues.running.len() && plan.batch.token_count() < self.options.max_batch_tokens {
            self.plan_group(next, plan);
            next += 1;
        }
    }
}
