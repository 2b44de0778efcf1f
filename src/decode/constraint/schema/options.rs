//! The schema's own options, "x-guidance".

use serde_json::{Value as Json, json};

/// Between the parts of a JSON text: one space or tab, or a line break and its indentation. Without a limit a model that is
/// unsure of what comes next may write spaces until its tokens run out.
const WHITESPACE: &str = r"[ \t]|\r?\n[ \t]{0,40}";

/// What is done with the schema before llguidance has it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    pub strict_formats: bool,
}

impl Options {
    /// Reads our options of a schema, and leaves those of llguidance.
    pub fn take(schema: &mut Json) -> Result<Options, String> {
        let options = schema.get_mut("x-guidance").and_then(Json::as_object_mut);
        match options.and_then(|options| options.shift_remove("strict_formats")) {
            None => Ok(Options::default()),
            Some(Json::Bool(strict_formats)) => Ok(Options { strict_formats }),
            Some(other) => Err(format!("invalid value of strict_formats in x-guidance ({other}); give true or false")),
        }
    }

    /// Writes llguidance's options. What the schema says itself stays.
    pub fn put(&self, schema: &mut Json) {
        let Some(members) = schema.as_object_mut() else { return };
        let options = members.entry("x-guidance").or_insert_with(|| json!({}));
        let Some(options) = options.as_object_mut() else { return };
        if options.get("whitespace_flexible") != Some(&Json::Bool(false)) {
            options.entry("whitespace_pattern").or_insert_with(|| WHITESPACE.into());
        }
    }
}
