//! The KV cache of a device, in blocks.

use super::{AttentionShape, BackendTypes, RotaryEmbedding, Values};
use crate::error::Result;
use crate::types::batch::{BlockCopy, BlockMove, Tail};
use crate::types::options::KvDtype;

/// Stores K and V, and moves blocks of them.
///
/// A block is an index below `KvShape::blocks` into the pool of every layer. `layers` holds the
/// pools of all layers.
pub trait KvOps: BackendTypes {
    /// Allocates the KV pool of a layer.
    ///
    /// Errors: `OutOfMemory`, and `Unsupported` if the backend does not support the head size.
    fn kv(&self, shape: KvShape) -> Result<Self::Kv>;
    /// Returns the exact number of bytes that `kv` allocates for each block.
    fn kv_block_bytes(&self, shape: &KvShape) -> u64;
    /// Returns a description of the layer's KV layout. Bytes of `read_blocks` are valid for every
    /// layer with the same description.
    fn kv_layout(&self, layer: &Self::Kv) -> String;
    /// Returns the bytes of one block in each of the two arrays in which `read_blocks` stores
    /// blocks. An array can be empty.
    fn kv_part_bytes(&self, layer: &Self::Kv) -> [usize; 2];

    /// Rotates the queries and keys of each row of `qkv`, and writes its K and V to the row's slot
    /// in the tables of `group`. `qkv` is `[rows, qkv_width]`.
    ///
    /// With `Values::OfKeys`, `qkv` holds the keys only, as `[rows, kv_width]`, and the caller
    /// rotates them.
    fn store_kv(
        &self,
        inputs: &Self::Inputs,
        group: usize,
        shape: &AttentionShape,
        turn: Option<RotaryEmbedding<Self::Buf>>,
        qkv: &mut Self::Buf,
        kv: &mut Self::Kv,
    );
    /// Copies whole blocks in every layer. No block is both a source and a destination.
    fn copy_blocks(&self, copies: &[BlockCopy], layers: &mut [Self::Kv]);

    /// Allocates a host tier of `blocks` blocks with `block_bytes` each, all layers included.
    ///
    /// Errors: `OutOfMemory`.
    fn host(&self, blocks: usize, block_bytes: u64) -> Result<Self::Host>;
    /// Returns the bytes of a block of the host tier.
    fn host_block<'a>(&self, host: &'a mut Self::Host, block: usize) -> &'a mut [u8];
    /// Copies whole blocks, with all layers, to the host tier. Each host block occurs at most once.
    /// After an error, the contents of the destination blocks are undefined.
    fn swap_out(&self, moves: &[BlockMove], layers: &[Self::Kv], host: &mut Self::Host) -> Result<()>;
    /// Copies whole blocks from the host tier to the device. Each device block occurs at most once.
    /// After an error, the contents of the destination blocks are undefined.
    fn swap_in(&self, moves: &[BlockMove], host: &mut Self::Host, layers: &mut [Self::Kv]) -> Result<()>;

    /// Appends the stored bytes of these blocks to `out`. For the tail block, only the filled slots
    /// are copied and the others are zero, because unused slots may hold data of other requests.
    fn read_blocks(&self, blocks: &[u32], tail: Tail, layer: &Self::Kv, out: &mut Vec<u8>) -> Result<()>;
    /// Writes these blocks from the beginning of `bytes`, the output of `read_blocks`. Returns the
    /// remaining bytes.
    ///
    /// Errors: `InvalidArgument` if `bytes` is too short.
    fn write_blocks<'a>(&self, blocks: &[u32], layer: &mut Self::Kv, bytes: &'a [u8]) -> Result<&'a [u8]>;
    /// Returns the memory of all blocks from index `from` on to the system. Their contents are
    /// lost, even if the call fails.
    ///
    /// Errors: `Unsupported` if the backend cannot free part of a pool.
    fn discard_blocks(&self, from: usize, layer: &mut Self::Kv) -> Result<()>;
}

/// The shape of a layer's KV pool.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvShape {
    pub blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub values: Values,
    pub dtype: KvDtype,
}
