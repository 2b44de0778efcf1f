//! The prefix cache: finds full blocks by the hash of all tokens up to their end. Eviction is least
//! recently used, leaf first.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use sha2::{Digest, Sha256};

use super::BlockId;
use crate::error::{Result, try_vec};
use crate::types::SeqId;

/// Tokens that are passed to the hash function at once.
const AT_ONCE: usize = 16;

/// The hash of a full block: of its tokens and of all tokens before them. SHA-256 excludes
/// collisions that an attacker could construct.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// Returns the initial hash for a model and a salt. Sequences with different models or salts
    /// share no blocks.
    pub fn root(model: &[u8; 32], salt: &[u8]) -> BlockHash {
        BlockHash(Sha256::new().chain_update(model).chain_update(b"salt").chain_update(salt).finalize().into())
    }

    /// Returns the initial hash for one sequence. No salt can produce it, so that the sequence
    /// shares blocks only with its forks.
    pub fn for_sequence(model: &[u8; 32], sequence: SeqId) -> BlockHash {
        BlockHash(Sha256::new().chain_update(model).chain_update(b"sequence").chain_update(sequence.get().to_le_bytes()).finalize().into())
    }

    /// Returns the hash of the next block, which holds `tokens`.
    pub fn next(&self, tokens: &[u32]) -> BlockHash {
        let mut hash = Sha256::new().chain_update(self.0);
        for tokens in tokens.chunks(AT_ONCE) {
            let mut bytes = [0; 4 * AT_ONCE];
            bytes.chunks_exact_mut(4).zip(tokens).for_each(|(bytes, token)| bytes.copy_from_slice(&token.to_le_bytes()));
            hash.update(&bytes[..4 * tokens.len()]);
        }
        BlockHash(hash.finalize().into())
    }

    /// Returns the bytes of the hash.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the hash of the block of a layer group for the same tokens.
    pub fn for_group(mut self, group: usize) -> BlockHash {
        self.0.iter_mut().zip((group as u32).to_le_bytes()).for_each(|(byte, number)| *byte ^= number);
        self
    }
}

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
    log: Option<ChangeLog>,
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

/// A block that was inserted into the index or removed from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexChange {
    Stored { hash: BlockHash, parent: Option<BlockHash>, origin: Origin },
    Removed { hash: BlockHash },
}

/// The changes of the index since they were last taken.
#[derive(Debug)]
struct ChangeLog {
    changes: VecDeque<IndexChange>,
    max_len: usize,
    /// Number of changes that had no space.
    lost: u64,
}

impl ChangeLog {
    fn push(&mut self, change: IndexChange) {
        match self.changes.len() < self.max_len {
            true => self.changes.push_back(change),
            false => self.lost += 1,
        }
    }
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
            log: None,
        })
    }

    /// Logs the changes from now on, up to `max_len` of them between two calls of `next_change`.
    pub fn log_changes(&mut self, max_len: usize) -> Result<()> {
        let mut changes = VecDeque::new();
        changes.try_reserve_exact(max_len)?;
        self.log = Some(ChangeLog { changes, max_len, lost: 0 });
        Ok(())
    }

    /// Returns the oldest change of the log and removes it.
    pub fn next_change(&mut self) -> Option<IndexChange> {
        self.log.as_mut()?.changes.pop_front()
    }

    /// Returns the number of changes that the log has lost.
    pub fn lost_changes(&self) -> u64 {
        self.log.as_ref().map_or(0, |log| log.lost)
    }

    /// Logs that a block was inserted, unless its hash is private.
    pub fn log_stored(&mut self, hash: BlockHash, parent: Option<BlockHash>, origin: Origin) {
        if let Some(log) = self.log.as_mut().filter(|_| origin != Origin::Private) {
            log.push(IndexChange::Stored { hash, parent, origin });
        }
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
    pub fn find_or_insert(&mut self, hash: BlockHash, before: Option<BlockHash>, block: BlockId) -> BlockId {
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
            if let Some(log) = &mut self.log {
                log.push(IndexChange::Removed { hash });
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

    #[test]
    fn hashes_depend_on_model_salt_tokens_and_position() {
        let root = BlockHash::root(&[0; 32], b"");
        let one = root.next(&[1, 2]);
        let others = [
            root,
            root.next(&[2, 1]),
            one.next(&[1, 2]),
            BlockHash::root(&[1; 32], b"").next(&[1, 2]),
            BlockHash::root(&[0; 32], b"tenant").next(&[1, 2]),
            BlockHash::for_sequence(&[0; 32], SeqId::from_raw(0)).next(&[1, 2]),
            BlockHash::for_sequence(&[0; 32], SeqId::from_raw(1)).next(&[1, 2]),
            // A salt that imitates the hash of a sequence.
            BlockHash::root(&[0; 32], &[&b"sequence"[..], &[0; 8]].concat()).next(&[1, 2]),
        ];
        assert!(others.iter().all(|other| *other != one));
        assert_eq!(root.next(&[1, 2]), one);
    }
}
