//! Lark grammars for llguidance. Regular expressions are those of Python, as in Lark. A schema
//! after "%json" is prepared like any other schema.

use serde_json::{Deserializer, Value as Json};

use super::pattern::Flags;
use super::schema::{Patterns, Prepared, WorkLimit};
use super::{pattern, schema};

/// A part of a grammar.
enum GrammarPart<'a> {
    /// A regular expression: the pattern and its flags.
    Regex(&'a str, &'a str),
    /// "%json" and the schema after it.
    Schema(Json),
    Other,
}

/// Rewrites the grammar and keeps its lines. The error describes the problem.
pub fn prepare(text: &str, check: impl Fn(&Json) -> Result<(), String>) -> Result<(String, Patterns), String> {
    let mut out = String::with_capacity(text.len());
    let mut patterns = Patterns::default();
    let mut budget = WorkLimit::new();
    let mut at = 0;
    while at < text.len() {
        let (part, length) = part(&text[at..]);
        let source = &text[at..at + length];
        let line = || text[..at].matches('\n').count() + 1;
        match part {
            GrammarPart::Regex(regex, flags) => {
                let translation = translate(regex, flags, &mut budget).map_err(|why| format!("line {}: {why}", line()))?;
                // An empty expression would be `//`, which begins a comment.
                out.push_str(&format!("/{}/", if translation.is_empty() { "(?:)" } else { &translation }));
            }
            GrammarPart::Schema(schema) => {
                check(&schema)?;
                let prepared: Prepared = schema::prepare(schema, &mut budget).map_err(|why| format!("line {}: {why}", line()))?;
                let (json, breaks) = (prepared.schema.to_string(), "\n".repeat(source.matches('\n').count()));
                out.push_str(&format!("%json {breaks}{json}"));
                patterns.extend(prepared.patterns);
            }
            GrammarPart::Other => out.push_str(source),
        }
        at += length;
    }
    Ok((out, patterns))
}

fn translate(regex: &str, flags: &str, budget: &mut WorkLimit) -> Result<String, String> {
    if flags.contains('l') {
        return Err("the flag l of a regular expression is not supported; leave it out".into());
    }
    let flags = Flags {
        ignore_case: flags.contains('i'),
        multiline: flags.contains('m'),
        dot_all: flags.contains('s'),
        verbose: flags.contains('x'),
        properties: true,
        ..Flags::default()
    };
    let language = pattern::python_full_match(regex, flags).map_err(|error| error.to_string())?;
    budget.translate(language.size())?;
    Ok(language.to_regex())
}

/// Returns the first part of the text and its length in bytes, by the rules of llguidance's lexer
/// for grammars. A part that this lexer refuses is returned unchanged.
fn part(text: &str) -> (GrammarPart<'_>, usize) {
    let bytes = text.as_bytes();
    let first = text.chars().next().map_or(1, char::len_utf8);
    match bytes[0] {
        b'#' => (GrammarPart::Other, text.find('\n').unwrap_or(text.len())),
        b'/' if bytes.get(1) == Some(&b'/') => (GrammarPart::Other, text.find('\n').unwrap_or(text.len())),
        b'/' => match closing(bytes, b'/') {
            Some(end) => {
                let flags = text[end + 1..].bytes().take_while(|byte| b"imslux".contains(byte)).count();
                (GrammarPart::Regex(&text[1..end], &text[end + 1..end + 1 + flags]), end + 1 + flags)
            }
            None => (GrammarPart::Other, first),
        },
        b'"' => (GrammarPart::Other, closing(bytes, b'"').map_or(first, |end| end + 1)),
        b'<' => (GrammarPart::Other, special_token(text).unwrap_or(first)),
        b'%' => keyword(text).unwrap_or((GrammarPart::Other, first)),
        _ => (GrammarPart::Other, first),
    }
}

/// Returns the position of the closing byte. The first byte is the opening one, and a backslash
/// escapes one character.
fn closing(bytes: &[u8], close: u8) -> Option<usize> {
    let mut i = 1;
    while i < bytes.len() && bytes[i] != close {
        i += if bytes[i] == b'\\' { 2 } else { 1 };
    }
    (i < bytes.len()).then_some(i)
}

/// Returns the length of a special token, `<name>`.
fn special_token(text: &str) -> Option<usize> {
    let end = text[1..].find(|c: char| c == '<' || c == '>' || c.is_whitespace())? + 1;
    (text[end..].starts_with('>') && end > 1).then_some(end + 1)
}

/// Returns a keyword with the JSON after it.
fn keyword(text: &str) -> Option<(GrammarPart<'_>, usize)> {
    let name = ["%json", "%llguidance", "%regex"].into_iter().find(|name| text.starts_with(name))?;
    let mut values = Deserializer::from_str(&text[name.len()..]).into_iter::<Json>();
    let value = values.next()?.ok()?;
    let length = name.len() + values.byte_offset();
    Some((if name == "%json" { GrammarPart::Schema(value) } else { GrammarPart::Other }, length))
}
