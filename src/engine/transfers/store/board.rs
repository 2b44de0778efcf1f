//! The state that the thread of a store shares with the stepping thread.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::engine::clock::Clock;
use crate::error::{Error, Result, try_vec};
use crate::observability::stats::StoreStats;
use crate::output::wakeup::Wakeup;
use crate::types::kv_store::{LoadedBlock, LookupProgress, LookupState};

/// Maximum number of lookups at a time.
const MAX_LOOKUPS: usize = 4096;

/// Number of unused buffers that are kept.
const SPARE_BUFFERS: usize = 64;

/// The pending lookups, and the bytes that reads and writes occupy.
pub struct Board {
    state: Mutex<State>,
    pub counts: Counts,
    wakeup: Arc<Wakeup>,
    clock: Arc<dyn Clock>,
    /// Time in which the store must answer the questions of a round and read its blocks.
    timeout: Duration,
    /// Maximum number of bytes of all reads, and of all writes.
    max_bytes: u64,
    value_bytes: u64,
    /// Whether the stepping thread has blocks to write that have no space.
    wants_room: AtomicBool,
    /// Whether the creation of the engine has succeeded. Until then the host owns the store.
    owns_store: AtomicBool,
}

#[derive(Default)]
struct State {
    lookups: Vec<PendingLookup>,
    read_bytes: u64,
    write_bytes: u64,
    spare: Vec<Vec<u8>>,
}

struct PendingLookup {
    id: u64,
    /// Time of the engine's clock at which the lookup ends with the blocks that it has: the limit of
    /// its round, or of the time until its next round.
    deadline: Duration,
    is_in_round: bool,
    blocks: Vec<LoadedBlock>,
    is_done: bool,
    /// No request waits for it. It stays until its round ends, because a store that does not answer
    /// must be noticed.
    is_cancelled: bool,
}

/// Whether a round of a lookup can begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    Begun,
    /// The stepping thread has not taken the blocks of the last round. The buffers of two rounds
    /// could exceed the limit, so that neither could end.
    Early,
    /// No request waits for the lookup.
    Unwanted,
}

/// Counters of the store.
#[derive(Default)]
pub struct Counts {
    pub queries: AtomicU64,
    pub hits: AtomicU64,
    pub stored: AtomicU64,
    pub dropped: AtomicU64,
    pub failures: AtomicU64,
    pub bytes_read: AtomicU64,
    pub bytes_written: AtomicU64,
}

impl Counts {
    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, value: u64) {
        counter.fetch_add(value, Relaxed);
    }

    pub fn read(&self) -> StoreStats {
        StoreStats {
            queries: self.queries.load(Relaxed),
            hits: self.hits.load(Relaxed),
            stored: self.stored.load(Relaxed),
            dropped: self.dropped.load(Relaxed),
            failures: self.failures.load(Relaxed),
            bytes_read: self.bytes_read.load(Relaxed),
            bytes_written: self.bytes_written.load(Relaxed),
        }
    }
}

impl State {
    /// Returns a lookup for which a request waits.
    fn find(&mut self, id: u64) -> Option<&mut PendingLookup> {
        self.lookups.iter_mut().find(|lookup| lookup.id == id && !lookup.is_cancelled)
    }
}

impl Board {
    /// Creates a board. `max_bytes` bounds the reads and writes together.
    pub fn new(wakeup: Arc<Wakeup>, clock: Arc<dyn Clock>, timeout: Duration, max_bytes: u64, value_bytes: usize) -> Board {
        let value_bytes = value_bytes as u64;
        // One value always has space.
        let max_bytes = (max_bytes / 2).max(value_bytes);
        Board {
            state: Mutex::default(),
            counts: Counts::default(),
            wakeup,
            clock,
            timeout,
            max_bytes,
            value_bytes,
            wants_room: AtomicBool::default(),
            owns_store: AtomicBool::default(),
        }
    }

    /// Makes the engine the owner of the store, which it closes at its end.
    pub fn own_store(&self) {
        self.owns_store.store(true, SeqCst);
    }

    pub fn owns_store(&self) -> bool {
        self.owns_store.load(SeqCst)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the maximum number of blocks that one lookup reads.
    pub fn max_blocks(&self) -> usize {
        (self.max_bytes / self.value_bytes) as usize
    }

    /// Adds a lookup, whose first round begins now.
    pub fn begin(&self, id: u64) -> Result<()> {
        let deadline = self.clock.now() + self.timeout;
        let mut state = self.state();
        if state.lookups.len() >= MAX_LOOKUPS {
            return Err(Error::capacity(format!("{MAX_LOOKUPS} lookups of kv_store are pending")));
        }
        state.lookups.try_reserve(1)?;
        let (blocks, is_done, is_cancelled) = (Vec::new(), false, false);
        state.lookups.push(PendingLookup { id, deadline, is_in_round: true, blocks, is_done, is_cancelled });
        Ok(())
    }

    /// Begins a round of a lookup.
    pub fn begin_round(&self, id: u64) -> Round {
        let deadline = self.clock.now() + self.timeout;
        let mut state = self.state();
        match state.find(id) {
            None => Round::Unwanted,
            Some(lookup) if !lookup.blocks.is_empty() => Round::Early,
            Some(lookup) => {
                if !std::mem::replace(&mut lookup.is_in_round, true) {
                    lookup.deadline = deadline;
                }
                Round::Begun
            }
        }
    }

    /// Ends a round of a lookup that continues after `pause`. Wakes the stepping thread if there are
    /// blocks.
    pub fn end_round(&self, id: u64, pause: Duration) {
        let deadline = self.clock.now() + pause + self.timeout;
        let mut state = self.state();
        let Some(lookup) = state.find(id) else { return };
        (lookup.deadline, lookup.is_in_round) = (deadline, false);
        if !lookup.blocks.is_empty() {
            self.wakeup.wake();
        }
    }

    /// Ends a lookup for which no request waits any more.
    pub fn cancel(&self, id: u64) {
        let mut state = self.state();
        let Some(lookup) = state.find(id) else { return };
        lookup.is_cancelled = true;
        let (blocks, is_in_round) = (std::mem::take(&mut lookup.blocks), lookup.is_in_round);
        blocks.into_iter().for_each(|block| self.release_read(&mut state, Arc::into_inner(block.value)));
        if !is_in_round {
            state.lookups.retain(|lookup| lookup.id != id);
        }
    }

    /// Returns the time at which the first lookup may end without an answer.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.state().lookups.iter().map(|lookup| lookup.deadline).min()
    }

