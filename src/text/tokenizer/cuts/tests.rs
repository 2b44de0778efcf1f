use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::super::super::tests::{fresh_dir, golden_dir};
use super::super::Tokenizer;
use super::*;
use crate::sys::random::Random;

/// The parts of random texts: scripts, white space, digits, marks, and the beginnings of
/// contractions, prefixes and numbers.
const PARTS: &[&str] = &[
    "a",
    "b",
    "the",
    " the",
    "Hello",
    " world",
    "I'm",
    "we'll",
    "'s",
    "'",
    "’s",
    "_x",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    " \n",
    "\r\n",
    "\t",
    "1",
    "12",
    "3456",
    " 7",
    ".",
    ",",
    "!",
    "...",
    " -",
    "--",
    "/",
    "\n/",
    "(",
    ")",
    "{\"k\":",
    "é",
    "e\u{301}",
    "\u{301}",
    "\u{308}",
    "中",
    "文",
    "中文字",
    "，",
    "。",
    "か",
    "カ",
    "・",
    "한",
    "я",
    "мир",
    " мир",
    "ﷺ",
    "\u{a0}",
    "\u{3000}",
    "\u{2028}",
    "😀",
    "👩‍💻",
    "\u{200d}",
    "\u{2581}",
    "\u{2581}a",
    "\u{0}",
    "\u{7f}",
    "²",
    "¼",
    "A",
    "ABc",
    "İ",
    "ß",
    "<",
    "<s",
    "<s>",
    "</s>",
    " <s>",
    "<|",
    "|>",
    "Ġ",
    "x",
    "xy",
    "xx y",
    "ab",
    "abab",
    "a b",
    "z z",
    "ﬁ",
    "ʰ",
    "ा",
    "क्ष",
    "ไทย",
    "عربي",
];

fn random_text(random: &mut Random, tokens: &[String]) -> String {
    let length = 1 + random.below(120);
    let mut text = String::new();
    for _ in 0..length {
        match random.below(12) {
            0 if !tokens.is_empty() => text.push_str(&tokens[random.below(tokens.len())]),
            1 if !tokens.is_empty() => {
                let token = &tokens[random.below(tokens.len())];
                text.extend(token.chars().take(1 + random.below(token.chars().count())));
            }
            _ => text.push_str(PARTS[random.below(PARTS.len())]),
        }
    }
    text
}

fn whole(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
    tokenizer.inner.encode_fast(text, special).unwrap().get_ids().to_vec()
}

fn added_tokens(tokenizer: &Tokenizer) -> Vec<String> {
    tokenizer.inner.get_added_vocabulary().get_added_tokens_decoder().values().map(|token| token.content.clone()).take(40).collect()
}

/// Compares the tokens of pieces with those of the whole text. Returns the number of cuts.
fn assert_equal_to_the_whole(name: &str, tokenizer: &Tokenizer, rounds: usize) -> usize {
    let (mut random, mut cuts) = (Random(rounds as u64), 0);
    let added = added_tokens(tokenizer);
    for _ in 0..rounds {
        let text = random_text(&mut random, &added);
        let piece = 1 + random.below(64);
        let special = random.below(2) == 0;
        let pieces = tokenizer.encode_pieces(&text, special, piece).unwrap();
        assert_eq!(pieces, whole(tokenizer, &text, special), "{name}: pieces of {piece} bytes of {text:?}");
        let mut start = 0;
        while start < text.len() {
            start = tokenizer.cuts.next(&text, start, piece).unwrap().1;
            cuts += usize::from(start < text.len());
        }
    }
    cuts
}

