//! Life under pressure: four hosts add, abort, fork, append, resume, move and free; the budget changes; the device fails at random.
//! Afterwards nothing is left: no block, no byte, no request without its end. PLLM_SOAK_SECONDS says for how long (default 5).

#[path = "../common/mod.rs"]
mod common;
mod counting;
mod host;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use common::faulty::{Faults, Faulty};
use common::{Random, TempDir, configs, model_info, write_random_model};
use counting::{live_bytes, resident_bytes};
use host::{Host, Tally};
use pagedllm::backend::cpu::CpuBackend;
use pagedllm::engine::{Engine, ModelRunner};
use pagedllm::model::{BatchLimits, KvCache, KvPool, ModelFiles};
use pagedllm::options::{EngineOptions, KvDtype};

const BLOCK: usize = 8;
const BLOCKS: usize = 64;
const HOSTS: u64 = 4;
/// A shorter run says nothing of a slope.
const LONG_ENOUGH: Duration = Duration::from_secs(50);
const MOST_GROWTH_PER_MINUTE: f64 = (1 << 20) as f64;

fn engine(dir: &TempDir) -> (Engine, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let options = EngineOptions {
        max_batch_tokens: 48,
        max_seqs: 12,
        max_waiting_requests: Some(40),
        max_waiting_tokens: Some(1500),
        ..EngineOptions::default()
    };
    let files = ModelFiles::open(&dir.0).unwrap();
    let backend = Faulty { cpu: CpuBackend::new(1, None).unwrap(), faults: faults.clone() };
    let kv = KvCache::new(&backend, &files.spec, KvPool { blocks: BLOCKS, block_size: BLOCK, dtype: KvDtype::F32 }).unwrap();
    let decoder = files.load(backend, BatchLimits { rows: 48, logits: 12 }, &mut |_, _| true).unwrap();
    let info = model_info(files.spec.vocab_size, BLOCKS, 128, vec![]);
    (Engine::with_runner(&options, info, None, Box::new(ModelRunner::new(decoder, kv))).unwrap(), faults)
}

/// Changes the budget until it is told to stop, and then gives all of it back.
fn squeeze(engine: &Engine, stop: &AtomicBool) {
    let mut random = Random(99);
    let most = engine.arena().info().most_bytes;
    while !stop.load(SeqCst) {
        // Less than what the requests on their way need is refused.
        let _ = engine.arena().resize(1 + random.below(most as usize) as u64);
        std::thread::sleep(Duration::from_millis(20));
    }
    engine.arena().resize(most).unwrap();
}

/// (seconds, bytes) while the hosts are at it, the first quarter aside.
fn watch(time: Duration) -> Vec<(f64, f64)> {
    let begun = Instant::now();
    let mut samples = Vec::with_capacity(10_000);
    while begun.elapsed() < time {
        std::thread::sleep(Duration::from_millis(100));
        if begun.elapsed() > time / 4 {
            samples.push((begun.elapsed().as_secs_f64(), resident_bytes() as f64));
        }
    }
    samples
}

/// Of the line of least squares, in bytes per minute.
fn slope(samples: &[(f64, f64)]) -> f64 {
    let n = samples.len() as f64;
    let (mean_x, mean_y) = (samples.iter().map(|s| s.0).sum::<f64>() / n, samples.iter().map(|s| s.1).sum::<f64>() / n);
    let over: f64 = samples.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    over / samples.iter().map(|(x, _)| (x - mean_x).powi(2)).sum::<f64>() * 60.0
}

/// Everything for so long, and the end of it. What the hosts did, and how the process grew.
fn live(dir: &TempDir, time: Duration, seed: u64) -> (Tally, Vec<(f64, f64)>) {
    let (engine, faults) = engine(dir);
    faults.one_in.store(20_000, SeqCst);
    faults.poisoned.store(true, SeqCst);
    engine.start().unwrap();
    let (stop, squeezed) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut tally = Tally::default();
    let samples = std::thread::scope(|scope| {
        let hosts: Vec<_> = (0..HOSTS)
            .map(|i| {
                let (engine, stop) = (&engine, &stop);
                scope.spawn(move || Host::new(engine, seed * HOSTS + i).live(stop))
            })
            .collect();
        let squeezer = scope.spawn(|| squeeze(&engine, &squeezed));
        let samples = watch(time);
        squeezed.store(true, SeqCst);
        squeezer.join().unwrap();
        stop.store(true, SeqCst);
        hosts.into_iter().for_each(|host| tally += host.join().unwrap());
        samples
    });
    engine.stop();
    while engine.step().unwrap_or_default().sequences > 0 {}
    let stats = engine.stats();
    assert_eq!((stats.waiting, stats.running, stats.idle, stats.blocks_used), (0, 0, 0, 0), "nothing is left: {stats:?}");
    assert_eq!(stats.blocks_free + stats.blocks_cached, BLOCKS as u64, "not a block is lost");
    tally.failed_steps = stats.steps_failed;
    tally.preemptions = stats.preemptions;
    tally.rejections = stats.admission_rejections;
    (tally, samples)
}

#[test]
fn nothing_is_left_of_a_life_under_pressure() {
    let seconds = std::env::var("PLLM_SOAK_SECONDS").map_or(5, |seconds| seconds.parse().unwrap());
    let time = Duration::from_secs(seconds);
    let dir = TempDir::new();
    let (_, config) = configs(512).pop().unwrap();
    write_random_model(&dir.0, &config, false, 5);
    // What is made once in a process is made.
    live(&dir, Duration::from_millis(500), 0);
    let before = live_bytes();
    let (tally, samples) = live(&dir, time, 1);
    assert_eq!(live_bytes() - before, samples.capacity() as i64 * size_of::<(f64, f64)>() as i64, "bytes are left");
    let slope = slope(&samples);
    println!("{seconds} s: {tally:?}\nresident memory grew by {:.0} KiB a minute", slope / 1024.0);
    assert!(tally.ended > 0 && tally.failed_steps > 0 && tally.preemptions > 0, "there was no pressure: {tally:?}");
    assert!(time < LONG_ENOUGH || slope < MOST_GROWTH_PER_MINUTE, "{slope} bytes a minute");
}
