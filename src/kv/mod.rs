//! Which block holds which tokens: reference counts, copy-on-write, block tables, the prefix index, and two tiers. Knows no bytes.

mod allocator;
mod paging;
mod prefix;
mod resize;
mod size;
mod swap;

use std::ops::Range;

pub use allocator::BlockAllocator;
pub use paging::Paging;
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

/// The first of the range from which on it `is` so, or its end.
fn first(range: Range<usize>, is: impl Fn(usize) -> bool) -> usize {
    let (mut start, mut end) = (range.start, range.end);
    while start < end {
        let middle = start + (end - start) / 2;
        if is(middle) { end = middle } else { start = middle + 1 }
    }
    end
}

/// The pool cannot give what was asked for; nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoSpace;

/// What a table has for a block that is gone: no token will look back on it.
pub const GONE: BlockId = BlockId::MAX;

/// One sequence's blocks, in the order of its tokens: at each place, a run of tokens, one for each group of layers. A group's first
/// ones may be gone.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<BlockId>, // [places, groups]
    places: usize,
    rests: bool,
    /// Its blocks are the host tier's.
    swapped: bool,
}

impl BlockTable {
    /// It will not have to allocate until it has more than so many entries.
    pub fn reserve(&mut self, entries: usize) -> Result<()> {
        Ok(self.blocks.try_reserve_exact(entries.saturating_sub(self.blocks.len()))?)
    }

    #[inline]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Runs of tokens that it has blocks for.
    pub fn places(&self) -> usize {
        self.places
    }

    /// None: it is gone.
    fn at(&self, entry: usize) -> Option<BlockId> {
        Some(self.blocks[entry]).filter(|&block| block != GONE)
    }

    fn held(&self) -> impl DoubleEndedIterator<Item = BlockId> {
        self.blocks.iter().copied().filter(|&block| block != GONE)
    }

    /// Some of its tokens' K and V are nowhere any more.
    pub fn has_gone(&self) -> bool {
        self.blocks.contains(&GONE)
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
    paging: Paging,
    size: BlockSize,
    filled: Vec<u16>, // [blocks] slots that hold a token's K and V, 0 while free
    /// Their sum over the used blocks.
    filled_slots: usize,
    /// Entries of tables whose block is gone.
    gone: usize,
}

impl BlockManager {
    pub fn new(blocks: usize, paging: Paging, keep_prefixes: bool) -> Result<BlockManager> {
        let prefix = if keep_prefixes { Some(PrefixIndex::new(blocks)?) } else { None };
        let (allocator, host) = (BlockAllocator::new(blocks)?, HostTier::new(blocks, 0)?);
        Ok(BlockManager { allocator, prefix, host, size: paging.size(), paging, filled: try_vec(blocks, 0)?, filled_slots: 0, gone: 0 })
    }

    pub fn paging(&self) -> &Paging {
        &self.paging
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

    /// Blocks that tables would have if no layer had a window; those of forks count for each.
    pub fn gone_blocks(&self) -> usize {
        self.gone
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
                self.host.part(from);
                self.forget(from);
            }
        }
        for _ in 0..missing {
            let block = self.take()?;
            table.blocks.push(block);
        }
        table.places = held.max(end);
        Ok(())
    }

    /// The entries of a table at these places.
    #[inline]
    fn entries(&self, places: Range<usize>) -> Range<usize> {
        places.start * self.paging.groups()..places.end * self.paging.groups()
    }

    /// Whether what is written from position `first` on must go to a copy of the block at `entry`: others read it. Those that
    /// `copies` gives a copy of their own have it back should the step fail, so that what they computed must stay until then.
    #[inline]
    fn must_copy(&self, table: &BlockTable, entry: usize, first: usize, copies: &[BlockCopy]) -> bool {
        let block = table.blocks[entry];
        let refs = self.allocator.refs(block);
        if refs == 1 {
            return false; // what is copied from has a reference more
        }
        let place = entry / self.paging.groups();
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
        if let Some(block) = table.blocks.iter_mut().find(|block| **block == copy.to) {
            *block = copy.from;
            self.release(copy.to);
        }
    }

