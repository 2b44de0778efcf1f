//! The device as the core uses it: the executor, and the measured costs of its work.

use std::sync::Arc;
use std::time::Duration;

use super::clock::Clock;
use super::step_time::{StepTimeModel, StepTimer};
use super::transfers::{DiskTime, EndedTransfer, MovedBlocks, SwapFile, TierMoves};
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::kv::BlockId;
use crate::kv::connector::{Connector, DeviceBlocks};
use crate::scheduler::simulate::StepLoad;
use crate::scheduler::{Costs, Scheduler};
use crate::types::batch::{BlockMove, Tail};

/// A step moves at most this many times the bytes between the tiers that it copies for exports: by
/// default 16 MiB in each direction, which take 2 to 4 ms. A block is one copy, without an
/// encoding.
const TIER_MOVES: usize = 8;

/// The executor and the measurements of its steps and transfers.
pub struct Device {
    pub executor: Box<dyn Executor>,
    block_bytes: usize,
    /// The host tier, if it is a file. A tier in memory belongs to the executor.
    swap_file: Option<SwapFile>,
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

/// Returns how many blocks a step moves between the tiers at most in each direction.
pub fn max_moves(executor: &dyn Executor) -> usize {
    (executor.max_transfer_bytes().saturating_mul(TIER_MOVES) / block_bytes(executor).max(1)).max(1)
}

fn block_bytes(executor: &dyn Executor) -> usize {
    executor.kv_part_bytes().iter().sum()
}

impl Device {
    pub fn new(executor: Box<dyn Executor>, swap_file: Option<SwapFile>, clock: Arc<dyn Clock>) -> Device {
        let block_bytes = block_bytes(&*executor);
        Device { executor, block_bytes, swap_file, timer: StepTimer::default(), clock, swaps: SwapCounts::default() }
    }

    /// Completes the transfers of the swap file that have ended, and limits those of this step.
    pub fn complete_disk_transfers(&mut self, ended: &[EndedTransfer], scheduler: &mut Scheduler) {
        let Some(file) = &mut self.swap_file else { return };
        let mut disk_time = DiskTime::default();
        for &end in ended {
            match file.complete(end, &mut disk_time) {
                Some(block) if scheduler.finish_read(block) => {}
                Some(block) => file.take(block).into_iter().for_each(|buffer| file.recycle(buffer)),
                None => self.swaps.failures += !end.succeeded as u64,
            }
        }
        if disk_time.blocks > 0 {
            self.timer.record_move(disk_time.blocks, disk_time.took);
        }
        scheduler.lower_limit_out(file.room());
    }

    /// Starts to read blocks that return from the swap file.
    fn read_ahead(&mut self, scheduler: &mut Scheduler) {
        let Some(file) = &mut self.swap_file else { return };
        while file.reads_left() > 0
            && let Some(block) = scheduler.next_to_read()
        {
            file.read(block);
        }
    }

    /// Returns whether the end of a disk transfer will wake the stepping thread.
    pub fn waits_for_disk(&self) -> bool {
        self.swap_file.as_ref().is_some_and(SwapFile::is_busy)
    }

    /// Makes the transfers that the scheduler has planned, and reports their results to it. Returns
    /// false if a transfer back to the device has failed, so that a plan must be rolled back first:
    /// `roll_back` does this.
    pub fn move_blocks(&mut self, scheduler: &mut Scheduler, roll_back: impl FnOnce(&mut Scheduler)) -> bool {
        let moves = scheduler.moves();
        if moves.is_empty() {
            scheduler.record_moves(true, true);
            self.read_ahead(scheduler);
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
        self.swap_file.iter_mut().for_each(SwapFile::drop_contents);
        self.read_ahead(scheduler);
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
        let Some(file) = &mut self.swap_file else { return self.executor.swap_out(moves) };
        moves.iter().try_for_each(|&BlockMove { device, host }| {
            let mut contents = file.take_buffer()?;
            self.executor.read_blocks(&[device], Tail { blocks: 0, slots: 0 }, &mut contents)?;
            file.write(host, contents);
            Ok(())
        })
    }

    fn move_in(&mut self, moves: &[BlockMove]) -> Result<()> {
        let Some(file) = &mut self.swap_file else { return self.executor.swap_in(moves) };
        moves.iter().try_for_each(|&BlockMove { device, host }| {
            let contents = file.take(host).ok_or_else(|| Error::io("the swap file cannot be read"))?;
            let written = self.executor.write_blocks(&[device], &contents);
            file.recycle(contents);
            written
        })
    }
}
