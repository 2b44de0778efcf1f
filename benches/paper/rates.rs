//! Figure 12: normalized latency by request rate, one sequence per request.

use serde_json::{Value, json};

use crate::simulation::workload::{ALPACA, Lengths, MAX_LEN, SHAREGPT};
use crate::systems::*;
use crate::{Result, Scale, map, round, trace_len};

pub const SYSTEMS: [System; 7] = [OURS, VLLM, TRT_RESERVED, ORACLE, POW2, MAX, FASTER_TRANSFORMER];
const SEED: u64 = 9;

/// Returns `count` requests of a data set for a trace of this length.
pub fn jobs(lengths: Lengths) -> impl Fn(f64, f64) -> Vec<crate::simulation::Job> + Sync {
    move |rate, seconds| lengths.jobs(trace_len(rate, seconds), rate, SEED)
}

pub fn figure_12(scale: &Scale) -> Result<Value> {
    let all = [OPT_13B, OPT_66B, OPT_175B].into_iter().flat_map(|model| [(model, SHAREGPT), (model, ALPACA)]);
    let panels: Vec<(Deployment, Lengths)> = all.take(scale.of(6, 1)).collect();
    let runs: Vec<(Deployment, Lengths, System)> =
        panels.iter().flat_map(|&(model, lengths)| SYSTEMS.map(|system| (model, lengths, system))).collect();
    let sustained = map(&runs, |&(model, lengths, system)| {
        let jobs = jobs(lengths);
        let load = Load { machine: model.machine()?, jobs: &jobs, seconds: scale.seconds(), max_output: MAX_LEN };
        load.sustained(&system.options(), &system, if lengths.name == ALPACA.name { 20.0 } else { 1.5 })
    })?;
    let indices: Vec<usize> = (0..runs.len()).collect();
    let curves = map(&indices, |&run| {
        let (model, lengths, system) = runs[run];
        let jobs = jobs(lengths);
        let load = Load { machine: model.machine()?, jobs: &jobs, seconds: scale.seconds(), max_output: MAX_LEN };
        curve(&load, &system.options(), &system, 1.2 * sustained[run], scale)
    })?;
    let panel = |(number, (model, lengths)): (usize, &(Deployment, Lengths))| {
        let systems: Vec<Value> = (0..SYSTEMS.len())
            .map(|system| {
                let run = number * SYSTEMS.len() + system;
                let ratio = sustained[number * SYSTEMS.len()] / sustained[run];
                json!({ "name": SYSTEMS[system].name, "sustained": round(sustained[run]), "ratio": round(ratio), "curve": curves[run] })
            })
            .collect();
        json!({ "model": model.name, "data": lengths.name, "systems": systems })
    };
    Ok(json!({ "limit": SUSTAINED, "trace_seconds": scale.seconds(), "panels": panels.iter().enumerate().map(panel).collect::<Vec<_>>() }))
}
