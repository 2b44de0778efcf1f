//! The engine: the bundled model with longer positions.

use std::fs;
use std::path::Path;

use pagedllm::types::options::EngineOptions;

/// Tokens of the longest sequence.
pub const MAX_MODEL_LEN: usize = 16 << 10;

/// Returns options for a copy of the bundled model that accepts sequences of `MAX_MODEL_LEN`. A step has
/// at most 64 tokens, so that prompts of the attackers take little time of a step. The engine has one
/// thread, since the CPU time of the stepping thread includes waits for others.
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
        max_batch_tokens: 64,
        max_seqs: 64,
        threads: Some(1),
        ..Default::default()
    }
}
