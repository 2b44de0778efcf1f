//! Blocks on their way between the tiers, and what that costs.

use std::time::Duration;

use super::core::{Core, stream_of};
use crate::sched::{Costs, StepPlan};

impl Core {
    /// The next step of the groups that may take part, with every block where the plan counts on it. Who could not be brought
    /// back will be computed again, and then there is another plan.
    pub(super) fn plan(&mut self, may: impl Fn(u64) -> bool) -> Option<StepPlan> {
        loop {
            let (streams, beams, journal) = (&self.streams, &self.beams, &self.journal);
            let has_room = |seq| stream_of(streams, beams, seq).is_none_or(|stream| !stream.outbox.is_full());
            let ready = |seq| may(seq) && journal.as_ref().map_or_else(|| has_room(seq), |journal| journal.ready(has_room(seq)));
            let plan = self.scheduler.schedule(ready);
            let (out, back) = self.try_moves();
            if !back {
                plan.into_iter().for_each(|plan| self.scheduler.rollback(plan));
                self.scheduler.moved(out, back);
                continue;
            }
            self.scheduler.moved(out, back);
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
        if self.scheduler.get(seq).is_ok_and(|sequence| sequence.table.swapped()) {
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
        let began = self.meter.as_ref().map(|_| self.shared.clock.now());
        let out = moves.out.is_empty() || self.runner.swap_out(&moves.out).is_ok();
        let back = moves.back.is_empty() || self.runner.swap_in(&moves.back).is_ok();
        let (out, back) = self.journal.as_mut().map_or((out, back), |journal| journal.moved(out, back));
        if let (Some(meter), Some(began)) = (&mut self.meter, began) {
            meter.moved(moves.out.len() + moves.back.len(), self.shared.clock.now().saturating_sub(began));
        }
        self.counts.blocks_swapped_out += if out { moves.out.len() as u64 } else { 0 };
        self.counts.blocks_swapped_in += if back { moves.back.len() as u64 } else { 0 };
        self.counts.swap_failures += !out as u64 + !back as u64;
        (out, back)
    }

    /// The one place where the scheduler is told of time.
    pub(super) fn tell_costs(&mut self) {
        let measured = self.meter.as_ref().map(Meter::costs);
        let costs = self.journal.as_mut().map_or(measured, |journal| journal.costs(measured));
        costs.into_iter().for_each(|costs| self.scheduler.set_costs(costs));
    }
}

/// What moving and computing have taken so far, by the clock.
#[derive(Debug, Default)]
pub struct Meter {
    moves: Rate,
    prompts: Rate,
}

#[derive(Debug, Default)]
struct Rate {
    things: f64,
    seconds: f64,
}

impl Rate {
    fn add(&mut self, things: f64, seconds: f64) {
        self.things += things;
        self.seconds += seconds;
    }

    /// 0 before the first.
    fn seconds_each(&self) -> f64 {
        if self.things > 0.0 { self.seconds / self.things } else { 0.0 }
    }
}

impl Meter {
    fn moved(&mut self, blocks: usize, time: Duration) {
        self.moves.add(blocks as f64, time.as_secs_f64());
    }

    /// Of a step that does several things, prompts take their share of the rows.
    pub fn computed(&mut self, plan: &StepPlan, time: Duration) {
        let rows = plan.parts.iter().map(|part| part.rows).sum::<usize>().max(1) as f64;
        let prompts = plan.parts.iter().filter(|part| part.rows > 1).map(|part| part.rows).sum::<usize>() as f64;
        self.prompts.add(prompts, time.as_secs_f64() * prompts / rows);
    }

    fn costs(&self) -> Costs {
        Costs { block: self.moves.seconds_each(), token: self.prompts.seconds_each() }
    }
}
