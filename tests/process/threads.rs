//! The engine's own threads: their CPUs, their CPU time while the engine is idle, and the
//! independence of outputs from both.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use crate::alone;
use crate::support::bundled_model;
use crate::support::progress::Progress;
use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::error::Code;
use pagedllm::types::options::{EngineOptions, SamplingParams, cpu_list};
use pagedllm::types::outputs::FinishReason;

/// Maximum CPU time of an idle engine in one second.
const MAX_IDLE_TIME: Duration = Duration::from_millis(2);

fn options() -> EngineOptions {
    EngineOptions { model_dir: bundled_model(), kv_bytes: Some(4 << 20), max_seqs: 4, max_batch_tokens: 64, ..Default::default() }
}

/// Returns a field of the status of a thread.
fn status(thread: &str, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("{field} in {status}")).trim().into()
}

/// Returns the CPUs on which this thread may run.
fn allowed() -> Vec<usize> {
    let own = fs::read_link("/proc/thread-self").unwrap();
    cpu_list(&status(own.file_name().unwrap().to_str().unwrap(), "Cpus_allowed_list")).unwrap()
}

/// Returns the names and ids of the threads of all engines.
fn threads() -> BTreeSet<(String, String)> {
    let ids = fs::read_dir("/proc/self/task").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let named = ids.map(|id| (fs::read_to_string(format!("/proc/self/task/{id}/comm")).unwrap().trim().to_string(), id));
    named.filter(|(name, _)| name.starts_with("pagedllm-")).collect()
}

/// Returns the CPU time of the threads so far.
fn cpu_time(threads: &BTreeSet<(String, String)>) -> Duration {
    let nanoseconds = |id: &str| -> u64 {
        let stat = fs::read_to_string(format!("/proc/self/task/{id}/schedstat")).unwrap();
        stat.split_whitespace().next().unwrap().parse().unwrap()
    };
    Duration::from_nanos(threads.iter().map(|(_, id)| nanoseconds(id)).sum())
}

