//! The recorded step that a replay repeats: its inputs, and the failures of the executor.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::engine::step_inputs::{Inputs, StepInputs};
use crate::engine::transfers::EndedTransfer;
use crate::error::{Error, Result};
use crate::generation::grammar::MaskId;
use crate::generation::grammar::Masker;
use crate::kv::connector::TransferId;
use crate::memory::budget::Need;
use crate::observability::journal::records::{Failure, Step};
use crate::scheduler::Costs;
use crate::types::kv_store::LookupProgress;

/// The recorded step that is repeated. The decorators of both seams read it.
#[derive(Clone, Default)]
pub struct Replayed(Arc<Mutex<ReplayedStep>>);

/// The recorded step, and how much of it has been repeated.
#[derive(Default)]
pub struct ReplayedStep {
    step: Step,
    lookups: Vec<LookupProgress>,
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
    pub fn begin_launch(&mut self) -> Result<()> {
        self.launches += 1;
        recorded(&self.step.failed_launches, self.launches)
    }

    pub fn begin_wait(&mut self) -> Result<()> {
        self.waits += 1;
        recorded(&self.step.failed_waits, self.waits)
    }

    pub fn begin_exchange(&mut self) -> Result<()> {
        self.exchanges += 1;
        recorded(&self.step.failed_exchanges, self.exchanges)
    }

    /// Fails if the last resize failed.
    pub fn shrink(&self) -> Result<()> {
        if self.fails_to_shrink { Err(Error::out_of_memory()) } else { Ok(()) }
    }

    pub fn begin_move(&mut self) -> Result<()> {
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
    pub fn set_step(&self, step: Step, lookups: Vec<LookupProgress>) {
        *self.lock() = ReplayedStep { step, lookups, ..ReplayedStep::default() };
    }

    pub fn lock(&self) -> MutexGuard<'_, ReplayedStep> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The recorded inputs. The commands come from `inner`: the replay has repeated their calls.
pub struct ReplayedInputs {
    inner: Box<dyn Inputs>,
    replayed: Replayed,
}

impl ReplayedInputs {
    pub fn new(inner: Box<dyn Inputs>, replayed: Replayed) -> ReplayedInputs {
        ReplayedInputs { inner, replayed }
    }
}

impl Inputs for ReplayedInputs {
    fn collect(&mut self, costs: Option<Costs>, inputs: &mut StepInputs) {
        self.inner.collect(costs, inputs);
        let mut replayed = self.replayed.lock();
        inputs.lookup_progress = std::mem::take(&mut replayed.lookups);
        let Step { now, full_queues, costs, finished_transfers, disk_transfers, store_room, .. } = &replayed.step;
        inputs.store_room = *store_room;
        inputs.disk_transfers.clear();
        inputs.disk_transfers.extend(disk_transfers.iter().map(|&(id, succeeded)| EndedTransfer { id, succeeded }));
        inputs.now = *now;
        inputs.finished_transfers.clear();
        inputs.finished_transfers.extend(finished_transfers.iter().copied().map(TransferId));
        inputs.costs = costs.map(|(block, token)| Costs { block: f64::from_bits(block), token: f64::from_bits(token) });
        inputs.swap_full_queues(&mut full_queues.clone());
    }

    fn await_masks(&mut self, masker: &mut Masker, ids: &[MaskId], late: &mut Vec<MaskId>) {
        let replayed = self.replayed.lock();
        for &id in ids {
            match replayed.step.late_masks.contains(&id.0) {
                true => late.push(id),
                false => masker.wait(&[id], None),
            }
        }
    }

    fn is_late(&mut self, id: MaskId, _takes_long: bool) -> bool {
        self.replayed.lock().step.late_masks.contains(&id.0)
    }

    fn finished_masks(&mut self, masker: &mut Masker, late: &[MaskId], finished: &mut Vec<MaskId>) {
        let replayed = self.replayed.lock();
        // A journal that does not fit names masks that are not late. They are ignored.
        finished.extend(replayed.step.finished_masks.iter().copied().map(MaskId).filter(|id| late.contains(id)));
        masker.wait(finished, None);
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
