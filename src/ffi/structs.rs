use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

use super::convert::{self, PLLM_NUL_TERMINATED, Versioned, slice, start, string};
use super::outputs::pllm_queue;
use crate::engine::{MemoryPlan, ModelInfo, Prompt, Request, Stats, StepReport};
use crate::error::{Error, Result};
use crate::options::{Dtype, EngineOptions, Isa, SamplingParams};

/// Let the library choose.
pub const PLLM_DTYPE_AUTO: u32 = 0;
pub const PLLM_DTYPE_F32: u32 = 1;
pub const PLLM_DTYPE_BF16: u32 = 2;

/// The widest instruction path that the machine has.
pub const PLLM_ISA_AUTO: u32 = 0;
pub const PLLM_ISA_PORTABLE: u32 = 1;
pub const PLLM_ISA_AVX2: u32 = 2;
pub const PLLM_ISA_AVX512: u32 = 3;

/// Serve token ids only: no tokenizer is read, and text calls answer PLLM_E_UNSUPPORTED.
pub const PLLM_ENGINE_SKIP_TOKENIZER: u32 = 1;

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
    /// Where to run: "cpu", the default (also NULL).
    pub device: *const c_char,
    /// In bytes, or PLLM_NUL_TERMINATED (the default).
    pub device_len: u64,
    /// Bytes of the KV pool. 0: what max_seqs sequences of the full length need, at most 1 GiB.
    pub kv_bytes: u64,
    /// Seeds the requests that bring no seed of their own. Default 0.
    pub seed: u64,
    /// Tokens per KV block: 8, 16 (default), 32, 64, 128 or 256.
    pub block_size: u32,
    /// How K and V are stored: PLLM_DTYPE_AUTO (default: f32 for models in f32, else bf16), PLLM_DTYPE_F32 or PLLM_DTYPE_BF16.
    pub kv_dtype: u32,
    /// Longest sequence, prompt and output together. 0 (default): the model's own, or what the pool holds.
    pub max_model_len: u32,
    /// Most rows (prompt and decode tokens of all sequences) in one step. Default 512.
    pub max_batch_tokens: u32,
    /// Most sequences running at once, at most max_batch_tokens. Default 64.
    pub max_seqs: u32,
    /// Most prompt tokens of one sequence in one step. 0 (default): max_batch_tokens.
    pub prefill_chunk: u32,
    /// Threads, the stepping one included. 0 (default): one per core.
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
}

/// Told how many bytes of weights have been read, of how many in all, on the thread that creates the engine. Any other
/// answer than 0 stops the loading: pllm_engine_create then returns PLLM_E_CANCELLED. It must return (no exception, no
/// longjmp) and call nothing of this library on the engine being made.
pub type pllm_progress = Option<unsafe extern "C" fn(progress_data: *mut c_void, done: u64, total: u64) -> i32>;

// SAFETY: repr(C), the u32 fields fill whole words, integers, pointers and a nullable function only.
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
        known_flags("flags", c.flags, PLLM_ENGINE_SKIP_TOKENIZER)?;
        known_flags("reserved", c.reserved, 0)?;
        Ok(EngineOptions {
            model_dir: model_path.into(),
            device: device.into(),
            kv_bytes: (c.kv_bytes > 0).then_some(c.kv_bytes),
            block_size: c.block_size as usize,
            kv_dtype: dtype(c.kv_dtype)?,
            max_model_len: some(c.max_model_len),
            max_batch_tokens: c.max_batch_tokens as usize,
            max_seqs: c.max_seqs as usize,
            prefill_chunk: some(c.prefill_chunk),
            threads: some(c.threads),
            isa: isa(c.isa)?,
            seed: c.seed,
            skip_tokenizer: c.flags & PLLM_ENGINE_SKIP_TOKENIZER != 0,
            queue_capacity: match c.queue_capacity {
                // Programs of the first release know neither the field nor a bound.
                0 if c.struct_size <= Self::FIRST_SIZE as u64 => usize::MAX,
                0 => EngineOptions::DEFAULT_QUEUE_CAPACITY,
                capacity => usize::try_from(capacity).unwrap_or(usize::MAX),
            },
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

/// 0 lets the library choose.
fn some(value: u32) -> Option<usize> {
    (value > 0).then_some(value as usize)
}

pub(super) fn known_flags(name: &str, flags: u32, known: u32) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        unknown => Err(Error::unsupported(format!("{name} has bits {unknown:#x} that this library does not know"))),
    }
}

