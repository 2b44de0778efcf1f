//! Figure 16: requests with a shared prefix, as examples of a translation.

use pagedllm::types::options::EngineOptions;
use serde_json::{Value, json};

use crate::simulation::Job;
use crate::simulation::workload::{Content, Lengths, MAX_LEN};
use crate::systems::*;
use crate::{Result, Scale, map, round, trace_len};

/// A sentence and its translation. The paper does not publish these lengths: sentences of WMT16 have
/// about 25 words.
const SENTENCES: Lengths = Lengths { name: "sentences", prompt: 35.0, output: 40.0, deviation: 0.5 };
/// Tokens of the shared prefix: an instruction with one example and with five examples.
const PREFIXES: [(&str, usize, f64); 2] = [("one shot", 80, 1.67), ("five shots", 341, 3.58)];

fn jobs(prefix: usize) -> impl Fn(f64, f64) -> Vec<Job> + Sync {
    move |rate, seconds| {
        let mut jobs = SENTENCES.jobs(trace_len(rate, seconds), rate, 3);
        for job in &mut jobs {
            job.prompt += prefix;
            job.content = Content::Shared { text: 1, until: prefix };
        }
        jobs
    }
}

pub fn figure_16(scale: &Scale) -> Result<Value> {
    let with_cache = |system: System| EngineOptions { prefix_cache: true, ..system.options() };
    let systems = [
        ("libpagedllm, prefix cache", OURS, with_cache(OURS)),
        ("vLLM 0.1.2, prefix cache", VLLM, with_cache(VLLM)),
        ("libpagedllm, no prefix cache", OURS, OURS.options()),
        ("Orca (Oracle)", ORACLE, ORACLE.options()),
    ];
    let runs: Vec<(usize, usize)> = (0..PREFIXES.len()).flat_map(|prefix| (0..systems.len()).map(move |system| (prefix, system))).collect();
    let results = map(&runs, |&(prefix, system)| {
        let (_, tokens, _) = PREFIXES[prefix];
        let (_, system, options) = &systems[system];
        let jobs = jobs(tokens);
        let load = Load { machine: LLAMA_13B.machine()?, jobs: &jobs, seconds: scale.seconds() / 4.0, max_output: MAX_LEN };
        let sustained = load.sustained(options, system, 10.0)?;
        Ok((sustained, curve(&load, options, system, 1.2 * sustained, scale)?))
    })?;
    let panel = |number: usize| {
        let (name, tokens, paper) = PREFIXES[number];
        let of = |system: usize| &results[number * systems.len() + system];
        let row = |system: usize| {
            let (sustained, curve) = of(system);
            json!({ "name": systems[system].0, "sustained": round(*sustained), "ratio": round(of(0).0 / sustained), "curve": curve })
        };
        json!({ "prefix": name, "tokens": tokens, "paper_ratio": paper, "systems": (0..systems.len()).map(row).collect::<Vec<_>>() })
    };
    Ok(json!({ "trace_seconds": scale.seconds() / 4.0, "panels": [panel(0), panel(1)] }))
}
