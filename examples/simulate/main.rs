//! pagedllm-simulate: serves a trace with the production scheduler on a simulated machine.

#[path = "../../benches/simulation/mod.rs"]
mod simulation;
#[cfg(test)]
#[path = "../../benches/simulation/tests.rs"]
mod simulation_tests;
mod trace;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use pagedllm::types::options::EngineOptions;
use simulation::device::{Device, Result};
use simulation::measurement::{Measurement, percentile};
use simulation::model::{Model, Parallel};
use simulation::workload::next_arrival;
use simulation::{Job, Machine, Served};
use trace::Trace;

const USAGE: &str = "usage: pagedllm-simulate --trace FILE --machine FILE|NAME --model CONFIG.json [OPTION VALUE]...

Serves the requests of a trace with the scheduler of the library on a simulated machine, and prints
the rate, latencies, the memory and its waste. Everything is in 16 bits.

  --trace FILE            Azure or BurstGPT CSV, Mooncake JSON lines, or ShareGPT JSON
  --machine FILE|NAME     a JSON description, or a100-40gb, a100-80gb, h100, h200, b200, epyc-9654
  --model CONFIG.json     config.json of a supported architecture
  --tensor-parallel N     devices that share each layer (1)
  --pipeline-parallel N   stages with different layers, each of N devices of --tensor-parallel (1)
  --rate R                requests per second, a Poisson process, instead of the times of the trace
  --requests N            only the first N requests
  --max-model-len N       maximum length of a sequence in tokens (the model's own)
  --max-seqs N            maximum number of running sequences (256)
  --max-batch-tokens N    maximum number of tokens per step (2048)
  --block-size N          tokens per KV block (16)";

/// Limit of all whole numbers. Products of two of them do not overflow.
const MAX_COUNT: usize = 1 << 31;

struct Arguments {
    trace: PathBuf,
    machine: String,
    model: PathBuf,
    parallel: Parallel,
    rate: Option<f64>,
    requests: usize,
    max_model_len: Option<usize>,
    max_seqs: usize,
    max_batch_tokens: usize,
    block_size: usize,
}

impl Arguments {
    fn read(arguments: &[String]) -> Result<Arguments> {
        let mut values = std::collections::BTreeMap::new();
        for pair in arguments.chunks(2) {
            let [name, value] = pair else { return Err(format!("{} has no value", pair[0])) };
            let name = name.strip_prefix("--").ok_or_else(|| format!("{name} is not an option"))?;
            values.insert(name.to_string(), value.clone());
        }
        let mut take = |name: &str| values.remove(name);
        let required = |value: Option<String>, name: &str| value.ok_or_else(|| format!("--{name} is missing"));
        let count = |value: Option<String>, name: &str, default: usize| match value {
            None => Ok(default),
            Some(text) => text
                .parse()
                .ok()
                .filter(|n| (1..=MAX_COUNT).contains(n))
                .ok_or_else(|| format!("--{name} is {text}; must be a whole number from 1 to {MAX_COUNT}")),
        };
        let rate = take("rate").map(|text| match text.parse::<f64>() {
            Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
            _ => Err(format!("--rate is {text}; must be above 0")),
        });
        let arguments = Arguments {
            trace: required(take("trace"), "trace")?.into(),
            machine: required(take("machine"), "machine")?,
            model: required(take("model"), "model")?.into(),
            parallel: Parallel {
                tensor: count(take("tensor-parallel"), "tensor-parallel", 1)?,
                pipeline: count(take("pipeline-parallel"), "pipeline-parallel", 1)?,
            },
            rate: rate.transpose()?,
            requests: count(take("requests"), "requests", usize::MAX)?,
            max_model_len: take("max-model-len").map(|text| count(Some(text), "max-model-len", 0)).transpose()?,
            max_seqs: count(take("max-seqs"), "max-seqs", 256)?,
            max_batch_tokens: count(take("max-batch-tokens"), "max-batch-tokens", 2048)?,
            block_size: count(take("block-size"), "block-size", 16)?,
        };
        match values.keys().next() {
            Some(unknown) => Err(format!("--{unknown} is not an option")),
            None => Ok(arguments),
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") || arguments.is_empty() {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    match Arguments::read(&arguments).and_then(|arguments| run(&arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("pagedllm-simulate: {problem}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let device = Device::load(&arguments.machine)?;
    let model = Model::load(&arguments.model)?;
    let mut machine = model.on(&device, arguments.parallel, arguments.max_model_len)?;
    // A sequence of the maximum length fits into whole blocks.
    machine.max_model_len = machine.max_model_len.min(machine.slots / arguments.block_size * arguments.block_size);
    let trace = Trace::load(&arguments.trace)?;
    let (jobs, too_long) = jobs(&trace, arguments, machine.max_model_len)?;
    let options = EngineOptions {
        max_seqs: arguments.max_seqs,
        max_batch_tokens: arguments.max_batch_tokens,
        block_size: arguments.block_size,
        // All prompts are equal.
        prefix_cache: false,
        ..Default::default()
    };
    print_setup(arguments, &device, &model, &machine, &trace, too_long);
    let run = Measurement::run(&options, machine, &jobs).map_err(|error| error.to_string())?;
    print_results(&run, &jobs);
    Ok(())
}

/// Returns the requests to serve, and the number of those beyond the maximum length.
fn jobs(trace: &Trace, arguments: &Arguments, max_model_len: usize) -> Result<(Vec<Job>, usize)> {
    let mut at = 0.0;
    let mut jobs = Vec::new();
    let wanted = trace.requests.iter().take(arguments.requests);
    let fits = |request: &trace::TracedRequest| request.prompt + request.output <= max_model_len;
    let too_long = wanted.clone().filter(|request| !fits(request)).count();
    for (number, request) in (0..).zip(wanted.filter(|request| fits(request))) {
        let time = match (arguments.rate, request.at) {
            (Some(rate), _) => {
                at = next_arrival(at, rate, 1, number);
                at
            }
            (None, Some(at)) => at,
            (None, None) => return Err("the trace has no times; set --rate".into()),
        };
        let at = Duration::try_from_secs_f64(time).map_err(|error| format!("time {time}: {error}"))?;
        jobs.push(Job::new(at, request.prompt, request.output));
    }
    if jobs.is_empty() {
        return Err(format!("all {too_long} requests are longer than {max_model_len} tokens; raise --max-model-len or the memory"));
    }
    Ok((jobs, too_long))
}

fn print_setup(arguments: &Arguments, device: &Device, model: &Model, machine: &Machine, trace: &Trace, too_long: usize) {
    let gb = |bytes: f64| bytes / 1e9;
    println!("machine   {} x {} ({})", arguments.parallel.tensor * arguments.parallel.pipeline, device.name, device.source);
    println!(
        "model     {}: {:.1} GB of weights, {:.1} kB of K and V per token, {} tokens at most",
        model.architecture,
        gb(model.weight_bytes()),
        model.kv_bytes() / 1e3,
        machine.max_model_len
    );
    println!("KV pool   {} tokens, {:.1} GB", machine.slots, gb(machine.slots as f64 * model.kv_bytes()));
    println!(
        "trace     {:?}, {} requests; skipped: {} without output, {too_long} longer than the model allows",
        trace.format,
        trace.requests.len(),
        trace.without_output
    );
}

fn print_results(run: &Measurement, jobs: &[Job]) {
    let span = run.span.as_secs_f64();
    let prompt: usize = jobs.iter().map(|job| job.prompt).sum();
    println!(
        "served    {} requests in {span:.1} s: {:.2} requests/s, {:.0} prompt and {:.0} output tokens/s",
        jobs.len(),
        jobs.len() as f64 / span,
        prompt as f64 / span,
        run.throughput()
    );
    println!("latency, ms                        p50       p90       p99");
    for (name, times) in [
        ("time to first token", &run.times(Served::time_to_first_token)),
        ("time between tokens", &run.gaps),
        ("end to end per output token", &run.times(Served::normalized_latency)),
    ] {
        let ms = |percent: usize| percentile(times, percent).as_secs_f64() * 1e3;
        println!("  {name:<27} {:>9.1} {:>9.1} {:>9.1}", ms(50), ms(90), ms(99));
    }
    let busy = run.busy;
    println!(
        "steps     {}; on average {:.1} running and {:.1} waiting requests, {:.1} % of the pool used; {} preemptions",
        busy.steps,
        busy.running,
        busy.waiting,
        busy.used * 100.0,
        run.preemptions
    );
    println!("waste     {:.1} % of the used slots hold no token", (1.0 - busy.filled) * 100.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(text: &str) -> Result<Arguments> {
        Arguments::read(&text.split_whitespace().map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn wrong_arguments_are_refused_with_the_option() {
        let all = "--trace t --machine h100 --model config.json";
        assert!(arguments(all).is_ok());
        for (wrong, part) in [
            ("--trace t", "--machine is missing"),
            (&format!("{all} --rate 0"), "--rate is 0"),
            (&format!("{all} --rate nan"), "--rate is nan"),
            (&format!("{all} --max-seqs -1"), "--max-seqs is -1"),
            (&format!("{all} --tensor-parallel 0"), "--tensor-parallel is 0"),
            (&format!("{all} --pipeline-parallel x"), "--pipeline-parallel is x"),
            (&format!("{all} --speed 3"), "--speed is not an option"),
            (&format!("{all} --rate"), "--rate has no value"),
            ("trace t", "trace is not an option"),
        ] {
            let problem = arguments(wrong).err().unwrap_or_default();
            assert!(problem.contains(part), "{wrong}: {problem}");
        }
    }

    #[test]
    fn a_trace_is_served_at_its_own_times_or_at_a_rate() {
        let text =
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,100,10\n2023-11-16 18:00:02,50,5\n2023-11-16 18:00:03,9000,5\n";
        let trace = Trace::read(text.as_bytes()).unwrap();
        let all = arguments("--trace t --machine h100 --model config.json").unwrap();
        let (jobs, too_long) = jobs(&trace, &all, 4096).unwrap();
        assert_eq!((jobs.len(), too_long, jobs[1].at), (2, 1, Duration::from_secs(2)));
        let machine = Machine { slots: 4096, ..Machine::PAPER };
        let run = Measurement::run(&EngineOptions { prefix_cache: false, ..Default::default() }, machine, &jobs).unwrap();
        assert_eq!(run.served.iter().map(|served| served.tokens).collect::<Vec<_>>(), [10, 5]);
        // The last step of each request leaves none running.
        assert!(run.busy.filled > 0.5 && run.busy.steps == 9 + 4 && run.preemptions == 0);
        let at_rate = arguments("--trace t --machine h100 --model config.json --rate 2").unwrap();
        assert!(super::jobs(&trace, &at_rate, 4096).unwrap().0.is_sorted_by_key(|job| job.at));
        assert!(super::jobs(&trace, &all, 20).err().unwrap().contains("all 3 requests are longer than 20"));
    }
}
