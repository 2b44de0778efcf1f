//! Tokenizer, detokenizer and chat templates of a model.

mod boundary_tokens;
mod bytes;
mod chat;
mod detokenizer;
mod jinja;
pub mod response;
mod special_tokens;
mod tokenizer;

pub use bytes::TokenBytes;
pub use detokenizer::Detokenizer;

use std::path::Path;

use serde_json::Value as Json;

use crate::error::{Error, Result, try_concat, try_copy};
use crate::sys::quiet::no_panic;
use crate::sys::{files, threads};
use boundary_tokens::BoundaryTokens;
use chat::Chat;
use special_tokens::SpecialTokens;
use tokenizer::Tokenizer;

/// Maximum size of a file. The largest published tokenizer.json has about 35 MB.
const MAX_FILE_BYTES: u64 = 512 << 20;

/// Stack size for reading the files. Most of it is for chat templates, the rest for nested JSON and
/// patterns.
const LOAD_STACK_BYTES: usize = jinja::STACK_BYTES + (1 << 20);
/// Stack size for the tokenizer.
const STACK_BYTES: usize = 1 << 20;

/// Runs `body` with at least `bytes` of stack on any thread of the host.
fn on_stack<T: Send>(bytes: usize, body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    threads::with_stack(bytes, body)?.unwrap_or_else(|panic| Err(Error::internal(format!("panic in the text module: {panic}"))))
}

/// The tokenizer, special tokens and chat templates of a model. Immutable and Sync.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    /// Tokens around a prompt. None: those of `tokenizer.json`.
    boundary: Option<BoundaryTokens>,
    eos: Option<u32>,
    chat: Chat,
    /// Maximum length of a prompt or chat in bytes.
    max_prompt_bytes: usize,
}

impl Text {
    /// Reads `tokenizer.json`, and, if they exist, `tokenizer_config.json`,
    /// `special_tokens_map.json` and `chat_template.jinja`. As in transformers,
    /// `chat_template.jinja` has precedence over the template in the config.
    pub fn load(dir: &Path) -> Result<Text> {
        on_stack(LOAD_STACK_BYTES, || Text::read(dir))
    }

    fn read(dir: &Path) -> Result<Text> {
        let tokenizer = Tokenizer::load(&dir.join("tokenizer.json"))?;
        let config = read_config(&dir.join("tokenizer_config.json"))?;
        Text::new(dir, tokenizer, config)
    }

    /// Like `load`, from the content of `tokenizer.json` and of `tokenizer_config.json` of the
    /// model file `path`. A `chat_template.jinja` beside the file has precedence.
    pub fn from_documents(path: &Path, tokenizer: Json, config: Json) -> Result<Text> {
        let dir = path.parent().unwrap_or(path);
        on_stack(LOAD_STACK_BYTES, || Text::new(dir, Tokenizer::from_json(path, tokenizer)?, config))
    }

    fn new(dir: &Path, tokenizer: Tokenizer, config: Json) -> Result<Text> {
        let tokens = SpecialTokens::load(dir, &config, tokenizer.padding_token())?;
        let eos = tokens.get("eos_token").and_then(|token| tokenizer.token_id(token));
        let boundary = BoundaryTokens::load(dir, &config, &tokens, &tokenizer)?;
        let chat = Chat::load(dir, &config, tokens)?;
        Ok(Text { tokenizer, boundary, eos, chat, max_prompt_bytes: usize::MAX })
    }

    /// Sets the maximum length of prompts and chats. The default is no limit.
    pub fn limit_prompts(&mut self, max_bytes: usize) {
        self.max_prompt_bytes = max_bytes;
    }

    /// Checks the size first, because the tokenizer and the template take a multiple of it.
    fn check_size(&self, what: &str, text: &str) -> Result<()> {
        let (len, max) = (text.len(), self.max_prompt_bytes);
        if len > max {
            return Err(Error::invalid(format!(
                "the {what} is too long ({len} bytes, max_prompt_bytes {max}); shorten it or raise max_prompt_bytes"
            )));
        }
        Ok(())
    }

