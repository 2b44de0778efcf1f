//! The KV cache of a model.

use super::kv_layout::{KvLayout, LayerPlace};
use super::spec::{AttentionShape, Layer, ModelSpec};
use crate::backend::{BackendTypes, KvOps, KvShape};
use crate::error::{Error, Result};
use crate::types::batch::{BlockCopy, BlockMove, Tail};
use crate::types::options::KvDtype;

/// The paged KV cache of all layers.
pub struct KvCache<B: BackendTypes> {
    pub(super) levels: Vec<B::Kv>,
    pub(super) places: Vec<LayerPlace>, // [layers]
    pub(super) groups: usize,
    host: Option<B::Host>,
}

impl<B: KvOps> KvCache<B> {
    /// Allocates the cache of a whole model.
    pub fn new(backend: &B, spec: &ModelSpec, pool: KvPool) -> Result<KvCache<B>> {
        KvCache::with_layout(backend, spec, &KvLayout::for_spec(spec), pool)
    }

    /// Allocates the cache of a part of a model.
    pub fn with_layout(backend: &B, spec: &ModelSpec, layout: &KvLayout, pool: KvPool) -> Result<KvCache<B>> {
        let levels = layout.of_levels(&spec.layers).map(|layer| backend.kv(pool.shape(layer))).collect::<Result<_>>()?;
        Ok(KvCache { levels, groups: layout.windows.len(), places: layout.places().to_vec(), host: None })
    }

    /// Adds a host tier in memory for swapped-out blocks.
    pub fn add_host_tier(&mut self, backend: &B, blocks: usize, block_bytes: u64) -> Result<()> {
        self.host = Some(backend.host(blocks, block_bytes)?);
        Ok(())
    }

    pub fn swap_out(&mut self, backend: &B, moves: &[BlockMove]) -> Result<()> {
        backend.swap_out(moves, &self.levels, self.host.as_mut().ok_or_else(no_host)?)
    }

    pub fn swap_in(&mut self, backend: &B, moves: &[BlockMove]) -> Result<()> {
        backend.swap_in(moves, self.host.as_mut().ok_or_else(no_host)?, &mut self.levels)
    }

    /// Returns the bytes of a block of the host tier. Without a tier there are none.
    pub fn host_block(&mut self, backend: &B, block: usize) -> &mut [u8] {
        self.host.as_mut().map_or(&mut [], |host| backend.host_block(host, block))
    }

    /// Appends the bytes of a sequence's blocks, level by level.
    pub fn read(&self, backend: &B, blocks: &[u32], tail: Tail, out: &mut Vec<u8>) -> Result<()> {
        self.levels.iter().try_for_each(|level| backend.read_blocks(blocks, tail, level, out))
    }

    /// Returns the bytes of one block in each of the arrays in which `read` stores blocks.
    pub fn part_bytes(&self, backend: &B) -> Vec<usize> {
        self.levels.iter().flat_map(|level| backend.kv_part_bytes(level)).collect()
    }

    pub fn write(&mut self, backend: &B, blocks: &[u32], bytes: &[u8]) -> Result<()> {
        self.levels.iter_mut().try_fold(bytes, |bytes, level| backend.write_blocks(blocks, level, bytes)).map(|_| ())
    }

    /// Copies whole blocks. An asynchronous device reports errors at the next read.
    pub fn copy(&mut self, backend: &B, copies: &[BlockCopy]) {
        backend.copy_blocks(copies, &mut self.levels);
    }

    /// Returns the memory of all blocks from index `blocks` on to the system, on all levels. An
    /// error on one level does not skip the others.
    pub fn discard(&mut self, backend: &B, blocks: usize) -> Result<()> {
        self.levels.iter_mut().map(|level| backend.discard_blocks(blocks, level)).fold(Ok(()), Result::and)
    }

    /// Returns a description of the KV layout of all layers.
    pub fn layout(&self, backend: &B) -> String {
        let levels = self.levels.iter().map(|level| backend.kv_layout(level)).collect::<Vec<_>>().join("; ");
        if self.groups == 1 { levels } else { format!("{} groups of {levels}", self.groups) }
    }
}

fn no_host() -> Error {
    Error::internal("swap without a host tier")
}

/// The size of a KV cache.
#[derive(Debug, Clone, Copy)]
pub struct KvPool {
    pub blocks: usize,
    pub block_size: usize,
    pub dtype: KvDtype,
}

impl KvPool {
    fn shape<L, N, V>(&self, layer: &Layer<L, N, V>) -> KvShape {
        let AttentionShape { kv_heads, head_dim, values, .. } = *layer.attention.shape();
        KvShape { blocks: self.blocks, block_size: self.block_size, kv_heads, head_dim, values, dtype: self.dtype }
    }

    /// Returns the bytes of one block of a whole model.
    pub fn block_bytes<B: KvOps>(&self, backend: &B, spec: &ModelSpec) -> u64 {
        self.block_bytes_with(backend, spec, &KvLayout::for_spec(spec))
    }

    /// Returns the bytes of one block of a part of a model: one layer of each level.
    pub fn block_bytes_with<B: KvOps>(&self, backend: &B, spec: &ModelSpec, layout: &KvLayout) -> u64 {
        layout.of_levels(&spec.layers).map(|layer| backend.kv_block_bytes(&self.shape(layer))).sum()
    }
}
