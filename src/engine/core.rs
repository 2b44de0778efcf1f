//! The stepping side of an engine: take commands, schedule, run, decide, commit, deliver.

use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use super::beams::Beams;
use super::commands::Pin;
use super::outputs::{Logprobs, Output};
use super::queue::Outbox;
use super::registry::{Command, Registry};
use super::request::branch_seed;
use super::runner::Runner;
use super::stream::{Advance, Stream};
use super::{Stats, StepReport};
use crate::decode::{Chosen, Constraint, Context, Masker, NoChoice, Sampler, logprob_and_top};
use crate::error::{Error, Result};
use crate::sched::{Choice, Event, FinishReason, Part, Scheduler, StepPlan, Verdict};
use crate::sys::float::StandardMode;
use crate::sys::quiet;
use crate::text::Text;

/// What only the stepping thread touches, and what it shares with the others.
pub struct Core {
    pub(super) scheduler: Scheduler,
    pub(super) runner: Box<dyn Runner>,
    vocab_size: usize,
    /// What chains of blocks begin with.
    pub(super) model: [u8; 32],
    /// The instruction path that computes K and V.
    pub(super) isa: &'static str,
    /// Most tokens of a sequence.
    pub(super) longest: usize,
    pub(super) streams: HashMap<u64, Stream>,
    /// By request, whose id is the first beam's; the others have the next ones.
    pub(super) beams: BTreeMap<u64, Beams>,
    /// Requests that draw more samples than they return.
    pub(super) contests: HashMap<u64, Contest>,
    pub(super) pins: Vec<Pin>,
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
    stuck: Vec<(u64, Error)>,
    events: Vec<Event>,
    /// In the last step that could not be computed.
    suspects: Vec<u64>,
    /// Whose readers are to be told at the end of the step.
    unannounced: Vec<Arc<Outbox>>,
    pub(super) counts: Stats,
    pub(super) shared: Shared,
}

/// What is to be told of a choice once it is committed.
type Decision = Result<Advance>;