    /// Returns whether a request still waits for the lookup.
    pub fn is_pending(&self, id: u64) -> bool {
        self.state().find(id).is_some()
    }

    /// Adds a block to a lookup. If no request waits for it, the block is dropped.
    pub fn add(&self, id: u64, block: LoadedBlock) {
        let mut state = self.state();
        match state.find(id).and_then(|lookup| lookup.blocks.try_reserve(1).is_ok().then_some(lookup)) {
            Some(lookup) => {
                lookup.blocks.push(block);
                Counts::add(&self.counts.hits, 1);
                Counts::add(&self.counts.bytes_read, self.value_bytes);
            }
            None => self.release_read(&mut state, Arc::into_inner(block.value)),
        }
    }

    /// Ends a lookup, and wakes the stepping thread.
    pub fn finish(&self, id: u64) {
        if let Some(lookup) = self.state().lookups.iter_mut().find(|lookup| lookup.id == id) {
            lookup.is_done = true;
        }
        self.wakeup.wake();
    }

    /// Appends the blocks of the rounds that have ended or whose time has passed.
    pub fn take_progress(&self, now: Duration, progress: &mut Vec<LookupProgress>) {
        let mut state = self.state();
        // Without memory, the lookups wait for the next step.
        if progress.try_reserve(state.lookups.len()).is_err() {
            return;
        }
        state.lookups.retain_mut(|lookup| {
            let state = if lookup.is_done {
                LookupState::Finished
            } else if !lookup.is_in_round && !lookup.blocks.is_empty() {
                lookup.deadline = now + self.timeout;
                LookupState::Waiting
            } else if lookup.deadline <= now {
                Counts::add(&self.counts.failures, 1);
                LookupState::TimedOut
            } else {
                return true;
            };
            progress.push(LookupProgress { id: lookup.id, state, blocks: std::mem::take(&mut lookup.blocks) });
            state == LookupState::Waiting
        });
    }

    /// Takes a buffer for a read, if the limit allows it.
    pub fn take_for_read(&self) -> Option<Vec<u8>> {
        let mut state = self.state();
        if state.read_bytes + self.value_bytes > self.max_bytes {
            return None;
        }
        let buffer = self.buffer(&mut state)?;
        state.read_bytes += self.value_bytes;
        Some(buffer)
    }

    /// Takes a buffer for a write, if the limit allows it.
    pub fn take_for_write(&self) -> Option<Vec<u8>> {
        let mut state = self.state();
        let buffer = self.buffer(&mut state)?;
        state.write_bytes += self.value_bytes;
        Some(buffer)
    }

    fn buffer(&self, state: &mut State) -> Option<Vec<u8>> {
        state.spare.pop().or_else(|| try_vec(self.value_bytes as usize, 0).ok())
    }

    /// Ends the use of the buffer of a read, and returns it unless a journal still needs it.
    pub fn end_read(&self, buffer: Option<Vec<u8>>) {
        self.release_read(&mut self.state(), buffer);
    }

    fn release_read(&self, state: &mut State, buffer: Option<Vec<u8>>) {
        state.read_bytes = state.read_bytes.saturating_sub(self.value_bytes);
        buffer.into_iter().for_each(|buffer| keep(&mut state.spare, buffer));
    }

    /// Returns the buffer of a write. Wakes the stepping thread if it has waited for space.
    pub fn end_write(&self, buffer: Vec<u8>) {
        let mut state = self.state();
        state.write_bytes = state.write_bytes.saturating_sub(buffer.len() as u64);
        keep(&mut state.spare, buffer);
        drop(state);
        if self.wants_room.swap(false, SeqCst) {
            self.wakeup.wake();
        }
    }

    /// Returns the number of bytes that may be written now.
    pub fn room(&self) -> u64 {
        self.max_bytes.saturating_sub(self.state().write_bytes)
    }

    /// Makes the next `end_write` wake the stepping thread.
    pub fn want_room(&self) {
        self.wants_room.store(true, SeqCst);
        // A write may have ended since this step has read `room`.
        if self.room() >= self.value_bytes && self.wants_room.swap(false, SeqCst) {
            self.wakeup.wake();
        }
    }
}

fn keep(spare: &mut Vec<Vec<u8>>, buffer: Vec<u8>) {
    if spare.len() < SPARE_BUFFERS && spare.try_reserve(1).is_ok() {
        spare.push(buffer);
    }
}
