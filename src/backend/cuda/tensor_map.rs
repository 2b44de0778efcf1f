//! The KV pool of a layer as a tensor, of which attention on Hopper copies boxes (TMA).

use cudarc::driver::sys;

use super::address::Address;
use super::device::Device;
use super::errors::failed;
use super::function::Argument;
use crate::backend::KvShape;
use crate::error::Result;

/// Dimensions of a tensor: blocks, K and V of each head, tokens, and numbers.
const RANK: usize = 4;
/// Numbers of a row of a box, which are `PANEL` in `kernels/hopper.cuh`.
const COLUMNS: usize = 64;
/// Tokens that a warp copies at a time. A box has at most as many, and at least 8, the tokens of the
/// smallest block: boxes begin where the swizzling of shared memory repeats, at each eighth row.
const MAX_TOKENS: usize = 32;

/// An encoded tensor, as kernels read it.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct TensorMap(sys::CUtensorMap);

impl Argument for TensorMap {}

/// The boxes of a KV pool: the numbers of some tokens of a block, for one head of K or V.
#[derive(Debug, Clone, Copy)]
pub struct KvBoxes {
    pub map: TensorMap,
    /// Tokens of a box. 0: the kernel copies tokens one by one and does not read the map.
    pub tokens: u32,
}

impl KvBoxes {
    pub const NONE: KvBoxes = KvBoxes { map: TensorMap(sys::CUtensorMap { opaque: [0; 16] }), tokens: 0 };

    /// Encodes the pool that begins at an address. It has K and V in 16 bits.
    pub fn new(device: &Device, begin: Address, shape: &KvShape) -> Result<KvBoxes> {
        let tokens = shape.block_size.min(MAX_TOKENS);
        let dims = [shape.head_dim, shape.block_size, 2 * shape.kv_heads, shape.blocks].map(|count| count as u64);
        let token = dims[0] * size_of::<u16>() as u64;
        let strides = [token, token * dims[1], token * dims[1] * dims[2]];
        let [of_box, steps]: [[u32; RANK]; 2] = [[COLUMNS as u32, tokens as u32, 1, 1], [1; RANK]];
        let mut map = KvBoxes::NONE.map;
        let encode = || {
            // SAFETY: the arrays have the dimensions of the rank, and one stride less. The driver writes the map.
            let encoded = unsafe {
                sys::cuTensorMapEncodeTiled(
                    &mut map.0,
                    sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
                    RANK as u32,
                    begin.0 as *mut _,
                    dims.as_ptr(),
                    strides.as_ptr(),
                    of_box.as_ptr(),
                    steps.as_ptr(),
                    sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                    sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                    sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
                )
            };
            encoded.result()
        };
        device.context().calling(encode).map_err(|e| failed("encode a KV pool as a tensor", e))?;
        Ok(KvBoxes { map, tokens: tokens as u32 })
    }
}
