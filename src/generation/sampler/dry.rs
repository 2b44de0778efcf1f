//! DRY, "Don't Repeat Yourself" (P. E. Weidmann, text-generation-webui pull request 5677): a token
//! that would extend a repetition gets a penalty that grows exponentially with the repetition's
//! length.

use std::collections::TryReserveError;

use super::context::Context;
use super::penalties::shift;
use super::resolved::ResolvedSampling;
use super::text_matcher::MatchState;
use crate::types::options::Dry;

/// Maximum penalty: finite, so that the token remains possible if no other is left.
const MAX_PENALTY: f64 = 1e30;

/// Working memory, as long as the vocabulary and the longest sequence so far.
#[derive(Default)]
pub struct DryScratch {
    /// Result of `find_matches`.
    matches: Vec<u32>,
    /// Tokens that would extend a repetition.
    repeats: Vec<u32>,
    /// `[vocab]` Length of the longest repetition that the token would extend. 0 between calls.
    longest: Vec<u32>,
}

#[cfg(test)]
impl DryScratch {
    pub fn capacities(&self) -> (usize, usize, usize) {
        (self.matches.capacity(), self.repeats.capacity(), self.longest.capacity())
    }
}

/// Applies the penalty. A repetition ends at a breaker, and tokens that contain one have no
/// penalty.
pub fn apply(
    logits: &mut [f32],
    scratch: &mut DryScratch,
    dry: &Dry,
    rules: &ResolvedSampling,
    context: &Context,
) -> Result<(), TryReserveError> {
    let first = context.tokens.len().saturating_sub(dry.penalty_last_n.unwrap_or(usize::MAX));
    let window = &context.tokens[first..];
    find_matches(window, &mut scratch.matches)?;
    let max_match = scratch.matches.iter().copied().max().unwrap_or(0);
    let limit = context.history.breaks().unbroken(rules, context.tokens, first, max_match as usize) as u32;
    let shortest = dry.allowed_length.max(1);
    if limit < shortest {
        return Ok(());
    }
    collect(window, scratch, logits.len(), shortest, limit)?;
    let mut penalty = (0, 0.0);
    for &token in &scratch.repeats {
        let length = std::mem::take(&mut scratch.longest[token as usize]);
        let Some(logit) = logits.get_mut(token as usize).filter(|_| !has_breaker(rules, token)) else { continue };
        // Many repetitions have the same length.
        if penalty.0 != length {
            let power = libm::pow(dry.base as f64, (length - dry.allowed_length) as f64);
            penalty = (length, -(dry.multiplier as f64 * power).min(MAX_PENALTY) as f32);
        }
        shift(logit, penalty.1);
    }
    Ok(())
}

/// Collects the tokens that followed an earlier occurrence of the window's end, each once, with the
/// longest occurrence.
fn collect(window: &[u32], scratch: &mut DryScratch, vocab: usize, shortest: u32, limit: u32) -> Result<(), TryReserveError> {
    let DryScratch { matches, repeats, longest } = scratch;
    repeats.clear();
    repeats.try_reserve(window.len().min(vocab))?;
    longest.try_reserve(vocab.saturating_sub(longest.len()))?;
    longest.resize(vocab.max(longest.len()), 0);
    for (&token, &length) in window.iter().rev().zip(matches.iter().skip(1)) {
        let length = length.min(limit);
        if let Some(longest) = longest.get_mut(token as usize).filter(|_| length >= shortest) {
            if *longest == 0 {
                repeats.push(token);
            }
            *longest = length.max(*longest);
        }
    }
    Ok(())
}

