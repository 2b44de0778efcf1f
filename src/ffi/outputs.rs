use std::collections::VecDeque;
use std::ffi::c_char;
use std::ptr::null;
use std::sync::Arc;
use std::time::Duration;

use super::convert::{borrow, not_null, start};
use super::{guard, guard_or, pllm_engine, pllm_error};
use crate::engine::{Logprobs, Output, Queue};
use crate::error::Result;
use crate::sched::FinishReason;
use crate::sys::process::Owner;

/// More will come.
pub const PLLM_FINISH_NONE: u32 = 0;
/// An end-of-sequence token, a stop token or a stop string.
pub const PLLM_FINISH_STOP: u32 = 1;
/// max_tokens, or the longest sequence that the engine allows.
pub const PLLM_FINISH_LENGTH: u32 = 2;
/// The host asked for it.
pub const PLLM_FINISH_ABORT: u32 = 3;
/// Its computation failed; the error fields say why.
pub const PLLM_FINISH_ERROR: u32 = 4;

/// A queue of outputs that any thread may poll.
pub struct pllm_queue {
    queue: Arc<Queue>,
    owner: Owner,
    /// Part of its engine, and freed with it.
    engines_own: bool,
}

/// A capacity that suits the queue of one request.
pub const PLLM_QUEUE_CAPACITY: u64 = 64;

impl pllm_queue {
    pub(super) fn new(queue: Arc<Queue>, engines_own: bool) -> pllm_queue {
        pllm_queue { queue, owner: Owner::this_process(), engines_own }
    }

    /// # Safety
    /// As `borrow`.
    pub(super) unsafe fn get<'a>(queue: *const pllm_queue) -> Result<&'a Queue> {
        // SAFETY: the caller's contract.
        let handle = unsafe { borrow("queue", queue) }?;
        handle.owner.check()?;
        Ok(&handle.queue)
    }
}

/// News of one sequence: new tokens, new text, or its end. It and what it points to live as long as its batch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_output {
    /// Bytes of this struct as the library knows it: a field that lies beyond is not there.
    pub struct_size: u64,
    pub request: u64,
    pub sequence: u64,
    /// The request's own word, returned.
    pub user_data: u64,
    /// NULL where there are none.
    pub tokens: *const u32,
    pub tokens_len: u64,
    /// One per token; NULL where the request did not ask for them.
    pub logprobs: *const f32,
    /// UTF-8, not NUL-terminated, never half a character; NULL where there is none. It may lag behind the tokens.
    pub text: *const c_char,
    pub text_len: u64,
    /// UTF-8, not NUL-terminated: why, where finish_reason is PLLM_FINISH_ERROR, where it is PLLM_FINISH_ABORT because the
    /// engine was freed, and where (PLLM_FINISH_NONE) it could not be exported, or, while it was idle, changed. Else NULL.
    pub error: *const c_char,
    pub error_len: u64,
    pub prompt_tokens: u64,
    /// Tokens generated so far.
    pub generated_tokens: u64,
    /// Which of the request's sequences, from 0.
    pub index: u32,
    /// PLLM_FINISH_*; anything but PLLM_FINISH_NONE makes this the sequence's last output.
    pub finish_reason: u32,
    /// PLLM_E_*, or 0. Together with error; PLLM_E_CLOSED where the engine was freed.
    pub error_code: i32,
    pub reserved: u32,
    /// The sum of the log probabilities of all generated tokens, where the request asked for log probabilities or for the best
    /// of several samples; of a beam, its score after the length penalty. Else 0.
    pub score: f64,
    /// The most probable tokens in place of each of `tokens`, most probable first: top_logprobs_len / tokens_len for each.
    /// NULL where the request did not ask for them.
    pub top_logprobs: *const pllm_logprob,
    pub top_logprobs_len: u64,
    /// Of the prompt's tokens but the first, where the request asked for them; they come in order, before the first token,
    /// and may come in several outputs.
    pub prompt_logprobs: *const f32,
    pub prompt_logprobs_len: u64,
    pub prompt_top_logprobs: *const pllm_logprob,
    pub prompt_top_logprobs_len: u64,
    /// An exported sequence. NULL in all other outputs.
    pub blob: *const u8,
    pub blob_len: u64,
}

/// A token and its log probability under the model's own distribution.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct pllm_logprob {
    pub token: u32,
    pub logprob: f32,
}

/// A batch of outputs. Belongs to the caller; reading it makes no call into the engine and outlives it.
pub struct pllm_outputs {
    records: Vec<pllm_output>,
    // What the records point to; never touched while they live.
    _outputs: VecDeque<Output>,
    _top: Vec<pllm_logprob>,
}

/// What `poll` needs for a batch, reserved before anything is taken from the queue.
#[derive(Default)]
pub struct Room {
    records: Vec<pllm_output>,
    top: Vec<pllm_logprob>,
}

impl Room {
    fn make(&mut self, outputs: &VecDeque<Output>) -> Result<()> {
        self.records.try_reserve_exact(outputs.len())?;
        let top = outputs.iter().map(|output| output.logprobs.top.len() + output.prompt_logprobs.top.len()).sum();
        Ok(self.top.try_reserve_exact(top)?)
    }
}

impl pllm_outputs {
    /// `room` was made for these outputs, so that nothing moves any more.
    fn new(outputs: VecDeque<Output>, room: Room) -> pllm_outputs {
        let Room { mut records, mut top } = room;
        records.extend(outputs.iter().map(|output| record(output, &mut top)));
        pllm_outputs { records, _outputs: outputs, _top: top }
    }
}

