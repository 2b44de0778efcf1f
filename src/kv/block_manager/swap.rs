//! The host tier: KV blocks of sequences that were swapped out instead of recomputed.
//!
//! A table is completely in one tier, or it arrives on the device. Blocks that other tables use on
//! the device are copied too, and each tier has its own reference counts. Two blocks with the same
//! contents, one in each tier, are mirrored blocks. A table that moves uses the mirrored block if
//! there is one. A shared block is therefore copied once and is shared again after its return. A
//! block that was not overwritten on the device is not copied back. A write to a block ends the
//! mirroring, so copy on write in one tier is independent of the other tier.
//!
//! A step makes a limited number of transfers. The others are queued, and their source blocks keep
//! a reference, so that they are neither written nor reused. Transfers to the host tier are
//! scheduled as soon as the limit allows. Transfers to the device are scheduled for one table at a
//! time, in the order in which the scheduler plans the sequences.
//!
//! A tier in a file has contents that another thread must read before a step can copy them. Its
//! transfers to the device are queued in the order in which tables return, and scheduled when the
//! contents have been read.

mod disk;

use super::block_queue::BlockQueue;
use super::{BlockManager, BlockTable, Tier};
use crate::error::{Result, try_vec};
use crate::kv::block_pool::BlockPool;
use crate::kv::{BlockId, NoSpace};
use crate::types::batch::{BlockMove, Moves};

/// The blocks and tables of the host tier, and the planned transfers.
#[derive(Debug)]
pub(super) struct HostTier {
    block_pool: BlockPool,
    filled: Vec<u16>, // [host blocks]
    /// Number of tables in the host tier.
    tables: usize,
    /// Number of tables that arrive on the device.
    arriving: usize,
    mirror_of_device: Vec<Option<BlockId>>, // [device blocks] mirrored host block
    mirror_of_host: Vec<Option<BlockId>>,   // [host blocks] mirrored device block
    /// [host blocks] Transfer of the block between it and its mirrored block.
    transfers: Vec<Transfer>,
    /// Number of queued transfers to this tier.
    queued_out: usize,
    /// The host blocks of these transfers. Also has some whose transfer was cancelled.
    out_queue: BlockQueue,
    /// The host blocks that another thread must read. `None` for a tier in memory.
    unread: Option<BlockQueue>,
    limits: MoveLimits,
    /// Transfers of this step that are not made yet. A host block in `moves.back` keeps a reference
    /// until then.
    moves: Moves,
}

/// The transfer that a host block waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transfer {
    None,
    /// To the host block, in a later step. The device block keeps a reference.
    OutQueued,
    /// To the host block, in this step.
    OutScheduled,
    /// To the device, in a later step. The host block keeps a reference.
    BackQueued,
    /// As `BackQueued`, but another thread must read the contents first.
    BackUnread,
    /// As `BackQueued`, but another thread reads the contents.
    BackReading,
}

impl Transfer {
    /// Returns whether a device block waits for its contents.
    fn is_back(self) -> bool {
        matches!(self, Transfer::BackQueued | Transfer::BackUnread | Transfer::BackReading)
    }
}

/// The limits of the transfers of one step, in blocks.
#[derive(Debug)]
struct MoveLimits {
    /// Maximum number of blocks in each direction.
    max_moves: usize,
    /// Number of blocks that this step may still move.
    out: usize,
    back: usize,
}

/// The contents of a set of tables. Each block counts once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwapLoad {
    /// Number of blocks that a swap would copy to the other tier.
    pub blocks: usize,
    /// Number of tokens that would be recomputed instead.
    pub tokens: usize,
}

impl HostTier {
    pub fn new(device_blocks: usize, blocks: usize) -> Result<HostTier> {
        let mut moves = Moves::default();
        moves.out.try_reserve(blocks)?;
        moves.back.try_reserve(device_blocks.min(blocks))?;
        Ok(HostTier {
            block_pool: BlockPool::new(blocks)?,
            filled: try_vec(blocks, 0)?,
            tables: 0,
            arriving: 0,
            mirror_of_device: try_vec(device_blocks, None)?,
            mirror_of_host: try_vec(blocks, None)?,
            transfers: try_vec(blocks, Transfer::None)?,
            queued_out: 0,
            out_queue: BlockQueue::new(blocks)?,
            unread: None,
            limits: MoveLimits { max_moves: usize::MAX, out: usize::MAX, back: usize::MAX },
            moves,
        })
    }

