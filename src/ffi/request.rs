use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::Duration;

use super::convert::{self, PLLM_NUL_TERMINATED, Versioned, known_flags, slice, some, string};
use super::outputs::pllm_queue;
use super::sampling::pllm_sampling;
use crate::engine::{LogitsHook, Prompt, Request};
use crate::error::{Error, Result, try_concat, try_copy};
use crate::types::SeqId;
use crate::types::options::{BeamParams, EarlyStopping};

/// The tokenizer adds its special tokens, such as BOS. Do not set it for a prompt that a chat
/// template rendered.
pub const PLLM_TEXT_ADD_SPECIAL: u32 = 1;
/// Special tokens are left out of the text.
pub const PLLM_TEXT_SKIP_SPECIAL: u32 = 2;

/// The sequences of the request are kept when they end, for any reason, and become idle.
/// pllm_sequence_resume continues one; pllm_sequence_free frees it.
pub const PLLM_REQUEST_KEEP: u32 = 1;

/// Stop when the best running beam, if it ended now, would not score higher than the worst finished
/// beam.
pub const PLLM_EARLY_STOPPING_NO: u32 = 0;
/// Stop as soon as width beams are finished.
pub const PLLM_EARLY_STOPPING_YES: u32 = 1;
/// Stop when no running beam can reach a higher score than the worst finished beam.
pub const PLLM_EARLY_STOPPING_NEVER: u32 = 2;

/// Edits logits[0..vocab_size] of the token that follows tokens[0..tokens_len] of the sequence,
/// before all other sampling parameters.
///
/// Called on the stepping thread, once for each token. For the first token of several samples it is
/// called once for all of them. It is called again if a step is tried again. Its time adds to the
/// step of all sequences. It must return normally: no exception, no longjmp. It may call any
/// function that any thread may call, but pllm_engine_step and pllm_engine_snapshot return
/// PLLM_E_BUSY, and pllm_engine_stop, pllm_engine_free and a blocking poll would deadlock.
pub type pllm_logits_hook = Option<
    unsafe extern "C" fn(hook_data: *mut c_void, sequence: u64, tokens: *const u32, tokens_len: u64, logits: *mut f32, vocab_size: u64),
>;

/// Parameters of a beam search, as in generate of Hugging Face transformers: release 5, and release
/// 4 for several groups. Call pllm_beam_init first.
///
/// Logit bias, penalties and exclusions of pllm_sampling apply to the log probabilities, in the
/// order of transformers. Frequency and presence penalties and DRY, which transformers lacks,
/// follow the repetition penalty. Bad words can forbid end tokens, which transformers ignores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_beam {
    /// sizeof(pllm_beam).
    pub struct_size: u64,
    /// Number of beams, 2 to 64. Default 4.
    pub width: u32,
    /// Number of groups of beams, each with its own search. Default 1.
    pub groups: u32,
    /// Subtracted from the log probability of a token for each beam of an earlier group that chose
    /// it in the same step, before the repetition penalty. Range 0 to 1,000,000. Default 0.
    pub diversity_penalty: f32,
    /// The score of a beam is the sum of its log probabilities divided by its length to this power.
    /// Range -5 to 5. Default 1.
    pub length_penalty: f32,
    /// PLLM_EARLY_STOPPING_*. Default PLLM_EARLY_STOPPING_NO.
    pub early_stopping: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: repr(C), the 32-bit fields fill whole words, numbers only.
unsafe impl Versioned for pllm_beam {
    const NAME: &'static str = "pllm_beam";
    const FIRST_SIZE: usize = 32;
    fn defaults() -> Self {
        let beam = BeamParams::default();
        pllm_beam {
            struct_size: size_of::<Self>() as u64,
            width: beam.width,
            groups: beam.groups,
            diversity_penalty: beam.diversity_penalty,
            length_penalty: beam.length_penalty,
            early_stopping: PLLM_EARLY_STOPPING_NO,
            reserved: 0,
        }
    }
}

impl pllm_beam {
    /// # Safety
    /// As `convert::read`.
    pub(super) unsafe fn to_beam(beam: *const Self) -> Result<Option<BeamParams>> {
        if beam.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller's contract.
        let c = unsafe { convert::read(beam) }?;
        known_flags("reserved", c.reserved, 0)?;
        let early_stopping = match c.early_stopping {
            PLLM_EARLY_STOPPING_NO => EarlyStopping::No,
            PLLM_EARLY_STOPPING_YES => EarlyStopping::Yes,
            PLLM_EARLY_STOPPING_NEVER => EarlyStopping::Never,
            other => return Err(Error::invalid(format!("early_stopping is {other}; must be one of PLLM_EARLY_STOPPING_*"))),
        };
        let pllm_beam { width, groups, diversity_penalty, length_penalty, .. } = c;
        Ok(Some(BeamParams { width, groups, diversity_penalty, length_penalty, early_stopping }))
    }
}

