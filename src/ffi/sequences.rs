use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::time::Duration;

use super::convert::{self, PLLM_NUL_TERMINATED, Versioned, init, known_flags, not_null, out_size, slice};
use super::outputs::pllm_queue;
use super::request::{PLLM_REQUEST_KEEP, PLLM_TEXT_ADD_SPECIAL, PLLM_TEXT_SKIP_SPECIAL, deadline, hook, pllm_logits_hook, prompt};
use super::sampling::pllm_sampling;
use super::{guard, guard_or, pllm_engine, pllm_error};
use crate::engine::{Continue, Fork, Resume, SequenceInfo};
use crate::error::try_copy;
use crate::types::{PinId, SeqId};

/// The fork has all tokens of its parent.
pub const PLLM_FORK_AT_END: u64 = u64::MAX;

/// Use the seed field. Without this flag the children draw the same random numbers as their parent.
pub const PLLM_FORK_SEED: u32 = 1;
/// The children are idle until they are resumed, even if the parent runs.
pub const PLLM_FORK_IDLE: u32 = 2;
/// Use the user_data field. Without this flag the children have the user_data of the parent.
pub const PLLM_FORK_USER_DATA: u32 = 4;

/// Parameters of a fork. Call pllm_fork_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_fork {
    /// sizeof(pllm_fork).
    pub struct_size: u64,
    /// Number of tokens that the children share with their parent: 1 to its length, or
    /// PLLM_FORK_AT_END (default).
    pub at: u64,
    /// With PLLM_FORK_SEED: each child draws from its own random stream of this seed, until it is
    /// resumed with other parameters.
    pub seed: u64,
    /// With PLLM_FORK_USER_DATA: returned in the outputs of the children.
    pub user_data: u64,
    /// Queue for the outputs of the children. NULL (default) selects the parent's queue.
    pub queue: *const pllm_queue,
    /// Number of children. Default 1.
    pub n: u32,
    /// PLLM_FORK_* flags. Default 0.
    pub flags: u32,
}

// SAFETY: repr(C), the two u32 fill a word, integers and pointers only.
unsafe impl Versioned for pllm_fork {
    const NAME: &'static str = "pllm_fork";
    const FIRST_SIZE: usize = 48;
    fn defaults() -> Self {
        pllm_fork { struct_size: size_of::<Self>() as u64, at: PLLM_FORK_AT_END, seed: 0, user_data: 0, queue: null(), n: 1, flags: 0 }
    }
}

/// Use the user_data field. Without this flag the sequence keeps its user_data.
pub const PLLM_RESUME_USER_DATA: u32 = 2;
/// Continue as if the sequence had never been idle, with its own parameters, counts, grammar and
/// output kind. Of the other fields only queue, user_data, logits_hook (NULL: keep it), deadline_ms
/// and PLLM_REQUEST_KEEP are used. A sequence that ended by its length must be rewound first;
/// otherwise it ends again with PLLM_FINISH_ERROR.
pub const PLLM_RESUME_CONTINUE: u32 = 4;

/// How an idle sequence continues. Call pllm_resume_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_resume {
    /// sizeof(pllm_resume).
    pub struct_size: u64,
    /// Sampling parameters. NULL selects the defaults of pllm_sampling_init. Counts (max_tokens,
    /// min_tokens) and penalties start anew.
    pub sampling: *const pllm_sampling,
    /// Queue for the outputs. NULL (default) keeps the queue of the sequence.
    pub queue: *const pllm_queue,
    /// With PLLM_RESUME_USER_DATA: returned in the outputs.
    pub user_data: u64,
    /// PLLM_REQUEST_KEEP (default), PLLM_RESUME_*.
    pub flags: u32,
    /// PLLM_TEXT_SKIP_SPECIAL (default) or 0.
    pub text_flags: u32,
    /// Edits the logits of each token. NULL (default): none.
    pub logits_hook: pllm_logits_hook,
    /// Passed to logits_hook.
    pub hook_data: *mut c_void,
    /// As in pllm_request, from this call on.
    pub deadline_ms: i64,
}

