use std::ffi::{c_char, c_void};
use std::time::Duration;

use super::communicator::to_communicator;
use super::convert::{self, PLLM_NUL_TERMINATED, Versioned, known_flags, limit, optional, path, slice, some, string};
use super::kv_store::{StoreLimits, to_store};
use super::{pllm_budget, pllm_communicator, pllm_kv_store};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::types::options::{
    AllocationPolicy, BatchingPolicy, EngineOptions, Isa, KvDtype, KvStoreOptions, OrderPolicy, Policies, Preemption, WeightFormat,
    WorkerOptions, cpu_list,
};
use crate::types::parallel::Division;

/// Selected by the library.
pub const PLLM_DTYPE_AUTO: u32 = 0;
/// 32-bit floating point.
pub const PLLM_DTYPE_F32: u32 = 1;
/// bfloat16.
pub const PLLM_DTYPE_BF16: u32 = 2;
/// 8-bit integers with a scale in f32 for each head of each token: about half the bytes of bf16, at
/// a small cost in quality.
pub const PLLM_DTYPE_INT8: u32 = 3;
/// 16-bit floating point. Values beyond 65504 are clamped.
pub const PLLM_DTYPE_F16: u32 = 4;
/// 8-bit floating point (OCP E4M3) with the scales of PLLM_DTYPE_INT8. More precise for small
/// values beside large ones, less precise for large values.
pub const PLLM_DTYPE_FP8: u32 = 5;

/// The widest instruction path of the machine: AVX512_BF16, AVX512_VNNI, AVX512, AVX_VNNI, AVX2,
/// PORTABLE.
pub const PLLM_ISA_AUTO: u32 = 0;
/// Any CPU.
pub const PLLM_ISA_PORTABLE: u32 = 1;
/// AVX2, FMA and F16C.
pub const PLLM_ISA_AVX2: u32 = 2;
/// AVX-512 F, BW, DQ and VL.
pub const PLLM_ISA_AVX512: u32 = 3;
/// As PLLM_ISA_AVX512_VNNI, with AVX-512 BF16: activations that are multiplied by weights or KV in
/// bf16 are rounded to bf16, and the products are summed in f32. Up to twice as fast for prompts.
pub const PLLM_ISA_AVX512_BF16: u32 = 4;
/// As PLLM_ISA_AVX2, with AVX-VNNI: products with integer weights are faster, with the same bits.
pub const PLLM_ISA_AVX_VNNI: u32 = 5;
/// As PLLM_ISA_AVX512, with AVX-512 VNNI: products with integer weights are faster, with the same
/// bits.
pub const PLLM_ISA_AVX512_VNNI: u32 = 6;

/// As in the model's files. Infinities and NaNs are kept.
pub const PLLM_WEIGHTS_AS_STORED: u32 = 0;
/// 32-bit floating point.
pub const PLLM_WEIGHTS_F32: u32 = 1;
/// 16-bit floating point.
pub const PLLM_WEIGHTS_F16: u32 = 2;
/// bfloat16.
pub const PLLM_WEIGHTS_BF16: u32 = 3;
/// 8-bit integers with a scale for each output. The CPU multiplies them by 8-bit activations, which
/// have a scale for every 128 values of a row. CUDA devices multiply them by activations in bf16.
pub const PLLM_WEIGHTS_INT8: u32 = 4;
/// 4-bit integers with a scale for each group of weight_group inputs of an output. The embedding
/// and the head are in 8 bits. Activations are as for PLLM_WEIGHTS_INT8.
pub const PLLM_WEIGHTS_INT4: u32 = 5;
/// As PLLM_WEIGHTS_INT4, with an offset for each group, for 16 more bits a group. With groups of the
/// same size, it is the more precise of the two formats.
pub const PLLM_WEIGHTS_INT4_ASYMMETRIC: u32 = 6;
/// CUDA only: 8-bit floating point (OCP E4M3) with a scale for each output. The embedding and the
/// head are as stored. Products of many rows multiply by fp8 activations with a scale for each row,
/// if the device supports it. All other products, those of experts and those with
/// PLLM_ENGINE_BATCH_INVARIANT multiply by bf16 activations.
pub const PLLM_WEIGHTS_FP8: u32 = 7;

