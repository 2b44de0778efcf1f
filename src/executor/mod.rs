//! The interface between scheduling and computation.

pub mod local;
pub mod parallel;
pub mod warmup;

use crate::error::{Error, Result};
use crate::kv::BlockId;
use crate::types::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits};
use crate::types::batch::{Batch, BlockCopy, BlockMove, Tail};

/// Maximum number of bytes that a step copies for exports, and for imports. The copy takes less
/// than 1 ms.
pub const MAX_TRANSFER_BYTES: usize = 2 << 20;

/// Computes plans. The executor of an engine has a model. A test can replace it by one with given
/// logits.
pub trait Executor: Send {
    /// Returns the number of steps that may be in flight. With 2, a plan may have placeholders for
    /// the tokens that the previous step samples on the device.
    fn depth(&self) -> usize {
        1
    }

    /// Starts a step. An error concerns this step only.
    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep>;

    /// Starts to sample a token on the device for each row in `_sampling`. The logits of these rows
    /// are undefined afterwards. Called once for each step, after the results of all earlier steps
    /// and before a later step is submitted.
    fn sample(&mut self, _step: &mut InFlightStep, _sampling: &DeviceSampling) -> Result<()> {
        Ok(())
    }

    /// Waits for the oldest step in flight.
    fn wait(&mut self, step: InFlightStep) -> Result<StepOutput<'_>>;

    /// Discards all steps in flight, after the oldest one has failed with `_error`, here or in the
    /// host, or because their blocks are about to change (`None`).
    fn discard(&mut self, _error: Option<&Error>) {}

    /// Returns the limits of sampling on the device. `None` if only the host samples.
    fn sampling_limits(&self) -> Option<DeviceSamplingLimits> {
        None
    }

    /// Returns whether the device is lost, so that no step can be computed any more.
    fn is_lost(&self) -> bool {
        false
    }

    /// Copies blocks to the host tier. After an error, the contents of all target blocks are
    /// undefined.
    fn swap_out(&mut self, _moves: &[BlockMove]) -> Result<()> {
        Ok(())
    }

    /// Copies blocks back to the device.
    fn swap_in(&mut self, _moves: &[BlockMove]) -> Result<()> {
        Ok(())
    }

    /// Returns the bytes of a block of the host tier. An executor without KV has none.
    fn host_block(&mut self, _block: usize) -> &mut [u8] {
        &mut []
    }

    /// Appends the stored K and V of the blocks to `out`. An executor without KV appends nothing.
    fn read_blocks(&mut self, _blocks: &[BlockId], _tail: Tail, _out: &mut Vec<u8>) -> Result<()> {
        Ok(())
    }

    /// Restores K and V from bytes that `read_blocks` returned.
    fn write_blocks(&mut self, _blocks: &[BlockId], _bytes: &[u8]) -> Result<()> {
        Ok(())
    }

    /// Makes the moves, which read no block that they write, and frees the memory of all blocks
    /// from `blocks` on.
    fn shrink(&mut self, _moves: &[BlockCopy], _blocks: usize) -> Result<()> {
        Ok(())
    }

    /// Returns how often the system did not take the memory of freed blocks back. The blocks are
    /// free in any case.
    fn discard_failures(&self) -> u64 {
        0
    }

    /// Returns the storage layout of K and V. Blocks can be exchanged between executors with the
    /// same layout.
    fn layout(&self) -> String {
        String::new()
    }

    /// Returns how many bytes a step copies at most for exports, and for imports.
    fn max_transfer_bytes(&self) -> usize {
        MAX_TRANSFER_BYTES
    }

    /// Returns the bytes of one block in each of the arrays in which `read_blocks` stores blocks.
    /// Empty for an executor without KV.
    fn kv_part_bytes(&self) -> Vec<usize> {
        Vec::new()
    }
}

/// The results of a step.
pub struct StepOutput<'a> {
    /// [logit rows, vocab] The logits. The rows of sampled tokens are undefined.
    pub logits: &'a [f32],
    /// The tokens that the device has sampled, in the order of their rows: none, one or several for
    /// each sequence of the plan.
    pub device_samples: &'a [DeviceSample],
}

impl StepOutput<'_> {
    /// Creates the results of a step whose tokens the host samples.
    pub fn from_logits(logits: &[f32]) -> StepOutput<'_> {
        StepOutput { logits, device_samples: &[] }
    }
}

/// A step that was started and has not finished.
#[must_use]
#[derive(Debug)]
pub struct InFlightStep {
    /// Number of logit rows of the step.
    pub logits: usize,
    /// Number of rows that the device samples.
    pub samples: usize,
}

impl InFlightStep {
    /// Creates the ticket of a step with this many rows of logits.
    pub fn new(logits: usize) -> InFlightStep {
        InFlightStep { logits, samples: 0 }
    }
}
