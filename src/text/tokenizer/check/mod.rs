//! Checks `tokenizer.json` before the `tokenizers` crate reads it.
//!
//! The crate trusts its file. It allocates the declared sizes, loops up to the largest id, recurses
//! as deep as a token is long, and panics on unexpected values. Each limit below is far above the
//! values of published tokenizers.

mod charsmap;
mod model;
mod parts;
mod pattern;

pub(super) use model::{bpe_merges, check_model};
pub(super) use parts::{PipelinePart, parts};

use serde_json::Value as Json;

/// Maximum nesting of the JSON. Published files nest at most 8 deep.
const MAX_DEPTH: usize = 32;
/// Maximum number of values of the JSON. Each takes about 72 bytes after parsing. The largest
/// published file has about 2.5 million.
const MAX_VALUES: usize = 8 << 20;
/// Upper bound of ids, because some code of the crate loops over all ids up to the largest.
const MAX_IDS: u64 = 4 << 20;
/// Maximum length of a token in bytes. A token is copied wherever it is decoded.
const MAX_TOKEN_BYTES: usize = 16 << 10;
/// Maximum total length of added tokens in bytes. Their automaton takes about 150 bytes for each
/// byte.
const MAX_ADDED_BYTES: usize = 4 << 20;
/// Maximum length in bytes of a prefix, suffix or replacement of a part.
const MAX_AFFIX_BYTES: usize = 64;
/// Maximum growth factor of a text: the product over normalizers and pre-tokenizers, and over
/// decoders.
const MAX_EXPANSION: u64 = 1024;

const SAVE_AGAIN: &str = "save the tokenizer again with transformers";

/// Bounds of a checked file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Checked {
    /// Maximum ratio of the length of a text as the model's input to its original length.
    pub expansion: u64,
}

/// Refuses a file with too many values or too deep nesting, before it is parsed.
pub(super) fn check_bytes(bytes: &[u8]) -> Result<(), String> {
    let (mut depth, mut values) = (0_usize, 1_usize);
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => at = end_of_string(bytes, at),
            b'[' | b'{' => {
                depth += 1;
                values += 1;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' => values += 1,
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(refusal("JSON", &format!("nests too deep (more than {MAX_DEPTH} levels)"), SAVE_AGAIN));
        }
        at += 1;
    }
    if values > MAX_VALUES {
        return Err(refusal("JSON", &format!("too many values ({values}, limit {MAX_VALUES})"), "use a smaller vocabulary"));
    }
    Ok(())
}

/// Returns the position of the quote that ends the string at `start`, or of the last byte if there
/// is no such quote.
fn end_of_string(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => return at,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Checks everything except the model, which `check_model` checks.
pub(super) fn check(file: &Json) -> Result<Checked, String> {
    if !file.is_object() {
        return Err(refusal("file", "not a JSON object", SAVE_AGAIN));
    }
    if !file["version"].is_null() && file["version"] != "1.0" {
        return Err(refusal("version", &format!("unknown ({}, supported: \"1.0\")", shown(&file["version"])), SAVE_AGAIN));
    }
    string_or_null(&file["padding"]["pad_token"], "padding.pad_token", MAX_TOKEN_BYTES)?;
    let normalized = parts::normalizers(&file["normalizer"])?;
    let expansion = normalized.saturating_mul(parts::pre_tokenizers(&file["pre_tokenizer"])?);
    check_expansion("normalizer and pre_tokenizer", expansion)?;
    check_expansion("decoder", parts::decoders(&file["decoder"])?)?;
    parts::post_processors(&file["post_processor"])?;
    check_added_tokens(&file["added_tokens"], normalized)?;
    Ok(Checked { expansion })
}

fn check_expansion(field: &str, factor: u64) -> Result<(), String> {
    if factor > MAX_EXPANSION {
        let problem = format!("can make a text too many times longer ({factor} times, limit {MAX_EXPANSION})");
        return Err(refusal(field, &problem, "shorten the replacements"));
    }
    Ok(())
}

fn check_added_tokens(list: &Json, expansion: u64) -> Result<(), String> {
    if list.is_null() {
        return Ok(());
    }
    let Some(list) = list.as_array() else { return Err(refusal("added_tokens", "not a list", SAVE_AGAIN)) };
    let mut bytes = 0_u64;
    for (i, token) in list.iter().enumerate() {
        let field = format!("added_tokens[{i}]");
        let content = string(&token["content"], &format!("{field}.content"), MAX_TOKEN_BYTES)?;
        id(&token["id"], &format!("{field}.id"))?;
        let strips = token["lstrip"] == true || token["rstrip"] == true;
        if strips && is_blank(content) {
            return Err(blank_token(&field));
        }
        let longer = if token["normalized"] == true { expansion } else { 1 };
        bytes = bytes.saturating_add(longer.saturating_mul(content.len() as u64));
    }
    if bytes > MAX_ADDED_BYTES as u64 {
        let problem = format!("too long together ({bytes} bytes once they are normalized, limit {MAX_ADDED_BYTES})");
        return Err(refusal("added_tokens", &problem, "put the tokens into the model's vocabulary"));
    }
    Ok(())
}

/// Returns true for a token of white space. If it strips white space, it matches each space of a
/// run and consumes the whole run each time, in quadratic time.
pub(super) fn is_blank(content: &str) -> bool {
    content.chars().all(char::is_whitespace)
}

pub(super) fn blank_token(field: &str) -> String {
    refusal(field, "a token of white space strips white space", "set lstrip and rstrip to false")
}

fn refusal(field: &str, problem: &str, remedy: &str) -> String {
    format!("{field}: {problem}; {remedy}")
}

/// Returns a value for an error message.
fn shown(value: &Json) -> String {
    let mut text: String = value.to_string().chars().take(60).collect();
    if text.len() < value.to_string().len() {
        text.push_str("..");
    }
    text
}

fn string<'a>(value: &'a Json, field: &str, limit: usize) -> Result<&'a str, String> {
    let text = match value {
        Json::String(text) => text,
        Json::Null => return Err(refusal(field, "missing", SAVE_AGAIN)),
        _ => return Err(refusal(field, "not a string", SAVE_AGAIN)),
    };
    if text.len() > limit {
        return Err(refusal(field, &format!("too long ({} bytes, limit {limit})", text.len()), "shorten it"));
    }
    Ok(text)
}

fn string_or_null<'a>(value: &'a Json, field: &str, limit: usize) -> Result<&'a str, String> {
    if value.is_null() { Ok("") } else { string(value, field, limit) }
}

fn id(value: &Json, field: &str) -> Result<u32, String> {
    match value.as_u64() {
        Some(id) if id < MAX_IDS => Ok(id as u32),
        Some(id) => Err(refusal(field, &format!("id too large ({id}, limit {})", MAX_IDS - 1), "number the tokens from 0")),
        None => Err(refusal(field, "not an id", SAVE_AGAIN)),
    }
}

fn count(value: &Json, field: &str, range: std::ops::RangeInclusive<u64>) -> Result<u64, String> {
    match value.as_u64() {
        Some(count) if range.contains(&count) => Ok(count),
        Some(count) => {
            let problem = format!("out of range ({count}, {} to {})", range.start(), range.end());
            Err(refusal(field, &problem, "change it to a number within the range"))
        }
        None => Err(refusal(field, "not a count", SAVE_AGAIN)),
    }
}

fn flag(value: &Json, field: &str) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| refusal(field, "neither true nor false", SAVE_AGAIN))
}

#[cfg(test)]
mod tests;
