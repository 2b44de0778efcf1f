//! Requests with random arrival times and lengths.
#![allow(dead_code)] // each benchmark and test uses a part

use std::time::Duration;

use pagedllm::generation::sampler::{Lane, uniform};

use super::simulation::Job;

/// Mean lengths of a data set. Lengths are log-normal, with a standard deviation of 1 in the
/// exponent.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    pub name: &'static str,
    pub prompt: f64,
    pub output: f64,
}

/// Means from Figure 11 of the PagedAttention paper.
pub const SHAREGPT: Lengths = Lengths { name: "ShareGPT", prompt: 161.31, output: 337.99 };
pub const ALPACA: Lengths = Lengths { name: "Alpaca", prompt: 19.31, output: 58.45 };

/// Maximum length of a sequence and of its prompt, in tokens.
const MAX_LEN: usize = 2048;
const MAX_PROMPT: usize = 1024;

/// Returns a number in [0, 1) that depends only on `seed` and `index`.
fn draw(seed: u64, index: u64) -> f64 {
    uniform(seed, index, Lane::Token).max(1e-12)
}

fn length(mean: f64, max: usize, seed: u64, index: u64) -> usize {
    let normal = (-2.0 * draw(seed, index).ln()).sqrt() * (std::f64::consts::TAU * draw(seed, index + 1)).cos();
    ((mean * (normal - 0.5).exp()).round() as usize).clamp(1, max)
}

impl Lengths {
    /// Returns `count` requests with `rate` arrivals per second on average (a Poisson process).
    /// `max_tokens` is the length of the output.
    pub fn jobs(&self, count: usize, rate: f64, seed: u64) -> Vec<Job> {
        let mut at = 0.0;
        let job = |i: u64| {
            at -= draw(seed, 5 * i).ln() / rate;
            let prompt = length(self.prompt, MAX_PROMPT, seed, 5 * i + 1);
            let output = length(self.output, MAX_LEN - prompt, seed, 5 * i + 3);
            Job { at: Duration::from_secs_f64(at), prompt, output, max_tokens: output, priority: 0 }
        };
        (0..count as u64).map(job).collect()
    }
}
