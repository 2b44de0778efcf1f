//! The simulation of the steps before a first token.

use std::cell::OnceCell;
use std::collections::VecDeque;

use super::super::{Allocation, Batching, OutputLengthPredictor, Running, StepBudget};
use super::{Capacity, PendingSequence, StepLoad, WaitingEntry};

/// Granularity: after every `FINENESS` simulated steps, the number of steps per turn grows by one.
const FINENESS: usize = 32;
/// Maximum number of turns. They simulate about 3e9 steps, which no product of counts overflows.
const MAX_TURNS: usize = 600;
/// Assumed maximum length of a sequence without a known one.
const MAX_SIMULATED_LEN: usize = 1 << 20;
/// Number of steps for which a turn of several steps calls the batching policy.
const PROBED_STEPS: usize = 16;

/// A simulated sequence.
#[derive(Debug, Clone, Copy)]
pub struct SimulatedSequence {
    pub prefill: usize,
    computed: usize,
    /// Expected number of tokens still to generate.
    output: usize,
    /// Number of tokens for which it reserves blocks at its start.
    reserved: usize,
    pub rank: u64,
    /// Position in the waiting queue, to order equal ranks.
    pub order: u32,
    is_candidate: bool,
}

impl SimulatedSequence {
    pub fn from_pending(sequence: &PendingSequence, lengths: &OutputLengthPredictor, allocation: &dyn Allocation) -> SimulatedSequence {
        let &PendingSequence { prefill, computed, generated, max_new_tokens, rank } = sequence;
        let max_len = computed + prefill.max(1) + max_new_tokens.saturating_sub(generated);
        SimulatedSequence {
            prefill,
            computed,
            output: lengths.expect(max_new_tokens, generated),
            reserved: allocation.length(computed + prefill, max_len),
            rank,
            order: 0,
            is_candidate: false,
        }
    }

    pub fn new(entry: &WaitingEntry, output: usize, rank: u64, allocation: &dyn Allocation) -> SimulatedSequence {
        let prefill = entry.tokens as usize;
        let reserved = allocation.length(prefill, prefill + (entry.max_new_tokens as usize).min(MAX_SIMULATED_LEN));
        SimulatedSequence { prefill, computed: 0, output: output.min(MAX_SIMULATED_LEN), reserved, rank, order: 0, is_candidate: true }
    }

    fn has_ended(&self) -> bool {
        self.prefill == 0 && self.output == 0
    }

    /// Returns the number of tokens for which it holds blocks.
    pub fn held_tokens(&self) -> usize {
        self.reserved.max(self.computed + self.prefill)
    }
}

/// The running sequences of a simulation, for the batching policy.
struct SimulatedRunning<'a> {
    running: &'a [SimulatedSequence],
    max_tokens: usize,
    /// Assumed minimum of `decodes`.
    min_decodes: usize,
    /// Counted at the first call, since few policies use it.
    decodes: OnceCell<usize>,
}

impl Running for SimulatedRunning<'_> {
    fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    fn decodes(&self) -> usize {
        let count = || self.running.iter().filter(|sequence| sequence.prefill == 0).count().max(self.min_decodes);
        *self.decodes.get_or_init(count)
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }
}

/// The limits of a turn, which simulates one or several steps.
struct TurnBudget {
    tokens: usize,
    prompt_tokens: usize,
    decodes: bool,
    /// In addition to the steps of the turn, `steps` steps without decodes per `tokens` prompt
    /// tokens.
    additional: AdditionalSteps,
}

/// The steps in which prompts exclude decodes.
#[derive(Default)]
struct AdditionalSteps {
    steps: usize,
    tokens: usize,
}

/// A simulation of the next steps.
pub struct AdmissionSimulation<'a> {
    capacity: &'a Capacity,
    batching: Box<dyn Batching>,
    step_cost: &'a dyn Fn(StepLoad) -> f64,
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
    steps: usize,
    cost: f64,
}

