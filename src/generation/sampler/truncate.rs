//! The candidates of sampling, and their truncation. Every function keeps at least one candidate,
//! and the order by id.

use std::cmp::Ordering;

use super::rows;
use crate::types::options::SamplingParams;

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Candidate {
    pub token: u32,
    /// The number by which candidates are ranked, usually the logit.
    pub rank: f32,
    /// Unnormalized probability, relative to the best candidate before truncation, which has 1.
    pub share: f32,
}

/// Returns the first of the largest logits. None: all are minus infinity.
pub fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    let max = rows::largest(logits);
    let first = rows::first(logits, max)?;
    (max > f32::NEG_INFINITY).then_some((first as u32, max))
}

/// Number of logits that are compared at once.
const PART: usize = 64;

/// Computes the candidates with their probabilities after temperature. Omits those that top-n-sigma
/// and min-p exclude, and most of those that top-k excludes. `max` is the largest logit.
pub fn weigh(candidates: &mut Vec<Candidate>, logits: &[f32], max: f32, params: &SamplingParams) {
    let floor = floor(candidates, logits, max, params);
    let mut shares = [0.0; PART];
    candidates.clear();
    for (part, logits) in logits.chunks(PART).enumerate() {
        if !rows::reaches(logits, floor) {
            continue;
        }
        for (share, &logit) in shares.iter_mut().zip(logits) {
            *share = rows::exp((logit - max) / params.temperature);
        }
        for (i, (&rank, &share)) in logits.iter().zip(&shares).enumerate() {
            // min-p (Nguyen et al. 2024) is relative to the most probable token, whose share is 1.
            if share > 0.0 && share >= params.min_p && rank >= floor {
                candidates.push(Candidate { token: (part * PART + i) as u32, rank, share });
            }
        }
    }
}

/// Returns a lower bound of the candidates' logits.
fn floor(scratch: &mut Vec<Candidate>, logits: &[f32], max: f32, params: &SamplingParams) -> f32 {
    // Slightly lower than exact, because the exact test compares shares.
    let min_p = max + params.temperature * (libm::logf(params.min_p) - 1e-3);
    let sigma = if params.top_n_sigma > 0.0 { sigma_floor(logits, max, params.top_n_sigma) } else { f32::NEG_INFINITY };
    top_k_floor(scratch, logits, params.top_k as usize).max(min_p).max(sigma)
}

/// Returns the k-th largest of the parts' maxima. At least k logits reach it.
fn top_k_floor(scratch: &mut Vec<Candidate>, logits: &[f32], k: usize) -> f32 {
    if k == 0 || k > logits.len().div_ceil(PART) {
        return f32::NEG_INFINITY;
    }
    scratch.clear();
    scratch.extend(logits.chunks(PART).map(|part| Candidate { rank: rows::largest(part), ..Candidate::default() }));
    scratch.select_nth_unstable_by(k - 1, by_rank).1.rank
}

/// Top-n-sigma (Tang et al. 2024): n standard deviations of the possible tokens' logits below the
/// largest logit. Temperature scales both sides equally and cancels out.
fn sigma_floor(logits: &[f32], max: f32, n: f32) -> f32 {
    let possible = || logits.iter().filter(|&&logit| logit > f32::NEG_INFINITY).map(|&logit| logit as f64);
    let count = possible().count() as f64;
    let mean = possible().sum::<f64>() / count;
    let variance = possible().map(|logit| (logit - mean) * (logit - mean)).sum::<f64>() / count;
    (max as f64 - n as f64 * variance.sqrt()) as f32
}

/// Orders candidates by descending rank, then by ascending token id.
pub fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.rank.total_cmp(&a.rank).then(a.token.cmp(&b.token))
}

pub fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| candidate.share as f64).sum()
}

pub fn keep_top_k(candidates: &mut Vec<Candidate>, k: usize) {
    if k > 0 && k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, by_rank);
        candidates.truncate(k);
        sort_by_token(candidates);
    }
}

