//! Regular expressions of tokenizer files. The number of steps of their searches is bounded.
//!
//! Oniguruma can limit the backtracking steps of a match. It does not count the characters of a
//! repetition without backtracking: `x++`, `(?=x*)`, or `x*y` if no x is a y. Every search
//! therefore runs an equivalent expression in which each repetition counts (see [`counted`]), and
//! adds up the steps of all its matches.

mod counted;

use std::cell::Cell;

use onig::{MatchParam, Regex, SearchOptions};
use tokenizers::Offsets;
use tokenizers::pattern::Pattern;

const ONIGERR_RETRY_LIMIT_IN_MATCH_OVER: i32 = -17;
const MAX_BYTES: usize = 2048;
/// Limit on the steps of all searches of a call: a base, plus a number per byte of text, up to a
/// maximum. Patterns of published tokenizers take one to ten steps per byte. A step takes 10 to 50
/// ns.
const MIN_STEPS: u64 = 1 << 22;
const STEPS_PER_BYTE: u64 = 512;
const MAX_STEPS: u64 = 1 << 28;
/// Initial limit on the steps of a match. Most matches take fewer.
const FIRST_STEPS: u32 = 64;
/// Maximum number of backtracking positions, of about 50 bytes each.
const MAX_STACK: u32 = 2 << 20;

#[derive(Debug)]
pub(super) struct BoundedRegex {
    regex: Regex,
    /// The expression of the file, for messages.
    text: String,
}

impl BoundedRegex {
    /// Checks and compiles an expression. The error describes its problem.
    pub fn new(text: &str) -> Result<BoundedRegex, String> {
        if text.len() > MAX_BYTES {
            return Err(format!("too long ({} bytes, limit {MAX_BYTES})", text.len()));
        }
        let counted = counted::counted(text)?;
        let invalid = |e: onig::Error| format!("not a regular expression ({})", e.description());
        Regex::new(text).map_err(invalid)?;
        Ok(BoundedRegex { regex: Regex::new(&counted).map_err(invalid)?, text: text.to_string() })
    }

    /// Returns a pattern that takes its steps from `steps`.
    pub fn bounded<'a>(&'a self, steps: &'a Steps) -> Search<'a> {
        Search { regex: self, steps }
    }
}

/// Steps of all searches of one call.
#[derive(Debug)]
pub(super) struct Steps {
    allowed: Cell<u64>,
    taken: Cell<u64>,
}

impl Steps {
    pub fn new() -> Steps {
        Steps { allowed: Cell::new(MIN_STEPS), taken: Cell::new(0) }
    }

    fn allow(&self, bytes: usize) {
        self.allowed.set(MAX_STEPS.min(self.allowed.get().saturating_add(STEPS_PER_BYTE.saturating_mul(bytes as u64))));
    }

    fn take(&self, count: u32) -> Result<(), String> {
        let taken = self.taken.get() + u64::from(count);
        self.taken.set(taken);
        if taken > self.allowed.get() {
            return Err(format!("takes more than {} steps", self.allowed.get()));
        }
        Ok(())
    }
}

/// An expression with the steps that it may take.
#[derive(Clone, Copy)]
pub(super) struct Search<'a> {
    regex: &'a BoundedRegex,
    steps: &'a Steps,
}

impl Search<'_> {
    /// Returns the length of the match at `at`.
    fn match_at(&self, text: &str, at: usize) -> Result<Option<usize>, String> {
        let failed = |problem: &str| format!("the pattern {:?} {problem} in {} bytes", self.regex.text, text.len());
        let mut limit = FIRST_STEPS;
        loop {
            self.steps.take(limit).map_err(|problem| failed(&problem))?;
            let mut param = MatchParam::default();
            param.set_retry_limit_in_match(limit);
            param.set_match_stack_limit(MAX_STACK);
            match self.regex.regex.match_with_param(text, at, SearchOptions::SEARCH_OPTION_NONE, None, param) {
                Ok(length) => return Ok(length),
                // Oniguruma does not report the number of steps of a match. Doubling the limit
                // counts at most four times the real number.
                Err(e) if e.code() == ONIGERR_RETRY_LIMIT_IN_MATCH_OVER => limit = limit.saturating_mul(2),
                Err(e) => return Err(failed(&format!("fails ({})", e.description()))),
            }
        }
    }
}

impl Pattern for Search<'_> {
    /// Finds the matches that the crate finds with the original expression.
    fn find_matches(&self, text: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        if text.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        self.steps.allow(text.len());
        let mut found = Vec::new();
        let (mut at, mut end) = (0, None);
        while at <= text.len() {
            match self.match_at(text, at)? {
                // An empty match directly after another one does not count.
                Some(length) if length > 0 || end != Some(at) => {
                    let before = end.unwrap_or(0);
                    found.extend((before < at).then_some(((before, at), false)));
                    at += length;
                    found.push(((at - length, at), true));
                    end = Some(at);
                }
                _ => at += text[at..].chars().next().map_or(1, char::len_utf8),
            }
        }
        let before = end.unwrap_or(0);
        found.extend((before < text.len()).then_some(((before, text.len()), false)));
        Ok(found)
    }
}

#[cfg(test)]
mod tests;
