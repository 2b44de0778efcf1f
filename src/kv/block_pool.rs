use std::cell::Cell;

use super::{BlockId, NoSpace};
use crate::error::{Result, try_vec};
use crate::types::batch::BlockCopy;

/// The free list and the reference counts of one tier.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<BlockId>,         // the last element is allocated next
    refs: Vec<u32>,             // [capacity] 0 while the block is free or cached
    reclaimable_refs: Vec<u32>, // [capacity] number of `refs` from reclaimable tables
    /// Number of blocks that only reclaimable tables refer to.
    idle: usize,
    /// Current number of blocks. Blocks with higher numbers do not exist.
    total: usize,
    marks: Vec<Cell<u32>>, // [capacity] value of `count` when the block was marked
    count: Cell<u32>,
}

impl BlockPool {
    pub fn new(blocks: usize) -> Result<BlockPool> {
        let mut free = try_vec(blocks, 0)?;
        // Low numbers are allocated first, so that the pages of unused blocks stay untouched.
        free.iter_mut().enumerate().for_each(|(i, block)| *block = (blocks - 1 - i) as BlockId);
        let (refs, reclaimable, marks) = (try_vec(blocks, 0)?, try_vec(blocks, 0)?, try_vec(blocks, Cell::new(0))?);
        Ok(BlockPool { free, refs, reclaimable_refs: reclaimable, idle: 0, total: blocks, marks, count: Cell::new(0) })
    }

    pub fn total(&self) -> usize {
        self.total
    }

    /// Returns the maximum number of blocks.
    pub fn capacity(&self) -> usize {
        self.refs.len()
    }

    /// Sets the number of blocks to `total`. New blocks are free.
    pub fn grow(&mut self, total: usize) {
        // Low numbers are allocated first. The list has capacity for all blocks.
        self.free.splice(0..0, (self.total as BlockId..total as BlockId).rev());
        self.total = total;
    }

    /// Reduces the number of blocks to `total`. The target blocks of `moves` are no longer free.
    pub fn shrink(&mut self, total: usize, moves: &[BlockCopy]) {
        self.total = total;
        // The targets are the lowest free blocks in ascending order.
        self.free.retain(|&block| (block as usize) < total && moves.binary_search_by_key(&block, |copy| copy.to).is_err());
    }

    /// Transfers the references of block `from` to the unused block `to`.
    pub fn relocate(&mut self, from: BlockId, to: BlockId) {
        let (from, to) = (from as usize, to as usize);
        self.refs[to] = std::mem::take(&mut self.refs[from]);
        self.reclaimable_refs[to] = std::mem::take(&mut self.reclaimable_refs[from]);
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    pub fn refs(&self, block: BlockId) -> u32 {
        self.refs[block as usize]
    }

    /// Removes a block from the free list, without a reference.
    pub fn take(&mut self) -> std::result::Result<BlockId, NoSpace> {
        self.free.pop().ok_or(NoSpace)
    }

    pub fn put(&mut self, block: BlockId) {
        assert_eq!(self.refs(block), 0, "block {block} is still in use");
        if (block as usize) < self.total {
            self.free.push(block);
        }
    }

    /// Returns the number of blocks that only reclaimable tables refer to.
    pub fn reclaimable(&self) -> usize {
        self.idle
    }

    pub fn acquire(&mut self, block: BlockId) {
        self.idle -= self.is_reclaimable(block) as usize;
        self.refs[block as usize] += 1;
    }

    /// Releases a reference of a table that is not reclaimable. Returns true if it was the last
    /// one.
    pub fn release(&mut self, block: BlockId) -> bool {
        assert!(self.refs(block) > self.reclaimable_refs[block as usize], "block {block} is released twice");
        self.refs[block as usize] -= 1;
        self.idle += self.is_reclaimable(block) as usize;
        self.refs(block) == 0
    }

    /// Records that the table of one reference is reclaimable from now on.
    pub fn mark_reclaimable(&mut self, block: BlockId) {
        self.reclaimable_refs[block as usize] += 1;
        self.idle += self.is_reclaimable(block) as usize;
    }

    pub fn unmark_reclaimable(&mut self, block: BlockId) {
        self.idle -= self.is_reclaimable(block) as usize;
        self.reclaimable_refs[block as usize] -= 1;
    }

    /// Clears the marks of all blocks.
    pub fn unmark(&self) {
        self.count.set(self.count.get().wrapping_add(1));
        if self.count.get() == 0 {
            self.marks.iter().for_each(|mark| mark.set(0));
            self.count.set(1);
        }
    }

    /// Marks a block. Returns true if it was not marked, so that shared blocks are counted once.
    pub fn mark(&self, block: BlockId) -> bool {
        self.marks[block as usize].replace(self.count.get()) != self.count.get()
    }

    pub fn is_marked(&self, block: BlockId) -> bool {
        self.marks[block as usize].get() == self.count.get()
    }

    fn is_reclaimable(&self, block: BlockId) -> bool {
        self.refs(block) > 0 && self.refs(block) == self.reclaimable_refs[block as usize]
    }

    /// Panics unless the counts match `owners` and `reclaimable`, and every block is referenced,
    /// cached or free. For tests.
    pub fn check(&self, owners: &[u32], reclaimable: &[u32], cached: impl Fn(BlockId) -> bool) {
        assert_eq!(owners, self.refs, "the reference counts differ from the owners");
        assert_eq!(reclaimable, self.reclaimable_refs, "the counts of reclaimable owners differ from the owners");
        let idle = owners.iter().zip(reclaimable).filter(|(owners, reclaimable)| **owners > 0 && owners == reclaimable);
        assert_eq!(idle.count(), self.idle, "the number of idle blocks is wrong");
        let mut free = vec![false; self.capacity()];
        for &block in &self.free {
            assert!(!std::mem::replace(&mut free[block as usize], true), "block {block} is twice in the free list");
        }
        for block in 0..self.capacity() as BlockId {
            let states = [owners[block as usize] > 0, cached(block), free[block as usize]];
            let there_is = ((block as usize) < self.total) as usize;
            assert_eq!(states.iter().filter(|&&state| state).count(), there_is, "block {block}: used, cached, free are {states:?}");
        }
    }
}
