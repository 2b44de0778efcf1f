//! The prefix cache: finds full blocks by the hash of all tokens up to their end. Eviction is least
//! recently used, leaf first.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use super::BlockId;
use super::block_hash::BlockHash;
use super::events::{CacheRecord, CachedBlock};
use crate::error::{Result, try_vec};

/// The full blocks that can be found by their hash. Unreferenced blocks are cached until they are
/// evicted.
///
/// Without a window, a block is useful only after its predecessor. When a block becomes
/// unreferenced, its unreferenced predecessors move to the recent end of the list, so that the
/// least recently used block is always a leaf. With a window, a block is useful without its
/// predecessors and keeps its own place in the list.
#[derive(Debug)]
pub struct PrefixIndex {
    blocks: HashMap<BlockHash, BlockId>,
    hashes: Vec<Option<BlockHash>>, // [blocks] hash of each block
    // [blocks] hash of the predecessor without which the block is useless
    before: Vec<Option<BlockHash>>,
    unused: Lru,
    computed: Option<ComputedLog>,
    record: Option<Box<CacheRecord>>,
}

/// The source of a block in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A step has computed it.
    Computed,
    /// A store had it.
    Loaded,
    /// Its hash is that of one sequence of this engine, and means nothing elsewhere.
    Private,
}

/// The tokens of a sequence and the hashes of its full blocks.
#[derive(Debug, Clone, Copy)]
pub struct HashedTokens<'a> {
    /// Initial hash.
    pub root: BlockHash,
    /// [places]
    pub hashes: &'a [BlockHash],
    /// Tokens of these places. May be empty if no events are recorded.
    pub tokens: &'a [u32],
    pub origin: Origin,
}

impl HashedTokens<'_> {
    /// Returns the hash of the block at `place`.
    fn hash(&self, place: usize, group: usize) -> BlockHash {
        self.hashes[place].for_group(group)
    }

    /// Returns the hash of the predecessor. `None` for the first block.
    fn before(&self, place: usize, group: usize) -> Option<BlockHash> {
        Some(self.hash(place.checked_sub(1)?, group))
    }
}

/// The blocks that steps have computed, in the order in which they were inserted.
#[derive(Debug)]
struct ComputedLog {
    hashes: VecDeque<BlockHash>,
    max_len: usize,
}

impl PrefixIndex {
    pub fn new(blocks: usize) -> Result<PrefixIndex> {
        let mut map = HashMap::new();
        // A map that is at most half full is rehashed in place and does not allocate.
        map.try_reserve(2 * blocks)?;
        Ok(PrefixIndex {
            blocks: map,
            hashes: try_vec(blocks, None)?,
            before: try_vec(blocks, None)?,
            unused: Lru::new(blocks)?,
            computed: None,
            record: None,
        })
    }

    /// Logs the hashes of computed blocks, up to `max_len` of them between two calls of
    /// `next_computed`.
    pub fn log_computed(&mut self, max_len: usize) -> Result<()> {
        let mut hashes = VecDeque::new();
        hashes.try_reserve_exact(max_len)?;
        self.computed = Some(ComputedLog { hashes, max_len });
        Ok(())
    }

    /// Returns the oldest hash of the log and removes it.
    pub fn next_computed(&mut self) -> Option<BlockHash> {
        self.computed.as_mut()?.hashes.pop_front()
    }

    /// Records the insertions and removals from now on, for events. The index must be empty.
    pub fn record_events(&mut self, block_size: usize) -> Result<()> {
        self.record = Some(Box::new(CacheRecord::new(self.hashes.len(), block_size)?));
        Ok(())
    }

    /// Returns the record for events.
    pub fn record(&mut self) -> Option<&mut CacheRecord> {
        self.record.as_deref_mut()
    }

    pub fn records_events(&self) -> bool {
        self.record.is_some()
    }

