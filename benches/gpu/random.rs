//! Random numbers. With zeros a device would be faster.

#[path = "../../tests/support/random.rs"]
#[allow(dead_code)] // only tests use the rest
mod seeded;

use half::bf16;
pub use seeded::Random;

/// Returns `len` random numbers with a long period.
pub fn numbers(len: usize) -> Vec<f32> {
    const PERIOD: usize = 1_000_003;
    let mut random = Random(len as u64);
    let first: Vec<f32> = (0..len.min(PERIOD)).map(|_| random.unit()).collect();
    first.iter().copied().cycle().take(len).collect()
}

/// A repeatable source of bf16 weights.
pub struct Weights(Vec<u8>);

impl Weights {
    pub fn new() -> Weights {
        let mut random = Random(1);
        Weights((0..1_000_003).flat_map(|_| bf16::from_f32(0.02 * random.unit()).to_le_bytes()).collect())
    }

    /// Fills `out` with the rows of the matrix from `first_row`.
    pub fn fill(&self, first_row: usize, out: &mut [u8]) {
        let start = 2 * (first_row * 7919 % (self.0.len() / 2));
        let mut rest = &self.0[start..];
        let mut filled = 0;
        while filled < out.len() {
            let count = rest.len().min(out.len() - filled);
            out[filled..filled + count].copy_from_slice(&rest[..count]);
            (filled, rest) = (filled + count, &self.0[..]);
        }
    }
}
