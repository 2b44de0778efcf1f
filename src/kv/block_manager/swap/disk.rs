//! A host tier in a file, which another thread reads and writes.

use super::{HostTier, Transfer};
use crate::error::Result;
use crate::kv::BlockId;
use crate::kv::block_manager::BlockManager;
use crate::kv::block_manager::block_queue::BlockQueue;

impl BlockManager {
    /// Makes the host tier one whose contents another thread reads: `next_to_read`.
    pub fn read_host_ahead(&mut self) -> Result<()> {
        self.host.unread = Some(BlockQueue::new(self.host_total())?);
        Ok(())
    }

    /// Lowers the limit of the transfers to the host tier for this step.
    pub fn lower_limit_out(&mut self, max_moves: usize) {
        self.host.limits.out = self.host.limits.out.min(max_moves);
    }

    /// Returns the next host block that another thread must read.
    pub fn next_to_read(&mut self) -> Option<BlockId> {
        let HostTier { unread, transfers, .. } = &mut self.host;
        let host = unread.as_mut()?.pop_if(|host| transfers[host as usize] == Transfer::BackUnread)?;
        transfers[host as usize] = Transfer::BackReading;
        Some(host)
    }

    /// Schedules the transfer of a host block that another thread has read, unless it was
    /// cancelled.
    pub fn finish_read(&mut self, host: BlockId) {
        if let Some(device) = self.target_of_read(host) {
            self.host.move_back(device, host);
        }
    }

    /// Cancels the transfer of a host block that another thread could not read, and marks the block
    /// as lost. Returns false if the transfer was cancelled before.
    pub fn fail_read(&mut self, host: BlockId) -> bool {
        let Some(device) = self.target_of_read(host) else { return false };
        self.unmark_all();
        self.block_pool.mark(device);
        self.host.transfers[host as usize] = Transfer::None;
        self.host.end_mirroring(device);
        self.remove_cached(device);
        self.host.release_unqueued(host);
        true
    }

    /// Returns the device block that waits until another thread has read the host block.
    fn target_of_read(&self, host: BlockId) -> Option<BlockId> {
        let is_read = self.host.transfers.get(host as usize) == Some(&Transfer::BackReading);
        is_read.then(|| self.host.mirror_of_host[host as usize].expect("the target of a queued transfer is mirrored"))
    }

    /// Marks the blocks that are queued to a tier in a file as lost. Returns false if there are
    /// none.
    pub fn mark_queued_out(&mut self) -> bool {
        if self.host.unread.is_none() || self.host.queued_out == 0 {
            return false;
        }
        self.unmark_all();
        for host in self.host.out_queue.iter().filter(|&host| self.host.transfers[host as usize] == Transfer::OutQueued) {
            self.host.block_pool.mark(host);
        }
        true
    }

    /// Returns whether a tier in a file takes no further block in this step.
    pub fn is_disk_behind(&self) -> bool {
        self.host.unread.is_some() && self.host.limits.out == 0
    }
}
