//! Opens files with any bytes as header of a GGUF model. They are models or refused: a panic, an abort,
//! or memory out of proportion to the file is a finding.

#![no_main]

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use pagedllm::backend::cpu::CpuBackend;
use pagedllm::model::gguf::{self, Gguf};
use pagedllm::model::{BatchLimits, ModelFiles};
use pagedllm::text::Text;

/// Zeros that follow the input, so that tensors have data.
const DATA_BYTES: u64 = 4 << 20;
/// Models with more bytes of weights are planned, and not loaded.
const MAX_LOADED: u64 = 1 << 20;

fn path() -> &'static PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| std::env::temp_dir().join(format!("pagedllm-fuzz-{}.gguf", std::process::id())))
}

fuzz_target!(|header: &[u8]| {
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).open(path()).unwrap();
    file.write_all(header).unwrap();
    file.set_len(header.len() as u64 + DATA_BYTES).unwrap();
    drop(file);
    if let Ok(file) = Gguf::open(path())
        && let Ok(documents) = gguf::text::documents(&file.metadata)
        && let Ok(text) = Text::from_documents(path(), documents.tokenizer, documents.config)
    {
        let _ = text.encode("Hello, world! 123", true).map(|tokens| text.decode(&tokens, true));
    }
    let Ok(files) = ModelFiles::open(path()) else { return };
    let backend = CpuBackend::new(1, None).unwrap();
    if files.weight_bytes(&backend).is_ok_and(|bytes| bytes <= MAX_LOADED) {
        let _ = files.load(backend, BatchLimits { tokens: 4, logits: 4 }, &mut |_, _| true);
    }
});
