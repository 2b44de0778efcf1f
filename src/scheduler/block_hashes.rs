//! The block hashes of a sequence.

use crate::error::Result;
use crate::kv::{BlockHash, HashedTokens, Origin};

/// The hashes of the full blocks of a sequence, as far as they are computed.
#[derive(Debug, Default)]
pub(super) struct BlockHashes {
    /// Initial hash. Sequences with the same value share prefixes.
    root: BlockHash,
    /// Whether the root is that of one sequence, so that the hashes mean nothing elsewhere.
    is_private: bool,
    hashes: Vec<BlockHash>,
}

impl BlockHashes {
    pub fn new(root: BlockHash) -> BlockHashes {
        BlockHashes { root, is_private: false, hashes: Vec::new() }
    }

    /// Marks the root as that of one sequence.
    pub fn mark_private(&mut self) {
        self.is_private = true;
    }

    /// Returns the initial hash.
    pub fn root(&self) -> BlockHash {
        self.root
    }

    pub fn is_private(&self) -> bool {
        self.is_private
    }

    /// Reserves space for `blocks` hashes in total.
    pub fn try_reserve(&mut self, blocks: usize) -> Result<()> {
        Ok(self.hashes.try_reserve_exact(blocks.saturating_sub(self.hashes.len()))?)
    }

    /// Makes this a copy of the first `blocks` hashes of `parent`, without an allocation.
    pub fn copy_from(&mut self, parent: &BlockHashes, blocks: usize) {
        (self.root, self.is_private) = (parent.root, parent.is_private);
        self.hashes.clear();
        self.hashes.extend_from_slice(&parent.hashes[..parent.hashes.len().min(blocks)]);
    }

    pub fn truncate(&mut self, blocks: usize) {
        self.hashes.truncate(blocks);
    }

    /// Computes the hashes of the first `blocks` blocks of `tokens`, which must be full.
    pub fn compute(&mut self, blocks: usize, tokens: &[u32], block_size: usize) {
        for place in self.hashes.len()..blocks {
            let before = self.hashes.last().unwrap_or(&self.root);
            let hash = before.next(&tokens[place * block_size..][..block_size]);
            self.hashes.push(hash);
        }
    }

    /// Returns the hashes that have been computed so far, with the tokens.
    pub fn of_tokens<'a>(&'a self, tokens: &'a [u32]) -> HashedTokens<'a> {
        let origin = if self.is_private { Origin::Private } else { Origin::Computed };
        HashedTokens { root: self.root, hashes: &self.hashes, tokens, origin }
    }

    /// Returns the hashes that have been computed so far.
    pub fn known(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Panics unless the hashes match the tokens. For tests.
    #[cfg(test)]
    pub fn check(&self, tokens: &[u32], block_size: usize) {
        let mut hash = self.root;
        for (tokens, known) in tokens.chunks_exact(block_size).zip(&self.hashes) {
            hash = hash.next(tokens);
            assert_eq!(hash, *known, "each block hash equals the hash of its tokens");
        }
    }
}
