//! A KV store in memory whose faults a test controls.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pagedllm::types::kv_store::{BlockKey, Completion, KvStore, KvStoreHandle, Operation, OperationResult};

/// The values of a store. They outlive the engines that use them.
#[derive(Clone, Default)]
pub struct Memory {
    pub values: Arc<Mutex<HashMap<BlockKey, Vec<u8>>>>,
    pub fault: Arc<Mutex<Fault>>,
    /// Number of `Exists` operations, and of `Get` operations.
    pub questions: Arc<AtomicU64>,
    pub reads: Arc<AtomicU64>,
    pub closed: Arc<AtomicU64>,
}

/// What is wrong with a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// Operations take this long.
    Slow(Duration),
    /// Operations fail.
    Fails,
    /// No operation starts.
    Refuses,
    /// No operation ends.
    Hangs,
    /// Each value has one wrong bit.
    Damages,
    /// Each value has a size that differs from that of the buffer.
    WrongLength,
    /// Each read returns the value of another key.
    OtherValue,
    /// The store claims to have every key.
    Claims,
    /// Each operation has another fault. The number is the state of a generator.
    Random(u64),
}

impl Fault {
    pub const SINGLE: [Fault; 9] = [
        Fault::None,
        Fault::Slow(Duration::from_millis(2)),
        Fault::Fails,
        Fault::Refuses,
        Fault::Hangs,
        Fault::Damages,
        Fault::WrongLength,
        Fault::OtherValue,
        Fault::Claims,
    ];
}

impl Memory {
    pub fn handle(&self) -> KvStoreHandle {
        KvStoreHandle::new(Box::new(MemoryStore { memory: self.clone(), started: VecDeque::new() }))
    }

    pub fn set(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }

    pub fn len(&self) -> usize {
        self.values.lock().unwrap().len()
    }

    fn next_fault(&self) -> Fault {
        let mut fault = self.fault.lock().unwrap();
        let Fault::Random(state) = &mut *fault else { return *fault };
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        // Half of the operations have no fault.
        Fault::SINGLE.get((*state >> 40) as usize % (2 * Fault::SINGLE.len())).copied().unwrap_or_default()
    }
}

struct MemoryStore {
    memory: Memory,
    /// Operations, the times at which they end, and their faults.
    started: VecDeque<(u64, Operation, Instant, Fault)>,
}

impl MemoryStore {
    fn execute(&self, operation: &mut Operation, fault: Fault) -> OperationResult {
        if fault == Fault::Fails {
            return OperationResult::Failed;
        }
        let mut values = self.memory.values.lock().unwrap();
        match operation {
            Operation::Exists { keys, found } => {
                self.memory.questions.fetch_add(1, SeqCst);
                keys.iter().zip(found).for_each(|(key, found)| *found = (values.contains_key(key) || fault == Fault::Claims) as u8);
                OperationResult::Done(0)
            }
            Operation::Get { key, value } => {
                self.memory.reads.fetch_add(1, SeqCst);
                let stored = match fault {
                    Fault::OtherValue => values.iter().find(|(other, _)| *other != key).map(|(_, value)| value),
                    _ => values.get(key),
                };
                let Some(stored) = stored else { return OperationResult::Missing };
                let len = value.len().min(stored.len());
                value[..len].copy_from_slice(&stored[..len]);
                if fault == Fault::Damages {
                    let place = key[0] as usize * 7 % len;
                    value[place] ^= 16;
                }
                OperationResult::Done(stored.len() as u64 - (fault == Fault::WrongLength) as u64)
            }
            Operation::Put { key, value } => {
                values.insert(*key, value.clone());
                OperationResult::Done(0)
            }
            Operation::Remove { key } => values.remove(key).map_or(OperationResult::Missing, |_| OperationResult::Done(0)),
        }
    }
}

impl KvStore for MemoryStore {
    fn start(&mut self, token: u64, operation: Operation) -> Result<(), Operation> {
        let fault = self.memory.next_fault();
        let delay = match fault {
            Fault::Slow(delay) => delay,
            Fault::Refuses => return Err(operation),
            Fault::Hangs => Duration::from_secs(3600),
            _ => Duration::ZERO,
        };
        self.started.push_back((token, operation, Instant::now() + delay, fault));
        Ok(())
    }

    fn poll(&mut self, timeout: Duration, ended: &mut Vec<Completion>) {
        let before = self.started.len();
        for _ in 0..before {
            let Some((token, mut operation, at, fault)) = self.started.pop_front() else { break };
            match at <= Instant::now() {
                true => {
                    let result = self.execute(&mut operation, fault);
                    ended.push(Completion { token, operation, result });
                }
                false => self.started.push_back((token, operation, at, fault)),
            }
        }
        if self.started.len() == before {
            std::thread::sleep(timeout);
        }
    }

    fn close(&mut self) {
        self.memory.closed.fetch_add(1, SeqCst);
    }
}
