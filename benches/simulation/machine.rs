//! The time that a step takes on a simulated machine.

use std::time::Duration;

use pagedllm::types::batch::{Batch, Span};

/// Times in seconds, and the size of the KV pool in tokens. Tensor parallel devices count as one
/// machine with the sum of their bandwidths.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Time per step that nothing overlaps.
    pub overhead: f64,
    /// Time per step: reads the weights.
    pub step: f64,
    /// Time per token: multiplies with the weights.
    pub row: f64,
    /// Whether the products of a step overlap the reads of the weights.
    pub overlaps: bool,
    /// Time to begin the exchanges of all layers with other devices of the same layer.
    pub exchange_start: f64,
    /// Time per token: exchanges results with these devices.
    pub exchange: f64,
    /// Time per visible position of a sequence in the step: reads its K and V.
    pub position: f64,
    pub pipeline: Pipeline,
    pub swap: Swap,
    pub slots: usize,
    pub max_model_len: usize,
}

/// Devices that have different layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pipeline {
    pub stages: usize,
    /// Time to send the results of a part of a step to the next stage.
    pub hop: f64,
    /// Time to send the results of a token to the next stage.
    pub hop_token: f64,
}

impl Pipeline {
    pub const NONE: Pipeline = Pipeline { stages: 1, hop: 0.0, hop_token: 0.0 };
}

/// Copies of blocks to the host and back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Swap {
    /// Time per block: starts its copies.
    pub block: f64,
    /// Time per token slot: copies its K and V.
    pub slot: f64,
}

impl Swap {
    pub const NONE: Swap = Swap { block: 0.0, slot: 0.0 };
}

impl Machine {
    /// OPT-13B in 16 bits on one A100 with 40 GB, the smallest machine of the PagedAttention paper,
    /// by its data sheet: 26 GB of weights and 820 kB per position (2 x 40 layers x 5,120 x 2
    /// bytes) at 1,555 GB/s, and 26 GFLOP per token at 312 TFLOP/s. The pool has the size in the
    /// paper's Table 1.
    pub const PAPER: Machine = Machine {
        overhead: 0.0,
        step: 16.72e-3,
        row: 83.3e-6,
        overlaps: false,
        exchange_start: 0.0,
        exchange: 0.0,
        position: 527e-9,
        pipeline: Pipeline::NONE,
        swap: Swap::NONE,
        slots: 15_700,
        max_model_len: 2048,
    };

    /// Returns the time of a step with blocks of `block_size` tokens.
    pub fn step_time(&self, batch: &Batch, block_size: usize) -> Duration {
        let last_position = |span: &Span| batch.positions[(span.first_token + span.tokens) as usize - 1];
        let positions: u32 = batch.spans.iter().map(|span| last_position(span) + 1).sum();
        // A copy of a block reads and writes it.
        let copied = 2 * batch.copies.len() * block_size;
        self.seconds(batch.token_count() as f64, f64::from(positions) + copied as f64)
    }

    /// Returns the time of a step that computes `tokens` tokens and reads K and V of `positions`
    /// positions. A pipeline computes the step in the number of parts that is fastest: each part
    /// reads all weights.
    pub fn seconds(&self, tokens: f64, positions: f64) -> Duration {
        let Pipeline { stages, hop, hop_token } = self.pipeline;
        let time = |parts: usize| {
            let share = (parts * stages) as f64;
            let products = self.row * tokens / share;
            let weights = self.step / stages as f64;
            let weights = if self.overlaps { weights.max(products) } else { weights + products };
            let sent = if stages > 1 { hop + hop_token * tokens / parts as f64 } else { 0.0 };
            let exchanged = self.exchange_start / stages as f64 + self.exchange * tokens / share;
            let stage = weights + self.position * positions / share + exchanged + sent;
            (parts + stages - 1) as f64 * stage
        };
        let fastest = (1..=stages).map(time).fold(f64::INFINITY, f64::min);
        Duration::from_secs_f64(self.overhead + fastest)
    }

    pub fn swap_time(&self, blocks: usize, block_size: usize) -> Duration {
        Duration::from_secs_f64(blocks as f64 * (self.swap.block + self.swap.slot * block_size as f64))
    }
}
