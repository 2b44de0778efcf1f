use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value as Json, json};

use crate::generation::grammar::tests::{byte_grammars, writes};
use crate::generation::grammar::{Constraint, Grammars};
use crate::generation::sampler::{Lane, uniform};
use crate::sys::cpu_time;
use crate::types::options::Grammar;

fn goldens() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/patterns")
}

/// Returns true if the grammar of the pattern contains the text. For ECMA-262, the text is the
/// value of a JSON string.
fn accepts(constraint: &Constraint, language: &str, text: &str) -> bool {
    let written = if language == "ecma" { json!(text).to_string() } else { text.to_string() };
    // llguidance writes this one as an escape.
    writes(constraint, &written.replace('\u{7f}', if language == "ecma" { "\\u007f" } else { "\u{7f}" }))
}

fn compile(grammars: &Grammars, language: &str, pattern: &str) -> crate::error::Result<Constraint> {
    grammars.compile(&match language {
        "ecma" => Grammar::JsonSchema(json!({"type": "string", "pattern": pattern}).to_string()),
        _ => Grammar::Regex(pattern.into()),
    })
}

/// The constructs that the languages have and this library refuses.
const UNSUPPORTED: [&str; 10] = [
    "a lookahead",
    "a lookbehind",
    "a backreference",
    "a word boundary",
    "an atomic group",
    "a possessive quantifier",
    "a condition",
    "a character by its name",
    "an anchor of lines",
    "in a pattern that is invalid in Unicode mode",
];

/// Returns the difference between the library and a golden.
fn difference(grammars: &Grammars, language: &str, case: &Json) -> Option<String> {
    let pattern = case["pattern"].as_str().unwrap();
    let texts = |key: &str| case[key].as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_string()).collect::<Vec<_>>();
    // Texts that the workaround in `to_json_regex` affects.
    let is_nul_in_json = |text: &str| language == "ecma" && text.contains('\0');
    let constraint = match compile(grammars, language, pattern) {
        Ok(constraint) => constraint,
        Err(error) => {
            let error = error.message();
            let is_unsupported = UNSUPPORTED.iter().any(|what| error.contains(what)) || error.contains("in other languages");
            let has_no_text = error.contains("allows no text") || error.contains("Regex is empty");
            let is_expected = !case["valid"].as_bool().unwrap()
                || is_unsupported
                || (has_no_text && texts("yes").iter().all(|text| is_nul_in_json(text)));
            return (!is_expected).then(|| format!("{language} /{pattern}/: {error}"));
        }
    };
    // ECMA-262 has modifiers since 2025, but node 20 does not support them.
    let is_newer = language == "ecma" && (pattern.contains("(?i:") || pattern.contains("(?s:"));
    if !case["valid"].as_bool().unwrap() && !is_newer {
        return Some(format!("{language} /{pattern}/ is invalid and compiles"));
    }
    let missing = texts("yes").into_iter().find(|text| !is_nul_in_json(text) && !accepts(&constraint, language, text));
    if let Some(text) = missing {
        return Some(format!("{language} /{pattern}/ matches {text:?}, which is not allowed"));
    }
    let extra = texts("no").into_iter().find(|text| accepts(&constraint, language, text));
    extra.map(|text| format!("{language} /{pattern}/ does not match {text:?}, which is allowed"))
}

fn differences(language: &str, cases: &Json) -> Vec<String> {
    let grammars = byte_grammars();
    cases.as_array().unwrap().iter().filter_map(|case| difference(&grammars, language, case)).collect()
}

#[test]
fn patterns_match_the_texts_of_their_language() {
    for (language, at_least) in [("python", 300), ("ecma", 300)] {
        let cases: Json = serde_json::from_slice(&std::fs::read(goldens().join(format!("{language}.json"))).unwrap()).unwrap();
        assert!(cases.as_array().unwrap().len() > at_least);
        let wrong = differences(language, &cases);
        assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
    }
}

