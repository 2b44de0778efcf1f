//! The kernels of `kernels/`, by family and name.

use std::collections::HashMap;

use super::attention_kernels::Attention;
use super::families::{Find, family, find_required};
use super::function::{Function, Shape};
use super::records::{Codes, Records};
use super::stored::Stored;
use crate::backend::{Act, Glu, NormKind, Pairs};
use crate::error::{Error, Result};
use crate::types::blocks::BlockType;
use crate::types::options::{Dtype, KvDtype};

family! {
    Elementwise {
        activate, add, add_gated, gate, gather, join_strips, scale_and_cap, split_strips,
        sum_ranks,
    }
}

family! {
    /// Reads of rows of a table, by its storage type.
    Tables {
        add_positions_bf16, add_positions_f16, add_positions_f32, embed_bf16, embed_codes4_by16, embed_codes4_by32, embed_codes5_by32,
        embed_codes6_by16, embed_codes8_by32, embed_f16, embed_f32, embed_int8,
    }
}

family! {
    Norms { add_norm, norm_heads, norm_rows }
}

family! {
    Rotation { angles, rope }
}

family! {
    Experts { combine_routes, gather_routes, route, sort_routes }
}

family! {
    /// Products, by the storage type of the matrix and the rows of a tile.
    Products {
        matmul_bf16_128, matmul_bf16_16, matmul_bf16_32, matmul_bf16_64, matmul_codes4_by16_128, matmul_codes4_by16_16,
        matmul_codes4_by16_32, matmul_codes4_by16_64, matmul_codes4_by32_128, matmul_codes4_by32_16, matmul_codes4_by32_32,
        matmul_codes4_by32_64, matmul_codes5_by32_128, matmul_codes5_by32_16, matmul_codes5_by32_32, matmul_codes5_by32_64,
        matmul_codes6_by16_128, matmul_codes6_by16_16, matmul_codes6_by16_32, matmul_codes6_by16_64, matmul_codes8_by32_128,
        matmul_codes8_by32_16, matmul_codes8_by32_32, matmul_codes8_by32_64, matmul_f16_128, matmul_f16_16, matmul_f16_32,
        matmul_f16_64, matmul_f32_128, matmul_f32_16, matmul_f32_64, matmul_fp8_128, matmul_fp8_16, matmul_fp8_32, matmul_fp8_64,
        matmul_int8_128, matmul_int8_16, matmul_int8_32, matmul_int8_64,
    }
}

family! {
    /// Products of few rows, by the storage type of the matrix and the maximum number of rows, without
    /// and with a gated activation. A row has other bits than in `Products`.
    FewRows {
        few_rows_bf16_16, few_rows_bf16_8, few_rows_f16_16, few_rows_f16_8, few_rows_fp8_16, few_rows_fp8_8, few_rows_gated_bf16_16,
        few_rows_gated_bf16_8, few_rows_gated_f16_16, few_rows_gated_f16_8, few_rows_gated_fp8_16, few_rows_gated_fp8_8, few_rows_gated_int8_16, few_rows_gated_int8_8, few_rows_int8_16, few_rows_int8_8,
    }
}

family! {
    /// The steps before and after a product of cuBLASLt.
    Conversions { scale_product, to_bf16, to_f16, to_fp8 }
}

family! {
    /// Copies of K and V, by their type.
    Cache { move_blocks, store_kv_bf16, store_kv_f16, store_kv_f32, store_kv_fp8, store_kv_int8 }
}

/// The checks of `kernels/exactness.cu`.
pub struct Exactness {
    pub sums_after_mma: Function,
    pub sums_after_wgmma: Option<Function>,
}

impl Exactness {
    fn load(find: Find) -> Result<Exactness> {
        Ok(Exactness { sums_after_mma: find_required(find, "sums_after_mma")?, sums_after_wgmma: find("sums_after_wgmma")? })
    }
}

family! {
    Sampling { draw_best, draw_choose, draw_edit, draw_weigh, fill_placeholders }
}

