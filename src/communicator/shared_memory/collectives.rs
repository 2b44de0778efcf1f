//! Operations of all ranks. The chunks of all operations are numbered, the same on all ranks. Chunk
//! n of a rank is in its slot n % SLOTS, which is free when all ranks are done with chunk n -
//! SLOTS.

use std::ops::Range;

use super::SharedMemory;
use super::segment::{SLOT_BYTES, SLOTS, Slot};
use super::waiting::{Limits, group_error};
use crate::error::Result;

/// Chunks that a rank writes before it reads the first.
const AHEAD: usize = 2;

/// The operation of a call, in the first byte of the word that identifies the call.
#[derive(Debug, Clone, Copy)]
pub enum Operation {
    Broadcast = 1,
    AllGather = 2,
    AllToAll = 3,
    AllReduce = 4,
}

impl Operation {
    fn call(self, bytes: usize) -> u64 {
        (self as u64) << 56 | (bytes as u64 & ((1 << 56) - 1))
    }
}

/// The use of a slot.
pub enum Access {
    /// The slot of this rank, for the other ranks.
    Write,
    /// The slot of a rank, this one included.
    Read(usize),
}

/// Describes a call in an error.
fn describe(call: u64) -> String {
    let names = ["nothing", "broadcast", "all_gather", "all_to_all", "all_reduce"];
    let name = names.get((call >> 56) as usize).unwrap_or(&"an unknown function");
    format!("{name} with {} bytes", call & ((1 << 56) - 1))
}

/// Cuts `bytes` into chunks. There is at least one, so that each call is compared.
fn chunk(bytes: usize, chunk_bytes: usize, i: usize) -> Range<usize> {
    i * chunk_bytes..bytes.min((i + 1) * chunk_bytes)
}

impl SharedMemory {
    /// Copies bytes from one rank to all others. The root waits only for free slots.
    pub(super) fn copy_to_all(&self, bytes: &mut [u8], root: usize, limits: &Limits) -> Result<()> {
        let call = Operation::Broadcast.call(bytes.len());
        let first = self.segment.done(self.rank).load();
        for i in 0..bytes.len().div_ceil(SLOT_BYTES).max(1) {
            let number = first.wrapping_add(i as u32);
            let range = chunk(bytes.len(), SLOT_BYTES, i);
            match self.rank == root {
                true => self.free_slot(number, call, limits)?.write(0, &bytes[range]),
                false => self.posted_slot(root, number, call, limits)?.read(0, &mut bytes[range]),
            }
            self.segment.posted(self.rank).publish(number.wrapping_add(1));
            self.segment.done(self.rank).publish(number.wrapping_add(1));
        }
        Ok(())
    }

    /// Exchanges `bytes` bytes in chunks. `access` writes a range to a slot of this rank, then
    /// reads it from the slot of each rank, in the order of the ranks.
    pub(super) fn exchange(
        &self,
        operation: Operation,
        (bytes, chunk_bytes): (usize, usize),
        limits: &Limits,
        mut access: impl FnMut(Access, Range<usize>, Slot),
    ) -> Result<()> {
        let call = operation.call(bytes);
        let chunks = bytes.div_ceil(chunk_bytes).max(1);
        let first = self.segment.done(self.rank).load();
        let mut written = 0;
        for i in 0..chunks {
            while written < chunks.min(i + AHEAD) {
                let number = first.wrapping_add(written as u32);
                let slot = self.free_slot(number, call, limits)?;
                access(Access::Write, chunk(bytes, chunk_bytes, written), slot);
                self.segment.posted(self.rank).publish(number.wrapping_add(1));
                written += 1;
            }
            let number = first.wrapping_add(i as u32);
            for rank in 0..self.segment.size() {
                let slot = self.posted_slot(rank, number, call, limits)?;
                access(Access::Read(rank), chunk(bytes, chunk_bytes, i), slot);
            }
            self.segment.done(self.rank).publish(number.wrapping_add(1));
        }
        Ok(())
    }

    /// Returns the slot for a chunk of this rank, when all ranks have read its previous contents.
    fn free_slot(&self, number: u32, call: u64, limits: &Limits) -> Result<Slot<'_>> {
        for rank in (0..self.segment.size()).filter(|&rank| rank != self.rank) {
            // A rank that makes other calls than this one may be done with more chunks.
            self.wait(self.segment.done(rank), rank, limits, |done| (number.wrapping_sub(done) as i32) < SLOTS as i32)?;
        }
        let slot = self.segment.slot(self.rank, number);
        slot.set_call(call);
        Ok(slot)
    }

    /// Returns the slot with a chunk of another rank, when it has written it.
    fn posted_slot(&self, rank: usize, number: u32, call: u64, limits: &Limits) -> Result<Slot<'_>> {
        self.wait(self.segment.posted(rank), rank, limits, |posted| posted.wrapping_sub(number).wrapping_sub(1) < SLOTS)?;
        let slot = self.segment.slot(rank, number);
        match slot.call() {
            theirs if theirs == call => Ok(slot),
            theirs => Err(group_error(format!(
                "rank {rank} has called {}, and this rank {}; all ranks must make the same calls",
                describe(theirs),
                describe(call)
            ))),
        }
    }
}
