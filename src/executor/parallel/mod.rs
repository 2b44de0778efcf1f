//! One model on several workers. Rank 0 schedules; before each step it sends the plan to the
//! others, which hold the same block tables and their own part of each block.

mod command;
mod group;
mod lead;
mod logits;
mod threads;
mod worker;

use command::{Kind, Message};
pub use group::Group;
pub use lead::Lead;
use logits::PipelineLogits;
use sha2::{Digest, Sha256};
use std::sync::Arc;
pub use threads::WorkerThreads;
pub use worker::serve;

use super::local::ModelExecutor;
use super::{Executor, InFlightStep, StepOutput};
use crate::backend::{Backend, BatchSize};
use crate::error::{Error, Result, try_with_capacity};
use crate::kv::BlockId;
use crate::sys::bytes::as_bytes;
use crate::types::batch::device_sampling::{DeviceSampling, DeviceSamplingLimits};
use crate::types::batch::{Batch, BlockCopy, BlockMove, Tail};
use crate::types::hex::Hex;
use crate::types::parallel::Division;

/// The executor of rank 0. The other ranks run `serve`.
///
/// If another worker fails or does not respond in time, the device is lost.
pub struct ParallelExecutor<B: Backend> {
    local: Box<ModelExecutor<B>>,
    message: Message,
    /// Bytes of one block in the arrays of `read_blocks`, for each worker.
    part_bytes: Vec<Vec<usize>>,
    layout: String,
    /// The steps in flight, if there are several stages.
    pipeline: Option<PipelineLogits>,
    /// With a single stage: rows of logits of the newest step, until they are received.
    unreceived: Option<usize>,
    /// The first error of an exchange with other workers.
    failure: Option<Error>,
    /// Dropped after `local`, which uses the group: its threads wait until nothing does.
    lead: Arc<Lead>,
}

impl<B: Backend> ParallelExecutor<B> {
    /// Creates the executor of rank 0, while the other ranks start `serve`. Commands can be sent
    /// after `Lead::agree_on_engine`.
    ///
    /// All memory of steps with batches up to `max` is reserved.
    pub fn new(lead: Arc<Lead>, local: Box<ModelExecutor<B>>, max: &BatchSize) -> Result<ParallelExecutor<B>> {
        let group = &lead.group;
        let (part_bytes, layout) = describe_blocks(&local, group)?;
        let reserved = Message::for_batches(max).and_then(|message| {
            let stages = group.place.division.pipeline;
            let logits = || PipelineLogits::new(local.vocab_size(), stages, max.logits);
            Ok((message, if stages > 1 { Some(logits()?) } else { None }))
        });
        let (message, pipeline) = group.agree(reserved)?;
        Ok(ParallelExecutor { local, message, part_bytes, layout, pipeline, unreceived: None, failure: None, lead })
    }

    /// Makes a change that all workers make too. `write` writes the message for them. No worker
    /// waits for this rank to take its logits, so that it can take the message.
    fn command(&mut self, write: impl FnOnce(&mut Message) -> Result<()>) -> Result<()> {
        self.receive_all()?;
        self.begin_command(write)?;
        let relayed = self.message.relay(&self.lead.group);
        self.keep_failure(relayed)
    }

