//! The stepping side of an engine: take commands, schedule, run, decide, commit, deliver.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use super::outputs::Output;
use super::queue::Outbox;
use super::registry::{Command, Registry};
use super::runner::Runner;
use super::stream::Stream;
use super::{Stats, StepReport};
use crate::decode::{Masker, NoChoice, Sampler, logprob};
use crate::error::{Error, Result, try_vec};
use crate::sched::{Choice, Event, FinishReason, Scheduler, StepPlan, Verdict};
use crate::sys::float::StandardMode;
use crate::sys::quiet;
use crate::text::Text;

/// What only the stepping thread touches, and what it shares with the others.
pub struct Core {
    scheduler: Scheduler,
    runner: Box<dyn Runner>,
    vocab_size: usize,
    streams: HashMap<u64, Stream>,
    sampler: Sampler,
    masker: Masker,
    /// One row of logits without what a grammar forbids.
    masked: Vec<f32>,
    /// Whose grammar ended them, and why.
    broken: Vec<(u64, Error)>,
    commands: VecDeque<Command>,
    choices: Vec<Choice>,
    /// Why, for each choice that failed.
    failures: Vec<(u64, NoChoice)>,
    events: Vec<Event>,
    /// In the last step that could not be computed.
    suspects: Vec<u64>,
    /// Whose readers are to be told at the end of the step.
    unannounced: Vec<Arc<Outbox>>,
    counts: Stats,
    shared: Shared,
}

/// What the host's threads see of the stepping one.
#[derive(Clone)]
pub struct Shared {
    pub text: Option<Arc<Text>>,
    pub registry: Arc<Registry>,
    /// As of the last step.
    pub stats: Arc<Mutex<Stats>>,
}

impl Core {
    pub fn new(scheduler: Scheduler, runner: Box<dyn Runner>, vocab_size: usize, max_seqs: usize, shared: Shared) -> Result<Core> {
        let mut core = Core {
            scheduler,
            runner,
            vocab_size,
            streams: HashMap::new(),
            sampler: Sampler::new(vocab_size)?,
            masker: Masker::default(),
            masked: try_vec(vocab_size, 0.0)?,
            broken: Vec::new(),
            commands: VecDeque::new(),
            choices: Vec::new(),
            failures: Vec::new(),
            events: Vec::new(),
            suspects: Vec::new(),
            unannounced: Vec::new(),
            counts: Stats::default(),
            shared,
        };
        core.choices.try_reserve(max_seqs)?;
        core.failures.try_reserve(max_seqs)?;
        core.events.try_reserve(max_seqs)?;
        core.suspects.try_reserve(max_seqs)?;
        core.publish();
        Ok(core)
    }

    /// One iteration.
    pub fn step(&mut self) -> Result<StepReport> {
        // With the core in hand: a thread that comes while another one fails must not step what is left.
        self.shared.registry.check()?;
        let _mode = StandardMode::enter();
        let result = catch_unwind(AssertUnwindSafe(|| self.advance()));
        let result = result.unwrap_or_else(|panic| Err(self.fail(panic)));
        self.publish();
        result.map(|report| StepReport { unfinished: self.shared.registry.unfinished(), ..report })
    }

    fn advance(&mut self) -> Result<StepReport> {
        self.take_commands();
        let streams = &self.streams;
        let Some(plan) = self.scheduler.schedule(|id| !streams[&id].outbox.is_full()) else {
            return Ok(StepReport { paused: self.scheduler.paused() as u64, ..StepReport::default() });
        };
        if let Err(error) = self.run(&plan) {
            self.suspects.clear();
            self.suspects.extend(plan.parts.iter().map(|part| part.seq));
            // Nothing has advanced: the next step tries again.
            self.scheduler.rollback(plan);
            return Err(error);
        }
        let report = self.report(&plan);
        self.commit(plan);
        Ok(report)
    }

    fn take_commands(&mut self) {
        let mut commands = std::mem::take(&mut self.commands);
        self.shared.registry.take_commands(&mut commands);
        for command in commands.drain(..) {
            match command {
                Command::Add { id, prompt, max_len, mut stream } => match self.scheduler.add(id, prompt, max_len) {
                    Ok(()) => drop(self.streams.insert(id, *stream)),
                    Err(error) => {
                        let output = stream.close(FinishReason::Error, None).failed(error);
                        self.end(&stream.outbox, output);
                    }
                },
                Command::Abort { id } => self.end_early(id, FinishReason::Abort, |output| output),
            }
        }
        self.commands = commands;
    }

