//! The engine: commands in, steps, outputs out. Any thread may add, abort and poll; one at a time steps.

mod memory;
mod outputs;
mod registry;
mod runner;
mod stream;

use std::any::Any;
use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

pub use memory::MemoryPlan;
pub use outputs::{Output, Queue};
use registry::{Command, Registry};
pub use runner::{ModelRunner, Runner, Ticket};
use stream::Stream;

use crate::backend::cpu::CpuBackend;
use crate::decode::{NoChoice, Rules, Sampler, logprob};
use crate::error::{Error, Result};
use crate::kv::BlockManager;
use crate::model::{KvCache, KvPool, ModelFiles};
use crate::options::{EngineOptions, Isa, SamplingParams};
use crate::sched::{Choice, Event, FinishReason, Scheduler, SchedulerOptions, StepPlan, Verdict};
use crate::sys::float::StandardMode;
use crate::sys::quiet;
use crate::text::Text;

/// What a request asks for.
#[derive(Debug, Clone)]
pub struct Request {
    pub prompt: Prompt,
    pub sampling: SamplingParams,
    /// Sequences to generate.
    pub n: u32,
    /// Comes back in every output.
    pub user_data: u64,
    /// Let the tokenizer add its special tokens (such as BOS) to a text prompt.
    pub add_special: bool,
    /// Leave special tokens out of the output's text.
    pub skip_special: bool,
}

#[derive(Debug, Clone)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Request {
    pub fn new(prompt: Prompt, sampling: SamplingParams) -> Request {
        Request { prompt, sampling, n: 1, user_data: 0, add_special: true, skip_special: true }
    }
}

/// The model and the limits it is served with.
#[derive(Debug, Clone)]
pub struct ModelInfo {
    pub architecture: &'static str,
    pub vocab_size: usize,
    pub layers: usize,
    pub max_positions: usize,
    pub eos_token_ids: Vec<u32>,
    pub isa: Option<Isa>,
    pub threads: usize,
    pub memory: MemoryPlan,
}

/// What one step did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Requests that have not ended, those not yet started included.
    pub unfinished: u64,
    pub prefill_tokens: u64,
    pub decode_tokens: u64,
    /// Sequences in the step.
    pub sequences: u64,
}

/// Counts since the engine was made, and the state after the last step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stats {
    pub waiting: u64,
    pub running: u64,
    pub blocks_total: u64,
    pub blocks_used: u64,
    /// Kept for reuse, and given away when they are needed.
    pub blocks_cached: u64,
    pub blocks_free: u64,
    /// Share of the used blocks' slots that hold a token's K and V; 1 while none is used.
    pub slot_utilization: f64,
    pub steps: u64,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub preemptions: u64,
    pub finished_stop: u64,
    pub finished_length: u64,
    pub finished_abort: u64,
    pub finished_error: u64,
}

pub struct Engine {
    info: ModelInfo,
    eos: Arc<[u32]>,
    text: Option<Text>,
    seed: u64,
    registry: Registry,
    core: Mutex<Core>,
    /// As of the last step.
    stats: Mutex<Stats>,
    queue: Queue,
}

/// What only the stepping thread touches.
struct Core {
    scheduler: Scheduler,
    runner: Box<dyn Runner>,
    vocab_size: usize,
    streams: HashMap<u64, Stream>,
    sampler: Sampler,
    commands: VecDeque<Command>,
    choices: Vec<Choice>,
    /// Why, for each choice that failed.
    failures: Vec<(u64, NoChoice)>,
    events: Vec<Event>,
    outputs: VecDeque<Output>,
    stats: Stats,
}

impl Engine {
    /// A dry run: reads the model's headers, allocates nothing of size.
    pub fn plan(options: &EngineOptions) -> Result<MemoryPlan> {
        options.validate()?;
        let files = ModelFiles::open(&options.model_dir)?;
        // One thread: sizes are all that is asked of it.
        MemoryPlan::of(&files, &CpuBackend::new(1, options.isa)?, options)
    }

