//! The share of the memory budget that an engine holds for its KV pool.

use std::cmp::Ordering;
use std::sync::Arc;

use super::device::Device;
use crate::memory::budget::{Lease, Need};
use crate::scheduler::Scheduler;
use crate::types::batch::BlockCopy;

/// The lease of an engine.
pub struct PoolLease {
    lease: Arc<Lease>,
    /// The block moves of a shrink, kept so that a shrink need not allocate.
    moves: Vec<BlockCopy>,
}

impl PoolLease {
    pub fn new(lease: Arc<Lease>) -> PoolLease {
        PoolLease { lease, moves: Vec::new() }
    }

    /// Returns what the engine needs. `steps` is set if a step starts now.
    pub fn need(scheduler: &Scheduler, steps: bool) -> Need {
        let blocks = scheduler.blocks();
        let (pool, used, cached) = (blocks.total(), blocks.used_blocks(), blocks.cached_blocks());
        Need { pool, used, cached, next: scheduler.next_need(), steps }
    }

    /// Resizes the pool to `blocks` blocks. A shrink preempts sequences if necessary. If it fails,
    /// the pool keeps its size, and the next step tries again.
    pub fn resize(&mut self, blocks: usize, scheduler: &mut Scheduler, device: &mut Device) {
        match blocks.cmp(&scheduler.blocks().total()) {
            Ordering::Less => self.shrink(blocks, scheduler, device),
            Ordering::Equal => {}
            Ordering::Greater => scheduler.grow(blocks),
        }
    }

    fn shrink(&mut self, blocks: usize, scheduler: &mut Scheduler, device: &mut Device) {
        // If a transfer of this step fails, its blocks are not among those that are moved.
        device.move_blocks(scheduler, |_| {});
        let smaller = scheduler.shrink_pool(blocks, &mut self.moves);
        // Preempted sequences may have transfers to the host tier.
        device.move_blocks(scheduler, |_| {});
        if smaller.and_then(|()| device.executor.shrink(&self.moves, blocks)).is_ok() {
            scheduler.shrink(blocks, &self.moves);
            self.lease.release(blocks);
        }
    }

    /// Returns all memory, after the device has freed it.
    pub fn release_all(&mut self) {
        self.lease.release_all();
    }
}
