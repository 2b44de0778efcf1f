//! The host tier: where the tables of those lie who had to leave the device and do not want to compute everything again.
//!
//! A table lies in one tier, whole; what others have on the device too is copied all the same, and each tier counts for itself.
//! Two blocks that hold the same in both tiers are twins for as long as that is so, and a table that moves takes the twin where
//! there is one. So a block that many share moves once and is shared again when it comes back, and one that nobody has overwritten
//! meanwhile does not move back at all. Who writes to a block parts it from its twin: in either tier copy-on-write is what it is
//! without the other.

use super::{BlockAllocator, BlockId, BlockManager, BlockTable, NoSpace};
use crate::batch::{BlockMove, Moves};
use crate::error::{Result, try_vec};

#[derive(Debug)]
pub(super) struct HostTier {
    allocator: BlockAllocator,
    filled: Vec<u16>, // [host blocks]
    /// The tables that lie here.
    tables: usize,
    twin_of_device: Vec<Option<BlockId>>, // [device blocks]
    twin_of_host: Vec<Option<BlockId>>,   // [host blocks]
    /// Decided, and not made yet. What comes back keeps a reference until then.
    moves: Moves,
}

/// What tables hold, each block counted once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Blocks that would have to be copied to the other tier.
    pub blocks: usize,
    /// Tokens that would have to be computed again.
    pub tokens: usize,
}

impl HostTier {
    pub fn new(device_blocks: usize, blocks: usize) -> Result<HostTier> {
        let mut moves = Moves::default();
        moves.out.try_reserve(blocks)?;
        moves.back.try_reserve(device_blocks.min(blocks))?;
        Ok(HostTier {
            allocator: BlockAllocator::new(blocks)?,
            filled: try_vec(blocks, 0)?,
            tables: 0,
            twin_of_device: try_vec(device_blocks, None)?,
            twin_of_host: try_vec(blocks, None)?,
            moves,
        })
    }

    fn join(&mut self, device: BlockId, host: BlockId) {
        (self.twin_of_device[device as usize], self.twin_of_host[host as usize]) = (Some(host), Some(device));
    }

    /// Where the host tier has, or will have, what the device's block holds.
    fn copy_of(&self, device: BlockId) -> Option<BlockId> {
        // A block that is still to come back has no twin where somebody was about to write to it.
        let coming = || self.moves.back.iter().find(|back| back.device == device).map(|back| back.host);
        self.twin_of_device[device as usize].or_else(coming)
    }

    /// The device's block will hold something else.
    pub fn part(&mut self, device: BlockId) {
        if self.used() == 0 {
            return; // nothing has a twin
        }
        if let Some(host) = self.twin_of_device[device as usize].take() {
            self.twin_of_host[host as usize] = None;
        }
    }

    fn part_host(&mut self, host: BlockId) {
        self.twin_of_host[host as usize].into_iter().for_each(|device| self.part(device));
    }

    /// The device's block has another number.
    pub fn relocate(&mut self, from: BlockId, to: BlockId) {
        assert!(self.moves.is_empty(), "blocks get other numbers when all moves are made");
        if let Some(host) = self.twin_of_device[from as usize].take() {
            self.join(to, host);
        }
    }

    /// Nobody has the device's block any more: what was to come to it need not.
    pub fn vacate(&mut self, device: BlockId) {
        self.part(device);
        if let Some(place) = self.moves.back.iter().position(|back| back.device == device) {
            let back = self.moves.back.swap_remove(place);
            self.release(back.host);
        }
    }

    pub fn release(&mut self, host: BlockId) {
        if !self.allocator.release(host) {
            return;
        }
        self.part_host(host);
        self.moves.out.retain(|out| out.host != host);
        self.allocator.give_back(host);
    }

    /// One more table shares the blocks of one that lies here.
    pub fn share(&mut self, table: &BlockTable) {
        table.held().for_each(|block| self.allocator.acquire(block));
        self.tables += 1;
    }

    /// A table without blocks lies nowhere.
    pub fn leave(&mut self, table: &mut BlockTable) {
        if table.swapped && table.blocks.is_empty() {
            table.swapped = false;
            self.tables -= 1;
        }
    }

    pub fn refs(&self, host: BlockId) -> u32 {
        self.allocator.refs(host)
    }

    fn used(&self) -> usize {
        self.allocator.total() - self.allocator.free()
    }

    /// Panics unless the tables account for every block here. For tests.
    pub fn check(&self, owners: &mut [u32], tables: usize) {
        self.moves.back.iter().for_each(|back| owners[back.host as usize] += 1);
        self.allocator.check(owners, &vec![0; owners.len()], |_| false);
        assert_eq!(tables, self.tables, "every table that lies in the host tier is counted once");
        let twins = self.twin_of_host.iter().flatten().count();
        assert_eq!(twins, self.twin_of_device.iter().flatten().count(), "twins come in pairs");
        for (host, device) in self.twin_of_host.iter().enumerate().filter_map(|(host, device)| Some((host as BlockId, (*device)?))) {
            assert_eq!(self.twin_of_device[device as usize], Some(host), "a twin's twin is itself");
            assert!(self.refs(host) > 0, "host block {host} is free and has a twin");
        }
    }
}

