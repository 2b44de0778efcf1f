//! The kernels of attention, with the shared memory and threads of their blocks.

use super::families::{Find, family, find_required};
use super::function::{Function, Shape};
use crate::error::{Error, Result};
use crate::types::options::KvDtype;

family! {
    /// Attention for heads of any width, by the type of K and V.
    PlainAttention {
        attention_plain_bf16, attention_plain_f16, attention_plain_f32, attention_plain_fp8, attention_plain_int8,
    }
}

/// The kernels of attention.
pub struct Attention {
    plain: PlainAttention,
    tensor: Vec<(KvDtype, usize, TensorAttention)>,
    latent: [(KvDtype, LatentAttention); 2],
    /// Merges the parts of split sequences of latents.
    pub latent_merge: Function,
}

impl Attention {
    pub fn load(find: Find, max_shared: u32) -> Result<Attention> {
        let each = TENSOR_DTYPES.into_iter().flat_map(|dtype| HEAD_DIMS.map(|dim| (dtype, dim)));
        let tensor = each.map(|(dtype, dim)| Ok((dtype, dim, TensorAttention::new(dtype, dim, find)?))).collect::<Result<_>>()?;
        let latent = |dtype| Ok::<_, Error>((dtype, LatentAttention::find(find, dtype, max_shared)?));
        Ok(Attention {
            plain: PlainAttention::load(find)?,
            tensor,
            latent: [latent(KvDtype::Bf16)?, latent(KvDtype::F16)?],
            latent_merge: find_required(find, "attention_latent_merge")?,
        })
    }

    /// Permits the shared memory that exceeds the default limit.
    pub fn allow_shared(&self) -> Result<()> {
        for (_, _, tensor) in &self.tensor {
            tensor.prefill.allow_shared()?;
            tensor.decode.allow_shared(tensor.decode_shared)?;
        }
        Ok(())
    }

    /// Returns the tensor core kernels. None: no kernel for this KV type or head width.
    pub fn tensor(&self, dtype: KvDtype, head_dim: usize) -> Option<TensorAttention> {
        self.tensor.iter().find(|(of, dim, _)| (*of, *dim) == (dtype, head_dim)).map(|(_, _, kernels)| *kernels)
    }

    /// Returns the tensor core kernel for latents of `LatentAttention::KEY_DIM`. None: no kernel for this
    /// KV type.
    pub fn latent(&self, dtype: KvDtype) -> Option<LatentAttention> {
        self.latent.iter().find(|(of, _)| *of == dtype).map(|(_, kernel)| *kernel)
    }

    /// Returns the kernel for heads of any width.
    pub fn plain(&self, dtype: KvDtype) -> Function {
        match dtype {
            KvDtype::F32 => self.plain.attention_plain_f32,
            KvDtype::Bf16 => self.plain.attention_plain_bf16,
            KvDtype::Int8 => self.plain.attention_plain_int8,
            KvDtype::F16 => self.plain.attention_plain_f16,
            KvDtype::Fp8 => self.plain.attention_plain_fp8,
        }
    }
}

/// Head widths with tensor core kernels.
pub const HEAD_DIMS: [usize; 6] = [64, 80, 96, 112, 128, 256];

/// KV types with tensor core kernels.
const TENSOR_DTYPES: [KvDtype; 4] = [KvDtype::Bf16, KvDtype::F16, KvDtype::Int8, KvDtype::Fp8];

/// The tensor core kernels for a KV type and head width, with their bytes of shared memory.
#[derive(Clone, Copy)]
pub struct TensorAttention {
    pub prefill: Prefill,
    pub decode: Function,
    pub decode_shared: u32,
    /// Threads per block of `decode`.
    pub decode_threads: u32,
}

/// A prefill kernel, with its bytes of shared memory.
#[derive(Clone, Copy)]
pub enum Prefill {
    /// `kernels/attention.cu`: a block processes half a tile.
    MmaSync { function: Function, shared: u32 },
    /// `kernels/attention_hopper.cu`: a block processes a tile.
    Wgmma { function: Function, shared: u32 },
}

impl Prefill {
    /// Returns the fastest kernel for this device.
    fn find(find: Find, dtype: KvDtype, head_dim: usize) -> Result<Prefill> {
        let name = |instruction| format!("attention_{instruction}_{}_{head_dim}", dtype.name());
        if let Some(function) = find(&name("wgmma"))? {
            return Ok(Prefill::Wgmma { function, shared: wgmma_shared(head_dim) });
        }
        Ok(Prefill::MmaSync { function: find_required(find, &name("prefill"))?, shared: mma_shared(dtype, head_dim) })
    }

    /// Returns the kernel and its launch configuration for some tiles.
    pub fn select(self, tiles: u32, kv_heads: u32) -> (Function, Shape) {
        match self {
            Prefill::MmaSync { function, shared } => (function, Shape { shared, ..Shape::new((2 * tiles, kv_heads, 1), 128) }),
            Prefill::Wgmma { function, shared } => (function, Shape { shared, ..Shape::new((tiles * kv_heads, 1, 1), 384) }),
        }
    }

