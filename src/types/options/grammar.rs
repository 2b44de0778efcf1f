//! Grammars that restrict outputs.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, try_concat, try_texts};

/// A description of the allowed outputs of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Grammar {
    /// A JSON text that matches this JSON schema.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// A text that matches this regular expression of Python's `re` completely.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's dialect of Lark, with regular expressions of Python's
    /// `re`.
    Lark(String),
}

impl Grammar {
    /// The limit in bytes. The compilation of a grammar of this size can take seconds.
    const MAX_BYTES: usize = 256 << 10;

    /// Copies the grammar. Fails if the system has no memory.
    pub fn try_clone(&self) -> Result<Grammar> {
        let copy = |text: &String| try_concat(&[text]);
        Ok(match self {
            Grammar::JsonSchema(text) => Grammar::JsonSchema(copy(text)?),
            Grammar::JsonObject => Grammar::JsonObject,
            Grammar::Regex(text) => Grammar::Regex(copy(text)?),
            Grammar::Choice(texts) => Grammar::Choice(try_texts(texts)?),
            Grammar::Lark(text) => Grammar::Lark(copy(text)?),
        })
    }

    /// Checks the size of the grammar.
    pub fn validate(&self) -> Result<()> {
        let bytes = match self {
            Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text.len(),
            Grammar::Choice(texts) if texts.is_empty() => {
                return Err(Error::invalid("choices is empty; pass at least one text"));
            }
            Grammar::Choice(texts) => texts.iter().map(String::len).sum(),
            Grammar::JsonObject => 0,
        };
        if bytes > Self::MAX_BYTES {
            return Err(Error::invalid(format!("the grammar is too large ({bytes} bytes, at most {}); shorten it", Self::MAX_BYTES)));
        }
        Ok(())
    }
}
