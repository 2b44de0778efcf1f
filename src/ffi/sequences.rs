use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::time::Duration;

use super::convert::{self, PLLM_NUL_TERMINATED, Versioned, init, not_null, out_size, slice};
use super::outputs::pllm_queue;
use super::request::{PLLM_REQUEST_KEEP, PLLM_TEXT_ADD_SPECIAL, PLLM_TEXT_SKIP_SPECIAL, deadline, hook, pllm_logits_hook, prompt};
use super::sampling::pllm_sampling;
use super::structs::known_flags;
use super::{guard, guard_or, pllm_engine, pllm_error};
use crate::engine::{Fork, GoOn, Resume, SequenceInfo};
use crate::error::try_copy;

/// All the tokens that the parent has when the fork is made.
pub const PLLM_AT_END: u64 = u64::MAX;

/// Use the seed field; without this the children draw the same random numbers as their parent.
pub const PLLM_FORK_SEED: u32 = 1;
/// The children wait to be resumed, even where the parent runs.
pub const PLLM_FORK_IDLE: u32 = 2;
/// Use the user_data field; without this the children have the parent's.
pub const PLLM_FORK_USER_DATA: u32 = 4;

/// How to fork. Fill it with pllm_fork_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_fork {
    /// sizeof(pllm_fork)
    pub struct_size: u64,
    /// The tokens that the children share with their parent: 1 to its length, or PLLM_AT_END (default).
    pub at: u64,
    /// With PLLM_FORK_SEED: each child draws from a stream of its own of this seed, until it is resumed with other parameters.
    pub seed: u64,
    /// With PLLM_FORK_USER_DATA: comes back in the children's outputs.
    pub user_data: u64,
    /// Where the children's outputs go. NULL (default): where the parent's go.
    pub queue: *const pllm_queue,
    /// Children. Default 1.
    pub n: u32,
    /// PLLM_FORK_* flags.
    pub flags: u32,
}

// SAFETY: repr(C), the two u32 fill a word, integers and pointers only.
unsafe impl Versioned for pllm_fork {
    const NAME: &'static str = "pllm_fork";
    const FIRST_SIZE: usize = 48;
    fn defaults() -> Self {
        pllm_fork { struct_size: size_of::<Self>() as u64, at: PLLM_AT_END, seed: 0, user_data: 0, queue: null(), n: 1, flags: 0 }
    }
}

/// Use the user_data field; without this the sequence's own stays.
pub const PLLM_RESUME_USER_DATA: u32 = 2;
/// Go on as if the sequence had never been idle, with its own parameters, counts, grammar and kind of outputs; of the other
/// fields only queue, user_data, logits_hook (NULL: the one it has), deadline_ms and PLLM_REQUEST_KEEP are looked at. One that ended by its
/// length has to be rewound first: it ends again with PLLM_FINISH_ERROR.
pub const PLLM_RESUME_CONTINUE: u32 = 4;

/// How an idle sequence goes on. Fill it with pllm_resume_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_resume {
    /// sizeof(pllm_resume)
    pub struct_size: u64,
    /// NULL: the defaults of pllm_sampling_init. Counts (max_tokens, min_tokens) and penalties begin anew.
    pub sampling: *const pllm_sampling,
    /// Where its outputs go. NULL (default): where they went before.
    pub queue: *const pllm_queue,
    /// With PLLM_RESUME_USER_DATA: comes back in its outputs.
    pub user_data: u64,
    /// PLLM_REQUEST_KEEP (default), PLLM_RESUME_*.
    pub flags: u32,
    /// PLLM_TEXT_SKIP_SPECIAL (default) or 0.
    pub text_flags: u32,
    /// NULL (default): nobody edits the logits.
    pub logits_hook: pllm_logits_hook,
    /// Handed to logits_hook.
    pub hook_data: *mut c_void,
    /// As in pllm_request, for this turn.
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

