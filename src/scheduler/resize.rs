//! Resizing of the pool.

use super::{GroupId, Scheduler};
use crate::error::Result;
use crate::types::batch::BlockCopy;

impl Scheduler {
    /// Reduces the number of used blocks to `total` between steps, and lists the moves to the
    /// lowest block numbers.
    ///
    /// Transfers to a host tier in memory are not limited. Sequences that a tier in a file cannot
    /// take at once are recomputed. Cached blocks are evicted first. Then idle and
    /// waiting sequences lose their blocks. Then the youngest running groups are preempted.
    pub fn shrink_pool(&mut self, total: usize, moves: &mut Vec<BlockCopy>) -> Result<()> {
        self.blocks.lift_limit_out();
        self.blocks.schedule_moves_out();
        while self.blocks.used_blocks() > total && (self.drop_queued_out() || self.free_some_blocks()) {}
        self.blocks.plan_moves(total, moves)
    }

    fn free_some_blocks(&mut self) -> bool {
        if self.blocks.idle_blocks() > 0 && self.reclaim_one() {
            return true;
        }
        if self.queues.running.len() < 2 && self.unpin_lowest(GroupId::MAX) {
            return true;
        }
        let runs = !self.queues.running.is_empty();
        if runs {
            self.preempt_youngest();
        }
        // Without a running group, shared blocks of reclaimable sequences become available too.
        runs || self.reclaim_one()
    }

    /// Applies the completed moves.
    pub fn shrink(&mut self, total: usize, moves: &[BlockCopy]) {
        self.blocks.shrink(total, moves, self.sequences.values_mut().map(|sequence| &mut sequence.table));
    }

    pub fn grow(&mut self, total: usize) {
        self.blocks.grow(total);
    }

    /// Returns the number of blocks that the next step may take from the pool, including the prompt
    /// of the first waiting group. 0 if no group can run.
    pub fn next_need(&self) -> usize {
        if self.queues.running.is_empty() && self.queues.waiting.first().is_none() && self.queues.paused.first().is_none() {
            return 0;
        }
        let rows = self.blocks.paging().entries(self.options.max_batch_tokens);
        let first = self.queues.waiting.first().map_or(0, |id| self.blocks_needed(id));
        rows.max(first) + self.options.max_seqs * self.blocks.paging().groups() + self.watermark()
    }
}