    pub fn create(options: &EngineOptions) -> Result<Engine> {
        let _mode = StandardMode::enter();
        options.validate()?;
        let files = ModelFiles::open(&options.model_dir)?;
        let text = if options.skip_tokenizer { None } else { Some(Text::load(&options.model_dir)?) };
        let backend = CpuBackend::new(options.thread_count(), options.isa)?;
        let memory = MemoryPlan::of(&files, &backend, options)?;
        let info = ModelInfo {
            architecture: files.architecture,
            vocab_size: files.spec.vocab_size,
            layers: files.spec.layers.len(),
            max_positions: files.spec.max_positions,
            eos_token_ids: eos_token_ids(&files, text.as_ref()),
            isa: Some(backend.isa()),
            threads: backend.threads(),
            memory,
        };
        let pool = KvPool { blocks: memory.blocks, block_size: memory.block_size, dtype: memory.kv_dtype };
        let kv = KvCache::new(&backend, &files.spec, pool)?;
        let decoder = files.load(backend, memory::limits(options))?;
        Engine::with_runner(options, info, text, Box::new(ModelRunner::new(decoder, kv)))
    }

    /// An engine over any runner: the real one, or one whose logits a test dictates.
    pub fn with_runner(options: &EngineOptions, info: ModelInfo, text: Option<Text>, runner: Box<dyn Runner>) -> Result<Engine> {
        let scheduler_options = SchedulerOptions {
            max_batch_tokens: options.max_batch_tokens,
            max_seqs: options.max_seqs,
            prefill_chunk: options.prefill_chunk.unwrap_or(options.max_batch_tokens),
        };
        let blocks = BlockManager::new(info.memory.blocks, info.memory.block_size)?;
        let mut core = Core {
            scheduler: Scheduler::new(scheduler_options, blocks)?,
            runner,
            vocab_size: info.vocab_size,
            streams: HashMap::new(),
            sampler: Sampler::new(info.vocab_size)?,
            commands: VecDeque::new(),
            choices: Vec::new(),
            failures: Vec::new(),
            events: Vec::new(),
            outputs: VecDeque::new(),
            stats: Stats::default(),
        };
        core.choices.try_reserve(options.max_seqs)?;
        core.failures.try_reserve(options.max_seqs)?;
        core.events.try_reserve(options.max_seqs)?;
        core.outputs.try_reserve(options.max_seqs)?;
        Ok(Engine {
            eos: info.eos_token_ids.as_slice().into(),
            info,
            text,
            seed: options.seed,
            registry: Registry::default(),
            stats: Mutex::new(core.stats()),
            core: Mutex::new(core),
            queue: Queue::default(),
        })
    }

    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    pub fn text(&self) -> Result<&Text> {
        self.text.as_ref().ok_or_else(|| Error::unsupported("the engine was made with skip_tokenizer: it serves token ids only"))
    }

    pub fn stats(&self) -> Stats {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ok unless an earlier call met a defect.
    pub fn check(&self) -> Result<()> {
        self.registry.check()
    }

    /// Checks a request, and hands it to the next step. What could never run is refused here.
    pub fn add_request(&self, request: Request) -> Result<u64> {
        self.check()?;
        if request.n == 0 {
            return Err(Error::invalid("n is 0: ask for at least one sequence"));
        }
        if request.n > 1 {
            return Err(Error::unsupported(format!("n is {}: this version generates one sequence per request", request.n)));
        }
        request.sampling.validate(self.info.vocab_size)?;
        if self.text.is_none() && !request.sampling.stop.is_empty() {
            return Err(Error::unsupported(
                "stop strings need a tokenizer, and the engine was made with skip_tokenizer: use stop_token_ids",
            ));
        }
        let prompt = self.prompt_tokens(request.prompt, request.add_special)?;
        let max_len = self.max_len(&prompt, &request.sampling)?;
        let (sampling, user_data, skip_special) = (request.sampling, request.user_data, request.skip_special);
        self.registry.add(user_data, |id| {
            let stream = Stream::new(id, user_data, self.rules(id, sampling), &prompt, skip_special);
            Command::Add { id, prompt, max_len, stream: Box::new(stream) }
        })
    }

    fn prompt_tokens(&self, prompt: Prompt, add_special: bool) -> Result<Vec<u32>> {
        let tokens = match prompt {
            Prompt::Text(text) if text.is_empty() => Vec::new(),
            Prompt::Text(text) => self.encode(&text, add_special)?,
            Prompt::Tokens(tokens) => tokens,
        };
        let vocab = self.info.vocab_size;
        match tokens.iter().position(|&token| token as usize >= vocab) {
            Some(i) => Err(Error::invalid(format!("prompt token {i} is {}, beyond the vocabulary of {vocab} tokens", tokens[i]))),
            None => Ok(tokens),
        }
    }

    /// A text that could never fit is refused before the tokenizer takes a multiple of its size.
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        const MOST_BYTES_PER_TOKEN: usize = 1024;
        let (len, most) = (text.len(), self.info.memory.max_model_len);
        if len / MOST_BYTES_PER_TOKEN > most {
            return Err(Error::invalid(format!("prompt is {len} bytes, max_model_len is {most} tokens: shorten the prompt")));
        }
        self.text()?.encode(text, add_special)
    }

