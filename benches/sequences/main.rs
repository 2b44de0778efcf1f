//! Blocks saved by samples and beams, cost of a fork, prefix cache, and cost of grammars in a step.

#[path = "../cpu/model.rs"]
#[allow(dead_code)] // only the CPU benchmark uses the rest
mod model;
mod sharing;
#[path = "../constraint/tokenizer.rs"]
mod tokenizer;

use std::path::Path;
use std::time::{Duration, Instant};

use pagedllm::engine::{Engine, Fork, Prompt, Request};
use pagedllm::types::options::{EngineOptions, Grammar, SamplingParams};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    sharing::print();
    let dir = model::make(&model::SHAPES[0], &Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench-models"))?;
    if !dir.join("tokenizer.json").exists() {
        tokenizer::train(&dir, model::VOCAB);
    }
    let options = EngineOptions { model_dir: dir, kv_bytes: Some(512 << 20), max_model_len: Some(4096), ..Default::default() };
    forks(&Engine::create(&options)?)?;
    prefixes(&options)?;
    masks(&Engine::create(&options)?)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn prompt(len: usize, seed: u32) -> Prompt {
    Prompt::Tokens((0..len as u32).map(|i| 300 + (i * 7919 + seed * 104_729) % 15_000).collect())
}

fn text_schema() -> Grammar {
    Grammar::JsonSchema(
        r#"{"type": "object", "properties": {"text": {"type": "string", "minLength": 3000}, "more": {"type": "array", "items": {"type": "string"}}},
        "required": ["text", "more"], "additionalProperties": false}"#
            .into(),
    )
}

/// Forks a sequence of 1,500 prompt tokens and 500 generated tokens, with all state that a fork
/// copies. Its queue is full, so that the step that creates the child does nothing else.
fn forks(engine: &Engine) -> Result<()> {
    let queue = engine.create_queue(1)?;
    let sampling = SamplingParams {
        repetition_penalty: 1.1,
        presence_penalty: 0.2,
        frequency_penalty: 0.2,
        logprobs: Some(0),
        seed: Some(1),
        ignore_eos: true,
        grammar: Some(text_schema()),
        ..Default::default()
    };
    let id = engine.add_request_to(&queue, Request::new(prompt(1500, 1), sampling))?.sequence(0);
    let mut generated = 0;
    while generated < 500 {
        engine.step()?;
        let outputs = queue.poll(Some(Duration::ZERO))?;
        if let Some(end) = outputs.iter().find(|output| output.finish.is_some()) {
            return Err(format!("the sequence ended after {generated} tokens: {:?} {:?}", end.finish, end.error).into());
        }
        generated += outputs.len();
    }
    engine.step()?; // the full queue pauses the sequence
    let used = engine.stats().blocks_used;
    let (mut calls, mut steps, mut idle) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..200 {
        let start = Instant::now();
        engine.step()?;
        idle.push(start.elapsed());
        let start = Instant::now();
        let child = engine.fork(id, 1, &Fork { idle: true, ..Default::default() })?[0];
        calls.push(start.elapsed());
        let start = Instant::now();
        engine.step()?;
        steps.push(start.elapsed());
        assert_eq!((engine.sequence(child)?.idle, engine.stats().blocks_used), (true, used), "the child exists, and no block was copied");
        engine.free(child)?;
        engine.step()?;
    }
    let (call, step, idle) = (median(calls), median(steps), median(idle));
    println!("## Fork\n\n{} tokens, with penalties, 500 log probabilities and a JSON grammar; medians of 200.\n", 1500 + generated);
    println!(
        "call {:.1} us, step that creates the child {:.1} us, idle step {:.1} us: {:.1} us until the child can be scheduled (goal 20)\n",
        ms(call) * 1e3,
        ms(step) * 1e3,
        ms(idle) * 1e3,
        (ms(call) + ms(step) - ms(idle)) * 1e3
    );
    engine.abort(id.own_request())?;
    Ok(())
}

fn first_token(engine: &Engine, prompt: Prompt) -> Result<Duration> {
    let start = Instant::now();
    engine.add_request(Request::new(prompt, SamplingParams { max_tokens: Some(1), ..SamplingParams::greedy() }))?;
    while engine.step()?.unfinished > 0 {}
    let time = start.elapsed();
    engine.queue().poll(Some(Duration::ZERO))?;
    Ok(time)
}

/// Prompts of 1,900 shared tokens and 30 others.
fn prefixes(options: &EngineOptions) -> Result<()> {
    let request_prompt = |i: u32| match (prompt(1900, 1), prompt(30, i)) {
        (Prompt::Tokens(shared), Prompt::Tokens(own)) => Prompt::Tokens([shared, own].concat()),
        _ => unreachable!("both are tokens"),
    };
    let cold_engine = Engine::create(&EngineOptions { prefix_cache: false, ..options.clone() })?;
    let engine = Engine::create(options)?;
    first_token(&engine, request_prompt(0))?;
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for i in 1..6 {
        cold.push(first_token(&cold_engine, request_prompt(i))?);
        warm.push(first_token(&engine, request_prompt(i))?);
    }
    let (cold, warm) = (median(cold), median(warm));
    println!("## Prefix cache\n\nModel S, 1,900 shared tokens and 30 others: time to first token; medians of 5, in turn.\n");
    println!("miss {:.1} ms, hit {:.1} ms: {:.1}x (goal 15x)\n", ms(cold), ms(warm), ms(cold) / ms(warm));
    Ok(())
}

/// Measures steps of eight sequences, with and without a grammar in turn.
fn masks(engine: &Engine) -> Result<()> {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..6 {
        for (i, grammar) in [None, Some(text_schema())].into_iter().enumerate() {
            for seed in 0..8 {
                let sampling = SamplingParams {
                    seed: Some(seed),
                    max_tokens: Some(60),
                    ignore_eos: true,
                    grammar: grammar.clone(),
                    ..Default::default()
                };
                engine.add_request(Request::new(prompt(50, seed as u32 + round), sampling))?;
            }
            loop {
                let start = Instant::now();
                let report = engine.step()?;
                if report.decode_tokens == 8 && report.prefill_tokens == 0 && report.unfinished == 8 {
                    times[i].push(start.elapsed());
                }
                if report.unfinished == 0 {
                    break;
                }
            }
            engine.queue().poll(Some(Duration::ZERO))?;
        }
    }
    let counts = times.each_ref().map(Vec::len);
    let [without, with] = times.map(median);
    println!("## Grammars in a step\n\nModel S, 32,000 tokens, eight sequences; medians of {counts:?} steps, in turn.\n");
    println!(
        "without a grammar {:.2} ms, with a JSON schema {:.2} ms: {:+.1} %",
        ms(without),
        ms(with),
        100.0 * (ms(with) / ms(without) - 1.0)
    );
    Ok(())
}
