//! The special tokens of a model by name, for chat templates.
//!
//! The rule is that of `AutoTokenizer.from_pretrained` in transformers 5.5.4 for a directory with a
//! `tokenizer.json`. `tests/data/special_tokens` has its results. Later sources have precedence:
//!
//! 1. The padding of `tokenizer.json` names `pad_token` if no other file has this member.
//! 2. `tokenizer_config.json` names the tokens in `NAMED`.
//! 3. `special_tokens_map.json` names them, also by null, if `tokenizer_config.json` has no
//!    `added_tokens_decoder`.
//! 4. Other members that end in `_token` name a token each: AddedTokens of `tokenizer_config.json`,
//!    then members of `special_tokens_map.json`, then strings of `tokenizer_config.json`.
//! 5. If `extra_special_tokens` is an object, it names tokens by any name, including standard ones.

use std::path::Path;

use serde_json::{Map, Value as Json};

use super::read_config;
use crate::error::{Error, Result};

const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
const NAMED: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const EXTRA: &str = "extra_special_tokens";
/// The name of `extra_special_tokens` in transformers 4.
const ADDITIONAL: &str = "additional_special_tokens";
/// Member in which transformers collects tokens with other names.
const SPECIFIC: &str = "model_specific_special_tokens";
const DECODER: &str = "added_tokens_decoder";
/// Members of `tokenizer_config.json` that end in `_token` but name no token.
const FLAGS: [&str; 2] = ["add_bos_token", "add_eos_token"];

/// The special tokens by name: `bos_token`, `eos_token`, and the names that the model adds.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    /// Strings, and null for a standard name that a file sets to null.
    tokens: Map<String, Json>,
}

impl SpecialTokens {
    /// Reads `special_tokens_map.json` in `dir`, and merges it with `config`, the JSON of
    /// `tokenizer_config.json`. `padding` is the token with which `tokenizer.json` pads.
    ///
    /// # Errors
    /// A token is neither a string nor an AddedToken, or a collection of tokens has another type.
    pub fn load(dir: &Path, config: &Json, padding: Option<&str>) -> Result<SpecialTokens> {
        let mut settings = from_config(config);
        match config.get(DECODER) {
            None => merge(&mut settings, read_config(&dir.join(MAP))?).map_err(|reason| refused(dir, &reason))?,
            Some(decoder) => check_decoder(decoder).map_err(|reason| refused(dir, &reason))?,
        }
        if let Some(padding) = padding {
            settings.entry("pad_token").or_insert_with(|| padding.into());
        }
        let tokens = resolve(settings).map_err(|reason| refused(dir, &reason))?;
        Ok(SpecialTokens { tokens })
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.tokens.get(name).and_then(Json::as_str)
    }

    /// Returns the token of a name, or `default` if no file has this member, not even as null.
    pub fn get_or<'a>(&'a self, name: &str, default: &'a str) -> Option<&'a str> {
        self.tokens.get(name).map_or(Some(default), Json::as_str)
    }

    /// Iterates over the names and the tokens, which are strings.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Json)> {
        self.tokens.iter().filter(|(_, token)| token.is_string()).map(|(name, token)| (name.as_str(), token))
    }
}

/// Returns the members of `tokenizer_config.json` that name tokens. Tokens with other names are
/// under `SPECIFIC`.
fn from_config(config: &Json) -> Map<String, Json> {
    let members = config.as_object().into_iter().flatten();
    let relevant = members.filter(|(name, _)| names_tokens(name) && !FLAGS.contains(&name.as_str()));
    let mut settings: Map<String, Json> = relevant.map(|(name, value)| (name.clone(), value.clone())).collect();
    if let Some(additional) = settings.shift_remove(ADDITIONAL) {
        settings.entry(EXTRA).or_insert(additional);
    }
    let mut specific = Map::new();
    settings.retain(|name, value| {
        let is_specific = name.ends_with("_token") && !NAMED.contains(&name.as_str()) && value.is_string();
        if is_specific {
            specific.insert(name.clone(), value.take());
        }
        !is_specific
    });
    specific.extend(take_object(&mut settings, EXTRA));
    if !specific.is_empty() {
        settings.insert(SPECIFIC.into(), Json::Object(specific));
    }
    settings
}