fn dtype(value: u32) -> Result<Option<Dtype>> {
    match value {
        PLLM_DTYPE_AUTO => Ok(None),
        PLLM_DTYPE_F32 => Ok(Some(Dtype::F32)),
        PLLM_DTYPE_BF16 => Ok(Some(Dtype::Bf16)),
        other => Err(Error::invalid(format!("kv_dtype is {other}: it must be one of PLLM_DTYPE_*"))),
    }
}

fn isa(value: u32) -> Result<Option<Isa>> {
    match value {
        PLLM_ISA_AUTO => Ok(None),
        PLLM_ISA_PORTABLE => Ok(Some(Isa::Portable)),
        PLLM_ISA_AVX2 => Ok(Some(Isa::Avx2)),
        PLLM_ISA_AVX512 => Ok(Some(Isa::Avx512)),
        other => Err(Error::invalid(format!("isa is {other}: it must be one of PLLM_ISA_*"))),
    }
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
    /// Bytes of one block across all layers.
    pub block_bytes: u64,
    /// Longest sequence, prompt and output together.
    pub max_model_len: u64,
    /// Sequences of that length that fit at once.
    pub full_sequences: u64,
    /// PLLM_DTYPE_F32 or PLLM_DTYPE_BF16.
    pub kv_dtype: u64,
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
            block_size: plan.block_size as u64,
            block_bytes: plan.block_bytes,
            max_model_len: plan.max_model_len as u64,
            full_sequences: plan.full_sequences as u64,
            kv_dtype: if plan.kv_dtype == Dtype::F32 { PLLM_DTYPE_F32 } else { PLLM_DTYPE_BF16 } as u64,
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
            ..pllm_model_info::defaults()
        }
    }
}

/// Use the seed field; without this the seed comes from the engine's and the request's id.
pub const PLLM_SAMPLING_SEED: u32 = 1;
/// Go on past end-of-sequence tokens.
pub const PLLM_SAMPLING_IGNORE_EOS: u32 = 2;
/// Report the log probability of every sampled token.
pub const PLLM_SAMPLING_LOGPROBS: u32 = 4;

/// How a request chooses its tokens and when it ends. Fill it with pllm_sampling_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_sampling {
    /// sizeof(pllm_sampling)
    pub struct_size: u64,
    /// Used with PLLM_SAMPLING_SEED. A request with a seed gives the same tokens whatever runs beside it.
    pub seed: u64,
    /// Tokens that end the sequence; reported, their text is not.
    pub stop_token_ids: *const u32,
    pub stop_token_ids_len: u64,
    /// Strings that end the sequence, also across tokens; they do not appear in the text.
    pub stop: *const *const c_char,
    /// Length of each of them in bytes; NULL: they end with a NUL.
    pub stop_lens: *const u64,
    pub stop_count: u64,
    /// 0 is greedy. Default 1.
    pub temperature: f32,
    /// Keep the most probable tokens that together reach this probability. Default 1: all.
    pub top_p: f32,
    /// Keep tokens at least this share as probable as the most probable one. Default 0: all.
    pub min_p: f32,
    /// Keep the k most probable tokens. Default 0: all.
    pub top_k: u32,
    /// 0 (default): until the sequence is as long as the engine allows.
    pub max_tokens: u32,
    /// Neither end-of-sequence tokens nor stops count before this many tokens. Default 0.
    pub min_tokens: u32,
    /// PLLM_SAMPLING_* flags.
    pub flags: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: repr(C), the 32-bit fields fill whole words, numbers and pointers only.
