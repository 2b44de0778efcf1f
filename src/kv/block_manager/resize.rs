//! Resizing of the pool. Before a shrink, blocks in use move to lower numbers.

use super::{BlockManager, BlockTable};
use crate::error::Result;
use crate::kv::BlockId;
use crate::types::batch::BlockCopy;

impl BlockManager {
    /// Evicts cached blocks until at most `total` blocks hold data, and lists the moves after which
    /// these blocks have numbers below `total`.
    ///
    /// At most `total` blocks may be in use. `shrink` must be called after the moves have been
    /// made.
    pub fn plan_moves(&mut self, total: usize, moves: &mut Vec<BlockCopy>) -> Result<()> {
        moves.clear();
        assert!(self.used_blocks() <= total, "the new size is below the blocks in use");
        moves.try_reserve(self.total().saturating_sub(total))?;
        while self.used_blocks() + self.cached_blocks() > total {
            let Ok(block) = self.evict() else { break };
            self.filled[block as usize] = 0;
            self.block_pool.put(block);
        }
        let holds =
            |block: &BlockId| self.block_pool.refs(*block) > 0 || self.prefix.as_ref().is_some_and(|prefix| prefix.is_unused(*block));
        let mut free = (0..total as BlockId).filter(|block| !holds(block));
        for from in (total as BlockId..self.total() as BlockId).filter(holds) {
            let to = free.next().expect("no free block below the new size");
            moves.push(BlockCopy { from, to });
        }
        Ok(())
    }

    /// Applies the moves of `plan_moves` and reduces the pool to `total` blocks.
    pub fn shrink<'a>(&mut self, total: usize, moves: &[BlockCopy], tables: impl Iterator<Item = &'a mut BlockTable>) {
        for &BlockCopy { from, to } in moves {
            self.block_pool.relocate(from, to);
            self.filled[to as usize] = std::mem::take(&mut self.filled[from as usize]);
            self.host.relocate(from, to);
            if let Some(prefix) = &mut self.prefix {
                prefix.relocate(from, to);
            }
        }
        let moved = |block: BlockId| moves.binary_search_by_key(&block, |copy| copy.from).map(|place| moves[place].to);
        for table in tables.filter(|table| !table.swapped()) {
            table.blocks.iter_mut().for_each(|block| *block = moved(*block).unwrap_or(*block));
        }
        self.block_pool.shrink(total, moves);
    }

    /// Grows the pool to `total` blocks. New blocks are free.
    pub fn grow(&mut self, total: usize) {
        self.block_pool.grow(total);
    }

    /// Returns the maximum number of blocks.
    pub fn capacity(&self) -> usize {
        self.block_pool.capacity()
    }
}
