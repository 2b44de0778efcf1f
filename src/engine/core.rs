//! The stepping side of an engine: take commands, schedule, run, decide, commit, deliver.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::beams::{Beams, request_of_beam};
use super::clock::Clock;
use super::commands::Pin;
use super::deadlines::Deadlines;
use super::deciding::{Deciding, Decision, collect_masks};
use super::endings::Contest;
use super::forecast::{Lengths, Load, Outlook, Pace, Pending};
use super::insight::Insight;
use super::journal::Journal;
use super::metrics::Histograms;
use super::outputs::{Logprobs, Output};
use super::queue::Outbox;
use super::registry::{Command, Registry};
use super::request::branch_seed;
use super::retry::Trouble;
use super::runner::Runner;
use super::stream::Stream;
use super::swapping::Meter;
use super::trace::{Phase, Trace};
use super::{ModelInfo, Stats, StepReport};
use crate::arena::Lease;
use crate::batch::BlockCopy;
use crate::decode::{Masker, Sampler};
use crate::error::{Error, Result};
use crate::options::EngineOptions;
use crate::sched::{Choice, Event, FinishReason, Past, Scheduler, Sequence, StepPlan};
use crate::sys::float::StandardMode;
use crate::text::Text;

/// What only the stepping thread touches, and what it shares with the others.
pub struct Core {
    pub(super) scheduler: Scheduler,
    pub(super) runner: Box<dyn Runner>,
    /// The engine's part of its arena, and the moves of blocks when that becomes smaller.
    pub(super) lease: Arc<Lease>,
    pub(super) moves: Vec<BlockCopy>,
    vocab_size: usize,
    /// What chains of blocks begin with.
    pub(super) model: [u8; 32],
    /// The instruction path that computes K and V.
    pub(super) isa: &'static str,
    /// Most tokens of a sequence.
    pub(super) longest: usize,
    pub(super) streams: HashMap<u64, Stream>,
    /// By request, whose id is the first beam's; the others have the next ones.
    pub(super) beams: BTreeMap<u64, Box<Beams>>,
    /// Requests that draw more samples than they return.
    pub(super) contests: HashMap<u64, Contest>,
    pub(super) pins: Vec<Pin>,
    pub(super) deadlines: Deadlines,
    sampler: Sampler,
    /// Started by the first request with a grammar.
    masker: Option<Masker>,
    /// Sequences whose grammar failed in this step.
    lost: Vec<(u64, Error)>,
    /// Logits that a host edits.
    edited: Vec<f32>,
    pub(super) commands: VecDeque<Command>,
    choices: Vec<Choice>,
    /// One for each choice.
    decisions: Vec<Decision>,
    /// Of prompts, in the step that is under way.
    prompt_logprobs: Vec<(u64, Logprobs)>,
    /// Requests whose beams cannot go on.
    pub(super) stuck: Vec<(u64, Error)>,
    events: Vec<Event>,
    /// The groups in the last step that could not be computed, by their first sequence.
    pub(super) suspects: Vec<u64>,
    pub(super) trouble: Option<Trouble>,
    /// Whose readers are to be told at the end of the step.
    unannounced: Vec<Arc<Outbox>>,
    pub(super) counts: Stats,
    pace: Pace,
    pub(super) lengths: Lengths,
    /// None: nobody asks what things cost.
    pub(super) meter: Option<Meter>,
    pub(super) insight: Insight,
    /// Who writes down, or says, what comes from outside of a step.
    pub(super) journal: Option<Journal>,
    /// When the step under way began: read once, so that all it decides by time can be decided again.
    pub(super) now: Duration,
    pub(super) shared: Shared,
}

/// What the host's threads see of the stepping one.
#[derive(Clone)]
pub struct Shared {
    pub text: Option<Arc<Text>>,
    pub registry: Arc<Registry>,
    /// As of the last step.
    pub published: Arc<Mutex<Published>>,
    pub outlook: Arc<Mutex<Outlook>>,
    pub clock: Arc<dyn Clock>,
}

