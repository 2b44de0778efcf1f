//! The parts of a forward pass in which the workers of an engine exchange results.

use super::decoder::{BatchLimits, Pass, Widths};
use super::spec::{HeadAttention, ModelSpec, QkNorm, QkNormOver};
use super::weights::LoadedNorm;
use crate::backend::{Collectives, Heads, KvOps, Ops, Strips};
use crate::types::parallel::{WorkerPlace, part_of};

impl Widths {
    /// Returns the maximum number of numbers that a worker receives at once: rows of partial
    /// results if several workers divide a layer, and on rank 0 the logits of another worker.
    pub fn exchanged(&self, limits: BatchLimits, spec: &ModelSpec, place: WorkerPlace) -> usize {
        let logits = if place.rank() == 0 { limits.logits * part_of(spec.vocab_size, 0, place.division.tensor).len() } else { 0 };
        let sums = if place.division.tensor > 1 { limits.tokens * self.normed } else { 0 };
        sums.max(logits)
    }

    /// Includes the buffers for the norm over the heads of all workers.
    pub fn hold_norm_of_all(&mut self, HeadAttention { shape, qk_norm, .. }: &HeadAttention, place: WorkerPlace) {
        let tensor = place.division.tensor;
        if tensor > 1 && matches!(qk_norm, Some(QkNorm { over: QkNormOver::AllHeads, .. })) {
            let width = tensor * shape.q_width().max(shape.kv_width());
            (self.routed, self.queries) = (self.routed.max(width), self.queries.max(width));
        }
    }
}

impl<B: Ops + KvOps + Collectives> Pass<'_, B> {
    /// Adds the partial results of the workers of this stage, rows of `width`.
    pub fn all_reduce(&self, width: usize, x: &mut B::Buf) {
        if self.place.division.tensor > 1 {
            self.backend.all_reduce(self.rows * width, x);
        }
    }

    /// Sends this worker's columns of the logits to rank 0, which receives them when it waits for
    /// the step.
    pub fn send_logits(&self, columns: usize, logits: &B::Buf) {
        if self.place.rank() > 0 && self.rows > 0 && columns > 0 {
            self.backend.send(self.rows * columns, logits, 0);
        }
    }

    /// Computes a norm over the heads of all workers: gathers them, and keeps this worker's part.
    pub fn norm_heads_of_all(&self, norm: &LoadedNorm<B>, heads: Heads, x: &mut B::Buf, [all, own]: [&mut B::Buf; 2]) {
        let WorkerPlace { division, tensor_rank, .. } = self.place;
        let (tensor, width) = (division.tensor, heads.count * heads.dim);
        let in_row = Strips { first: heads.first, count: 1, dim: width, pitch: width, stride: heads.stride };
        let of_all = Strips { first: 0, count: tensor, dim: width, pitch: width, stride: tensor * width };
        let own_of_all = Strips { first: tensor_rank * width, count: 1, ..of_all };
        self.backend.split_strips(self.rows, in_row, x, own);
        self.backend.all_gather(self.rows * width, own, all);
        self.backend.join_strips(self.rows, of_all, all, own);
        self.norm(norm, &[], own, all);
        self.backend.split_strips(self.rows, own_of_all, all, own);
        self.backend.join_strips(self.rows, in_row, own, x);
    }
}
