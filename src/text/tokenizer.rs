//! The tokenizer of `tokenizer.json`: a wrapper of the `tokenizers` crate that catches panics.

mod check;
mod cuts;
mod pipeline;
mod regex;

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{
    AddedToken, Decoder, DecoderWrapper, Encoding, ModelWrapper, PostProcessorWrapper, Token, TokenizerBuilder, TokenizerImpl,
};

use super::{no_panic, read_if_there};
use crate::error::{Error, Result, try_copy, try_grow};
use cuts::Cuts;
use pipeline::{Normalizers, PreTokenizers};

type Inner = TokenizerImpl<ModelWrapper, Normalizers, PreTokenizers, PostProcessorWrapper, DecoderWrapper>;

/// Number of words whose tokens a Unigram model caches. A word has less than 256 bytes and takes at
/// most 14 KB.
const CACHED_WORDS: usize = 1024;

/// The tokenizer of a `tokenizer.json`. It does not pad or truncate.
#[derive(Debug)]
pub(super) struct Tokenizer {
    inner: Inner,
    padding_token: Option<String>,
    cuts: Cuts,
    /// Tokens that the post-processor writes around a text.
    special: Special,
}

impl Tokenizer {
    pub fn load(path: &Path) -> Result<Tokenizer> {
        let bytes = read_if_there(path)?.ok_or_else(|| missing(path))?;
        let refused = |problem: String| Error::model(format!("{}: {problem}", path.display()));
        check::check_bytes(&bytes).map_err(refused)?;
        let file: Json = serde_json::from_slice(&bytes).map_err(|e| refused(format!("not a valid tokenizer: {e}")))?;
        // Freed first, because the values take several times as much memory as the text.
        drop(bytes);
        Tokenizer::from_json(path, file)
    }

    /// Builds the tokenizer of a document. Errors name `path`.
    pub fn from_json(path: &Path, file: Json) -> Result<Tokenizer> {
        let refused = |problem: String| Error::model(format!("{}: {problem}", path.display()));
        let checked = check::check(&file).map_err(refused)?;
        let cuts = Cuts::new(&file, checked.expansion).map_err(refused)?;
        let padding_token = file["padding"]["pad_token"].as_str().map(str::to_string);
        let built = no_panic(|| build(file)).map_err(|panic| refused(format!("not a valid tokenizer: {panic}")))?;
        let inner = built.map_err(refused)?;
        let special =
            no_panic(|| Special::from_tokenizer(&inner)).unwrap_or_else(Err).map_err(|e| refused(invalid("post_processor", e)))?;
        let mut tokenizer = Tokenizer { inner, padding_token, cuts, special };
        tokenizer.take_added_tokens().map_err(refused)?;
        Ok(tokenizer)
    }

