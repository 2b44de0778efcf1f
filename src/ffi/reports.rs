use std::ffi::c_char;
use std::ptr::null;

use super::convert::{Versioned, start};
use super::options::{
    PLLM_DTYPE_BF16, PLLM_DTYPE_F16, PLLM_DTYPE_F32, PLLM_DTYPE_FP8, PLLM_DTYPE_INT8, PLLM_PACKED_READ, PLLM_PACKED_SAVED,
    PLLM_PACKED_UNSAVED, PLLM_PACKED_UNUSED,
};
use crate::engine::{Admission, ModelInfo};
use crate::memory::plan::MemoryPlan;
use crate::model::PackedForm;
use crate::observability::stats::{Stats, StepReport};
use crate::types::options::{Isa, KvDtype};

/// Memory that an engine would allocate. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_plan {
    /// sizeof(pllm_plan).
    pub struct_size: u64,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Bytes of the KV pool.
    pub kv_bytes: u64,
    /// Bytes of activations, logits and working memory of kernels. Small tables are not included.
    pub work_bytes: u64,
    /// Number of KV blocks.
    pub blocks: u64,
    /// Tokens per KV block.
    pub block_size: u64,
    /// Bytes of one KV block: of all layers, or of the layers of one group.
    pub block_bytes: u64,
    /// Maximum length of a sequence in tokens, prompt and output together.
    pub max_model_len: u64,
    /// Number of sequences of max_model_len tokens that fit at the same time.
    pub full_sequences: u64,
    /// Data type of KV blocks: PLLM_DTYPE_*, not PLLM_DTYPE_AUTO.
    pub kv_dtype: u64,
    /// Maximum number of KV blocks, if the budget grows to its maximum.
    pub max_blocks: u64,
    /// Bytes of the host tier, in memory or in its file.
    pub swap_bytes: u64,
    /// Number of KV blocks in the host tier.
    pub swap_blocks: u64,
    /// Number of layer groups with KV blocks of their own. A sequence has one block of each group
    /// for every block_size tokens. For a group of layers with a window it has only the blocks
    /// inside the window.
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
            max_blocks: plan.max_blocks as u64,
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

/// The model and the limits of its engine. Set struct_size before the call. Pointers are valid
/// until the engine is freed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_model_info {
    /// sizeof(pllm_model_info).
    pub struct_size: u64,
    /// Name in config.json, such as "LlamaForCausalLM". UTF-8.
    pub architecture: *const c_char,
    /// Length of architecture in bytes.
    pub architecture_len: u64,
    /// Instruction path, such as "avx512".
    pub isa: *const c_char,
    /// Length of isa in bytes.
    pub isa_len: u64,
    /// Tokens that end a sequence.
    pub eos_token_ids: *const u32,
    /// Number of end-of-sequence tokens.
    pub eos_token_ids_len: u64,
    /// Number of tokens in the vocabulary.
    pub vocab_size: u64,
    /// Number of layers.
    pub layers: u64,
    /// Maximum length of a sequence for which the model was made.
    pub max_positions: u64,
    /// Maximum length of a sequence in this engine.
    pub max_model_len: u64,
    /// Number of threads.
    pub threads: u64,
    /// Result of packed_path: PLLM_PACKED_*.
    pub packed: u64,
    /// Reason, as text, why the packed weights were not read or not written. Empty if there is
    /// nothing to report.
    pub packed_reason: *const c_char,
    /// Length of packed_reason in bytes.
    pub packed_reason_len: u64,
    /// On a CUDA device: the library that computes products of many rows, such as
    /// "cuBLASLt 12.9.1 (/usr/lib/libcublasLt.so.12)". If none does, "own kernels: " and the reason;
    /// prompts then take longer. Empty on the CPU.
    pub blas_library: *const c_char,
    /// Length of blas_library in bytes.
    pub blas_library_len: u64,
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
            blas_library: null(),
            blas_library_len: 0,
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
            blas_library: start(info.blas_library.as_bytes()).cast(),
            blas_library_len: info.blas_library.len() as u64,
            ..pllm_model_info::defaults()
        }
    }
}

/// Predicted admission of a request. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_admission {
    /// sizeof(pllm_admission).
    pub struct_size: u64,
    /// 1 if pllm_engine_add_request would accept the request, 0 if too many requests wait, its
    /// queue is full, or a shared budget cannot reserve its blocks.
    pub admits: u64,
    /// 1 if no request is ahead of it and its blocks are free, so that it would start in the next
    /// step.
    pub fits_now: u64,
    /// Predicted seconds until its first token. Negative if no step has been measured yet.
    pub first_token_seconds: f64,
    /// Number of requests ahead of it.
    pub waiting_requests: u64,
    /// Number of tokens that those requests have to compute.
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

