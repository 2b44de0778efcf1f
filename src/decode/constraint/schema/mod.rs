//! JSON schemas as llguidance takes them: patterns in its dialect, no formats that it cannot generate, options with our defaults.

mod formats;
mod options;
mod walk;

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json};

use super::pattern::{self, Language};

pub use options::Options;

/// A schema for llguidance.
pub struct Prepared {
    pub schema: Json,
    /// The pattern that each translation was made of, for messages.
    pub patterns: Patterns,
}

/// Translations and the patterns that they were made of.
#[derive(Default)]
pub struct Patterns(BTreeMap<String, String>);

impl Patterns {
    /// A message of llguidance, with the patterns as they stand in the schema.
    pub fn restore(&self, message: &str) -> String {
        self.0.iter().fold(message.to_string(), |message, (translation, pattern)| message.replace(translation, pattern))
    }
}

/// Rewrites the schema, without any change of what it describes. `Err` says what is wrong with it.
pub fn prepare(mut schema: Json) -> Result<Prepared, String> {
    let options = Options::take(&mut schema)?;
    let mut normalizer = Normalizer { options, patterns: Patterns::default() };
    walk::every_schema(&mut schema, &mut |members| normalizer.normalize(members))?;
    normalizer.options.put(&mut schema);
    Ok(Prepared { schema, patterns: normalizer.patterns })
}

struct Normalizer {
    options: Options,
    patterns: Patterns,
}

impl Normalizer {
    /// One schema, after those within it.
    fn normalize(&mut self, members: &mut Map<String, Json>) -> Result<(), String> {
        for annotation in ANNOTATIONS {
            members.shift_remove(annotation);
        }
        formats::remove_annotation(members, self.options.strict_formats)?;
        self.pattern(members)?;
        self.pattern_properties(members)
    }

    fn pattern(&mut self, members: &mut Map<String, Json>) -> Result<(), String> {
        if !may_be(members, "string") {
            // It says nothing of other values.
            members.shift_remove("pattern");
        }
        let Some(Json::String(text)) = members.get_mut("pattern") else { return Ok(()) };
        let language = pattern::ecma_search(text).map_err(|error| format!("\"pattern\": {error}"))?;
        let translation = translate(&language);
        self.patterns.0.insert(translation.clone(), std::mem::replace(text, translation));
        Ok(())
    }

    fn pattern_properties(&mut self, members: &mut Map<String, Json>) -> Result<(), String> {
        let Some(Json::Object(patterns)) = members.get_mut("patternProperties") else { return Ok(()) };
        let mut translated = Map::new();
        for (text, schema) in std::mem::take(patterns) {
            let language = pattern::ecma_search(&text).map_err(|error| format!("\"patternProperties\": {error}"))?;
            let translation = translate(&language);
            self.patterns.0.insert(translation.clone(), text);
            match translated.get_mut(&translation) {
                Some(other) => *other = both(std::mem::take(other), schema),
                None => drop(translated.insert(translation, schema)),
            }
        }
        *patterns = translated;
        Ok(())
    }
}

/// Keywords that say nothing about a value and that llguidance refuses.
const ANNOTATIONS: [&str; 3] = ["contentSchema", "deprecated", "$vocabulary"];

/// llguidance searches. The anchors keep it from adding what the translation has already.
fn translate(language: &Language) -> String {
    format!("^(?:{})$", language.to_json_regex())
}

/// What both schemas describe.
fn both(one: Json, other: Json) -> Json {
    serde_json::json!({ "allOf": [one, other] })
}

/// Whether the schema's "type", if it has one, allows values of this type.
fn may_be(members: &Map<String, Json>, name: &str) -> bool {
    match members.get("type") {
        Some(Json::String(only)) => only == name,
        Some(Json::Array(types)) => types.iter().any(|of| of == name),
        _ => true,
    }
}
