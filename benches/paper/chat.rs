//! Figure 17: chat, where prompts are the last 1,024 tokens of a history.

use std::time::Duration;

use serde_json::{Value, json};

use crate::panels::{Entry, Panel, measure};
use crate::simulation::Job;
use crate::simulation::workload::{SHAREGPT, draw, length, next_arrival};
use crate::systems::*;
use crate::{Result, Scale, round, trace_len};

const SYSTEMS: [System; 5] = [OURS, VLLM, ORACLE, POW2, MAX];
/// Maximum tokens of a prompt, and of an output.
const LIMIT: usize = 1024;
/// Mean numbers of turns of a conversation: as in ShareGPT, and so many that most prompts are full.
/// The number is geometric.
const TURNS: [f64; 2] = [3.5, 12.0];
const SEED: u64 = 13;

/// Each request is a random turn of a random conversation. The prompt has the questions and answers
/// of all earlier turns.
fn jobs(turns: f64, rate: f64, seconds: f64) -> Vec<Job> {
    let mut at = 0.0;
    let mut index = 0;
    let mut next = || {
        index += 2;
        index
    };
    let job = |_| {
        at = next_arrival(at, rate, SEED, next());
        let mut prompt = length(SHAREGPT.prompt, SHAREGPT.deviation, LIMIT, SEED, next());
        while draw(SEED, next()) > 1.0 / turns && prompt < LIMIT {
            prompt += length(SHAREGPT.prompt, SHAREGPT.deviation, LIMIT, SEED, next());
            prompt += length(SHAREGPT.output, SHAREGPT.deviation, LIMIT, SEED, next());
        }
        let output = length(SHAREGPT.output, SHAREGPT.deviation, LIMIT, SEED, next());
        Job::new(Duration::from_secs_f64(at), prompt.min(LIMIT), output)
    };
    (0..trace_len(rate, seconds)).map(job).collect()
}

pub fn figure_17(scale: &Scale) -> Result<Value> {
    let panel = |turns: f64| {
        let some = jobs(turns, 100.0, 100.0);
        let mean = |value: fn(&Job) -> usize| round(some.iter().map(value).sum::<usize>() as f64 / some.len() as f64);
        let full = some.iter().filter(|job| job.prompt == LIMIT).count() as f64 / some.len() as f64;
        Ok(Panel {
            about: json!({
                "turns": turns,
                "mean_prompt": mean(|job| job.prompt),
                "mean_output": mean(|job| job.output),
                "full_prompts": round(full),
            }),
            machine: OPT_13B.machine()?,
            jobs: Box::new(move |rate, seconds| jobs(turns, rate, seconds)),
            max_output: LIMIT,
            guess: 1.0,
            entries: SYSTEMS.map(Entry::from).into(),
        })
    };
    let panels = TURNS.into_iter().map(panel).collect::<Result<Vec<_>>>()?;
    Ok(json!({ "panels": measure(&panels, scale)? }))
}
