//! A queue of blocks.

use std::collections::VecDeque;

use crate::error::{Result, try_vec};
use crate::kv::BlockId;

/// Blocks in the order in which they were added, each at most once. It never allocates after its
/// creation.
#[derive(Debug)]
pub struct BlockQueue {
    blocks: VecDeque<BlockId>,
    /// [blocks] Whether the block is in the queue.
    is_queued: Vec<bool>,
}

impl BlockQueue {
    /// Creates a queue for blocks below `total`.
    pub fn new(total: usize) -> Result<BlockQueue> {
        let mut blocks = VecDeque::new();
        blocks.try_reserve_exact(total)?;
        Ok(BlockQueue { blocks, is_queued: try_vec(total, false)? })
    }

    /// Appends a block. A block that is in the queue keeps its place.
    pub fn push(&mut self, block: BlockId) {
        if !std::mem::replace(&mut self.is_queued[block as usize], true) {
            self.blocks.push_back(block);
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = BlockId> {
        self.blocks.iter().copied()
    }

    /// Removes blocks up to the first one that is wanted, and returns that one.
    pub fn pop_if(&mut self, is_wanted: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        while let Some(block) = self.blocks.pop_front() {
            self.is_queued[block as usize] = false;
            if is_wanted(block) {
                return Some(block);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_leave_in_their_order_and_unwanted_ones_are_dropped() {
        let mut queue = BlockQueue::new(4).unwrap();
        [3, 1, 3, 0].into_iter().for_each(|block| queue.push(block));
        assert_eq!(queue.pop_if(|block| block != 3), Some(1));
        queue.push(3);
        assert_eq!([queue.pop_if(|_| true), queue.pop_if(|_| true), queue.pop_if(|_| true)], [Some(0), Some(3), None]);
    }
}
