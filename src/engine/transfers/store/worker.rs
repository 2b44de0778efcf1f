//! The thread that calls a store. A store that hangs stops this thread alone.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, TryRecvError};

use super::board::{Board, Counts};
use super::value::ValueFormat;
use crate::kv::{BlockHash, Paging};
use crate::scheduler::PrefixLookup;
use crate::types::kv_store::{BlockKey, Completion, KvStore, LoadedBlock, Operation, OperationResult};

/// Time of one poll. New jobs wait at most this long.
const POLL_TIME: Duration = Duration::from_millis(1);

/// Work of the thread.
pub enum Job {
    /// Reads the blocks that the prefix cache does not have.
    Lookup { id: u64, lookup: PrefixLookup },
    /// Writes a block. The value has space for the header.
    Save { hash: BlockHash, value: Vec<u8> },
}

/// The purpose of an operation in flight.
enum Purpose {
    /// `entries` are those of the keys.
    Exists {
        id: u64,
        lookup: PrefixLookup,
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

pub struct Worker {
    store: Box<dyn KvStore>,
    board: Arc<Board>,
    format: ValueFormat,
    paging: Paging,
    max_operations: usize,
    in_flight: HashMap<u64, Purpose>,
    last_token: u64,
    lookups: VecDeque<(u64, PrefixLookup)>,
    gets: VecDeque<PendingGet>,
    /// Number of reads of each lookup that have not ended.
    remaining: HashMap<u64, usize>,
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
            lookups: VecDeque::new(),
            gets: VecDeque::new(),
            remaining: HashMap::new(),
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
                match jobs.recv() {
                    Ok(job) => self.accept(job),
                    Err(_) => end = Some(Instant::now() + grace),
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
            self.start_all();
            self.poll();
        }
        // If the creation of the engine fails, the host closes its store.
        if self.board.owns_store() {
            self.store.close();
        }
    }

    fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.lookups.is_empty() && self.gets.is_empty() && self.puts.is_empty()
    }

    fn accept(&mut self, job: Job) {
        match job {
            Job::Lookup { id, lookup } => self.lookups.push_back((id, lookup)),
            Job::Save { hash, value } => self.puts.push_back((hash, value)),
        }
    }

    fn has_slot(&self) -> bool {
        self.in_flight.len() < self.max_operations
    }

    /// Starts as many operations as the limits allow. Requests wait for reads, so reads precede
    /// writes.
    fn start_all(&mut self) {
        while self.has_slot()
            && let Some((id, lookup)) = self.lookups.pop_front()
        {
            self.start_exists(id, lookup);
        }
        while self.has_slot()
            && let Some(get) = self.gets.pop_front()
        {
            if !self.board.is_pending(get.id) {
                self.end_get(get.id);
                continue;
            }
            let Some(value) = self.board.take_for_read() else {
                self.gets.push_front(get);
                break;
            };
            let PendingGet { id, entry, key } = get;
            if let Err(Operation::Get { value, .. }) = self.start(Purpose::Get { id, entry }, Operation::Get { key, value }) {
                self.board.end_read(Some(value));
                self.end_get(id);
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

    fn start_exists(&mut self, id: u64, lookup: PrefixLookup) {
        let groups = self.paging.groups();
        let missing = |(place, _): &(usize, &bool)| !lookup.cached[*place];
        let entries: Vec<usize> = lookup.cached.iter().enumerate().filter(missing).map(|(place, _)| lookup.from * groups + place).collect();
        let key = |&entry: &usize| self.format.key(&lookup.prompt.hashes[entry / groups].for_group(entry % groups));
        let keys: Vec<BlockKey> = entries.iter().map(key).collect();
        Counts::add(&self.board.counts.queries, keys.len() as u64);
        let found = vec![0; keys.len()];
        if self.start(Purpose::Exists { id, lookup, entries }, Operation::Exists { keys, found }).is_err() {
            self.board.finish(id);
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
            (Purpose::Exists { id, lookup, entries }, Operation::Exists { keys, found }) => {
                let is_known = matches!(result, OperationResult::Done(_));
                match is_known {
                    true => self.queue_gets(id, &lookup, &entries, &keys, &found),
                    false => self.board.finish(id),
                }
            }
            (Purpose::Get { id, entry }, Operation::Get { key, value }) => {
                self.end_read(id, entry, key, value, result);
                self.end_get(id);
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
    fn queue_gets(&mut self, id: u64, lookup: &PrefixLookup, entries: &[usize], keys: &[BlockKey], found: &[u8]) {
        let (groups, places) = (self.paging.groups(), lookup.prompt.hashes.len());
        let mut has = lookup.cached.clone();
        let first = lookup.from * groups;
        entries.iter().zip(found).for_each(|(entry, found)| has[entry - first] |= *found == 1);
        let max_places = lookup.from + (self.board.max_blocks() / groups).max(1);
        let end = self.paging.usable_prefix(lookup.from, places.min(max_places), |place, group| has[place * groups + group - first]);
        let is_needed = |entry: usize| entry / groups < end && entry / groups >= self.paging.first_visible(entry % groups, end);
        let before = self.gets.len();
        let needed = entries.iter().zip(keys).filter(|(entry, _)| is_needed(**entry));
        self.gets.extend(needed.map(|(&entry, &key)| PendingGet { id, entry, key }));
        match self.gets.len() - before {
            0 => self.board.finish(id),
            count => drop(self.remaining.insert(id, count)),
        }
    }

    fn end_read(&mut self, id: u64, entry: usize, key: BlockKey, value: Vec<u8>, result: OperationResult) {
        let OperationResult::Done(bytes) = result else { return self.board.end_read(Some(value)) };
        if bytes == value.len() as u64 && self.format.is_valid(&key, &value) {
            return self.board.add(id, LoadedBlock { entry: entry as u32, value: Arc::new(value) });
        }
        Counts::add(&self.board.counts.failures, 1);
        self.board.end_read(Some(value));
        // Otherwise every later lookup would read the damaged block again.
        let _ = self.start(Purpose::Remove, Operation::Remove { key });
    }

    /// Counts a read that has ended. The last one ends its lookup.
    fn end_get(&mut self, id: u64) {
        let Some(remaining) = self.remaining.get_mut(&id) else { return };
        *remaining -= 1;
        if *remaining == 0 {
            self.remaining.remove(&id);
            self.board.finish(id);
        }
    }
}