    /// Encodes a text in pieces, because the crate takes some hundred bytes for each byte of a
    /// piece.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.encode_pieces(text, add_special, self.cuts.piece)
    }

    fn encode_pieces(&self, text: &str, add_special: bool, piece: usize) -> Result<Vec<u32>> {
        let nothing = Special::default();
        let special = if add_special { &self.special } else { &nothing };
        let mut tokens = try_copy(&special.before)?;
        if special.replaces_text {
            return Ok(tokens);
        }
        let mut start = 0;
        while start < text.len() {
            let (end, next) = self.cuts.next(text, start, piece).map_err(|length| self.uncut(length))?;
            self.encode_piece(&text[start..end], &mut tokens)?;
            start = next;
        }
        try_grow(&mut tokens, special.after.len())?;
        tokens.extend_from_slice(&special.after);
        Ok(tokens)
    }

    fn encode_piece(&self, text: &str, tokens: &mut Vec<u32>) -> Result<()> {
        let failed = |reason: String| {
            Error::invalid(format!("the tokenizer cannot encode a part of the text ({} bytes: {reason}); send token ids", text.len()))
        };
        let encoding = no_panic(|| self.inner.encode_fast(text, false)).map_err(failed)?;
        let encoding = encoding.map_err(|e| failed(e.to_string()))?;
        try_grow(tokens, encoding.len())?;
        tokens.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    fn uncut(&self, length: usize) -> Error {
        Error::invalid(format!(
            "a part of the text is too long for this tokenizer ({length} bytes, limit {}); \
             send token ids, or a text with white space",
            self.cuts.max_stretch
        ))
    }

    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String> {
        let mut pieces = Vec::new();
        pieces.try_reserve_exact(tokens.len())?;
        for &token in tokens {
            pieces.extend(self.piece(token, skip_special)?);
        }
        self.join(pieces)
    }

    /// Returns the piece of a token in the vocabulary. Returns None for a special token if those
    /// are skipped: the decoder must not see them.
    pub fn piece(&self, token: u32, skip_special: bool) -> Result<Option<String>> {
        let piece = self.inner.id_to_token(token).ok_or_else(|| self.unknown(token))?;
        let skipped = skip_special && self.inner.get_added_vocabulary().is_special_token(&piece);
        Ok((!skipped).then_some(piece))
    }

    /// Returns true if the token has text. Unknown tokens, such as padded rows of the model, have
    /// none.
    pub fn shows(&self, token: u32, skip_special: bool) -> bool {
        matches!(self.piece(token, skip_special), Ok(Some(_)))
    }

    pub fn join(&self, pieces: Vec<String>) -> Result<String> {
        // Some decoders panic on an empty list.
        let Some(decoder) = self.inner.get_decoder().filter(|_| !pieces.is_empty()) else {
            return Ok(pieces.join(" "));
        };
        let failed = |reason: String| Error::invalid(format!("the tokenizer cannot decode these tokens: {reason}"));
        no_panic(|| decoder.decode(pieces)).map_err(failed)?.map_err(|e| failed(e.to_string()))
    }

    /// Returns true if `wanted` is true for a part of the decoder.
    pub fn decodes_with(&self, wanted: &dyn Fn(&DecoderWrapper) -> bool) -> bool {
        self.inner.get_decoder().is_some_and(|decoder| has(decoder, wanted))
    }

    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the padding token of `tokenizer.json`. The tokenizer itself does not pad.
    pub fn padding_token(&self) -> Option<&str> {
        self.padding_token.as_deref()
    }

    /// Prevents cuts within added tokens. This is the first place where a normalized token is known
    /// to be white space.
    fn take_added_tokens(&mut self) -> std::result::Result<(), String> {
        for (id, token) in self.inner.get_added_vocabulary().get_added_tokens_decoder() {
            let normalized = self.inner.id_to_token(*id).unwrap_or_default();
            if (token.lstrip || token.rstrip) && check::is_blank(&normalized) {
                return Err(check::blank_token(&format!("added_tokens: token {id}")));
            }
            self.cuts.protect(token, &normalized);
        }
        Ok(())
    }

    fn unknown(&self, token: u32) -> Error {
        let size = self.vocab_size();
        Error::invalid(format!("token {token} is not in the tokenizer's vocabulary of {size} tokens"))
    }
}

/// Tokens that the post-processor writes before and after a text.
#[derive(Debug, Default)]
struct Special {
    before: Vec<u32>,
    after: Vec<u32>,
    /// If true, the template omits the text and writes `before` only.
    replaces_text: bool,
}

impl Special {
    fn from_tokenizer(tokenizer: &Inner) -> std::result::Result<Special, String> {
        const TEXT: u32 = u32::MAX;
        let text = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
        let processed = tokenizer.post_process(text, None, true).map_err(|e| e.to_string())?;
        let ids = processed.get_ids();
        Ok(match ids.iter().position(|&id| id == TEXT) {
            Some(at) => Special { before: ids[..at].to_vec(), after: ids[at + 1..].to_vec(), replaces_text: false },
            None => Special { before: ids.to_vec(), after: Vec::new(), replaces_text: true },
        })
    }
}

fn has(decoder: &DecoderWrapper, wanted: &dyn Fn(&DecoderWrapper) -> bool) -> bool {
    match decoder {
        DecoderWrapper::Sequence(sequence) => sequence.get_decoders().iter().any(|decoder| has(decoder, wanted)),
        decoder => wanted(decoder),
    }
}

