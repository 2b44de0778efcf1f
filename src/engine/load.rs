//! Loading: from a model directory to an executor, with the memory plan and the tokenizer.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::device::max_moves;
use crate::backend::cpu::CpuBackend;
use crate::backend::cuda::CudaBackend;
use crate::backend::{Backend, BatchSize};
use crate::communicator::Communicator;
use crate::communicator::local::Local;
use crate::error::{Code, Error, Result, try_format};
use crate::executor::local::ModelExecutor;
use crate::executor::parallel::{self, Group, Lead, ParallelExecutor, WorkerThreads};
use crate::executor::warmup::WarmupLimits;
use crate::executor::{self, Executor, warmup};
use crate::kv::Paging;
use crate::memory::plan;
use crate::memory::plan::MemoryPlan;
use crate::model::{GgufSource, KvPool, LoadProgress, ModelFiles, PackedReport, gguf};
use crate::sys::float::StandardMode;
use crate::text::Text;
use crate::types::batch::Bounds;
use crate::types::options::{Device, EngineOptions, Isa, KvDtype, ModelDefaults, WorkerOptions};
use crate::types::parallel::WorkerPlace;

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
    /// Sampling parameters of the model's generation_config.json. An error affects only requests
    /// that want them.
    pub sampling_defaults: Result<ModelDefaults>,
    /// Instruction path of the CPU kernels. `None` on a CUDA device.
    pub isa: Option<Isa>,
    /// On a CUDA device: cuBLASLt with its version and path, or the reason why the library's own kernels
    /// compute products of many rows. Empty on the CPU.
    pub blas_library: String,
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
    /// Describes an executor without a model, for `Engine::with_executor`: a pool of `blocks`
    /// blocks, and no bytes that are accounted for.
    pub fn without_model(vocab_size: usize, block_size: usize, blocks: usize, max_model_len: usize) -> ModelInfo {
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
            full_sequences: blocks * block_size / max_model_len.max(1),
            swap_bytes: 0,
            swap_blocks: 0,
        };
        ModelInfo {
            architecture: "none",
            vocab_size,
            layers: 0,
            max_positions: max_model_len,
            eos_token_ids: Vec::new(),
            sampling_defaults: Ok(ModelDefaults::default()),
            isa: None,
            blas_library: String::new(),
            threads: 1,
            memory,
            paging: Paging::without_windows(block_size),
            fingerprint: [0; 32],
            packed: PackedReport::default(),
        }
    }

    /// Returns the name of the instruction path that determines the bits of the results.
    pub(super) fn isa_name(&self) -> &'static str {
        self.isa.map_or("", |isa| isa.bits().name())
    }
}

/// The parts of a new engine.
pub struct EngineParts {
    pub(super) info: ModelInfo,
    pub(super) text: Option<Text>,
    pub(super) executor: Box<dyn Executor>,
    /// The other workers, if there are any. They wait until `create` has been called.
    pub(super) lead: Option<Arc<Lead>>,
}

impl EngineParts {
    /// Creates an engine from its parts. If this fails, the other workers fail too.
    pub fn create<T>(self, create: impl FnOnce(ModelInfo, Option<Text>, Box<dyn Executor>) -> Result<T>) -> Result<T> {
        let engine = create(self.info, self.text, self.executor);
        match self.lead {
            Some(lead) => lead.agree_on_engine(engine),
            None => engine,
        }
    }

