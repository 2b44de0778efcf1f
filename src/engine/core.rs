//! The core of the engine: takes commands, schedules, runs, samples, commits and delivers outputs.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::active_sequence::ActiveSequence;
use super::beams::{Beams, request_of_beam};
use super::budget_client::BudgetChecks;
use super::clock::Clock;
use super::commands::Pin;
use super::deadlines::Deadlines;
use super::finish::BestOfGroup;
use super::journal::Journal;
use super::metrics::Histograms;
use super::outputs::Output;
use super::queue::OutputSender;
use super::request::branch_seed;
use super::retry::FailureStreak;
use super::runner::{Runner, StepResult};
use super::sampling::{PromptLogprobs, SampleResult, SamplingPass, TopLogprobs, collect_masks, plan_device_sampling};
use super::sequence_table::{Command, SequenceTable};
use super::simulation::{PendingSequence, SchedulerSnapshot};
use super::step_time::{StepLoad, StepTimer};
use super::telemetry::Telemetry;
use super::trace::{Phase, Trace};
use super::{ModelInfo, Stats, StepReport};
use crate::batch::BlockCopy;
use crate::batch::device_sampling::DeviceSampling;
use crate::budget::Lease;
use crate::decode::{Masker, Sampler};
use crate::error::{Error, Result};
use crate::options::EngineOptions;
use crate::scheduler::{Event, FinishReason, GroupId, IdMap, SampledToken, Scheduler, Sequence, SequenceStats, StepPlan};
use crate::sys::float::StandardMode;
use crate::text::Text;
use crate::types::{RequestId, SeqId};

/// The state of the stepping thread, and the state that it shares with other threads.
pub struct EngineCore {
    pub(super) scheduler: Scheduler,
    /// Value of `Wakeup::rooms` when the paused groups were last checked.
    pub(super) space_count: u64,
    pub(super) runner: Box<dyn Runner>,
    /// Lease of the engine, and the block moves of a shrink.
    pub(super) lease: Arc<Lease>,
    pub(super) moves: Vec<BlockCopy>,
    vocab_size: usize,
    /// Fingerprint of the model, the start of all block hashes.
    pub(super) model: [u8; 32],
    /// Instruction path that computes K and V.
    pub(super) isa: &'static str,
    /// Maximum length of a sequence in tokens.
    pub(super) max_len: usize,
    pub(super) sequences: IdMap<SeqId, ActiveSequence>,
    /// Beam searches by request. The beam in slot i has the id of sample i.
    pub(super) beams: BTreeMap<RequestId, Box<Beams>>,
    /// Best-of groups, by request.
    pub(super) contests: IdMap<RequestId, BestOfGroup>,
    pub(super) pins: Vec<Pin>,
    pub(super) deadlines: Deadlines,
    sampler: Sampler,
    /// Worker for grammar masks. The first request with a grammar starts it.
    masker: Option<Masker>,
    /// Sequences whose grammar failed, until they end.
    lost: Vec<(SeqId, Error)>,
    /// Logits that a logits hook edits.
    edited: Vec<f32>,
    /// Samples to draw on the device. `None` if the runner cannot sample.
    device_sampling: Option<DeviceSampling>,
    pub(super) commands: VecDeque<Command>,
    sampled: Vec<SampledToken>,
    /// One decision per sampled token.
    decisions: Vec<SampleResult>,
    tops: TopLogprobs,
    prompts: PromptLogprobs,
    /// Requests whose beam search has failed.
    pub(super) stuck: Vec<(RequestId, Error)>,
    events: Vec<Event>,
    /// Groups of the last failed step, identified by their first sequence.
    pub(super) batch_groups: Vec<SeqId>,
    pub(super) failure_streak: Option<FailureStreak>,
    /// Requests with outputs that could not be queued for lack of memory.
    undeliverable: Vec<(RequestId, Error)>,
    /// Answers that could not be queued for lack of memory and end no request. They are retried.
    deferred_outputs: Vec<(Arc<OutputSender>, Output)>,
    /// An output whose buffers the next output reuses.
    pub(super) reusable_output: Output,
    /// Queues whose readers must be notified at the end of the step.
    unannounced: Vec<Arc<OutputSender>>,
    pub(super) counts: Stats,
    pub(super) step_timer: StepTimer,
    pub(super) telemetry: Telemetry,
    /// Journal that records or replays the inputs of steps.
    pub(super) journal: Option<Journal>,
    /// Start time of the current step. It is read once per step, so that a replay can repeat all
    /// decisions that depend on it.
    pub(super) now: Duration,
    pub(super) shared: Shared,
}

