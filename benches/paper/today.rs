//! What came after the paper: chunked prefill, goodput, prefix caching of conversations,
//! priorities.

use std::time::Duration;

use pagedllm::types::options::{BatchingPolicy, EngineOptions, OrderPolicy, Policies};
use serde_json::{Value, json};

use crate::rates::jobs;
use crate::simulation::measurement::{Measurement, mean, percentile};
use crate::simulation::workload::{Content, MAX_LEN, SHAREGPT, draw, length, next_arrival};
use crate::simulation::{Job, Served};
use crate::systems::*;
use crate::{Result, Scale, map, round, trace_len};

/// Limits of goodput: the time to first token, and the time per output token.
const TTFT: Duration = Duration::from_millis(1000);
const TPOT: Duration = Duration::from_millis(100);
/// Share of requests within both limits.
const ATTAINED: f64 = 0.9;

const BATCHINGS: [(&str, BatchingPolicy); 6] = [
    ("mixed (chunked prefill)", BatchingPolicy::Mixed),
    ("decode first, 512 prompt tokens per step", BatchingPolicy::DecodeFirst { budget: 512 }),
    ("decode first, 256 prompt tokens per step", BatchingPolicy::DecodeFirst { budget: 256 }),
    ("decode first, 64 prompt tokens per step", BatchingPolicy::DecodeFirst { budget: 64 }),
    ("prefill first (vLLM 0.1.2)", BatchingPolicy::PrefillFirst { threshold: EngineOptions::MAX_BATCH_TOKENS }),
    ("static batches", BatchingPolicy::Static),
];

pub fn today(scale: &Scale) -> Result<Value> {
    Ok(json!({
        "trace_seconds": scale.seconds(),
        "goodput": goodput(scale)?,
        "conversations": conversations(scale)?,
        "priorities": priorities(scale)?,
    }))
}

fn is_good(served: &Served) -> bool {
    served.time_to_first_token() <= TTFT && served.time_per_output_token() <= TPOT
}

fn goodput(scale: &Scale) -> Result<Value> {
    let jobs = jobs(SHAREGPT);
    let load = Load { machine: OPT_13B.machine()?, jobs: &jobs, seconds: scale.seconds(), max_output: MAX_LEN };
    let share = |run: &Measurement| run.served.iter().filter(|served| is_good(served)).count() as f64 / run.served.len() as f64;
    let rows = map(&BATCHINGS, |&(name, batching)| {
        let system = System { name, policies: Policies { batching, ..OURS.policies }, ..OURS };
        let options = system.options();
        let rate = load.highest(1.0, |rate| Ok(share(&load.run(&options, &system, rate)?) >= ATTAINED))?;
        let run = load.run(&options, &system, rate)?;
        let ms = |times: &[Duration], percent| round(percentile(times, percent).as_secs_f64() * 1e3);
        let (first, next) = (run.times(Served::time_to_first_token), run.times(Served::time_per_output_token));
        Ok(json!({ "batching": name, "goodput": round(rate),
            "ttft_ms": [ms(&first, 50), ms(&first, 90), ms(&first, 99)],
            "tpot_ms": [ms(&next, 50), ms(&next, 90), ms(&next, 99)],
            "gap_p99_ms": ms(&run.gaps, 99) }))
    })?;
    Ok(json!({ "ttft_limit_ms": TTFT.as_millis() as u64, "tpot_limit_ms": TPOT.as_millis() as u64, "share": ATTAINED, "rows": rows }))
}

/// Minimum and maximum seconds from one question of a conversation to the next.
const PAUSES: (f64, f64) = (60.0, 180.0);
const TURNS: usize = 4;

/// Conversations of four turns that keep their whole history, up to the limit of the model.
fn turns(rate: f64, seconds: f64) -> Vec<Job> {
    let (mut at, mut index, mut jobs) = (0.0, 0, Vec::new());
    let mut next = || {
        index += 2;
        index
    };
    for conversation in 0..(trace_len(rate, seconds) / TURNS) as u64 {
        at = next_arrival(at, rate / TURNS as f64, 17, next());
        let (mut time, mut history) = (at, 0);
        for _ in 0..TURNS {
            let prompt = history + length(SHAREGPT.prompt, SHAREGPT.deviation, 512, 17, next());
            let output = length(SHAREGPT.output, SHAREGPT.deviation, 512, 17, next());
            if prompt + output > MAX_LEN {
                break;
            }
            let content = Content::Shared { text: conversation, until: usize::MAX };
            jobs.push(Job { content, ..Job::new(Duration::from_secs_f64(time), prompt, output) });
            history = prompt + output;
            time += PAUSES.0 + (PAUSES.1 - PAUSES.0) * draw(17, next());
        }
    }
    jobs.sort_by_key(|job| job.at);
    jobs
}

fn conversations(scale: &Scale) -> Result<Value> {
    // Four times as long, since a conversation takes minutes.
    let load = Load { machine: OPT_13B.machine()?, jobs: &turns, seconds: 4.0 * scale.seconds(), max_output: MAX_LEN };
    let rows = map(&[(OURS, true), (OURS, false), (ORACLE, false)], |&(system, prefix_cache)| {
        let options = EngineOptions { prefix_cache, ..system.options() };
        let rate = load.sustained(&options, &system, 1.0)?;
        let run = load.run(&options, &system, rate)?;
        let first = run.times(Served::time_to_first_token);
        // Turns beyond the maximum length are dropped, so that the real rate is lower.
        let arrivals = run.served.iter().map(|served| served.arrived).max().unwrap_or_default();
        let real = run.served.len() as f64 / arrivals.as_secs_f64();
        let first_ms = round(percentile(&first, 50).as_secs_f64() * 1e3);
        Ok(json!({ "name": system.name, "prefix_cache": prefix_cache, "sustained": round(real), "ttft_p50_ms": first_ms }))
    })?;
    Ok(json!({ "turns": TURNS, "rows": rows }))
}

/// One request in ten is urgent, at loads below and above the limit.
fn priorities(scale: &Scale) -> Result<Value> {
    let lengths = jobs(SHAREGPT);
    let jobs = |rate: f64, seconds: f64| {
        let mut jobs = lengths(rate, seconds);
        jobs.iter_mut().step_by(10).for_each(|job| job.priority = 5);
        jobs
    };
    let load = Load { machine: OPT_13B.machine()?, jobs: &jobs, seconds: scale.seconds(), max_output: MAX_LEN };
    let limit = load.sustained(&OURS.options(), &OURS, 1.5)?;
    let orders =
        [("first come, first served", OrderPolicy::Fcfs), ("priority", OrderPolicy::Priority { ageing: Policies::DEFAULT_AGEING })];
    let runs: Vec<_> = [0.5, 0.9, 1.1].into_iter().flat_map(|share| orders.map(|order| (share, order))).collect();
    let rows = map(&runs, |&(share, (name, order))| {
        let system = System { name, policies: Policies { order, ..OURS.policies }, ..OURS };
        let run = load.run(&system.options(), &system, share * limit)?;
        let times = |urgent: bool| {
            let of_kind = run.served.iter().enumerate().filter(|(index, _)| (index % 10 == 0) == urgent);
            let first: Vec<Duration> = of_kind.map(|(_, served)| served.time_to_first_token()).collect();
            round(mean(&first).as_secs_f64())
        };
        Ok(json!({ "order": name, "load": share, "urgent_ttft_s": times(true), "other_ttft_s": times(false),
            "latency": round(run.normalized_latency().as_secs_f64()) }))
    })?;
    Ok(json!({ "limit": round(limit), "rows": rows }))
}
