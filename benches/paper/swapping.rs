//! Figure 19: preempted requests are swapped to the host, or recomputed.

use pagedllm::types::options::{EngineOptions, Preemption};
use serde_json::{Value, json};

use crate::blocks::SIZES;
use crate::rates::jobs;
use crate::simulation::workload::{MAX_LEN, SHAREGPT};
use crate::systems::*;
use crate::{Result, Scale, map, round};

/// Length of the sequence that is swapped or recomputed.
const TOKENS: usize = 256;

/// Milliseconds on the simulated machine.
pub fn figure_19a(_: &Scale) -> Result<Value> {
    let machine = OPT_13B.machine()?;
    let ms = |seconds: f64| round(seconds * 1e3);
    let row = |block_size: usize| {
        let swap = machine.swap_time(TOKENS / block_size, block_size).as_secs_f64();
        let recompute = machine.seconds(TOKENS as f64, TOKENS as f64).as_secs_f64();
        json!({ "block_size": block_size, "swap_out_ms": ms(swap), "swap_in_ms": ms(swap), "recompute_ms": ms(recompute) })
    };
    let rows = [1, 2, 4, 8, 16, 32, 64, 128, 256].map(row);
    Ok(json!({ "tokens": TOKENS, "rows": rows }))
}

/// At a rate a little above that which is sustained, where requests are preempted most of the time.
pub fn figure_19b(scale: &Scale) -> Result<Value> {
    let jobs = jobs(SHAREGPT);
    let load = Load { machine: OPT_13B.machine()?, jobs: &jobs, seconds: scale.seconds(), max_output: MAX_LEN };
    let rate = 1.02 * load.sustained(&OURS.options(), &OURS, 1.5)?;
    let rows = map(&SIZES, |&block_size| {
        let measure = |preemption| {
            let options = EngineOptions { block_size, preemption, ..OURS.options() };
            let run = load.run(&options, &OURS, rate)?;
            Result::Ok((run.normalized_latency().as_secs_f64(), run.preemptions))
        };
        let (recompute, recomputed) = measure(Preemption::Recompute)?;
        let (swap, swapped) = measure(Preemption::Swap)?;
        Ok(json!({ "block_size": block_size, "recompute": round(recompute), "swap": round(swap), "ratio": round(recompute / swap),
            "recomputed": recomputed, "swapped": swapped }))
    })?;
    Ok(json!({ "rate": round(rate), "trace_seconds": scale.seconds(), "rows": rows }))
}
