//! Blocks of the prefix cache that a store outside of the pool reads or supplies.

use super::BlockManager;
use crate::error::Result;
use crate::kv::prefix_cache::{BlockHash, IndexChange, Origin};
use crate::kv::{BlockId, NoSpace};

impl BlockManager {
    /// Logs the changes of the prefix cache, up to `max_len` of them between two calls of
    /// `next_change`.
    pub fn log_changes(&mut self, max_len: usize) -> Result<()> {
        self.prefix.as_mut().map_or(Ok(()), |prefix| prefix.log_changes(max_len))
    }

    /// Returns the oldest change of the prefix cache and removes it from the log.
    pub fn next_change(&mut self) -> Option<IndexChange> {
        self.prefix.as_mut()?.next_change()
    }

    /// Returns the number of changes that the log has lost.
    pub fn lost_changes(&self) -> u64 {
        self.prefix.as_ref().map_or(0, |prefix| prefix.lost_changes())
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
    /// place in `hashes`.
    pub fn insert_loaded(&mut self, block: BlockId, group: usize, place: usize, hashes: &[BlockHash]) {
        let (tokens, of_group) = (self.size.tokens(), |place: usize| hashes[place].for_group(group));
        let is_windowed = self.paging.windows()[group].is_some();
        let Some(prefix) = &mut self.prefix else { return self.release(block) };
        let parent = place.checked_sub(1).map(of_group);
        if prefix.find_or_insert(of_group(place), parent.filter(|_| !is_windowed), block) == block {
            prefix.log_stored(of_group(place), parent, Origin::Loaded);
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
