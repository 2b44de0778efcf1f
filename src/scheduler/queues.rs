//! The queues of the scheduler: older groups before younger ones, if they are ready.

use super::group::{Queue, SequenceGroup};
use super::slab::Slot;
use super::{GroupId, Running, Scheduler, Sequence, StepBudget, StepPlan};
use crate::types::SeqId;

impl Scheduler {
    /// Plans the next step and reserves its blocks. Returns `None` if there is nothing to do.
    ///
    /// `ready` is called with the first member of a group. Paused groups are checked only after
    /// `recheck_paused`.
    pub fn schedule(&mut self, ready: impl Fn(SeqId) -> bool) -> Option<StepPlan> {
        if std::mem::take(&mut self.looks_again) {
            self.resume_paused(&ready);
        }
        self.write_step(&ready)
    }

    /// Plans a step of the running groups only, since the device has already started the predicted
    /// step. If they have nothing to do, plans an ordinary step.
    pub fn schedule_lookahead(&mut self, ready: impl Fn(SeqId) -> bool) -> Option<StepPlan> {
        let mut plan = std::mem::take(&mut self.spare_plan);
        plan.clear();
        plan.is_closed = true;
        self.pause_running(&ready);
        self.step_budget = StepBudget { decodes: true, ..self.policies.batching.step_budget(Running(self)) };
        self.plan_running(&mut plan);
        if !plan.sequences.is_empty() {
            return Some(plan);
        }
        self.spare_plan = plan;
        self.schedule(ready)
    }

    /// Makes the next step check the paused groups.
    pub fn recheck_paused(&mut self) {
        self.looks_again = true;
    }

    /// Plans a step of the groups of these sequences only. All other groups wait and are not
    /// checked.
    pub fn schedule_among(&mut self, seqs: &[SeqId], ready: impl Fn(SeqId) -> bool) -> Option<StepPlan> {
        self.set_aside_others(seqs);
        let plan = self.write_step(&ready);
        std::mem::swap(&mut self.waiting, &mut self.set_aside);
        while let Some(id) = self.set_aside.pop_first() {
            self.waiting.insert(id);
        }
        plan
    }

    fn set_aside_others(&mut self, seqs: &[SeqId]) {
        let mut some = std::mem::take(&mut self.set_aside);
        for group in seqs.iter().filter_map(|&seq| self.sequences.get(seq)?.group) {
            some.insert(group);
        }
        let mut running = std::mem::take(&mut self.running);
        running.retain(|&id| {
            let stays = some.contains(id);
            if !stays {
                self.wait(id);
            }
            stays
        });
        self.running = running;
        some.retain(|id| self.waiting.remove(id));
        self.set_aside = std::mem::replace(&mut self.waiting, some);
    }

    fn write_step(&mut self, ready: &impl Fn(SeqId) -> bool) -> Option<StepPlan> {
        let mut plan = std::mem::take(&mut self.spare_plan);
        plan.clear();
        let before = self.preemptions;
        self.pause_running(ready);
        for step_budget in [self.policies.batching.step_budget(Running(self)), StepBudget::UNLIMITED] {
            self.step_budget = step_budget;
            self.preempt_for_higher_rank(ready);
            self.plan_running(&mut plan);
            if self.preemptions == before {
                self.admit(&mut plan, ready);
            }
            if !plan.sequences.is_empty() {
                return Some(plan);
            }
        }
        self.spare_plan = plan;
        None
    }

    pub(super) fn is_ready(&self, id: GroupId, ready: &impl Fn(SeqId) -> bool) -> bool {
        ready(self.sequences[self.groups[id].members[0]].id)
    }

    fn resume_paused(&mut self, ready: &impl Fn(SeqId) -> bool) {
        let mut paused = std::mem::take(&mut self.paused);
        paused.retain(|id| {
            let ready = self.is_ready(id, ready);
            if ready {
                self.wait(id);
            }
            !ready
        });
        self.paused = paused;
    }