/// Builds the tokenizer from the checked values, not from the file: if the file has a field twice,
/// the crate would read the other one. Prompts are neither padded nor truncated.
fn build(mut file: Json) -> std::result::Result<Inner, String> {
    let model = model(file["model"].take())?;
    let tokens: Vec<AddedToken> = part(&mut file, "added_tokens")?.unwrap_or_default();
    let mut tokenizer = TokenizerBuilder::new()
        .with_model(model)
        .with_normalizer(Normalizers::new(&file["normalizer"])?)
        .with_pre_tokenizer(PreTokenizers::new(&file["pre_tokenizer"])?)
        .with_post_processor(part::<PostProcessorWrapper>(&mut file, "post_processor")?)
        .with_decoder(part::<DecoderWrapper>(&mut file, "decoder")?)
        .build()
        .map_err(|e| invalid("tokenizer", e))?;
    tokenizer.add_tokens(tokens).map_err(|e| invalid("added_tokens", e))?;
    Ok(tokenizer)
}

fn part<T: DeserializeOwned>(file: &mut Json, name: &str) -> std::result::Result<Option<T>, String> {
    match file.get_mut(name) {
        Some(value) => serde_json::from_value(value.take()).map_err(|e| invalid(name, e)),
        None => Ok(None),
    }
}

fn invalid(field: &str, e: impl std::fmt::Display) -> String {
    format!("{field}: not a valid tokenizer: {e}")
}

fn model(json: Json) -> std::result::Result<ModelWrapper, String> {
    if check::check_model(&json)? == "BPE" {
        return Ok(bpe(json)?.into());
    }
    let mut model: ModelWrapper = serde_json::from_value(json).map_err(|e| invalid("model", e))?;
    model.resize_cache(CACHED_WORDS);
    Ok(model)
}

/// Builds a BPE model without the word cache of the crate. The crate has one cache per thread and
/// model and never frees it, so a host that opens many engines would leak memory. The cache can be
/// disabled only when the model is built.
fn bpe(mut json: Json) -> std::result::Result<BPE, String> {
    #[derive(serde::Deserialize)]
    struct Settings {
        unk_token: Option<String>,
        continuing_subword_prefix: Option<String>,
        end_of_word_suffix: Option<String>,
        fuse_unk: Option<bool>,
        byte_fallback: Option<bool>,
        ignore_merges: Option<bool>,
    }
    let merges = check::bpe_merges(&json)?;
    json["merges"].take();
    let vocab: Vocab = serde_json::from_value(json["vocab"].take()).map_err(|e| invalid("model.vocab", e))?;
    let settings: Settings = serde_json::from_value(json).map_err(|e| invalid("model", e))?;
    let mut builder = BPE::builder().vocab_and_merges(vocab, merges).cache_capacity(0);
    if let Some(prefix) = settings.continuing_subword_prefix {
        builder = builder.continuing_subword_prefix(prefix);
    }
    let mut built = builder.build().map_err(|e| invalid("model", e))?;
    built.unk_token = settings.unk_token;
    built.end_of_word_suffix = settings.end_of_word_suffix;
    built.fuse_unk = settings.fuse_unk.unwrap_or_default();
    built.byte_fallback = settings.byte_fallback.unwrap_or_default();
    built.ignore_merges = settings.ignore_merges.unwrap_or_default();
    Ok(built)
}

