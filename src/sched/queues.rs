//! Who runs: the older before the younger, and whoever is ready.

use super::{GroupId, Scheduler, SeqId, Sequence, StepPlan};

/// Blocks that admission leaves free, so that those already running need not preempt at once: 1 in 100.
const WATERMARK_PARTS: usize = 100;

impl Scheduler {
    /// Reserves blocks and writes the next step down; None when there is nothing to do. `ready` is asked about a group's
    /// first member.
    pub fn schedule(&mut self, ready: impl Fn(SeqId) -> bool) -> Option<StepPlan> {
        let mut plan = std::mem::take(&mut self.spare);
        plan.clear();
        let before = self.preemptions;
        self.pause_and_resume(&ready);
        self.let_the_older_in(&ready);
        self.plan_running(&mut plan);
        self.admit(&mut plan, &ready, before);
        if plan.parts.is_empty() {
            self.spare = plan;
            return None;
        }
        Some(plan)
    }

    pub(super) fn is_ready(&self, id: GroupId, ready: &impl Fn(SeqId) -> bool) -> bool {
        ready(self.groups[&id].members[0])
    }

    fn pause_and_resume(&mut self, ready: &impl Fn(SeqId) -> bool) {
        let mut next = 0;
        while next < self.paused.len() {
            match self.is_ready(self.paused[next], ready) {
                true => {
                    let id = self.paused.remove(next);
                    self.wait(id);
                }
                false => next += 1,
            }
        }
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
        let place = self.paused.partition_point(|&other| other < id);
        self.paused.insert(place, id);
        self.rest_all(id);
    }

    pub(super) fn wait(&mut self, id: GroupId) {
        let place = self.waiting.partition_point(|&other| other < id);
        self.waiting.insert(place, id);
        self.rest_all(id);
    }

    fn run(&mut self, id: GroupId) -> usize {
        let place = self.running.partition_point(|&other| other < id);
        self.running.insert(place, id);
        self.wake_all(id);
        self.find_prefixes(id);
        place
    }

    /// Members take the blocks that the prefix index still has of what they have not computed.
    fn find_prefixes(&mut self, id: GroupId) {
        let block_size = self.blocks.block_size();
        for seq in &self.groups[&id].members {
            let sequence = self.sequences.get_mut(seq).expect("a member is known");
            if !self.blocks.keeps_prefixes() || sequence.table.swapped() {
                continue;
            }
            // The last token is computed in any case: its logits choose the next one. And so is every other whose logits are wanted.
            let useful = sequence.logits_from.unwrap_or(usize::MAX).min(sequence.tokens.len() - 1);
            let (before, place) = (sequence.computed, sequence.computed / block_size);
            sequence.chains(useful / block_size, block_size);
            let (table, chains) = sequence.table_and_chains();
            let found = self.blocks.reuse(table, place, &chains[..useful / block_size]);
            sequence.computed = before.max((place + found) * block_size);
            self.prefix.count(useful.saturating_sub(before), sequence.computed - before);
        }
    }

    /// Who paused and is ready again takes the place of younger ones, which keep their blocks while they wait.
    fn let_the_older_in(&mut self, ready: &impl Fn(SeqId) -> bool) {
        while let (Some(&oldest), Some(&youngest)) = (self.waiting.front(), self.running.last()) {
            if oldest > youngest {
                return;
            }
            self.waiting.pop_front();
            if !self.is_ready(oldest, ready) {
                self.pause(oldest);
                continue;
            }
            while self.width() + self.groups[&oldest].width() > self.options.max_seqs {
                let Some(youngest) = self.running.pop() else { break };
                self.wait(youngest);
            }
            self.run(oldest);
        }
    }

    /// Rows that the running may come to need in one step.
    pub(super) fn width(&self) -> usize {
        self.running.iter().map(|id| self.groups[id].width()).sum()
    }

    fn plan_running(&mut self, plan: &mut StepPlan) {
        let mut next = 0;
        while next < self.running.len() {
            if !self.plan_group(next, plan) {
                return;
            }
            next += 1;
        }
    }

    /// Until somebody has to give way, more often than the `preemptions` before this step: then nobody comes in.
    fn admit(&mut self, plan: &mut StepPlan, ready: &impl Fn(SeqId) -> bool, preemptions: u64) {
        while self.preemptions == preemptions
            && let Some(&id) = self.waiting.front()
        {
            if !self.is_ready(id, ready) {
                self.waiting.pop_front();
                self.pause(id);
                continue;
            }
            let places = self.options.max_seqs - self.width();
            let room = self.options.max_batch_tokens - plan.batch.rows();
            if self.groups[&id].width() > places || room == 0 || !self.may_enter(id) {
                return;
            }
            self.waiting.pop_front();
            let place = self.run(id);
            if !self.plan_group(place, plan) {
                return;
            }
        }
    }

    /// Whether all its tokens would fit above the watermark, beside all those of the running. What those that do not run still
    /// hold counts as free.
    fn may_enter(&mut self, id: GroupId) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let needed = self.needed(id) + self.running.iter().map(|&id| self.needed(id)).sum::<usize>() + self.watermark();
        if needed <= self.blocks.available() {
            return true;
        }
        // Its own are not to be taken from it.
        self.wake_all(id);
        let reclaimable = self.blocks.idle_blocks();
        self.rest_all(id);
        needed <= self.blocks.available() + reclaimable
    }

    pub(super) fn watermark(&self) -> usize {
        self.blocks.total().div_ceil(WATERMARK_PARTS)
    }

    /// Blocks that the group takes from the pool until all its tokens are computed.
    pub(super) fn needed(&self, id: GroupId) -> usize {
        let members = || self.groups[&id].members.iter().map(|seq| &self.sequences[seq]);
        let back = self.blocks.needed_back(members().map(|sequence| &sequence.table));
        let needed = |sequence: &Sequence| self.blocks.needed(&sequence.table, sequence.computed..sequence.tokens.len());
        back + members().map(needed).sum::<usize>()
    }
}
