//! The core of the engine: takes commands, schedules, runs, samples, commits and delivers outputs.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::active_sequence::ActiveSequence;
use super::budget_client::{BudgetChecks, PoolLease};
use super::clock::Clock;
use super::delivery::Delivery;
use super::journal::Journal;
use super::live_requests::LiveRequests;
use super::metrics::Histograms;
use super::outputs::Output;
use super::queue::OutputSender;
use super::recovery::{self, RETRY_TIMEOUT, Recovery};
use super::request::branch_seed;
use super::runner::Runner;
use super::sampling::{SampleResult, Sampling};
use super::sequence_table::{Command, SequenceTable};
use super::snapshot::AdmissionSnapshot;
use super::step_time::StepTimer;
use super::telemetry::Telemetry;
use super::trace::{Phase, Trace};
use super::{ModelInfo, Stats, StepReport};
use crate::budget::Lease;
use crate::error::{Error, Result};
use crate::options::EngineOptions;
use crate::scheduler::simulate::StepLoad;
use crate::scheduler::{Event, FinishReason, SampledToken, Scheduler, SequenceStats, StepPlan};
use crate::sys::float::StandardMode;
use crate::text::Text;
use crate::types::SeqId;

/// The state of the stepping thread, and the state that it shares with other threads.
pub struct EngineCore {
    pub(super) scheduler: Scheduler,
    pub(super) runner: Box<dyn Runner>,
    pub(super) pool: PoolLease,
    pub(super) model: ModelIdentity,
    pub(super) requests: LiveRequests,
    pub(super) sampling: Sampling,
    pub(super) commands: VecDeque<Command>,
    events: Vec<Event>,
    /// Groups are identified by their first sequence.
    pub(super) recovery: Recovery<SeqId>,
    pub(super) delivery: Delivery,
    pub(super) step_timer: StepTimer,
    pub(super) telemetry: Telemetry,
    /// Journal that records or replays the inputs of steps.
    pub(super) journal: Option<Journal>,
    /// Start time of the current step. It is read once per step, so that a replay can repeat all
    /// decisions that depend on it.
    pub(super) now: Duration,
    pub(super) shared: Shared,
}

/// The properties of the model on which the state of sequences depends.
pub struct ModelIdentity {
    /// Fingerprint of the model, the start of all block hashes.
    pub fingerprint: [u8; 32],
    /// Instruction path that computes K and V.
    pub isa: &'static str,
    /// Maximum length of a sequence in tokens.
    pub max_len: usize,
}

/// The state that the threads of the host share with the stepping thread.
#[derive(Clone)]
pub struct Shared {
    pub text: Option<Arc<Text>>,
    pub table: Arc<SequenceTable>,
    /// Statistics after the last step.
    pub published: Arc<Mutex<Published>>,
    pub snapshot: Arc<Mutex<AdmissionSnapshot>>,
    pub clock: Arc<dyn Clock>,
    /// True if the budget requires the engine to check its lease.
    pub wants_check: Arc<AtomicBool>,
    pub budget_checks: Arc<BudgetChecks>,
}

impl Shared {
    pub fn snapshot(&self) -> MutexGuard<'_, AdmissionSnapshot> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The statistics that other threads can read during a step.
#[derive(Debug, Clone, Copy, Default)]
pub struct Published {
    pub stats: Stats,
    pub histograms: Histograms,
}

impl EngineCore {
    pub fn new(
        scheduler: Scheduler,
        runner: Box<dyn Runner>,
        lease: Arc<Lease>,
        info: &ModelInfo,
        options: &EngineOptions,
        shared: Shared,
        journal: Option<Journal>,
    ) -> Result<EngineCore> {
        let max_seqs = options.max_seqs;
        let trace = options.trace_path.as_deref().map(Trace::create).transpose()?;
        let mut core = EngineCore {
            scheduler,
            sampling: Sampling::new(info.vocab_size, max_seqs, runner.sampling_limits())?,
            runner,
            pool: PoolLease::new(lease),
            model: ModelIdentity { fingerprint: info.fingerprint, isa: info.isa_name(), max_len: info.memory.max_model_len },
            requests: LiveRequests::default(),
            commands: VecDeque::new(),
            events: Vec::new(),
            recovery: Recovery::new(max_seqs)?,
            delivery: Delivery::new(max_seqs)?,
            step_timer: StepTimer::default(),
            telemetry: Telemetry::new(shared.clock.clone(), trace),
            journal,
            now: Duration::ZERO,
            shared,
        };
        core.events.try_reserve(3 * max_seqs)?;
        core.shared.snapshot().scheduler.reserve(max_seqs)?;
        Ok(core)
    }

