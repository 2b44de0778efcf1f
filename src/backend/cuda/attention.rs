//! Selection and launches of attention kernels.

use super::attention_kernels::{LatentAttention, Prefill, TensorAttention};
use super::device::Device;
use super::function::{Shape, launch};
use super::inputs::{InputRange, Inputs, PREFILL_TILE, Tiles, decode_blocks, decode_tile};
use super::kernels::dtype_number;
use super::kv::Kv;
use super::memory::{Address, Memory};
use super::tensor_map::KvBoxes;
use crate::backend::{AttentionShape, KvShape, Values};
use crate::error::{Error, Result};
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
    pub new_tokens: NewTokens,
}

/// How the decode kernel rotates and stores the rows of its step (`NewTokens` in
/// `kernels/attention_decode.cuh`). Without slots, `store_kv` has done both.
#[derive(Debug, Clone, Copy)]
pub struct NewTokens {
    pub angles: Address,
    pub slots: Address,
    pub rotated: u32,
    pub pairs: u32,
}

impl NewTokens {
    pub const STORED: NewTokens = NewTokens { angles: Address::NULL, slots: Address::NULL, rotated: 0, pairs: 0 };
}

/// The results of parts of sequences, before they are merged: a counter of each result, and behind
/// the counters the results.
pub struct PartialResults(Memory);

impl PartialResults {
    /// Returns the maximum number of results of all KV heads if `blocks` blocks run at once. A sequence
    /// with several parts has at most twice as many as its share of the work.
    fn max(blocks: u32) -> u64 {
        2 * u64::from(blocks)
    }

    /// Returns the bytes of the counters. The results behind them are aligned to 16 bytes.
    fn counter_bytes(device: &Device) -> u64 {
        (PartialResults::max(device.blocks_at_once()) * size_of::<u32>() as u64).next_multiple_of(16)
    }

    /// Returns the bytes for layers of this shape. A result has sums, maximum score and weight of
    /// each query, and 8 bytes of padding.
    pub fn bytes(device: &Device, shape: &AttentionShape) -> u64 {
        if shape.values != Values::Own && !is_latent(shape) {
            return 0; // the plain kernel has no parts
        }
        let results = PartialResults::max(decode_blocks(shape.head_groups(), device.blocks_at_once()));
        let result = u64::from(queries_per_tile(shape)) * (shape.value_dim() as u64 + 4) * size_of::<f32>() as u64;
        PartialResults::counter_bytes(device) + results * result
    }

    /// Makes `results` large enough for layers of this shape.
    ///
    /// The counters are 0 between launches: a launch that ends has reset them, and one that does not
    /// end loses the context with this memory. So they are zeroed here only.
    pub fn reserve(results: &mut Option<PartialResults>, device: &Device, shape: &AttentionShape) -> Result<()> {
        let bytes = PartialResults::bytes(device, shape);
        if bytes > 0 && results.as_ref().is_none_or(|PartialResults(memory)| memory.bytes() < bytes) {
            let mut memory = results.take().map(|PartialResults(memory)| memory);
            device.clear(device.grow(&mut memory, bytes)?, PartialResults::counter_bytes(device));
            device.check()?;
            *results = memory.map(PartialResults);
        }
        Ok(())
    }

    /// Returns the addresses of the counters and of the results.
    fn addresses(&self, device: &Device) -> [Address; 2] {
        let counters = self.0.address();
        [counters, counters.at(PartialResults::counter_bytes(device))]
    }
}

/// Returns the queries of a KV head that a decode tile has at most.
fn queries_per_tile(shape: &AttentionShape) -> u32 {
    let heads = shape.head_groups();
    heads.each.min(decode_tile(heads))
}

/// Returns true if a shape has the features of latent attention on tensor cores, which uses it if the
/// type of K and V has a kernel and there are no sinks.
fn is_latent(shape: &AttentionShape) -> bool {
    const VALUES: Values = Values::OfKeys(LatentAttention::VALUE_DIM);
    let AttentionShape { head_dim, values, window, soft_cap, alibi, .. } = *shape;
    (head_dim, values, window, soft_cap, alibi) == (LatentAttention::KEY_DIM, VALUES, None, None, None)
}

/// Launches an attention kernel over some tiles. Only some kernels take the arguments in brackets.
macro_rules! attend {
    ($args:ident, $device:ident, $function:expr, $shape:expr, $tiles:expr, [$($dims:expr),*], [$($decode:expr),*]) => {{
        let Args { inputs, group, shape, slopes, sinks, qkv, kv, out, stores, .. } = $args;
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
            $($decode),*
        )
    }};
}