    /// Sends a message to the workers of this stage. Nothing is sent if there is no memory for it,
    /// or if the workers do not wait for commands yet.
    fn begin_command(&mut self, write: impl FnOnce(&mut Message) -> Result<()>) -> Result<()> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        if !self.lead.has_engine() {
            return Err(Error::internal("the engine is still being created"));
        }
        write(&mut self.message)?;
        let sent = self.message.broadcast(&self.lead.group);
        self.keep_failure(sent)
    }

    /// Remembers an error of an exchange.
    fn keep_failure(&mut self, result: Result<()>) -> Result<()> {
        let Err(error) = result else { return Ok(()) };
        let failure = match (&self.failure, self.lead.threads.failure().get()) {
            (Some(failure), _) => failure.clone(),
            (None, Some(cause)) => Error::internal(format!("{}; {}", error.message(), cause.message())),
            (None, None) => error,
        };
        self.failure.get_or_insert_with(|| failure.clone());
        Err(failure)
    }

    /// Receives logits until at most `left` steps are pending. A worker that waits for this rank to
    /// take its logits does nothing else.
    fn receive_logits(&mut self, left: usize) -> Result<()> {
        while let Some(pipeline) = self.pipeline.as_mut().filter(|pipeline| pipeline.pending() > left) {
            let received = match &self.failure {
                Some(failure) => Err(failure.clone()),
                None => pipeline.receive(&mut self.local),
            };
            self.keep_failure(received)?;
        }
        Ok(())
    }

    /// Receives the logits of the newest step of a single stage, if they have not been received.
    fn receive_newest(&mut self) {
        if let Some(rows) = self.unreceived.take() {
            self.local.receive_logits(rows);
        }
    }

    /// Receives all logits.
    fn receive_all(&mut self) -> Result<()> {
        self.receive_newest();
        self.receive_logits(0)
    }

    /// Returns the bytes that a worker stores for each block.
    fn block_bytes(&self, rank: usize) -> usize {
        self.part_bytes[rank].iter().sum()
    }
}

impl<B: Backend> Executor for ParallelExecutor<B> {
    /// Returns the number of stages, each of which can compute another step. A single stage has as
    /// many steps in flight as its devices.
    fn depth(&self) -> usize {
        if self.pipeline.is_some() { self.lead.group.place.division.pipeline } else { self.local.depth() }
    }

    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        let rows = batch.logit_rows.len();
        // The sampling of the previous step may have failed before its logits were received.
        self.receive_newest();
        // An error before the plan is sent concerns this step only.
        let extent = self.local.begin(batch)?;
        self.begin_command(|message| message.put_step(batch))?;
        self.local.compute(extent);
        // With a step on each other stage, the last one could wait for this rank to take its logits,
        // and this rank for the next stage to take the new step.
        self.receive_logits(self.depth().saturating_sub(2))?;
        let relayed = self.message.relay(&self.lead.group);
        self.keep_failure(relayed)?;
        match &mut self.pipeline {
            Some(pipeline) => pipeline.push(rows),
            None => self.unreceived = Some(rows),
        }
        Ok(self.local.deliver(extent))
    }

    /// The device of rank 0 samples. It sends the samples to the others with the next step.
    fn sample(&mut self, step: &mut InFlightStep, sampling: &DeviceSampling) -> Result<()> {
        if self.pipeline.is_some() {
            return Ok(());
        }
        self.receive_newest();
        self.local.sample(step, sampling)
    }

    fn sampling_limits(&self) -> Option<DeviceSamplingLimits> {
        if self.pipeline.is_some() { None } else { self.local.sampling_limits() }
    }

    fn wait(&mut self, step: InFlightStep) -> Result<StepOutput<'_>> {
        let pending = self.pipeline.as_ref().map_or(0, |pipeline| pipeline.pending());
        match &self.pipeline {
            // The sampling of the step may have failed before its logits were received.
            None if self.local.steps_in_flight() == 1 => self.receive_newest(),
            Some(pipeline) if pipeline.oldest_is_pending() => self.receive_logits(pending - 1)?,
            _ => {}
        }
        let Some(pipeline) = &mut self.pipeline else { return self.local.wait(step) };
        self.local.wait(InFlightStep::new(0))?;
        Ok(StepOutput::from_logits(pipeline.take()))
    }

    fn discard(&mut self, error: Option<&Error>) {
        // The others send the logits of each step. An error is reported by every later call.
        let _ = self.receive_all();
        if let Some(pipeline) = &mut self.pipeline {
            pipeline.clear();
        }
        self.local.discard(error);
    }

    fn is_lost(&self) -> bool {
        self.failure.is_some() || self.local.is_lost()
    }

    fn swap_out(&mut self, moves: &[BlockMove]) -> Result<()> {
        self.command(|message| message.put_moves(Kind::SwapOut, moves))?;
        self.local.swap_out(moves)
    }

    fn swap_in(&mut self, moves: &[BlockMove]) -> Result<()> {
        self.command(|message| message.put_moves(Kind::SwapIn, moves))?;
        self.local.swap_in(moves)
    }

    fn read_blocks(&mut self, blocks: &[BlockId], tail: Tail, out: &mut Vec<u8>) -> Result<()> {
        let (own, all) = (self.block_bytes(0), self.part_bytes.iter().flatten().sum::<usize>());
        out.try_reserve(blocks.len() * all)?;
        let start = out.len();
        self.local.read_blocks(blocks, tail, out)?;
        debug_assert_eq!(out.len() - start, blocks.len() * own);
        self.command(|message| message.put_blocks(Kind::Read, blocks, tail))?;
        for rank in 1..self.part_bytes.len() {
            let start = out.len();
            out.resize(start + blocks.len() * self.block_bytes(rank), 0);
            let received = self.lead.group.world().receive(&mut out[start..], rank, self.lead.group.timeout());
            self.keep_failure(received)?;
        }
        Ok(())
    }

    fn write_blocks(&mut self, blocks: &[BlockId], bytes: &[u8]) -> Result<()> {
        let all = blocks.len() * self.part_bytes.iter().flatten().sum::<usize>();
        if bytes.len() < all {
            return Err(Error::invalid(format!("the stored blocks are too short ({} bytes of {all})", bytes.len())));
        }
        let (own, mut rest) = bytes.split_at(blocks.len() * self.block_bytes(0));
        self.command(|message| message.put_blocks(Kind::Write, blocks, Tail { blocks: 0, slots: 0 }))?;
        for rank in 1..self.part_bytes.len() {
            let (now, later) = rest.split_at(blocks.len() * self.block_bytes(rank));
            let sent = self.lead.group.world().send(now, rank, self.lead.group.timeout());
            self.keep_failure(sent)?;
            rest = later;
        }
        self.local.write_blocks(blocks, own)
    }

    fn shrink(&mut self, moves: &[BlockCopy], blocks: usize) -> Result<()> {
        if self.is_lost() && moves.is_empty() {
            // The memory returns to the budget without the other workers.
            self.local.free_blocks(blocks);
            return Ok(());
        }
        self.command(|message| message.put_shrink(moves, blocks))?;
        self.local.shrink(moves, blocks)
    }

    fn discard_failures(&self) -> u64 {
        self.local.discard_failures()
    }

    fn layout(&self) -> String {
        self.layout.clone()
    }

    fn max_transfer_bytes(&self) -> usize {
        self.local.max_transfer_bytes()
    }

    fn kv_part_bytes(&self) -> Vec<usize> {
        self.part_bytes.concat()
    }
}