// SAFETY: repr(C), the two u32 fill a word, integers, pointers and a nullable function only.
unsafe impl Versioned for pllm_resume {
    const NAME: &'static str = "pllm_resume";
    const FIRST_SIZE: usize = 56;
    fn defaults() -> Self {
        pllm_resume {
            struct_size: size_of::<Self>() as u64,
            sampling: null(),
            queue: null(),
            user_data: 0,
            flags: PLLM_REQUEST_KEEP,
            text_flags: PLLM_TEXT_SKIP_SPECIAL,
            logits_hook: None,
            hook_data: null_mut(),
            deadline_ms: 0,
        }
    }
}

/// A sequence as of the last step and the calls since. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_sequence_info {
    /// sizeof(pllm_sequence_info).
    pub struct_size: u64,
    /// Id of the request that created it.
    pub request: u64,
    /// Number of its tokens, prompt and output.
    pub len: u64,
    /// Index of the sequence in its request, from 0. With best_of it is not the rank of the result.
    pub index: u32,
    /// 1 if it waits to be resumed or freed, 0 if it runs or waits to run.
    pub idle: u32,
    /// 1 if it was imported from a machine or an instruction path that does not compute the same
    /// bits.
    pub inexact: u64,
}

// SAFETY: repr(C), the two u32 fill a word, integers only.
unsafe impl Versioned for pllm_sequence_info {
    const NAME: &'static str = "pllm_sequence_info";
    const FIRST_SIZE: usize = 32;
    fn defaults() -> Self {
        pllm_sequence_info { struct_size: size_of::<Self>() as u64, ..Default::default() }
    }
}

impl From<SequenceInfo> for pllm_sequence_info {
    fn from(info: SequenceInfo) -> pllm_sequence_info {
        let SequenceInfo { request, index, len, idle, inexact } = info;
        pllm_sequence_info {
            request: request.get(),
            len: len as u64,
            index,
            idle: idle as u32,
            inexact: inexact as u64,
            ..pllm_sequence_info::defaults()
        }
    }
}

/// A prompt that is kept in the prefix cache. Call pllm_pin_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_pin {
    /// sizeof(pllm_pin).
    pub struct_size: u64,
    /// Prompt as UTF-8 text. NULL if the prompt is given as tokens.
    pub prompt: *const c_char,
    /// Length of prompt in bytes, or PLLM_NUL_TERMINATED (default).
    pub prompt_len: u64,
    /// Prompt as token ids. NULL if the prompt is given as text.
    pub prompt_token_ids: *const u32,
    /// Number of prompt tokens.
    pub prompt_token_ids_len: u64,
    /// As in pllm_request.
    pub cache_salt: *const u8,
    /// Length of cache_salt in bytes.
    pub cache_salt_len: u64,
    /// Time in milliseconds for which the prompt is kept. 0 (default): until it is unpinned.
    pub time_to_live_ms: u64,
    /// If a sequence cannot continue otherwise, pins are dropped, those with the lowest priority
    /// first. Default 0.
    pub priority: u32,
    /// PLLM_TEXT_ADD_SPECIAL (default) or 0.
    pub text_flags: u32,
}

// SAFETY: repr(C), the two u32 fill a word, integers and pointers only.
unsafe impl Versioned for pllm_pin {
    const NAME: &'static str = "pllm_pin";
    const FIRST_SIZE: usize = 72;
    fn defaults() -> Self {
        pllm_pin {
            struct_size: size_of::<Self>() as u64,
            prompt: null(),
            prompt_len: PLLM_NUL_TERMINATED,
            prompt_token_ids: null(),
            prompt_token_ids_len: 0,
            cache_salt: null(),
            cache_salt_len: 0,
            time_to_live_ms: 0,
            priority: 0,
            text_flags: PLLM_TEXT_ADD_SPECIAL,
        }
    }
}

/// Writes the defaults into a struct of struct_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_fork_init(fork: *mut pllm_fork, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(fork, struct_size) });
}

/// Writes the defaults into a struct of struct_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_resume_init(resume: *mut pllm_resume, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(resume, struct_size) });
}

/// Writes the defaults into a struct of struct_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_pin_init(pin: *mut pllm_pin, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(pin, struct_size) });
}

