//! The engine: requests in, steps, outputs out. Any thread may add, abort and poll. One thread at a
//! time may step.

mod active_sequence;
mod admission;
mod beams;
mod budget_client;
mod clock;
mod commands;
mod core;
mod deadlines;
mod delivery;
mod driver;
mod finish;
#[doc(hidden)]
pub mod journal;
mod live_requests;
mod log_file;
mod memory;
mod metrics;
mod output_batch;
mod outputs;
mod queue;
mod recovery;
mod request;
mod runner;
mod sampling;
mod sequence_calls;
mod sequence_state;
mod sequence_table;
mod snapshot;
mod step_time;
#[cfg(test)]
mod stored_names_test;
mod swapping;
mod telemetry;
mod timing;
mod trace;
mod wait_queue;
mod warmup;

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use self::core::{EngineCore, Published, Shared};
use crate::types::RequestId;
pub use admission::Admission;
pub use clock::{Clock, SystemClock};
use driver::Driver;
use journal::{Header, Journal, Recorder};
pub use memory::MemoryPlan;
use metrics::Snapshot;
pub use output_batch::OutputBatch;
pub use outputs::{Logprobs, Output, OutputView};
pub use queue::{Outputs, Queue};
pub use request::{Prompt, Request};
pub use runner::{InFlightStep, ModelRunner, Runner};
pub use sequence_calls::{Continue, Fork, Hook as LogitsHook, Resume, SequenceInfo};
use sequence_table::SequenceTable;
use wait_queue::QueueLimits;
use warmup::WarmupLimits;

pub use timing::Timing;

use once_cell::sync::OnceCell;

use crate::backend::Backend;
use crate::backend::cpu::CpuBackend;
use crate::backend::cuda::CudaBackend;
use crate::budget::{Lease, MemoryBudget};
use crate::decode::{Grammars, Vocabulary};
use crate::error::{Error, Result};
use crate::kv::{BlockManager, Paging};
use crate::model::{KvCache, KvPool, LoadProgress, ModelFiles, PackedReport};
use crate::options::{Device, EngineOptions, Isa};
use crate::scheduler::simulate::Capacity;
use crate::scheduler::{Policies, Scheduler, SchedulerOptions};
use crate::sys::float::StandardMode;
use crate::text::Text;

/// The model and the limits of the engine.
#[derive(Debug, Clone)]
pub struct ModelInfo {
    /// Name of the architecture, as in `config.json`.
    pub architecture: &'static str,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Maximum number of positions that the model supports.
    pub max_positions: usize,
    /// End-of-sequence tokens.
    pub eos_token_ids: Vec<u32>,
    /// Instruction path of the CPU kernels. `None` on a CUDA device.
    pub isa: Option<Isa>,
    /// Number of threads that compute.
    pub threads: usize,
    /// Memory plan of the engine.
    pub memory: MemoryPlan,
    /// Block size and layer groups.
    pub paging: Paging,
    /// Fingerprint of the model. It differs between models that compute different results.
    pub fingerprint: [u8; 32],
    /// Result of reading or writing packed weights.
    pub packed: PackedReport,
}

impl ModelInfo {
    /// Returns the name of the instruction path that determines the bits of the results.
    fn isa_name(&self) -> &'static str {
        self.isa.map_or("", |isa| isa.bits().name())
    }
}

/// The result of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Number of requests that have not ended, including those that have not started.
    pub unfinished: u64,
    /// Number of prompt tokens in the step.
    pub prefill_tokens: u64,
    /// Number of decode tokens in the step.
    pub decode_tokens: u64,
    /// Number of sequences in the step.
    pub sequences: u64,
    /// Number of sequences that were not scheduled because their queue is full.
    pub paused: u64,
}