/// Returns whether a token contains a breaker.
fn has_breaker(rules: &ResolvedSampling, token: u32) -> bool {
    let mut state = MatchState::default();
    rules.bytes_of(token).iter().any(|&byte| {
        state = rules.breakers.next(state, byte);
        rules.breakers.is_match(state)
    })
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::generation::sampler::history::SamplingHistory;
    use crate::generation::sampler::outcome::Sample;
    use crate::generation::sampler::random::{Lane, uniform};
    use crate::generation::sampler::token_texts::TokenTexts;
    use crate::types::options::SamplingParams;

    fn plain(allowed_length: u32) -> Dry {
        Dry { multiplier: 1.0, base: 2.0, allowed_length, penalty_last_n: None, sequence_breakers: None }
    }

    /// Returns the penalties of tokens whose texts are their digits.
    fn penalties(dry: &Dry, breakers: &[&str], tokens: &[u32]) -> Vec<(u32, f32)> {
        penalties_of(&["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], dry, breakers, tokens)
    }

    fn penalties_of(vocabulary: &[&str], dry: &Dry, breakers: &[&str], tokens: &[u32]) -> Vec<(u32, f32)> {
        let rules = rules(vocabulary, dry, breakers);
        let history = SamplingHistory::new(&rules, tokens, 0).unwrap();
        penalties_after(&rules, &mut DryScratch::default(), &history, tokens)
    }

    fn rules(vocabulary: &[&str], dry: &Dry, breakers: &[&str]) -> ResolvedSampling {
        let dry = Dry { sequence_breakers: Some(breakers.iter().map(|text| text.to_string()).collect()), ..dry.clone() };
        let texts: Vec<Vec<u8>> = vocabulary.iter().map(|text| text.as_bytes().to_vec()).collect();
        let params = SamplingParams { dry: Some(dry), ..SamplingParams::default() };
        ResolvedSampling::new(params, Arc::new([]), vec![], Arc::new(TokenTexts::new(&texts).unwrap())).unwrap()
    }

    fn penalties_after(rules: &ResolvedSampling, scratch: &mut DryScratch, history: &SamplingHistory, tokens: &[u32]) -> Vec<(u32, f32)> {
        let context = Context { tokens, prompt_len: 0, generated: tokens.len(), seed: 0, history, allowed: None };
        let mut logits = [0.0; 10];
        apply(&mut logits, scratch, rules.params.dry.as_ref().unwrap(), rules, &context).unwrap();
        (0..10).map(|token| (token, -logits[token as usize])).filter(|(_, penalty)| *penalty != 0.0).collect()
    }

    /// The definition of the penalties of the tokens 0 to 9, without any index.
    fn defined_penalties(rules: &ResolvedSampling, tokens: &[u32]) -> Vec<(u32, f32)> {
        let dry = rules.params.dry.as_ref().unwrap();
        let window = &tokens[tokens.len().saturating_sub(dry.penalty_last_n.unwrap_or(usize::MAX))..];
        // Whether a breaker ends in the last of these tokens.
        let breaks = |tokens: &[u32]| {
            let bytes: Vec<u8> = tokens.iter().flat_map(|&token| rules.bytes_of(token)).copied().collect();
            let last = tokens.last().map_or(0, |&token| rules.bytes_of(token).len());
            let ends = bytes.len() - last + 1..=bytes.len();
            ends.into_iter().any(|end| dry.sequence_breakers.iter().flatten().any(|text| bytes[..end].ends_with(text.as_bytes())))
        };
        let unbroken = (0..window.len()).find(|back| breaks(&window[..window.len() - back])).unwrap_or(window.len());
        let length_before = |at: usize| {
            let pairs = window[..at].iter().rev().zip(window.iter().rev());
            pairs.take_while(|(a, b)| a == b).count().min(unbroken)
        };
        let penalty = |token: u32| {
            let length = (0..window.len()).filter(|&at| window[at] == token).map(length_before).max().unwrap_or(0);
            let power = libm::pow(dry.base as f64, length as f64 - dry.allowed_length as f64);
            let is_free = length < dry.allowed_length.max(1) as usize || breaks(&[token]);
            (token, if is_free { 0.0 } else { (dry.multiplier as f64 * power).min(MAX_PENALTY) as f32 })
        };
        (0..10).map(penalty).filter(|(_, penalty)| *penalty != 0.0).collect()
    }

    #[test]
    fn random_sequences_equal_the_definition_after_any_change() {
        // Tokens with several characters, a part of a character, no text, and one without a logit.
        let vocabulary = ["a", "b", "ab", "ba", "", "aab", "c", "ca", "b\n", "cc", "ac"];
        let mut scratch = DryScratch::default();
        for seed in 0..600 {
            let number = |i: u64, below: u64| (uniform(seed, i, Lane::Token) * below as f64) as u64;
            let breakers = &["c", "bab", "aa", "cab", "\n", "abaab", "bb"][number(0, 4) as usize..number(1, 4) as usize + 4];
            let penalty_last_n = (number(2, 2) == 0).then_some(1 + number(3, 30) as usize);
            let dry = Dry { penalty_last_n, base: 1.5, ..plain(number(4, 4) as u32) };
            let rules = rules(&vocabulary, &dry, breakers);
            let kinds = 2 + number(5, 10);
            let token = |i: u64| number(1000 + i, kinds) as u32;
            let mut tokens: Vec<u32> = (0..number(6, 20)).map(token).collect();
            let mut history = SamplingHistory::new(&rules, &tokens, 0).unwrap();
            for step in 0..40 {
                match number(10 + step, 8) {
                    0 => {
                        let more: Vec<u32> = (0..5).map(|i| token(100 * step + i)).collect();
                        tokens.extend(&more);
                        history.extend(&rules, &more).unwrap();
                    }
                    1 => {
                        tokens.truncate(number(100 + step, 1 + tokens.len() as u64) as usize);
                        history.rewind(&rules, &tokens, 0).unwrap();
                    }
                    2 => history = history.try_clone().unwrap(),
                    _ => {
                        tokens.push(token(100 * step));
                        history.advance(&rules, &Sample { token: token(100 * step), surprise: None }).unwrap();
                    }
                }
                let found = penalties_after(&rules, &mut scratch, &history, &tokens);
                assert_eq!(found, defined_penalties(&rules, &tokens), "{tokens:?}, breakers {breakers:?}, {dry:?}");
            }
        }
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
