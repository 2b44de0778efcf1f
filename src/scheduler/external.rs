//! The prefix cache as a store of blocks outside of the pool and the readers of events use it.

use std::sync::Arc;

use super::Scheduler;
use crate::error::{Result, try_copy};
use crate::kv::events::CacheRecord;
use crate::kv::{BlockHash, BlockId, HashedTokens, Origin};
use crate::types::SeqId;

/// The full blocks at the start of a prompt.
#[derive(Debug, PartialEq, Eq)]
pub struct PromptBlocks {
    root: BlockHash,
    /// [places] The hashes of the blocks from which the prompt could continue.
    pub hashes: Vec<BlockHash>,
    /// Their tokens, if events are recorded.
    tokens: Vec<u32>,
}

/// The full blocks at the start of a prompt, some of which the prefix cache does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixLookup {
    pub prompt: Arc<PromptBlocks>,
    /// Number of places at the start that are cached.
    pub from: usize,
    /// [places - from, groups] Whether the prefix cache has the block.
    pub cached: Vec<bool>,
}

impl Scheduler {
    /// Returns the blocks that a waiting sequence could use. `None` if it needs no others than
    /// those of the prefix cache, or if its hashes mean nothing in a store.
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
        let (mut hashes, mut tokens, mut cached) = (Vec::new(), Vec::new(), Vec::new());
        hashes.try_reserve_exact(places)?;
        hashes.extend_from_slice(known);
        if self.blocks.records_events() {
            tokens = try_copy(&sequence.tokens[..places * block_size])?;
        }
        cached.try_reserve_exact((places - from) * groups)?;
        cached.extend(hashes[from..].iter().flat_map(|hash| (0..groups).map(|group| self.blocks.has_cached(group, hash))));
        let prompt = PromptBlocks { root: sequence.hashes.root(), hashes, tokens };
        Ok(Some(PrefixLookup { prompt: Arc::new(prompt), from, cached }))
    }

    /// Makes the cached blocks before `entry` the last ones to be evicted.
    pub fn refresh_before(&mut self, prompt: &PromptBlocks, entry: usize) {
        self.blocks.refresh(&prompt.hashes[..entry / self.blocks.paging().groups()]);
    }

    /// Inserts a block into the prefix cache. `write` writes its contents. Returns false if the
    /// pool has no block without an owner.
    pub fn insert_loaded(&mut self, prompt: &PromptBlocks, entry: usize, write: impl FnOnce(BlockId) -> Result<()>) -> Result<bool> {
        let PromptBlocks { root, hashes, tokens } = prompt;
        let groups = self.blocks.paging().groups();
        let (place, group) = (entry / groups, entry % groups);
        if self.blocks.has_cached(group, &hashes[place]) {
            return Ok(true);
        }
        let Ok(block) = self.blocks.take_for_load() else { return Ok(false) };
        let source = HashedTokens { root: *root, hashes, tokens, origin: Origin::Loaded };
        match write(block) {
            Ok(()) => self.blocks.insert_loaded(block, group, place, &source),
            Err(error) => {
                self.blocks.discard_loaded(block);
                return Err(error);
            }
        }
        Ok(true)
    }

    /// Logs the hashes of computed blocks that enter the prefix cache, up to `max_len` of them
    /// between two calls of `next_computed`.
    pub fn log_computed(&mut self, max_len: usize) -> Result<()> {
        self.blocks.log_computed(max_len)
    }

    /// Returns the oldest hash of the log and removes it.
    pub fn next_computed(&mut self) -> Option<BlockHash> {
        self.blocks.next_computed()
    }

    /// Records the changes of the empty prefix cache from now on.
    pub fn record_events(&mut self) -> Result<()> {
        self.blocks.record_events()
    }

    /// Returns the changes of the prefix cache, if they are recorded.
    pub fn cache_record(&mut self) -> Option<&mut CacheRecord> {
        self.blocks.cache_record()
    }
}
