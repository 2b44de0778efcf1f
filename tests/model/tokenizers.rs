//! Tests of damaged tokenizer files and long texts. No panic escapes, no process aborts, and the
//! memory is bounded.

use std::cell::Cell;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use crate::counting::peak_of;
use crate::support::{Random, on_deep_stack};
use pagedllm::error::Code;
use pagedllm::text::Text;
use serde_json::{Value, json};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A directory for one test, removed on drop.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("pagedllm-tokenizers-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    fn load(&self, file: &Value) -> Result<Text, pagedllm::error::Error> {
        fs::write(self.0.join("tokenizer.json"), file.to_string()).unwrap();
        Text::load(&self.0)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The tokenizers of the repository.
fn whole_files() -> Vec<(String, Value)> {
    let mut files = vec![root().join("examples/model/tokenizer.json")];
    for entry in fs::read_dir(root().join("tests/data/tokenizers")).unwrap() {
        files.push(entry.unwrap().path().join("tokenizer.json"));
    }
    files.retain(|path| path.exists());
    files.sort();
    let read = |path: PathBuf| (path.display().to_string(), serde_json::from_slice(&fs::read(&path).unwrap()).unwrap());
    files.into_iter().map(read).collect()
}

fn sequence(list: &str, parts: &[Value]) -> Value {
    json!({"type": "Sequence", list: parts})
}

fn split(regex: &str, behavior: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": false})
}

fn normalizers() -> Vec<Value> {
    let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
        "lowercase": true});
    // A map without entries: a trie of one block.
    let charsmap = format!("AAQAAA{}", "A".repeat(1029 / 3 * 4 - 6));
    let simple = ["StripAccents", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "ByteLevel"].map(|kind| json!({"type": kind}));
    let mut all = vec![
        bert,
        json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        json!({"type": "Precompiled", "precompiled_charsmap": charsmap}),
        json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u{2581}"}),
        json!({"type": "Prepend", "prepend": "\u{2581}"}),
    ];
    all.extend(simple);
    all.push(sequence("normalizers", &all[1..6]));
    all
}

fn pre_tokenizers() -> Vec<Value> {
    let simple = ["BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts"].map(|kind| json!({"type": kind}));
    let mut all = vec![
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true}),
        json!({"type": "CharDelimiterSplit", "delimiter": "-"}),
        split(r"\p{N}{1,3}|\s+(?!\S)|[^\s]+", "MergedWithNext"),
        json!({"type": "Punctuation", "behavior": "MergedWithPrevious"}),
        json!({"type": "Digits", "individual_digits": true}),
        json!({"type": "FixedLength", "length": 3}),
    ];
    all.extend(simple);
    all.push(sequence("pretokenizers", &all[2..8]));
    all
}

fn decoders() -> Vec<Value> {
    let mut all = vec![
        json!({"type": "BPEDecoder", "suffix": "</w>"}),
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true}),
        json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}),
        json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
        json!({"type": "Fuse"}),
        json!({"type": "Strip", "content": " ", "start": 1, "stop": 1}),
        json!({"type": "ByteFallback"}),
    ];
    all.push(sequence("decoders", &all[4..]));
    all
}

fn models() -> Vec<Value> {
    let tokens = ["<unk>", "a", "b", "ab", "##b", "\u{2581}", "\u{2581}a", "<0x61>", "c</w>", "\u{120}", "\u{120}a", "1", "\u{e9}"];
    let ids: serde_json::Map<String, Value> = tokens.iter().enumerate().map(|(id, token)| (token.to_string(), json!(id))).collect();
    let scores: Vec<Value> = tokens.iter().enumerate().map(|(id, token)| json!([token, -(id as f64)])).collect();
    vec![
        json!({"type": "BPE", "vocab": ids, "merges": [["a", "b"], ["\u{2581}", "a"]], "unk_token": "<unk>", "byte_fallback": true,
            "fuse_unk": true, "ignore_merges": false, "dropout": null, "end_of_word_suffix": "</w>", "continuing_subword_prefix": ""}),
        json!({"type": "BPE", "vocab": ids, "merges": ["a ##b"], "continuing_subword_prefix": "##", "ignore_merges": true}),
        json!({"type": "WordPiece", "vocab": ids, "unk_token": "<unk>", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100}),
        json!({"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"}),
        json!({"type": "Unigram", "vocab": scores, "unk_id": 0, "byte_fallback": true}),
    ]
}