/// Runs one request and returns the tokens and the bits of their log probabilities.
fn answer(engine: &Engine, steps: bool) -> Vec<(u32, u32)> {
    let sampling = SamplingParams { max_tokens: Some(20), ignore_eos: true, logprobs: Some(0), ..SamplingParams::greedy() };
    engine.add_request(Request::new(Prompt::Tokens((10..60).collect()), sampling)).unwrap();
    let (mut bits, mut progress) = (Vec::new(), Progress::new());
    loop {
        progress.check(bits.len() as u64, "the request does not end");
        if steps {
            engine.step().unwrap();
        }
        for output in engine.queue().poll(Some(Duration::from_millis(if steps { 0 } else { 100 }))).unwrap() {
            bits.extend(output.tokens.iter().copied().zip(output.logprobs.tokens.iter().map(|p| p.to_bits())));
            match output.finish {
                None => {}
                Some(FinishReason::Length) => return bits,
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn an_idle_engine_uses_no_cpu_time() {
    let _alone = alone();
    for start in [false, true] {
        let engine = Engine::create(&EngineOptions { threads: Some(3), ..options() }).unwrap();
        if start {
            engine.start().unwrap();
        }
        answer(&engine, !start);
        let threads = threads();
        assert!(threads.len() >= 2 + start as usize, "{threads:?}");
        // Threads spin for some time before they sleep. On a busy machine, this takes several rounds.
        let used_of_a_second = || {
            let before = cpu_time(&threads);
            std::thread::sleep(Duration::from_secs(1));
            cpu_time(&threads) - before
        };
        let used: Vec<Duration> = std::iter::repeat_with(used_of_a_second).take(20).take_while(|&used| used >= MAX_IDLE_TIME).collect();
        assert!(used.len() < 20, "{used:?} of a second each");
    }
}

#[test]
fn engine_threads_run_on_the_given_cpus_and_the_host_thread_keeps_its_affinity() {
    let _alone = alone();
    let allowed = allowed();
    let mut cpus = allowed.clone();
    cpus.reverse();
    cpus.truncate(8);
    let plain = answer(&Engine::create(&EngineOptions { threads: Some(1), ..options() }).unwrap(), true);
    let engine = Engine::create(&EngineOptions { cpus: Some(cpus.clone()), ..options() }).unwrap();
    assert_eq!(engine.info().threads, cpus.len());
    assert_eq!(answer(&engine, true), plain);
    engine.start().unwrap();
    assert_eq!(answer(&engine, false), plain);
    for (name, id) in threads() {
        let on = status(&id, "Cpus_allowed_list");
        match name.strip_prefix("pagedllm-").unwrap() {
            "driver" => assert_eq!(on, cpus[0].to_string()),
            worker if worker.parse::<usize>().is_ok() => assert_eq!(on, cpus[worker.parse::<usize>().unwrap()].to_string()),
            _ => assert_eq!(cpu_list(&on).unwrap(), allowed, "{name}"),
        }
    }
    assert_eq!(threads().iter().filter(|(name, _)| name == "pagedllm-driver").count(), 1);
    assert_eq!(self::allowed(), allowed, "the affinity of the thread that created and stepped the engine is unchanged");
}

#[test]
fn invalid_threads_and_cpus_are_refused_with_the_limits() {
    let _alone = alone();
    let allowed = allowed();
    let elsewhere = (0..1024).find(|cpu| !allowed.contains(cpu)).unwrap();
    for (threads, cpus, code, message) in [
        (Some(0), None, Code::InvalidArgument, "threads is 0; must be 1 to 1024".into()),
        (Some(10_000), None, Code::InvalidArgument, "threads is 10000; must be 1 to 1024".into()),
        (Some(3), Some(vec![allowed[0]]), Code::InvalidArgument, "cpus has 1 CPUs and threads is 3".into()),
        (None, Some(vec![allowed[0]; 2]), Code::InvalidArgument, format!("CPU {} twice", allowed[0])),
        (
            None,
            Some(vec![elsewhere]),
            Code::Unsupported,
            format!("CPU {elsewhere}, which this process may not use; it may use {}", allowed.len()),
        ),
    ] {
        let options = EngineOptions { threads, cpus, ..options() };
        for error in [Engine::plan(&options).err().unwrap(), Engine::create(&options).err().unwrap()] {
            assert!(error.code() == code && error.message().contains(&message), "{error}");
        }
    }
}

/// A waiting thread yields its core to the threads of other engines, so all engines finish.
#[test]
fn concurrent_engines_with_more_threads_than_cores_give_the_same_bits() {
    let _alone = alone();
    let plain = answer(&Engine::create(&EngineOptions { threads: Some(1), ..options() }).unwrap(), true);
    let threads = 2 * std::thread::available_parallelism().unwrap().get();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let engine = Engine::create(&EngineOptions { threads: Some(threads), ..options() }).unwrap();
                (0..3).for_each(|_| assert_eq!(answer(&engine, true), plain));
            });
        }
    });
}

#[test]
fn workers_of_this_process_block_all_signals_and_end_with_the_engine() {
    let _alone = alone();
    let ranks = || threads().into_iter().filter(|(name, _)| name.starts_with("pagedllm-rank")).collect::<Vec<_>>();
    let engine = Engine::create(&EngineOptions { device: "cpu,cpu".into(), threads: Some(1), ..options() }).unwrap();
    let [(_, id)] = &ranks()[..] else { panic!("one worker is a thread") };
    let blocked = u64::from_str_radix(&status(id, "SigBlk"), 16).unwrap();
    let handled =
        [libc::SIGINT, libc::SIGUSR1, libc::SIGTERM, libc::SIGCHLD, libc::SIGPROF].iter().fold(0, |set, signal| set | 1 << (signal - 1));
    assert_eq!(blocked & handled, handled, "{blocked:x}");
    drop(engine);
    assert!(ranks().is_empty());
}