    /// Computes the plan and decides on a token for each sampled part. Changes no lengths.
    fn run(&mut self, plan: &StepPlan) -> Result<()> {
        self.begin_masks(plan);
        let ticket = self.runner.submit(plan);
        let logits = ticket.and_then(|ticket| self.runner.wait(ticket));
        // Taken back even when there are no logits: a step that failed is tried again.
        collect_masks(&mut self.masker, &mut self.streams, &mut self.broken);
        let logits = logits?;
        self.choices.clear();
        self.failures.clear();
        for (part, logits) in plan.sampled().zip(logits.chunks_exact(self.vocab_size)) {
            let stream = self.streams.get_mut(&part.seq).expect("a sequence in the plan has its stream");
            let logits = match &mut stream.constraint {
                Some(constraint) => {
                    self.masked.copy_from_slice(logits);
                    apply(constraint.mask()?, &mut self.masked);
                    &self.masked
                }
                None => logits,
            };
            let rules = &stream.rules;
            let chosen = match self.broken.iter().any(|(seq, _)| *seq == part.seq) {
                true => Err(NoChoice::Excluded),
                false => self.sampler.choose(logits, rules, part.generated),
            };
            let verdict = match chosen {
                Err(_) => Verdict::Fail,
                Ok(token) if rules.stops_at(token) && !rules.must_go_on(part.generated) => Verdict::Stop(token),
                Ok(token) => Verdict::Token(token),
            };
            let logprob = chosen.ok().filter(|_| rules.params.logprobs).map(|token| logprob(logits, token));
            self.choices.push(Choice { seq: part.seq, verdict, logprob });
            self.failures.extend(chosen.err().map(|why| (part.seq, why)));
        }
        Ok(())
    }

    /// What grammars allow is computed while the model computes.
    fn begin_masks(&mut self, plan: &StepPlan) {
        for part in plan.sampled() {
            if let Some(constraint) = self.streams.get_mut(&part.seq).and_then(|stream| stream.constraint.take()) {
                self.masker.submit(part.seq, constraint);
            }
        }
    }

    fn commit(&mut self, plan: StepPlan) {
        let mut events = std::mem::take(&mut self.events);
        let choices = std::mem::take(&mut self.choices);
        self.scheduler.commit(plan, &choices, &mut events);
        for (choice, event) in choices.iter().zip(&events) {
            self.deliver(choice, event.finish);
        }
        (self.events, self.choices) = (events, choices);
    }

    /// Turns a committed choice into an output; a stop string found in its text ends the sequence.
    fn deliver(&mut self, choice: &Choice, finish: Option<FinishReason>) {
        let Some(stream) = self.streams.get_mut(&choice.seq) else { return };
        let text = self.shared.text.as_deref();
        let output = match choice.verdict {
            Verdict::Token(token) | Verdict::Stop(token) => {
                self.counts.generated_tokens += 1;
                let advanced = stream.constraint.as_mut().map_or(Ok(()), |constraint| constraint.advance(token));
                let output = stream.advance(token, choice.logprob, finish, text);
                match advanced {
                    Ok(()) => output,
                    Err(error) => output.failed(error),
                }
            }
            Verdict::Fail => {
                let why = self.failures.iter().find(|(seq, _)| *seq == choice.seq).map(|(_, why)| *why);
                let broken = self.broken.iter().find(|(seq, _)| *seq == choice.seq).map(|(_, error)| error.clone());
                stream.close(FinishReason::Error, text).failed(broken.unwrap_or_else(|| no_choice(why)))
            }
        };
        let outbox = stream.outbox.clone();
        match output.finish {
            None => self.push(&outbox, output),
            Some(_) => {
                self.forget(choice.seq);
                self.end(&outbox, output);
            }
        }
    }

    /// The one place where a request ends: its id is gone and its last output is on its way.
    fn end(&mut self, outbox: &Arc<Outbox>, output: Output) {
        self.counts.count(output.finish);
        self.shared.registry.remove(output.request);
        self.push(outbox, output);
    }

    fn push(&mut self, outbox: &Arc<Outbox>, output: Output) {
        if outbox.push(output) {
            self.unannounced.push(outbox.clone());
        }
    }

    fn forget(&mut self, id: u64) -> Option<Stream> {
        self.scheduler.remove(id);
        self.streams.remove(&id)
    }

    /// Ends a sequence between steps, if it still lives.
    fn end_early(&mut self, id: u64, finish: FinishReason, complete: impl FnOnce(Output) -> Output) {
        if let Some(mut stream) = self.forget(id) {
            let output = complete(stream.close(finish, self.shared.text.as_deref()));
            self.end(&stream.outbox, output);
        }
    }

    /// Steps keep failing with `error`: the requests that were in the last one end with it, the others go on.
    pub fn give_up(&mut self, error: &Error) {
        while let Some(id) = self.suspects.pop() {
            self.end_early(id, FinishReason::Error, |output| output.failed(error.clone()));
        }
        self.publish();
    }

