//! DRY, "Don't Repeat Yourself" (P. E. Weidmann, text-generation-webui pull request 5677): a token
//! that would extend a repetition gets a penalty that grows exponentially with the repetition's
//! length.

use std::collections::TryReserveError;

use super::penalties::shift;
use crate::types::options::Dry;

/// Maximum penalty: finite, so that the token remains possible if no other is left.
const MAX_PENALTY: f64 = 1e30;

/// Working memory, as long as the longest sequence so far.
#[derive(Default)]
pub struct DryScratch {
    /// Result of `find_matches`.
    matches: Vec<u32>,
    /// Tokens, each with the length of the repetition that it would extend.
    repeats: Vec<(u32, u32)>,
}

#[cfg(test)]
impl DryScratch {
    pub fn capacities(&self) -> (usize, usize) {
        (self.matches.capacity(), self.repeats.capacity())
    }
}

/// Applies the penalty. `token_bytes` are the texts of tokens, which are searched for breakers. A
/// repetition ends at a breaker, and tokens that contain one have no penalty.
pub fn apply(
    logits: &mut [f32],
    scratch: &mut DryScratch,
    dry: &Dry,
    token_bytes: &[Vec<u8>],
    tokens: &[u32],
) -> Result<(), TryReserveError> {
    let breakers = Breakers { texts: dry.sequence_breakers.as_deref().unwrap_or_default(), token_bytes };
    let window = &tokens[tokens.len().saturating_sub(dry.penalty_last_n.unwrap_or(usize::MAX))..];
    find_matches(window, &mut scratch.matches)?;
    let max_match = scratch.matches.iter().copied().max().unwrap_or(0);
    let limit = breakers.unbroken(window, max_match as usize) as u32;
    collect(window, scratch, dry.allowed_length.max(1), limit)?;
    for &(token, length) in &scratch.repeats {
        if let Some(logit) = logits.get_mut(token as usize).filter(|_| !breakers.end_in_last(&[token])) {
            let power = libm::pow(dry.base as f64, (length - dry.allowed_length) as f64);
            shift(logit, -(dry.multiplier as f64 * power).min(MAX_PENALTY) as f32);
        }
    }
    Ok(())
}

/// Collects the tokens that followed an earlier occurrence of the window's end, each once, with the
/// longest occurrence.
fn collect(window: &[u32], scratch: &mut DryScratch, shortest: u32, limit: u32) -> Result<(), TryReserveError> {
    let DryScratch { matches, repeats } = scratch;
    repeats.clear();
    repeats.try_reserve(window.len())?;
    for (back, &length) in matches.iter().enumerate().skip(1) {
        let length = length.min(limit);
        if length >= shortest {
            repeats.push((window[window.len() - back], length));
        }
    }
    repeats.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
    repeats.dedup_by_key(|(token, _)| *token);
    Ok(())
}

/// Computes for each `back` from 1 how many tokens before the last `back` ones equal the window's
/// end. This is the Z function (Gusfield 1997) of the reversed window, in linear time. `matches[0]`
/// is 0.
fn find_matches(window: &[u32], matches: &mut Vec<u32>) -> Result<(), TryReserveError> {
    matches.clear();
    matches.try_reserve(window.len())?;
    matches.extend(window.first().map(|_| 0));
    let from_end = |back: usize| window[window.len() - 1 - back];
    // The known match that extends furthest back.
    let (mut start, mut end) = (0, 0);
    for back in 1..window.len() {
        let mut length = if back < end { (matches[back - start] as usize).min(end - back) } else { 0 };
        while back + length < window.len() && from_end(length) == from_end(back + length) {
            length += 1;
        }
        if back + length > end {
            (start, end) = (back, back + length);
        }
        matches.push(length as u32);
    }
    Ok(())
}