/// The state that the threads of the host share with the stepping thread.
#[derive(Clone)]
pub struct Shared {
    pub text: Option<Arc<Text>>,
    pub table: Arc<SequenceTable>,
    /// Statistics after the last step.
    pub published: Arc<Mutex<Published>>,
    pub snapshot: Arc<Mutex<SchedulerSnapshot>>,
    pub clock: Arc<dyn Clock>,
    /// Whether the budget has asked the engine to check its lease.
    pub wants_check: Arc<AtomicBool>,
    pub budget_checks: Arc<BudgetChecks>,
}

impl Shared {
    pub fn snapshot(&self) -> MutexGuard<'_, SchedulerSnapshot> {
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
            space_count: 0,
            device_sampling: runner.sampling_limits().map(DeviceSampling::new).transpose()?,
            runner,
            lease,
            moves: Vec::new(),
            vocab_size: info.vocab_size,
            model: info.fingerprint,
            isa: info.isa_name(),
            max_len: info.memory.max_model_len,
            sequences: IdMap::default(),
            beams: BTreeMap::new(),
            contests: IdMap::default(),
            pins: Vec::new(),
            deadlines: Deadlines::default(),
            sampler: Sampler::new(info.vocab_size)?,
            masker: None,
            lost: Vec::new(),
            edited: Vec::new(),
            commands: VecDeque::new(),
            sampled: Vec::new(),
            decisions: Vec::new(),
            tops: TopLogprobs::default(),
            prompts: PromptLogprobs::default(),
            stuck: Vec::new(),
            events: Vec::new(),
            batch_groups: Vec::new(),
            failure_streak: None,
            undeliverable: Vec::new(),
            deferred_outputs: Vec::new(),
            reusable_output: Output::default(),
            unannounced: Vec::new(),
            counts: Stats::default(),
            step_timer: StepTimer::default(),
            telemetry: Telemetry::new(shared.clock.clone(), trace),
            journal,
            now: Duration::ZERO,
            shared,
        };
        core.sampled.try_reserve(max_seqs)?;
        core.decisions.try_reserve(max_seqs)?;
        core.events.try_reserve(3 * max_seqs)?;
        core.batch_groups.try_reserve(max_seqs)?;
        core.undeliverable.try_reserve(max_seqs)?;
        core.unannounced.try_reserve(max_seqs)?;
        core.shared.snapshot().reserve(max_seqs)?;
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

    /// Plans, runs and commits a step of these groups (by their first sequence), or of all ready
    /// groups. If it fails, `groups` are its groups, and nothing else has changed.
    pub(super) fn attempt(&mut self, groups: Option<&[SeqId]>) -> Result<StepReport> {
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
            self.batch_groups.clear();
            self.batch_groups.extend(plan.sequences.iter().map(|part| self.scheduler.members(part.seq).next().unwrap_or(part.seq)));
            self.batch_groups.dedup();
            self.counts.steps_failed += 1;
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
            if let Some(sequence) = sequence_of_mut(&mut self.sequences, &self.beams, part.seq) {
                self.telemetry.started(sequence, self.now);
                self.shared.table.mark_started(sequence.request, sequence.sequence);
            }
        }
    }

    /// Computes the plan and samples tokens. Changes no lengths.
    fn run(&mut self, plan: &StepPlan) -> Result<()> {
        self.start_masks(plan);
        let ticket = self.runner.submit(plan);
        // Collected even after an error, since a failed step is retried.
        collect_masks(&mut self.masker, &mut self.sequences, &mut self.lost);
        let ticket = ticket?;
        let computed = match &mut self.device_sampling {
            None => self.runner.wait_and_sample(ticket, &DeviceSampling::default()),
            Some(device_sampling) => {
                device_sampling.clear();
                plan_device_sampling(
                    device_sampling,
                    plan,
                    self.vocab_size,
                    &self.scheduler,
                    &mut self.sequences,
                    &self.beams,
                    &self.lost,
                )?;
                self.runner.wait_and_sample(ticket, device_sampling)
            }
        };
        self.telemetry.end_phase(Phase::Run);
        let StepResult { logits, device_samples: device_sample } = computed?;
        self.sampled.clear();
        self.decisions.clear();
        self.tops.all.clear();
        self.prompts.clear();
        self.stuck.clear();
        let (mut rest, mut device_sample) = (logits, device_sample.iter());
        let mut drawn_rows =
            self.device_sampling.iter().flat_map(|device_sampling| &device_sampling.rows).map(|draw| draw.row as usize).peekable();
        let mut row = 0;
        let mut deciding = SamplingPass {
            scheduler: &self.scheduler,
            sequences: &mut self.sequences,
            lost: &self.lost,
            beams: &mut self.beams,
            sampler: &mut self.sampler,
            edited: &mut self.edited,
            sampled: &mut self.sampled,
            decisions: &mut self.decisions,
            tops: &mut self.tops,
            prompts: &mut self.prompts,
            stuck: &mut self.stuck,
        };
        for part in plan.sequences.iter().filter(|part| part.logits > 0) {
            let (rows, others) = rest.split_at(part.logits * self.vocab_size);
            row += part.logits;
            let device_sample = drawn_rows.next_if_eq(&(row - 1)).and_then(|_| device_sample.next());
            deciding.sample(part, rows, self.vocab_size, device_sample)?;
            rest = others;
        }
        self.telemetry.end_phase(Phase::Decide);
        Ok(())
    }

    /// Starts the computation of the grammar masks, in parallel with the forward pass.
    fn start_masks(&mut self, plan: &StepPlan) {
        for part in plan.sampled() {
            if let Some(constraint) = self.sequences.get_mut(&part.seq).and_then(|sequence| sequence.constraint.take()) {
                self.masker.get_or_insert_default().submit(part.seq, constraint);
            }
        }
    }

    fn commit(&mut self, plan: StepPlan) {
        let mut events = std::mem::take(&mut self.events);
        let sampled = std::mem::take(&mut self.sampled);
        let decisions = std::mem::take(&mut self.decisions);
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
                    self.emit_token(&sampled[sampled_token], &decisions[sampled_token], finish, stats)
                }
                Event::Failed { sampled_token } => self.fail_sample(&sampled[sampled_token], Error::out_of_memory()),
                Event::Dropped { .. } => {}
            }
        }
        self.end_beams();
        let len = |sampled_token: &SampledToken| Some((sampled_token.child, self.scheduler.find(sampled_token.child)?.tokens.len()));
        self.shared.table.update_lengths(sampled.iter().filter_map(len));
        (self.events, self.sampled, self.decisions) = (events, sampled, decisions);
    }

    fn emit_prompt_logprobs(&mut self) {
        let prompts = std::mem::take(&mut self.prompts);
        for (seq, logprobs, top) in prompts.iter() {
            let Some(sequence) = self.sequences.get_mut(&seq) else { continue };
            let sender = sequence.sender.clone();
            let request = sequence.request;
            match sequence.emit_prompt(logprobs, top, std::mem::take(&mut self.reusable_output)) {
                Ok(output) => output.into_iter().for_each(|output| self.push(&sender, output)),
                Err(error) => self.stuck.push((request, error)),
            }
        }
        self.prompts = prompts;
    }

    /// Creates the sequence of a sample when the first token of its parent is sampled several times.
    fn start_sample(&mut self, sampled_token: &SampledToken) {
        let reserved = self.sequences.try_reserve(1).map_err(Error::from);
        let Some(unstarted) = self.sequences.get_mut(&sampled_token.parent).map(|parent| parent.unstarted_samples.pop()) else { return };
        match reserved.and_then(|()| self.sample_of(&self.sequences[&sampled_token.parent], unstarted, sampled_token.child)) {
            Ok(mut sequence) => {
                let (sender, echo) = (sequence.sender.clone(), sequence.repeat_echo());
                self.sequences.insert(sampled_token.child, sequence);
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
        if let Some(request) = request_of_beam(&self.beams, sampled_token.parent) {
            return self.stuck.push((request, error));
        }
        let Some(parent) = self.sequences.get(&sampled_token.parent) else { return };
        let index = parent.request.sample_of(sampled_token.child).expect("a sample has an id of its request");
        let output = parent.output().for_sample(index).failed(error);
        let sender = parent.sender.clone();
        self.finish(&sender, output);
    }

    /// Turns a committed sampled token into an output. A stop string in its text ends the sequence.
    fn emit_token(&mut self, sampled_token: &SampledToken, decision: &SampleResult, finish: Option<FinishReason>, stats: SequenceStats) {
        let Some(sequence) = self.sequences.get_mut(&sampled_token.child) else { return };
        sequence.branches = 1;
        sequence.timing.set_stats(stats);
        let (text, reusable) = (self.shared.text.as_deref(), std::mem::take(&mut self.reusable_output));
        let output = match decision {
            Ok(advance) => {
                self.counts.generated_tokens += 1;
                self.telemetry.token(sequence, stats);
                sequence.advance(advance, &self.tops.all[advance.top.clone()], finish, text, reusable)
            }
            Err(why) => {
                sequence.close(FinishReason::Error, self.scheduler.find(sampled_token.child).is_some(), text, reusable).failed(why.clone())
            }
        };
        if !sequence.is_delivered(&output) {
            self.reusable_output = output.cleared();
            return;
        }
        let sender = sequence.sender.clone();
        match output.finish {
            None => self.push(&sender, output),
            Some(finish) => {
                if finish == FinishReason::Stop {
                    // The scheduler knows about other ends and has removed the sequence already.
                    self.scheduler.record_length(sampled_token.child);
                }
                self.release(sampled_token.child);
                self.finish(&sender, output);
            }
        }
    }

    pub(super) fn push(&mut self, sender: &Arc<OutputSender>, mut output: Output) {
        self.journal.iter_mut().for_each(|journal| journal.record_output(&output));
        match sender.push(&mut output) {
            Ok(first) => self.emit(sender, first, output),
            // The output answers a completed command and can be delivered later.
            Err(_) if output.error.is_some() || !output.sequence_state.is_empty() => self.deferred_outputs.push((sender.clone(), output)),
            Err(error) => self.undeliverable.push((output.request, error)),
        }
    }

    /// Queues the last output of a sequence.
    pub(super) fn emit_last(&mut self, sender: &Arc<OutputSender>, mut output: Output) {
        self.journal.iter_mut().for_each(|journal| journal.record_output(&output));
        let first = sender.push_last(&mut output);
        self.emit(sender, first, output);
    }

    fn emit(&mut self, sender: &Arc<OutputSender>, first: bool, output: Output) {
        self.unannounced.extend(first.then(|| sender.clone()));
        self.reusable_output = output.cleared();
    }

    /// Retries outputs that could not be queued for lack of memory.
    fn emit_deferred(&mut self) {
        let EngineCore { deferred_outputs: later, unannounced, .. } = self;
        later.retain_mut(|(sender, output)| {
            let pushed = sender.push(output);
            unannounced.extend(pushed.as_ref().is_ok_and(|&first| first).then(|| sender.clone()));
            pushed.is_err()
        });
    }

    /// Ends the requests whose outputs could not be queued.
    pub(super) fn end_undeliverable(&mut self) {
        while let Some((request, error)) = self.undeliverable.pop() {
            self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
        }
    }

    pub(super) fn remove_sequence(&mut self, id: SeqId) -> Option<ActiveSequence> {
        self.scheduler.remove(id);
        self.journal.iter_mut().for_each(|journal| journal.forget(id));
        self.sequences.remove(&id)
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
        self.emit_deferred();
        self.unannounced.drain(..).for_each(|sender| sender.notify());
        if let Err(error) = self.shared.table.check() {
            self.shared.table.close_queues(&error);
        }
        stats
    }

    fn update_lengths(&self, snapshot: &mut SchedulerSnapshot) {
        let pending = |sequence: &Sequence| PendingSequence {
            prefill: if sequence.pending() > 1 { sequence.pending() } else { 0 },
            computed: sequence.computed,
            chosen: sequence.generated,
            max_new_tokens: sequence.max_new_tokens(),
            rank: sequence.group.map_or(0, GroupId::rank),
        };
        snapshot.running.clear();
        snapshot.running.extend(self.scheduler.running_sequences().map(pending));
        snapshot.preempted.clear();
        snapshot.preempted.extend(self.scheduler.preempted_sequences().map(pending));
        (snapshot.entries, snapshot.spare_blocks) = self.scheduler.spare();
        (snapshot.step_time, snapshot.length_predictor, snapshot.step) = (self.step_timer.model, *self.scheduler.lengths(), None);
    }

    fn report(&mut self, plan: &StepPlan) -> StepReport {
        let mut report =
            StepReport { sequences: plan.sequences.len() as u64, paused: self.scheduler.paused() as u64, ..StepReport::default() };
        for part in &plan.sequences {
            *if part.decodes() { &mut report.decode_tokens } else { &mut report.prefill_tokens } += part.rows as u64;
        }
        self.counts.steps += 1;
        self.counts.prompt_tokens += report.prefill_tokens;
        self.counts.blocks_copied += plan.batch.copies.len() as u64;
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
            ..self.counts
        }
    }
}

/// Returns the sequence that delivers the outputs of `seq`. `None` for a pin, which has no outputs.
pub(super) fn sequence_of<'a>(
    sequences: &'a IdMap<SeqId, ActiveSequence>,
    beams: &BTreeMap<RequestId, Box<Beams>>,
    seq: SeqId,
) -> Option<&'a ActiveSequence> {
    sequences.get(&seq).or_else(|| sequences.get(&request_of_beam(beams, seq)?.sequence(0)))
}

fn sequence_of_mut<'a>(
    sequences: &'a mut IdMap<SeqId, ActiveSequence>,
    beams: &BTreeMap<RequestId, Box<Beams>>,
    seq: SeqId,
) -> Option<&'a mut ActiveSequence> {
    let speaker = if sequences.contains_key(&seq) { seq } else { request_of_beam(beams, seq)?.sequence(0) };
    sequences.get_mut(&speaker)
}