    /// A defect: nothing of the core can be trusted, so every request ends and later calls are told.
    fn fail(&mut self, panic: Box<dyn Any + Send>) -> Error {
        let what = quiet::said(&*panic);
        let error = Error::internal(format!("a defect of libpagedllm stopped this engine: {what}; free it and create another"));
        self.end_all(&error, |output| output.failed(error.clone()));
        error
    }

    /// The engine is being freed: every request ends and every reader is told.
    pub fn close(&mut self) {
        let error = Error::closed("the engine has been freed");
        self.end_all(&error, |output| Output { finish: Some(FinishReason::Abort), error: Some(error.clone()), ..output });
        self.publish();
    }

    /// A defect outside a step: nothing but the registry is trusted any more.
    pub fn fail_hard(&self) {
        let registry = &self.shared.registry;
        let error = Error::internal("a defect of libpagedllm stopped this engine's thread; free it and create another");
        for (outbox, last) in registry.fail(&error) {
            outbox.push(last.failed(error.clone()));
            outbox.announce();
        }
        registry.close_queues(&error);
    }

    fn end_all(&mut self, error: &Error, complete: impl Fn(Output) -> Output) {
        for (outbox, last) in self.shared.registry.fail(error) {
            let output = match self.streams.remove(&last.request) {
                Some(mut stream) => stream.close(FinishReason::Error, None),
                None => last,
            };
            self.end(&outbox, complete(output));
        }
    }

    pub fn has_failed(&self) -> bool {
        self.shared.registry.check().is_err()
    }

    /// Lets the other threads see where the engine stands now.
    fn publish(&mut self) {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner) = self.stats();
        self.unannounced.drain(..).for_each(|outbox| outbox.announce());
        if let Err(error) = self.shared.registry.check() {
            self.shared.registry.close_queues(&error);
        }
    }

    fn report(&mut self, plan: &StepPlan) -> StepReport {
        let mut report = StepReport { sequences: plan.parts.len() as u64, paused: self.scheduler.paused() as u64, ..StepReport::default() };
        for part in &plan.parts {
            let decodes = part.rows == 1 && part.generated > 0;
            *if decodes { &mut report.decode_tokens } else { &mut report.prefill_tokens } += part.rows as u64;
        }
        self.counts.steps += 1;
        self.counts.prompt_tokens += report.prefill_tokens;
        report
    }

    fn stats(&self) -> Stats {
        let blocks = self.scheduler.blocks();
        let slots = blocks.used_blocks() * blocks.block_size();
        Stats {
            waiting: self.scheduler.waiting() as u64,
            running: self.scheduler.running() as u64,
            paused: self.scheduler.paused() as u64,
            blocks_total: blocks.total() as u64,
            blocks_used: blocks.used_blocks() as u64,
            blocks_cached: 0,
            blocks_free: blocks.free_blocks() as u64,
            slot_utilization: if slots == 0 { 1.0 } else { self.scheduler.filled_slots() as f64 / slots as f64 },
            preemptions: self.scheduler.preemptions(),
            ..self.counts
        }
    }
}

fn collect_masks(masker: &mut Masker, streams: &mut HashMap<u64, Stream>, broken: &mut Vec<(u64, Error)>) {
    broken.clear();
    while let Some(masked) = masker.collect() {
        let Some(stream) = streams.get_mut(&masked.seq) else { continue };
        match masked.constraint {
            Ok(constraint) => stream.constraint = Some(constraint),
            Err(error) => broken.push((masked.seq, error)),
        }
    }
}

/// Excludes the tokens whose bit is not set.
fn apply(mask: &[u32], logits: &mut [f32]) {
    for (&word, logits) in mask.iter().zip(logits.chunks_mut(32)) {
        logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0).for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
    }
}

fn no_choice(why: Option<NoChoice>) -> Error {
    match why {
        Some(NoChoice::Excluded) => Error::invalid(
            "no token can be chosen: min_tokens is not reached, and stop_token_ids and the end-of-sequence tokens exclude all others",
        ),
        _ => {
            Error::model("no token can be chosen: the logits are not finite numbers; the model's weights hold NaN or infinity, or overflow")
        }
    }
}

impl Stats {
    fn count(&mut self, finish: Option<FinishReason>) {
        match finish {
            Some(FinishReason::Stop) => self.finished_stop += 1,
            Some(FinishReason::Length) => self.finished_length += 1,
            Some(FinishReason::Abort) => self.finished_abort += 1,
            Some(FinishReason::Error) => self.finished_error += 1,
            None => {}
        }
    }
}