    fn allow_shared(self) -> Result<()> {
        let (Prefill::MmaSync { function, shared } | Prefill::Wgmma { function, shared }) = self;
        function.allow_shared(shared)
    }
}

/// Returns the bytes of `HopperShared` in `kernels/attention_hopper.cu`.
fn wgmma_shared(head_dim: usize) -> u32 {
    const QUERIES: usize = 128;
    const TOKENS: usize = 128;
    const STAGES: usize = 2;
    const ALIGNMENT: usize = 1024;
    let numbers = (QUERIES + 2 * STAGES * TOKENS) * head_dim * size_of::<u16>();
    let barriers = 4 * STAGES * size_of::<u64>();
    let rest = (barriers + QUERIES * size_of::<f32>()).next_multiple_of(size_of::<u64>());
    (numbers + rest + ALIGNMENT) as u32
}

impl TensorAttention {
    fn new(dtype: KvDtype, head_dim: usize, find: Find) -> Result<TensorAttention> {
        let (tokens, stage) = (tokens_at_once(head_dim), stage_bytes(dtype, head_dim));
        Ok(TensorAttention {
            prefill: Prefill::find(find, dtype, head_dim)?,
            decode: find_required(find, &format!("attention_decode_{}_{head_dim}", dtype.name()))?,
            decode_shared: 72 * 1024 / stage * stage,
            decode_threads: tokens / 16 * 32,
        })
    }
}

/// Tokens of K and V that a tensor core kernel reads at a time. This function and `stage_bytes`
/// match `kernels/attention.cu`.
fn tokens_at_once(head_dim: usize) -> u32 {
    if head_dim <= 128 { 64 } else { 32 }
}

fn stage_bytes(dtype: KvDtype, head_dim: usize) -> u32 {
    // Rows have an odd number of 16-byte chunks.
    let token = ((head_dim * dtype.bytes() / 16) | 1) * 16 + dtype.scale_bytes();
    2 * tokens_at_once(head_dim) * token as u32
}

/// Returns the bytes of shared memory of a prefill kernel of `kernels/attention.cu`: two stages. In 8-bit
/// types, there is one stage, with K and V in bf16 beside it.
fn mma_shared(dtype: KvDtype, head_dim: usize) -> u32 {
    if dtype.scale_bytes() == 0 {
        return 2 * stage_bytes(dtype, head_dim);
    }
    let (token, token_in_bf16) = (head_dim + dtype.scale_bytes(), 2 * head_dim + dtype.scale_bytes());
    2 * tokens_at_once(head_dim) * (token + token_in_bf16) as u32
}

/// The tensor core kernel for latents of a KV type.
#[derive(Clone, Copy)]
pub struct LatentAttention {
    pub function: Function,
    /// Queries of a block.
    pub queries: u32,
}

impl LatentAttention {
    pub const KEY_DIM: usize = 576;
    pub const VALUE_DIM: usize = 512;

    fn find(find: Find, dtype: KvDtype, max_shared: u32) -> Result<LatentAttention> {
        let queries = latent_queries(max_shared);
        let function = find_required(find, &format!("attention_latent_{}_{queries}", dtype.name()))?;
        function.allow_shared(latent_shared(queries))?;
        Ok(LatentAttention { function, queries })
    }

    /// Returns the launch configuration for a number of blocks.
    pub fn shape(self, blocks: u32, kv_heads: u32) -> Shape {
        Shape { shared: latent_shared(self.queries), ..Shape::new((blocks, kv_heads, 1), 4 * self.queries) }
    }
}

/// Returns the queries of a block over latents that may have this many bytes of shared memory.
fn latent_queries(max_shared: u32) -> u32 {
    if latent_shared(64) <= max_shared { 64 } else { 32 }
}

/// Returns the bytes of `LatentShared` in `kernels/attention_latent.cu`.
fn latent_shared(queries: u32) -> u32 {
    let (tokens, stages) = (queries / 2, if queries == 64 { 2 } else { 3 });
    let (pitch, weight_pitch) = (LatentAttention::KEY_DIM as u32 + 8, tokens + 8);
    ((queries + stages * tokens) * pitch + queries * weight_pitch) * 2 + 7 * queries * 4
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Devices of compute capability 8.0 have 163 KiB for a block, and those of 8.6 and 8.9 99 KiB.
    #[test]
    fn blocks_over_latents_fit_the_shared_memory_of_all_devices() {
        for (max_shared, queries) in [(227 << 10, 64), (163 << 10, 64), (99 << 10, 32)] {
            assert_eq!(latent_queries(max_shared), queries);
            assert!(latent_shared(queries) <= max_shared);
        }
    }
}