/// Creates how->n sequences (how NULL: one) with the first tokens of a sequence. They share its KV
/// blocks; the random stream, penalty counts, grammar state, stop strings and text are copied. Each
/// child is a request of its own, and its sequence id is also its request id. The ids are written
/// to out_sequences, an array of n.
///
/// Children of a running sequence run; children of an idle one are idle. If the parent ends before
/// the next step and is not kept, the children end with PLLM_FINISH_ERROR, including those that
/// wait to be resumed; a child that has been resumed gets one more such output for the resume.
///
/// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
/// kept; PLLM_E_INVALID_ARGUMENT if n is 0 or at is beyond the end; PLLM_E_CAPACITY if n is too
/// large, too many requests wait or the queue is full. Any thread may call it, also during a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_fork(
    engine: *const pllm_engine,
    sequence: u64,
    how: *const pllm_fork,
    out_sequences: *mut u64,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_sequences", out_sequences)?;
        let c = if how.is_null() { pllm_fork::defaults() } else { convert::read(how)? };
        known_flags("fork flags", c.flags, PLLM_FORK_SEED | PLLM_FORK_IDLE | PLLM_FORK_USER_DATA)?;
        let how = Fork {
            at: (c.at != PLLM_FORK_AT_END).then_some(usize::try_from(c.at).unwrap_or(usize::MAX)),
            idle: c.flags & PLLM_FORK_IDLE != 0,
            seed: (c.flags & PLLM_FORK_SEED != 0).then_some(c.seed),
            queue: if c.queue.is_null() { None } else { Some(pllm_queue::get(c.queue)?) },
            user_data: (c.flags & PLLM_FORK_USER_DATA != 0).then_some(c.user_data),
        };
        let children = engine.fork(SeqId::from_raw(sequence), c.n as usize, &how)?;
        children.iter().enumerate().for_each(|(i, &child)| out_sequences.add(i).write(child.get()));
        Ok(())
    })
}

/// Appends tokens to a sequence. A running sequence continues after them from the next step on, and
/// its max_tokens grows by their number. An idle sequence computes them when it is resumed. If the
/// sequence ends before the next step and is not kept, it is not changed. If the tokens violate the
/// grammar of the sequence, it ends with PLLM_FINISH_ERROR when it continues with that grammar;
/// rewinding it to before the tokens repairs it.
///
/// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
/// kept; PLLM_E_INVALID_ARGUMENT if a token is unknown or the tokens do not fit max_model_len. Any
/// thread may call it, also during a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_append(
    engine: *const pllm_engine,
    sequence: u64,
    tokens: *const u32,
    tokens_len: u64,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)?.append(SeqId::from_raw(sequence), try_copy(slice("tokens", tokens, tokens_len)?)?) })
}

/// Truncates a sequence to its first len tokens (1 or more), also into the prompt. Its state is as
/// it was then, including the random stream. Outputs that have been polled are not taken back. A
/// running sequence continues from there.
///
/// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
/// kept; PLLM_E_INVALID_ARGUMENT if len is 0 or beyond the end. Any thread may call it, also during
/// a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_rewind(engine: *const pllm_engine, sequence: u64, len: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)? }.rewind(SeqId::from_raw(sequence), usize::try_from(len).unwrap_or(usize::MAX)))
}

/// Continues an idle sequence. Only its last token and the tokens appended since are computed. how
/// NULL selects the defaults.
///
/// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
/// kept; PLLM_E_INVALID_ARGUMENT if it is not idle or a parameter is invalid; PLLM_E_CAPACITY if
/// too many requests wait or the queue is full. Any thread may call it, also during a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_resume(engine: *const pllm_engine, sequence: u64, how: *const pllm_resume) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        let c = if how.is_null() { pllm_resume::defaults() } else { convert::read(how)? };
        known_flags("resume flags", c.flags, PLLM_REQUEST_KEEP | PLLM_RESUME_USER_DATA | PLLM_RESUME_CONTINUE)?;
        let keep = c.flags & PLLM_REQUEST_KEEP != 0;
        let queue = if c.queue.is_null() { None } else { Some(pllm_queue::get(c.queue)?) };
        let deadline = deadline(c.deadline_ms)?;
        let user_data = (c.flags & PLLM_RESUME_USER_DATA != 0).then_some(c.user_data);
        if c.flags & PLLM_RESUME_CONTINUE != 0 {
            return engine.continue_sequence(
                SeqId::from_raw(sequence),
                Continue { keep, queue, user_data, hook: hook(c.logits_hook, c.hook_data), deadline },
            );
        }
        known_flags("text flags", c.text_flags, PLLM_TEXT_SKIP_SPECIAL)?;
        let how = Resume {
            sampling: pllm_sampling::to_params(c.sampling)?,
            keep,
            queue,
            user_data,
            skip_special: c.text_flags & PLLM_TEXT_SKIP_SPECIAL != 0,
            hook: hook(c.logits_hook, c.hook_data),
            deadline,
        };
        engine.resume(SeqId::from_raw(sequence), how)
    })
}

