//! Rotary embeddings.

use crate::backend::Pairs;

/// A rotary embedding: pairs of dimensions are rotated by these frequencies (radians per position).
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub frequencies: Vec<f32>, // [rotated dimensions / 2]
    pub amplitude: f32,
    pub pairs: Pairs,
    /// Factor by which sequences may exceed the config's positions.
    pub stretch: f64,
    pub long: Option<Long>,
}

/// Frequencies for sequences longer than `beyond` positions. They depend on the maximum length of
/// the engine instead of the length of a sequence. So cached K stays valid, and a sequence's
/// results do not depend on other sequences.
#[derive(Debug, Clone, PartialEq)]
pub struct Long {
    pub beyond: usize,
    pub how: Longer,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Longer {
    /// Explicit frequencies.
    Other(Vec<f32>),
    /// A base that grows with the length.
    Dynamic { theta: f64, factor: f64 },
}

impl Rope {
    /// 1 / theta^(2i / dims) for each pair i.
    pub fn frequencies(theta: f64, dims: usize) -> Vec<f32> {
        (0..dims / 2).map(|i| (1.0 / theta.powf((2 * i) as f64 / dims as f64)) as f32).collect()
    }

    /// Returns the maximum sequence length of a model whose config has `positions`.
    pub fn reach(&self, positions: usize) -> usize {
        positions.max((positions as f64 * self.stretch) as usize)
    }

    /// Selects the frequencies for sequences of at most `max_len` positions.
    pub fn fit(&mut self, max_len: usize) {
        let dims = self.rotated();
        let Some(Long { how, beyond }) = self.long.take_if(|long| max_len > long.beyond) else { return };
        self.frequencies = match how {
            Longer::Other(frequencies) => frequencies,
            Longer::Dynamic { theta, factor } => {
                let stretch = factor * max_len as f64 / beyond as f64 - (factor - 1.0);
                Rope::frequencies(theta * stretch.powf(dims as f64 / (dims as f64 - 2.0)), dims)
            }
        };
    }

    /// Returns the number of rotated dimensions of a head.
    pub fn rotated(&self) -> usize {
        2 * self.frequencies.len()
    }
}
