//! Tokens to be drawn where the logits lie, as flat data. `decode` writes what is asked for, a backend draws; neither knows the other.

use std::ops::Range;

use crate::error::Result;

/// Most probable tokens that a draw can tell of.
pub const MOST_TOPS: usize = 20;
/// Instead of a number of them: no log probability is asked for.
pub const NO_LOGPROBS: u32 = u32::MAX;
/// Instead of where a mask lies: all tokens are allowed.
pub const NO_MASK: u32 = u32::MAX;

/// How a row's token is drawn: by the rules that most requests have, which mean what `decode` says. As `kernels/draw.cu` has it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Draw {
    /// Of the step's logits.
    pub row: u32,
    /// Of so many of the most probable tokens too, or `NO_LOGPROBS`.
    pub logprobs: u32,
    pub top_k: u32,
    pub temperature: f32,
    pub min_p: f32,
    pub top_p: f32,
    pub repetition_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    /// How far along all shares, as a fraction of 2^64: the high half, then the low one.
    pub fraction: [u32; 2],
    /// Where its edits begin: biases, and behind them how often tokens have come.
    pub edits: u32,
    pub biases: u32,
    pub counts: u32,
    /// Where its mask begins, or `NO_MASK`: a bit for each token, the lowest first, that says whether it is allowed.
    pub mask: u32,
}

/// What becomes of one token's logit.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct Edit {
    pub token: u32,
    /// A bias, or how often the token was generated: the bits of an f32, or a number.
    pub value: u32,
    /// Where the backend keeps what the logit was.
    pub before: f32,
}

/// How many numbers `Draws` has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrawLimits {
    pub draws: usize,
    pub edits: usize,
    /// Words of 32 bits.
    pub mask: usize,
}

/// Edits that a draw has room for: a bias for each of some hundred tokens, or a penalty for each of some pages' words. Were the room shared, it would
/// depend on the others in a step where a token is drawn.
pub const MOST_EDITS: usize = 4096;

impl DrawLimits {
    /// For a draw from each of so many rows, each with a mask.
    pub fn of(rows: usize, vocab: usize) -> DrawLimits {
        DrawLimits { draws: rows, edits: rows * MOST_EDITS, mask: rows * vocab.div_ceil(32) }
    }
}

/// The draws of a step, by rising row, with what some of them need besides.
#[derive(Debug, Default)]
pub struct Draws {
    pub draws: Vec<Draw>,
    pub edits: Vec<Edit>,
    pub masks: Vec<u32>,
}

impl Draws {
    pub fn new(limits: DrawLimits) -> Result<Draws> {
        let mut draws = Draws::default();
        draws.draws.try_reserve_exact(limits.draws)?;
        draws.edits.try_reserve_exact(limits.edits)?;
        draws.masks.try_reserve_exact(limits.mask)?;
        Ok(draws)
    }

    pub fn clear(&mut self) {
        self.draws.clear();
        self.edits.clear();
        self.masks.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.draws.is_empty()
    }

    /// The rows of `rows` from which nothing is drawn, in runs.
    pub fn other_rows(&self, rows: usize) -> impl Iterator<Item = Range<usize>> {
        let ends = self.draws.iter().map(|draw| draw.row as usize).chain(std::iter::once(rows));
        let starts = std::iter::once(0).chain(self.draws.iter().map(|draw| draw.row as usize + 1));
        starts.zip(ends).map(|(start, end)| start..end).filter(|run| !run.is_empty())
    }
}

/// What came of a draw. As `kernels/draw.cu` has it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Drawn {
    pub outcome: Outcome,
    pub token: u32,
    /// The token's own logit, as the model gave it, where a log probability was asked for; and the greatest of all.
    pub logit: f32,
    pub greatest: f32,
    /// The sum of e^(logit - greatest) over all tokens, in units of 2^-40. 0 where no log probability was asked for.
    pub powers: u64,
    /// The most probable tokens with their logits, the best first.
    pub tops: [Top; MOST_TOPS],
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct Top {
    pub token: u32,
    pub logit: f32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Outcome(pub u32);

impl Outcome {
    pub const TOKEN: Outcome = Outcome(0);
    /// The logits hold NaN or infinity.
    pub const NOT_FINITE: Outcome = Outcome(1);
    /// Every token is excluded.
    pub const EXCLUDED: Outcome = Outcome(2);
}

impl Drawn {
    /// What a logit less this is a log probability.
    pub fn normalizer(&self) -> f64 {
        const UNIT: f64 = 1.0 / (1u64 << 40) as f64;
        f64::from(self.greatest) + libm::log(self.powers as f64 * UNIT)
    }
}

/// As `kernels/draw.cu` counts.
const _: () = assert!(size_of::<Draw>() == 60 && size_of::<Edit>() == 12 && size_of::<Drawn>() == 24 + 8 * MOST_TOPS);

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(row: u32) -> Draw {
        Draw {
            row,
            logprobs: NO_LOGPROBS,
            top_k: 0,
            temperature: 1.0,
            min_p: 0.0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            fraction: [0; 2],
            edits: 0,
            biases: 0,
            counts: 0,
            mask: NO_MASK,
        }
    }

    #[test]
    fn other_rows_are_those_that_nothing_is_drawn_from() {
        let mut draws = Draws::new(DrawLimits::of(4, 10)).unwrap();
        let others = |draws: &Draws, rows| draws.other_rows(rows).map(|run| (run.start, run.end)).collect::<Vec<_>>();
        assert_eq!(others(&draws, 3), [(0, 3)]);
        assert!(others(&draws, 0).is_empty());
        draws.draws.extend([0, 1, 4].map(draw));
        assert_eq!(others(&draws, 5), [(2, 4)]);
        assert_eq!(others(&draws, 7), [(2, 4), (5, 7)]);
    }
}
