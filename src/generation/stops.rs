//! Detection of stop strings in a stream of text that arrives in arbitrary pieces.

use std::sync::Arc;

use super::sampler::ResolvedSampling;
use super::sampler::text_matcher::MatchState;
use crate::error::Result;

/// A matcher that withholds text that may be the beginning of a stop string. It is plain data,
/// which a fork copies.
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    sampling: Arc<ResolvedSampling>,
    held: String,
    /// Number of bytes of `held` that have been emitted anyway.
    emitted: usize,
    /// Position in the search for stop strings. It stands for the bytes of `held`.
    state: MatchState,
}

impl StopMatcher {
    pub fn new(rules: Arc<ResolvedSampling>) -> StopMatcher {
        StopMatcher { sampling: rules, ..StopMatcher::default() }
    }

    /// Reserves memory for `text`, of which a part may be held, and a part appended to `out` with
    /// previously held text.
    pub fn reserve(&mut self, text: &str, out: &mut String) -> Result<()> {
        self.held.try_reserve(text.len())?;
        Ok(out.try_reserve(self.held.len() + text.len())?)
    }

    /// Reserves memory for `text` more bytes than the longest stop string, the maximum that can be
    /// held.
    pub fn reserve_held(&mut self, text: usize) -> Result<()> {
        Ok(self.held.try_reserve(self.sampling.stops.max_len() + text)?)
    }

    /// Makes this a copy of `other`, in the existing memory if it suffices.
    pub fn copy(&mut self, other: &StopMatcher) -> Result<()> {
        self.sampling.clone_from(&other.sampling);
        self.held.clear();
        self.held.try_reserve(other.held.len())?;
        self.held.push_str(&other.held);
        (self.emitted, self.state) = (other.emitted, other.state);
        Ok(())
    }

