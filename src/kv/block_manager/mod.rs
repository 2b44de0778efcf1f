//! The block manager: reference counts, copy on write, block tables, the prefix cache and the host
//! tier.

mod block_queue;
mod checks;
mod external;
mod resize;
mod swap;
#[cfg(test)]
mod tests;

use std::ops::Range;

use swap::HostTier;
pub use swap::SwapLoad;

use super::block_hash::BlockHash;
use super::block_pool::BlockPool;
use super::paging::Paging;
use super::prefix_cache::{HashedTokens, PrefixIndex};
use super::size::BlockSize;
use super::{BlockId, NULL_BLOCK, NoSpace, first};
use crate::error::{Result, try_vec};
use crate::types::batch::BlockCopy;

/// The blocks of one sequence in the order of its tokens. A place is a run of `block_size` tokens
/// with one entry per layer group. The first entries of a group can be null.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<BlockId>, // [places, groups]
    places: usize,
    reclaimable: bool,
    tier: Tier,
}

/// The tier of the blocks of a table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Tier {
    #[default]
    Device,
    /// The table has device blocks, but some of their contents are still in the host tier.
    Arriving,
    Host,
}

impl BlockTable {
    /// Reserves capacity for `entries` entries.
    pub fn reserve(&mut self, entries: usize) -> Result<()> {
        Ok(self.blocks.try_reserve_exact(entries.saturating_sub(self.blocks.len()))?)
    }

    #[inline]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Returns the number of token runs for which the table has blocks.
    pub fn places(&self) -> usize {
        self.places
    }

    /// Returns the block of an entry. `None` means that the entry is null.
    fn at(&self, entry: usize) -> Option<BlockId> {
        Some(self.blocks[entry]).filter(|&block| block != NULL_BLOCK)
    }

    /// Returns the blocks of the table.
    pub fn held(&self) -> impl DoubleEndedIterator<Item = BlockId> {
        self.blocks.iter().copied().filter(|&block| block != NULL_BLOCK)
    }

    /// Returns whether K and V of some tokens have been dropped.
    pub fn has_dropped(&self) -> bool {
        self.blocks.contains(&NULL_BLOCK)
    }

    /// Returns whether the table is reclaimable: its sequence does not run, so its blocks may be
    /// taken.
    #[inline]
    pub fn is_reclaimable(&self) -> bool {
        self.reclaimable
    }

    /// Returns whether the table is in the host tier. It must return to the device before the
    /// sequence can be computed.
    #[inline]
    pub fn swapped(&self) -> bool {
        self.tier == Tier::Host
    }

    /// Returns whether the contents of all blocks are on the device, after the transfers of this
    /// step.
    #[inline]
    pub fn is_on_device(&self) -> bool {
        self.tier == Tier::Device
    }
}

/// Manages block tables over the blocks of the device and of the host tier.
///
/// A block with several owners, or one that the prefix cache can find, is never written. A writer
/// gets a copy of a shared block. If the writer is the only owner, the block is removed from the
/// prefix cache instead.
#[derive(Debug)]
pub struct BlockManager {
    block_pool: BlockPool,
    /// Prefix cache. `None` if it is disabled.
    prefix: Option<PrefixIndex>,
    host: HostTier,
    paging: Paging,
    size: BlockSize,
    filled: Vec<u16>, // [blocks] filled slots, 0 while free
    /// Sum of `filled` over the used blocks.
    filled_slots: usize,
    /// Number of null entries in all tables.
    dropped: usize,
}

impl BlockManager {
    pub fn new(blocks: usize, paging: Paging, keep_prefixes: bool) -> Result<BlockManager> {
        let prefix = if keep_prefixes { Some(PrefixIndex::new(blocks)?) } else { None };
        let (block_pool, host) = (BlockPool::new(blocks)?, HostTier::new(blocks, 0)?);
        Ok(BlockManager { block_pool, prefix, host, size: paging.size(), paging, filled: try_vec(blocks, 0)?, filled_slots: 0, dropped: 0 })
    }

    pub fn paging(&self) -> &Paging {
        &self.paging
    }