/// Samples of which the best are returned, once all have ended.
pub struct Contest {
    pub wanted: usize,
    /// Those that have not ended.
    pub open: usize,
    pub ends: Vec<Output>,
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
    pub fn new(scheduler: Scheduler, runner: Box<dyn Runner>, info: &super::ModelInfo, max_seqs: usize, shared: Shared) -> Result<Core> {
        let mut core = Core {
            scheduler,
            runner,
            vocab_size: info.vocab_size,
            model: info.fingerprint,
            isa: info.isa_name(),
            longest: info.memory.max_model_len,
            streams: HashMap::new(),
            beams: BTreeMap::new(),
            contests: HashMap::new(),
            pins: Vec::new(),
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
            unannounced: Vec::new(),
            counts: Stats::default(),
            shared,
        };
        core.choices.try_reserve(max_seqs)?;
        core.decisions.try_reserve(max_seqs)?;
        core.events.try_reserve(3 * max_seqs)?;
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
        let (streams, beams) = (&self.streams, &self.beams);
        let ready = |seq| stream_of(streams, beams, seq).is_none_or(|stream| !stream.outbox.is_full());
        let Some(plan) = self.scheduler.schedule(ready) else {
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

    /// Computes the plan and decides on tokens. Changes no lengths.
    fn run(&mut self, plan: &StepPlan) -> Result<()> {
        self.start_masks(plan);
        let ticket = self.runner.submit(plan);
        let logits = ticket.and_then(|ticket| self.runner.wait(ticket));
        // Taken back even where there are no logits: a step that failed is tried again.
        collect_masks(&mut self.masker, &mut self.streams, &mut self.lost);
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
        self.commit_beams(&plan);
        self.scheduler.commit(plan, &choices, &mut events);
        self.tell_prompts();
        for event in &events {
            match *event {
                // What beams chose is told when their search is done.
                Event::Forked { choice } | Event::Advanced { choice, .. } if self.is_beam(&choices[choice]) => {}
                Event::Forked { choice } => self.branch(&choices[choice]),
                Event::Advanced { choice, finish } => self.deliver(&choices[choice], &decisions[choice], finish),
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
            if let Some(output) = stream.tell_prompt(logprobs) {
                self.push(&outbox, output);
            }
        }
    }

    /// A first token that was chosen several times makes several streams of one.
    fn branch(&mut self, choice: &Choice) {
        let Some(parent) = self.streams.get(&choice.parent) else { return };
        let index = (choice.child - parent.request) as u32;
        match parent.fork() {
            Ok(mut stream) => {
                (stream.sequence, stream.index, stream.seed) = (choice.child, index, branch_seed(parent.seed, index as usize));
                let known = stream.known(parent.prompt_len);
                self.shared.registry.born(choice.child, known);
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

    fn never_born(&mut self, choice: &Choice, error: Error) {
        if let Some(request) = request_of_beam(&self.beams, choice.parent) {
            return self.stuck.push((request, error));
        }
        let Some(parent) = self.streams.get(&choice.parent) else { return };
        let output = parent.output().of((choice.child - parent.request) as u32).failed(error);
        let outbox = parent.outbox.clone();
        self.finish(&outbox, output);
    }

    fn is_beam(&self, choice: &Choice) -> bool {
        request_of_beam(&self.beams, choice.parent).is_some()
    }

    /// Turns a committed choice into an output; a stop string found in its text ends the sequence.
    fn deliver(&mut self, choice: &Choice, decision: &Decision, finish: Option<FinishReason>) {
        let Some(stream) = self.streams.get_mut(&choice.child) else { return };
        stream.branches = 1;
        let text = self.shared.text.as_deref();
        let output = match decision {
            Ok(advance) => {
                self.counts.generated_tokens += 1;
                stream.advance(advance, finish, text)
            }
            Err(why) => Some(stream.close(FinishReason::Error, text).failed(why.clone())),
        };
        let Some(output) = output else { return };
        let outbox = stream.outbox.clone();
        match output.finish {
            None => self.push(&outbox, output),
            Some(_) => {
                self.let_go(choice.child);
                self.finish(&outbox, output);
            }
        }
    }

    /// The sequence ends: it stays, idle, if it is to be kept.
    fn let_go(&mut self, seq: u64) {
        self.scheduler.end(seq);
        if self.scheduler.get(seq).is_err() {
            self.streams.remove(&seq);
        }
    }

    /// The last output of one of a request's sequences: told at once, or, of a contest, when all have ended.
    fn finish(&mut self, outbox: &Arc<Outbox>, output: Output) {
        let request = output.request;
        let Some(contest) = self.contests.get_mut(&request) else { return self.end(outbox, output) };
        contest.open -= 1;
        if self.scheduler.get(output.sequence).is_err() {
            self.shared.registry.forget(output.sequence);
        }
        contest.ends.push(output);
        if contest.open > 0 {
            return;
        }
        let Contest { wanted, mut ends, .. } = self.contests.remove(&request).expect("it was just there");
        let rank = |output: &Output| (output.finish != Some(FinishReason::Error), output.score);
        ends.sort_by(|a, b| rank(b).partial_cmp(&rank(a)).unwrap_or(std::cmp::Ordering::Equal));
        for (index, output) in ends.into_iter().enumerate() {
            match index < wanted {
                true => self.end(outbox, Output { index: index as u32, ..output }),
                false => {
                    self.forget(output.sequence);
                    self.shared.registry.forget(output.sequence);
                }
            }
        }
    }

    /// The one place where a sequence's outputs end: its last one is on its way. What the scheduler still has stays, idle.
    pub(super) fn end(&mut self, outbox: &Arc<Outbox>, output: Output) {
        self.counts.count(output.finish);
        let kept = self.scheduler.get(output.sequence).ok().map(|sequence| sequence.tokens.len());
        self.shared.registry.ended(&output, kept);
        self.push(outbox, output);
    }

    /// As `end`, and the same for those of the request's sequences that have not come into being.
    pub(super) fn end_with_siblings(&mut self, outbox: &Arc<Outbox>, output: Output) {
        for index in self.shared.registry.open(output.request) {
            if index != output.index {
                let sibling = Output { tokens: Vec::new(), text: String::new(), logprobs: Logprobs::default(), ..output.of(index) };
                self.end(outbox, sibling);
            }
        }
        self.end(outbox, output);
    }

    pub(super) fn push(&mut self, outbox: &Arc<Outbox>, output: Output) {
        if outbox.push(output) {
            self.unannounced.push(outbox.clone());
        }
    }

    pub(super) fn forget(&mut self, id: u64) -> Option<Stream> {
        self.scheduler.remove(id);
        self.streams.remove(&id)
    }

    /// Ends one sequence between steps, if it runs.
    pub(super) fn end_sequence(&mut self, seq: u64, finish: FinishReason, complete: impl FnOnce(Output) -> Output) {
        let runs = self.scheduler.get(seq).is_ok_and(|sequence| sequence.group.is_some());
        let Some(stream) = self.streams.get_mut(&seq).filter(|_| runs) else { return };
        let outbox = stream.outbox.clone();
        let branched = stream.branches == 1;
        let output = complete(stream.close(finish, self.shared.text.as_deref()));
        if !branched {
            self.contests.remove(&output.request);
            self.let_go(seq);
            return self.end_with_siblings(&outbox, output);
        }
        self.let_go(seq);
        self.finish(&outbox, output);
    }

    /// Ends all of a request's sequences that run.
    pub(super) fn end_request(&mut self, request: u64, finish: FinishReason, complete: impl Fn(Output) -> Output) {
        if let Some(beams) = self.beams.remove(&request) {
            (request..request + beams.width() as u64).for_each(|seq| drop(self.scheduler.remove(seq)));
            if let Some(mut stream) = self.streams.remove(&request) {
                let output = complete(stream.close(finish, None));
                self.end_with_siblings(&stream.outbox, output);
            }
            return;
        }
        let mut sequences: Vec<u64> =
            self.streams.values().filter(|stream| stream.request == request).map(|stream| stream.sequence).collect();
        sequences.sort_unstable();
        sequences.into_iter().for_each(|seq| self.end_sequence(seq, finish, &complete));
    }

    // --- beams ---

    fn commit_beams(&mut self, plan: &StepPlan) {
        for part in plan.sampled() {
            // Once for each search: its first beam speaks for all.
            let Some(request) = request_of_beam(&self.beams, part.seq) else { continue };
            if self.scheduler.members(part.seq).first() != Some(&part.seq) || self.stuck.iter().any(|(stuck, _)| *stuck == request) {
                continue;
            }
            let rules = self.streams[&request].rules.clone();
            let beams = self.beams.get_mut(&request).expect("it was just found");
            match beams.commit(&rules) {
                Ok(()) => {}
                Err(error) => self.stuck.push((request, error)),
            }
        }
    }

    /// Searches that are done give their results, and those that cannot go on give the reason.
    fn end_beams(&mut self) {
        for (request, error) in std::mem::take(&mut self.stuck) {
            self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
        }
        let done = |(&request, beams): (&u64, &Beams)| beams.is_done().then_some(request);
        while let Some(request) = self.beams.iter().find_map(done) {
            if let Err(error) = self.tell_beams(request) {
                self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
            }
        }
    }

    fn tell_beams(&mut self, request: u64) -> Result<()> {
        let best = self.beams[&request].best()?;
        let stream = &self.streams[&request];
        let mut outputs = Vec::new();
        for (index, hypothesis) in best.iter().enumerate() {
            outputs.push(stream.hypothesis(index as u32, hypothesis, self.shared.text.as_deref())?);
        }
        let outbox = stream.outbox.clone();
        let missing =
            stream.output().failed(Error::invalid("fewer beams than n were found: so many tokens are excluded that no more could end"));
        self.beams.remove(&request);
        self.streams.remove(&request);
        for index in self.shared.registry.open(request) {
            let output = outputs.get_mut(index as usize).map_or_else(|| missing.of(index), std::mem::take);
            self.counts.generated_tokens += output.tokens.len() as u64;
            self.end(&outbox, output);
        }
        Ok(())
    }

    /// Steps keep failing with `error`: the requests that were in the last one end with it, the others go on.
    pub fn give_up(&mut self, error: &Error) {
        while let Some(seq) = self.suspects.pop() {
            match request_of_beam(&self.beams, seq) {
                Some(request) => self.end_request(request, FinishReason::Error, |output| output.failed(error.clone())),
                None => self.end_sequence(seq, FinishReason::Error, |output| output.failed(error.clone())),
            }
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
            // A turn that no step has seen is not the stream's yet.
            let runs = self.scheduler.get(last.sequence).is_ok_and(|sequence| sequence.group.is_some());
            let output = match self.streams.remove(&last.sequence).filter(|_| runs) {
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
        self.counts.blocks_copied += plan.batch.copies.len() as u64;
        report
    }

    fn stats(&self) -> Stats {
        let blocks = self.scheduler.blocks();
        let slots = blocks.used_blocks() * blocks.block_size();
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
            prefix_queries: prefix.queries,
            prefix_hits: prefix.hits,
            ..self.counts
        }
    }
}

/// What decides, while the runner's logits are borrowed.
struct Deciding<'a> {
    scheduler: &'a Scheduler,
    streams: &'a mut HashMap<u64, Stream>,
    lost: &'a [(u64, Error)],
    beams: &'a mut BTreeMap<u64, Beams>,
    sampler: &'a mut Sampler,
    edited: &'a mut Vec<f32>,
    choices: &'a mut Vec<Choice>,
    decisions: &'a mut Vec<Decision>,
    prompt_logprobs: &'a mut Vec<(u64, Logprobs)>,
    stuck: &'a mut Vec<(u64, Error)>,
}

impl Deciding<'_> {
    /// `rows` are the logits of the part's last rows.
    fn part(&mut self, part: &Part, rows: &[f32], vocab: usize) -> Result<()> {
        self.prompt(part, rows, vocab)?;
        if !part.samples {
            return Ok(());
        }
        let logits = &rows[rows.len() - vocab..];
        match request_of_beam(self.beams, part.seq) {
            Some(request) => self.beam(request, part.seq, logits),
            None => self.samples(part, logits),
        }
    }

    /// Log probabilities of the prompt's tokens, each from the logits of the row before it.
    fn prompt(&mut self, part: &Part, rows: &[f32], vocab: usize) -> Result<()> {
        let Some(stream) = self.streams.get(&part.seq) else { return Ok(()) };
        let Some(k) = stream.rules.params.prompt_logprobs else { return Ok(()) };
        let tokens = &self.scheduler.get(part.seq)?.tokens[..stream.prompt_len];
        let first = part.first + part.rows - part.logits + 1;
        let (mut logprobs, mut top) = (Logprobs::default(), Vec::new());
        for (&token, logits) in tokens.get(first..).unwrap_or_default().iter().zip(rows.chunks_exact(vocab)) {
            logprobs.tokens.push(logprob_and_top(logits, token, k as usize, &mut top)?);
            logprobs.top.extend_from_slice(&top);
        }
        if !logprobs.tokens.is_empty() {
            self.prompt_logprobs.push((part.seq, logprobs));
        }
        Ok(())
    }

    /// A token, or, at the end of a prompt, one for each sample.
    fn samples(&mut self, part: &Part, logits: &[f32]) -> Result<()> {
        let tokens = &self.scheduler.get(part.seq)?.tokens;
        let stream = self.streams.get_mut(&part.seq).ok_or_else(|| Error::internal("a sequence without a stream was sampled"))?;
        let edited = edit(stream, tokens, logits, self.edited)?;
        let lost = self.lost.iter().find(|(seq, _)| *seq == part.seq).map(|(_, error)| error.clone());
        // Its mask is there already.
        let mut constraint = stream.constraint.take();
        let allowed = lost.map_or(Ok(()), Err).and_then(|()| constraint.as_mut().map(Constraint::mask).transpose());
        for i in 0..stream.branches {
            let Stream { rules, memory, prompt_len, generated, .. } = &*stream;
            let seed = branch_seed(stream.seed, i);
            let decision = allowed.clone().and_then(|allowed| {
                let context = Context { tokens, prompt_len: *prompt_len, generated: *generated, seed, memory, allowed };
                let chosen = self.sampler.choose(edited, rules, &context);
                advance(stream, logits, chosen.map_err(|why| blame(why, stream))?)
            });
            let verdict = match &decision {
                Err(_) => Verdict::Fail,
                Ok(Advance { chosen, .. }) if rules.stops_at(chosen.token) && !rules.must_go_on(*generated) => Verdict::Stop(chosen.token),
                Ok(Advance { chosen, .. }) => Verdict::Token(chosen.token),
            };
            self.choices.push(Choice { parent: part.seq, child: part.seq + i as u64, verdict });
            self.decisions.push(decision);
        }
        stream.constraint = constraint;
        Ok(())
    }

    /// A beam's row; with the last of them, the search decides.
    fn beam(&mut self, request: u64, seq: u64, logits: &[f32]) -> Result<()> {
        let stream = &self.streams[&request];
        let beams = self.beams.get_mut(&request).expect("it was just found");
        let tokens = &self.scheduler.get(seq)?.tokens;
        if let Err(why) = beams.read((seq - request) as usize, logits, self.sampler, &stream.rules, tokens, stream.prompt_len)
            && !self.stuck.iter().any(|(stuck, _)| *stuck == request)
        {
            self.stuck.push((request, why.into()));
        }
        if self.scheduler.members(seq).last() != Some(&seq) {
            return Ok(());
        }
        for next in &beams.decide()?.next {
            let (parent, child) = (request + next.parent as u64, request + next.slot as u64);
            self.choices.push(Choice { parent, child, verdict: Verdict::Token(next.token) });
            self.decisions.push(Ok(Advance::default()));
        }
        Ok(())
    }
}

fn collect_masks(masker: &mut Option<Masker>, streams: &mut HashMap<u64, Stream>, lost: &mut Vec<(u64, Error)>) {
    lost.clear();
    while let Some(masked) = masker.as_mut().and_then(Masker::collect) {
        match masked.constraint {
            Ok(constraint) => streams.get_mut(&masked.seq).expect("its mask was asked for").constraint = Some(constraint),
            Err(error) => lost.push((masked.seq, error)),
        }
    }
}

/// Where a hook edits the logits, it is the hook that made them what they are.
fn blame(why: NoChoice, stream: &Stream) -> Error {
    match why {
        NoChoice::NotFinite if stream.hook.is_some() => {
            Error::invalid("no token can be chosen: after the logits hook some logits are NaN or infinite")
        }
        _ => why.into(),
    }
}

/// The logits as the host's hook leaves them.
fn edit<'a>(stream: &Stream, tokens: &[u32], logits: &'a [f32], edited: &'a mut Vec<f32>) -> Result<&'a [f32]> {
    let Some(hook) = &stream.hook else { return Ok(logits) };
    edited.clear();
    edited.try_reserve(logits.len())?;
    edited.extend_from_slice(logits);
    hook(stream.sequence, tokens, edited);
    Ok(edited)
}

fn advance(stream: &Stream, logits: &[f32], chosen: Chosen) -> Result<Advance> {
    let mut advance = Advance { chosen, ..Advance::default() };
    if stream.scores() {
        let k = stream.rules.params.logprobs.unwrap_or(0) as usize;
        advance.logprob = logprob_and_top(logits, advance.chosen.token, k, &mut advance.top)?;
    }
    Ok(advance)
}

/// The request that the beam `seq` belongs to, if it is one.
fn request_of_beam(beams: &BTreeMap<u64, Beams>, seq: u64) -> Option<u64> {
    let (&request, beams) = beams.range(..=seq).next_back()?;
    (seq - request < beams.width() as u64).then_some(request)
}

/// The stream that speaks for `seq`. None: a pin, which nobody reads.
fn stream_of<'a>(streams: &'a HashMap<u64, Stream>, beams: &BTreeMap<u64, Beams>, seq: u64) -> Option<&'a Stream> {
    streams.get(&seq).or_else(|| streams.get(&request_of_beam(beams, seq)?))
}

impl Stats {
    pub(super) fn count(&mut self, finish: Option<FinishReason>) {
        match finish {
            Some(FinishReason::Stop) => self.finished_stop += 1,
            Some(FinishReason::Length) => self.finished_length += 1,
            Some(FinishReason::Abort) => self.finished_abort += 1,
            Some(FinishReason::Error) => self.finished_error += 1,
            None => {}
        }
    }
}
