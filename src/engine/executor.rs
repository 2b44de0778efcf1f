//! The interface between scheduling and computation.

use std::cell::RefCell;

use crate::backend::{Backend, BatchSize, InputLimits};
use crate::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits};
use crate::batch::{Batch, BlockCopy, BlockMove, Tail};
use crate::error::{Error, Result};
use crate::kv::BlockId;
use crate::model::{Decoder, KvCache};
use crate::scheduler::StepPlan;

/// Maximum number of bytes that a step copies for exports, and for imports. The copy takes less than
/// 1 ms.
const MAX_TRANSFER_BYTES: usize = 2 << 20;

/// Computes plans. The executor of an engine has a model. A test can replace it by one with given
/// logits.
pub trait Executor: Send {
    /// Returns the number of steps that may be in flight. With 2, a plan may have placeholders for
    /// the tokens that the previous step samples on the device.
    fn depth(&self) -> usize {
        1
    }

    /// Starts a step. An error concerns this step only.
    fn submit(&mut self, plan: &StepPlan) -> Result<InFlightStep>;

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

    /// Appends the stored K and V of the blocks to `out`. An executor without KV appends nothing.
    fn read_blocks(&self, _blocks: &[BlockId], _tail: Tail, _out: &mut Vec<u8>) -> Result<()> {
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

    /// Returns the storage layout of K and V. Blocks can be exchanged between executors with the same
    /// layout.
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

/// An executor that computes a model on a backend.
pub struct ModelExecutor<B: Backend> {
    decoder: Decoder<B>,
    kv: KvCache<B>,
    discard_failures: u64,
    max_transfer_bytes: usize,
    /// Number of steps in flight.
    in_flight: usize,
    /// Error of a step in flight that was found before its `wait`.
    failure: RefCell<Option<Error>>,
}

impl InFlightStep {
    /// Creates the ticket of a step with this many rows of logits.
    pub fn new(logits: usize) -> InFlightStep {
        InFlightStep { logits, samples: 0 }
    }
}

impl<B: Backend> ModelExecutor<B> {
    /// Creates an executor from a decoder and its KV cache.
    pub fn new(decoder: Decoder<B>, kv: KvCache<B>) -> ModelExecutor<B> {
        ModelExecutor {
            decoder,
            kv,
            discard_failures: 0,
            in_flight: 0,
            failure: RefCell::default(),
            max_transfer_bytes: MAX_TRANSFER_BYTES,
        }
    }

    /// Sets how many bytes a step copies at most for exports, and for imports. For tests.
    pub fn with_max_transfer_bytes(self, max_transfer_bytes: usize) -> ModelExecutor<B> {
        ModelExecutor { max_transfer_bytes, ..self }
    }

    /// Keeps the pending error of a step in flight for its `wait`. Otherwise the next operation of
    /// another kind would report it, and the results of the step would count as computed.
    fn keep_failure(&self) {
        if self.in_flight > 0
            && let Err(error) = self.decoder.backend().check()
        {
            self.failure.borrow_mut().get_or_insert(error);
        }
    }

    /// Returns the backend.
    pub fn backend(&self) -> &B {
        self.decoder.backend()
    }

    /// Runs the largest batches, so that later steps allocate no device memory. K and V are
    /// undefined afterwards.
    pub fn warm_up(&mut self, limits: &InputLimits, batches: &[Batch]) -> Result<()> {
        self.decoder.reserve_inputs(limits)?;
        for batch in batches.iter().filter(|batch| batch.token_count() > 0) {
            self.decoder.forward(batch, &mut self.kv)?;
            // Reading the maximum number of logits also allocates their host buffer.
            self.decoder.logits(limits.max.logits)?;
        }
        Ok(())
    }

    /// Makes the device record its decode steps. `batch` is a decode step with one token.
    pub fn record_steps(&mut self, max: &BatchSize, batch: &Batch) -> Result<()> {
        self.decoder.keep_steps(max, batch, &mut self.kv)
    }

    /// Swaps a block out and in, for the same purpose.
    pub fn warm_up_swap(&mut self) -> Result<()> {
        let there_and_back = [BlockMove { device: 0, host: 0 }];
        self.swap_out(&there_and_back)?;
        self.swap_in(&there_and_back)
    }
}

impl<B: Backend> Executor for ModelExecutor<B> {
    fn depth(&self) -> usize {
        self.decoder.backend().max_steps_in_flight()
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<InFlightStep> {
        self.keep_failure();
        if let Some(error) = &*self.failure.borrow() {
            return Err(error.clone());
        }
        self.decoder.forward(&plan.batch, &mut self.kv)?;
        self.in_flight += 1;
        Ok(InFlightStep::new(plan.batch.logit_rows.len()))
    }

    fn sample(&mut self, step: &mut InFlightStep, sampling: &DeviceSampling) -> Result<()> {
        step.samples = sampling.rows.len();
        self.decoder.start_outputs(step.logits, sampling)
    }

    fn wait(&mut self, step: InFlightStep) -> Result<StepOutput<'_>> {
        self.in_flight -= 1;
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        let (logits, device_samples) = self.decoder.outputs(step.logits, step.samples)?;
        Ok(StepOutput { logits, device_samples })
    }

    fn discard(&mut self, _error: Option<&Error>) {
        // Errors of discarded work do not matter, unless the device is lost; in that case every
        // later call reports it.
        let _ = self.decoder.backend().wait();
        (self.in_flight, self.failure) = (0, RefCell::default());
    }

    fn sampling_limits(&self) -> Option<DeviceSamplingLimits> {
        self.decoder.draw_limits()
    }

    fn is_lost(&self) -> bool {
        self.decoder.backend().is_lost()
    }

    fn swap_out(&mut self, moves: &[BlockMove]) -> Result<()> {
        self.keep_failure();
        self.kv.swap_out(self.decoder.backend(), moves)
    }

    fn swap_in(&mut self, moves: &[BlockMove]) -> Result<()> {
        self.keep_failure();
        self.kv.swap_in(self.decoder.backend(), moves)
    }

    fn read_blocks(&self, blocks: &[BlockId], tail: Tail, out: &mut Vec<u8>) -> Result<()> {
        self.keep_failure();
        self.kv.read(self.decoder.backend(), blocks, tail, out)
    }

    fn write_blocks(&mut self, blocks: &[BlockId], bytes: &[u8]) -> Result<()> {
        self.keep_failure();
        self.kv.write(self.decoder.backend(), blocks, bytes)
    }

    fn shrink(&mut self, moves: &[BlockCopy], blocks: usize) -> Result<()> {
        self.kv.copy(self.decoder.backend(), moves);
        self.decoder.backend().wait()?;
        // The moves are complete and need not be reverted if the discard fails.
        self.discard_failures += self.kv.discard(self.decoder.backend(), blocks).is_err() as u64;
        Ok(())
    }

    fn discard_failures(&self) -> u64 {
        self.discard_failures
    }

    fn layout(&self) -> String {
        self.kv.layout(self.decoder.backend())
    }

    fn max_transfer_bytes(&self) -> usize {
        self.max_transfer_bytes
    }

    fn kv_part_bytes(&self) -> Vec<usize> {
        self.kv.part_bytes(self.decoder.backend())
    }
}
