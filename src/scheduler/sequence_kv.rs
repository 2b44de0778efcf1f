use super::block_hashes::BlockHashes;
use super::ids::GroupId;
use super::in_flight::InFlight;
use super::length_limit::LengthLimit;
use super::outcome::TokenOutcome;
use crate::error::Result;
use crate::kv::{BlockHash, BlockTable, HashedTokens, Paging, blocks_for};
use crate::types::SeqId;
use crate::types::outputs::FinishReason;
use crate::types::timing::SequenceStats;

/// The tokens of one sequence and the blocks that hold their K and V. The scheduler needs no other
/// state of a sequence, and keeps this state in a slot, so that a step looks up no id.
#[derive(Debug, Default)]
pub struct SequenceKv {
    pub id: SeqId,
    /// Group of the sequence. `None` if it is idle or a computed pin.
    pub group: Option<GroupId>,
    /// Properties of the request, or of the parent.
    pub(super) request: RequestProperties,
    /// Value of a counter when it became idle. Larger values are more recent. `None` if it is not
    /// idle. An idle sequence belongs to no group and waits for the host to resume or free it.
    pub(super) idle_since: Option<u64>,
    pub tokens: Vec<u32>,
    /// Number of tokens generated since it started or was resumed.
    pub generated: usize,
    /// Number of tokens whose K and V are stored.
    pub computed: usize,
    pub(super) in_flight: InFlight,
    pub(super) limit: LengthLimit,
    /// Whether a step has computed a part of it since it was added, forked or resumed.
    pub started: bool,
    /// Whether a sampled token of the current commit continues it in place.
    pub chosen: bool,
    /// First position whose logits are wanted. `None` selects the last row only.
    pub logits_from: Option<usize>,
    pub stats: SequenceStats,
    pub table: BlockTable,
    pub(super) hashes: BlockHashes,
}

/// The properties of a request that its sequences keep.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RequestProperties {
    pub priority: i32,
    /// Whether the sequence stays idle when it ends.
    pub keep: bool,
    /// Whether the sequence is a pin: it samples nothing, and its blocks stay until it is removed.
    pub pinned: bool,
    /// Whether the sequence ends when its tokens have been computed, without a generated token.
    pub prompt_only: bool,
}

impl RequestProperties {
    /// Returns whether a sequence of `len` tokens that ends at `max_len` has room for the tokens
    /// that it generates.
    pub fn has_room(&self, len: usize, max_len: usize) -> bool {
        if self.prompt_only { len <= max_len } else { len < max_len }
    }
}

impl SequenceKv {
    /// Creates a sequence and reserves all memory that a step would otherwise allocate.
    pub fn new(id: SeqId, prompt: Vec<u32>, max_len: usize, root: BlockHash, paging: &Paging) -> Result<SequenceKv> {
        let mut sequence = SequenceKv { id, tokens: prompt, hashes: BlockHashes::new(root), ..SequenceKv::default() };
        sequence.raise_max_len(max_len, paging)?;
        Ok(sequence)
    }

    /// Raises the maximum length to `max_len` tokens.
    pub fn raise_max_len(&mut self, max_len: usize, paging: &Paging) -> Result<()> {
        self.reserve(max_len, paging)?;
        self.limit.set(max_len);
        Ok(())
    }

    /// Reserves space for `max_len` tokens.
    fn reserve(&mut self, max_len: usize, paging: &Paging) -> Result<()> {
        let blocks = blocks_for(max_len, paging.block_size());
        self.tokens.try_reserve_exact(max_len.saturating_sub(self.tokens.len()))?;
        self.hashes.try_reserve(blocks)?;
        self.table.reserve(paging.entries(max_len))
    }

    /// Creates an unused sequence with the memory that a fork of `max_len` tokens needs.
    pub fn preallocated(max_len: usize, paging: &Paging) -> Result<SequenceKv> {
        SequenceKv::new(SeqId::default(), Vec::new(), max_len, BlockHash::default(), paging)
    }

    /// Extends an unused sequence so that it can hold a fork of `parent`, which has become longer.
    pub fn reserve_for_fork(&mut self, parent: &SequenceKv, paging: &Paging) -> Result<()> {
        self.limit.reserve_for_fork(&parent.limit)?;
        self.tokens.clear();
        self.hashes.truncate(0);
        self.raise_max_len(parent.max_len(), paging)
    }

    /// Returns a fork with the first `len` tokens and without blocks. It reuses the memory of
    /// `shell`, an unused or dropped sequence.
    pub fn branch(&self, shell: SequenceKv, id: SeqId, len: usize, paging: &Paging) -> Result<SequenceKv> {
        let SequenceKv { tokens, hashes, limit, table, .. } = shell;
        let mut child = SequenceKv {
            id,
            tokens,
            hashes,
            limit,
            table,
            request: RequestProperties { pinned: false, ..self.request },
            generated: self.generated.saturating_sub(self.tokens.len() - len),
            logits_from: self.logits_from.map(|from| from.min(len)),
            stats: self.stats,
            ..SequenceKv::default()
        };
        child.tokens.clear();
        child.hashes.truncate(0);
        child.limit.reserve_for_fork(&self.limit)?;
        child.reserve(self.max_len().max(len), paging)?;
        child.tokens.extend_from_slice(&self.tokens[..len]);
        child.hashes.copy_from(&self.hashes, len / paging.block_size());
        child.limit.copy_from(&self.limit);
        child.limit.revert_extensions(len);
        Ok(child)
    }

