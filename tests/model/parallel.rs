//! Models that several workers compute give the logits of transformers, and refuse divisions that
//! do not divide them.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pagedllm::backend::cpu::CpuBackend;
use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{Backend, Workers};
use pagedllm::communicator::Communicator;
use pagedllm::communicator::local::Local;
use pagedllm::error::{Code, Result};
use pagedllm::model::{BatchLimits, KvPool, ModelFiles};
use pagedllm::types::options::{Isa, KvDtype, WeightFormat};
use pagedllm::types::parallel::Division;

use crate::goldens::{BLOCK_SIZE, Golden, LONGEST, NAMES, Run, TOLERANCE, directory};
use crate::support::cuda;

const TIMEOUT: Duration = Duration::from_secs(600);
/// Goldens with experts, for CUDA devices.
const EXPERTS: &[&str] = &["qwen3_moe", "deepseek_v3"];

/// Computes the tokens of a golden on one rank: the prompt in one pass, and the others one by one.
/// Returns all logits on rank 0.
fn compute<B: Backend>(golden: &Golden, mut backend: B, mut files: ModelFiles, world: Local, division: Division) -> Result<Vec<f32>> {
    let world: Arc<dyn Communicator> = Arc::new(world);
    let place = division.place(world.rank());
    let tensor = world.split(place.stage, Some(TIMEOUT))?;
    backend.join(Workers { world, tensor, timeout: TIMEOUT })?;
    files.fit(LONGEST);
    let groups = files.windows().len();
    let kv = files.kv_cache(&backend, KvPool { blocks: 11 * groups, block_size: BLOCK_SIZE, dtype: KvDtype::F32 })?;
    let vocab = files.spec.vocab_size;
    let decoder = files.load(backend, BatchLimits { tokens: 80, logits: 80 }, &mut |_, _| true)?;
    let mut run = Run { decoder, kv, groups, experts: false, vocab, kv_dtype: KvDtype::F32 };
    let mut logits = Vec::new();
    let passes = std::iter::once((0, golden.prompt_len)).chain((golden.prompt_len..golden.tokens.len()).map(|start| (start, 1)));
    for (start, count) in passes {
        let tokens = &golden.tokens[start..][..count];
        match place.rank() {
            0 => logits.extend(run.logits(tokens, start)),
            _ => run.forward(tokens, start),
        }
    }
    run.decoder.backend().wait()?;
    Ok(logits)
}

/// The kind of device of all workers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum On {
    Cpu,
    Cuda,
}

/// Returns the logits that the workers of a division compute for a golden. Errors: the division is
/// refused.
fn divided(name: &str, golden: &Arc<Golden>, on: On, division: Division) -> Result<Vec<f32>> {
    let open = |rank: usize| {
        let mut files = ModelFiles::open(&directory(name)).unwrap();
        files.weight_format = (on == On::Cuda || name.starts_with("gguf_")).then_some(WeightFormat::F32);
        files.divide(division.place(rank)).map(|()| files)
    };
    let files = (0..division.workers()).map(open).collect::<Result<Vec<_>>>()?;
    let ranks = files.into_iter().zip(Local::group(division.workers())).map(|(files, world)| {
        let golden = golden.clone();
        thread::spawn(move || {
            let logits = match on {
                On::Cpu => compute(&golden, CpuBackend::new(1, Some(Isa::Portable)).unwrap(), files, world, division),
                On::Cuda => compute(&golden, CudaBackend::for_worker(world.rank(), false).unwrap(), files, world, division),
            };
            logits.unwrap()
        })
    });
    let mut logits = ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap());
    let first = logits.next().unwrap();
    logits.for_each(drop);
    Ok(first)
}

/// Compares goldens with the workers of a division. Exactly the goldens that `is_refused` selects
/// cannot be divided in this way.
fn compare(names: &[&str], on: On, (tensor, pipeline): (usize, usize), is_refused: fn(&str) -> bool) {
    for &name in names {
        // On CUDA devices, the inputs of a router are rounded to its stored type.
        let tolerance = if on == On::Cuda && EXPERTS.contains(&name) { 100.0 * TOLERANCE } else { TOLERANCE };
        let golden = Arc::new(Golden::read(name));
        match divided(name, &golden, on, Division { tensor, pipeline }) {
            Err(error) => {
                assert!(is_refused(name) && error.code() == Code::InvalidArgument, "{name} on {tensor} x {pipeline} workers: {error}");
                let numbers = [tensor, pipeline].map(|number| number.to_string());
                assert!(numbers.iter().any(|number| error.message().contains(number)), "{error}");
            }
            Ok(logits) => {
                assert!(!is_refused(name), "{name} on {tensor} x {pipeline} workers");
                assert_eq!(logits.len(), golden.logits.len());
                for (i, (ours, theirs)) in logits.iter().zip(&golden.logits).enumerate() {
                    let near = (ours - theirs).abs() <= tolerance;
                    assert!(near, "{name} on {tensor} x {pipeline} workers: number {i} is {ours}, transformers {theirs}");
                }
            }
        }
    }
}

/// Goldens with 3 heads.
fn has_three_heads(name: &str) -> bool {
    name.ends_with("_odd") && name != "falcon_odd"
}

fn has_one_layer(name: &str) -> bool {
    ModelFiles::open(&directory(name)).unwrap().spec.layers.len() == 1
}

#[test]
fn two_workers_that_divide_each_layer_agree_with_transformers() {
    compare(NAMES, On::Cpu, (2, 1), has_three_heads);
}

#[test]
fn four_workers_that_divide_each_layer_agree_with_transformers() {
    // Two others have 6 and 2 heads.
    compare(NAMES, On::Cpu, (4, 1), |name| has_three_heads(name) || ["falcon_odd", "llama3_rope"].contains(&name));
}

#[test]
fn two_stages_agree_with_transformers() {
    compare(NAMES, On::Cpu, (1, 2), has_one_layer);
}

#[test]
fn two_stages_of_two_workers_agree_with_transformers() {
    compare(NAMES, On::Cpu, (2, 2), |name| has_three_heads(name) || has_one_layer(name));
}

/// Sums, gathered norms (olmo2), experts, latents and tied heads, on simulated devices.
#[test]
fn cuda_devices_that_divide_the_model_agree_with_transformers() {
    if cuda::nccl().is_none() {
        return;
    }
    cuda::shim().pretend_devices(4);
    compare(&["gpt2", "llama", "gemma3", "olmo2"], On::Cuda, (2, 1), |_| false);
    compare(EXPERTS, On::Cuda, (2, 1), |_| false);
    compare(&["llama", "gemma3", "deepseek_v3"], On::Cuda, (1, 2), |_| false);
    compare(&["llama"], On::Cuda, (2, 2), |_| false);
}
