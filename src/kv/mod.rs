//! Which block holds which tokens: reference counts, copy-on-write, block tables, the prefix index, and two tiers. Knows no bytes.

mod allocator;
mod prefix;
mod resize;
mod size;
mod swap;

use std::ops::Range;

pub use allocator::BlockAllocator;
pub use prefix::{Chain, PrefixIndex};
use size::BlockSize;
use swap::HostTier;
pub use swap::Load;

use crate::batch::BlockCopy;
use crate::error::{Result, try_vec};

pub type BlockId = u32;

/// Blocks that `tokens` need: the one place that knows.
pub fn blocks_for(tokens: usize, block_size: usize) -> usize {
    tokens.div_ceil(block_size)
}

/// The pool cannot give what was asked for; nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoSpace;

/// One sequence's blocks, in the order of its tokens. The first ones may be gone: no token will look back on them.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    gone: usize,
    rests: bool,
    /// Its blocks are the host tier's.
    swapped: bool,
}

impl BlockTable {
    /// An empty table that will not have to allocate until it holds more than `blocks`.
    pub fn with_capacity(blocks: usize) -> Result<BlockTable> {
        let mut table = BlockTable::default();
        table.reserve(blocks)?;
        Ok(table)
    }

    pub fn reserve(&mut self, blocks: usize) -> Result<()> {
        Ok(self.blocks.try_reserve_exact(blocks.saturating_sub(self.blocks.len()))?)
    }

    /// One for each run of tokens; for those that are gone some number that nobody may look at.
    #[inline]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    fn held(&self) -> &[BlockId] {
        &self.blocks[self.gone..]
    }

    /// How many of the first blocks are gone.
    pub fn gone(&self) -> usize {
        self.gone
    }

    /// Nobody works with it: it may be asked to give its blocks up.
    #[inline]
    pub fn rests(&self) -> bool {
        self.rests
    }

    /// It lies in the host tier: nothing can be computed with it until it comes back.
    #[inline]
    pub fn swapped(&self) -> bool {
        self.swapped
    }
}

/// Grows, shares, moves and frees block tables over the device's blocks and those of a host tier.
///
/// A block with several owners, or one that the prefix index can find, is never written: its writer gets a copy, or, where it
/// is the only owner, the index forgets the block.
#[derive(Debug)]
pub struct BlockManager {
    allocator: BlockAllocator,
    /// None: prefixes are not kept.
    prefix: Option<PrefixIndex>,
    host: HostTier,
    size: BlockSize,
    filled: Vec<u16>, // [blocks] slots that hold a token's K and V, 0 while free
    /// Their sum over the used blocks.
    filled_slots: usize,
}

impl BlockManager {
    pub fn new(blocks: usize, block_size: usize, keep_prefixes: bool) -> Result<BlockManager> {
        let prefix = if keep_prefixes { Some(PrefixIndex::new(blocks)?) } else { None };
        let (allocator, host) = (BlockAllocator::new(blocks)?, HostTier::new(blocks, 0)?);
        let size = BlockSize::new(block_size);
        Ok(BlockManager { allocator, prefix, host, size, filled: try_vec(blocks, 0)?, filled_slots: 0 })
    }

    pub fn block_size(&self) -> usize {
        self.size.tokens()
    }

    /// Blocks that so many tokens fill.
    #[inline]
    pub fn full(&self, tokens: usize) -> usize {
        self.size.full(tokens)
    }

    pub fn total(&self) -> usize {
        self.allocator.total()
    }

    pub fn free_blocks(&self) -> usize {
        self.allocator.free()
    }

    /// Blocks that nobody refers to and that the prefix index can still find.
    pub fn cached_blocks(&self) -> usize {
        self.prefix.as_ref().map_or(0, PrefixIndex::unused)
    }

    /// Blocks that can be given out: the free, and the cached.
    #[inline]
    pub fn available(&self) -> usize {
        self.free_blocks() + self.cached_blocks()
    }

    /// Blocks that would become available if all resting tables were freed.
    pub fn idle_blocks(&self) -> usize {
        self.allocator.idle()
    }