fn names_tokens(member: &str) -> bool {
    member.ends_with("_token") || [EXTRA, ADDITIONAL, SPECIFIC].contains(&member)
}

/// Removes and returns a member if it is an object.
fn take_object(settings: &mut Map<String, Json>, name: &str) -> Map<String, Json> {
    match settings.get_mut(name).map(Json::take) {
        Some(Json::Object(object)) => {
            settings.shift_remove(name);
            object
        }
        Some(other) => {
            settings.insert(name.into(), other);
            Map::new()
        }
        None => Map::new(),
    }
}

/// Merges the members of `special_tokens_map.json`, including null, into those of
/// `tokenizer_config.json`. They have precedence.
fn merge(settings: &mut Map<String, Json>, mut map: Json) -> std::result::Result<(), String> {
    let Some(map) = map.as_object_mut() else { return Ok(()) };
    for (name, value) in map.iter_mut().filter(|(name, _)| names_tokens(name)) {
        let value = match value {
            Json::Object(token) if name != EXTRA => content(token).ok_or_else(|| no_content(name))?.into(),
            value => value.take(),
        };
        settings.insert(name.clone(), value);
    }
    let extra = take_object(settings, EXTRA);
    if extra.is_empty() {
        return Ok(());
    }
    match settings.entry(SPECIFIC).or_insert_with(|| Json::Object(Map::new())) {
        Json::Object(specific) => specific.extend(extra),
        other => return Err(format!("{SPECIFIC} is {}; give an object of tokens by name", shown(other))),
    }
    Ok(())
}

fn check_decoder(decoder: &Json) -> std::result::Result<(), String> {
    let tokens = decoder.as_object().ok_or_else(|| format!("{DECODER} is {}; give an object of AddedTokens by id", shown(decoder)))?;
    match tokens.iter().find(|(_, token)| !token.is_object()) {
        Some((id, token)) => Err(format!("{DECODER} has {} for {id}; give an AddedToken", shown(token))),
        None => Ok(()),
    }
}

fn resolve(mut settings: Map<String, Json>) -> std::result::Result<Map<String, Json>, String> {
    let specific = match settings.shift_remove(SPECIFIC) {
        None | Some(Json::Null) => Map::new(),
        Some(Json::Object(specific)) => specific,
        Some(other) => return Err(format!("{SPECIFIC} is {}; give an object of tokens by name", shown(&other))),
    };
    let additional = settings.shift_remove(ADDITIONAL);
    match settings.shift_remove(EXTRA).or(additional) {
        None | Some(Json::Null | Json::Array(_)) => {}
        Some(other) => return Err(format!("{EXTRA} is {}; give an array, or an object of tokens by name", shown(&other))),
    }
    let mut tokens = Map::new();
    for (name, value) in settings {
        if NAMED.contains(&name.as_str()) {
            let token = if value.is_null() { value } else { required_token(&name, &value)? };
            tokens.insert(name, token);
        } else if let Some(token) = added_token(&value) {
            tokens.insert(name, token.into());
        }
    }
    for (name, value) in specific {
        let token = required_token(&name, &value)?;
        tokens.insert(name, token);
    }
    Ok(tokens)
}

/// Returns the text of a token: a string, or an AddedToken in the form of `tokenizer_config.json`.
fn added_token(value: &Json) -> Option<&str> {
    match value {
        Json::String(token) => Some(token),
        Json::Object(token) if token.get("__type").is_some_and(|kind| kind == "AddedToken") => content(token),
        _ => None,
    }
}

/// Returns the text of a required token. An object without `__type` counts as an AddedToken, too.
/// Transformers refuses such a directory, so no other meaning is possible.
fn required_token(name: &str, value: &Json) -> std::result::Result<Json, String> {
    let untyped = || if value.get("__type").is_none() { value["content"].as_str() } else { None };
    let token = added_token(value).or_else(untyped);
    token.map(Json::from).ok_or_else(|| match value {
        Json::Object(_) => no_content(name),
        _ => format!("{name} is {}; give a string, or an AddedToken with its content", shown(value)),
    })
}

