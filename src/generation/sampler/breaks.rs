//! The places in a sequence where a sequence breaker of DRY ends, independent of the tokenization
//! of the breaker.
//!
//! Most breakers are parts of longer tokens, such as `":` or ` "`. llama.cpp
//! (`get_overlapping_token_sequences`, after koboldcpp's pull request 982) also uses every token
//! whose text contains a breaker, and tokens that end with its beginning if the rest follows. It
//! knows one tokenization of the rest; the search in the text accepts any.

use super::resolved::ResolvedSampling;
use super::text_matcher::MatchState;
use crate::error::{Result, try_refill};

/// The breakers in the tokens so far. Each token is searched once, when it is appended. Empty
/// without breakers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Breaks {
    /// Number of tokens.
    len: usize,
    state: MatchState,
    found: Vec<Break>,
}

/// A token in which a breaker ends.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Break {
    /// Position of the token.
    at: u32,
    /// Number of bytes of the breaker in earlier tokens, the smallest of all breakers.
    before: u32,
}

impl Breaks {
    /// Reserves memory for `more` tokens, so that `push` does not allocate.
    pub fn reserve(&mut self, rules: &ResolvedSampling, more: usize) -> Result<()> {
        if rules.breakers.is_empty() { Ok(()) } else { Ok(self.found.try_reserve(more)?) }
    }

    /// Makes this a copy of `other`, in the existing memory if it suffices.
    pub fn copy(&mut self, other: &Breaks) -> Result<()> {
        (self.len, self.state) = (other.len, other.state);
        try_refill(&mut self.found, &other.found)
    }

    /// Updates the state after the sequence was truncated to `tokens`.
    pub fn rewind(&mut self, rules: &ResolvedSampling, tokens: &[u32]) {
        while self.found.pop_if(|found| found.at as usize >= tokens.len()).is_some() {}
        self.len = tokens.len().min(self.len);
        // The state depends on as many bytes as a breaker has.
        let (mut first, mut missing) = (self.len, rules.breakers.max_len());
        while first > 0 && missing > 0 {
            first -= 1;
            missing = missing.saturating_sub(rules.bytes_of(tokens[first]).len());
        }
        let bytes = tokens[first..self.len].iter().flat_map(|&token| rules.bytes_of(token));
        self.state = bytes.fold(MatchState::default(), |state, &byte| rules.breakers.next(state, byte));
    }

    /// Adds tokens, for which `reserve` has reserved memory.
    pub fn extend(&mut self, rules: &ResolvedSampling, tokens: &[u32]) {
        if rules.breakers.is_empty() {
            return;
        }
        for &token in tokens {
            let mut shortest = None;
            for (before, &byte) in rules.bytes_of(token).iter().enumerate() {
                self.state = rules.breakers.next(self.state, byte);
                if rules.breakers.is_match(self.state) {
                    let in_earlier = rules.breakers.match_lens(self.state).map(|len| len.saturating_sub(before + 1) as u32);
                    shortest = in_earlier.chain(shortest).min();
                }
            }
            self.found.extend(shortest.map(|before| Break { at: self.len as u32, before }));
            self.len += 1;
        }
    }

    /// Returns the number of tokens after the last breaker in `tokens[first..]`, at most `max_len`.
    /// `tokens` are those that were added.
    pub fn unbroken(&self, rules: &ResolvedSampling, tokens: &[u32], first: usize, max_len: usize) -> usize {
        let after = |found: &Break| tokens.len().saturating_sub(1 + found.at as usize);
        let recent = self.found.iter().rev().take_while(|found| after(found) < max_len);
        recent.filter(|found| begins_in(rules, tokens, first, found)).map(after).next().unwrap_or(max_len)
    }
}

/// Returns whether the breaker begins in `tokens[first..]`.
fn begins_in(rules: &ResolvedSampling, tokens: &[u32], first: usize, found: &Break) -> bool {
    let earlier = tokens.get(first..found.at as usize).unwrap_or_default();
    let mut lens = earlier.iter().rev().map(|&token| rules.bytes_of(token).len());
    let mut missing = found.before as usize;
    while missing > 0 {
        let Some(len) = lens.next() else { return false };
        missing = missing.saturating_sub(len);
    }
    true
}
