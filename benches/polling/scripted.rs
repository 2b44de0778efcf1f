//! The library with one more function, which creates an engine whose model is a script. A benchmark
//! in C++ or Go thus measures only the cost of the C ABI. The whole C ABI is exported too.
#![allow(clippy::missing_safety_doc)]

#[path = "../../tests/support/cpu_time.rs"]
#[allow(dead_code)]
mod cpu_time;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pagedllm::engine::{Engine, Executor, InFlightStep, ModelInfo, StepOutput};
use pagedllm::error::Result;
use pagedllm::ffi::pllm_engine;
use pagedllm::types::batch::Batch;
use pagedllm::types::options::EngineOptions;

const VOCAB: usize = 8;
const MAX_SEQS: usize = 256;
/// More tokens than a sequence generates during a measurement.
const MAX_LEN: usize = 1 << 21;
const BLOCK_SIZE: usize = 256;

/// A model that always returns the same token, one step per `pace`.
struct Scripted {
    logits: Vec<f32>, // [MAX_SEQS, VOCAB]
    pace: Duration,
    next: Instant,
    cpu_ns: Arc<AtomicU64>,
}

impl Executor for Scripted {
    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        self.cpu_ns.store(cpu_time::of_thread().as_nanos() as u64, Ordering::Relaxed);
        let now = Instant::now();
        if self.next > now {
            std::thread::sleep(self.next - now);
        }
        self.next = self.next.max(now) + self.pace;
        Ok(InFlightStep::new(batch.logit_rows.len()))
    }

    fn wait(&mut self, ticket: InFlightStep) -> Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&self.logits[..ticket.logits * VOCAB]))
    }
}

static DRIVER_CPU: std::sync::OnceLock<Arc<AtomicU64>> = std::sync::OnceLock::new();

/// Creates an engine of up to 256 sequences with one step per `pace_us` microseconds. It has no
/// tokenizer. Free it with pllm_engine_free.
#[unsafe(no_mangle)]
pub extern "C" fn bench_engine_create(pace_us: u64) -> *mut pllm_engine {
    let cpu_ns = DRIVER_CPU.get_or_init(Arc::default).clone();
    let mut logits = vec![0.0; MAX_SEQS * VOCAB];
    logits.chunks_exact_mut(VOCAB).for_each(|row| row[1] = 1.0);
    let executor = Scripted { logits, pace: Duration::from_micros(pace_us), next: Instant::now(), cpu_ns };
    let blocks = MAX_SEQS * MAX_LEN / BLOCK_SIZE;
    let info = ModelInfo::without_model(VOCAB, BLOCK_SIZE, blocks, MAX_LEN);
    let options = EngineOptions { max_seqs: MAX_SEQS, ..EngineOptions::default() };
    Engine::with_executor(&options, info, None, Box::new(executor)).map_or(std::ptr::null_mut(), pllm_engine::into_raw)
}

/// Returns the CPU time of the stepping thread up to its last step. The rest of the process's CPU
/// time is the host's.
#[unsafe(no_mangle)]
pub extern "C" fn bench_driver_cpu_ns() -> u64 {
    DRIVER_CPU.get().map_or(0, |cpu| cpu.load(Ordering::Relaxed))
}
