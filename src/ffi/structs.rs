use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::time::Duration;

use super::convert::{self, PLLM_NUL_TERMINATED, Versioned, start, string};
use super::pllm_arena;
use crate::engine::{Admission, MemoryPlan, ModelInfo, Stats, StepReport};
use crate::error::{Error, Result};
use crate::model::PackedForm;
use crate::options::{
    AllocationPolicy, BatchingPolicy, EngineOptions, Isa, KvDtype, OrderPolicy, Policies, Preemption, WeightFormat, cpu_list,
};

/// Let the library choose.
pub const PLLM_DTYPE_AUTO: u32 = 0;
pub const PLLM_DTYPE_F32: u32 = 1;
pub const PLLM_DTYPE_BF16: u32 = 2;
/// 8 bits a number and, for each head of each token, a scale in f32: about half the bytes of bf16, at a small cost in quality.
pub const PLLM_DTYPE_INT8: u32 = 3;
/// Numbers beyond 65504 become 65504, with their sign.
pub const PLLM_DTYPE_F16: u32 = 4;
/// As INT8, with numbers of 8 bits in floating point (OCP E4M3): small numbers beside great ones keep more, great ones less.
pub const PLLM_DTYPE_FP8: u32 = 5;

/// The widest instruction path that the machine has: AVX512_BF16 before AVX512_VNNI before AVX512, then those of AVX2.
pub const PLLM_ISA_AUTO: u32 = 0;
pub const PLLM_ISA_PORTABLE: u32 = 1;
pub const PLLM_ISA_AVX2: u32 = 2;
pub const PLLM_ISA_AVX512: u32 = 3;
/// As AVX512_VNNI, but for weights, and K and V, that are kept in bf16: what they are multiplied by is rounded to bf16, too, and summed in f32.
/// Up to twice as fast where many tokens are computed at once; AVX512_VNNI rounds nothing there.
pub const PLLM_ISA_AVX512_BF16: u32 = 4;
/// As AVX2 and AVX512, with AVX-VNNI and AVX-512 VNNI: weights in whole numbers are multiplied faster, and nothing else changes.
pub const PLLM_ISA_AVX_VNNI: u32 = 5;
pub const PLLM_ISA_AVX512_VNNI: u32 = 6;

/// As the model's files have them. A number that is infinite or not a number is kept.
pub const PLLM_WEIGHTS_AS_STORED: u32 = 0;
pub const PLLM_WEIGHTS_F32: u32 = 1;
pub const PLLM_WEIGHTS_F16: u32 = 2;
pub const PLLM_WEIGHTS_BF16: u32 = 3;
/// Whole numbers of 8 bits, with a scale for each output. They are multiplied by activations in 8 bits, of which every 128 of a row share a scale.
pub const PLLM_WEIGHTS_INT8: u32 = 4;
/// Whole numbers of 4 bits, with a scale for each group of weight_group inputs of an output. The embedding and the head are in 8.
pub const PLLM_WEIGHTS_INT4: u32 = 5;
/// The same, and each group begins at its least weight: a little more exact, for 16 bits more a group.
pub const PLLM_WEIGHTS_INT4_ASYMMETRIC: u32 = 6;
/// On CUDA devices: floating point of 8 bits (OCP's E4M3), with a scale for each output; the embedding and the head are as they are stored. Products of
/// many rows are multiplied by activations in it, too, where the device can, each row with a scale; all others, experts' and those with
/// PLLM_ENGINE_BATCH_INVARIANT, by activations in bf16.
pub const PLLM_WEIGHTS_FP8: u32 = 7;

/// No packed_path was given.
pub const PLLM_PACKED_UNUSED: u32 = 0;
/// The weights were read in their packed form.
pub const PLLM_PACKED_READ: u32 = 1;
/// The weights were packed from the model's files, and their packed form was written.
pub const PLLM_PACKED_SAVED: u32 = 2;
/// The weights were packed from the model's files, and their packed form could not be written.
pub const PLLM_PACKED_UNSAVED: u32 = 3;

/// Serve token ids only: no tokenizer is read, and text calls answer PLLM_E_UNSUPPORTED.
pub const PLLM_ENGINE_SKIP_TOKENIZER: u32 = 1;
/// Do not keep what was computed for the requests that come after with the same first tokens.
pub const PLLM_ENGINE_NO_PREFIX_CACHE: u32 = 2;
/// On a CUDA device: give a sequence the same bits whatever the batch, as the CPU always does. It costs speed: products of many rows are not
/// left to cuBLASLt, and long sequences are not cut into parts.
pub const PLLM_ENGINE_BATCH_INVARIANT: u32 = 4;

