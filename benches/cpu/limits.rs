//! The least time that a piece of work can take: its bytes at the memory's speed, or its arithmetic at the cores'.

use pagedllm::options::WeightFormat;

use crate::model::{Shape, VOCAB};

/// What must be read and computed.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    pub bytes: f64,
    /// Of products with weights.
    pub operations: f64,
    /// Of attention, in f32 whatever the weights.
    pub attention: f64,
}

/// Operations a second.
#[derive(Debug, Clone, Copy, Default)]
pub struct Arithmetic {
    /// With the weights' format.
    pub weights: f64,
    pub f32: f64,
}

impl Arithmetic {
    /// The best of each so far.
    pub fn max(self, other: Arithmetic) -> Arithmetic {
        Arithmetic { weights: self.weights.max(other.weights), f32: self.f32.max(other.f32) }
    }
}

impl Work {
    pub fn seconds(&self, bandwidth: f64, arithmetic: Arithmetic) -> f64 {
        (self.bytes / bandwidth).max(self.operations / arithmetic.weights + self.attention / arithmetic.f32)
    }
}

/// What one model costs.
pub struct Costs {
    /// All weights but the embedding table, of which a token reads one row.
    weight_bytes: f64,
    body: f64,
    head: f64,
    /// Bytes of K and V of one position.
    kv_bytes: f64,
    /// Operations of one query position against one key position.
    attention: f64,
}

impl Costs {
    pub fn of(shape: &Shape, weights: WeightFormat, weight_bytes: u64, kv_head_bytes: usize) -> Costs {
        let table_row = match weights {
            WeightFormat::F32 => 4 * shape.hidden,
            WeightFormat::F16 | WeightFormat::Bf16 => 2 * shape.hidden,
            // In int8, with a scale.
            WeightFormat::Int8 | WeightFormat::Int4 { .. } => shape.hidden + 4,
        };
        Costs {
            weight_bytes: weight_bytes as f64 - (VOCAB * table_row) as f64,
            body: shape.body() as f64,
            head: shape.head() as f64,
            kv_bytes: (2 * shape.layers * shape.kv_heads * kv_head_bytes) as f64,
            attention: (4 * shape.layers * shape.hidden) as f64, // score and value, two operations each
        }
    }

    /// A prompt in `steps` chunks, then one token's logits.
    pub fn prefill(&self, tokens: u64, steps: u64) -> Work {
        let tokens = tokens as f64;
        let pairs = tokens * (tokens + 1.0) / 2.0;
        Work {
            bytes: self.weight_bytes * steps as f64,
            operations: 2.0 * (self.body * tokens + self.head),
            attention: self.attention * pairs,
        }
    }

    /// `steps` that make `tokens` together, which look back on `positions` in sum.
    pub fn decode(&self, steps: u64, tokens: u64, positions: u64) -> Work {
        let (steps, tokens, positions) = (steps as f64, tokens as f64, positions as f64);
        Work {
            bytes: self.weight_bytes * steps + self.kv_bytes * positions,
            operations: 2.0 * (self.body + self.head) * tokens,
            attention: self.attention * positions,
        }
    }
}
