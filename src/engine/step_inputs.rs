//! The inputs of a step: all that a step reads from outside of the core. With them and the results
//! of the executor, a step can be repeated bit for bit.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Receiver;

use super::clock::Clock;
use super::command::Command;
use super::sequence_table::SequenceTable;
use super::transfers::store::StoreClient;
use super::transfers::{Completions, EndedTransfer, receive_all};
use crate::error::Result;
use crate::generation::grammar::MaskId;
use crate::generation::grammar::Masker;
use crate::kv::connector::TransferId;
use crate::memory::budget::{Lease, Need};
use crate::observability::journal::digests::OutputDigests;
use crate::observability::stats::{Stats, StepReport};
use crate::scheduler::Costs;
use crate::types::QueueId;
use crate::types::kv_store::LookupProgress;

/// Time that a step waits for masks after its forward pass. Quick masks take less than a
/// millisecond. The rest is for threads that the system has not scheduled, since a late mask wastes
/// the computation of its row.
const MASK_GRACE_TIME: Duration = Duration::from_millis(5);

/// The inputs of one step, collected at its beginning.
#[derive(Default)]
pub struct StepInputs {
    /// Start time of the step. All decisions that depend on the time use it.
    pub now: Duration,
    pub commands: VecDeque<Command>,
    /// Measured costs of swapping and recomputation, if the scheduler compares them.
    pub costs: Option<Costs>,
    /// Transfers that other threads have completed since the last step.
    pub finished_transfers: Vec<TransferId>,
    /// Reads and writes of the swap file that have ended since the last step.
    pub disk_transfers: Vec<EndedTransfer>,
    /// Blocks that the lookups of the KV store have read since the last step.
    pub lookup_progress: Vec<LookupProgress>,
    /// Number of bytes that the KV store can take.
    pub store_room: u64,
    /// Late masks that other threads have computed since the last step.
    pub finished_masks: Vec<MaskId>,
    /// Queues whose requests must pause, in ascending order.
    full_queues: Vec<QueueId>,
    has_new_space: bool,
}

impl StepInputs {
    pub fn is_full(&self, queue: QueueId) -> bool {
        self.full_queues.binary_search(&queue).is_ok()
    }

    pub fn full_queues(&self) -> &[QueueId] {
        &self.full_queues
    }

    /// Returns whether a queue that was full in the last step is not full now.
    pub fn has_new_space(&self) -> bool {
        self.has_new_space
    }

    /// Swaps the full queues with `queues`, which is in ascending order.
    pub fn swap_full_queues(&mut self, queues: &mut Vec<QueueId>) {
        std::mem::swap(&mut self.full_queues, queues);
        self.has_new_space = queues.iter().any(|&queue| !self.is_full(queue));
    }
}

/// The source of the inputs. A recorder of a journal decorates it, and a replay replaces it.
pub trait Inputs: Send {
    /// Collects the inputs of the step that begins. `costs` are the measured ones.
    fn collect(&mut self, costs: Option<Costs>, inputs: &mut StepInputs);

    /// Waits for masks that the step needs, and adds those to `late` for which it does not wait.
    fn await_masks(&mut self, masker: &mut Masker, ids: &[MaskId], late: &mut Vec<MaskId>);

    /// Returns whether another thread consumes a token, before it computes this mask. `takes_long`
    /// is set if the token would take too long for the step.
    fn is_late(&mut self, id: MaskId, takes_long: bool) -> bool;

    /// Adds those of the late masks that have been computed to `finished`.
    fn finished_masks(&mut self, masker: &mut Masker, late: &[MaskId], finished: &mut Vec<MaskId>);

    /// Waits until a transfer or a late mask may have finished, a command has come, or the time has
    /// passed. Returns false if the inputs are those of a replay, which has no wait.
    fn await_completion(&mut self, _timeout: Option<Duration>) -> bool {
        false
    }

    /// Returns how many blocks the pool may have. Called after the commands of a step, and between
    /// steps when another engine needs memory.
    fn pool_blocks(&mut self, need: Need) -> usize;

    /// Ends the step.
    fn end_step(&mut self, _step: &EndedStep) {}

    /// Returns whether the recording has stopped because of a disk error.
    fn has_stopped(&self) -> bool {
        false
    }

    /// Ends the recording when the engine is freed.
    fn close(&mut self) {}
}

/// The results of a step.
pub struct EndedStep<'a> {
    pub result: &'a Result<StepReport>,
    pub stats: &'a Stats,
    /// Digests of the outputs. `None` without a journal.
    pub outputs: Option<&'a OutputDigests>,
}

/// The inputs of an engine in use.
pub struct LiveInputs {
    table: Arc<SequenceTable>,
    clock: Arc<dyn Clock>,
    lease: Arc<Lease>,
    completions: Completions,
    store: Option<Arc<StoreClient>>,
    /// The ends of reads and writes of the swap file.
    disk_transfers: Option<Receiver<EndedTransfer>>,
    /// Maximum size of the pool in blocks.
    max_blocks: usize,
    /// Version of the full queues in the last step.
    version: u64,
    full_queues: Vec<QueueId>,
}

impl LiveInputs {
    pub fn new(
        table: Arc<SequenceTable>,
        clock: Arc<dyn Clock>,
        lease: Arc<Lease>,
        completions: Completions,
        (store, disk_transfers): (Option<Arc<StoreClient>>, Option<Receiver<EndedTransfer>>),
        max_blocks: usize,
    ) -> LiveInputs {
        LiveInputs { table, clock, lease, completions, store, disk_transfers, max_blocks, version: 0, full_queues: Vec::new() }
    }
}

impl Inputs for LiveInputs {
    fn collect(&mut self, costs: Option<Costs>, inputs: &mut StepInputs) {
        (inputs.now, inputs.costs) = (self.clock.now(), costs);
        self.table.take_commands(inputs.now, &mut inputs.commands);
        inputs.finished_transfers.clear();
        self.completions.take(&mut inputs.finished_transfers);
        inputs.disk_transfers.clear();
        self.disk_transfers.iter().for_each(|ended| receive_all(ended, &mut inputs.disk_transfers));
        inputs.lookup_progress.clear();
        if let Some(store) = &self.store {
            store.board.take_progress(inputs.now, &mut inputs.lookup_progress);
            inputs.store_room = store.board.room();
        }
        inputs.has_new_space = false;
        if self.table.wakeup.read_full_queues(&mut self.version, &mut self.full_queues) {
            inputs.swap_full_queues(&mut self.full_queues);
        }
    }

    fn await_masks(&mut self, masker: &mut Masker, ids: &[MaskId], late: &mut Vec<MaskId>) {
        masker.wait(ids, Some(MASK_GRACE_TIME));
        late.extend(ids.iter().filter(|&&id| !masker.has(id)));
    }

    fn is_late(&mut self, _id: MaskId, takes_long: bool) -> bool {
        takes_long
    }

    fn finished_masks(&mut self, masker: &mut Masker, late: &[MaskId], finished: &mut Vec<MaskId>) {
        masker.wait(late, Some(Duration::ZERO));
        finished.extend(late.iter().filter(|&&id| masker.has(id)));
    }

    fn await_completion(&mut self, timeout: Option<Duration>) -> bool {
        // Commands, completions and other engines wake the stepping thread after they have written
        // what a step reads. A wake-up from before the last step ends the wait too early, once.
        self.table.wakeup.wait(timeout);
        true
    }

    fn pool_blocks(&mut self, need: Need) -> usize {
        self.lease.request(need).min(self.max_blocks)
    }
}