impl<B: Backend> Drop for ParallelExecutor<B> {
    fn drop(&mut self) {
        // The devices of the others must not end an exchange in which this one still takes part.
        self.discard(None);
        // The others notice a lost connection, too.
        let _ = self.command(Message::put_exit);
    }
}

/// Exchanges the sizes of blocks and the descriptions of their layout. All workers call it. Returns
/// the sizes for each worker, and one layout for all.
fn describe_blocks<B: Backend>(local: &ModelExecutor<B>, group: &Group) -> Result<(Vec<Vec<usize>>, String)> {
    let own: Vec<u64> = local.kv_part_bytes().into_iter().map(|bytes| bytes as u64).collect();
    let mut part_bytes = try_with_capacity(group.world().size())?;
    for record in group.gather(as_bytes(&own))? {
        part_bytes.push(record.as_chunks().0.iter().map(|&bytes| u64::from_ne_bytes(bytes) as usize).collect());
    }
    let mut hash = Sha256::new();
    for layout in group.gather(local.layout().as_bytes())? {
        hash.update((layout.len() as u64).to_le_bytes());
        hash.update(layout);
    }
    let Division { tensor, pipeline } = group.place.division;
    let layout = format!("{pipeline} stages of {tensor} workers: {}; all: {}", local.layout(), Hex(&hash.finalize()));
    Ok((part_bytes, layout))
}
