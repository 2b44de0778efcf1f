use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::Duration;

use super::convert::{self, PLLM_NUL_TERMINATED, Versioned, slice, string};
use super::outputs::pllm_queue;
use super::sampling::pllm_sampling;
use super::structs::{known_flags, some};
use crate::engine::{LogitsHook, Prompt, Request};
use crate::error::{Error, Result, try_concat, try_copy};
use crate::options::{BeamParams, EarlyStopping};

/// Let the tokenizer add its special tokens, such as BOS. Leave it out for a prompt that a chat template wrote.
pub const PLLM_TEXT_ADD_SPECIAL: u32 = 1;
/// Leave special tokens out of text.
pub const PLLM_TEXT_SKIP_SPECIAL: u32 = 2;

/// The request's sequences stay when they end, whatever ended them: pllm_sequence_resume lets them go on,
/// pllm_sequence_free lets them go.
pub const PLLM_REQUEST_KEEP: u32 = 1;

/// When no running beam, ended now, would be better than the worst finished one.
pub const PLLM_EARLY_STOPPING_NO: u32 = 0;
/// As soon as width beams are finished.
pub const PLLM_EARLY_STOPPING_YES: u32 = 1;
/// When no running beam can become better than the worst finished one.
pub const PLLM_EARLY_STOPPING_NEVER: u32 = 2;

/// Edits logits[0..vocab_size] of the token that follows tokens[0..tokens_len] of the sequence, before anything else does.
/// Called on the thread that steps, once for each token (once for the first of all samples together; again where a step is tried
/// again); what takes long here holds up all. It must return (no exception, no longjmp). It may call what any thread may call; pllm_engine_step answers PLLM_E_BUSY, and pllm_engine_stop,
/// pllm_engine_free and a poll that waits would wait for themselves.
pub type pllm_logits_hook = Option<
    unsafe extern "C" fn(hook_data: *mut c_void, sequence: u64, tokens: *const u32, tokens_len: u64, logits: *mut f32, vocab_size: u64),
>;

/// Beam search, as generate of Hugging Face transformers does it: release 5, and for several groups release 4. Fill it with
/// pllm_beam_init first. Logit bias, penalties and exclusions of pllm_sampling apply to the log probabilities, in the order in
/// which transformers applies them; frequency and presence penalties and DRY, which it does not have, follow the repetition
/// penalty. Bad words may forbid end tokens, where transformers would ignore that.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_beam {
    /// sizeof(pllm_beam)
    pub struct_size: u64,
    /// Beams side by side: 2 to 64. Default 4.
    pub width: u32,
    /// Groups into which they are divided, each with a search of its own. Default 1.
    pub groups: u32,
    /// Taken off a token's log probability for every beam of an earlier group that chose it in the same step, before the repetition
    /// penalty multiplies what is left. Default 0.
    pub diversity_penalty: f32,
    /// Scores are sums of log probabilities divided by the length to this power. Default 1.
    pub length_penalty: f32,
    /// PLLM_EARLY_STOPPING_*.
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
    unsafe fn to_beam(beam: *const Self) -> Result<Option<BeamParams>> {
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
            other => return Err(Error::invalid(format!("early_stopping is {other}: it must be one of PLLM_EARLY_STOPPING_*"))),
        };
        let pllm_beam { width, groups, diversity_penalty, length_penalty, .. } = c;
        Ok(Some(BeamParams { width, groups, diversity_penalty, length_penalty, early_stopping }))
    }
}

/// Fills in the defaults, within struct_size bytes and never beyond them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_beam_init(beam: *mut pllm_beam, struct_size: u64) {
    // SAFETY: the caller's contract.
    super::guard_or((), || unsafe { convert::init(beam, struct_size) });
}