    fn mirror(&mut self, device: BlockId, host: BlockId) {
        (self.mirror_of_device[device as usize], self.mirror_of_host[host as usize]) = (Some(host), Some(device));
    }

    /// Returns the host block that has, or will have, the contents of the device block.
    fn copy_of(&self, device: BlockId) -> Option<BlockId> {
        // A block whose return is pending may have lost its mirrored block to a planned write.
        let coming = || self.moves.back.iter().find(|back| back.device == device).map(|back| back.host);
        self.mirror_of_device[device as usize].or_else(coming)
    }

    /// Ends the mirroring of a device block before its contents change.
    pub fn end_mirroring(&mut self, device: BlockId) {
        if self.used() == 0 {
            return; // no block is mirrored
        }
        if let Some(host) = self.mirror_of_device[device as usize].take() {
            self.mirror_of_host[host as usize] = None;
        }
    }

    fn end_host_mirroring(&mut self, host: BlockId) {
        self.mirror_of_host[host as usize].into_iter().for_each(|device| self.end_mirroring(device));
    }

    /// Transfers the mirroring of device block `from` to `to`.
    pub fn relocate(&mut self, from: BlockId, to: BlockId) {
        assert!(self.moves.is_empty(), "moves are pending during a resize");
        if let Some(host) = self.mirror_of_device[from as usize].take() {
            self.mirror(to, host);
        }
    }

    /// Records that the device block is unreferenced. A transfer to it is cancelled.
    pub fn release_device_block(&mut self, device: BlockId) {
        let host = self.mirror_of_device[device as usize];
        self.end_mirroring(device);
        if let Some(host) = host.filter(|&host| self.transfers[host as usize].is_back()) {
            self.transfers[host as usize] = Transfer::None;
            self.release_unqueued(host);
        } else if let Some(place) = self.moves.back.iter().position(|back| back.device == device) {
            let back = self.moves.back.swap_remove(place);
            self.release_unqueued(back.host);
        }
    }

    /// Releases a reference. If it was the last one and a transfer to the block is queued, cancels
    /// the transfer and returns its device block, which has one reference too many.
    #[must_use]
    fn release(&mut self, host: BlockId) -> Option<BlockId> {
        if !self.block_pool.release(host) {
            return None;
        }
        let mirror = self.mirror_of_host[host as usize];
        let transfer = std::mem::replace(&mut self.transfers[host as usize], Transfer::None);
        self.end_host_mirroring(host);
        self.block_pool.put(host);
        match transfer {
            Transfer::OutQueued => {
                self.queued_out -= 1;
                mirror
            }
            Transfer::OutScheduled => {
                self.moves.out.retain(|out| out.host != host);
                None
            }
            Transfer::None | Transfer::BackQueued | Transfer::BackUnread | Transfer::BackReading => None,
        }
    }

    /// Releases a reference to a block that no queued transfer writes.
    fn release_unqueued(&mut self, host: BlockId) {
        let device = self.release(host);
        assert_eq!(device, None, "host block {host} is the source and the target of transfers");
    }

    pub fn acquire(&mut self, host: BlockId) {
        self.block_pool.acquire(host);
    }

    /// Changes the tier of a table.
    pub fn set_tier(&mut self, table: &mut BlockTable, tier: Tier) {
        match std::mem::replace(&mut table.tier, tier) {
            Tier::Device => {}
            Tier::Arriving => self.arriving -= 1,
            Tier::Host => self.tables -= 1,
        }
        match tier {
            Tier::Device => {}
            Tier::Arriving => self.arriving += 1,
            Tier::Host => self.tables += 1,
        }
    }

    /// Removes a transfer to this tier from the queue, if this step may make it. Returns the
    /// blocks.
    fn next_move_out(&mut self) -> Option<BlockMove> {
        if self.limits.out == 0 {
            return None;
        }
        let host = self.out_queue.pop_if(|host| self.transfers[host as usize] == Transfer::OutQueued)?;
        self.transfers[host as usize] = Transfer::OutScheduled;
        self.queued_out -= 1;
        self.limits.out -= 1;
        let device = self.mirror_of_host[host as usize].expect("the source of a queued transfer is mirrored");
        Some(BlockMove { device, host })
    }