/// packed_path was not set.
pub const PLLM_PACKED_UNUSED: u32 = 0;
/// The packed weights were read from packed_path.
pub const PLLM_PACKED_READ: u32 = 1;
/// The weights were packed from the model's files and written to packed_path.
pub const PLLM_PACKED_SAVED: u32 = 2;
/// The weights were packed from the model's files and could not be written to packed_path.
pub const PLLM_PACKED_UNSAVED: u32 = 3;

/// Serve token ids only: no tokenizer is loaded, and text calls return PLLM_E_UNSUPPORTED.
pub const PLLM_ENGINE_SKIP_TOKENIZER: u32 = 1;
/// Disable the prefix cache.
pub const PLLM_ENGINE_NO_PREFIX_CACHE: u32 = 2;
/// On a CUDA device: the results of a sequence do not depend on the batch, as on the CPU. Slower:
/// products of many rows do not use cuBLASLt, and attention over long sequences is not split.
pub const PLLM_ENGINE_BATCH_INVARIANT: u32 = 4;

/// Preempted requests lose their KV blocks and are recomputed when they are rescheduled.
pub const PLLM_PREEMPTION_RECOMPUTE: u32 = 0;
/// Preempted requests are swapped to host memory. If it is full, they are recomputed.
pub const PLLM_PREEMPTION_SWAP: u32 = 1;
/// Swap or recompute, whichever costs less by the measured times.
pub const PLLM_PREEMPTION_AUTO: u32 = 2;

/// First come, first served.
pub const PLLM_ORDER_FCFS: u32 = 0;
/// Highest priority of pllm_request first. It can preempt running requests of lower priority. To
/// prevent starvation, a request that has waited for ageing_ms goes before new requests of the next
/// higher priority.
pub const PLLM_ORDER_PRIORITY: u32 = 1;
/// Shortest predicted output first. The prediction uses recent requests with a similar max_tokens.
/// To prevent starvation, a request that has waited for ageing_ms goes before new requests that are
/// predicted to be up to 100 tokens shorter.
pub const PLLM_ORDER_SHORTEST_PREDICTED: u32 = 2;

/// Each step mixes prompt chunks and decodes, in the order of the requests.
pub const PLLM_BATCHING_MIXED: u32 = 0;
/// Each step has either prompts or decodes, and prompts go first. After prefill_budget prompt
/// tokens, the decodes get one step.
pub const PLLM_BATCHING_PREFILL_FIRST: u32 = 1;
/// Each step has every decode and at most prefill_budget prompt tokens: bounds the time between
/// tokens.
pub const PLLM_BATCHING_DECODE_FIRST: u32 = 2;
/// Static batching: no request is admitted until the running batch has finished. For baselines.
pub const PLLM_BATCHING_STATIC: u32 = 3;

/// Blocks are allocated as a sequence grows. If the pool is full, the last request in the order is
/// preempted.
pub const PLLM_ALLOCATION_ON_DEMAND: u32 = 0;
/// A request starts when the pool has blocks for its max_tokens, so that growing sequences cause no
/// preemption. Forks and appended tokens of running sequences are not included.
pub const PLLM_ALLOCATION_MAX_TOKENS: u32 = 1;

