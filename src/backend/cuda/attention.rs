//! Selection and launches of attention kernels.

use super::device::Device;
use super::function::{Shape, launch};
use super::inputs::{DECODE_TILE, InputRange, Inputs, PREFILL_TILE, Tiles};
use super::kernels::{TensorAttention, dtype_number};
use super::kv::Kv;
use super::memory::{Address, Memory};
use crate::backend::{AttentionShape, Values};
use crate::error::Error;
use crate::types::options::Dtype;

/// Threads per block, except on tensor cores.
const THREADS: u32 = 128;

/// The arguments of a layer's attention.
pub struct Args<'a> {
    pub inputs: &'a Inputs,
    pub group: usize,
    pub shape: &'a AttentionShape,
    pub slopes: Address,
    pub sinks: Address,
    pub qkv: Address,
    pub kv: &'a Kv,
    pub out: Address,
    /// The type of `out`.
    pub stores: Dtype,
}

/// Returns the queries of a KV head that a decode tile has at most.
fn queries_per_tile(shape: &AttentionShape) -> u32 {
    shape.head_groups().each.min(DECODE_TILE)
}

/// Returns the maximum bytes of partial results: sums, maximum score and weight for each query of
/// each part. A sequence with several parts has at most twice as many as its share of the work.
pub fn partial_bytes(device: &Device, shape: &AttentionShape) -> u64 {
    let parts = 2 * u64::from(device.blocks_at_once());
    parts * u64::from(queries_per_tile(shape)) * (shape.head_dim as u64 + 2) * size_of::<f32>() as u64
}

/// Launches an attention kernel over some tiles. Only some kernels take the arguments in brackets.
macro_rules! attend {
    ($args:ident, $device:ident, $function:expr, $shape:expr, $tiles:expr, [$($dims:expr),*], [$($parts:expr),*]) => {{
        let Args { inputs, group, shape, slopes, sinks, qkv, kv, out, stores } = $args;
        launch!(
            $device,
            $function,
            $shape,
            *out,
            *qkv,
            kv.address(),
            inputs.address($tiles),
            inputs.address(inputs.positions),
            inputs.address(inputs.tables),
            *slopes,
            *sinks,
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
            dtype_number(*stores),
            $($parts),*
        )
    }};
}

impl Args<'_> {
    pub fn run(&self, device: &Device, partial: Option<&Memory>) {
        let Some(tiles) = self.inputs.tiles(self.shape.head_groups()) else {
            return device.refuse(Error::internal("no tiles for this shape of attention"));
        };
        let tensor = device.kernels.attention.tensor(self.kv.shape.dtype, self.shape.head_dim);
        match (tensor.filter(|_| self.shape.values == Values::Own), partial) {
            (Some(tensor), Some(partial)) => {
                self.prefill(device, tensor, tiles.prefill);
                self.decode(device, tensor, tiles, partial);
            }
            // In batch-invariant mode, one kernel processes all rows, so that a row has the same
            // bits in every batch.
            (Some(tensor), None) => self.prefill(device, tensor, tiles.all),
            (None, _) => self.plain(device, tiles.all),
        }
    }

    /// Sequences with more than one row, or all sequences.
    fn prefill(&self, device: &Device, kernels: TensorAttention, tiles: InputRange) {
        let (function, shape) = kernels.prefill.select(tiles.count, self.shape.kv_heads as u32);
        attend!(self, device, function, shape, tiles, [], []);
    }

    /// Sequences with one row. Long ones are divided into parts, whose results are merged.
    fn decode(&self, device: &Device, kernels: TensorAttention, tiles: Tiles, partial: &Memory) {
        let shape = Shape { shared: kernels.decode_shared, ..self.shape_of(tiles.parts, 1, kernels.decode_threads) };
        attend!(self, device, kernels.decode, shape, tiles.parts, [], [partial.address()]);
        // Recorded steps have more parts than tiles, whatever the sequences are.
        if tiles.parts.count > tiles.decode.count {
            self.merge(device, tiles.decode, partial);
        }
    }

    fn merge(&self, device: &Device, tiles: InputRange, partial: &Memory) {
        let shape = self.shape_of(tiles, queries_per_tile(self.shape), THREADS);
        let (heads, kv_heads, dim) = (self.shape.heads as u32, self.shape.kv_heads as u32, self.shape.head_dim as u32);
        let (tiles, stores) = (self.inputs.address(tiles), dtype_number(self.stores));
        launch!(
            device,
            device.kernels.attention.merge,
            shape,
            self.out,
            partial.address(),
            tiles,
            self.sinks,
            heads,
            kv_heads,
            dim,
            stores
        );
    }

    /// Heads of any width, and K and V of any type.
    fn plain(&self, device: &Device, tiles: InputRange) {
        let (head_dim, value_dim) = (self.shape.head_dim as u32, self.shape.value_dim() as u32);
        let sharing = (device.blocks_at_once() / (tiles.count * self.shape.kv_heads as u32).max(1)).clamp(1, PREFILL_TILE);
        let shape = self.shape_of(tiles, sharing, THREADS);
        attend!(self, device, device.kernels.attention.plain(self.kv.shape.dtype), shape, tiles, [head_dim, value_dim], []);
    }

    /// Returns a grid of tiles, KV heads and `more`.
    fn shape_of(&self, tiles: InputRange, more: u32, threads: u32) -> Shape {
        Shape::new((tiles.count, self.shape.kv_heads as u32, more), threads)
    }
}
