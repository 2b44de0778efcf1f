//! The device as the core uses it: the executor, and the measured costs of its work.

use std::sync::Arc;
use std::time::Duration;

use super::clock::Clock;
use super::step_time::{StepTimeModel, StepTimer};
use super::transfers::{CompletedTransfer, EndedTransfer, MovedBlocks, SwapFile, TierMoves};
use crate::error::Result;
use crate::executor::Executor;
use crate::kv::BlockId;
use crate::kv::connector::{Connector, DeviceBlocks};
use crate::scheduler::simulate::StepLoad;
use crate::scheduler::{Costs, Scheduler};
use crate::types::batch::{BlockMove, Tail};

/// A step moves at most this many times the bytes between the tiers that it copies for exports: by
/// default 16 MiB in each direction, which take 2 to 4 ms on most machines. A block is one copy,
/// without an encoding.
const TIER_MOVES: usize = 8;
/// Maximum time of the transfers of a step between the tiers in each direction. It applies where
/// memory is slower, by the measured times.
const MAX_MOVE_TIME: Duration = Duration::from_micros(2500);
/// Bytes that a step moves in each direction until the time of a transfer is known. The first use
/// of the host tier also takes the time in which the system clears its memory: 4 ms for 2 MiB on
/// some virtual machines.
const FIRST_MOVES: usize = 1 << 20;

/// The executor and the measurements of its steps and transfers.
pub struct Device {
    pub executor: Box<dyn Executor>,
    block_bytes: usize,
    /// The host tier, if it is a file. A tier in memory belongs to the executor.
    swap_file: Option<SwapFile>,
    /// Time of the last step before which a transfer of the file had ended, or none was pending.
    disk_ended_at: Duration,
    timer: StepTimer,
    clock: Arc<dyn Clock>,
    /// Counters of the blocks transferred between the tiers.
    pub swaps: SwapCounts,
}

/// Counters of the transfers between the tiers.
#[derive(Default)]
pub struct SwapCounts {
    pub blocks_out: u64,
    pub blocks_in: u64,
    pub failures: u64,
}

/// If a disk completes no transfer for this time, the sequences that it has not taken are
/// recomputed.
const DISK_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns how many blocks a step moves between the tiers at most in each direction, if it copies
/// at most `transfer_bytes` bytes for exports.
pub fn max_moves(transfer_bytes: usize, block_bytes: usize) -> usize {
    (transfer_bytes.saturating_mul(TIER_MOVES) / block_bytes.max(1)).max(1)
}

impl Device {
    pub fn new(executor: Box<dyn Executor>, swap_file: Option<SwapFile>, clock: Arc<dyn Clock>) -> Device {
        let block_bytes = executor.kv_part_bytes().iter().sum();
        let (timer, swaps) = (StepTimer::default(), SwapCounts::default());
        Device { executor, block_bytes, swap_file, disk_ended_at: Duration::ZERO, timer, clock, swaps }
    }

    /// Limits the transfers between the tiers that the scheduler plans for one step.
    pub fn limit_moves(&self, costs: Costs, scheduler: &mut Scheduler) {
        let by_bytes = max_moves(self.executor.max_transfer_bytes(), self.block_bytes);
        // A file's transfers take place outside the step.
        let by_time = match costs.block > 0.0 {
            _ if self.swap_file.is_some() => usize::MAX,
            true => (MAX_MOVE_TIME.as_secs_f64() / costs.block) as usize,
            false => FIRST_MOVES / self.block_bytes.max(1),
        };
        scheduler.limit_moves(by_bytes.min(by_time).max(1));
    }

