//! How well the time to the first token is told before a request is added.
#![allow(dead_code)] // each benchmark and test uses its part

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pagedllm::engine::{Prompt, Request};
use pagedllm::options::{AllocationPolicy, BatchingPolicy, EngineOptions, OrderPolicy, Policies, SamplingParams};

use super::simulation::{Job, Machine, Simulation};
use super::workload::{ALPACA, Lengths, SHAREGPT};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const REQUESTS: usize = 3000;
/// Before these the engine has not seen what it learns from.
const WARM_UP: usize = 200;

/// What is known beforehand of an answer's length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Hosts {
    /// They name it, as max_tokens.
    Know,
    /// They allow each the same, and it ends by itself.
    DoNotKnow,
}

/// How far off the forecasts were.
#[derive(Debug, Clone, Copy)]
pub struct Errors {
    pub median: f64,
    pub ninetieth: f64,
    /// The time to the first token itself, in seconds.
    pub mean: f64,
}

/// One request in ten is urgent, where that matters.
pub fn measure(lengths: &Lengths, rate: f64, hosts: Hosts, policies: Policies) -> Result<Errors> {
    let options = EngineOptions { max_seqs: 256, max_batch_tokens: 2048, prefix_cache: false, policies, ..Default::default() };
    let simulation = Simulation::new(&options, Machine::PAPER)?;
    let mut jobs = lengths.jobs(REQUESTS, rate, 1);
    jobs.iter_mut().step_by(10).for_each(|job| job.priority = 5);
    if hosts == Hosts::DoNotKnow {
        jobs.iter_mut().for_each(|job| job.max_tokens = 1024);
    }
    let (told, came) = serve(&simulation, &jobs)?;
    let mut errors: Vec<f64> = told.iter().zip(&came).skip(WARM_UP).map(|(told, came)| (told / came - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    let mean = came[WARM_UP..].iter().sum::<f64>() / (came.len() - WARM_UP) as f64;
    Ok(Errors { median: errors[errors.len() / 2], ninetieth: errors[errors.len() * 9 / 10], mean })
}

/// Seconds from arrival to the first token, as they were told and as they came.
fn serve(simulation: &Simulation, jobs: &[Job]) -> Result<(Vec<f64>, Vec<f64>)> {
    let (engine, clock) = (&simulation.engine, &simulation.clock);
    let now = || pagedllm::engine::Clock::now(&**clock);
    let (mut told, mut came) = (Vec::new(), vec![0.0; jobs.len()]);
    let mut first = 0;
    loop {
        while let Some(job) = jobs.get(told.len()).filter(|job| job.at <= now()) {
            let sampling = SamplingParams { max_tokens: Some(job.max_tokens), ..SamplingParams::greedy() };
            let request = Request { priority: job.priority, ..Request::new(Prompt::Tokens(vec![0; job.prompt]), sampling) };
            let from_now = engine.predict_admission(engine.queue(), request)?.first_token.unwrap_or_default();
            let id = simulation.add(job)?;
            first = if told.is_empty() { id } else { first };
            told.push((now() + from_now - job.at).as_secs_f64());
        }
        let report = engine.step()?;
        for output in engine.queue().poll(Some(Duration::ZERO))? {
            let place = (output.request - first) as usize;
            if came[place] == 0.0 {
                came[place] = (now() - jobs[place].at).as_secs_f64();
            }
        }
        if report.unfinished == 0 {
            let Some(job) = jobs.get(told.len()) else { return Ok((told, came)) };
            clock.advance_to(job.at);
        }
    }
}

/// Rates from an idle machine to one that falls behind.
pub const CASES: [(Lengths, f64); 7] =
    [(SHAREGPT, 1.0), (SHAREGPT, 3.0), (SHAREGPT, 4.0), (SHAREGPT, 6.0), (ALPACA, 25.0), (ALPACA, 60.0), (ALPACA, 100.0)];

pub fn print() -> Result<()> {
    println!(
        "## Time to the first token, told and come\n\n| lengths | rate | hosts know the length | mean | median error | 90th percentile |"
    );
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

/// Each of these instead of the default one.
const OTHERS: [(&str, Policies); 6] = [
    ("priority", Policies { order: OrderPolicy::Priority { ageing: AGEING }, ..DEFAULT }),
    ("shortest predicted", Policies { order: OrderPolicy::ShortestPredicted { ageing: AGEING }, ..DEFAULT }),
    ("prefill first, 2048", Policies { batching: BatchingPolicy::PrefillFirst { threshold: 2048 }, ..DEFAULT }),
    ("decode first, 256", Policies { batching: BatchingPolicy::DecodeFirst { budget: 256 }, ..DEFAULT }),
    ("static", Policies { batching: BatchingPolicy::Static, ..DEFAULT }),
    ("max_tokens", Policies { allocation: AllocationPolicy::MaxTokens, ..DEFAULT }),
];
const DEFAULT: Policies = Policies { order: OrderPolicy::Fcfs, batching: BatchingPolicy::Mixed, allocation: AllocationPolicy::OnDemand };

/// From an idle machine to one that falls behind.
const RATES: [f64; 3] = [1.0, 3.0, 6.0];

fn print_policies() -> Result<()> {
    print!("\nMedian errors by policy, {}:\n\n| policy |", SHAREGPT.name);
    let columns: Vec<(f64, Hosts)> = RATES.into_iter().flat_map(|rate| [(rate, Hosts::Know), (rate, Hosts::DoNotKnow)]).collect();
    for (rate, hosts) in &columns {
        print!(" {rate}/s, {} |", if *hosts == Hosts::Know { "known" } else { "not known" });
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

const ASKED: usize = 50;

/// What asking costs the host, and those whose calls need the same lock meanwhile, as the stepping thread's do.
fn print_cost() -> Result<()> {
    println!("| requests that wait | a call of admit | another thread's call meanwhile, at most |\n| --- | --- | --- |");
    for waiting in [100, 10_000, 100_000] {
        let (call, held_up) = cost(waiting)?;
        println!("| {waiting} | {:.0} us | {:.0} us |", call.as_secs_f64() * 1e6, held_up.as_secs_f64() * 1e6);
    }
    println!();
    Ok(())
}

/// Medians.
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
    let (longest, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let asked = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let begun = Instant::now();
                engine.check().expect("it has not failed");
                longest.fetch_max(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        let ask = |_| -> Result<(Duration, Duration)> {
            let request = Request::new(Prompt::Tokens(vec![0; 100]), SamplingParams { max_tokens: Some(100), ..SamplingParams::greedy() });
            longest.store(0, Ordering::Relaxed);
            let begun = Instant::now();
            engine.predict_admission(engine.queue(), request)?;
            let call = begun.elapsed();
            std::thread::sleep(Duration::from_millis(1));
            Ok((call, Duration::from_nanos(longest.load(Ordering::Relaxed))))
        };
        let asked: Result<Vec<_>> = (0..ASKED).map(ask).collect();
        over.store(true, Ordering::Relaxed);
        asked
    })?;
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let (calls, held_up) = asked.into_iter().unzip();
    Ok((median(calls), median(held_up)))
}
