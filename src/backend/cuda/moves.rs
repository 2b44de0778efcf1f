//! Moves of blocks between and within the tiers.

use std::sync::PoisonError;

use super::CudaBackend;
use super::context::Stream;
use super::device::Device;
use super::function::{FLAT, Shape, launch};
use super::kv::Kv;
use super::memory::{Address, Memory, Pinned};
use super::tables::Key;
use crate::error::Result;

/// A buffer for block moves, from which kernels read them.
pub struct MoveList {
    memory: Memory,
    staging: Pinned,
    /// Number of moves in the buffer, which kernels may still read.
    sent: usize,
}

/// Capacity in moves.
const MOVES: usize = 4096;
const MOVE_BYTES: usize = size_of::<[u32; 2]>();

impl MoveList {
    pub fn new(device: &Device) -> Result<MoveList> {
        let bytes = MOVES * MOVE_BYTES;
        Ok(MoveList { memory: device.memory(bytes as u64)?, staging: device.pinned(bytes, "set device to \"cpu\"")?, sent: 0 })
    }

    /// Queues the copy of the next moves, as (from, to), after the previous ones. Returns their
    /// number and address. If the buffer is full, waits for the device first.
    pub fn send(&mut self, device: &Device, moves: &mut impl ExactSizeIterator<Item = (u32, u32)>) -> Result<(u32, Address)> {
        if self.sent + moves.len() > MOVES {
            device.wait()?;
            self.sent = 0;
        }
        let (first, count) = (self.sent, moves.len().min(MOVES));
        let places = self.staging.bytes_mut().as_chunks_mut::<MOVE_BYTES>().0;
        for (place, (from, to)) in places[first..first + count].iter_mut().zip(moves) {
            *place = (u64::from(from) | u64::from(to) << 32).to_le_bytes();
        }
        self.sent += count;
        let bytes = first * MOVE_BYTES..self.sent * MOVE_BYTES;
        device.send(Stream::Compute, &self.memory, &self.staging, bytes.clone());
        Ok((count as u32, self.memory.address().at(bytes.start as u64)))
    }
}

/// A tier of blocks, as `move_blocks` accesses it: lists with the base and the stride of each
/// level.
#[derive(Clone, Copy)]
pub struct Tier {
    bases: Address,
    strides: Address,
}

impl CudaBackend {
    /// Queues copies of blocks, with all levels of each.
    pub fn move_blocks(&self, mut moves: impl ExactSizeIterator<Item = (u32, u32)>, layers: &[Kv], from: Tier, to: Tier) -> Result<()> {
        let (device, Some(first)) = (&self.device, layers.first()) else { return Ok(()) };
        let bytes = self.tables.get(device, Key::Levels(first.address()), layers.iter().map(Kv::block_bytes))?;
        let mut list = self.moves.lock().unwrap_or_else(PoisonError::into_inner);
        while moves.len() > 0 {
            let (count, moves) = list.send(device, &mut moves)?;
            let shape = Shape::new((count, layers.len() as u32, 1), FLAT);
            launch!(device, device.kernels.cache.move_blocks, shape, to.bases, to.strides, from.bases, from.strides, bytes, moves);
        }
        Ok(())
    }

    /// Returns the tier of the blocks on the device.
    pub fn pool(&self, layers: &[Kv]) -> Result<Tier> {
        let start = layers.first().map_or(Address::NULL, Kv::address);
        Ok(Tier {
            bases: self.tables.get(&self.device, Key::Bases(start), layers.iter().map(|kv| kv.address().0))?,
            strides: self.tables.get(&self.device, Key::Strides(start), layers.iter().map(Kv::block_bytes))?,
        })
    }

    /// Returns the tier of blocks that begins at a host address, with all levels of a block one
    /// after the other.
    pub fn host_tier(&self, start: Address, layers: &[Kv]) -> Result<Tier> {
        let all: u64 = layers.iter().map(Kv::block_bytes).sum();
        let next = |at: &mut u64, kv: &Kv| Some(std::mem::replace(at, *at + kv.block_bytes()));
        Ok(Tier {
            bases: self.tables.get(&self.device, Key::Bases(start), layers.iter().scan(start.0, next))?,
            strides: self.tables.get(&self.device, Key::Strides(start), layers.iter().map(|_| all))?,
        })
    }
}
