//! The KV pool of one layer, in blocks.
//!
//! A block holds its keys and then its values, each head by head, and each head token by token. In
//! int8 and fp8, a head is followed by one f32 scale per token. With `Values::OfKeys`, a block
//! holds only the keys. A block is contiguous, so it can be copied without knowledge of its
//! contents.

use super::device::Device;
use super::memory::{Address, Memory};
use super::tensor_map::KvBoxes;
use crate::backend::{KvShape, Values};
use crate::error::{Error, Result};
use crate::types::batch::Tail;

pub struct Kv {
    pub shape: KvShape,
    /// The boxes that prefill attention copies.
    pub boxes: KvBoxes,
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
    /// `copies_boxes`: prefill attention copies boxes of the pool.
    pub fn new(device: &Device, shape: KvShape, copies_boxes: bool) -> Result<Kv> {
        if shape.head_dim > MAX_HEAD_DIM {
            return Err(Error::unsupported(format!(
                "head_dim is too large for CUDA devices ({}, limit {MAX_HEAD_DIM}); set device to \"cpu\"",
                shape.head_dim
            )));
        }
        let memory = device.memory(block_bytes(&shape) * shape.blocks as u64)?;
        let boxes = if copies_boxes { KvBoxes::new(device, memory.address(), &shape)? } else { KvBoxes::NONE };
        Ok(Kv { shape, boxes, memory })
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