/// Who has to give way is computed again.
pub const PLLM_PREEMPTION_RECOMPUTE: u32 = 0;
/// Their K and V wait in the host tier, where it has room.
pub const PLLM_PREEMPTION_SWAP: u32 = 1;
/// Whichever costs less, by what moving and computing have cost so far.
pub const PLLM_PREEMPTION_AUTO: u32 = 2;

/// First come, first served.
pub const PLLM_ORDER_FIRST_COME: u32 = 0;
/// The higher priority of pllm_request first; it may take the place, and the blocks, of what runs. Who has waited for ageing_ms comes
/// before those one level above that come then, so that nobody waits for ever.
pub const PLLM_ORDER_PRIORITY: u32 = 1;
/// Whoever is likely to generate the fewest tokens first: as many as those before that were allowed about as many. Who has waited
/// for ageing_ms comes before those that come then with a hundred tokens less.
pub const PLLM_ORDER_SHORTEST_PREDICTED: u32 = 2;

/// Prompts, in chunks, and decodes together, in the order of the requests.
pub const PLLM_BATCHING_MIXED: u32 = 0;
/// Prompts alone while there are any, then decodes alone: first tokens come soon. When prefill_budget prompt tokens have held the
/// decodes up, they get a step in between.
pub const PLLM_BATCHING_PREFILL_FIRST: u32 = 1;
/// Every decode in every step, beside at most prefill_budget prompt tokens: bounds the time between two tokens.
pub const PLLM_BATCHING_DECODE_FIRST: u32 = 2;
/// Nobody joins until all that run have ended. To compare with.
pub const PLLM_BATCHING_STATIC: u32 = 3;

/// For those that it has: blocks are taken as it grows. Where the pool is full, whoever comes last is preempted.
pub const PLLM_ALLOCATION_ON_DEMAND: u32 = 0;
/// For all that it may come to have, so that nobody is preempted because somebody grows. (What is forked or appended while it runs
/// was not foreseen.)
pub const PLLM_ALLOCATION_MAX_TOKENS: u32 = 1;