    /// Runs one step.
    pub fn step(&mut self) -> Result<StepReport> {
        // The check needs the lock: a thread that waited for the lock while another one failed must
        // not step.
        self.shared.table.check()?;
        let _mode = StandardMode::enter();
        self.now = self.shared.clock.now();
        self.telemetry.step_begins(self.now);
        self.journal.iter_mut().for_each(|journal| journal.begin(self.now));
        let result = catch_unwind(AssertUnwindSafe(|| self.advance()));
        let result = result.unwrap_or_else(|panic| Err(self.fail(panic)));
        self.journal.iter_mut().for_each(|journal| journal.end(&result));
        let stats = self.publish();
        self.telemetry.step_ends(&result, &stats);
        result.map(|report| StepReport { unfinished: self.shared.table.unfinished(), ..report })
    }

    /// Runs a step of all ready groups. Commits what can be computed. The rest stays unchanged.
    fn advance(&mut self) -> Result<StepReport> {
        self.pass_costs();
        self.take_commands();
        self.end_overdue();
        self.check_budget(true);
        self.recheck_paused();
        self.telemetry.end_phase(Phase::Commands);
        let result = self.attempt(None).or_else(|error| match self.runner.is_lost() {
            true => Err(error),
            false => self.continue_without_failing_groups(error),
        });
        self.end_undeliverable();
        match &result {
            Ok(_) => self.recovery.record_success(),
            Err(error) if self.runner.is_lost() => self.lose_device(error),
            Err(error) => self.record_failure(error),
        }
        result
    }

    /// Checks the paused groups only if a reader has emptied a full queue, since there may be many.
    fn recheck_paused(&mut self) {
        let changed = self.delivery.has_new_space(self.shared.table.wakeup.space_count());
        if self.scheduler.paused() > 0 && self.journal.as_ref().map_or(changed, |journal| journal.ready(changed)) {
            self.scheduler.recheck_paused();
        }
    }

    /// Computes the groups of a failed step separately. If some succeed, those that failed alone
    /// end with their error.
    fn continue_without_failing_groups(&mut self, error: Error) -> Result<StepReport> {
        let groups = std::mem::take(&mut self.recovery.groups);
        let mut done = StepReport::default();
        let bisection = recovery::bisect(&groups, error, |some| {
            let report = self.attempt(Some(some))?;
            done.prefill_tokens += report.prefill_tokens;
            done.decode_tokens += report.decode_tokens;
            done.sequences += report.sequences;
            done.paused = report.paused;
            Ok(report.sequences)
        });
        self.recovery.groups = groups;
        if bisection.computed == 0 {
            return Err(bisection.error);
        }
        bisection.failing.into_iter().for_each(|(group, error)| self.end_group(group, &error));
        Ok(done)
    }

    /// Records a step in which no group could be computed. After the retry timeout, ends the groups
    /// that have failed since.
    fn record_failure(&mut self, error: &Error) {
        let Some(latest) = self.recovery.record_failure(self.now) else { return };
        let error =
            Error::new(error.code(), format!("no step with this request could be computed for {RETRY_TIMEOUT:?}: {}", error.message()));
        let groups = std::mem::take(&mut self.recovery.groups);
        groups.iter().filter(|group| **group <= latest).for_each(|&group| self.end_group(group, &error));
        self.recovery.groups = groups;
    }

