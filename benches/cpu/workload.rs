//! The requests of the batch, the same for every engine.

use serde::{Deserialize, Serialize};

use crate::{Options, Result};

/// Lengths that were drawn once, log-normal with the means of ShareGPT: prompts with a mean of 161
/// tokens (sigma 1, from 4 to 1,024), outputs with a mean of 338 for S and 128 for M (sigma 0.8).
/// benches/peers reads the file too.
const LENGTHS: &str = include_str!("workload.json");

/// Lengths in tokens.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Request {
    pub prompt: u64,
    pub output: u64,
}

/// Requests for the model with this name.
pub fn requests(model: &str, options: &Options) -> Result<Vec<Request>> {
    let all: serde_json::Value = serde_json::from_str(LENGTHS)?;
    let lengths: Vec<(u64, u64)> = serde_json::from_value(all[model].clone()).map_err(|e| format!("workload.json, model {model}: {e}"))?;
    let small = |length: u64| if options.quick { length / 16 + 2 } else { length };
    let requests = lengths.into_iter().map(|(prompt, output)| Request { prompt: small(prompt), output: small(output) });
    Ok(requests.take(if options.quick { 8 } else { usize::MAX }).collect())
}