    /// The length at which the sequence ends, its prompt included.
    fn max_len(&self, prompt: &[u32], sampling: &SamplingParams) -> Result<usize> {
        let (len, most) = (prompt.len(), self.info.memory.max_model_len);
        if len == 0 {
            return Err(Error::invalid("the prompt is empty: give at least one token"));
        }
        if len >= most {
            let pool = match most < self.info.max_positions {
                true => format!(
                    " (the model's own limit is {}, the KV pool holds {})",
                    self.info.max_positions,
                    self.info.memory.blocks * self.info.memory.block_size
                ),
                false => String::new(),
            };
            return Err(Error::invalid(format!(
                "prompt is {len} tokens, max_model_len is {most}{pool}: raise it or shorten the prompt to at most {}",
                most - 1
            )));
        }
        Ok(sampling.max_tokens.map_or(most, |tokens| len.saturating_add(tokens).min(most)))
    }

    fn rules(&self, id: u64, params: SamplingParams) -> Rules {
        let eos = if params.ignore_eos { Arc::new([]) } else { self.eos.clone() };
        // Odd multipliers keep neighbouring ids and seeds apart.
        let seed = params.seed.unwrap_or(self.seed.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ id.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        Rules { params, eos, seed }
    }

    /// Ends a request at the next step; its last output says `Abort`.
    pub fn abort(&self, request: u64) -> Result<()> {
        self.registry.abort(request)
    }

    /// One iteration. A second thread that steps meanwhile gets `Busy`.
    pub fn step(&self) -> Result<StepReport> {
        let mut core = match self.core.try_lock() {
            Ok(core) => core,
            Err(TryLockError::WouldBlock) => return Err(Error::busy("another thread is stepping this engine: one at a time")),
            Err(TryLockError::Poisoned(core)) => core.into_inner(),
        };
        // With the lock held: a thread that comes while another one fails must not step what is left.
        self.check()?;
        let _mode = StandardMode::enter();
        let result = catch_unwind(AssertUnwindSafe(|| self.step_core(&mut core)));
        let result = result.unwrap_or_else(|panic| Err(self.fail(&mut core, panic)));
        self.queue.append(&mut core.outputs);
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = core.stats();
        if let Err(error) = self.registry.check() {
            self.queue.close(error);
        }
        result.map(|report| StepReport { unfinished: self.registry.unfinished(), ..report })
    }

    fn step_core(&self, core: &mut Core) -> Result<StepReport> {
        self.take_commands(core);
        let Some(plan) = core.scheduler.schedule() else { return Ok(StepReport::default()) };
        if let Err(error) = core.run(&plan) {
            // Nothing has advanced: the next step tries again.
            core.scheduler.rollback(plan);
            return Err(error);
        }
        let report = core.report(&plan);
        self.commit(core, plan);
        Ok(report)
    }

    fn take_commands(&self, core: &mut Core) {
        let mut commands = std::mem::take(&mut core.commands);
        self.registry.take_commands(&mut commands);
        for command in commands.drain(..) {
            match command {
                Command::Add { id, prompt, max_len, mut stream } => match core.scheduler.add(id, prompt, max_len) {
                    Ok(()) => drop(core.streams.insert(id, *stream)),
                    Err(error) => self.end(core, stream.close(FinishReason::Error, None).failed(error)),
                },
                Command::Abort { id } => {
                    if let Some(mut stream) = core.forget(id) {
                        self.end(core, stream.close(FinishReason::Abort, self.text.as_ref()));
                    }
                }
            }
        }
        core.commands = commands;
    }

    fn commit(&self, core: &mut Core, plan: StepPlan) {
        let mut events = std::mem::take(&mut core.events);
        let choices = std::mem::take(&mut core.choices);
        core.scheduler.commit(plan, &choices, &mut events);
        for (choice, event) in choices.iter().zip(&events) {
            self.deliver(core, choice, event.finish);
        }
        (core.events, core.choices) = (events, choices);
    }

    /// Turns a committed choice into an output; a stop string found in its text ends the sequence.
    fn deliver(&self, core: &mut Core, choice: &Choice, finish: Option<FinishReason>) {
        let Some(stream) = core.streams.get_mut(&choice.seq) else { return };
        let output = match choice.verdict {
            Verdict::Token(token) | Verdict::Stop(token) => {
                core.stats.generated_tokens += 1;
                stream.advance(token, choice.logprob, finish, self.text.as_ref())
            }
            Verdict::Fail => {
                let why = core.failures.iter().find(|(seq, _)| *seq == choice.seq).map(|(_, why)| *why);
                stream.close(FinishReason::Error, self.text.as_ref()).failed(no_choice(why))
            }
        };
        if output.finish.is_none() {
            return core.outputs.push_back(output);
        }
        core.forget(choice.seq);
        self.end(core, output);
    }

    /// The one place where a request ends: its last output is queued and its id is gone.
    fn end(&self, core: &mut Core, output: Output) {
        core.stats.count(output.finish);
        self.registry.remove(output.request);
        core.outputs.push_back(output);
    }

    /// A defect: nothing of the core can be trusted, so every request ends and later calls are told.
    fn fail(&self, core: &mut Core, panic: Box<dyn Any + Send>) -> Error {
        let what = quiet::said(&*panic);
        let error = Error::internal(format!("a defect of libpagedllm stopped this engine: {what}; free it and create another"));
        for (request, user_data) in self.registry.fail(&error) {
            let output = match core.streams.remove(&request) {
                Some(mut stream) => stream.close(FinishReason::Error, None),
                None => Output { request, sequence: request, user_data, ..Output::default() },
            };
            self.end(core, output.failed(error.clone()));
        }
        error
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

/// The model's own, or what its tokenizer names.
fn eos_token_ids(files: &ModelFiles, text: Option<&Text>) -> Vec<u32> {
    let mut ids = files.eos_token_ids.clone();
    if ids.is_empty() {
        ids.extend(text.and_then(Text::eos_token_id).filter(|&id| (id as usize) < files.spec.vocab_size));
    }
    let mut seen = HashSet::new();
    ids.retain(|id| seen.insert(*id));
    ids
}

impl Core {
    /// Computes the plan and decides on a token for each sampled part. Changes no lengths.
    fn run(&mut self, plan: &StepPlan) -> Result<()> {
        let ticket = self.runner.submit(plan)?;
        let logits = self.runner.wait(ticket)?;
        self.choices.clear();
        self.failures.clear();
        for (part, logits) in plan.sampled().zip(logits.chunks_exact(self.vocab_size)) {
            let rules = &self.streams[&part.seq].rules;
            let chosen = self.sampler.choose(logits, rules, part.generated);
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

    fn forget(&mut self, id: u64) -> Option<Stream> {
        self.scheduler.remove(id);
        self.streams.remove(&id)
    }

    fn report(&mut self, plan: &StepPlan) -> StepReport {
        let mut report = StepReport { sequences: plan.parts.len() as u64, ..Default::default() };
        for part in &plan.parts {
            let decodes = part.rows == 1 && part.generated > 0;
            *if decodes { &mut report.decode_tokens } else { &mut report.prefill_tokens } += part.rows as u64;
        }
        self.stats.steps += 1;
        self.stats.prompt_tokens += report.prefill_tokens;
        report
    }

    fn stats(&self) -> Stats {
        let blocks = self.scheduler.blocks();
        let slots = blocks.used_blocks() * blocks.block_size();
        Stats {
            waiting: self.scheduler.waiting() as u64,
            running: self.scheduler.running() as u64,
            blocks_total: blocks.total() as u64,
            blocks_used: blocks.used_blocks() as u64,
            blocks_cached: 0,
            blocks_free: blocks.free_blocks() as u64,
            slot_utilization: if slots == 0 { 1.0 } else { self.scheduler.filled_slots() as f64 / slots as f64 },
            preemptions: self.scheduler.preemptions(),
            ..self.stats
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