/// Returns the tensor core kernel for a layer of latents, which has no sinks. None: there is none.
fn latent(device: &Device, shape: &AttentionShape, kv: &Kv) -> Option<LatentAttention> {
    device.kernels.attention.latent(kv.shape.dtype).filter(|_| is_latent(shape))
}

/// Returns the tensor core kernels for a layer. None: the plain kernel processes it.
fn tensor(device: &Device, shape: &KvShape) -> Option<TensorAttention> {
    device.kernels.attention.tensor(shape.dtype, shape.head_dim).filter(|_| shape.values == Values::Own)
}

/// Returns true if attention can rotate and store the rows of the batch itself: the decode kernel
/// processes all of them.
pub fn stores_rows(device: &Device, inputs: &Inputs, shape: &AttentionShape, kv: &Kv, partial: Option<&PartialResults>) -> bool {
    let decodes = inputs.tiles(shape.head_groups()).is_some_and(|tiles| tiles.prefill.count == 0);
    decodes && partial.is_some() && tensor(device, &kv.shape).is_some()
}

/// Returns true if the kernel for prompts can copy boxes of K and V of this shape.
pub fn can_copy_boxes(device: &Device, shape: &KvShape) -> bool {
    tensor(device, shape).is_some_and(|kernels| matches!(kernels.prefill, Prefill::Wgmma { .. }))
}

impl Args<'_> {
    pub fn run(&self, device: &Device, partial: Option<&PartialResults>) {
        let Some(tiles) = self.inputs.tiles(self.shape.head_groups()) else {
            return device.refuse(Error::internal("no tiles for this shape of attention"));
        };
        if let Some(kernel) = latent(device, self.shape, self.kv).filter(|_| self.sinks == Address::NULL) {
            return self.latents(device, kernel, tiles, partial);
        }
        match (tensor(device, &self.kv.shape), partial) {
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
        match kernels.prefill {
            Prefill::MmaSync { .. } => attend!(self, device, function, shape, tiles, [], []),
            Prefill::Wgmma { .. } => {
                let KvBoxes { map, tokens } = self.kv.boxes;
                attend!(self, device, function, shape, tiles, [], [map, tokens]);
            }
        }
    }

    /// Sequences with one row. Long ones are divided into parts, whose results the last block merges.
    fn decode(&self, device: &Device, kernels: TensorAttention, tiles: Tiles, partial: &PartialResults) {
        let shape = Shape { shared: kernels.decode_shared, ..self.shape_of(tiles.decode, 1, kernels.decode_threads) };
        let NewTokens { angles, slots, rotated, pairs } = self.new_tokens;
        let [counters, results] = partial.addresses(device);
        attend!(self, device, kernels.decode, shape, tiles.decode, [], [angles, slots, rotated, pairs, counters, results]);
    }

    /// Latents. As above, one grid has all rows in batch-invariant mode.
    fn latents(&self, device: &Device, kernel: LatentAttention, tiles: Tiles, partial: Option<&PartialResults>) {
        let attend = |tiles: InputRange, tile_queries: u32, partial: Address| {
            let blocks_per_tile = tile_queries.div_ceil(kernel.queries);
            let shape = kernel.shape(tiles.count * blocks_per_tile, self.shape.kv_heads as u32);
            attend!(self, device, kernel.function, shape, tiles, [blocks_per_tile], [partial]);
        };
        let Some(partial) = partial else {
            return attend(tiles.all, PREFILL_TILE, Address::NULL);
        };
        let [_, results] = partial.addresses(device);
        attend(tiles.prefill, PREFILL_TILE, results);
        attend(tiles.decode, queries_per_tile(self.shape), results);
        self.merge_latents(device, tiles.decode, results);
    }

    fn merge_latents(&self, device: &Device, tiles: InputRange, results: Address) {
        let (heads, kv_heads) = (self.shape.heads as u32, self.shape.kv_heads as u32);
        let sharing = (device.blocks_at_once() / (tiles.count * kv_heads).max(1)).clamp(1, queries_per_tile(self.shape));
        let shape = self.shape_of(tiles, sharing, THREADS);
        let (tiles, stores) = (self.inputs.address(tiles), dtype_number(self.stores));
        launch!(device, device.kernels.attention.latent_merge, shape, self.out, results, tiles, heads, kv_heads, stores);
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
