//! A reader of events, as a router: it knows the prefix cache from the events alone.

use std::collections::HashSet;

use crate::kv::BlockHash;
use crate::kv::events::{EventBatch, EventFeed, KvEventKind};
use crate::scheduler::Scheduler;
use crate::scheduler::tests::Random;

/// Number of events by kind.
#[derive(Debug, Default)]
pub struct EventCounts {
    pub stored: usize,
    pub removed: usize,
    pub cleared: usize,
}

impl std::ops::AddAssign for EventCounts {
    fn add_assign(&mut self, other: EventCounts) {
        self.stored += other.stored;
        self.removed += other.removed;
        self.cleared += other.cleared;
    }
}

pub struct EventReader {
    feed: EventFeed,
    /// Number of acts between two updates of the feed, and between two reads.
    update_period: usize,
    read_period: usize,
    /// The blocks that the reader believes to be cached.
    known: HashSet<BlockHash>,
    /// Number of the last step that was read.
    last: u64,
    counts: EventCounts,
    acts: usize,
}

impl EventReader {
    pub fn new(s: &mut Scheduler, seed: u64) -> EventReader {
        let mut random = Random(seed + 1);
        s.record_events().unwrap();
        let max_events = [1 + random.below(8), 1 + random.below(100), 10_000][random.below(3)];
        EventReader {
            feed: EventFeed::new(s.blocks.capacity(), s.blocks.block_size(), max_events).unwrap(),
            update_period: 1 + random.below(4),
            read_period: 1 + random.below(40),
            known: HashSet::new(),
            last: 0,
            counts: EventCounts::default(),
            acts: 0,
        }
    }

    /// Updates the feed and reads it if their time has come. Then the reader knows the cache.
    pub fn read(&mut self, s: &mut Scheduler) {
        self.acts += 1;
        let Some(record) = s.cache_record() else { return };
        if self.acts.is_multiple_of(self.update_period) {
            self.feed.update(record, self.acts as f64);
            assert!(!record.has_changed());
            let cached: HashSet<BlockHash> = s.blocks.cached_hashes().collect();
            if self.acts.is_multiple_of(7) {
                self.check_snapshot(&cached);
            }
            if self.acts.is_multiple_of(self.read_period) {
                self.take();
                assert_eq!(self.known, cached, "the events give the blocks of the prefix cache");
            }
        }
    }

    /// Reads all events.
    pub fn finish(&mut self, s: &mut Scheduler) -> EventCounts {
        (self.update_period, self.read_period) = (1, 1);
        self.read(s);
        std::mem::take(&mut self.counts)
    }

    fn take(&mut self) {
        let mut batch = EventBatch::default();
        batch.reserve(self.feed.unread(), self.feed.block_size()).unwrap();
        self.feed.take(&mut batch);
        for event in batch.events() {
            match event.kind {
                KvEventKind::Stored => {
                    assert!(self.known.insert(event.block.hash), "a block is stored twice");
                    check_hash(&batch, event);
                    self.counts.stored += 1;
                }
                KvEventKind::Removed => {
                    assert!(self.known.remove(&event.block.hash), "a block is removed that was not stored");
                    self.counts.removed += 1;
                }
                KvEventKind::Cleared => {
                    self.known.clear();
                    self.last = event.sequence_number;
                    self.counts.cleared += 1;
                }
            }
            assert!(event.sequence_number == self.last || event.sequence_number == self.last + 1, "a step is missing");
            self.last = event.sequence_number;
        }
        assert_eq!(self.feed.unread(), 0);
    }

    fn check_snapshot(&self, cached: &HashSet<BlockHash>) {
        let mut snapshot = EventBatch::default();
        snapshot.reserve(self.feed.snapshot_len(), self.feed.block_size()).unwrap();
        self.feed.snapshot(&mut snapshot);
        let (first, blocks) = snapshot.events().split_first().unwrap();
        assert_eq!(first.kind, KvEventKind::Cleared);
        assert!(blocks.iter().all(|event| event.kind == KvEventKind::Stored && event.sequence_number == first.sequence_number));
        assert_eq!(blocks.len(), cached.len());
        assert_eq!(blocks.iter().map(|event| event.block.hash).collect::<HashSet<_>>(), *cached);
    }
}

/// Panics unless the hash of a stored block is that of its tokens and its predecessor.
fn check_hash(batch: &EventBatch, event: &crate::kv::events::KvEvent) {
    let (block, group) = (event.block, event.block.group as usize);
    let parent = block.parent.for_group(group); // removes the group
    assert_eq!(parent.next(batch.tokens(event)).for_group(group), block.hash, "the tokens of place {}", block.place);
}
