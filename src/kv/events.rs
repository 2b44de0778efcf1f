//! Events: the blocks that enter and leave the prefix cache, as plain data for readers outside of
//! the engine.
//!
//! `CacheRecord` belongs to the prefix cache and lists the entries that have changed. `EventFeed`
//! belongs to the readers and has a copy of all entries. At the end of a step, `EventFeed::update`
//! compares the changed entries with its copy. The differences are the events of the step. A block
//! that is inserted and removed within one step is therefore in no event, and the number of events
//! of a step is bounded by the number of blocks.

use super::BlockId;
use super::block_hash::BlockHash;
use crate::error::{Result, try_vec};

/// What identifies a cached block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CachedBlock {
    pub hash: BlockHash,
    /// Hash of the block before it. For the first block of a sequence: the initial hash.
    pub parent: BlockHash,
    /// Number of blocks before it in its sequence.
    pub place: u32,
    /// Layer group.
    pub group: u32,
}

/// Cached blocks with their tokens.
#[derive(Debug)]
struct Entries {
    block_size: usize,
    blocks: Vec<Option<CachedBlock>>, // [entries]
    tokens: Vec<u32>,                 // [entries, block_size]
    len: usize,
}

impl Entries {
    fn new(capacity: usize, block_size: usize) -> Result<Entries> {
        Ok(Entries { block_size, blocks: try_vec(capacity, None)?, tokens: try_vec(capacity * block_size, 0)?, len: 0 })
    }

    fn tokens(&self, entry: u32) -> &[u32] {
        &self.tokens[entry as usize * self.block_size..][..self.block_size]
    }

    fn set(&mut self, entry: u32, block: CachedBlock, tokens: &[u32]) {
        self.tokens[entry as usize * self.block_size..][..self.block_size].copy_from_slice(tokens);
        self.len += self.blocks[entry as usize].replace(block).is_none() as usize;
    }

    fn clear(&mut self, entry: u32) {
        self.len -= self.blocks[entry as usize].take().is_some() as usize;
    }
}

/// The cached blocks whose hashes have a meaning outside of the engine, and the changes since the
/// last update of a feed. A block that moves in the pool keeps its entry.
#[derive(Debug)]
pub struct CacheRecord {
    entries: Entries,
    entry_of: Vec<Option<u32>>, // [blocks]
    free: Vec<u32>,
    changed: Vec<u32>,
    is_changed: Vec<bool>, // [entries]
}

impl CacheRecord {
    /// Creates a record for a pool of at most `blocks` blocks.
    pub fn new(blocks: usize, block_size: usize) -> Result<CacheRecord> {
        let (mut free, mut changed) = (Vec::new(), Vec::new());
        free.try_reserve_exact(blocks)?;
        free.extend((0..blocks as u32).rev());
        changed.try_reserve_exact(blocks)?;
        let (entry_of, is_changed) = (try_vec(blocks, None)?, try_vec(blocks, false)?);
        Ok(CacheRecord { entries: Entries::new(blocks, block_size)?, entry_of, free, changed, is_changed })
    }

    pub fn block_size(&self) -> usize {
        self.entries.block_size
    }

    pub fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    fn mark_changed(&mut self, entry: u32) {
        if !std::mem::replace(&mut self.is_changed[entry as usize], true) {
            self.changed.push(entry);
        }
    }

    /// Records that a block was inserted. A block that is inserted again keeps its entry.
    pub fn insert(&mut self, block: BlockId, cached: CachedBlock, tokens: &[u32]) {
        if self.entry_of[block as usize].is_some() {
            return;
        }
        let entry = self.free.pop().expect("there is an entry for each block");
        self.entry_of[block as usize] = Some(entry);
        self.entries.set(entry, cached, tokens);
        self.mark_changed(entry);
    }

    /// Records that a block was removed.
    pub fn remove(&mut self, block: BlockId) {
        if let Some(entry) = self.entry_of[block as usize].take() {
            self.entries.clear(entry);
            self.free.push(entry);
            self.mark_changed(entry);
        }
    }

    /// Records that the contents of block `from` have moved to `to`.
    pub fn relocate(&mut self, from: BlockId, to: BlockId) {
        self.entry_of[to as usize] = self.entry_of[from as usize].take();
    }

    /// Returns the hashes of all recorded blocks. For tests.
    #[cfg(test)]
    pub fn hashes(&self) -> impl Iterator<Item = BlockHash> {
        self.entries.blocks.iter().flatten().map(|block| block.hash)
    }
}

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvEventKind {
    /// The block is in the cache from now on.
    Stored,
    /// The block is no longer in the cache.
    Removed,
    /// No block is in the cache. The events of all blocks that are there follow.
    #[default]
    Cleared,
}