    /// Queues the transfer of a host block to its mirrored device block.
    fn queue_back(&mut self, host: BlockId) {
        self.transfers[host as usize] = match &mut self.unread {
            None => Transfer::BackQueued,
            Some(unread) => {
                unread.push(host);
                Transfer::BackUnread
            }
        };
    }

    /// Schedules the queued transfer to a device block, if this step may make it. Returns false if
    /// it stays queued.
    fn schedule_back(&mut self, device: BlockId) -> bool {
        let queued = |host: &BlockId| self.transfers[*host as usize].is_back();
        let Some(host) = self.mirror_of_device[device as usize].filter(queued) else { return true };
        if self.transfers[host as usize] != Transfer::BackQueued || self.limits.back == 0 {
            return false;
        }
        self.limits.back -= 1;
        self.move_back(device, host);
        true
    }

    fn move_back(&mut self, device: BlockId, host: BlockId) {
        self.transfers[host as usize] = Transfer::None;
        self.moves.back.push(BlockMove { device, host });
    }

    pub fn refs(&self, host: BlockId) -> u32 {
        self.block_pool.refs(host)
    }

    fn used(&self) -> usize {
        self.block_pool.total() - self.block_pool.free()
    }

    /// Returns the block that has the contents of a block, and whether it is in this tier. For
    /// tests.
    #[cfg(test)]
    pub fn location(&self, block: BlockId, hosted: bool) -> (BlockId, bool) {
        let scheduled = self.moves.back.iter().find(|back| !hosted && back.device == block);
        if let Some(back) = scheduled {
            return (back.host, true);
        }
        let mirror = if hosted { &self.mirror_of_host } else { &self.mirror_of_device }[block as usize];
        let host = if hosted { Some(block) } else { mirror };
        match (host.map(|host| self.transfers[host as usize]), mirror) {
            (Some(Transfer::OutQueued), Some(device)) if hosted => (device, false),
            (Some(transfer), Some(host)) if !hosted && transfer.is_back() => (host, true),
            _ => (block, hosted),
        }
    }

    /// Returns the device blocks to which queued transfers refer. For tests.
    pub fn sources(&self) -> impl Iterator<Item = BlockId> {
        let queued = (0..self.transfers.len()).filter(|&host| self.transfers[host] == Transfer::OutQueued);
        queued.map(|host| self.mirror_of_host[host].expect("the source of a queued transfer is mirrored"))
    }

    /// Panics unless the reference counts match the tables. For tests.
    pub fn check(&self, owners: &mut [u32], (tables, arriving): (usize, usize)) {
        self.moves.back.iter().for_each(|back| owners[back.host as usize] += 1);
        assert_eq!(self.sources().count(), self.queued_out, "the number of queued transfers is wrong");
        for (host, transfer) in self.transfers.iter().enumerate() {
            owners[host] += transfer.is_back() as u32;
            let is_mirrored = self.mirror_of_host[host].is_some();
            assert!(!transfer.is_back() || is_mirrored, "the target of a queued transfer is not mirrored");
            let is_scheduled = self.moves.out.iter().any(|out| out.host == host as BlockId);
            assert_eq!(*transfer == Transfer::OutScheduled, is_scheduled, "host block {host} and the transfers of this step disagree");
        }
        self.block_pool.check(owners, &vec![0; owners.len()], |_| false);
        assert_eq!((tables, arriving), (self.tables, self.arriving), "the numbers of swapped and arriving tables are wrong");
        let mirrors = self.mirror_of_host.iter().flatten().count();
        assert_eq!(mirrors, self.mirror_of_device.iter().flatten().count(), "the numbers of mirrored blocks differ");
        for (host, device) in self.mirror_of_host.iter().enumerate().filter_map(|(host, device)| Some((host as BlockId, (*device)?))) {
            assert_eq!(self.mirror_of_device[device as usize], Some(host), "mirrored blocks do not refer to each other");
            assert!(self.refs(host) > 0, "host block {host} is free and mirrored");
        }
    }
}

impl BlockManager {
    /// Adds a host tier of `blocks` blocks.
    pub fn with_host(self, blocks: usize) -> Result<BlockManager> {
        Ok(BlockManager { host: HostTier::new(self.capacity(), blocks)?, ..self })
    }