    /// Completes the transfers of the swap file that have ended, and limits those of this step,
    /// which begins at `now`.
    pub fn complete_disk_transfers(&mut self, ended: &[EndedTransfer], now: Duration, scheduler: &mut Scheduler) {
        let Some(file) = &mut self.swap_file else { return };
        if !ended.is_empty() || !file.is_busy() {
            self.disk_ended_at = now;
        }
        let (mut blocks, mut disk_time) = (0, Duration::ZERO);
        for CompletedTransfer { read, took } in ended.iter().filter_map(|&ended| file.complete(ended)) {
            match read {
                Some((block, true)) => scheduler.finish_read(block),
                Some((block, false)) => self.swaps.failures += scheduler.fail_read(block) as u64,
                None => {}
            }
            if let Some(took) = took {
                (blocks, disk_time) = (blocks + 1, disk_time + took);
            }
        }
        if blocks > 0 {
            self.timer.record_move(blocks, disk_time);
        }
        scheduler.lower_limit_out(file.room());
        if now.saturating_sub(self.disk_ended_at) >= DISK_TIMEOUT && scheduler.drop_queued_out() {
            self.disk_ended_at = now;
        }
    }

    /// Returns whether the end of a disk transfer will wake the stepping thread.
    pub fn waits_for_disk(&self) -> bool {
        self.swap_file.as_ref().is_some_and(SwapFile::is_busy)
    }

    /// Makes the transfers that the scheduler has planned, and reports their results to it. Then
    /// starts to read blocks that return from the swap file. Returns false if a transfer back
    /// to the device has failed, so that a plan must be rolled back first: `roll_back` does
    /// this.
    pub fn move_blocks(&mut self, scheduler: &mut Scheduler, roll_back: impl FnOnce(&mut Scheduler)) -> bool {
        let have_returned = self.make_moves(scheduler, roll_back);
        if let Some(file) = &mut self.swap_file {
            file.drop_contents();
            while file.reads_left() > 0
                && let Some(block) = scheduler.next_to_read()
            {
                file.read(block);
            }
        }
        have_returned
    }

    fn make_moves(&mut self, scheduler: &mut Scheduler, roll_back: impl FnOnce(&mut Scheduler)) -> bool {
        let moves = scheduler.moves();
        if moves.is_empty() {
            scheduler.record_moves(true, true);
            return true;
        }
        let began = self.clock.now();
        // The scheduler has planned as many transfers as a step may make.
        let mut transfers = TierMoves::new(moves, self.block_bytes);
        while transfers.copy(self, usize::MAX) > 0 {}
        let MovedBlocks { out, back } = transfers.poll().unwrap_or(MovedBlocks { out: true, back: true });
        // A failed transfer has no meaningful duration. With a file, the disk takes the time.
        if out && back && self.swap_file.is_none() {
            self.timer.record_move(moves.out.len() + moves.back.len(), self.clock.now().saturating_sub(began));
        }
        self.swaps.blocks_out += if out { moves.out.len() as u64 } else { 0 };
        self.swaps.blocks_in += if back { moves.back.len() as u64 } else { 0 };
        self.swaps.failures += !out as u64 + !back as u64;
        if !back {
            roll_back(scheduler);
        }
        scheduler.record_moves(out, back);
        back
    }

    /// Records the duration of a step that began at `began`.
    pub fn record_step(&mut self, load: StepLoad, began: Duration) {
        self.timer.record_step(load, self.clock.now().saturating_sub(began));
    }

    /// Returns the measured costs of swapping and recomputation.
    pub fn costs(&self) -> Costs {
        self.timer.costs()
    }

    /// Returns the measured step times.
    pub fn step_times(&self) -> StepTimeModel {
        self.timer.model
    }
}

impl DeviceBlocks for Device {
    fn read_block(&mut self, block: BlockId, filled_slots: Option<usize>, out: &mut Vec<u8>) -> Result<()> {
        let tail = Tail { blocks: filled_slots.is_some() as usize, slots: filled_slots.unwrap_or(0) };
        self.executor.read_blocks(&[block], tail, out)
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<()> {
        self.executor.write_blocks(&[block], bytes)
    }

    fn move_out(&mut self, moves: &[BlockMove]) -> Result<()> {
        match &mut self.swap_file {
            None => self.executor.swap_out(moves),
            Some(file) => file.move_out(&mut *self.executor, moves),
        }
    }

    fn move_in(&mut self, moves: &[BlockMove]) -> Result<()> {
        match &mut self.swap_file {
            None => self.executor.swap_in(moves),
            Some(file) => file.move_in(&mut *self.executor, moves),
        }
    }
}