    /// Inserts the block at `place` of a sequence, unless there is one with its hash. Returns the
    /// block with this hash. With a window, the block is useful without its predecessors.
    pub fn insert(&mut self, block: BlockId, source: &HashedTokens, place: usize, group: usize, is_windowed: bool) -> BlockId {
        let (hash, before) = (source.hash(place, group), source.before(place, group));
        let found = self.find_or_insert(hash, before.filter(|_| !is_windowed), block);
        if found != block || source.origin == Origin::Private {
            return found;
        }
        if let Some(log) = self.computed.as_mut().filter(|log| source.origin == Origin::Computed && log.hashes.len() < log.max_len) {
            log.hashes.push_back(hash);
        }
        if let Some(record) = &mut self.record {
            let parent = before.unwrap_or_else(|| source.root.for_group(group));
            let cached = CachedBlock { hash, parent, place: place as u32, group: group as u32 };
            record.insert(block, cached, &source.tokens[place * record.block_size()..][..record.block_size()]);
        }
        found
    }

    pub fn find(&self, hash: &BlockHash) -> Option<BlockId> {
        self.blocks.get(hash).copied()
    }

    pub fn holds(&self, block: BlockId) -> bool {
        self.hash(block).is_some()
    }

    /// Returns the hash of the block.
    pub fn hash(&self, block: BlockId) -> Option<BlockHash> {
        self.hashes[block as usize]
    }

    /// Returns the block with this hash. If there is none, inserts `block` with the predecessor
    /// `before`.
    fn find_or_insert(&mut self, hash: BlockHash, before: Option<BlockHash>, block: BlockId) -> BlockId {
        match self.blocks.entry(hash) {
            Entry::Occupied(found) => *found.get(),
            Entry::Vacant(place) => {
                (self.hashes[block as usize], self.before[block as usize]) = (Some(hash), before);
                place.insert(block);
                block
            }
        }
    }

    /// Removes the block from the index, since its content changes.
    pub fn remove(&mut self, block: BlockId) {
        if let Some(hash) = self.hashes[block as usize].take() {
            self.blocks.remove(&hash);
            if let Some(record) = &mut self.record {
                record.remove(block);
            }
        }
    }

    /// Records that the block is unreferenced. Moves the block, and then its unreferenced
    /// predecessors, to the most recently used end of the list.
    pub fn mark_unused(&mut self, block: BlockId) {
        let mut next = Some(block);
        while let Some(block) = next {
            self.unused.push(block);
            let before = self.before[block as usize].and_then(|before| self.find(&before));
            next = before.filter(|&before| self.is_unused(before));
            next.into_iter().for_each(|before| self.unused.remove(before));
        }
    }

    /// Records that the block is referenced again.
    pub fn mark_used(&mut self, block: BlockId) {
        self.unused.remove(block);
    }

    /// Returns the number of unreferenced blocks.
    pub fn unused(&self) -> usize {
        self.unused.len
    }

    pub fn is_unused(&self, block: BlockId) -> bool {
        self.unused.contains(block)
    }

    /// Transfers the entry of block `from` to block `to`, which is not in the index.
    pub fn relocate(&mut self, from: BlockId, to: BlockId) {
        let hash = self.hashes[from as usize].take();
        if let Some(hash) = hash {
            self.blocks.insert(hash, to);
        }
        (self.hashes[to as usize], self.before[to as usize]) = (hash, self.before[from as usize].take());
        if let Some(record) = &mut self.record {
            record.relocate(from, to);
        }
        if self.is_unused(from) {
            self.unused.relocate(from, to);
        }
    }

    /// Removes and returns the least recently used unreferenced block.
    pub fn evict(&mut self) -> Option<BlockId> {
        let block = self.unused.oldest()?;
        self.unused.remove(block);
        self.remove(block);
        Some(block)
    }

    /// Panics unless both directions of the index agree. For tests.
    pub fn check(&self) {
        let held = self.hashes.iter().flatten().count();
        assert_eq!(held, self.blocks.len(), "every hash has its block");
        self.blocks.iter().for_each(|(hash, &block)| assert_eq!(self.hashes[block as usize], Some(*hash)));
    }