/// Writes the defaults into a struct of struct_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_beam_init(beam: *mut pllm_beam, struct_size: u64) {
    // SAFETY: the caller's contract.
    super::guard_or((), || unsafe { convert::init(beam, struct_size) });
}

/// A request. Call pllm_request_init first. Its pointers, except hook_data, need to be valid only
/// during the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_request {
    /// sizeof(pllm_request).
    pub struct_size: u64,
    /// Prompt as UTF-8 text. NULL if the prompt is given as tokens.
    pub prompt: *const c_char,
    /// Length of prompt in bytes, or PLLM_NUL_TERMINATED (default).
    pub prompt_len: u64,
    /// Prompt as token ids. NULL if the prompt is given as text.
    pub prompt_token_ids: *const u32,
    /// Number of prompt tokens.
    pub prompt_token_ids_len: u64,
    /// Sampling parameters. NULL selects the defaults of pllm_sampling_init.
    pub sampling: *const pllm_sampling,
    /// Returned in each output of the request.
    pub user_data: u64,
    /// Number of results: samples, or best beams. Default 1. Result i has the sequence id request +
    /// i; with best_of, result i is one of the ids request to request + best_of - 1. Each sequence
    /// has its own last output.
    pub n: u32,
    /// PLLM_TEXT_* flags. Default PLLM_TEXT_ADD_SPECIAL | PLLM_TEXT_SKIP_SPECIAL.
    pub text_flags: u32,
    /// Queue for the outputs. NULL (default) selects the engine's own queue.
    pub queue: *const pllm_queue,
    /// Number of samples to generate. If it is larger than n, the n samples with the highest log
    /// probability are returned at the end, best first. 0 (default) selects n.
    pub best_of: u32,
    /// Keeps only this many tokens at the end of the prompt. 0 (default) keeps all.
    pub truncate_prompt_tokens: u32,
    /// PLLM_REQUEST_* flags. Default 0.
    pub flags: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Beam search. NULL (default) selects sampling. The n best beams are returned at the end, best
    /// first, whatever output_kind is.
    ///
    /// PLLM_E_INVALID_ARGUMENT if it is combined with best_of, PLLM_REQUEST_KEEP, logits_hook, a
    /// temperature other than 0 or the default, top_k, top_p, min_p, typical_p, top_n_sigma, XTC,
    /// mirostat, a seed, stop strings, top_logprobs, PLLM_SAMPLING_PROMPT_LOGPROBS,
    /// PLLM_SAMPLING_ECHO or a grammar.
    pub beam: *const pllm_beam,
    /// Requests share blocks of the prefix cache only if their salts are equal, so that tenants
    /// cannot probe the prompts of other tenants. NULL (default): the empty salt.
    pub cache_salt: *const u8,
    /// Length of cache_salt in bytes.
    pub cache_salt_len: u64,
    /// Edits the logits of each token. NULL (default): none.
    pub logits_hook: pllm_logits_hook,
    /// Passed to logits_hook. Must be valid until the last output of the request has been made.
    pub hook_data: *mut c_void,
    /// Deadline in milliseconds from now. When it passes, the request ends with
    /// PLLM_FINISH_DEADLINE and the tokens it has. 0 (default): none. A negative deadline is
    /// PLLM_E_INVALID_ARGUMENT.
    pub deadline_ms: i64,
    /// Priority, -100 to 100; higher runs first. Used if the order is PLLM_ORDER_PRIORITY. Default
    /// 0. Forks inherit it.
    pub priority: i32,
    /// Must be 0.
    pub reserved2: u32,
    /// Time in milliseconds for which the request waits for each next block of its prompt that the
    /// KV store does not have yet, because another engine computes the prompt. The engine reads each
    /// block when the store has it, and computes the prompt from the first block on that has not
    /// appeared in this time. If no other request can run meanwhile, a step waits for these blocks,
    /// too. 0 (default): the request waits only for blocks that the store has.
    /// PLLM_E_INVALID_ARGUMENT if it is not 0 and the engine has no kv_store.
    pub kv_store_wait_ms: u32,
    /// Must be 0.
    pub reserved3: u32,
}

