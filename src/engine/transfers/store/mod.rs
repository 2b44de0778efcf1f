//! Blocks outside of the pool: a store supplies blocks of prompts, and gets the full blocks that
//! steps compute.
//!
//! The stepping thread never calls the store. A request whose blocks are looked up is paused. The
//! blocks that arrive are inputs of a step, which copies them into the prefix cache; there the
//! request finds them. A journal records them, so that a replay needs no store.

mod board;
mod client;
mod saves;
mod value;
mod worker;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

pub use client::StoreClient;
pub use saves::Saves;
pub use value::{Contents, HEADER, ValueFormat};
pub use worker::Job;

use crate::error::Result;
use crate::kv::BlockId;
use crate::kv::connector::{Connector, DeviceBlocks, Progress, TransferId};
use crate::scheduler::{PrefixLookup, PromptBlocks};
use crate::types::RequestId;
use crate::types::kv_store::{FinishedLookup, LoadedBlock};

/// After a lookup without an answer, no request waits for the store for this many time limits.
const SUSPENSION: u32 = 8;

/// The lookups of requests, and the blocks that they have found.
pub struct Loads {
    client: Option<Arc<StoreClient>>,
    timeout: Duration,
    last_id: u64,
    pending: Vec<Lookup>,
    copying: VecDeque<FoundBlocks>,
    finished: VecDeque<Vec<RequestId>>,
    /// Time of the step, and the time until which requests do not wait for the store.
    now: Duration,
    suspended_until: Duration,
    max_bytes: usize,
    bytes_left: usize,
    /// Block for the next copy, and the result of the last one.
    target: Option<BlockId>,
    result: Result<()>,
}

/// A lookup and the requests that wait for it.
struct Lookup {
    id: u64,
    prompt: Arc<PromptBlocks>,
    from: usize,
    requests: Vec<RequestId>,
    deadline: Duration,
}

/// The blocks of a lookup that are copied into the pool, the last place first. The first places are
/// then the most recently used ones, so that the prefix is evicted from its end.
struct FoundBlocks {
    lookup: Lookup,
    blocks: Vec<LoadedBlock>,
}

impl Loads {
    pub fn new(client: Option<Arc<StoreClient>>, timeout: Duration, max_bytes: usize) -> Loads {
        Loads {
            client,
            timeout,
            last_id: 0,
            pending: Vec::new(),
            copying: VecDeque::new(),
            finished: VecDeque::new(),
            now: Duration::ZERO,
            suspended_until: Duration::ZERO,
            max_bytes,
            bytes_left: max_bytes,
            target: None,
            result: Ok(()),
        }
    }

    pub fn begin_step(&mut self, now: Duration) {
        (self.now, self.bytes_left) = (now, self.max_bytes);
    }

    /// Returns whether requests may wait for the store.
    pub fn may_wait(&self) -> bool {
        self.now >= self.suspended_until
    }

    /// Makes a request wait for a lookup. If another request already waits for the same block, they
    /// wait for one lookup.
    pub fn begin(&mut self, request: RequestId, lookup: PrefixLookup) -> Result<()> {
        let first = lookup.prompt.hashes[lookup.from];
        let is_same = |other: &&mut Lookup| other.from <= lookup.from && other.prompt.hashes.get(lookup.from) == Some(&first);
        if let Some(same) = self.pending.iter_mut().find(is_same) {
            same.requests.try_reserve(1)?;
            same.requests.push(request);
            return Ok(());
        }
        self.pending.try_reserve(1)?;
        self.copying.try_reserve(self.pending.len() + 1)?;
        self.finished.try_reserve(self.copying.len() + self.pending.len() + 1)?;
        let (id, deadline) = (self.last_id + 1, self.now + self.timeout);
        let prompt = lookup.prompt.clone();
        let mut requests = Vec::new();
        requests.try_reserve(1)?;
        requests.push(request);
        let from = lookup.from;
        if let Some(client) = &self.client {
            client.board.begin(id, deadline)?;
            client.submit(Job::Lookup { id, lookup });
        }
        self.last_id = id;
        self.pending.push(Lookup { id, prompt, from, requests, deadline });
        Ok(())
    }

