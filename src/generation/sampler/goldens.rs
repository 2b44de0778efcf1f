//! Compares sampling with transformers and with the published definitions.
//! tests/data/sampling/make_sampling.py documents the cases.

use std::sync::Arc;

use serde_json::Value;

use super::truncate::{argmax, total, weigh};
use super::{Context, ResolvedSampling, Sample, Sampler, SamplingHistory, TokenTexts, mirostat, narrow};
use crate::types::options::{Dry, Mirostat, SamplingParams};

const CASES: &str = include_str!("../../../tests/data/sampling/cases.json");
/// Absolute for numbers up to 1, relative for larger ones.
const TOLERANCE: f32 = 1e-5;

fn number(value: &Value) -> f32 {
    value.as_f64().map_or(f32::NEG_INFINITY, |x| x as f32)
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(number).collect()
}

fn token(value: &Value) -> u32 {
    value.as_u64().unwrap() as u32
}

fn tokens(value: &Value) -> Vec<u32> {
    value.as_array().map(|tokens| tokens.iter().map(token).collect()).unwrap_or_default()
}

fn sequences(value: &Value) -> Vec<Vec<u32>> {
    value.as_array().map(|sequences| sequences.iter().map(tokens).collect()).unwrap_or_default()
}

/// Maps each token to one character, so that text breakers correspond to token breakers.
fn text(tokens: &[u32]) -> String {
    tokens.iter().filter_map(|&token| char::from_u32(token)).collect()
}

fn rules(case: &Value) -> ResolvedSampling {
    let (given, off) = (&case["params"], SamplingParams::default());
    let float = |name: &str, off: f32| if given[name].is_null() { off } else { number(&given[name]) };
    let count = |name: &str| given[name].as_u64().unwrap_or(0);
    let bias = given["logit_bias"].as_array().cloned().unwrap_or_default();
    let dry = given["dry"].as_object().map(|dry| Dry {
        multiplier: number(&dry["multiplier"]),
        base: number(&dry["base"]),
        allowed_length: token(&dry["allowed_length"]),
        penalty_last_n: dry["penalty_last_n"].as_u64().map(|n| n as usize),
        sequence_breakers: Some(sequences(&dry["sequence_breakers"]).iter().map(|tokens| text(tokens)).collect()),
    });
    let params = SamplingParams {
        temperature: float("temperature", off.temperature),
        top_k: count("top_k") as u32,
        top_p: float("top_p", off.top_p),
        min_p: float("min_p", off.min_p),
        typical_p: float("typical_p", off.typical_p),
        top_n_sigma: float("top_n_sigma", off.top_n_sigma),
        xtc_probability: float("xtc_probability", off.xtc_probability),
        xtc_threshold: float("xtc_threshold", off.xtc_threshold),
        mirostat: given["mirostat"].as_object().map(|m| Mirostat { tau: number(&m["tau"]), eta: number(&m["eta"]) }),
        presence_penalty: float("presence_penalty", off.presence_penalty),
        frequency_penalty: float("frequency_penalty", off.frequency_penalty),
        repetition_penalty: float("repetition_penalty", off.repetition_penalty),
        no_repeat_ngram_size: count("no_repeat_ngram_size") as u32,
        dry,
        logit_bias: bias.iter().map(|pair| (token(&pair[0]), number(&pair[1]))).collect(),
        bad_words_ids: sequences(&given["bad_words_ids"]),
        allowed_token_ids: tokens(&given["allowed_token_ids"]),
        min_tokens: count("min_tokens") as usize,
        stop_token_ids: tokens(&given["stop_token_ids"]),
        ..off
    };
    let texts: Vec<Vec<u8>> = (0..32).map(|token| text(&[token]).into()).collect();
    let token_texts = Arc::new(TokenTexts::new(&texts).unwrap());
    ResolvedSampling::new(params, tokens(&case["eos"]).into(), vec![], token_texts).unwrap()
}