    pub fn used_blocks(&self) -> usize {
        self.total() - self.available()
    }

    /// Slots of the used blocks that hold a token's K and V; a slot that several sequences share counts once.
    pub fn filled_slots(&self) -> usize {
        self.filled_slots
    }

    pub fn keeps_prefixes(&self) -> bool {
        self.prefix.is_some()
    }

    /// Makes the positions of `write` writable: new blocks at the end, and a copy of a block that others read. The copies that
    /// must be made first are appended to `copies`. All or nothing.
    ///
    /// What is copied from keeps its reference until `settle` or `undo`.
    #[inline]
    pub fn prepare(
        &mut self,
        table: &mut BlockTable,
        write: Range<usize>,
        copies: &mut Vec<BlockCopy>,
    ) -> std::result::Result<(), NoSpace> {
        assert!(!table.swapped, "who writes is on the device");
        let (held, end) = (table.blocks.len(), self.size.blocks_for(write.end));
        let missing = end.saturating_sub(held);
        let written = self.size.full(write.start)..held.min(end);
        let to_copy = written.clone().filter(|&place| self.must_copy(table.blocks[place], place, write.start, copies)).count();
        if missing + to_copy > self.available() {
            return Err(NoSpace);
        }
        for place in written {
            let from = table.blocks[place];
            if self.must_copy(from, place, write.start, copies) {
                let to = self.take()?;
                table.blocks[place] = to;
                copies.push(BlockCopy { from, to });
            } else {
                self.host.part(from);
                self.forget(from);
            }
        }
        for _ in 0..missing {
            let block = self.take()?;
            table.blocks.push(block);
        }
        Ok(())
    }

    /// Whether what is written from position `first` on must go to a copy of the block at `place`: others read it. Those that
    /// `copies` gives a copy of their own have it back should the step fail, so that what they computed must stay until then.
    #[inline]
    fn must_copy(&self, block: BlockId, place: usize, first: usize, copies: &[BlockCopy]) -> bool {
        let refs = self.allocator.refs(block);
        if refs == 1 {
            return false; // what is copied from has a reference more
        }
        let copied = copies.iter().filter(|copy| copy.from == block).count() as u32;
        let overwrites = first < place * self.block_size() + self.filled[block as usize] as usize;
        refs > 1 + copied || (copied > 0 && overwrites)
    }

    /// The block will be written to: where it is full and can be found, nobody shall find it any more.
    fn forget(&mut self, block: BlockId) {
        if let Some(prefix) = &mut self.prefix
            && self.filled[block as usize] as usize == self.size.tokens()
        {
            prefix.forget(block);
        }
    }

    fn take(&mut self) -> std::result::Result<BlockId, NoSpace> {
        let block = self.allocator.take().or_else(|_| self.evict())?;
        self.allocator.acquire(block);
        self.filled[block as usize] = 0;
        Ok(block)
    }

    /// Gives up the cached block that was used least recently.
    fn evict(&mut self) -> std::result::Result<BlockId, NoSpace> {
        let block = self.prefix.as_mut().and_then(PrefixIndex::evict).ok_or(NoSpace)?;
        self.host.vacate(block);
        Ok(block)
    }

    /// The copies were made: nobody needs to hold what they were made from.
    pub fn settle(&mut self, copies: &[BlockCopy]) {
        copies.iter().for_each(|copy| self.release(copy.from));
    }

    /// The copy was not made: the table has its old block again, if it has the new one.
    pub fn undo(&mut self, copy: BlockCopy, table: &mut BlockTable) {
        if let Some(block) = table.blocks[table.gone..].iter_mut().find(|block| **block == copy.to) {
            *block = copy.from;
            self.release(copy.to);
        }
    }

    /// K and V of the positions are now stored.
    #[inline]
    pub fn fill(&mut self, table: &BlockTable, positions: Range<usize>) {
        let tokens = self.size.tokens();
        for place in self.size.full(positions.start)..self.size.blocks_for(positions.end) {
            let filled = &mut self.filled[table.blocks[place] as usize];
            let now = (positions.end - place * tokens).min(tokens).max(*filled as usize);
            self.filled_slots += now - *filled as usize;
            *filled = now as u16;
        }
    }

