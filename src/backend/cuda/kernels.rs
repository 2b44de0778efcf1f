//! The kernels of `kernels/`, by name.

use super::attention;
use super::device::Function;
use super::matrix::{Stored, Tile};
use crate::error::Result;
use crate::options::{Dtype, KvDtype};

macro_rules! kernels {
    ($($name:ident),+ $(,)?) => {
        pub struct Kernels {
            $(pub $name: Function,)+
            tensor: Vec<(KvDtype, usize, TensorAttention)>,
        }

        impl Kernels {
            /// Loads all kernels. `find` returns a kernel by its name.
            pub fn load(find: impl Fn(&str) -> Result<Function>) -> Result<Kernels> {
                let tensor = |(dtype, dim): (KvDtype, usize)| {
                    let find = |what| find(&format!("attention_{what}_{}_{dim}", dtype.name()));
                    Ok((dtype, dim, TensorAttention { prefill: find("prefill")?, decode: find("decode")? }))
                };
                let each = TENSOR_DTYPES.into_iter().flat_map(|dtype| HEAD_DIMS.map(|dim| (dtype, dim)));
                let kernels = Kernels { $($name: find(stringify!($name))?,)+ tensor: each.map(tensor).collect::<Result<_>>()? };
                kernels.allow_shared().map(|()| kernels)
            }
        }
    };
}

kernels! {
    activate, add, add_gated, add_norm, add_positions_bf16, add_positions_f16, add_positions_f32, angles,
    attention_merge, attention_plain_bf16, attention_plain_f16, attention_plain_f32, attention_plain_fp8, attention_plain_int8,
    combine_routes, draw_rows, embed_bf16, embed_f16, embed_f32, gate, gate_clamped, gather, gather_routes, prepare_next,
    join_strips,
    matmul_bf16_128, matmul_bf16_16, matmul_bf16_64, matmul_f16_128, matmul_f16_16, matmul_f16_64, matmul_f32_128, matmul_f32_16, matmul_f32_64,
    matmul_fp8_128, matmul_fp8_16, matmul_fp8_64,
    move_blocks, norm_heads, norm_rows, rope, route, scale_and_cap, scale_product, sort_routes, split_strips,
    store_kv_bf16, store_kv_f16, store_kv_f32, store_kv_fp8, store_kv_int8, to_bf16, to_f16, to_fp8,
}

/// Head widths with tensor core kernels.
pub const HEAD_DIMS: [usize; 6] = [64, 80, 96, 112, 128, 256];

/// KV types with tensor core kernels.
const TENSOR_DTYPES: [KvDtype; 4] = [KvDtype::Bf16, KvDtype::F16, KvDtype::Int8, KvDtype::Fp8];

/// The tensor core kernels for a KV type and head width.
#[derive(Clone, Copy)]
pub struct TensorAttention {
    pub prefill: Function,
    pub decode: Function,
}

impl Kernels {
    /// Permits the shared memory that exceeds the default limit.
    fn allow_shared(&self) -> Result<()> {
        for &(dtype, dim, TensorAttention { prefill, decode }) in &self.tensor {
            prefill.allow_shared(attention::prefill_shared(dtype, dim))?;
            decode.allow_shared(attention::decode_shared(dtype, dim))?;
        }
        for stored in [Stored::As(Dtype::F32), Stored::As(Dtype::F16), Stored::As(Dtype::Bf16), Stored::Fp8] {
            self.products(stored).into_iter().try_for_each(|(function, tile)| function.allow_shared(tile.shared(stored)))?;
        }
        Ok(())
    }

    /// Returns the kernels for few, some and many rows.
    pub fn products(&self, stored: Stored) -> [(Function, Tile); 3] {
        let [few, some, many] = match stored {
            Stored::As(Dtype::F32) => [self.matmul_f32_16, self.matmul_f32_64, self.matmul_f32_128],
            Stored::As(Dtype::F16) => [self.matmul_f16_16, self.matmul_f16_64, self.matmul_f16_128],
            Stored::As(Dtype::Bf16) => [self.matmul_bf16_16, self.matmul_bf16_64, self.matmul_bf16_128],
            Stored::Fp8 => [self.matmul_fp8_16, self.matmul_fp8_64, self.matmul_fp8_128],
        };
        let tile = if stored == Stored::Fp8 { Tile::FEW_OF_BYTES } else { Tile::FEW };
        [(few, tile), (some, Tile::SOME), (many, Tile::MANY)]
    }

    /// Returns the tensor core kernels. None: no kernel for this KV type or head width.
    pub fn tensor_attention(&self, dtype: KvDtype, head_dim: usize) -> Option<TensorAttention> {
        self.tensor.iter().find(|(of, dim, _)| (*of, *dim) == (dtype, head_dim)).map(|(_, _, kernels)| *kernels)
    }

    pub fn plain_attention(&self, dtype: KvDtype) -> Function {
        match dtype {
            KvDtype::F32 => self.attention_plain_f32,
            KvDtype::Bf16 => self.attention_plain_bf16,
            KvDtype::Int8 => self.attention_plain_int8,
            KvDtype::F16 => self.attention_plain_f16,
            KvDtype::Fp8 => self.attention_plain_fp8,
        }
    }

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