    /// Opens the device and loads the model. With several workers, this is rank 0. If the options
    /// name several devices, threads of this process are the other ranks.
    pub fn load_on_device(options: &EngineOptions, progress: LoadProgress) -> Result<EngineParts> {
        let mut threads = WorkerThreads::default();
        let devices = options.devices().map_or(1, |devices| devices.len());
        if devices == 1 || options.workers.communicator.is_some() {
            return EngineParts::load_rank(options, threads, None, progress);
        }
        options.validate()?;
        let mut ranks = Local::group(devices).into_iter().map(|rank| Arc::new(rank) as Arc<dyn Communicator>);
        let first = ranks.next();
        let is_cancelled = Arc::new(AtomicBool::new(false));
        for world in ranks {
            let (options, is_cancelled) = (options.for_device(world.rank())?, is_cancelled.clone());
            threads.spawn(world, move |world| run_rank(&options, Some(world), &mut |_, _| !is_cancelled.load(Relaxed)))?;
        }
        let failure = threads.failure().clone();
        let mut progress = |done, total| {
            let continues = progress(done, total);
            is_cancelled.store(!continues, Relaxed);
            continues
        };
        EngineParts::load_rank(&options.for_device(0)?, threads, first, &mut progress).map_err(|error| match error.code() {
            // Rank 0 may only know that another rank has ended.
            Code::Internal => failure.get().unwrap_or(error),
            _ => error,
        })
    }

    /// Loads one device. `threads` are workers of this process, which are connected by `world`.
    fn load_rank(
        options: &EngineOptions,
        threads: WorkerThreads,
        world: Option<Arc<dyn Communicator>>,
        progress: LoadProgress,
    ) -> Result<EngineParts> {
        let _mode = StandardMode::enter();
        let group = join(options, world, |rank| match rank {
            0 => Ok(()),
            _ => Err(Error::invalid(format!("the communicator has rank {rank}; the engine has rank 0, run a worker on the others"))),
        })?;
        match options.device()? {
            Device::Cpu => EngineParts::load_on_cpu(options, threads, group, progress),
            Device::Cuda(ordinal) => EngineParts::load_on_cuda(ordinal, options, threads, group, progress),
        }
    }

    // Inlined, both backends would have their frames on the stack, which may be small.
    #[inline(never)]
    fn load_on_cpu(options: &EngineOptions, threads: WorkerThreads, group: Option<Group>, progress: LoadProgress) -> Result<EngineParts> {
        let backend = Agreement(group.as_ref()).on(cpu_backend(options))?;
        let (isa, cpu_threads) = (backend.isa(), backend.threads());
        let mut parts = LoadedPart::load(backend, options, group, isa.bits().name(), progress)?.into_parts(threads)?;
        (parts.info.isa, parts.info.threads) = (Some(isa), cpu_threads);
        Ok(parts)
    }

    #[inline(never)]
    fn load_on_cuda(
        ordinal: usize,
        options: &EngineOptions,
        threads: WorkerThreads,
        group: Option<Group>,
        progress: LoadProgress,
    ) -> Result<EngineParts> {
        let backend = cuda_backend(ordinal, options, group.is_some());
        let backend = Agreement(group.as_ref()).on(backend)?;
        let blas_library = backend.blas_library();
        let mut parts = LoadedPart::load(backend, options, group, NO_ISA, progress)?.into_parts(threads)?;
        parts.info.blas_library = blas_library;
        Ok(parts)
    }
}

/// Runs a worker other than rank 0 until the engine of rank 0 is freed.
pub fn run_worker(options: &EngineOptions, progress: LoadProgress) -> Result<()> {
    if options.workers.communicator.is_none() && options.devices()?.len() > 1 {
        return Err(Error::invalid(format!("device is {:?}; a worker has one device, so give one", options.device)));
    }
    run_rank(options, None, progress)
}

/// Runs a worker. `world` connects workers of this process.
fn run_rank(options: &EngineOptions, world: Option<Arc<dyn Communicator>>, progress: LoadProgress) -> Result<()> {
    let _mode = StandardMode::enter();
    let group = join(options, world, |rank| match rank {
        0 => Err(Error::invalid("the communicator has rank 0, which creates the engine; run workers on the other ranks")),
        _ => Ok(()),
    })?;
    let group = group.ok_or_else(|| Error::invalid("a worker needs others; set tensor_parallel or pipeline_parallel to more than 1"))?;
    match options.device()? {
        Device::Cpu => {
            let backend = group.agree(cpu_backend(options))?;
            let isa = backend.isa().bits().name();
            LoadedPart::load(backend, options, Some(group), isa, progress)?.serve()
        }
        Device::Cuda(ordinal) => {
            let backend = group.agree(cuda_backend(ordinal, options, true))?;
            LoadedPart::load(backend, options, Some(group), NO_ISA, progress)?.serve()
        }
    }
}

