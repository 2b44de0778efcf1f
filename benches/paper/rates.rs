//! Figure 12: normalized latency by request rate, one sequence per request.

use serde_json::{Value, json};

use crate::panels::{Entry, Panel, measure};
use crate::simulation::Job;
use crate::simulation::workload::{ALPACA, Lengths, MAX_LEN, SHAREGPT};
use crate::systems::*;
use crate::{Result, Scale, trace_len};

pub const SYSTEMS: [System; 7] = [OURS, VLLM, TRT_RESERVED, ORACLE, POW2, MAX, FASTER_TRANSFORMER];
const SEED: u64 = 9;

/// Returns a function of a rate and of seconds, to the requests of a trace.
pub fn jobs(lengths: Lengths) -> impl Fn(f64, f64) -> Vec<Job> + Sync {
    move |rate, seconds| lengths.jobs(trace_len(rate, seconds), rate, SEED)
}

/// Returns a rate near those which systems sustain with OPT-13B.
pub fn guess(lengths: &Lengths) -> f64 {
    if lengths.name == ALPACA.name { 20.0 } else { 1.5 }
}

pub fn figure_12(scale: &Scale) -> Result<Value> {
    let cases = [OPT_13B, OPT_66B, OPT_175B].into_iter().flat_map(|model| [(model, SHAREGPT), (model, ALPACA)]);
    let panel = |(model, lengths): (Deployment, Lengths)| {
        Ok(Panel {
            about: json!({ "model": model.name, "data": lengths.name }),
            machine: model.machine()?,
            jobs: Box::new(jobs(lengths)),
            max_output: MAX_LEN,
            guess: guess(&lengths),
            entries: SYSTEMS.map(Entry::from).into(),
        })
    };
    let panels = cases.take(scale.of(6, 1)).map(panel).collect::<Result<Vec<_>>>()?;
    Ok(json!({ "limit": SUSTAINED, "panels": measure(&panels, scale)? }))
}