fn post_processors() -> Vec<Value> {
    let piece = |kind: &str, id: &str| json!({kind: {"id": id, "type_id": 0}});
    let template = json!({"type": "TemplateProcessing", "single": [piece("SpecialToken", "<s>"), piece("Sequence", "A")],
        "pair": [piece("Sequence", "A"), piece("Sequence", "B")],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}});
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    vec![
        sequence("processors", &[byte_level.clone(), template.clone()]),
        json!({"type": "RobertaProcessing", "sep": ["b", 2], "cls": ["a", 1], "trim_offsets": true, "add_prefix_space": true}),
        json!({"type": "BertProcessing", "sep": ["b", 2], "cls": ["a", 1]}),
        byte_level,
        template,
    ]
}

/// Small tokenizers that together have all kinds of parts.
fn small_files() -> Vec<(String, Value)> {
    let (normalizers, pre_tokenizers, decoders) = (normalizers(), pre_tokenizers(), decoders());
    let (models, post_processors) = (models(), post_processors());
    let token = |id: usize, content: &str| {
        json!({"id": id, "content": content, "single_word": id == 20, "lstrip": id != 20, "rstrip": true, "normalized": id != 21,
            "special": true})
    };
    let count = normalizers.len();
    let file = |i: usize| {
        let file = json!({"version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [token(20, "<s>"), token(21, "</s>"), token(22, "\u{e9}<x>")],
            "normalizer": normalizers[i],
            "pre_tokenizer": pre_tokenizers[i % pre_tokenizers.len()],
            "post_processor": post_processors[i % post_processors.len()],
            "decoder": decoders[i % decoders.len()],
            "model": models[i % models.len()]});
        (format!("small {i}"), file)
    };
    (0..count).map(file).collect()
}

/// Returns a random value of the file, selected level by level, so that the vocabulary is as likely
/// as any other field.
fn random_value<'a>(random: &mut Random, value: &'a mut Value) -> &'a mut Value {
    let children = value.as_array().map(Vec::len).or(value.as_object().map(serde_json::Map::len)).unwrap_or_default();
    if children == 0 || random.below(6) == 0 {
        return value;
    }
    let child = random.below(children);
    match value {
        Value::Array(list) => random_value(random, &mut list[child]),
        Value::Object(fields) => random_value(random, fields.values_mut().nth(child).unwrap()),
        _ => unreachable!("the value has no children"),
    }
}

fn new_value(random: &mut Random, others: &[(String, Value)]) -> Value {
    let numbers = [0_i64, 1, -1, 2, 255, 1 << 16, (1 << 22) - 1, 1 << 31, (1 << 32) - 1, i64::MAX];
    match random.below(8) {
        0 => Value::Null,
        1 => json!(random.below(2) == 0),
        2 | 3 => json!(random.pick(&numbers)),
        4 => json!(1e300 * random.below(3) as f64),
        5 => {
            let texts = ["", "a", " ", "\u{2581}", "\u{301}", "\u{1f600}\u{0}", "Sequence", "<s>", "(?:a|b)*", "x{1,9}"];
            Value::from(random.pick(&texts).repeat(*random.pick(&[1, 1, 2, 60, 600])))
        }
        6 => json!([random.below(9), "a"]),
        _ => {
            let mut other = random.pick(others).1.clone();
            random_value(random, &mut other).take()
        }
    }
}