fn cpu_backend(options: &EngineOptions) -> Result<CpuBackend> {
    match &options.cpus {
        None => CpuBackend::new(options.thread_count(), options.isa),
        Some(cpus) => CpuBackend::pinned(cpus, options.isa),
    }
}

/// What workers on CUDA devices have instead of an instruction path.
const NO_ISA: &str = "none (a CUDA device)";

/// Opens a CUDA device, alone or as one of several workers.
fn cuda_backend(ordinal: usize, options: &EngineOptions, is_worker: bool) -> Result<CudaBackend> {
    match is_worker {
        false => CudaBackend::new(ordinal, options.batch_invariant),
        true => CudaBackend::for_worker(ordinal, options.batch_invariant),
    }
}

/// Connects this worker with the others, if there are several. If the options of one worker are
/// invalid, or its rank is refused, all workers fail.
fn join(options: &EngineOptions, world: Option<Arc<dyn Communicator>>, check_rank: fn(usize) -> Result<()>) -> Result<Option<Group>> {
    let valid = options.validate();
    let group = match group(&options.workers, world) {
        Ok(Some(group)) => group,
        Ok(None) => return valid.map(|()| None),
        // Invalid options are reported first.
        Err(error) => return valid.and(Err(error)),
    };
    group.agree(valid.and_then(|()| check_rank(group.place.rank())))?;
    Ok(Some(group))
}

/// Makes the other workers fail because options of this one are refused, which are not in
/// `EngineOptions` yet. Returns the error of this worker.
pub fn refuse(workers: &WorkerOptions, error: Error) -> Error {
    if let Ok(Some(group)) = group(workers, None) {
        let _ = group.agree::<()>(Err(error.clone()));
    }
    error
}

/// Returns the group of the workers, if there are several. Those of other processes are connected
/// by the communicator of the options.
fn group(options: &WorkerOptions, world: Option<Arc<dyn Communicator>>) -> Result<Option<Group>> {
    let WorkerOptions { division, communicator, timeout } = options;
    let world = match (division.workers(), communicator, world) {
        (_, _, Some(world)) => world,
        (1, None, _) => return Ok(None),
        (workers, None, _) => {
            return Err(Error::invalid(format!(
                "tensor_parallel times pipeline_parallel is {workers} and communicator is NULL; set a communicator with this many \
                 ranks, or give as many devices"
            )));
        }
        (_, Some(communicator), _) => {
            communicator.take().ok_or_else(|| Error::invalid("the communicator is in use by another engine or worker"))?
        }
    };
    Group::new(world, *division, *timeout).map(Some)
}

/// The part of the model that this worker computes. A single worker has the whole model.
struct LoadedPart<B: Backend> {
    info: ModelInfo,
    text: Option<Box<Text>>,
    executor: Box<ModelExecutor<B>>,
    /// The other workers, if there are any, and the largest batch.
    group: Option<(Group, BatchSize)>,
}