/// How an engine is made. Fill it with pllm_engine_options_init first. The strings need to live only during the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_engine_options {
    /// sizeof(pllm_engine_options)
    pub struct_size: u64,
    /// A model directory as Hugging Face ships it. UTF-8.
    pub model_path: *const c_char,
    /// In bytes, or PLLM_NUL_TERMINATED (the default).
    pub model_path_len: u64,
    /// Where to run: "cpu", the default (also NULL), or "cuda:0" for the first CUDA device ("cuda" is the same). Of those NVIDIA's driver for CUDA 13
    /// and compute capability 8.0 or newer are needed, and weights in f32, f16, bf16 or fp8.
    pub device: *const c_char,
    /// In bytes, or PLLM_NUL_TERMINATED (the default).
    pub device_len: u64,
    /// Bytes of the KV pool. 0: what max_seqs sequences of the full length need, at most 1 GiB.
    pub kv_bytes: u64,
    /// Seeds the requests that bring no seed of their own. Default 0.
    pub seed: u64,
    /// Tokens per KV block: 8, 16 (default), 32, 64, 128 or 256.
    pub block_size: u32,
    /// How K and V are stored: PLLM_DTYPE_AUTO (default: f32 for models in f32, else bf16), PLLM_DTYPE_F32, PLLM_DTYPE_BF16,
    /// PLLM_DTYPE_INT8, PLLM_DTYPE_F16 or PLLM_DTYPE_FP8.
    pub kv_dtype: u32,
    /// Longest sequence, prompt and output together. 0 (default): the model's own, or what the pool holds.
    pub max_model_len: u32,
    /// Most rows (prompt and decode tokens of all sequences) in one step. Default 512.
    pub max_batch_tokens: u32,
    /// Most sequences running at once, at most max_batch_tokens. Default 64.
    pub max_seqs: u32,
    /// Most prompt tokens of one sequence in one step. 0 (default): max_batch_tokens.
    pub prefill_chunk: u32,
    /// Threads, the stepping one included. 0 (default): as many as cpus names, or one for each CPU on which the process may run, within a
    /// container's quota.
    pub threads: u32,
    /// PLLM_ISA_AUTO (default) or a path to force. Bits are the same within one path, not across paths.
    pub isa: u32,
    /// PLLM_ENGINE_* flags.
    pub flags: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Outputs that may wait in the engine's own queue before its requests pause. 0 (default): 65536. Programs built with a
    /// header that lacks this field have no bound.
    pub queue_capacity: u64,
    /// Called while weights are loaded. NULL (default): nobody is told.
    pub progress: pllm_progress,
    /// Handed to progress.
    pub progress_data: *mut c_void,
    /// Requests, and resumed and forked sequences, that may wait for their first step before others are refused with
    /// PLLM_E_CAPACITY. 0 (default): as many as memory holds. One may always wait.
    pub max_waiting_requests: u64,
    /// Tokens that those may have to compute. 0 (default): no limit.
    pub max_waiting_tokens: u64,
    /// The budget from which the KV pool takes its bytes, in place of kv_bytes. NULL (default): the engine has its own.
    pub arena: *const pllm_arena,
    /// Bytes of the host tier, to which K and V go of requests and kept sequences that have to give way. 0 (default): there is
    /// none.
    pub swap_bytes: u64,
    /// A directory: the host tier is a file there that has no name, takes room as it is written and is gone with the engine. NULL
    /// (default): it is memory. Where it cannot be written or read later, as on a full disk, who was to move is computed again, and
    /// swap_failures in pllm_stats counts it.
    pub swap_path: *const c_char,
    /// In bytes, or PLLM_NUL_TERMINATED (the default).
    pub swap_path_len: u64,
    /// PLLM_PREEMPTION_*: the default is to recompute. The others need swap_bytes.
    pub preemption: u32,
    /// Who comes first: PLLM_ORDER_*.
    pub order: u32,
    /// Milliseconds, for the orders that have a use for it. 0 (default): 10,000. The more, the longer who stands behind has to wait.
    pub ageing_ms: u32,
    /// What a step is made of: PLLM_BATCHING_*.
    pub batching: u32,
    /// Prompt tokens, for the two batchings that have a use for it. 0 (default): 256 for PLLM_BATCHING_DECODE_FIRST, 2048 for
    /// PLLM_BATCHING_PREFILL_FIRST.
    pub prefill_budget: u32,
    /// For how many of its tokens a request needs room before it begins: PLLM_ALLOCATION_*.
    pub allocation: u32,
    /// A file to draw every step into, in the format that Perfetto and chrome://tracing open: what it consisted of, how long each of its
    /// parts took, and when each sequence was queued, prefilled and decoded. UTF-8; what was in the file is gone. Where the disk fails
    /// tracing ends, and no step does: traces_stopped in pllm_stats. NULL (default): none.
    pub trace_path: *const c_char,
    /// In bytes, or PLLM_NUL_TERMINATED (the default).
    pub trace_path_len: u64,
    /// A file to write down what is asked of the engine, and whatever else its steps depend on, so that pagedllm-replay can run them again
    /// bit for bit on a machine with the same instruction path. Prompts are in it, as tokens, and cache salts. UTF-8; what was in the file is gone. Where
    /// the disk fails the journal ends, and no step does: journals_stopped in pllm_stats. NULL (default): none.
    pub journal_path: *const c_char,
    /// In bytes, or PLLM_NUL_TERMINATED (the default).
    pub journal_path_len: u64,
    /// What the label model_name of pllm_engine_metrics says. UTF-8. NULL (default): the model directory's name.
    pub model_name: *const c_char,
    /// In bytes, or PLLM_NUL_TERMINATED (the default).
    pub model_name_len: u64,
    /// How weights are kept: PLLM_WEIGHTS_*. Fewer bits are faster to read and take less memory, and cost quality. What is small and
    /// decides much (the choice among experts, learned positions) stays as the files have it, and so do the matrices by which latents are
    /// read.
    pub weight_format: u32,
    /// Inputs of an output that share a scale in 4 bits: 32, 64 or 128. 0 (default): 32. The fewer, the more exact.
    pub weight_group: u32,
    /// A directory that keeps weights in their packed form, so that the next engine reads them as fast as the disk and packs nothing: where it has the
    /// form of this very model, weight_format and library, it is read and checked; otherwise the weights are packed and the form is written, or
    /// replaced. Several models and processes may share it; what nobody uses any more stays until somebody removes it. It holds weights: let
    /// nobody write there who may not write the model. A disk that is full, or takes nothing, is no error: packed in pllm_model_info tells. UTF-8.
    /// NULL (default): weights are packed each time.
    pub packed_path: *const c_char,
    /// In bytes, or PLLM_NUL_TERMINATED (the default).
    pub packed_path_len: u64,
    /// CPUs, as taskset -c takes them, such as "0-3,8": each of the engine's threads is pinned to one, in this order. The first is the
    /// stepping thread's: the engine's own is pinned there (pllm_engine_start); one of the program's is left where it is. NULL (default): the
    /// system places them.
    pub cpus: *const c_char,
    /// In bytes, or PLLM_NUL_TERMINATED (the default).
    pub cpus_len: u64,
    /// The part of a CUDA device's memory that the KV pool takes, of what is free once weights and working memory have their place: from 0.01 to 1, in
    /// place of kv_bytes. 0 (default): as kv_bytes says.
    pub memory_fraction: f32,
    /// Must be 0.
    pub reserved2: u32,
    /// Maximum length in bytes of a text prompt, of a chat's JSON and the prompt it renders to, and of a text to tokenize. Longer ones
    /// are refused with PLLM_E_INVALID_ARGUMENT before they are tokenized. 0 (default): 64 for each token of the engine's
    /// max_model_len, at least 1048576. Tokenizing takes up to 16 bytes of memory for each byte, and up to 512 for each byte of a
    /// stretch without a place to cut (docs/models.md), of 2 MiB at most.
    pub max_prompt_bytes: u64,
}

