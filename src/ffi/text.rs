use std::ffi::c_char;
use std::ptr::null;

use super::convert::{not_null, slice, start, string};
use super::{PLLM_TEXT_ADD_SPECIAL, PLLM_TEXT_SKIP_SPECIAL, guard, guard_or, known_flags, pllm_engine, pllm_error};

/// Token ids. Belongs to the caller.
pub struct pllm_tokens(Vec<u32>);

/// Bytes, here always UTF-8 text. Belongs to the caller.
pub struct pllm_bytes(Vec<u8>);

impl pllm_bytes {
    pub(super) fn into_raw(bytes: Vec<u8>) -> *mut pllm_bytes {
        Box::into_raw(Box::new(pllm_bytes(bytes)))
    }
}

/// Turns text into token ids. flags: PLLM_TEXT_ADD_SPECIAL or 0.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_tokenize(
    engine: *const pllm_engine,
    text: *const c_char,
    len: u64,
    flags: u32,
    out_tokens: *mut *mut pllm_tokens,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_tokens", out_tokens)?;
        known_flags("flags", flags, PLLM_TEXT_ADD_SPECIAL)?;
        let tokens = engine.text()?.encode(string("text", text, len)?, flags & PLLM_TEXT_ADD_SPECIAL != 0)?;
        out_tokens.write(Box::into_raw(Box::new(pllm_tokens(tokens))));
        Ok(())
    })
}

/// Turns token ids into text. flags: PLLM_TEXT_SKIP_SPECIAL or 0.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_detokenize(
    engine: *const pllm_engine,
    tokens: *const u32,
    len: u64,
    flags: u32,
    out_text: *mut *mut pllm_bytes,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_text", out_text)?;
        known_flags("flags", flags, PLLM_TEXT_SKIP_SPECIAL)?;
        let text = engine.text()?.decode(slice("tokens", tokens, len)?, flags & PLLM_TEXT_SKIP_SPECIAL != 0)?;
        out_text.write(pllm_bytes::into_raw(text.into_bytes()));
        Ok(())
    })
}

/// Renders a conversation with the model's own chat template. The JSON is an array of messages
/// ([{"role": "user", "content": "..."}]) or an object with "messages" and what else the template reads
/// ("tools", "add_generation_prompt", ...). Add a request with the result without PLLM_TEXT_ADD_SPECIAL.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_render_chat(
    engine: *const pllm_engine,
    messages_json: *const c_char,
    len: u64,
    out_text: *mut *mut pllm_bytes,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_text", out_text)?;
        let text = engine.text()?.render_chat(string("messages_json", messages_json, len)?)?;
        out_text.write(pllm_bytes::into_raw(text.into_bytes()));
        Ok(())
    })
}

/// The ids, borrowed; NULL for NULL and where there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_tokens_data(tokens: *const pllm_tokens) -> *const u32 {
    // SAFETY: the caller's contract.
    unsafe { tokens.as_ref() }.map_or(null(), |tokens| start(&tokens.0))
}

/// How many ids there are; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_tokens_len(tokens: *const pllm_tokens) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { tokens.as_ref() }.map_or(0, |tokens| tokens.0.len() as u64)
}

/// Frees token ids. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_tokens_free(tokens: *mut pllm_tokens) {
    guard_or((), || {
        if !tokens.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            drop(unsafe { Box::from_raw(tokens) });
        }
    });
}

/// The bytes, borrowed, not NUL-terminated; NULL for NULL and where there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_bytes_data(bytes: *const pllm_bytes) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe { bytes.as_ref() }.map_or(null(), |bytes| start(&bytes.0).cast())
}

/// How many bytes there are; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_bytes_len(bytes: *const pllm_bytes) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { bytes.as_ref() }.map_or(0, |bytes| bytes.0.len() as u64)
}

/// Frees bytes. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_bytes_free(bytes: *mut pllm_bytes) {
    guard_or((), || {
        if !bytes.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            drop(unsafe { Box::from_raw(bytes) });
        }
    });
}
