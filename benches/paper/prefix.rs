//! Figure 16: requests with a shared prefix, as examples of a translation.

use pagedllm::types::options::EngineOptions;
use serde_json::{Value, json};

use crate::panels::{Entry, Panel, measure};
use crate::simulation::Job;
use crate::simulation::workload::{Content, Lengths, MAX_LEN};
use crate::systems::*;
use crate::{Result, Scale, trace_len};

/// A sentence and its translation. The paper does not publish these lengths: sentences of WMT16
/// have about 25 words.
const SENTENCES: Lengths = Lengths { name: "sentences", prompt: 35.0, output: 40.0, deviation: 0.5 };
/// Tokens of the shared prefix: an instruction with one example and with five examples.
const PREFIXES: [(&str, usize); 2] = [("one shot", 80), ("five shots", 341)];

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
    let cached = |name, system: System| Entry { name, system, options: EngineOptions { prefix_cache: true, ..system.options() } };
    let panel = |(name, tokens): (&str, usize)| {
        Ok(Panel {
            about: json!({ "prefix": name, "tokens": tokens }),
            machine: LLAMA_13B.machine()?,
            jobs: Box::new(jobs(tokens)),
            max_output: MAX_LEN,
            guess: 10.0,
            entries: vec![
                cached("libpagedllm, prefix cache", OURS),
                cached("vLLM 0.1.2, prefix cache", VLLM),
                Entry { name: "libpagedllm, no prefix cache", ..OURS.into() },
                ORACLE.into(),
            ],
        })
    };
    let panels = PREFIXES.into_iter().map(panel).collect::<Result<Vec<_>>>()?;
    Ok(json!({ "panels": measure(&panels, scale)? }))
}
