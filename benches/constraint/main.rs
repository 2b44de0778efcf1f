//! Cost of a grammar: compilation, a mask of 32,000 tokens, a fork, and a rewind.
//!
//! The vocabulary is a byte-level BPE that is trained on the text and code of this repository.
//! Pairs of its words fill the rest of the vocabulary. Tokens are drawn uniformly from each mask,
//! which visits more grammar states than the output of a model.

mod tokenizer;

use std::time::{Duration, Instant};

use pagedllm::generation::grammar::{Constraint, Grammars, Vocabulary};
use pagedllm::generation::sampler::{Lane, uniform};
use pagedllm::text::Text;
use pagedllm::types::options::Grammar;

const TOKENS: usize = 32_000;
const WALKS: u64 = 20;
const MAX_LEN: usize = 200;

/// Trains a tokenizer and reads its vocabulary like that of a model.
fn vocabulary() -> Vocabulary {
    let dir = std::env::temp_dir().join(format!("pagedllm-bench-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let bytes = tokenizer::train(&dir, TOKENS - 1);
    let text = Text::load(&dir).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let start = Instant::now();
    let trained = text.vocab_size().min(TOKENS - 1);
    let mut tokens = text.token_bytes(trained).unwrap().bytes;
    let read = start.elapsed();
    let words: Vec<Vec<u8>> = tokens.iter().filter(|bytes| bytes.len() > 3).cloned().collect();
    let pair = |i: usize| [words[i * 7919 % words.len()].clone(), words[i * 104_729 % words.len()].clone()].concat();
    tokens.extend((trained..TOKENS - 1).map(pair));
    tokens.push(b"</s>".to_vec());
    println!("{TOKENS} tokens: {trained} trained on {} KB; reading their bytes took {read:.1?}", bytes / 1000);
    Vocabulary { special: (0..TOKENS).map(|token| token == TOKENS - 1).collect(), tokens, eos: vec![TOKENS as u32 - 1] }
}

fn grammars() -> Vec<(&'static str, Grammar)> {
    let schema = |text: &str| Grammar::JsonSchema(text.into());
    let person = r#"{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "email": {"type": "string",
        "format": "email"}, "tags": {"type": "array", "items": {"type": "string"}}}, "required": ["name", "age", "email", "tags"],
        "additionalProperties": false}"#;
    let tree = r##"{"$defs": {"node": {"type": "object", "properties": {"label": {"type": "string", "maxLength": 20}, "kind": {"enum":
        ["leaf", "branch", "root"]}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 4}}, "required":
        ["label", "kind", "children"], "additionalProperties": false}}, "$ref": "#/$defs/node"}"##;
    let calls = r#"{"anyOf": [
        {"type": "object", "properties": {"tool": {"const": "search"}, "query": {"type": "string", "minLength": 3, "maxLength": 80},
            "limit": {"type": "integer", "minimum": 1, "maximum": 50}}, "required": ["tool", "query"], "additionalProperties": false},
        {"type": "object", "properties": {"tool": {"const": "send"}, "to": {"type": "string", "pattern": "^[a-z.]+@[a-z]+\\.(com|org)$"},
            "at": {"type": "string", "format": "date-time"}, "body": {"type": "string"}}, "required": ["tool", "to", "body"],
            "additionalProperties": false}]}"#;
    let options: String = (0..40).map(|i| format!(r#""field_{i}": {{"type": ["string", "number", "null"]}},"#)).collect();
    let many = format!(r#"{{"type": "object", "properties": {{{options} "last": {{"type": "boolean"}}}}, "additionalProperties": false}}"#);
    vec![
        ("any JSON object", Grammar::JsonObject),
        ("person", schema(person)),
        ("tree ($ref, maxLength)", schema(tree)),
        ("tool calls (anyOf, pattern)", schema(calls)),
        ("41 optional properties", schema(&many)),
        ("regex: a URL", Grammar::Regex(r"https?://[a-z0-9.-]{3,40}(/[\w%-]{0,20}){0,6}(\?\w+=\w*)?".into())),
        ("choice of 200", Grammar::Choice((0..200).map(|i| format!("answer number {i}")).collect())),
        (
            "Lark: arithmetic",
            Grammar::Lark("start: e\ne: t ((\"+\" | \"-\") t)*\nt: f ((\"*\" | \"/\") f)*\nf: /[0-9]+/ | \"(\" e \")\"".into()),
        ),
    ]
}

#[derive(Default)]
struct Times {
    masks: Vec<Duration>,
    steps: Vec<Duration>,
    forks: Vec<Duration>,
    rewinds: Vec<Duration>,
}

fn timed<T>(times: &mut Vec<Duration>, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    times.push(start.elapsed());
    result
}

fn draw(mask: &[u32], number: f64) -> u32 {
    let count: u32 = mask.iter().map(|word| word.count_ones()).sum();
    let mut left = (number * count as f64) as u32;
    for (i, word) in mask.iter().enumerate() {
        if left < word.count_ones() {
            let bit = (0..32).filter(|bit| word >> bit & 1 == 1).nth(left as usize).unwrap();
            return i as u32 * 32 + bit;
        }
        left -= word.count_ones();
    }
    unreachable!("the mask is not empty")
}

fn walk(constraint: &mut Constraint, seed: u64, times: &mut Times) {
    for i in 0..MAX_LEN {
        if constraint.is_complete() {
            return;
        }
        let mask = timed(&mut times.masks, || constraint.mask().unwrap().to_vec());
        let token = draw(&mask, uniform(seed, i as u64, Lane::Token));
        timed(&mut times.steps, || constraint.advance(token).unwrap());
        if i % 10 == 9 {
            drop(timed(&mut times.forks, || constraint.fork().unwrap()));
            let mut back = constraint.fork().unwrap();
            timed(&mut times.rewinds, || back.rewind(5).unwrap());
        }
    }
}

fn at(times: &mut [Duration], share: f64) -> f64 {
    times.sort_unstable();
    times.get(((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1))).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

fn main() {
    let vocabulary = vocabulary();
    let start = Instant::now();
    let compiler = Grammars::new(vocabulary).unwrap();
    println!("Grammars::new: {:.1?}\n", start.elapsed());
    println!("Times in µs. The first request with a grammar starts with an empty lexer cache, which later requests share.\n");
    println!(
        "| grammar | compile | compile again | first: mask p50 | p99 | max | later: masks | p50 | p99 | max | advance p99 | fork p50 | p99 | rewind 5 |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for (name, grammar) in grammars() {
        let (mut cold, mut warm, mut first, mut later) = (Vec::new(), Vec::new(), Times::default(), Times::default());
        walk(&mut timed(&mut cold, || compiler.compile(&grammar).unwrap()), WALKS, &mut first);
        for seed in 0..WALKS {
            walk(&mut timed(&mut warm, || compiler.compile(&grammar).unwrap()), seed, &mut later);
        }
        let of =
            |times: &mut Vec<Duration>, shares: &[f64]| shares.iter().map(|&share| format!("{:.1}", at(times, share))).collect::<Vec<_>>();
        let cells = [
            of(&mut cold, &[0.5]),
            of(&mut warm, &[0.5]),
            of(&mut first.masks, &[0.5, 0.99, 1.0]),
            vec![later.masks.len().to_string()],
            of(&mut later.masks, &[0.5, 0.99, 1.0]),
            of(&mut later.steps, &[0.99]),
            of(&mut later.forks, &[0.5, 0.99]),
            of(&mut later.rewinds, &[0.5]),
        ];
        println!("| {name} | {} |", cells.concat().join(" | "));
    }
}
