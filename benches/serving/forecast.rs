//! Error of the predicted time to first token.
#![allow(dead_code)] // each benchmark and test uses a part

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pagedllm::engine::{Prompt, Request};
use pagedllm::types::RequestId;
use pagedllm::types::options::{AllocationPolicy, BatchingPolicy, EngineOptions, OrderPolicy, Policies, SamplingParams};

use super::simulation::workload::{ALPACA, Lengths, SHAREGPT};
use super::simulation::{Job, Machine, Simulation};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const REQUESTS: usize = 3000;
/// Number of first requests that are not counted: the engine learns from them.
const WARM_UP: usize = 200;

/// Whether hosts know the length of an output.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Hosts {
    /// `max_tokens` is the length.
    Know,
    /// `max_tokens` is the same for all, and outputs end earlier.
    DoNotKnow,
}

/// Relative errors of the predictions.
#[derive(Debug, Clone, Copy)]
pub struct Errors {
    pub median: f64,
    pub ninetieth: f64,
    /// Mean time to first token, in seconds.
    pub mean: f64,
}

/// Measures the errors. One request in ten has priority 5.
pub fn measure(lengths: &Lengths, rate: f64, hosts: Hosts, policies: Policies) -> Result<Errors> {
    let options = EngineOptions { max_seqs: 256, max_batch_tokens: 2048, prefix_cache: false, policies, ..Default::default() };
    let simulation = Simulation::new(&options, Machine::PAPER)?;
    let mut jobs = lengths.jobs(REQUESTS, rate, 1);
    jobs.iter_mut().step_by(10).for_each(|job| job.priority = 5);
    if hosts == Hosts::DoNotKnow {
        jobs.iter_mut().for_each(|job| job.max_tokens = 1024);
    }
    let (predicted, measured) = serve(&simulation, &jobs)?;
    let mut errors: Vec<f64> =
        predicted.iter().zip(&measured).skip(WARM_UP).map(|(predicted, measured)| (predicted / measured - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    let mean = measured[WARM_UP..].iter().sum::<f64>() / (measured.len() - WARM_UP) as f64;
    Ok(Errors { median: errors[errors.len() / 2], ninetieth: errors[errors.len() * 9 / 10], mean })
}

/// Returns the predicted and the measured seconds from arrival to the first token.
fn serve(simulation: &Simulation, jobs: &[Job]) -> Result<(Vec<f64>, Vec<f64>)> {
    let (engine, clock) = (&simulation.engine, &simulation.clock);
    let now = || pagedllm::engine::Clock::now(&**clock);
    let (mut predicted, mut measured) = (Vec::new(), vec![0.0; jobs.len()]);
    let mut first = RequestId::default();
    loop {
        while let Some(job) = jobs.get(predicted.len()).filter(|job| job.at <= now()) {
            let sampling = SamplingParams { max_tokens: Some(job.max_tokens), ..SamplingParams::greedy() };
            let request = Request { priority: job.priority, ..Request::new(Prompt::Tokens(vec![0; job.prompt]), sampling) };
            let from_now = engine.predict_admission(engine.queue(), request)?.first_token.unwrap_or_default();
            let id = simulation.add(job)?;
            first = if predicted.is_empty() { id } else { first };
            predicted.push((now() + from_now - job.at).as_secs_f64());
        }
        let report = engine.step()?;
        for output in engine.queue().poll(Some(Duration::ZERO))? {
            let index = (output.request.get() - first.get()) as usize;
            if measured[index] == 0.0 {
                measured[index] = (now() - jobs[index].at).as_secs_f64();
            }
        }
        if report.unfinished == 0 {
            let Some(job) = jobs.get(predicted.len()) else { return Ok((predicted, measured)) };
            clock.advance_to(job.at);
        }
    }
}

/// Rates from an idle machine to an overloaded one.
pub const CASES: [(Lengths, f64); 7] =
    [(SHAREGPT, 1.0), (SHAREGPT, 3.0), (SHAREGPT, 4.0), (SHAREGPT, 6.0), (ALPACA, 25.0), (ALPACA, 60.0), (ALPACA, 100.0)];

pub fn print() -> Result<()> {
    println!("## Predicted time to first token\n\n| lengths | rate | hosts know the length | mean TTFT | median error | 90th percentile |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (lengths, rate) in CASES {
        for hosts in [Hosts::Know, Hosts::DoNotKnow] {
            let Errors { median, ninetieth, mean } = measure(&lengths, rate, hosts, Policies::default())?;
            let known = if hosts == Hosts::Know { "yes" } else { "no" };
            println!("| {} | {rate}/s | {known} | {mean:.2} s | {:.0} % | {:.0} % |", lengths.name, 100.0 * median, 100.0 * ninetieth);
        }
    }
    print_policies()?;
    print_cost()
}

const AGEING: Duration = Policies::DEFAULT_AGEING;

/// Policies that are compared with the default.
const OTHERS: [(&str, Policies); 6] = [
    ("priority", Policies { order: OrderPolicy::Priority { ageing: AGEING }, ..DEFAULT }),
    ("shortest predicted", Policies { order: OrderPolicy::ShortestPredicted { ageing: AGEING }, ..DEFAULT }),
    ("prefill first, 2048", Policies { batching: BatchingPolicy::PrefillFirst { threshold: 2048 }, ..DEFAULT }),
    ("decode first, 256", Policies { batching: BatchingPolicy::DecodeFirst { budget: 256 }, ..DEFAULT }),
    ("static", Policies { batching: BatchingPolicy::Static, ..DEFAULT }),
    ("max_tokens", Policies { allocation: AllocationPolicy::MaxTokens, ..DEFAULT }),
];
const DEFAULT: Policies = Policies { order: OrderPolicy::Fcfs, batching: BatchingPolicy::Mixed, allocation: AllocationPolicy::OnDemand };

/// Requests per second, from an idle machine to an overloaded one.
const RATES: [f64; 3] = [1.0, 3.0, 6.0];

fn print_policies() -> Result<()> {
    print!("\nMedian errors by policy, {}:\n\n| policy |", SHAREGPT.name);
    let columns: Vec<(f64, Hosts)> = RATES.into_iter().flat_map(|rate| [(rate, Hosts::Know), (rate, Hosts::DoNotKnow)]).collect();
    for (rate, hosts) in &columns {
        print!(" {rate}/s, {} |", if *hosts == Hosts::Know { "known" } else { "unknown" });
    }
    println!("\n| --- | --- | --- | --- | --- | --- | --- |");
    for (name, policies) in OTHERS {
        print!("| {name} |");
        for &(rate, hosts) in &columns {
            let Errors { median, mean, .. } = measure(&SHAREGPT, rate, hosts, policies)?;
            print!(" {:.0} % of {mean:.1} s |", 100.0 * median);
        }
        println!();
    }
    println!();
    Ok(())
}

const CALLS: usize = 50;

/// Prints the time of a prediction, and the delay of other threads that need the same lock, as
/// every step does.
fn print_cost() -> Result<()> {
    println!("| waiting requests | time of a call | maximum delay of another thread's call |\n| --- | --- | --- |");
    for waiting in [100, 10_000, 100_000] {
        let (call, delay) = cost(waiting)?;
        println!("| {waiting} | {:.0} us | {:.0} us |", call.as_secs_f64() * 1e6, delay.as_secs_f64() * 1e6);
    }
    println!();
    Ok(())
}

/// Returns the median time of a call and the median of the maximum delay.
fn cost(waiting: usize) -> Result<(Duration, Duration)> {
    let options = EngineOptions { max_seqs: 256, max_batch_tokens: 2048, prefix_cache: false, ..Default::default() };
    let simulation = Simulation::new(&options, Machine::PAPER)?;
    let engine = &simulation.engine;
    for (i, job) in ALPACA.jobs(256 + waiting, 1e6, 1).iter().enumerate() {
        simulation.add(job)?;
        if i == 255 {
            engine.step()?;
        }
    }
    let (max_delay, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let results = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let start = Instant::now();
                engine.check().expect("the engine has not failed");
                max_delay.fetch_max(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        let call = |_| -> Result<(Duration, Duration)> {
            let request = Request::new(Prompt::Tokens(vec![0; 100]), SamplingParams { max_tokens: Some(100), ..SamplingParams::greedy() });
            max_delay.store(0, Ordering::Relaxed);
            let start = Instant::now();
            engine.predict_admission(engine.queue(), request)?;
            let time = start.elapsed();
            std::thread::sleep(Duration::from_millis(1));
            Ok((time, Duration::from_nanos(max_delay.load(Ordering::Relaxed))))
        };
        let results: Result<Vec<_>> = (0..CALLS).map(call).collect();
        done.store(true, Ordering::Relaxed);
        results
    })?;
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let (calls, delays) = results.into_iter().unzip();
    Ok((median(calls), median(delays)))
}