    /// Adds text, and appends to `out` what certainly precedes every stop string. Returns the index
    /// of the stop string that is complete, if there is one. Text after it is dropped, and so is
    /// the stop string unless `include_stop` is set.
    ///
    /// The stop string that ends first matches, so that the result does not depend on the pieces.
    /// If there are several, the longest one matches.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        let ResolvedSampling { params, stops, .. } = &*self.sampling;
        if stops.is_empty() {
            out.push_str(text);
            return None;
        }
        let (include_stop, held) = (params.include_stop, self.held.len());
        self.held.push_str(text);
        for (before, byte) in text.bytes().enumerate() {
            self.state = stops.next(self.state, byte);
            if let Some((len, which)) = stops.matches(self.state).max() {
                let end = held + before + 1;
                self.release_held(if include_stop { end } else { end - len }, out);
                (self.emitted, self.state) = (0, MatchState::default());
                self.held.clear();
                return Some(which);
            }
        }
        // A stop string starts with the first byte of a character, so the cut is at a character
        // boundary.
        let begun = stops.depth(self.state);
        self.release_held(self.held.len() - begun, out);
        None
    }

    /// Releases the first `len` bytes, and emits those that were not emitted before.
    fn release_held(&mut self, len: usize, out: &mut String) {
        out.push_str(&self.held[self.emitted.min(len)..len]);
        self.held.drain(..len);
        self.emitted = self.emitted.saturating_sub(len);
    }

    /// Emits the held text, but keeps holding it, because the stream may continue.
    pub fn tell_held(&mut self, out: &mut String) {
        out.push_str(&self.held[self.emitted..]);
        self.emitted = self.held.len();
    }

    /// Like `push`, while stop strings are not yet active.
    pub fn pass(&mut self, text: &str, out: &mut String) {
        self.finish(out);
        out.push_str(text);
    }

    /// Ends the stream: the held text is ordinary text.
    pub fn finish(&mut self, out: &mut String) {
        self.release_held(self.held.len(), out);
        self.state = MatchState::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::sampler::{Lane, uniform};
    use crate::types::options::SamplingParams;

    fn matcher(stops: &[&str], include: bool) -> StopMatcher {
        let stop = stops.iter().map(|s| s.to_string()).collect();
        let params = SamplingParams { stop, include_stop: include, ..SamplingParams::default() };
        StopMatcher::new(Arc::new(ResolvedSampling::new(params, Arc::new([]), vec![], Arc::default()).unwrap()))
    }

    fn read(mut matcher: StopMatcher, pieces: &[&str]) -> (String, bool) {
        let mut out = String::new();
        for piece in pieces {
            if matcher.push(piece, &mut out).is_some() {
                return (out, true);
            }
        }
        matcher.finish(&mut out);
        (out, false)
    }

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        read(matcher(stops, false), pieces)
    }

    fn run_including(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        read(matcher(stops, true), pieces)
    }

    #[test]
    fn a_stop_string_across_pieces_is_found_and_not_emitted() {
        assert_eq!(run(&["END"], &["one E", "N", "D two"]), ("one ".into(), true));
        assert_eq!(run(&["END"], &["one E", "N", "d two"]), ("one ENd two".into(), false));
    }

    #[test]
    fn an_included_stop_string_is_emitted_when_complete_and_ends_the_text() {
        assert_eq!(run_including(&["END"], &["one E", "N", "D two"]), ("one END".into(), true));
        assert_eq!(run_including(&["END"], &["one E", "N", "d two"]), ("one ENd two".into(), false));
        let (mut matcher, mut out) = (matcher(&["END"], true), String::new());
        assert_eq!(matcher.push("one EN", &mut out), None);
        assert_eq!(out, "one ", "an incomplete stop string is held back");
        assert_eq!(matcher.push("D two", &mut out), Some(0));
        matcher.finish(&mut out);
        assert_eq!(out, "one END", "text after the stop string is dropped");
    }

    #[test]
    fn held_text_that_was_emitted_is_not_emitted_twice() {
        let pieces = |last: &str| {
            let (mut matcher, mut out) = (matcher(&["END"], false), String::new());
            matcher.push("one E", &mut out);
            matcher.tell_held(&mut out);
            let found = matcher.push("N", &mut out).is_some() | {
                matcher.tell_held(&mut out);
                matcher.push(last, &mut out).is_some()
            };
            matcher.finish(&mut out);
            (out, found)
        };
        assert_eq!(pieces("D two"), ("one EN".into(), true));
        assert_eq!(pieces("d two"), ("one ENd two".into(), false));
    }

    #[test]
    fn the_earliest_stop_string_matches() {
        assert_eq!(run(&["yy", "x"], &["a", "x", "yy"]), ("a".into(), true));
        assert_eq!(run_including(&["yy", "x"], &["a", "xyy"]), ("ax".into(), true));
    }

    #[test]
    fn the_first_complete_one_of_overlapping_stop_strings_matches() {
        for stops in [["abc", "b"], ["b", "abc"]] {
            assert_eq!(run(&stops, &["xabc"]), ("xa".into(), true));
            assert_eq!(run(&stops, &["xa", "b", "c"]), ("xa".into(), true));
            assert_eq!(run_including(&stops, &["xabc"]), ("xab".into(), true));
        }
        assert_eq!(run(&["bc", "abc", "c"], &["xabc"]), ("x".into(), true), "of those complete at once, the longest one matches");
    }

    #[test]
    fn a_repeated_beginning_is_held_back_only_while_it_can_match() {
        assert_eq!(run(&["aab"], &["a", "a", "a", "b!"]), ("a".into(), true));
        let mut out = String::new();
        let mut matcher = matcher(&["aab"], false);
        matcher.push("xaaa", &mut out);
        assert_eq!(out, "xa");
    }

    /// Compares pieces of one to five characters with the whole text.
    #[test]
    fn the_result_does_not_depend_on_the_pieces() {
        let text = "naïve 日本 «stop» and more 日本語 stop here";
        let all = [vec!["日本語"], vec!["p h", "»"], vec!["nope"], vec!["e", "ï"], vec!["«stop»", "top"], vec!["本 «s", "本 "]];
        for (stops, include) in all.iter().flat_map(|stops| [(stops, false), (stops, true)]) {
            let whole = read(matcher(stops, include), &[text]);
            let chars: Vec<String> = text.chars().map(String::from).collect();
            for size in 1..6 {
                let pieces: Vec<String> = chars.chunks(size).map(|c| c.concat()).collect();
                assert_eq!(read(matcher(stops, include), &pieces.iter().map(String::as_str).collect::<Vec<_>>()), whole);
            }
        }
    }

    /// The definition: all stop strings are searched in all of the text, from its last cut on.
    #[derive(Clone, Default)]
    struct Reference {
        stops: Vec<String>,
        include: bool,
        text: String,
        emitted: usize,
    }

    impl Reference {
        fn push(&mut self, text: &str, out: &mut String) -> bool {
            self.text.push_str(text);
            let found = self.stops.iter().filter_map(|stop| self.text.find(stop.as_str()).map(|start| (start + stop.len(), start)));
            if let Some((end, start)) = found.min() {
                self.emit(if self.include { end } else { start }, out);
                (self.text, self.emitted) = (String::new(), 0);
                return true;
            }
            let begun = |stop: &String| (0..stop.len()).rev().find(|&len| self.text.as_bytes().ends_with(&stop.as_bytes()[..len])).unwrap();
            let held = self.stops.iter().map(begun).max().unwrap_or(0);
            self.emit(self.text.len() - held, out);
            false
        }

        fn emit(&mut self, end: usize, out: &mut String) {
            if end > self.emitted {
                out.push_str(&self.text[self.emitted..end]);
                self.emitted = end;
            }
        }

        fn pass(&mut self, text: &str, out: &mut String) {
            self.emit(self.text.len(), out);
            (self.text, self.emitted) = (String::new(), 0);
            out.push_str(text);
        }
    }

    fn random_text(seed: u64, max_len: u64) -> String {
        let number = |i: u64, below: u64| (uniform(seed, i, Lane::Token) * below as f64) as u64;
        (0..1 + number(0, max_len)).map(|i| ['a', 'b', 'ä', '日'][number(1 + i, 4) as usize]).collect()
    }

    #[test]
    fn random_streams_equal_the_definition() {
        for seed in 0..2000 {
            let number = |i: u64, below: u64| (uniform(seed, i, Lane::Xtc) * below as f64) as u64;
            let stops: Vec<String> = (0..1 + number(0, 6)).map(|i| random_text(100 * seed + i, 6)).collect();
            let include = number(1, 2) == 0;
            let mut reference = Reference { stops: stops.clone(), include, ..Reference::default() };
            let mut matcher = matcher(&stops.iter().map(String::as_str).collect::<Vec<_>>(), include);
            let (mut fork, mut fork_of_reference) = (matcher.clone(), reference.clone());
            for step in 0..30 {
                let piece = random_text(100 * seed + 10 + step, 4);
                let (mut out, mut expected) = (String::new(), String::new());
                match number(2 + 2 * step, 12) {
                    0 => {
                        matcher.pass(&piece, &mut out);
                        reference.pass(&piece, &mut expected);
                    }
                    1 => {
                        matcher.tell_held(&mut out);
                        reference.emit(reference.text.len(), &mut expected);
                    }
                    2 => {
                        fork.copy(&matcher).unwrap();
                        fork_of_reference = reference.clone();
                    }
                    // A rewind to the fork.
                    3 => {
                        matcher.copy(&fork).unwrap();
                        reference = fork_of_reference.clone();
                    }
                    _ => assert_eq!(matcher.push(&piece, &mut out).is_some(), reference.push(&piece, &mut expected)),
                }
                assert_eq!(out, expected, "stops {stops:?}, step {step}");
            }
        }
    }
}
