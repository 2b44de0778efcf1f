//! Requests with random arrival times and lengths.

use std::sync::Arc;
use std::time::Duration;

use pagedllm::engine::{Prompt, Request};
use pagedllm::generation::sampler::{Lane, uniform};
use pagedllm::types::SeqId;
use pagedllm::types::options::{BeamParams, SamplingParams};

use super::beams::{DIGITS, digit};
use super::{EOS, TOKEN, VOCAB};

/// A request to simulate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Job {
    /// Arrival time.
    pub at: Duration,
    pub prompt: usize,
    /// Tokens after which each of its sequences ends with EOS.
    pub output: usize,
    /// `max_tokens` of the request.
    pub max_tokens: usize,
    pub priority: i32,
    pub branching: Branching,
    pub content: Content,
}

/// The sequences of a request.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Branching {
    #[default]
    One,
    /// Parallel sampling.
    Samples(u32),
    /// Beam search. Scores are random, with this scale: the larger, the more a token stands out.
    /// The prompt has at least three tokens and no content of its own.
    Beams { width: u32, scale: f32 },
}

impl Branching {
    pub fn sequences(self) -> usize {
        match self {
            Branching::One => 1,
            Branching::Samples(n) => n as usize,
            Branching::Beams { width, .. } => width as usize,
        }
    }
}

/// The tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Content {
    /// All tokens are the same.
    #[default]
    Constant,
    /// Up to this position, the tokens are those of all requests with the same text. The others
    /// differ.
    Shared { text: u64, until: usize },
}

impl Job {
    /// Returns a request for one sequence of unimportant content. `max_tokens` is the length of the
    /// output.
    pub fn new(at: Duration, prompt: usize, output: usize) -> Job {
        Job { at, prompt, output, max_tokens: output, priority: 0, branching: Branching::One, content: Content::Constant }
    }

    /// Returns the request for the engine, without its priority.
    pub fn request(&self) -> Request {
        let sampling = SamplingParams { max_tokens: Some(self.max_tokens), ..SamplingParams::greedy() };
        let prompt = Prompt::Tokens((0..self.prompt).map(|position| self.token(position) as u32).collect());
        let job = *self;
        let end = move |_: SeqId, tokens: &[u32], logits: &mut [f32]| job.score(tokens, logits);
        let request = Request::new(prompt, sampling);
        match self.branching {
            Branching::One => Request { hook: Some(Arc::new(end)), ..request },
            Branching::Samples(n) => Request { n, hook: Some(Arc::new(end)), ..request },
            Branching::Beams { width, .. } => Request { n: width, beam: Some(BeamParams { width, ..BeamParams::default() }), ..request },
        }
    }

    /// Returns the token at a position.
    fn token(&self, position: usize) -> usize {
        if let (Branching::Beams { .. }, 0..DIGITS) = (self.branching, position) {
            return digit(self.prompt + self.output, position);
        }
        match self.content {
            Content::Constant if matches!(self.branching, Branching::Beams { .. }) => EOS + 1,
            Content::Constant => TOKEN,
            Content::Shared { text, until } => {
                let own = self.at.as_nanos() as u64 | 1 << 63;
                let text = if position < until { text } else { own };
                EOS + 1 + mix(text, position as u64) as usize % (VOCAB - EOS - 1)
            }
        }
    }

    /// Edits the logits of the next token of a sequence.
    fn score(&self, tokens: &[u32], logits: &mut [f32]) {
        if tokens.len() + 1 >= self.prompt + self.output {
            logits.fill(f32::NEG_INFINITY);
            logits[EOS] = 0.0;
        } else {
            logits[self.token(tokens.len())] = 2.0;
        }
    }
}

/// Lengths of a data set: log-normal, with these means and this standard deviation of the exponent.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    pub name: &'static str,
    pub prompt: f64,
    pub output: f64,
    pub deviation: f64,
}

/// Means from Figure 11 of the PagedAttention paper.
pub const SHAREGPT: Lengths = Lengths { name: "ShareGPT", prompt: 161.31, output: 337.99, deviation: 1.0 };
pub const ALPACA: Lengths = Lengths { name: "Alpaca", prompt: 19.31, output: 58.45, deviation: 1.0 };

/// Maximum length of a sequence and of its prompt, in tokens.
pub const MAX_LEN: usize = 2048;
pub const MAX_PROMPT: usize = 1024;

/// Returns a number in (0, 1) that depends only on `seed` and `index`.
pub fn draw(seed: u64, index: u64) -> f64 {
    uniform(seed, index, Lane::Token).max(1e-12)
}

/// Returns a random number that depends only on `seed` and `index`.
pub fn mix(seed: u64, index: u64) -> u64 {
    (draw(seed, index) * (1u64 << 53) as f64) as u64
}

/// Returns the arrival time after `previous` in a Poisson process, in seconds.
pub fn next_arrival(previous: f64, rate: f64, seed: u64, index: u64) -> f64 {
    previous - draw(seed, index).ln() / rate
}

/// Returns a log-normal length with this mean before it is limited.
pub fn length(mean: f64, deviation: f64, max: usize, seed: u64, index: u64) -> usize {
    let normal = (-2.0 * draw(seed, index).ln()).sqrt() * (std::f64::consts::TAU * draw(seed, index + 1)).cos();
    ((mean * (deviation * normal - deviation * deviation / 2.0).exp()).round() as usize).clamp(1, max)
}

impl Lengths {
    /// Returns `count` requests with `rate` arrivals per second on average (a Poisson process).
    /// `max_tokens` is the length of the output.
    pub fn jobs(&self, count: usize, rate: f64, seed: u64) -> Vec<Job> {
        let mut at = 0.0;
        let job = |i: u64| {
            at = next_arrival(at, rate, seed, 5 * i);
            let prompt = length(self.prompt, self.deviation, MAX_PROMPT, seed, 5 * i + 1);
            let output = length(self.output, self.deviation, MAX_LEN - prompt, seed, 5 * i + 3);
            Job::new(Duration::from_secs_f64(at), prompt, output)
        };
        (0..count as u64).map(job).collect()
    }
}