    /// Panics if a block would be evicted before a block that depends on it. `before` returns the
    /// predecessor of a hash.
    #[cfg(test)]
    pub fn check_order(&self, before: impl Fn(&BlockHash) -> Option<BlockHash>) {
        let unused: Vec<BlockId> = std::iter::successors(self.unused.oldest(), |&block| self.unused.next(block)).collect();
        assert_eq!(unused.len(), self.unused());
        for (age, &block) in unused.iter().enumerate() {
            let hash = self.hash(block).expect("every unused block is in the index");
            let Some(parent) = before(&hash).and_then(|hash| self.find(&hash)) else { continue };
            assert!(!unused[..age].contains(&parent), "block {parent} would be evicted before {block}, which is found through it");
        }
    }
}

/// Block numbers in insertion order: a doubly linked list in fixed arrays.
#[derive(Debug)]
struct Lru {
    /// [blocks + 1] The neighbours of each block. The last entry is both ends of the list. A block
    /// outside the list is its own neighbour.
    before: Vec<u32>,
    after: Vec<u32>,
    len: usize,
}

impl Lru {
    fn new(blocks: usize) -> Result<Lru> {
        let mut before = try_vec(blocks + 1, 0)?;
        before.iter_mut().enumerate().for_each(|(i, place)| *place = i as u32);
        let mut after = try_vec(blocks + 1, 0)?;
        after.copy_from_slice(&before);
        Ok(Lru { before, after, len: 0 })
    }

    fn end(&self) -> usize {
        self.before.len() - 1
    }

    fn contains(&self, block: BlockId) -> bool {
        self.before[block as usize] != block
    }

    fn oldest(&self) -> Option<BlockId> {
        let first = self.after[self.end()];
        (first as usize != self.end()).then_some(first)
    }

    #[cfg(test)]
    fn next(&self, block: BlockId) -> Option<BlockId> {
        Some(self.after[block as usize]).filter(|&next| next as usize != self.end())
    }

    fn push(&mut self, block: BlockId) {
        assert!(!self.contains(block), "block {block} is already unused");
        let end = self.end();
        let last = self.before[end];
        (self.before[block as usize], self.after[block as usize]) = (last, end as u32);
        (self.after[last as usize], self.before[end]) = (block, block);
        self.len += 1;
    }

    fn relocate(&mut self, from: BlockId, to: BlockId) {
        let (before, after) = (self.before[from as usize], self.after[from as usize]);
        (self.before[to as usize], self.after[to as usize]) = (before, after);
        (self.after[before as usize], self.before[after as usize]) = (to, to);
        (self.before[from as usize], self.after[from as usize]) = (from, from);
    }

    fn remove(&mut self, block: BlockId) {
        assert!(self.contains(block), "block {block} is in use");
        let (before, after) = (self.before[block as usize], self.after[block as usize]);
        (self.after[before as usize], self.before[after as usize]) = (after, before);
        (self.before[block as usize], self.after[block as usize]) = (block, block);
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_block_is_evicted_first() {
        let mut lru = Lru::new(5).unwrap();
        [3, 1, 4].into_iter().for_each(|block| lru.push(block));
        lru.remove(1);
        lru.push(0);
        let mut order = Vec::new();
        while let Some(block) = lru.oldest() {
            lru.remove(block);
            order.push(block);
        }
        assert_eq!((order, lru.len), (vec![3, 4, 0], 0));
    }

    #[test]
    fn a_relocated_block_keeps_its_age() {
        let mut lru = Lru::new(5).unwrap();
        [3, 1, 4].into_iter().for_each(|block| lru.push(block));
        lru.relocate(4, 0);
        lru.relocate(3, 2);
        let order: Vec<BlockId> = std::iter::successors(lru.oldest(), |&block| lru.next(block)).collect();
        assert_eq!((order, lru.len), (vec![2, 1, 0], 3));
        assert!(!lru.contains(3) && !lru.contains(4));
    }
}
