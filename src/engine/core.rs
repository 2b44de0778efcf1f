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

/// The state of the stepping thread, and the state that it shares with other threads.
pub struct EngineCore {
    pub(super) scheduler: Scheduler,
    /// Value of `Wakeup::rooms` when the paused groups were last checked.
    pub(super) rooms: u64,
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
    pub(super) longest: usize,
    pub(super) streams: IdMap<u64, ActiveSequence>,
    /// Beam searches by request. The id of the first beam is that of the request. The other beams
    /// have the following ids.
    pub(super) beams: BTreeMap<u64, Box<Beams>>,
    /// Best-of groups, by request.
    pub(super) contests: IdMap<u64, BestOfGroup>,
    pub(super) pins: Vec<Pin>,
    pub(super) deadlines: Deadlines,
    sampler: Sampler,
    /// Worker for grammar masks. The first request with a grammar starts it.
    masker: Option<Masker>,
    /// Sequences whose grammar failed, until they end.
    lost: Vec<(u64, Error)>,
    /// Logits that a logits hook edits.
    edited: Vec<f32>,
    /// Samples to draw on the device. `None` if the runner cannot sample.
    draws: Option<DeviceSampling>,
    pub(super) commands: VecDeque<Command>,
    choices: Vec<SampledToken>,
    /// One decision per choice.
    decisions: Vec<SampleResult>,
    tops: TopLogprobs,
    prompts: PromptLogprobs,
    /// Requests whose beam search has failed.
    pub(super) stuck: Vec<(u64, Error)>,
    events: Vec<Event>,
    /// Groups of the last failed step, identified by their first sequence.
    pub(super) suspects: Vec<u64>,
    pub(super) trouble: Option<FailureStreak>,
    /// Requests with outputs that could not be queued for lack of memory.
    unheard: Vec<(u64, Error)>,
    /// Answers that could not be queued for lack of memory and end no request. They are retried.
    later: Vec<(Arc<OutputSender>, Output)>,
    /// An output whose buffers the next output reuses.
    pub(super) blank: Output,
    /// Queues whose readers must be notified at the end of the step.
    unannounced: Vec<Arc<OutputSender>>,
    pub(super) counts: Stats,
    pub(super) meter: StepTimer,
    pub(super) insight: Telemetry,
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
    pub registry: Arc<SequenceTable>,
    /// Statistics after the last step.
    pub published: Arc<Mutex<Published>>,
    pub outlook: Arc<Mutex<SchedulerSnapshot>>,
    pub clock: Arc<dyn Clock>,
    /// Whether the budget has asked the engine to check its lease.
    pub called: Arc<AtomicBool>,
    pub governors: Arc<BudgetChecks>,
}

