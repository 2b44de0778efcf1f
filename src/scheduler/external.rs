//! The prefix cache as a store of blocks outside of the pool uses it.

use super::Scheduler;
use crate::error::Result;
use crate::kv::{BlockHash, BlockId, IndexChange};
use crate::types::SeqId;

/// The full blocks at the start of a prompt, some of which the prefix cache does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixLookup {
    /// [places] The hashes of the blocks from which the prompt could continue.
    pub hashes: Vec<BlockHash>,
    /// Number of places at the start that are cached.
    pub from: usize,
    /// [places - from, groups] Whether the prefix cache has the block.
    pub cached: Vec<bool>,
}

impl Scheduler {
    /// Returns the blocks that a waiting sequence could use. `None` if it needs no others than those
    /// of the prefix cache, or if its hashes mean nothing in a store.
    pub fn prefix_lookup(&mut self, id: SeqId) -> Result<Option<PrefixLookup>> {
        let block_size = self.blocks.block_size();
        let Some(slot) = self.sequences.find(id) else { return Ok(None) };
        let sequence = &mut self.sequences[slot];
        let useful = sequence.logits_from.unwrap_or(usize::MAX).min(sequence.tokens.len() - 1);
        let places = useful / block_size;
        if places == 0 || sequence.hashes.is_private() || sequence.computed > 0 {
            return Ok(None);
        }
        let known = sequence.block_hashes(places, block_size);
        let from = self.blocks.cached_places(known);
        if from == places {
            return Ok(None);
        }
        let groups = self.blocks.paging().groups();
        let (mut hashes, mut cached) = (Vec::new(), Vec::new());
        hashes.try_reserve_exact(places)?;
        hashes.extend_from_slice(known);
        cached.try_reserve_exact((places - from) * groups)?;
        cached.extend(hashes[from..].iter().flat_map(|hash| (0..groups).map(|group| self.blocks.has_cached(group, hash))));
        Ok(Some(PrefixLookup { hashes, from, cached }))
    }

    /// Makes the cached blocks of `hashes` the last ones to be evicted.
    pub fn refresh_prefix(&mut self, hashes: &[BlockHash]) {
        self.blocks.refresh(hashes);
    }

    /// Inserts a block into the prefix cache. `write` writes its contents. Returns false if the pool
    /// has no block without an owner.
    pub fn insert_loaded(&mut self, hashes: &[BlockHash], entry: usize, write: impl FnOnce(BlockId) -> Result<()>) -> Result<bool> {
        let groups = self.blocks.paging().groups();
        let (place, group) = (entry / groups, entry % groups);
        if self.blocks.has_cached(group, &hashes[place]) {
            return Ok(true);
        }
        let Ok(block) = self.blocks.take_for_load() else { return Ok(false) };
        match write(block) {
            Ok(()) => self.blocks.insert_loaded(block, group, place, hashes),
            Err(error) => {
                self.blocks.discard_loaded(block);
                return Err(error);
            }
        }
        Ok(true)
    }

    /// Logs the changes of the prefix cache, up to `max_len` of them between two calls of
    /// `next_index_change`.
    pub fn log_index_changes(&mut self, max_len: usize) -> Result<()> {
        self.blocks.log_changes(max_len)
    }

    /// Returns the oldest change of the prefix cache and removes it from the log.
    pub fn next_index_change(&mut self) -> Option<IndexChange> {
        self.blocks.next_change()
    }
}