/// Counters since the creation of the engine, and its state after the last step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stats {
    /// Number of waiting sequences.
    pub waiting: u64,
    /// Number of running sequences.
    pub running: u64,
    /// Number of waiting sequences that the last step skipped because their queue is full.
    pub paused: u64,
    /// Number of idle sequences, which wait to be resumed or freed.
    pub idle: u64,
    /// Size of the KV pool in blocks.
    pub blocks_total: u64,
    /// Number of blocks that sequences use.
    pub blocks_used: u64,
    /// Blocks of the prefix cache without an owner, which are evicted when needed.
    pub blocks_cached: u64,
    /// Number of free blocks.
    pub blocks_free: u64,
    /// Fraction of slots that hold a token, in blocks that are used or reserved for running
    /// sequences. 1 if there are no such blocks.
    pub slot_utilization: f64,
    /// Number of steps.
    pub steps: u64,
    /// Number of steps that failed and were retried, in part or as a whole.
    pub steps_failed: u64,
    /// Number of prompt tokens of all requests.
    pub prompt_tokens: u64,
    /// Number of prompt tokens that the prefix cache had.
    pub prompt_tokens_cached: u64,
    /// Number of generated tokens.
    pub generated_tokens: u64,
    /// Number of preemptions.
    pub preemptions: u64,
    /// Number of preemptions that swapped to the host tier. The others are recomputed.
    pub preemptions_swapped: u64,
    /// Number of sequences in the host tier.
    pub swapped: u64,
    /// Size of the host tier in blocks.
    pub swap_blocks_total: u64,
    /// Number of used blocks of the host tier.
    pub swap_blocks_used: u64,
    /// Number of blocks swapped out.
    pub blocks_swapped_out: u64,
    /// Number of blocks swapped in.
    pub blocks_swapped_in: u64,
    /// Number of failed transfers, for example on a full disk. The affected sequences are
    /// recomputed.
    pub swap_failures: u64,
    /// Number of shrinks after which the system did not take the memory back, for example because
    /// the host has locked it.
    pub discard_failures: u64,
    /// Number of blocks that the sequences would additionally hold without windows. Blocks of forks
    /// count once per fork.
    pub blocks_out_of_window: u64,
    /// Number of blocks copied because a sequence wrote to a shared one.
    pub blocks_copied: u64,
    /// Number of tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Number of tokens found in the prefix cache.
    pub prefix_hits: u64,
    /// Number of sequences that ended at a stop token, a stop string or the end of a grammar.
    pub finished_stop: u64,
    /// Number of sequences that reached their maximum length.
    pub finished_length: u64,
    /// Number of sequences that were aborted.
    pub finished_abort: u64,
    /// Number of sequences that ended with an error.
    pub finished_error: u64,
    /// Number of sequences that reached their deadline.
    pub finished_deadline: u64,
    /// Number of requests refused because of `max_waiting_requests`, `max_waiting_tokens` or a full
    /// queue.
    pub admission_rejections: u64,
    /// Number of traces that have stopped because of a disk error: 0 or 1.
    pub traces_stopped: u64,
    /// Number of journals that have stopped because of a disk error: 0 or 1.
    pub journals_stopped: u64,
}

/// The parts of a new engine.
struct EngineParts {
    info: ModelInfo,
    text: Option<Text>,
    runner: Box<dyn Runner>,
}

impl EngineParts {
    fn on_cpu(backend: CpuBackend, options: &EngineOptions, progress: LoadProgress) -> Result<EngineParts> {
        let (isa, threads) = (backend.isa(), backend.threads());
        let mut parts = EngineParts::load(backend, options, progress)?;
        (parts.info.isa, parts.info.threads) = (Some(isa), threads);
        Ok(parts)
    }

    /// Loads the model for a backend.
    fn load<B: Backend + 'static>(backend: B, options: &EngineOptions, progress: LoadProgress) -> Result<EngineParts> {
        let mut files = model_files(options)?;
        let mut text = if options.skip_tokenizer { None } else { Some(Text::load(&options.model_dir)?) };
        let memory = MemoryPlan::for_model(&files, &backend, options)?;
        if let Some(text) = &mut text {
            text.limit_prompts(options.max_prompt_bytes(memory.max_model_len));
        }
        files.spec.fit(memory.max_model_len);
        let mut info = ModelInfo {
            architecture: files.architecture,
            vocab_size: files.spec.vocab_size,
            layers: files.spec.layers.len(),
            max_positions: files.spec.max_positions,
            eos_token_ids: eos_token_ids(&files, text.as_ref()),
            isa: None,
            threads: options.thread_count(),
            memory,
            paging: memory::paging(&files, memory.block_size),
            fingerprint: files.fingerprint()?,
            packed: PackedReport::default(),
        };
        let pool = KvPool { blocks: memory.max_blocks, block_size: memory.block_size, dtype: memory.kv_dtype };
        let mut kv = KvCache::new(&backend, &files.spec, pool)?;
        if memory.swap_blocks > 0 {
            kv.add_host_tier(&backend, memory.swap_blocks, memory.block_bytes, options.swap_dir.as_deref())?;
        }
        let limits = memory::limits(options);
        let decoder = match &options.packed_dir {
            None => files.load(backend, limits, progress)?,
            Some(dir) => {
                let (decoder, report) = files.load_packed(dir, backend, limits, progress)?;
                info.packed = report;
                decoder
            }
        };
        let mut runner = ModelRunner::new(decoder, kv);
        if runner.backend().free_bytes()?.is_some() {
            warm_up(&mut runner, &files, options, &info)?;
        }
        Ok(EngineParts { info, text, runner: Box::new(runner) })
    }
}