    /// Plans, runs and commits a step of these groups (by their first sequence), or of all ready
    /// groups. If it fails, `groups` are its groups, and nothing else has changed.
    fn attempt(&mut self, groups: Option<&[SeqId]>) -> Result<StepReport> {
        let plan = self.plan(groups);
        self.telemetry.end_phase(Phase::Schedule);
        let Some(plan) = plan else {
            return Ok(StepReport { paused: self.scheduler.paused() as u64, ..StepReport::default() });
        };
        let (load, began) = (StepLoad::for_plan(&plan), self.shared.clock.now());
        self.shared.snapshot().step = Some((load, began));
        let fault = self.journal.as_mut().and_then(Journal::fault);
        if fault.is_some() {
            self.runner.cancel_in_flight(); // as after a real failure
        }
        if let Err(error) = fault.map_or_else(|| self.run(&plan), Err) {
            self.journal.iter_mut().for_each(|journal| journal.failed(&error));
            self.recovery.groups.clear();
            self.recovery.groups.extend(plan.sequences.iter().map(|part| self.scheduler.members(part.seq).next().unwrap_or(part.seq)));
            self.recovery.groups.dedup();
            self.telemetry.counts.steps_failed += 1;
            self.scheduler.rollback(plan);
            self.telemetry.end_phase(Phase::Commit);
            return Err(error);
        }
        let report = self.report(&plan);
        self.mark_started(&plan);
        self.commit(plan);
        self.step_timer.record_step(load, self.shared.clock.now().saturating_sub(began));
        self.telemetry.end_phase(Phase::Commit);
        Ok(report)
    }

    /// Removes the generations that this step started from the waiting queue.
    fn mark_started(&mut self, plan: &StepPlan) {
        for part in plan.sequences.iter().filter(|part| part.begins) {
            if let Some(sequence) = self.requests.deliverer_of_mut(part.seq) {
                self.telemetry.started(sequence, self.now);
                self.shared.table.mark_started(sequence.request, sequence.sequence);
            }
        }
    }

    /// Computes the plan and samples tokens. Changes no lengths.
    fn run(&mut self, plan: &StepPlan) -> Result<()> {
        self.sampling.start_masks(plan, &mut self.requests);
        let ticket = self.runner.submit(plan);
        // Collected even after an error, since a failed step is retried.
        self.sampling.collect_masks(&mut self.requests);
        let ticket = ticket?;
        let on_device = self.sampling.plan_on_device(plan, &self.scheduler, &mut self.requests)?;
        let computed = self.runner.wait_and_sample(ticket, on_device);
        self.telemetry.end_phase(Phase::Run);
        self.sampling.sample(plan, computed?, &self.scheduler, &mut self.requests)?;
        self.telemetry.end_phase(Phase::Decide);
        Ok(())
    }

    fn commit(&mut self, plan: StepPlan) {
        let mut events = std::mem::take(&mut self.events);
        let sampled = std::mem::take(&mut self.sampling.sampled);
        let results = std::mem::take(&mut self.sampling.results);
        self.telemetry.computed(&plan);
        self.commit_beams(&plan);
        self.scheduler.commit(plan, &sampled, &mut events);
        self.emit_prompt_logprobs();
        for event in &events {
            match *event {
                // Tokens of beams are delivered when the search has finished.
                Event::Forked { sampled_token } | Event::Advanced { sampled_token, .. } if self.is_beam(&sampled[sampled_token]) => {}
                Event::Forked { sampled_token } => self.start_sample(&sampled[sampled_token]),
                Event::Advanced { sampled_token, finish, stats } => {
                    self.emit_token(&sampled[sampled_token], &results[sampled_token], finish, stats)
                }
                Event::Failed { sampled_token } => self.fail_sample(&sampled[sampled_token], Error::out_of_memory()),
                Event::Dropped { .. } => {}
            }
        }
        self.end_beams();
        let len = |sampled_token: &SampledToken| Some((sampled_token.child, self.scheduler.find(sampled_token.child)?.tokens.len()));
        self.shared.table.update_lengths(sampled.iter().filter_map(len));
        (self.events, self.sampling.sampled, self.sampling.results) = (events, sampled, results);
    }

