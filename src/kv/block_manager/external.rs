//! Blocks of the prefix cache that a store outside of the pool reads or supplies.

use super::BlockManager;
use crate::error::Result;
use crate::kv::events::CacheRecord;
use crate::kv::prefix_cache::HashedTokens;
use crate::kv::{BlockHash, BlockId, NoSpace};

impl BlockManager {
    /// Logs the hashes of computed blocks that enter the prefix cache, up to `max_len` of them
    /// between two calls of `next_computed`.
    pub fn log_computed(&mut self, max_len: usize) -> Result<()> {
        self.prefix.as_mut().map_or(Ok(()), |prefix| prefix.log_computed(max_len))
    }

    /// Returns the oldest hash of the log and removes it.
    pub fn next_computed(&mut self) -> Option<BlockHash> {
        self.prefix.as_mut()?.next_computed()
    }

    /// Records the changes of the empty prefix cache from now on.
    pub fn record_events(&mut self) -> Result<()> {
        let block_size = self.block_size();
        self.prefix.as_mut().map_or(Ok(()), |prefix| prefix.record_events(block_size))
    }

    /// Returns the changes of the prefix cache, if they are recorded.
    pub fn cache_record(&mut self) -> Option<&mut CacheRecord> {
        self.prefix.as_mut()?.record()
    }

    /// Returns whether the changes of the prefix cache are recorded.
    pub fn records_events(&self) -> bool {
        self.prefix.as_ref().is_some_and(|prefix| prefix.records_events())
    }

    /// Returns the block with this hash of a layer group.
    pub fn cached_block(&self, hash: &BlockHash) -> Option<BlockId> {
        self.prefix.as_ref()?.find(hash)
    }

    /// Returns the number of places at the start of `hashes` after which a sequence can continue.
    pub fn cached_places(&self, hashes: &[BlockHash]) -> usize {
        self.cached_prefix(0, hashes)
    }

    /// Returns whether the cache has the block of a layer group.
    pub fn has_cached(&self, group: usize, hash: &BlockHash) -> bool {
        self.find(group, hash).is_some()
    }

    /// Makes the unreferenced cached blocks of `hashes` the most recently used ones.
    pub fn refresh(&mut self, hashes: &[BlockHash]) {
        let Some(prefix) = &mut self.prefix else { return };
        for hash in hashes.iter().rev() {
            for group in 0..self.paging.groups() {
                if let Some(block) = prefix.find(&hash.for_group(group)).filter(|&block| prefix.is_unused(block)) {
                    prefix.mark_used(block);
                    prefix.mark_unused(block);
                }
            }
        }
    }

    /// Takes a free block, or the least recently used cached one, for contents from a store.
    /// `insert_loaded` or `discard_loaded` ends its use.
    pub fn take_for_load(&mut self) -> std::result::Result<BlockId, NoSpace> {
        self.take()
    }

    /// Inserts a block of `take_for_load` into the prefix cache, without an owner. `place` is its
    /// place in `source`.
    pub fn insert_loaded(&mut self, block: BlockId, group: usize, place: usize, source: &HashedTokens) {
        let (tokens, is_windowed) = (self.size.tokens(), self.paging.windows()[group].is_some());
        let Some(prefix) = &mut self.prefix else { return self.release(block) };
        if prefix.insert(block, source, place, group, is_windowed) == block {
            self.filled[block as usize] = tokens as u16;
            self.filled_slots += tokens;
        }
        self.release(block);
    }

    /// Returns a block of `take_for_load` whose contents could not be written.
    pub fn discard_loaded(&mut self, block: BlockId) {
        self.release(block);
    }
}