/// Options of an engine. Call pllm_engine_options_init first. The strings need to be valid only
/// during the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_engine_options {
    /// sizeof(pllm_engine_options).
    pub struct_size: u64,
    /// Model directory in the layout of Hugging Face, or a GGUF file. UTF-8.
    pub model_path: *const c_char,
    /// Length of model_path in bytes, or PLLM_NUL_TERMINATED (default).
    pub model_path_len: u64,
    /// Device: "cpu" (default, also NULL), or "cuda:0" (also "cuda") for the first CUDA device.
    /// CUDA needs an NVIDIA driver for CUDA 12.0 or newer (525) and compute capability 8.0 or newer.
    /// Prompts are faster with NVIDIA's cuBLAS for CUDA 12 or 13 (libcublasLt.so.12 or .13), which
    /// blas_library of pllm_model_info reports. A list such as "cuda:0,cuda:1" divides the model
    /// among up to 64 devices of one kind, which needs NCCL (libnccl.so.2). Lists have not been tested
    /// on GPUs yet.
    pub device: *const c_char,
    /// Length of device in bytes, or PLLM_NUL_TERMINATED (default).
    pub device_len: u64,
    /// KV pool size in bytes. 0 (default): enough for max_seqs sequences of max_model_len tokens,
    /// at most 1 GiB.
    pub kv_bytes: u64,
    /// Seed for requests without a seed of their own. Default 0.
    pub seed: u64,
    /// Tokens per KV block: 8, 16 (default), 32, 64, 128 or 256.
    pub block_size: u32,
    /// Data type of KV blocks: PLLM_DTYPE_*. Default PLLM_DTYPE_AUTO: f32 for models in f32, else
    /// bf16.
    pub kv_dtype: u32,
    /// Maximum length of a sequence in tokens, prompt and output together. 0 (default): the model's
    /// own maximum, or what the pool holds.
    pub max_model_len: u32,
    /// Maximum number of tokens in one step, prompt and decode tokens of all sequences together.
    /// Default 512.
    pub max_batch_tokens: u32,
    /// Maximum number of running sequences, at most max_batch_tokens. Default 64.
    pub max_seqs: u32,
    /// Maximum number of prompt tokens of one sequence in one step. 0 (default): max_batch_tokens.
    pub prefill_chunk: u32,
    /// Number of threads, including the stepping thread. 0 (default): the number of CPUs in cpus,
    /// or of CPUs on which the process may run, within the quota of its container.
    pub threads: u32,
    /// Instruction path: PLLM_ISA_*. Default PLLM_ISA_AUTO. Results have the same bits within a
    /// path, not across paths.
    pub isa: u32,
    /// PLLM_ENGINE_* flags. Default 0.
    pub flags: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Capacity, in outputs, of the engine's own queue. See pllm_queue_create. 0 (default): 65536.
    /// Unlimited for programs built with a header without this field.
    pub queue_capacity: u64,
    /// Called while weights are loaded. NULL (default): not called.
    pub progress: pllm_progress,
    /// Passed to progress.
    pub progress_data: *mut c_void,
    /// Maximum number of requests, including resumed and forked sequences, that wait for their
    /// first step. More are refused with PLLM_E_CAPACITY; one can always wait. 0 (default): no
    /// limit.
    pub max_waiting_requests: u64,
    /// Maximum number of tokens that the waiting requests have to compute. 0 (default): no limit.
    pub max_waiting_tokens: u64,
    /// Budget from which the KV pool takes its bytes, instead of kv_bytes. NULL (default): a budget
    /// of its own.
    pub budget: *const pllm_budget,
    /// Size in bytes of the host tier, which holds the KV of swapped requests and idle sequences. 0
    /// (default): none.
    pub swap_bytes: u64,
    /// Directory for the host tier. The tier is an unnamed file there, which grows as it is written
    /// and disappears with the engine. A thread of the engine reads and writes it. A slow disk
    /// delays only the sequences that return from it; while it is behind, others are recomputed.
    /// NULL (default): the tier is in memory. If the file cannot be written or read, as on a full
    /// disk, the sequence is recomputed when it returns and swap_failures of pllm_stats counts it.
    pub swap_path: *const c_char,
    /// Length of swap_path in bytes, or PLLM_NUL_TERMINATED (default).
    pub swap_path_len: u64,
    /// PLLM_PREEMPTION_*. Default PLLM_PREEMPTION_RECOMPUTE. The others need swap_bytes, and
    /// swap_bytes needs one of the others.
    pub preemption: u32,
    /// Order of the waiting requests: PLLM_ORDER_*. Default PLLM_ORDER_FCFS.
    pub order: u32,
    /// Waiting time in milliseconds after which a request is preferred; see PLLM_ORDER_*. 0
    /// (default): 10,000.
    pub ageing_ms: u32,
    /// Composition of a step: PLLM_BATCHING_*. Default PLLM_BATCHING_MIXED.
    pub batching: u32,
    /// Prompt tokens for PLLM_BATCHING_DECODE_FIRST and PLLM_BATCHING_PREFILL_FIRST. 0 (default):
    /// 256 and 2048.
    pub prefill_budget: u32,
    /// Number of blocks that a request needs to start: PLLM_ALLOCATION_*. Default
    /// PLLM_ALLOCATION_ON_DEMAND.
    pub allocation: u32,
    /// File for a trace of every step, in the format of Perfetto and chrome://tracing: the batch,
    /// the times of its phases, and the phases of each sequence. UTF-8. An existing file is
    /// replaced. A thread of the engine writes it, at most about one second late. If the disk fails
    /// or falls behind by 256 MiB, the trace ends and traces_stopped of pllm_stats is 1. NULL
    /// (default): none.
    pub trace_path: *const c_char,
    /// Length of trace_path in bytes, or PLLM_NUL_TERMINATED (default).
    pub trace_path_len: u64,
    /// File for a journal of all calls and of everything else on which steps depend.
    /// pagedllm-replay repeats them bit for bit on a machine with the same instruction path. It
    /// contains prompts, as tokens, and cache salts. UTF-8. An existing file is replaced. A thread
    /// of the engine writes it, at most about one second late. If the disk fails or falls
    /// behind by 256 MiB, the journal ends and journals_stopped of pllm_stats is 1. NULL
    /// (default): none.
    pub journal_path: *const c_char,
    /// Length of journal_path in bytes, or PLLM_NUL_TERMINATED (default).
    pub journal_path_len: u64,
    /// Value of the label model_name in pllm_engine_get_metrics. UTF-8. NULL (default): the name of
    /// the model directory.
    pub model_name: *const c_char,
    /// Length of model_name in bytes, or PLLM_NUL_TERMINATED (default).
    pub model_name_len: u64,
    /// Format of the weights in memory: PLLM_WEIGHTS_*. Fewer bits take less memory and time, and
    /// cost quality. Small tensors that affect quality (routers of experts, learned positions) and
    /// the projections of latents stay as stored. Default PLLM_WEIGHTS_AS_STORED.
    pub weight_format: u32,
    /// Number of inputs that share a scale in 4-bit formats: 32, 64 or 128. Smaller is more
    /// precise. 0 (default): 32.
    pub weight_group: u32,
    /// Directory for packed weights. If it has the packed form of this model, weight_format and
    /// library, the form is checked and read as fast as the disk. Otherwise the weights are packed
    /// and the form is written, or replaced. Several models and processes can share the directory;
    /// unused files are not removed. It contains weights: protect it against writing as the model
    /// is protected. If it cannot be written, the engine works and packed of pllm_model_info
    /// reports it. UTF-8. NULL (default): weights are packed each time.
    pub packed_path: *const c_char,
    /// Length of packed_path in bytes, or PLLM_NUL_TERMINATED (default).
    pub packed_path_len: u64,
    /// List of CPUs in the syntax of taskset -c, such as "0-3,8", one for each of threads. Each
    /// thread of the engine is pinned to one of them, in this order. The first is for the stepping
    /// thread: the engine's own thread (pllm_engine_start) is pinned, a thread of the program is
    /// not. NULL (default): threads are not pinned.
    pub cpus: *const c_char,
    /// Length of cpus in bytes, or PLLM_NUL_TERMINATED (default).
    pub cpus_len: u64,
    /// CUDA only: fraction, 0.01 to 1, of the device memory that is free after weights and working
    /// memory, for the KV pool. Cannot be combined with kv_bytes. 0 (default): kv_bytes is used.
    pub memory_fraction: f32,
    /// Must be 0.
    pub reserved2: u32,
    /// Maximum length in bytes of a text prompt, of a chat's JSON and the prompt it renders to, and
    /// of a text to tokenize. A longer one is PLLM_E_INVALID_ARGUMENT. 0 (default): 64 for each
    /// token of max_model_len, at least 1048576. Tokenization takes up to 16 bytes of memory for
    /// each byte of text, and up to 512 for each byte of a stretch of at most 2 MiB without a place
    /// to cut (docs/models.md).
    pub max_prompt_bytes: u64,
    /// Store for KV blocks outside of the pool, which is copied. NULL (default): none. A request
    /// first waits for the blocks of its prompt that the store has. Full blocks are written to
    /// the store. Needs the prefix cache. Each engine needs a store of its own.
    pub kv_store: *const pllm_kv_store,
    /// Maximum number of bytes of the blocks that are read or written at a time. 0 (default):
    /// 268435456.
    pub kv_store_max_bytes: u64,
    /// Maximum number of operations in flight, at most 65536. 0 (default): 64.
    pub kv_store_max_operations: u32,
    /// Time in milliseconds in which the store must answer a lookup and read its blocks, at most
    /// 3600000. Then the request continues without the others. If no block has arrived by then,
    /// requests do not wait for 8 times this time. 0 (default): 1000.
    pub kv_store_timeout_ms: u32,
    /// Secret for the keys and checksums of the blocks (HMAC-SHA-256), at least 16 bytes, for a
    /// store that is not trusted. Only engines with the same secret share blocks. It is copied.
    /// NULL (default): none.
    pub kv_store_secret: *const u8,
    /// Length of kv_store_secret in bytes.
    pub kv_store_secret_len: u64,
    /// Maximum number of KV events that wait for pllm_engine_poll_kv_events, at most 1048576. 0
    /// (default): no events are recorded. 16384 suits most hosts. Needs the prefix cache. Events
    /// take memory of the host: about 100 bytes and 4 for each token of a block, for each event
    /// and twice for each block of the pool.
    pub kv_events_capacity: u64,
    /// Connection with the other workers that compute the model (docs/parallel.md), which is
    /// copied. NULL (default): this engine computes it with the devices of this process. Its
    /// ranks are tensor_parallel * pipeline_parallel. Each engine or worker needs a
    /// communicator of its own.
    pub communicator: *const pllm_communicator,
    /// Number of workers that divide each layer. 0 (default): 1, or with a list of devices their
    /// number divided by pipeline_parallel. The number of attention heads and the widths of MLPs
    /// must be multiples of it, and so must the number of KV heads, unless it is a multiple of
    /// that.
    pub tensor_parallel: u32,
    /// Number of groups of workers, each with some of the layers. 0 (default): 1.
    pub pipeline_parallel: u32,
    /// Time in milliseconds after which a wait for another worker fails. It must be longer than any
    /// step, and than the difference between the times in which the workers load their parts of the
    /// model. 0 (default): 60000.
    pub worker_timeout_ms: u64,
}

