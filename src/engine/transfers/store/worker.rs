//! The thread that calls a store. A store that hangs stops this thread alone.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, TryRecvError};

use super::board::{Board, Counts, Round};
use super::value::ValueFormat;
use crate::kv::{BlockHash, Paging};
use crate::scheduler::PrefixLookup;
use crate::types::kv_store::{BlockKey, Completion, KvStore, LoadedBlock, Operation, OperationResult};

/// Time of one poll. New jobs wait at most this long.
const POLL_TIME: Duration = Duration::from_millis(1);

/// Limits of the pause between two questions for a block that another engine computes. It is a
/// sixteenth of the time since the last block.
const MIN_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(160);

/// Work of the thread.
pub enum Job {
    /// Reads the blocks that the prefix cache does not have. Waits up to `wait` for each next block
    /// that the store does not have yet.
    Lookup { id: u64, lookup: PrefixLookup, wait: Duration },
    /// Another request waits for a lookup, from now on for `wait`.
    Extend { id: u64, wait: Duration },
    /// Writes a block. The value has space for the header.
    Save { hash: BlockHash, value: Vec<u8> },
}

/// The purpose of an operation in flight.
enum Purpose {
    /// `entries` are those of the keys.
    Exists {
        id: u64,
        entries: Vec<usize>,
    },
    Get {
        id: u64,
        entry: usize,
    },
    Put,
    Remove,
}

/// A read that has not started.
struct PendingGet {
    id: u64,
    entry: usize,
    key: BlockKey,
}

/// A lookup that has not ended. It has one round, which asks for all blocks and reads those of the
/// longest prefix, or several if it waits for blocks.
struct ActiveLookup {
    lookup: PrefixLookup,
    /// Number of places that are cached or read, and number of places that were asked for.
    end: usize,
    asked: usize,
    /// Number of reads that have not ended.
    reads: usize,
    /// Zero if it does not wait for blocks, or if a read has failed.
    wait: Duration,
    waits_until: Instant,
    /// Time at which the last block was found.
    last_found: Instant,
    has_found: bool,
}

impl ActiveLookup {
    fn new(lookup: PrefixLookup, wait: Duration) -> ActiveLookup {
        let (now, end) = (Instant::now(), lookup.from);
        ActiveLookup { lookup, end, asked: end, reads: 0, wait, waits_until: now + wait, last_found: now, has_found: true }
    }

    /// Returns the end of the places of which a round asks for blocks: as many as may be read, or
    /// one while none appears.
    fn end_of_round(&self, max_places: usize) -> usize {
        let places = if self.has_found { max_places } else { 1 };
        (self.end + places).min(self.lookup.prompt.hashes.len())
    }
}

pub struct Worker {
    store: Box<dyn KvStore>,
    board: Arc<Board>,
    format: ValueFormat,
    paging: Paging,
    max_operations: usize,
    in_flight: HashMap<u64, Purpose>,
    last_token: u64,
    lookups: HashMap<u64, ActiveLookup>,
    /// Ids of the lookups whose next round can begin.
    asking: VecDeque<u64>,
    /// Ids of the lookups whose next round begins at a time.
    pausing: BinaryHeap<Reverse<(Instant, u64)>>,
    gets: VecDeque<PendingGet>,
    puts: VecDeque<(BlockHash, Vec<u8>)>,
    ended: Vec<Completion>,
}

impl Worker {
    pub fn new(store: Box<dyn KvStore>, board: Arc<Board>, format: ValueFormat, paging: Paging, max_operations: usize) -> Worker {
        Worker {
            store,
            board,
            format,
            paging,
            max_operations,
            in_flight: HashMap::new(),
            last_token: 0,
            lookups: HashMap::new(),
            asking: VecDeque::new(),
            pausing: BinaryHeap::new(),
            gets: VecDeque::new(),
            puts: VecDeque::new(),
            ended: Vec::new(),
        }
    }

