//! The transfers between the prefix cache and a KV store: lookups of new requests, the blocks that
//! they have found, and the full blocks that are stored.

use std::time::Duration;

use super::device::Device;
use super::lifecycle::Lifecycle;
use super::transfers::StoreTransfers;
use crate::kv::connector::Connector;
use crate::scheduler::Scheduler;
use crate::types::RequestId;
use crate::types::kv_store::LookupProgress;

impl Lifecycle {
    /// Begins a step: takes the blocks that lookups have read, and the new blocks of the prefix
    /// cache.
    pub fn begin_store_transfers(&mut self, progress: &mut Vec<LookupProgress>, room: u64, now: Duration) {
        let Some(StoreTransfers { loads, saves }) = &mut self.transfers.store else { return progress.clear() };
        loads.begin_step(now);
        saves.begin_step(room);
        progress.drain(..).for_each(|blocks| loads.receive(blocks));
        while let Some(hash) = self.scheduler.next_computed() {
            saves.enqueue(hash);
        }
    }

    /// Looks up the blocks of a new request that the prefix cache does not have. Until the lookup
    /// ends, the request is paused. Without memory, the request computes its prompt.
    /// `wait`: time to wait for each next block that the store does not have yet.
    pub(super) fn begin_lookup(&mut self, request: RequestId, wait: Duration) {
        let Some(StoreTransfers { loads, .. }) = &mut self.transfers.store else { return };
        if loads.may_wait()
            && let Ok(Some(lookup)) = self.scheduler.prefix_lookup(request.sequence(0))
        {
            let _ = loads.begin(request, lookup, wait);
        }
    }

    /// Copies the portion of this step from and to the store.
    pub fn copy_store_transfers(&mut self, device: &mut Device) {
        let Some(store) = &mut self.transfers.store else { return };
        copy_loads(store, &mut self.scheduler, device);
        while store.loads.poll().is_some() {
            self.scheduler.recheck_paused();
        }
        while let Some(hash) = store.saves.next_to_copy() {
            match self.scheduler.blocks().cached_block(&hash) {
                Some(block) => store.saves.copy_from(hash, block, device),
                // Evicted, or overwritten by its only owner.
                None => store.saves.count_dropped(),
            }
        }
    }
}

fn copy_loads(StoreTransfers { loads, .. }: &mut StoreTransfers, scheduler: &mut Scheduler, device: &mut Device) {
    while let Some((prompt, first, entry)) = loads.next_to_copy() {
        // The blocks before the first one must not be evicted for the others.
        first.into_iter().for_each(|first| scheduler.refresh_before(&prompt, first));
        match scheduler.insert_loaded(&prompt, entry, |block| loads.copy_to(block, device)) {
            Ok(true) => loads.remove_copied(),
            // The pool has no block without an owner, or the device has failed.
            Ok(false) | Err(_) => loads.drop_rest(),
        }
    }
}