/// Reports the bytes of weights that have been read, out of total, on the thread that creates the
/// engine. A result other than 0 cancels the loading: pllm_engine_create returns PLLM_E_CANCELLED.
/// It must return normally: no exception, no longjmp. It must not use the engine that is being
/// created.
pub type pllm_progress = Option<unsafe extern "C" fn(progress_data: *mut c_void, done: u64, total: u64) -> i32>;

// SAFETY: repr(C), the 32-bit fields fill whole words, numbers, pointers and a nullable function
// only.
unsafe impl Versioned for pllm_engine_options {
    const NAME: &'static str = "pllm_engine_options";
    const FIRST_SIZE: usize = 96;
    fn defaults() -> Self {
        let options = EngineOptions::default();
        // SAFETY: zero is a valid number, a null pointer, and None of a nullable function.
        let zero: Self = unsafe { std::mem::zeroed() };
        pllm_engine_options {
            struct_size: size_of::<Self>() as u64,
            model_path_len: PLLM_NUL_TERMINATED,
            device_len: PLLM_NUL_TERMINATED,
            seed: options.seed,
            block_size: options.block_size as u32,
            max_batch_tokens: options.max_batch_tokens as u32,
            max_seqs: options.max_seqs as u32,
            swap_path_len: PLLM_NUL_TERMINATED,
            trace_path_len: PLLM_NUL_TERMINATED,
            journal_path_len: PLLM_NUL_TERMINATED,
            model_name_len: PLLM_NUL_TERMINATED,
            packed_path_len: PLLM_NUL_TERMINATED,
            cpus_len: PLLM_NUL_TERMINATED,
            ..zero
        }
    }
}