    /// K and V of the positions are now stored.
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

    /// `child`, which is empty and has room for them, shares the blocks of the first `tokens`.
    pub fn fork(&mut self, table: &BlockTable, tokens: usize, child: &mut BlockTable) {
        assert!(child.blocks.is_empty() && !child.rests, "a child begins with what its parent has");
        child.places = self.size.blocks_for(tokens);
        child.blocks.extend_from_slice(&table.blocks[..self.paging.entries(tokens)]);
        child.swapped = table.swapped && child.places > 0;
        self.gone += child.blocks.len() - child.held().count();
        match child.swapped {
            true => self.host.share(child),
            false => child.held().for_each(|block| self.allocator.acquire(block)),
        }
    }

    /// Cuts the table to the blocks of the first `tokens`.
    pub fn truncate(&mut self, table: &mut BlockTable, tokens: usize) {
        let entries = self.paging.entries(tokens);
        while table.blocks.len() > entries {
            match table.blocks.pop() {
                Some(block) if block != GONE => self.let_go(block, table),
                _ => self.gone -= 1,
            }
        }
        table.places = table.places.min(self.size.blocks_for(tokens));
        self.host.leave(table);
    }

    /// Lets go of the blocks that nobody will look back on once `computed` tokens are computed.
    #[inline]
    pub fn slide(&mut self, table: &mut BlockTable, computed: usize) {
        if !self.paging.slides() {
            return;
        }
        for group in 0..self.paging.groups() {
            let out = self.paging.out_of(self.paging.windows()[group], computed).min(table.places);
            for place in (0..out).rev() {
                let entry = place * self.paging.groups() + group;
                let block = std::mem::replace(&mut table.blocks[entry], GONE);
                if block == GONE {
                    break; // and so are all before it
                }
                self.let_go(block, table);
                self.gone += 1;
            }
        }
    }

    /// Whether a sequence cut to `len` tokens would look back on blocks that are gone.
    pub fn looks_back_on_gone(&self, table: &BlockTable, len: usize) -> bool {
        self.paging.windows().iter().enumerate().any(|(group, &window)| {
            let first = self.paging.out_of(window, len);
            first < table.places && table.at(first * self.paging.groups() + group).is_none()
        })
    }

    pub fn free(&mut self, table: &mut BlockTable) {
        self.truncate(table, 0);
    }

    /// The table rests: its blocks are counted as such, until it is woken. Meanwhile it gets no others.
    pub fn rest(&mut self, table: &mut BlockTable) {
        assert!(!std::mem::replace(&mut table.rests, true), "a table rests once");
        table.held().for_each(|block| self.allocator.rest(block));
    }