impl Shared {
    pub fn outlook(&self) -> MutexGuard<'_, Outlook> {
        self.outlook.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub struct Published {
    pub stats: Stats,
    pub histograms: Histograms,
}

impl Core {
    pub fn new(
        scheduler: Scheduler,
        runner: Box<dyn Runner>,
        lease: Arc<Lease>,
        info: &ModelInfo,
        options: &EngineOptions,
        shared: Shared,
        journal: Option<Journal>,
    ) -> Result<Core> {
        let max_seqs = options.max_seqs;
        let trace = options.trace_path.as_deref().map(Trace::create).transpose()?;
        let mut core = Core {
            scheduler,
            runner,
            lease,
            moves: Vec::new(),
            vocab_size: info.vocab_size,
            model: info.fingerprint,
            isa: info.isa_name(),
            longest: info.memory.max_model_len,
            streams: HashMap::new(),
            beams: BTreeMap::new(),
            contests: HashMap::new(),
            pins: Vec::new(),
            deadlines: Deadlines::default(),
            sampler: Sampler::new(info.vocab_size)?,
            masker: None,
            lost: Vec::new(),
            edited: Vec::new(),
            commands: VecDeque::new(),
            choices: Vec::new(),
            decisions: Vec::new(),
            prompt_logprobs: Vec::new(),
            stuck: Vec::new(),
            events: Vec::new(),
            suspects: Vec::new(),
            trouble: None,
            unannounced: Vec::new(),
            counts: Stats::default(),
            pace: Pace::default(),
            lengths: Lengths::default(),
            meter: None,
            insight: Insight::new(shared.clock.clone(), trace),
            journal,
            now: Duration::ZERO,
            shared,
        };
        core.choices.try_reserve(max_seqs)?;
        core.decisions.try_reserve(max_seqs)?;
        core.events.try_reserve(3 * max_seqs)?;
        core.suspects.try_reserve(max_seqs)?;
        core.govern();
        core.publish();
        Ok(core)
    }

    /// One iteration.
    pub fn step(&mut self) -> Result<StepReport> {
        // With the core in hand: a thread that comes while another one fails must not step what is left.
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

    /// A step of the groups that may take part, by their first sequence. Where it fails, they are the suspects and nothing has changed.
    pub(super) fn attempt(&mut self, may: impl Fn(u64) -> bool) -> Result<StepReport> {
        let plan = self.plan(may);
        self.insight.lap(Phase::Schedule);
        let Some(plan) = plan else {
            return Ok(StepReport { paused: self.scheduler.paused() as u64, ..StepReport::default() });
        };
        let (load, began) = (Load::of(&plan), self.shared.clock.now());
        self.shared.outlook().step = Some((load, began));
        let fault = self.journal.as_mut().and_then(Journal::fault);
        if let Err(error) = fault.map_or_else(|| self.run(&plan), Err) {
            self.journal.iter_mut().for_each(|journal| journal.failed(&error));
            self.suspects.clear();
            self.suspects.extend(plan.parts.iter().map(|part| self.scheduler.members(part.seq)[0]));
            self.suspects.dedup();
            self.counts.steps_failed += 1;
            self.scheduler.rollback(plan);
            self.insight.lap(Phase::Commit);
            return Err(error);
        }
        let report = self.report(&plan);
        self.begin(&plan);
        self.commit(plan);
        self.pace.observe(load, self.shared.clock.now().saturating_sub(began));
        self.insight.lap(Phase::Commit);
        Ok(report)
    }

    /// Turns of which a step has computed some wait no more.
    fn begin(&mut self, plan: &StepPlan) {
        for part in plan.parts.iter().filter(|part| part.begins) {
            if let Some(stream) = stream_of_mut(&mut self.streams, &self.beams, part.seq) {
                self.insight.begins(stream, self.now);
                self.shared.registry.begun(stream.request, stream.sequence);
            }
        }
    }

    /// Computes the plan and decides on tokens. Changes no lengths.
    fn run(&mut self, plan: &StepPlan) -> Result<()> {
        self.start_masks(plan);
        let began = self.meter.as_ref().map(|_| self.shared.clock.now());
        let ticket = self.runner.submit(plan);
        let logits = ticket.and_then(|ticket| self.runner.wait(ticket));
        if let (Some(meter), Some(began), Ok(_)) = (&mut self.meter, began, &logits) {
            meter.computed(plan, self.shared.clock.now().saturating_sub(began));
        }
        // Taken back even where there are no logits: a step that failed is tried again.
        collect_masks(&mut self.masker, &mut self.streams, &mut self.lost);
        self.insight.lap(Phase::Run);
        let logits = logits?;
        self.choices.clear();
        self.decisions.clear();
        self.prompt_logprobs.clear();
        self.stuck.clear();
        let mut rest = logits;
        let mut deciding = Deciding {
            scheduler: &self.scheduler,
            streams: &mut self.streams,
            lost: &self.lost,
            beams: &mut self.beams,
            sampler: &mut self.sampler,
            edited: &mut self.edited,
            choices: &mut self.choices,
            decisions: &mut self.decisions,
            prompt_logprobs: &mut self.prompt_logprobs,
            stuck: &mut self.stuck,
        };
        for part in plan.parts.iter().filter(|part| part.logits > 0) {
            let (rows, others) = rest.split_at(part.logits * self.vocab_size);
            deciding.part(part, rows, self.vocab_size)?;
            rest = others;
        }
        self.insight.lap(Phase::Decide);
        Ok(())
    }

    /// What grammars allow is found out beside the forward pass.
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
        self.tell_prompts();
        for event in &events {
            match *event {
                // What beams chose is told when their search is done.
                Event::Forked { choice } | Event::Advanced { choice, .. } if self.is_beam(&choices[choice]) => {}
                Event::Forked { choice } => self.branch(&choices[choice]),
                Event::Advanced { choice, finish, past } => self.deliver(&choices[choice], &decisions[choice], finish, past),
                Event::Failed { choice } => self.never_born(&choices[choice], Error::out_of_memory()),
                Event::Dropped { .. } => {}
            }
        }
        self.end_beams();
        let len = |choice: &Choice| Some((choice.child, self.scheduler.get(choice.child).ok()?.tokens.len()));
        self.shared.registry.grown(choices.iter().filter_map(len));
        (self.events, self.choices, self.decisions) = (events, choices, decisions);
    }

