//! Selection of the best continuations of a group of beams, without a full sort.

use std::cmp::Ordering;

use crate::error::Result;
use crate::generation::sampler::rows::largest;

/// Tokens whose maximum is compared at once.
const CHUNK: usize = 256;

/// A continuation of a beam by one token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    /// Index of the beam in its group.
    pub beam: usize,
    pub token: u32,
    /// Sum of the log probabilities, including this token's.
    pub score: f32,
}

/// Orders candidates by descending score, then by ascending beam and token id.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.score.total_cmp(&a.score).then(a.beam.cmp(&b.beam)).then(a.token.cmp(&b.token))
}

/// The best `wanted` candidates of those offered. The buffer has twice the size; when it is full,
/// the worse half is discarded.
#[derive(Default)]
pub(super) struct Best {
    kept: Vec<Candidate>,
    wanted: usize,
    /// Score that at least `wanted` candidates reach.
    bar: f32,
}

impl Best {
    pub fn start(&mut self, wanted: usize) -> Result<()> {
        self.kept.clear();
        self.kept.try_reserve(2 * wanted)?;
        (self.wanted, self.bar) = (wanted, f32::NEG_INFINITY);
        Ok(())
    }

    /// Offers every continuation of one beam. Beams must come in order: a candidate that only
    /// equals `bar` then ranks after those that set it.
    pub fn offer(&mut self, beam: usize, score: f32, row: &[f32]) {
        for (chunk, values) in row.chunks(CHUNK).enumerate() {
            // Skips most tokens without visiting each.
            if score + largest(values) <= self.bar {
                continue;
            }
            for (place, &logprob) in values.iter().enumerate() {
                self.add(Candidate { beam, token: (chunk * CHUNK + place) as u32, score: score + logprob });
            }
        }
    }

    /// Offers one continuation. Those of a beam must come by ascending token id.
    pub fn add(&mut self, candidate: Candidate) {
        if candidate.score <= self.bar {
            return;
        }
        self.kept.push(candidate);
        if self.kept.len() == 2 * self.wanted {
            self.kept.select_nth_unstable_by(self.wanted - 1, by_rank);
            self.kept.truncate(self.wanted);
            self.bar = self.kept[self.wanted - 1].score;
        }
    }

    /// Returns the candidates, best first. There are fewer than `wanted` if other tokens are
    /// excluded (minus infinity).
    pub fn ranked(&mut self) -> &[Candidate] {
        self.kept.sort_unstable_by(by_rank);
        self.kept.truncate(self.wanted);
        &self.kept
    }

    /// Returns the candidates of both, best first. `other` has at most as many.
    pub fn ranked_with(&mut self, other: &mut Best) -> &[Candidate] {
        self.ranked();
        self.kept.extend_from_slice(other.ranked());
        self.kept.sort_unstable_by(by_rank);
        &self.kept
    }
}