    pub fn host_total(&self) -> usize {
        self.host.block_pool.total()
    }

    pub fn host_used(&self) -> usize {
        self.host.used()
    }

    /// Returns how many tables and transfers use a block of the host tier.
    pub fn host_users(&self, block: BlockId) -> u32 {
        self.host.refs(block)
    }

    /// Returns the number of tables in the host tier.
    pub fn swapped(&self) -> usize {
        self.host.tables
    }

    /// Returns what a swap of these tables to the host tier would copy.
    pub fn swap_out_load<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> SwapLoad {
        let mut load = SwapLoad { blocks: 0, tokens: 0 };
        self.block_pool.unmark();
        for table in tables.filter(|table| !table.swapped()) {
            for entry in 0..table.blocks.len() {
                // The number of tokens is read from the first group, which has the largest window.
                let tells = entry.is_multiple_of(self.paging.groups());
                match table.at(entry) {
                    None => load.tokens += if tells { self.size.tokens() } else { 0 },
                    Some(device) if self.block_pool.mark(device) => {
                        load.blocks += self.host.copy_of(device).is_none() as usize;
                        load.tokens += if tells { self.filled[device as usize] as usize } else { 0 };
                    }
                    Some(_) => {}
                }
            }
        }
        load
    }

    /// Returns the number of blocks that the return of these tables takes from the pool.
    pub fn blocks_to_swap_in<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> usize {
        if self.host.tables == 0 {
            return 0;
        }
        self.host.block_pool.unmark();
        let mut needed = 0;
        for host in tables.filter(|table| table.swapped()).flat_map(BlockTable::held) {
            let in_use = self.host.mirror_of_host[host as usize].is_some_and(|device| self.block_pool.refs(device) > 0);
            needed += (self.host.block_pool.mark(host) && !in_use) as usize;
        }
        needed
    }

    pub fn host_free(&self) -> usize {
        self.host.block_pool.free()
    }

    /// Limits the transfers of one step to `max_moves` blocks in each direction, at least 1.
    pub fn limit_moves(&mut self, max_moves: usize) {
        self.host.limits.max_moves = max_moves.max(1);
        self.begin_step();
    }

    /// Begins a step, which may make as many transfers as the limit allows.
    pub fn begin_step(&mut self) {
        let limits = &mut self.host.limits;
        (limits.out, limits.back) = (limits.max_moves, limits.max_moves);
    }

    fn unmark_all(&self) {
        self.block_pool.unmark();
        self.host.block_pool.unmark();
    }

    /// Removes the limit of the transfers to a host tier in memory for this step.
    pub fn lift_limit_out(&mut self) {
        if self.host.unread.is_none() {
            self.host.limits.out = usize::MAX;
        }
    }

    /// Returns whether device blocks are kept until later steps have copied them to the host tier.
    pub fn has_queued_out(&self) -> bool {
        self.host.queued_out > 0
    }

    /// Returns the number of tables that are not completely on the device.
    pub fn tables_off_device(&self) -> usize {
        self.host.tables + self.host.arriving
    }

    /// Moves the table to the host tier, which must have space for its load. The device blocks
    /// become available when their transfers are scheduled.
    pub fn swap_out(&mut self, table: &mut BlockTable) -> std::result::Result<(), NoSpace> {
        assert!(!table.swapped() && !table.reclaimable, "the table is swapped or reclaimable");
        for entry in 0..table.blocks.len() {
            let Some(device) = table.at(entry) else { continue };
            let host = match self.host.copy_of(device) {
                Some(host) => host,
                None => {
                    let host = self.host.block_pool.take()?;
                    self.host.filled[host as usize] = self.filled[device as usize];
                    self.host.mirror(device, host);
                    self.block_pool.acquire(device);
                    self.host.transfers[host as usize] = Transfer::OutQueued;
                    self.host.out_queue.push(host);
                    self.host.queued_out += 1;
                    host
                }
            };
            self.host.acquire(host);
            table.blocks[entry] = host;
            self.release(device);
        }
        let tier = if table.blocks.is_empty() { Tier::Device } else { Tier::Host };
        self.host.set_tier(table, tier);
        self.schedule_moves_out();
        Ok(())
    }