fn damage(random: &mut Random, file: &mut Value, others: &[(String, Value)]) {
    let value = new_value(random, others);
    let target = random_value(random, file);
    let choice = random.below(4);
    match target {
        Value::Array(list) if choice == 1 && !list.is_empty() => drop(list.remove(random.below(list.len()))),
        Value::Array(list) if choice == 2 && !list.is_empty() => {
            let copy = random.pick(list).clone();
            list.extend(vec![copy; random.below(40)]);
        }
        Value::Object(fields) if choice == 1 && !fields.is_empty() => {
            let key = fields.keys().nth(random.below(fields.len())).unwrap().clone();
            fields.remove(&key);
        }
        Value::Object(fields) if choice == 2 && !fields.is_empty() => {
            let keys: Vec<String> = fields.keys().cloned().collect();
            let moved = fields.get(random.pick(&keys)).cloned().unwrap();
            fields.insert(random.pick(&keys).clone(), moved);
        }
        Value::String(text) if choice != 0 => {
            let at = text.char_indices().map(|(at, _)| at).nth(random.below(text.chars().count())).unwrap_or_default();
            match choice {
                1 => text.truncate(at),
                2 => text.insert(at, *random.pick(&['a', '(', '+', '\\', '[', ' ', '\u{e9}', 'A', '/'])),
                _ => drop((at < text.len()).then(|| text.remove(at))),
            }
        }
        target => *target = value,
    }
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs without messages of panics, which the library catches and which would fill pages.
fn quietly<T>(run: impl FnOnce() -> T) -> std::thread::Result<T> {
    static HOOK: std::sync::Once = std::sync::Once::new();
    HOOK.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                previous(info);
            }
        }));
    });
    QUIET.set(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    QUIET.set(false);
    result
}

const TEXT: &str =
    "Hello <s> world 12345</s> abab \u{e9}e\u{301} \u{4e2d}\u{6587}\u{ff0c}\n\n  \u{1f600}\u{2581}a-b\u{fdfa} e\u{e9}<x>'s\u{0}";

/// Loads a file and uses it. Whether each call succeeds does not matter.
fn exercise(directory: &Directory, file: &Value) -> Result<(), pagedllm::error::Error> {
    let text = directory.load(file)?;
    for special in [false, true] {
        for end in [TEXT.len(), 5, 0] {
            let Ok(tokens) = text.encode(&TEXT[..end], special) else { continue };
            let _ = text.decode(&tokens, special);
        }
    }
    for token in 0..40 {
        let _ = text.decode(&[token, 1, token, 40 - token], token % 2 == 0);
    }
    Ok(())
}