/// An engine: one model with its KV pool and its requests.
pub struct Engine {
    info: ModelInfo,
    /// Name of the model in metrics.
    name: String,
    eos: Arc<[u32]>,
    seed: u64,
    capacity: Capacity,
    keeps_prefixes: bool,
    /// Whether a journal records all inputs.
    journals: bool,
    /// Storage layout of K and V.
    layout: String,
    shared: Shared,
    core: Arc<Mutex<EngineCore>>,
    lease: Arc<Lease>,
    driver: Mutex<Option<Driver>>,
    /// CPU to which the stepping thread of the engine is pinned.
    driver_cpu: Option<usize>,
    queue: Arc<Queue>,
    /// Created by the first request with a grammar.
    grammars: OnceCell<Grammars>,
    /// Bytes of each token, created by the first request that needs them.
    token_bytes: OnceCell<Arc<Vec<Vec<u8>>>>,
}

impl Engine {
    /// Computes the memory plan from the headers of the model files, without large allocations.
    pub fn plan(options: &EngineOptions) -> Result<MemoryPlan> {
        options.validate()?;
        let files = model_files(options)?;
        match options.device()? {
            // One thread is enough to compute sizes.
            Device::Cpu => MemoryPlan::for_model(&files, &CpuBackend::new(1, options.isa)?, options),
            Device::Cuda(ordinal) => MemoryPlan::for_model(&files, &CudaBackend::new(ordinal, options.batch_invariant)?, options),
        }
    }

    /// Loads a model and creates an engine.
    pub fn create(options: &EngineOptions) -> Result<Engine> {
        Engine::load(options, &mut |_, _| true)
    }

    /// Creates an engine. `progress` is called with (bytes read, total bytes) while the weights
    /// load, and cancels the loading if it returns false.
    pub fn load(options: &EngineOptions, progress: LoadProgress) -> Result<Engine> {
        let EngineParts { info, text, runner } = Engine::parts(options, progress)?;
        Engine::with_runner(options, info, text, runner)
    }

    fn parts(options: &EngineOptions, progress: LoadProgress) -> Result<EngineParts> {
        let _mode = StandardMode::enter();
        options.validate()?;
        match (options.device()?, &options.cpus) {
            (Device::Cpu, None) => EngineParts::on_cpu(CpuBackend::new(options.thread_count(), options.isa)?, options, progress),
            (Device::Cpu, Some(cpus)) => EngineParts::on_cpu(CpuBackend::pinned(cpus, options.isa)?, options, progress),
            (Device::Cuda(ordinal), _) => EngineParts::load(CudaBackend::new(ordinal, options.batch_invariant)?, options, progress),
        }
    }

    /// Creates an engine with any runner: that of a model, or one whose logits a test sets.
    pub fn with_runner(options: &EngineOptions, info: ModelInfo, text: Option<Text>, runner: Box<dyn Runner>) -> Result<Engine> {
        Engine::with_clock(options, info, text, runner, Arc::new(SystemClock::default()))
    }

    /// Creates an engine as `with_runner` does. All decisions that depend on time use this clock.
    pub fn with_clock(
        options: &EngineOptions,
        info: ModelInfo,
        text: Option<Text>,
        runner: Box<dyn Runner>,
        clock: Arc<dyn Clock>,
    ) -> Result<Engine> {
        let header = Header::new(options, &info, &runner.layout());
        let recorder = options.journal_path.as_deref().map(|path| Recorder::create(path, &header)).transpose()?;
        let journal = recorder.map(|recorder| Journal::recorded(recorder, options.max_seqs)).transpose()?;
        Engine::build(options, info, text, runner, clock, journal)
    }

