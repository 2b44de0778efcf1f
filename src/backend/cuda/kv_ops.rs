//! The operations of the KV cache.

use super::CudaBackend;
use super::attention::NewTokens;
use super::buffer::Buf;
use super::function::{Shape, WARP, launch};
use super::host::Host;
use super::inputs::Inputs;
use super::kernels::pairs_number;
use super::kv::{self, Kv};
use crate::backend::{AttentionShape, KvOps, KvShape, RotaryEmbedding, Values};
use crate::error::{Error, Result};
use crate::types::batch::{BlockCopy, BlockMove, Tail};

/// Warps of a block that stores K and V, each of which stores one head.
const STORING_WARPS: usize = 4;

impl CudaBackend {
    /// Returns how the rows of a batch are rotated and where they are stored.
    pub(super) fn new_tokens(&self, inputs: &Inputs, turn: Option<RotaryEmbedding<Buf>>) -> NewTokens {
        let slots = inputs.address(inputs.slots);
        turn.map_or(NewTokens { slots, ..NewTokens::STORED }, |turn| NewTokens {
            angles: self.input(turn.angles),
            slots,
            rotated: turn.rotated as u32,
            pairs: pairs_number(turn.pairs),
        })
    }
}

impl KvOps for CudaBackend {
    fn kv(&self, shape: KvShape) -> Result<Kv> {
        Kv::new(&self.device, shape, self.copies_boxes && self.can_copy_boxes(&shape))
    }

    fn kv_block_bytes(&self, shape: &KvShape) -> u64 {
        kv::block_bytes(shape)
    }

    fn kv_part_bytes(&self, layer: &Kv) -> [usize; 2] {
        // K and V of a block are stored together.
        [layer.block_bytes() as usize, 0]
    }

    fn kv_layout(&self, layer: &Kv) -> String {
        layer.layout()
    }

    fn store_kv(
        &self,
        inputs: &Inputs,
        group: usize,
        shape: &AttentionShape,
        turn: Option<RotaryEmbedding<Buf>>,
        qkv: &mut Buf,
        kv: &mut Kv,
    ) {
        let KvShape { block_size, dtype, .. } = kv.shape;
        let own = shape.values == Values::Own;
        let (heads, halves) = (if own { shape.heads } else { 0 }, kv::halves(&kv.shape));
        let NewTokens { angles, slots, rotated, pairs } = self.new_tokens(inputs, turn);
        let blocks = (heads + halves * shape.kv_heads).div_ceil(STORING_WARPS);
        let launched = Shape::new((inputs.rows, blocks as u32, 1), (STORING_WARPS * WARP) as u32);
        launch!(
            self.device,
            self.device.kernels.cache.store_kv(dtype),
            launched,
            kv.address(),
            self.input(qkv),
            angles,
            slots,
            heads as u32,
            shape.kv_heads as u32,
            halves as u32,
            shape.head_dim as u32,
            rotated,
            pairs,
            block_size.ilog2(),
            inputs.groups,
            group as u32,
        );
    }

    fn copy_blocks(&self, copies: &[BlockCopy], layers: &mut [Kv]) {
        if copies.is_empty() {
            return;
        }
        let pairs = copies.iter().map(|&BlockCopy { from, to }| (from, to));
        let copied = self.pool(layers).and_then(|pool| self.move_blocks(pairs, layers, pool, pool));
        copied.unwrap_or_else(|error| self.device.refuse(error));
    }

    fn host(&self, blocks: usize, block_bytes: u64) -> Result<Host> {
        Host::new(&self.device, blocks, block_bytes)
    }

    fn host_block<'a>(&self, host: &'a mut Host, block: usize) -> &'a mut [u8] {
        host.block(block)
    }

    fn swap_out(&self, moves: &[BlockMove], layers: &[Kv], host: &mut Host) -> Result<()> {
        let tier = self.host_tier(host.address_for(moves)?, layers)?;
        let pairs = moves.iter().map(|&BlockMove { device, host }| (device, host));
        self.move_blocks(pairs, layers, self.pool(layers)?, tier)?;
        self.device.wait()
    }

    fn swap_in(&self, moves: &[BlockMove], host: &mut Host, layers: &mut [Kv]) -> Result<()> {
        let tier = self.host_tier(host.address_for(moves)?, layers)?;
        let pairs = moves.iter().map(|&BlockMove { device, host }| (host, device));
        self.move_blocks(pairs, layers, tier, self.pool(layers)?)?;
        self.device.wait()
    }

    fn read_blocks(&self, blocks: &[u32], tail: Tail, layer: &Kv, out: &mut Vec<u8>) -> Result<()> {
        layer.read(&self.device, blocks, tail, out)
    }

    fn write_blocks<'a>(&self, blocks: &[u32], layer: &mut Kv, bytes: &'a [u8]) -> Result<&'a [u8]> {
        layer.write(&self.device, blocks, bytes)
    }

    fn discard_blocks(&self, _from: usize, _layer: &mut Kv) -> Result<()> {
        Err(Error::unsupported("a CUDA device cannot release part of the KV pool"))
    }
}