#[test]
fn random_patterns_match_as_in_python_and_node() {
    let script = goldens().join("patterns.py");
    let count = std::env::var("PLLM_RANDOM_PATTERNS").unwrap_or_else(|_| "100".into());
    let answer = match Command::new("python3").arg(script).args(["random", &count]).output() {
        Ok(answer) if answer.status.success() => answer.stdout,
        Ok(answer) => return println!("skipped: {}", String::from_utf8_lossy(&answer.stderr).lines().last().unwrap_or("python3 failed")),
        Err(error) => return println!("skipped: python3 cannot be run: {error}"),
    };
    let cases: Json = serde_json::from_slice(&answer).unwrap();
    let wrong: Vec<String> = ["python", "ecma"].iter().flat_map(|language| differences(language, &cases[language])).collect();
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn random_characters_compile_or_are_refused_in_bounded_time() {
    let grammars = byte_grammars();
    let parts = [
        "(", ")", "[", "]", "{", "}", "^", "$", "*", "+", "?", "|", "\\", "-", ".", "a", "b", "z", "0", "1", ",", ":", "<", ">", "=", "!",
        "i", "x", "P", "#", "\n", " ", "é", "😀", "\\d", "\\W", "\\p{L}", "\\u{1}", "\\1", "(?:", "(?i:", "(?P<n>", "[^", "{2,3}",
        "{9999}", "\0", "&&", "~", "k",
    ];
    let (mut compiled, mut refused) = (0, 0);
    for seed in 0..3000u64 {
        let random = |i: u64, n: usize| (uniform(seed, i, Lane::Token) * n as f64) as usize;
        let length = 1 + random(0, 25);
        let pattern: String = (0..length as u64).map(|i| parts[random(i + 1, parts.len())]).collect();
        let language = ["ecma", "python"][random(1000, 2)];
        match compile(&grammars, language, &pattern) {
            Ok(_) => compiled += 1,
            Err(error) => {
                assert!(error.message().len() < 1000 && !error.message().contains("defect"), "{error}");
                refused += 1;
            }
        }
    }
    assert!(compiled > 200 && refused > 200, "{compiled} compiled, {refused} refused");
}

#[test]
fn patterns_with_large_expansions_are_translated_or_refused_quickly() {
    let grammars = byte_grammars();
    let nested = |depth: usize, inner: &str, repeat: &str| format!("{}{inner}{}", "(".repeat(depth), format!("){repeat}").repeat(depth));
    let patterns = [
        nested(10_000, "a", ""),
        nested(50, "a|", "*"),
        nested(55, "^a$|b", "{0,3}"),
        nested(55, "^a|b$|^$|c", "+"),
        "(^a|b$)".repeat(5_000),
        "^".repeat(100_000),
        "$|".repeat(50_000),
        "$".repeat(250_000),
        "(?:^|a)".repeat(37_000),
        "(?:a|$)".repeat(37_000),
        "[".repeat(100_000),
        "\\w".repeat(10_000),
        "(?i:\\w)".repeat(5_000),
        "a{1000000000}".repeat(100),
        "a{99999999999999999999}".into(),
        "(".repeat(100_000),
        "a".repeat(200_000),
        "[a-\u{10ffff}]".repeat(2_000),
    ];
    // A grammar is compiled on the calling thread if its stack is large enough.
    let compile_all = || {
        for (pattern, language) in patterns.iter().flat_map(|pattern| ["ecma", "python"].map(|language| (pattern, language))) {
            let start = cpu_time::of_thread();
            let _ = compile(&grammars, language, pattern);
            let used = cpu_time::of_thread() - start;
            assert!(used < Duration::from_secs(20), "{language} {} took {used:?}", &pattern[..10]);
        }
    };
    std::thread::scope(|scope| {
        let deep = std::thread::Builder::new().stack_size(256 << 20).spawn_scoped(scope, compile_all).unwrap();
        deep.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}
