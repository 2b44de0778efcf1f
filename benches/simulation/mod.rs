//! The production engine and scheduler on a simulated machine that only advances a clock.
#![allow(dead_code)] // each benchmark and test uses a part

mod beams;
pub mod device;
pub mod machine;
pub mod measurement;
pub mod model;
pub mod workload;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use pagedllm::engine::{Clock, Engine, Executor, InFlightStep, ModelInfo, Request, StepOutput, StepReport};
use pagedllm::error::Result;
use pagedllm::types::RequestId;
use pagedllm::types::batch::{Batch, BlockMove};
use pagedllm::types::options::{EngineOptions, Preemption};

pub use machine::Machine;
use workload::Branching;
pub use workload::Job;

/// Size of the vocabulary. Large enough for the candidates of the widest beam search.
pub const VOCAB: usize = 32;
/// The token of all sequences whose content does not matter.
pub const TOKEN: usize = 0;
pub const EOS: usize = 1;

/// A clock that moves only when it is advanced.
#[derive(Default)]
pub struct SimulatedClock(AtomicU64);

impl SimulatedClock {
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
    }

    pub fn advance_to(&self, time: Duration) {
        self.0.fetch_max(time.as_nanos() as u64, Ordering::Relaxed);
    }
}

impl Clock for SimulatedClock {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// Counts of block table entries over all steps.
#[derive(Default)]
pub struct Sharing {
    is_counting: AtomicBool,
    entries: AtomicU64,
    distinct: AtomicU64,
}

impl Sharing {
    /// Counts from now on.
    pub fn count(&self) {
        self.is_counting.store(true, Ordering::Relaxed);
    }

    /// Returns the share of blocks that sequences would need in addition without sharing: of all
    /// entries, those whose block another sequence of the step has too.
    pub fn saved(&self) -> f64 {
        let entries = self.entries.load(Ordering::Relaxed) as f64;
        1.0 - self.distinct.load(Ordering::Relaxed) as f64 / entries
    }

    fn add(&self, batch: &Batch, block_size: usize) {
        if !self.is_counting.load(Ordering::Relaxed) {
            return;
        }
        let mut blocks = Vec::new();
        for span in &batch.spans {
            let positions = batch.positions[(span.first_token + span.tokens) as usize - 1] as usize + 1;
            let table = span.table as usize;
            blocks.extend_from_slice(&batch.tables[table..table + positions.div_ceil(block_size)]);
        }
        self.entries.fetch_add(blocks.len() as u64, Ordering::Relaxed);
        blocks.sort_unstable();
        blocks.dedup();
        self.distinct.fetch_add(blocks.len() as u64, Ordering::Relaxed);
    }
}

/// Advances the clock by the time of a step. Every token is `TOKEN`, unless the hook of a request
/// selects another one.
struct SimulatedExecutor {
    machine: Machine,
    block_size: usize,
    clock: Arc<SimulatedClock>,
    sharing: Arc<Sharing>,
    beam_scale: Arc<AtomicU32>,
    ends: beams::Ends,
    logits: Vec<f32>, // [rows, VOCAB]
}

impl Executor for SimulatedExecutor {
    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        self.clock.advance(self.machine.step_time(batch, self.block_size));
        self.sharing.add(batch, self.block_size);
        self.logits.clear();
        self.logits.resize(batch.logit_rows.len() * VOCAB, 0.0);
        match f32::from_bits(self.beam_scale.load(Ordering::Relaxed)) {
            0.0 => self.logits.iter_mut().skip(TOKEN).step_by(VOCAB).for_each(|logit| *logit = 1.0),
            scale => self.ends.score(batch, scale, &mut self.logits),
        }
        Ok(InFlightStep::new(batch.logit_rows.len()))
    }

    fn wait(&mut self, ticket: InFlightStep) -> Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&self.logits[..ticket.logits * VOCAB]))
    }

    fn swap_out(&mut self, moves: &[BlockMove]) -> Result<()> {
        self.clock.advance(self.machine.swap_time(moves.len(), self.block_size));
        Ok(())
    }

    fn swap_in(&mut self, moves: &[BlockMove]) -> Result<()> {
        self.clock.advance(self.machine.swap_time(moves.len(), self.block_size));
        Ok(())
    }
}

/// Times of a served request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Served {
    pub arrived: Duration,
    pub first_token: Duration,
    pub last_token: Duration,
    /// Tokens of all sequences of the request.
    pub tokens: usize,
    pub sequences: usize,
    /// Number of sequences that have finished.
    pub finished: usize,
}

impl Served {
    pub fn time_to_first_token(&self) -> Duration {
        self.first_token - self.arrived
    }

    /// The metric of the paper: end-to-end time per output token of a sequence.
    pub fn normalized_latency(&self) -> Duration {
        (self.last_token - self.arrived) / (self.tokens / self.sequences).max(1) as u32
    }

    /// Time per token after the first one.
    pub fn time_per_output_token(&self) -> Duration {
        (self.last_token - self.first_token) / (self.tokens / self.sequences).saturating_sub(1).max(1) as u32
    }

