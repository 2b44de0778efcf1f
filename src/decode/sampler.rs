//! Greedy choice and sampling. Order of the warpers: temperature, min-p, top-k, top-p.

use std::sync::Arc;

use super::random::uniform;
use crate::error::{self, try_vec};
use crate::options::SamplingParams;

/// What ends one sequence and how its tokens are chosen.
#[derive(Debug, Clone)]
pub struct Rules {
    pub params: SamplingParams,
    /// The model's end-of-sequence tokens; empty with `ignore_eos`.
    pub eos: Arc<[u32]>,
    pub seed: u64,
}

impl Rules {
    pub fn stops_at(&self, token: u32) -> bool {
        self.eos.contains(&token) || self.params.stop_token_ids.contains(&token)
    }

    /// Whether a sequence that has generated so many tokens may not end with the next one.
    pub fn must_go_on(&self, generated: usize) -> bool {
        generated < self.params.min_tokens
    }
}

/// Why no token can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoChoice {
    /// The logits hold NaN or infinity.
    NotFinite,
    /// Every token is excluded.
    Excluded,
}

/// Working memory for one row of logits, as long as the vocabulary.
pub struct Sampler {
    logits: Vec<f32>,
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Candidate {
    token: u32,
    logit: f32,
    /// Probability, not normalized: the best candidate has 1.
    share: f32,
}

impl Sampler {
    pub fn new(vocab_size: usize) -> error::Result<Sampler> {
        Ok(Sampler { logits: try_vec(vocab_size, 0.0)?, candidates: try_vec(vocab_size, Candidate::default())? })
    }

    /// The next token after `generated` ones.
    pub fn choose(&mut self, logits: &[f32], rules: &Rules, generated: usize) -> Result<u32, NoChoice> {
        if logits.iter().any(|x| x.is_nan() || *x == f32::INFINITY) {
            return Err(NoChoice::NotFinite);
        }
        if !rules.must_go_on(generated) {
            return self.pick(logits, rules, generated);
        }
        let mut masked = std::mem::take(&mut self.logits);
        masked.copy_from_slice(logits);
        let ends = rules.eos.iter().chain(&rules.params.stop_token_ids);
        ends.for_each(|&token| masked[token as usize] = f32::NEG_INFINITY);
        let token = self.pick(&masked, rules, generated);
        self.logits = masked;
        token
    }

    fn pick(&mut self, logits: &[f32], rules: &Rules, generated: usize) -> Result<u32, NoChoice> {
        let (best, max) = argmax(logits).ok_or(NoChoice::Excluded)?;
        if rules.params.temperature == 0.0 {
            return Ok(best);
        }
        self.weigh(logits, max, &rules.params);
        keep_top_k(&mut self.candidates, rules.params.top_k as usize);
        keep_top_p(&mut self.candidates, rules.params.top_p);
        Ok(draw(&self.candidates, uniform(rules.seed, generated as u64)))
    }

    /// Candidates with their share after temperature, without those that min-p excludes.
    fn weigh(&mut self, logits: &[f32], max: f32, params: &SamplingParams) {
        self.candidates.clear();
        for (token, &logit) in logits.iter().enumerate() {
            let share = libm::expf((logit - max) / params.temperature);
            if share > 0.0 && share >= params.min_p {
                self.candidates.push(Candidate { token: token as u32, logit, share });
            }
        }
    }
}

/// The first of the largest logits. None: there is none above minus infinity.
fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, &logit) in logits.iter().enumerate() {
        if logit > best.1 {
            best = (token as u32, logit);
        }
    }
    (best.1 > f32::NEG_INFINITY).then_some(best)
}

/// More probable first; of equals, the lower token id.
fn by_rank(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

fn keep_top_k(candidates: &mut Vec<Candidate>, k: usize) {
    if k > 0 && k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, by_rank);
        candidates.truncate(k);
    }
    // Whatever way they were selected, they are drawn from in the order of their ids.
    candidates.sort_unstable_by_key(|candidate| candidate.token);
}

/// The fewest candidates that together reach `p`, found without sorting them all: the top n for n = 64, 256, 1024, ...
fn keep_top_p(candidates: &mut Vec<Candidate>, p: f32) {
    if p >= 1.0 {
        return;
    }
    let wanted = p as f64 * total(candidates);
    let mut n = 64;
    loop {
        n = n.min(candidates.len());
        if n < candidates.len() {
            candidates.select_nth_unstable_by(n - 1, by_rank);
        }
        let top = &mut candidates[..n];
        top.sort_unstable_by(by_rank);
        let mut sum = 0.0;
        let reached = top.iter().position(|candidate| {
            sum += candidate.share as f64;
            sum >= wanted
        });
        if reached.is_some() || n == candidates.len() {
            candidates.truncate(reached.map_or(n, |last| last + 1));
            return candidates.sort_unstable_by_key(|candidate| candidate.token);
        }
        n *= 4;
    }
}

fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| candidate.share as f64).sum()
}

fn draw(candidates: &[Candidate], uniform: f64) -> u32 {
    let mut left = uniform * total(candidates);
    for candidate in candidates {
        left -= candidate.share as f64;
        if left < 0.0 {
            return candidate.token;
        }
    }
    candidates[candidates.len() - 1].token
}