    /// `child`, which is empty and has room for them, shares the blocks of the first `tokens`.
    pub fn fork(&mut self, table: &BlockTable, tokens: usize, child: &mut BlockTable) {
        assert!(child.blocks.is_empty() && !child.rests, "a child begins with what its parent has");
        let shared = &table.blocks[..self.size.blocks_for(tokens)];
        child.blocks.extend_from_slice(shared);
        child.gone = table.gone.min(shared.len());
        child.swapped = table.swapped && !shared.is_empty();
        match child.swapped {
            true => self.host.share(child),
            false => child.held().iter().for_each(|&block| self.allocator.acquire(block)),
        }
    }

    /// Cuts the table to the blocks of the first `tokens`.
    pub fn truncate(&mut self, table: &mut BlockTable, tokens: usize) {
        let kept = self.size.blocks_for(tokens);
        while table.blocks.len() > kept.max(table.gone) {
            let block = table.blocks.pop().expect("it is longer than that");
            self.let_go(block, table);
        }
        table.blocks.truncate(kept);
        table.gone = table.gone.min(kept);
        self.host.leave(table);
    }

    /// Lets go of the blocks before the one that holds position `first`: nobody will look back on them.
    #[inline]
    pub fn slide(&mut self, table: &mut BlockTable, first: usize) {
        let gone = self.size.full(first).min(table.blocks.len());
        if gone <= table.gone {
            return;
        }
        (table.gone..gone).for_each(|place| self.let_go(table.blocks[place], table));
        table.blocks[table.gone..gone].fill(0);
        table.gone = gone;
    }

    pub fn free(&mut self, table: &mut BlockTable) {
        self.truncate(table, 0);
    }

    /// The table rests: its blocks are counted as such, until it is woken. Meanwhile it gets no others.
    pub fn rest(&mut self, table: &mut BlockTable) {
        assert!(!std::mem::replace(&mut table.rests, true), "a table rests once");
        table.held().iter().for_each(|&block| self.allocator.rest(block));
    }

    pub fn wake(&mut self, table: &mut BlockTable) {
        assert!(std::mem::take(&mut table.rests), "a table is woken once");
        table.held().iter().for_each(|&block| self.allocator.wake(block));
    }

    /// A reference less to a block of the table's.
    fn let_go(&mut self, block: BlockId, table: &BlockTable) {
        if table.swapped {
            return self.host.release(block);
        }
        if table.rests {
            self.allocator.wake(block);
        }
        self.release(block);
    }

    fn release(&mut self, block: BlockId) {
        if !self.allocator.release(block) {
            return;
        }
        self.filled_slots -= self.filled[block as usize] as usize;
        match &mut self.prefix {
            Some(prefix) if prefix.holds(block) => prefix.retire(block),
            _ => {
                self.host.vacate(block);
                self.allocator.give_back(block);
            }
        }
    }

    /// Gives the table the blocks of `chains` from `place` on, as far as they can be found, instead of what it has there, and says
    /// how many.
    pub fn reuse(&mut self, table: &mut BlockTable, place: usize, chains: &[Chain]) -> usize {
        let find = |manager: &BlockManager, place: usize| manager.prefix.as_ref()?.find(chains.get(place)?);
        if find(self, place).is_none() {
            return 0;
        }
        self.truncate(table, place * self.size.tokens());
        while let Some(block) = find(self, table.blocks.len()) {
            self.acquire(block);
            table.blocks.push(block);
        }
        table.blocks.len() - place
    }

    /// One more table has the block, which is full.
    fn acquire(&mut self, block: BlockId) {
        if let Some(prefix) = self.prefix.as_mut().filter(|prefix| prefix.is_unused(block)) {
            prefix.revive(block);
            self.filled_slots += self.size.tokens();
        }
        self.allocator.acquire(block);
    }

