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
use crate::types::id_map::IdMap;
use crate::types::kv_store::{LoadedBlock, LookupProgress, LookupState};

/// After a lookup without an answer, no request waits for the store for this many time limits.
const SUSPENSION: u32 = 8;

/// The lookups of requests, and the blocks that they have found.
pub struct Loads {
    client: Option<Arc<StoreClient>>,
    timeout: Duration,
    last_id: u64,
    pending: Vec<Lookup>,
    /// The requests that wait for a lookup or for the copies of its blocks.
    waiting: IdMap<RequestId, ()>,
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
    /// Whether the requests wait for blocks that the store does not have yet.
    waits: bool,
    requests: Vec<RequestId>,
}

/// Blocks of a lookup that are copied into the pool, the last place first. The first places are
/// then the most recently used ones, so that the prefix is evicted from its end.
struct FoundBlocks {
    lookup: u64,
    prompt: Arc<PromptBlocks>,
    is_new: bool,
    blocks: Vec<LoadedBlock>,
    /// The requests whose lookup has ended.
    requests: Vec<RequestId>,
}

impl Loads {
    pub fn new(client: Option<Arc<StoreClient>>, timeout: Duration, max_bytes: usize) -> Loads {
        Loads {
            client,
            timeout,
            last_id: 0,
            pending: Vec::new(),
            waiting: IdMap::default(),
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

    /// Makes a request wait for a lookup, which waits up to `wait` for each next block that the
    /// store does not have yet. If another request already waits for the same block, they wait for
    /// one lookup. Requests that wait for blocks share a lookup if their prompts have the same ones.
    pub fn begin(&mut self, request: RequestId, lookup: PrefixLookup, wait: Duration) -> Result<()> {
        let PrefixLookup { prompt, from, .. } = &lookup;
        let (from, waits, first, last) = (*from, !wait.is_zero(), prompt.hashes[*from], prompt.hashes.last());
        let is_same = |other: &&mut Lookup| {
            let Lookup { prompt: other_prompt, from: other_from, waits: other_waits, .. } = &**other;
            let has_same_blocks = match waits {
                true => other_prompt.hashes.len() == prompt.hashes.len() && other_prompt.hashes.last() == last,
                false => other_prompt.hashes.get(from) == Some(&first),
            };
            *other_waits == waits && *other_from <= from && has_same_blocks
        };
        self.waiting.try_reserve(1)?;
        if let Some(same) = self.pending.iter_mut().find(is_same) {
            same.requests.try_reserve(1)?;
            same.requests.push(request);
            self.waiting.insert(request, ());
            if let Some(client) = self.client.as_ref().filter(|_| waits) {
                client.submit(Job::Extend { id: same.id, wait });
            }
            return Ok(());
        }
        self.pending.try_reserve(1)?;
        self.copying.try_reserve(self.pending.len() + 1)?;
        self.finished.try_reserve(self.copying.len() + self.pending.len() + 1)?;
        let id = self.last_id + 1;
        let prompt = lookup.prompt.clone();
        let mut requests = Vec::new();
        requests.try_reserve(1)?;
        requests.push(request);
        if let Some(client) = &self.client {
            client.board.begin(id)?;
            client.submit(Job::Lookup { id, lookup, wait });
        }
        self.last_id = id;
        self.waiting.insert(request, ());
        self.pending.push(Lookup { id, prompt, from, waits, requests });
        Ok(())
    }

    /// Takes the blocks that a lookup has read.
    pub fn receive(&mut self, progress: LookupProgress) {
        let LookupProgress { id, state, mut blocks } = progress;
        if state == LookupState::TimedOut && blocks.is_empty() {
            self.suspended_until = self.now + self.timeout * SUSPENSION;
        }
        let place = self.pending.iter().position(|lookup| lookup.id == id);
        let has_space = self.copying.try_reserve(self.pending.len() + 1).is_ok();
        let Some(place) = place.filter(|_| has_space || state != LookupState::Waiting) else {
            return blocks.into_iter().for_each(|block| self.recycle(block));
        };
        let prompt = self.pending[place].prompt.clone();
        let requests = match state {
            LookupState::Waiting => Vec::new(),
            LookupState::Finished | LookupState::TimedOut => self.pending.remove(place).requests,
        };
        blocks.sort_unstable_by_key(|block| block.entry);
        self.copying.push_back(FoundBlocks { lookup: id, prompt, is_new: true, blocks, requests });
    }

    /// Removes a request that has ended. If no other one waits for its lookup, the lookup ends.
    pub fn remove(&mut self, request: RequestId) {
        if self.waiting.remove(&request).is_none() {
            return;
        }
        self.copying.iter_mut().for_each(|found| found.requests.retain(|other| *other != request));
        let Some(place) = self.pending.iter().position(|lookup| lookup.requests.contains(&request)) else { return };
        self.pending[place].requests.retain(|other| *other != request);
        if self.pending[place].requests.is_empty() {
            self.cancel(place);
        }
    }

    /// Ends a lookup before its time. Returns the requests that wait for it.
    fn cancel(&mut self, place: usize) -> Vec<RequestId> {
        let lookup = self.pending.remove(place);
        self.client.iter().for_each(|client| client.board.cancel(lookup.id));
        lookup.requests
    }

    /// Returns whether a request waits for blocks.
    pub fn has(&self, request: RequestId) -> bool {
        self.waiting.contains_key(&request)
    }

    pub fn pending(&self) -> usize {
        self.pending.len() + self.copying.len()
    }

    /// Returns the time at which the first lookup may end without an answer.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.client.as_ref()?.board.next_deadline()
    }

    /// Returns the prompt of the next block, the entry of the first block that arrived with it (only
    /// once), and the entry of the block. `None` ends the copies of this step.
    pub fn next_to_copy(&mut self) -> Option<(Arc<PromptBlocks>, Option<usize>, usize)> {
        if self.bytes_left == 0 {
            return None;
        }
        while let Some(FoundBlocks { prompt, is_new, blocks, .. }) = self.copying.front_mut() {
            if let (Some(first), Some(last)) = (blocks.first(), blocks.last()) {
                let first = std::mem::take(is_new).then_some(first.entry as usize);
                return Some((prompt.clone(), first, last.entry as usize));
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

    /// Removes all blocks that have arrived with the next one, because the pool cannot take them. If
    /// their lookup continues, it ends, since later blocks would be of no use.
    pub fn drop_rest(&mut self) {
        let Some(found) = self.copying.front_mut() else { return };
        let (id, blocks) = (found.lookup, std::mem::take(&mut found.blocks));
        blocks.into_iter().for_each(|block| self.recycle(block));
        if let Some(place) = self.pending.iter().position(|lookup| lookup.id == id) {
            let requests = self.cancel(place);
            if let Some(found) = self.copying.front_mut() {
                found.requests = requests;
            }
        }
    }

    fn finish_first(&mut self) {
        let Some(FoundBlocks { requests, .. }) = self.copying.pop_front() else { return };
        if !requests.is_empty() {
            for request in &requests {
                self.waiting.remove(request);
            }
            self.finished.push_back(requests);
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
        for lookup in self.pending.drain(..) {
            self.client.iter().for_each(|client| client.board.cancel(lookup.id));
        }
        self.waiting.clear();
        self.copying.clear();
        self.finished.clear();
    }
}
