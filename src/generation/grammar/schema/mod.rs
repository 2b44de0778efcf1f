//! Rewrites JSON schemas for llguidance: patterns in its dialect, no formats that it cannot
//! generate, and options with the defaults of this library.

mod formats;
mod limits;
mod names;
mod options;
mod property_names;
mod references;
mod walk;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json};

use super::pattern;
pub use limits::WorkLimit;
use names::Translated;
use options::Options;

/// A schema for llguidance.
pub struct Prepared {
    pub schema: Json,
    /// The patterns of the schema, for messages.
    pub patterns: Patterns,
}

/// The pattern of each translation.
#[derive(Default)]
pub struct Patterns(BTreeMap<String, String>);

impl Patterns {
    pub fn extend(&mut self, others: Patterns) {
        self.0.extend(others.0);
    }

    /// Replaces the translations in a message of llguidance by the patterns of the schema.
    pub fn restore(&self, message: &str) -> String {
        self.0.iter().fold(message.to_string(), |message, (translation, pattern)| message.replace(translation, pattern))
    }
}

/// Rewrites the schema without changing its values. The error describes the problem.
pub fn prepare(mut schema: Json, budget: &mut WorkLimit) -> Result<Prepared, String> {
    let mut options = Options::take(&mut schema)?;
    references::keep_targets(&mut schema)?;
    property_names::rewrite(&mut schema, budget)?;
    let mut declared = BTreeSet::new();
    names::declared(&schema, &mut declared);
    let mut translator = Translator {
        strict_formats: options.strict_formats,
        needs_code_points: options::has_controls(&schema),
        name_patterns: 0,
        budget,
        translated: BTreeMap::new(),
    };
    walk::every_schema(&mut schema, &mut |members| translator.translate_members(members))?;
    let Translator { needs_code_points, name_patterns, translated, .. } = translator;
    options.choose_escapes(&declared, name_patterns > 0, needs_code_points);
    if name_patterns > 0 {
        budget.members(name_patterns, &declared)?;
        limits::check_pairs(&mut schema)?;
        names::rewrite(&mut schema, &mut declared, &translated, options.escapes(), budget)?;
        budget.compare(limits::check_pairs(&mut schema)?)?;
    }
    budget.properties(&mut schema)?;
    options.put(&mut schema);
    let patterns = translated.into_iter().map(|(translation, (pattern, _))| (translation, pattern));
    Ok(Prepared { schema, patterns: Patterns(patterns.collect()) })
}

/// Rewrites keywords one by one.
struct Translator<'a> {
    strict_formats: bool,
    /// True if a pattern requires a control character that JSON writes with a code point only.
    needs_code_points: bool,
    /// Members of "patternProperties".
    name_patterns: usize,
    budget: &'a mut WorkLimit,
    translated: Translated,
}

impl Translator<'_> {
    fn translate_members(&mut self, members: &mut Map<String, Json>) -> Result<(), String> {
        for annotation in ANNOTATIONS {
            members.shift_remove(annotation);
        }
        formats::remove_annotation(members, self.strict_formats)?;
        if !may_be(members, "string") {
            // "pattern" applies to strings only.
            members.shift_remove("pattern");
        }
        if let Some(Json::String(text)) = members.get_mut("pattern") {
            *text = self.translate(text).map_err(|why| format!("\"pattern\": {why}"))?;
        }
        let Some(Json::Object(patterns)) = members.get_mut("patternProperties") else { return Ok(()) };
        self.name_patterns += patterns.len();
        let mut renamed = Map::new();
        for (text, schema) in std::mem::take(patterns) {
            let translation = self.translate(&text).map_err(|why| format!("\"patternProperties\": {why}"))?;
            let before = renamed.get_mut(&translation).map(std::mem::take);
            renamed.insert(translation, before.map_or_else(|| schema.clone(), |before| both(before, schema.clone())));
        }
        *patterns = renamed;
        Ok(())
    }

    fn translate(&mut self, pattern: &str) -> Result<String, String> {
        let language = pattern::ecma_search(pattern).map_err(|error| error.to_string())?;
        self.budget.translate(language.size())?;
        // llguidance searches for matches. With anchors, it does not add the text around them
        // again.
        let translation = format!("^(?:{})$", language.to_json_regex());
        self.needs_code_points |= language.needs(&options::needs_code_point);
        self.translated.insert(translation.clone(), (pattern.into(), language));
        Ok(translation)
    }
}

/// Annotations that llguidance refuses.
const ANNOTATIONS: [&str; 3] = ["contentSchema", "deprecated", "$vocabulary"];

/// Returns a schema of the values that both schemas describe.
fn both(one: Json, other: Json) -> Json {
    let is_anything = |schema: &Json| *schema == Json::Bool(true) || schema.as_object().is_some_and(Map::is_empty);
    if is_anything(&one) {
        return other;
    }
    if is_anything(&other) { one } else { serde_json::json!({ "allOf": [one, other] }) }
}

/// Returns true if the schema's "type", if any, allows values of this type.
fn may_be(members: &Map<String, Json>, name: &str) -> bool {
    match members.get("type") {
        Some(Json::String(only)) => only == name,
        Some(Json::Array(types)) => types.iter().any(|of| of == name),
        _ => true,
    }
}

#[cfg(test)]
mod tests;
