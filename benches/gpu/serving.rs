//! Serving: requests with the lengths of ShareGPT that arrive at random times. Measures the throughput,
//! the time to the first token (TTFT) and the time per further token (TPOT).

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::types::SeqId;
use pagedllm::types::options::{EngineOptions, SamplingParams};
use serde_json::json;

use crate::Result;
use crate::engine::Shape;
use crate::line::Line;
use crate::options::Options;
use crate::simulation::Job;
use crate::simulation::workload::SHAREGPT;

const PART: &str = "serving";
/// Requests per second, and the number of requests. With an infinite rate they arrive together.
const LOADS: [(f64, usize); 3] = [(4.0, 80), (16.0, 320), (f64::INFINITY, 400)];
const SMALL_LOADS: [(f64, usize); 2] = [(50.0, 4), (f64::INFINITY, 6)];
/// Maximum tokens of a prompt and of an output with `--small`.
const SMALL_LEN: usize = 12;
const MAX_SEQS: usize = 256;
const SEED: u64 = 1;
const PERCENTILES: [usize; 3] = [50, 90, 99];

pub fn bench(options: &Options) -> Result<()> {
    let vocab = Shape::read(&options.model)?.vocab;
    let engine = Engine::create(&EngineOptions {
        model_dir: options.model.clone(),
        device: "cuda:0".into(),
        memory_fraction: Some(0.9),
        max_seqs: MAX_SEQS,
        prefix_cache: false, // no two prompts are alike
        skip_tokenizer: true,
        ..Default::default()
    })?;
    for &(rate, count) in options.sizes(&LOADS, &SMALL_LOADS) {
        let mut jobs = SHAREGPT.jobs(count, rate, SEED);
        if options.small {
            jobs.iter_mut().for_each(|job| (job.prompt, job.output) = (job.prompt.min(SMALL_LEN), job.output.min(SMALL_LEN)));
        }
        let (seconds, served) = serve(&engine, &jobs, vocab)?;
        let name = if rate.is_finite() { format!("{rate} requests/s") } else { "all at once".into() };
        print(&format!("{count} requests, {name}"), seconds, &served);
    }
    Ok(())
}

/// A request and its progress, in seconds since the start.
struct Served {
    arrival: f64,
    first: f64,
    last: f64,
    tokens: usize,
}

impl Served {
    fn to_first_token(&self) -> f64 {
        self.first - self.arrival
    }

    /// Returns the seconds per token after the first one.
    fn per_token(&self) -> Option<f64> {
        (self.tokens > 1).then(|| (self.last - self.first) / (self.tokens - 1) as f64)
    }
}

/// Adds each request when it arrives, and steps until all have ended. Returns the seconds of all.
fn serve(engine: &Engine, jobs: &[Job], vocab: usize) -> Result<(f64, Vec<Served>)> {
    let (mut waiting, mut running) = (jobs.iter().enumerate().peekable(), 0);
    let mut served: HashMap<SeqId, Served> = HashMap::new();
    let start = Instant::now();
    while running > 0 || waiting.peek().is_some() {
        while let Some((number, job)) = waiting.next_if(|(_, job)| job.at <= start.elapsed()) {
            let request = engine.add_request(request(number, job, vocab))?;
            served.insert(request.sequence(0), Served { arrival: job.at.as_secs_f64(), first: 0.0, last: 0.0, tokens: 0 });
            running += 1;
        }
        if let (0, Some((_, next))) = (running, waiting.peek()) {
            thread::sleep(next.at.saturating_sub(start.elapsed()));
            continue;
        }
        engine.step()?;
        for output in engine.queue().poll(Some(Duration::ZERO))? {
            if let Some(error) = output.error {
                return Err(error.into());
            }
            let now = start.elapsed().as_secs_f64();
            let one = served.get_mut(&output.sequence).ok_or("an output belongs to no request")?;
            if one.tokens == 0 && !output.tokens.is_empty() {
                one.first = now;
            }
            (one.tokens, one.last) = (one.tokens + output.tokens.len(), now);
            running -= output.finish.is_some() as usize;
        }
    }
    let tokens: usize = served.values().map(|one| one.tokens).sum();
    match jobs.iter().map(|job| job.output).sum::<usize>() {
        expected if expected == tokens => Ok((start.elapsed().as_secs_f64(), served.into_values().collect())),
        expected => Err(format!("{tokens} tokens were generated, expected {expected}").into()),
    }
}

fn request(number: usize, job: &Job, vocab: usize) -> Request {
    let prompt = (0..job.prompt).map(|i| ((i * 7919 + number * 104_729) % vocab) as u32).collect();
    let sampling = SamplingParams { max_tokens: Some(job.output), ignore_eos: true, ..SamplingParams::greedy() };
    Request::new(Prompt::Tokens(prompt), sampling)
}

fn print(load: &str, seconds: f64, served: &[Served]) {
    let line = |what: String, value: f64, unit| {
        let (case, shape) = (format!("{load}: {what}"), json!({}));
        Line { part: PART, case, shape, value, unit, limit: f64::INFINITY }.print();
    };
    let tokens: usize = served.iter().map(|one| one.tokens).sum();
    line("output".into(), tokens as f64 / seconds, "tokens/s");
    line("completed".into(), served.len() as f64 / seconds, "requests/s");
    let first = sorted(served.iter().map(Served::to_first_token));
    let per_token = sorted(served.iter().filter_map(Served::per_token));
    for (name, times) in [("TTFT", first), ("TPOT", per_token)] {
        for percent in PERCENTILES.into_iter().filter(|_| !times.is_empty()) {
            line(format!("{name} p{percent}"), 1e3 * times[(times.len() * percent).div_ceil(100) - 1], "ms");
        }
    }
}

fn sorted(numbers: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers
}
