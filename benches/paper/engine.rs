//! The CPU engine with model S and lengths scaled down to a quarter: all requests arrive at once.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::types::SeqId;
use pagedllm::types::options::{EngineOptions, KvDtype, SamplingParams};
use serde_json::{Value, json};

use crate::simulation::Job;
use crate::simulation::measurement::mean;
use crate::simulation::workload::{Lengths, SHAREGPT};
use crate::systems::*;
use crate::{Result, Scale, round};

#[path = "../cpu/model.rs"]
#[allow(dead_code)] // only the CPU benchmark uses the rest
mod model;

const SYSTEMS: [System; 6] = [OURS, VLLM, ORACLE, POW2, MAX, FASTER_TRANSFORMER];
/// All lengths of the paper are divided by this number.
const DIVISOR: usize = 4;
const MAX_LEN: usize = crate::simulation::workload::MAX_LEN / DIVISOR;
/// Sizes of the pool, in sequences of the maximum length: as in the paper, and smaller. A CPU with
/// two cores gains little from a batch of more than about 15.
const POOLS: [usize; 2] = [2, 7];
/// The token that ends a sequence.
const END: u32 = 5;

fn model_dir(scale: &Scale) -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    match scale.quick {
        true => Ok(root.join("examples/model")),
        false => model::make(&model::SHAPES[0], &root.join("target/bench-models")),
    }
}

pub fn engine(scale: &Scale) -> Result<Value> {
    let dir = model_dir(scale)?;
    let lengths = Lengths { prompt: SHAREGPT.prompt / DIVISOR as f64, output: SHAREGPT.output / DIVISOR as f64, ..SHAREGPT };
    let mut jobs = lengths.jobs(scale.of(120, 12), 1.0, 9);
    for job in &mut jobs {
        job.prompt = job.prompt.min(MAX_LEN / 2);
        job.output = job.output.min(MAX_LEN - job.prompt);
    }
    let mut panels = Vec::new();
    for sequences in POOLS {
        let pool = sequences * MAX_LEN;
        let (mut rows, mut ours) = (Vec::new(), 0.0);
        for system in SYSTEMS {
            let run = serve(&dir, &system, &jobs, pool)?;
            let rate = jobs.len() as f64 / run.seconds;
            ours = if rows.is_empty() { rate } else { ours };
            rows.push(json!({ "name": system.name, "requests_per_second": round(rate), "ratio": round(ours / rate),
                "latency": round(run.latency.as_secs_f64()), "running": round(run.running), "preemptions": run.preemptions }));
        }
        panels.push(json!({ "pool_sequences": sequences, "pool_tokens": pool, "rows": rows }));
    }
    let model = if scale.quick { "examples/model" } else { "S" };
    Ok(json!({ "model": model, "requests": jobs.len(), "panels": panels }))
}

struct Run {
    seconds: f64,
    /// Mean normalized latency.
    latency: Duration,
    /// Mean number of running requests.
    running: f64,
    preemptions: u64,
}

fn serve(dir: &Path, system: &System, jobs: &[Job], pool: usize) -> Result<Run> {
    let mut options = EngineOptions {
        model_dir: dir.into(),
        kv_dtype: Some(KvDtype::Bf16),
        max_model_len: Some(MAX_LEN),
        skip_tokenizer: true,
        max_seqs: 128,
        ..system.options()
    };
    let block_bytes = Engine::plan(&options)?.block_bytes;
    options.kv_bytes = Some((pool / options.block_size) as u64 * block_bytes);
    let engine = Engine::create(&options)?;
    for job in jobs {
        engine.add_request(request(system.jobs(vec![*job], MAX_LEN - job.prompt)[0]))?;
    }
    let start = Instant::now();
    let (mut latencies, mut running, mut steps) = (Vec::new(), 0, 0);
    loop {
        let report = engine.step()?;
        running += engine.stats().running;
        steps += 1;
        for output in engine.queue().poll(Some(Duration::ZERO))? {
            if let Some(error) = output.error {
                return Err(error.into());
            }
            if output.finish.is_some() {
                latencies.push(start.elapsed() / output.generated_tokens as u32);
            }
        }
        if report.unfinished == 0 {
            break;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(Run { seconds, latency: mean(&latencies), running: running as f64 / f64::from(steps), preemptions: engine.stats().preemptions })
}

/// A request whose output has a length that its `max_tokens` does not show.
fn request(job: Job) -> Request {
    let sampling =
        SamplingParams { max_tokens: Some(job.max_tokens), ignore_eos: true, stop_token_ids: vec![END], ..SamplingParams::greedy() };
    let end = move |_: SeqId, tokens: &[u32], logits: &mut [f32]| {
        let is_last = tokens.len() + 1 >= job.prompt + job.output;
        logits[END as usize] = if is_last { 1e9 } else { f32::NEG_INFINITY };
    };
    let prompt = (0..job.prompt as u32).map(|i| 10 + (i * 7919 + job.prompt as u32) % 200).collect();
    Request { hook: Some(Arc::new(end)), ..Request::new(Prompt::Tokens(prompt), sampling) }
}
