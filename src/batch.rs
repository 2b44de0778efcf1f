//! One forward pass as flat data. The scheduler writes it, the backend reads it; neither knows the other.

/// The rows (tokens) of many sequences back to back: prefill chunks and decode tokens mixed, no padding.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Batch {
    pub tokens: Vec<u32>,     // [rows]
    pub positions: Vec<u32>,  // [rows] place of the token in its sequence
    pub slots: Vec<u32>,      // [rows] where its K and V go: block * block_size + offset
    pub spans: Vec<Span>,     // [sequences]
    pub tables: Vec<u32>,     // the spans' block tables, back to back
    pub logit_rows: Vec<u32>, // [logits] rows whose logits are wanted
}

/// One sequence's part of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub first_row: u32,
    pub rows: u32,
    /// Where its block table begins in `Batch::tables`; it covers every position up to the last row's.
    pub table: u32,
}

impl Batch {
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.spans.clear();
        self.tables.clear();
        self.logit_rows.clear();
    }
}