impl pllm_engine_options {
    /// # Safety
    /// As `convert::read`, and the strings are readable.
    pub(super) unsafe fn to_options(options: *const Self) -> Result<EngineOptions> {
        // SAFETY: the caller's contract.
        unsafe {
            let c = convert::read(options)?;
            Self::convert(&c, workers(&c)?)
        }
    }

    /// Converts the options of one of several workers. If they are refused, the other workers fail
    /// too, provided that the communicator can be used.
    /// # Safety
    /// As `to_options`.
    pub(super) unsafe fn to_options_of_worker(options: *const Self) -> Result<EngineOptions> {
        // SAFETY: the caller's contract.
        unsafe {
            let c = convert::read(options)?;
            let workers = workers(&c)?;
            Self::convert(&c, workers.clone()).map_err(|error| Engine::refuse_options(&workers, error))
        }
    }

    /// # Safety
    /// The strings are readable.
    unsafe fn convert(c: &Self, workers: WorkerOptions) -> Result<EngineOptions> {
        // SAFETY: the caller's contract.
        let model_path = unsafe { string("model_path", c.model_path, c.model_path_len) }?;
        if model_path.is_empty() {
            return Err(Error::invalid("model_path is empty; set a model directory or a GGUF file"));
        }
        // SAFETY: the caller's contract.
        let device = unsafe { optional("device", c.device, c.device_len) }?.unwrap_or("cpu");
        known_flags("flags", c.flags, PLLM_ENGINE_SKIP_TOKENIZER | PLLM_ENGINE_NO_PREFIX_CACHE | PLLM_ENGINE_BATCH_INVARIANT)?;
        [("reserved", c.reserved), ("reserved2", c.reserved2)].into_iter().try_for_each(|(name, value)| known_flags(name, value, 0))?;
        // SAFETY: the caller's contract.
        let (model_name, kv_store) = unsafe { (optional("model_name", c.model_name, c.model_name_len)?, kv_store(c)?) };
        // SAFETY: the caller's contract.
        let swap_path = unsafe { optional("swap_path", c.swap_path, c.swap_path_len) }?;
        Ok(EngineOptions {
            model_dir: model_path.into(),
            device: device.into(),
            // SAFETY: the caller's contract.
            budget: if c.budget.is_null() { None } else { Some(unsafe { pllm_budget::get(c.budget) }?.clone()) },
            kv_bytes: (c.kv_bytes > 0).then_some(c.kv_bytes),
            block_size: c.block_size as usize,
            weight_format: weight_format(c.weight_format, c.weight_group)?,
            // SAFETY: the caller's contract.
            packed_dir: unsafe { path("packed_path", c.packed_path, c.packed_path_len) }?,
            kv_dtype: kv_dtype(c.kv_dtype)?,
            max_model_len: some(c.max_model_len),
            max_batch_tokens: c.max_batch_tokens as usize,
            max_seqs: c.max_seqs as usize,
            prefill_chunk: some(c.prefill_chunk),
            threads: some(c.threads),
            // SAFETY: the caller's contract.
            cpus: if c.cpus.is_null() { None } else { Some(cpu_list(unsafe { string("cpus", c.cpus, c.cpus_len) }?)?) },
            isa: isa(c.isa)?,
            // SAFETY: the caller's contract.
            trace_path: unsafe { path("trace_path", c.trace_path, c.trace_path_len) }?,
            // SAFETY: the caller's contract.
            journal_path: unsafe { path("journal_path", c.journal_path, c.journal_path_len) }?,
            seed: c.seed,
            skip_tokenizer: c.flags & PLLM_ENGINE_SKIP_TOKENIZER != 0,
            prefix_cache: c.flags & PLLM_ENGINE_NO_PREFIX_CACHE == 0,
            batch_invariant: c.flags & PLLM_ENGINE_BATCH_INVARIANT != 0,
            memory_fraction: (c.memory_fraction != 0.0).then_some(c.memory_fraction),
            max_waiting_requests: limit(c.max_waiting_requests),
            max_waiting_tokens: limit(c.max_waiting_tokens),
            max_prompt_bytes: limit(c.max_prompt_bytes),
            queue_capacity: queue_capacity(c),
            preemption: preemption(c.preemption)?,
            swap_bytes: c.swap_bytes,
            // An empty path is the current directory, as for the system.
            swap_dir: swap_path.map(|path| if path.is_empty() { "." } else { path }.into()),
            policies: policies(c)?,
            model_name: model_name.map(Into::into),
            kv_store,
            kv_events_capacity: usize::try_from(c.kv_events_capacity).unwrap_or(usize::MAX),
            workers,
        })
    }