    fn build(
        options: &EngineOptions,
        info: ModelInfo,
        text: Option<Text>,
        runner: Box<dyn Runner>,
        clock: Arc<dyn Clock>,
        journal: Option<Journal>,
    ) -> Result<Engine> {
        let journals = journal.is_some();
        let scheduler_options = SchedulerOptions {
            max_batch_tokens: options.max_batch_tokens,
            max_seqs: options.max_seqs,
            prefill_chunk: options.rows_at_once(),
            preemption: options.preemption,
        };
        let MemoryPlan { blocks, max_blocks, block_bytes, max_model_len, swap_blocks, .. } = info.memory;
        let (block_bytes, rows_at_once) = (block_bytes.max(1), scheduler_options.max_tokens_per_step());
        let own = || MemoryBudget::new(blocks as u64 * block_bytes, max_blocks as u64 * block_bytes);
        let min_blocks = info.paging.max_blocks(max_model_len, rows_at_once) as u64;
        let lease = Arc::new(options.budget.clone().map_or_else(own, Ok)?.join(block_bytes, min_blocks)?);
        let blocks = BlockManager::new(max_blocks, info.paging.clone(), options.prefix_cache)?.with_host(swap_blocks)?;
        let scheduler = Scheduler::with_policies(scheduler_options, blocks, Policies::new(&options.policies))?;
        let shared = Shared {
            text: text.map(Arc::new),
            table: Arc::new(SequenceTable::new(QueueLimits::from_options(options), max_model_len)),
            published: Arc::default(),
            snapshot: Arc::default(),
            wants_check: Arc::default(),
            budget_checks: Arc::default(),
            clock,
        };
        let layout = runner.layout();
        let capacity = scheduler.capacity();
        let core = EngineCore::new(scheduler, runner, lease.clone(), &info, options, shared.clone(), journal)?;
        let core = Arc::new(Mutex::new(core));
        lease.on_call(budget_client::callback(&core, &shared));
        // The callback is set now, so calls of the budget are not lost. Earlier changes are handled
        // here.
        core.lock().unwrap_or_else(PoisonError::into_inner).answer_caller();
        let queue = Arc::new(Queue::new(shared.table.new_sender(options.queue_capacity, options.max_seqs)?, &shared.table));
        Ok(Engine {
            eos: info.eos_token_ids.as_slice().into(),
            name: options.model_name.clone().unwrap_or_else(|| name_of(&options.model_dir, &info)),
            info,
            seed: options.seed,
            capacity,
            keeps_prefixes: options.prefix_cache,
            journals,
            layout,
            shared,
            core,
            lease,
            driver: Mutex::new(None),
            driver_cpu: options.cpus.as_ref().and_then(|cpus| cpus.first().copied()),
            queue,
            grammars: OnceCell::new(),
            token_bytes: OnceCell::new(),
        })
    }

    /// Returns the model and the limits of the engine.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Returns the queue of the engine, for requests without a queue of their own.
    pub fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    /// Creates a queue. Requests that write to it pause while it contains `capacity` outputs or
    /// more.
    pub fn create_queue(&self, capacity: usize) -> Result<Queue> {
        if capacity == 0 {
            return Err(Error::invalid("capacity is 0; must be at least 1"));
        }
        Ok(Queue::new(self.shared.table.new_sender(capacity, self.capacity.seqs)?, &self.shared.table))
    }

    /// Returns the budget of the KV pool: the shared one of the options, or one of this engine
    /// alone.
    pub fn budget(&self) -> &Arc<MemoryBudget> {
        self.lease.budget()
    }

    /// Returns the tokenizer and the chat template. Fails if the engine has no tokenizer.
    pub fn text(&self) -> Result<&Text> {
        let text = self.shared.text.as_deref();
        text.ok_or_else(|| Error::unsupported("the engine has no tokenizer (skip_tokenizer); use token ids"))
    }

    fn grammars(&self) -> Result<&Grammars> {
        self.grammars.get_or_try_init(|| {
            let tokens = self.text()?.token_bytes(self.info.vocab_size)?;
            Grammars::new(Vocabulary { tokens: tokens.bytes, special: tokens.special, eos: self.info.eos_token_ids.clone() })
        })
    }

    fn token_bytes(&self) -> Result<Arc<Vec<Vec<u8>>>> {
        let read = || Ok(Arc::new(self.text()?.token_bytes(self.info.vocab_size)?.bytes));
        self.token_bytes.get_or_try_init(read).cloned()
    }

    /// Returns the counters and the state of the engine.
    pub fn stats(&self) -> Stats {
        self.published().stats
    }

    /// Formats the metrics after the last step in the OpenMetrics text format, without waiting for
    /// a step.
    pub fn metrics(&self) -> Result<String> {
        let Published { stats, histograms } = self.published();
        let (budget, config) = (self.budget().info(), Snapshot::config(&self.info, self.keeps_prefixes));
        Snapshot { stats, histograms, budget, config }.text(self.name.clone())
    }

    fn published(&self) -> Published {
        let mut published = *self.shared.published.lock().unwrap_or_else(PoisonError::into_inner);
        published.stats.admission_rejections = self.shared.table.rejections();
        published
    }

