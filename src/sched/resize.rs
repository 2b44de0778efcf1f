//! A pool of another size: who gives way when it shrinks.

use super::{GroupId, Scheduler};
use crate::batch::BlockCopy;
use crate::error::Result;

impl Scheduler {
    /// Between steps: sees to it that no more than `total` blocks are in use, and lists the moves after which they have the lowest
    /// numbers. What is only cached goes first, then what idle and waiting sequences hold, then the youngest who run are preempted.
    pub fn make_smaller(&mut self, total: usize, moves: &mut Vec<BlockCopy>) -> Result<()> {
        while self.blocks.used_blocks() > total && self.someone_gives_way() {}
        self.blocks.plan_moves(total, moves)
    }

    fn someone_gives_way(&mut self) -> bool {
        if self.blocks.idle_blocks() > 0 && self.one_gives_way() {
            return true;
        }
        if self.running.len() < 2 && self.unpin_lowest(GroupId::MAX) {
            return true;
        }
        let runs = !self.running.is_empty();
        if runs {
            self.preempt_youngest();
        }
        // What rests together with somebody who ran is nobody else's now.
        runs || self.one_gives_way()
    }

    /// The moves are made.
    pub fn shrink(&mut self, total: usize, moves: &[BlockCopy]) {
        self.blocks.shrink(total, moves, self.sequences.values_mut().map(|sequence| &mut sequence.table));
    }

    pub fn grow(&mut self, total: usize) {
        self.blocks.grow(total);
    }

    /// Blocks that the next step may take from the pool, those of a prompt that waits included: none where nobody has anything to do.
    pub fn next_need(&self) -> usize {
        if self.running.is_empty() && self.waiting.first().is_none() && self.paused.first().is_none() {
            return 0;
        }
        let rows = self.blocks.paging().entries(self.options.max_batch_tokens);
        let first = self.waiting.first().map_or(0, |id| self.needed(id));
        rows.max(first) + self.options.max_seqs * self.blocks.paging().groups() + self.watermark()
    }
}