fn load(name: &str, file: &Json) -> Tokenizer {
    let path = fresh_dir(&format!("cuts-{name}")).join("tokenizer.json");
    fs::write(&path, file.to_string()).unwrap();
    Tokenizer::load(&path).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn golden_files() -> Vec<PathBuf> {
    let mut files = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/model/tokenizer.json")];
    for entry in fs::read_dir(golden_dir()).unwrap() {
        files.push(entry.unwrap().path().join("tokenizer.json"));
    }
    files.retain(|file| file.exists());
    files.sort();
    files
}

#[test]
fn pieces_of_a_text_have_the_tokens_of_the_whole_text() {
    let files = golden_files();
    assert!(files.len() > 3);
    for file in files {
        let tokenizer = Tokenizer::load(&file).unwrap();
        let cuts = assert_equal_to_the_whole(&file.display().to_string(), &tokenizer, 3000);
        assert!(cuts > 1000, "{}: only {cuts} cuts", file.display());
    }
}

/// A vocabulary with all bytes of GPT-2's alphabet and merges across many kinds of characters.
fn byte_level_model() -> Json {
    let golden: Json = serde_json::from_slice(&fs::read(golden_dir().join("byte_level/tokenizer.json")).unwrap()).unwrap();
    golden["model"].clone()
}

fn symbols_model() -> Json {
    let golden: Json = serde_json::from_slice(&fs::read(golden_dir().join("llama2/tokenizer.json")).unwrap()).unwrap();
    golden["model"].clone()
}

/// Tokens that strip, that match whole words only, that are normalized, and that contain spaces and
/// line breaks. Those that begin with a space can prevent all cuts before spaces.
fn difficult_tokens(with_spaces_first: bool) -> Json {
    let token = |i: usize, content: &str, flags: &str| {
        json!({"id": 2000 + i, "content": content, "lstrip": flags.contains('l'), "rstrip": flags.contains('r'),
            "single_word": flags.contains('w'), "normalized": flags.contains('n'), "special": flags.contains('s')})
    };
    let mut tokens = vec![
        token(0, "<s>", "s"),
        token(1, "</s>", "sr"),
        token(2, "<|l|>", "l"),
        token(3, "<|lr|>", "lrn"),
        token(4, "a b", ""),
        token(5, "xy", "w"),
        token(6, "z z", "n"),
        token(7, "!\n", ""),
        token(8, ",x", "w"),
        token(9, "中，", ""),
        token(10, "the\n", "n"),
        token(11, "é<x>", "n"),
        token(12, "\n\n", ""),
        token(15, "é b", "n"),
        token(16, "x≠", "n"),
        token(17, "か\u{3099}", "nr"),
    ];
    if with_spaces_first {
        tokens.extend([token(13, " <s>", ""), token(14, " мир", "wn")]);
    }
    tokens.into()
}

fn split(regex: &str) -> Json {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}

fn sequence(parts: &[Json]) -> Json {
    json!({"type": "Sequence", "pretokenizers": parts})
}

fn pre_tokenizers() -> Vec<(String, Json)> {
    let byte_level =
        |prefix: bool, regex: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex});
    let mut all: Vec<(String, Json)> = Vec::new();
    for (i, regex) in WORDS.iter().enumerate() {
        for prefix in [false, true] {
            all.push((format!("words-{i}-{prefix}"), sequence(&[split(regex), byte_level(prefix, false)])));
        }
    }
    let runs = |regex: &str| sequence(&[split(RUNS[0]), split(RUNS[4]), split(regex), byte_level(false, false)]);
    all.push(("deepseek".into(), runs(WORDS[5])));
    all.push(("gpt2".into(), byte_level(false, true)));
    all.push(("gpt2-prefix".into(), byte_level(true, true)));
    let digits = |individual: bool| json!({"type": "Digits", "individual_digits": individual});
    all.push(("digits".into(), sequence(&[digits(true), byte_level(false, true)])));
    all.push(("digits-prefix".into(), sequence(&[digits(false), byte_level(true, true)])));
    for behavior in ["Isolated", "Contiguous", "Removed"] {
        let punctuation = json!({"type": "Punctuation", "behavior": behavior});
        let parts = [punctuation, byte_level(false, true), digits(false), split("[0-9][0-9][0-9]")];
        all.push((format!("falcon-{behavior}"), sequence(&parts)));
    }
    all
}

