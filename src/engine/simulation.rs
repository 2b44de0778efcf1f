//! Forecast of the time to first token: simulates the next steps with the policies of the engine
//! and the measured step times.

use std::collections::VecDeque;
use std::time::Duration;

use super::step_time::{StepCosts, StepLoad, StepTimeModel};
use super::wait_queue::{WaitingEntry, WaitingTotals};
use crate::error::{Result, try_copy};
use crate::kv::Paging;
use crate::options::{AllocationPolicy, BatchingPolicy, OrderPolicy, Policies};
use crate::scheduler::{OutputLengthPredictor, RankInputs, order};

/// A sequence that has started, as of the last step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PendingSequence {
    /// Number of tokens to compute before the next token is sampled.
    pub prefill: usize,
    /// Number of computed tokens.
    pub computed: usize,
    /// Number of generated tokens, and their maximum.
    pub generated: usize,
    pub max_new_tokens: usize,
    /// Rank in the order of the scheduler. Smaller values come first.
    pub rank: u64,
}

/// A snapshot of the scheduler after the last step.
#[derive(Debug, Default)]
pub struct SchedulerSnapshot {
    pub step_time: StepTimeModel,
    pub length_predictor: OutputLengthPredictor,
    /// Running sequences, the oldest first.
    pub running: Vec<PendingSequence>,
    /// Preempted sequences.
    pub preempted: Vec<PendingSequence>,
    /// Sequences and KV blocks that are available after the needs of the running sequences.
    pub entries: usize,
    pub spare_blocks: usize,
    /// The current step: its load and its start time.
    pub step: Option<(StepLoad, Duration)>,
}

/// The limits and policies that determine the composition of steps.
#[derive(Debug, Clone)]
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
    /// Requests that wait before it.
    pub before: WaitingTotals,
    /// Whether the next step would start it.
    pub fits_now: bool,
    /// Time to first token in seconds. `None` if no step has been measured.
    pub first_token: Option<f64>,
}

/// Granularity: after every `FINENESS` simulated steps, the number of steps per generation grows by
/// one.
const FINENESS: usize = 32;
/// Maximum number of generations. They simulate about 3e9 steps, which no product of counts
/// overflows.
const MAX_TURNS: usize = 600;
/// Assumed maximum length of a sequence without a known one.
const MAX_SIMULATED_LEN: usize = 1 << 20;

impl SchedulerSnapshot {
    /// Reserves space for `sequences` running and `sequences` preempted sequences.
    pub fn reserve(&mut self, sequences: usize) -> Result<()> {
        self.running.try_reserve(sequences)?;
        Ok(self.preempted.try_reserve(sequences)?)
    }

    pub fn try_clone(&self) -> Result<SchedulerSnapshot> {
        Ok(SchedulerSnapshot { running: try_copy(&self.running)?, preempted: try_copy(&self.preempted)?, ..*self })
    }

