//! The input of one forward pass as flat data. The scheduler writes it and the backend reads it.
//! Neither module depends on the other.

pub mod device_sampling;

use crate::error::{Error, Result};

/// The tokens of all sequences of a step back to back, without padding. Prefill chunks and
/// decode tokens are mixed.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Batch {
    pub tokens: Vec<u32>,    // [tokens]
    pub positions: Vec<u32>, // [tokens] position of each token in its sequence
    /// [tokens, groups] The KV slot of each token in the layers of each group: block * block_size +
    /// offset.
    pub slots: Vec<u32>,
    pub spans: Vec<Span>,       // [sequences]
    pub tables: Vec<u32>,       // [table entries, groups] block tables of the spans, back to back
    pub logit_rows: Vec<u32>,   // [logits] indices of the tokens whose logits are computed
    pub copies: Vec<BlockCopy>, // block copies that precede the computation, in any order
    /// The tokens that the previous step samples on the device. `tokens` has 0 for them. Empty if
    /// the previous step is complete.
    pub placeholders: Vec<Placeholder>,
}

/// The value of a slot if K and V are not stored.
pub const NO_SLOT: u32 = u32::MAX;

/// A token that the previous step samples on the device, so that the host does not know it yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placeholder {
    /// Index of the token in the batch.
    pub token: u32,
    /// Index of the device sample of the previous step.
    pub sample: u32,
}

/// A copy of all K and V of a block, in the layers of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: u32,
    pub to: u32,
}

/// A block on the device and its block in the host tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockMove {
    pub device: u32,
    pub host: u32,
}

/// The last blocks of a sequence, which may be partly filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    pub blocks: usize,
    /// Number of filled slots in each of these blocks.
    pub slots: usize,
}

/// Transfers between the tiers, made before the computation: first all that go to the host tier,
/// then all that return. No block is written twice.
#[derive(Debug, Default)]
pub struct Moves {
    pub out: Vec<BlockMove>,
    pub back: Vec<BlockMove>,
}

impl Moves {
    pub fn is_empty(&self) -> bool {
        self.out.is_empty() && self.back.is_empty()
    }
}

/// The tokens of one sequence in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub first_token: u32,
    pub tokens: u32,
    /// Index of the first entry of the block table in `Batch::tables`. The table covers all
    /// positions up to the last token. An entry outside the window of all tokens refers to the
    /// newest block of its group.
    pub table: u32,
}

/// The blocks and positions that exist on a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    pub blocks: usize,
    /// Blocks of the host tier.
    pub host_blocks: usize,
    pub block_size: usize,
    /// Number of layer groups, which have block tables of their own.
    pub groups: usize,
    /// Maximum length of a sequence in tokens.
    pub max_len: usize,
}

impl Bounds {
    /// Returns whether all blocks exist.
    pub fn contain(&self, blocks: &[u32]) -> bool {
        blocks.iter().all(|&block| (block as usize) < self.blocks)
    }

    /// Returns whether the blocks of all copies exist.
    pub fn contain_copies(&self, copies: &[BlockCopy]) -> bool {
        copies.iter().all(|copy| self.contain(&[copy.from, copy.to]))
    }

    /// Returns whether the blocks of all moves exist on both sides.
    pub fn contain_moves(&self, moves: &[BlockMove]) -> bool {
        moves.iter().all(|moved| self.contain(&[moved.device]) && (moved.host as usize) < self.host_blocks)
    }
}

impl Batch {
    /// Reserves space for the largest batch, so that no step allocates.
    pub fn reserve(&mut self, tokens: usize, sequences: usize, blocks: usize, groups: usize) -> Result<()> {
        self.tokens.try_reserve(tokens)?;
        self.positions.try_reserve(tokens)?;
        self.slots.try_reserve(tokens * groups)?;
        self.spans.try_reserve(sequences)?;
        self.tables.try_reserve(blocks)?;
        self.copies.try_reserve(sequences * groups)?;
        self.placeholders.try_reserve(sequences)?;
        Ok(self.logit_rows.try_reserve(sequences)?)
    }

    /// Makes this batch a copy of `other`.
    pub fn copy_from(&mut self, other: &Batch) -> Result<()> {
        self.clear();
        let sequences = other.spans.len().max(other.logit_rows.len()).max(other.copies.len());
        self.reserve(other.token_count(), sequences, other.tables.len(), other.groups())?;
        self.tokens.extend_from_slice(&other.tokens);
        self.positions.extend_from_slice(&other.positions);
        self.slots.extend_from_slice(&other.slots);
        self.spans.extend_from_slice(&other.spans);
        self.tables.extend_from_slice(&other.tables);
        self.logit_rows.extend_from_slice(&other.logit_rows);
        self.copies.extend_from_slice(&other.copies);
        self.placeholders.extend_from_slice(&other.placeholders);
        Ok(())
    }