/// Told how many bytes of weights have been read, of how many in all, on the thread that creates the engine. Any other
/// answer than 0 stops the loading: pllm_engine_create then returns PLLM_E_CANCELLED. It must return (no exception, no
/// longjmp) and call nothing of this library on the engine being made.
pub type pllm_progress = Option<unsafe extern "C" fn(progress_data: *mut c_void, done: u64, total: u64) -> i32>;

// SAFETY: repr(C), the fields of 32 bits fill whole words, numbers, pointers and a nullable function only.
unsafe impl Versioned for pllm_engine_options {
    const NAME: &'static str = "pllm_engine_options";
    const FIRST_SIZE: usize = 96;
    fn defaults() -> Self {
        let options = EngineOptions::default();
        pllm_engine_options {
            struct_size: size_of::<Self>() as u64,
            model_path: null(),
            model_path_len: PLLM_NUL_TERMINATED,
            device: null(),
            device_len: PLLM_NUL_TERMINATED,
            kv_bytes: 0,
            seed: options.seed,
            block_size: options.block_size as u32,
            kv_dtype: PLLM_DTYPE_AUTO,
            max_model_len: 0,
            max_batch_tokens: options.max_batch_tokens as u32,
            max_seqs: options.max_seqs as u32,
            prefill_chunk: 0,
            threads: 0,
            isa: PLLM_ISA_AUTO,
            flags: 0,
            reserved: 0,
            queue_capacity: 0,
            progress: None,
            progress_data: null_mut(),
            max_waiting_requests: 0,
            max_waiting_tokens: 0,
            arena: null(),
            swap_bytes: 0,
            swap_path: null(),
            swap_path_len: PLLM_NUL_TERMINATED,
            preemption: PLLM_PREEMPTION_RECOMPUTE,
            order: PLLM_ORDER_FIRST_COME,
            ageing_ms: 0,
            batching: PLLM_BATCHING_MIXED,
            prefill_budget: 0,
            allocation: PLLM_ALLOCATION_ON_DEMAND,
            trace_path: null(),
            trace_path_len: PLLM_NUL_TERMINATED,
            journal_path: null(),
            journal_path_len: PLLM_NUL_TERMINATED,
            model_name: null(),
            model_name_len: PLLM_NUL_TERMINATED,
            weight_format: PLLM_WEIGHTS_AS_STORED,
            weight_group: 0,
            packed_path: null(),
            packed_path_len: PLLM_NUL_TERMINATED,
            cpus: null(),
            cpus_len: PLLM_NUL_TERMINATED,
            memory_fraction: 0.0,
            reserved2: 0,
            max_prompt_bytes: 0,
        }
    }
}

impl pllm_engine_options {
    /// # Safety
    /// As `convert::read`, and the strings are readable.
    pub(super) unsafe fn to_options(options: *const Self) -> Result<EngineOptions> {
        // SAFETY: the caller's contract.
        let c = unsafe { convert::read(options) }?;
        // SAFETY: the caller's contract.
        let model_path = unsafe { string("model_path", c.model_path, c.model_path_len) }?;
        if model_path.is_empty() {
            return Err(Error::invalid("model_path is empty: name a model directory"));
        }
        // SAFETY: the caller's contract.
        let device = if c.device.is_null() { "cpu" } else { unsafe { string("device", c.device, c.device_len) }? };
        known_flags("flags", c.flags, PLLM_ENGINE_SKIP_TOKENIZER | PLLM_ENGINE_NO_PREFIX_CACHE | PLLM_ENGINE_BATCH_INVARIANT)?;
        [("reserved", c.reserved), ("reserved2", c.reserved2)].into_iter().try_for_each(|(name, value)| known_flags(name, value, 0))?;
        // SAFETY: the caller's contract.
        let model_name = if c.model_name.is_null() { None } else { Some(unsafe { string("model_name", c.model_name, c.model_name_len) }?) };
        // SAFETY: the caller's contract.
        let swap_path = if c.swap_path.is_null() { None } else { Some(unsafe { string("swap_path", c.swap_path, c.swap_path_len) }?) };
        Ok(EngineOptions {
            model_dir: model_path.into(),
            device: device.into(),
            // SAFETY: the caller's contract.
            arena: if c.arena.is_null() { None } else { Some(unsafe { pllm_arena::get(c.arena) }?.clone()) },
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
            queue_capacity: match c.queue_capacity {
                // Programs of the first release know neither the field nor a bound.
                0 if c.struct_size <= Self::FIRST_SIZE as u64 => usize::MAX,
                0 => EngineOptions::DEFAULT_QUEUE_CAPACITY,
                capacity => usize::try_from(capacity).unwrap_or(usize::MAX),
            },
            preemption: preemption(c.preemption)?,
            swap_bytes: c.swap_bytes,
            swap_dir: swap_path.map(Into::into),
            policies: policies(&c)?,
            model_name: model_name.map(Into::into),
        })
    }

