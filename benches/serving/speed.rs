//! Cost of the engine: wall time of 100,000 requests, and of a step of the scheduler and the block
//! manager.

use std::time::{Duration, Instant};

use pagedllm::kv::{BlockHash, BlockManager, Paging};
use pagedllm::scheduler::{self, Branching, Event, NewGroup, PreparedGroup, SampledToken, Scheduler, SchedulerOptions, TokenOutcome};
use pagedllm::types::SeqId;
use pagedllm::types::options::{OrderPolicy, Policies, Preemption};

use super::Result;
use super::simulation::measurement::{median, options};
use super::simulation::workload::{ALPACA, Lengths, SHAREGPT};
use super::simulation::{Machine, OnStep, Simulation};

const REQUESTS: usize = 100_000;

pub fn print_requests() -> Result<()> {
    println!(
        "## {REQUESTS} requests\n\n| lengths | mean prompt, output | rate | simulated | tokens | steps | wall time | wall time per token |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for (lengths, rate) in [(SHAREGPT, 3.0), (ALPACA, 30.0)] {
        print_run(&lengths, rate)?;
    }
    println!();
    Ok(())
}

fn print_run(lengths: &Lengths, rate: f64) -> Result<()> {
    let simulation = Simulation::new(&options(Policies::default()), Machine::PAPER)?;
    let jobs = lengths.jobs(REQUESTS, rate, 1);
    let start = Instant::now();
    let mut steps = 0;
    let served = simulation.serve(&jobs, &mut OnStep(|_: &_| steps += 1))?;
    let wall = start.elapsed();
    let outputs: usize = served.iter().map(|served| served.tokens).sum();
    let tokens: usize = served.iter().zip(&jobs).map(|(served, job)| served.tokens + job.prompt).sum();
    let end = served.iter().map(|served| served.last_token).max().unwrap_or_default();
    println!(
        "| {} | {:.0}, {:.0} | {rate}/s | {:.0} s | {tokens} | {steps} | {:.1} s | {:.0} ns |",
        lengths.name,
        (tokens - outputs) as f64 / jobs.len() as f64,
        outputs as f64 / jobs.len() as f64,
        end.as_secs_f64(),
        wall.as_secs_f64(),
        wall.as_secs_f64() * 1e9 / tokens as f64
    );
    Ok(())
}

const STEPS: usize = 512;
const CONTEXT: usize = 256;

pub fn print_steps() -> Result<()> {
    println!("## A step of the scheduler and the block manager\n");
    println!(
        "Microseconds, medians of {STEPS} steps in which every sequence decodes, with contexts of {CONTEXT} to {} tokens;",
        CONTEXT + STEPS
    );
    println!("the prefix cache is on. Goal: 20 with 256 sequences.\n");
    println!("| running | 0 waiting | 1,000 waiting | 100,000 waiting | 100,000 waiting, by priority |\n| --- | --- | --- | --- | --- |");
    let by_priority = Policies { order: OrderPolicy::Priority { ageing: Policies::DEFAULT_AGEING }, ..Policies::default() };
    for running in [64, 256, 1024] {
        let mut row = Vec::new();
        for (waiting, policies) in
            [(0, Policies::default()), (1_000, Policies::default()), (100_000, Policies::default()), (100_000, by_priority)]
        {
            row.push(format!("{:.1}", step(running, waiting, &policies)?.as_nanos() as f64 / 1e3));
        }
        println!("| {running} | {} |", row.join(" | "));
    }
    println!();
    Ok(())
}

fn prepared(id: u64, prompt: usize, max_len: usize, priority: i32) -> pagedllm::error::Result<PreparedGroup> {
    // All prompts differ, so that they share no blocks.
    let prompt = (0..prompt as u32).map(|i| id as u32 ^ i).collect();
    let (branching, root) = (Branching::One, BlockHash::default());
    NewGroup { prompt, max_len, branching, priority, keep: false, logits_from: None, prompt_only: false, root }
        .prepare(&Paging::without_windows(16))
}

fn step(running: usize, waiting: usize, policies: &Policies) -> Result<Duration> {
    let max_len = CONTEXT + STEPS + 1000;
    let options = SchedulerOptions { max_batch_tokens: 8192, max_seqs: running, prefill_chunk: 8192, preemption: Preemption::Recompute };
    let blocks = BlockManager::new(running * max_len.div_ceil(16) * 102 / 100 + 1, Paging::without_windows(16), true)?;
    let mut scheduler = Scheduler::with_policies(options, blocks, scheduler::Policies::new(policies))?;
    for id in 1..=running as u64 {
        scheduler.add(SeqId::from_raw(id), prepared(id, CONTEXT, max_len, 1)?)?;
    }
    let (mut choices, mut events) = (Vec::new(), Vec::new());
    while scheduler.waiting() > 0 || choices.len() < running {
        timed_step(&mut scheduler, &mut choices, &mut events);
    }
    for id in 1..=waiting as u64 {
        scheduler.add(SeqId::from_raw(1_000_000 + id), prepared(id, 16, 100, 0)?)?;
    }
    Ok(median((0..STEPS).map(|_| timed_step(&mut scheduler, &mut choices, &mut events)).collect()))
}

/// Returns the time of the scheduler in one step. The choice of tokens is not counted.
fn timed_step(scheduler: &mut Scheduler, choices: &mut Vec<SampledToken>, events: &mut Vec<Event>) -> Duration {
    let start = Instant::now();
    let plan = scheduler.schedule(|_| true).expect("sequences are running");
    let planned = start.elapsed();
    choices.clear();
    choices.extend(plan.sampled().map(|part| SampledToken {
        parent: part.seq,
        child: part.seq,
        outcome: TokenOutcome::Token(part.generated as u32),
    }));
    let start = Instant::now();
    scheduler.commit(plan, choices, events);
    std::hint::black_box((scheduler.waiting(), scheduler.running(), scheduler.reserved_blocks()));
    planned + start.elapsed()
}
