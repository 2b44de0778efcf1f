use std::ffi::c_char;
use std::ptr::null;

use super::convert::{known_flags, not_null, slice, start, string};
use super::{PLLM_TEXT_ADD_SPECIAL, PLLM_TEXT_SKIP_SPECIAL, guard, guard_or, pllm_engine, pllm_error};

/// A list of token ids. The caller frees it with pllm_tokens_free.
pub struct pllm_tokens(Vec<u32>);

/// A UTF-8 text, or the hashes of pllm_engine_hash_prompt. The caller frees it with
/// pllm_bytes_free.
pub struct pllm_bytes(Vec<u8>);

impl pllm_bytes {
    pub(super) fn into_raw(bytes: Vec<u8>) -> *mut pllm_bytes {
        Box::into_raw(Box::new(pllm_bytes(bytes)))
    }
}

/// Encodes text as token ids. flags: PLLM_TEXT_ADD_SPECIAL or 0.
///
/// Errors: PLLM_E_INVALID_ARGUMENT if the text is longer than max_prompt_bytes or cannot be
/// encoded; PLLM_E_UNSUPPORTED if the engine has no tokenizer. Any thread may call it.
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

/// Decodes token ids as text. flags: PLLM_TEXT_SKIP_SPECIAL or 0.
///
/// Errors: PLLM_E_INVALID_ARGUMENT if an id is unknown; PLLM_E_UNSUPPORTED if the engine has no
/// tokenizer. Any thread may call it.
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

/// Returns the bytes that a token contributes to a text. They can be a part of a character. A
/// special token has its name, and an id that only the model knows has no bytes. Borrowed; valid
/// until the engine is freed. The first call reads the whole vocabulary.
///
/// Errors: PLLM_E_INVALID_ARGUMENT if the id is not below vocab_size of pllm_model_info;
/// PLLM_E_UNSUPPORTED if the engine has no tokenizer. Any thread may call it.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_get_token_bytes(
    engine: *const pllm_engine,
    token: u32,
    out_bytes: *mut *const u8,
    out_len: *mut u64,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_bytes", out_bytes)?;
        not_null("out_len", out_len)?;
        let bytes = engine.token_bytes(token)?;
        out_bytes.write(start(bytes));
        out_len.write(bytes.len() as u64);
        Ok(())
    })
}

/// Renders a chat with the model's chat template, as `apply_chat_template` of transformers 5.5.4
/// does. Add a request with the result without PLLM_TEXT_ADD_SPECIAL.
///
/// messages_json is an array of messages, [{"role": "user", "content": "..."}], or an object with
/// "messages" and any of these members. Each other member is a variable of the template.
///
/// - "tools", "documents": arrays, null by default.
/// - "add_generation_prompt": true (default) ends the prompt where the assistant's answer begins.
/// - "continue_final_message": true ends the prompt after the content of the last message, so that
///   the model continues it. Excludes "add_generation_prompt": true. Default false.
/// - "chat_template": the name of one of the model's templates. Default: "tool_use" if "tools" is
///   given and the model has that template, else "default".
/// - "chat_template_content_format": "string" joins the text parts of a content that is an array by
///   newlines before the template sees it, for templates that take only strings. Default "openai":
///   content is not changed.
///
/// Errors: PLLM_E_INVALID_ARGUMENT if the JSON is not a chat, the template raises an error, or the
/// chat or its prompt exceeds max_prompt_bytes; PLLM_E_CAPACITY if the rendering exceeds a limit of
/// docs/models.md; PLLM_E_MODEL if the template does not compile; PLLM_E_UNSUPPORTED if the model
/// has no template. Any thread may call it.
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

/// Returns the token ids. Borrowed. Returns NULL for NULL and for an empty list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_tokens_data(tokens: *const pllm_tokens) -> *const u32 {
    // SAFETY: the caller's contract.
    unsafe { tokens.as_ref() }.map_or(null(), |tokens| start(&tokens.0))
}

/// Returns the number of token ids, 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_tokens_len(tokens: *const pllm_tokens) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { tokens.as_ref() }.map_or(0, |tokens| tokens.0.len() as u64)
}

/// Frees a list of token ids. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_tokens_free(tokens: *mut pllm_tokens) {
    guard_or((), || {
        if !tokens.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            drop(unsafe { Box::from_raw(tokens) });
        }
    });
}

/// Returns the bytes, which are not NUL-terminated. Borrowed. Returns NULL for NULL and for an
/// empty text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_bytes_data(bytes: *const pllm_bytes) -> *const c_char {
    // SAFETY: the caller's contract.
    unsafe { bytes.as_ref() }.map_or(null(), |bytes| start(&bytes.0).cast())
}

/// Returns the number of bytes, 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_bytes_len(bytes: *const pllm_bytes) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { bytes.as_ref() }.map_or(0, |bytes| bytes.0.len() as u64)
}

/// Frees a text. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_bytes_free(bytes: *mut pllm_bytes) {
    guard_or((), || {
        if !bytes.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            drop(unsafe { Box::from_raw(bytes) });
        }
    });
}