    fn tell_prompts(&mut self) {
        for (seq, logprobs) in std::mem::take(&mut self.prompt_logprobs) {
            let Some(stream) = self.streams.get_mut(&seq) else { continue };
            let outbox = stream.outbox.clone();
            let request = stream.request;
            match stream.tell_prompt(logprobs) {
                Ok(output) => output.into_iter().for_each(|output| self.push(&outbox, output)),
                Err(error) => self.stuck.push((request, error)),
            }
        }
    }

    /// A first token that was chosen several times makes several streams of one.
    fn branch(&mut self, choice: &Choice) {
        let room = self.streams.try_reserve(1).map_err(Error::from);
        let Some(parent) = self.streams.get(&choice.parent) else { return };
        match room.and_then(|()| self.branch_of(parent, choice.child)) {
            Ok(mut stream) => {
                let (outbox, echo) = (stream.outbox.clone(), stream.echo_again());
                self.streams.insert(choice.child, stream);
                echo.into_iter().for_each(|output| self.push(&outbox, output));
            }
            Err(error) => {
                self.scheduler.remove(choice.child);
                self.never_born(choice, error);
            }
        }
    }

    fn branch_of(&self, parent: &Stream, child: u64) -> Result<Stream> {
        let index = (child - parent.request) as u32;
        let mut stream = parent.fork()?;
        (stream.sequence, stream.index, stream.seed) = (child, index, branch_seed(parent.seed, index as usize));
        self.shared.registry.born(child, stream.known(parent.prompt_len))?;
        Ok(stream)
    }

    fn never_born(&mut self, choice: &Choice, error: Error) {
        if let Some(request) = request_of_beam(&self.beams, choice.parent) {
            return self.stuck.push((request, error));
        }
        let Some(parent) = self.streams.get(&choice.parent) else { return };
        let output = parent.output().of((choice.child - parent.request) as u32).failed(error);
        let outbox = parent.outbox.clone();
        self.finish(&outbox, output);
    }