    /// Takes the blocks of a lookup that has ended.
    pub fn receive(&mut self, finished: FinishedLookup) {
        let FinishedLookup { id, timed_out, mut blocks } = finished;
        if timed_out && blocks.is_empty() {
            self.suspended_until = self.now + self.timeout * SUSPENSION;
        }
        let Some(place) = self.pending.iter().position(|lookup| lookup.id == id) else { return };
        let lookup = self.pending.remove(place);
        blocks.sort_unstable_by_key(|block| block.entry);
        self.copying.push_back(FoundBlocks { lookup, blocks });
    }

    /// Returns whether a request waits for blocks.
    pub fn has(&self, request: RequestId) -> bool {
        let waits = |lookup: &Lookup| lookup.requests.contains(&request);
        self.pending.iter().any(waits) || self.copying.iter().any(|found| waits(&found.lookup))
    }

    pub fn pending(&self) -> usize {
        self.pending.len() + self.copying.len()
    }

    /// Returns the time at which the first lookup ends without an answer.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.pending.iter().map(|lookup| lookup.deadline).min()
    }

    /// Returns the prompt of the next block, the number of places that were cached before
    /// (only once for each lookup), and the entry of the block. `None` ends the copies of this
    /// step.
    pub fn next_to_copy(&mut self) -> Option<(Arc<PromptBlocks>, usize, usize)> {
        if self.bytes_left == 0 {
            return None;
        }
        while let Some(FoundBlocks { lookup, blocks }) = self.copying.front_mut() {
            if let Some(block) = blocks.last() {
                let from = std::mem::take(&mut lookup.from);
                return Some((lookup.prompt.clone(), from, block.entry as usize));
            }
            self.finish_first();
        }
        None
    }

    /// Copies the next block into `target`.
    pub fn copy_to(&mut self, target: BlockId, device: &mut dyn DeviceBlocks) -> Result<()> {
        self.target = Some(target);
        let copied = self.copy(device, self.bytes_left);
        self.bytes_left = self.bytes_left.saturating_sub(copied);
        std::mem::replace(&mut self.result, Ok(()))
    }

    /// Removes the next block, which is in the pool now.
    pub fn remove_copied(&mut self) {
        let block = self.copying.front_mut().and_then(|found| found.blocks.pop());
        block.into_iter().for_each(|block| self.recycle(block));
    }

    /// Removes all blocks of the next lookup, which the pool cannot take.
    pub fn drop_rest(&mut self) {
        let blocks = self.copying.front_mut().map(|found| std::mem::take(&mut found.blocks)).unwrap_or_default();
        blocks.into_iter().for_each(|block| self.recycle(block));
    }

    fn finish_first(&mut self) {
        if let Some(FoundBlocks { lookup, .. }) = self.copying.pop_front() {
            self.finished.push_back(lookup.requests);
        }
    }

    fn recycle(&self, block: LoadedBlock) {
        if let Some(client) = &self.client {
            // A journal that is not written yet may share the buffer.
            client.board.end_read(Arc::into_inner(block.value));
        }
    }
}

impl Connector for Loads {
    /// The requests that waited for the lookup.
    type Finished = Vec<RequestId>;

    fn copy(&mut self, device: &mut dyn DeviceBlocks, _max_bytes: usize) -> usize {
        let (Some(found), Some(target)) = (self.copying.front(), self.target.take()) else { return 0 };
        let Some(block) = found.blocks.last() else { return 0 };
        let bytes = block.value.get(HEADER..).unwrap_or_default();
        self.result = device.write_block(target, bytes);
        bytes.len().max(1)
    }

    /// The inputs of a step have the blocks themselves: `receive`.
    fn complete(&mut self, _id: TransferId) {}

    fn poll(&mut self) -> Option<Vec<RequestId>> {
        self.finished.pop_front()
    }

    fn progress(&self) -> Progress {
        match (self.copying.is_empty(), self.pending.is_empty()) {
            (false, _) => Progress::Copying,
            (true, false) => Progress::Waiting,
            (true, true) => Progress::Idle,
        }
    }

    fn cancel_all(&mut self) {
        self.pending.clear();
        self.copying.clear();
        self.finished.clear();
    }
}
