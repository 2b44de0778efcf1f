//! The engine: commands in, steps, outputs out. Any thread may add, abort and poll; one at a time steps.

mod memory;
mod outputs;
mod runner;
mod stream;

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crossbeam::queue::SegQueue;
use once_cell::sync::OnceCell;

pub use memory::MemoryPlan;
pub use outputs::{Output, Queue};
pub use runner::{ModelRunner, Runner, Ticket};
use stream::Stream;

use crate::backend::cpu::CpuBackend;
use crate::decode::{Rules, Sampler, logprob};
use crate::error::{Error, Result};
use crate::kv::BlockManager;
use crate::model::{KvCache, KvPool, ModelFiles};
use crate::options::{EngineOptions, Isa, SamplingParams};
use crate::sched::{Choice, Event, FinishReason, Scheduler, SchedulerOptions, StepPlan, Verdict};
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
    text: Option<Text>,
    seed: u64,
    next_id: AtomicU64,
    /// Requests that have not ended. Held only for moments.
    live: Mutex<HashMap<u64, ()>>,
    inbox: SegQueue<Command>,
    core: Mutex<Core>,
    stats: Mutex<Stats>,
    queue: Queue,
    failure: OnceCell<Error>,
}

enum Command {
    Add { id: u64, prompt: Vec<u32>, max_len: usize, stream: Box<Stream> },
    Abort { id: u64 },
}

/// What only the stepping thread touches.
struct Core {
    scheduler: Scheduler,
    runner: Box<dyn Runner>,
    vocab_size: usize,
    streams: HashMap<u64, Stream>,
    sampler: Sampler,
    choices: Vec<Choice>,
    events: Vec<Event>,
    stats: Stats,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks guard is whole between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// A dry run: reads the model's headers, allocates nothing of size.
    pub fn plan(options: &EngineOptions) -> Result<MemoryPlan> {
        options.validate()?;
        let files = ModelFiles::open(&options.model_dir)?;
        MemoryPlan::of(&files, &CpuBackend::new(options.thread_count(), options.isa)?, options)
    }