    /// Returns the progress function, which reports the loading to the host and can cancel it.
    /// # Safety
    /// As `convert::read`; the callback keeps to its contract while the result is used.
    pub(super) unsafe fn to_progress(options: *const Self) -> Result<impl FnMut(u64, u64) -> bool> {
        // SAFETY: the caller's contract.
        let c = unsafe { convert::read(options) }?;
        // SAFETY: the caller's contract.
        Ok(move |done, total| c.progress.is_none_or(|progress| unsafe { progress(c.progress_data, done, total) } == 0))
    }
}

fn queue_capacity(c: &pllm_engine_options) -> usize {
    match c.queue_capacity {
        // Programs of the first release know neither the field nor a bound.
        0 if c.struct_size <= pllm_engine_options::FIRST_SIZE as u64 => usize::MAX,
        0 => EngineOptions::DEFAULT_QUEUE_CAPACITY,
        capacity => usize::try_from(capacity).unwrap_or(usize::MAX),
    }
}

/// # Safety
/// As `to_store`, and the secret is readable.
unsafe fn kv_store(c: &pllm_engine_options) -> Result<Option<KvStoreOptions>> {
    // SAFETY: the caller's contract.
    let secret = unsafe { slice("kv_store_secret", c.kv_store_secret, c.kv_store_secret_len) }?;
    let limits =
        StoreLimits { max_bytes: c.kv_store_max_bytes, max_operations: c.kv_store_max_operations, timeout_ms: c.kv_store_timeout_ms };
    // SAFETY: the caller's contract.
    unsafe { to_store(c.kv_store, secret, limits) }
}

