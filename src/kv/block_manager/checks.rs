//! Checks of the block manager's consistency, for tests.

use std::ops::Range;

use super::{BlockManager, BlockTable, Tier};
use crate::kv::BlockHash;
use crate::types::batch::BlockCopy;

impl BlockManager {
    /// Panics unless the reference counts match the tables and the copies in flight.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>, copies: &[BlockCopy]) {
        let capacity = self.block_pool.capacity();
        let (mut owners, mut reclaimable) = (vec![0; capacity], vec![0; capacity]);
        let (mut host_owners, mut swapped, mut arriving, mut gone) = (vec![0; self.host_total()], 0, 0, 0);
        for table in tables {
            assert_eq!(table.places * self.paging.groups(), table.blocks.len(), "the table lacks blocks of a group");
            swapped += table.swapped() as usize;
            arriving += (table.tier == Tier::Arriving) as usize;
            gone += table.blocks.len() - table.held().count();
            if table.swapped() {
                assert!(!table.reclaimable, "a swapped table is reclaimable");
                table.held().for_each(|block| host_owners[block as usize] += 1);
                continue;
            }
            for block in table.held() {
                owners[block as usize] += 1;
                reclaimable[block as usize] += table.reclaimable as u32;
            }
        }
        copies.iter().for_each(|copy| owners[copy.from as usize] += 1);
        self.host.sources().for_each(|device| owners[device as usize] += 1);
        self.block_pool.check(&owners, &reclaimable, |block| self.is_cached(block));
        self.host.check(&mut host_owners, (swapped, arriving));
        assert_eq!(gone, self.dropped, "the number of dropped blocks is wrong");
        let used = (0..capacity).filter(|&block| owners[block] > 0);
        assert_eq!(used.map(|block| self.filled[block] as usize).sum::<usize>(), self.filled_slots, "the number of filled slots is wrong");
        if let Some(prefix) = &self.prefix {
            prefix.check();
        }
    }

    /// Returns the block that has the contents of a block of the table, and whether it is in the
    /// host tier. Differs from the block itself while a transfer is queued.
    #[cfg(test)]
    pub fn location(&self, table: &BlockTable, block: super::BlockId) -> (super::BlockId, bool) {
        self.host.location(block, table.swapped())
    }

    /// Panics if one of the first blocks of the table is found by another hash than its own.
    pub fn check_found(&self, table: &BlockTable, hashes: &[BlockHash]) {
        let Some(prefix) = self.prefix.as_ref().filter(|_| !table.swapped()) else { return };
        let groups = self.paging.groups();
        for entry in self.entries(0..hashes.len().min(table.places)) {
            let (Some(block), hash) = (table.at(entry), hashes[entry / groups].for_group(entry % groups)) else { continue };
            assert!(prefix.hash(block).is_none_or(|found| found == hash), "block {block} has the hash of other tokens");
        }
    }

    /// Panics if another table reads what `write` writes after `copies`.
    pub fn check_writable(&self, table: &BlockTable, write: Range<usize>, copies: &[BlockCopy]) {
        for entry in self.entries(self.size.full(write.start)..self.size.blocks_for(write.end)) {
            let block = table.blocks[entry];
            let copied = copies.iter().filter(|copy| copy.from == block).count() as u32;
            assert_eq!(self.block_pool.refs(block), 1 + copied, "block {block} has other owners");
            assert!(self.prefix.as_ref().is_none_or(|prefix| !prefix.holds(block)), "block {block} can still be found");
        }
    }

    /// Returns the hashes of all blocks of the prefix cache.
    #[cfg(test)]
    pub fn cached_hashes(&self) -> impl Iterator<Item = BlockHash> {
        self.prefix.iter().flat_map(|prefix| (0..self.capacity() as super::BlockId).filter_map(|block| prefix.hash(block)))
    }

    /// Panics if a cached block would be evicted before a block that depends on it.
    #[cfg(test)]
    pub fn check_order(&self, before: impl Fn(&BlockHash) -> Option<BlockHash>) {
        self.prefix.iter().for_each(|prefix| prefix.check_order(&before));
    }
}
