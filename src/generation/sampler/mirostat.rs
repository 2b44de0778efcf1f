//! Mirostat 2 (Basu et al., ICLR 2021): excludes tokens with a surprise of more than `mu` bits.
//! Each sampled token updates `mu`, so that the surprise per token stays near `tau` bits.

use super::truncate::{Candidate, by_rank, total};
use crate::types::options::Mirostat;

pub fn first_mu(mirostat: Mirostat) -> f32 {
    2.0 * mirostat.tau
}

/// Returns the state after a token with this surprise. None: no token was sampled.
pub fn next_mu(mirostat: Mirostat, mu: f32, surprise: Option<f32>) -> f32 {
    surprise.map_or(mu, |surprise| mu - mirostat.eta * (surprise - mirostat.tau))
}

/// Keeps the candidates with a surprise of at most `mu` bits, and always the most probable one.
pub fn keep_expected(candidates: &mut Vec<Candidate>, mu: f32) {
    let min_share = total(candidates) * libm::exp2(-mu as f64);
    let Some(&best) = candidates.iter().min_by(|a, b| by_rank(a, b)) else { return };
    candidates.retain(|candidate| candidate.share as f64 >= min_share);
    if candidates.is_empty() {
        candidates.push(best);
    }
}

/// Returns the surprise in bits of a candidate among the remaining ones.
pub fn surprise(chosen: &Candidate, candidates: &[Candidate]) -> f32 {
    libm::log2(total(candidates) / chosen.share as f64) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(shares: &[f32]) -> Vec<Candidate> {
        let candidate = |(token, &share): (usize, &f32)| Candidate { token: token as u32, rank: share.ln(), share };
        shares.iter().enumerate().map(candidate).collect()
    }

    #[test]
    fn candidates_with_a_surprise_above_mu_are_removed() {
        let kept = |mu: f32| {
            let mut candidates = candidates(&[0.125, 1.0, 0.25, 0.5, 0.125]); // 1/16, 1/2, 1/8, 1/4, 1/16: 4, 1, 3, 2, 4 bits
            keep_expected(&mut candidates, mu);
            candidates.iter().map(|c| c.token).collect::<Vec<_>>()
        };
        assert_eq!(kept(4.0), [0, 1, 2, 3, 4]);
        assert_eq!(kept(3.5), [1, 2, 3]);
        assert_eq!(kept(2.0), [1, 3]);
        assert_eq!(kept(0.5), [1]);
        assert_eq!(kept(-1e9), [1]);
        assert_eq!(kept(1e9), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn surprise_is_relative_to_the_remaining_candidates() {
        let left = candidates(&[1.0, 0.5, 0.5]);
        assert_eq!(surprise(&left[0], &left), 1.0);
        assert_eq!(surprise(&left[1], &left), 2.0);
        assert_eq!(surprise(&left[0], &left[..1]), 0.0);
    }
}
