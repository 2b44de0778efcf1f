use std::ffi::c_char;
use std::sync::{Mutex, MutexGuard};

use super::convert::{not_null, string};
use super::{guard, guard_or, pllm_bytes, pllm_engine, pllm_error};
use crate::error::{Error, Result};
use crate::text::response::{Deltas, ResponseParser, Settings};

/// Maximum length of one piece of text in bytes.
const MAX_PIECE: usize = 16 << 20;

/// The parser of one response: it separates reasoning, content and tool calls while the response is
/// generated. The caller frees it with pllm_response_parser_free.
pub struct pllm_response_parser {
    /// None after the end of the response.
    parser: Mutex<Option<ResponseParser>>,
}

impl pllm_response_parser {
    /// # Safety
    /// `parser` is NULL or alive.
    unsafe fn lock<'a>(parser: *mut pllm_response_parser) -> Result<MutexGuard<'a, Option<ResponseParser>>> {
        not_null("parser", parser)?;
        // SAFETY: the caller's contract.
        unsafe { &(*parser).parser }.lock().map_err(|_| Error::internal("an earlier call on this parser has failed"))
    }
}

fn ended() -> Error {
    Error::invalid("the response of this parser has ended; create a parser for each response")
}

/// Creates the parser of a response. Feed it the texts of the outputs of one sequence, generated
/// without PLLM_TEXT_SKIP_SPECIAL, because special tokens mark the parts of a response.
///
/// settings_json is an object with any of these members:
///
/// - "format": how the model writes reasoning and tool calls. "auto" (default): the format that the
///   chat template of the engine's model shows. Else one of "response_formats" of pllm_build_info.
/// - "prompt": the rendered prompt. If it ends with the opening tag of the reasoning, the response
///   begins inside of the reasoning.
/// - "tools": the array of tools that the prompt contains, as OpenAI's API defines it. Formats
///   whose arguments have no quotes take from it which arguments are strings.
/// - "tool_call_id_prefix": the id of a call is this prefix and the index of the call, unless the
///   model writes an id. Default "call_". At most 256 bytes.
///
/// engine may be NULL if "format" names a format. The parser does not keep it.
///
/// Errors: PLLM_E_INVALID_ARGUMENT if the settings are invalid or a format is unknown;
/// PLLM_E_UNSUPPORTED if engine has no tokenizer. Any thread may call it.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_response_parser_create(
    engine: *const pllm_engine,
    settings_json: *const c_char,
    len: u64,
    out_parser: *mut *mut pllm_response_parser,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        not_null("out_parser", out_parser)?;
        let detected = if engine.is_null() { None } else { Some(pllm_engine::get(engine)?.text()?.response_format()) };
        let (format, settings) = Settings::parse(string("settings_json", settings_json, len)?, detected)?;
        let parser = Mutex::new(Some(ResponseParser::new(format, settings)));
        out_parser.write(Box::into_raw(Box::new(pllm_response_parser { parser })));
        Ok(())
    })
}

/// Parses the next piece of the response. *out_deltas is a JSON array of deltas as a chat
/// completion streams them, which may be empty: {"content": TEXT}, {"reasoning_content": TEXT},
/// {"tool_calls": [{"index": I, "id": ID, "type": "function", "function": {"name": NAME,
/// "arguments": ""}}]} at the beginning of a call, and {"tool_calls": [{"index": I, "function":
/// {"arguments": TEXT}}]} for the parts of its arguments. The concatenated deltas do not depend on
/// how the response is divided in pieces. The caller frees *out_deltas with pllm_bytes_free.
///
/// Malformed text is no error: if it is not the beginning of a call it is content, and after the
/// beginning of a call it belongs to the arguments. At most 64 KiB of text are held back until
/// their meaning is known.
///
/// Errors: PLLM_E_INVALID_ARGUMENT if the text is not UTF-8 or has more than 16 MiB, or the
/// response has ended. Any thread may call it; calls on one parser wait for each other.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_response_parser_feed(
    parser: *mut pllm_response_parser,
    text: *const c_char,
    len: u64,
    out_deltas: *mut *mut pllm_bytes,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        not_null("out_deltas", out_deltas)?;
        let mut parser = pllm_response_parser::lock(parser)?;
        let text = string("text", text, len)?;
        if text.len() > MAX_PIECE {
            return Err(Error::invalid(format!("text has {} bytes; the limit is {MAX_PIECE}: feed it in pieces", text.len())));
        }
        let mut deltas = Deltas::default();
        parser.as_mut().ok_or_else(ended)?.feed(text, &mut deltas);
        out_deltas.write(pllm_bytes::into_raw(deltas.to_json().into_bytes()));
        Ok(())
    })
}

/// Ends the response. *out_deltas has the deltas of the text that was held back, as
/// pllm_response_parser_feed returns them. The caller frees it with pllm_bytes_free.
///
/// Errors: PLLM_E_INVALID_ARGUMENT if the response has ended. Any thread may call it; calls on one
/// parser wait for each other.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_response_parser_finish(
    parser: *mut pllm_response_parser,
    out_deltas: *mut *mut pllm_bytes,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        not_null("out_deltas", out_deltas)?;
        let mut parser = pllm_response_parser::lock(parser)?.take().ok_or_else(ended)?;
        let mut deltas = Deltas::default();
        parser.finish(&mut deltas);
        out_deltas.write(pllm_bytes::into_raw(deltas.to_json().into_bytes()));
        Ok(())
    })
}

/// Frees a parser. NULL is allowed. No other call on the parser may be in progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_response_parser_free(parser: *mut pllm_response_parser) {
    guard_or((), || {
        if !parser.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            drop(unsafe { Box::from_raw(parser) });
        }
    });
}
