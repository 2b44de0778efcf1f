//! Every policy with the same requests.

use pagedllm::types::options::{AllocationPolicy, BatchingPolicy, OrderPolicy, Policies};

use super::Result;
use super::simulation::measurement::{Measurement, mean, options, percentile};
use super::simulation::workload::{Lengths, SHAREGPT};
use super::simulation::{Job, Machine, Served};

const REQUESTS: usize = 3000;
/// A rate at which no request waits for blocks, and the limit of the machine.
const RATES: [f64; 2] = [2.0, 3.0];
const SEED: u64 = 5;

const ORDERS: [(&str, OrderPolicy); 3] = [
    ("fcfs", OrderPolicy::Fcfs),
    ("priority", OrderPolicy::Priority { ageing: Policies::DEFAULT_AGEING }),
    ("shortest predicted", OrderPolicy::ShortestPredicted { ageing: Policies::DEFAULT_AGEING }),
];
const BATCHINGS: [(&str, BatchingPolicy); 6] = [
    ("mixed", BatchingPolicy::Mixed),
    ("prefill first, 2048", BatchingPolicy::PrefillFirst { threshold: 2048 }),
    ("prefill first, 512", BatchingPolicy::PrefillFirst { threshold: 512 }),
    ("decode first, 256", BatchingPolicy::DecodeFirst { budget: 256 }),
    ("decode first, 64", BatchingPolicy::DecodeFirst { budget: 64 }),
    ("static", BatchingPolicy::Static),
];
const ALLOCATIONS: [(&str, AllocationPolicy); 2] = [("on demand", AllocationPolicy::OnDemand), ("max_tokens", AllocationPolicy::MaxTokens)];

/// Hosts do not know the length of an output: `max_tokens` is the next power of two. One request in
/// ten is urgent.
fn jobs(lengths: &Lengths, rate: f64) -> Vec<Job> {
    let mut jobs = lengths.jobs(REQUESTS, rate, SEED);
    for (i, job) in jobs.iter_mut().enumerate() {
        (job.max_tokens, job.priority) = (job.output.next_power_of_two(), if i % 10 == 0 { 5 } else { 0 });
    }
    jobs
}

pub fn print() -> Result<()> {
    let jobs = print_head(RATES[0]);
    for batching in &BATCHINGS[..5] {
        print_row(&jobs, ORDERS[0], *batching, ALLOCATIONS[0])?;
    }
    let jobs = print_head(RATES[1]);
    for batching in BATCHINGS {
        for allocation in ALLOCATIONS {
            print_row(&jobs, ORDERS[0], batching, allocation)?;
        }
    }
    for order in &ORDERS[1..] {
        for batching in [BATCHINGS[0], BATCHINGS[3]] {
            for allocation in ALLOCATIONS {
                print_row(&jobs, *order, batching, allocation)?;
            }
        }
    }
    println!();
    Ok(())
}

fn print_head(rate: f64) -> Vec<Job> {
    println!(
        "\n## Policies at {rate}/s\n\n{REQUESTS} requests with the lengths of {}; times in ms, normalized latency in ms per token.\n",
        SHAREGPT.name
    );
    println!(
        "| order | batching | allocation | tokens/s | TTFT mean | TTFT p90 | TTFT mean, urgent | TPOT mean | TPOT p90 | TPOT p99 | latency | preemptions | slots |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    jobs(&SHAREGPT, rate)
}

fn print_row(
    jobs: &[Job],
    (order_name, order): (&str, OrderPolicy),
    (batching_name, batching): (&str, BatchingPolicy),
    (allocation_name, allocation): (&str, AllocationPolicy),
) -> Result<()> {
    let run = Measurement::run(&options(Policies { order, batching, allocation }), Machine::PAPER, jobs)?;
    let ms = |time: std::time::Duration| format!("{:.0}", time.as_secs_f64() * 1e3);
    let first = run.times(Served::time_to_first_token);
    let urgent = run.served.iter().zip(jobs).filter(|(_, job)| job.priority > 0).map(|(served, _)| served.time_to_first_token());
    println!(
        "| {order_name} | {batching_name} | {allocation_name} | {:.0} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
        run.throughput(),
        ms(mean(&first)),
        ms(percentile(&first, 90)),
        ms(mean(&urgent.collect::<Vec<_>>())),
        ms(mean(&run.gaps)),
        ms(percentile(&run.gaps, 90)),
        ms(percentile(&run.gaps, 99)),
        ms(run.normalized_latency()),
        run.preemptions,
        if run.saturated.steps > 100 { format!("{:.1} %", run.saturated.filled * 100.0) } else { "-".into() },
    );
    Ok(())
}
