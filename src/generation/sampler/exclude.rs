//! Exclusion of tokens.

use super::context::Context;
use super::ngrams;
use super::resolved::ResolvedSampling;
use super::truncate::Candidate;

pub fn applies(rules: &ResolvedSampling, context: &Context) -> bool {
    let params = &rules.params;
    context.allowed.is_some()
        || rules.must_go_on(context.generated)
        || params.no_repeat_ngram_size > 0
        || !params.allowed_token_ids.is_empty()
        || !params.bad_words_ids.is_empty()
        || !rules.bad_words.is_empty()
}

/// Excludes tokens by setting their logits to minus infinity. `scratch` has capacity for as many
/// candidates as there are logits.
pub fn apply(logits: &mut [f32], scratch: &mut Vec<Candidate>, rules: &ResolvedSampling, context: &Context) {
    exclude(&mut Logits { logits, scratch }, rules, context);
}

/// Computes the exclusions as a mask of `vocab` tokens: one bit per token, 32 per word, lowest bit
/// first.
pub fn mask(mask: &mut [u32], vocab: usize, rules: &ResolvedSampling, context: &Context) {
    mask.fill(u32::MAX);
    exclude(&mut Mask { mask, vocab }, rules, context);
}

/// A set of tokens from which tokens are removed.
trait Choices {
    /// Removes a token. The tokenizer may have tokens without a logit.
    fn forbid(&mut self, token: u32);
    fn keep(&mut self, allowed: &[u32]);
    /// Keeps the tokens of a mask: one bit per token, 32 per word, lowest bit first. Tokens beyond
    /// the last word are removed.
    fn keep_masked(&mut self, allowed: &[u32]);
}

fn exclude(choices: &mut impl Choices, rules: &ResolvedSampling, context: &Context) {
    let params = &rules.params;
    if !params.allowed_token_ids.is_empty() {
        choices.keep(&params.allowed_token_ids);
    }
    rules.bad_words.iter().chain(&params.bad_words_ids).for_each(|word| forbid_completion(choices, context.tokens, word));
    // NoRepeatNGramLogitsProcessor of transformers.
    ngrams::continuations(context.tokens, params.no_repeat_ngram_size as usize, |token| choices.forbid(token));
    if rules.must_go_on(context.generated) {
        rules.eos.iter().chain(&params.stop_token_ids).for_each(|&token| choices.forbid(token));
    }
    if let Some(allowed) = context.allowed {
        choices.keep_masked(allowed);
    }
}

struct Logits<'a> {
    logits: &'a mut [f32],
    scratch: &'a mut Vec<Candidate>,
}

impl Choices for Logits<'_> {
    fn forbid(&mut self, token: u32) {
        if let Some(logit) = self.logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }

    fn keep(&mut self, allowed: &[u32]) {
        let Logits { logits, scratch } = self;
        scratch.clear();
        let kept = |&token: &u32| Candidate { token, rank: logits[token as usize], share: 0.0 };
        scratch.extend(allowed.iter().take(logits.len()).map(kept));
        logits.fill(f32::NEG_INFINITY);
        scratch.iter().for_each(|kept| logits[kept.token as usize] = kept.rank);
    }

    fn keep_masked(&mut self, allowed: &[u32]) {
        let words = allowed.iter().copied().chain(std::iter::repeat(0));
        for (logits, word) in self.logits.chunks_mut(32).zip(words) {
            if word == u32::MAX {
                continue;
            }
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

struct Mask<'a> {
    mask: &'a mut [u32],
    vocab: usize,
}

impl Choices for Mask<'_> {
    fn forbid(&mut self, token: u32) {
        if let Some(word) = self.mask.get_mut(token as usize / 32) {
            *word &= !(1 << (token % 32));
        }
    }

    fn keep(&mut self, allowed: &[u32]) {
        self.mask.fill(0);
        allowed.iter().take(self.vocab).for_each(|&token| self.mask[token as usize / 32] |= 1 << (token % 32));
    }

    fn keep_masked(&mut self, allowed: &[u32]) {
        let words = allowed.iter().copied().chain(std::iter::repeat(0));
        self.mask.iter_mut().zip(words).for_each(|(word, allowed)| *word &= allowed);
    }
}

