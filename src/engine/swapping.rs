//! Blocks on their way between the tiers, and what that costs.

use super::core::{Core, stream_of};
use crate::options::Preemption;
use crate::sched::StepPlan;

impl Core {
    /// The next step, of these groups alone or of all that are ready, with every block where the plan counts on it. Who could not
    /// be brought back will be computed again, and then there is another plan.
    pub(super) fn plan(&mut self, groups: Option<&[u64]>) -> Option<StepPlan> {
        loop {
            let (streams, beams, journal) = (&self.streams, &self.beams, &self.journal);
            let has_room = |seq| stream_of(streams, beams, seq).is_none_or(|stream| !stream.outbox.is_full());
            let ready = |seq| journal.as_ref().map_or_else(|| has_room(seq), |journal| journal.ready(has_room(seq)));
            let mut plan = match groups {
                Some(groups) => self.scheduler.schedule_among(groups, ready),
                // Who came meanwhile joins the step after this one.
                None if self.runner.is_ahead() => self.scheduler.schedule_foreseen(ready),
                None => self.scheduler.schedule(ready),
            };
            let (out, back) = self.try_moves();
            if !back {
                plan.into_iter().for_each(|plan| self.scheduler.rollback(plan));
                self.scheduler.moved(out, back);
                continue;
            }
            self.scheduler.moved(out, back);
            let foreseen = |plan: &&mut StepPlan| groups.is_none() && self.runner.works_ahead(plan.batch.rows());
            plan.iter_mut().filter(foreseen).for_each(|plan| self.scheduler.foresee(plan));
            return plan;
        }
    }

    /// Makes the moves that were decided between steps.
    pub(super) fn move_blocks(&mut self) {
        let (out, back) = self.try_moves();
        self.scheduler.moved(out, back);
    }

    /// Brings a sequence back from the host tier, if there is room.
    pub(super) fn bring_back(&mut self, seq: u64) {
        if self.scheduler.find(seq).is_some_and(|sequence| sequence.table.swapped()) {
            self.scheduler.fetch(seq);
            self.move_blocks();
        }
    }

    /// Makes the moves that were decided: whether those out could be made, and those back.
    fn try_moves(&mut self) -> (bool, bool) {
        let moves = self.scheduler.moves();
        if moves.is_empty() {
            return (true, true);
        }
        // Blocks will not hold what they held; and what is measured is the moves.
        self.runner.forget_foreseen();
        let began = self.shared.clock.now();
        let out = moves.out.is_empty() || self.runner.swap_out(&moves.out).is_ok();
        let back = moves.back.is_empty() || self.runner.swap_in(&moves.back).is_ok();
        let (out, back) = self.journal.as_mut().map_or((out, back), |journal| journal.moved(out, back));
        // What fails at once is not cheap.
        if out && back {
            self.meter.moved(moves.out.len() + moves.back.len(), self.shared.clock.now().saturating_sub(began));
        }
        self.counts.blocks_swapped_out += if out { moves.out.len() as u64 } else { 0 };
        self.counts.blocks_swapped_in += if back { moves.back.len() as u64 } else { 0 };
        self.counts.swap_failures += !out as u64 + !back as u64;
        (out, back)
    }

    /// The one place where the scheduler is told of time.
    pub(super) fn tell_costs(&mut self) {
        let measured = (self.scheduler.preemption() == Preemption::Auto).then(|| self.meter.costs());
        let costs = self.journal.as_mut().map_or(measured, |journal| journal.costs(measured));
        costs.into_iter().for_each(|costs| self.scheduler.set_costs(costs));
    }
}
