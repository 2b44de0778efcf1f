//! The file of a group and its layout. Its contents are not trusted: offsets are computed from the
//! number of ranks and from counters modulo the number of slots or bytes.
//!
//! ```text
//! header   magic, version, number of ranks, failure; below, bytes that only serve as locks
//! lines    one counter each: the state of a rank, its posted and its done chunks, the heads and
//!          the tails of the rings
//! slots    SLOTS chunks of each rank, which all ranks read
//! rings    RING_BYTES of messages from each rank to each rank, allocated at the first message
//! ```

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sys::shared_mapping::{SharedMapping, wait_while, wake_all};
use crate::sys::{file_locks, files};

pub const MAX_RANKS: usize = 64;
/// Chunks of a rank that not all other ranks have read.
pub const SLOTS: u32 = 16;
pub const SLOT_BYTES: usize = 64 << 10;
pub const RING_BYTES: usize = 4 << 20;

const MAGIC: [u8; 8] = *b"pllmcomm";
/// The first three fields of the header, and the failure, are the same in all versions.
pub const VERSION: u32 = 1;
const FAILURE: usize = 16;
const FAILURE_DETAIL: usize = 20;
const HEADER_BYTES: usize = 64;

/// Bytes of the file whose locks have a meaning. The contents of these bytes have none.
const RANK_LOCKS: u64 = 1024;
/// Held while a rank 0 creates or replaces a file.
pub const CREATION_LOCK: u64 = 1023;

const PAGE: usize = 4096;
const LINE: usize = 64;
const SLOT_STRIDE: usize = LINE + SLOT_BYTES;
const PID: usize = 8;
const PID_NAMESPACE: usize = 12;

/// States of a rank.
pub const ABSENT: u32 = 0;
pub const JOINED: u32 = 1;
pub const LEFT: u32 = 2;

/// The byte whose lock a rank holds while it lives.
pub fn rank_lock(rank: usize) -> u64 {
    RANK_LOCKS + rank as u64
}

/// Why a group has failed. The number of the rank and the reason form one word.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Failure {
    /// A call of the rank has failed.
    Call,
    /// The rank expects this number of ranks.
    Size(u32),
    /// The rank has this version of the format.
    Version(u32),
}

impl Failure {
    fn to_words(self, rank: usize) -> (u32, u32) {
        let (reason, detail) = match self {
            Failure::Call => (1, 0),
            Failure::Size(size) => (2, size),
            Failure::Version(version) => (3, version),
        };
        (reason << 16 | (rank as u32 & 0xffff), detail)
    }

    fn from_words(word: u32, detail: u32) -> Option<(Failure, u32)> {
        let failure = match word >> 16 {
            0 => return None,
            2 => Failure::Size(detail),
            3 => Failure::Version(detail),
            _ => Failure::Call,
        };
        Some((failure, word & 0xffff))
    }
}

/// What the header of a file states.
pub struct Header {
    pub version: u32,
    pub size: u32,
}

impl Header {
    /// Returns `None` if the file is empty: rank 0 has not written it yet.
    pub fn read(file: &File) -> Result<Option<Header>> {
        let mut bytes = [0; 16];
        let len = file.read_at(&mut bytes, 0).map_err(|e| Error::io(format!("cannot be read: {e}")))?;
        if len == 0 {
            return Ok(None);
        }
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let header = Header { version: word(8), size: word(12) };
        let has_size = header.version != VERSION || (1..=MAX_RANKS).contains(&(header.size as usize));
        match len == bytes.len() && bytes[..8] == MAGIC && has_size {
            true => Ok(Some(header)),
            false => Err(Error::io("not the file of a communicator; remove it or choose another path")),
        }
    }

    pub fn write(file: &File, size: usize) -> std::io::Result<()> {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_ne_bytes());
        bytes[12..16].copy_from_slice(&(size as u32).to_ne_bytes());
        file.write_all_at(&bytes, 0)
    }
}

fn read_word(file: &File, offset: usize) -> u32 {
    let mut word = [0; 4];
    // A file that is too short has zeros: its rank 0 has not completed it.
    file.read_exact_at(&mut word, offset as u64).map_or(0, |()| u32::from_ne_bytes(word))
}

