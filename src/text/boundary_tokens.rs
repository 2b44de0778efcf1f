//! The tokens around a prompt, for tokenizer classes that replace those of `tokenizer.json`.
//!
//! Some classes of transformers 4 replace the post-processor of `tokenizer.json`. A prompt then
//! begins with `bos_token` if `add_bos_token` of `tokenizer_config.json` is true, and ends with
//! `eos_token` if `add_eos_token` is true. Models such as DeepSeek V3 rely on it. Transformers 5
//! ignores both flags. `tests/data/special_tokens` has the results of transformers 4.57, and
//! docs/models.md has a table.

use std::path::Path;

use serde_json::Value as Json;

use super::read_config;
use super::special_tokens::SpecialTokens;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

const CONFIG: &str = "tokenizer_config.json";

/// A tokenizer class that sets the tokens around a prompt, with its defaults.
struct Class {
    name: &'static str,
    bos: &'static str,
    eos: &'static str,
    add_bos: bool,
    /// Model types whose tokenizer has this class if no file names one.
    model_types: &'static [&'static str],
}

const CLASSES: [Class; 5] = [
    Class {
        name: "LlamaTokenizer",
        bos: "<s>",
        eos: "</s>",
        add_bos: true,
        model_types: &["llama", "mistral", "mixtral", "phi3", "deepseek_v2", "deepseek_v3"],
    },
    Class { name: "CodeLlamaTokenizer", bos: "<s>", eos: "</s>", add_bos: true, model_types: &[] },
    Class { name: "GemmaTokenizer", bos: "<bos>", eos: "<eos>", add_bos: true, model_types: &["gemma", "gemma2", "gemma3", "gemma3_text"] },
    Class { name: "CohereTokenizer", bos: "<BOS_TOKEN>", eos: "<|END_OF_TURN_TOKEN|>", add_bos: true, model_types: &["cohere", "cohere2"] },
    Class {
        name: "GPTNeoXTokenizer",
        bos: "<|endoftext|>",
        eos: "<|endoftext|>",
        add_bos: false,
        model_types: &["gpt_neox", "olmo2", "stablelm"],
    },
];

/// The first and last tokens of a prompt, instead of those of `tokenizer.json`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BoundaryTokens {
    first: Option<u32>,
    last: Option<u32>,
}

impl BoundaryTokens {
    /// Reads the tokens from `config`, the JSON of `tokenizer_config.json` in `dir`. Returns None
    /// if the class does not replace the tokens of `tokenizer.json`.
    ///
    /// # Errors
    /// A flag requires a token that the tokenizer does not have.
    pub fn load(dir: &Path, config: &Json, tokens: &SpecialTokens, tokenizer: &Tokenizer) -> Result<Option<BoundaryTokens>> {
        let Some(class) = find_class(dir, config)? else { return Ok(None) };
        let bos = tokens.get_or("bos_token", class.bos).and_then(|token| tokenizer.token_id(token));
        let eos = tokens.get_or("eos_token", class.eos).and_then(|token| tokenizer.token_id(token));
        let required = |flag: &str, name: &str, token: Option<u32>| {
            token.map(Some).ok_or_else(|| {
                let path = dir.join(CONFIG);
                Error::model(format!(
                    "{}: {flag} is set, but {name} is not in the vocabulary; name another {name}, or set {flag} to false",
                    path.display()
                ))
            })
        };
        let first = match config.get("add_bos_token") {
            Some(flag) if is_true(flag) => required("add_bos_token", "bos_token", bos)?,
            Some(_) => None,
            // Transformers 5 writes `backend` and omits the flag, because tokenizer.json has the
            // tokens.
            None if config.get("backend").is_some() => return Ok(None),
            None if class.add_bos && bos.is_none() => return Ok(None),
            None => bos.filter(|_| class.add_bos),
        };
        let last = match config.get("add_eos_token") {
            Some(flag) if is_true(flag) => required("add_eos_token", "eos_token", eos)?,
            _ => None,
        };
        Ok(Some(BoundaryTokens { first, last }))
    }

    /// Returns `tokens` between the first and the last token.
    pub fn around(&self, tokens: &[u32]) -> Result<Vec<u32>> {
        let mut whole = Vec::new();
        whole.try_reserve_exact(tokens.len() + 2)?;
        whole.extend(self.first);
        whole.extend_from_slice(tokens);
        whole.extend(self.last);
        Ok(whole)
    }
}