    pub fn create(options: &EngineOptions) -> Result<Engine> {
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
            eos_token_ids: files.eos_token_ids.clone(),
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
        let core = Core {
            scheduler: Scheduler::new(scheduler_options, blocks)?,
            runner,
            vocab_size: info.vocab_size,
            streams: HashMap::new(),
            sampler: Sampler::new(info.vocab_size)?,
            choices: Vec::new(),
            events: Vec::new(),
            stats: Stats::default(),
        };
        let stats = Mutex::new(core.stats());
        Ok(Engine {
            info,
            text,
            seed: options.seed,
            next_id: AtomicU64::new(1),
            live: Mutex::default(),
            inbox: SegQueue::new(),
            core: Mutex::new(core),
            stats,
            queue: Queue::default(),
            failure: OnceCell::new(),
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
        *lock(&self.stats)
    }

    /// Ok unless an earlier call met a defect.
    pub fn check(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
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
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let rules = self.rules(id, request.sampling);
        let stream = Box::new(Stream::new(id, request.user_data, rules, &prompt, request.skip_special));
        let mut live = lock(&self.live);
        live.try_reserve(1)?;
        live.insert(id, ());
        self.inbox.push(Command::Add { id, prompt, max_len, stream });
        Ok(id)
    }

    fn prompt_tokens(&self, prompt: Prompt, add_special: bool) -> Result<Vec<u32>> {
        let tokens = match prompt {
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
        let eos = if params.ignore_eos { Vec::new() } else { self.info.eos_token_ids.clone() };
        // Odd multipliers keep neighbouring ids and seeds apart.
        let seed = params.seed.unwrap_or(self.seed.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ id.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        Rules { params, eos, seed }
    }

    /// Ends a request at the next step; its last output says `Abort`.
    pub fn abort(&self, request: u64) -> Result<()> {
        self.check()?;
        if !lock(&self.live).contains_key(&request) {
            return Err(Error::not_found(format!("request {request} is unknown or has ended")));
        }
        self.inbox.push(Command::Abort { id: request });
        Ok(())
    }

    /// One iteration. A second thread that steps meanwhile gets `Busy`.
    pub fn step(&self) -> Result<StepReport> {
        self.check()?;
        let mut core = match self.core.try_lock() {
            Ok(core) => core,
            Err(TryLockError::WouldBlock) => return Err(Error::busy("another thread is stepping this engine: one at a time")),
            Err(TryLockError::Poisoned(core)) => core.into_inner(),
        };
        match catch_unwind(AssertUnwindSafe(|| self.step_core(&mut core))) {
            Ok(report) => Ok(report),
            Err(panic) => Err(self.fail(&mut core, panic)),
        }
    }

    fn step_core(&self, core: &mut Core) -> StepReport {
        self.take_commands(core);
        let mut report = StepReport::default();
        if let Some(plan) = core.scheduler.schedule() {
            report = core.report(&plan);
            match core.run(&plan) {
                Ok(()) => self.commit(core, plan),
                Err(error) => self.end_failed(core, plan, error),
            }
        }
        *lock(&self.stats) = core.stats();
        report.unfinished = lock(&self.live).len() as u64;
        report
    }

    fn take_commands(&self, core: &mut Core) {
        while let Some(command) = self.inbox.pop() {
            match command {
                Command::Add { id, prompt, max_len, stream } => match core.scheduler.add(id, prompt, max_len) {
                    Ok(()) => drop(core.streams.insert(id, *stream)),
                    Err(error) => self.end(core, *stream, |stream| stream.failure(error)),
                },
                Command::Abort { id } => {
                    if let Some(stream) = core.forget(id) {
                        self.end(core, stream, |stream| stream.output(Some(FinishReason::Abort)));
                    }
                }
            }
        }
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
            Verdict::Token(token) | Verdict::Stop(token) => stream.advance(token, choice.logprob, finish, self.text.as_ref()),
            Verdict::Fail => Err(Error::internal("the logits are not finite numbers: the weights or the KV cache hold NaN or infinity")),
        };
        core.stats.generated_tokens += 1;
        let output = output.unwrap_or_else(|error| stream.failure(error));
        if output.finish.is_none() {
            return self.queue.push(output);
        }
        core.scheduler.remove(choice.seq);
        if let Some(stream) = core.streams.remove(&choice.seq) {
            self.end(core, stream, |_| output);
        }
    }

    /// The step could not be computed: its sequences end with the reason, the others go on.
    fn end_failed(&self, core: &mut Core, plan: StepPlan, error: Error) {
        let failed: Vec<u64> = plan.parts.iter().map(|part| part.seq).collect();
        core.scheduler.rollback(plan);
        for id in failed {
            if let Some(stream) = core.forget(id) {
                self.end(core, stream, |stream| stream.failure(error.clone()));
            }
        }
    }

    /// The one place where a request ends: its last output is queued and its id is gone.
    fn end(&self, core: &mut Core, stream: Stream, output: impl FnOnce(&Stream) -> Output) {
        let output = output(&stream);
        core.stats.count(output.finish);
        lock(&self.live).remove(&stream.request);
        self.queue.push(output);
    }

    /// A defect: nothing of the core can be trusted, so every request ends and later calls are told.
    fn fail(&self, core: &mut Core, panic: Box<dyn Any + Send>) -> Error {
        let what = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        let error = Error::internal(format!("a defect of libpagedllm stopped this engine: {what}; free it and create another"));
        let error = self.failure.get_or_init(|| error).clone();
        while let Some(command) = self.inbox.pop() {
            if let Command::Add { id, stream, .. } = command {
                core.streams.insert(id, *stream);
            }
        }
        for (_, stream) in std::mem::take(&mut core.streams) {
            self.end(core, stream, |stream| stream.failure(error.clone()));
        }
        *lock(&self.stats) = core.stats;
        error
    }
}

impl Core {
    /// Computes the plan and decides on a token for each sampled part. Changes no lengths.
    fn run(&mut self, plan: &StepPlan) -> Result<()> {
        let ticket = self.runner.submit(plan)?;
        let logits = self.runner.wait(ticket)?;
        self.choices.clear();
        for (part, logits) in plan.sampled().zip(logits.chunks_exact(self.vocab_size)) {
            let rules = &self.streams[&part.seq].rules;
            let token = self.sampler.choose(logits, rules, part.generated);
            let verdict = match token {
                None => Verdict::Fail,
                Some(token) if rules.stops_at(token) && !rules.must_go_on(part.generated) => Verdict::Stop(token),
                Some(token) => Verdict::Token(token),
            };
            let logprob = token.filter(|_| rules.params.logprobs).map(|token| logprob(logits, token));
            self.choices.push(Choice { seq: part.seq, verdict, logprob });
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
