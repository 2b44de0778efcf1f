//! The production engine and scheduler on a simulated machine that only advances a clock.
#![allow(dead_code)] // each benchmark and test uses a part

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pagedllm::engine::{Clock, Engine, Executor, InFlightStep, MemoryPlan, ModelInfo, Prompt, Request, StepOutput, StepReport};
use pagedllm::error::Result;
use pagedllm::kv::Paging;
use pagedllm::types::batch::{Batch, Span};
use pagedllm::types::options::{EngineOptions, KvDtype, SamplingParams};
use pagedllm::types::{RequestId, SeqId};

const VOCAB: usize = 2;
const TOKEN: usize = 0;
const EOS: usize = 1;

/// Time of a step in seconds, and size of the KV pool in tokens.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Time per step that nothing overlaps.
    pub overhead: f64,
    /// Time per step: reads the weights.
    pub step: f64,
    /// Time per token: multiplies with the weights.
    pub row: f64,
    /// Whether the products of a step overlap the reads of the weights.
    pub overlaps: bool,
    /// Time per token: exchanges results with other devices.
    pub exchange: f64,
    /// Time per visible position of a sequence in the step: reads its K and V.
    pub position: f64,
    pub slots: usize,
    pub max_model_len: usize,
}

impl Machine {
    /// OPT-13B in 16 bits on one A100 with 40 GB, the smallest machine of the PagedAttention paper,
    /// by its data sheet: 26 GB of weights and 820 kB per position (2 x 40 layers x 5,120 x 2
    /// bytes) at 1,555 GB/s, and 26 GFLOP per token at 312 TFLOP/s. The pool has the size in the
    /// paper's Table 1. A real machine reaches about two thirds of its data sheet, so the rates
    /// here are higher.
    pub const PAPER: Machine = Machine {
        overhead: 0.0,
        step: 16.72e-3,
        row: 83.3e-6,
        overlaps: false,
        exchange: 0.0,
        position: 527e-9,
        slots: 15_700,
        max_model_len: 2048,
    };

    pub fn cost(&self, batch: &Batch) -> Duration {
        let last_position = |span: &Span| batch.positions[(span.first_token + span.tokens) as usize - 1];
        let positions: u32 = batch.spans.iter().map(|span| last_position(span) + 1).sum();
        let tokens = batch.token_count() as f64;
        let products = self.row * tokens;
        let weights = if self.overlaps { self.step.max(products) } else { self.step + products };
        Duration::from_secs_f64(self.overhead + weights + self.exchange * tokens + self.position * f64::from(positions))
    }
}

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

/// Advances the clock by the time of a step. Every token is `TOKEN`; the hooks of the requests end
/// them.
struct SimulatedExecutor {
    machine: Machine,
    clock: Arc<SimulatedClock>,
    logits: Vec<f32>, // [rows, VOCAB]
}

impl Executor for SimulatedExecutor {
    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        self.clock.advance(self.machine.cost(batch));
        self.logits.clear();
        self.logits.resize(batch.logit_rows.len() * VOCAB, 0.0);
        self.logits.iter_mut().skip(TOKEN).step_by(VOCAB).for_each(|logit| *logit = 1.0);
        Ok(InFlightStep::new(batch.logit_rows.len()))
    }

    fn wait(&mut self, ticket: InFlightStep) -> Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&self.logits[..ticket.logits * VOCAB]))
    }
}

/// A request to simulate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Job {
    /// Arrival time.
    pub at: Duration,
    pub prompt: usize,
    /// Tokens after which it ends with EOS.
    pub output: usize,
    /// `max_tokens` of the request.
    pub max_tokens: usize,
    pub priority: i32,
}

/// Times of a served request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Served {
    pub arrived: Duration,
    pub first_token: Duration,
    pub last_token: Duration,
    pub tokens: usize,
}

impl Served {
    pub fn time_to_first_token(&self) -> Duration {
        self.first_token - self.arrived
    }

    /// The metric of the paper: end-to-end time per output token.
    pub fn normalized_latency(&self) -> Duration {
        (self.last_token - self.arrived) / self.tokens as u32
    }
}

pub struct Simulation {
    pub engine: Engine,
    pub clock: Arc<SimulatedClock>,
}