/// The positions of breakers in a text, independent of its tokenization. Most breakers are parts of
/// longer tokens, such as `":` or ` "`. llama.cpp (`get_overlapping_token_sequences`, after
/// koboldcpp's pull request 982) also uses every token whose text contains a breaker, and tokens
/// that end with its beginning if the rest follows. It knows one tokenization of the rest; this
/// function accepts any.
struct Breakers<'a> {
    texts: &'a [String],
    token_bytes: &'a [Vec<u8>],
}

impl Breakers<'_> {
    /// Returns the number of tokens after the last breaker in the window, at most `max_len`.
    fn unbroken(&self, window: &[u32], max_len: usize) -> usize {
        (0..max_len).find(|back| self.end_in_last(&window[..window.len() - back])).unwrap_or(max_len)
    }

    /// Returns true if a breaker ends in the last token.
    fn end_in_last(&self, tokens: &[u32]) -> bool {
        let Some((&last, before)) = tokens.split_last() else { return false };
        let last = self.bytes(last);
        self.texts.iter().any(|text| (1..=last.len()).any(|end| self.ends_with(before, &last[..end], text.as_bytes())))
    }

    fn ends_with(&self, before: &[u32], part: &[u8], text: &[u8]) -> bool {
        let earlier = before.iter().rev().flat_map(|&token| self.bytes(token).iter().rev());
        part.last() == text.last() && text.iter().rev().eq(part.iter().rev().chain(earlier).take(text.len()))
    }

    fn bytes(&self, token: u32) -> &[u8] {
        self.token_bytes.get(token as usize).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::sampler::random::{Lane, uniform};

    fn plain(allowed_length: u32) -> Dry {
        Dry { multiplier: 1.0, base: 2.0, allowed_length, penalty_last_n: None, sequence_breakers: None }
    }

    /// Returns the penalties of tokens whose texts are their digits.
    fn penalties(dry: &Dry, breakers: &[&str], tokens: &[u32]) -> Vec<(u32, f32)> {
        penalties_of(&["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], dry, breakers, tokens)
    }

    fn penalties_of(vocabulary: &[&str], dry: &Dry, breakers: &[&str], tokens: &[u32]) -> Vec<(u32, f32)> {
        let dry = Dry { sequence_breakers: Some(breakers.iter().map(|text| text.to_string()).collect()), ..dry.clone() };
        let token_bytes: Vec<Vec<u8>> = vocabulary.iter().map(|text| text.as_bytes().to_vec()).collect();
        let mut logits = [0.0; 10];
        apply(&mut logits, &mut DryScratch::default(), &dry, &token_bytes, tokens).unwrap();
        (0..10).map(|token| (token, -logits[token as usize])).filter(|(_, penalty)| *penalty != 0.0).collect()
    }

    #[test]
    fn the_penalty_grows_with_the_length_of_the_repetition() {
        assert_eq!(penalties(&plain(2), &[], &[1, 2, 3, 4, 1]), []);
        assert_eq!(penalties(&plain(2), &[], &[1, 2, 3, 4, 1, 2]), [(3, 1.0)]);
        assert_eq!(penalties(&plain(2), &[], &[1, 2, 3, 4, 1, 2, 3]), [(4, 2.0)]);
        assert_eq!(penalties(&plain(1), &[], &[1, 2, 3, 4, 1, 2, 3]), [(4, 4.0)]);
        assert_eq!(penalties(&plain(0), &[], &[5, 6, 5]), [(6, 2.0)], "only continuations of a repetition are penalized");
    }

    #[test]
    fn each_continuation_is_penalized_once_for_its_longest_repetition() {
        assert_eq!(penalties(&plain(1), &[], &[1, 2, 3, 2, 4, 2, 3, 1, 2]), [(3, 2.0), (4, 1.0)]);
    }

    #[test]
    fn a_breaker_ends_the_repetition_and_is_not_penalized() {
        let tokens = [1, 2, 9, 3, 4, 1, 2, 9, 3];
        assert_eq!(penalties(&plain(1), &[], &tokens), [(4, 8.0)]);
        assert_eq!(penalties(&plain(1), &["9"], &tokens), [(4, 1.0)]);
        assert_eq!(penalties(&plain(1), &["29"], &tokens), [(4, 1.0)]);
        assert_eq!(penalties(&plain(1), &["12"], &tokens), [(4, 2.0)]);
        assert_eq!(penalties(&plain(1), &["92", "8"], &tokens), [(4, 8.0)]);
        assert_eq!(penalties(&plain(1), &["3"], &tokens), [], "the breaker is the last token");
        assert_eq!(penalties(&plain(1), &["4"], &tokens), []);
    }

    #[test]
    fn a_breaker_is_found_inside_a_token_and_across_tokens() {
        let vocabulary = ["a", "b", " \"", "c", "\":", "x<", "br", "> ", ">"];
        let found = |breaker: &str, tokens: &[u32]| penalties_of(&vocabulary, &plain(1), &[breaker], tokens);
        let quoted = [0, 1, 2, 3, 0, 1, 2, 3];
        assert_eq!(found("?", &quoted), [(0, 8.0)]);
        assert_eq!(found("\"", &quoted), [(0, 1.0)], "the breaker is the end of a token");
        assert_eq!(found("\"", &[0, 1, 2, 0, 1]), [], "the token that contains the breaker is not penalized");
        assert_eq!(found(":", &[4, 0, 1, 4, 0]), [(1, 1.0)]);
        let tagged = [0, 5, 6, 7, 1, 3, 0, 5, 6, 7, 1];
        assert_eq!(found("?", &tagged), [(3, 16.0)]);
        assert_eq!(found("<br>", &tagged), [(3, 1.0)]);
        assert_eq!(found("<br>", &tagged[..10]), [], "the breaker is the last token");
        assert_eq!(
            found("<br>", &tagged[..9]),
            [(7, 4.0)],
            "an incomplete breaker does not end the repetition, and its next token is penalized"
        );
        assert_eq!(found("x<br> b", &tagged), [], "the breaker is the last token");
        assert_eq!(found("ax<br> bc", &tagged), [(3, 16.0)], "the repetition contains only the beginning of the breaker");
    }

    #[test]
    fn only_the_last_n_tokens_are_compared() {
        let tokens = [1, 2, 3, 4, 1, 2];
        assert_eq!(penalties(&Dry { penalty_last_n: Some(6), ..plain(2) }, &[], &tokens), [(3, 1.0)]);
        assert_eq!(penalties(&Dry { penalty_last_n: Some(5), ..plain(1) }, &[], &tokens), [(3, 1.0)]);
        assert_eq!(penalties(&Dry { penalty_last_n: Some(4), ..plain(1) }, &[], &tokens), []);
        assert_eq!(penalties(&Dry { penalty_last_n: Some(1), ..plain(1) }, &[], &tokens), []);
    }

    #[test]
    fn a_penalty_that_overflows_is_finite() {
        assert_eq!(penalties(&Dry { base: 100.0, ..plain(1) }, &[], &[1; 500]), [(1, 1e30)]);
    }

    #[test]
    fn an_empty_sequence_has_no_penalties() {
        assert_eq!(penalties(&plain(1), &["1"], &[]), []);
        assert_eq!(penalties(&plain(1), &["1"], &[3]), []);
    }

    #[test]
    fn matches_equal_those_of_a_comparison_of_all_pairs() {
        for seed in 0..200 {
            let window: Vec<u32> = (0..40).map(|i| (uniform(seed, i, Lane::Token) * 2.5) as u32).collect();
            let mut found = vec![];
            find_matches(&window, &mut found).unwrap();
            let compared = |back: usize| {
                let (before, end) = (window[..window.len() - back].iter().rev(), window.iter().rev());
                before.zip(end).take_while(|(a, b)| a == b).count() as u32
            };
            let expected: Vec<u32> = std::iter::once(0).chain((1..window.len()).map(compared)).collect();
            assert_eq!(found, expected);
        }
    }
}