/// A sequence as of the last step and of the calls since. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_sequence_info {
    /// sizeof(pllm_sequence_info)
    pub struct_size: u64,
    /// The request it came from.
    pub request: u64,
    /// Its tokens.
    pub len: u64,
    /// Which of the request's sequences, from 0; with best_of not the rank that its result had.
    pub index: u32,
    /// 1: it waits to be resumed or freed. 0: it runs, or waits to.
    pub idle: u32,
    /// 1: it was imported from a machine or an instruction path that cannot give the same bits.
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
        pllm_sequence_info { request, len: len as u64, index, idle: idle as u32, inexact: inexact as u64, ..pllm_sequence_info::defaults() }
    }
}

/// A prompt to keep in the prefix cache. Fill it with pllm_pin_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_pin {
    /// sizeof(pllm_pin)
    pub struct_size: u64,
    /// The prompt as text, UTF-8; NULL where it is given as tokens.
    pub prompt: *const c_char,
    /// In bytes, or PLLM_NUL_TERMINATED (the default).
    pub prompt_len: u64,
    /// The prompt as token ids; NULL where it is given as text.
    pub prompt_tokens: *const u32,
    pub prompt_tokens_len: u64,
    /// As in pllm_request.
    pub cache_salt: *const u8,
    pub cache_salt_len: u64,
    /// How long it is kept, in milliseconds. 0 (default): until it is unpinned.
    pub time_to_live_ms: u64,
    /// Where a sequence could not go on otherwise, pins with the lowest priority give way. Default 0.
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
            prompt_tokens: null(),
            prompt_tokens_len: 0,
            cache_salt: null(),
            cache_salt_len: 0,
            time_to_live_ms: 0,
            priority: 0,
            text_flags: PLLM_TEXT_ADD_SPECIAL,
        }
    }
}

/// Fills in the defaults, within struct_size bytes and never beyond them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_fork_init(fork: *mut pllm_fork, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(fork, struct_size) });
}

/// Fills in the defaults, within struct_size bytes and never beyond them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_resume_init(resume: *mut pllm_resume, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(resume, struct_size) });
}

/// Fills in the defaults, within struct_size bytes and never beyond them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_pin_init(pin: *mut pllm_pin, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(pin, struct_size) });
}

/// Makes how->n sequences (how NULL: one) that begin with the parent's tokens and share its KV blocks; nothing is copied but
/// what is not KV: the place in the random stream, penalty counts, grammar state, stop strings, text. Each child is a request
/// of its own, whose id is the sequence's; the ids are written to out_sequences, which has room for n (nothing is written
/// where the call fails). Children of a sequence that runs run too; those of an idle one wait to be resumed. A parent that ends
/// before the next step, and is not kept, ends its children with PLLM_FINISH_ERROR, also those that wait; for what those were
/// resumed to do, another such output comes. May be called from any thread, also while another one steps.
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
            at: (c.at != PLLM_AT_END).then_some(usize::try_from(c.at).unwrap_or(usize::MAX)),
            idle: c.flags & PLLM_FORK_IDLE != 0,
            seed: (c.flags & PLLM_FORK_SEED != 0).then_some(c.seed),
            queue: if c.queue.is_null() { None } else { Some(pllm_queue::get(c.queue)?) },
            user_data: (c.flags & PLLM_FORK_USER_DATA != 0).then_some(c.user_data),
        };
        let children = engine.fork(sequence, c.n as usize, &how)?;
        children.iter().enumerate().for_each(|(i, &child)| out_sequences.add(i).write(child));
        Ok(())
    })
}

/// Adds tokens to the end of a sequence. One that runs goes on after them, from the next step on, and may become longer by as
/// many; an idle one has them computed when it is resumed. A sequence that ends before the next step, and is not kept, is not
/// changed. Where they lead out of its grammar, it ends with PLLM_FINISH_ERROR as soon as it is to go on with that grammar; to
/// rewind it to before them mends that. May be called from any thread, also while another one steps.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_append(
    engine: *const pllm_engine,
    sequence: u64,
    tokens: *const u32,
    tokens_len: u64,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)?.append(sequence, try_copy(slice("tokens", tokens, tokens_len)?)?) })
}