impl Simulation {
    /// `options` has everything except the model and its memory. Turn the prefix cache off, because
    /// all prompts are equal.
    pub fn new(options: &EngineOptions, machine: Machine) -> Result<Simulation> {
        let clock = Arc::new(SimulatedClock::default());
        let executor = SimulatedExecutor { machine, clock: clock.clone(), logits: Vec::new() };
        let info = model_info(options, machine);
        let engine = Engine::with_clock(options, info, None, Box::new(executor), clock.clone())?;
        Ok(Simulation { engine, clock })
    }

    /// Adds a request and returns its id.
    pub fn add(&self, job: &Job) -> Result<RequestId> {
        let sampling = SamplingParams { max_tokens: Some(job.max_tokens), ..SamplingParams::greedy() };
        let prompt = Prompt::Tokens(vec![TOKEN as u32; job.prompt]);
        let len = job.prompt + job.output;
        let end = move |_: SeqId, tokens: &[u32], logits: &mut [f32]| {
            if tokens.len() + 1 >= len {
                logits[EOS] = 2.0;
            }
        };
        self.engine.add_request(Request { priority: job.priority, hook: Some(Arc::new(end)), ..Request::new(prompt, sampling) })
    }

    /// Serves jobs, which are in order of arrival, to their end. Calls `on_step` after every step.
    pub fn serve(&self, jobs: &[Job], on_step: impl FnMut(&Engine, &StepReport)) -> Result<Vec<Served>> {
        self.serve_with_gaps(jobs, on_step, |_| {})
    }

    /// Like `serve`. Also calls `on_gap` with the time between each token and the previous one.
    pub fn serve_with_gaps(
        &self,
        jobs: &[Job],
        mut on_step: impl FnMut(&Engine, &StepReport),
        mut on_gap: impl FnMut(Duration),
    ) -> Result<Vec<Served>> {
        let (mut served, mut first, mut next) = (vec![Served::default(); jobs.len()], RequestId::default(), 0);
        loop {
            while let Some(job) = jobs.get(next).filter(|job| job.at <= self.clock.now()) {
                let id = self.add(job)?;
                first = if next == 0 { id } else { first };
                assert_eq!(id.get(), first.get() + next as u64, "ids are consecutive");
                served[next].arrived = job.at;
                next += 1;
            }
            let report = self.engine.step()?;
            self.collect(first, &mut served, &mut on_gap)?;
            on_step(&self.engine, &report);
            if report.unfinished == 0 {
                let Some(job) = jobs.get(next) else { return Ok(served) };
                self.clock.advance_to(job.at);
            }
        }
    }

    fn collect(&self, first: RequestId, served: &mut [Served], on_gap: &mut impl FnMut(Duration)) -> Result<()> {
        let now = self.clock.now();
        for output in self.engine.queue().poll(Some(Duration::ZERO))? {
            if let Some(error) = output.error {
                return Err(error);
            }
            let served = &mut served[(output.request.get() - first.get()) as usize];
            match served.tokens {
                0 => served.first_token = now,
                _ => on_gap(now - served.last_token),
            }
            served.last_token = now;
            served.tokens += output.tokens.len();
        }
        Ok(())
    }
}

fn model_info(options: &EngineOptions, machine: Machine) -> ModelInfo {
    let Machine { slots, max_model_len, .. } = machine;
    let (block_size, blocks) = (options.block_size, slots / options.block_size);
    let memory = MemoryPlan {
        weight_bytes: 0,
        kv_bytes: 0,
        work_bytes: 0,
        blocks,
        max_blocks: blocks,
        block_size,
        groups: 1,
        block_bytes: 0,
        kv_dtype: KvDtype::F32,
        max_model_len,
        full_sequences: slots / max_model_len,
        swap_bytes: 0,
        swap_blocks: 0,
    };
    ModelInfo {
        architecture: "simulated",
        vocab_size: VOCAB,
        layers: 0,
        max_positions: max_model_len,
        eos_token_ids: vec![EOS as u32],
        sampling_defaults: Ok(Default::default()),
        isa: None,
        threads: 1,
        memory,
        paging: Paging::without_windows(block_size),
        fingerprint: [0; 32],
        packed: Default::default(),
    }
}
