//! Requests as a service meets them: they come when they like, and are as long as they happen to be.
#![allow(dead_code)] // each benchmark and test uses its part

use std::time::Duration;

use pagedllm::decode::{Lane, uniform};

use super::simulation::Job;

/// Mean lengths of a data set. Lengths are log-normal around them, with a standard deviation of 1 in the exponent: a few are
/// many times as long as most.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    pub name: &'static str,
    pub prompt: f64,
    pub output: f64,
}

/// As the PagedAttention paper measured them (its Figure 11).
pub const SHAREGPT: Lengths = Lengths { name: "ShareGPT", prompt: 161.31, output: 337.99 };
pub const ALPACA: Lengths = Lengths { name: "Alpaca", prompt: 19.31, output: 58.45 };

/// Tokens of a sequence, and of its prompt.
const MOST: usize = 2048;
const MOST_PROMPT: usize = 1024;

/// A number from 0 to 1, not included, that depends on seed and place alone.
fn draw(seed: u64, place: u64) -> f64 {
    uniform(seed, place, Lane::Token).max(1e-12)
}

fn length(mean: f64, most: usize, seed: u64, place: u64) -> usize {
    let normal = (-2.0 * draw(seed, place).ln()).sqrt() * (std::f64::consts::TAU * draw(seed, place + 1)).cos();
    ((mean * (normal - 0.5).exp()).round() as usize).clamp(1, most)
}

impl Lengths {
    /// `count` requests, `rate` a second on average (a Poisson process). Their hosts allow what they need and no more.
    pub fn jobs(&self, count: usize, rate: f64, seed: u64) -> Vec<Job> {
        let mut at = 0.0;
        let job = |i: u64| {
            at -= draw(seed, 5 * i).ln() / rate;
            let prompt = length(self.prompt, MOST_PROMPT, seed, 5 * i + 1);
            let output = length(self.output, MOST - prompt, seed, 5 * i + 3);
            Job { at: Duration::from_secs_f64(at), prompt, output, max_tokens: output, priority: 0 }
        };
        (0..count as u64).map(job).collect()
    }
}
