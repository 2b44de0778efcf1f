//! The engine: requests in, steps, outputs out. Any thread may add, abort and poll. One thread at a
//! time may step.

mod admission;
mod admission_snapshot;
mod budget_checks;
mod budget_client;
mod clock;
mod command;
mod commands;
mod core;
mod deadlines;
mod deferred_commands;
mod delivery;
mod device;
mod driver;
mod fork_commands;
mod held_forks;
mod inbox;
#[doc(hidden)]
pub mod journal;
mod kv_events;
mod late_masks;
#[cfg(test)]
mod late_masks_test;
mod lifecycle;
mod live_requests;
mod load;
mod masks;
mod pool_lease;
mod recovery;
mod request;
mod results;
mod sampling;
mod sequence;
mod sequence_calls;
mod sequence_table;
mod sequence_view;
mod shared;
mod snapshot;
mod snapshot_calls;
mod step_inputs;
mod step_time;
mod store_commands;
#[cfg(test)]
mod stored_names_test;
mod telemetry;
mod transfer_commands;
mod transfers;
mod wait_queue;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use self::core::EngineCore;
pub use admission::Admission;
pub use clock::{Clock, SystemClock};
use driver::Driver;
use journal::Recording;
use kv_events::EventQueue;
pub use kv_events::{KvEventKind, KvEventView, KvEvents};
pub use load::ModelInfo;
use load::{EngineParts, model_files};
use once_cell::sync::OnceCell;
pub use request::{Prompt, Request};
pub use sequence_calls::{Continue, Fork, Resume, SequenceInfo};
use shared::{Published, Shared};
use step_inputs::{Inputs, LiveInputs};
use transfers::store::{Contents, StoreClient, ValueFormat};
use transfers::{StoreTransfers, SwapFile};

use crate::backend::cpu::CpuBackend;
use crate::backend::cuda::CudaBackend;
use crate::error::{Error, Result};
pub use crate::executor::local::ModelExecutor;
pub use crate::executor::{Executor, InFlightStep, StepOutput};
pub use crate::generation::LogitsHook;
use crate::generation::grammar::{Grammars, Vocabulary};
use crate::generation::sampler::TokenTexts;
use crate::kv::BlockManager;
use crate::memory::budget::{Lease, MemoryBudget};
pub use crate::memory::plan::MemoryPlan;
use crate::model::LoadProgress;
use crate::observability::journal::writer::JournalWriter;
use crate::observability::metrics::Snapshot;
pub use crate::observability::stats::{Stats, StepReport};
pub use crate::output::batch::OutputBatch;
pub use crate::output::queue::{Outputs, Queue};
use crate::scheduler::simulate::Capacity;
use crate::scheduler::{Policies, Scheduler, SchedulerOptions};
use crate::text::Text;
use crate::types::RequestId;
use crate::types::kv_store::KvStoreHandle;
use crate::types::options::{Device, EngineOptions, WorkerOptions};
pub use crate::types::outputs::{FinishReason, Logprobs, Output, OutputView};
pub use crate::types::timing::Timing;

/// Maximum number of blocks that one step computes and that reach a KV store.
const MAX_COMPUTED_BLOCKS: usize = 1 << 14;

/// Decorates what the core gets from outside: its inputs and the results of its executor.
type Decorate = Box<dyn FnOnce(Box<dyn Inputs>, Box<dyn Executor>) -> (Box<dyn Inputs>, Box<dyn Executor>)>;

/// An engine: one model with its KV pool and its requests.
pub struct Engine {
    info: ModelInfo,
    /// Name of the model in metrics.
    name: String,
    seed: u64,
    capacity: Capacity,
    keeps_prefixes: bool,
    /// Whether a journal records all inputs.
    journals: bool,
    external: ExternalBlocks,
    /// Storage layout of K and V.
    layout: String,
    shared: Shared,
    core: Arc<Mutex<EngineCore>>,
    lease: Arc<Lease>,
    driver: Mutex<Option<Driver>>,
    /// CPU to which the stepping thread of the engine is pinned.
    driver_cpu: Option<usize>,
    queue: Arc<Queue>,
    vocabulary: TokenTables,
}

