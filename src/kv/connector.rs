//! The interface to whatever holds blocks outside of the device pool: exported and imported
//! sequences, the host tier, and later external stores.
//!
//! A transfer goes out (device to holder) or in (holder to device). Its life has three parts:
//!
//! 1. The owner starts it, by a function of the implementation.
//! 2. The stepping thread copies its blocks in portions of bounded size (`Connector::copy`).
//! 3. Other threads may complete it: they encode, hash, or write to a store. The stepping thread
//!    never waits for them. They announce the id of the transfer, the inputs of a later step list
//!    it, and the step calls `Connector::complete`.
//!
//! `Connector::poll` returns the results. The ids in the inputs are the only decision that depends
//! on other threads, so a journal that has them can be replayed.

use super::BlockId;
use crate::error::Result;
use crate::types::batch::BlockMove;

/// The id of a transfer. Ids count up from 1 in the order of the starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TransferId(pub u64);

/// The blocks of the device pool and of its host tier, as a connector copies them.
pub trait DeviceBlocks {
    /// Appends the contents of a block to `out`. If `filled_slots` is set, the other slots are
    /// replaced by zeros, since they may hold data of other sequences.
    fn read_block(&mut self, block: BlockId, filled_slots: Option<usize>, out: &mut Vec<u8>) -> Result<()>;

    /// Replaces the contents of a block by bytes that `read_block` returned.
    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<()>;

    /// Copies blocks to the host tier. After an error, the contents of all target blocks are
    /// undefined.
    fn move_out(&mut self, moves: &[BlockMove]) -> Result<()>;

    /// Copies blocks back to the device.
    fn move_in(&mut self, moves: &[BlockMove]) -> Result<()>;
}

/// Something that holds blocks outside of the device pool.
pub trait Connector {
    /// The result of a transfer.
    type Finished;

    /// Copies the next portion of the transfers: at most `max_bytes` bytes, but at least one block.
    /// Returns the number of bytes. 0 means that no transfer has blocks to copy.
    fn copy(&mut self, device: &mut dyn DeviceBlocks, max_bytes: usize) -> usize;

    /// Completes a transfer that another thread has announced. The id may be that of a cancelled
    /// transfer. In a replay, the other thread may be slower than in the recording: then this call
    /// waits for it.
    fn complete(&mut self, id: TransferId);

    /// Returns the result of the next finished transfer, in the order in which they finished.
    fn poll(&mut self) -> Option<Self::Finished>;

    /// Returns what the started transfers need next.
    fn progress(&self) -> Progress;

    /// Cancels all transfers without results.
    fn cancel_all(&mut self);
}

/// What the transfers of a connector need next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Progress {
    /// No transfer is pending.
    Idle,
    /// All pending transfers are completed by other threads.
    Waiting,
    /// There are blocks that the stepping thread must copy.
    Copying,
}

/// The order of the bytes of several blocks in one byte string: array by array, and in each array
/// block by block. `read_block` returns the parts of one block in the order of the arrays.
#[derive(Debug, Clone, Default)]
pub struct BlockArrays {
    /// Bytes of one block in each array.
    parts: Vec<usize>,
    blocks: usize,
}

impl BlockArrays {
    /// Creates the order of `blocks` blocks. `parts` has the bytes of one block in each array.
    pub fn new(parts: Vec<usize>, blocks: usize) -> BlockArrays {
        BlockArrays { parts, blocks }
    }

    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.parts.iter().sum()
    }

    /// Returns the bytes of all blocks.
    pub fn total_bytes(&self) -> usize {
        self.block_bytes() * self.blocks
    }

    /// Returns the offset of each part of the block in the byte string, and its length.
    fn places(&self, block: usize) -> impl Iterator<Item = (usize, usize)> {
        let starts = self.parts.iter().scan(0, |end, &part| Some(std::mem::replace(end, *end + part * self.blocks)));
        starts.zip(&self.parts).map(move |(start, &part)| (start + block * part, part))
    }

    /// Calls `copy` for the blocks from `copied` on: as many as `max_bytes` bytes have, but at
    /// least one. Advances `copied`, and returns the number of bytes.
    pub fn copy_portion(&self, copied: &mut usize, max_bytes: usize, mut copy: impl FnMut(usize) -> Result<()>) -> Result<usize> {
        let first = *copied;
        while *copied < self.blocks && (*copied == first || (*copied - first + 1) * self.block_bytes() <= max_bytes) {
            copy(*copied)?;
            *copied += 1;
        }
        Ok((*copied - first) * self.block_bytes())
    }

    /// Copies the bytes of a block to its places in the byte string `all`.
    pub fn scatter(&self, block: usize, mut bytes: &[u8], all: &mut [u8]) {
        for (start, len) in self.places(block) {
            let (part, rest) = bytes.split_at(len);
            all[start..start + len].copy_from_slice(part);
            bytes = rest;
        }
    }

    /// Appends the bytes of a block from the byte string `all` to `bytes`.
    pub fn gather(&self, block: usize, all: &[u8], bytes: &mut Vec<u8>) {
        self.places(block).for_each(|(start, len)| bytes.extend_from_slice(&all[start..start + len]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_scattered_array_by_array_and_gathered_again() {
        let arrays = BlockArrays::new(vec![2, 0, 1], 3);
        let blocks = [[1, 2, 3], [4, 5, 6], [7, 8, 9]];
        let mut all = [0; 9];
        [2, 0, 1].into_iter().for_each(|block| arrays.scatter(block, &blocks[block], &mut all));
        assert_eq!(all, [1, 2, 4, 5, 7, 8, 3, 6, 9]);
        for (block, expected) in blocks.iter().enumerate() {
            let mut bytes = Vec::new();
            arrays.gather(block, &all, &mut bytes);
            assert_eq!(bytes, expected);
        }
        assert_eq!((arrays.block_bytes(), arrays.total_bytes()), (3, 9));
    }

    #[test]
    fn blocks_without_bytes_have_no_places() {
        let arrays = BlockArrays::new(Vec::new(), 4);
        arrays.scatter(3, &[], &mut []);
        assert_eq!(arrays.total_bytes(), 0);
    }

    #[test]
    fn copying_is_more_urgent_than_waiting() {
        assert!(Progress::Idle < Progress::Waiting && Progress::Waiting < Progress::Copying);
    }
}
