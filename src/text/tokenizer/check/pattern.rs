//! Checks of patterns: texts, or regular expressions that Oniguruma runs.

use serde_json::Value as Json;

use super::super::regex::BoundedRegex;
use super::{MAX_AFFIX_BYTES, SAVE_AGAIN, refusal, string};

const MAX_BYTES: usize = 4096;

/// Checks a pattern: `{"String": text}` or `{"Regex": expression}`.
pub fn check(pattern: &Json, field: &str) -> Result<(), String> {
    if pattern.as_object().map_or(0, serde_json::Map::len) != 1 {
        return Err(refusal(field, "not an object with one member (\"String\" or \"Regex\")", SAVE_AGAIN));
    }
    if let Some(text) = pattern.get("String") {
        return string(text, &format!("{field}.String"), MAX_BYTES).map(drop);
    }
    let field = format!("{field}.Regex");
    let regex = string(&pattern["Regex"], &field, MAX_BYTES)?;
    BoundedRegex::new(regex).map(drop).map_err(|problem| refusal(&field, &problem, "write a simpler pattern"))
}

/// Checks a part `Replace`. Returns the maximum growth factor of a text.
pub fn replacement(part: &Json, field: &str) -> Result<u64, String> {
    check(&part["pattern"], &format!("{field}.pattern"))?;
    let content = string(&part["content"], &format!("{field}.content"), MAX_AFFIX_BYTES)?.len() as u64;
    match part["pattern"]["String"].as_str() {
        Some("") => Err(refusal(&format!("{field}.pattern.String"), "matches between all characters", SAVE_AGAIN)),
        Some(text) => Ok(content.div_ceil(text.len() as u64).max(1)),
        // The expression may match the empty text between characters, which stay.
        None => Ok(1 + content),
    }
}