/// With both sets of difficult tokens.
fn assert_equal(name: &str, normalizer: &Json, pre_tokenizer: &Json, model: &Json, rounds: usize) {
    for with_spaces_first in [false, true] {
        let file = json!({"added_tokens": difficult_tokens(with_spaces_first), "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer, "model": model});
        let cuts = assert_equal_to_the_whole(name, &load(name, &file), rounds);
        assert!(with_spaces_first || cuts > rounds / 4, "{name}: only {cuts} cuts in {rounds} texts");
    }
}

#[test]
fn cuts_are_proven_for_each_known_split_with_difficult_added_tokens() {
    for (name, pre_tokenizer) in pre_tokenizers() {
        for normalizer in [Json::Null, json!({"type": "NFC"})] {
            assert_equal(&name, &normalizer, &pre_tokenizer, &byte_level_model(), 300);
        }
    }
}

#[test]
fn cuts_are_proven_for_words_of_other_models() {
    let tokens = ["<unk>", "a", "b", "the", "##e", "##b", "\u{2581}", "\u{2581}a", "\u{2581}the", "x", "##x", "1", ".", "中", "o", "l"];
    let ids: serde_json::Map<String, Json> = tokens.iter().enumerate().map(|(id, token)| (token.to_string(), json!(id))).collect();
    let scores: Vec<Json> = tokens.iter().enumerate().map(|(id, token)| json!([token, -(id as f64)])).collect();
    let word_piece = json!({"type": "WordPiece", "vocab": ids, "unk_token": "<unk>", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100});
    let word_level = json!({"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"});
    let unigram = json!({"type": "Unigram", "vocab": scores, "unk_id": 0});
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": true});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let cases = [
        (Json::Null, json!({"type": "BertPreTokenizer"}), word_piece.clone()),
        (json!({"type": "NFC"}), json!({"type": "Whitespace"}), word_level.clone()),
        (Json::Null, json!({"type": "WhitespaceSplit"}), word_level),
        (Json::Null, metaspace("always"), unigram.clone()),
        (json!({"type": "NFC"}), metaspace("first"), unigram.clone()),
        (replace.clone(), metaspace("first"), unigram.clone()),
        (Json::Null, metaspace("never"), unigram),
        (replace, metaspace("always"), symbols_model()),
    ];
    for (i, (normalizer, pre_tokenizer, model)) in cases.into_iter().enumerate() {
        assert_equal(&format!("other-{i}"), &normalizer, &pre_tokenizer, &model, 1000);
    }
}

#[test]
fn cuts_within_one_word_are_proven_by_the_vocabulary() {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let prepend = json!({"type": "Prepend", "prepend": "\u{2581}"});
    let sequence = |parts: &[&Json]| json!({"type": "Sequence", "normalizers": parts});
    let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false});
    let mut joining = symbols_model();
    let next = joining["vocab"].as_object().unwrap().len() + 5;
    for (i, (a, b)) in [("e", "\u{2581}"), ("e\u{2581}", "t"), ("o", "\n"), ("\u{2581}", "\u{2581}")].into_iter().enumerate() {
        joining["vocab"]["\n"] = json!(next + 20);
        joining["vocab"][format!("{a}{b}")] = json!(next + i);
        joining["merges"].as_array_mut().unwrap().push(json!([a, b]));
    }
    let cases = [
        (sequence(&[&prepend, &replace]), Json::Null, symbols_model()),
        (sequence(&[&replace, &prepend]), Json::Null, joining.clone()),
        (Json::Null, metaspace("first"), symbols_model()),
        (Json::Null, metaspace("always"), joining.clone()),
        (Json::Null, metaspace("never"), joining.clone()),
        (replace.clone(), split, joining.clone()),
        (replace, Json::Null, joining),
    ];
    for (i, (normalizer, pre_tokenizer, model)) in cases.into_iter().enumerate() {
        assert_equal(&format!("symbols-{i}"), &normalizer, &pre_tokenizer, &model, 1000);
    }
}

#[test]
fn unknown_shapes_are_not_cut() {
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let cases = [
        (json!({"type": "NFKC"}), byte_level.clone()),
        (json!({"type": "Prepend", "prepend": "\u{2581}"}), Json::Null),
        (json!({"type": "Lowercase"}), Json::Null),
        (Json::Null, split(r"\w+(?<=x)|.")),
        (Json::Null, json!({"type": "FixedLength", "length": 3})),
        (Json::Null, sequence(&[json!({"type": "UnicodeScripts"}), byte_level])),
    ];
    for (normalizer, pre_tokenizer) in cases {
        let file = json!({"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": byte_level_model()});
        let cuts = Cuts::new(&file, 1).unwrap();
        assert_eq!(cuts.next("one two three\nfour, five", 0, 1), Ok((24, 24)), "{file}");
    }
}

#[test]
fn a_long_stretch_without_a_place_to_cut_is_an_error_with_its_length() {
    let tokenizer = load("stretch", &json!({"pre_tokenizer": split("x"), "model": byte_level_model()}));
    let text = "a b ".repeat(tokenizer.cuts.max_stretch / 4 + 1);
    let error = tokenizer.encode(&text, false).unwrap_err();
    let expected = format!("({} bytes, limit {})", text.len(), tokenizer.cuts.max_stretch);
    assert!(error.message().contains(&expected), "{error}");
}

/// Tokens are matched in the normalized text, in which the characters at the cut differ.
#[test]
fn composed_characters_at_a_cut_belong_to_added_tokens() {
    let gpt2 = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let file = json!({"added_tokens": difficult_tokens(false), "normalizer": {"type": "NFC"}, "pre_tokenizer": gpt2,
        "model": byte_level_model()});
    let tokenizer = load("composed", &file);
    for text in ["one e\u{301} b two", "one x=\u{338} two", "one か\u{3099} two", "one é b two", "one x≠ two"] {
        for piece in 1..text.len() {
            assert_eq!(tokenizer.encode_pieces(text, false, piece).unwrap(), whole(&tokenizer, text, false), "{piece} {text:?}");
        }
    }
}
