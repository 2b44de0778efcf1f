//! The call of a host that reads a snapshot.

use std::sync::TryLockError;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::core::EngineCore;
use super::shared::Shared;
use super::snapshot::EngineSnapshot;
use super::{Engine, budget_client};
use crate::error::{Result, try_format, try_with_capacity};
use crate::observability::stats::{RecentSteps, Stats};
use crate::scheduler::PoolMap;

/// Maximum numbers of blocks of each tier and of sequences. With the limit of the table entries that
/// are read, they bound the pause between two steps.
const MAX_BLOCKS: usize = 1 << 20;
const MAX_SEQUENCES: usize = 1 << 14;

impl Engine {
    /// Describes the engine after its current step as JSON, with the members that the manual of the
    /// C ABI describes at `pllm_engine_snapshot`: the first `max_blocks` blocks of each tier, at
    /// most `max_sequences` sequences, and the last steps. The text is formatted by this thread.
    ///
    /// # Errors
    /// The engine has failed, memory is short, or a hook calls it on the stepping thread.
    pub fn snapshot(&self, max_blocks: usize, max_sequences: usize) -> Result<String> {
        self.check()?;
        let (memory, max_blocks) = (&self.info.memory, max_blocks.min(MAX_BLOCKS));
        let sequences = max_sequences.min(MAX_SEQUENCES);
        let snapshot = EngineSnapshot {
            time: Duration::ZERO,
            block_size: memory.block_size,
            layer_groups: self.info.paging.groups(),
            stats: Stats::default(),
            map: PoolMap::new(memory.max_blocks.min(max_blocks), memory.swap_blocks.min(max_blocks), sequences)?,
            steps: try_with_capacity(RecentSteps::LEN)?,
        };
        let try_fill = |snapshot: &mut EngineSnapshot| {
            self.check()?;
            Ok(self.read_core(snapshot))
        };
        let snapshot = self.shared.snapshots.read(snapshot, try_fill, || self.shared.table.wakeup.wake())?;
        try_format(format_args!("{snapshot}"))
    }

    /// Fills the snapshot, unless a thread steps or waits to step.
    fn read_core(&self, snapshot: &mut EngineSnapshot) -> bool {
        let Shared { budget_checks, snapshots, wants_check, .. } = &self.shared;
        if budget_checks.has_steppers() {
            return false;
        }
        let mut fill = |core: &EngineCore| {
            !core.has_failed() && {
                core.write_snapshot(snapshot);
                true
            }
        };
        // A thread that wants to step waits for this one, as for a check of the lease.
        budget_checks.with(|| {
            let is_filled = snapshots.with_core(|| match self.core.try_lock() {
                Ok(core) => fill(&core),
                Err(TryLockError::Poisoned(core)) => fill(&core.into_inner()),
                Err(TryLockError::WouldBlock) => false,
            });
            // Meanwhile another engine may have called, and found the core locked.
            if wants_check.load(SeqCst) {
                budget_client::answer_calls(&self.core, &self.shared);
            }
            is_filled
        })
    }
}