    fn pause_running(&mut self, ready: &impl Fn(SeqId) -> bool) {
        let mut next = 0;
        while next < self.running.len() {
            match self.is_ready(self.running[next], ready) {
                true => next += 1,
                false => {
                    let id = self.running.remove(next);
                    self.pause(id);
                }
            }
        }
    }

    fn pause(&mut self, id: GroupId) {
        self.paused.insert(id);
        self.groups.change(id, |group| group.queue = Queue::Paused);
        self.mark_group_reclaimable(id);
    }

    pub(super) fn wait(&mut self, id: GroupId) {
        self.waiting.insert(id);
        self.groups.change(id, |group| group.queue = Queue::Waiting);
        self.mark_group_reclaimable(id);
    }

    fn start_group(&mut self, id: GroupId) -> usize {
        let place = self.running.partition_point(|&other| other < id);
        self.running.insert(place, id);
        self.groups.change(id, |group| (group.queue, group.started) = (Queue::Running, true));
        self.unmark_group_reclaimable(id);
        self.find_prefixes(id);
        place
    }

    /// Returns the first waiting group that is ready. Groups before it pause.
    fn first_waiting(&mut self, ready: &impl Fn(SeqId) -> bool) -> Option<GroupId> {
        while let Some(id) = self.waiting.first() {
            if self.is_ready(id, ready) {
                return Some(id);
            }
            self.waiting.pop_first();
            self.pause(id);
        }
        None
    }

    /// Returns whether the step may start or continue the group.
    pub(super) fn may_run(&self, id: GroupId) -> bool {
        self.step_budget.new_groups || self.groups[id].started
    }

    /// Attaches cached blocks to the members, for tokens that are not computed.
    fn find_prefixes(&mut self, id: GroupId) {
        let block_size = self.blocks.block_size();
        for &slot in &self.groups[id].members {
            let sequence = &mut self.sequences[slot];
            if !self.blocks.caches_prefixes() || sequence.table.swapped() {
                continue;
            }
            // The last token is always computed, since its logits select the next one. So is every
            // token whose logits are wanted.
            let useful = sequence.logits_from.unwrap_or(usize::MAX).min(sequence.tokens.len() - 1);
            let (before, place) = (sequence.computed, sequence.computed / block_size);
            sequence.block_hashes(useful / block_size, block_size);
            let (table, hashes) = sequence.table_and_hashes();
            let found = self.blocks.reuse(table, place, &hashes[..useful / block_size]);
            sequence.computed = before.max((place + found) * block_size);
            let found = sequence.computed - before;
            self.prefix.count(useful.saturating_sub(before), found);
            if sequence.stats.preemptions == 0 {
                sequence.stats.cached += found as u64;
            }
        }
    }

    /// Replaces the youngest running groups with waiting groups that are older. The replaced groups
    /// keep their blocks while they wait.
    fn preempt_for_higher_rank(&mut self, ready: &impl Fn(SeqId) -> bool) {
        while let (Some(oldest), Some(&youngest)) = (self.waiting.first(), self.running.last()) {
            if oldest > youngest || !self.may_run(oldest) {
                return;
            }
            if !self.is_ready(oldest, ready) {
                self.waiting.pop_first();
                self.pause(oldest);
                continue;
            }
            let Some(stay) = self.make_reclaimable_for(oldest) else { return };
            self.waiting.pop_first();
            while self.running.len() > stay {
                let youngest = self.running.pop().expect("it is one of several");
                self.wait(youngest);
            }
            self.start_group(oldest);
        }
    }

    /// Marks the youngest running groups reclaimable until the group fits beside the others.
    /// Returns how many groups keep running. Returns `None` if the group does not fit beside older
    /// groups.
    fn make_reclaimable_for(&mut self, id: GroupId) -> Option<usize> {
        let mut stay = self.running.len();
        let (mut width, mut promised) = (self.running_sequences_limit(), self.reserved_by_running());
        while width + self.groups[id].width() > self.options.max_seqs || !self.fits(id, stay, promised) {
            if stay == 0 || self.running[stay - 1] < id {
                (stay..self.running.len()).for_each(|place| self.unmark_group_reclaimable(self.running[place]));
                return None;
            }
            stay -= 1;
            let youngest = self.running[stay];
            width -= self.groups[youngest].width();
            promised -= self.blocks_needed(youngest);
            self.mark_group_reclaimable(youngest);
        }
        Some(stay)
    }

