//! Errors for tokens that the grammar does not allow. They name the token, the preceding text and
//! the allowed continuations.

use std::fmt::Write;
use std::sync::Mutex;

use llguidance::TokenParser;
use llguidance::earley::{BiasComputer, ParserRecognizer};
use llguidance::toktrie::{Recognizer, SimpleVob, TokEnv, TokTrie};

use super::{Shared, has};
use crate::error::Error;
use crate::sys::quiet::no_panic;

/// Maximum number of bytes of the output in a message.
const MAX_SHOWN_BYTES: usize = 40;
/// Maximum number of bytes and byte ranges in a message.
const MAX_LISTED: usize = 8;

/// The continuations that the grammar allows.
#[derive(Debug, Clone, Default, PartialEq)]
struct Next {
    /// Number of bytes of the probed text that the grammar allows.
    fitting: usize,
    /// Bytes that the grammar allows after them.
    bytes: Vec<u8>,
}

/// Finds which bytes the parser allows, independently of the tokens of the model. Does not change
/// the parser.
struct Probe<'a> {
    tokens: TokEnv,
    text: &'a [u8],
    next: Mutex<Next>,
}

impl BiasComputer for Probe<'_> {
    fn compute_bias(&self, recognizer: &mut ParserRecognizer<'_>, _: &[u8]) -> SimpleVob {
        recognizer.trie_started("probe");
        let fitting = self.text.iter().take_while(|byte| recognizer.try_push_byte(**byte)).count();
        let bytes = (0..=u8::MAX).filter(|byte| recognizer.byte_allowed(*byte)).collect();
        recognizer.pop_bytes(fitting);
        recognizer.trie_finished();
        if let Ok(mut next) = self.next.lock() {
            *next = Next { fitting, bytes };
        }
        self.trie().alloc_token_set()
    }

    fn trie(&self) -> &TokTrie {
        self.tokens.tok_trie()
    }
}

fn probe(shared: &Shared, parser: &mut TokenParser, text: &[u8]) -> Next {
    let probe = Probe { tokens: shared.factory.tok_env().clone(), text, next: Mutex::default() };
    // If the start is not empty, the parser does not store the result as its mask.
    let _ = no_panic(|| parser.parser.compute_bias(&probe, b" "));
    probe.next.into_inner().unwrap_or_default()
}

/// Returns true if the grammar allows the bytes of this token. A limit has then caused the error.
pub(super) fn fits(shared: &Shared, parser: &mut TokenParser, token: u32) -> bool {
    let bytes = shared.factory.tok_env().tok_trie().token(token).to_vec();
    let is_text = has(&shared.known, token) && bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER);
    is_text && probe(shared, parser, &bytes).fitting == bytes.len()
}

/// Returns the error for a token that the grammar does not allow. `parser` is in the state after
/// the tokens `before`.
pub(super) fn refused(shared: &Shared, parser: &mut TokenParser, before: &[u32], token: u32, cause: Option<&str>) -> Error {
    let bytes = shared.factory.tok_env().tok_trie().token(token).to_vec();
    let is_special = bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
    let mut message = format!("token {token}");
    if !bytes.is_empty() {
        let _ = write!(message, " ({})", shown(bytes.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER]).unwrap_or(&bytes)));
    }
    let _ = write!(message, " is not allowed by the grammar {}", place(shared, before));
    if let Some(cause) = cause {
        let _ = write!(message, ": {cause}");
    }
    if !has(&shared.known, token) {
        return Error::invalid(message + ": it is outside of the vocabulary");
    }
    let next = probe(shared, parser, if is_special { &[] } else { &bytes });
    let wrong = if has(&shared.ends, token) {
        "the text is not complete".into()
    } else if is_special {
        "it is a special token, and the grammar does not name it here".into()
    } else {
        let wrong = bytes.get(next.fitting..=next.fitting).unwrap_or_default();
        format!("its byte {} is {}", next.fitting + 1, shown(wrong))
    };
    Error::invalid(format!("{message}: {wrong}, and the grammar allows {}", listed(&next.bytes)))
}

/// Returns the error for a token after the end of the sequence.
pub(super) fn after_end(shared: &Shared, before: &[u32], token: u32) -> Error {
    let bytes = shared.factory.tok_env().tok_trie().token(token);
    let bytes = bytes.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER]).unwrap_or(bytes);
    Error::invalid(format!(
        "token {token} ({}) is not allowed by the grammar {}: the sequence has ended",
        shown(bytes),
        place(shared, before)
    ))
}

/// Returns the error if no token of the model is allowed.
pub(super) fn stuck(shared: &Shared, parser: &mut TokenParser, before: &[u32]) -> Error {
    Error::invalid(format!("{} {}; allow other texts there", no_token(shared, parser), place(shared, before)))
}

/// Names the text that the grammar demands and no token of the model has.
pub(super) fn no_token(shared: &Shared, parser: &mut TokenParser) -> String {
    let next = probe(shared, parser, &[]);
    if next.bytes.is_empty() {
        return "the grammar allows no text at all".into();
    }
    format!("no token of the model matches the text that the grammar requires ({})", listed(&next.bytes))
}

/// Returns the error if one step exceeds a limit.
pub(super) fn too_much(shared: &Shared, before: &[u32], why: &str) -> Error {
    Error::capacity(format!("the grammar exceeds the limits of a step {} ({why}); simplify it", place(shared, before)))
}

/// Returns the number of tokens and the end of their text.
fn place(shared: &Shared, before: &[u32]) -> String {
    if before.is_empty() {
        return "at the start of the output".into();
    }
    let trie = shared.factory.tok_env().tok_trie();
    let bytes: Vec<u8> = before.iter().rev().take(MAX_SHOWN_BYTES).rev().flat_map(|token| trie.token(*token).to_vec()).collect();
    // An incomplete character at the cut is left out.
    let from = (bytes.len().saturating_sub(MAX_SHOWN_BYTES)..bytes.len()).find(|&i| bytes[i] & 0xC0 != 0x80).unwrap_or(0);
    format!("after {} tokens ({}{})", before.len(), if from > 0 { "..." } else { "" }, shown(&bytes[from..]))
}

/// Returns bytes as quoted text, or as numbers if they are not UTF-8.
fn shown(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if text.chars().count() <= MAX_SHOWN_BYTES => format!("{text:?}"),
        Ok(text) => format!("{:?}...", text.chars().take(MAX_SHOWN_BYTES).collect::<String>()),
        Err(_) => bytes.iter().take(MAX_SHOWN_BYTES).fold("bytes".to_string(), |all, byte| format!("{all} 0x{byte:02X}")),
    }
}

/// Returns a list of bytes and byte ranges.
fn listed(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "only the end of the text".into();
    }
    let one = |byte: u8| if byte.is_ascii() { format!("{:?}", byte as char) } else { format!("0x{byte:02X}") };
    let mut ranges: Vec<(u8, u8)> = Vec::new();
    for &byte in bytes {
        match ranges.last_mut() {
            Some(last) if last.1.checked_add(1) == Some(byte) => last.1 = byte,
            _ => ranges.push((byte, byte)),
        }
    }
    let mut list: Vec<String> = ranges
        .iter()
        .take(MAX_LISTED)
        .map(|&(low, high)| match low == high {
            true => one(low),
            false => format!("{} to {}", one(low), one(high)),
        })
        .collect();
    list.extend((ranges.len() > MAX_LISTED).then(|| "and others".to_string()));
    list.join(", ")
}
