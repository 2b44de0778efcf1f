//! Figures 2 and 13: use of the KV pool, and the number of requests in it.

use pagedllm::engine::{Engine, StepReport};
use serde_json::{Value, json};

use crate::rates::{guess, jobs};
use crate::simulation::workload::{ALPACA, MAX_LEN, SHAREGPT};
use crate::simulation::{Job, Observer, Served, Simulation};
use crate::systems::*;
use crate::{Result, Scale, map, round};

const SYSTEMS: [System; 5] = [OURS, VLLM, ORACLE, POW2, MAX];

/// Shares of the pool, averaged over the steps in which requests wait.
#[derive(Debug, Clone, Copy, Default)]
struct Shares {
    /// Slots that hold K and V of a token.
    tokens: f64,
    /// Slots that a running request will fill later.
    reserved: f64,
    /// Slots that are reserved for a request, or in its last block, and that it never fills. The
    /// rest of the pool is external: rounding up to a power of two, and free memory.
    internal: f64,
}

/// Accounts for the memory of systems that reserve contiguous chunks, from the lengths of the
/// requests, and of the others, from the statistics of the engine.
struct Accounting<'a> {
    jobs: &'a [Job],
    block_size: usize,
    slots: usize,
    is_contiguous: bool,
    sum: Shares,
    running: f64,
    steps: f64,
}

impl Accounting<'_> {
    fn contiguous(&self, served: &[Served]) -> Shares {
        let mut shares = Shares::default();
        for (job, served) in self.jobs.iter().zip(served).filter(|(_, served)| served.is_resident()) {
            shares.tokens += (job.prompt + served.tokens) as f64;
            shares.reserved += (job.output - served.tokens) as f64;
            shares.internal += (job.max_tokens - job.output) as f64;
        }
        shares
    }

    fn paged(&self, engine: &Engine) -> Shares {
        let stats = engine.stats();
        let used = (stats.blocks_used as usize * self.block_size) as f64;
        // A request fills the rest of its last block later, or never.
        let tokens = used * stats.slot_utilization;
        Shares { tokens, reserved: 0.0, internal: used - tokens }
    }
}

impl Observer for Accounting<'_> {
    fn step(&mut self, engine: &Engine, _: &StepReport, served: &[Served]) {
        let stats = engine.stats();
        if stats.waiting == 0 || stats.running == 0 {
            return;
        }
        let shares = if self.is_contiguous { self.contiguous(served) } else { self.paged(engine) };
        let slots = self.slots as f64;
        self.sum.tokens += shares.tokens / slots;
        self.sum.reserved += shares.reserved / slots;
        self.sum.internal += shares.internal / slots;
        self.running += stats.running as f64;
        self.steps += 1.0;
    }
}

/// All requests arrive in the first second. Only steps count in which requests wait, so that the
/// pool is full.
pub fn figure_2(scale: &Scale) -> Result<Value> {
    let machine = OPT_13B.machine()?;
    let rows = map(&SYSTEMS, |system| {
        let jobs = system.jobs(SHAREGPT.jobs(scale.of(2000, 100), 1e4, 5), MAX_LEN);
        let options = system.options();
        let is_contiguous = options.policies.allocation == pagedllm::types::options::AllocationPolicy::Contiguous;
        let slots = machine.slots / options.block_size * options.block_size;
        let mut accounting = Accounting {
            jobs: &jobs,
            block_size: options.block_size,
            slots,
            is_contiguous,
            sum: Shares::default(),
            running: 0.0,
            steps: 0.0,
        };
        Simulation::new(&options, machine)?.serve(&jobs, &mut accounting)?;
        let percent = |sum: f64| round(100.0 * sum / accounting.steps);
        let [tokens, reserved, internal] = [accounting.sum.tokens, accounting.sum.reserved, accounting.sum.internal].map(percent);
        let external = round(100.0 - tokens - reserved - internal);
        Ok(json!({ "name": system.name, "tokens": tokens, "reserved": reserved, "internal": internal, "external": external,
            "running": round(accounting.running / accounting.steps) }))
    })?;
    Ok(json!({ "systems": rows }))
}

/// The rate is that which the policies of vLLM 0.1.2 sustain, as the rates in the paper are near
/// its limit.
pub fn figure_13(scale: &Scale) -> Result<Value> {
    let panels = map(&[SHAREGPT, ALPACA], |&lengths| {
        let jobs = jobs(lengths);
        let load = Load { machine: OPT_13B.machine()?, jobs: &jobs, seconds: scale.seconds(), max_output: MAX_LEN };
        let rate = load.sustained(&VLLM.options(), &VLLM, guess(&lengths))?;
        let mut systems = Vec::new();
        for system in SYSTEMS {
            let run = load.run(&system.options(), &system, rate)?;
            systems.push(json!({ "name": system.name, "running": round(run.busy.running) }));
        }
        Ok(json!({ "data": lengths.name, "rate": round(rate), "systems": systems }))
    })?;
    Ok(json!({ "panels": panels }))
}