    /// Returns the maximum number of sequences of the running groups in a step.
    pub(super) fn running_sequences_limit(&self) -> usize {
        self.groups.tally(Queue::Running).width
    }

    fn plan_running(&mut self, plan: &mut StepPlan) {
        let mut next = 0;
        while next < self.running.len() && plan.batch.token_count() < self.options.max_batch_tokens {
            self.plan_group(next, plan);
            next += 1;
        }
    }

    fn admit(&mut self, plan: &mut StepPlan, ready: &impl Fn(SeqId) -> bool) {
        let before = self.preemptions;
        // `reserved_by_running` is expensive, so it is computed only if a group waits.
        let Some(first) = self.first_waiting(ready) else { return };
        let (mut next, mut width) = (Some(first), self.running_sequences_limit());
        let mut promised = None;
        while let Some(id) = next {
            width += self.groups[id].width();
            if width > self.options.max_seqs || self.prompt_budget(plan) == 0 || !self.may_run(id) {
                return;
            }
            let beside = *promised.get_or_insert_with(|| self.reserved_by_running());
            if !self.fits(id, self.running.len(), beside) {
                return;
            }
            self.waiting.pop_first();
            let place = self.start_group(id);
            self.plan_group(place, plan);
            if self.preemptions > before {
                return;
            }
            promised = Some(beside + self.blocks_needed(id));
            next = self.first_waiting(ready);
        }
    }

    /// Returns whether the group fits, with the watermark, beside `others` running groups that need
    /// `reserved_by_running` blocks. Reclaimable blocks count as free.
    pub(super) fn fits(&mut self, id: GroupId, others: usize, promised: usize) -> bool {
        if others == 0 {
            return true;
        }
        let needed = self.blocks_needed(id) + promised + self.watermark();
        if needed <= self.blocks.available() {
            return true;
        }
        // The blocks of the group itself must not be reclaimed for it.
        self.unmark_group_reclaimable(id);
        let reclaimable = self.blocks.idle_blocks();
        self.mark_group_reclaimable(id);
        needed <= self.blocks.available() + reclaimable
    }

    pub(super) fn watermark(&self) -> usize {
        self.policies.allocation.watermark(self.blocks.total())
    }

    /// Returns the number of blocks that the running groups still take from the pool.
    pub(super) fn reserved_by_running(&self) -> usize {
        self.running.iter().map(|&id| self.blocks_needed(id)).sum()
    }

    /// Returns the number of blocks that the group takes from the pool for the tokens that the
    /// allocation policy requires.
    pub(super) fn blocks_needed(&self, id: GroupId) -> usize {
        let SequenceGroup { branching, members, .. } = &self.groups[id];
        let sequences = || members.iter().map(|&slot| &self.sequences[slot]);
        let back = self.blocks.blocks_to_swap_in(sequences().map(|sequence| &sequence.table));
        let needed = |sequence: &Sequence| {
            let length = self.policies.allocation.length(sequence.tokens.len(), sequence.max_len);
            let rows = sequence.pending().clamp(1, self.options.max_tokens_per_step());
            self.blocks.needed(&sequence.table, sequence.computed..length, rows)
        };
        let future_forks = branching.max_members().saturating_sub(members.len());
        back + sequences().map(needed).sum::<usize>() + self.blocks_for_forks(future_forks, members[0])
    }

    /// Returns the number of blocks that `branches` future forks of `parent` need beyond the shared
    /// full ones.
    fn blocks_for_forks(&self, branches: usize, parent: Slot) -> usize {
        if branches == 0 {
            return 0;
        }
        let parent = &self.sequences[parent];
        let (len, length) = (parent.tokens.len(), self.policies.allocation.length(parent.tokens.len(), parent.max_len));
        branches * self.blocks.paging().blocks_beyond_shared(len, length)
    }
}