impl BlockManager {
    /// Adds a host tier of so many blocks.
    pub fn with_host(self, blocks: usize) -> Result<BlockManager> {
        Ok(BlockManager { host: HostTier::new(self.capacity(), blocks)?, ..self })
    }

    pub fn host_total(&self) -> usize {
        self.host.allocator.total()
    }

    pub fn host_used(&self) -> usize {
        self.host.used()
    }

    /// Tables that lie in the host tier.
    pub fn swapped(&self) -> usize {
        self.host.tables
    }

    /// What swapping these tables out would move.
    pub fn load_out<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> Load {
        let mut load = Load { blocks: 0, tokens: 0 };
        self.allocator.unmark();
        for table in tables.filter(|table| !table.swapped) {
            for entry in 0..table.blocks.len() {
                // The first group looks back the farthest: it tells how many tokens there are.
                let tells = entry.is_multiple_of(self.paging.groups());
                match table.at(entry) {
                    None => load.tokens += if tells { self.size.tokens() } else { 0 },
                    Some(device) if self.allocator.mark(device) => {
                        load.blocks += self.host.copy_of(device).is_none() as usize;
                        load.tokens += if tells { self.filled[device as usize] as usize } else { 0 };
                    }
                    Some(_) => {}
                }
            }
        }
        load
    }

    /// Blocks that bringing these tables back would take from the pool.
    pub fn needed_back<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> usize {
        if self.host.tables == 0 {
            return 0;
        }
        self.host.allocator.unmark();
        let mut needed = 0;
        for host in tables.filter(|table| table.swapped).flat_map(BlockTable::held) {
            let in_use = self.host.twin_of_host[host as usize].is_some_and(|device| self.allocator.refs(device) > 0);
            needed += (self.host.allocator.mark(host) && !in_use) as usize;
        }
        needed
    }

    pub fn host_free(&self) -> usize {
        self.host.allocator.free()
    }

    /// The table, whose load there must be room for, lies in the host tier from now on.
    pub fn swap_out(&mut self, table: &mut BlockTable) -> std::result::Result<(), NoSpace> {
        assert!(!table.swapped && !table.rests, "a table is swapped out once, and awake");
        for entry in 0..table.blocks.len() {
            let Some(device) = table.at(entry) else { continue };
            let host = match self.host.copy_of(device) {
                Some(host) => host,
                None => {
                    let host = self.host.allocator.take()?;
                    self.host.filled[host as usize] = self.filled[device as usize];
                    self.host.moves.out.push(BlockMove { device, host });
                    self.host.join(device, host);
                    host
                }
            };
            self.host.allocator.acquire(host);
            table.blocks[entry] = host;
            self.release(device);
        }
        table.swapped = !table.blocks.is_empty();
        self.host.tables += table.swapped as usize;
        Ok(())
    }

    /// The table, for which there must be enough blocks, lies on the device from now on.
    pub fn swap_in(&mut self, table: &mut BlockTable) -> std::result::Result<(), NoSpace> {
        assert!(table.swapped, "only what was swapped out comes back");
        for entry in 0..table.blocks.len() {
            let Some(host) = table.at(entry) else { continue };
            table.blocks[entry] = match self.host.twin_of_host[host as usize] {
                Some(twin) => {
                    self.acquire(twin);
                    self.host.release(host);
                    twin
                }
                None => {
                    let device = self.take()?;
                    self.filled[device as usize] = self.host.filled[host as usize];
                    self.filled_slots += self.filled[device as usize] as usize;
                    // The table's reference is the move's from now on.
                    self.host.moves.back.push(BlockMove { device, host });
                    self.host.join(device, host);
                    device
                }
            };
        }
        table.swapped = false;
        self.host.tables -= 1;
        Ok(())
    }

    /// To be made before the device writes or computes anything, and then `settle_moves`.
    pub fn moves(&self) -> &Moves {
        &self.host.moves
    }

    /// Marks the blocks that hold nothing, since they could not be moved: nobody finds them any more.
    pub fn spoil(&mut self, out_failed: bool, back_failed: bool) {
        self.allocator.unmark();
        self.host.allocator.unmark();
        let moves = std::mem::take(&mut self.host.moves);
        for out in moves.out.iter().filter(|_| out_failed) {
            self.host.allocator.mark(out.host);
            self.host.part_host(out.host);
        }
        for back in moves.back.iter().filter(|_| back_failed) {
            self.allocator.mark(back.device);
            self.host.part(back.device);
            self.unfind(back.device);
        }
        self.host.moves = moves;
    }

    /// Whether the table has blocks that were marked by `spoil`.
    pub fn is_spoilt(&self, table: &BlockTable) -> bool {
        let tier = if table.swapped { &self.host.allocator } else { &self.allocator };
        table.held().any(|block| tier.is_marked(block))
    }

    /// The moves have been tried, and who lost by them has been told.
    pub fn settle_moves(&mut self) {
        self.host.moves.out.clear();
        while let Some(back) = self.host.moves.back.pop() {
            self.host.release(back.host);
        }
    }

    /// The block is not what its chain says.
    pub(super) fn unfind(&mut self, block: BlockId) {
        let Some(prefix) = &mut self.prefix else { return };
        prefix.forget(block);
        if prefix.is_unused(block) {
            prefix.revive(block);
            self.allocator.give_back(block);
        }
    }
}
