//! The device as the core uses it: the executor, and the measured costs of its work.

use std::sync::Arc;
use std::time::Duration;

use super::clock::Clock;
use super::step_time::{StepTimeModel, StepTimer};
use super::transfers::{MovedBlocks, TierMoves};
use crate::error::Result;
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

impl Device {
    pub fn new(executor: Box<dyn Executor>, clock: Arc<dyn Clock>) -> Device {
        let block_bytes = executor.kv_part_bytes().iter().sum();
        Device { executor, block_bytes, timer: StepTimer::default(), clock, swaps: SwapCounts::default() }
    }

    /// Limits the transfers between the tiers that the scheduler plans for one step.
    pub fn limit_moves(&self, scheduler: &mut Scheduler) {
        let max_bytes = self.executor.max_transfer_bytes().saturating_mul(TIER_MOVES);
        scheduler.limit_moves(max_bytes / self.block_bytes.max(1));
    }

    /// Makes the transfers that the scheduler has planned, and reports their results to it. Returns
    /// false if a transfer back to the device has failed, so that a plan must be rolled back first:
    /// `roll_back` does this.
    pub fn move_blocks(&mut self, scheduler: &mut Scheduler, roll_back: impl FnOnce(&mut Scheduler)) -> bool {
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
        // A failed transfer has no meaningful duration.
        if out && back {
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
        self.executor.swap_out(moves)
    }

    fn move_in(&mut self, moves: &[BlockMove]) -> Result<()> {
        self.executor.swap_in(moves)
    }
}