    /// Processes jobs until their sender is dropped. Then writes what is left, for at most `grace`,
    /// and closes the store if the engine owns it.
    pub fn run(mut self, jobs: &Receiver<Job>, grace: Duration) {
        let mut end = None;
        loop {
            if end.is_none() && self.is_idle() {
                let job = match self.pausing.peek() {
                    Some(Reverse((at, _))) => jobs.recv_deadline(*at),
                    None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                };
                match job {
                    Ok(job) => self.accept(job),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => end = Some(Instant::now() + grace),
                }
            }
            loop {
                match jobs.try_recv() {
                    Ok(job) => self.accept(job),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        end.get_or_insert_with(|| Instant::now() + grace);
                        break;
                    }
                }
            }
            if end.is_some_and(|end| self.is_idle() || Instant::now() >= end) {
                break;
            }
            self.end_pauses();
            self.start_all();
            self.poll();
        }
        // If the creation of the engine fails, the host closes its store.
        if self.board.owns_store() {
            self.store.close();
        }
    }

    /// Returns whether there is nothing to do now.
    fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.asking.is_empty() && self.gets.is_empty() && self.puts.is_empty()
    }

    fn accept(&mut self, job: Job) {
        match job {
            Job::Lookup { id, lookup, wait } => {
                self.lookups.insert(id, ActiveLookup::new(lookup, wait));
                self.asking.push_back(id);
            }
            Job::Extend { id, wait } => {
                if let Some(active) = self.lookups.get_mut(&id).filter(|active| !active.wait.is_zero()) {
                    active.wait = active.wait.max(wait);
                    active.waits_until = active.waits_until.max(Instant::now() + wait);
                }
            }
            Job::Save { hash, value } => self.puts.push_back((hash, value)),
        }
    }

    /// Returns the maximum number of places of a round.
    fn max_places(&self) -> usize {
        (self.board.max_blocks() / self.paging.groups()).max(1)
    }

    fn has_slot(&self) -> bool {
        self.in_flight.len() < self.max_operations
    }

    /// Starts as many operations as the limits allow. Requests wait for reads, so reads precede
    /// writes.
    fn start_all(&mut self) {
        while self.has_slot()
            && let Some(id) = self.asking.pop_front()
        {
            self.start_exists(id);
        }
        while self.has_slot()
            && let Some(get) = self.gets.pop_front()
        {
            if !self.board.is_pending(get.id) {
                self.end_get(get.id, false);
                continue;
            }
            let Some(value) = self.board.take_for_read() else {
                self.gets.push_front(get);
                break;
            };
            let PendingGet { id, entry, key } = get;
            if let Err(Operation::Get { value, .. }) = self.start(Purpose::Get { id, entry }, Operation::Get { key, value }) {
                self.board.end_read(Some(value));
                self.end_get(id, false);
            }
        }
        while self.has_slot()
            && let Some((hash, mut value)) = self.puts.pop_front()
        {
            let key = self.format.key(&hash);
            self.format.seal(&key, &mut value);
            if let Err(Operation::Put { value, .. }) = self.start(Purpose::Put, Operation::Put { key, value }) {
                self.board.end_write(value);
            }
        }
    }

    /// Starts an operation. Counts a refused one as a failure.
    fn start(&mut self, purpose: Purpose, operation: Operation) -> Result<(), Operation> {
        self.last_token += 1;
        let refused = self.store.start(self.last_token, operation);
        match &refused {
            Ok(()) => drop(self.in_flight.insert(self.last_token, purpose)),
            Err(_) => Counts::add(&self.board.counts.failures, 1),
        }
        refused
    }

    /// Begins a round of a lookup.
    fn start_exists(&mut self, id: u64) {
        let groups = self.paging.groups();
        let max_places = self.max_places();
        let Some(active) = self.lookups.get_mut(&id) else { return };
        match self.board.begin_round(id) {
            Round::Begun => {}
            Round::Early => return self.pausing.push(Reverse((Instant::now() + POLL_TIME, id))),
            Round::Unwanted => return drop(self.lookups.remove(&id)),
        }
        let end = active.end_of_round(max_places);
        let lookup = &active.lookup;
        let is_missing = |entry: &usize| !lookup.cached[entry - lookup.from * groups];
        let entries: Vec<usize> = (active.end * groups..end * groups).filter(is_missing).collect();
        let key = |&entry: &usize| self.format.key(&lookup.prompt.hashes[entry / groups].for_group(entry % groups));
        let keys: Vec<BlockKey> = entries.iter().map(key).collect();
        // Blocks for which a request waits are asked for several times, and count once.
        let new = entries.iter().filter(|&entry| entry / groups >= active.asked).count();
        active.asked = active.asked.max(end);
        Counts::add(&self.board.counts.queries, new as u64);
        let found = vec![0; keys.len()];
        if self.start(Purpose::Exists { id, entries }, Operation::Exists { keys, found }).is_err() {
            self.finish(id);
        }
    }

    fn poll(&mut self) {
        if self.in_flight.is_empty() {
            // Reads wait until the engine has copied earlier ones.
            if !self.gets.is_empty() {
                std::thread::sleep(POLL_TIME);
            }
            return;
        }
        let mut ended = std::mem::take(&mut self.ended);
        self.store.poll(POLL_TIME, &mut ended);
        ended.drain(..).for_each(|completion| self.complete(completion));
        self.ended = ended;
    }

    fn complete(&mut self, completion: Completion) {
        let Completion { token, operation, result } = completion;
        let Some(purpose) = self.in_flight.remove(&token) else { return };
        Counts::add(&self.board.counts.failures, (result == OperationResult::Failed) as u64);
        match (purpose, operation) {
            (Purpose::Exists { id, entries }, Operation::Exists { keys, found }) => match result {
                OperationResult::Done(_) => self.queue_gets(id, &entries, &keys, &found),
                _ => self.finish(id),
            },
            (Purpose::Get { id, entry }, Operation::Get { key, value }) => {
                let is_valid = self.end_read(id, entry, key, value, result);
                self.end_get(id, is_valid);
            }
            (Purpose::Put, Operation::Put { value, .. }) => {
                if let OperationResult::Done(_) = result {
                    Counts::add(&self.board.counts.stored, 1);
                    Counts::add(&self.board.counts.bytes_written, value.len() as u64);
                }
                self.board.end_write(value);
            }
            _ => {}
        }
    }

    /// Queues the reads of the blocks that the request can use.
    fn queue_gets(&mut self, id: u64, entries: &[usize], keys: &[BlockKey], found: &[u8]) {
        let (groups, max_places) = (self.paging.groups(), self.max_places());
        let Some(active) = self.lookups.get_mut(&id) else { return };
        let lookup = &active.lookup;
        // The blocks before `active.end` are there. `entries` are sorted.
        let end = self.paging.usable_prefix(active.end, active.end_of_round(max_places), |place, group| {
            let entry = place * groups + group;
            lookup.cached[entry - lookup.from * groups] || entries.binary_search(&entry).is_ok_and(|at| found[at] == 1)
        });
        let is_needed = |entry: usize| entry / groups < end && entry / groups >= self.paging.first_visible(entry % groups, end);
        for (&entry, &key) in entries.iter().zip(keys).filter(|(entry, _)| is_needed(**entry)) {
            active.reads += 1;
            self.gets.push_back(PendingGet { id, entry, key });
        }
        active.has_found = end > active.end;
        if active.has_found {
            (active.end, active.last_found) = (end, Instant::now());
            active.waits_until = active.last_found + active.wait;
        }
        if active.reads == 0 {
            self.end_round(id);
        }
    }

    /// Passes a block that was read to the stepping thread. Returns false if it is not valid.
    fn end_read(&mut self, id: u64, entry: usize, key: BlockKey, value: Vec<u8>, result: OperationResult) -> bool {
        let is_there = matches!(result, OperationResult::Done(_));
        if result == OperationResult::Done(value.len() as u64) && self.format.is_valid(&key, &value) {
            self.board.add(id, LoadedBlock { entry: entry as u32, value: Arc::new(value) });
            return true;
        }
        self.board.end_read(Some(value));
        if is_there {
            Counts::add(&self.board.counts.failures, 1);
            // Otherwise every later lookup would read the damaged block again.
            let _ = self.start(Purpose::Remove, Operation::Remove { key });
        }
        false
    }

    /// Counts a read that has ended. The last one ends its round.
    fn end_get(&mut self, id: u64, is_valid: bool) {
        let Some(active) = self.lookups.get_mut(&id) else { return };
        active.reads -= 1;
        if !is_valid {
            // Nothing after this block is of use.
            active.wait = Duration::ZERO;
        }
        if active.reads == 0 {
            self.end_round(id);
        }
    }

    /// Ends the lookup, or makes it ask again for the blocks that the store does not have yet.
    fn end_round(&mut self, id: u64) {
        let Some(active) = self.lookups.get(&id) else { return };
        let now = Instant::now();
        if active.wait.is_zero() || active.waits_until <= now || active.end == active.lookup.prompt.hashes.len() {
            return self.finish(id);
        }
        let since_found = now.duration_since(active.last_found);
        let pause = if active.has_found { POLL_TIME } else { (since_found / 16).clamp(MIN_PAUSE, MAX_PAUSE) };
        self.board.end_round(id, pause);
        self.pausing.push(Reverse((now + pause, id)));
    }

    fn end_pauses(&mut self) {
        while let Some(&Reverse((at, id))) = self.pausing.peek()
            && at <= Instant::now()
        {
            self.pausing.pop();
            self.asking.push_back(id);
        }
    }

    fn finish(&mut self, id: u64) {
        self.lookups.remove(&id);
        self.board.finish(id);
    }
}
