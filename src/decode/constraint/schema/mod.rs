//! JSON schemas as llguidance takes them: patterns in its dialect, no formats that it cannot generate, options with our defaults.

mod formats;
mod names;
mod options;
mod walk;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json};

use super::pattern::{self, Language, PatternError};
use names::NamePattern;
use options::Options;

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
    pub fn extend(&mut self, others: Patterns) {
        self.0.extend(others.0);
    }

    /// A message of llguidance, with the patterns as they stand in the schema.
    pub fn restore(&self, message: &str) -> String {
        self.0.iter().fold(message.to_string(), |message, (translation, pattern)| message.replace(translation, pattern))
    }
}

/// Rewrites the schema, without any change of what it describes. `Err` says what is wrong with it.
pub fn prepare(mut schema: Json) -> Result<Prepared, String> {
    let mut options = Options::take(&mut schema)?;
    let mut declared = BTreeSet::new();
    names::declared(&schema, &mut declared);
    let needs_code_points = options::has_controls(&schema);
    let strict_formats = options.strict_formats;
    let mut translator = Translator { strict_formats, needs_code_points, has_names: false, translated: BTreeMap::new() };
    walk::every_schema(&mut schema, &mut |members| translator.translate_members(members))?;
    options.choose_escapes(&declared, translator.has_names, translator.needs_code_points);
    walk::every_schema(&mut schema, &mut |members| {
        let patterns = translator.name_patterns(members);
        if !patterns.is_empty() {
            names::put(members, patterns, &declared, options.escapes());
        }
        Ok(())
    })?;
    options.put(&mut schema);
    let patterns = translator.translated.into_iter().map(|(translation, (pattern, _))| (translation, pattern));
    Ok(Prepared { schema, patterns: Patterns(patterns.collect()) })
}

/// Rewrites keywords one by one.
struct Translator {
    strict_formats: bool,
    /// A pattern demands a control character that JSON writes with a code point only.
    needs_code_points: bool,
    /// There are "patternProperties".
    has_names: bool,
    /// By translation: the pattern, and what it matches.
    translated: BTreeMap<String, (String, Language)>,
}

impl Translator {
    fn translate_members(&mut self, members: &mut Map<String, Json>) -> Result<(), String> {
        for annotation in ANNOTATIONS {
            members.shift_remove(annotation);
        }
        formats::remove_annotation(members, self.strict_formats)?;
        if !may_be(members, "string") {
            // It says nothing of other values.
            members.shift_remove("pattern");
        }
        if let Some(Json::String(text)) = members.get_mut("pattern") {
            *text = self.translate(text).map_err(|error| format!("\"pattern\": {error}"))?;
        }
        let Some(Json::Object(patterns)) = members.get_mut("patternProperties") else { return Ok(()) };
        self.has_names = true;
        let mut renamed = Map::new();
        for (text, schema) in std::mem::take(patterns) {
            let translation = self.translate(&text).map_err(|error| format!("\"patternProperties\": {error}"))?;
            let before = renamed.get_mut(&translation).map(std::mem::take);
            renamed.insert(translation, before.map_or_else(|| schema.clone(), |before| both(before, schema.clone())));
        }
        *patterns = renamed;
        Ok(())
    }

    fn translate(&mut self, pattern: &str) -> Result<String, PatternError> {
        let language = pattern::ecma_search(pattern)?;
        // llguidance searches. The anchors keep it from adding what the translation has already.
        let translation = format!("^(?:{})$", language.to_json_regex());
        self.needs_code_points |= language.needs(&options::needs_code_point);
        self.translated.insert(translation.clone(), (pattern.into(), language));
        Ok(translation)
    }

    fn name_patterns(&self, members: &Map<String, Json>) -> Vec<NamePattern> {
        let patterns = members.get("patternProperties").and_then(Json::as_object).into_iter().flatten();
        let found = patterns.filter_map(|(translation, schema)| {
            let (_, language) = self.translated.get(translation)?;
            Some(NamePattern { translation: translation.clone(), language: language.clone(), schema: schema.clone() })
        });
        found.collect()
    }
}

/// Keywords that say nothing about a value and that llguidance refuses.
const ANNOTATIONS: [&str; 3] = ["contentSchema", "deprecated", "$vocabulary"];

/// What both schemas describe.
fn both(one: Json, other: Json) -> Json {
    let is_anything = |schema: &Json| *schema == Json::Bool(true) || schema.as_object().is_some_and(Map::is_empty);
    if is_anything(&one) {
        return other;
    }
    if is_anything(&other) { one } else { serde_json::json!({ "allOf": [one, other] }) }
}

/// Whether the schema's "type", if it has one, allows values of this type.
fn may_be(members: &Map<String, Json>, name: &str) -> bool {
    match members.get("type") {
        Some(Json::String(only)) => only == name,
        Some(Json::Array(types)) => types.iter().any(|of| of == name),
        _ => true,
    }
}

#[cfg(test)]
mod tests;
