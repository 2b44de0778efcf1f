//! Table 1 and Figure 11: models, memory, and lengths of requests.

use serde_json::{Value, json};

use crate::simulation::workload::{ALPACA, SHAREGPT};
use crate::systems::*;
use crate::{Result, Scale, round};

pub fn table_1(_: &Scale) -> Result<Value> {
    let mut rows = Vec::new();
    for deployment in [OPT_13B, OPT_66B, OPT_175B] {
        let (model, device, machine) = (deployment.model()?, deployment.device()?, deployment.computed()?);
        rows.push(json!({
            "model": deployment.name,
            "device": device.name,
            "devices": deployment.devices,
            "memory_gb": round(device.memory_bytes as f64 * deployment.devices as f64 / 1e9),
            "weights_gb": round(model.weight_bytes() / 1e9),
            "pool_gb": round(machine.slots as f64 * model.kv_bytes() / 1e9),
            "slots": machine.slots,
            "paper_slots": deployment.slots,
        }));
    }
    Ok(json!({ "rows": rows }))
}

/// Number of bars of a histogram, and tokens per bar.
const BARS: usize = 40;

pub fn figure_11(scale: &Scale) -> Result<Value> {
    let mut panels = Vec::new();
    for (lengths, width) in [(SHAREGPT, 50), (ALPACA, 10)] {
        let jobs = lengths.jobs(scale.of(20_000, 1000), 1.0, 1);
        let distribution = |values: Vec<usize>, published: f64| {
            let mut counts = vec![0.0; BARS];
            values.iter().filter(|&&value| value / width < BARS).for_each(|value| counts[value / width] += 1.0);
            let shares: Vec<f64> = counts.iter().map(|count| round(count / values.len() as f64)).collect();
            let mean = values.iter().sum::<usize>() as f64 / values.len() as f64;
            json!({ "published_mean": published, "mean": round(mean), "shares": shares })
        };
        panels.push(json!({
            "data": lengths.name,
            "tokens_per_bar": width,
            "prompt": distribution(jobs.iter().map(|job| job.prompt).collect(), lengths.prompt),
            "output": distribution(jobs.iter().map(|job| job.output).collect(), lengths.output),
        }));
    }
    Ok(json!({ "panels": panels }))
}
