//! A byte-level BPE, trained on the text and code of this repository.

use std::path::Path;

use tokenizers::decoders::byte_level::ByteLevel as Decoder;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerBuilder, TokenizerImpl};

fn texts(dir: &Path, found: &mut Vec<String>) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.') || name == "target");
        if path.is_dir() && !hidden {
            texts(&path, found);
        } else if path.extension().is_some_and(|end| ["rs", "md", "py", "c", "h", "hpp", "cpp", "go", "json"].iter().any(|e| end == *e)) {
            found.extend(std::fs::read_to_string(&path).ok().filter(|text| text.len() < 1 << 20));
        }
    }
}

/// Writes tokenizer.json with at most `max_tokens` tokens. Returns the number of bytes of the
/// training text.
pub fn train(dir: &Path, max_tokens: usize) -> usize {
    let mut corpus = Vec::new();
    texts(Path::new(env!("CARGO_MANIFEST_DIR")), &mut corpus);
    type Trained = TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;
    let mut tokenizer: Trained = TokenizerBuilder::new()
        .with_model(BPE::default())
        .with_normalizer(None)
        .with_pre_tokenizer(Some(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true))))
        .with_post_processor(None)
        .with_decoder(Some(DecoderWrapper::ByteLevel(Decoder::default())))
        .build()
        .unwrap();
    let alphabet = ByteLevel::alphabet().into_iter().collect();
    let mut trainer = BpeTrainerBuilder::new().show_progress(false).vocab_size(max_tokens).initial_alphabet(alphabet).build();
    tokenizer.train(&mut trainer, corpus.iter()).unwrap();
    tokenizer.save(dir.join("tokenizer.json"), false).unwrap();
    corpus.iter().map(String::len).sum()
}
