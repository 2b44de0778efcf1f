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
    pub chosen: usize,
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
    pub rows: usize,
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

/// Granularity: after every `FINENESS` simulated steps, the number of steps per generation grows by one.
const FINENESS: usize = 32;
/// Maximum number of generations. They simulate about 3e9 steps, which no product of counts overflows.
const MOST_TURNS: usize = 600;
/// Assumed maximum length of a sequence without a known one.
const LONGEST: usize = 1 << 20;

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
        let (mut before, mut device_sample, mut line) = (WaitingTotals::default(), self.length_predictor.generator(), Vec::new());
        // Preempted running sequences can enter the queue too.
        line.try_reserve(self.preempted.len() + waiting.len() + self.running.len() + 1)?;
        line.extend(self.preempted.iter().filter(|sequence| sequence.rank <= rank).map(begun));
        let fits = line.is_empty();
        for waits in waiting {
            let its = if ranked { claim(waits) } else { 0 };
            if its <= rank {
                before.enter(waits.tokens as usize);
                line.push(SimulatedSequence::new(waits, device_sample.draw(waits.max_new_tokens as usize).min(LONGEST), its, allocation));
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
            AdmissionSimulation { capacity, costs, rank, running, queue, spare_blocks, newcomers: true, held_up: 0, steps: 0, seconds }
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
        let (places, room) = younger.fold((self.entries, self.spare_blocks), |(places, room), sequence| {
            (places + 1, room + blocks(SimulatedSequence::from_pending(sequence, &self.length_predictor, allocation)))
        });
        let may_join = batching != BatchingPolicy::Static || self.running.is_empty();
        may_join && candidate.width <= places && blocks(SimulatedSequence::new(&candidate.waiting, 1, rank, allocation)) <= room
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
        let &PendingSequence { prefill, computed, chosen, max_new_tokens: most, rank } = sequence;
        let reserved = match allocation {
            AllocationPolicy::OnDemand => 0,
            AllocationPolicy::MaxTokens => computed + prefill.max(1) + most.saturating_sub(chosen),
        };
        SimulatedSequence { prefill, computed, output: lengths.expect(most, chosen), reserved, rank, order: 0, is_candidate: false }
    }

    fn new(waits: &WaitingEntry, output: usize, rank: u64, allocation: AllocationPolicy) -> SimulatedSequence {
        let reserved = match allocation {
            AllocationPolicy::OnDemand => 0,
            AllocationPolicy::MaxTokens => waits.tokens as usize + (waits.max_new_tokens as usize).min(LONGEST),
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
    rows: usize,
    prompt_rows: usize,
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
    newcomers: bool,
    /// Prompt tokens since the last step with decodes, for the prefill-first policy.
    held_up: usize,
    steps: usize,
    seconds: f64,
}

impl AdmissionSimulation<'_> {
    /// Simulates until the first token of the forecast request. It is admitted last and prefills
    /// last, so this is the step after which no sequence before it has tokens to prefill.
    fn until_first_token(&mut self) -> f64 {
        for _ in 0..MOST_TURNS {
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
        self.newcomers = !is_static || self.running.is_empty();
        let mut rows: usize = self.running.iter().map(|sequence| sequence.prefill.clamp(1, self.capacity.chunk)).sum();
        while let Some(&first) = self.queue.front() {
            if self.running.len() < self.capacity.seqs && rows < self.capacity.rows && self.next().is_some() {
                rows += first.prefill.min(self.capacity.chunk);
                let place = self.running.partition_point(|sequence| sequence.rank <= first.rank);
                self.running.insert(place, first);
            } else if self.running.last().is_some_and(|last| last.rank > first.rank) && self.may_admit(&first) {
                self.preempt_last();
            } else {
                break;
            }
        }
        self.newcomers = !is_static;
    }

    fn may_admit(&self, sequence: &SimulatedSequence) -> bool {
        self.newcomers || !sequence.is_candidate
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
        let mut room = self.step_budget(steps);
        let prompt_rows = room.prompt_rows;
        let mut place = 0;
        while place < self.running.len() {
            let mut left = steps;
            while left > 0 && !self.running[place].has_ended() {
                left -= self.advance(place, left, &mut room, &mut load);
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
        let prompt_rows = prompt_rows - room.prompt_rows;
        self.held_up = if room.decodes { 0 } else { self.held_up + prompt_rows };
        if room.decodes && room.prompts && matches!(self.capacity.policies.batching, BatchingPolicy::PrefillFirst { .. }) {
            // Prefills take steps of their own.
            load.steps += prompt_rows.div_ceil(self.capacity.rows);
        }
        self.steps += steps;
        self.seconds += self.costs.seconds(load);
    }

    fn step_budget(&self, steps: usize) -> SimulatedBudget {
        let rows = self.capacity.rows;
        let whatever = SimulatedBudget { rows: rows * steps, prompt_rows: rows * steps, prompts: true, decodes: true };
        match self.capacity.policies.batching {
            BatchingPolicy::Mixed | BatchingPolicy::Static => whatever,
            BatchingPolicy::DecodeFirst { budget } => {
                let decodes = self.running.iter().filter(|sequence| sequence.prefill == 0).count();
                SimulatedBudget { prompt_rows: budget.min(rows.saturating_sub(decodes).max(1)) * steps, ..whatever }
            }
            // A generation of several steps contains steps of both kinds.
            BatchingPolicy::PrefillFirst { .. } if steps > 1 => whatever,
            BatchingPolicy::PrefillFirst { threshold } => {
                let prompts = self.held_up < threshold && self.running.iter().any(|sequence| sequence.prefill > 0);
                SimulatedBudget { prompt_rows: rows.min(threshold.saturating_sub(self.held_up)), prompts, decodes: !prompts, ..whatever }
            }
        }
    }

    /// Simulates up to `most` steps of one sequence. Returns their number.
    fn advance(&mut self, place: usize, most: usize, room: &mut SimulatedBudget, load: &mut StepLoad) -> usize {
        let chunk = self.capacity.chunk;
        let before = self.blocks(self.running[place].held_tokens());
        let sequence = &mut self.running[place];
        if sequence.prefill > 0 {
            if !room.prompts {
                return most;
            }
            let rows = sequence.prefill.min(chunk * most).min(room.rows).min(room.prompt_rows);
            load.add(1, rows, sequence.computed);
            (room.rows, room.prompt_rows) = (room.rows - rows, room.prompt_rows - rows);
            (sequence.computed, sequence.prefill) = (sequence.computed + rows, sequence.prefill - rows);
            sequence.is_candidate = false;
            // The last row of a prompt samples a token.
            sequence.output -= (sequence.prefill == 0) as usize;
            return if sequence.prefill > 0 { most } else { rows.div_ceil(chunk).max(1) };
        }
        if !room.decodes {
            return most;
        }
        let chosen = most.min(sequence.output);
        load.add(chosen, 1, sequence.computed);
        room.rows = room.rows.saturating_sub(chosen);
        (sequence.computed, sequence.output) = (sequence.computed + chosen, sequence.output - chosen);
        let after = sequence.held_tokens();
        self.spare_blocks -= self.blocks(after) - before;
        chosen
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
        Capacity { seqs: SEQS, rows: 64, chunk: 64, paging: Paging::without_windows(16), policies }
    }

    fn outlook(running: Vec<PendingSequence>, spare_blocks: usize) -> SchedulerSnapshot {
        let places = SEQS - running.len();
        SchedulerSnapshot { step_time: learned(), running, entries: places, spare_blocks, ..SchedulerSnapshot::default() }
    }

    /// A decoding sequence with `computed` tokens that generates up to `most` more.
    fn decodes(computed: usize, most: usize) -> PendingSequence {
        PendingSequence { computed, max_new_tokens: most, ..PendingSequence::default() }
    }

    fn waits(tokens: usize, most: usize) -> WaitingEntry {
        WaitingEntry::new(tokens, most, 0, Duration::ZERO)
    }

    fn forecast(snapshot: &SchedulerSnapshot, capacity: &Capacity, waiting: &[WaitingEntry], waits: WaitingEntry) -> Forecast {
        snapshot.forecast(capacity, waiting, CandidateRequest { waiting: waits, width: 1 }, Duration::ZERO).unwrap()
    }

    fn first_token(snapshot: &SchedulerSnapshot, waiting: &[WaitingEntry], prompt: usize) -> f64 {
        forecast(snapshot, &capacity(), waiting, waits(prompt, 9)).first_token.unwrap()
    }

    #[test]
    fn a_prompt_alone_waits_for_its_own_steps() {
        let snapshot = outlook(vec![], 100);
        let expected = seconds(load(&[(64, 0)])) + seconds(load(&[(36, 64)]));
        let told = first_token(&snapshot, &[], 100);
        assert!((told / expected - 1.0).abs() < 0.02, "{told} for {expected}");
        let fits = |width, tokens, waiting: &[WaitingEntry]| {
            snapshot.forecast(&capacity(), waiting, CandidateRequest { waiting: waits(tokens, 9), width }, Duration::ZERO).unwrap().fits_now
        };
        assert!(fits(1, 100, &[]) && fits(4, 1600, &[]));
        assert!(!fits(5, 100, &[]) && !fits(1, 100, &[waits(1, 1)]) && !fits(1, 16 * 100 + 1, &[]));
    }

    #[test]
    fn where_all_places_are_taken_it_waits_for_an_end() {
        let snapshot = outlook([50, 20, 90, 70].map(|most| decodes(10, most)).into(), 100);
        let told = first_token(&snapshot, &[], 10);
        let decode = seconds(load(&[(1, 10); 4]));
        assert!((20.0 * decode..24.0 * decode).contains(&told), "{told}, a step takes {decode}");
        // One more request before it: it waits for the second end.
        let told = first_token(&snapshot, &[waits(10, 500)], 10);
        assert!((50.0 * decode..70.0 * decode).contains(&told), "{told}, a step takes {decode}");
    }

    #[test]
    fn a_crowd_before_it_is_played_in_ever_larger_steps() {
        let snapshot = outlook(vec![decodes(10, 10); 4], 100);
        // Four at a time, each with a prefill and 100 steps beside three decodes.
        let each = 100.0 * seconds(load(&[(1, 60); 4])) / 4.0;
        for crowd in [100, 1000, 100_000] {
            let (told, right) = (first_token(&snapshot, &vec![waits(10, 100); crowd], 10), crowd as f64 * each);
            assert!((told / right - 1.0).abs() < 0.15, "{told} for {right}");
        }
    }

    #[test]
    fn where_the_pool_is_full_the_youngest_compute_again() {
        let running = vec![decodes(160, 100); 2];
        let (full, roomy) = (outlook(running.clone(), 4), outlook(running, 400));
        let told = |snapshot: &SchedulerSnapshot| first_token(snapshot, &[], 70);
        assert!(told(&full) > 100.0 * seconds(load(&[(1, 200)])) && told(&roomy) < 0.1, "{} and {}", told(&full), told(&roomy));
    }

    fn with(policies: Policies) -> Capacity {
        Capacity { policies, ..capacity() }
    }

    #[test]
    fn who_comes_first_is_what_the_order_says() {
        let ageing = Duration::from_secs(10);
        let by_priority = with(Policies { order: OrderPolicy::Priority { ageing }, ..Policies::default() });
        // The ranks that the scheduler would compute.
        let running: Vec<PendingSequence> = vec![PendingSequence { rank: 1_000_000_000, ..decodes(10, 100) }; 4];
        let snapshot = outlook(running, 100);
        let at = |priority| WaitingEntry::new(10, 100, priority, Duration::ZERO);
        let crowd = [at(0); 20];
        let urgent = forecast(&snapshot, &by_priority, &crowd, at(5));
        let step = seconds(load(&[(10, 0), (1, 10), (1, 10), (1, 10)]));
        assert!(urgent.fits_now && urgent.before.requests == 0, "{urgent:?}");
        assert!((urgent.first_token.unwrap() / step - 1.0).abs() < 0.05, "it takes the place of one that runs: {urgent:?}");
        let calm = forecast(&snapshot, &by_priority, &crowd, at(0));
        assert!(!calm.fits_now && calm.before == WaitingTotals { requests: 20, tokens: 200 }, "{calm:?}");
        assert!(calm.first_token.unwrap() > 100.0 * step, "{calm:?}");
        // The shortest first: all others may generate more tokens.
        let shortest = with(Policies { order: OrderPolicy::ShortestPredicted { ageing }, ..Policies::default() });
        let told = |most| forecast(&snapshot, &shortest, &[waits(10, 100); 20], waits(10, most)).before.requests;
        assert_eq!((told(50), told(200)), (0, 20));
    }

    #[test]
    fn who_needs_room_for_all_it_may_choose_waits_for_it() {
        let reserves = with(Policies { allocation: AllocationPolicy::MaxTokens, ..Policies::default() });
        // Blocks for 320 more tokens.
        let snapshot = outlook(vec![decodes(160, 100)], 20);
        let told = |most| forecast(&snapshot, &reserves, &[], waits(20, most));
        assert!(told(300).fits_now && told(300).first_token.unwrap() < 0.1);
        assert!(!told(301).fits_now && told(301).first_token.unwrap() > 100.0 * seconds(load(&[(1, 160)])));
    }

    #[test]
    fn steps_are_made_of_what_the_batching_says() {
        let snapshot = outlook(vec![decodes(10, 1000)], 100);
        let told = |batching, prompt| {
            let capacity = with(Policies { batching, ..Policies::default() });
            forecast(&snapshot, &capacity, &[], waits(prompt, 9)).first_token.unwrap()
        };
        let near = |told: f64, right: f64| assert!((told / right - 1.0).abs() < 0.05, "{told} for {right}");
        // In chunks of 10 tokens, each beside a decode.
        near(told(BatchingPolicy::DecodeFirst { budget: 10 }, 40), (0..4).map(|i| seconds(load(&[(10, 10 * i), (1, 10 + i)]))).sum());
        // Alone, with a decode step after 30 tokens.
        let alone = seconds(load(&[(30, 0)])) + seconds(load(&[(1, 10)])) + seconds(load(&[(20, 30)]));
        near(told(BatchingPolicy::PrefillFirst { threshold: 30 }, 50), alone);
        // No sequence joins a running batch.
        assert!(told(BatchingPolicy::Static, 40) > 990.0 * seconds(load(&[(1, 20)])));
        assert!(told(BatchingPolicy::Mixed, 40) < 0.1);
    }
}