    fn emit_prompt_logprobs(&mut self) {
        let prompts = std::mem::take(&mut self.sampling.prompts);
        for (seq, logprobs, top) in prompts.iter() {
            let Some(sequence) = self.requests.sequences.get_mut(&seq) else { continue };
            let sender = sequence.sender.clone();
            let request = sequence.request;
            match sequence.emit_prompt(logprobs, top, self.delivery.empty_output()) {
                Ok(output) => output.into_iter().for_each(|output| self.push(&sender, output)),
                Err(error) => self.sampling.failed_beams.push((request, error)),
            }
        }
        self.sampling.prompts = prompts;
    }

    /// Creates the sequence of a sample when the first token of its parent is sampled several
    /// times.
    fn start_sample(&mut self, sampled_token: &SampledToken) {
        let reserved = self.requests.sequences.try_reserve(1).map_err(Error::from);
        let Some(unstarted) = self.requests.sequences.get_mut(&sampled_token.parent).map(|parent| parent.unstarted_samples.pop()) else {
            return;
        };
        match reserved.and_then(|()| self.sample_of(&self.requests.sequences[&sampled_token.parent], unstarted, sampled_token.child)) {
            Ok(mut sequence) => {
                let (sender, echo) = (sequence.sender.clone(), sequence.repeat_echo());
                self.requests.sequences.insert(sampled_token.child, sequence);
                echo.into_iter().for_each(|output| self.push(&sender, output));
            }
            Err(error) => {
                self.scheduler.remove(sampled_token.child);
                self.fail_sample(sampled_token, error);
            }
        }
    }

    fn sample_of(&self, parent: &ActiveSequence, unstarted: Option<ActiveSequence>, child: SeqId) -> Result<ActiveSequence> {
        let index = parent.request.sample_of(child).expect("a sample has an id of its request");
        let mut sequence = match unstarted {
            Some(mut sequence) => sequence.copy(parent).map(|()| sequence),
            None => parent.fork(),
        }?;
        (sequence.sequence, sequence.index, sequence.seed) = (child, index, branch_seed(parent.seed, index as usize));
        self.shared.table.insert_fork(child, sequence.view(parent.prompt_len))?;
        Ok(sequence)
    }

    fn fail_sample(&mut self, sampled_token: &SampledToken, error: Error) {
        if let Some(request) = self.requests.request_of_beam(sampled_token.parent) {
            return self.sampling.failed_beams.push((request, error));
        }
        let Some(parent) = self.requests.sequences.get(&sampled_token.parent) else { return };
        let index = parent.request.sample_of(sampled_token.child).expect("a sample has an id of its request");
        let output = parent.output().for_sample(index).failed(error);
        let sender = parent.sender.clone();
        self.finish(&sender, output);
    }

    /// Turns a committed sampled token into an output. A stop string in its text ends the sequence.
    fn emit_token(&mut self, sampled_token: &SampledToken, result: &SampleResult, finish: Option<FinishReason>, stats: SequenceStats) {
        let Some(sequence) = self.requests.sequences.get_mut(&sampled_token.child) else { return };
        sequence.branches = 1;
        sequence.timing.set_stats(stats);
        let (text, reusable) = (self.shared.text.as_deref(), self.delivery.empty_output());
        let output = match result {
            Ok(advance) => {
                self.telemetry.counts.generated_tokens += 1;
                self.telemetry.token(sequence, stats);
                sequence.advance(advance, &self.sampling.tops.all[advance.top.clone()], finish, text, reusable)
            }
            Err(why) => {
                sequence.close(FinishReason::Error, self.scheduler.find(sampled_token.child).is_some(), text, reusable).failed(why.clone())
            }
        };
        if !sequence.is_delivered(&output) {
            self.delivery.reuse(output);
            return;
        }
        let sender = sequence.sender.clone();
        match output.finish {
            None => self.push(&sender, output),
            Some(finish) => {
                if finish == FinishReason::Stop {
                    // The scheduler has already removed a sequence that ended in another way.
                    self.scheduler.record_length(sampled_token.child);
                }
                self.release(sampled_token.child);
                self.finish(&sender, output);
            }
        }
    }

