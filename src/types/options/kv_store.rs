//! The options for a store of KV blocks.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::types::kv_store::{KvStoreHandle, StoreSecret};

/// A store of KV blocks outside of the engine, and the limits of its use.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KvStoreOptions {
    /// The store. `None` in the options of a journal.
    #[serde(skip)]
    pub store: Option<KvStoreHandle>,
    /// Maximum number of bytes in blocks that are read or written.
    pub max_bytes: u64,
    /// Maximum number of operations that the store executes at a time.
    pub max_operations: usize,
    /// Time after which a request no longer waits for the store.
    pub timeout: Duration,
    /// Secret for the names and checksums of the blocks. `None`: they have no secret.
    #[serde(skip)]
    pub secret: Option<StoreSecret>,
}

impl KvStoreOptions {
    /// Default of `max_bytes`.
    pub const DEFAULT_MAX_BYTES: u64 = 256 << 20;
    /// Default of `max_operations`.
    pub const DEFAULT_MAX_OPERATIONS: usize = 64;
    /// Default of `timeout`.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1);
    const MAX_OPERATIONS: usize = 1 << 16;
    const MAX_TIMEOUT: Duration = Duration::from_secs(3600);
    const MIN_SECRET_BYTES: usize = 16;

    /// Creates options with the default limits.
    pub fn new(store: KvStoreHandle) -> KvStoreOptions {
        KvStoreOptions {
            store: Some(store),
            max_bytes: Self::DEFAULT_MAX_BYTES,
            max_operations: Self::DEFAULT_MAX_OPERATIONS,
            timeout: Self::DEFAULT_TIMEOUT,
            secret: None,
        }
    }

    /// Checks the limits.
    pub fn validate(&self) -> Result<()> {
        if !(1..=Self::MAX_OPERATIONS).contains(&self.max_operations) {
            return Err(Error::invalid(format!(
                "kv_store_max_operations is {}; must be 1 to {}",
                self.max_operations,
                Self::MAX_OPERATIONS
            )));
        }
        if self.timeout.is_zero() || self.timeout > Self::MAX_TIMEOUT {
            return Err(Error::invalid(format!(
                "kv_store_timeout_ms is {}; must be 1 to {}",
                self.timeout.as_millis(),
                Self::MAX_TIMEOUT.as_millis()
            )));
        }
        match &self.secret {
            Some(secret) if secret.0.len() < Self::MIN_SECRET_BYTES => {
                Err(Error::invalid(format!("kv_store_secret has {} bytes; must have at least {}", secret.0.len(), Self::MIN_SECRET_BYTES)))
            }
            _ => Ok(()),
        }
    }
}