/// The blocks of the engine outside of it.
struct ExternalBlocks {
    /// Whether there is a KV store. A replay repeats what it returned.
    has_store: bool,
    /// KV store, for its counters.
    store: Option<Arc<StoreClient>>,
    /// The names of the blocks.
    format: ValueFormat,
}

/// What requests need to know of the tokens of the vocabulary.
struct TokenTables {
    /// End-of-sequence tokens.
    eos: Arc<[u32]>,
    /// Created by the first request with a grammar.
    grammars: OnceCell<Grammars>,
    /// Bytes of each token, created by the first request that needs them.
    texts: OnceCell<Arc<TokenTexts>>,
}

impl Engine {
    /// Computes the memory plan from the headers of the model files, without large allocations.
    pub fn plan(options: &EngineOptions) -> Result<MemoryPlan> {
        options.validate()?;
        let mut files = model_files(options)?;
        files.divide(options.division()?.place(0))?;
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
        let parts = EngineParts::load_on_device(options, progress)?;
        let engine = parts.create(|info, text, executor| Engine::with_executor(options, info, text, executor))?;
        // While the engine was created, other workers could not follow a change of the pool.
        budget_client::answer_calls(&engine.core, &engine.shared);
        options.workers.adopt();
        Ok(engine)
    }

    /// Runs one of several workers that compute a model with the engine of rank 0, in another
    /// process or thread. Returns when that engine is freed, or with an error, which ends the
    /// engine too.
    pub fn run_worker(options: &EngineOptions, progress: LoadProgress) -> Result<()> {
        load::run_worker(options, progress)?;
        options.workers.adopt();
        Ok(())
    }

    /// Makes the other workers fail if the options of this one cannot be read. Returns the error.
    pub fn refuse_options(workers: &WorkerOptions, error: Error) -> Error {
        load::refuse(workers, error)
    }

    /// Creates an engine with any executor: that of a model, or one whose logits a test sets.
    pub fn with_executor(options: &EngineOptions, info: ModelInfo, text: Option<Text>, executor: Box<dyn Executor>) -> Result<Engine> {
        Engine::with_clock(options, info, text, executor, Arc::new(SystemClock::default()))
    }

    /// Creates an engine as `with_executor` does. All decisions that depend on time use this clock.
    pub fn with_clock(
        options: &EngineOptions,
        info: ModelInfo,
        text: Option<Text>,
        executor: Box<dyn Executor>,
        clock: Arc<dyn Clock>,
    ) -> Result<Engine> {
        let header = journal::header(options, &info, &executor.layout());
        let writer = options.journal_path.as_deref().map(|path| JournalWriter::create(path, &header)).transpose()?;
        let record = writer.map(|writer| {
            let recording = Recording::new(options.max_seqs)?;
            let decorate: Decorate = Box::new(|inputs, executor| recording.around(inputs, executor, writer));
            Ok::<_, Error>(decorate)
        });
        let record = record.transpose()?;
        let engine = Engine::build(options, info, text, executor, clock, record)?;
        if let Some(client) = &engine.external.store {
            client.board.own_store();
        }
        Ok(engine)
    }

