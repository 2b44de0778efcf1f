use std::alloc::{Layout, alloc};
use std::borrow::Cow;
use std::ffi::{CStr, c_char};

use super::guard_or;
use crate::error::{Code, Error};

/// What went wrong: a stable code and a message with the numbers and the remedy. Belongs to the caller.
pub struct pllm_error {
    code: i32,
    message: Cow<'static, CStr>,
}

/// An argument is wrong: its value, its range, its encoding.
pub const PLLM_E_INVALID_ARGUMENT: i32 = 1;
/// No live request or sequence has this id.
pub const PLLM_E_NOT_FOUND: i32 = 2;
/// A file could not be opened or read.
pub const PLLM_E_IO: i32 = 3;
/// The model's files are damaged, incomplete or contradict each other, or its numbers are not finite.
pub const PLLM_E_MODEL: i32 = 4;
/// Understood, and not offered by this build, model or machine.
pub const PLLM_E_UNSUPPORTED: i32 = 5;
/// The budget of memory, blocks or requests does not allow it.
pub const PLLM_E_CAPACITY: i32 = 6;
/// Another thread is in the middle of what allows one at a time.
pub const PLLM_E_BUSY: i32 = 7;
/// The machine would not give the memory.
pub const PLLM_E_OUT_OF_MEMORY: i32 = 8;
/// A defect of the library. After one in a step, the engine serves no more: every request ends with an output that says
/// so, later calls for work are refused with the same message, and freeing it still works.
pub const PLLM_E_INTERNAL: i32 = 9;
/// What this was asked of has been freed: the engine of a queue.
pub const PLLM_E_CLOSED: i32 = 10;
/// The host's own callback asked to stop.
pub const PLLM_E_CANCELLED: i32 = 11;

const _: () = {
    assert!(PLLM_E_INVALID_ARGUMENT == Code::InvalidArgument as i32 && PLLM_E_NOT_FOUND == Code::NotFound as i32);
    assert!(PLLM_E_IO == Code::Io as i32 && PLLM_E_MODEL == Code::Model as i32 && PLLM_E_UNSUPPORTED == Code::Unsupported as i32);
    assert!(PLLM_E_CAPACITY == Code::Capacity as i32 && PLLM_E_BUSY == Code::Busy as i32);
    assert!(PLLM_E_OUT_OF_MEMORY == Code::OutOfMemory as i32 && PLLM_E_INTERNAL == Code::Internal as i32);
    assert!(PLLM_E_CLOSED == Code::Closed as i32 && PLLM_E_CANCELLED == Code::Cancelled as i32);
};

// These two are always there: reporting them allocates nothing.
static OUT_OF_MEMORY: pllm_error = pllm_error {
    code: PLLM_E_OUT_OF_MEMORY,
    message: Cow::Borrowed(c"the machine would not give the memory: lower the budgets or free some memory"),
};
static BUSY: pllm_error = pllm_error {
    code: PLLM_E_BUSY,
    message: Cow::Borrowed(c"another thread, or the engine's own, is stepping this engine: one at a time"),
};

fn is_static(error: *const pllm_error) -> bool {
    std::ptr::eq(error, &OUT_OF_MEMORY) || std::ptr::eq(error, &BUSY)
}

/// Hands an error to the caller. Never fails: where there is no memory for it, it becomes that error.
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
        // SAFETY: the only zero is the last byte; the vector's capacity is exact, so this does not reallocate.
        Cow::Owned(unsafe { std::ffi::CString::from_vec_with_nul_unchecked(message) })
    });
    // SAFETY: the layout is not empty; the block is initialized before anyone sees it and freed as the Box it is.
    unsafe {
        let place = alloc(Layout::new::<pllm_error>()).cast::<pllm_error>();
        if place.is_null() {
            return (&raw const OUT_OF_MEMORY).cast_mut();
        }
        place.write(pllm_error { code: error.code() as i32, message });
        place
    }
}

/// The error's code, one of PLLM_E_*; 0 for NULL (success).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_error_code(error: *const pllm_error) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { error.as_ref() }.map_or(0, |error| error.code)
}

/// The error's message: UTF-8, ends with a NUL, lives as long as the error. "" for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_error_message(error: *const pllm_error) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe { error.as_ref() }.map_or(c"".as_ptr(), |error| error.message.as_ptr())
}

/// Frees an error. NULL is fine.
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
    fn errors_keep_code_and_message_and_the_static_ones_survive_being_freed() {
        for error in [Error::capacity("full: 3 of 3"), Error::out_of_memory(), Error::busy(), Error::io("a\0b")] {
            let code = error.code() as i32;
            let raw = into_raw(error);
            // SAFETY: raw is a live error, freed once.
            unsafe {
                assert_eq!(pllm_error_code(raw), code);
                assert!(!CStr::from_ptr(pllm_error_message(raw)).is_empty());
                pllm_error_free(raw);
            }
        }
        assert_eq!(OUT_OF_MEMORY.code, 8);
    }
}