impl AdmissionSimulation<'_> {
    pub fn new<'a>(
        capacity: &'a Capacity,
        step_cost: &'a dyn Fn(StepLoad) -> f64,
        rank: u64,
        running: Vec<SimulatedSequence>,
        queue: VecDeque<SimulatedSequence>,
        spare_blocks: i64,
    ) -> AdmissionSimulation<'a> {
        let batching = capacity.policies.batching.fork();
        AdmissionSimulation { capacity, batching, step_cost, rank, running, queue, spare_blocks, new_groups: true, steps: 0, cost: 0.0 }
    }

    /// Simulates until the first token of the forecast request, and returns the cost of the steps.
    ///
    /// The request is admitted last and prefills last, so this is the step after which no sequence
    /// before it has tokens to prefill.
    pub fn until_first_token(mut self) -> f64 {
        for _ in 0..MAX_TURNS {
            self.turn();
            if self.queue.is_empty() && self.running.iter().all(|sequence| sequence.prefill == 0 || sequence.rank > self.rank) {
                break;
            }
            self.preempt();
        }
        self.cost
    }

    /// Simulates one turn. If no sequence fits the limits of the batching policy, the turn has no
    /// limits, as a step of the scheduler.
    fn turn(&mut self) {
        for budget in [self.batching.step_budget(&self.running_view(0)), StepBudget::UNLIMITED] {
            self.new_groups = budget.new_groups;
            self.admit();
            // Sequences that end within the turn are replaced if a later step admits others.
            self.new_groups = self.batching.step_budget(&self.running_view(0)).new_groups;
            let steps = self.uniform_steps();
            let budget = if steps == 1 { self.single_step(budget) } else { self.average_steps(steps) };
            if self.simulate(steps, budget) {
                return;
            }
        }
    }

    fn running_view(&self, min_decodes: usize) -> SimulatedRunning<'_> {
        SimulatedRunning { running: &self.running, max_tokens: self.capacity.tokens, min_decodes, decodes: OnceCell::new() }
    }

    /// Returns the number of steps of this turn.
    fn uniform_steps(&self) -> usize {
        let steps = 1 + self.steps / FINENESS;
        if self.new_groups {
            return steps;
        }
        // The policy can admit other sequences at the latest when the running batch has ended.
        let left = |sequence: &SimulatedSequence| sequence.output + sequence.prefill.div_ceil(self.capacity.chunk);
        steps.min(self.running.iter().map(left).max().unwrap_or(1)).max(1)
    }

    fn blocks(&self, tokens: usize) -> i64 {
        self.capacity.paging.max_blocks(tokens, 1) as i64
    }

    fn admit(&mut self) {
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

    /// Simulates `steps` steps. A sequence that ends is replaced by the next one at once. Returns
    /// false if no sequence fits the budget.
    fn simulate(&mut self, steps: usize, mut budget: TurnBudget) -> bool {
        let mut load = StepLoad { steps, ..StepLoad::default() };
        let prompt_tokens = budget.prompt_tokens;
        let (mut place, mut is_sorted) = (0, true);
        while place < self.running.len() {
            let mut left = steps;
            while left > 0 && !self.running[place].has_ended() {
                left -= self.advance(place, left, &mut budget, &mut load);
                if self.running[place].has_ended() {
                    self.spare_blocks += self.blocks(self.running[place].held_tokens());
                    if let Some(next) = self.next() {
                        is_sorted &= next.rank == self.running[place].rank;
                        self.running[place] = next;
                    }
                }
            }
            place += 1;
        }
        if load.tokens == 0 {
            return false;
        }
        self.running.retain(|sequence| !sequence.has_ended());
        if !is_sorted {
            self.running.sort_by_key(|sequence| sequence.rank);
        }
        let used = prompt_tokens - budget.prompt_tokens;
        self.batching.record_step(used, load.tokens - used);
        load.steps += (used * budget.additional.steps).div_ceil(budget.additional.tokens.max(1));
        self.steps += steps;
        self.cost += (self.step_cost)(load);
        true
    }

    /// Returns the limits of one step under the budget of the batching policy.
    fn single_step(&self, budget: StepBudget) -> TurnBudget {
        let tokens = self.capacity.tokens;
        TurnBudget {
            tokens,
            prompt_tokens: budget.max_prompt_tokens.min(tokens),
            decodes: budget.decodes,
            additional: AdditionalSteps::default(),
        }
    }

    /// Returns the limits of `steps` steps with decodes, and of the steps without decodes between
    /// them.
    ///
    /// The batching policy is called for some steps in which both prompts and decodes are pending.
    /// The average of these steps stands for all.
    fn average_steps(&self, steps: usize) -> TurnBudget {
        let running = self.running_view(1);
        let mut batching = self.batching.fork();
        let (mut with_decodes, mut prompt_tokens) = (0, 0);
        for _ in 0..PROBED_STEPS {
            let mut budget = batching.step_budget(&running);
            if !budget.decodes && budget.max_prompt_tokens == 0 {
                budget = StepBudget::UNLIMITED;
            }
            let tokens = budget.max_prompt_tokens.min(self.capacity.tokens);
            batching.record_step(tokens, if budget.decodes { running.decodes() } else { 0 });
            with_decodes += budget.decodes as usize;
            prompt_tokens += tokens;
        }
        // If prompts exclude all decodes, the decodes run after the prompts.
        let total = steps * PROBED_STEPS / if with_decodes == 0 { PROBED_STEPS } else { with_decodes };
        TurnBudget {
            tokens: self.capacity.tokens.saturating_mul(total),
            prompt_tokens: prompt_tokens.saturating_mul(total) / PROBED_STEPS,
            decodes: true,
            additional: AdditionalSteps { steps: PROBED_STEPS - with_decodes, tokens: prompt_tokens },
        }
    }

    /// Simulates up to `max_steps` steps of one sequence. Returns their number.
    fn advance(&mut self, place: usize, max_steps: usize, budget: &mut TurnBudget, load: &mut StepLoad) -> usize {
        let chunk = self.capacity.chunk;
        let before = self.blocks(self.running[place].held_tokens());
        let sequence = &mut self.running[place];
        if sequence.prefill > 0 {
            let tokens = sequence.prefill.min(chunk * max_steps).min(budget.tokens).min(budget.prompt_tokens);
            if tokens == 0 {
                return max_steps;
            }
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
