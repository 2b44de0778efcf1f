//! A map of the KV blocks and of the sequences that use them, to be displayed.

use super::Scheduler;
use super::group::Queue;
use super::sequence_kv::SequenceKv;
use crate::error::{Error, Result, try_vec, try_with_capacity};
use crate::kv::{BlockManager, BlockTable};
use crate::types::{RequestId, SeqId};

/// Maximum number of entries of block tables that are read for one map. The blocks of further tables
/// have no sequence in the map.
const MAX_ENTRIES: usize = 1 << 20;

/// The first blocks of both tiers, and the sequences. It allocates only when it is created.
#[derive(Debug)]
pub struct PoolMap {
    pub device: TierMap,
    pub host: TierMap,
    pub sequences: Vec<MappedSequence>,
    /// Number of sequences that did not fit.
    pub sequences_omitted: usize,
}

/// The blocks of one tier.
#[derive(Debug)]
pub struct TierMap {
    /// Number of blocks of the tier.
    pub total: usize,
    /// Number of blocks without a user that the prefix cache can find.
    pub cached: usize,
    /// Number of free blocks.
    pub free: usize,
    pub blocks: Vec<MappedBlock>, // [first blocks]
}

/// The use of a block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MappedBlock {
    /// Number of sequences and transfers that use it.
    pub users: u32,
    /// Whether only the prefix cache has it.
    pub is_cached: bool,
    /// One of the sequences, if it is known.
    pub sequence: Option<SeqId>,
}

/// What a sequence waits for, or that it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SequenceState {
    Running,
    Waiting,
    /// Skipped, because its queue is full, or it waits for a slow grammar or a KV store.
    Paused,
    Idle,
    /// A pin, computed or not.
    Pinned,
}

/// A sequence of the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedSequence {
    pub id: SeqId,
    /// Its request. `None` for pins and for sequences of transfers.
    pub request: Option<RequestId>,
    pub state: SequenceState,
    /// Number of tokens, and the number at which it ends.
    pub tokens: usize,
    pub max_len: usize,
    /// Number of tokens whose K and V are stored.
    pub computed: usize,
    /// Number of prompt tokens that the prefix cache had.
    pub cached: u64,
    pub generated: usize,
    /// Number of blocks in all layer groups, including those out of their window.
    pub blocks: usize,
    /// Whether the blocks are in the host tier.
    pub is_swapped: bool,
}

impl PoolMap {
    /// Creates a map with space for this many blocks of each tier and this many sequences.
    pub fn new(device_blocks: usize, host_blocks: usize, sequences: usize) -> Result<PoolMap> {
        // The memory is written here, so that the stepping thread takes no page faults.
        let tier = |blocks| {
            let mut blocks = try_vec(blocks, MappedBlock::default())?;
            blocks.clear();
            Ok::<_, Error>(TierMap { total: 0, cached: 0, free: 0, blocks })
        };
        Ok(PoolMap {
            device: tier(device_blocks)?,
            host: tier(host_blocks)?,
            sequences: try_with_capacity(sequences)?,
            sequences_omitted: 0,
        })
    }

    /// Sets the users of all blocks.
    fn read_blocks(&mut self, blocks: &BlockManager) {
        let TierMap { total, cached, free, blocks: map } = &mut self.device;
        (*total, *cached, *free) = (blocks.total(), blocks.cached_blocks(), blocks.free_blocks());
        let of_device = |block| MappedBlock { users: blocks.users(block), is_cached: blocks.is_cached(block), sequence: None };
        map.clear();
        map.extend((0..(*total).min(map.capacity()) as u32).map(of_device));
        let TierMap { total, free, blocks: map, .. } = &mut self.host;
        (*total, *free) = (blocks.host_total(), blocks.host_total() - blocks.host_used());
        let of_host = |block| MappedBlock { users: blocks.host_users(block), ..MappedBlock::default() };
        map.clear();
        map.extend((0..(*total).min(map.capacity()) as u32).map(of_host));
    }

    /// Makes the sequence one of the users of its blocks. `entries` is how many may still be read.
    fn add_users(&mut self, id: SeqId, table: &BlockTable, entries: &mut usize) {
        let tier = if table.swapped() { &mut self.host } else { &mut self.device };
        for block in table.held().take(*entries) {
            if let Some(block) = tier.blocks.get_mut(block as usize) {
                block.sequence.get_or_insert(id);
            }
        }
        *entries = entries.saturating_sub(table.blocks().len());
    }
}

impl Scheduler {
    /// Replaces the contents of the map. The running sequences come first. `request_of` returns the
    /// request of a sequence.
    pub fn write_map(&self, map: &mut PoolMap, request_of: impl Fn(SeqId) -> Option<RequestId>) {
        map.read_blocks(&self.blocks);
        map.sequences.clear();
        let others = self.sequences.values().filter(|sequence| self.queue_of(sequence) != Some(Queue::Running));
        let mut entries = MAX_ENTRIES;
        for sequence in self.running_sequences().chain(others).take(map.sequences.capacity()) {
            map.sequences.push(self.mapped(sequence, request_of(sequence.id)));
            map.add_users(sequence.id, &sequence.table, &mut entries);
        }
        map.sequences_omitted = self.sequences.len() - map.sequences.len();
    }

    fn queue_of(&self, sequence: &SequenceKv) -> Option<Queue> {
        sequence.group.map(|group| self.queues.groups[group].queue)
    }

    fn state(&self, sequence: &SequenceKv) -> SequenceState {
        match self.queue_of(sequence) {
            _ if sequence.request.pinned => SequenceState::Pinned,
            Some(Queue::Running) => SequenceState::Running,
            Some(Queue::Waiting) => SequenceState::Waiting,
            Some(Queue::Paused) => SequenceState::Paused,
            None => SequenceState::Idle,
        }
    }

    fn mapped(&self, sequence: &SequenceKv, request: Option<RequestId>) -> MappedSequence {
        MappedSequence {
            id: sequence.id,
            request,
            state: self.state(sequence),
            tokens: sequence.tokens.len(),
            max_len: sequence.max_len(),
            computed: sequence.computed,
            cached: sequence.stats.cached,
            generated: sequence.generated,
            blocks: sequence.table.blocks().len(),
            is_swapped: sequence.table.swapped(),
        }
    }
}