/// All kernels, by family.
pub struct Kernels {
    pub elementwise: Elementwise,
    pub tables: Tables,
    pub norms: Norms,
    pub rotation: Rotation,
    pub experts: Experts,
    pub products: Products,
    pub few_rows: FewRows,
    pub conversions: Conversions,
    pub cache: Cache,
    pub attention: Attention,
    pub sampling: Sampling,
    pub exactness: Exactness,
}

impl Kernels {
    /// Loads all kernels. `find` returns a kernel by its name. A block has at most `max_shared` bytes of
    /// shared memory.
    pub fn load(find: impl Fn(&str) -> Result<Option<Function>>, max_shared: u32) -> Result<Kernels> {
        let find: Find = &find;
        let kernels = Kernels {
            elementwise: Elementwise::load(find)?,
            tables: Tables::load(find)?,
            norms: Norms::load(find)?,
            rotation: Rotation::load(find)?,
            experts: Experts::load(find)?,
            products: Products::load(find)?,
            few_rows: FewRows::load(find)?,
            conversions: Conversions::load(find)?,
            cache: Cache::load(find)?,
            attention: Attention::load(find, max_shared)?,
            sampling: Sampling::load(find)?,
            exactness: Exactness::load(find)?,
        };
        kernels.attention.allow_shared()?;
        kernels.products.allow_shared()?;
        Ok(kernels)
    }
}

impl Tables {
    pub fn embed(&self, stored: Stored) -> Result<Function> {
        if stored == Stored::Int8 {
            return Ok(self.embed_int8);
        }
        let Stored::Records(records) = stored else { return by_dtype(stored, [self.embed_f32, self.embed_f16, self.embed_bf16]) };
        Ok(match records.codes() {
            Codes::FourBy16 => self.embed_codes4_by16,
            Codes::FourBy32 => self.embed_codes4_by32,
            Codes::FiveBy32 => self.embed_codes5_by32,
            Codes::SixBy16 => self.embed_codes6_by16,
            Codes::EightBy32 => self.embed_codes8_by32,
        })
    }

    pub fn add_positions(&self, stored: Stored) -> Result<Function> {
        by_dtype(stored, [self.add_positions_f32, self.add_positions_f16, self.add_positions_bf16])
    }
}

/// Selects the kernel for a storage type from those for f32, f16 and bf16.
fn by_dtype(stored: Stored, [f32, f16, bf16]: [Function; 3]) -> Result<Function> {
    match stored {
        Stored::As(Dtype::F32) => Ok(f32),
        Stored::As(Dtype::F16) => Ok(f16),
        Stored::As(Dtype::Bf16) => Ok(bf16),
        Stored::Fp8 | Stored::Int8 | Stored::Records(_) => Err(Error::internal("a table in a format without a kernel")),
    }
}

/// The rows of products in groups: the expected and the maximum number per group.
#[derive(Debug, Clone, Copy)]
pub struct RowCounts {
    pub each: usize,
    pub max: usize,
    pub groups: usize,
}

impl RowCounts {
    /// Returns groups of `rows` rows each.
    pub fn alike(rows: usize, groups: usize) -> RowCounts {
        RowCounts { each: rows, max: rows, groups }
    }
}

/// The tile of a thread block, as defined in `kernels/matmul.cu` and `kernels/blocks.cu`.
#[derive(Debug, Clone, Copy)]
pub struct Tile {
    rows: usize,
    outs: usize,
    /// Bytes per step of a row of activations.
    step: usize,
    /// Steps of weights in shared memory.
    stages: usize,
    threads: u32,
}