/// Returns the class that `tokenizer_config.json` or `config.json` names, or the class of the model
/// type.
fn find_class(dir: &Path, config: &Json) -> Result<Option<&'static Class>> {
    if config.is_null() {
        return Ok(None);
    }
    if let Some(name) = config["tokenizer_class"].as_str() {
        return Ok(class_named(name));
    }
    let model = read_config(&dir.join("config.json"))?;
    if let Some(name) = model["tokenizer_class"].as_str() {
        return Ok(class_named(name));
    }
    let model_type = model["model_type"].as_str().unwrap_or_default();
    Ok(CLASSES.iter().find(|class| class.model_types.contains(&model_type)))
}

/// Returns the class of this name. As in `AutoTokenizer`, a name and the name with `Fast` are the
/// same class.
fn class_named(name: &str) -> Option<&'static Class> {
    let name = name.strip_suffix("Fast").unwrap_or(name);
    CLASSES.iter().find(|class| class.name == name)
}

/// Returns true if the JSON value is true in Python.
fn is_true(value: &Json) -> bool {
    match value {
        Json::Null => false,
        Json::Bool(value) => *value,
        Json::Number(number) => number.as_f64() != Some(0.0),
        Json::String(text) => !text.is_empty(),
        Json::Array(items) => !items.is_empty(),
        Json::Object(members) => !members.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Text;
    use super::super::tests::{check_cases, fresh_dir, special_tokens_golden, write_case};
    use super::*;
    use serde_json::json;

    /// Returns the model of a case that has these files, with the vocabulary of the golden cases.
    fn load(name: &str, post_processor: &str, files: &Json) -> Result<Text> {
        let golden = special_tokens_golden("prompt_ids.json");
        let mut tokenizer = golden["tokenizer"].clone();
        tokenizer["post_processor"] = golden["post_processors"][post_processor].clone();
        let dir = fresh_dir(name);
        write_case(&dir, &tokenizer, files);
        Text::load(&dir)
    }

    fn encoded(name: &str, post_processor: &str, config: Json) -> Vec<u32> {
        load(name, post_processor, &json!({"tokenizer_config.json": config})).unwrap().encode("c", true).unwrap()
    }

    /// Cases that transformers 4 refuses and transformers 5 accepts. The tokens of `tokenizer.json`
    /// apply.
    const TAKEN: [&str; 3] = [
        "bos_token null without flags",
        "CodeGenTokenizerFast, add_bos_token true, byte level",
        "CodeGenTokenizerFast, add_bos_token true, both",
    ];

    #[test]
    fn golden_prompts_equal_the_tokens_of_transformers_4() {
        let golden = special_tokens_golden("prompt_ids.json");
        let text = golden["text"].as_str().unwrap();
        let load = |case: &Json| load("boundary", case["post_processor"].as_str().unwrap(), &case["files"]);
        check_cases(&golden, &TAKEN, load, |name, case, model| {
            assert_eq!(json!(model.encode(text, true).unwrap()), case["ids"], "{name}");
            assert_eq!(json!(model.encode(text, false).unwrap()), case["ids_plain"], "{name}");
        });
    }

    #[test]
    fn absent_flag_without_a_token_keeps_the_tokens_of_the_tokenizer() {
        let config = json!({"tokenizer_class": "LlamaTokenizer", "bos_token": null});
        assert_eq!(encoded("absent-flag", "both", config), [4, 2, 5]);
    }

    #[test]
    fn absent_flag_in_files_of_transformers_5_keeps_the_tokens_of_the_tokenizer() {
        let config = json!({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "backend": "tokenizers"});
        assert_eq!(encoded("backend", "none", config.clone()), [2]);
        let mut flagged = config;
        flagged["add_bos_token"] = true.into();
        assert_eq!(encoded("backend", "none", flagged), [4, 2]);
    }

    #[test]
    fn directory_without_a_tokenizer_config_has_the_tokens_of_the_tokenizer() {
        let files = json!({"config.json": {"model_type": "llama"}});
        assert_eq!(load("no-config", "last", &files).unwrap().encode("c", true).unwrap(), [2, 5]);
    }

    #[test]
    fn flag_for_a_token_that_the_vocabulary_lacks_is_an_error() {
        let config = json!({"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "bos_token": "<nowhere>"});
        let error = load("lacking", "none", &json!({"tokenizer_config.json": config})).unwrap_err();
        assert!(error.message().contains("add_bos_token is set, but bos_token is not in the vocabulary"), "{error}");
    }
}