/// Appends to `top`, which has room for them, and says where they are.
fn pairs(logprobs: &Logprobs, top: &mut Vec<pllm_logprob>) -> (*const pllm_logprob, u64) {
    let first = top.len();
    top.extend(logprobs.top.iter().map(|&(token, logprob)| pllm_logprob { token, logprob }));
    (start(&top[first..]), (top.len() - first) as u64)
}

fn record(output: &Output, top: &mut Vec<pllm_logprob>) -> pllm_output {
    let (top_logprobs, top_logprobs_len) = pairs(&output.logprobs, top);
    let (prompt_top_logprobs, prompt_top_logprobs_len) = pairs(&output.prompt_logprobs, top);
    let error = output.error.as_ref().map(|error| (error.message(), error.code() as i32));
    pllm_output {
        struct_size: size_of::<pllm_output>() as u64,
        request: output.request,
        sequence: output.sequence,
        user_data: output.user_data,
        tokens: start(&output.tokens),
        tokens_len: output.tokens.len() as u64,
        logprobs: start(&output.logprobs.tokens),
        text: start(output.text.as_bytes()).cast(),
        text_len: output.text.len() as u64,
        error: error.map_or(null(), |(message, _)| message.as_ptr().cast()),
        error_len: error.map_or(0, |(message, _)| message.len() as u64),
        prompt_tokens: output.prompt_tokens,
        generated_tokens: output.generated_tokens,
        index: output.index,
        finish_reason: match output.finish {
            None => PLLM_FINISH_NONE,
            Some(FinishReason::Stop) => PLLM_FINISH_STOP,
            Some(FinishReason::Length) => PLLM_FINISH_LENGTH,
            Some(FinishReason::Abort) => PLLM_FINISH_ABORT,
            Some(FinishReason::Error) => PLLM_FINISH_ERROR,
        },
        error_code: error.map_or(0, |(_, code)| code),
        reserved: 0,
        score: output.score,
        top_logprobs,
        top_logprobs_len,
        prompt_logprobs: start(&output.prompt_logprobs.tokens),
        prompt_logprobs_len: output.prompt_logprobs.tokens.len() as u64,
        prompt_top_logprobs,
        prompt_top_logprobs_len,
        blob: start(&output.blob),
        blob_len: output.blob.len() as u64,
    }
}

/// Makes a queue for some of the engine's requests (pllm_request.queue), so that threads, clients or event loops each
/// read their own. capacity: while so many outputs or more wait in it, the requests that write to it pause; no others wait
/// for them and nothing is dropped. A step under way may add one output for each request beyond the capacity, and so may
/// the end of each; once max_seqs outputs are there beyond it, further requests are refused with PLLM_E_CAPACITY. Free it
/// with pllm_queue_free.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_queue_create(engine: *const pllm_engine, capacity: u64, out_queue: *mut *mut pllm_queue) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_queue", out_queue)?;
        let queue = engine.create_queue(usize::try_from(capacity).unwrap_or(usize::MAX))?;
        out_queue.write(Box::into_raw(Box::new(pllm_queue::new(Arc::new(queue), false))));
        Ok(())
    })
}

/// Frees a queue, before or after its engine; what still writes to it is aborted. NULL is fine. No other call on it may be
/// under way. The engine's own queue is left alone: it goes with the engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_queue_free(queue: *mut pllm_queue) {
    guard_or((), || {
        // SAFETY: the caller's contract.
        if unsafe { queue.as_ref() }.is_some_and(|queue| !queue.engines_own) {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            let queue = unsafe { Box::from_raw(queue) };
            if queue.owner.check().is_err() {
                // In a forked child its lock may be held by a thread that is not there.
                std::mem::forget(queue);
            }
        }
    });
}

/// A descriptor that is readable while a poll of this queue would not have to wait, for epoll and what is built on it (Linux).
/// Borrowed: it lives as long as the queue. Polling makes it unreadable again; reading it is not needed, and allowed.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_queue_event_fd(queue: *const pllm_queue, out_fd: *mut i32) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let queue = pllm_queue::get(queue)?;
        not_null("out_fd", out_fd)?.write(queue.event_fd()?);
        Ok(())
    })
}

/// Takes everything that is in the queue, in the order it was made. Waits up to timeout_ms for the first
/// (0: not at all; negative: as long as it takes). When time runs out the batch is empty; that is no error.
/// Once an engine has failed or is freed and its last outputs are taken, polling answers with that error.
/// Free the batch with pllm_outputs_free. May be called from any thread, also while another one steps.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_queue_poll(
    queue: *const pllm_queue,
    timeout_ms: i64,
    out_outputs: *mut *mut pllm_outputs,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let queue = pllm_queue::get(queue)?;
        not_null("out_outputs", out_outputs)?;
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        let mut room = Room::default();
        let outputs = queue.poll_with(timeout, |outputs| room.make(outputs))?;
        out_outputs.write(Box::into_raw(Box::new(pllm_outputs::new(outputs, room))));
        Ok(())
    })
}

/// How many outputs the batch has; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_outputs_len(outputs: *const pllm_outputs) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { outputs.as_ref() }.map_or(0, |outputs| outputs.records.len() as u64)
}

/// Output i of the batch, borrowed from it; NULL where there is none. Each output lies struct_size bytes after the one before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_outputs_get(outputs: *const pllm_outputs, i: u64) -> *const pllm_output {
    // SAFETY: the caller's contract.
    let records = unsafe { outputs.as_ref() }.map_or(&[][..], |outputs| &outputs.records);
    usize::try_from(i).ok().and_then(|i| records.get(i)).map_or(null(), |record| &raw const *record)
}

/// Frees a batch. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_outputs_free(outputs: *mut pllm_outputs) {
    guard_or((), || {
        if !outputs.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            drop(unsafe { Box::from_raw(outputs) });
        }
    });
}
