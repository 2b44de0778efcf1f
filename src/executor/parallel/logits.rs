//! The logits of steps in flight, which rank 0 receives from the last stage.

use std::collections::VecDeque;

use crate::backend::Backend;
use crate::error::{Result, try_vec, try_with_capacity};
use crate::executor::local::ModelExecutor;

/// The steps in flight of a pipeline, the oldest first. A step's logits can be received before they
/// are needed, so that the last stage does not wait for rank 0.
pub struct PipelineLogits {
    vocab: usize,
    steps: VecDeque<Step>,
    /// Number of steps, from the oldest on, whose logits have been received.
    received: usize,
    /// Logits of the last step that has been taken.
    taken: Vec<f32>,
    /// Memory for the next steps.
    spare: Vec<Vec<f32>>,
}

struct Step {
    rows: usize,
    logits: Vec<f32>, // [rows, vocab]
}

impl PipelineLogits {
    /// Creates the logits of up to `depth` steps with up to `max_rows` rows each.
    pub fn new(vocab: usize, depth: usize, max_rows: usize) -> Result<PipelineLogits> {
        let (mut steps, mut spare) = (VecDeque::new(), try_with_capacity(depth + 1)?);
        steps.try_reserve_exact(depth)?;
        for _ in 0..depth {
            spare.push(try_vec(max_rows * vocab, 0.0)?);
        }
        Ok(PipelineLogits { vocab, steps, received: 0, taken: try_vec(max_rows * vocab, 0.0)?, spare })
    }

    /// Adds a step. There is spare memory for as many steps as may be in flight.
    pub fn push(&mut self, rows: usize) {
        let logits = self.spare.pop().unwrap_or_default();
        self.steps.push_back(Step { rows, logits });
    }

    /// Returns the number of steps whose logits have not been received.
    pub fn pending(&self) -> usize {
        self.steps.len() - self.received
    }

    /// Returns whether the logits of the oldest step have not been received.
    pub fn oldest_is_pending(&self) -> bool {
        self.received == 0 && !self.steps.is_empty()
    }

    /// Removes all steps.
    pub fn clear(&mut self) {
        self.received = 0;
        while let Some(step) = self.steps.pop_front() {
            self.spare.push(step.logits);
        }
    }

    /// Receives the logits of the oldest step whose logits have not been received. They pass
    /// through a buffer that the next step overwrites.
    pub fn receive<B: Backend>(&mut self, local: &mut ModelExecutor<B>) -> Result<()> {
        let Some(Step { rows, logits }) = self.steps.get_mut(self.received) else { return Ok(()) };
        self.received += 1;
        if *rows > 0 {
            logits[..*rows * self.vocab].copy_from_slice(local.logits(*rows)?);
        }
        Ok(())
    }

    /// Removes the oldest step. Returns its logits, which have been received.
    pub fn take(&mut self) -> &[f32] {
        let Some(step) = self.steps.pop_front() else { return &[] };
        self.received = self.received.saturating_sub(1);
        self.spare.push(std::mem::replace(&mut self.taken, step.logits));
        &self.taken[..step.rows * self.vocab]
    }
}
