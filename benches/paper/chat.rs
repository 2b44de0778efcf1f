//! Figure 17: chat, where prompts are the last 1,024 tokens of a history.

use std::time::Duration;

use serde_json::{Value, json};

use crate::simulation::Job;
use crate::simulation::workload::{SHAREGPT, draw, length, next_arrival};
use crate::systems::*;
use crate::{Result, Scale, map, round, trace_len};

const SYSTEMS: [System; 5] = [OURS, VLLM, ORACLE, POW2, MAX];
/// Maximum tokens of a prompt, and of an output.
const LIMIT: usize = 1024;
/// Mean number of turns of a conversation, as in ShareGPT. The number is geometric.
const TURNS: f64 = 3.5;
const SEED: u64 = 13;

/// Each request is a random turn of a random conversation. The prompt has the questions and answers
/// of all earlier turns.
fn jobs(rate: f64, seconds: f64) -> Vec<Job> {
    let mut at = 0.0;
    let mut index = 0;
    let mut next = || {
        index += 2;
        index
    };
    let job = |_| {
        at = next_arrival(at, rate, SEED, next());
        let mut prompt = length(SHAREGPT.prompt, SHAREGPT.deviation, LIMIT, SEED, next());
        while draw(SEED, next()) > 1.0 / TURNS && prompt < LIMIT {
            prompt += length(SHAREGPT.prompt, SHAREGPT.deviation, LIMIT, SEED, next());
            prompt += length(SHAREGPT.output, SHAREGPT.deviation, LIMIT, SEED, next());
        }
        let output = length(SHAREGPT.output, SHAREGPT.deviation, LIMIT, SEED, next());
        Job::new(Duration::from_secs_f64(at), prompt.min(LIMIT), output)
    };
    (0..trace_len(rate, seconds)).map(job).collect()
}

pub fn figure_17(scale: &Scale) -> Result<Value> {
    let load = Load { machine: OPT_13B.machine()?, jobs: &jobs, seconds: scale.seconds(), max_output: LIMIT };
    let results = map(&SYSTEMS, |system| {
        let sustained = load.sustained(&system.options(), system, 1.0)?;
        Ok((sustained, curve(&load, &system.options(), system, 1.2 * sustained, scale)?))
    })?;
    let row = |(system, (sustained, curve)): (&System, &(f64, Vec<[f64; 2]>))| json!({ "name": system.name, "sustained": round(*sustained), "ratio": round(results[0].0 / sustained), "curve": curve });
    let jobs = jobs(100.0, 100.0);
    let mean = |value: fn(&Job) -> usize| round(jobs.iter().map(value).sum::<usize>() as f64 / jobs.len() as f64);
    let full = jobs.iter().filter(|job| job.prompt == LIMIT).count() as f64 / jobs.len() as f64;
    Ok(json!({
        "trace_seconds": scale.seconds(),
        "mean_prompt": mean(|job| job.prompt),
        "mean_output": mean(|job| job.output),
        "full_prompts": round(full),
        "systems": SYSTEMS.iter().zip(&results).map(row).collect::<Vec<_>>(),
    }))
}
