//! Figure 18b: latency by block size.

use pagedllm::types::options::EngineOptions;
use serde_json::{Value, json};

use crate::rates::{guess, jobs};
use crate::simulation::Machine;
use crate::simulation::workload::{ALPACA, MAX_LEN, SHAREGPT};
use crate::systems::*;
use crate::{Result, Scale, kernel, map, round};

/// The block sizes of the engine.
pub const SIZES: [usize; 6] = [8, 16, 32, 64, 128, 256];

/// At the rate that blocks of 16 tokens sustain. Reading K and V takes as many times longer than
/// contiguous K and V as the CPU kernel takes.
pub fn figure_18b(scale: &Scale) -> Result<Value> {
    let factors = kernel::relative_times(16, 512, &SIZES, scale.of(201, 5))?;
    let mut results = Vec::new();
    for lengths in [SHAREGPT, ALPACA] {
        let guess = guess(&lengths);
        let jobs = jobs(lengths);
        let load = |factor: f64| {
            let machine = OPT_13B.machine()?;
            let machine = Machine { position: factor * machine.position, ..machine };
            Result::Ok(Load { machine, jobs: &jobs, seconds: scale.seconds(), max_output: MAX_LEN })
        };
        let rate = load(factors[1])?.sustained(&OURS.options(), &OURS, guess)?;
        let sizes: Vec<(usize, f64)> = SIZES.into_iter().zip(factors.iter().copied()).collect();
        let rows = map(&sizes, |&(block_size, factor)| {
            let options = EngineOptions { block_size, ..OURS.options() };
            let (latency, sustained) = (
                load(factor)?.run(&options, &OURS, rate)?.normalized_latency().as_secs_f64(),
                load(factor)?.sustained(&options, &OURS, guess)?,
            );
            Ok(json!({ "block_size": block_size, "kernel": round(factor), "latency": round(latency), "sustained": round(sustained) }))
        })?;
        results.push(json!({ "data": lengths.name, "rate": round(rate), "rows": rows }));
    }
    Ok(json!({ "trace_seconds": scale.seconds(), "panels": results }))
}