    /// What tells the host of the loading, and asks it whether to go on.
    /// # Safety
    /// As `convert::read`; the callback keeps to its contract while the result is used.
    pub(super) unsafe fn to_progress(options: *const Self) -> Result<impl FnMut(u64, u64) -> bool> {
        // SAFETY: the caller's contract.
        let c = unsafe { convert::read(options) }?;
        // SAFETY: the caller's contract.
        Ok(move |done, total| c.progress.is_none_or(|progress| unsafe { progress(c.progress_data, done, total) } == 0))
    }
}

/// NULL: none.
/// # Safety
/// As `string`.
unsafe fn path(name: &str, data: *const c_char, len: u64) -> Result<Option<PathBuf>> {
    if data.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    match unsafe { string(name, data, len) }? {
        "" => Err(Error::invalid(format!("{name} is empty: name one, or give NULL"))),
        path => Ok(Some(path.into())),
    }
}

/// 0 lets the library choose.
pub(super) fn some(value: u32) -> Option<usize> {
    (value > 0).then_some(value as usize)
}

fn limit(value: u64) -> Option<usize> {
    (value > 0).then_some(usize::try_from(value).unwrap_or(usize::MAX))
}

pub(super) fn known_flags(name: &str, flags: u32, known: u32) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        unknown => Err(Error::unsupported(format!("{name} has bits {unknown:#x} that this library does not know"))),
    }
}

fn kv_dtype(value: u32) -> Result<Option<KvDtype>> {
    match value {
        PLLM_DTYPE_AUTO => Ok(None),
        PLLM_DTYPE_F32 => Ok(Some(KvDtype::F32)),
        PLLM_DTYPE_BF16 => Ok(Some(KvDtype::Bf16)),
        PLLM_DTYPE_INT8 => Ok(Some(KvDtype::Int8)),
        PLLM_DTYPE_F16 => Ok(Some(KvDtype::F16)),
        PLLM_DTYPE_FP8 => Ok(Some(KvDtype::Fp8)),
        other => Err(Error::invalid(format!("kv_dtype is {other}: it must be one of PLLM_DTYPE_*"))),
    }
}

fn weight_format(format: u32, group: u32) -> Result<Option<WeightFormat>> {
    let int4 = |offsets| Some(WeightFormat::Int4 { group: some(group).unwrap_or(WeightFormat::GROUPS[0]), offsets });
    let ungrouped = |format| match group {
        0 => Ok(format),
        _ => Err(Error::invalid(format!("weight_group is {group}: only formats of 4 bits have groups, so leave it at 0"))),
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
        other => Err(Error::invalid(format!("weight_format is {other}: it must be one of PLLM_WEIGHTS_*"))),
    }
}

fn preemption(value: u32) -> Result<Preemption> {
    match value {
        PLLM_PREEMPTION_RECOMPUTE => Ok(Preemption::Recompute),
        PLLM_PREEMPTION_SWAP => Ok(Preemption::Swap),
        PLLM_PREEMPTION_AUTO => Ok(Preemption::Auto),
        other => Err(Error::invalid(format!("preemption is {other}: it must be one of PLLM_PREEMPTION_*"))),
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
        other => Err(Error::invalid(format!("isa is {other}: it must be one of PLLM_ISA_*"))),
    }
}

fn policies(c: &pllm_engine_options) -> Result<Policies> {
    let ageing = some(c.ageing_ms).map_or(Policies::DEFAULT_AGEING, |ms| Duration::from_millis(ms as u64));
    let rows = some(c.prefill_budget);
    Ok(Policies {
        order: match c.order {
            PLLM_ORDER_FIRST_COME => OrderPolicy::FirstCome,
            PLLM_ORDER_PRIORITY => OrderPolicy::Priority { ageing },
            PLLM_ORDER_SHORTEST_PREDICTED => OrderPolicy::ShortestPredicted { ageing },
            other => return Err(Error::invalid(format!("order is {other}: it must be one of PLLM_ORDER_*"))),
        },
        batching: match c.batching {
            PLLM_BATCHING_MIXED => BatchingPolicy::Mixed,
            PLLM_BATCHING_PREFILL_FIRST => BatchingPolicy::PrefillFirst { threshold: rows.unwrap_or(Policies::DEFAULT_PREFILL_THRESHOLD) },
            PLLM_BATCHING_DECODE_FIRST => BatchingPolicy::DecodeFirst { budget: rows.unwrap_or(Policies::DEFAULT_PREFILL_BUDGET) },
            PLLM_BATCHING_STATIC => BatchingPolicy::Static,
            other => return Err(Error::invalid(format!("batching is {other}: it must be one of PLLM_BATCHING_*"))),
        },
        allocation: match c.allocation {
            PLLM_ALLOCATION_ON_DEMAND => AllocationPolicy::OnDemand,
            PLLM_ALLOCATION_MAX_TOKENS => AllocationPolicy::MaxTokens,
            other => return Err(Error::invalid(format!("allocation is {other}: it must be one of PLLM_ALLOCATION_*"))),
        },
    })
}

