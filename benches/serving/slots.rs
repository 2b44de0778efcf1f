//! Share of KV slots that hold tokens while more requests wait than fit.

use pagedllm::engine::Engine;
use pagedllm::types::options::{EngineOptions, Policies};

use super::Result;
use super::simulation::measurement::options;
use super::simulation::workload::{ALPACA, Lengths, SHAREGPT};
use super::simulation::{Machine, OnStep, Simulation};

const REQUESTS: usize = 2000;

pub fn print() -> Result<()> {
    println!("## KV slots that hold tokens, at saturation\n\n\"half a block\": the value if each running sequence wasted half a block.\n");
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

/// Returns three shares of filled slots: of the used slots, the same if each sequence wasted half a
/// block, and of all slots.
fn shares(lengths: &Lengths, block_size: usize) -> Result<String> {
    let options = EngineOptions { block_size, ..options(Policies::default()) };
    let simulation = Simulation::new(&options, Machine::PAPER)?;
    let (mut steps, mut sums) = (0.0, [0.0; 3]);
    let on_step = |engine: &Engine| {
        let stats = engine.stats();
        // Only steps in which requests wait for blocks count.
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
    simulation.serve(&lengths.jobs(REQUESTS, 1000.0, 3), &mut OnStep(on_step))?;
    Ok(sums.map(|sum| format!("{:.1} %", 100.0 * sum / steps)).join(" | "))
}