    pub(super) fn push(&mut self, sender: &Arc<OutputSender>, output: Output) {
        self.journal.iter_mut().for_each(|journal| journal.record_output(&output));
        self.delivery.push(sender, output);
    }

    /// Queues the last output of a sequence.
    pub(super) fn push_last(&mut self, sender: &Arc<OutputSender>, output: Output) {
        self.journal.iter_mut().for_each(|journal| journal.record_output(&output));
        self.delivery.push_last(sender, output);
    }

    /// Ends the requests whose outputs could not be queued.
    fn end_undeliverable(&mut self) {
        while let Some((request, error)) = self.delivery.next_undeliverable() {
            self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
        }
    }

    pub(super) fn remove_sequence(&mut self, id: SeqId) -> Option<ActiveSequence> {
        self.scheduler.remove(id);
        self.journal.iter_mut().for_each(|journal| journal.remove(id));
        self.requests.sequences.remove(&id)
    }

    pub fn has_failed(&self) -> bool {
        self.shared.table.check().is_err()
    }

    /// Publishes the state of the engine to the other threads.
    pub(super) fn publish(&mut self) -> Stats {
        let stats = self.stats();
        let published = Published { stats, histograms: self.telemetry.histograms };
        *self.shared.published.lock().unwrap_or_else(PoisonError::into_inner) = published;
        self.update_lengths(&mut self.shared.snapshot());
        self.delivery.finish_step();
        if let Err(error) = self.shared.table.check() {
            self.shared.table.close_queues(&error);
        }
        stats
    }

    fn update_lengths(&self, snapshot: &mut AdmissionSnapshot) {
        self.scheduler.write_snapshot(&mut snapshot.scheduler);
        (snapshot.step_time, snapshot.step) = (self.step_timer.model, None);
    }

    fn report(&mut self, plan: &StepPlan) -> StepReport {
        let mut report =
            StepReport { sequences: plan.sequences.len() as u64, paused: self.scheduler.paused() as u64, ..StepReport::default() };
        for part in &plan.sequences {
            *if part.decodes() { &mut report.decode_tokens } else { &mut report.prefill_tokens } += part.tokens as u64;
        }
        self.telemetry.counts.steps += 1;
        self.telemetry.counts.prompt_tokens += report.prefill_tokens;
        self.telemetry.counts.blocks_copied += plan.batch.copies.len() as u64;
        report
    }

    fn stats(&self) -> Stats {
        let blocks = self.scheduler.blocks();
        let slots = (blocks.used_blocks() + self.scheduler.reserved_blocks()) * blocks.block_size();
        let prefix = self.scheduler.prefix();
        Stats {
            waiting: self.scheduler.waiting() as u64,
            running: self.scheduler.running() as u64,
            paused: self.scheduler.paused() as u64,
            idle: self.scheduler.idle() as u64,
            blocks_total: blocks.total() as u64,
            blocks_used: blocks.used_blocks() as u64,
            blocks_cached: blocks.cached_blocks() as u64,
            blocks_free: blocks.free_blocks() as u64,
            slot_utilization: if slots == 0 { 1.0 } else { blocks.filled_slots() as f64 / slots as f64 },
            preemptions: self.scheduler.preemptions(),
            preemptions_swapped: self.scheduler.preemptions_swapped(),
            swapped: blocks.swapped() as u64,
            swap_blocks_total: blocks.host_total() as u64,
            swap_blocks_used: blocks.host_used() as u64,
            blocks_out_of_window: blocks.dropped_blocks() as u64,
            discard_failures: self.runner.discard_failures(),
            prefix_queries: prefix.queries,
            prefix_hits: prefix.hits,
            prompt_tokens_cached: self.telemetry.cached_tokens,
            traces_stopped: self.telemetry.traces_stopped(),
            journals_stopped: self.journal.as_ref().is_some_and(Journal::has_stopped) as u64,
            ..self.telemetry.counts
        }
    }
}