    /// Panics unless every invariant between two steps holds. For tests.
    pub fn check_invariants(&self) {
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        core.scheduler.check();
        core.journal.iter().for_each(|journal| journal.check(|sequence| core.scheduler.find(sequence).is_some()));
    }

    /// Fails if an earlier call has detected a defect.
    pub fn check(&self) -> Result<()> {
        self.shared.table.check()
    }

    /// Ends a request at the next step. Its last output has the finish reason `Abort`.
    pub fn abort(&self, request: RequestId) -> Result<()> {
        self.shared.table.abort(request)
    }

    /// Runs one step. Returns `Busy` if another thread is stepping, or if the engine has a stepping
    /// thread.
    pub fn step(&self) -> Result<StepReport> {
        // The stepping thread may have started without holding the lock of the core yet.
        if self.driver.try_lock().map_or(true, |driver| driver.is_some()) {
            return Err(Error::busy());
        }
        let result = self.core_to_step()?.step();
        budget_client::answer_calls(&self.core, &self.shared);
        result
    }

    /// Locks the core for a step. Returns `Busy` while another thread steps. Waits for threads that
    /// only check the lease, since the host does not know about them.
    fn core_to_step(&self) -> Result<MutexGuard<'_, EngineCore>> {
        loop {
            let before = self.shared.budget_checks.completed();
            match self.core.try_lock() {
                Ok(core) => return Ok(core),
                Err(TryLockError::Poisoned(core)) => return Ok(core.into_inner()),
                Err(TryLockError::WouldBlock) if before.is_some() && self.shared.budget_checks.completed() == before => {
                    return Err(Error::busy());
                }
                Err(TryLockError::WouldBlock) => self.shared.budget_checks.wait(),
            }
        }
    }

    /// Starts a thread of the engine that steps it and sleeps while there is nothing to do.
    pub fn start(&self) -> Result<()> {
        self.check()?;
        let mut driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
        if driver.is_some() {
            return Err(Error::busy());
        }
        *driver = Some(Driver::start(self.core.clone(), self.shared.table.wakeup.clone(), self.driver_cpu)?);
        Ok(())
    }

    /// Stops the stepping thread after its current step. Requests stay where they are.
    pub fn stop(&self) {
        let mut driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
        *driver = None;
        budget_client::answer_calls(&self.core, &self.shared);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
        self.core.lock().unwrap_or_else(PoisonError::into_inner).close();
    }
}

/// Makes a device allocate all the memory that it will ever need.
fn warm_up<B: Backend>(runner: &mut ModelRunner<B>, files: &ModelFiles, options: &EngineOptions, info: &ModelInfo) -> Result<()> {
    let MemoryPlan { max_blocks: blocks, block_size, max_model_len, swap_blocks, .. } = info.memory;
    let (rows, sequences) = (options.max_batch_tokens, options.max_seqs);
    let stage = WarmupLimits { tokens: rows, sequences, blocks, block_size, groups: info.paging.groups(), max_len: max_model_len };
    let limits = memory::inputs(files, options, &info.paging, memory::model_max_len(options, files.spec.max_positions)?);
    let rehearsed = runner.warm_up(&limits, &warmup::largest_batches(stage)?);
    rehearsed.map_err(|e| Error::new(e.code(), format!("the warm-up with the largest step ({rows} rows) has failed: {}", e.message())))?;
    if let Some(batch) = warmup::single_decode(stage)? {
        let kept = runner.record_steps(&limits.max, &batch);
        kept.map_err(|e| Error::new(e.code(), format!("the device cannot record its decode steps: {}", e.message())))?;
    }
    if swap_blocks > 0 { runner.warm_up_swap() } else { Ok(()) }
}

fn model_files(options: &EngineOptions) -> Result<ModelFiles> {
    let mut files = ModelFiles::open(&options.model_dir)?;
    files.weight_format = options.weight_format;
    Ok(files)
}

/// Returns the name of the model directory.
fn name_of(model_dir: &Path, info: &ModelInfo) -> String {
    model_dir.file_name().map_or_else(|| info.architecture.into(), |name| name.to_string_lossy().into_owned())
}

/// Returns the end-of-sequence tokens of the model, or else those of its tokenizer.
fn eos_token_ids(files: &ModelFiles, text: Option<&Text>) -> Vec<u32> {
    let mut ids = files.eos_token_ids.clone();
    if ids.is_empty() {
        ids.extend(text.and_then(Text::eos_token_id).filter(|&id| (id as usize) < files.spec.vocab_size));
    }
    let mut seen = HashSet::new();
    ids.retain(|id| seen.insert(*id));
    ids
}
