//! The host tier: KV blocks in pinned memory or in a file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::device::Device;
use super::memory::{Address, Pinned};
use crate::error::{Error, Result};
use crate::sys::files;
use crate::types::batch::BlockMove;

/// The host tier: blocks with all their levels, one after the other.
pub struct Host {
    pub block_bytes: u64,
    pub blocks: usize,
    store: Store,
}

enum Store {
    /// Pinned memory, which the device accesses directly.
    Memory(Pinned),
    /// The file, and a buffer for one block.
    File(File, Pinned),
}

impl Host {
    pub fn new(device: &Device, blocks: usize, block_bytes: u64, dir: Option<&Path>) -> Result<Host> {
        let bytes = block_bytes.checked_mul(blocks as u64).ok_or_else(Error::out_of_memory)?;
        let store = match dir {
            None => Store::Memory(device.pinned(usize::try_from(bytes).map_err(|_| Error::out_of_memory())?, "lower swap_bytes")?),
            Some(dir) => Store::File(files::nameless(dir, bytes)?, device.pinned(block_bytes as usize, "lower block_size")?),
        };
        Ok(Host { block_bytes, blocks, store })
    }

    /// Moves blocks to the host tier. `copy` copies them from the device to the tier that begins at
    /// the given address.
    pub fn take(&mut self, moves: &[BlockMove], mut copy: impl FnMut(&[BlockMove], Address) -> Result<()>) -> Result<()> {
        self.check(moves)?;
        match &mut self.store {
            Store::Memory(pinned) => copy(moves, pinned.address()),
            Store::File(file, pinned) => moves.iter().try_for_each(|&BlockMove { device, host }| {
                copy(&[BlockMove { device, host: 0 }], pinned.address())?;
                file.write_all_at(pinned.bytes(), u64::from(host) * self.block_bytes).map_err(|e| failed("written", e))
            }),
        }
    }

    /// Moves blocks back to the device. `copy` copies them from the tier that begins at the given
    /// address.
    pub fn give(&mut self, moves: &[BlockMove], mut copy: impl FnMut(&[BlockMove], Address) -> Result<()>) -> Result<()> {
        self.check(moves)?;
        match &mut self.store {
            Store::Memory(pinned) => copy(moves, pinned.address()),
            Store::File(file, pinned) => moves.iter().try_for_each(|&BlockMove { device, host }| {
                file.read_exact_at(pinned.bytes_mut(), u64::from(host) * self.block_bytes).map_err(|e| failed("read", e))?;
                copy(&[BlockMove { device, host: 0 }], pinned.address())
            }),
        }
    }

    fn check(&self, moves: &[BlockMove]) -> Result<()> {
        match moves.iter().find(|BlockMove { host, .. }| *host as usize >= self.blocks) {
            Some(BlockMove { host, .. }) => {
                Err(Error::internal(format!("host block {host} is outside the host tier of {} blocks", self.blocks)))
            }
            None => Ok(()),
        }
    }
}

fn failed(what: &str, e: std::io::Error) -> Error {
    Error::io(format!("the swap file cannot be {what}: {e}"))
}
