use super::*;
use serde_json::json;

fn bpe() -> Json {
    json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []})
}

fn refused(file: &Json) -> String {
    let checked = check(file).and_then(|_| check_model(&file["model"]).and_then(|_| bpe_merges(&file["model"])).map(drop));
    checked.expect_err(&file.to_string())
}

/// Each field of a part is refused by its name, with the value and the limit.
#[test]
fn an_error_names_the_refused_part_with_its_value_and_limit() {
    let long = "x".repeat(65);
    let nested = |inner: Json| json!({"type": "Sequence", "normalizers": [inner]});
    let deep = (0..5).fold(json!({"type": "NFC"}), |inner, _| nested(inner));
    let cases = [
        ("normalizer", json!({"type": "Prepend", "prepend": long}), "normalizer.prepend: too long (65 bytes, limit 64)"),
        ("normalizer", nested(json!({"type": "Foo"})), "normalizer.normalizers[0].type: unknown (\"Foo\")"),
        ("normalizer", json!({"normalizers": []}), "normalizer.type: missing"),
        ("normalizer", deep, "sequences nest too deep (more than 4)"),
        ("normalizer", json!({"type": "Replace", "pattern": {"String": ""}, "content": "b"}), "matches between all characters"),
        ("normalizer", json!({"type": "BertNormalizer", "normalizers": []}), "normalizer.clean_text: neither true nor false"),
        ("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAA="}), "too short (2 bytes, at least 4)"),
        ("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "!"}), "not base64"),
        ("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "////fw=="}), "declares a trie of the wrong size"),
        ("pre_tokenizer", json!({"type": "FixedLength", "length": 0}), "pre_tokenizer.length: out of range (0, 1 to 1048576)"),
        ("decoder", json!({"type": "Strip", "content": " ", "start": 0, "stop": 1 << 20}), "decoder.stop: out of range (1048576"),
        (
            "decoder",
            json!({"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}),
            "decoder.pattern: a regular expression in a decoder",
        ),
        ("decoder", json!({"type": "WordPiece", "prefix": long, "cleanup": true}), "decoder.prefix: too long"),
        ("post_processor", json!({"type": "BertProcessing", "sep": ["x", -1], "cls": ["y", 1]}), "post_processor.sep[1]: not an id"),
        ("post_processor", json!({"type": "Foo"}), "post_processor.type: unknown"),
    ];
    for (section, part, problem) in cases {
        let message = refused(&json!({section: part, "model": bpe()}));
        assert!(message.contains(problem) && message.contains("; "), "{message:?} does not contain {problem:?}");
    }
}

#[test]
fn a_chain_that_makes_a_text_too_long_is_refused() {
    let replace = |content: &str| json!({"type": "Replace", "pattern": {"String": "a"}, "content": content});
    let sequence = |parts: Vec<Json>| json!({"normalizer": {"type": "Sequence", "normalizers": parts}, "model": bpe()});
    assert_eq!(check(&sequence(vec![replace("aaaa"); 5])), Ok(Checked { expansion: 1024 }));
    let message = refused(&sequence(vec![replace("aaaa"); 6]));
    assert!(message.contains("too many times longer (4096 times, limit 1024)"), "{message}");
    let doubled = vec![json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}); 11];
    let message = refused(&json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": doubled}, "model": bpe()}));
    assert!(message.contains("(2048 times, limit 1024)"), "{message}");
    let message = refused(&sequence(vec![json!({"type": "NFC"}); 33]));
    assert!(message.contains("too many parts (more than 32)"), "{message}");
}

#[test]
fn a_template_uses_only_its_own_tokens_and_sequences() {
    let template = |single: Json| {
        json!({"post_processor": {"type": "TemplateProcessing", "single": single, "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}, "model": bpe()})
    };
    let token = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    assert!(check(&template(json!([token("<s>"), sequence("A")]))).is_ok());
    let cases = [
        (json!([token("</s>")]), "single[0].SpecialToken.id: not among special_tokens (\"</s>\")"),
        (json!([sequence("B")]), "single[0].Sequence.id: unknown or repeated sequence"),
        (json!([sequence("A"), sequence("A")]), "single[1].Sequence.id"),
        (Json::from(vec![token("<s>"); 65]), "single: too many pieces (65, limit 64)"),
    ];
    for (single, problem) in cases {
        let message = refused(&template(single));
        assert!(message.contains(problem), "{message:?} does not contain {problem:?}");
    }
}

#[test]
fn an_error_names_the_refused_model_with_its_value_and_limit() {
    let word_piece = |chars: u64| json!({"type": "WordPiece", "vocab": {}, "unk_token": "", "continuing_subword_prefix": "", "max_input_chars_per_word": chars});
    let cases = [
        (json!({"type": "BPE", "vocab": {"a": 4_000_000_000_u64}, "merges": []}), "id too large (4000000000, limit 4194303)"),
        (json!({"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}), "model.vocab[\"b\"]: another token has the same id (0)"),
        (json!({"type": "BPE", "vocab": {"a": -1}, "merges": []}), "model.vocab[\"a\"]: not an id"),
        (json!({"type": "BPE", "vocab": {"x".repeat(16_385): 0}, "merges": []}), "token too long (16385 bytes, limit 16384)"),
        (json!({"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.1}), "model.dropout: tokens would be random (0.1)"),
        (json!({"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}), "model.merges[0]: not in the vocabulary (\"b\")"),
        (json!({"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]}), "model.merges[0]: not in the vocabulary (\"aa\")"),
        (json!({"type": "BPE", "vocab": {"a": 0}, "merges": ["a a a"]}), "model.merges[0]: not a pair of tokens"),
        (
            json!({"type": "BPE", "vocab": {"a": 0, "é": 1}, "merges": [["a", "é"]], "continuing_subword_prefix": "#"}),
            "model.merges[0]: the second token does not begin with continuing_subword_prefix",
        ),
        (word_piece(257), "model.max_input_chars_per_word: out of range (257, 0 to 256)"),
        (json!({"type": "Unigram", "vocab": [["x".repeat(513), 0.0]]}), "model.vocab[0][0]: too long (513 bytes, limit 512)"),
        (json!({"type": "Unigram", "vocab": [["a", null]]}), "model.vocab[0][1]: not a score (null)"),
        (json!({"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 1}), "model.unk_id: not in the vocabulary (1, 1 tokens)"),
        (json!({"type": "Foo"}), "model.type: unknown (\"Foo\")"),
        (json!(3), "model.type: unknown (null)"),
    ];
    for (model, problem) in cases {
        let message = refused(&json!({"model": model}));
        assert!(message.contains(problem) && message.contains("; "), "{message:?} does not contain {problem:?}");
    }
}

#[test]
fn added_tokens_are_bounded() {
    let token = |content: &str| json!({"id": 2, "content": content, "lstrip": true, "normalized": true});
    let cases = [
        (json!([{"id": 1_u64 << 40, "content": "x"}]), "added_tokens[0].id: id too large"),
        (json!([token(" \n")]), "added_tokens[0]: a token of white space strips white space"),
        (json!([token(&"x".repeat(16_385))]), "added_tokens[0].content: too long (16385 bytes, limit 16384)"),
        (json!({}), "added_tokens: not a list"),
        (Json::from(vec![token(&"x".repeat(16_000)); 30]), "too long together (5280000 bytes"),
    ];
    for (tokens, problem) in cases {
        let message = refused(&json!({"added_tokens": tokens, "normalizer": {"type": "NFKC"}, "model": bpe()}));
        assert!(message.contains(problem), "{message:?} does not contain {problem:?}");
    }
}

#[test]
fn a_pattern_is_a_text_or_a_bounded_expression() {
    let checked = |pattern: Json| pattern::check(&pattern, "f");
    assert!(checked(json!({"String": "("})).is_ok());
    assert!(checked(json!({"Regex": "a+"})).is_ok());
    let message = checked(json!({"Regex": "("})).unwrap_err();
    assert!(message.starts_with("f.Regex: not a regular expression (") && message.ends_with("; write a simpler pattern"), "{message}");
    assert!(checked(json!({"String": "x".repeat(4097)})).unwrap_err().contains("f.String: too long (4097 bytes, limit 4096)"));
    assert!(checked(json!({"Other": "a"})).unwrap_err().contains("f.Regex: missing"));
    for pattern in [json!({}), json!("a"), json!({"String": "a", "Regex": "b"})] {
        let part = json!({"type": "Replace", "pattern": pattern, "content": "b"});
        for section in ["normalizer", "decoder"] {
            let message = refused(&json!({section: part, "model": bpe()}));
            assert!(message.contains(".pattern: "), "{message}");
        }
        assert!(checked(pattern).unwrap_err().contains("f: not an object with one member"));
    }
}

#[test]
fn json_that_nests_deep_or_has_too_many_values_is_refused_before_it_is_parsed() {
    assert!(check_bytes("[".repeat(33).as_bytes()).unwrap_err().contains("nests too deep (more than 32 levels)"));
    assert!(check_bytes("[".repeat(32).as_bytes()).is_ok());
    let quoted = format!(r#"["{}", "\"{}"]"#, "[".repeat(40), "[".repeat(40));
    assert!(check_bytes(quoted.as_bytes()).is_ok());
    assert!(check_bytes(&vec![b','; MAX_VALUES]).unwrap_err().contains("too many values (8388609, limit 8388608)"));
    for broken in ["\"", "\"\\", "\\", ""] {
        assert!(check_bytes(broken.as_bytes()).is_ok(), "{broken}");
    }
}

/// A double array of one key, `a`, whose replacement is `xy`.
fn charsmap_of_one_key() -> (Vec<u32>, &'static [u8]) {
    let mut units = vec![0_u32; 512];
    units[0] = 256 << 10;
    units[256 ^ 97] = 97 | 1 << 8 | (97 << 10);
    units[256] = 1 << 31;
    (units, b"xy\0")
}

fn encoded(units: &[u32], texts: &[u8]) -> String {
    let mut bytes = (units.len() as u32 * 4).to_le_bytes().to_vec();
    bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
    bytes.extend(texts);
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |chunk: &[u8]| {
        let bits = chunk.iter().fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
        let digit = |i: usize| if i <= chunk.len() { digits[(bits >> (18 - 6 * i)) as usize & 63] as char } else { '=' };
        (0..4).map(digit).collect::<String>()
    };
    bytes.chunks(3).map(group).collect()
}

#[test]
fn a_charsmap_with_indices_outside_its_trie_is_refused() {
    let (units, texts) = charsmap_of_one_key();
    assert_eq!(charsmap::check(&encoded(&units, texts), "f"), Ok(2));
    let damaged = |change: &dyn Fn(&mut Vec<u32>)| {
        let mut units = units.clone();
        change(&mut units);
        charsmap::check(&encoded(&units, texts), "f").unwrap_err()
    };
    assert!(damaged(&|units| units[0] = 1 << 20).contains("a node of the trie is outside of it (1024, 512 units)"));
    assert!(damaged(&|units| units[256] = 4).contains("a leaf of the trie points outside of the replacements (Some(4), 3 bytes)"));
    assert!(damaged(&|units| units.truncate(300)).contains("an edge of the trie leads outside of it"));
    let cyclic = damaged(&|units| units[256 ^ 97] = 97 | 97 << 10 | 1 << 8 | 1 << 30);
    assert!(cyclic.contains("outside"), "{cyclic}");
}