impl Tile {
    const FEW: Tile = Tile { rows: 16, outs: 32, step: 256, stages: 6, threads: 128 };
    const SOME: Tile = Tile { rows: 32, outs: 32, step: 256, stages: 5, threads: 128 };
    const MORE: Tile = Tile { rows: 64, outs: 64, step: 128, stages: 4, threads: 128 };
    const MANY: Tile = Tile { rows: 128, outs: 128, step: 64, stages: 4, threads: 128 };
    /// For weights in fp8 and int8, and for records.
    const FEW_OF_BYTES: Tile = Tile { step: 512, ..Tile::FEW };
    const SOME_OF_BYTES: Tile = Tile { step: 512, ..Tile::SOME };
    /// For records.
    const MORE_OF_RECORDS: Tile = Tile { stages: 3, ..Tile::MORE };
    const MANY_OF_RECORDS: Tile = Tile { stages: 2, threads: 256, ..Tile::MANY };
    /// Padding bytes between rows in shared memory.
    const BETWEEN: usize = 16;

    /// Returns the tiles for few to many rows.
    fn all(stored: Stored) -> [Tile; 4] {
        match stored {
            Stored::As(Dtype::F32) => [Tile::FEW, Tile::MORE, Tile::MORE, Tile::MANY],
            Stored::As(_) => [Tile::FEW, Tile::SOME, Tile::MORE, Tile::MANY],
            Stored::Fp8 | Stored::Int8 => [Tile::FEW_OF_BYTES, Tile::SOME_OF_BYTES, Tile::MORE, Tile::MANY],
            Stored::Records(_) => [Tile::FEW_OF_BYTES, Tile::SOME_OF_BYTES, Tile::MORE_OF_RECORDS, Tile::MANY_OF_RECORDS],
        }
    }

    /// Returns the index of the tile for products with `outs` outputs.
    ///
    /// Larger tiles read less for each product, but a block takes as long with few rows as with many.
    /// So a larger tile is used if it is more than half full, and if three quarters of the device's
    /// multiprocessors, or more, have a block.
    fn choose(tiles: [Tile; 4], outs: usize, counts: RowCounts, multiprocessors: u32) -> usize {
        let RowCounts { each, groups, .. } = counts;
        let blocks = |tile: Tile| outs.div_ceil(tile.outs) * each.div_ceil(tile.rows) * groups;
        let suits = |tile: Tile| 2 * each > tile.rows && 4 * blocks(tile) >= 3 * multiprocessors as usize;
        match each {
            each if each <= tiles[0].rows => 0,
            _ if suits(tiles[3]) => 3,
            _ if suits(tiles[2]) => 2,
            _ => 1,
        }
    }

    /// Returns the bytes of shared memory: all stages of weights, and two steps of rows. With
    /// weights in bytes or records, rows are in bf16.
    pub fn shared(self, stored: Stored) -> u32 {
        let of_weights = match stored {
            Stored::As(_) => self.step + Self::BETWEEN,
            Stored::Fp8 | Stored::Int8 => self.step / 2 + Self::BETWEEN,
            Stored::Records(records) => records.shared_pitch(),
        };
        (self.stages * self.outs * of_weights + 2 * self.rows * (self.step + Self::BETWEEN)) as u32
    }
}

impl Products {
    /// Permits the shared memory that exceeds the default limit.
    fn allow_shared(&self) -> Result<()> {
        let numbers = [Stored::As(Dtype::F32), Stored::As(Dtype::F16), Stored::As(Dtype::Bf16), Stored::Fp8, Stored::Int8];
        // Those of weights in int4 are not larger.
        let records = BlockType::all().filter_map(Records::of).map(Stored::Records);
        let mut most: HashMap<Function, u32> = HashMap::new();
        for stored in numbers.into_iter().chain(records) {
            for (function, tile) in self.kernels(stored) {
                let most = most.entry(function).or_default();
                *most = tile.shared(stored).max(*most);
            }
        }
        most.into_iter().try_for_each(|(function, shared)| function.allow_shared(shared))
    }

