//! The least time that a piece of work can take: its bytes at the memory's speed, or its arithmetic at the cores'.

use pagedllm::engine::MemoryPlan;
use pagedllm::options::WeightFormat;
use serde::{Deserialize, Serialize};

use crate::cell::Cell;
use crate::model::VOCAB;

/// What one step of the engine consisted of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Tokens that went through the layers.
    pub rows: u64,
    /// Of these: those whose logits were computed, each of which gave a token.
    pub logits: u64,
    /// Positions whose K and V were looked back on, the rows' own included, each once for its sequence.
    pub positions: u64,
    /// Pairs of a row and a position that it looks back on.
    pub pairs: u64,
}

impl Step {
    /// A sequence takes part: `rows` of it after the `before` that were computed earlier.
    pub fn add(&mut self, before: u64, rows: u64) {
        let until = |end: u64| end * (end + 1) / 2;
        self.rows += rows;
        self.positions += before + rows;
        self.pairs += until(before + rows) - until(before);
    }
}

/// Operations a second.
#[derive(Debug, Clone, Copy, Default)]
pub struct Arithmetic {
    /// With the instruction that multiplies the weights.
    pub weights: f64,
    /// With that of attention.
    pub attention: f64,
}

impl Arithmetic {
    /// The best of each so far.
    pub fn max(self, other: Arithmetic) -> Arithmetic {
        Arithmetic { weights: self.weights.max(other.weights), attention: self.attention.max(other.attention) }
    }
}

/// What one model costs.
pub struct Costs {
    /// All weights but the embedding table, of which a token reads one row.
    weight_bytes: f64,
    body: f64,
    head: f64,
    /// Bytes of K and V of one position.
    position_bytes: f64,
    /// Operations of one query position against one key position.
    pair: f64,
}

impl Costs {
    pub fn of(Cell { shape, weights }: &Cell, plan: &MemoryPlan) -> Costs {
        let table_row = match weights {
            WeightFormat::F32 => 4 * shape.hidden,
            // In fp8 as it is stored.
            WeightFormat::F16 | WeightFormat::Bf16 | WeightFormat::Fp8 => 2 * shape.hidden,
            // In int8, with a scale.
            WeightFormat::Int8 | WeightFormat::Int4 { .. } => shape.hidden + 4,
        };
        Costs {
            weight_bytes: plan.weight_bytes as f64 - (VOCAB * table_row) as f64,
            body: shape.body() as f64,
            head: shape.head() as f64,
            position_bytes: plan.block_bytes as f64 / plan.block_size as f64,
            pair: (4 * shape.layers * shape.hidden) as f64, // score and value, two operations each
        }
    }

    /// All that a step has to read from memory.
    pub fn bytes(&self, step: &Step) -> f64 {
        self.weight_bytes + self.position_bytes * step.positions as f64
    }

    pub fn seconds(&self, step: &Step, bandwidth: f64, arithmetic: Arithmetic) -> f64 {
        let products = 2.0 * (self.body * step.rows as f64 + self.head * step.logits as f64);
        let attention = self.pair * step.pairs as f64;
        (self.bytes(step) / bandwidth).max(products / arithmetic.weights + attention / arithmetic.attention)
    }
}