    /// Schedules queued transfers to the host tier, as many as this step may make. Their device
    /// blocks become available. Returns false if there are none.
    pub fn schedule_moves_out(&mut self) -> bool {
        let before = self.host.moves.out.len();
        while let Some(out) = self.host.next_move_out() {
            self.host.moves.out.push(out);
            self.release(out.device);
        }
        self.host.moves.out.len() > before
    }

    /// Returns whether this step still writes a block of the table, so that the table cannot return
    /// before the next step.
    pub fn is_leaving(&self, table: &BlockTable) -> bool {
        let is_scheduled = |host: BlockId| self.host.transfers[host as usize] == Transfer::OutScheduled;
        table.swapped() && !self.host.moves.out.is_empty() && table.held().any(is_scheduled)
    }

    /// Allocates the device blocks of the table. Enough blocks must be available. Then
    /// `continue_swap_in` schedules the transfers.
    pub fn swap_in(&mut self, table: &mut BlockTable) -> std::result::Result<(), NoSpace> {
        assert!(table.swapped(), "the table is not swapped");
        for entry in 0..table.blocks.len() {
            let Some(host) = table.at(entry) else { continue };
            table.blocks[entry] = match self.host.mirror_of_host[host as usize] {
                Some(mirror) => {
                    self.acquire(mirror);
                    self.release_host_block(host);
                    mirror
                }
                None => {
                    let device = self.take()?;
                    self.filled[device as usize] = self.host.filled[host as usize];
                    self.filled_slots += self.filled[device as usize] as usize;
                    assert_eq!(self.host.transfers[host as usize], Transfer::None, "host block {host} is still being written");
                    // The reference of the table becomes the reference of the transfer.
                    self.host.queue_back(host);
                    self.host.mirror(device, host);
                    device
                }
            };
        }
        self.host.set_tier(table, Tier::Arriving);
        Ok(())
    }

    /// Schedules the transfers of an arriving table, as many as this step may make. Returns whether
    /// all contents are on the device after this step's transfers.
    pub fn continue_swap_in(&mut self, table: &mut BlockTable) -> bool {
        assert!(table.tier == Tier::Arriving, "the table does not arrive");
        let has_arrived = table.held().all(|device| self.host.schedule_back(device));
        if has_arrived {
            self.host.set_tier(table, Tier::Device);
        }
        has_arrived
    }

    /// Releases a reference of a table to a block of the host tier.
    pub(super) fn release_host_block(&mut self, host: BlockId) {
        if let Some(device) = self.host.release(host) {
            self.release(device);
        }
    }

    /// Returns the transfers of this step. The caller makes them before the device writes or
    /// computes, and then calls `clear_moves`.
    pub fn moves(&self) -> &Moves {
        &self.host.moves
    }

    /// Marks the blocks whose transfer failed as lost and removes them from the prefix cache.
    pub fn mark_lost(&mut self, out_failed: bool, back_failed: bool) {
        self.unmark_all();
        let moves = std::mem::take(&mut self.host.moves);
        for out in moves.out.iter().filter(|_| out_failed) {
            self.host.block_pool.mark(out.host);
            self.host.end_host_mirroring(out.host);
        }
        for back in moves.back.iter().filter(|_| back_failed) {
            self.block_pool.mark(back.device);
            self.host.end_mirroring(back.device);
            self.remove_cached(back.device);
        }
        self.host.moves = moves;
    }

    /// Returns whether the table has blocks that are marked as lost.
    pub fn is_lost(&self, table: &BlockTable) -> bool {
        let tier = if table.swapped() { &self.host.block_pool } else { &self.block_pool };
        table.held().any(|block| tier.is_marked(block))
    }

    /// Clears the planned transfers after they have been tried and lost tables have been freed.
    pub fn clear_moves(&mut self) {
        while let Some(out) = self.host.moves.out.pop() {
            self.host.transfers[out.host as usize] = Transfer::None;
        }
        while let Some(back) = self.host.moves.back.pop() {
            self.host.release_unqueued(back.host);
        }
    }

    /// Removes a block with wrong contents from the prefix cache.
    pub(super) fn remove_cached(&mut self, block: BlockId) {
        let Some(prefix) = &mut self.prefix else { return };
        prefix.remove(block);
        if prefix.is_unused(block) {
            prefix.mark_used(block);
            self.block_pool.put(block);
        }
    }
}
