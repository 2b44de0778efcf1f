//! The requests that come all at once: as many and as long for every engine that is measured.

use serde::{Deserialize, Serialize};

use crate::{Options, Result};

/// Drawn once: log-normal lengths around those of ShareGPT, prompts with a mean of 161 tokens (sigma 1, from 4 to 1,024), answers with
/// one of 338 for S and 128 for M (sigma 0.8). benches/peers reads it too.
const LENGTHS: &str = include_str!("workload.json");

/// Lengths in tokens.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Request {
    pub prompt: u64,
    pub output: u64,
}

/// Of the model of this name.
pub fn requests(model: &str, options: &Options) -> Result<Vec<Request>> {
    let all: serde_json::Value = serde_json::from_str(LENGTHS)?;
    let lengths: Vec<(u64, u64)> = serde_json::from_value(all[model].clone()).map_err(|e| format!("workload.json, model {model}: {e}"))?;
    let small = |length: u64| if options.quick { length / 16 + 2 } else { length };
    let requests = lengths.into_iter().map(|(prompt, output)| Request { prompt: small(prompt), output: small(output) });
    Ok(requests.take(if options.quick { 8 } else { usize::MAX }).collect())
}