    /// Encodes `text`. With `add_special`, adds the special tokens around a prompt, such as BOS.
    /// The names of special tokens within the text become these tokens in both cases.
    ///
    /// # Errors
    /// The text is longer than `max_prompt_bytes`, or the tokenizer cannot encode it.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.check_size("text", text)?;
        on_stack(STACK_BYTES, || match &self.boundary {
            Some(boundary) if add_special => boundary.around(&self.tokenizer.encode(text, false)?),
            _ => self.tokenizer.encode(text, add_special),
        })
    }

    /// Returns the encodings of `text` at the beginning of a text, after a space, and after another
    /// character that no token joins to it. Other tokens can spell the same text.
    pub fn spellings(&self, text: &str) -> Result<Vec<Vec<u32>>> {
        // The text is no prompt, so the limit of prompts does not apply.
        let encode = |text: &str| on_stack(STACK_BYTES, || self.tokenizer.encode(text, false));
        let mut found = vec![encode(text)?, encode(&try_concat(&[" ", text])?)?];
        for before in ["\n", "a"] {
            let (whole, before) = (encode(&try_concat(&[before, text])?)?, encode(before)?);
            found.extend(whole.strip_prefix(&before[..]).map(try_copy).transpose()?);
        }
        found.sort_unstable();
        found.dedup();
        found.retain(|tokens| !tokens.is_empty());
        Ok(found)
    }

    /// Decodes `tokens`. Bytes that are not UTF-8 become U+FFFD. An unknown token is an error.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String> {
        on_stack(STACK_BYTES, || self.tokenizer.decode(tokens, skip_special))
    }

    /// Returns the number of tokens, including added ones. The model may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// Returns the bytes of each token within a text, for a model with `rows` rows of logits.
    pub fn token_bytes(&self, rows: usize) -> Result<TokenBytes> {
        on_stack(STACK_BYTES, || TokenBytes::from_tokenizer(&self.tokenizer, rows))
    }

    /// Returns the end-of-sequence token, if the tokenizer's files name one.
    pub fn eos_token_id(&self) -> Option<u32> {
        self.eos
    }

    /// Renders a chat with the model's template. `json` is an array of messages, or an object with
    /// `messages` and options: see `pllm_engine_render_chat`.
    ///
    /// # Errors
    /// The JSON is not a chat, the model has no template for it, the template raises an error, or
    /// the chat or its prompt is longer than `max_prompt_bytes`.
    pub fn render_chat(&self, json: &str) -> Result<String> {
        self.check_size("chat", json)?;
        let prompt = self.chat.render(json)?;
        self.check_size("chat's prompt", &prompt)?;
        Ok(prompt)
    }

    /// Returns the format of the model's responses, which its chat template shows.
    pub fn response_format(&self) -> &'static response::Format {
        self.chat.response_format()
    }
}

fn read_config(path: &Path) -> Result<Json> {
    let Some(bytes) = read_if_there(path)? else { return Ok(Json::Null) };
    let config: Json = serde_json::from_slice(&bytes).map_err(|e| Error::model(format!("{}: not valid JSON: {e}", path.display())))?;
    if !config.is_object() {
        return Err(Error::model(format!("{}: not a JSON object", path.display())));
    }
    Ok(config)
}