// SAFETY: repr(C), the u32 fields fill whole words, integers, pointers and a nullable function
// only.
unsafe impl Versioned for pllm_request {
    const NAME: &'static str = "pllm_request";
    const FIRST_SIZE: usize = 64;
    fn defaults() -> Self {
        pllm_request {
            struct_size: size_of::<Self>() as u64,
            prompt: null(),
            prompt_len: PLLM_NUL_TERMINATED,
            prompt_token_ids: null(),
            prompt_token_ids_len: 0,
            sampling: null(),
            user_data: 0,
            n: 1,
            text_flags: PLLM_TEXT_ADD_SPECIAL | PLLM_TEXT_SKIP_SPECIAL,
            queue: null(),
            best_of: 0,
            truncate_prompt_tokens: 0,
            flags: 0,
            reserved: 0,
            beam: null(),
            cache_salt: null(),
            cache_salt_len: 0,
            logits_hook: None,
            hook_data: null_mut(),
            deadline_ms: 0,
            priority: 0,
            reserved2: 0,
            kv_store_wait_ms: 0,
            reserved3: 0,
        }
    }
}

impl pllm_request {
    /// # Safety
    /// As `convert::read`, and what it points to is readable.
    pub(super) unsafe fn to_request(request: *const Self) -> Result<(Request, *const pllm_queue)> {
        // SAFETY: the caller's contract.
        let c = unsafe { convert::read(request) }?;
        known_flags("text flags", c.text_flags, PLLM_TEXT_ADD_SPECIAL | PLLM_TEXT_SKIP_SPECIAL)?;
        known_flags("request flags", c.flags, PLLM_REQUEST_KEEP)?;
        known_flags("reserved", c.reserved, 0)?;
        known_flags("reserved2", c.reserved2, 0)?;
        known_flags("reserved3", c.reserved3, 0)?;
        // SAFETY: the caller's contract, for all that it points to.
        let request = unsafe {
            Request {
                prompt: prompt(c.prompt, c.prompt_len, c.prompt_token_ids, c.prompt_token_ids_len)?,
                sampling: pllm_sampling::to_params(c.sampling)?,
                n: c.n,
                best_of: (c.best_of > 0).then_some(c.best_of),
                beam: pllm_beam::to_beam(c.beam)?,
                priority: c.priority,
                keep: c.flags & PLLM_REQUEST_KEEP != 0,
                truncate_prompt_tokens: some(c.truncate_prompt_tokens),
                salt: try_copy(slice("cache_salt", c.cache_salt, c.cache_salt_len)?)?,
                hook: hook(c.logits_hook, c.hook_data),
                deadline: deadline(c.deadline_ms)?,
                store_wait: Duration::from_millis(c.kv_store_wait_ms.into()),
                user_data: c.user_data,
                add_special: c.text_flags & PLLM_TEXT_ADD_SPECIAL != 0,
                skip_special: c.text_flags & PLLM_TEXT_SKIP_SPECIAL != 0,
            }
        };
        Ok((request, c.queue))
    }
}

pub(super) fn deadline(ms: i64) -> Result<Option<Duration>> {
    match u64::try_from(ms) {
        Ok(ms) => Ok((ms > 0).then_some(Duration::from_millis(ms))),
        Err(_) => Err(Error::invalid(format!("deadline_ms is {ms} and has passed; pass the time that is left, or 0 for no deadline"))),
    }
}

/// # Safety
/// What is given is readable.
pub(super) unsafe fn prompt(text: *const c_char, len: u64, tokens: *const u32, tokens_len: u64) -> Result<Prompt> {
    match (text.is_null(), tokens.is_null()) {
        // SAFETY: the caller's contract.
        (false, true) => Ok(Prompt::Text(try_concat(&[unsafe { string("prompt", text, len) }?])?)),
        // SAFETY: the caller's contract.
        (true, false) => Ok(Prompt::Tokens(try_copy(unsafe { slice("prompt_token_ids", tokens, tokens_len) }?)?)),
        (true, true) => Err(Error::invalid("prompt and prompt_token_ids are both NULL; set one of them")),
        (false, false) => Err(Error::invalid("prompt and prompt_token_ids are both set; set one of them")),
    }
}

/// The hook_data of the host.
struct HookData(*mut c_void);

// SAFETY: the header documents the thread that uses it. The library never dereferences it.
unsafe impl Send for HookData {}
// SAFETY: as above.
unsafe impl Sync for HookData {}

/// # Safety
/// The function keeps to its contract as long as the request lives.
pub(super) unsafe fn hook(hook: pllm_logits_hook, data: *mut c_void) -> Option<LogitsHook> {
    let (hook, data) = (hook?, HookData(data));
    Some(Arc::new(move |seq: SeqId, tokens: &[u32], logits: &mut [f32]| {
        let HookData(data) = &data;
        // SAFETY: the caller's contract; both slices live during the call.
        unsafe { hook(*data, seq.get(), tokens.as_ptr(), tokens.len() as u64, logits.as_mut_ptr(), logits.len() as u64) };
    }))
}