    /// Turns a committed choice into an output; a stop string found in its text ends the sequence.
    fn deliver(&mut self, choice: &Choice, decision: &Decision, finish: Option<FinishReason>, past: Past) {
        let Some(stream) = self.streams.get_mut(&choice.child) else { return };
        stream.branches = 1;
        stream.timing.set_past(past);
        let text = self.shared.text.as_deref();
        let output = match decision {
            Ok(advance) => {
                self.counts.generated_tokens += 1;
                self.insight.token(stream, past);
                stream.advance(advance, finish, text)
            }
            Err(why) => Some(stream.close(FinishReason::Error, self.scheduler.get(choice.child).is_ok(), text).failed(why.clone())),
        };
        let Some(output) = output else { return };
        let outbox = stream.outbox.clone();
        match output.finish {
            None => self.push(&outbox, output),
            Some(finish) => {
                if matches!(finish, FinishReason::Stop | FinishReason::Length) {
                    self.lengths.observe(stream.generated, stream.rules.params.max_tokens);
                }
                self.let_go(choice.child);
                self.finish(&outbox, output);
            }
        }
    }

    pub(super) fn push(&mut self, outbox: &Arc<Outbox>, output: Output) {
        self.journal.iter_mut().for_each(|journal| journal.says(&output));
        if outbox.push(output) {
            self.unannounced.push(outbox.clone());
        }
    }

    pub(super) fn forget(&mut self, id: u64) -> Option<Stream> {
        self.scheduler.remove(id);
        self.streams.remove(&id)
    }

    pub fn has_failed(&self) -> bool {
        self.shared.registry.check().is_err()
    }

    /// Lets the other threads see where the engine stands now.
    pub(super) fn publish(&mut self) -> Stats {
        let stats = self.stats();
        let published = Published { stats, histograms: self.insight.histograms };
        *self.shared.published.lock().unwrap_or_else(PoisonError::into_inner) = published;
        self.look_ahead(&mut self.shared.outlook());
        self.unannounced.drain(..).for_each(|outbox| outbox.announce());
        if let Err(error) = self.shared.registry.check() {
            self.shared.registry.close_queues(&error);
        }
        stats
    }

    fn look_ahead(&self, outlook: &mut Outlook) {
        let pending = |sequence: &Sequence| {
            let max_tokens = stream_of(&self.streams, &self.beams, sequence.id).and_then(|stream| stream.rules.params.max_tokens);
            let room = sequence.max_len.saturating_sub(sequence.tokens.len());
            let output = self.lengths.expect(max_tokens, sequence.generated, room + sequence.generated);
            let prefill = if sequence.pending() > 1 { sequence.pending() } else { 0 };
            Pending { prefill, computed: sequence.computed, output }
        };
        outlook.running.clear();
        outlook.running.extend(self.scheduler.running_sequences().map(pending));
        outlook.preempted.clear();
        outlook.preempted.extend(self.scheduler.preempted_sequences().map(pending));
        (outlook.places, outlook.spare_blocks) = self.scheduler.spare();
        (outlook.pace, outlook.lengths, outlook.step) = (self.pace, self.lengths, None);
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
            prefix_queries: prefix.queries,
            prefix_hits: prefix.hits,
            prompt_tokens_cached: self.insight.cached_tokens,
            traces_stopped: self.insight.traces_stopped(),
            journals_stopped: self.journal.as_ref().is_some_and(Journal::has_stopped) as u64,
            ..self.counts
        }
    }
}

/// The stream that speaks for `seq`. None: a pin, which nobody reads.
pub(super) fn stream_of<'a>(streams: &'a HashMap<u64, Stream>, beams: &BTreeMap<u64, Box<Beams>>, seq: u64) -> Option<&'a Stream> {
    streams.get(&seq).or_else(|| streams.get(&request_of_beam(beams, seq)?))
}

fn stream_of_mut<'a>(streams: &'a mut HashMap<u64, Stream>, beams: &BTreeMap<u64, Box<Beams>>, seq: u64) -> Option<&'a mut Stream> {
    let speaker = if streams.contains_key(&seq) { seq } else { request_of_beam(beams, seq)? };
    streams.get_mut(&speaker)
}
