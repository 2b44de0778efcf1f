//! The options in the schema, "x-guidance".

use std::collections::BTreeSet;

use serde_json::{Value as Json, json};

/// Default white space between the parts of a JSON text: one space or tab, or a line break and its
/// indentation. Without a limit, a model could write spaces until its last token.
const WHITESPACE: &str = r"[ \t]|\r?\n[ \t]{0,40}";

/// Default of llguidance's "json_allowed_escapes": the characters that may follow a backslash.
const ALL_ESCAPES: &str = "nrbtf\\\"u";
const SHORT_ESCAPES: &str = "nrbtf\\\"";

/// The options that this library applies itself.
#[derive(Debug, Clone)]
pub struct Options {
    pub strict_formats: bool,
    escapes: String,
    /// True if the schema has an option for the escapes of strings.
    is_chosen: bool,
}

impl Options {
    /// Reads the options, and removes those that llguidance does not have.
    pub fn take(schema: &mut Json) -> Result<Options, String> {
        let mut taken = Options { strict_formats: false, escapes: ALL_ESCAPES.into(), is_chosen: false };
        let Some(options) = schema.get_mut("x-guidance").and_then(Json::as_object_mut) else { return Ok(taken) };
        match options.shift_remove("strict_formats") {
            None => {}
            Some(Json::Bool(strict_formats)) => taken.strict_formats = strict_formats,
            Some(other) => return Err(format!("invalid value of strict_formats in x-guidance ({other}); give true or false")),
        }
        if let Some(Json::String(escapes)) = options.get("json_allowed_escapes") {
            (taken.escapes, taken.is_chosen) = (escapes.clone(), true);
        }
        taken.is_chosen |= options.get("json_allow_general_unicode_escapes") == Some(&Json::Bool(true));
        Ok(taken)
    }

    /// Disables escapes of code points if names are declared, because llguidance 1.9 treats
    /// "\u0061" and "a" as different names. They stay enabled if the schema has control characters
    /// that JSON can write in no other way.
    pub fn choose_escapes(&mut self, declared: &BTreeSet<String>, has_name_patterns: bool, needs_code_points: bool) {
        if !self.is_chosen && !needs_code_points && (has_name_patterns || !declared.is_empty()) {
            self.escapes = SHORT_ESCAPES.into();
        }
    }

    pub fn escapes(&self) -> &str {
        &self.escapes
    }

    /// Writes the options of llguidance that the schema does not have.
    pub fn put(&self, schema: &mut Json) {
        if *schema == Json::Bool(true) {
            *schema = json!({});
        }
        let Some(members) = schema.as_object_mut() else { return };
        let options = members.entry("x-guidance").or_insert_with(|| json!({}));
        let Some(options) = options.as_object_mut() else { return };
        if options.get("whitespace_flexible") != Some(&Json::Bool(false)) {
            let pattern = options.entry("whitespace_pattern").or_insert(Json::Null);
            *pattern = if pattern.is_null() { WHITESPACE.into() } else { pattern.take() };
        }
        if self.escapes != ALL_ESCAPES {
            options.entry("json_allowed_escapes").or_insert_with(|| self.escapes.clone().into());
        }
    }
}

/// Returns true if a string of the schema has a control character that JSON writes with its code
/// point only.
pub fn has_controls(schema: &Json) -> bool {
    let has = |text: &str| text.chars().any(|c| needs_code_point(c as u32));
    match schema {
        Json::String(text) => has(text),
        Json::Array(values) => values.iter().any(has_controls),
        Json::Object(members) => members.iter().any(|(name, value)| has(name) || has_controls(value)),
        _ => false,
    }
}

/// Returns true for a control character without a short escape.
pub fn needs_code_point(c: u32) -> bool {
    (c < 0x20 && !matches!(c, 8 | 9 | 10 | 12 | 13)) || c == 0x7F
}
