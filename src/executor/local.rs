//! The executor of a model on the backend of this process.

use std::cell::RefCell;

use super::{Executor, InFlightStep, MAX_TRANSFER_BYTES, StepOutput};
use crate::backend::{Backend, BatchSize, Extent, InputLimits};
use crate::error::{Error, Result};
use crate::kv::BlockId;
use crate::model::{Decoder, KvCache};
use crate::types::batch::device_sampling::{DeviceSampling, DeviceSamplingLimits};
use crate::types::batch::{Batch, BlockCopy, BlockMove, Tail};

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

    /// Uploads the batch of a step, which `run` computes.
    pub fn begin(&mut self, batch: &Batch) -> Result<Extent> {
        self.keep_failure();
        if let Some(error) = &*self.failure.borrow() {
            return Err(error.clone());
        }
        self.decoder.begin(batch, &mut self.kv)
    }

    /// Computes the layers of this worker.
    pub fn compute(&mut self, extent: Extent) {
        self.decoder.compute(extent, &mut self.kv);
    }

    /// Delivers the results of the layers: the logits, or what the next stage needs.
    pub fn deliver(&mut self, extent: Extent) -> InFlightStep {
        self.decoder.deliver(extent);
        self.in_flight += 1;
        InFlightStep::new(extent.logits)
    }

    /// Waits until all steps are complete.
    pub fn finish(&mut self) -> Result<()> {
        self.in_flight = 0;
        self.failure.take().map_or(Ok(()), Err).and(self.backend().wait())
    }

    /// Returns the number of tokens in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.decoder.vocab_size()
    }

    /// Returns the number of steps that were submitted and not waited for.
    pub fn steps_in_flight(&self) -> usize {
        self.in_flight
    }

    /// Receives the logits of the oldest step from the workers that have computed them.
    pub fn receive_logits(&mut self, rows: usize) {
        self.decoder.receive_logits(rows);
    }

    /// Receives the logits of the oldest step, and waits for them.
    pub fn logits(&mut self, rows: usize) -> Result<&[f32]> {
        self.decoder.logits(rows)
    }

    /// Runs the largest batches, so that later steps allocate no device memory. K and V are
    /// undefined afterwards.
    pub fn warm_up(&mut self, limits: &InputLimits, batches: &[Batch]) -> Result<()> {
        self.decoder.reserve_inputs(limits)?;
        for batch in batches.iter().filter(|batch| batch.token_count() > 0) {
            self.decoder.forward(batch, &mut self.kv)?;
            self.decoder.receive_logits(batch.logit_rows.len());
            self.backend().wait()?;
        }
        // Reading the maximum number of logits allocates their host buffer.
        self.decoder.read_logits(limits.max.logits)
    }

    /// Makes the device record its decode steps. `batch` is a decode step with one token.
    pub fn record_steps(&mut self, max: &BatchSize, batch: &Batch) -> Result<()> {
        self.decoder.keep_steps(max, batch, &mut self.kv)
    }

    /// Returns the memory of all blocks from `blocks` on to the system.
    pub fn free_blocks(&mut self, blocks: usize) {
        self.discard_failures += self.kv.discard(self.decoder.backend(), blocks).is_err() as u64;
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

    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        let extent = self.begin(batch)?;
        self.compute(extent);
        Ok(InFlightStep { logits: batch.logit_rows.len(), ..self.deliver(extent) })
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

    fn host_block(&mut self, block: usize) -> &mut [u8] {
        self.kv.host_block(self.decoder.backend(), block)
    }

    fn read_blocks(&mut self, blocks: &[BlockId], tail: Tail, out: &mut Vec<u8>) -> Result<()> {
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
        self.free_blocks(blocks);
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
