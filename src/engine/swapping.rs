//! Transfers of blocks between the tiers, and their costs.

use super::core::EngineCore;
use crate::options::Preemption;
use crate::scheduler::StepPlan;
use crate::types::SeqId;

impl EngineCore {
    /// Plans the next step, of these groups or of all ready ones, and makes the transfers that it
    /// needs. If a transfer back to the device fails, the affected sequences are recomputed, and
    /// the step is planned again.
    pub(super) fn plan(&mut self, groups: Option<&[SeqId]>) -> Option<StepPlan> {
        loop {
            let (requests, journal) = (&self.requests, &self.journal);
            let has_room = |seq| requests.deliverer_of(seq).is_none_or(|sequence| !sequence.sender.is_full());
            let ready = |seq| journal.as_ref().map_or_else(|| has_room(seq), |journal| journal.ready(has_room(seq)));
            let mut plan = match groups {
                Some(groups) => self.scheduler.schedule_among(groups, ready),
                // New requests join the step after the predicted one.
                None if self.runner.step_in_flight() => self.scheduler.schedule_lookahead(ready),
                None => self.scheduler.schedule(ready),
            };
            let (out, back) = self.try_moves();
            if !back {
                plan.into_iter().for_each(|plan| self.scheduler.rollback(plan));
                self.scheduler.record_moves(out, back);
                continue;
            }
            self.scheduler.record_moves(out, back);
            let may_run_ahead = |plan: &&mut StepPlan| groups.is_none() && self.runner.can_run_ahead(plan.batch.token_count());
            plan.iter_mut().filter(may_run_ahead).for_each(|plan| self.scheduler.reserve_lookahead(plan));
            return plan;
        }
    }

    /// Makes the transfers that were planned between steps.
    pub(super) fn move_blocks(&mut self) {
        let (out, back) = self.try_moves();
        self.scheduler.record_moves(out, back);
    }

    /// Swaps a sequence in if enough blocks are available.
    pub(super) fn swap_in(&mut self, seq: SeqId) {
        if self.scheduler.find(seq).is_some_and(|sequence| sequence.table.swapped()) {
            self.scheduler.swap_in_sequence(seq);
            self.move_blocks();
        }
    }

    /// Makes the planned transfers. Returns whether those to the host tier and those back
    /// succeeded.
    fn try_moves(&mut self) -> (bool, bool) {
        let moves = self.scheduler.moves();
        if moves.is_empty() {
            return (true, true);
        }
        // The predicted step would read blocks that change, and would distort the measurement.
        self.runner.cancel_in_flight();
        let began = self.shared.clock.now();
        let out = moves.out.is_empty() || self.runner.swap_out(&moves.out).is_ok();
        let back = moves.back.is_empty() || self.runner.swap_in(&moves.back).is_ok();
        let (out, back) = self.journal.as_mut().map_or((out, back), |journal| journal.record_moves(out, back));
        // A failed transfer has no meaningful duration.
        if out && back {
            self.step_timer.record_move(moves.out.len() + moves.back.len(), self.shared.clock.now().saturating_sub(began));
        }
        self.telemetry.counts.blocks_swapped_out += if out { moves.out.len() as u64 } else { 0 };
        self.telemetry.counts.blocks_swapped_in += if back { moves.back.len() as u64 } else { 0 };
        self.telemetry.counts.swap_failures += !out as u64 + !back as u64;
        (out, back)
    }

    /// Passes the measured costs to the scheduler, which has no other knowledge of time.
    pub(super) fn pass_costs(&mut self) {
        let measured = (self.scheduler.preemption() == Preemption::Auto).then(|| self.step_timer.costs());
        let costs = self.journal.as_mut().map_or(measured, |journal| journal.costs(measured));
        costs.into_iter().for_each(|costs| self.scheduler.set_costs(costs));
    }
}