    /// The table's block at `place` is full and can from now on be found by its chain. Where another block with the same tokens
    /// can be, the table takes that one, and its own goes.
    pub fn index(&mut self, table: &mut BlockTable, place: usize, chains: &[Chain]) {
        let Some(prefix) = &mut self.prefix else { return };
        let own = table.blocks[place];
        let before = place.checked_sub(1).map(|before| chains[before]);
        let found = prefix.find_or_insert(chains[place], before, own);
        if found != own {
            self.acquire(found);
            table.blocks[place] = found;
            self.release(own);
        }
    }

    /// Whether a block would become available if the table were freed alone. Forks share what comes first: the last is asked first.
    pub fn has_own(&self, table: &BlockTable) -> bool {
        table.held().iter().rev().any(|&block| self.allocator.refs(block) == 1)
    }

    /// Blocks that writing `write` takes from the pool, once the table is on the device.
    #[inline]
    pub fn needed(&self, table: &BlockTable, write: Range<usize>) -> usize {
        let (held, end) = (table.blocks.len(), self.size.blocks_for(write.end));
        let shared = table.blocks[self.size.full(write.start).min(held)..held.min(end)].iter();
        let refs = |block| if table.swapped { self.host.refs(block) } else { self.allocator.refs(block) };
        end.saturating_sub(held) + shared.filter(|&&block| refs(block) > 1).count()
    }

    /// Where the token at `position` lies: block * block_size + offset.
    #[inline]
    pub fn slot(&self, table: &BlockTable, position: usize) -> u32 {
        table.blocks[self.size.full(position)] * self.size.tokens() as u32 + self.size.offset(position) as u32
    }

    /// Panics unless the tables account for every used block exactly as often as it is counted. For tests.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        let capacity = self.allocator.capacity();
        let (mut owners, mut resting) = (vec![0; capacity], vec![0; capacity]);
        let (mut host_owners, mut swapped) = (vec![0; self.host_total()], 0);
        for table in tables {
            swapped += table.swapped as usize;
            if table.swapped {
                assert!(!table.rests, "only on the device somebody may need its blocks");
                table.held().iter().for_each(|&block| host_owners[block as usize] += 1);
                continue;
            }
            for &block in table.held() {
                owners[block as usize] += 1;
                resting[block as usize] += table.rests as u32;
            }
        }
        self.allocator.check(&owners, &resting, |block| self.prefix.as_ref().is_some_and(|prefix| prefix.is_unused(block)));
        self.host.check(&mut host_owners, swapped);
        let used = (0..capacity).filter(|&block| owners[block] > 0);
        assert_eq!(used.map(|block| self.filled[block] as usize).sum::<usize>(), self.filled_slots, "every filled slot is counted once");
        if let Some(prefix) = &self.prefix {
            prefix.check();
        }
    }

    /// Panics where one of the table's first blocks is found by another chain than its own of `chains`. For tests.
    pub fn check_found(&self, table: &BlockTable, chains: &[Chain]) {
        let Some(prefix) = self.prefix.as_ref().filter(|_| !table.swapped) else { return };
        for (&block, chain) in table.blocks.iter().zip(chains).skip(table.gone) {
            assert!(prefix.chain(block).is_none_or(|found| found == *chain), "block {block} is found by the tokens of others");
        }
    }

    /// Panics unless nobody else reads what `write` writes, once `copies` are made. For tests.
    pub fn check_writable(&self, table: &BlockTable, write: Range<usize>, copies: &[BlockCopy]) {
        for &block in &table.blocks[self.size.full(write.start)..self.size.blocks_for(write.end)] {
            let copied = copies.iter().filter(|copy| copy.from == block).count() as u32;
            assert_eq!(self.allocator.refs(block), 1 + copied, "block {block} has other owners");
            assert!(self.prefix.as_ref().is_none_or(|prefix| !prefix.holds(block)), "block {block} can still be found");
        }
    }

    /// Panics where a cached block would go before one that is found through it. For tests.
    #[cfg(test)]
    pub fn check_order(&self, before: impl Fn(&Chain) -> Option<Chain>) {
        self.prefix.iter().for_each(|prefix| prefix.check_order(&before));
    }
}

#[cfg(test)]
mod tests;