/// Top-p (Holtzman et al. 2020): keeps the fewest candidates whose total probability reaches `p`,
/// best first.
pub fn keep_top_p(candidates: &mut Vec<Candidate>, p: f32) {
    if p >= 1.0 {
        return;
    }
    let total = total(candidates);
    // All candidates with less than this add up to less than 1 - p, so they are not needed.
    let negligible = (1.0 - p as f64) * total / candidates.len() as f64;
    candidates.retain(|candidate| candidate.share as f64 >= negligible);
    keep_first(candidates, p as f64 * total);
}

/// Keeps the fewest candidates by rank whose shares reach `wanted`. Selects by halves, and
/// continues only in the half that contains the last needed one.
fn keep_first(candidates: &mut Vec<Candidate>, wanted: f64) {
    const FEW: usize = 64;
    // All candidates before `start` are needed, and their sum is `sum`. None from `end` on is
    // needed.
    let (mut start, mut end, mut sum) = (0, candidates.len(), 0.0);
    while end - start > FEW {
        let middle = start + (end - start) / 2;
        candidates[start..end].select_nth_unstable_by(middle - start, by_rank);
        let better = total(&candidates[start..middle]);
        if sum + better >= wanted {
            end = middle;
        } else {
            (start, sum) = (middle, sum + better);
        }
    }
    candidates[start..end].sort_unstable_by(by_rank);
    let is_needed = |candidate: &&Candidate| {
        let needed = sum < wanted;
        sum += candidate.share as f64;
        needed
    };
    let needed = candidates[start..end].iter().take_while(is_needed).count();
    candidates.truncate(start + needed);
    sort_by_token(candidates);
}

/// Locally typical sampling (Meister et al. 2023): like top-p, but ordered by the distance of the
/// surprise to the expected surprise. `logits` are those of the candidates, the best of which must
/// still be present.
pub fn keep_typical(candidates: &mut Vec<Candidate>, logits: &[f32], params: &SamplingParams) {
    if params.typical_p >= 1.0 {
        return;
    }
    let total = total(candidates);
    let (log_total, best) = (libm::log(total), candidates.iter().map(|candidate| candidate.rank).fold(f32::MIN, f32::max));
    let surprise = |candidate: &Candidate| log_total + ((best - candidate.rank) / params.temperature) as f64;
    let expected = candidates.iter().map(|candidate| candidate.share as f64 * surprise(candidate)).sum::<f64>() / total;
    for candidate in candidates.iter_mut() {
        candidate.rank = -(surprise(candidate) - expected).abs() as f32;
    }
    keep_first(candidates, params.typical_p as f64 * total);
    candidates.iter_mut().for_each(|candidate| candidate.rank = logits[candidate.token as usize]);
}

/// XTC, "Exclude Top Choices" (P. E. Weidmann, text-generation-webui pull request 6335): of the
/// candidates at least as probable as `threshold`, keeps only the least probable one.
pub fn drop_top_choices(candidates: &mut Vec<Candidate>, threshold: f32) {
    let min_share = threshold as f64 * total(candidates);
    let is_top = |candidate: &Candidate| candidate.share as f64 >= min_share;
    let last = candidates.iter().filter(|candidate| is_top(candidate)).max_by(|a, b| by_rank(a, b)).copied();
    candidates.retain(|candidate| !is_top(candidate) || Some(*candidate) == last);
}

/// Number of candidates from which two passes over all of them take less time than comparisons.
const MANY: usize = 512;
/// Maximum number of bits of an id that one pass distributes. Two passes suffice for a vocabulary.
const MAX_DIGIT_BITS: u32 = 11;

/// Restores the order by id. Many candidates are distributed by the lower and then by the upper
/// half of their ids, if the list has memory for as many more.
fn sort_by_token(candidates: &mut Vec<Candidate>) {
    let count = candidates.len();
    let max = candidates.iter().map(|candidate| candidate.token).max().unwrap_or(0);
    let digit = (u32::BITS - max.leading_zeros()).div_ceil(2);
    if count < MANY || digit > MAX_DIGIT_BITS || candidates.capacity() < 2 * count {
        return candidates.sort_unstable_by_key(|candidate| candidate.token);
    }
    candidates.resize(2 * count, Candidate::default());
    let (list, spare) = candidates.split_at_mut(count);
    distribute(list, spare, |token| token as usize & ((1 << digit) - 1));
    distribute(spare, list, |token| (token >> digit) as usize);
    candidates.truncate(count);
}