/// # Safety
/// As `to_communicator`.
unsafe fn workers(c: &pllm_engine_options) -> Result<WorkerOptions> {
    let size = |value: u32| some(value).unwrap_or(1);
    Ok(WorkerOptions {
        division: Division { tensor: size(c.tensor_parallel), pipeline: size(c.pipeline_parallel) },
        // SAFETY: the caller's contract.
        communicator: unsafe { to_communicator(c.communicator) }?,
        timeout: match c.worker_timeout_ms {
            0 => WorkerOptions::DEFAULT_TIMEOUT,
            milliseconds => Duration::from_millis(milliseconds),
        },
    })
}

fn kv_dtype(value: u32) -> Result<Option<KvDtype>> {
    match value {
        PLLM_DTYPE_AUTO => Ok(None),
        PLLM_DTYPE_F32 => Ok(Some(KvDtype::F32)),
        PLLM_DTYPE_BF16 => Ok(Some(KvDtype::Bf16)),
        PLLM_DTYPE_INT8 => Ok(Some(KvDtype::Int8)),
        PLLM_DTYPE_F16 => Ok(Some(KvDtype::F16)),
        PLLM_DTYPE_FP8 => Ok(Some(KvDtype::Fp8)),
        other => Err(Error::invalid(format!("kv_dtype is {other}; must be one of PLLM_DTYPE_*"))),
    }
}

fn weight_format(format: u32, group: u32) -> Result<Option<WeightFormat>> {
    let int4 = |offsets| Some(WeightFormat::Int4 { group: some(group).unwrap_or(WeightFormat::GROUPS[0]), offsets });
    let ungrouped = |format| match group {
        0 => Ok(format),
        _ => Err(Error::invalid(format!("weight_group is {group}; only 4-bit formats have groups, so set it to 0"))),
    };
    match format {
        PLLM_WEIGHTS_AS_STORED => ungrouped(None),
        PLLM_WEIGHTS_F32 => ungrouped(Some(WeightFormat::F32)),
        PLLM_WEIGHTS_F16 => ungrouped(Some(WeightFormat::F16)),
        PLLM_WEIGHTS_BF16 => ungrouped(Some(WeightFormat::Bf16)),
        PLLM_WEIGHTS_INT8 => ungrouped(Some(WeightFormat::Int8)),
        PLLM_WEIGHTS_INT4 => Ok(int4(false)),
        PLLM_WEIGHTS_INT4_ASYMMETRIC => Ok(int4(true)),
        PLLM_WEIGHTS_FP8 => ungrouped(Some(WeightFormat::Fp8)),
        other => Err(Error::invalid(format!("weight_format is {other}; must be one of PLLM_WEIGHTS_*"))),
    }
}

