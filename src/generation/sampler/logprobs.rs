//! Log probabilities under the model's own distribution, without temperature, penalties and
//! exclusions.

use super::rows;
use crate::error::Result;

/// Returns the log probability of `token`.
pub fn logprob(logits: &[f32], token: u32) -> f32 {
    (logits[token as usize] as f64 - normalizer(logits)) as f32
}

/// Writes the `k` most probable tokens with their log probabilities to `out`, by descending
/// probability and then ascending token id.
pub fn top_logprobs(logits: &[f32], k: usize, out: &mut Vec<(u32, f32)>) -> Result<()> {
    select_top(logits, k, out)?;
    if !out.is_empty() {
        normalize(out, normalizer(logits));
    }
    Ok(())
}

/// Computes both at once, at little more than the cost of one.
pub fn logprob_and_top(logits: &[f32], token: u32, k: usize, out: &mut Vec<(u32, f32)>) -> Result<f32> {
    select_top(logits, k, out)?;
    let normalizer = normalizer(logits);
    normalize(out, normalizer);
    Ok((logits[token as usize] as f64 - normalizer) as f32)
}

/// Returns the logarithm of the sum of all exponentials.
fn normalizer(logits: &[f32]) -> f64 {
    let max = rows::largest(logits);
    max as f64 + libm::log(rows::sum_of_powers(logits, max))
}

fn normalize(tokens: &mut [(u32, f32)], normalizer: f64) {
    tokens.iter_mut().for_each(|(_, logit)| *logit = (*logit as f64 - normalizer) as f32);
}

/// Selects the `k` largest logits in order, in one pass with a buffer of 2 * k.
fn select_top(logits: &[f32], k: usize, out: &mut Vec<(u32, f32)>) -> Result<()> {
    let k = k.min(logits.len());
    // Adding 0 turns -0 into 0, which is equal.
    let by_rank = |a: &(u32, f32), b: &(u32, f32)| (b.1 + 0.0).total_cmp(&(a.1 + 0.0)).then(a.0.cmp(&b.0));
    out.clear();
    if k == 0 {
        return Ok(());
    }
    out.try_reserve(2 * k)?;
    let mut min_logit = f32::NEG_INFINITY; // lower bound of the k best logits so far
    for (token, &logit) in logits.iter().enumerate() {
        // Among equals, the first stays. NaN passes the filter, so that there are never fewer than
        // k.
        if out.len() >= k && logit <= min_logit {
            continue;
        }
        out.push((token as u32, logit));
        if out.len() == 2 * k {
            out.select_nth_unstable_by(k - 1, by_rank);
            out.truncate(k);
            min_logit = out[k - 1].1;
        }
    }
    out.sort_unstable_by(by_rank);
    out.truncate(k);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::sampler::random::{Lane, uniform};

    #[test]
    fn logprobs_equal_those_of_the_softmax() {
        let probabilities = [0.15f32, 0.5, 0.1, 0.25];
        let logits = probabilities.map(|p| p.ln() + 3.0);
        for (token, p) in probabilities.iter().enumerate() {
            assert!((logprob(&logits, token as u32) - p.ln()).abs() < 1e-6);
        }
    }

    #[test]
    fn top_logprobs_equal_those_of_a_full_sort() {
        for seed in 0..50 {
            // Few distinct values, so that many are equal.
            let logits: Vec<f32> = (0..300).map(|i| (uniform(seed, i, Lane::Token) * 40.0).floor() as f32 / 8.0).collect();
            let mut sorted: Vec<(u32, f32)> = (0..300).map(|token| (token, logprob(&logits, token))).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            let mut top = vec![];
            for k in [0, 1, 2, 5, 128, 299, 300, 1000] {
                top_logprobs(&logits, k, &mut top).unwrap();
                assert_eq!(top, sorted[..k.min(300)], "{k}");
                assert_eq!(logprob_and_top(&logits, 17, k, &mut top).unwrap(), logprob(&logits, 17));
                assert_eq!(top, sorted[..k.min(300)]);
            }
        }
    }

    #[test]
    fn excluded_tokens_rank_last_and_nan_does_not_panic() {
        let mut top = vec![];
        top_logprobs(&[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY], 3, &mut top).unwrap();
        assert_eq!(top, [(1, 0.0), (0, f32::NEG_INFINITY), (2, f32::NEG_INFINITY)]);
        top_logprobs(&[f32::NAN; 9], 2, &mut top).unwrap();
        assert_eq!(top.len(), 2);
        top_logprobs(&[], 2, &mut top).unwrap();
        assert!(top.is_empty());
    }

    #[test]
    fn a_second_row_allocates_nothing() {
        let mut top = vec![];
        top_logprobs(&[1.0, 2.0, 3.0], 3, &mut top).unwrap();
        let (at, capacity) = (top.as_ptr(), top.capacity());
        top_logprobs(&[3.0, 2.0, 1.0], 3, &mut top).unwrap();
        assert_eq!((top.as_ptr(), top.capacity()), (at, capacity));
    }
}
