//! Stop strings over a stream of text that arrives in arbitrary pieces.

/// Holds back text that may turn out to be the beginning of a stop string. Plain data: a fork copies it.
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

impl StopMatcher {
    pub fn new(stops: Vec<String>) -> StopMatcher {
        StopMatcher { stops, held: String::new() }
    }

    /// Takes new text and appends to `out` what is certain to come before any stop string.
    /// True: a stop string is complete; it and what follows are dropped.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.stops.is_empty() {
            out.push_str(text);
            return false;
        }
        self.held.push_str(text);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        let certain = first.unwrap_or(self.held.len() - self.longest_beginning());
        out.push_str(&self.held[..certain]);
        self.held.drain(..certain);
        first.is_some()
    }

    /// As `push`, while stop strings do not count yet.
    pub fn pass(&mut self, text: &str, out: &mut String) {
        self.finish(out);
        out.push_str(text);
    }

    /// The stream ended: what was held back is ordinary text after all.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Length of the longest end of the held text that begins some stop string.
    fn longest_beginning(&self) -> usize {
        let begins = |stop: &String| {
            let most = (stop.len() - 1).min(self.held.len());
            (1..=most).rev().find(|&n| self.held.as_bytes().ends_with(&stop.as_bytes()[..n])).unwrap_or(0)
        };
        // A stop string starts with a character's first byte, so the cut is at a boundary.
        self.stops.iter().map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect());
        let mut out = String::new();
        for piece in pieces {
            if matcher.push(piece, &mut out) {
                return (out, true);
            }
        }
        matcher.finish(&mut out);
        (out, false)
    }

    #[test]
    fn a_stop_string_that_spans_pieces_is_found_and_never_shown() {
        assert_eq!(run(&["END"], &["one E", "N", "D two"]), ("one ".into(), true));
        assert_eq!(run(&["END"], &["one E", "N", "d two"]), ("one ENd two".into(), false));
    }

    #[test]
    fn the_earliest_of_several_wins() {
        assert_eq!(run(&["yy", "x"], &["a", "x", "yy"]), ("a".into(), true));
    }

    #[test]
    fn a_beginning_that_repeats_is_held_back_only_as_long_as_it_may_match() {
        assert_eq!(run(&["aab"], &["a", "a", "a", "b!"]), ("a".into(), true));
        let mut out = String::new();
        let mut matcher = StopMatcher::new(vec!["aab".into()]);
        matcher.push("xaaa", &mut out);
        assert_eq!(out, "xa");
    }

    /// However text is cut into pieces, the result is that of the whole.
    #[test]
    fn the_cut_into_pieces_does_not_matter() {
        let text = "naïve 日本 «stop» and more 日本語 stop here";
        for stops in [vec!["日本語"], vec!["p h", "»"], vec!["nope"], vec!["e", "ï"]] {
            let whole = run(&stops, &[text]);
            let chars: Vec<String> = text.chars().map(String::from).collect();
            for size in 1..6 {
                let pieces: Vec<String> = chars.chunks(size).map(|c| c.concat()).collect();
                assert_eq!(run(&stops, &pieces.iter().map(String::as_str).collect::<Vec<_>>()), whole);
            }
        }
    }
}