/// A change of the prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct KvEvent {
    pub kind: KvEventKind,
    /// Number of the step among those with events, from 1.
    pub sequence_number: u64,
    /// Time of the step in seconds since 1970.
    pub time: f64,
    pub block: CachedBlock,
    /// Place of its tokens in those of the batch, for stored blocks.
    tokens: u32,
}

/// Events in their order, with the tokens of the stored blocks.
#[derive(Debug, Default)]
pub struct EventBatch {
    events: Vec<KvEvent>,
    tokens: Vec<u32>, // [stored blocks, block_size]
    block_size: usize,
}

impl EventBatch {
    /// Reserves space for `events` events in an empty batch. Writes to it, so that the system does
    /// not supply its pages while a reader holds the lock.
    pub fn reserve(&mut self, events: usize, block_size: usize) -> Result<()> {
        self.block_size = block_size;
        self.events.try_reserve_exact(events)?;
        self.tokens.try_reserve_exact(events * block_size)?;
        self.events.resize(events, KvEvent::default());
        self.tokens.resize(events * block_size, 0);
        self.clear();
        Ok(())
    }

    /// Returns the number of events for which there is space.
    pub fn capacity(&self) -> usize {
        self.events.capacity().min(self.tokens.capacity().checked_div(self.block_size).unwrap_or(0))
    }

    pub fn events(&self) -> &[KvEvent] {
        &self.events
    }

    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Returns the tokens of a stored block, and none for other events.
    pub fn tokens(&self, event: &KvEvent) -> &[u32] {
        match event.kind {
            KvEventKind::Stored => &self.tokens[event.tokens as usize * self.block_size..][..self.block_size],
            KvEventKind::Removed | KvEventKind::Cleared => &[],
        }
    }

    fn clear(&mut self) {
        self.events.clear();
        self.tokens.clear();
    }

    fn push(&mut self, kind: KvEventKind, (sequence_number, time): (u64, f64), block: CachedBlock, tokens: &[u32]) {
        let place = self.tokens.len() / self.block_size.max(1);
        self.events.push(KvEvent { kind, sequence_number, time, block, tokens: place as u32 });
        self.tokens.extend_from_slice(tokens);
    }
}

/// The events that were not read yet, and a copy of all cached blocks. If there are more unread
/// events than the capacity, all are dropped, and the next read returns all cached blocks instead.
/// A reader therefore always ends with the blocks that are cached, however slow it is.
#[derive(Debug)]
pub struct EventFeed {
    entries: Entries,
    /// Number of the last step with events, and its time.
    last: (u64, f64),
    unread: EventBatch,
    max_events: usize,
    /// Whether unread events were dropped.
    has_dropped: bool,
}

impl EventFeed {
    /// Creates a feed of at most `max_events` unread events of a pool of at most `blocks` blocks.
    pub fn new(blocks: usize, block_size: usize, max_events: usize) -> Result<EventFeed> {
        let mut unread = EventBatch::default();
        unread.reserve(max_events, block_size)?;
        Ok(EventFeed { entries: Entries::new(blocks, block_size)?, last: (0, 0.0), unread, max_events, has_dropped: false })
    }

    /// Appends the changes of the record as the events of a step. Allocates nothing.
    pub fn update(&mut self, record: &mut CacheRecord, time: f64) {
        let CacheRecord { entries: now, changed, is_changed, .. } = record;
        changed.iter().for_each(|&entry| is_changed[entry as usize] = false);
        let before = &self.entries;
        changed.retain(|&entry| now.blocks[entry as usize] != before.blocks[entry as usize]);
        if changed.is_empty() {
            return;
        }
        let step = (self.last.0 + 1, time);
        self.last = step;
        // A block can be removed and stored again in another entry: removals go first.
        for &entry in changed.iter() {
            if let Some(block) = self.entries.blocks[entry as usize] {
                self.push(KvEventKind::Removed, step, block, &[]);
                self.entries.clear(entry);
            }
        }
        // Predecessors go first.
        changed.sort_unstable_by_key(|&entry| now.blocks[entry as usize].map(|block| (block.place, block.group, entry)));
        for entry in changed.drain(..) {
            if let Some(block) = now.blocks[entry as usize] {
                self.push(KvEventKind::Stored, step, block, now.tokens(entry));
                self.entries.set(entry, block, now.tokens(entry));
            }
        }
    }