    /// Forecasts a request that arrives now. `waiting` is in order of arrival.
    pub fn forecast(&self, capacity: &Capacity, waiting: &[WaitingEntry], candidate: CandidateRequest, now: Duration) -> Result<Forecast> {
        let Policies { order: policy, allocation, .. } = capacity.policies;
        let sampling = order(policy);
        let claim = |waits: &WaitingEntry| {
            let expected = self.length_predictor.expect(waits.max_new_tokens as usize, 0);
            sampling.rank(&RankInputs { at: waits.at, priority: waits.priority, expected })
        };
        let ranked = policy != OrderPolicy::Fcfs;
        let rank = if ranked { claim(&candidate.waiting) } else { 0 };
        let begun = |sequence: &PendingSequence| SimulatedSequence::from_pending(sequence, &self.length_predictor, allocation);
        let (mut before, mut generator, mut line) = (WaitingTotals::default(), self.length_predictor.generator(), Vec::new());
        // Preempted running sequences can enter the queue too.
        line.try_reserve(self.preempted.len() + waiting.len() + self.running.len() + 1)?;
        line.extend(self.preempted.iter().filter(|sequence| sequence.rank <= rank).map(begun));
        let fits = line.is_empty();
        for waits in waiting {
            let its = if ranked { claim(waits) } else { 0 };
            if its <= rank {
                before.enter(waits.tokens as usize);
                line.push(SimulatedSequence::new(
                    waits,
                    generator.draw(waits.max_new_tokens as usize).min(MAX_SIMULATED_LEN),
                    its,
                    allocation,
                ));
            }
        }
        if ranked {
            // Equal ranks keep the order of arrival.
            line.iter_mut().enumerate().for_each(|(place, sequence)| sequence.order = place);
            line.sort_unstable_by_key(|sequence| (sequence.rank, sequence.order));
        }
        line.push(SimulatedSequence::new(&candidate.waiting, 1, rank, allocation));
        let fits_now = fits && before.requests == 0 && self.fits_now(capacity, candidate, rank);
        let mut running = Vec::new();
        running.try_reserve(self.running.len().max(capacity.seqs))?;
        running.extend(self.running.iter().map(begun));
        let first_token = self.step_time.solve().map(|costs| {
            let rest_of_step = self.step.map_or(0.0, |(load, began)| costs.seconds(load) - now.saturating_sub(began).as_secs_f64());
            let queue = line.into();
            let (spare_blocks, seconds) = (self.spare_blocks as i64, rest_of_step.max(0.0));
            AdmissionSimulation { capacity, costs, rank, running, queue, spare_blocks, new_groups: true, held_up: 0, steps: 0, seconds }
                .until_first_token()
        });
        Ok(Forecast { before, fits_now, first_token })
    }

    /// Returns whether a request fits if no other request is before it. Younger running sequences
    /// would be preempted for it.
    fn fits_now(&self, capacity: &Capacity, candidate: CandidateRequest, rank: u64) -> bool {
        let Policies { allocation, batching, .. } = capacity.policies;
        let blocks =
            |sequence: SimulatedSequence| capacity.paging.max_blocks(sequence.held_tokens(), sequence.prefill.clamp(1, capacity.chunk));
        let younger = self.running.iter().filter(|sequence| sequence.rank > rank);
        let (free_entries, free_blocks) = younger.fold((self.entries, self.spare_blocks), |(free_entries, free_blocks), sequence| {
            (free_entries + 1, free_blocks + blocks(SimulatedSequence::from_pending(sequence, &self.length_predictor, allocation)))
        });
        let may_join = batching != BatchingPolicy::Static || self.running.is_empty();
        may_join
            && candidate.width <= free_entries
            && blocks(SimulatedSequence::new(&candidate.waiting, 1, rank, allocation)) <= free_blocks
    }
}

/// A simulated sequence.
#[derive(Debug, Clone, Copy)]
struct SimulatedSequence {
    prefill: usize,
    computed: usize,
    /// Expected number of tokens still to generate.
    output: usize,
    /// Number of tokens for which it reserves blocks at its start.
    reserved: usize,
    rank: u64,
    /// Position in the waiting queue, to order equal ranks.
    order: usize,
    is_candidate: bool,
}

impl SimulatedSequence {
    fn from_pending(sequence: &PendingSequence, lengths: &OutputLengthPredictor, allocation: AllocationPolicy) -> SimulatedSequence {
        let &PendingSequence { prefill, computed, generated, max_new_tokens, rank } = sequence;
        let reserved = match allocation {
            AllocationPolicy::OnDemand => 0,
            AllocationPolicy::MaxTokens => computed + prefill.max(1) + max_new_tokens.saturating_sub(generated),
        };
        SimulatedSequence {
            prefill,
            computed,
            output: lengths.expect(max_new_tokens, generated),
            reserved,
            rank,
            order: 0,
            is_candidate: false,
        }
    }

    fn new(waits: &WaitingEntry, output: usize, rank: u64, allocation: AllocationPolicy) -> SimulatedSequence {
        let reserved = match allocation {
            AllocationPolicy::OnDemand => 0,
            AllocationPolicy::MaxTokens => waits.tokens as usize + (waits.max_new_tokens as usize).min(MAX_SIMULATED_LEN),
        };
        SimulatedSequence { prefill: waits.tokens as usize, computed: 0, output, reserved, rank, order: 0, is_candidate: true }
    }

    fn has_ended(&self) -> bool {
        self.prefill == 0 && self.output == 0
    }

