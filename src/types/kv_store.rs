//! The interface to a store that holds KV blocks outside of the engine, and its operations.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The name of a block in a store.
pub type BlockKey = [u8; 32];

/// A store of blocks by key. Its operations are asynchronous: `start` returns at once, and `poll`
/// reports the end. One thread of the engine calls all functions.
pub trait KvStore: Send {
    /// Starts an operation. The store owns its buffers until `poll` returns them. A store that
    /// refuses the operation returns it.
    fn start(&mut self, token: u64, operation: Operation) -> std::result::Result<(), Operation>;

    /// Waits until an operation ends or the time has passed. Appends the operations that have
    /// ended.
    fn poll(&mut self, timeout: Duration, ended: &mut Vec<Completion>);

    /// Ends all operations. Their buffers are not used afterwards.
    fn close(&mut self);
}

/// An operation with its buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Sets the byte of `found` to 1 for each key that the store has.
    Exists {
        /// The keys.
        keys: Vec<BlockKey>,
        /// One byte per key, initially 0.
        found: Vec<u8>,
    },
    /// Reads a value. The store fills the buffer.
    Get {
        /// The key.
        key: BlockKey,
        /// The buffer, as long as every value of this engine.
        value: Vec<u8>,
    },
    /// Writes a value. A store may keep an older value of the same key.
    Put {
        /// The key.
        key: BlockKey,
        /// The value.
        value: Vec<u8>,
    },
    /// Removes a value that was damaged.
    Remove {
        /// The key.
        key: BlockKey,
    },
}

/// The end of an operation.
#[derive(Debug)]
pub struct Completion {
    /// The token of its start.
    pub token: u64,
    /// The operation with its buffers.
    pub operation: Operation,
    /// The result.
    pub result: OperationResult,
}

/// The result of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperationResult {
    /// It succeeded. A read has the number of bytes of the stored value.
    Done(u64),
    /// The store has no such value.
    Missing,
    /// It failed.
    Failed,
}

/// A store that the options of an engine refer to. The engine takes it when it starts.
#[derive(Clone)]
pub struct KvStoreHandle(Arc<Mutex<Option<Box<dyn KvStore>>>>);

impl KvStoreHandle {
    /// Creates a handle of a store.
    pub fn new(store: Box<dyn KvStore>) -> KvStoreHandle {
        KvStoreHandle(Arc::new(Mutex::new(Some(store))))
    }

    /// Returns the store. `None` if an engine has taken it.
    pub fn take(&self) -> Option<Box<dyn KvStore>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl fmt::Debug for KvStoreHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KvStoreHandle")
    }
}

/// The secret with which the names and the checksums of blocks are computed.
#[derive(Clone)]
pub struct StoreSecret(pub Vec<u8>);

impl fmt::Debug for StoreSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreSecret")
    }
}

/// A block that a store has returned, with a valid checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadedBlock {
    /// Entry in the block table of the request: place * layer groups + group.
    pub entry: u32,
    /// The stored value: a header, and the bytes of the block. A journal shares it.
    pub value: Arc<Vec<u8>>,
}

/// Blocks that a lookup has read since the last ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupProgress {
    /// The id of the lookup.
    pub id: u64,
    /// Whether the lookup continues.
    pub state: LookupState,
    /// The blocks.
    pub blocks: Vec<LoadedBlock>,
}

/// Whether a lookup continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LookupState {
    /// It waits for blocks that another engine computes.
    Waiting,
    /// It has ended.
    Finished,
    /// The store has not answered within its time limit.
    TimedOut,
}