    fn push(&mut self, kind: KvEventKind, step: (u64, f64), block: CachedBlock, tokens: &[u32]) {
        if self.unread.events.len() == self.max_events {
            self.unread.clear();
            self.has_dropped = true;
        }
        if !self.has_dropped {
            self.unread.push(kind, step, block, tokens);
        }
    }

    pub fn block_size(&self) -> usize {
        self.entries.block_size
    }

    /// Returns the number of events that the next `take` returns.
    pub fn unread(&self) -> usize {
        if self.has_dropped { self.snapshot_len() } else { self.unread.events.len() }
    }

    /// Moves the unread events to `out`, which is empty and has space for them.
    pub fn take(&mut self, out: &mut EventBatch) {
        if std::mem::take(&mut self.has_dropped) {
            return self.snapshot(out);
        }
        out.events.extend_from_slice(&self.unread.events);
        out.tokens.extend_from_slice(&self.unread.tokens);
        self.unread.clear();
    }

    /// Returns the number of events of a snapshot.
    pub fn snapshot_len(&self) -> usize {
        self.entries.len + 1
    }

    /// Appends a `Cleared` event and the cached blocks to `out`, which is empty and has space for
    /// them.
    pub fn snapshot(&self, out: &mut EventBatch) {
        out.push(KvEventKind::Cleared, self.last, CachedBlock::default(), &[]);
        for (entry, block) in (0..).zip(&self.entries.blocks) {
            if let Some(block) = block {
                out.push(KvEventKind::Stored, self.last, *block, self.entries.tokens(entry));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 4;

    fn cached(name: u32) -> CachedBlock {
        CachedBlock { hash: BlockHash::root(&[0; 32], b"").next(&[name]), place: name, ..Default::default() }
    }

    fn record_with(names: std::ops::Range<u32>) -> CacheRecord {
        let mut record = CacheRecord::new(8, SIZE).unwrap();
        names.for_each(|name| record.insert(name, cached(name), &[name; SIZE]));
        record
    }

    /// Returns the kind, the place and the step of each unread event.
    fn take(feed: &mut EventFeed) -> Vec<(KvEventKind, u32, u64)> {
        let mut batch = EventBatch::default();
        batch.reserve(feed.unread(), SIZE).unwrap();
        feed.take(&mut batch);
        for event in batch.events() {
            let tokens = [event.block.place; SIZE];
            assert_eq!(batch.tokens(event), if event.kind == KvEventKind::Stored { &tokens[..] } else { &[] });
        }
        batch.events().iter().map(|event| (event.kind, event.block.place, event.sequence_number)).collect()
    }

    #[test]
    fn the_events_of_a_step_are_its_net_changes() {
        use KvEventKind::{Removed, Stored};
        let (mut record, mut feed) = (record_with(0..3), EventFeed::new(8, SIZE, 100).unwrap());
        record.insert(7, cached(7), &[7; SIZE]);
        record.remove(7);
        feed.update(&mut record, 1.0);
        feed.update(&mut record, 2.0);
        assert_eq!(take(&mut feed), [(Stored, 0, 1), (Stored, 1, 1), (Stored, 2, 1)]);
        // A block that moves, and one that is removed and inserted again, have no events.
        record.relocate(2, 5);
        record.remove(1);
        record.insert(6, cached(1), &[1; SIZE]);
        feed.update(&mut record, 3.0);
        assert_eq!(take(&mut feed), []);
        record.remove(5);
        record.insert(2, cached(3), &[3; SIZE]);
        feed.update(&mut record, 4.0);
        assert_eq!(take(&mut feed), [(Removed, 2, 2), (Stored, 3, 2)]);
    }

    #[test]
    fn a_reader_that_misses_events_gets_all_blocks_and_then_the_next_events() {
        use KvEventKind::{Cleared, Removed, Stored};
        let (mut record, mut feed) = (record_with(0..2), EventFeed::new(8, SIZE, 2).unwrap());
        feed.update(&mut record, 1.0);
        record.insert(3, cached(3), &[3; SIZE]);
        feed.update(&mut record, 2.0);
        record.remove(0);
        feed.update(&mut record, 3.0);
        assert_eq!(take(&mut feed), [(Cleared, 0, 3), (Stored, 1, 3), (Stored, 3, 3)]);
        record.remove(1);
        feed.update(&mut record, 4.0);
        assert_eq!(take(&mut feed), [(Removed, 1, 4)]);
        assert_eq!(take(&mut feed), []);
    }
}