impl<B: Backend + 'static> LoadedPart<B> {
    /// Loads the part of this worker. If one of several workers fails, all of them fail.
    fn load(mut backend: B, options: &EngineOptions, group: Option<Group>, isa: &str, progress: LoadProgress) -> Result<LoadedPart<B>> {
        let agree = Agreement(group.as_ref());
        let place = group.as_ref().map(|group| group.place).unwrap_or_default();
        let (mut files, mut text) = agree.on(open(options, place))?;
        agree.on_settings(&files, options, isa)?;
        if let Some(group) = &group {
            backend.join(group.workers.clone())?;
        }
        let memory = agree.on_blocks(MemoryPlan::for_model(&files, &backend, options), &files, options)?;
        if let Some(text) = &mut text {
            text.limit_prompts(options.max_prompt_bytes(memory.max_model_len));
        }
        files.fit(memory.max_model_len);
        let inputs = plan::inputs(&files, options, &plan::paging(&files, memory.block_size), memory.max_model_len);
        let (info, mut executor) = agree.on(load_weights(backend, &files, options, memory, text.as_deref(), progress))?;
        // Only if all have loaded their parts, because they exchange data.
        agree.on(warm_up(&mut executor, &files, options, &info))?;
        Ok(LoadedPart { info, text, executor, group: group.map(|group| (group, inputs.max)) })
    }

    fn into_parts(self, threads: WorkerThreads) -> Result<EngineParts> {
        let (executor, lead): (Box<dyn Executor>, _) = match self.group {
            None => (self.executor, None),
            Some((group, max)) => {
                let lead = Arc::new(Lead::new(group, threads));
                (Box::new(ParallelExecutor::new(lead.clone(), self.executor, &max)?), Some(lead))
            }
        };
        Ok(EngineParts { info: self.info, text: self.text.map(|text| *text), executor, lead })
    }

    fn serve(self) -> Result<()> {
        let MemoryPlan { max_blocks: blocks, swap_blocks: host_blocks, block_size, max_model_len: max_len, .. } = self.info.memory;
        let Some((group, max)) = self.group else { return Ok(()) };
        let bounds = Bounds { blocks, host_blocks, block_size, groups: max.groups, max_len };
        parallel::serve(self.executor, &group, &max, &bounds)
    }
}

/// What several workers agree on while they load. A single worker agrees with itself.
struct Agreement<'a>(Option<&'a Group>);

impl Agreement<'_> {
    fn on<T>(&self, result: Result<T>) -> Result<T> {
        match self.0 {
            Some(group) => group.agree(result),
            None => result,
        }
    }

    /// Compares what must be the same on all workers.
    fn on_settings(&self, files: &ModelFiles, options: &EngineOptions, isa: &str) -> Result<()> {
        let Some(group) = self.0 else { return Ok(()) };
        let settings = files.fingerprint().and_then(|fingerprint| {
            let [fingerprint, ..] = fingerprint.as_chunks().0 else { return Err(Error::internal("a short fingerprint")) };
            let EngineOptions { block_size, kv_dtype, max_model_len, max_batch_tokens, max_seqs, .. } = options;
            try_format(format_args!(
                "model {} with fingerprint {:016x}\ninstruction path {isa}\nweight_format {:?}\nblock_size {block_size}\nkv_dtype {kv_dtype:?}\n\
                 max_model_len {max_model_len:?}\nmax_batch_tokens {max_batch_tokens}\nmax_seqs {max_seqs}\nprefill_chunk {:?}\nbatch_invariant {}\n",
                files.architecture,
                u64::from_be_bytes(*fingerprint),
                options.weight_format,
                options.prefill_chunk,
                options.batch_invariant,
            ))
        });
        group.compare(&group.agree(settings)?)
    }

    /// Limits the pools to the smallest one, since all workers have the same blocks.
    fn on_blocks(&self, plan: Result<MemoryPlan>, files: &ModelFiles, options: &EngineOptions) -> Result<MemoryPlan> {
        let Some(group) = self.0 else { return plan };
        let plan = group.agree(plan)?;
        let blocks = group.min_over_workers([plan.blocks, plan.max_blocks, plan.swap_blocks].map(|blocks| blocks as u64))?;
        group.agree(plan.with_blocks(files, options, blocks.map(|blocks| blocks as usize)))
    }
}

/// Opens the part of the model of one worker, and the tokenizer, which only rank 0 needs.
fn open(options: &EngineOptions, place: WorkerPlace) -> Result<(Box<ModelFiles>, Option<Box<Text>>)> {
    let mut files = Box::new(model_files(options)?);
    files.divide(place)?;
    let text = if options.skip_tokenizer || place.rank() > 0 { None } else { Some(Box::new(load_text(&files, &options.model_dir)?)) };
    Ok((files, text))
}

