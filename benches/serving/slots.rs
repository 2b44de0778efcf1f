//! KV slots that hold real tokens while more requests wait than fit.

use pagedllm::engine::Engine;
use pagedllm::options::{EngineOptions, Policies};

use super::Result;
use super::figures::options;
use super::simulation::{Machine, Simulation};
use super::workload::{ALPACA, Lengths, SHAREGPT};

const REQUESTS: usize = 2000;

pub fn print() -> Result<()> {
    println!(
        "## KV slots that hold real tokens, at saturation\n\nBeside what half a block wasted for each running sequence would leave.\n"
    );
    println!(
        "| block size | {0} | half a block | of the whole pool | {1} | half a block | of the whole pool |",
        SHAREGPT.name, ALPACA.name
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for block_size in [8, 16, 32, 64, 128] {
        println!("| {block_size} | {} | {} |", shares(&SHAREGPT, block_size)?, shares(&ALPACA, block_size)?);
    }
    println!();
    Ok(())
}

/// Of the slots in use; what half a block a sequence would leave of them; of all there are.
fn shares(lengths: &Lengths, block_size: usize) -> Result<String> {
    let options = EngineOptions { block_size, ..options(Policies::default()) };
    let simulation = Simulation::new(&options, Machine::PAPER)?;
    let (mut steps, mut sums) = (0.0, [0.0; 3]);
    let watch = |engine: &Engine, _: &_| {
        let stats = engine.stats();
        // Saturated: the next ones wait for blocks.
        if stats.waiting < 10 || stats.blocks_used == 0 {
            return;
        }
        let used = (stats.blocks_used as usize * block_size) as f64;
        let filled = used * stats.slot_utilization;
        let half = stats.running as f64 * block_size as f64 / 2.0;
        let shares = [filled / used, filled / (filled + half), filled / (stats.blocks_total as usize * block_size) as f64];
        sums.iter_mut().zip(shares).for_each(|(sum, share)| *sum += share);
        steps += 1.0;
    };
    simulation.serve(&lengths.jobs(REQUESTS, 1000.0, 3), watch)?;
    Ok(sums.map(|sum| format!("{:.1} %", 100.0 * sum / steps)).join(" | "))
}