    /// Returns whether the request has KV memory: it has begun and not finished.
    pub fn is_resident(&self) -> bool {
        self.tokens > 0 && self.finished < self.sequences
    }
}

/// Receives what happens in a simulation.
pub trait Observer {
    /// Called after every step, with the times of all requests until then.
    fn step(&mut self, _engine: &Engine, _report: &StepReport, _served: &[Served]) {}

    /// Called when all sequences of a request have finished.
    fn finished(&mut self, _served: &Served) {}

    /// Returns whether the simulation ends here. The times of unfinished requests are incomplete
    /// then.
    fn is_over(&self) -> bool {
        false
    }

    /// Called with the time between a token of a request and the previous one.
    fn gap(&mut self, _gap: Duration) {}
}

impl Observer for () {}

/// Calls a function after every step.
pub struct OnStep<F>(pub F);

impl<F: FnMut(&Engine)> Observer for OnStep<F> {
    fn step(&mut self, engine: &Engine, _: &StepReport, _: &[Served]) {
        self.0(engine);
    }
}

pub struct Simulation {
    pub engine: Engine,
    pub clock: Arc<SimulatedClock>,
    pub sharing: Arc<Sharing>,
    /// Scale of the scores of beam search, as the bits of an f32. 0: no request is a beam search.
    beam_scale: Arc<AtomicU32>,
}

impl Simulation {
    /// `options` has everything except the model and its memory. If the contents of the prompts are
    /// constant, turn the prefix cache off.
    pub fn new(options: &EngineOptions, machine: Machine) -> Result<Simulation> {
        let clock = Arc::new(SimulatedClock::default());
        let sharing = Arc::new(Sharing::default());
        let beam_scale = Arc::new(AtomicU32::default());
        let executor = SimulatedExecutor {
            machine,
            block_size: options.block_size,
            clock: clock.clone(),
            sharing: sharing.clone(),
            beam_scale: beam_scale.clone(),
            ends: Default::default(),
            logits: Vec::new(),
        };
        let info = model_info(options, machine);
        let engine = Engine::with_clock(options, info, None, Box::new(executor), clock.clone())?;
        Ok(Simulation { engine, clock, sharing, beam_scale })
    }

    /// Adds a request and returns its id. If one is a beam search, all must be.
    pub fn add(&self, job: &Job) -> Result<RequestId> {
        if let Branching::Beams { scale, .. } = job.branching {
            self.beam_scale.store(scale.to_bits(), Ordering::Relaxed);
        }
        self.engine.add_request(Request { priority: job.priority, ..job.request() })
    }

    /// Serves jobs, which are in order of arrival, to their end.
    pub fn serve(&self, jobs: &[Job], observer: &mut impl Observer) -> Result<Vec<Served>> {
        let sequences = |job: &Job| Served { arrived: job.at, sequences: job.branching.sequences(), ..Served::default() };
        let mut served: Vec<Served> = jobs.iter().map(sequences).collect();
        let mut ids = Vec::with_capacity(jobs.len());
        loop {
            while let Some(job) = jobs.get(ids.len()).filter(|job| job.at <= self.clock.now()) {
                ids.push(self.add(job)?);
            }
            let report = self.engine.step()?;
            self.collect(&ids, &mut served, observer)?;
            observer.step(&self.engine, &report, &served);
            if observer.is_over() {
                return Ok(served);
            }
            if report.unfinished == 0 {
                let Some(job) = jobs.get(ids.len()) else {
                    check_lengths(jobs, &served);
                    return Ok(served);
                };
                self.clock.advance_to(job.at);
            }
        }
    }

    fn collect(&self, ids: &[RequestId], served: &mut [Served], observer: &mut impl Observer) -> Result<()> {
        let now = self.clock.now();
        for output in self.engine.queue().poll(Some(Duration::ZERO))? {
            if let Some(error) = output.error {
                return Err(error);
            }
            let index = ids.binary_search(&output.request).expect("the request was added");
            let served = &mut served[index];
            match served.tokens {
                0 => served.first_token = now,
                _ => observer.gap(now - served.last_token),
            }
            served.last_token = now;
            served.tokens += output.tokens.len();
            if output.finish.is_some() {
                served.finished += 1;
                if served.finished == served.sequences {
                    observer.finished(served);
                }
            }
        }
        Ok(())
    }
}

/// A simulation whose requests have other outputs than wanted measures something else.
fn check_lengths(jobs: &[Job], served: &[Served]) {
    for (job, served) in jobs.iter().zip(served) {
        assert_eq!(served.tokens, served.sequences * job.output.min(job.max_tokens), "all tokens of {job:?}");
    }
}

fn model_info(options: &EngineOptions, machine: Machine) -> ModelInfo {
    let (block_size, blocks) = (options.block_size, machine.slots / options.block_size);
    let mut info = ModelInfo::without_model(VOCAB, block_size, blocks, machine.max_model_len);
    info.eos_token_ids = vec![EOS as u32];
    if options.preemption == Preemption::Swap {
        // The host has room for every sequence that fits into the pool.
        info.memory.swap_blocks = blocks;
    }
    info
}