unsafe impl Versioned for pllm_sampling {
    const NAME: &'static str = "pllm_sampling";
    const FIRST_SIZE: usize = 88;
    fn defaults() -> Self {
        let params = SamplingParams::default();
        pllm_sampling {
            struct_size: size_of::<Self>() as u64,
            seed: 0,
            stop_token_ids: null(),
            stop_token_ids_len: 0,
            stop: null(),
            stop_lens: null(),
            stop_count: 0,
            temperature: params.temperature,
            top_p: params.top_p,
            min_p: params.min_p,
            top_k: params.top_k,
            max_tokens: 0,
            min_tokens: 0,
            flags: 0,
            reserved: 0,
        }
    }
}

impl pllm_sampling {
    /// # Safety
    /// As `convert::read`, and its arrays are readable.
    unsafe fn to_params(sampling: *const Self) -> Result<SamplingParams> {
        // SAFETY: the caller's contract.
        let c = unsafe { convert::read(sampling) }?;
        known_flags("sampling flags", c.flags, PLLM_SAMPLING_SEED | PLLM_SAMPLING_IGNORE_EOS | PLLM_SAMPLING_LOGPROBS)?;
        known_flags("reserved", c.reserved, 0)?;
        // SAFETY: the caller's contract.
        let stop_token_ids = unsafe { slice("stop_token_ids", c.stop_token_ids, c.stop_token_ids_len) }?;
        if c.seed != 0 && c.flags & PLLM_SAMPLING_SEED == 0 {
            return Err(Error::invalid(format!(
                "seed is {} and flags lacks PLLM_SAMPLING_SEED: set the flag, or leave the seed 0",
                c.seed
            )));
        }
        Ok(SamplingParams {
            temperature: c.temperature,
            top_k: c.top_k,
            top_p: c.top_p,
            min_p: c.min_p,
            seed: (c.flags & PLLM_SAMPLING_SEED != 0).then_some(c.seed),
            max_tokens: some(c.max_tokens),
            min_tokens: c.min_tokens as usize,
            ignore_eos: c.flags & PLLM_SAMPLING_IGNORE_EOS != 0,
            stop_token_ids: try_copy(stop_token_ids)?,
            // SAFETY: the caller's contract.
            stop: unsafe { c.stops() }?,
            logprobs: c.flags & PLLM_SAMPLING_LOGPROBS != 0,
            grammar: None,
        })
    }

    /// # Safety
    /// The arrays are readable as far as `stop_count` says.
    unsafe fn stops(&self) -> Result<Vec<String>> {
        // SAFETY: the caller's contract.
        let stops = unsafe { slice("stop", self.stop, self.stop_count) }?;
        let lens: &[u64] = match self.stop_lens.is_null() {
            true => &[],
            // SAFETY: the caller's contract.
            false => unsafe { slice("stop_lens", self.stop_lens, self.stop_count) }?,
        };
        let mut strings = Vec::new();
        strings.try_reserve_exact(stops.len())?;
        for (i, &stop) in stops.iter().enumerate() {
            let len = lens.get(i).copied().unwrap_or(PLLM_NUL_TERMINATED);
            // SAFETY: the caller's contract.
            strings.push(try_string(unsafe { string("a stop string", stop, len) }?)?);
        }
        Ok(strings)
    }
}

fn try_copy(values: &[u32]) -> Result<Vec<u32>> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(values.len())?;
    copy.extend_from_slice(values);
    Ok(copy)
}

fn try_string(text: &str) -> Result<String> {
    let mut copy = String::new();
    copy.try_reserve_exact(text.len())?;
    copy.push_str(text);
    Ok(copy)
}