fn missing(path: &Path) -> Error {
    Error::io(format!(
        "{}: not found; write it with transformers: AutoTokenizer.from_pretrained(model).save_pretrained(directory)",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{fresh_dir, golden_cases, golden_dir, model_dir};
    use super::*;
    use crate::error::Code;
    use serde_json::json;
    use std::collections::HashMap;

    fn tokenizer(dir: &Path) -> Tokenizer {
        Tokenizer::load(&dir.join("tokenizer.json")).unwrap()
    }

    fn load_json(name: &str, json: &str) -> Result<Tokenizer> {
        let path = fresh_dir(name).join("tokenizer.json");
        std::fs::write(&path, json).unwrap();
        Tokenizer::load(&path)
    }

    fn ids(case: &Json, key: &str) -> Vec<u32> {
        case[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    #[test]
    fn golden_texts_encode_and_decode_as_in_transformers() {
        let mut loaded = HashMap::new();
        let cases = golden_cases("cases.json");
        assert!(cases.len() > 100);
        for case in &cases {
            let name = case["tokenizer"].as_str().unwrap();
            let tokenizer = loaded.entry(name).or_insert_with(|| tokenizer(&golden_dir().join(name)));
            if let Some(text) = case["text"].as_str() {
                assert_eq!(tokenizer.encode(text, true).unwrap(), ids(case, "ids"), "{case}");
                assert_eq!(tokenizer.encode(text, false).unwrap(), ids(case, "ids_plain"), "{case}");
            }
            assert_eq!(tokenizer.decode(&ids(case, "ids"), true).unwrap(), case["decoded"], "{case}");
        }
    }

    #[test]
    fn unknown_token_is_an_error_that_names_it() {
        let tokenizer = tokenizer(&model_dir("unknown", &[]));
        assert_eq!(tokenizer.vocab_size(), 3);
        let error = tokenizer.decode(&[0, 4_000_000_000], false).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("token 4000000000"), "{error}");
    }

    #[test]
    fn special_tokens_are_skipped_on_demand() {
        let tokenizer = tokenizer(&model_dir("special", &[]));
        assert_eq!(tokenizer.decode(&[2, 0, 2, 1], true).unwrap(), "a b");
        assert_eq!(tokenizer.decode(&[2, 0], false).unwrap(), "<s> a");
        assert_eq!(tokenizer.decode(&[2], true).unwrap(), "");
    }

    #[test]
    fn truncation_and_padding_in_the_file_are_switched_off() {
        let file = json!({"version": "1.0",
            "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
            "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_id": 1, "pad_type_id": 0,
                "pad_token": "b", "pad_to_multiple_of": null},
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}});
        let tokenizer = load_json("padding", &file.to_string()).unwrap();
        assert_eq!(tokenizer.encode("abab", true).unwrap(), [0, 1, 0, 1]);
    }

    #[test]
    fn broken_file_is_an_error_that_names_it_and_never_a_panic() {
        let model = r#"{"type": "BPE", "vocab": {"a": 0}, "merges": []}"#;
        let broken = [
            String::new(),
            "{".into(),
            "{}".into(),
            "[]".into(),
            "\u{0}".into(),
            r#"{"version": "9.0"}"#.into(),
            r#"{"model": 3}"#.into(),
            r#"{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a a"]}}"#.into(),
            r#"{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}"#.into(),
            r#"{"model": {"type": "Unigram", "vocab": [], "unk_id": 7}}"#.into(),
            format!(r#"{{"model": {model}, "decoder": 5}}"#),
            format!(r#"{{"model": {model}, "normalizer": {{"type": "Precompiled", "precompiled_charsmap": "AAA="}}}}"#),
            format!(
                r#"{{"model": {model}, "pre_tokenizer": {{"type": "Split", "pattern": {{"Regex": "("}}, "behavior": "Isolated", "invert": false}}}}"#
            ),
            "[".repeat(100_000),
        ];
        for json in &broken {
            let error = load_json("broken", json).expect_err(json);
            assert_eq!(error.code(), Code::Model, "{error}");
            assert!(error.message().contains("tokenizer.json: "), "{error}");
        }
    }

    #[test]
    fn decoder_that_panics_is_an_error() {
        // The decoder Strip removes a character from the end of an empty string.
        let json = r#"{"model": {"type": "BPE", "vocab": {"": 0, "a": 1}, "merges": []},
            "decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 1}}"#;
        let tokenizer = load_json("panics", json).unwrap();
        assert!(tokenizer.decode(&[0], false).is_err());
        assert_eq!(tokenizer.decode(&[1], false).unwrap(), "");
    }
}
