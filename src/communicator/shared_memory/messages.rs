//! Messages from one rank to another, through a ring of bytes: the length, and the bytes.

use std::sync::atomic::Ordering;

use super::SharedMemory;
use super::segment::RING_BYTES;
use super::waiting::{Limits, group_error};
use crate::error::Result;

/// Bytes that are copied before the other rank sees them, so that both ranks copy at the same time.
const PIECE_BYTES: usize = 256 << 10;

const RING: u32 = RING_BYTES as u32;

impl SharedMemory {
    pub(super) fn write_message(&self, bytes: &[u8], to: usize, limits: &Limits) -> Result<()> {
        let ring = 1u64 << to;
        if self.rings.load(Ordering::Relaxed) & ring == 0 {
            self.segment.reserve_ring(self.rank, to)?;
            self.rings.fetch_or(ring, Ordering::Relaxed);
        }
        let mut head = self.segment.head(self.rank, to).load();
        self.push(&(bytes.len() as u64).to_ne_bytes(), to, &mut head, limits)?;
        for piece in bytes.chunks(PIECE_BYTES) {
            self.push(piece, to, &mut head, limits)?;
            self.segment.head(self.rank, to).publish(head);
        }
        if bytes.is_empty() {
            self.segment.head(self.rank, to).publish(head);
        }
        Ok(())
    }

    /// Copies bytes behind `head`. They are visible when the head is published, at the latest when
    /// the ring is full.
    fn push(&self, mut bytes: &[u8], to: usize, head: &mut u32, limits: &Limits) -> Result<()> {
        let (published, tail) = (self.segment.head(self.rank, to), self.segment.tail(self.rank, to));
        while !bytes.is_empty() {
            let mut free = RING.saturating_sub(head.wrapping_sub(tail.load()));
            if free == 0 {
                published.publish(*head);
                free = RING - self.wait(tail, to, limits, |tail| head.wrapping_sub(tail) < RING).map(|tail| head.wrapping_sub(tail))?;
            }
            let position = (*head % RING) as usize;
            let count = bytes.len().min(free as usize).min(RING_BYTES - position);
            self.segment.write_ring(self.rank, to, position, &bytes[..count]);
            *head = head.wrapping_add(count as u32);
            bytes = &bytes[count..];
        }
        Ok(())
    }

    pub(super) fn read_message(&self, bytes: &mut [u8], from: usize, limits: &Limits) -> Result<()> {
        let mut len = [0; 8];
        self.pop(&mut len, from, limits)?;
        let len = u64::from_ne_bytes(len);
        if len != bytes.len() as u64 {
            return Err(group_error(format!("rank {from} has sent {len} bytes, and {} were expected", bytes.len())));
        }
        self.pop(bytes, from, limits)
    }

    fn pop(&self, mut bytes: &mut [u8], from: usize, limits: &Limits) -> Result<()> {
        let (head, tail) = (self.segment.head(from, self.rank), self.segment.tail(from, self.rank));
        let mut read = tail.load();
        while !bytes.is_empty() {
            let end = self.wait(head, from, limits, |head| (1..=RING).contains(&head.wrapping_sub(read)))?;
            let position = (read % RING) as usize;
            let count = bytes.len().min(end.wrapping_sub(read) as usize).min(RING_BYTES - position);
            let (part, rest) = bytes.split_at_mut(count);
            self.segment.read_ring(from, self.rank, position, part);
            read = read.wrapping_add(count as u32);
            tail.publish(read);
            bytes = rest;
        }
        Ok(())
    }
}
