//! The best continuations of a group of beams, without sorting all of them.

use std::cmp::Ordering;

use crate::decode::rows::largest;
use crate::error::Result;

/// Tokens that are looked at together.
const CHUNK: usize = 256;

/// One token after one beam.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    /// The beam's place in its group.
    pub beam: usize,
    pub token: u32,
    /// Sum of the log probabilities, this token's included.
    pub score: f32,
}

/// Better first; of equals the earlier beam, then the lower token id.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.score.total_cmp(&a.score).then(a.beam.cmp(&b.beam)).then(a.token.cmp(&b.token))
}

/// The best `wanted` candidates of those offered. It holds twice as many and throws away the worse half when it is full.
#[derive(Default)]
pub(super) struct Best {
    kept: Vec<Candidate>,
    wanted: usize,
    /// `wanted` candidates at least this good are known.
    bar: f32,
}

impl Best {
    pub fn start(&mut self, wanted: usize) -> Result<()> {
        self.kept.clear();
        self.kept.try_reserve(2 * wanted)?;
        (self.wanted, self.bar) = (wanted, f32::NEG_INFINITY);
        Ok(())
    }

    /// Offers every token after one beam. Beams come in order: what only equals the bar comes later than what set it.
    pub fn offer(&mut self, beam: usize, score: f32, row: &[f32]) {
        for (chunk, values) in row.chunks(CHUNK).enumerate() {
            // Most tokens are refused before anyone looks at them.
            if score + largest(values) <= self.bar {
                continue;
            }
            for (place, &logprob) in values.iter().enumerate() {
                self.add(Candidate { beam, token: (chunk * CHUNK + place) as u32, score: score + logprob });
            }
        }
    }

    fn add(&mut self, candidate: Candidate) {
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

    /// Best first. Fewer than wanted where there are no more: minus infinity is no candidate.
    pub fn ranked(&mut self) -> &[Candidate] {
        self.kept.sort_unstable_by(by_rank);
        self.kept.truncate(self.wanted);
        &self.kept
    }
}
