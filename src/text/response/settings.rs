//! The settings of a parser, and the JSON object in which hosts give them.

use std::collections::HashMap;

use serde_json::{Map, Value as Json};

use super::{FORMATS, Format};
use crate::error::{Error, Result};

/// Maximum length in bytes of the prefix of the ids of calls.
const MAX_PREFIX: usize = 256;

/// What the parser is given besides the text.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The prompt ends inside of the reasoning, after its opening tag.
    pub in_reasoning: bool,
    /// Prefix of the ids of calls, which the index follows. Empty: `call_`.
    pub id_prefix: String,
    /// The parameters of each tool that are not strings. Families with tags need them, since their
    /// values have no quotes. Without a tool's entry all its parameters are strings.
    pub typed: HashMap<String, Vec<String>>,
}

impl Settings {
    /// Reads the JSON object of `pllm_response_parser_create`. `detected` is the format of the
    /// model.
    pub fn parse(json: &str, detected: Option<&'static Format>) -> Result<(&'static Format, Settings)> {
        let mut given: Map<String, Json> = serde_json::from_str(json)
            .map_err(|error| Error::invalid(format!("settings_json is not a JSON object ({error}); pass {{}} for the defaults")))?;
        let format = find_format(text(&mut given, "format")?.as_deref().unwrap_or("auto"), detected)?;
        let prompt = text(&mut given, "prompt")?.unwrap_or_default();
        let id_prefix = text(&mut given, "tool_call_id_prefix")?.unwrap_or_default();
        if id_prefix.len() > MAX_PREFIX {
            return Err(Error::invalid(format!("tool_call_id_prefix has {} bytes; the limit is {MAX_PREFIX}", id_prefix.len())));
        }
        let typed = match given.remove("tools") {
            None | Some(Json::Null) => HashMap::new(),
            Some(tools) => typed_parameters(&tools)?,
        };
        if let Some(name) = given.keys().next() {
            return Err(Error::invalid(format!(
                "settings_json has the unknown member {name:?}; the known ones are format, prompt, tools, tool_call_id_prefix"
            )));
        }
        Ok((format, Settings { in_reasoning: format.is_reasoning_after(&prompt), id_prefix, typed }))
    }
}

/// Removes a member that is a string.
fn text(given: &mut Map<String, Json>, name: &str) -> Result<Option<String>> {
    match given.remove(name) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(text)) => Ok(Some(text)),
        Some(_) => Err(Error::invalid(format!("{name} is not a string; pass a string, or leave it out"))),
    }
}

fn find_format(name: &str, detected: Option<&'static Format>) -> Result<&'static Format> {
    if name == "auto" {
        let missing = || Error::invalid("format is auto, but engine is NULL; pass the engine, or name a format");
        return detected.ok_or_else(missing);
    }
    Format::find(name).ok_or_else(|| {
        let known: Vec<_> = FORMATS.iter().map(|format| format.name).collect();
        Error::invalid(format!("format {name:?} is unknown; the known ones are auto, {}", known.join(", ")))
    })
}

/// Returns the parameters that are not strings of each tool in an array of OpenAI's tools.
fn typed_parameters(tools: &Json) -> Result<HashMap<String, Vec<String>>> {
    let tools = tools.as_array().ok_or_else(|| Error::invalid("tools is not an array; pass OpenAI's array of tools"))?;
    let entries = tools.iter().enumerate().map(|(index, tool)| {
        // Some templates take the functions alone.
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name").and_then(Json::as_str);
        let name = name.ok_or_else(|| Error::invalid(format!("tools[{index}] has no function with a name; add it")))?;
        let properties = function.pointer("/parameters/properties").and_then(Json::as_object);
        let typed = properties.into_iter().flatten().filter(|(_, schema)| !is_string(schema)).map(|(key, _)| key.clone());
        Ok((name.to_owned(), typed.collect()))
    });
    entries.collect()
}

/// Returns whether all values of a schema are strings, as far as its type or its values show it. A
/// schema without either is taken for a string: models write such values as plain text.
fn is_string(schema: &Json) -> bool {
    match (schema.get("type"), schema.get("enum").and_then(Json::as_array)) {
        (Some(Json::String(one)), _) => one == "string",
        (Some(Json::Array(several)), _) => several.iter().all(|one| one == "string"),
        (_, Some(values)) => values.iter().all(Json::is_string),
        _ => ["anyOf", "oneOf", "allOf", "$ref"].iter().all(|member| schema.get(member).is_none()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(json: &str, reason: &str) {
        let error = Settings::parse(json, None).unwrap_err().to_string();
        assert!(error.contains(reason), "{json}: {error}");
    }

    #[test]
    fn wrong_settings_are_errors_with_their_names() {
        refused("", "not a JSON object");
        refused("[]", "not a JSON object");
        refused("{}", "engine is NULL");
        refused(r#"{"format": "hermess"}"#, "the known ones are auto, harmony, qwen3_coder");
        refused(r#"{"format": 1}"#, "format is not a string");
        refused(r#"{"format": "json", "prompt": []}"#, "prompt is not a string");
        refused(r#"{"format": "json", "tools": {}}"#, "tools is not an array");
        refused(r#"{"format": "json", "tools": [{"function": {}}]}"#, "tools[0] has no function with a name");
        refused(r#"{"format": "json", "tool": []}"#, r#"unknown member "tool""#);
        refused(&format!(r#"{{"format": "json", "tool_call_id_prefix": "{}"}}"#, "x".repeat(257)), "has 257 bytes; the limit is 256");
    }

    #[test]
    fn parameters_are_strings_unless_their_schema_says_otherwise() {
        let properties = r##"{"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": ["string", "null"]}, "d": {},
            "e": {"enum": ["x"]}, "f": {"enum": [1]}, "g": {"anyOf": [{"type": "string"}]}, "h": {"$ref": "#/x"}}"##;
        let function = format!(r#"{{"name": "f", "parameters": {{"properties": {properties}}}}}"#);
        for tool in [format!(r#"{{"type": "function", "function": {function}}}"#), function.clone()] {
            let (_, settings) = Settings::parse(&format!(r#"{{"format": "glm45", "tools": [{tool}]}}"#), None).unwrap();
            let mut typed = settings.typed["f"].clone();
            typed.sort();
            assert_eq!(typed, ["b", "c", "f", "g", "h"]);
        }
    }

    #[test]
    fn a_prompt_that_ends_with_the_opening_tag_is_inside_of_the_reasoning() {
        let reasoning = |prompt: &str| {
            let json = serde_json::json!({"format": "hermes", "prompt": prompt}).to_string();
            Settings::parse(&json, None).unwrap().1.in_reasoning
        };
        assert!(reasoning("<|im_start|>assistant\n<think>\n"));
        assert!(!reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
        assert!(!reasoning("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n"));
    }
}