#[test]
fn damaged_tokenizer_files_never_panic_and_their_memory_is_bounded() {
    on_deep_stack(|| {
        let directory = Directory::new("damaged");
        let (whole, small) = (whole_files(), small_files());
        assert!(whole.len() > 3 && small.len() > 12);
        for (name, file) in whole.iter().chain(&small) {
            exercise(&directory, file).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        let mut random = Random(11);
        let (mut loaded, mut refused) = (0, 0);
        for round in 0..4000 {
            let (name, file) = if round % 20 == 0 { random.pick(&whole) } else { random.pick(&small) };
            let mut file = file.clone();
            for _ in 0..1 + random.below(3) {
                damage(&mut random, &mut file, &small);
            }
            let (result, peak) = peak_of(|| quietly(|| exercise(&directory, &file)));
            let description = || format!("{name}, round {round}: {}", file.to_string().chars().take(4000).collect::<String>());
            match result.unwrap_or_else(|_| panic!("a panic escaped: {}", description())) {
                Ok(()) => loaded += 1,
                Err(e) => {
                    assert_eq!(e.code(), Code::Model, "{e}");
                    assert!(e.message().contains("tokenizer.json: "), "{e}");
                    refused += 1;
                }
            }
            assert!(peak < (16 << 20) + 100 * file.to_string().len(), "{peak} bytes: {}", description());
        }
        assert!(loaded > 300 && refused > 300, "{loaded} loaded, {refused} refused");
        let (_, peak) = peak_of(|| exercise(&directory, &whole[0].1).unwrap());
        assert!(peak > whole[0].1.to_string().len(), "loading is counted: {peak} bytes");
    });
}

/// A text of four MiB: words, numbers, line breaks, and other scripts.
fn long_text() -> String {
    let part = "The quick brown fox jumps over 12345 lazy dogs. \u{4e2d}\u{6587}\u{5b57}\u{ff0c}\u{e9}\u{1f600} it's\n\n  done; ";
    part.repeat((4 << 20) / part.len())
}

/// The limits of docs/allocations.md. Measured: 6.6 and 456.
const MAX_BYTES_PER_BYTE: usize = 16;
const MAX_BYTES_PER_UNCUT_BYTE: usize = 512;

#[test]
fn a_long_text_needs_at_most_the_stated_memory_per_byte() {
    let directory = Directory::new("long");
    let long = long_text();
    for (name, file) in whole_files() {
        let text = directory.load(&file).unwrap();
        let (tokens, peak) = peak_of(|| text.encode(&long, true).unwrap());
        let max = long.len() * MAX_BYTES_PER_BYTE;
        assert!(peak < max, "{name}: {peak} bytes for {} tokens of {} bytes, limit {max}", tokens.len(), long.len());
    }
}

/// The memory for a part without a place to cut is proportional to its length.
#[test]
fn a_long_word_needs_at_most_the_stated_memory_per_byte() {
    let directory = Directory::new("word");
    for (name, file) in whole_files().into_iter().chain(small_files()) {
        let text = directory.load(&file).unwrap();
        for part in ["a", "ab", " ", "\n", "1", "\u{4e2d}", "\u{1f600}"] {
            let word = part.repeat((150 << 10) / part.len());
            let (result, peak) = peak_of(|| text.encode(&word, true).map(|tokens| tokens.len()));
            let max = word.len() * MAX_BYTES_PER_UNCUT_BYTE;
            assert!(peak < max, "{name}: {peak} bytes for {result:?} tokens of {part:?}, limit {max}");
        }
    }
}

/// A tokenizer of an unknown shape gets the whole text as one piece.
#[test]
fn the_longest_piece_needs_at_most_the_stated_memory() {
    let directory = Directory::new("piece");
    let mut file = whole_files().into_iter().find(|(name, _)| name.contains("byte_level")).unwrap().1;
    file["pre_tokenizer"] = sequence(
        "pretokenizers",
        &[
            split(r"\w+| |.", "Isolated"),
            json!({"type": "ByteLevel",
        "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
        ],
    );
    let text = directory.load(&file).unwrap();
    let longest: String = long_text().chars().filter(char::is_ascii).take(1 << 20).collect();
    let (tokens, peak) = peak_of(|| text.encode(&longest, false).unwrap());
    assert!(tokens.len() > 1000 && peak < longest.len() * MAX_BYTES_PER_UNCUT_BYTE, "{peak} bytes for {} tokens", tokens.len());
    let error = text.encode(&(longest + "x"), false).unwrap_err();
    assert!(error.message().contains("(1048577 bytes, limit 1048576)"), "{error}");
}

/// The crate drops a Unigram model by a recursion whose depth is the length of the longest token.
#[test]
fn the_longest_unigram_token_fits_on_a_small_stack() {
    let directory = Directory::new("deep");
    let unigram = |length: usize| json!({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["x".repeat(length), -1.0]], "unk_id": 0}});
    let load = || {
        assert_eq!(directory.load(&unigram(512)).unwrap().encode(&"x".repeat(512), false).unwrap(), [1]);
        let error = directory.load(&unigram(513)).unwrap_err();
        assert!(error.message().contains("model.vocab[1][0]: too long (513 bytes, limit 512)"), "{error}");
    };
    std::thread::scope(|scope| std::thread::Builder::new().stack_size(512 << 10).spawn_scoped(scope, load).unwrap().join().unwrap());
}

/// Applies the longest chain of replacements that the check accepts to the longest text that its
/// factor allows.
#[test]
fn the_greatest_expansion_is_bounded() {
    let directory = Directory::new("expansion");
    let replace = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"});
    let model = json!({"type": "BPE", "vocab": {"a": 0}, "merges": []});
    let file = json!({"normalizer": sequence("normalizers", &vec![replace; 5]), "pre_tokenizer": split("b", "Isolated"), "model": model});
    let text = directory.load(&file).unwrap();
    let (tokens, peak) = peak_of(|| text.encode(&"a".repeat(2048), false).unwrap());
    assert_eq!(tokens.len(), 2 << 20);
    assert!(peak < 400 << 20, "{peak} bytes");
    assert_eq!(text.encode(&"a".repeat(2049), false).unwrap_err().code(), Code::InvalidArgument);
}
