//! What the engine itself costs: a hundred thousand requests in wall time.

use std::time::Instant;

use pagedllm::options::EngineOptions;

use super::Result;
use super::simulation::{Machine, Simulation};
use super::workload::{ALPACA, Lengths, SHAREGPT};

const REQUESTS: usize = 100_000;

pub fn print() -> Result<()> {
    println!("## {REQUESTS} requests\n\n| lengths | rate | simulated | tokens | steps | wall time | of it for each token |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for (lengths, rate) in [(SHAREGPT, 3.0), (ALPACA, 30.0)] {
        print_run(&lengths, rate)?;
    }
    println!();
    Ok(())
}

fn print_run(lengths: &Lengths, rate: f64) -> Result<()> {
    let options = EngineOptions { max_seqs: 256, max_batch_tokens: 2048, prefix_cache: false, ..Default::default() };
    let simulation = Simulation::new(&options, Machine::PAPER)?;
    let jobs = lengths.jobs(REQUESTS, rate, 1);
    let begun = Instant::now();
    let mut steps = 0;
    let served = simulation.serve(&jobs, |_, _| steps += 1)?;
    let wall = begun.elapsed();
    let tokens: usize = served.iter().zip(&jobs).map(|(served, job)| served.tokens + job.prompt).sum();
    let end = served.iter().map(|served| served.last_token).max().unwrap_or_default();
    println!(
        "| {} | {rate}/s | {:.0} s | {tokens} | {steps} | {:.1} s | {:.0} ns |",
        lengths.name,
        end.as_secs_f64(),
        wall.as_secs_f64(),
        wall.as_secs_f64() * 1e9 / tokens as f64
    );
    Ok(())
}
