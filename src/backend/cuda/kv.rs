//! The KV cache of one layer, in blocks, and the host tier.
//!
//! A block holds its keys and then its values, each head by head, and each head token by token. In
//! int8 and fp8, a head is followed by one f32 scale per token. With `Values::OfKeys`, a block
//! holds only the keys. A block is contiguous, so it can be copied without knowledge of its
//! contents.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::context::Stream;
use super::device::{Address, Device, Memory, Pinned};
use crate::backend::{KvShape, Values};
use crate::batch::{BlockMove, Tail};
use crate::error::{Error, Result};
use crate::sys::files;

pub struct Kv {
    pub shape: KvShape,
    memory: Memory,
}

/// The limit of `kernels/attention.cu`.
const MAX_HEAD_DIM: usize = 576;

/// Returns the halves of a block: keys and values, or keys only.
pub fn halves(shape: &KvShape) -> usize {
    if shape.values == Values::Own { 2 } else { 1 }
}

pub fn block_bytes(shape: &KvShape) -> u64 {
    (halves(shape) * shape.block_size * shape.kv_heads * shape.dtype.head_bytes(shape.head_dim)) as u64
}

impl Kv {
    pub fn new(device: &Device, shape: KvShape) -> Result<Kv> {
        if shape.head_dim > MAX_HEAD_DIM {
            return Err(Error::unsupported(format!(
                "head_dim is too large for CUDA devices ({}, limit {MAX_HEAD_DIM}); set device to \"cpu\"",
                shape.head_dim
            )));
        }
        Ok(Kv { shape, memory: device.memory(block_bytes(&shape) * shape.blocks as u64)? })
    }

    pub fn address(&self) -> Address {
        self.memory.address()
    }

    pub fn block_bytes(&self) -> u64 {
        block_bytes(&self.shape)
    }

    /// Appends blocks, with zeros for the unused slots of the tail.
    pub fn read(&self, device: &Device, blocks: &[u32], tail: Tail, out: &mut Vec<u8>) -> Result<()> {
        let bytes = self.block_bytes();
        let (start, all) = (out.len(), blocks.len() * bytes as usize);
        out.try_reserve(all)?;
        out.resize(start + all, 0);
        for (i, &block) in blocks.iter().enumerate() {
            let part = &mut out[start + i * bytes as usize..][..bytes as usize];
            // SAFETY: `block` checks that the block is inside the pool, so it has `bytes` bytes.
            unsafe { device.read(self.block(block)?, part, std::iter::once((0..bytes as usize, 0)))? };
            if blocks.len() - i <= tail.blocks {
                self.blank(tail.slots, part);
            }
        }
        Ok(())
    }

    pub fn write<'a>(&mut self, device: &Device, blocks: &[u32], mut from: &'a [u8]) -> Result<&'a [u8]> {
        let bytes = self.block_bytes();
        for &block in blocks {
            let (part, rest) =
                from.split_at_checked(bytes as usize).ok_or_else(|| Error::invalid("the exported sequence is truncated in its K and V"))?;
            self.block(block)?;
            device.write(&self.memory, u64::from(block) * bytes, part)?;
            from = rest;
        }
        Ok(from)
    }

    fn block(&self, block: u32) -> Result<Address> {
        if block as usize >= self.shape.blocks {
            return Err(Error::internal(format!("block {block} is outside the pool of {} blocks", self.shape.blocks)));
        }
        Ok(self.address().at(u64::from(block) * self.block_bytes()))
    }

    /// Clears the slots of a block from `filled` on.
    fn blank(&self, filled: usize, block: &mut [u8]) {
        let KvShape { block_size, head_dim, dtype, .. } = self.shape;
        let (numbers, scale) = (head_dim * dtype.bytes(), dtype.scale_bytes());
        for head in block.chunks_exact_mut(block_size * dtype.head_bytes(head_dim)) {
            let (numbers_of, scales) = head.split_at_mut(block_size * numbers);
            numbers_of[filled * numbers..].fill(0);
            scales[filled * scale..].fill(0);
        }
    }

    pub fn layout(&self) -> String {
        let KvShape { block_size, kv_heads, head_dim, dtype, .. } = self.shape;
        let name = dtype.name();
        match self.shape.values {
            Values::Own => format!("cuda {name} [k and v,{kv_heads},{block_size},{head_dim}]"),
            Values::OfKeys(_) => format!("cuda {name} [{kv_heads},{block_size},{head_dim}]"),
        }
    }
}

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