/// Frees a sequence and its blocks. A running sequence ends with PLLM_FINISH_ABORT. Its id is
/// invalid from now on.
///
/// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
/// kept. Any thread may call it, also during a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_free(engine: *const pllm_engine, sequence: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)? }.free(SeqId::from_raw(sequence)))
}

/// Reads the state of a sequence.
///
/// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
/// kept. Any thread may call it, also during a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_get_info(
    engine: *const pllm_engine,
    sequence: u64,
    out_info: *mut pllm_sequence_info,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        out_size(out_info)?;
        convert::write(out_info, &engine.sequence(SeqId::from_raw(sequence))?.into())
    })
}

/// Exports the state of a sequence: tokens, KV blocks, sampling parameters, random stream, grammar
/// and text, as they are at the beginning of the next step. The state arrives as an output of the
/// sequence (sequence_state, sequence_state_len), in queue (NULL: the queue of its other outputs):
/// in that step if it is small or nothing else runs, otherwise in a later step, since a step copies
/// a limited number of bytes. If the export fails, or the sequence has ended by the next step, that
/// output has error and error_code.
///
/// The state names the model, the layout of the KV blocks and the instruction path, and has a
/// checksum. It contains the conversation in plain text. It does not contain the logits hook: pass
/// it again with PLLM_RESUME_CONTINUE.
///
/// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
/// kept. Any thread may call it, also during a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_export(engine: *const pllm_engine, sequence: u64, queue: *const pllm_queue) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let queue = if queue.is_null() { None } else { Some(pllm_queue::get(queue)?) };
        pllm_engine::get(engine)?.export(SeqId::from_raw(sequence), queue)
    })
}

/// Creates an idle sequence from an exported state, in this or another process. Resumed with
/// PLLM_RESUME_CONTINUE, it continues with the same bits on a machine that computes the same (see
/// pllm_sequence_info.inexact). queue receives its outputs (NULL: the engine's own queue).
///
/// Errors: PLLM_E_INVALID_ARGUMENT if the state is damaged, or made with another model, block_size
/// or kv_dtype; PLLM_E_UNSUPPORTED if it was made by a release with another format of states;
/// PLLM_E_CAPACITY if the queue is full. Any thread may call it, also during a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_import(
    engine: *const pllm_engine,
    state: *const u8,
    state_len: u64,
    queue: *const pllm_queue,
    out_sequence: *mut u64,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_sequence", out_sequence)?;
        let queue = if queue.is_null() { engine.queue() } else { pllm_queue::get(queue)? };
        out_sequence.write(engine.import(queue, slice("state", state, state_len)?)?.get());
        Ok(())
    })
}

/// Computes a prompt, from the next step on, and keeps its blocks in the prefix cache: requests
/// that begin with the same tokens reuse them. pllm_prefix_unpin undoes it.
///
/// Errors: PLLM_E_INVALID_ARGUMENT if the prompt is empty or does not fit max_model_len;
/// PLLM_E_UNSUPPORTED if the engine has no prefix cache, or no tokenizer for a text. Any thread may
/// call it, also during a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_prefix_pin(engine: *const pllm_engine, pin: *const pllm_pin, out_pin: *mut u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_pin", out_pin)?;
        let c = convert::read(pin)?;
        known_flags("text flags", c.text_flags, PLLM_TEXT_ADD_SPECIAL)?;
        let prompt = prompt(c.prompt, c.prompt_len, c.prompt_token_ids, c.prompt_token_ids_len)?;
        let salt = slice("cache_salt", c.cache_salt, c.cache_salt_len)?;
        let time = (c.time_to_live_ms > 0).then(|| Duration::from_millis(c.time_to_live_ms));
        out_pin.write(engine.pin(prompt, c.text_flags & PLLM_TEXT_ADD_SPECIAL != 0, salt, c.priority, time)?.get());
        Ok(())
    })
}

/// Unpins a prompt: its blocks can be evicted again.
///
/// Errors: PLLM_E_NOT_FOUND if the pin has expired or was dropped. Any thread may call it, also
/// during a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_prefix_unpin(engine: *const pllm_engine, pin: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)? }.unpin(PinId::from_raw(pin)))
}
