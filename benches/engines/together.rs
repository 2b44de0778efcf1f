//! Two engines in one process, stepped by two threads of the host: tokens per second of both,
//! compared with one engine alone. If the engines compete for cores, the sum is much lower.

use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::types::options::{EngineOptions, SamplingParams};

use crate::Result;
use crate::common::median;

const SEQUENCES: usize = 8;
const PROMPT: u32 = 64;
const STEPS: usize = 100;
const REPETITIONS: usize = 5;

pub fn print(model: &str, dir: &Path) -> Result<()> {
    let cores = std::thread::available_parallelism()?.get();
    println!("Two engines, model {model}, {SEQUENCES} sequences each: tokens/s ({cores} cores)\n");
    println!("| Threads per engine | one engine alone | both together | both together / one engine with all cores |");
    println!("| --- | --- | --- | --- |");
    let pinned = |first: usize, count: usize| Some((first..first + count).collect::<Vec<_>>());
    let half = (cores / 2).max(1);
    let [alone, together] = measure(dir, cores, [None, None])?;
    let print = |what: &str, [one, both]: [f64; 2]| println!("| {what} | {one:.0} | {both:.0} | {:.2} |", both / alone);
    print("one per core", [alone, together]);
    print("half of the cores", measure(dir, half, [None, None])?);
    print("half of the cores, pinned apart", measure(dir, half, [pinned(0, half), pinned(cores - half, half)])?);
    Ok(())
}

/// Returns the tokens per second of one engine alone, and of both together.
fn measure(dir: &Path, threads: usize, cpus: [Option<Vec<usize>>; 2]) -> Result<[f64; 2]> {
    let [first, second] = cpus.map(|cpus| Bench::open(dir, threads, cpus));
    let (mut first, mut second) = (first?, second?);
    let (mut alone, mut together) = (Vec::new(), Vec::new());
    for _ in 0..REPETITIONS {
        alone.push(rate(1, first.serve()?));
        together.push(rate(2, both(&mut first, &mut second)?));
    }
    Ok([median(alone), median(together)])
}

fn rate(engines: usize, time: Duration) -> f64 {
    (engines * SEQUENCES * STEPS) as f64 / time.as_secs_f64()
}

/// Runs both engines. Returns the time from the common start to the end of the slower engine.
fn both(first: &mut Bench, second: &mut Bench) -> Result<Duration> {
    let barrier = Barrier::new(2);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let threads = [first, second].map(|engine| {
            scope.spawn(|| {
                barrier.wait();
                engine.serve()
            })
        });
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?.map(drop))
    })?;
    Ok(start.elapsed())
}

struct Bench(Engine);

impl Bench {
    fn open(dir: &Path, threads: usize, cpus: Option<Vec<usize>>) -> Result<Bench> {
        let options = EngineOptions {
            model_dir: dir.into(),
            threads: Some(threads),
            cpus,
            max_seqs: SEQUENCES,
            max_model_len: Some(1024),
            prefix_cache: false,
            skip_tokenizer: true,
            ..Default::default()
        };
        Ok(Bench(Engine::create(&options)?))
    }

    /// Runs all sequences of this engine and returns the time, with prompts.
    fn serve(&mut self) -> Result<Duration> {
        let start = Instant::now();
        for seed in 0..SEQUENCES as u32 {
            let prompt = (0..PROMPT).map(|i| 300 + (i * 7919 + seed * 104_729) % 15_000).collect();
            let sampling = SamplingParams { max_tokens: Some(STEPS + 1), ignore_eos: true, ..SamplingParams::greedy() };
            self.0.add_request(Request::new(Prompt::Tokens(prompt), sampling))?;
        }
        self.0.step()?;
        for _ in 0..STEPS {
            let report = self.0.step()?;
            if report.decode_tokens != SEQUENCES as u64 {
                return Err(format!("a step has {report:?}").into());
            }
        }
        let time = start.elapsed();
        self.0.queue().poll(Some(Duration::ZERO))?;
        Ok(time)
    }
}