/// Where the bytes go, known before any are taken. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_plan {
    /// sizeof(pllm_plan)
    pub struct_size: u64,
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    /// Activations, logits and the kernels' working memory; small tables are not counted.
    pub work_bytes: u64,
    /// KV blocks, and the tokens each holds.
    pub blocks: u64,
    pub block_size: u64,
    /// Bytes of one block: of all layers, or of those of one group.
    pub block_bytes: u64,
    /// Longest sequence, prompt and output together.
    pub max_model_len: u64,
    /// Sequences of that length that fit at once.
    pub full_sequences: u64,
    /// PLLM_DTYPE_F32, PLLM_DTYPE_BF16, PLLM_DTYPE_INT8, PLLM_DTYPE_F16 or PLLM_DTYPE_FP8.
    pub kv_dtype: u64,
    /// KV blocks that there can be, should the arena grow.
    pub most_blocks: u64,
    /// Of the host tier, in memory or in its file, and the blocks it holds.
    pub swap_bytes: u64,
    pub swap_blocks: u64,
    /// Groups of layers whose K and V are in blocks of their own: a sequence has a block of each for every block_size of its tokens, and
    /// where the layers of a group have a window, only for those that are still looked back on.
    pub kv_groups: u64,
}

// SAFETY: repr(C), u64 only.
unsafe impl Versioned for pllm_plan {
    const NAME: &'static str = "pllm_plan";
    const FIRST_SIZE: usize = 80;
    fn defaults() -> Self {
        pllm_plan { struct_size: size_of::<Self>() as u64, ..Default::default() }
    }
}

impl From<&MemoryPlan> for pllm_plan {
    fn from(plan: &MemoryPlan) -> pllm_plan {
        pllm_plan {
            weight_bytes: plan.weight_bytes,
            kv_bytes: plan.kv_bytes,
            work_bytes: plan.work_bytes,
            blocks: plan.blocks as u64,
            most_blocks: plan.most_blocks as u64,
            block_size: plan.block_size as u64,
            block_bytes: plan.block_bytes,
            max_model_len: plan.max_model_len as u64,
            full_sequences: plan.full_sequences as u64,
            kv_dtype: match plan.kv_dtype {
                KvDtype::F32 => PLLM_DTYPE_F32,
                KvDtype::Bf16 => PLLM_DTYPE_BF16,
                KvDtype::Int8 => PLLM_DTYPE_INT8,
                KvDtype::F16 => PLLM_DTYPE_F16,
                KvDtype::Fp8 => PLLM_DTYPE_FP8,
            } as u64,
            swap_bytes: plan.swap_bytes,
            swap_blocks: plan.swap_blocks as u64,
            kv_groups: plan.groups as u64,
            ..pllm_plan::defaults()
        }
    }
}

/// The model and the limits it is served with. Set struct_size before the call; pointers live as long as the engine.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_model_info {
    /// sizeof(pllm_model_info)
    pub struct_size: u64,
    /// As config.json names it, such as "LlamaForCausalLM".
    pub architecture: *const c_char,
    pub architecture_len: u64,
    /// The instruction path in use, such as "avx512".
    pub isa: *const c_char,
    pub isa_len: u64,
    /// Tokens that end a sequence.
    pub eos_token_ids: *const u32,
    pub eos_token_ids_len: u64,
    pub vocab_size: u64,
    pub layers: u64,
    /// The longest sequence that the model was made for.
    pub max_positions: u64,
    /// The longest that this engine allows.
    pub max_model_len: u64,
    pub threads: u64,
    /// What became of packed_path: PLLM_PACKED_*.
    pub packed: u64,
    /// Why the packed form was not read, or not written. Empty where nothing is to be said. For people.
    pub packed_reason: *const c_char,
    pub packed_reason_len: u64,
}

