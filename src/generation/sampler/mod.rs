//! Sampling of a token from logits. The steps, in this order:
//! 1. logit bias, and the diversity penalty of beam groups (both are sums; `beam` applies the
//!    penalty before all other steps),
//! 2. repetition penalty, then frequency and presence penalty,
//! 3. DRY,
//! 4. exclusions: allowed tokens, bad words, repeated n-grams, end tokens before `min_tokens`, the
//!    grammar's mask,
//! 5. temperature; if it is 0, the largest logit wins,
//! 6. top-n-sigma, min-p, top-k, typical-p, top-p, XTC; or mirostat instead,
//! 7. the random choice.
//!
//! Bias precedes penalties and penalties precede temperature, as in transformers, vLLM and
//! llama.cpp. Temperature precedes truncation, as in transformers and vLLM, so it affects how many
//! tokens are kept.
//!
//! Beam search applies steps 1 to 4 to log probabilities. `_get_logits_processor` of transformers
//! (generation/utils.py) appends SequenceBias, HammingDiversity, RepetitionPenalty, NoRepeatNGram,
//! NoBadWords and MinNewTokensLength in release 4.52; release 5.5 omits HammingDiversity. So the
//! repetition penalty multiplies the diversity penalty, and the order of exclusions is irrelevant.
//! transformers has no frequency and presence penalties and no DRY.

mod breaks;
mod context;
pub mod drawing;
mod dry;
mod exclude;
#[cfg(test)]
mod goldens;
mod history;
mod log_softmax;
mod logprobs;
mod mirostat;
mod ngrams;
mod outcome;
pub mod penalties;
mod random;
mod resolved;
pub mod rows;
pub mod text_matcher;
mod token_texts;
mod truncate;

pub use context::Context;
pub use drawing::{chosen, logprob_of, plan_draw};
pub use history::SamplingHistory;
pub use log_softmax::log_softmax;
pub use logprobs::{logprob, logprob_and_top, top_logprobs};
pub use outcome::{NoChoice, Sample};
pub use random::{Lane, branch_seed, uniform};
pub use resolved::ResolvedSampling;
pub use token_texts::TokenTexts;
use truncate::{Candidate, argmax, draw};

use crate::error::{self, try_vec};
use crate::types::options::Dry;

/// Working memory for one row of logits, with the length of the vocabulary.
pub struct Sampler {
    processed: Vec<f32>,
    candidates: Vec<Candidate>,
    dry: dry::DryScratch,
}

impl Sampler {
    pub fn new(vocab_size: usize) -> error::Result<Sampler> {
        // Sorting takes as much memory again.
        let mut candidates = try_vec(vocab_size, Candidate::default())?;
        candidates.try_reserve_exact(vocab_size)?;
        Ok(Sampler { processed: try_vec(vocab_size, 0.0)?, candidates, dry: dry::DryScratch::default() })
    }

    /// Applies bias, penalties and exclusions (steps 1 to 4) in place.
    pub fn process(&mut self, logits: &mut [f32], rules: &ResolvedSampling, context: &Context) -> Result<(), NoChoice> {
        let params = &rules.params;
        penalties::apply_bias(logits, &params.logit_bias);
        penalties::apply(logits, params, context.history);
        if let Some(dry) = params.dry.as_ref().filter(|dry| dry.is_on()) {
            dry::apply(logits, &mut self.dry, dry, rules, context)?;
        }
        if exclude::applies(rules, context) {
            exclude::apply(logits, &mut self.candidates, rules, context);
        }
        Ok(())
    }

    /// Samples the next token. Changes no state of the sequence: `SamplingHistory::advance` records
    /// the token when it is appended.
    pub fn choose(&mut self, logits: &[f32], rules: &ResolvedSampling, context: &Context) -> Result<Sample, NoChoice> {
        let changed = self.rewrite(logits, rules, context)?;
        let logits = if changed { &self.processed } else { logits };
        let (best, max) = argmax(logits).ok_or(NoChoice::Excluded)?;
        if rules.params.temperature == 0.0 {
            return Ok(Sample { token: best, surprise: None });
        }
        truncate::weigh(&mut self.candidates, logits, max, &rules.params);
        narrow(&mut self.candidates, logits, rules, context);
        let chosen = draw(&self.candidates, uniform(context.seed, context.tokens.len() as u64, Lane::Token));
        let surprise = rules.params.mirostat.map(|_| mirostat::surprise(&chosen, &self.candidates));
        Ok(Sample { token: chosen.token, surprise })
    }