    pub fn block_size(&self) -> usize {
        self.size.tokens()
    }

    /// Returns the number of blocks that `tokens` tokens fill completely.
    #[inline]
    pub fn full(&self, tokens: usize) -> usize {
        self.size.full(tokens)
    }

    pub fn total(&self) -> usize {
        self.block_pool.total()
    }

    pub fn free_blocks(&self) -> usize {
        self.block_pool.free()
    }

    /// Returns the number of unreferenced blocks that the prefix cache can find.
    pub fn cached_blocks(&self) -> usize {
        self.prefix.as_ref().map_or(0, PrefixIndex::unused)
    }

    /// Returns how many tables and transfers use a block of the pool.
    pub fn users(&self, block: BlockId) -> u32 {
        self.block_pool.refs(block)
    }

    /// Returns whether only the prefix cache has the block.
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.prefix.as_ref().is_some_and(|prefix| prefix.is_unused(block))
    }

    /// Returns the number of blocks that can be allocated: free and cached ones.
    #[inline]
    pub fn available(&self) -> usize {
        self.free_blocks() + self.cached_blocks()
    }

    /// Returns the number of blocks that would become available if all reclaimable tables were
    /// freed.
    pub fn idle_blocks(&self) -> usize {
        self.block_pool.reclaimable()
    }

    pub fn used_blocks(&self) -> usize {
        self.total() - self.available()
    }

    /// Returns the number of filled slots in used blocks. A slot that several sequences share
    /// counts once.
    pub fn filled_slots(&self) -> usize {
        self.filled_slots
    }

    /// Returns the number of blocks that tables would additionally hold without windows. Blocks of
    /// forks count once per fork.
    pub fn dropped_blocks(&self) -> usize {
        self.dropped
    }

    pub fn caches_prefixes(&self) -> bool {
        self.prefix.is_some()
    }

    /// Makes the positions of `write` writable: allocates blocks at the end and copies shared
    /// blocks. All or nothing.
    ///
    /// Appends the copies to `copies`; they must precede the writes. The source of a copy keeps its
    /// reference until `settle` or `undo`.
    #[inline]
    pub fn prepare(
        &mut self,
        table: &mut BlockTable,
        write: Range<usize>,
        copies: &mut Vec<BlockCopy>,
    ) -> std::result::Result<(), NoSpace> {
        assert!(table.is_on_device(), "a swapped table is written");
        let (held, end) = (table.places, self.size.blocks_for(write.end));
        let missing = end.saturating_sub(held) * self.paging.groups();
        let written = self.entries(self.size.full(write.start)..held.min(end));
        let to_copy = written.clone().filter(|&entry| self.must_copy(table, entry, write.start, copies)).count();
        if missing + to_copy > self.available() {
            return Err(NoSpace);
        }
        for entry in written {
            let from = table.blocks[entry];
            if self.must_copy(table, entry, write.start, copies) {
                let to = self.take()?;
                table.blocks[entry] = to;
                copies.push(BlockCopy { from, to });
            } else {
                self.host.end_mirroring(from);
                self.uncache(from);
            }
        }
        for _ in 0..missing {
            let block = self.take()?;
            table.blocks.push(block);
        }
        table.places = held.max(end);
        Ok(())
    }

    /// Returns the table entries at `places`.
    #[inline]
    fn entries(&self, places: Range<usize>) -> Range<usize> {
        places.start * self.paging.groups()..places.end * self.paging.groups()
    }

    /// Returns whether a write from position `first` on needs a copy of the block at `entry`.
    ///
    /// If `copies` already copies the block for another table, that table gets the block back when
    /// the step fails. Its computed tokens must therefore not be overwritten.
    #[inline]
    fn must_copy(&self, table: &BlockTable, entry: usize, first: usize, copies: &[BlockCopy]) -> bool {
        let block = table.blocks[entry];
        let refs = self.block_pool.refs(block);
        if refs == 1 {
            return false; // the source of a copy has an additional reference
        }
        let place = entry / self.paging.groups();
        let copied = copies.iter().filter(|copy| copy.from == block).count() as u32;
        let overwrites = first < place * self.block_size() + self.filled[block as usize] as usize;
        refs > 1 + copied || (copied > 0 && overwrites)
    }

    /// Removes a full block from the prefix cache before it is overwritten.
    fn uncache(&mut self, block: BlockId) {
        if let Some(prefix) = &mut self.prefix
            && self.filled[block as usize] as usize == self.size.tokens()
        {
            prefix.remove(block);
        }
    }

    fn take(&mut self) -> std::result::Result<BlockId, NoSpace> {
        let block = self.block_pool.take().or_else(|_| self.evict())?;
        self.block_pool.acquire(block);
        self.filled[block as usize] = 0;
        Ok(block)
    }

    /// Evicts the least recently used cached block.
    fn evict(&mut self) -> std::result::Result<BlockId, NoSpace> {
        let block = self.prefix.as_mut().and_then(PrefixIndex::evict).ok_or(NoSpace)?;
        self.host.release_device_block(block);
        Ok(block)
    }

    /// Releases the sources of completed copies.
    pub fn release_copied(&mut self, copies: &[BlockCopy]) {
        copies.iter().for_each(|copy| self.release(copy.from));
    }

    /// Reverts a copy that was not made: the table gets its old block back, if it has the new one.
    /// Returns whether it had.
    pub fn undo(&mut self, copy: BlockCopy, table: &mut BlockTable) -> bool {
        let Some(block) = table.blocks.iter_mut().find(|block| **block == copy.to) else { return false };
        *block = copy.from;
        self.release(copy.to);
        true
    }

    /// Records that K and V of the positions are stored.
    #[inline]
    pub fn fill(&mut self, table: &BlockTable, positions: Range<usize>) {
        let tokens = self.size.tokens();
        for place in self.size.full(positions.start)..self.size.blocks_for(positions.end) {
            let reached = (positions.end - place * tokens).min(tokens);
            for entry in self.entries(place..place + 1) {
                let Some(block) = table.at(entry) else { continue };
                let filled = &mut self.filled[block as usize];
                let now = reached.max(*filled as usize);
                self.filled_slots += now - *filled as usize;
                *filled = now as u16;
            }
        }
    }

    /// Makes the empty table `child` share the blocks of the first `tokens` tokens.
    pub fn fork(&mut self, table: &BlockTable, tokens: usize, child: &mut BlockTable) {
        assert!(child.blocks.is_empty() && !child.reclaimable, "the child of a fork has blocks");
        child.places = self.size.blocks_for(tokens);
        child.blocks.extend_from_slice(&table.blocks[..self.paging.entries(tokens)]);
        self.dropped += child.blocks.len() - child.held().count();
        match table.tier {
            Tier::Host => child.held().for_each(|block| self.host.acquire(block)),
            Tier::Device | Tier::Arriving => child.held().for_each(|block| self.block_pool.acquire(block)),
        }
        if child.places > 0 {
            self.host.set_tier(child, table.tier);
        }
    }

    /// Truncates the table to the blocks of the first `tokens` tokens.
    pub fn truncate(&mut self, table: &mut BlockTable, tokens: usize) {
        let entries = self.paging.entries(tokens);
        while table.blocks.len() > entries {
            match table.blocks.pop() {
                Some(block) if block != NULL_BLOCK => self.release_block(block, table),
                _ => self.dropped -= 1,
            }
        }
        table.places = table.places.min(self.size.blocks_for(tokens));
        if table.blocks.is_empty() {
            self.host.set_tier(table, Tier::Device);
        }
    }

    /// Releases the blocks that are out of the window after `computed` tokens.
    #[inline]
    pub fn drop_out_of_window(&mut self, table: &mut BlockTable, computed: usize) {
        if !self.paging.has_windows() {
            return;
        }
        for group in 0..self.paging.groups() {
            let out = self.paging.blocks_out_of(self.paging.windows()[group], computed).min(table.places);
            for place in (0..out).rev() {
                let entry = place * self.paging.groups() + group;
                let block = std::mem::replace(&mut table.blocks[entry], NULL_BLOCK);
                if block == NULL_BLOCK {
                    break; // all entries before it are null too
                }
                self.release_block(block, table);
                self.dropped += 1;
            }
        }
    }

    /// Returns whether a sequence truncated to `len` tokens would attend to null entries.
    pub fn sees_null_block(&self, table: &BlockTable, len: usize) -> bool {
        self.paging.windows().iter().enumerate().any(|(group, &window)| {
            let first = self.paging.blocks_out_of(window, len);
            first < table.places && table.at(first * self.paging.groups() + group).is_none()
        })
    }

    pub fn free(&mut self, table: &mut BlockTable) {
        self.truncate(table, 0);
    }

    /// Marks the table reclaimable. A reclaimable table must not get further blocks.
    pub fn mark_reclaimable(&mut self, table: &mut BlockTable) {
        assert!(!std::mem::replace(&mut table.reclaimable, true), "the table is already reclaimable");
        table.held().for_each(|block| self.block_pool.mark_reclaimable(block));
    }

    pub fn unmark_reclaimable(&mut self, table: &mut BlockTable) {
        assert!(std::mem::take(&mut table.reclaimable), "the table is not reclaimable");
        table.held().for_each(|block| self.block_pool.unmark_reclaimable(block));
    }

    /// Releases a reference of the table to a block.
    fn release_block(&mut self, block: BlockId, table: &BlockTable) {
        if table.swapped() {
            return self.release_host_block(block);
        }
        if table.reclaimable {
            self.block_pool.unmark_reclaimable(block);
        }
        self.release(block);
    }

    fn release(&mut self, block: BlockId) {
        if !self.block_pool.release(block) {
            return;
        }
        self.filled_slots -= self.filled[block as usize] as usize;
        match &mut self.prefix {
            Some(prefix) if prefix.holds(block) => prefix.mark_unused(block),
            _ => {
                self.host.release_device_block(block);
                self.block_pool.put(block);
            }
        }
    }

    /// Returns the blocks that are visible to a sequence of `computed` tokens, in table order.
    /// `None` means that some are not on the device.
    pub fn visible_blocks(&self, table: &BlockTable, computed: usize) -> Result<Option<Vec<BlockId>>> {
        if table.swapped() || self.sees_null_block(table, computed) {
            return Ok(None);
        }
        let mut blocks = Vec::new();
        blocks.try_reserve_exact(self.paging.visible_blocks(computed))?;
        let kept = (0..self.paging.entries(computed)).filter(|&entry| !self.is_out_of_window(entry, computed));
        blocks.extend(kept.map(|entry| table.blocks[entry]));
        Ok(Some(blocks))
    }

    /// Returns whether an entry is out of the window after `computed` tokens.
    fn is_out_of_window(&self, entry: usize, computed: usize) -> bool {
        let groups = self.paging.groups();
        entry / groups < self.paging.blocks_out_of(self.paging.windows()[entry % groups], computed)
    }

    /// Allocates the blocks that are visible to a sequence of `computed` tokens, for an empty
    /// table. All or nothing.
    pub fn adopt(&mut self, table: &mut BlockTable, computed: usize) -> std::result::Result<(), NoSpace> {
        assert!(table.blocks.is_empty(), "the table has blocks");
        if self.paging.visible_blocks(computed) > self.available() {
            return Err(NoSpace);
        }
        for entry in 0..self.paging.entries(computed) {
            let gone = self.is_out_of_window(entry, computed);
            self.dropped += gone as usize;
            let block = if gone { NULL_BLOCK } else { self.take()? };
            table.blocks.push(block);
        }
        table.places = self.size.blocks_for(computed);
        Ok(())
    }

    /// Replaces the table from `place` on with cached blocks of `hashes`, as far as a sequence can
    /// continue after them. Returns the number of places that were found.
    pub fn reuse(&mut self, table: &mut BlockTable, place: usize, hashes: &[BlockHash]) -> usize {
        let end = self.cached_prefix(place, hashes);
        if end == place {
            return 0;
        }
        let (groups, tokens) = (self.paging.groups(), self.size.tokens());
        self.truncate(table, place * tokens);
        self.drop_out_of_window(table, end * tokens);
        for entry in self.entries(place..end) {
            let block = match self.is_out_of_window(entry, end * tokens) {
                true => None,
                false => self.find(entry % groups, &hashes[entry / groups]),
            };
            block.into_iter().for_each(|block| self.acquire(block));
            self.dropped += block.is_none() as usize;
            table.blocks.push(block.unwrap_or(NULL_BLOCK));
        }
        table.places = end;
        end - place
    }

    /// Returns the end of the longest prefix of `hashes` after which a sequence can continue. The
    /// table already has the places before `from`.
    fn cached_prefix(&self, from: usize, hashes: &[BlockHash]) -> usize {
        self.paging.usable_prefix(from, hashes.len(), |place, group| self.find(group, &hashes[place]).is_some())
    }

    fn find(&self, group: usize, hash: &BlockHash) -> Option<BlockId> {
        self.prefix.as_ref()?.find(&hash.for_group(group))
    }

    /// Adds a reference of a table to a full block.
    fn acquire(&mut self, block: BlockId) {
        if let Some(prefix) = self.prefix.as_mut().filter(|prefix| prefix.is_unused(block)) {
            prefix.mark_used(block);
            self.filled_slots += self.size.tokens();
        }
        self.block_pool.acquire(block);
    }

    /// Inserts the full blocks at `place` into the prefix cache. If the cache already has a block
    /// with the same tokens, the table uses that block and releases its own.
    pub fn index(&mut self, table: &mut BlockTable, place: usize, source: &HashedTokens) {
        for group in 0..self.paging.groups() {
            let entry = place * self.paging.groups() + group;
            let (Some(own), Some(prefix)) = (table.at(entry), &mut self.prefix) else { continue };
            let found = prefix.insert(own, source, place, group, self.paging.windows()[group].is_some());
            if found != own {
                self.acquire(found);
                table.blocks[entry] = found;
                self.release(own);
            }
        }
    }

    /// Returns whether the table has a block that no other table shares. Forks share their first
    /// blocks, so the last ones are checked first.
    pub fn has_own(&self, table: &BlockTable) -> bool {
        table.held().rev().any(|block| self.block_pool.refs(block) == 1)
    }

    /// Returns the number of blocks that a write of `write` takes from the pool when the table is
    /// on the device. A step computes at most `rows` tokens of it.
    #[inline]
    pub fn needed(&self, table: &BlockTable, write: Range<usize>, rows: usize) -> usize {
        let (held, end) = (table.places, self.size.blocks_for(write.end));
        let refs = |block| if table.swapped() { self.host.refs(block) } else { self.block_pool.refs(block) };
        // Blocks that leave the window are released, unless they are shared. Shared blocks come
        // first in the table.
        let missing = |(group, &window): (usize, &Option<usize>)| {
            let own = |place: usize| table.at(place * self.paging.groups() + group).is_some_and(|block| refs(block) == 1);
            let kept = if window.is_some() { held - first(self.paging.blocks_out_of(window, write.start).min(held)..held, own) } else { 0 };
            end.saturating_sub(held).min(self.paging.span(window, rows).saturating_sub(kept))
        };
        let written = self.size.full(write.start).min(held)..held.min(end);
        let shared = self.entries(written).filter(|&entry| refs(table.blocks[entry]) > 1);
        self.paging.windows().iter().enumerate().map(missing).sum::<usize>() + shared.count()
    }

    /// Returns the slot of the token at `position` for each layer group: block * block_size +
    /// offset.
    #[inline]
    pub fn slots(&self, table: &BlockTable, position: usize) -> impl Iterator<Item = u32> {
        let first = self.size.full(position) * self.paging.groups();
        let (tokens, offset) = (self.size.tokens() as u32, self.size.offset(position) as u32);
        table.blocks[first..first + self.paging.groups()].iter().map(move |block| block * tokens + offset)
    }
}