/// Loads the weights, and allocates the KV pool and the working memory.
fn load_weights<B: Backend>(
    backend: B,
    files: &ModelFiles,
    options: &EngineOptions,
    memory: MemoryPlan,
    text: Option<&Text>,
    progress: LoadProgress,
) -> Result<(ModelInfo, Box<ModelExecutor<B>>)> {
    let mut info = ModelInfo {
        architecture: files.architecture,
        vocab_size: files.spec.vocab_size,
        layers: files.spec.layers.len(),
        max_positions: files.spec.max_positions,
        eos_token_ids: eos_token_ids(files, text),
        sampling_defaults: files.sampling_defaults.clone(),
        isa: None,
        blas_library: String::new(),
        threads: options.thread_count(),
        memory,
        paging: plan::paging(files, memory.block_size),
        fingerprint: files.fingerprint()?,
        packed: PackedReport::default(),
    };
    let pool = KvPool { blocks: memory.max_blocks, block_size: memory.block_size, dtype: memory.kv_dtype };
    let mut kv = files.kv_cache(&backend, pool)?;
    if memory.swap_blocks > 0 {
        // With a file, the tier in memory has the blocks that a step moves.
        let staged = max_moves(executor::MAX_TRANSFER_BYTES, memory.block_bytes as usize);
        let blocks = if options.swap_dir.is_some() { memory.swap_blocks.min(staged) } else { memory.swap_blocks };
        kv.add_host_tier(&backend, blocks, memory.block_bytes)?;
    }
    let limits = plan::limits(options);
    let decoder = match &options.packed_dir {
        None => files.load(backend, limits, progress)?,
        Some(dir) => {
            let (decoder, report) = files.load_packed(dir, backend, limits, progress)?;
            info.packed = report;
            decoder
        }
    };
    decoder.backend().end_loading();
    Ok((info, Box::new(ModelExecutor::new(decoder, kv))))
}

/// Makes a device allocate all the memory that it will ever need.
fn warm_up<B: Backend>(executor: &mut ModelExecutor<B>, files: &ModelFiles, options: &EngineOptions, info: &ModelInfo) -> Result<()> {
    if executor.backend().free_bytes()?.is_none() {
        return Ok(());
    }
    let MemoryPlan { max_blocks: blocks, block_size, max_model_len, swap_blocks, .. } = info.memory;
    let (rows, sequences) = (options.max_batch_tokens, options.max_seqs);
    let stage = WarmupLimits { tokens: rows, sequences, blocks, block_size, groups: info.paging.groups(), max_len: max_model_len };
    let limits = plan::inputs(files, options, &info.paging, plan::model_max_len(options, files.spec.max_positions)?);
    let rehearsed = executor.warm_up(&limits, &warmup::largest_batches(stage)?);
    rehearsed.map_err(|e| Error::new(e.code(), format!("the warm-up with the largest step ({rows} rows) has failed: {}", e.message())))?;
    if let Some(batch) = warmup::single_decode(stage)? {
        let kept = executor.record_steps(&limits.max, &batch);
        kept.map_err(|e| Error::new(e.code(), format!("the device cannot record its decode steps: {}", e.message())))?;
    }
    if swap_blocks > 0 { executor.warm_up_swap() } else { Ok(()) }
}

/// Loads the tokenizer of a model directory, or of a GGUF file. A `tokenizer.json` beside the file
/// has precedence.
fn load_text(files: &ModelFiles, model_dir: &Path) -> Result<Text> {
    let Some(GgufSource { path, metadata }) = &files.gguf else { return Text::load(model_dir) };
    let dir = path.parent().unwrap_or(path);
    if dir.join("tokenizer.json").exists() {
        return Text::load(dir);
    }
    let documents = gguf::text::documents(metadata).map_err(|error| error.within(path.display()))?;
    Text::from_documents(path, documents.tokenizer, documents.config)
}

/// Opens the files of the model without reading the weights.
pub fn model_files(options: &EngineOptions) -> Result<ModelFiles> {
    let mut files = ModelFiles::open(&options.model_dir)?;
    files.weight_format = options.weight_format;
    Ok(files)
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