    /// Returns the kernels for few to many rows.
    fn kernels(&self, stored: Stored) -> [(Function, Tile); 4] {
        let functions = match stored {
            // Without a kernel for tiles of 32 rows: few models have such matrices.
            Stored::As(Dtype::F32) => [self.matmul_f32_16, self.matmul_f32_64, self.matmul_f32_64, self.matmul_f32_128],
            Stored::As(Dtype::F16) => [self.matmul_f16_16, self.matmul_f16_32, self.matmul_f16_64, self.matmul_f16_128],
            Stored::As(Dtype::Bf16) => [self.matmul_bf16_16, self.matmul_bf16_32, self.matmul_bf16_64, self.matmul_bf16_128],
            Stored::Fp8 => [self.matmul_fp8_16, self.matmul_fp8_32, self.matmul_fp8_64, self.matmul_fp8_128],
            Stored::Int8 => [self.matmul_int8_16, self.matmul_int8_32, self.matmul_int8_64, self.matmul_int8_128],
            Stored::Records(records) => self.of_records(records),
        };
        let tiles = Tile::all(stored);
        std::array::from_fn(|i| (functions[i], tiles[i]))
    }

    /// Returns the kernels for few to many rows.
    fn of_records(&self, records: Records) -> [Function; 4] {
        match records.codes() {
            Codes::FourBy16 => {
                [self.matmul_codes4_by16_16, self.matmul_codes4_by16_32, self.matmul_codes4_by16_64, self.matmul_codes4_by16_128]
            }
            Codes::FourBy32 => {
                [self.matmul_codes4_by32_16, self.matmul_codes4_by32_32, self.matmul_codes4_by32_64, self.matmul_codes4_by32_128]
            }
            Codes::FiveBy32 => {
                [self.matmul_codes5_by32_16, self.matmul_codes5_by32_32, self.matmul_codes5_by32_64, self.matmul_codes5_by32_128]
            }
            Codes::SixBy16 => {
                [self.matmul_codes6_by16_16, self.matmul_codes6_by16_32, self.matmul_codes6_by16_64, self.matmul_codes6_by16_128]
            }
            Codes::EightBy32 => {
                [self.matmul_codes8_by32_16, self.matmul_codes8_by32_32, self.matmul_codes8_by32_64, self.matmul_codes8_by32_128]
            }
        }
    }

    /// Returns the kernel for the expected number of rows, and its launch configuration for
    /// products with `outs` outputs. A row has the same bits with every kernel.
    pub fn select(&self, stored: Stored, outs: usize, counts: RowCounts, multiprocessors: u32) -> (Function, Shape) {
        let kernels = self.kernels(stored);
        let (function, tile) = kernels[Tile::choose(kernels.map(|(_, tile)| tile), outs, counts, multiprocessors)];
        let grid = (outs.div_ceil(tile.outs) as u32, counts.max.div_ceil(tile.rows) as u32, counts.groups as u32);
        (function, Shape { shared: tile.shared(stored), ..Shape::new(grid, tile.threads) })
    }
}

/// What a product of few rows writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    Plain,
    /// Half as many numbers: the first half of the outputs gates the second.
    Gated,
}

impl FewRows {
    /// Rows of the matrix per thread block, and threads.
    const OUTS: usize = 32;
    const THREADS: u32 = 512;
    /// The kernels for more rows take no norm.
    pub const MAX_NORMED_ROWS: usize = 8;

    /// Returns the kernel for a number of rows, and its launch configuration for a matrix with
    /// `outs` rows. None: there is none for so many rows or this storage type.
    pub fn select(&self, stored: Stored, rows: usize, outs: usize, output: Output) -> Option<(Function, Shape)> {
        let [plain, gated] = match stored {
            Stored::As(Dtype::Bf16) => {
                [[self.few_rows_bf16_8, self.few_rows_bf16_16], [self.few_rows_gated_bf16_8, self.few_rows_gated_bf16_16]]
            }
            Stored::As(Dtype::F16) => {
                [[self.few_rows_f16_8, self.few_rows_f16_16], [self.few_rows_gated_f16_8, self.few_rows_gated_f16_16]]
            }
            Stored::Fp8 => [[self.few_rows_fp8_8, self.few_rows_fp8_16], [self.few_rows_gated_fp8_8, self.few_rows_gated_fp8_16]],
            Stored::Int8 => [[self.few_rows_int8_8, self.few_rows_int8_16], [self.few_rows_gated_int8_8, self.few_rows_gated_int8_16]],
            Stored::As(Dtype::F32) | Stored::Records(_) => return None,
        };
        let [eight, sixteen] = if output == Output::Gated { gated } else { plain };
        let function = [(8, eight), (16, sixteen)].into_iter().find(|(most, _)| rows <= *most)?.1;
        Some((function, Shape::new((outs.div_ceil(Self::OUTS) as u32, 1, 1), Self::THREADS)))
    }
}

