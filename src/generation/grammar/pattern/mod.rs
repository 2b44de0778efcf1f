//! Translates regular expressions of other languages for llguidance, which uses the dialect of the
//! Rust crate `regex`.
//!
//! A pattern is parsed by the rules of its language ([`ecma`], [`python`]) into a [`Node`].
//! [`anchors`] removes the anchors. [`Language`] writes the rest in an unambiguous subset of the
//! Rust dialect: every character except ASCII letters and digits is an escape, and a class consists
//! of ranges.

mod anchors;
mod class;
mod ecma;
mod fold;
mod language;
mod python;
mod reader;

use std::fmt;

use class::Class;
pub use language::Language;
pub use python::Flags;

/// Maximum size of a translation in bytes. The compiler of llguidance takes about 50 ms for it.
const MAX_BYTES: usize = 1 << 20;
/// Maximum nesting of groups. The parsers and the crate `regex-syntax` recurse into them.
const MAX_DEPTH: usize = 60;

/// A parsed pattern.
#[derive(Debug, Clone, PartialEq)]
enum Node {
    Class(Class),
    Concat(Vec<Node>),
    Or(Vec<Node>),
    /// Minimum and maximum number of repetitions.
    Repeat(Box<Node>, u32, Option<u32>),
    /// Start of the text.
    Start,
    /// End of the text.
    End,
    /// End of the text, or before a line feed that ends the text.
    EndOrNewline,
}

/// The reason why a pattern cannot be translated.
#[derive(Debug, Clone, PartialEq)]
pub struct PatternError {
    problem: String,
    /// Position in characters, from 1.
    position: usize,
    /// True if the pattern is a syntax error in its language. False if it is valid, but this
    /// library does not support it.
    is_syntax: bool,
    remedy: &'static str,
    language: &'static str,
    pattern: String,
}

impl fmt::Display for PatternError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX_CHARS: usize = 100;
        let PatternError { problem, position, remedy, language, pattern, .. } = self;
        let shown: String = pattern.chars().take(MAX_CHARS).collect();
        let more = if shown.len() < pattern.len() { "..." } else { "" };
        write!(f, "{problem} (character {position} of the {language} regular expression /{shown}{more}/); {remedy}")
    }
}

/// Returns the texts in which a pattern of ECMA-262 finds a match, as in JSON Schema. A pattern
/// that is invalid in Unicode mode is read by the rules of annex B.
pub fn ecma_search(pattern: &str) -> Result<Language, PatternError> {
    checked(anchors::searched(&ecma::parse(pattern)?), ecma::LANGUAGE, pattern)
}

/// Returns the texts that a pattern of Python's `re` matches as a whole.
pub fn python_full_match(pattern: &str, flags: Flags) -> Result<Language, PatternError> {
    checked(anchors::matched_whole(&python::parse(pattern, flags)?), python::LANGUAGE, pattern)
}

fn checked(language: Language, name: &'static str, pattern: &str) -> Result<Language, PatternError> {
    if language.size() <= MAX_BYTES {
        return Ok(language);
    }
    Err(PatternError {
        problem: format!("the translation is too large ({} bytes, limit {MAX_BYTES})", language.size()),
        position: 1,
        is_syntax: false,
        remedy: "simplify it",
        language: name,
        pattern: pattern.into(),
    })
}

#[cfg(test)]
mod tests;
