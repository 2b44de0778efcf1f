//! Transfers of blocks: exports, imports, and the moves to the host tier and back.

mod exports;
mod imports;
pub mod store;
mod swap_file;
#[cfg(test)]
mod tests;
mod tier_moves;
mod worker;

use std::sync::Arc;
use std::time::Duration;

pub use exports::{Export, Exports};
pub use imports::{Import, Imports};
pub use swap_file::{CompletedTransfer, EndedTransfer, SwapFile};
pub use tier_moves::{MovedBlocks, TierMoves};
pub use worker::{Completions, receive_all};

use store::{Loads, Saves, StoreClient};

use crate::error::Result;
use crate::kv::connector::{Connector, Progress};
use crate::types::RequestId;

/// A step copies at most this many times the bytes of an export from and to a store.
const STORE_BYTES: usize = 8;

/// The pending exports and imports, and the transfers from and to a store.
pub struct Transfers {
    pub exports: Exports,
    pub imports: Imports,
    /// Whether the next export or import needs blocks that move between the tiers.
    pub waits_for_moves: bool,
    /// Transfers from and to the KV store, if the engine has one.
    pub store: Option<StoreTransfers>,
}

/// The transfers from and to a KV store.
pub struct StoreTransfers {
    pub loads: Loads,
    pub saves: Saves,
}

impl StoreTransfers {
    /// Creates the transfers. A replay has no client.
    pub fn new(client: Option<Arc<StoreClient>>, timeout: Duration, block_bytes: usize, max_bytes: usize) -> Result<StoreTransfers> {
        let max_bytes = max_bytes.saturating_mul(STORE_BYTES);
        let loads = Loads::new(client.clone(), timeout, max_bytes);
        Ok(StoreTransfers { loads, saves: Saves::new(client, block_bytes, max_bytes)? })
    }

    /// Returns the number of transfers for which the end of a step waits.
    fn pending(&self) -> usize {
        self.loads.pending() + self.saves.can_copy() as usize
    }
}

impl Transfers {
    /// Creates the state for steps that copy at most `max_bytes` bytes in each direction.
    pub fn new(completions: Completions, max_bytes: usize, store: Option<StoreTransfers>) -> Transfers {
        Transfers { exports: Exports::new(completions, max_bytes), imports: Imports::new(max_bytes), waits_for_moves: false, store }
    }

    /// Returns whether the request waits for blocks of the store.
    pub fn has_lookup(&self, request: RequestId) -> bool {
        self.store.as_ref().is_some_and(|store| store.loads.has(request))
    }

    /// Returns whether a request waits for blocks of the store.
    pub fn has_lookups(&self) -> bool {
        self.store.as_ref().is_some_and(|store| store.loads.pending() > 0)
    }

    /// Returns the time at which the first lookup ends without an answer.
    pub fn next_lookup_deadline(&self) -> Option<Duration> {
        self.store.as_ref()?.loads.next_deadline()
    }

    /// Begins a step, which may copy again.
    pub fn begin_step(&mut self) {
        self.exports.begin_step();
        self.imports.begin_step();
    }

    /// Returns the number of transfers without a result.
    pub fn pending(&self) -> usize {
        self.exports.pending() + self.imports.pending() + self.store.as_ref().map_or(0, StoreTransfers::pending)
    }

    /// Returns what the transfers need next. `waits_for_disk` is set while a swap file is slow.
    pub fn progress(&self, waits_for_disk: bool) -> Progress {
        let of_store = self.store.as_ref().map_or(Progress::Idle, |store| store.loads.progress().max(store.saves.progress()));
        let others = self.exports.progress().max(self.imports.progress());
        let is_blocked = self.waits_for_moves && waits_for_disk;
        of_store.max(if is_blocked { others.min(Progress::Waiting) } else { others })
    }

    pub fn cancel_all(&mut self) {
        self.exports.cancel_all();
        self.imports.cancel_all();
        if let Some(store) = &mut self.store {
            store.loads.cancel_all();
            store.saves.cancel_all();
        }
    }
}