/// A request. Fill it with pllm_request_init first. What it points to needs to live only during the call, hook_data aside.
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
    /// Results: samples, or the best beams. Default 1. Sample i is sequence request + i; each has its own last output.
    pub n: u32,
    /// PLLM_TEXT_* flags. Default: PLLM_TEXT_ADD_SPECIAL | PLLM_TEXT_SKIP_SPECIAL.
    pub text_flags: u32,
    /// Where its outputs go. NULL (default): the engine's own queue.
    pub queue: *const pllm_queue,
    /// Samples to draw. Where they are more than n, the n with the highest log probability are returned, best first, at the end.
    /// 0 (default): n.
    pub best_of: u32,
    /// Keep only so many of the prompt's last tokens. 0 (default): all.
    pub truncate_prompt_tokens: u32,
    /// PLLM_REQUEST_* flags.
    pub flags: u32,
    /// Must be 0.
    pub reserved: u32,
    /// NULL (default): samples. Otherwise the request's outputs are the n best beams, best first, all of them at the end, whatever
    /// output_kind says. Beams cannot be combined with best_of, PLLM_REQUEST_KEEP, logits_hook, a temperature (0 and the default
    /// mean nothing here), top_k, top_p, min_p, typical_p, top_n_sigma, XTC, mirostat, a seed, stop strings, top_logprobs,
    /// PLLM_SAMPLING_PROMPT_LOGPROBS, PLLM_SAMPLING_ECHO or a grammar: PLLM_E_INVALID_ARGUMENT.
    pub beam: *const pllm_beam,
    /// Only requests with the same salt share what the prefix cache holds, so that tenants cannot probe each other.
    pub cache_salt: *const u8,
    pub cache_salt_len: u64,
    /// NULL (default): nobody edits the logits.
    pub logits_hook: pllm_logits_hook,
    /// Handed to logits_hook, until the request's last output has been made.
    pub hook_data: *mut c_void,
    /// Milliseconds from now, after which it ends with PLLM_FINISH_DEADLINE and what it has by then, wherever it is. 0 (default):
    /// none. A negative one has passed: PLLM_E_INVALID_ARGUMENT.
    pub deadline_ms: i64,
    /// Where the engine's order is PLLM_ORDER_PRIORITY: the higher comes first. -100 to 100, default 0. Forks have their parent's.
    pub priority: i32,
    /// Must be 0.
    pub reserved2: u32,
}

// SAFETY: repr(C), the u32 fields fill whole words, integers, pointers and a nullable function only.
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
        // SAFETY: the caller's contract, for all that it points to.
        let request = unsafe {
            Request {
                prompt: prompt(c.prompt, c.prompt_len, c.prompt_tokens, c.prompt_tokens_len)?,
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
        Err(_) => Err(Error::invalid(format!("deadline_ms is {ms}: it has passed; give the time that is left, or 0 for no deadline"))),
    }
}

/// # Safety
/// What is given is readable.
pub(super) unsafe fn prompt(text: *const c_char, len: u64, tokens: *const u32, tokens_len: u64) -> Result<Prompt> {
    match (text.is_null(), tokens.is_null()) {
        // SAFETY: the caller's contract.
        (false, true) => Ok(Prompt::Text(try_concat(&[unsafe { string("prompt", text, len) }?])?)),
        // SAFETY: the caller's contract.
        (true, false) => Ok(Prompt::Tokens(try_copy(unsafe { slice("prompt_tokens", tokens, tokens_len) }?)?)),
        (true, true) => Err(Error::invalid("prompt and prompt_tokens are both NULL: give one of them")),
        (false, false) => Err(Error::invalid("prompt and prompt_tokens are both given: give one of them")),
    }
}

/// The host's word, handed to its function.
struct HookData(*mut c_void);

// SAFETY: the header says on which thread it is used; the library never looks at it.
unsafe impl Send for HookData {}
// SAFETY: as above.
unsafe impl Sync for HookData {}

/// # Safety
/// The function keeps to its contract as long as the request lives.
pub(super) unsafe fn hook(hook: pllm_logits_hook, data: *mut c_void) -> Option<LogitsHook> {
    let (hook, data) = (hook?, HookData(data));
    Some(Arc::new(move |seq, tokens: &[u32], logits: &mut [f32]| {
        let HookData(data) = &data;
        // SAFETY: the caller's contract; both slices live during the call.
        unsafe { hook(*data, seq, tokens.as_ptr(), tokens.len() as u64, logits.as_mut_ptr(), logits.len() as u64) };
    }))
}
