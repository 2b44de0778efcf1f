//! The transfers between the device and the host tier that a step needs before it computes.

use crate::kv::connector::{Connector, DeviceBlocks, Progress, TransferId};
use crate::types::batch::{BlockMove, Moves};

/// The transfers of one step: first all that go to the host tier, then all that return. Other
/// threads have no part in them.
pub struct TierMoves<'a> {
    out: Direction<'a>,
    back: Direction<'a>,
    block_bytes: usize,
    is_polled: bool,
}

/// The transfers in one direction.
struct Direction<'a> {
    pending: &'a [BlockMove],
    succeeded: bool,
}

/// Whether all transfers to the host tier, and all back to the device, have succeeded. After a
/// failure, the contents of all target blocks of the direction are undefined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MovedBlocks {
    pub out: bool,
    pub back: bool,
}

impl<'a> Direction<'a> {
    fn new(pending: &'a [BlockMove]) -> Direction<'a> {
        Direction { pending, succeeded: true }
    }

    /// Makes the next `max_blocks` transfers. Returns their number. A failure ends the direction.
    fn advance(&mut self, max_blocks: usize, copy: impl FnOnce(&[BlockMove]) -> bool) -> usize {
        let (now, later) = self.pending.split_at(max_blocks.min(self.pending.len()));
        self.succeeded = copy(now);
        self.pending = if self.succeeded { later } else { &[] };
        now.len()
    }
}

impl<'a> TierMoves<'a> {
    /// Starts the transfers of blocks with `block_bytes` bytes.
    pub fn new(moves: &'a Moves, block_bytes: usize) -> TierMoves<'a> {
        TierMoves {
            out: Direction::new(&moves.out),
            back: Direction::new(&moves.back),
            block_bytes: block_bytes.max(1),
            is_polled: moves.is_empty(),
        }
    }
}

impl Connector for TierMoves<'_> {
    type Finished = MovedBlocks;

    fn copy(&mut self, device: &mut dyn DeviceBlocks, max_bytes: usize) -> usize {
        let max_blocks = (max_bytes / self.block_bytes).max(1);
        let copied = match self.out.pending.is_empty() {
            false => self.out.advance(max_blocks, |moves| device.move_out(moves).is_ok()),
            true if self.back.pending.is_empty() => 0,
            true => self.back.advance(max_blocks, |moves| device.move_in(moves).is_ok()),
        };
        copied.saturating_mul(self.block_bytes)
    }

    /// No other thread completes a transfer.
    fn complete(&mut self, _id: TransferId) {}

    fn poll(&mut self) -> Option<MovedBlocks> {
        let is_finished = self.progress() == Progress::Idle && !std::mem::replace(&mut self.is_polled, true);
        is_finished.then_some(MovedBlocks { out: self.out.succeeded, back: self.back.succeeded })
    }

    fn progress(&self) -> Progress {
        match self.out.pending.is_empty() && self.back.pending.is_empty() {
            true => Progress::Idle,
            false => Progress::Copying,
        }
    }

    fn cancel_all(&mut self) {
        (self.out.pending, self.back.pending, self.is_polled) = (&[], &[], true);
    }
}
