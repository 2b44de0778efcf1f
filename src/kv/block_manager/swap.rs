//! The host tier: KV blocks of sequences that were swapped out instead of recomputed.
//!
//! A table is completely in one tier. Blocks that other tables use on the device are copied too,
//! and each tier has its own reference counts. Two blocks with the same contents, one in each tier,
//! are mirrored blocks. A table that moves uses the mirrored block if there is one. A shared block
//! is therefore copied once and is shared again after its return. A block that was not overwritten
//! on the device is not copied back. A write to a block ends the mirroring, so copy on write in one
//! tier is independent of the other tier.

use super::{BlockManager, BlockTable};
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
    mirror_of_device: Vec<Option<BlockId>>, // [device blocks] mirrored host block
    mirror_of_host: Vec<Option<BlockId>>,   // [host blocks] mirrored device block
    /// Transfers that are planned but not made. A host block in `moves.back` keeps a reference
    /// until then.
    moves: Moves,
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
            mirror_of_device: try_vec(device_blocks, None)?,
            mirror_of_host: try_vec(blocks, None)?,
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

    /// Records that the device block is unreferenced. A pending transfer to it is cancelled.
    pub fn release_device_block(&mut self, device: BlockId) {
        self.end_mirroring(device);
        if let Some(place) = self.moves.back.iter().position(|back| back.device == device) {
            let back = self.moves.back.swap_remove(place);
            self.release(back.host);
        }
    }

    pub fn release(&mut self, host: BlockId) {
        if !self.block_pool.release(host) {
            return;
        }
        self.end_host_mirroring(host);
        self.moves.out.retain(|out| out.host != host);
        self.block_pool.put(host);
    }

    /// Adds a table that shares the blocks of a table in this tier.
    pub fn share(&mut self, table: &BlockTable) {
        table.held().for_each(|block| self.block_pool.acquire(block));
        self.tables += 1;
    }

    /// Removes an empty table from this tier.
    pub fn leave(&mut self, table: &mut BlockTable) {
        if table.swapped && table.blocks.is_empty() {
            table.swapped = false;
            self.tables -= 1;
        }
    }

    pub fn refs(&self, host: BlockId) -> u32 {
        self.block_pool.refs(host)
    }

    fn used(&self) -> usize {
        self.block_pool.total() - self.block_pool.free()
    }

    /// Panics unless the reference counts match the tables. For tests.
    pub fn check(&self, owners: &mut [u32], tables: usize) {
        self.moves.back.iter().for_each(|back| owners[back.host as usize] += 1);
        self.block_pool.check(owners, &vec![0; owners.len()], |_| false);
        assert_eq!(tables, self.tables, "the number of swapped tables is wrong");
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

    /// Returns the number of tables in the host tier.
    pub fn swapped(&self) -> usize {
        self.host.tables
    }

    /// Returns what a swap of these tables to the host tier would copy.
    pub fn swap_out_load<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> SwapLoad {
        let mut load = SwapLoad { blocks: 0, tokens: 0 };
        self.block_pool.unmark();
        for table in tables.filter(|table| !table.swapped) {
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
        for host in tables.filter(|table| table.swapped).flat_map(BlockTable::held) {
            let in_use = self.host.mirror_of_host[host as usize].is_some_and(|device| self.block_pool.refs(device) > 0);
            needed += (self.host.block_pool.mark(host) && !in_use) as usize;
        }
        needed
    }

    pub fn host_free(&self) -> usize {
        self.host.block_pool.free()
    }

    /// Moves the table to the host tier, which must have space for its load.
    pub fn swap_out(&mut self, table: &mut BlockTable) -> std::result::Result<(), NoSpace> {
        assert!(!table.swapped && !table.reclaimable, "the table is swapped or reclaimable");
        for entry in 0..table.blocks.len() {
            let Some(device) = table.at(entry) else { continue };
            let host = match self.host.copy_of(device) {
                Some(host) => host,
                None => {
                    let host = self.host.block_pool.take()?;
                    self.host.filled[host as usize] = self.filled[device as usize];
                    self.host.moves.out.push(BlockMove { device, host });
                    self.host.mirror(device, host);
                    host
                }
            };
            self.host.block_pool.acquire(host);
            table.blocks[entry] = host;
            self.release(device);
        }
        table.swapped = !table.blocks.is_empty();
        self.host.tables += table.swapped as usize;
        Ok(())
    }

    /// Moves the table to the device, which must have enough available blocks.
    pub fn swap_in(&mut self, table: &mut BlockTable) -> std::result::Result<(), NoSpace> {
        assert!(table.swapped, "the table is not swapped");
        for entry in 0..table.blocks.len() {
            let Some(host) = table.at(entry) else { continue };
            table.blocks[entry] = match self.host.mirror_of_host[host as usize] {
                Some(mirror) => {
                    self.acquire(mirror);
                    self.host.release(host);
                    mirror
                }
                None => {
                    let device = self.take()?;
                    self.filled[device as usize] = self.host.filled[host as usize];
                    self.filled_slots += self.filled[device as usize] as usize;
                    // The reference of the table becomes the reference of the transfer.
                    self.host.moves.back.push(BlockMove { device, host });
                    self.host.mirror(device, host);
                    device
                }
            };
        }
        table.swapped = false;
        self.host.tables -= 1;
        Ok(())
    }

    /// Returns the planned transfers. The caller makes them before the device writes or computes,
    /// and then calls `clear_moves`.
    pub fn moves(&self) -> &Moves {
        &self.host.moves
    }

    /// Marks the blocks whose transfer failed as lost and removes them from the prefix cache.
    pub fn mark_lost(&mut self, out_failed: bool, back_failed: bool) {
        self.block_pool.unmark();
        self.host.block_pool.unmark();
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

    /// Returns whether the table has blocks that `mark_lost` has marked.
    pub fn is_lost(&self, table: &BlockTable) -> bool {
        let tier = if table.swapped { &self.host.block_pool } else { &self.block_pool };
        table.held().any(|block| tier.is_marked(block))
    }

    /// Clears the planned transfers after they have been tried and lost tables have been freed.
    pub fn clear_moves(&mut self) {
        self.host.moves.out.clear();
        while let Some(back) = self.host.moves.back.pop() {
            self.host.release(back.host);
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
