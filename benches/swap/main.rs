//! Swapping compared with recomputation, by block size: for one sequence, as in Figure 19 of the
//! PagedAttention paper, and for an engine whose requests do not fit into the pool.

#[path = "../cpu/model.rs"]
#[allow(dead_code)] // only the CPU benchmark uses the rest
mod model;

use std::path::Path;
use std::time::{Duration, Instant};

use pagedllm::backend::cpu::CpuBackend;
use pagedllm::engine::{Engine, Prompt, Request, Stats};
use pagedllm::kv::blocks_for;
use pagedllm::model::{KvCache, KvPool, ModelFiles};
use pagedllm::types::batch::BlockMove;
use pagedllm::types::options::{EngineOptions, KvDtype, Preemption, SamplingParams};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const BLOCK_SIZES: [usize; 6] = [8, 16, 32, 64, 128, 256];
/// Length of the sequence that is swapped or recomputed.
const TOKENS: usize = 1024;

fn main() -> Result<()> {
    let dir = model::make(&model::SHAPES[0], &Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench-models"))?;
    one_sequence(&dir)?;
    under_pressure(&dir)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Swaps one sequence out and in. Its blocks are scattered over the pool.
fn one_sequence(dir: &Path) -> Result<()> {
    println!("One sequence of {TOKENS} tokens, model S, K and V in bf16; milliseconds, medians of 9 (recompute: of 3)\n");
    // With a file, another thread makes the transfers: the second table has the whole effect.
    println!("| Block size | out | in | recompute | recompute / swap |");
    println!("| --- | --- | --- | --- | --- |");
    let files = ModelFiles::open(dir)?;
    for block_size in BLOCK_SIZES {
        let (out, back) = moves(&files, block_size)?;
        let recompute = recompute(dir, block_size)?;
        let ratio = recompute.as_secs_f64() / (out + back).as_secs_f64();
        println!("| {block_size} | {:.2} | {:.2} | {:.0} | {ratio:.0}x |", ms(out), ms(back), ms(recompute));
    }
    Ok(())
}

fn moves(files: &ModelFiles, block_size: usize) -> Result<(Duration, Duration)> {
    let backend = CpuBackend::new(threads(), None)?;
    let blocks = blocks_for(TOKENS, block_size);
    let pool = KvPool { blocks: 4 * blocks, block_size, dtype: KvDtype::Bf16 };
    let mut kv = KvCache::new(&backend, &files.spec, pool)?;
    kv.add_host_tier(&backend, 2 * blocks, pool.block_bytes(&backend, &files.spec))?;
    let scattered = |i: usize, n: usize| (i * 7919 % n) as u32; // a prime factor makes it a permutation
    let list: Vec<BlockMove> =
        (0..blocks).map(|i| BlockMove { device: scattered(i, 4 * blocks), host: scattered(i, 2 * blocks) }).collect();
    let timed = |act: &mut dyn FnMut() -> Result<()>| -> Result<Duration> {
        let start = Instant::now();
        act()?;
        Ok(start.elapsed())
    };
    let (mut swapped_out, mut swapped_in) = (Vec::new(), Vec::new());
    // The first round touches new pages and does not count.
    for round in 0..10 {
        let times = (timed(&mut || Ok(kv.swap_out(&backend, &list)?))?, timed(&mut || Ok(kv.swap_in(&backend, &list)?))?);
        if round > 0 {
            swapped_out.push(times.0);
            swapped_in.push(times.1);
        }
    }
    Ok((median(swapped_out), median(swapped_in)))
}

fn threads() -> usize {
    EngineOptions::default().thread_count()
}

fn request(len: usize, seed: u32, max_tokens: usize) -> Request {
    let prompt = (0..len as u32).map(|i| 300 + (i * 7919 + seed * 104_729) % 15_000).collect();
    Request::new(Prompt::Tokens(prompt), SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..Default::default() })
}

fn options(dir: &Path, block_size: usize) -> EngineOptions {
    EngineOptions {
        model_dir: dir.into(),
        block_size,
        kv_dtype: Some(KvDtype::Bf16),
        max_model_len: Some(2048),
        max_batch_tokens: TOKENS,
        skip_tokenizer: true,
        prefix_cache: false,
        ..Default::default()
    }
}

/// Measures a prefill of all tokens in one step.
fn recompute(dir: &Path, block_size: usize) -> Result<Duration> {
    let engine = Engine::create(&EngineOptions { kv_bytes: Some(128 << 20), ..options(dir, block_size) })?;
    let mut times = Vec::new();
    for round in 0..4 {
        engine.add_request(request(TOKENS, round, 1))?;
        let start = Instant::now();
        engine.step()?;
        if round > 0 {
            times.push(start.elapsed());
        }
        drain(&engine)?;
    }
    Ok(median(times))
}

fn drain(engine: &Engine) -> Result<()> {
    while engine.step()?.unfinished > 0 {
        engine.queue().poll(Some(Duration::ZERO))?;
    }
    engine.queue().poll(Some(Duration::ZERO))?;
    Ok(())
}

/// Eight requests of 64 prompt tokens and 96 new tokens, in a pool of 640 tokens: four of them fit.
fn under_pressure(dir: &Path) -> Result<()> {
    println!("\nEight requests of 64 prompt and 96 new tokens each, in a pool of 640 tokens: seconds (preemptions)\n");
    println!("| Block size | all fit | recompute | swap, memory | swap, file | auto, memory | auto chose |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for block_size in BLOCK_SIZES {
        let base = EngineOptions { max_model_len: Some(512), ..options(dir, block_size) };
        let block_bytes = Engine::plan(&base)?.block_bytes;
        let pool = |tokens: usize| Some((tokens / block_size) as u64 * block_bytes);
        let small = EngineOptions { kv_bytes: pool(640), ..base.clone() };
        let swap_bytes = pool(4096).unwrap_or(0);
        let swapping = |preemption, swap_dir| EngineOptions { preemption, swap_bytes, swap_dir, ..small.clone() };
        let (fits, _) = run(&EngineOptions { kv_bytes: pool(4096), ..base.clone() })?;
        let cell = |(time, stats): (Duration, Stats)| format!("{:.2} ({})", time.as_secs_f64(), stats.preemptions);
        let recompute = cell(run(&small)?);
        let memory = cell(run(&swapping(Preemption::Swap, None))?);
        let file = cell(run(&swapping(Preemption::Swap, Some(std::env::temp_dir())))?);
        let auto = run(&swapping(Preemption::Auto, None))?;
        let chose = format!("swap {}, recompute {}", auto.1.preemptions_swapped, auto.1.preemptions - auto.1.preemptions_swapped);
        println!("| {block_size} | {:.2} | {recompute} | {memory} | {file} | {} | {chose} |", fits.as_secs_f64(), cell(auto));
    }
    Ok(())
}

fn run(options: &EngineOptions) -> Result<(Duration, Stats)> {
    let engine = Engine::create(options)?;
    for seed in 0..8 {
        engine.add_request(request(64, seed, 96))?;
    }
    let start = Instant::now();
    drain(&engine)?;
    let stats = engine.stats();
    match (stats.finished_length, stats.swap_failures) {
        (8, 0) => Ok((start.elapsed(), stats)),
        _ => Err(format!("some requests did not finish: {stats:?}").into()),
    }
}