// SAFETY: repr(C), u64 and pointers only.
unsafe impl Versioned for pllm_model_info {
    const NAME: &'static str = "pllm_model_info";
    const FIRST_SIZE: usize = 96;
    fn defaults() -> Self {
        pllm_model_info {
            struct_size: size_of::<Self>() as u64,
            architecture: null(),
            architecture_len: 0,
            isa: null(),
            isa_len: 0,
            eos_token_ids: null(),
            eos_token_ids_len: 0,
            vocab_size: 0,
            layers: 0,
            max_positions: 0,
            max_model_len: 0,
            threads: 0,
            packed: PLLM_PACKED_UNUSED as u64,
            packed_reason: null(),
            packed_reason_len: 0,
        }
    }
}

impl From<&ModelInfo> for pllm_model_info {
    fn from(info: &ModelInfo) -> pllm_model_info {
        let isa = info.isa.map_or("", Isa::name);
        pllm_model_info {
            architecture: start(info.architecture.as_bytes()).cast(),
            architecture_len: info.architecture.len() as u64,
            isa: start(isa.as_bytes()).cast(),
            isa_len: isa.len() as u64,
            eos_token_ids: start(&info.eos_token_ids),
            eos_token_ids_len: info.eos_token_ids.len() as u64,
            vocab_size: info.vocab_size as u64,
            layers: info.layers as u64,
            max_positions: info.max_positions as u64,
            max_model_len: info.memory.max_model_len as u64,
            threads: info.threads as u64,
            packed: match info.packed.form {
                PackedForm::Unused => PLLM_PACKED_UNUSED,
                PackedForm::Read => PLLM_PACKED_READ,
                PackedForm::Saved => PLLM_PACKED_SAVED,
                PackedForm::Unsaved => PLLM_PACKED_UNSAVED,
            } as u64,
            packed_reason: start(info.packed.reason.as_bytes()).cast(),
            packed_reason_len: info.packed.reason.len() as u64,
            ..pllm_model_info::defaults()
        }
    }
}

/// What would become of a request that was added now. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_admission {
    /// sizeof(pllm_admission)
    pub struct_size: u64,
    /// 1: pllm_engine_add_request would take it. 0: too much waits, or its queue is not read.
    pub admits: u64,
    /// 1: nobody is before it, and there is room for it: the next step would begin it.
    pub fits_now: u64,
    /// Seconds until its first token is expected; negative: no step has shown yet how long steps take.
    pub first_token_seconds: f64,
    /// Requests before it, and the tokens that these have to compute.
    pub waiting_requests: u64,
    pub waiting_tokens: u64,
}

// SAFETY: repr(C), 64-bit numbers only.
unsafe impl Versioned for pllm_admission {
    const NAME: &'static str = "pllm_admission";
    const FIRST_SIZE: usize = 48;
    fn defaults() -> Self {
        pllm_admission { struct_size: size_of::<Self>() as u64, ..Default::default() }
    }
}

impl From<Admission> for pllm_admission {
    fn from(admission: Admission) -> pllm_admission {
        pllm_admission {
            admits: admission.admits as u64,
            fits_now: admission.fits_now as u64,
            first_token_seconds: admission.first_token.map_or(-1.0, |time| time.as_secs_f64()),
            waiting_requests: admission.waiting_requests as u64,
            waiting_tokens: admission.waiting_tokens as u64,
            ..pllm_admission::defaults()
        }
    }
}

/// What one step did. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_step {
    /// sizeof(pllm_step)
    pub struct_size: u64,
    /// Requests that have not ended: step again while this is not 0, and poll: those whose queue is full wait for that.
    pub unfinished: u64,
    pub prefill_tokens: u64,
    pub decode_tokens: u64,
    /// Sequences in the step.
    pub sequences: u64,
    /// Sequences passed over because their queue is full.
    pub paused: u64,
}

// SAFETY: repr(C), u64 only.
unsafe impl Versioned for pllm_step {
    const NAME: &'static str = "pllm_step";
    const FIRST_SIZE: usize = 40;
    fn defaults() -> Self {
        pllm_step { struct_size: size_of::<Self>() as u64, ..Default::default() }
    }
}

impl From<StepReport> for pllm_step {
    fn from(report: StepReport) -> pllm_step {
        let StepReport { unfinished, prefill_tokens, decode_tokens, sequences, paused } = report;
        pllm_step { unfinished, prefill_tokens, decode_tokens, sequences, paused, ..pllm_step::defaults() }
    }
}

