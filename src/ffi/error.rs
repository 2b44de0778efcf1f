use std::alloc::{Layout, alloc};
use std::borrow::Cow;
use std::ffi::{CStr, c_char};

use super::guard_or;
use crate::error::{Code, Error, PromptLength};

/// An error: a stable code, and a message with the numbers and the remedy. The caller frees it with
/// pllm_error_free.
pub struct pllm_error {
    code: i32,
    message: Cow<'static, CStr>,
    prompt: Option<PromptLength>,
    is_temporary: bool,
}

/// An argument is invalid: a value, a range, a text encoding.
pub const PLLM_E_INVALID_ARGUMENT: i32 = 1;
/// No live request, sequence or pin has this id.
pub const PLLM_E_NOT_FOUND: i32 = 2;
/// A file cannot be opened, read or written.
pub const PLLM_E_IO: i32 = 3;
/// The model's files are damaged, incomplete or contradictory, or its weights are not finite.
pub const PLLM_E_MODEL: i32 = 4;
/// This build, model or machine does not support the request.
pub const PLLM_E_UNSUPPORTED: i32 = 5;
/// A limit of memory, blocks, requests or queues does not allow it.
pub const PLLM_E_CAPACITY: i32 = 6;
/// Another thread is stepping this engine.
pub const PLLM_E_BUSY: i32 = 7;
/// The system has no memory left.
pub const PLLM_E_OUT_OF_MEMORY: i32 = 8;
/// A defect of the library. If it occurs in a step, the engine has failed: each request ends with
/// PLLM_FINISH_ERROR, later calls return the same error, and pllm_engine_free still works.
pub const PLLM_E_INTERNAL: i32 = 9;
/// The engine that owns this object has been freed.
pub const PLLM_E_CLOSED: i32 = 10;
/// The host's progress callback cancelled the call.
pub const PLLM_E_CANCELLED: i32 = 11;

const _: () = {
    assert!(PLLM_E_INVALID_ARGUMENT == Code::InvalidArgument as i32 && PLLM_E_NOT_FOUND == Code::NotFound as i32);
    assert!(PLLM_E_IO == Code::Io as i32 && PLLM_E_MODEL == Code::Model as i32 && PLLM_E_UNSUPPORTED == Code::Unsupported as i32);
    assert!(PLLM_E_CAPACITY == Code::Capacity as i32 && PLLM_E_BUSY == Code::Busy as i32);
    assert!(PLLM_E_OUT_OF_MEMORY == Code::OutOfMemory as i32 && PLLM_E_INTERNAL == Code::Internal as i32);
    assert!(PLLM_E_CLOSED == Code::Closed as i32 && PLLM_E_CANCELLED == Code::Cancelled as i32);
};

// Static errors, so that reporting them allocates nothing.
static OUT_OF_MEMORY: pllm_error = pllm_error {
    code: PLLM_E_OUT_OF_MEMORY,
    message: Cow::Borrowed(c"the system refused an allocation; lower the budgets or free memory"),
    prompt: None,
    is_temporary: true,
};
static BUSY: pllm_error = pllm_error {
    code: PLLM_E_BUSY,
    message: Cow::Borrowed(c"another thread, or the engine's own, is stepping this engine; step it from one thread at a time"),
    prompt: None,
    is_temporary: true,
};

fn is_static(error: *const pllm_error) -> bool {
    std::ptr::eq(error, &OUT_OF_MEMORY) || std::ptr::eq(error, &BUSY)
}

/// Transfers an error to the caller. Cannot fail: if memory runs out, it returns the out-of-memory
/// error.
pub(super) fn into_raw(error: Error) -> *mut pllm_error {
    match error.code() {
        Code::OutOfMemory => return (&raw const OUT_OF_MEMORY).cast_mut(),
        Code::Busy => return (&raw const BUSY).cast_mut(),
        _ => {}
    }
    let mut message = Vec::new();
    if message.try_reserve_exact(error.message().len() + 1).is_err() {
        return (&raw const OUT_OF_MEMORY).cast_mut();
    }
    message.extend(error.message().bytes().map(|byte| if byte == 0 { b'?' } else { byte }));
    message.push(0);
    let message = CStr::from_bytes_with_nul(&message).map(|_| ()).map_or(Cow::Borrowed(c""), |()| {
        // SAFETY: only the last byte is zero. The vector's capacity is exact, so this does not
        // reallocate.
        Cow::Owned(unsafe { std::ffi::CString::from_vec_with_nul_unchecked(message) })
    });
    // SAFETY: the layout is not empty. The block is initialized before it is visible to other code,
    // and freed as the same Box.
    unsafe {
        let place = alloc(Layout::new::<pllm_error>()).cast::<pllm_error>();
        if place.is_null() {
            return (&raw const OUT_OF_MEMORY).cast_mut();
        }
        place.write(pllm_error { code: error.code() as i32, message, prompt: error.prompt(), is_temporary: error.is_temporary() });
        place
    }
}

/// Returns the code of an error, one of PLLM_E_*, or 0 for NULL (success).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_error_code(error: *const pllm_error) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { error.as_ref() }.map_or(0, |error| error.code)
}

/// Returns the message of an error: UTF-8, NUL-terminated, valid until the error is freed. Returns
/// "" for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_error_message(error: *const pllm_error) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe { error.as_ref() }.map_or(c"".as_ptr(), |error| error.message.as_ptr())
}

/// Returns the number of tokens of a prompt that is too long for max_model_len. 0 for any other
/// error, and for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_error_prompt_tokens(error: *const pllm_error) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { error.as_ref() }.and_then(|error| error.prompt).map_or(0, |prompt| prompt.tokens as u64)
}

/// Returns max_model_len of the engine for which a prompt is too long. 0 for any other error, and
/// for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_error_max_model_len(error: *const pllm_error) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { error.as_ref() }.and_then(|error| error.prompt).map_or(0, |prompt| prompt.max_model_len as u64)
}

/// Returns 1 if the same call can succeed later, without a change of its arguments or of the
/// options: too many requests wait, a queue is full, other engines hold the budget, the engine is
/// busy, or the system has no memory left. 0 for any other error, and for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_error_is_temporary(error: *const pllm_error) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { error.as_ref() }.is_some_and(|error| error.is_temporary).into()
}

/// Frees an error. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_error_free(error: *mut pllm_error) {
    guard_or((), || {
        if !error.is_null() && !is_static(error) {
            // SAFETY: every other error was allocated by `into_raw` with this type's layout.
            drop(unsafe { Box::from_raw(error) });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_code_and_message_and_static_errors_can_be_freed() {
        let errors = [(Error::full("full: 3 of 3"), 1), (Error::out_of_memory(), 1), (Error::busy(), 1), (Error::capacity("a"), 0)];
        for (error, is_temporary) in errors.into_iter().chain([(Error::io("a\0b"), 0)]) {
            let code = error.code() as i32;
            let raw = into_raw(error);
            // SAFETY: raw is a live error, freed once.
            unsafe {
                assert_eq!((pllm_error_code(raw), pllm_error_is_temporary(raw)), (code, is_temporary));
                assert!(!CStr::from_ptr(pllm_error_message(raw)).is_empty());
                pllm_error_free(raw);
            }
        }
        assert_eq!(OUT_OF_MEMORY.code, 8);
    }
}