    /// Checks that no index is out of range. A batch of another process may have any numbers.
    pub fn check(&self, bounds: &Bounds) -> Result<()> {
        let (tokens, groups, below) = (self.token_count(), bounds.groups, |index: u32, limit: usize| (index as usize) < limit);
        let is_in_table = |span: &Span| {
            let (first, end) = (span.first_token as usize, (span.first_token as usize).checked_add(span.tokens as usize)?);
            let positions = self.positions.get(first..end)?;
            let last = *positions.last()?;
            let entries = (last as usize / bounds.block_size + 1).checked_mul(groups)?;
            let is_complete = (span.table as usize).checked_add(entries)? <= self.tables.len();
            Some(is_complete && below(last, bounds.max_len) && positions.iter().all(|&position| position <= last))
        };
        let is_valid = self.positions.len() == tokens
            && self.slots.len() == tokens * groups
            && self.slots.iter().all(|&slot| slot == NO_SLOT || below(slot, bounds.blocks * bounds.block_size))
            && self.spans.iter().all(|span| is_in_table(span) == Some(true))
            && self.spans.iter().map(|span| span.tokens as usize).sum::<usize>() == tokens
            && bounds.contain(&self.tables)
            && self.logit_rows.iter().all(|&row| below(row, tokens))
            && bounds.contain_copies(&self.copies)
            && self.placeholders.iter().all(|placeholder| below(placeholder.token, tokens));
        match is_valid {
            true => Ok(()),
            false => Err(Error::internal("a batch refers to tokens, positions or blocks that it does not have")),
        }
    }

    pub fn token_count(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the number of layer groups, which have KV blocks of their own.
    pub fn groups(&self) -> usize {
        self.slots.len().checked_div(self.token_count()).map_or(1, |groups| groups.max(1))
    }

    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.spans.clear();
        self.tables.clear();
        self.logit_rows.clear();
        self.copies.clear();
        self.placeholders.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two groups of layers, two sequences, blocks of 8 tokens.
    fn batch() -> Batch {
        Batch {
            tokens: vec![5, 6, 7],
            positions: vec![0, 1, 9],
            slots: vec![16, 17, NO_SLOT, 16, 17, 39],
            spans: vec![Span { first_token: 0, tokens: 2, table: 0 }, Span { first_token: 2, tokens: 1, table: 2 }],
            tables: vec![1, 1, 2, 2, 3, 4],
            logit_rows: vec![1, 2],
            copies: vec![BlockCopy { from: 3, to: 4 }],
            placeholders: vec![Placeholder { token: 2, sample: 0 }],
        }
    }

    #[test]
    fn indices_out_of_range_are_found() {
        let bounds = Bounds { blocks: 5, host_blocks: 3, block_size: 8, groups: 2, max_len: 10 };
        assert_eq!(batch().check(&bounds), Ok(()));
        let smaller = [
            Bounds { blocks: 4, ..bounds },
            Bounds { block_size: 4, ..bounds },
            Bounds { groups: 1, ..bounds },
            Bounds { max_len: 9, ..bounds },
        ];
        assert!(smaller.iter().all(|bounds| batch().check(bounds).is_err()));
        let changes: [fn(&mut Batch); 14] = [
            |batch| batch.positions[0] = 2,
            |batch| batch.spans[0].tokens = 1,
            |batch| batch.positions[2] = 16,
            |batch| batch.positions[2] = u32::MAX,
            |batch| _ = batch.positions.pop(),
            |batch| _ = batch.slots.pop(),
            |batch| batch.slots[0] = 40,
            |batch| batch.spans[1].first_token = 3,
            |batch| batch.spans[1].tokens = 0,
            |batch| batch.spans[1].tokens = u32::MAX,
            |batch| batch.spans[1].table = 3,
            |batch| batch.tables[5] = 5,
            |batch| batch.logit_rows[1] = 3,
            |batch| batch.copies[0].to = 5,
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut batch = batch();
            change(&mut batch);
            assert!(batch.check(&bounds).is_err(), "change {number}");
        }
    }

    #[test]
    fn blocks_out_of_range_are_found() {
        let bounds = Bounds { blocks: 5, host_blocks: 3, block_size: 8, groups: 2, max_len: 10 };
        assert!(bounds.contain(&[0, 4]) && !bounds.contain(&[0, 5]));
        let moves = |device, host| bounds.contain_moves(&[BlockMove { device, host }]);
        assert!(moves(4, 2) && !moves(5, 2) && !moves(4, 3));
        let copies = |from, to| bounds.contain_copies(&[BlockCopy { from, to }]);
        assert!(copies(4, 4) && !copies(5, 4) && !copies(4, 5));
    }
}
