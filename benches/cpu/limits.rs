//! Lower bound of the time of a step: its bytes at the memory bandwidth, or its operations at the
//! arithmetic rate of the cores.

use pagedllm::engine::MemoryPlan;
use pagedllm::types::options::WeightFormat;
use serde::{Deserialize, Serialize};

use crate::cell::Cell;
use crate::model::VOCAB;

/// Work of one step of the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Tokens that the layers computed.
    pub rows: u64,
    /// Tokens whose logits were computed. Each produced an output token.
    pub logits: u64,
    /// Visible positions whose K and V were read, each once per sequence. New positions are
    /// included.
    pub positions: u64,
    /// Pairs of a token and a position that is visible to it.
    pub pairs: u64,
}

impl Step {
    /// Adds `rows` tokens of a sequence with `before` computed tokens.
    pub fn add(&mut self, before: u64, rows: u64) {
        let until = |end: u64| end * (end + 1) / 2;
        self.rows += rows;
        self.positions += before + rows;
        self.pairs += until(before + rows) - until(before);
    }
}

/// Operations per second.
#[derive(Debug, Clone, Copy, Default)]
pub struct Arithmetic {
    /// Rate of the instruction that multiplies weights.
    pub weights: f64,
    /// Rate of the instruction of attention.
    pub attention: f64,
}

impl Arithmetic {
    /// The higher of both rates, for each instruction.
    pub fn max(self, other: Arithmetic) -> Arithmetic {
        Arithmetic { weights: self.weights.max(other.weights), attention: self.attention.max(other.attention) }
    }
}

/// Bytes and operations of one model.
pub struct Costs {
    /// All weights except the embedding table, of which a token reads one row.
    weight_bytes: f64,
    body: f64,
    head: f64,
    /// Bytes of K and V of one position.
    position_bytes: f64,
    /// Operations of one query position against one key position.
    pair: f64,
}

impl Costs {
    pub fn new(Cell { shape, weights }: &Cell, plan: &MemoryPlan) -> Costs {
        let table_row = match weights.arithmetic() {
            WeightFormat::F32 => 4 * shape.hidden,
            // With fp8 weights the table keeps its stored format.
            WeightFormat::F16 | WeightFormat::Bf16 | WeightFormat::Fp8 => 2 * shape.hidden,
            // The table is in int8, with one scale per row. In files, it is about that size.
            WeightFormat::Int8 | WeightFormat::Int4 { .. } => shape.hidden + 4,
        };
        Costs {
            weight_bytes: plan.weight_bytes as f64 - (VOCAB * table_row) as f64,
            body: shape.body() as f64,
            head: shape.head() as f64,
            position_bytes: plan.block_bytes as f64 / plan.block_size as f64,
            pair: (4 * shape.layers * shape.hidden) as f64, // scores and values, two operations each
        }
    }

    /// Bytes that a step reads from memory.
    pub fn bytes(&self, step: &Step) -> f64 {
        self.weight_bytes + self.position_bytes * step.positions as f64
    }

    pub fn seconds(&self, step: &Step, bandwidth: f64, arithmetic: Arithmetic) -> f64 {
        let products = 2.0 * (self.body * step.rows as f64 + self.head * step.logits as f64);
        let attention = self.pair * step.pairs as f64;
        (self.bytes(step) / bandwidth).max(products / arithmetic.weights + attention / arithmetic.attention)
    }
}
