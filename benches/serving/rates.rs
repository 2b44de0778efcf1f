//! Normalized latency by request rate, as in Figure 12 of the PagedAttention paper.

use pagedllm::types::options::{AllocationPolicy, BatchingPolicy, Policies};

use super::Result;
use super::figures::{Figures, options};
use super::simulation::{Job, Machine};
use super::workload::{ALPACA, Lengths, SHAREGPT};

const REQUESTS: usize = 2000;
/// Maximum normalized latency, in seconds, of a rate that a system sustains.
const SUSTAINED: f64 = 0.2;
const SEED: u64 = 9;

/// Returns the `max_tokens` of a request.
type MaxTokens = fn(&Job) -> usize;

fn known(job: &Job) -> usize {
    job.output
}

fn power_of_two(job: &Job) -> usize {
    job.output.next_power_of_two()
}

fn maximum(job: &Job) -> usize {
    Machine::PAPER.max_model_len - job.prompt
}

const ON_DEMAND: Policies = Policies {
    order: pagedllm::types::options::OrderPolicy::Fcfs,
    batching: BatchingPolicy::Mixed,
    allocation: AllocationPolicy::OnDemand,
};
const RESERVED: Policies = Policies { allocation: AllocationPolicy::MaxTokens, ..ON_DEMAND };
const CONTIGUOUS: Policies = Policies { allocation: AllocationPolicy::Contiguous, ..ON_DEMAND };
const STATIC: Policies = Policies { batching: BatchingPolicy::Static, ..CONTIGUOUS };

/// A name, policies and the `max_tokens` of requests.
type System = (&'static str, Policies, MaxTokens);

const fn batched(batching: BatchingPolicy) -> Policies {
    Policies { batching, ..ON_DEMAND }
}

const SYSTEMS: [System; 12] = [
    ("on demand (vLLM)", ON_DEMAND, maximum),
    ("the same, prefill first, 2048", batched(BatchingPolicy::PrefillFirst { threshold: 2048 }), maximum),
    ("the same, prefill first, 512", batched(BatchingPolicy::PrefillFirst { threshold: 512 }), maximum),
    ("the same, decode first, 256", batched(BatchingPolicy::DecodeFirst { budget: 256 }), maximum),
    ("the same, decode first, 64", batched(BatchingPolicy::DecodeFirst { budget: 64 }), maximum),
    ("contiguous, length known (Orca, Oracle)", CONTIGUOUS, known),
    ("contiguous, power of two (Orca, Pow2)", CONTIGUOUS, power_of_two),
    ("contiguous, maximum (Orca, Max)", CONTIGUOUS, maximum),
    ("static batches, contiguous, maximum (FasterTransformer)", STATIC, maximum),
    ("reserved in blocks, length known", RESERVED, known),
    ("reserved in blocks, power of two", RESERVED, power_of_two),
    ("reserved in blocks, maximum", RESERVED, maximum),
];

pub fn print() -> Result<()> {
    print_table(&SHAREGPT, &[0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5])?;
    print_table(&ALPACA, &[1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0])
}

fn print_table(lengths: &Lengths, rates: &[f64]) -> Result<()> {
    println!("## Normalized latency, {}: seconds per token by requests per second ({REQUESTS} requests)\n", lengths.name);
    let rates_text: Vec<String> = rates.iter().map(f64::to_string).collect();
    println!("| | {} | sustained | ratio |\n| --- |{}", rates_text.join(" | "), " --- |".repeat(rates.len() + 2));
    let ours = sustained(lengths, SYSTEMS[0], rates)?;
    for system in SYSTEMS {
        let mut row = Vec::new();
        for &rate in rates {
            row.push(format!("{:.3}", normalized_latency(lengths, system, rate)?));
        }
        let sustained = sustained(lengths, system, rates)?;
        println!("| {} | {} | {sustained:.2} | {:.2} |", system.0, row.join(" | "), ours / sustained);
    }
    println!();
    Ok(())
}

/// Returns the normalized latency in seconds.
fn normalized_latency(lengths: &Lengths, (_, policies, max_tokens): System, rate: f64) -> Result<f64> {
    let mut jobs = lengths.jobs(REQUESTS, rate, SEED);
    jobs.iter_mut().for_each(|job| job.max_tokens = max_tokens(job));
    Ok(Figures::measure(&options(policies), &jobs)?.normalized_latency().as_secs_f64())
}

/// Returns the highest rate, up to that of the last column, at which the normalized latency is below
/// `SUSTAINED`.
fn sustained(lengths: &Lengths, system: System, rates: &[f64]) -> Result<f64> {
    let (mut low, mut high) = (rates[0] / 4.0, *rates.last().expect("there are rates"));
    while high / low > 1.02 {
        let rate = (low * high).sqrt();
        match normalized_latency(lengths, system, rate)? < SUSTAINED {
            true => low = rate,
            false => high = rate,
        }
    }
    Ok(low)
}