/// Returns the content of an AddedToken, which is empty by default.
fn content(token: &Map<String, Json>) -> Option<&str> {
    match token.get("content") {
        None | Some(Json::Null) => Some(""),
        Some(content) => content.as_str(),
    }
}

fn no_content(name: &str) -> String {
    format!("{name} is an object without a text as its content; give a string, or an AddedToken")
}

/// Returns a value for a message, shortened because files may have large ones.
fn shown(value: &Json) -> String {
    const MAX_SHOWN: usize = 80;
    match value {
        Json::Array(items) => format!("an array of {}", items.len()),
        Json::Object(members) => format!("an object of {}", members.len()),
        Json::String(text) if text.len() > MAX_SHOWN => format!("a string of {} bytes", text.len()),
        value => value.to_string(),
    }
}

fn refused(dir: &Path, reason: &str) -> Error {
    Error::model(format!("{}: in {CONFIG} or {MAP}, {reason}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{check_cases, fresh_dir, special_tokens_golden, write_case};
    use super::super::tokenizer::Tokenizer;
    use super::*;
    use serde_json::json;

    /// Cases that transformers refuses although they have one meaning only: an AddedToken without
    /// its type.
    const TAKEN: [&str; 5] = [
        "object without a type",
        "extra tokens by name as objects",
        "map with extra names as objects",
        "a list of additional objects",
        "map with additional objects",
    ];

    #[test]
    fn golden_special_tokens_equal_those_of_transformers() {
        let golden = special_tokens_golden("special_tokens.json");
        let load = |case: &Json| {
            let dir = fresh_dir("special-tokens");
            write_case(&dir, &golden["tokenizer"], &case["files"]);
            let tokenizer = Tokenizer::load(&dir.join("tokenizer.json")).unwrap();
            SpecialTokens::load(&dir, &read_config(&dir.join(CONFIG)).unwrap(), tokenizer.padding_token())
        };
        check_cases(&golden, &TAKEN, load, |name, case, tokens| {
            let tokens = tokens.iter().map(|(name, token)| (name.to_string(), token.clone())).collect();
            assert_eq!(Json::Object(tokens), case["special_tokens_map"], "{name}");
        });
    }

    #[test]
    fn token_is_found_by_its_name() {
        let config = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": null,
            "extra_special_tokens": {"image": "<i>"}});
        let tokens = SpecialTokens::load(Path::new("/nowhere"), &config, None).unwrap();
        assert_eq!((tokens.get("bos_token"), tokens.get("eos_token")), (Some("<s>"), Some("</s>")));
        assert_eq!((tokens.get("image"), tokens.get("pad_token")), (Some("<i>"), None));
        assert_eq!((tokens.get_or("unk_token", "<unk>"), tokens.get_or("pad_token", "<pad>")), (Some("<unk>"), None));
        assert_eq!(tokens.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["bos_token", "eos_token", "image"]);
    }

    #[test]
    fn refusal_names_the_member_and_its_value() {
        let cases = [
            (json!({"eos_token": 7}), "eos_token is 7; give a string"),
            (json!({"eos_token": ["</s>"]}), "eos_token is an array of 1; give a string"),
            (json!({"eos_token": {"content": 7}}), "eos_token is an object without a text as its content"),
            (json!({"extra_special_tokens": "<x>"}), "extra_special_tokens is \"<x>\"; give an array"),
            (json!({"extra_special_tokens": "x".repeat(1000)}), "extra_special_tokens is a string of 1000 bytes; give"),
            (json!({"model_specific_special_tokens": []}), "model_specific_special_tokens is an array of 0; give an object"),
            (json!({"added_tokens_decoder": null}), "added_tokens_decoder is null; give an object"),
            (json!({"added_tokens_decoder": {"4": "<s>"}}), "added_tokens_decoder has \"<s>\" for 4; give an AddedToken"),
        ];
        for (config, reason) in cases {
            let error = SpecialTokens::load(Path::new("/nowhere"), &config, None).unwrap_err();
            assert!(error.message().contains(reason), "{error}");
        }
    }
}