fn preemption(value: u32) -> Result<Preemption> {
    match value {
        PLLM_PREEMPTION_RECOMPUTE => Ok(Preemption::Recompute),
        PLLM_PREEMPTION_SWAP => Ok(Preemption::Swap),
        PLLM_PREEMPTION_AUTO => Ok(Preemption::Auto),
        other => Err(Error::invalid(format!("preemption is {other}; must be one of PLLM_PREEMPTION_*"))),
    }
}

fn isa(value: u32) -> Result<Option<Isa>> {
    match value {
        PLLM_ISA_AUTO => Ok(None),
        PLLM_ISA_PORTABLE => Ok(Some(Isa::Portable)),
        PLLM_ISA_AVX2 => Ok(Some(Isa::Avx2)),
        PLLM_ISA_AVX512 => Ok(Some(Isa::Avx512)),
        PLLM_ISA_AVX512_BF16 => Ok(Some(Isa::Avx512Bf16)),
        PLLM_ISA_AVX_VNNI => Ok(Some(Isa::AvxVnni)),
        PLLM_ISA_AVX512_VNNI => Ok(Some(Isa::Avx512Vnni)),
        other => Err(Error::invalid(format!("isa is {other}; must be one of PLLM_ISA_*"))),
    }
}

fn policies(c: &pllm_engine_options) -> Result<Policies> {
    let ageing = some(c.ageing_ms).map_or(Policies::DEFAULT_AGEING, |ms| Duration::from_millis(ms as u64));
    let rows = some(c.prefill_budget);
    Ok(Policies {
        order: match c.order {
            PLLM_ORDER_FCFS => OrderPolicy::Fcfs,
            PLLM_ORDER_PRIORITY => OrderPolicy::Priority { ageing },
            PLLM_ORDER_SHORTEST_PREDICTED => OrderPolicy::ShortestPredicted { ageing },
            other => return Err(Error::invalid(format!("order is {other}; must be one of PLLM_ORDER_*"))),
        },
        batching: match c.batching {
            PLLM_BATCHING_MIXED => BatchingPolicy::Mixed,
            PLLM_BATCHING_PREFILL_FIRST => BatchingPolicy::PrefillFirst { threshold: rows.unwrap_or(Policies::DEFAULT_PREFILL_THRESHOLD) },
            PLLM_BATCHING_DECODE_FIRST => BatchingPolicy::DecodeFirst { budget: rows.unwrap_or(Policies::DEFAULT_PREFILL_BUDGET) },
            PLLM_BATCHING_STATIC => BatchingPolicy::Static,
            other => return Err(Error::invalid(format!("batching is {other}; must be one of PLLM_BATCHING_*"))),
        },
        allocation: match c.allocation {
            PLLM_ALLOCATION_ON_DEMAND => AllocationPolicy::OnDemand,
            PLLM_ALLOCATION_MAX_TOKENS => AllocationPolicy::MaxTokens,
            other => return Err(Error::invalid(format!("allocation is {other}; must be one of PLLM_ALLOCATION_*"))),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_the_first_release_have_an_unbounded_queue() {
        let capacity = |struct_size: usize| {
            let options =
                pllm_engine_options { struct_size: struct_size as u64, model_path: c"model".as_ptr(), ..pllm_engine_options::defaults() };
            // SAFETY: the struct is complete, and its strings are alive.
            unsafe { pllm_engine_options::to_options(&options) }.unwrap().queue_capacity
        };
        assert_eq!(capacity(pllm_engine_options::FIRST_SIZE), usize::MAX);
        assert_eq!(capacity(size_of::<pllm_engine_options>()), 65536);
    }
}