    /// Creates an engine whose seams are decorated, to record or to replay a journal.
    fn build(
        options: &EngineOptions,
        info: ModelInfo,
        text: Option<Text>,
        executor: Box<dyn Executor>,
        clock: Arc<dyn Clock>,
        decorate: Option<Decorate>,
    ) -> Result<Engine> {
        let journals = decorate.is_some();
        let MemoryPlan { max_blocks, max_model_len, .. } = info.memory;
        let (lease, mut scheduler) = pool(options, &info)?;
        let shared = Shared::new(options, max_model_len, text, start_events(options, &info, &mut scheduler)?, clock);
        let (external, store) = start_store(options, &info, executor.as_ref(), &shared, &mut scheduler)?;
        let swap_file = start_swap_file(options, &info, executor.as_ref(), &shared, &mut scheduler)?;
        let (layout, capacity) = (executor.layout(), scheduler.capacity());
        let inputs = LiveInputs::new(
            shared.table.clone(),
            shared.clock.clone(),
            lease.clone(),
            shared.completions.clone(),
            (external.store.clone(), swap_file.as_ref().map(SwapFile::ended)),
            max_blocks,
        );
        let decorate = decorate.unwrap_or_else(|| Box::new(|inputs, executor| (inputs, executor)));
        let seams = decorate(Box::new(inputs), executor);
        let core = EngineCore::new(scheduler, seams, (store, swap_file, journals), lease.clone(), &info, options, shared.clone())?;
        let core = Arc::new(Mutex::new(core));
        lease.on_call(budget_client::callback(&core, &shared));
        // From now on, calls of the budget reach the callback. Earlier changes are handled here.
        core.lock().unwrap_or_else(PoisonError::into_inner).answer_caller();
        let queue = Arc::new(Queue::new(shared.table.new_sender(options.queue_capacity, options.max_seqs)?, &shared.table));
        Ok(Engine {
            vocabulary: TokenTables { eos: info.eos_token_ids.as_slice().into(), grammars: OnceCell::new(), texts: OnceCell::new() },
            name: options.model_name.clone().unwrap_or_else(|| name_of(&options.model_dir, &info)),
            info,
            seed: options.seed,
            capacity,
            keeps_prefixes: options.prefix_cache,
            journals,
            external,
            layout,
            shared,
            core,
            lease,
            driver: Mutex::new(None),
            driver_cpu: options.cpus.as_ref().and_then(|cpus| cpus.first().copied()),
            queue,
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
        self.vocabulary.grammars.get_or_try_init(|| {
            let tokens = self.text()?.token_bytes(self.info.vocab_size)?;
            Grammars::new(Vocabulary { tokens: tokens.bytes, special: tokens.special, eos: self.info.eos_token_ids.clone() })
        })
    }

    fn token_texts(&self) -> Result<&Arc<TokenTexts>> {
        let read = || Ok(Arc::new(TokenTexts::new(&self.text()?.token_bytes(self.info.vocab_size)?.bytes)?));
        self.vocabulary.texts.get_or_try_init(read)
    }

    /// Returns the bytes that a token contributes to a text. A special token has its name.
    ///
    /// # Errors
    /// The engine has no tokenizer, or the model has no such token.
    pub fn token_bytes(&self, token: u32) -> Result<&[u8]> {
        let texts = self.token_texts()?;
        let count = self.info.vocab_size;
        match (token as usize) < count {
            true => Ok(texts.get(token)),
            false => Err(Error::invalid(format!("token {token} is beyond the vocabulary of {count} tokens; use a smaller id"))),
        }
    }

    /// Returns the counters and the state of the engine.
    pub fn stats(&self) -> Stats {
        self.published().stats
    }

    /// Formats the metrics after the last step in the OpenMetrics text format, without waiting for
    /// a step.
    pub fn metrics(&self) -> Result<String> {
        let Published { stats, histograms } = self.published();
        let (budget, config) = (self.budget().info(), Snapshot::config(&self.info.memory, self.keeps_prefixes));
        Snapshot { stats, histograms, budget, config }.text(self.name.clone())
    }

    fn published(&self) -> Published {
        let mut published = *self.shared.published.lock().unwrap_or_else(PoisonError::into_inner);
        published.stats.admission_rejections = self.shared.table.rejections();
        published.stats.store = self.external.store.as_ref().map_or_else(Default::default, |store| store.board.counts.read());
        published
    }

    /// Panics unless every invariant between two steps holds. For tests.
    pub fn check_invariants(&self) {
        self.core.lock().unwrap_or_else(PoisonError::into_inner).check_invariants();
    }

    /// Fails if an earlier call has detected a defect.
    pub fn check(&self) -> Result<()> {
        self.shared.table.check()
    }

    /// Ends a request at the next step. Its last output has the finish reason `Abort`.
    pub fn abort(&self, request: RequestId) -> Result<()> {
        self.shared.table.abort(request)
    }

    /// Runs one step. Without requests, it returns when the pending exports and imports are
    /// complete. If all requests wait for late masks, it returns when one has come, or if there are
    /// outputs to read. Returns `Busy` if another thread is stepping, or if the engine has a
    /// stepping thread.
    pub fn step(&self) -> Result<StepReport> {
        // The stepping thread may have started without holding the lock of the core yet.
        if self.driver.try_lock().map_or(true, |driver| driver.is_some()) {
            return Err(Error::busy());
        }
        let mut core = self.core_to_step()?;
        let mut result = core.step();
        // Nothing else can run, so the call need not return before transfers and late masks.
        while result.as_ref().is_ok_and(|report| report.sequences == 0) && core.await_completion() {
            result = core.step();
        }
        drop(core);
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

/// Joins the memory budget, and creates the scheduler of the KV pool.
fn pool(options: &EngineOptions, info: &ModelInfo) -> Result<(Arc<Lease>, Box<Scheduler>)> {
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
    Ok((lease, Box::new(Scheduler::with_policies(scheduler_options, blocks, Policies::new(&options.policies))?)))
}

/// Creates the file of the host tier, if the options have a directory for it.
fn start_swap_file(
    options: &EngineOptions,
    info: &ModelInfo,
    executor: &dyn Executor,
    shared: &Shared,
    scheduler: &mut Scheduler,
) -> Result<Option<SwapFile>> {
    let Some(dir) = options.swap_dir.as_deref().filter(|_| info.memory.swap_blocks > 0) else { return Ok(None) };
    scheduler.read_host_ahead()?;
    let MemoryPlan { swap_blocks, block_bytes, .. } = info.memory;
    let max_moves = device::max_moves(executor.max_transfer_bytes(), block_bytes as usize);
    SwapFile::create(dir, swap_blocks, block_bytes as usize, max_moves, shared.table.wakeup.clone()).map(Some)
}

/// Returns the format of blocks outside of the engine.
fn value_format(options: &EngineOptions, info: &ModelInfo, executor: &dyn Executor) -> ValueFormat {
    let contents = Contents {
        model: &info.fingerprint,
        layout: &executor.layout(),
        isa: info.isa_name(),
        block_size: info.paging.block_size(),
        groups: info.paging.groups(),
        parts: &executor.kv_part_bytes(),
    };
    let secret = options.kv_store.as_ref().and_then(|store| store.secret.as_ref());
    ValueFormat::new(&contents, secret.map(|secret| secret.0.as_slice()))
}

/// Starts the thread of the store of the options, and creates the transfers from and to it. A
/// replay has transfers without a store.
fn start_store(
    options: &EngineOptions,
    info: &ModelInfo,
    executor: &dyn Executor,
    shared: &Shared,
    scheduler: &mut Scheduler,
) -> Result<(ExternalBlocks, Option<StoreTransfers>)> {
    let format = value_format(options, info, executor);
    let Some(options) = &options.kv_store else { return Ok((ExternalBlocks { has_store: false, store: None, format }, None)) };
    let start = |handle: &KvStoreHandle| {
        let store = handle.take().ok_or_else(|| Error::invalid("kv_store belongs to another engine; create a store for each engine"))?;
        StoreClient::start(store, options, format.clone(), info.paging.clone(), shared.table.wakeup.clone(), shared.clock.clone())
            .map(Arc::new)
    };
    let client = options.store.as_ref().map(start).transpose()?;
    scheduler.log_computed(MAX_COMPUTED_BLOCKS)?;
    let block_bytes = executor.kv_part_bytes().iter().sum();
    let transfers = StoreTransfers::new(client.clone(), options.timeout, block_bytes, executor.max_transfer_bytes())?;
    Ok((ExternalBlocks { has_store: true, store: client, format }, Some(transfers)))
}

/// Makes the prefix cache record its changes for KV events, if the options ask for them.
fn start_events(options: &EngineOptions, info: &ModelInfo, scheduler: &mut Scheduler) -> Result<Option<Arc<EventQueue>>> {
    if options.kv_events_capacity == 0 {
        return Ok(None);
    }
    scheduler.record_events()?;
    let queue = EventQueue::new(info.memory.max_blocks, info.paging.block_size(), options.kv_events_capacity)?;
    Ok(Some(Arc::new(queue)))
}

/// Returns the name of the model directory.
fn name_of(model_dir: &Path, info: &ModelInfo) -> String {
    model_dir.file_name().map_or_else(|| info.architecture.into(), |name| name.to_string_lossy().into_owned())
}
