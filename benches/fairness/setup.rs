//! The engine: the bundled model with longer positions.

use std::fs;
use std::path::Path;
use std::time::Duration;

use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::error::Error;
use pagedllm::types::options::{EngineOptions, Preemption, SamplingParams};

/// Tokens of the longest sequence.
pub const MAX_MODEL_LEN: usize = 16 << 10;

/// Returns options for a copy of the bundled model that accepts sequences of `MAX_MODEL_LEN`. A
/// step has at most 80 tokens, so that prompts of the attackers take little time of a step. The
/// engine has one thread, since the CPU time of the stepping thread includes waits for others.
pub fn options() -> EngineOptions {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = root.join("target/bench-models/fairness");
    fs::create_dir_all(&dir).unwrap();
    for entry in fs::read_dir(root.join("examples/model")).unwrap() {
        let from = entry.unwrap().path();
        if from.is_file() {
            fs::copy(&from, dir.join(from.file_name().unwrap())).unwrap();
        }
    }
    let config = fs::read_to_string(dir.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["max_position_embeddings"] = MAX_MODEL_LEN.into();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    EngineOptions {
        model_dir: dir,
        kv_bytes: Some(512 << 20),
        max_model_len: Some(MAX_MODEL_LEN),
        max_batch_tokens: 80,
        max_seqs: 80,
        threads: Some(1),
        preemption: Preemption::Swap,
        swap_bytes: 128 << 20,
        ..Default::default()
    }
}

/// Returns the exported state of a sequence of nearly `MAX_MODEL_LEN` tokens.
pub fn long_state(options: &EngineOptions) -> Result<Vec<u8>, Error> {
    let engine = Engine::create(options)?;
    let prompt = Prompt::Tokens((0..MAX_MODEL_LEN as u32 - 8).map(|i| 10 + i % 1000).collect());
    let sampling = SamplingParams { max_tokens: Some(1), ignore_eos: true, ..SamplingParams::greedy() };
    let request = engine.add_request(Request { keep: true, ..Request::new(prompt, sampling) })?;
    while engine.step()?.unfinished > 0 {}
    engine.queue().poll(Some(Duration::ZERO))?;
    engine.export(request.sequence(0), None)?;
    while engine.step()?.unfinished > 0 {}
    let outputs = Vec::from(engine.queue().poll(Some(Duration::ZERO))?);
    Ok(outputs.into_iter().map(|output| output.sequence_state).find(|state| !state.is_empty()).unwrap_or_default())
}

/// Writes the blocks of the pool once, as far as whole copies of the state fit. The first use of
/// their pages takes the system milliseconds, which no attack causes.
pub fn touch_pool(engine: &Engine, state: &[u8]) -> Result<(), Error> {
    let blocks = engine.stats().blocks_total as usize;
    let mut imported = Vec::new();
    while (imported.len() + 1) * MAX_MODEL_LEN / 16 <= blocks {
        imported.push(engine.import(engine.queue(), state)?);
        while engine.step()?.unfinished > 0 {}
    }
    imported.into_iter().try_for_each(|seq| engine.free(seq))?;
    engine.step().map(drop)
}