/// Removes the last token of a bad word if the sequence ends with the others
/// (NoBadWordsLogitsProcessor of transformers).
fn forbid_completion(choices: &mut impl Choices, tokens: &[u32], word: &[u32]) {
    if let Some((&last, before)) = word.split_last()
        && tokens.ends_with(before)
    {
        choices.forbid(last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::sampler::history::SamplingHistory;
    use crate::types::options::SamplingParams;

    const VOCAB: u32 = 70;

    fn kept(rules: &ResolvedSampling, tokens: &[u32], generated: usize, allowed: Option<&[u32]>) -> Vec<u32> {
        let memory = SamplingHistory::default();
        let context = Context { tokens, prompt_len: 0, generated, history: &memory, allowed, seed: 0 };
        let mut logits = [1.0; VOCAB as usize];
        let mut scratch = Vec::with_capacity(VOCAB as usize);
        let mut bits = [0; VOCAB.div_ceil(32) as usize];
        mask(&mut bits, VOCAB as usize, rules, &context);
        if applies(rules, &context) {
            apply(&mut logits, &mut scratch, rules, &context);
        }
        let is_kept = |token: u32| logits[token as usize] == 1.0;
        assert!(
            (0..VOCAB).all(|token| is_kept(token) == (bits[token as usize / 32] >> (token % 32) & 1 == 1)),
            "the mask differs from the logits"
        );
        (0..VOCAB).filter(|&token| logits[token as usize] == 1.0).collect()
    }

    fn all_but(tokens: &[u32]) -> Vec<u32> {
        (0..VOCAB).filter(|token| !tokens.contains(token)).collect()
    }

    #[test]
    fn only_the_last_token_of_a_bad_word_is_excluded() {
        let mut rules = ResolvedSampling { bad_words: vec![vec![1, 2, 3], vec![4]], ..ResolvedSampling::default() };
        rules.params.bad_words_ids = vec![vec![2, 5], vec![2, 200]];
        assert_eq!(kept(&rules, &[], 0, None), all_but(&[4]));
        assert_eq!(kept(&rules, &[1], 1, None), all_but(&[4]));
        assert_eq!(kept(&rules, &[1, 2], 2, None), all_but(&[3, 4, 5]));
        assert_eq!(kept(&rules, &[2, 1], 2, None), all_but(&[4]));
    }

    #[test]
    fn no_ngram_of_n_tokens_is_repeated() {
        let run = |n: u32, tokens: &[u32]| {
            let params = SamplingParams { no_repeat_ngram_size: n, ..Default::default() };
            kept(&ResolvedSampling { params, ..ResolvedSampling::default() }, tokens, 0, None)
        };
        assert_eq!(run(1, &[3, 4, 3]), all_but(&[3, 4]));
        assert_eq!(run(2, &[3, 4, 3, 5, 3]), all_but(&[4, 5]));
        assert_eq!(run(3, &[1, 2, 3, 1, 2]), all_but(&[3]));
        assert_eq!(run(3, &[1, 2]), all_but(&[]));
        assert_eq!(run(4, &[1, 1, 1]), all_but(&[]));
    }

    #[test]
    fn end_tokens_are_excluded_before_min_tokens() {
        let params = SamplingParams { min_tokens: 2, stop_token_ids: vec![7], ..Default::default() };
        let rules = ResolvedSampling { params, eos: [69, 70].into(), ..ResolvedSampling::default() };
        assert_eq!(kept(&rules, &[1], 1, None), all_but(&[7, 69]));
        assert_eq!(kept(&rules, &[1, 1], 2, None), all_but(&[]));
    }

    #[test]
    fn only_allowed_tokens_that_no_rule_excludes_are_kept() {
        let params = SamplingParams { allowed_token_ids: vec![9, 3, 9, 33, 69], bad_words_ids: vec![vec![3]], ..Default::default() };
        let rules = ResolvedSampling { params, ..ResolvedSampling::default() };
        assert_eq!(kept(&rules, &[1], 1, None), [9, 33, 69]);
        assert_eq!(kept(&rules, &[1], 1, Some(&[1 << 9, u32::MAX])), [9, 33]);
    }

    #[test]
    fn a_mask_has_one_bit_per_token_and_excludes_tokens_beyond_it() {
        let rules = ResolvedSampling::default();
        assert_eq!(kept(&rules, &[1], 1, Some(&[0b101, u32::MAX, 1 << 5])), [vec![0, 2], (32..64).collect(), vec![69]].concat());
        assert_eq!(kept(&rules, &[1], 1, Some(&[1])), [0]);
        assert!(kept(&rules, &[1], 1, Some(&[])).is_empty());
    }
}
