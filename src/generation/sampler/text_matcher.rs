//! Search for several texts in a stream of bytes, by one Aho-Corasick automaton (Aho and Corasick
//! 1975). A byte costs the same for any number and length of the texts, on average over the stream.

use aho_corasick::Anchored;
use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::{contiguous, noncontiguous};

use crate::error::{Error, Result};

/// The texts of one request. It is immutable: all sequences of the request share it, and each has a
/// `MatchState`.
///
/// The contiguous form of the automaton has a known size: one state for each byte of the texts, of
/// three words, or more for states with several successors.
#[derive(Debug, Clone, Default)]
pub struct TextMatcher {
    /// `None` without texts.
    automaton: Option<contiguous::NFA>,
    /// The number of bytes that each state stands for, ordered by state.
    depths: Vec<(StateID, u32)>,
}

/// A position in a stream: the longest end of the bytes so far that is the beginning of a text.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct MatchState(Option<StateID>);

impl TextMatcher {
    pub fn new(texts: &[String]) -> Result<TextMatcher> {
        if texts.is_empty() {
            return Ok(TextMatcher::default());
        }
        let failed = |error| Error::internal(format!("the automaton of {} texts cannot be built: {error}", texts.len()));
        // Dense states are faster, but their size depends on the alphabet. One is enough: the start.
        let sparse = noncontiguous::Builder::new().prefilter(false).dense_depth(1).build(texts).map_err(failed)?;
        let automaton = contiguous::Builder::new().dense_depth(1).build_from_noncontiguous(&sparse).map_err(failed)?;
        let mut matcher = TextMatcher { automaton: Some(automaton), depths: Vec::new() };
        matcher.measure_depths(texts)?;
        Ok(matcher)
    }

    /// The automaton does not expose the depth of a state. The beginnings of the texts lead to all
    /// states.
    fn measure_depths(&mut self, texts: &[String]) -> Result<()> {
        let mut depths = Vec::new();
        depths.try_reserve_exact(texts.iter().map(String::len).sum())?;
        for text in texts {
            let mut state = MatchState::default();
            for (before, &byte) in text.as_bytes().iter().enumerate() {
                state = self.next(state, byte);
                depths.extend(state.0.map(|id| (id, before as u32 + 1)));
            }
        }
        depths.sort_unstable();
        depths.dedup();
        self.depths = depths;
        Ok(())
    }

    pub fn is_empty(&self) -> bool {
        self.automaton.is_none()
    }

    /// Returns the length of the longest text, or 0 without texts.
    pub fn max_len(&self) -> usize {
        self.automaton.as_ref().map_or(0, Automaton::max_pattern_len)
    }

    /// Returns the state after one more byte.
    pub fn next(&self, state: MatchState, byte: u8) -> MatchState {
        MatchState(self.automaton.as_ref().map(|automaton| automaton.next_state(Anchored::No, state.0.unwrap_or(start(automaton)), byte)))
    }

    /// Returns whether a text ends at this position.
    pub fn is_match(&self, state: MatchState) -> bool {
        self.automaton.as_ref().zip(state.0).is_some_and(|(automaton, id)| automaton.is_match(id))
    }

    /// Returns the texts that end at this position: their lengths and their indices.
    pub fn matches(&self, state: MatchState) -> impl Iterator<Item = (usize, usize)> {
        let matching = self.automaton.as_ref().zip(state.0).filter(|(automaton, id)| automaton.is_match(*id));
        matching.into_iter().flat_map(|(automaton, id)| {
            let patterns = (0..automaton.match_len(id)).map(move |i| automaton.match_pattern(id, i));
            patterns.map(|pattern| (automaton.pattern_len(pattern), pattern.as_usize()))
        })
    }

    /// Returns the lengths of the texts that end at this position.
    pub fn match_lens(&self, state: MatchState) -> impl Iterator<Item = usize> {
        self.matches(state).map(|(len, _)| len)
    }

    /// Returns the number of last bytes that are the beginning of a text.
    pub fn depth(&self, state: MatchState) -> usize {
        let Some(id) = state.0 else { return 0 };
        self.depths.binary_search_by_key(&id, |&(id, _)| id).map_or(0, |at| self.depths[at].1 as usize)
    }
}

fn start(automaton: &contiguous::NFA) -> StateID {
    automaton.start_state(Anchored::No).expect("an automaton of this kind starts anywhere")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::sampler::random::{Lane, uniform};

    /// Returns a text of at most `max_len` characters of one and two bytes.
    fn random_text(seed: u64, max_len: f64) -> String {
        let number = |i: u64, below: f64| (uniform(seed, i, Lane::Token) * below) as u64;
        (0..1 + number(0, max_len)).map(|i| ['a', 'b', 'ä', 'ö'][number(1 + i, 4.0) as usize]).collect()
    }

    #[test]
    fn every_state_equals_a_comparison_with_all_texts() {
        for seed in 0..500 {
            let texts: Vec<String> = (0..1 + seed % 7).map(|i| random_text(1000 * seed + i, 5.0)).collect();
            let matcher = TextMatcher::new(&texts).unwrap();
            let stream = random_text(1000 * seed + 999, 60.0);
            let mut state = MatchState::default();
            assert_eq!(matcher.depth(state), 0);
            for end in 1..=stream.len() {
                let seen = &stream.as_bytes()[..end];
                state = matcher.next(state, seen[end - 1]);
                let begun = |text: &String| (0..=text.len()).rev().find(|&len| seen.ends_with(&text.as_bytes()[..len])).unwrap();
                assert_eq!(matcher.depth(state), texts.iter().map(begun).max().unwrap());
                let mut found: Vec<usize> = matcher.match_lens(state).collect();
                let mut expected: Vec<usize> = texts.iter().filter(|text| seen.ends_with(text.as_bytes())).map(String::len).collect();
                found.sort_unstable();
                expected.sort_unstable();
                assert_eq!(found, expected);
                assert_eq!(matcher.is_match(state), !expected.is_empty());
            }
        }
    }

    #[test]
    fn no_texts_match_nothing() {
        let matcher = TextMatcher::new(&[]).unwrap();
        let state = matcher.next(MatchState::default(), b'a');
        assert!(matcher.is_empty() && !matcher.is_match(state) && matcher.depth(state) == 0);
    }

    #[test]
    fn the_size_is_proportional_to_that_of_the_texts() {
        for texts in [vec!["a".repeat(16_000)], (0..1000).map(|i| format!("{i:016}")).collect(), vec!["x".into()]] {
            let bytes: usize = texts.iter().map(String::len).sum();
            let matcher = TextMatcher::new(&texts).unwrap();
            let size = matcher.automaton.as_ref().unwrap().memory_usage() + size_of_val(&matcher.depths[..]);
            assert!(size <= 24 * bytes + 16 * texts.len() + 4096, "{size} bytes for {bytes}");
        }
    }
}
