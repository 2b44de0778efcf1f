//! An engine on a device whose faults and clock the script controls.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use pagedllm::backend::cpu::CpuBackend;
use pagedllm::engine::{Engine, ModelExecutor};
use pagedllm::ffi::pllm_engine;
use pagedllm::model::{BatchLimits, KvCache, KvPool, ModelFiles};
use pagedllm::types::options::{EngineOptions, Isa, KvDtype, Preemption};
use serde_json::{Value as Json, json};

use crate::support::faulty::{Faults, Faulty};
use crate::support::{ManualClock, model_info};

const MAX_MODEL_LEN: usize = 120;

pub struct Device {
    faults: Arc<Faults>,
    clock: Arc<ManualClock>,
}

/// Creates an engine. `settings` has the numbers of "blocks" and "host_blocks" of 8 tokens each.
pub fn engine(model: &Path, isa: Isa, settings: &Json) -> (*mut pllm_engine, Device) {
    let number = |name: &str| settings[name].as_u64().unwrap_or(0) as usize;
    let faults = Arc::new(Faults::default());
    let backend = Faulty { cpu: CpuBackend::new(1, Some(isa)).unwrap(), faults: faults.clone() };
    let files = ModelFiles::open(model).unwrap();
    let pool = KvPool { blocks: number("blocks"), block_size: 8, dtype: KvDtype::F32 };
    let mut kv = KvCache::new(&backend, &files.spec, pool).unwrap();
    let block_bytes = pool.block_bytes(&backend, &files.spec);
    if number("host_blocks") > 0 {
        kv.add_host_tier(&backend, number("host_blocks"), block_bytes).unwrap();
    }
    let decoder = files.load(backend, BatchLimits { tokens: 32, logits: 16 }, &mut |_, _| true).unwrap();
    let mut info = model_info(files.spec.vocab_size, pool.blocks, MAX_MODEL_LEN, vec![2]);
    (info.memory.block_bytes, info.memory.swap_blocks) = (block_bytes, number("host_blocks"));
    let preemption = if number("host_blocks") > 0 { Preemption::Swap } else { Preemption::Recompute };
    let options = EngineOptions { max_batch_tokens: 32, max_seqs: 16, seed: 7, preemption, ..Default::default() };
    let clock = Arc::new(ManualClock::default());
    let executor = Box::new(ModelExecutor::new(decoder, kv));
    let engine = Engine::with_clock(&options, info, None, executor, clock.clone()).unwrap();
    (pllm_engine::into_raw(engine), Device { faults, clock })
}

impl Device {
    /// Injects faults. `{"operation": n}`: the n-th operation from now on fails. "swap" and
    /// "export" work in the same way. `{"all": true}`: every step fails. `{"poison": true}`: every
    /// step with token 126 fails. `{"panic": true}`: every operation panics.
    pub fn fail(&self, settings: &Json) {
        for (name, point) in [("operation", &self.faults.ops), ("swap", &self.faults.swaps), ("export", &self.faults.exports)] {
            if let Some(n) = settings[name].as_u64() {
                point.fails_at.store(point.seen.load(SeqCst) + n, SeqCst);
            }
        }
        for (name, flag) in [("all", &self.faults.dead), ("poison", &self.faults.poisoned), ("panic", &self.faults.panics)] {
            if let Some(on) = settings[name].as_bool() {
                flag.store(on, SeqCst);
            }
        }
    }

    pub fn advance(&self, milliseconds: u64) -> Json {
        self.clock.advance(Duration::from_millis(milliseconds));
        json!({})
    }
}
