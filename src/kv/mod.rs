//! Which block holds which tokens: a free list, block tables, and one rule for growing. Knows no bytes.

use crate::error::{Result, try_vec};

pub type BlockId = u32;

/// Blocks that `tokens` need: the one place that knows.
pub fn blocks_for(tokens: usize, block_size: usize) -> usize {
    tokens.div_ceil(block_size)
}

/// The pool cannot give what was asked for; nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoSpace;

/// Free list and reference counts of one tier.
#[derive(Debug)]
pub struct BlockAllocator {
    free: Vec<BlockId>, // the last is given out next
    refs: Vec<u32>,     // [blocks] 0 while free
}

impl BlockAllocator {
    pub fn new(blocks: usize) -> Result<BlockAllocator> {
        let mut free = try_vec(blocks, 0)?;
        // Low numbers first, so that an idle pool's pages stay untouched.
        free.iter_mut().enumerate().for_each(|(i, block)| *block = (blocks - 1 - i) as BlockId);
        Ok(BlockAllocator { free, refs: try_vec(blocks, 0)? })
    }

    pub fn total(&self) -> usize {
        self.refs.len()
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    fn allocate(&mut self) -> std::result::Result<BlockId, NoSpace> {
        let block = self.free.pop().ok_or(NoSpace)?;
        self.refs[block as usize] = 1;
        Ok(block)
    }

    fn release(&mut self, block: BlockId) {
        let refs = &mut self.refs[block as usize];
        assert!(*refs > 0, "block {block} is released twice");
        *refs -= 1;
        if *refs == 0 {
            self.free.push(block);
        }
    }
}

/// One sequence's blocks, in the order of its tokens.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
}

impl BlockTable {
    /// An empty table that will not have to allocate until it holds more than `blocks`.
    pub fn with_capacity(blocks: usize) -> Result<BlockTable> {
        let mut table = BlockTable::default();
        table.blocks.try_reserve_exact(blocks)?;
        Ok(table)
    }

    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// Grows and frees block tables over one allocator.
#[derive(Debug)]
pub struct BlockManager {
    allocator: BlockAllocator,
    block_size: usize,
}

impl BlockManager {
    pub fn new(blocks: usize, block_size: usize) -> Result<BlockManager> {
        Ok(BlockManager { allocator: BlockAllocator::new(blocks)?, block_size })
    }

    pub fn block_size(&self) -> usize {
        self.block_size
    }

    pub fn total(&self) -> usize {
        self.allocator.total()
    }

    pub fn free_blocks(&self) -> usize {
        self.allocator.free()
    }

    pub fn used_blocks(&self) -> usize {
        self.total() - self.free_blocks()
    }

    /// Makes the table cover `tokens`: all of it or nothing.
    pub fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> std::result::Result<(), NoSpace> {
        let missing = blocks_for(tokens, self.block_size).saturating_sub(table.blocks.len());
        if missing > self.allocator.free() {
            return Err(NoSpace);
        }
        for _ in 0..missing {
            table.blocks.push(self.allocator.allocate()?);
        }
        Ok(())
    }

    pub fn free(&mut self, table: &mut BlockTable) {
        for block in table.blocks.drain(..) {
            self.allocator.release(block);
        }
    }

    /// Where the token at `position` lies: block * block_size + offset.
    pub fn slot(&self, table: &BlockTable, position: usize) -> u32 {
        table.blocks[position / self.block_size] * self.block_size as u32 + (position % self.block_size) as u32
    }

    /// Panics unless the tables account for every used block exactly as often as it is counted. For tests.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        let mut owners = vec![0; self.total()];
        tables.flat_map(|table| &table.blocks).for_each(|&block| owners[block as usize] += 1);
        assert_eq!(owners, self.allocator.refs, "owners and reference counts differ");
        let free: std::collections::HashSet<_> = self.allocator.free.iter().collect();
        assert_eq!(free.len(), self.allocator.free.len(), "a block is twice in the free list");
        assert!(free.iter().all(|&&block| owners[block as usize] == 0), "a free block has an owner");
        assert_eq!(free.len() + owners.iter().filter(|&&n| n > 0).count(), self.total(), "a block is lost");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_grows_by_whole_blocks_only_when_tokens_need_them() {
        let mut manager = BlockManager::new(4, 16).unwrap();
        let mut table = BlockTable::default();
        for (tokens, blocks) in [(1, 1), (16, 1), (17, 2), (33, 3), (20, 3)] {
            manager.grow(&mut table, tokens).unwrap();
            assert_eq!(table.blocks().len(), blocks);
        }
        manager.check([&table].into_iter());
    }

    #[test]
    fn growing_beyond_the_pool_changes_nothing() {
        let mut manager = BlockManager::new(3, 8).unwrap();
        let mut table = BlockTable::default();
        manager.grow(&mut table, 8).unwrap();
        assert_eq!(manager.grow(&mut table, 32), Err(NoSpace));
        assert_eq!((table.blocks().len(), manager.free_blocks()), (1, 2));
        manager.free(&mut table);
        assert_eq!(manager.free_blocks(), 3);
        manager.check(std::iter::empty());
    }

    #[test]
    fn slots_follow_the_table() {
        let mut manager = BlockManager::new(8, 8).unwrap();
        let (mut a, mut b) = (BlockTable::default(), BlockTable::default());
        manager.grow(&mut a, 8).unwrap();
        manager.grow(&mut b, 8).unwrap();
        manager.grow(&mut a, 9).unwrap();
        assert_eq!([manager.slot(&a, 7), manager.slot(&b, 0), manager.slot(&a, 8)], [7, 8, 16]);
    }
}
