//! Detection of stop strings in a stream of text that arrives in arbitrary pieces.

use std::ops::Range;
use std::sync::Arc;

use super::sampler::ResolvedSampling;
use crate::error::Result;

/// A matcher that withholds text that may be the beginning of a stop string. It is plain data,
/// which a fork copies.
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    sampling: Arc<ResolvedSampling>,
    held: String,
    /// Number of bytes of `held` that have been emitted anyway.
    emitted: usize,
}

impl StopMatcher {
    pub fn new(rules: Arc<ResolvedSampling>) -> StopMatcher {
        StopMatcher { sampling: rules, held: String::new(), emitted: 0 }
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
        let max_len = self.stops().iter().map(String::len).max().unwrap_or(0);
        Ok(self.held.try_reserve(max_len + text)?)
    }

    /// Makes this a copy of `other`, in the existing memory if it suffices.
    pub fn copy(&mut self, other: &StopMatcher) -> Result<()> {
        self.sampling.clone_from(&other.sampling);
        self.held.clear();
        self.held.try_reserve(other.held.len())?;
        self.held.push_str(&other.held);
        self.emitted = other.emitted;
        Ok(())
    }

    fn stops(&self) -> &[String] {
        &self.sampling.params.stop
    }

    /// Adds text, and appends to `out` what certainly precedes every stop string. Returns true if a
    /// stop string is complete. Text after it is dropped, and so is the stop string unless
    /// `include_stop` is set.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.stops().is_empty() {
            out.push_str(text);
            return false;
        }
        self.held.push_str(text);
        let Some(stop) = self.first_complete() else {
            self.release_held(self.held.len() - self.longest_beginning(), out);
            return false;
        };
        self.release_held(if self.sampling.params.include_stop { stop.end } else { stop.start }, out);
        self.emitted = 0;
        self.held.clear();
        true
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
    }

    /// Returns the stop string that ends first, so that the result does not depend on the pieces.
    /// If there are several, returns the longest one.
    fn first_complete(&self) -> Option<Range<usize>> {
        let found = self.stops().iter().filter_map(|stop| self.held.find(stop.as_str()).map(|start| start..start + stop.len()));
        found.min_by_key(|stop| (stop.end, stop.start))
    }

    /// Returns the length of the longest suffix of the held text that is a prefix of a stop string.
    fn longest_beginning(&self) -> usize {
        let begins = |stop: &String| {
            let max_len = (stop.len() - 1).min(self.held.len());
            (1..=max_len).rev().find(|&n| self.held.as_bytes().ends_with(&stop.as_bytes()[..n])).unwrap_or(0)
        };
        // A stop string starts with the first byte of a character, so the cut is at a character
        // boundary.
        self.stops().iter().map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::options::SamplingParams;

    fn matcher(stops: &[&str], include: bool) -> StopMatcher {
        let stop = stops.iter().map(|s| s.to_string()).collect();
        let params = SamplingParams { stop, include_stop: include, ..SamplingParams::default() };
        StopMatcher::new(Arc::new(ResolvedSampling { params, ..ResolvedSampling::default() }))
    }

    fn read(mut matcher: StopMatcher, pieces: &[&str]) -> (String, bool) {
        let mut out = String::new();
        for piece in pieces {
            if matcher.push(piece, &mut out) {
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
        assert!(!matcher.push("one EN", &mut out));
        assert_eq!(out, "one ", "an incomplete stop string is held back");
        assert!(matcher.push("D two", &mut out));
        matcher.finish(&mut out);
        assert_eq!(out, "one END", "text after the stop string is dropped");
    }

    #[test]
    fn held_text_that_was_emitted_is_not_emitted_twice() {
        let pieces = |last: &str| {
            let (mut matcher, mut out) = (matcher(&["END"], false), String::new());
            matcher.push("one E", &mut out);
            matcher.tell_held(&mut out);
            let found = matcher.push("N", &mut out) | {
                matcher.tell_held(&mut out);
                matcher.push(last, &mut out)
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
}