/// Let the tokenizer add its special tokens, such as BOS. Leave it out for a prompt that a chat template wrote.
pub const PLLM_TEXT_ADD_SPECIAL: u32 = 1;
/// Leave special tokens out of text.
pub const PLLM_TEXT_SKIP_SPECIAL: u32 = 2;

/// A request. Fill it with pllm_request_init first. What it points to needs to live only during the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_request {
    /// sizeof(pllm_request)
    pub struct_size: u64,
    /// The prompt as text, UTF-8; NULL where it is given as tokens.
    pub prompt: *const c_char,
    /// In bytes, or PLLM_NUL_TERMINATED (the default).
    pub prompt_len: u64,
    /// The prompt as token ids; NULL where it is given as text.
    pub prompt_tokens: *const u32,
    pub prompt_tokens_len: u64,
    /// NULL: the defaults of pllm_sampling_init.
    pub sampling: *const pllm_sampling,
    /// Comes back in every output.
    pub user_data: u64,
    /// Sequences to generate. Default and, in this version, most: 1.
    pub n: u32,
    /// PLLM_TEXT_* flags. Default: PLLM_TEXT_ADD_SPECIAL | PLLM_TEXT_SKIP_SPECIAL.
    pub text_flags: u32,
    /// Where its outputs go. NULL (default): the engine's own queue.
    pub queue: *const pllm_queue,
}

// SAFETY: repr(C), the two u32 fill a word, integers and pointers only.
unsafe impl Versioned for pllm_request {
    const NAME: &'static str = "pllm_request";
    const FIRST_SIZE: usize = 64;
    fn defaults() -> Self {
        pllm_request {
            struct_size: size_of::<Self>() as u64,
            prompt: null(),
            prompt_len: PLLM_NUL_TERMINATED,
            prompt_tokens: null(),
            prompt_tokens_len: 0,
            sampling: null(),
            user_data: 0,
            n: 1,
            text_flags: PLLM_TEXT_ADD_SPECIAL | PLLM_TEXT_SKIP_SPECIAL,
            queue: null(),
        }
    }
}

impl pllm_request {
    /// # Safety
    /// As `convert::read`, and what it points to is readable.
    pub(super) unsafe fn to_request(request: *const Self) -> Result<(Request, *const pllm_queue)> {
        // SAFETY: the caller's contract.
        let c = unsafe { convert::read(request) }?;
        let prompt = match (c.prompt.is_null(), c.prompt_tokens.is_null()) {
            // SAFETY: the caller's contract.
            (false, true) => Prompt::Text(try_string(unsafe { string("prompt", c.prompt, c.prompt_len) }?)?),
            // SAFETY: the caller's contract.
            (true, false) => Prompt::Tokens(try_copy(unsafe { slice("prompt_tokens", c.prompt_tokens, c.prompt_tokens_len) }?)?),
            (true, true) => return Err(Error::invalid("prompt and prompt_tokens are both NULL: give one of them")),
            (false, false) => return Err(Error::invalid("prompt and prompt_tokens are both given: give one of them")),
        };
        // SAFETY: the caller's contract.
        let sampling = if c.sampling.is_null() { SamplingParams::default() } else { unsafe { pllm_sampling::to_params(c.sampling) }? };
        known_flags("text flags", c.text_flags, PLLM_TEXT_ADD_SPECIAL | PLLM_TEXT_SKIP_SPECIAL)?;
        let request = Request {
            prompt,
            sampling,
            n: c.n,
            user_data: c.user_data,
            add_special: c.text_flags & PLLM_TEXT_ADD_SPECIAL != 0,
            skip_special: c.text_flags & PLLM_TEXT_SKIP_SPECIAL != 0,
        };
        Ok((request, c.queue))
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
    /// Blocks kept for reuse, given away when they are needed. Always 0 in this version.
    pub blocks_cached: u64,
    pub blocks_free: u64,
    /// Share of the used blocks' slots that hold a token's K and V; 1 while none is used.
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