    /// Returns the number of tokens to compute. It is 1 during decoding.
    #[inline]
    pub fn pending(&self) -> usize {
        self.expected_len() - self.scheduled()
    }

    pub fn is_idle(&self) -> bool {
        self.idle_since.is_some()
    }

    /// Returns whether the sequence stays idle when it ends.
    pub fn is_kept(&self) -> bool {
        self.request.keep
    }

    /// Returns the length in tokens at which the sequence ends.
    #[inline]
    pub fn max_len(&self) -> usize {
        self.limit.max_len()
    }

    /// Returns the maximum number of tokens that the sequence can generate in this generation.
    pub fn max_new_tokens(&self) -> usize {
        self.max_len().saturating_sub(self.tokens.len()) + self.generated
    }

    /// Appends the sampled token. Returns the finish reason if the sequence ends.
    #[inline]
    pub fn apply(&mut self, outcome: TokenOutcome) -> Option<FinishReason> {
        let (token, stops) = match outcome {
            TokenOutcome::Token(token) => (token, false),
            TokenOutcome::Stop(token) => (token, true),
            TokenOutcome::Complete => return Some(FinishReason::Length),
            TokenOutcome::Fail => return Some(FinishReason::Error),
        };
        self.tokens.push(token);
        self.generated += 1;
        match stops {
            true => Some(FinishReason::Stop),
            false if self.tokens.len() >= self.max_len() => Some(FinishReason::Length),
            false => None,
        }
    }

    /// Truncates the sequence to `len` tokens. Computed tokens before `len` stay computed.
    pub fn truncate(&mut self, len: usize, block_size: usize) {
        self.generated = self.generated.saturating_sub(self.tokens.len() - len);
        self.tokens.truncate(len);
        self.hashes.truncate(len / block_size);
        self.computed = self.computed.min(len);
        self.logits_from = self.logits_from.map(|from| from.min(len));
        self.limit.revert_extensions(len);
    }

    /// Appends tokens that do not count as generated. The maximum length grows by their number, up
    /// to `max_model_len`.
    pub fn append(&mut self, tokens: &[u32], max_model_len: usize, paging: &Paging) -> Result<()> {
        let (at, len) = (self.tokens.len(), self.tokens.len() + tokens.len());
        let max_len = self.max_len().saturating_add(tokens.len()).clamp(len, max_model_len);
        self.limit.reserve_extension()?;
        self.reserve(max_len, paging)?;
        self.limit.extend(max_len, at, tokens.len());
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// Returns the hashes of the first `blocks` blocks, which must be full.
    pub fn block_hashes(&mut self, blocks: usize, block_size: usize) -> &[BlockHash] {
        self.hashes.compute(blocks, &self.tokens, block_size);
        &self.hashes.known()[..blocks]
    }

    pub fn table_and_hashes(&mut self) -> (&mut BlockTable, HashedTokens<'_>) {
        (&mut self.table, self.hashes.of_tokens(&self.tokens))
    }

    /// Returns the length of the common prefix if it exceeds `min_len`. The last token of each
    /// sequence is excluded, since it must be computed.
    pub fn common(&self, other: &SequenceKv, min_len: usize) -> Option<usize> {
        let max_len = self.tokens.len().min(other.tokens.len()) - 1;
        if min_len >= max_len || self.tokens[min_len] != other.tokens[min_len] {
            return None;
        }
        let common = self.tokens[..max_len].iter().zip(&other.tokens[..max_len]).take_while(|(a, b)| a == b).count();
        (common > min_len).then_some(common)
    }

    /// Returns the hashes that have been computed so far.
    pub fn known_block_hashes(&self) -> &[BlockHash] {
        self.hashes.known()
    }

    /// Panics unless the invariants between two steps hold. For tests.
    pub fn check(&self, block_size: usize) {
        if self.group.is_some() {
            assert!(self.computed < self.tokens.len(), "the last token of a queued sequence is still to be computed");
            assert!(
                self.request.pinned || self.request.has_room(self.tokens.len(), self.max_len()),
                "an unfinished sequence has room for a token"
            );
        }
        assert!(self.logits_from.is_none_or(|from| from <= self.tokens.len()), "logits are wanted of what there is or comes next");
        assert!(self.computed <= self.tokens.len(), "no more is computed than there is");
        let blocks = self.table.places();
        assert!(blocks >= blocks_for(self.computed, block_size), "every computed token has a slot");
        assert!(blocks <= blocks_for(self.expected_len(), block_size), "no block is reserved for tokens that do not exist");
        assert!(self.hashes.known().len() <= self.tokens.len() / block_size, "only full blocks have a chain");
    }

    /// Panics unless the hashes match the tokens. For tests.
    #[cfg(test)]
    pub fn check_chains(&self, block_size: usize) {
        self.hashes.check(&self.tokens, block_size);
    }
}