impl Shared {
    pub fn snapshot(&self) -> MutexGuard<'_, SchedulerSnapshot> {
        self.outlook.lock().unwrap_or_else(PoisonError::into_inner)
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
            rooms: 0,
            draws: runner.sampling_limits().map(DeviceSampling::new).transpose()?,
            runner,
            lease,
            moves: Vec::new(),
            vocab_size: info.vocab_size,
            model: info.fingerprint,
            isa: info.isa_name(),
            longest: info.memory.max_model_len,
            streams: IdMap::default(),
            beams: BTreeMap::new(),
            contests: IdMap::default(),
            pins: Vec::new(),
            deadlines: Deadlines::default(),
            sampler: Sampler::new(info.vocab_size)?,
            masker: None,
            lost: Vec::new(),
            edited: Vec::new(),
            commands: VecDeque::new(),
            choices: Vec::new(),
            decisions: Vec::new(),
            tops: TopLogprobs::default(),
            prompts: PromptLogprobs::default(),
            stuck: Vec::new(),
            events: Vec::new(),
            suspects: Vec::new(),
            trouble: None,
            unheard: Vec::new(),
            later: Vec::new(),
            blank: Output::default(),
            unannounced: Vec::new(),
            counts: Stats::default(),
            meter: StepTimer::default(),
            insight: Telemetry::new(shared.clock.clone(), trace),
            journal,
            now: Duration::ZERO,
            shared,
        };
        core.choices.try_reserve(max_seqs)?;
        core.decisions.try_reserve(max_seqs)?;
        core.events.try_reserve(3 * max_seqs)?;
        core.suspects.try_reserve(max_seqs)?;
        core.unheard.try_reserve(max_seqs)?;
        core.unannounced.try_reserve(max_seqs)?;
        core.shared.snapshot().reserve(max_seqs)?;
        Ok(core)
    }

    /// Runs one step.
    pub fn step(&mut self) -> Result<StepReport> {
        // The check needs the lock: a thread that waited for the lock while another one failed must
        // not step.
        self.shared.registry.check()?;
        let _mode = StandardMode::enter();
        self.now = self.shared.clock.now();
        self.insight.step_begins(self.now);
        self.journal.iter_mut().for_each(|journal| journal.begin(self.now));
        let result = catch_unwind(AssertUnwindSafe(|| self.advance()));
        let result = result.unwrap_or_else(|panic| Err(self.fail(panic)));
        self.journal.iter_mut().for_each(|journal| journal.end(&result));
        let stats = self.publish();
        self.insight.step_ends(&result, &stats);
        result.map(|report| StepReport { unfinished: self.shared.registry.unfinished(), ..report })
    }

    /// Plans, runs and commits a step of these groups (by their first sequence), or of all ready
    /// groups. If it fails, `suspects` are its groups, and nothing else has changed.
    pub(super) fn attempt(&mut self, groups: Option<&[u64]>) -> Result<StepReport> {
        let plan = self.plan(groups);
        self.insight.end_phase(Phase::Schedule);
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
            self.suspects.clear();
            self.suspects.extend(plan.parts.iter().map(|part| self.scheduler.members(part.seq).next().unwrap_or(part.seq)));
            self.suspects.dedup();
            self.counts.steps_failed += 1;
            self.scheduler.rollback(plan);
            self.insight.end_phase(Phase::Commit);
            return Err(error);
        }
        let report = self.report(&plan);
        self.mark_started(&plan);
        self.commit(plan);
        self.meter.record_step(load, self.shared.clock.now().saturating_sub(began));
        self.insight.end_phase(Phase::Commit);
        Ok(report)
    }

    /// Removes the turns that this step started from the waiting queue.
    fn mark_started(&mut self, plan: &StepPlan) {
        for part in plan.parts.iter().filter(|part| part.begins) {
            if let Some(stream) = sequence_of_mut(&mut self.streams, &self.beams, part.seq) {
                self.insight.started(stream, self.now);
                self.shared.registry.mark_started(stream.request, stream.sequence);
            }
        }
    }

    /// Computes the plan and samples tokens. Changes no lengths.
    fn run(&mut self, plan: &StepPlan) -> Result<()> {
        self.start_masks(plan);
        let ticket = self.runner.submit(plan);
        // Collected even after an error, since a failed step is retried.
        collect_masks(&mut self.masker, &mut self.streams, &mut self.lost);
        let ticket = ticket?;
        let computed = match &mut self.draws {
            None => self.runner.wait_and_sample(ticket, &DeviceSampling::default()),
            Some(draws) => {
                draws.clear();
                plan_device_sampling(draws, plan, self.vocab_size, &self.scheduler, &mut self.streams, &self.beams, &self.lost)?;
                self.runner.wait_and_sample(ticket, draws)
            }
        };
        self.insight.end_phase(Phase::Run);
        let StepResult { logits, drawn } = computed?;
        self.choices.clear();
        self.decisions.clear();
        self.tops.all.clear();
        self.prompts.clear();
        self.stuck.clear();
        let (mut rest, mut drawn) = (logits, drawn.iter());
        let mut drawn_rows = self.draws.iter().flat_map(|draws| &draws.draws).map(|draw| draw.row as usize).peekable();
        let mut row = 0;
        let mut deciding = SamplingPass {
            scheduler: &self.scheduler,
            streams: &mut self.streams,
            lost: &self.lost,
            beams: &mut self.beams,
            sampler: &mut self.sampler,
            edited: &mut self.edited,
            choices: &mut self.choices,
            decisions: &mut self.decisions,
            tops: &mut self.tops,
            prompts: &mut self.prompts,
            stuck: &mut self.stuck,
        };
        for part in plan.parts.iter().filter(|part| part.logits > 0) {
            let (rows, others) = rest.split_at(part.logits * self.vocab_size);
            row += part.logits;
            let drawn = drawn_rows.next_if_eq(&(row - 1)).and_then(|_| drawn.next());
            deciding.sample(part, rows, self.vocab_size, drawn)?;
            rest = others;
        }
        self.insight.end_phase(Phase::Decide);
        Ok(())
    }

    /// Starts the computation of the grammar masks, in parallel with the forward pass.
    fn start_masks(&mut self, plan: &StepPlan) {
        for part in plan.sampled() {
            if let Some(constraint) = self.streams.get_mut(&part.seq).and_then(|stream| stream.constraint.take()) {
                self.masker.get_or_insert_default().submit(part.seq, constraint);
            }
        }
    }

    fn commit(&mut self, plan: StepPlan) {
        let mut events = std::mem::take(&mut self.events);
        let choices = std::mem::take(&mut self.choices);
        let decisions = std::mem::take(&mut self.decisions);
        self.insight.computed(&plan);
        self.commit_beams(&plan);
        self.scheduler.commit(plan, &choices, &mut events);
        self.emit_prompt_logprobs();
        for event in &events {
            match *event {
                // Tokens of beams are delivered when the search has finished.
                Event::Forked { choice } | Event::Advanced { choice, .. } if self.is_beam(&choices[choice]) => {}
                Event::Forked { choice } => self.start_sample(&choices[choice]),
                Event::Advanced { choice, finish, past } => self.emit_token(&choices[choice], &decisions[choice], finish, past),
                Event::Failed { choice } => self.fail_sample(&choices[choice], Error::out_of_memory()),
                Event::Dropped { .. } => {}
            }
        }
        self.end_beams();
        let len = |choice: &SampledToken| Some((choice.child, self.scheduler.find(choice.child)?.tokens.len()));
        self.shared.registry.update_lengths(choices.iter().filter_map(len));
        (self.events, self.choices, self.decisions) = (events, choices, decisions);
    }

    fn emit_prompt_logprobs(&mut self) {
        let prompts = std::mem::take(&mut self.prompts);
        for (seq, logprobs, top) in prompts.iter() {
            let Some(stream) = self.streams.get_mut(&seq) else { continue };
            let outbox = stream.outbox.clone();
            let request = stream.request;
            match stream.emit_prompt(logprobs, top, std::mem::take(&mut self.blank)) {
                Ok(output) => output.into_iter().for_each(|output| self.push(&outbox, output)),
                Err(error) => self.stuck.push((request, error)),
            }
        }
        self.prompts = prompts;
    }

    /// Creates the stream of a sample when the first token of its parent is sampled several times.
    fn start_sample(&mut self, choice: &SampledToken) {
        let room = self.streams.try_reserve(1).map_err(Error::from);
        let Some(unborn) = self.streams.get_mut(&choice.parent).map(|parent| parent.unborn.pop()) else { return };
        match room.and_then(|()| self.sample_of(&self.streams[&choice.parent], unborn, choice.child)) {
            Ok(mut stream) => {
                let (outbox, echo) = (stream.outbox.clone(), stream.repeat_echo());
                self.streams.insert(choice.child, stream);
                echo.into_iter().for_each(|output| self.push(&outbox, output));
            }
            Err(error) => {
                self.scheduler.remove(choice.child);
                self.fail_sample(choice, error);
            }
        }
    }

    fn sample_of(&self, parent: &ActiveSequence, unborn: Option<ActiveSequence>, child: u64) -> Result<ActiveSequence> {
        let index = (child - parent.request) as u32;
        let mut stream = match unborn {
            Some(mut stream) => stream.copy(parent).map(|()| stream),
            None => parent.fork(),
        }?;
        (stream.sequence, stream.index, stream.seed) = (child, index, branch_seed(parent.seed, index as usize));
        self.shared.registry.insert_fork(child, stream.view(parent.prompt_len))?;
        Ok(stream)
    }

    fn fail_sample(&mut self, choice: &SampledToken, error: Error) {
        if let Some(request) = request_of_beam(&self.beams, choice.parent) {
            return self.stuck.push((request, error));
        }
        let Some(parent) = self.streams.get(&choice.parent) else { return };
        let output = parent.output().for_sample((choice.child - parent.request) as u32).failed(error);
        let outbox = parent.outbox.clone();
        self.finish(&outbox, output);
    }

    /// Turns a committed choice into an output. A stop string in its text ends the sequence.
    fn emit_token(&mut self, choice: &SampledToken, decision: &SampleResult, finish: Option<FinishReason>, past: SequenceStats) {
        let Some(stream) = self.streams.get_mut(&choice.child) else { return };
        stream.branches = 1;
        stream.timing.set_stats(past);
        let (text, blank) = (self.shared.text.as_deref(), std::mem::take(&mut self.blank));
        let output = match decision {
            Ok(advance) => {
                self.counts.generated_tokens += 1;
                self.insight.token(stream, past);
                stream.advance(advance, &self.tops.all[advance.top.clone()], finish, text, blank)
            }
            Err(why) => stream.close(FinishReason::Error, self.scheduler.find(choice.child).is_some(), text, blank).failed(why.clone()),
        };
        if !stream.is_delivered(&output) {
            self.blank = output.cleared();
            return;
        }
        let outbox = stream.outbox.clone();
        match output.finish {
            None => self.push(&outbox, output),
            Some(finish) => {
                if finish == FinishReason::Stop {
                    // The scheduler knows about other ends and has removed the sequence already.
                    self.scheduler.record_length(choice.child);
                }
                self.release(choice.child);
                self.finish(&outbox, output);
            }
        }
    }

    pub(super) fn push(&mut self, outbox: &Arc<OutputSender>, mut output: Output) {
        self.journal.iter_mut().for_each(|journal| journal.record_output(&output));
        match outbox.push(&mut output) {
            Ok(first) => self.emit(outbox, first, output),
            // The output answers a completed command and can be delivered later.
            Err(_) if output.error.is_some() || !output.sequence_state.is_empty() => self.later.push((outbox.clone(), output)),
            Err(error) => self.unheard.push((output.request, error)),
        }
    }

    /// Queues the last output of a sequence.
    pub(super) fn emit_last(&mut self, outbox: &Arc<OutputSender>, mut output: Output) {
        self.journal.iter_mut().for_each(|journal| journal.record_output(&output));
        let first = outbox.push_last(&mut output);
        self.emit(outbox, first, output);
    }

    fn emit(&mut self, outbox: &Arc<OutputSender>, first: bool, output: Output) {
        self.unannounced.extend(first.then(|| outbox.clone()));
        self.blank = output.cleared();
    }

    /// Retries outputs that could not be queued for lack of memory.
    fn emit_deferred(&mut self) {
        let EngineCore { later, unannounced, .. } = self;
        later.retain_mut(|(outbox, output)| {
            let pushed = outbox.push(output);
            unannounced.extend(pushed.as_ref().is_ok_and(|&first| first).then(|| outbox.clone()));
            pushed.is_err()
        });
    }

    /// Ends the requests whose outputs could not be queued.
    pub(super) fn end_undeliverable(&mut self) {
        while let Some((request, error)) = self.unheard.pop() {
            self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
        }
    }

    pub(super) fn remove_sequence(&mut self, id: u64) -> Option<ActiveSequence> {
        self.scheduler.remove(id);
        self.journal.iter_mut().for_each(|journal| journal.forget(id));
        self.streams.remove(&id)
    }

    pub fn has_failed(&self) -> bool {
        self.shared.registry.check().is_err()
    }

    /// Publishes the state of the engine to the other threads.
    pub(super) fn publish(&mut self) -> Stats {
        let stats = self.stats();
        let published = Published { stats, histograms: self.insight.histograms };
        *self.shared.published.lock().unwrap_or_else(PoisonError::into_inner) = published;
        self.update_lengths(&mut self.shared.snapshot());
        self.emit_deferred();
        self.unannounced.drain(..).for_each(|outbox| outbox.notify());
        if let Err(error) = self.shared.registry.check() {
            self.shared.registry.close_queues(&error);
        }
        stats
    }

    fn update_lengths(&self, outlook: &mut SchedulerSnapshot) {
        let pending = |sequence: &Sequence| PendingSequence {
            prefill: if sequence.pending() > 1 { sequence.pending() } else { 0 },
            computed: sequence.computed,
            chosen: sequence.generated,
            most: sequence.max_new_tokens(),
            rank: sequence.group.map_or(0, GroupId::rank),
        };
        outlook.running.clear();
        outlook.running.extend(self.scheduler.running_sequences().map(pending));
        outlook.preempted.clear();
        outlook.preempted.extend(self.scheduler.preempted_sequences().map(pending));
        (outlook.places, outlook.spare_blocks) = self.scheduler.spare();
        (outlook.pace, outlook.lengths, outlook.step) = (self.meter.pace, *self.scheduler.lengths(), None);
    }

    fn report(&mut self, plan: &StepPlan) -> StepReport {
        let mut report = StepReport { sequences: plan.parts.len() as u64, paused: self.scheduler.paused() as u64, ..StepReport::default() };
        for part in &plan.parts {
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
            prompt_tokens_cached: self.insight.cached_tokens,
            traces_stopped: self.insight.traces_stopped(),
            journals_stopped: self.journal.as_ref().is_some_and(Journal::has_stopped) as u64,
            ..self.counts
        }
    }
}

/// Returns the stream that delivers the outputs of `seq`. `None` for a pin, which has no outputs.
pub(super) fn sequence_of<'a>(
    streams: &'a IdMap<u64, ActiveSequence>,
    beams: &BTreeMap<u64, Box<Beams>>,
    seq: u64,
) -> Option<&'a ActiveSequence> {
    streams.get(&seq).or_else(|| streams.get(&request_of_beam(beams, seq)?))
}

fn sequence_of_mut<'a>(
    streams: &'a mut IdMap<u64, ActiveSequence>,
    beams: &BTreeMap<u64, Box<Beams>>,
    seq: u64,
) -> Option<&'a mut ActiveSequence> {
    let speaker = if streams.contains_key(&seq) { seq } else { request_of_beam(beams, seq)? };
    streams.get_mut(&speaker)
}
