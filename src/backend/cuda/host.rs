//! The host tier: KV blocks in pinned memory, which the device accesses directly.

use super::device::Device;
use super::memory::{Address, Pinned};
use crate::error::{Error, Result};
use crate::types::batch::BlockMove;

/// The host tier: blocks with all their levels, one after the other.
pub struct Host {
    pub block_bytes: u64,
    pub blocks: usize,
    pinned: Pinned,
}

impl Host {
    pub fn new(device: &Device, blocks: usize, block_bytes: u64) -> Result<Host> {
        let bytes =
            block_bytes.checked_mul(blocks as u64).and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(Error::out_of_memory)?;
        Ok(Host { block_bytes, blocks, pinned: device.pinned(bytes, "lower swap_bytes")? })
    }

    /// Returns the bytes of a block.
    pub fn block(&mut self, block: usize) -> &mut [u8] {
        let bytes = self.block_bytes as usize;
        &mut self.pinned.bytes_mut()[block * bytes..(block + 1) * bytes]
    }

    /// Returns the address of the tier, which has the blocks of all moves.
    pub fn address_for(&self, moves: &[BlockMove]) -> Result<Address> {
        match moves.iter().find(|BlockMove { host, .. }| *host as usize >= self.blocks) {
            Some(BlockMove { host, .. }) => {
                Err(Error::internal(format!("host block {host} is outside the host tier of {} blocks", self.blocks)))
            }
            None => Ok(self.pinned.address()),
        }
    }
}