/// Copies candidates in the order of a part of their ids. Equal parts keep their order.
fn distribute(from: &[Candidate], to: &mut [Candidate], part_of: impl Fn(u32) -> usize) {
    let mut places = [0u32; 1 << MAX_DIGIT_BITS];
    from.iter().for_each(|candidate| places[part_of(candidate.token)] += 1);
    let mut next = 0;
    for place in &mut places {
        (*place, next) = (next, next + *place);
    }
    for candidate in from {
        let place = &mut places[part_of(candidate.token)];
        to[*place as usize] = *candidate;
        *place += 1;
    }
}

/// Returns the candidate at the fraction `uniform` (0 to 1) of the cumulative shares.
pub fn draw(candidates: &[Candidate], uniform: f64) -> Candidate {
    let mut left = uniform * total(candidates);
    for candidate in candidates {
        left -= candidate.share as f64;
        if left < 0.0 {
            return *candidate;
        }
    }
    candidates[candidates.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::sampler::random::{Lane, uniform};

    fn weighed(logits: &[f32], params: &SamplingParams) -> Vec<Candidate> {
        let mut candidates = vec![];
        weigh(&mut candidates, logits, argmax(logits).unwrap().1, params);
        candidates
    }

    fn tokens(candidates: &[Candidate]) -> Vec<u32> {
        candidates.iter().map(|candidate| candidate.token).collect()
    }

    fn with_probabilities(probabilities: &[f32]) -> Vec<Candidate> {
        weighed(&probabilities.iter().map(|p| p.ln()).collect::<Vec<_>>(), &SamplingParams::default())
    }

    fn many_logits() -> Vec<f32> {
        (0..5000).map(|i| (uniform(3, i, Lane::Token) * 6.0) as f32).collect()
    }

    /// Top-p by its definition, with a full sort.
    fn top_p_with_a_sort(candidates: &[Candidate], p: f32) -> Vec<u32> {
        let mut sorted = candidates.to_vec();
        sorted.sort_by(by_rank);
        let wanted = p as f64 * total(candidates);
        let mut sum = 0.0;
        let is_needed = |candidate: &&Candidate| {
            let needed = sum < wanted;
            sum += candidate.share as f64;
            needed
        };
        let mut kept: Vec<u32> = sorted.iter().take_while(is_needed).map(|candidate| candidate.token).collect();
        kept.sort_unstable();
        kept
    }

    #[test]
    fn top_p_without_a_full_sort_equals_top_p_with_one() {
        let candidates = weighed(&many_logits(), &SamplingParams::default());
        for p in [0.001, 0.1, 0.5, 0.9, 0.999] {
            let mut kept = candidates.clone();
            keep_top_p(&mut kept, p);
            assert_eq!(tokens(&kept), top_p_with_a_sort(&candidates, p));
        }
    }

    #[test]
    fn the_shortcuts_for_top_k_and_min_p_keep_all_candidates() {
        for (seed, spread) in [(5, 6.0), (6, 60.0), (7, 0.01)] {
            // Rounded, so that many logits are equal.
            let logits: Vec<f32> = (0..5000).map(|i| (uniform(seed, i, Lane::Token) * spread * 8.0).round() as f32 / 8.0).collect();
            let all = weighed(&logits, &SamplingParams::default());
            for k in [1, 2, 40, 79, 80, 1000, 9999] {
                let mut kept = weighed(&logits, &SamplingParams { top_k: k, ..Default::default() });
                let mut sorted = all.clone();
                keep_top_k(&mut kept, k as usize);
                sorted.sort_by(by_rank);
                sorted.truncate(k as usize);
                sorted.sort_by_key(|candidate| candidate.token);
                assert_eq!(kept, sorted, "top {k}");
            }
            for min_p in [1e-30, 1e-3, 0.1, 0.99, 1.0] {
                let kept = weighed(&logits, &SamplingParams { min_p, ..Default::default() });
                let expected: Vec<Candidate> = all.iter().filter(|candidate| candidate.share >= min_p).copied().collect();
                assert_eq!(kept, expected, "min-p {min_p}");
            }
        }
    }

    #[test]
    fn typical_p_also_removes_tokens_that_are_too_probable() {
        // The expected surprise is 1.1. The surprise of 0.28 is 1.3, that of 0.5 is 0.7.
        let mut candidates = with_probabilities(&[0.02, 0.5, 0.28, 0.2]);
        let params = SamplingParams { typical_p: 0.25, ..Default::default() };
        keep_typical(&mut candidates, &[0.02f32, 0.5, 0.28, 0.2].map(f32::ln), &params);
        assert_eq!(tokens(&candidates), [2]);
        assert_eq!(candidates[0].rank, 0.28f32.ln(), "the rank is the logit again");
    }

    #[test]
    fn xtc_keeps_the_least_probable_top_choice_and_all_other_tokens() {
        let kept = |threshold: f32| {
            let mut candidates = with_probabilities(&[0.05, 0.3, 0.4, 0.15, 0.1]);
            drop_top_choices(&mut candidates, threshold);
            tokens(&candidates)
        };
        assert_eq!(kept(0.12), [0, 3, 4]);
        assert_eq!(kept(0.2), [0, 1, 3, 4]);
        assert_eq!(kept(0.35), [0, 1, 2, 3, 4], "a single top choice is kept");
        assert_eq!(kept(0.45), [0, 1, 2, 3, 4]);
        assert_eq!(kept(0.0), [0]);
    }

    #[test]
    fn top_n_sigma_does_not_depend_on_temperature_or_excluded_tokens() {
        let mut logits = many_logits();
        let kept =
            |logits: &[f32], temperature| tokens(&weighed(logits, &SamplingParams { temperature, top_n_sigma: 0.5, ..Default::default() }));
        let expected = kept(&logits, 1.0);
        assert!((100..1500).contains(&expected.len()), "{} of 5000", expected.len());
        assert_eq!(kept(&logits, 7.0), expected);
        logits.extend([f32::NEG_INFINITY; 5000]);
        assert_eq!(kept(&logits, 1.0), expected);
    }

    #[test]
    fn any_number_of_candidates_is_sorted_by_token() {
        for (count, step) in [(0, 1), (1, 7), (511, 3), (512, 1), (513, 300), (5000, 29), (5000, 1000)] {
            let shuffled = |i: u32| Candidate { token: i * 1999 % count * step, rank: i as f32, share: 1.0 };
            for spare in [0, 5000] {
                let mut candidates = Vec::with_capacity(count as usize + spare);
                candidates.extend((0..count).map(shuffled));
                let mut expected = candidates.clone();
                expected.sort_by_key(|candidate| candidate.token);
                sort_by_token(&mut candidates);
                assert_eq!(candidates, expected, "{count} candidates, {step} apart");
            }
        }
    }

    #[test]
    fn any_truncation_keeps_at_least_one_candidate() {
        for logits in [vec![0.0; 7], vec![f32::MAX, f32::MIN, 0.0], vec![3.0], vec![f32::NEG_INFINITY, -5.0]] {
            for temperature in [1e-40, 1e4] {
                let params = SamplingParams { temperature, min_p: 1.0, top_n_sigma: 1e-9, typical_p: 1e-9, ..Default::default() };
                let mut candidates = weighed(&logits, &params);
                keep_top_k(&mut candidates, 1);
                keep_typical(&mut candidates, &logits, &params);
                keep_top_p(&mut candidates, 1e-9);
                drop_top_choices(&mut candidates, 0.0);
                assert_eq!(tokens(&candidates), [argmax(&logits).unwrap().0]);
            }
        }
    }
}