/// Returns the process of rank 0 and the namespace of its number, from a file that is not mapped.
pub fn first_process(file: &File) -> (u32, u32) {
    (read_word(file, PAGE + PID), read_word(file, PAGE + PID_NAMESPACE))
}

/// Makes the group of a file fail, from a rank that cannot join it. A complete group is not
/// affected.
pub fn refuse(file: &File, header: &Header, rank: usize, failure: Failure) {
    let ranks = (header.size as usize).min(MAX_RANKS);
    let is_complete = header.version == VERSION && (0..ranks).all(|rank| read_word(file, PAGE + 3 * rank * LINE) != ABSENT);
    if !is_complete {
        let (word, detail) = failure.to_words(rank);
        // An error leaves the other ranks to their timeouts.
        let _ = file.write_all_at(&detail.to_ne_bytes(), FAILURE_DETAIL as u64);
        let _ = file.write_all_at(&word.to_ne_bytes(), FAILURE as u64);
    }
}

/// The mapped file of a group.
pub struct Segment {
    file: File,
    map: SharedMapping,
    size: usize,
}

/// Bytes before the rings, which are always allocated.
fn fixed_bytes(size: usize) -> usize {
    slots_at(size) + (size * SLOTS as usize * SLOT_STRIDE).next_multiple_of(PAGE)
}

fn slots_at(size: usize) -> usize {
    PAGE + ((3 * size + 2 * size * size) * LINE).next_multiple_of(PAGE)
}

/// The length of the file of a group.
pub fn file_bytes(size: usize) -> usize {
    fixed_bytes(size) + size * size * RING_BYTES
}

impl Segment {
    /// Allocates the memory of an empty file with a header.
    pub fn create(file: File, size: usize) -> Result<Segment> {
        files::reserve(&file, 0, fixed_bytes(size) as u64)?;
        // Last, since the other ranks wait for this length.
        files::set_len(&file, file_bytes(size) as u64)?;
        Segment::open(file, size)
    }

    /// Maps a file that has `file_bytes(size)` bytes.
    pub fn open(file: File, size: usize) -> Result<Segment> {
        let map = SharedMapping::new(&file, file_bytes(size))?;
        Ok(Segment { file, map, size })
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// The first failure of a rank.
    pub fn failure(&self) -> Option<(Failure, u32)> {
        let word = self.map.word(FAILURE).load(Ordering::Acquire);
        Failure::from_words(word, self.map.word(FAILURE_DETAIL).load(Ordering::Relaxed))
    }

    /// Makes all later calls of all ranks fail.
    pub fn fail(&self, rank: usize) {
        let (word, _) = Failure::Call.to_words(rank);
        // The first failure stays.
        let _ = self.map.word(FAILURE).compare_exchange(0, word, Ordering::AcqRel, Ordering::Relaxed);
    }

    fn line(&self, line: usize) -> Counter<'_> {
        let at = PAGE + line * LINE;
        Counter { value: self.map.word(at), sleepers: self.map.word(at + 4) }
    }