impl Cache {
    pub fn store_kv(&self, dtype: KvDtype) -> Function {
        match dtype {
            KvDtype::F32 => self.store_kv_f32,
            KvDtype::Bf16 => self.store_kv_bf16,
            KvDtype::Int8 => self.store_kv_int8,
            KvDtype::F16 => self.store_kv_f16,
            KvDtype::Fp8 => self.store_kv_fp8,
        }
    }
}

/// Returns the number of an activation in `kernels/`. `norm_number` and `pairs_number` do the same
/// for norms and pairs.
pub fn act_number(act: Act) -> u32 {
    match act {
        Act::Relu => 0,
        Act::Silu => 1,
        Act::Gelu => 2,
        Act::GeluTanh => 3,
    }
}

/// Returns a gated activation as in `kernels/activation.cuh`: its number, and the parameters of the
/// clamped one.
pub fn glu_numbers(glu: Glu) -> (u32, f32, f32) {
    match glu {
        Glu::Of(act) => (act_number(act), 0.0, 0.0),
        Glu::Clamped { alpha, limit } => (4, alpha, limit),
    }
}

/// Returns the type of rows that a kernel writes.
pub fn dtype_number(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
    }
}

pub fn norm_number(kind: NormKind) -> u32 {
    match kind {
        NormKind::Rms { unit_offset: false } => 0,
        NormKind::Rms { unit_offset: true } => 1,
        NormKind::Layer => 2,
    }
}

pub fn pairs_number(pairs: Pairs) -> u32 {
    match pairs {
        Pairs::Halves => 0,
        Pairs::Neighbours => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Devices of compute capability 8.6 and 8.9 have 99 KiB for a block.
    #[test]
    fn tiles_fit_the_shared_memory_of_all_devices() {
        let records = BlockType::all().filter_map(Records::of).map(Stored::Records);
        let numbers = [Stored::As(Dtype::F32), Stored::As(Dtype::F16), Stored::As(Dtype::Bf16), Stored::Fp8, Stored::Int8];
        for stored in records.chain(numbers) {
            for tile in Tile::all(stored) {
                assert!(tile.shared(stored) <= 99 << 10, "{tile:?} needs {} bytes for {stored:?}", tile.shared(stored));
            }
        }
    }

    #[test]
    fn rows_and_outputs_determine_the_tile() {
        let rows_of_tile = |stored, rows, outs, groups, multiprocessors| {
            let tiles = Tile::all(stored);
            tiles[Tile::choose(tiles, outs, RowCounts::alike(rows, groups), multiprocessors)].rows
        };
        let bf16 = Stored::As(Dtype::Bf16);
        for (rows, narrow, wide) in [(1, 16, 16), (16, 16, 16), (17, 32, 32), (32, 32, 32), (33, 32, 64), (64, 32, 64), (65, 64, 128)] {
            assert_eq!(rows_of_tile(bf16, rows, 4096, 1, 132), narrow, "{rows} rows");
            assert_eq!(rows_of_tile(bf16, rows, 28_672, 1, 132), wide, "{rows} rows");
        }
        assert_eq!(rows_of_tile(bf16, 512, 4096, 1, 132), 128, "128 of 132 multiprocessors have a block");
        assert_eq!(rows_of_tile(bf16, 40, 4096, 8, 132), 64, "products of eight groups");
        assert_eq!(rows_of_tile(Stored::As(Dtype::F32), 17, 4096, 1, 132), 64, "f32 has no tile of 32 rows");
        assert_eq!(rows_of_tile(Stored::Fp8, 130, 70, 1, 1), 128, "one multiprocessor");
    }
}