    pub fn wake(&mut self, table: &mut BlockTable) {
        assert!(std::mem::take(&mut table.rests), "a table is woken once");
        table.held().for_each(|block| self.allocator.wake(block));
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

    /// The blocks that a sequence of `computed` tokens looks back on, in the order of its table; None: some are not on the device.
    pub fn looked_back_on(&self, table: &BlockTable, computed: usize) -> Result<Option<Vec<BlockId>>> {
        if table.swapped || self.looks_back_on_gone(table, computed) {
            return Ok(None);
        }
        let mut blocks = Vec::new();
        blocks.try_reserve_exact(self.paging.looked_back_on(computed))?;
        let kept = (0..self.paging.entries(computed)).filter(|&entry| !self.is_out(entry, computed));
        blocks.extend(kept.map(|entry| table.blocks[entry]));
        Ok(Some(blocks))
    }

    /// Whether nobody looks back on a table's entry once `computed` tokens are computed.
    fn is_out(&self, entry: usize, computed: usize) -> bool {
        let groups = self.paging.groups();
        entry / groups < self.paging.out_of(self.paging.windows()[entry % groups], computed)
    }

    /// An empty table gets blocks for what a sequence of `computed` tokens looks back on. All or nothing.
    pub fn adopt(&mut self, table: &mut BlockTable, computed: usize) -> std::result::Result<(), NoSpace> {
        assert!(table.blocks.is_empty(), "what it has is another's");
        if self.paging.looked_back_on(computed) > self.available() {
            return Err(NoSpace);
        }
        for entry in 0..self.paging.entries(computed) {
            let gone = self.is_out(entry, computed);
            self.gone += gone as usize;
            let block = if gone { GONE } else { self.take()? };
            table.blocks.push(block);
        }
        table.places = self.size.blocks_for(computed);
        Ok(())
    }

    /// Gives the table the blocks of `chains` from `place` on, as far as all that look back on them can go on, instead of what it has
    /// there, and says for how many places.
    pub fn reuse(&mut self, table: &mut BlockTable, place: usize, chains: &[Chain]) -> usize {
        let end = self.known(place, chains);
        if end == place {
            return 0;
        }
        let (groups, tokens) = (self.paging.groups(), self.size.tokens());
        self.truncate(table, place * tokens);
        self.slide(table, end * tokens);
        for entry in self.entries(place..end) {
            let block = match self.is_out(entry, end * tokens) {
                true => None,
                false => self.find(entry % groups, &chains[entry / groups]),
            };
            block.into_iter().for_each(|block| self.acquire(block));
            self.gone += block.is_none() as usize;
            table.blocks.push(block.unwrap_or(GONE));
        }
        table.places = end;
        end - place
    }

    /// As many of the first places of `chains` as one that has those before `from` can go on after: of the others, all groups' blocks can
    /// be found that are then looked back on.
    fn known(&self, from: usize, chains: &[Chain]) -> usize {
        let mut end = chains.len();
        for group in (0..self.paging.groups()).filter(|&group| self.paging.windows()[group].is_none()) {
            end = (from..end).find(|&place| self.find(group, &chains[place]).is_none()).unwrap_or(end);
        }
        // A block that a window lacks is in that of every end up to there.
        let lacking = |end: usize| {
            let lacks =
                |group| (self.first_kept(group, end).max(from)..end).rev().find(|&place| self.find(group, &chains[place]).is_none());
            (0..self.paging.groups()).filter(|&group| self.paging.windows()[group].is_some()).find_map(lacks)
        };
        while let Some(place) = lacking(end) {
            end = place;
        }
        end.max(from)
    }

    /// The first place that the group keeps of a sequence of which the first `places` are computed.
    fn first_kept(&self, group: usize, places: usize) -> usize {
        self.paging.out_of(self.paging.windows()[group], places * self.size.tokens())
    }

    fn find(&self, group: usize, chain: &Chain) -> Option<BlockId> {
        self.prefix.as_ref()?.find(&chain.of_group(group))
    }

    /// One more table has the block, which is full.
    fn acquire(&mut self, block: BlockId) {
        if let Some(prefix) = self.prefix.as_mut().filter(|prefix| prefix.is_unused(block)) {
            prefix.revive(block);
            self.filled_slots += self.size.tokens();
        }
        self.allocator.acquire(block);
    }

    /// The table's blocks at `place` are full and can from now on be found by their chain. Where another block with the same tokens
    /// can be, the table takes that one, and its own goes.
    pub fn index(&mut self, table: &mut BlockTable, place: usize, chains: &[Chain]) {
        for group in 0..self.paging.groups() {
            let entry = place * self.paging.groups() + group;
            let (Some(own), Some(prefix)) = (table.at(entry), &mut self.prefix) else { continue };
            // With a window, what comes later can be of use without what comes before.
            let before = place.checked_sub(1).filter(|_| self.paging.windows()[group].is_none());
            let found = prefix.find_or_insert(chains[place].of_group(group), before.map(|before| chains[before].of_group(group)), own);
            if found != own {
                self.acquire(found);
                table.blocks[entry] = found;
                self.release(own);
            }
        }
    }

    /// Whether a block would become available if the table were freed alone. Forks share what comes first: the last is asked first.
    pub fn has_own(&self, table: &BlockTable) -> bool {
        table.held().rev().any(|block| self.allocator.refs(block) == 1)
    }

    /// Blocks that writing `write`, of which a step computes at most `rows`, takes from the pool, once the table is on the device.
    #[inline]
    pub fn needed(&self, table: &BlockTable, write: Range<usize>, rows: usize) -> usize {
        let (held, end) = (table.places, self.size.blocks_for(write.end));
        let refs = |block| if table.swapped { self.host.refs(block) } else { self.allocator.refs(block) };
        // What leaves the window is given back, unless others have it too: they have the first blocks.
        let missing = |(group, &window): (usize, &Option<usize>)| {
            let own = |place: usize| table.at(place * self.paging.groups() + group).is_some_and(|block| refs(block) == 1);
            let kept = if window.is_some() { held - first(self.paging.out_of(window, write.start).min(held)..held, own) } else { 0 };
            end.saturating_sub(held).min(self.paging.span(window, rows).saturating_sub(kept))
        };
        let written = self.size.full(write.start).min(held)..held.min(end);
        let shared = self.entries(written).filter(|&entry| refs(table.blocks[entry]) > 1);
        self.paging.windows().iter().enumerate().map(missing).sum::<usize>() + shared.count()
    }

    /// Where the token at `position` lies, for each group of layers: block * block_size + offset.
    #[inline]
    pub fn slots(&self, table: &BlockTable, position: usize) -> impl Iterator<Item = u32> {
        let first = self.size.full(position) * self.paging.groups();
        let (tokens, offset) = (self.size.tokens() as u32, self.size.offset(position) as u32);
        table.blocks[first..first + self.paging.groups()].iter().map(move |block| block * tokens + offset)
    }

    /// Panics unless the tables account for every used block exactly as often as it is counted. For tests.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        let capacity = self.allocator.capacity();
        let (mut owners, mut resting) = (vec![0; capacity], vec![0; capacity]);
        let (mut host_owners, mut swapped, mut gone) = (vec![0; self.host_total()], 0, 0);
        for table in tables {
            assert_eq!(table.places * self.paging.groups(), table.blocks.len(), "at each place there is a block for each group");
            swapped += table.swapped as usize;
            gone += table.blocks.len() - table.held().count();
            if table.swapped {
                assert!(!table.rests, "only on the device somebody may need its blocks");
                table.held().for_each(|block| host_owners[block as usize] += 1);
                continue;
            }
            for block in table.held() {
                owners[block as usize] += 1;
                resting[block as usize] += table.rests as u32;
            }
        }
        self.allocator.check(&owners, &resting, |block| self.prefix.as_ref().is_some_and(|prefix| prefix.is_unused(block)));
        self.host.check(&mut host_owners, swapped);
        assert_eq!(gone, self.gone, "what is gone of each table is counted");
        let used = (0..capacity).filter(|&block| owners[block] > 0);
        assert_eq!(used.map(|block| self.filled[block] as usize).sum::<usize>(), self.filled_slots, "every filled slot is counted once");
        if let Some(prefix) = &self.prefix {
            prefix.check();
        }
    }

    /// Panics where one of the table's first blocks is found by another chain than its own of `chains`. For tests.
    pub fn check_found(&self, table: &BlockTable, chains: &[Chain]) {
        let Some(prefix) = self.prefix.as_ref().filter(|_| !table.swapped) else { return };
        let groups = self.paging.groups();
        for entry in self.entries(0..chains.len().min(table.places)) {
            let (Some(block), chain) = (table.at(entry), chains[entry / groups].of_group(entry % groups)) else { continue };
            assert!(prefix.chain(block).is_none_or(|found| found == chain), "block {block} is found by the tokens of others");
        }
    }

    /// Panics unless nobody else reads what `write` writes, once `copies` are made. For tests.
    pub fn check_writable(&self, table: &BlockTable, write: Range<usize>, copies: &[BlockCopy]) {
        for entry in self.entries(self.size.full(write.start)..self.size.blocks_for(write.end)) {
            let block = table.blocks[entry];
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