    /// One of `ABSENT`, `JOINED`, `LEFT`.
    pub fn state(&self, rank: usize) -> Counter<'_> {
        self.line(3 * rank)
    }

    /// Chunks of collective operations that the rank has written. Those that it need not write
    /// count.
    pub fn posted(&self, rank: usize) -> Counter<'_> {
        self.line(3 * rank + 1)
    }

    /// Chunks of collective operations that the rank has read from all others.
    pub fn done(&self, rank: usize) -> Counter<'_> {
        self.line(3 * rank + 2)
    }

    /// Bytes that a rank has written to a ring.
    pub fn head(&self, from: usize, to: usize) -> Counter<'_> {
        self.line(3 * self.size + 2 * (from * self.size + to))
    }

    /// Bytes that a rank has read from a ring.
    pub fn tail(&self, from: usize, to: usize) -> Counter<'_> {
        self.line(3 * self.size + 2 * (from * self.size + to) + 1)
    }

    /// Writes the process of a rank.
    pub fn set_process(&self, rank: usize, pid: u32, namespace: u32) {
        let at = PAGE + 3 * rank * LINE;
        self.map.word(at + PID).store(pid, Ordering::Relaxed);
        self.map.word(at + PID_NAMESPACE).store(namespace, Ordering::Relaxed);
    }

    /// Returns the process of a rank that has joined, and the namespace of its number.
    pub fn process(&self, rank: usize) -> (u32, u32) {
        let at = PAGE + 3 * rank * LINE;
        let word = |offset| self.map.word(at + offset).load(Ordering::Relaxed);
        (word(PID), word(PID_NAMESPACE))
    }

    /// Returns whether the rank holds its lock. Not for the own rank.
    pub fn is_locked(&self, rank: usize) -> bool {
        // If the system cannot answer, the timeouts of the calls remain.
        file_locks::is_locked(&self.file, rank_lock(rank)).unwrap_or(true)
    }

    /// Returns the offset of the call in a slot. The payload follows one line later.
    pub fn slot(&self, rank: usize, chunk: u32) -> Slot<'_> {
        let slot = rank * SLOTS as usize + (chunk % SLOTS) as usize;
        Slot { map: &self.map, at: slots_at(self.size) + slot * SLOT_STRIDE }
    }

    /// Allocates the memory of a ring.
    pub fn reserve_ring(&self, from: usize, to: usize) -> Result<()> {
        files::reserve(&self.file, self.ring_at(from, to) as u64, RING_BYTES as u64)
    }

    fn ring_at(&self, from: usize, to: usize) -> usize {
        fixed_bytes(self.size) + (from * self.size + to) * RING_BYTES
    }

    /// Copies bytes to a position of a ring, before its end.
    pub fn write_ring(&self, from: usize, to: usize, position: usize, bytes: &[u8]) {
        assert!(position + bytes.len() <= RING_BYTES);
        self.map.write(self.ring_at(from, to) + position, bytes);
    }

    /// Copies bytes from a position of a ring, before its end.
    pub fn read_ring(&self, from: usize, to: usize, position: usize, bytes: &mut [u8]) {
        assert!(position + bytes.len() <= RING_BYTES);
        self.map.read(self.ring_at(from, to) + position, bytes);
    }
}

/// A chunk of a rank.
pub struct Slot<'a> {
    map: &'a SharedMapping,
    at: usize,
}

impl Slot<'_> {
    /// Writes the call to which the chunk belongs.
    pub fn set_call(&self, call: u64) {
        self.map.write(self.at, &call.to_ne_bytes());
    }

    pub fn call(&self) -> u64 {
        let mut call = [0; 8];
        self.map.read(self.at, &mut call);
        u64::from_ne_bytes(call)
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= SLOT_BYTES);
        self.map.write(self.at + LINE + offset, bytes);
    }

    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset + bytes.len() <= SLOT_BYTES);
        self.map.read(self.at + LINE + offset, bytes);
    }

    /// Adds the numbers at the start of the chunk.
    pub fn add_numbers(&self, sums: &mut [f32]) {
        assert!(size_of_val(sums) <= SLOT_BYTES);
        self.map.add_numbers(self.at + LINE, sums);
    }
}

/// A word that one rank changes and others wait for, with the number of threads that sleep.
#[derive(Clone, Copy)]
pub struct Counter<'a> {
    value: &'a AtomicU32,
    sleepers: &'a AtomicU32,
}

impl Counter<'_> {
    pub fn load(self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Changes the value after all previous writes, and wakes the threads that wait for it.
    pub fn publish(self, value: u32) {
        self.value.store(value, Ordering::Release);
        // Either this thread sees the sleeper, or the sleeper sees the value: both write before the
        // fence and read after it.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            wake_all(self.value);
        }
    }

    /// Sleeps while the counter has this value, at most for `timeout`. It may return earlier.
    pub fn sleep(self, value: u32, timeout: Duration) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.value.load(Ordering::Relaxed) == value {
            wait_while(self.value, value, timeout);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}
