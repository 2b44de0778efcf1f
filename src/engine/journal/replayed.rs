//! Decorators of the two seams of the core for a replay. They return the recorded inputs of a step
//! and the recorded failures of the executor.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::records::{Failure, Step};
use crate::batch::device_sampling::{DeviceSampling, DeviceSamplingLimits};
use crate::batch::{BlockCopy, BlockMove, Tail};
use crate::budget::Need;
use crate::engine::executor::{Executor, InFlightStep, StepOutput};
use crate::engine::inputs::{Inputs, StepInputs};
use crate::error::{Error, Result};
use crate::kv::BlockId;
use crate::kv::connector::TransferId;
use crate::scheduler::{Costs, StepPlan};

/// The recorded step that is repeated. Both decorators read it.
#[derive(Clone, Default)]
pub struct Replayed(Arc<Mutex<ReplayedStep>>);

#[derive(Default)]
struct ReplayedStep {
    step: Step,
    /// Number of resizes that have been repeated, and whether the last of them failed.
    resizes: usize,
    fails_to_shrink: bool,
    launches: u32,
    waits: u32,
    exchanges: u32,
    moves: u32,
}

impl ReplayedStep {
    /// Returns the error of the launch if it failed.
    fn begin_launch(&mut self) -> Result<()> {
        self.launches += 1;
        recorded(&self.step.failed_launches, self.launches)
    }

    fn begin_wait(&mut self) -> Result<()> {
        self.waits += 1;
        recorded(&self.step.failed_waits, self.waits)
    }

    fn begin_exchange(&mut self) -> Result<()> {
        self.exchanges += 1;
        recorded(&self.step.failed_exchanges, self.exchanges)
    }

    fn begin_move(&mut self) -> Result<()> {
        self.moves += 1;
        match self.step.failed_moves.contains(&self.moves) {
            true => Err(Error::io("the transfer failed when it was recorded")),
            false => Ok(()),
        }
    }
}

fn recorded(failures: &[Failure], number: u32) -> Result<()> {
    failures.iter().find(|failure| failure.number == number).map_or(Ok(()), |failure| Err(failure.error()))
}

impl Replayed {
    /// Sets the step that is repeated next.
    pub fn set_step(&self, step: Step) {
        *self.lock() = ReplayedStep { step, ..ReplayedStep::default() };
    }

    fn lock(&self) -> MutexGuard<'_, ReplayedStep> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `inputs` and `executor` with a decorator around each.
    pub fn around(self, inputs: Box<dyn Inputs>, executor: Box<dyn Executor>) -> (Box<dyn Inputs>, Box<dyn Executor>) {
        let replayed = self.clone();
        (Box::new(ReplayedInputs { inner: inputs, replayed: self }), Box::new(ReplayedExecutor { inner: executor, replayed }))
    }
}

/// The recorded inputs. The commands come from `inner`: the replay has repeated their calls.
struct ReplayedInputs {
    inner: Box<dyn Inputs>,
    replayed: Replayed,
}

impl Inputs for ReplayedInputs {
    fn collect(&mut self, costs: Option<Costs>, inputs: &mut StepInputs) {
        self.inner.collect(costs, inputs);
        let replayed = self.replayed.lock();
        let Step { now, full_queues, costs, finished_transfers, .. } = &replayed.step;
        inputs.now = *now;
        inputs.finished_transfers.clear();
        inputs.finished_transfers.extend(finished_transfers.iter().copied().map(TransferId));
        inputs.costs = costs.map(|(block, token)| Costs { block: f64::from_bits(block), token: f64::from_bits(token) });
        inputs.swap_full_queues(&mut full_queues.clone());
    }

    fn pool_blocks(&mut self, need: Need) -> usize {
        let mut replayed = self.replayed.lock();
        let next = replayed.step.resized.get(replayed.resizes).copied().filter(|resized| resized.between != need.steps);
        let Some(resized) = next else { return need.pool };
        replayed.resizes += 1;
        replayed.fails_to_shrink = !resized.succeeded;
        resized.blocks
    }
}

/// An executor that fails where it failed when it was recorded.
struct ReplayedExecutor {
    inner: Box<dyn Executor>,
    replayed: Replayed,
}

impl Executor for ReplayedExecutor {
    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<InFlightStep> {
        self.replayed.lock().begin_launch()?;
        self.inner.submit(plan)
    }

    fn sample(&mut self, step: &mut InFlightStep, sampling: &DeviceSampling) -> Result<()> {
        self.inner.sample(step, sampling)
    }

    fn wait(&mut self, step: InFlightStep) -> Result<StepOutput<'_>> {
        let failed = self.replayed.lock().begin_wait();
        let output = self.inner.wait(step);
        failed.and(output)
    }

    fn discard(&mut self, error: Option<&Error>) {
        self.inner.discard(error);
    }

    fn sampling_limits(&self) -> Option<DeviceSamplingLimits> {
        self.inner.sampling_limits()
    }

    fn is_lost(&self) -> bool {
        self.inner.is_lost()
    }

    fn swap_out(&mut self, moves: &[BlockMove]) -> Result<()> {
        self.replayed.lock().begin_move()?;
        self.inner.swap_out(moves)
    }

    fn swap_in(&mut self, moves: &[BlockMove]) -> Result<()> {
        self.replayed.lock().begin_move()?;
        self.inner.swap_in(moves)
    }

    fn read_blocks(&self, blocks: &[BlockId], tail: Tail, out: &mut Vec<u8>) -> Result<()> {
        self.replayed.lock().begin_exchange()?;
        self.inner.read_blocks(blocks, tail, out)
    }

    fn write_blocks(&mut self, blocks: &[BlockId], bytes: &[u8]) -> Result<()> {
        self.replayed.lock().begin_exchange()?;
        self.inner.write_blocks(blocks, bytes)
    }

    fn shrink(&mut self, moves: &[BlockCopy], blocks: usize) -> Result<()> {
        match self.replayed.lock().fails_to_shrink {
            true => Err(Error::out_of_memory()),
            false => self.inner.shrink(moves, blocks),
        }
    }

    fn discard_failures(&self) -> u64 {
        self.inner.discard_failures()
    }

    fn layout(&self) -> String {
        self.inner.layout()
    }

    fn max_transfer_bytes(&self) -> usize {
        self.inner.max_transfer_bytes()
    }

    fn kv_part_bytes(&self) -> Vec<usize> {
        self.inner.kv_part_bytes()
    }
}
