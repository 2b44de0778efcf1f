//! Sampling on the device with the vocabulary of LLaMA-3, compared with reading all logits once.

use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{Alloc, Sampling};
use pagedllm::generation::sampler::{Context, ResolvedSampling, SamplingHistory, plan_draw};
use pagedllm::types::batch::device_sampling::{DeviceSampling, DeviceSamplingLimits};
use pagedllm::types::options::SamplingParams;
use serde_json::json;

use crate::Result;
use crate::line::Line;
use crate::options::Options;
use crate::random::numbers;
use crate::timing::seconds;

const PART: &str = "draws";
/// With 16 parts per row, then with fewer, and with one.
const ROWS: [usize; 4] = [1, 8, 64, 256];
const VOCAB: usize = 128_256;
const SMALL_VOCAB: usize = 500;

/// Sampling parameters, from the least work to the most.
fn kinds() -> [(&'static str, SamplingParams); 5] {
    let greedy = SamplingParams { temperature: 0.0, ..Default::default() };
    let nucleus = SamplingParams { top_p: 0.9, top_k: 50, ..Default::default() };
    [
        ("greedy", greedy.clone()),
        ("greedy, 5 logprobs", SamplingParams { logprobs: Some(5), ..greedy }),
        ("temperature", SamplingParams::default()),
        ("top-k and top-p", nucleus.clone()),
        ("top-k and top-p, penalties, 20 logprobs", SamplingParams { repetition_penalty: 1.1, logprobs: Some(20), ..nucleus }),
    ]
}

pub fn bench(options: &Options) -> Result<()> {
    let backend = CudaBackend::new(0, false)?;
    let vocab = if options.small { SMALL_VOCAB } else { VOCAB };
    let tokens: Vec<u32> = (0..2000).map(|i| (i * 61 % vocab) as u32).collect();
    for (name, params) in kinds() {
        let rules = ResolvedSampling { params, ..ResolvedSampling::default() };
        let memory = SamplingHistory::new(&rules, &tokens, 0)?;
        for &rows in options.sizes(&ROWS, &[1, 3]) {
            let limits = DeviceSamplingLimits::for_rows(rows, vocab);
            let mut drawing = backend.sampler(limits)?.ok_or("the backend does not sample on this device")?;
            let (mut draws, mut logits) = (DeviceSampling::new(limits)?, backend.vector(&numbers(rows * vocab))?);
            for row in 0..rows {
                let context = Context { tokens: &tokens, prompt_len: 0, generated: 0, seed: row as u64, history: &memory, allowed: None };
                plan_draw(&mut draws, row as u32, vocab, rules.params.logprobs, &rules, &context);
            }
            let mut failed = None;
            let mut sample = || {
                backend.start_sampling(&mut drawing, vocab, &mut logits, &draws)?;
                backend.finish_sampling(&mut drawing, draws.rows.len()).map(drop)
            };
            let seconds = seconds(&backend, |_| failed = sample().err().or(failed.take()))?;
            failed.map_or(Ok(()), Err)?;
            let limit = options.ceilings.min_seconds((size_of::<f32>() * rows * vocab) as f64, 0.0);
            let (case, shape) = (format!("{name}, {rows} rows"), json!({"rows": rows, "vocab": vocab}));
            Line { part: PART, case, shape, value: 1e6 * seconds, unit: "us", limit: 1e6 * limit }.print();
        }
    }
    Ok(())
}
