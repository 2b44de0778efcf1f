//! The normalizers and pre-tokenizers of a file. This module runs those with an expression from the
//! file, with bounded steps. The crate runs all others.

use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use tokenizers::pattern::Invert;
use tokenizers::{
    NormalizedString, Normalizer, NormalizerWrapper, PreTokenizedString, PreTokenizer, PreTokenizerWrapper, SplitDelimiterBehavior,
};

use super::check::{self, PipelinePart};
use super::cuts::is_known_split;
use super::regex::{BoundedRegex, Steps};

/// The normalizers, in order.
#[derive(Debug)]
pub(super) struct Normalizers(Vec<NormalizerPart>);

#[derive(Debug)]
enum NormalizerPart {
    Replace { regex: BoundedRegex, content: String },
    Other(NormalizerWrapper),
}

impl Normalizers {
    pub fn new(section: &Json) -> Result<Option<Normalizers>, String> {
        Ok(each(section, "normalizer", "normalizers", normalizer)?.map(Normalizers))
    }
}

fn normalizer((field, kind, part): PipelinePart) -> Result<NormalizerPart, String> {
    match part["pattern"]["Regex"].as_str() {
        Some(regex) if kind == "Replace" => {
            let content = part["content"].as_str().unwrap_or_default().to_string();
            Ok(NormalizerPart::Replace { regex: BoundedRegex::new(regex)?, content })
        }
        _ => read(&field, part).map(NormalizerPart::Other),
    }
}

impl Normalizer for Normalizers {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        let steps = Steps::new();
        self.0.iter().try_for_each(|part| match part {
            NormalizerPart::Replace { regex, content } => text.replace(regex.bounded(&steps), content),
            NormalizerPart::Other(other) => other.normalize(text),
        })
    }
}

/// The pre-tokenizers, in order.
#[derive(Debug)]
pub(super) struct PreTokenizers(Vec<PreTokenizerPart>);

#[derive(Debug)]
enum PreTokenizerPart {
    Split { regex: BoundedRegex, behavior: SplitDelimiterBehavior, invert: bool },
    Other(PreTokenizerWrapper),
}

impl PreTokenizers {
    pub fn new(section: &Json) -> Result<Option<PreTokenizers>, String> {
        Ok(each(section, "pre_tokenizer", "pretokenizers", pre_tokenizer)?.map(PreTokenizers))
    }
}

fn pre_tokenizer((field, kind, part): PipelinePart) -> Result<PreTokenizerPart, String> {
    match part["pattern"]["Regex"].as_str() {
        Some(regex) if kind == "Split" && !is_known_split(part) => Ok(PreTokenizerPart::Split {
            regex: BoundedRegex::new(regex)?,
            behavior: read(&format!("{field}.behavior"), &part["behavior"])?,
            invert: read(&format!("{field}.invert"), &part["invert"])?,
        }),
        _ => read(&field, part).map(PreTokenizerPart::Other),
    }
}

impl PreTokenizer for PreTokenizers {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        let steps = Steps::new();
        self.0.iter().try_for_each(|part| match part {
            PreTokenizerPart::Split { regex, behavior, invert } => text.split(|_, part| match *invert {
                true => part.split(Invert(regex.bounded(&steps)), *behavior),
                false => part.split(regex.bounded(&steps), *behavior),
            }),
            PreTokenizerPart::Other(other) => other.pre_tokenize(text),
        })
    }
}

/// Builds each part of a section. Returns None if the file does not have the section.
fn each<T>(section: &Json, name: &str, list: &str, build: impl Fn(PipelinePart) -> Result<T, String>) -> Result<Option<Vec<T>>, String> {
    if section.is_null() {
        return Ok(None);
    }
    check::parts(section, name, list)?.into_iter().map(build).collect::<Result<_, _>>().map(Some)
}

fn read<T: DeserializeOwned>(field: &str, value: &Json) -> Result<T, String> {
    T::deserialize(value).map_err(|e| format!("{field}: not a valid tokenizer: {e}"))
}