/// Counts since the engine was made, and the state after its last step. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_stats {
    /// sizeof(pllm_stats)
    pub struct_size: u64,
    /// Sequences that wait for their first or next step.
    pub waiting: u64,
    pub running: u64,
    pub blocks_total: u64,
    pub blocks_used: u64,
    /// Blocks that nobody uses and that the prefix cache still finds; given away when they are needed.
    pub blocks_cached: u64,
    pub blocks_free: u64,
    /// Share of the slots of the blocks in use, or set aside for those that run, that hold a token's K and V; 1 while there are none.
    pub slot_utilization: f64,
    pub steps: u64,
    /// Prompt tokens computed; those computed again after a preemption count again.
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub preemptions: u64,
    /// Requests that ended, by reason.
    pub finished_stop: u64,
    pub finished_length: u64,
    pub finished_abort: u64,
    pub finished_error: u64,
    /// Of the waiting: those the last step passed over because their queue is full.
    pub paused: u64,
    /// Sequences that were kept, and wait to be resumed or freed.
    pub idle: u64,
    /// Blocks copied because a sequence wrote to one that others share.
    pub blocks_copied: u64,
    /// Prompt tokens looked for in the prefix cache, and those of them that did not have to be computed.
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    /// Requests that ended because their deadline passed.
    pub finished_deadline: u64,
    /// Requests that were refused because too much waits (max_waiting_requests, max_waiting_tokens, an unread queue).
    pub admission_rejections: u64,
    /// Steps that could not be computed and were tried again, in part or as a whole.
    pub steps_failed: u64,
    /// Of the preemptions: those of requests that went to the host tier. The others are computed again.
    pub preemptions_swapped: u64,
    /// Sequences whose K and V are in the host tier.
    pub swapped: u64,
    pub swap_blocks_total: u64,
    pub swap_blocks_used: u64,
    /// Blocks that moved to the host tier, and back.
    pub blocks_swapped_out: u64,
    pub blocks_swapped_in: u64,
    /// Moves that failed, as on a full disk: who was to move is computed again.
    pub swap_failures: u64,
    /// Tokens that sequences began with and that were found in the prefix cache.
    pub prompt_tokens_cached: u64,
    /// 1 where trace_path was given and the disk has failed: the trace has ended.
    pub traces_stopped: u64,
    /// The same of journal_path.
    pub journals_stopped: u64,
    /// Times that the KV pool became smaller and the system did not take the memory back, as where the program has locked its memory
    /// (mlockall): the budget is kept, but the process is no smaller.
    pub discard_failures: u64,
    /// Blocks that the sequences would have besides, did every layer look back on all tokens: those that left the windows of the layers
    /// that have one. Those of forks count for each.
    pub blocks_out_of_window: u64,
}

// SAFETY: repr(C), 64-bit numbers only.
unsafe impl Versioned for pllm_stats {
    const NAME: &'static str = "pllm_stats";
    const FIRST_SIZE: usize = 128;
    fn defaults() -> Self {
        pllm_stats { struct_size: size_of::<Self>() as u64, ..Default::default() }
    }
}

impl From<Stats> for pllm_stats {
    fn from(stats: Stats) -> pllm_stats {
        pllm_stats {
            waiting: stats.waiting,
            running: stats.running,
            blocks_total: stats.blocks_total,
            blocks_used: stats.blocks_used,
            blocks_cached: stats.blocks_cached,
            blocks_free: stats.blocks_free,
            slot_utilization: stats.slot_utilization,
            steps: stats.steps,
            prompt_tokens: stats.prompt_tokens,
            generated_tokens: stats.generated_tokens,
            preemptions: stats.preemptions,
            finished_stop: stats.finished_stop,
            finished_length: stats.finished_length,
            finished_abort: stats.finished_abort,
            finished_error: stats.finished_error,
            paused: stats.paused,
            idle: stats.idle,
            blocks_copied: stats.blocks_copied,
            prefix_queries: stats.prefix_queries,
            prefix_hits: stats.prefix_hits,
            finished_deadline: stats.finished_deadline,
            admission_rejections: stats.admission_rejections,
            steps_failed: stats.steps_failed,
            preemptions_swapped: stats.preemptions_swapped,
            swapped: stats.swapped,
            swap_blocks_total: stats.swap_blocks_total,
            swap_blocks_used: stats.swap_blocks_used,
            blocks_swapped_out: stats.blocks_swapped_out,
            blocks_swapped_in: stats.blocks_swapped_in,
            swap_failures: stats.swap_failures,
            prompt_tokens_cached: stats.prompt_tokens_cached,
            traces_stopped: stats.traces_stopped,
            journals_stopped: stats.journals_stopped,
            discard_failures: stats.discard_failures,
            blocks_out_of_window: stats.blocks_out_of_window,
            ..pllm_stats::defaults()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_of_a_program_of_the_first_release_is_not_bounded() {
        let capacity = |struct_size: usize| {
            let options =
                pllm_engine_options { struct_size: struct_size as u64, model_path: c"model".as_ptr(), ..pllm_engine_options::defaults() };
            // SAFETY: a whole struct, whose strings live.
            unsafe { pllm_engine_options::to_options(&options) }.unwrap().queue_capacity
        };
        assert_eq!(capacity(pllm_engine_options::FIRST_SIZE), usize::MAX);
        assert_eq!(capacity(size_of::<pllm_engine_options>()), 65536);
    }
}