/// Result of one step. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_step {
    /// sizeof(pllm_step).
    pub struct_size: u64,
    /// Number of requests, exports and imports that have not ended, and of commands left to the
    /// next steps. While it is not 0, step again, and poll the queues: requests whose queue is
    /// full wait for that.
    pub unfinished: u64,
    /// Number of prompt tokens computed.
    pub prefill_tokens: u64,
    /// Number of decode tokens computed.
    pub decode_tokens: u64,
    /// Number of sequences in the step.
    pub sequences: u64,
    /// Number of sequences that were skipped because their queue is full, or because they wait for
    /// a slow grammar.
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

/// Counters since the creation of the engine, and its state after the last step. Set struct_size
/// before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_stats {
    /// sizeof(pllm_stats).
    pub struct_size: u64,
    /// Sequences that wait for their first or next step.
    pub waiting: u64,
    /// Sequences that run.
    pub running: u64,
    /// KV blocks of the pool.
    pub blocks_total: u64,
    /// KV blocks in use.
    pub blocks_used: u64,
    /// Unused KV blocks that are in the prefix cache. They are evicted when blocks are needed.
    pub blocks_cached: u64,
    /// KV blocks that are neither in use nor cached.
    pub blocks_free: u64,
    /// Fraction of the token slots of all used and reserved blocks that hold K and V of a token. 1
    /// if there are none.
    pub slot_utilization: f64,
    /// Steps.
    pub steps: u64,
    /// Prompt tokens computed. Tokens that are recomputed after a preemption count again.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Results that ended with PLLM_FINISH_STOP: one for each sequence of a request.
    pub finished_stop: u64,
    /// Results that ended with PLLM_FINISH_LENGTH: one for each sequence of a request.
    pub finished_length: u64,
    /// Results that ended with PLLM_FINISH_ABORT: one for each sequence of a request.
    pub finished_abort: u64,
    /// Results that ended with PLLM_FINISH_ERROR: one for each sequence of a request.
    pub finished_error: u64,
    /// Waiting sequences that the last step skipped because their queue is full, or because they
    /// wait for a slow grammar.
    pub paused: u64,
    /// Kept sequences that wait to be resumed or freed.
    pub idle: u64,
    /// Blocks copied because a sequence wrote to a shared block.
    pub blocks_copied: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found in the prefix cache, which were not computed.
    pub prefix_hits: u64,
    /// Results that ended with PLLM_FINISH_DEADLINE: one for each sequence of a request.
    pub finished_deadline: u64,
    /// Requests refused because of max_waiting_requests, max_waiting_tokens or a full queue.
    pub admission_rejections: u64,
    /// Steps that failed and were tried again, in part or as a whole.
    pub steps_failed: u64,
    /// Preemptions that swapped the request to the host tier. The others were recomputed.
    pub preemptions_swapped: u64,
    /// Sequences whose KV is in the host tier.
    pub swapped: u64,
    /// KV blocks of the host tier.
    pub swap_blocks_total: u64,
    /// KV blocks in use in the host tier.
    pub swap_blocks_used: u64,
    /// Blocks moved to the host tier.
    pub blocks_swapped_out: u64,
    /// Blocks moved back from the host tier.
    pub blocks_swapped_in: u64,
    /// Moves that failed, as on a full disk. Their sequences were recomputed.
    pub swap_failures: u64,
    /// Tokens at the start of sequences that were found in the prefix cache.
    pub prompt_tokens_cached: u64,
    /// 1 if trace_path was set and the trace has ended because the disk failed or fell
    /// behind.
    pub traces_stopped: u64,
    /// 1 if journal_path was set and the journal has ended because the disk failed or fell
    /// behind.
    pub journals_stopped: u64,
    /// Times that the KV pool shrank and the system did not take the memory back, as after
    /// mlockall. The budget is kept, but the memory of the process does not shrink.
    pub discard_failures: u64,
    /// Blocks that sequences do not hold because they are outside the windows of their layers.
    /// Blocks of forks count once for each fork.
    pub blocks_out_of_window: u64,
    /// KV blocks looked up in the KV store.
    pub kv_store_queries: u64,
    /// KV blocks read from the KV store, with a valid checksum.
    pub kv_store_hits: u64,
    /// KV blocks written to the KV store.
    pub kv_store_stored: u64,
    /// Full KV blocks that were not written to the KV store, because it was slow or the pool had
    /// evicted them.
    pub kv_store_dropped: u64,
    /// Operations of the KV store that failed or took too long, and damaged blocks.
    pub kv_store_failures: u64,
    /// Bytes read from the KV store.
    pub kv_store_bytes_read: u64,
    /// Bytes written to the KV store.
    pub kv_store_bytes_written: u64,
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
            kv_store_queries: stats.store.queries,
            kv_store_hits: stats.store.hits,
            kv_store_stored: stats.store.stored,
            kv_store_dropped: stats.store.dropped,
            kv_store_failures: stats.store.failures,
            kv_store_bytes_read: stats.store.bytes_read,
            kv_store_bytes_written: stats.store.bytes_written,
            ..pllm_stats::defaults()
        }
    }
}