fn assert_near(found: &[f32], expected: &[f32], name: &str) {
    assert_eq!(found.len(), expected.len(), "{name}");
    for (found, expected) in found.iter().zip(expected) {
        let near = match expected.is_finite() {
            true => (found - expected).abs() <= TOLERANCE * expected.abs().max(1.0),
            false => found == expected,
        };
        assert!(near, "{found} is not {expected}: {name}");
    }
}

/// Calls `check` for every case with its name, its rules and its sequence.
fn check_all(mut check: impl FnMut(&Value, &str, &ResolvedSampling, &Context)) {
    let cases: Value = serde_json::from_str(CASES).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(cases.len() > 100);
    for case in cases {
        let (rules, tokens, prompt_len) = (rules(case), tokens(&case["tokens"]), case["prompt_len"].as_u64().unwrap() as usize);
        rules.params.validate(32).unwrap();
        let mut history = SamplingHistory::new(&rules, &tokens, prompt_len).unwrap();
        if let (Some(mirostat), Some(mu)) = (rules.params.mirostat, case["mu"].as_f64()) {
            // A token with a suitable surprise sets the state of mirostat to that of the case.
            let surprise = mirostat.tau - (mu as f32 - mirostat::first_mu(mirostat)) / mirostat.eta;
            history = SamplingHistory::new(&rules, &tokens[..tokens.len() - 1], prompt_len.min(tokens.len() - 1)).unwrap();
            history.advance(&rules, &Sample { token: tokens[tokens.len() - 1], surprise: Some(surprise) }).unwrap();
        }
        let context =
            Context { tokens: &tokens, prompt_len, generated: tokens.len() - prompt_len, history: &history, allowed: None, seed: 0 };
        check(case, &format!("{} {}", case["name"], case["params"]), &rules, &context);
    }
}

#[test]
fn bias_penalties_and_exclusions_equal_the_reference() {
    let mut sampler = Sampler::new(32).unwrap();
    check_all(|case, name, rules, context| {
        let mut logits = numbers(&case["logits"]);
        sampler.process(&mut logits, rules, context).unwrap();
        assert_near(&logits, &numbers(&case["processed"]), name);
    });
}

#[test]
fn candidates_and_their_probabilities_equal_the_reference() {
    let mut sampler = Sampler::new(32).unwrap();
    check_all(|case, name, rules, context| {
        let mut logits = numbers(&case["logits"]);
        sampler.process(&mut logits, rules, context).unwrap();
        let mut candidates = vec![];
        weigh(&mut candidates, &logits, argmax(&logits).unwrap().1, &rules.params);
        narrow(&mut candidates, &logits, rules, context);
        assert_eq!(candidates.iter().map(|candidate| candidate.token).collect::<Vec<_>>(), tokens(&case["kept"]), "{name}");
        let total = total(&candidates) as f32;
        let probabilities: Vec<f32> = candidates.iter().map(|candidate| candidate.share / total).collect();
        assert_near(&probabilities, &numbers(&case["probs"]), name);
        if rules.params.mirostat.is_some() {
            let chosen = candidates.iter().find(|candidate| candidate.token == token(&case["chosen"])).unwrap();
            assert_near(&[mirostat::surprise(chosen, &candidates)], &[number(&case["surprise"])], name);
        }
    });
}

#[test]
fn sampled_tokens_are_candidates_and_update_mirostat() {
    let mut sampler = Sampler::new(32).unwrap();
    check_all(|case, name, rules, context| {
        let chosen = sampler.choose(&numbers(&case["logits"]), rules, context).unwrap();
        assert!(tokens(&case["kept"]).contains(&chosen.token), "{name}");
        if rules.params.mirostat.is_some() {
            let mut history = context.history.clone();
            let oracles = Sample { token: token(&case["chosen"]), surprise: Some(number(&case["surprise"])) };
            history.advance(rules, &oracles).unwrap();
            assert_near(&[history.mu().unwrap()], &[number(&case["next_mu"])], name);
        }
    });
}