/// Cuts a sequence to its first len tokens, 1 or more; also into the prompt. Everything is as it was then, the place in the
/// random stream included; what has been polled stays polled. One that runs goes on from there. May be called from any
/// thread, also while another one steps.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_rewind(engine: *const pllm_engine, sequence: u64, len: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)? }.rewind(sequence, usize::try_from(len).unwrap_or(usize::MAX)))
}

/// An idle sequence goes on. Only its last token and those that were appended since are computed. how NULL: the defaults.
/// May be called from any thread, also while another one steps.
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
            return engine.go_on(sequence, GoOn { keep, queue, user_data, hook: hook(c.logits_hook, c.hook_data), deadline });
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
        engine.resume(sequence, how)
    })
}

/// Forgets a sequence and gives back its blocks. One that runs ends with PLLM_FINISH_ABORT. Its id is unknown from now on.
/// May be called from any thread, also while another one steps.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_free(engine: *const pllm_engine, sequence: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)? }.free(sequence))
}

/// What is known of a sequence. May be called from any thread, also while another one steps.
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
        convert::write(out_info, &engine.sequence(sequence)?.into())
    })
}

/// Writes a sequence down: its tokens, KV, sampling parameters, random stream, grammar and text. The blob comes after the next
/// step as an output of the sequence (blob, blob_len), into queue (NULL: where its other outputs go); or, where it could not be
/// written or the sequence has ended by then, such an output has error and error_code. It names the model, the layout of the KV and the
/// instruction path, and has a checksum; it holds the conversation in the clear. The logits hook is not part of it:
/// give it again with PLLM_RESUME_CONTINUE.
/// May be called from any thread, also while another one steps.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_export(engine: *const pllm_engine, sequence: u64, queue: *const pllm_queue) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let queue = if queue.is_null() { None } else { Some(pllm_queue::get(queue)?) };
        pllm_engine::get(engine)?.export(sequence, queue)
    })
}

/// Makes an idle sequence from a blob, in this or another process; resumed with PLLM_RESUME_CONTINUE it goes on with the same
/// bits, on a machine that computes the same (see pllm_sequence_info.inexact). A blob that is damaged, of another model, of
/// another block_size or kv_dtype, or of a newer library is an error. queue: where its outputs go (NULL: the engine's own).
/// May be called from any thread, also while another one steps.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sequence_import(
    engine: *const pllm_engine,
    blob: *const u8,
    blob_len: u64,
    queue: *const pllm_queue,
    out_sequence: *mut u64,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_sequence", out_sequence)?;
        let queue = if queue.is_null() { engine.queue() } else { pllm_queue::get(queue)? };
        out_sequence.write(engine.import(queue, slice("blob", blob, blob_len)?)?);
        Ok(())
    })
}

/// Computes a prompt, from the next step on, and keeps its blocks: requests that begin with the same tokens find them.
/// Undo it with pllm_prefix_unpin. May be called from any thread, also while another one steps.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_prefix_pin(engine: *const pllm_engine, pin: *const pllm_pin, out_pin: *mut u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_pin", out_pin)?;
        let c = convert::read(pin)?;
        known_flags("text flags", c.text_flags, PLLM_TEXT_ADD_SPECIAL)?;
        let prompt = prompt(c.prompt, c.prompt_len, c.prompt_tokens, c.prompt_tokens_len)?;
        let salt = slice("cache_salt", c.cache_salt, c.cache_salt_len)?;
        let time = (c.time_to_live_ms > 0).then(|| Duration::from_millis(c.time_to_live_ms));
        out_pin.write(engine.pin(prompt, c.text_flags & PLLM_TEXT_ADD_SPECIAL != 0, salt, c.priority, time)?);
        Ok(())
    })
}

/// Lets the prompt's blocks go when others need their place. PLLM_E_NOT_FOUND: the pin has expired, or had to give way.
/// May be called from any thread, also while another one steps.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_prefix_unpin(engine: *const pllm_engine, pin: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)? }.unpin(pin))
}
