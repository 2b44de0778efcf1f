//! Reads a pattern character by character, and creates errors with positions.

use super::{Node, PatternError};

pub struct Reader<'a> {
    pattern: &'a str,
    chars: Vec<char>,
    at: usize,
    language: &'static str,
}

impl<'a> Reader<'a> {
    pub fn new(pattern: &'a str, language: &'static str) -> Reader<'a> {
        Reader { pattern, chars: pattern.chars().collect(), at: 0, language }
    }

    pub fn at(&self) -> usize {
        self.at
    }

    pub fn go_to(&mut self, at: usize) {
        self.at = at;
    }

    pub fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    /// Returns the character `ahead` places after the next one.
    pub fn peek_at(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    pub fn next(&mut self) -> Option<char> {
        let next = self.peek();
        self.at += usize::from(next.is_some());
        next
    }

    /// Skips these characters if they are next.
    pub fn take(&mut self, text: &str) -> bool {
        let found = text.chars().enumerate().all(|(i, c)| self.peek_at(i) == Some(c));
        if found {
            self.at += text.chars().count();
        }
        found
    }

    pub fn take_while(&mut self, limit: usize, is: impl Fn(char) -> bool) -> String {
        let end = (self.at..self.chars.len().min(self.at.saturating_add(limit))).find(|&i| !is(self.chars[i]));
        let end = end.unwrap_or(self.chars.len().min(self.at.saturating_add(limit)));
        let taken = self.chars[self.at..end].iter().collect();
        self.at = end;
        taken
    }

    /// Reads a number of exactly `digits` hexadecimal digits. Otherwise reads nothing.
    pub fn hex(&mut self, digits: usize) -> Option<u32> {
        let start = self.at;
        let text = self.take_while(digits, |c| c.is_ascii_hexdigit());
        if text.len() == digits {
            return u32::from_str_radix(&text, 16).ok();
        }
        self.at = start;
        None
    }

    /// Reads a decimal number. Returns `u32::MAX` for larger numbers.
    pub fn number(&mut self) -> Option<u32> {
        let digits = self.take_while(usize::MAX, |c| c.is_ascii_digit());
        (!digits.is_empty()).then(|| digits.parse().unwrap_or(u32::MAX))
    }

    /// Returns the error for a pattern that is not in the language.
    pub fn syntax(&self, problem: impl Into<String>, at: usize, remedy: &'static str) -> PatternError {
        self.error(problem.into(), at, remedy, true)
    }

    /// Returns the error for a valid pattern that this library does not support.
    pub fn unsupported(&self, problem: impl Into<String>, at: usize, remedy: &'static str) -> PatternError {
        self.error(problem.into(), at, remedy, false)
    }

    fn error(&self, problem: String, at: usize, remedy: &'static str, is_syntax: bool) -> PatternError {
        PatternError { problem, position: at + 1, is_syntax, remedy, language: self.language, pattern: self.pattern.into() }
    }
}

/// Reads one or more sequences separated by bars. `sequence` reads one, up to a bar or the end of
/// its group.
pub fn alternatives<'a, P>(
    parser: &mut P,
    reader: fn(&mut P) -> &mut Reader<'a>,
    sequence: fn(&mut P) -> Result<Node, PatternError>,
) -> Result<Node, PatternError> {
    let mut alternatives = vec![sequence(parser)?];
    while reader(parser).take("|") {
        alternatives.push(sequence(parser)?);
    }
    Ok(if alternatives.len() == 1 { alternatives.swap_remove(0) } else { Node::Or(alternatives) })
}