/// Log probability of `token` under the model's own distribution (no temperature, no mask).
pub fn logprob(logits: &[f32], token: u32) -> f32 {
    let max = logits.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b)) as f64;
    let sum: f64 = logits.iter().map(|&x| libm::exp(x as f64 - max)).sum();
    (logits[token as usize] as f64 - max - libm::log(sum)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(params: SamplingParams) -> Rules {
        Rules { params, eos: Arc::new([]), seed: 1 }
    }

    /// How often each token comes out of 20,000 draws.
    fn frequencies(logits: &[f32], params: SamplingParams) -> Vec<f64> {
        let mut sampler = Sampler::new(logits.len()).unwrap();
        let mut counts = vec![0.0; logits.len()];
        for position in 0..20_000 {
            counts[sampler.choose(logits, &rules(params.clone()), position).unwrap() as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    fn assert_near(found: &[f64], expected: &[f64]) {
        assert!(
            found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 0.012 && (*b > 0.0 || *a == 0.0)),
            "{found:?}, expected {expected:?}"
        );
    }

    /// Logits whose softmax is 0.5, 0.25, 0.15, 0.1.
    fn known() -> Vec<f32> {
        [0.15f32, 0.5, 0.1, 0.25].iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn plain_sampling_follows_the_softmax() {
        assert_near(&frequencies(&known(), SamplingParams::default()), &[0.15, 0.5, 0.1, 0.25]);
    }

    #[test]
    fn temperature_sharpens() {
        let squares = [0.15f64, 0.5, 0.1, 0.25].map(|p| p * p);
        let sum: f64 = squares.iter().sum();
        assert_near(&frequencies(&known(), SamplingParams { temperature: 0.5, ..Default::default() }), &squares.map(|p| p / sum));
    }

    #[test]
    fn top_k_top_p_and_min_p_keep_what_their_definitions_say() {
        let two = [0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0];
        assert_near(&frequencies(&known(), SamplingParams { top_k: 2, ..Default::default() }), &two);
        assert_near(&frequencies(&known(), SamplingParams { top_p: 0.7, ..Default::default() }), &two);
        assert_near(&frequencies(&known(), SamplingParams { min_p: 0.4, ..Default::default() }), &two);
        assert_near(&frequencies(&known(), SamplingParams { top_p: 0.01, ..Default::default() }), &[0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn top_p_without_a_full_sort_equals_top_p_with_one() {
        let logits: Vec<f32> = (0..5000).map(|i| (uniform(3, i) * 6.0) as f32).collect();
        for p in [0.001, 0.1, 0.5, 0.9, 0.999] {
            let mut sampler = Sampler::new(logits.len()).unwrap();
            sampler.weigh(&logits, argmax(&logits).unwrap().1, &SamplingParams::default());
            let mut sorted = sampler.candidates.clone();
            sorted.sort_by(by_rank);
            let wanted = p as f64 * total(&sampler.candidates);
            let mut sum = 0.0;
            let count = sorted
                .iter()
                .take_while(|c| {
                    let more = sum < wanted;
                    sum += c.share as f64;
                    more
                })
                .count();
            let mut expected: Vec<u32> = sorted[..count].iter().map(|c| c.token).collect();
            expected.sort_unstable();
            keep_top_p(&mut sampler.candidates, p);
            assert_eq!(sampler.candidates.iter().map(|c| c.token).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn greedy_takes_the_first_of_equals_and_min_tokens_forbids_the_end() {
        let mut sampler = Sampler::new(4).unwrap();
        let logits = [0.0, 2.0, 2.0, 1.0];
        let mut rules = Rules { eos: Arc::new([1]), ..rules(SamplingParams { min_tokens: 3, ..SamplingParams::greedy() }) };
        assert_eq!(sampler.choose(&logits, &rules, 2), Ok(2));
        assert_eq!(sampler.choose(&logits, &rules, 3), Ok(1));
        rules.params.stop_token_ids = vec![0, 2, 3];
        assert_eq!(sampler.choose(&logits, &rules, 0), Err(NoChoice::Excluded), "nothing is left to choose");
    }

    #[test]
    fn logits_that_are_not_numbers_choose_nothing() {
        let mut sampler = Sampler::new(2).unwrap();
        for params in [SamplingParams::greedy(), SamplingParams::default()] {
            assert_eq!(sampler.choose(&[f32::NAN, 1.0], &rules(params.clone()), 0), Err(NoChoice::NotFinite));
            assert_eq!(sampler.choose(&[f32::NEG_INFINITY; 2], &rules(params), 0), Err(NoChoice::Excluded));
        }
        assert_eq!(sampler.choose(&[f32::INFINITY, 1.0], &rules(SamplingParams::default()), 0), Err(NoChoice::NotFinite));
        assert_eq!(sampler.choose(&[f32::INFINITY, 1.0], &rules(SamplingParams::greedy()), 0), Err(NoChoice::NotFinite));
    }

    #[test]
    fn logprobs_are_those_of_the_softmax() {
        for (token, p) in [0.15f32, 0.5, 0.1, 0.25].iter().enumerate() {
            assert!((logprob(&known(), token as u32) - p.ln()).abs() < 1e-6);
        }
    }
}
