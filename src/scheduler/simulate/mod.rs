//! Forecast of the first token of a request: simulates the next steps with the policies of the
//! scheduler.
//!
//! The caller passes the cost of a step as a function, since the scheduler knows no durations.

mod load;
mod simulation;
mod snapshot;

use std::time::Duration;

pub use load::StepLoad;
#[cfg(test)]
pub use load::test_times;
use simulation::{AdmissionSimulation, SimulatedSequence};
use snapshot::SnapshotRunning;
pub use snapshot::{PendingSequence, SchedulerSnapshot};

use super::{Policies, RankInputs};
use crate::error::Result;
use crate::kv::Paging;

/// A waiting generation. The type is small, since there may be many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitingEntry {
    /// Number of tokens to compute, at least 1.
    pub tokens: u32,
    /// Maximum number of tokens to generate.
    pub max_new_tokens: u32,
    pub priority: i32,
    /// Arrival time in microseconds.
    pub at: u64,
}

impl WaitingEntry {
    pub fn new(tokens: usize, max_new_tokens: usize, priority: i32, at: Duration) -> WaitingEntry {
        let short = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        WaitingEntry { tokens: short(tokens).max(1), max_new_tokens: short(max_new_tokens), priority, at: at.as_micros() as u64 }
    }
}

/// The limits and policies that determine the composition of steps.
pub struct Capacity {
    pub seqs: usize,
    pub tokens: usize,
    pub chunk: usize,
    pub paging: Paging,
    pub policies: Policies,
}

/// A request that could be added.
#[derive(Debug, Clone, Copy)]
pub struct CandidateRequest {
    pub waiting: WaitingEntry,
    /// Number of sequences that it needs places for.
    pub width: usize,
}

/// The result of a forecast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forecast {
    /// Number of requests that wait before it, and the number of tokens that they must compute.
    pub requests_before: usize,
    pub tokens_before: usize,
    /// Whether the next step would start it.
    pub fits_now: bool,
    /// Cost of all steps up to its first token. `None` without a cost function.
    pub first_token: Option<f64>,
}

impl SchedulerSnapshot {
    /// Forecasts a request that arrives now. `waiting` is in order of arrival. `step_cost` returns
    /// the cost of steps with a load, for example their duration in seconds.
    pub fn forecast(
        &self,
        capacity: &Capacity,
        waiting: &[WaitingEntry],
        candidate: CandidateRequest,
        step_cost: Option<&dyn Fn(StepLoad) -> f64>,
    ) -> Result<Forecast> {
        let Policies { order, allocation, .. } = &capacity.policies;
        let common_rank = order.common_rank();
        let rank_of = |entry: &WaitingEntry| {
            if let Some(rank) = common_rank {
                return rank;
            }
            let expected = || self.length_predictor.expect(entry.max_new_tokens as usize, 0);
            order.rank(&RankInputs { at: entry.at, priority: entry.priority, expected: &expected })
        };
        let rank = rank_of(&candidate.waiting);
        let started = |sequence: &PendingSequence| SimulatedSequence::from_pending(sequence, &self.length_predictor, &**allocation);
        let (mut requests_before, mut tokens_before) = (0, 0);
        let (mut generator, mut line) = (self.length_predictor.generator(), Vec::new());
        // Preempted running sequences can enter the queue too.
        line.try_reserve(self.preempted.len() + waiting.len() + self.running.len() + 1)?;
        line.extend(self.preempted.iter().filter(|sequence| sequence.rank <= rank).map(started));
        let fits = line.is_empty();
        let mut is_sorted = line.is_sorted_by_key(|sequence| sequence.rank);
        let mut last_rank = line.last().map_or(0, |sequence| sequence.rank);
        for entry in waiting {
            let entry_rank = rank_of(entry);
            if entry_rank <= rank {
                requests_before += 1;
                tokens_before += entry.tokens as usize;
                is_sorted &= last_rank <= entry_rank;
                last_rank = entry_rank;
                let output = generator.draw(entry.max_new_tokens as usize);
                line.push(SimulatedSequence::new(entry, output, entry_rank, &**allocation));
            }
        }
        // In first-come order, the queue is sorted already.
        if !is_sorted {
            // Equal ranks keep the order of arrival.
            line.iter_mut().enumerate().for_each(|(place, sequence)| sequence.order = place as u32);
            line.sort_unstable_by_key(|sequence| (sequence.rank, sequence.order));
        }
        let simulated_candidate = SimulatedSequence::new(&candidate.waiting, 1, rank, &**allocation);
        line.push(simulated_candidate);
        let fits_now = fits && requests_before == 0 && self.fits_now(capacity, &simulated_candidate, candidate.width);
        let mut running = Vec::new();
        running.try_reserve(self.running.len().max(capacity.seqs))?;
        running.extend(self.running.iter().map(started));
        let first_token = step_cost.map(|step_cost| {
            AdmissionSimulation::new(capacity, step_cost, rank, running, line.into(), self.spare_blocks as i64).until_first_token()
        });
        Ok(Forecast { requests_before, tokens_before, fits_now, first_token })
    }

    /// Returns whether a request fits if no other request is before it. Younger running sequences
    /// would be preempted for it.
    fn fits_now(&self, capacity: &Capacity, candidate: &SimulatedSequence, width: usize) -> bool {
        let Policies { allocation, batching, .. } = &capacity.policies;
        let blocks =
            |sequence: &SimulatedSequence| capacity.paging.max_blocks(sequence.held_tokens(), sequence.prefill.clamp(1, capacity.chunk));
        let younger = self.running.iter().filter(|sequence| sequence.rank > candidate.rank);
        let (free_entries, free_blocks) = younger.fold((self.entries, self.spare_blocks), |(free_entries, free_blocks), sequence| {
            let sequence = SimulatedSequence::from_pending(sequence, &self.length_predictor, &**allocation);
            (free_entries + 1, free_blocks + blocks(&sequence))
        });
        let running = SnapshotRunning { running: &self.running, max_tokens: capacity.tokens };
        batching.step_budget(&running).new_groups && width <= free_entries && blocks(candidate) <= free_blocks
    }
}

#[cfg(test)]
mod tests;
