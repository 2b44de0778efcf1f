//! Selection of attention kernels, and the number of splits.

use super::buffer::{Buf, address_of};
use super::device::Device;
use super::function::{Shape, launch};
use super::inputs::{DECODE_TILE, InputRange, Inputs, PREFILL_TILE};
use super::kernels::TensorAttention;
use super::kv::Kv;
use super::memory::{Address, Memory};
use crate::backend::{AttentionShape, Values};
use crate::error::Error;

/// Threads per block, except in decode on tensor cores.
const THREADS: u32 = 128;

/// The arguments of a layer's attention.
pub struct Args<'a> {
    pub inputs: &'a Inputs,
    pub group: usize,
    pub shape: &'a AttentionShape,
    pub slopes: Address,
    pub sinks: Option<&'a Buf>,
    pub qkv: &'a Buf,
    pub kv: &'a Kv,
    pub out: &'a Buf,
}

pub fn heads_per_kv(shape: &AttentionShape) -> u32 {
    (shape.heads / shape.kv_heads) as u32
}

/// Returns the number of thread blocks that occupy the device: three per multiprocessor.
fn wave(device: &Device) -> u32 {
    3 * device.multiprocessors
}

/// Returns the maximum bytes of partial results: sums, maximum score and weight for each query of
/// each split.
pub fn partial_bytes(device: &Device, shape: &AttentionShape) -> u64 {
    u64::from(wave(device)) * u64::from(heads_per_kv(shape).min(DECODE_TILE)) * (shape.head_dim as u64 + 2) * size_of::<f32>() as u64
}

/// Launches an attention kernel over some tiles. Only some kernels take the arguments in brackets.
macro_rules! attend {
    ($args:ident, $device:ident, $function:expr, $shape:expr, $tiles:expr, [$($dims:expr),*], [$($parts:expr),*]) => {{
        let Args { inputs, group, shape, slopes, sinks, qkv, kv, out } = $args;
        launch!(
            $device,
            $function,
            $shape,
            out.address(),
            qkv.address(),
            kv.address(),
            inputs.address($tiles),
            inputs.address(inputs.positions),
            inputs.address(inputs.tables),
            *slopes,
            address_of(*sinks),
            shape.row_width() as u32,
            shape.heads as u32,
            shape.kv_heads as u32,
            $($dims,)*
            kv.shape.block_size.ilog2(),
            inputs.groups,
            *group as u32,
            shape.window.unwrap_or(0) as u32,
            shape.scale,
            shape.soft_cap.unwrap_or(0.0),
            $($parts),*
        )
    }};
}

impl Args<'_> {
    pub fn run(&self, device: &Device, partial: Option<&Memory>) {
        let Some(tiles) = self.inputs.tiles(heads_per_kv(self.shape)) else {
            return device.refuse(Error::internal("no tiles for this shape of attention"));
        };
        let tensor = device.kernels.attention.tensor(self.kv.shape.dtype, self.shape.head_dim);
        match (tensor.filter(|_| self.shape.values == Values::Own), partial) {
            (Some(tensor), Some(partial)) => {
                self.prefill(device, tensor, tiles.prefill);
                self.decode(device, tensor, tiles.decode, partial);
            }
            // In batch-invariant mode, one kernel processes all rows, so that a row has the same
            // bits in every batch.
            (Some(tensor), None) => self.prefill(device, tensor, tiles.all),
            (None, _) => self.plain(device, tiles.all),
        }
    }

    /// Sequences with more than one row, or all sequences.
    fn prefill(&self, device: &Device, kernels: TensorAttention, tiles: InputRange) {
        let shape = Shape { shared: kernels.prefill_shared, ..self.shape_of(tiles, 1, THREADS) };
        attend!(self, device, kernels.prefill, shape, tiles, [], []);
    }

    /// Sequences with one row. If they are too few to occupy the device, each is split, and the
    /// parts are merged.
    fn decode(&self, device: &Device, kernels: TensorAttention, tiles: InputRange, partial: &Memory) {
        let splits = self.splits(device, tiles);
        let max_len = self.inputs.address(self.inputs.max_decode_len);
        let shape = Shape { shared: kernels.decode_shared, ..self.shape_of(tiles, splits, kernels.decode_threads) };
        attend!(self, device, kernels.decode, shape, tiles, [], [partial.address(), max_len]);
        if splits > 1 {
            self.merge(device, tiles, splits, partial);
        }
    }

    fn merge(&self, device: &Device, tiles: InputRange, splits: u32, partial: &Memory) {
        let shape = self.shape_of(tiles, heads_per_kv(self.shape).min(DECODE_TILE), THREADS);
        let (heads, kv_heads, dim) = (self.shape.heads as u32, self.shape.kv_heads as u32, self.shape.head_dim as u32);
        let (tiles, max_len) = (self.inputs.address(tiles), self.inputs.address(self.inputs.max_decode_len));
        let (sinks, out) = (address_of(self.sinks), self.out.address());
        launch!(device, device.kernels.attention.merge, shape, out, partial.address(), tiles, sinks, max_len, heads, kv_heads, dim, splits);
    }

    /// Heads of any width, and K and V of any type.
    fn plain(&self, device: &Device, tiles: InputRange) {
        let (head_dim, value_dim) = (self.shape.head_dim as u32, self.shape.value_dim() as u32);
        let sharing = (wave(device) / (tiles.count * self.shape.kv_heads as u32).max(1)).clamp(1, PREFILL_TILE);
        let shape = self.shape_of(tiles, sharing, THREADS);
        attend!(self, device, device.kernels.attention.plain(self.kv.shape.dtype), shape, tiles, [head_dim, value_dim], []);
    }

    /// Returns a grid of tiles, KV heads and `more`.
    fn shape_of(&self, tiles: InputRange, more: u32, threads: u32) -> Shape {
        Shape::new((tiles.count, self.shape.kv_heads as u32, more), threads)
    }

    /// Returns the number of splits per sequence that occupies the device. Kernels use fewer for
    /// short sequences.
    fn splits(&self, device: &Device, tiles: InputRange) -> u32 {
        let blocks = (tiles.count * self.shape.kv_heads as u32).max(1);
        (wave(device) / blocks).max(1)
    }
}
