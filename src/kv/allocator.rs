use super::{BlockId, NoSpace};
use crate::error::{Result, try_vec};

/// Free list and reference counts of one tier.
#[derive(Debug)]
pub struct BlockAllocator {
    free: Vec<BlockId>, // the last is given out next
    refs: Vec<u32>,     // [blocks] 0 while free or cached
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

    pub fn refs(&self, block: BlockId) -> u32 {
        self.refs[block as usize]
    }

    /// A block that nobody refers to yet.
    pub fn take(&mut self) -> std::result::Result<BlockId, NoSpace> {
        self.free.pop().ok_or(NoSpace)
    }

    pub fn give_back(&mut self, block: BlockId) {
        assert_eq!(self.refs(block), 0, "block {block} is still in use");
        self.free.push(block);
    }

    pub fn acquire(&mut self, block: BlockId) {
        self.refs[block as usize] += 1;
    }

    /// True when that was the last reference.
    pub fn release(&mut self, block: BlockId) -> bool {
        let refs = &mut self.refs[block as usize];
        assert!(*refs > 0, "block {block} is released twice");
        *refs -= 1;
        *refs == 0
    }

    /// Panics unless `owners` is what the counts say, and every block is referred to, cached or free. For tests.
    pub fn check(&self, owners: &[u32], cached: impl Fn(BlockId) -> bool) {
        assert_eq!(owners, self.refs, "owners and reference counts differ");
        let mut free = vec![false; self.total()];
        for &block in &self.free {
            assert!(!std::mem::replace(&mut free[block as usize], true), "block {block} is twice in the free list");
        }
        for block in 0..self.total() as BlockId {
            let states = [owners[block as usize] > 0, cached(block), free[block as usize]];
            assert_eq!(states.iter().filter(|&&state| state).count(), 1, "block {block}: used, cached, free are {states:?}");
        }
    }
}