    /// Returns the number of tokens for which it holds blocks.
    fn held_tokens(&self) -> usize {
        self.reserved.max(self.computed + self.prefill)
    }
}

/// The remaining capacity of a generation, which simulates one or several steps.
struct SimulatedBudget {
    tokens: usize,
    prompt_tokens: usize,
    prompts: bool,
    decodes: bool,
}

/// A simulation of the next steps.
struct AdmissionSimulation<'a> {
    capacity: &'a Capacity,
    costs: StepCosts,
    /// Rank of the forecast request. Preempted sequences with a higher rank are dropped, since they
    /// resume after it.
    rank: u64,
    /// In rank order, the oldest first.
    running: Vec<SimulatedSequence>,
    /// In rank order. The last one is the forecast request.
    queue: VecDeque<SimulatedSequence>,
    /// Negative if sequences must be preempted.
    spare_blocks: i64,
    /// Whether sequences that have not run may start.
    new_groups: bool,
    /// Prompt tokens since the last step with decodes, for the prefill-first policy.
    held_up: usize,
    steps: usize,
    seconds: f64,
}

impl AdmissionSimulation<'_> {
    /// Simulates until the first token of the forecast request. It is admitted last and prefills
    /// last, so this is the step after which no sequence before it has tokens to prefill.
    fn until_first_token(&mut self) -> f64 {
        for _ in 0..MAX_TURNS {
            self.admit();
            self.simulate(self.uniform_steps());
            if self.queue.is_empty() && self.running.iter().all(|sequence| sequence.prefill == 0 || sequence.rank > self.rank) {
                break;
            }
            self.preempt();
        }
        self.seconds
    }

    fn uniform_steps(&self) -> usize {
        let steps = 1 + self.steps / FINENESS;
        if self.capacity.policies.batching != BatchingPolicy::Static {
            return steps;
        }
        // A generation ends at the latest with the running batch.
        let left = |sequence: &SimulatedSequence| sequence.output + sequence.prefill.div_ceil(self.capacity.chunk);
        steps.min(self.running.iter().map(left).max().unwrap_or(1)).max(1)
    }

    fn blocks(&self, tokens: usize) -> i64 {
        self.capacity.paging.max_blocks(tokens, 1) as i64
    }

    fn admit(&mut self) {
        let is_static = self.capacity.policies.batching == BatchingPolicy::Static;
        self.new_groups = !is_static || self.running.is_empty();
        let mut tokens: usize = self.running.iter().map(|sequence| sequence.prefill.clamp(1, self.capacity.chunk)).sum();
        while let Some(&first) = self.queue.front() {
            if self.running.len() < self.capacity.seqs && tokens < self.capacity.tokens && self.next().is_some() {
                tokens += first.prefill.min(self.capacity.chunk);
                let place = self.running.partition_point(|sequence| sequence.rank <= first.rank);
                self.running.insert(place, first);
            } else if self.running.last().is_some_and(|last| last.rank > first.rank) && self.may_admit(&first) {
                self.preempt_last();
            } else {
                break;
            }
        }
        self.new_groups = !is_static;
    }

    fn may_admit(&self, sequence: &SimulatedSequence) -> bool {
        self.new_groups || !sequence.is_candidate
    }

    /// Removes and returns the first waiting sequence, if there are blocks for it.
    fn next(&mut self) -> Option<SimulatedSequence> {
        let first = self.queue.front()?;
        let blocks = self.blocks(first.held_tokens());
        if !self.may_admit(first) || (blocks > self.spare_blocks && !self.running.is_empty()) {
            return None;
        }
        self.spare_blocks -= blocks;
        self.queue.pop_front()
    }

    /// Simulates `steps` steps. A sequence that ends is replaced by the next one at once.
    fn simulate(&mut self, steps: usize) {
        let mut load = StepLoad { steps, ..StepLoad::default() };
        let mut budget = self.step_budget(steps);
        let prompt_tokens = budget.prompt_tokens;
        let mut place = 0;
        while place < self.running.len() {
            let mut left = steps;
            while left > 0 && !self.running[place].has_ended() {
                left -= self.advance(place, left, &mut budget, &mut load);
                if self.running[place].has_ended() {
                    self.spare_blocks += self.blocks(self.running[place].held_tokens());
                    let next = self.next();
                    next.into_iter().for_each(|next| self.running[place] = next);
                }
            }
            place += 1;
        }
        self.running.retain(|sequence| !sequence.has_ended());
        if self.capacity.policies.order != OrderPolicy::Fcfs {
            self.running.sort_by_key(|sequence| sequence.rank);
        }
        let prompt_tokens = prompt_tokens - budget.prompt_tokens;
        self.held_up = if budget.decodes { 0 } else { self.held_up + prompt_tokens };
        if budget.decodes && budget.prompts && matches!(self.capacity.policies.batching, BatchingPolicy::PrefillFirst { .. }) {
            // Prefills take steps of their own.
            load.steps += prompt_tokens.div_ceil(self.capacity.tokens);
        }
        self.steps += steps;
        self.seconds += self.costs.seconds(load);
    }

    fn step_budget(&self, steps: usize) -> SimulatedBudget {
        let tokens = self.capacity.tokens;
        let unlimited = SimulatedBudget { tokens: tokens * steps, prompt_tokens: tokens * steps, prompts: true, decodes: true };
        match self.capacity.policies.batching {
            BatchingPolicy::Mixed | BatchingPolicy::Static => unlimited,
            BatchingPolicy::DecodeFirst { budget } => {
                let decodes = self.running.iter().filter(|sequence| sequence.prefill == 0).count();
                SimulatedBudget { prompt_tokens: budget.min(tokens.saturating_sub(decodes).max(1)) * steps, ..unlimited }
            }
            // A generation of several steps contains steps of both kinds.
            BatchingPolicy::PrefillFirst { .. } if steps > 1 => unlimited,
            BatchingPolicy::PrefillFirst { threshold } => {
                let prompts = self.held_up < threshold && self.running.iter().any(|sequence| sequence.prefill > 0);
                SimulatedBudget {
                    prompt_tokens: tokens.min(threshold.saturating_sub(self.held_up)),
                    prompts,
                    decodes: !prompts,
                    ..unlimited
                }
            }
        }
    }

    /// Simulates up to `max_steps` steps of one sequence. Returns their number.
    fn advance(&mut self, place: usize, max_steps: usize, budget: &mut SimulatedBudget, load: &mut StepLoad) -> usize {
        let chunk = self.capacity.chunk;
        let before = self.blocks(self.running[place].held_tokens());
        let sequence = &mut self.running[place];
        if sequence.prefill > 0 {
            if !budget.prompts {
                return max_steps;
            }
            let tokens = sequence.prefill.min(chunk * max_steps).min(budget.tokens).min(budget.prompt_tokens);
            load.add(1, tokens, sequence.computed);
            (budget.tokens, budget.prompt_tokens) = (budget.tokens - tokens, budget.prompt_tokens - tokens);
            (sequence.computed, sequence.prefill) = (sequence.computed + tokens, sequence.prefill - tokens);
            sequence.is_candidate = false;
            // The last row of a prompt samples a token.
            sequence.output -= (sequence.prefill == 0) as usize;
            return if sequence.prefill > 0 { max_steps } else { tokens.div_ceil(chunk).max(1) };
        }
        if !budget.decodes {
            return max_steps;
        }
        let generated = max_steps.min(sequence.output);
        load.add(generated, 1, sequence.computed);
        budget.tokens = budget.tokens.saturating_sub(generated);
        (sequence.computed, sequence.output) = (sequence.computed + generated, sequence.output - generated);
        let after = sequence.held_tokens();
        self.spare_blocks -= self.blocks(after) - before;
        generated
    }

    /// Preempts the youngest sequences while blocks are missing. They are recomputed.
    fn preempt(&mut self) {
        while self.spare_blocks < 0 && self.running.len() > 1 {
            self.preempt_last();
        }
    }

    fn preempt_last(&mut self) {
        let Some(last) = self.running.pop() else { return };
        self.spare_blocks += self.blocks(last.held_tokens());
        if last.rank <= self.rank {
            let again = SimulatedSequence { prefill: last.computed + last.prefill.max(1), computed: 0, is_candidate: false, ..last };
            let place = self.queue.partition_point(|sequence| sequence.rank < last.rank);
            self.queue.insert(place, again);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::step_time::tests::{learned, load, seconds};
    use super::*;

    const SEQS: usize = 4;

    fn capacity() -> Capacity {
        let policies = Policies { order: OrderPolicy::Fcfs, batching: BatchingPolicy::Mixed, allocation: AllocationPolicy::OnDemand };
        Capacity { seqs: SEQS, tokens: 64, chunk: 64, paging: Paging::without_windows(16), policies }
    }

    fn snapshot_with(running: Vec<PendingSequence>, spare_blocks: usize) -> SchedulerSnapshot {
        let entries = SEQS - running.len();
        SchedulerSnapshot { step_time: learned(), running, entries, spare_blocks, ..SchedulerSnapshot::default() }
    }

    /// Returns a decoding sequence with `computed` tokens that generates up to `max_new_tokens`
    /// more.
    fn decoding(computed: usize, max_new_tokens: usize) -> PendingSequence {
        PendingSequence { computed, max_new_tokens, ..PendingSequence::default() }
    }

    fn entry(tokens: usize, max_new_tokens: usize) -> WaitingEntry {
        WaitingEntry::new(tokens, max_new_tokens, 0, Duration::ZERO)
    }

    fn forecast(snapshot: &SchedulerSnapshot, capacity: &Capacity, waiting: &[WaitingEntry], candidate: WaitingEntry) -> Forecast {
        snapshot.forecast(capacity, waiting, CandidateRequest { waiting: candidate, width: 1 }, Duration::ZERO).unwrap()
    }

    fn first_token(snapshot: &SchedulerSnapshot, waiting: &[WaitingEntry], prompt: usize) -> f64 {
        forecast(snapshot, &capacity(), waiting, entry(prompt, 9)).first_token.unwrap()
    }

    #[test]
    fn a_prompt_in_an_idle_engine_takes_only_its_own_steps() {
        let snapshot = snapshot_with(vec![], 100);
        let expected = seconds(load(&[(64, 0)])) + seconds(load(&[(36, 64)]));
        let found = first_token(&snapshot, &[], 100);
        assert!((found / expected - 1.0).abs() < 0.02, "{found}, expected {expected}");
        let fits = |width, tokens, waiting: &[WaitingEntry]| {
            snapshot.forecast(&capacity(), waiting, CandidateRequest { waiting: entry(tokens, 9), width }, Duration::ZERO).unwrap().fits_now
        };
        assert!(fits(1, 100, &[]) && fits(4, 1600, &[]));
        assert!(!fits(5, 100, &[]) && !fits(1, 100, &[entry(1, 1)]) && !fits(1, 16 * 100 + 1, &[]));
    }

    #[test]
    fn a_request_waits_until_a_running_sequence_ends() {
        let snapshot = snapshot_with([50, 20, 90, 70].map(|max_new_tokens| decoding(10, max_new_tokens)).into(), 100);
        let found = first_token(&snapshot, &[], 10);
        let decode = seconds(load(&[(1, 10); 4]));
        assert!((20.0 * decode..24.0 * decode).contains(&found), "{found}, a step takes {decode}");
        // With one more request in the queue, the candidate waits for the second sequence to end.
        let found = first_token(&snapshot, &[entry(10, 500)], 10);
        assert!((50.0 * decode..70.0 * decode).contains(&found), "{found}, a step takes {decode}");
    }

    #[test]
    fn a_long_queue_is_simulated_in_growing_steps() {
        let snapshot = snapshot_with(vec![decoding(10, 10); 4], 100);
        // Four requests run at a time. Each has one prefill and 100 decode steps beside three
        // others.
        let time_per_request = 100.0 * seconds(load(&[(1, 60); 4])) / 4.0;
        for queue_len in [100, 1000, 100_000] {
            let found = first_token(&snapshot, &vec![entry(10, 100); queue_len], 10);
            let expected = queue_len as f64 * time_per_request;
            assert!((found / expected - 1.0).abs() < 0.15, "{found}, expected {expected}");
        }
    }

    #[test]
    fn preemptions_in_a_full_pool_delay_the_first_token() {
        let running = vec![decoding(160, 100); 2];
        let full = first_token(&snapshot_with(running.clone(), 4), &[], 70);
        let large = first_token(&snapshot_with(running, 400), &[], 70);
        assert!(full > 100.0 * seconds(load(&[(1, 200)])) && large < 0.1, "{full} and {large}");
    }

    fn with(policies: Policies) -> Capacity {
        Capacity { policies, ..capacity() }
    }

    #[test]
    fn order_policy_determines_rank() {
        let ageing = Duration::from_secs(10);
        let by_priority = with(Policies { order: OrderPolicy::Priority { ageing }, ..Policies::default() });
        // These are the ranks that the scheduler would compute.
        let running: Vec<PendingSequence> = vec![PendingSequence { rank: 1_000_000_000, ..decoding(10, 100) }; 4];
        let snapshot = snapshot_with(running, 100);
        let at = |priority| WaitingEntry::new(10, 100, priority, Duration::ZERO);
        let waiting = [at(0); 20];
        let urgent = forecast(&snapshot, &by_priority, &waiting, at(5));
        let step = seconds(load(&[(10, 0), (1, 10), (1, 10), (1, 10)]));
        assert!(urgent.fits_now && urgent.before.requests == 0, "{urgent:?}");
        assert!((urgent.first_token.unwrap() / step - 1.0).abs() < 0.05, "the request preempts a running one: {urgent:?}");
        let normal = forecast(&snapshot, &by_priority, &waiting, at(0));
        assert!(!normal.fits_now && normal.before == WaitingTotals { requests: 20, tokens: 200 }, "{normal:?}");
        assert!(normal.first_token.unwrap() > 100.0 * step, "{normal:?}");
        // Shortest predicted first: the request with fewer tokens than all others comes first.
        let shortest = with(Policies { order: OrderPolicy::ShortestPredicted { ageing }, ..Policies::default() });
        let requests_before =
            |max_new_tokens| forecast(&snapshot, &shortest, &[entry(10, 100); 20], entry(10, max_new_tokens)).before.requests;
        assert_eq!((requests_before(50), requests_before(200)), (0, 20));
    }

    #[test]
    fn max_tokens_allocation_waits_for_blocks_of_all_tokens() {
        let reserves = with(Policies { allocation: AllocationPolicy::MaxTokens, ..Policies::default() });
        // The spare blocks have space for 320 more tokens.
        let snapshot = snapshot_with(vec![decoding(160, 100)], 20);
        let result = |max_new_tokens| forecast(&snapshot, &reserves, &[], entry(20, max_new_tokens));
        assert!(result(300).fits_now && result(300).first_token.unwrap() < 0.1);
        assert!(!result(301).fits_now && result(301).first_token.unwrap() > 100.0 * seconds(load(&[(1, 160)])));
    }

    #[test]
    fn batching_policy_determines_the_steps() {
        let snapshot = snapshot_with(vec![decoding(10, 1000)], 100);
        let time_to_first_token = |batching, prompt| {
            let capacity = with(Policies { batching, ..Policies::default() });
            forecast(&snapshot, &capacity, &[], entry(prompt, 9)).first_token.unwrap()
        };
        let assert_near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 0.05, "{found}, expected {expected}");
        // The prompt runs in chunks of 10 tokens, each beside one decode.
        let chunks = (0..4).map(|i| seconds(load(&[(10, 10 * i), (1, 10 + i)]))).sum();
        assert_near(time_to_first_token(BatchingPolicy::DecodeFirst { budget: 10 }, 40), chunks);
        // The prefill runs alone, with one decode step after 30 tokens.
        let alone = seconds(load(&[(30, 0)])) + seconds(load(&[(1, 10)])) + seconds(load(&[(20, 30)]));
        assert_near(time_to_first_token(BatchingPolicy::PrefillFirst { threshold: 30 }, 50), alone);
        // No sequence joins a running batch.
        assert!(time_to_first_token(BatchingPolicy::Static, 40) > 990.0 * seconds(load(&[(1, 20)])));
        assert!(time_to_first_token(BatchingPolicy::Mixed, 40) < 0.1);
    }
}
