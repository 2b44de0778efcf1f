//! One forward pass as flat data. The scheduler writes it, the backend reads it; neither knows the other.

pub mod draws;

use crate::error::Result;

/// The rows (tokens) of many sequences back to back: prefill chunks and decode tokens mixed, no padding.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Batch {
    pub tokens: Vec<u32>,       // [rows]
    pub positions: Vec<u32>,    // [rows] place of the token in its sequence
    pub slots: Vec<u32>,        // [rows, groups] where its K and V go in the layers of each group: block * block_size + offset
    pub spans: Vec<Span>,       // [sequences]
    pub tables: Vec<u32>,       // [places, groups] the spans' block tables, back to back
    pub logit_rows: Vec<u32>,   // [logits] rows whose logits are wanted
    pub copies: Vec<BlockCopy>, // block copies to make first, in any order
    /// [rows, groups] Where K and V of the token go that is chosen from each row, or `NOWHERE`: it is the sequence's last. Nothing where what
    /// comes after this step cannot be foreseen: that each of its rows is followed by such a token, and nobody joins.
    pub next_slots: Vec<u32>,
}

/// Instead of a slot: K and V are not kept.
pub const NOWHERE: u32 = u32::MAX;

/// All of a block's K and V, in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: u32,
    pub to: u32,
}

/// A block's place on the device and in the host tier: all of its K and V, in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockMove {
    pub device: u32,
    pub host: u32,
}

/// The last of a sequence's blocks, which may not be full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    pub blocks: usize,
    /// The first slots of each that hold a token's K and V.
    pub slots: usize,
}

/// Moves between the tiers, made before anything is computed: all that go out, and then all that come back. No block is
/// written twice.
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

/// One sequence's part of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub first_row: u32,
    pub rows: u32,
    /// Where its block table begins in `Batch::tables`; it covers every position up to the last row's. What no row looks back on
    /// is some block: where it is gone, the sequence's newest of the group.
    pub table: u32,
}

impl Batch {
    /// Makes room for the largest batch, so that no step has to.
    pub fn reserve(&mut self, rows: usize, sequences: usize, blocks: usize, groups: usize) -> Result<()> {
        self.tokens.try_reserve(rows)?;
        self.positions.try_reserve(rows)?;
        self.slots.try_reserve(rows * groups)?;
        self.spans.try_reserve(sequences)?;
        self.tables.try_reserve(blocks)?;
        self.copies.try_reserve(sequences * groups)?;
        self.next_slots.try_reserve(sequences * groups)?;
        Ok(self.logit_rows.try_reserve(sequences)?)
    }

    /// Becomes a copy of `other`.
    pub fn copy_from(&mut self, other: &Batch) -> Result<()> {
        self.clear();
        let sequences = other.spans.len().max(other.logit_rows.len()).max(other.copies.len());
        self.reserve(other.rows(), sequences, other.tables.len(), other.groups())?;
        self.tokens.extend_from_slice(&other.tokens);
        self.positions.extend_from_slice(&other.positions);
        self.slots.extend_from_slice(&other.slots);
        self.spans.extend_from_slice(&other.spans);
        self.tables.extend_from_slice(&other.tables);
        self.logit_rows.extend_from_slice(&other.logit_rows);
        self.copies.extend_from_slice(&other.copies);
        self.next_slots.extend_from_slice(&other.next_slots);
        Ok(())
    }

    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Groups of layers that have K and V in blocks of their own.
    pub fn groups(&self) -> usize {
        self.slots.len().checked_div(self.rows()).map_or(1, |groups| groups.max(1))
    }

    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.spans.clear();
        self.tables.clear();
        self.logit_rows.clear();
        self.copies.clear();
        self.next_slots.clear();
    }
}