    /// Like `process`, into `processed`. Returns false if no step applies; `processed` is then not
    /// written.
    fn rewrite(&mut self, logits: &[f32], rules: &ResolvedSampling, context: &Context) -> Result<bool, NoChoice> {
        if !rows::are_logits(logits) {
            return Err(NoChoice::NotFinite);
        }
        let params = &rules.params;
        let dry = params.dry.as_ref().is_some_and(Dry::is_on);
        if !exclude::applies(rules, context) && params.logit_bias.is_empty() && !params.counts_tokens() && !dry {
            return Ok(false);
        }
        let mut processed = std::mem::take(&mut self.processed);
        processed.copy_from_slice(logits);
        let result = self.process(&mut processed, rules, context);
        self.processed = processed;
        result.map(|()| true)
    }
}

/// Applies step 6, except for the parts that `weigh` has applied.
pub(super) fn narrow(candidates: &mut Vec<Candidate>, logits: &[f32], rules: &ResolvedSampling, context: &Context) {
    let params = &rules.params;
    if let Some(mirostat) = params.mirostat {
        return mirostat::keep_expected(candidates, context.history.mu().unwrap_or(mirostat::first_mu(mirostat)));
    }
    truncate::keep_top_k(candidates, params.top_k as usize);
    truncate::keep_typical(candidates, logits, params);
    truncate::keep_top_p(candidates, params.top_p);
    let chance = params.xtc_probability as f64;
    if chance > 0.0 && uniform(context.seed, context.tokens.len() as u64, Lane::Xtc) < chance {
        truncate::drop_top_choices(candidates, params.xtc_threshold);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::options::{Mirostat, SamplingParams};
    use history::SamplingHistory;

    const DRAWS: usize = 20_000;

    fn rules(params: SamplingParams) -> ResolvedSampling {
        ResolvedSampling { params, ..ResolvedSampling::default() }
    }

    fn choose(
        sampler: &mut Sampler,
        logits: &[f32],
        rules: &ResolvedSampling,
        tokens: &[u32],
        generated: usize,
    ) -> Result<Sample, NoChoice> {
        let history = SamplingHistory::new(rules, tokens, tokens.len() - generated).unwrap();
        let context = Context { tokens, prompt_len: tokens.len() - generated, generated, history: &history, allowed: None, seed: 1 };
        sampler.choose(logits, rules, &context)
    }

    fn token(logits: &[f32], rules: &ResolvedSampling, tokens: &[u32], generated: usize) -> Result<u32, NoChoice> {
        choose(&mut Sampler::new(logits.len()).unwrap(), logits, rules, tokens, generated).map(|chosen| chosen.token)
    }

    /// Returns the frequency of each token over many samples.
    fn frequencies(logits: &[f32], params: SamplingParams) -> Vec<f64> {
        let (mut sampler, rules) = (Sampler::new(logits.len()).unwrap(), rules(params));
        let tokens = vec![0; DRAWS];
        let mut counts = vec![0.0; logits.len()];
        for len in 0..DRAWS {
            let history = SamplingHistory::default();
            let context = Context { tokens: &tokens[..len], prompt_len: 0, generated: len, history: &history, allowed: None, seed: 1 };
            counts[sampler.choose(logits, &rules, &context).unwrap().token as usize] += 1.0 / DRAWS as f64;
        }
        counts
    }

    fn assert_near(found: &[f64], expected: &[f64]) {
        assert!(
            found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 0.012 && (*b > 0.0 || *a == 0.0)),
            "{found:?}, expected {expected:?}"
        );
    }

    /// Returns logits whose softmax is 0.15, 0.5, 0.1, 0.25.
    fn known() -> Vec<f32> {
        [0.15f32, 0.5, 0.1, 0.25].iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn plain_sampling_follows_the_softmax() {
        assert_near(&frequencies(&known(), SamplingParams::default()), &[0.15, 0.5, 0.1, 0.25]);
    }

    #[test]
    fn a_low_temperature_sharpens_the_distribution() {
        let squares = [0.15f64, 0.5, 0.1, 0.25].map(|p| p * p);
        let sum: f64 = squares.iter().sum();
        assert_near(&frequencies(&known(), SamplingParams { temperature: 0.5, ..Default::default() }), &squares.map(|p| p / sum));
    }

    #[test]
    fn top_k_top_p_and_min_p_keep_the_candidates_of_their_definitions() {
        let two = [0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0];
        assert_near(&frequencies(&known(), SamplingParams { top_k: 2, ..Default::default() }), &two);
        assert_near(&frequencies(&known(), SamplingParams { top_p: 0.7, ..Default::default() }), &two);
        assert_near(&frequencies(&known(), SamplingParams { min_p: 0.4, ..Default::default() }), &two);
        assert_near(&frequencies(&known(), SamplingParams { top_p: 0.01, ..Default::default() }), &[0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn xtc_applies_with_its_probability() {
        // When XTC applies, 0.25 is the least probable of the top choices: 0.15, 0.1 and 0.25 of a
        // total of 0.5 remain.
        let mixed = [0.15, 0.5, 0.1, 0.25].map(|p| 0.6 * p);
        let without = [0.3, 0.0, 0.2, 0.5].map(|p| 0.4 * p);
        let expected: Vec<f64> = mixed.iter().zip(without).map(|(a, b)| a + b).collect();
        let params = SamplingParams { xtc_probability: 0.4, xtc_threshold: 0.2, ..Default::default() };
        assert_near(&frequencies(&known(), params), &expected);
    }

    #[test]
    fn mirostat_keeps_the_surprise_near_its_target() {
        let logits: Vec<f32> = (0..1000).map(|i| -(i as f32).sqrt() / 2.0).collect();
        for tau in [2.0, 3.0, 4.5] {
            let rules = rules(SamplingParams { mirostat: Some(Mirostat { tau, eta: 0.1 }), ..Default::default() });
            let (mut sampler, mut history) = (Sampler::new(logits.len()).unwrap(), SamplingHistory::new(&rules, &[], 0).unwrap());
            let tokens = vec![0; 2000];
            let mut sum = 0.0;
            for len in 0..2000 {
                let context = Context { tokens: &tokens[..len], prompt_len: 0, generated: len, history: &history, allowed: None, seed: 1 };
                let chosen = sampler.choose(&logits, &rules, &context).unwrap();
                sum += chosen.surprise.unwrap() / 2000.0;
                history.advance(&rules, &chosen).unwrap();
            }
            assert!((sum - tau).abs() < 0.1, "{sum} bits, expected {tau}");
        }
    }

    #[test]
    fn greedy_selects_the_first_of_equal_tokens_and_min_tokens_excludes_the_end() {
        let logits = [0.0, 2.0, 2.0, 1.0];
        let mut rules = ResolvedSampling { eos: [1].into(), ..rules(SamplingParams { min_tokens: 3, ..SamplingParams::greedy() }) };
        assert_eq!(token(&logits, &rules, &[0; 9], 2), Ok(2));
        assert_eq!(token(&logits, &rules, &[0; 9], 3), Ok(1));
        rules.params.stop_token_ids = vec![0, 2, 3];
        assert_eq!(token(&logits, &rules, &[0; 9], 0), Err(NoChoice::Excluded), "all tokens are excluded");
    }

    #[test]
    fn greedy_applies_bias_penalties_and_exclusions() {
        let logits = [0.0, 3.0, 2.9, 1.0];
        let chosen = |params: SamplingParams| token(&logits, &rules(params), &[2, 0, 1, 3, 1], 4);
        let greedy = SamplingParams::greedy;
        assert_eq!(chosen(greedy()), Ok(1));
        assert_eq!(chosen(SamplingParams { presence_penalty: 0.5, ..greedy() }), Ok(2));
        assert_eq!(chosen(SamplingParams { frequency_penalty: 0.5, ..greedy() }), Ok(2));
        assert_eq!(chosen(SamplingParams { logit_bias: vec![(3, 2.5)], ..greedy() }), Ok(3));
        assert_eq!(chosen(SamplingParams { bad_words_ids: vec![vec![3, 1, 1], vec![1, 2]], ..greedy() }), Ok(3));
        assert_eq!(chosen(SamplingParams { allowed_token_ids: vec![0, 3], ..greedy() }), Ok(3));
        assert_eq!(chosen(SamplingParams { no_repeat_ngram_size: 1, ..greedy() }), Err(NoChoice::Excluded));
        let dry = Some(Dry { multiplier: 5.0, allowed_length: 1, ..Dry::default() });
        assert_eq!(
            chosen(SamplingParams { dry, logit_bias: vec![(3, 2.5)], ..greedy() }),
            Ok(1),
            "DRY penalizes token 3 because it followed token 1 before"
        );
    }

    #[test]
    fn dry_with_a_multiplier_of_0_is_off_for_any_repetition() {
        let logits = [0.0, 3.0];
        for (multiplier, chosen) in [(0.0, 1), (0.01, 0)] {
            let params = SamplingParams { dry: Some(Dry { multiplier, base: 2.5, ..Dry::default() }), ..SamplingParams::greedy() };
            assert_eq!(token(&logits, &rules(params), &[1; 900], 4), Ok(chosen), "{multiplier}");
        }
    }

    #[test]
    fn the_random_number_depends_only_on_seed_and_position() {
        let logits = vec![0.0; 1000];
        let (rules, history) = (rules(SamplingParams::default()), SamplingHistory::default());
        let drawn = |seed, tokens: &[u32], generated: usize| {
            let context = Context { tokens, prompt_len: tokens.len() - generated, generated, history: &history, allowed: None, seed };
            Sampler::new(1000).unwrap().choose(&logits, &rules, &context).unwrap().token
        };
        let at = |seed, tokens: &[u32]| drawn(seed, tokens, 0);
        assert_eq!(at(5, &[1, 2, 3]), at(5, &[7, 8, 9]));
        assert_ne!(at(5, &[1, 2, 3]), at(5, &[1, 2, 3, 4]));
        assert_ne!(at(5, &[1, 2, 3]), at(6, &[1, 2, 3]));
        assert_eq!(drawn(5, &[1, 2, 3], 2), at(5, &[1, 2, 3]), "the length of the prompt does not matter");
    }

    #[test]
    fn logits_without_applicable_parameters_are_unchanged() {
        let (mut sampler, history) = (Sampler::new(4).unwrap(), SamplingHistory::default());
        let context = Context { tokens: &[1], prompt_len: 1, generated: 0, history: &history, allowed: None, seed: 1 };
        let mut logits = known();
        let narrowed = rules(SamplingParams { top_k: 1, top_p: 0.5, ..Default::default() });
        assert_eq!(sampler.rewrite(&logits, &narrowed, &context), Ok(false));
        sampler.process(&mut logits, &narrowed, &context).unwrap();
        assert_eq!(logits, known());
        let biased = rules(SamplingParams { logit_bias: vec![(2, 1.0)], ..Default::default() });
        let expected = [logits[0], logits[1], logits[2] + 1.0, logits[3]];
        sampler.process(&mut logits, &biased, &context).unwrap();
        assert_eq!(logits, expected);
    }

    #[test]
    fn logits_that_are_not_finite_or_all_excluded_are_errors() {
        for params in [SamplingParams::greedy(), SamplingParams::default()] {
            let rules = rules(params);
            assert_eq!(token(&[f32::NAN, 1.0], &rules, &[1], 0), Err(NoChoice::NotFinite));
            assert_eq!(token(&[f32::INFINITY, 1.0], &rules, &[1], 0), Err(NoChoice::NotFinite));
            assert_eq!(token(&[f32::NEG_INFINITY; 2], &rules, &[1], 0), Err(NoChoice::Excluded));
        }
    }

    #[test]
    fn sampling_again_allocates_nothing() {
        let params = SamplingParams { dry: Some(Dry::default()), top_p: 0.9, allowed_token_ids: (0..40).collect(), ..Default::default() };
        let (mut sampler, rules) = (Sampler::new(50).unwrap(), rules(params));
        let capacities = |sampler: &Sampler| (sampler.processed.capacity(), sampler.candidates.capacity(), sampler.dry.capacities());
        let logits: Vec<f32> = (0..50).map(|i| i as f32 / 10.0).collect();
        choose(&mut sampler, &logits, &rules, &[1; 100], 50).unwrap();
        let before = capacities(&sampler);
        for tokens in [&[1; 100], &[1, 2].repeat(50)[..], &[]] {
            choose(&mut sampler, &logits, &rules, tokens, 0).unwrap();
        }
        assert_eq!(capacities(&sampler), before);
    }

    /// Random parameters: no panics, no excluded tokens, and reproducible results.
    #[test]
    fn any_combination_of_parameters_samples_an_allowed_token() {
        const VOCAB: usize = 50;
        let mut sampler = Sampler::new(VOCAB).unwrap();
        for case in 0..3000u64 {
            let number = |i: u64| uniform(case, i, Lane::Token);
            let some = |i: u64| number(i) < 0.3;
            let rules = ResolvedSampling { params: random_params(&number, &some), eos: [3].into(), ..ResolvedSampling::default() };
            rules.params.validate(VOCAB).unwrap();
            let tokens: Vec<u32> = (0..30).map(|i| (number(500 + i) * 12.0) as u32).collect();
            let logits: Vec<f32> = (0..VOCAB as u64)
                .map(|i| if number(100 + i) < 0.1 { f32::NEG_INFINITY } else { (number(200 + i) * 40.0 - 20.0) as f32 })
                .collect();
            let history = SamplingHistory::new(&rules, &tokens, 10).unwrap();
            let context = Context { tokens: &tokens, prompt_len: 10, generated: 20, history: &history, allowed: None, seed: 1 };
            let first = sampler.choose(&logits, &rules, &context);
            assert_eq!(sampler.choose(&logits, &rules, &context), first);
            let mut processed = logits;
            sampler.process(&mut processed, &rules, &context).unwrap();
            match first {
                Ok(chosen) => assert!(processed[chosen.token as usize] > f32::NEG_INFINITY),
                Err(why) => assert!(why == NoChoice::Excluded && processed.iter().all(|x| *x == f32::NEG_INFINITY)),
            }
        }
    }

    fn random_params(number: &impl Fn(u64) -> f64, some: &impl Fn(u64) -> bool) -> SamplingParams {
        let off = SamplingParams::default();
        let mirostat = some(1).then_some(Mirostat { tau: number(2) as f32 * 5.0 + 0.1, eta: 0.3 });
        let plain = mirostat.is_none();
        SamplingParams {
            temperature: if plain && some(3) { 0.0 } else { number(4) as f32 * 3.0 + 1e-3 },
            top_k: if plain && some(5) { (number(6) * 60.0) as u32 } else { 0 },
            top_p: if plain && some(7) { number(8) as f32 + 1e-9 } else { 1.0 }.min(1.0),
            min_p: if plain && some(9) { number(10) as f32 } else { 0.0 },
            typical_p: if plain && some(11) { number(12) as f32 + 1e-9 } else { 1.0 }.min(1.0),
            top_n_sigma: if plain && some(13) { number(14) as f32 * 3.0 } else { 0.0 },
            xtc_probability: if plain && some(15) { number(16) as f32 } else { 0.0 },
            xtc_threshold: number(17) as f32 / 2.0,
            mirostat,
            presence_penalty: if some(18) { number(19) as f32 * 4.0 - 2.0 } else { 0.0 },
            frequency_penalty: if some(20) { number(21) as f32 * 4.0 - 2.0 } else { 0.0 },
            repetition_penalty: if some(22) { number(23) as f32 * 3.0 + 0.01 } else { 1.0 },
            no_repeat_ngram_size: if some(24) { (number(25) * 5.0) as u32 } else { 0 },
            dry: some(26).then(|| Dry { penalty_last_n: some(27).then_some(7), ..Dry::default() }),
            logit_bias: if some(28) { vec![(4, number(29) as f32 * 200.0 - 100.0)] } else { vec![] },
            bad_words_ids: if some(30) { vec![vec![5], vec![1, 2]] } else { vec![] },
            allowed_token_ids: if some(31) { (0..(number(32) * 50.0) as u32).collect() } else { vec![] },
            min_tokens: if some(33) { 25 } else { 0 },
            ..off
        }
    }
}