/// Reads a file. Returns None if it does not exist.
fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    files::read(path, MAX_FILE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use std::fs::{self, File};
    use std::path::PathBuf;

    /// Returns a separate directory for one test, initially empty.
    pub(super) fn fresh_dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pagedllm-text-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// Returns the smallest valid tokenizer, and the other files of the test.
    pub(super) fn model_dir(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let dir = fresh_dir(name);
        let tokenizer = r#"{"version": "1.0", "added_tokens": [{"id": 2, "content": "<s>", "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}"#;
        fs::write(dir.join("tokenizer.json"), tokenizer).unwrap();
        for (file, content) in files {
            fs::write(dir.join(file), content).unwrap();
        }
        dir
    }

    pub(super) fn golden_dir() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers")
    }

    pub(super) fn golden_cases(file: &str) -> Vec<Json> {
        let bytes = fs::read(golden_dir().join(file)).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    /// Returns a file of `tests/data/special_tokens`.
    pub(super) fn special_tokens_golden(file: &str) -> Json {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/special_tokens").join(file);
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    /// Loads each case of `special_tokens_golden` and checks the result or the error. Unlike this
    /// library, the reference refuses the cases in `taken`.
    pub(super) fn check_cases<T>(golden: &Json, taken: &[&str], load: impl Fn(&Json) -> Result<T>, check: impl Fn(&str, &Json, T)) {
        let cases = golden["cases"].as_array().unwrap();
        assert!(cases.len() > 100);
        for case in cases {
            let name = case["name"].as_str().unwrap();
            let is_taken = taken.contains(&name);
            match load(case) {
                Ok(found) if case["error"] == false => check(name, case, found),
                Ok(_) => assert!(is_taken, "{name} is not refused"),
                Err(error) => {
                    let as_wanted = case["error"] == true && !is_taken && error.code() == Code::Model;
                    assert!(as_wanted, "{name}: {error}");
                }
            }
        }
    }

    /// Writes the files of a case of `special_tokens_golden`, whose `tokenizer.json` is `base` with
    /// other members.
    pub(super) fn write_case(dir: &Path, base: &Json, files: &Json) {
        let mut tokenizer = base.clone();
        for (file, content) in files.as_object().unwrap() {
            match content.as_object() {
                Some(members) if file == "tokenizer.json" => tokenizer.as_object_mut().unwrap().extend(members.clone()),
                _ => fs::write(dir.join(file), content.to_string()).unwrap(),
            }
        }
        fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    }

    #[test]
    fn a_word_has_one_of_its_spellings_in_any_context() {
        let mut seen = 0;
        for name in ["byte_level", "llama2", "metaspace"] {
            let text = Text::load(&golden_dir().join(name)).unwrap();
            let bytes = text.token_bytes(text.vocab_size()).unwrap().bytes;
            for word in ["hello", "the", "code", "time", ":", "Paris"] {
                let spellings = text.spellings(word).unwrap();
                for before in ["", "see ", "one\n", "(", "\"", "a", "under", "9"] {
                    let tokens = text.encode(&format!("{before}{word}"), false).unwrap();
                    // The index at which the word starts with its own token, with or without the
                    // space before it.
                    let of_word = |at: &usize| {
                        let spelled = tokens[*at..].iter().flat_map(|&token| bytes[token as usize].clone()).collect::<Vec<u8>>();
                        spelled.strip_prefix(b" ").unwrap_or(&spelled) == word.as_bytes()
                    };
                    if let Some(at) = (0..tokens.len()).rev().find(of_word) {
                        let whole = spellings.iter().any(|spelling| tokens.ends_with(spelling));
                        assert!(whole, "{name}: {before:?} {word:?}: {:?} is not among {spellings:?}", &tokens[at..]);
                        seen += 1;
                    }
                }
            }
        }
        assert!(seen > 60, "only {seen} cases");
    }

    /// Returns the text of the tokens as the outputs of a sequence contain it.
    fn streamed(text: &Text, tokens: &[u32]) -> String {
        let (mut stream, mut out) = (Detokenizer::new(false), String::new());
        tokens.iter().for_each(|&token| stream.push(text, token, &mut out).unwrap());
        out
    }

    #[test]
    fn tokenizers_work_on_a_small_stack() {
        let nested = |kind: &str, part: &str| {
            let open = format!(r#"{{"type": "Sequence", "{kind}": ["#);
            format!("{}{part}{}", open.repeat(4), "]}".repeat(4))
        };
        let deepest = format!(
            r#"{{"version": "1.0", "added_tokens": [], "normalizer": {}, "pre_tokenizer": {}, "decoder": {},
               "model": {{"type": "BPE", "vocab": {{"a": 0, "b": 1}}, "merges": []}}}}"#,
            nested("normalizers", r#"{"type": "Lowercase"}"#),
            nested(
                "pretokenizers",
                r#"{"type": "Split", "pattern": {"Regex": "a(?:b|(?:a|(?:b)))"}, "behavior": "Isolated", "invert": false}"#
            ),
            nested("decoders", r#"{"type": "Fuse"}"#),
        );
        let dir = fresh_dir("deepest");
        fs::write(dir.join("tokenizer.json"), deepest).unwrap();
        let dirs = ["byte_level", "llama2", "metaspace"].map(|name| golden_dir().join(name)).into_iter().chain([dir]);
        let everything = move || {
            for dir in dirs {
                let text = Text::load(&dir).unwrap();
                let tokens = text.encode(&"a b ab\n".repeat(1000), true).unwrap();
                assert!(text.decode(&tokens, true).unwrap().contains("ab"));
                assert!(streamed(&text, &tokens[..40]).contains('b'));
                text.token_bytes(text.vocab_size()).unwrap();
                text.spellings("ab").unwrap();
            }
        };
        std::thread::Builder::new().stack_size(64 << 10).spawn(everything).unwrap().join().unwrap();
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn rounding_mode_of_the_host_does_not_change_tokens() {
        // -0.1 + -0.2 is the score of "ab" in the standard rounding mode, and higher if sums are
        // rounded up.
        let tokenizer = r#"{"version": "1.0", "added_tokens": [], "model": {"type": "Unigram", "unk_id": 0,
            "vocab": [["?", -9.0], ["a", -0.1], ["b", -0.2], ["ab", -0.30000000000000004]]}}"#;
        let dir = fresh_dir("rounding");
        fs::write(dir.join("tokenizer.json"), tokenizer).unwrap();
        let encoded = || Text::load(&dir).unwrap().encode("ab", false).unwrap();
        assert_eq!(encoded(), [3]);
        assert_eq!(crate::sys::float::rounding_up(encoded), [3]);
    }

    #[test]
    fn text_longer_than_the_limit_is_refused_before_it_is_tokenized() {
        let template = r#"{"chat_template": "{{ messages[0].content * 3 }}"}"#;
        let mut text = Text::load(&model_dir("limit", &[("tokenizer_config.json", template)])).unwrap();
        text.limit_prompts(50);
        assert_eq!(text.encode(&"a".repeat(50), false).unwrap().len(), 50);
        let refused = |error: Error, words: &str| {
            assert_eq!(error.code(), Code::InvalidArgument);
            assert!(error.message().contains(words), "{error}");
        };
        refused(text.encode(&"a".repeat(51), false).unwrap_err(), "the text is too long (51 bytes, max_prompt_bytes 50)");
        assert!(text.spellings(&"a".repeat(51)).is_ok(), "a text that is no prompt");
        refused(text.render_chat(&" ".repeat(51)).unwrap_err(), "the chat is too long (51 bytes, max_prompt_bytes 50)");
        let chat = r#"[{"content": "aaaaaaaaaaaaaaaaaaaa"}]"#;
        refused(text.render_chat(chat).unwrap_err(), "the chat's prompt is too long (60 bytes, max_prompt_bytes 50)");
    }

    #[test]
    fn text_can_be_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Text>();
    }

    #[test]
    fn missing_tokenizer_is_an_error_that_names_the_file_and_the_remedy() {
        let error = Text::load(&fresh_dir("missing")).unwrap_err();
        assert_eq!(error.code(), Code::Io);
        assert!(error.message().contains("tokenizer.json"), "{error}");
        assert!(error.message().contains("save_pretrained"), "{error}");
    }

    #[test]
    fn directory_in_the_place_of_a_file_is_an_error() {
        let dir = fresh_dir("directory");
        fs::create_dir(dir.join("tokenizer.json")).unwrap();
        assert_eq!(Text::load(&dir).unwrap_err().code(), Code::Io);
    }

    #[test]
    fn too_large_file_is_refused_before_it_is_read() {
        let dir = fresh_dir("large");
        File::create(dir.join("tokenizer.json")).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        let error = Text::load(&dir).unwrap_err();
        assert!(error.message().contains("536870913 bytes"), "{error}");
    }

    #[test]
    fn broken_config_is_an_error_that_names_the_file() {
        for broken in ["{", "[]", "\u{1}"] {
            let dir = model_dir("config", &[("tokenizer_config.json", broken)]);
            let error = Text::load(&dir).unwrap_err();
            assert_eq!(error.code(), Code::Model);
            assert!(error.message().contains("tokenizer_config.json"), "{error}");
        }
    }

    #[test]
    fn eos_token_is_a_string_or_an_object() {
        let cases = [
            (r#"{"eos_token": "<s>"}"#, Some(2)),
            (r#"{"eos_token": {"content": "<s>", "lstrip": false}}"#, Some(2)),
            (r#"{"eos_token": "</unknown>"}"#, None),
            (r#"{"eos_token": null}"#, None),
            ("{}", None),
        ];
        for (config, eos) in cases {
            let dir = model_dir("eos", &[("tokenizer_config.json", config)]);
            assert_eq!(Text::load(&dir).unwrap().eos_token_id(), eos, "{config}");
        }
    }

    #[test]
    fn special_tokens_map_overrides_the_config_for_chats_and_eos() {
        let config = r#"{"bos_token": "<c>", "eos_token": "</c>", "chat_template": "{{ bos_token }}{{ eos_token }}{{ image }}"}"#;
        let map = r#"{"eos_token": {"content": "<s>"}, "extra_special_tokens": {"image": "<i>"}}"#;
        let dir = model_dir("map", &[("tokenizer_config.json", config), ("special_tokens_map.json", map)]);
        let text = Text::load(&dir).unwrap();
        assert_eq!((text.eos_token_id(), text.render_chat("[]").unwrap().as_str()), (Some(2), "<c><s><i>"));
    }

    #[test]
    fn end_token_that_is_not_a_token_is_an_error() {
        let error = Text::load(&model_dir("eos", &[("tokenizer_config.json", r#"{"eos_token": 7}"#)])).unwrap_err();
        assert_eq!(error.code(), Code::Model);
        assert!(error.message().contains("eos_token is 7"), "{error}");
    }
}
