//! The engine with a model of random weights, in both modes: prompts, steps of 1 to 256 sequences, and
//! requests that arrive together.

use std::path::Path;
use std::time::{Duration, Instant};

use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::types::RequestId;
use pagedllm::types::options::{EngineOptions, SamplingParams};
use serde_json::{Value, json};

use crate::Result;
use crate::common::median;
use crate::line::Line;
use crate::options::{Ceilings, Options};

const DECODE: &str = "decode";
const PREFILL: &str = "prefill";
const THROUGHPUT: &str = "throughput";
const BATCHES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// Numbers of requests that arrive together.
const TOGETHER: [usize; 4] = [1, 8, 64, 128];
/// Output tokens of each of them.
const OUTPUT: usize = 128;
const PROMPTS: [usize; 3] = [512, 2048, 8192];
/// Prompt length of the decoding sequences.
const CONTEXT: usize = 512;
/// More tokens than any sequence generates here.
const MAX_TOKENS: usize = 400;
const STEPS: usize = 16;
/// Steps before the timed ones, so that all one-time work is done.
const WARM_UP: usize = 3;
const REPETITIONS: usize = 3;

pub fn bench(options: &Options) -> Result<()> {
    let shape = Shape::read(&options.model)?;
    for batch_invariant in [false, true] {
        let bench = Bench::open(options, batch_invariant, &shape)?;
        bench.prefill(options)?;
        bench.decode(options)?;
        bench.throughput(options)?;
    }
    Ok(())
}

/// Sizes from the config of a LLaMA model.
pub struct Shape {
    hidden: usize,
    layers: usize,
    heads: usize,
    head_dim: usize,
    pub vocab: usize,
}

impl Shape {
    pub fn read(dir: &Path) -> Result<Shape> {
        let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json"))?)?;
        let number = |name: &str| config[name].as_u64().map(|n| n as usize).ok_or_else(|| format!("config.json has no {name}"));
        let (hidden, heads) = (number("hidden_size")?, number("num_attention_heads")?);
        let head_dim = number("head_dim").unwrap_or(hidden / heads);
        Ok(Shape { hidden, layers: number("num_hidden_layers")?, heads, head_dim, vocab: number("vocab_size")? })
    }

    /// Bytes of the embedding or of the head, in bf16.
    fn table_bytes(&self) -> f64 {
        2.0 * (self.vocab * self.hidden) as f64
    }
}

/// A step of the engine.
struct Step {
    seconds: f64,
    /// Tokens of sequences that decode.
    decoded: u64,
    /// Sequences that have not ended.
    unfinished: usize,
}

struct Bench<'a> {
    engine: Engine,
    mode: &'static str,
    shape: &'a Shape,
    ceilings: Ceilings,
}

impl Bench<'_> {
    fn open<'a>(options: &Options, batch_invariant: bool, shape: &'a Shape) -> Result<Bench<'a>> {
        let longest_prompt = *options.sizes(&PROMPTS, &[64]).last().unwrap_or(&CONTEXT);
        let engine = Engine::create(&EngineOptions {
            model_dir: options.model.clone(),
            device: "cuda:0".into(),
            batch_invariant,
            memory_fraction: Some(0.9),
            max_seqs: *options.sizes(&BATCHES, &[1, 3]).last().unwrap_or(&1),
            max_batch_tokens: longest_prompt,
            prefix_cache: false,
            skip_tokenizer: true,
            ..Default::default()
        })?;
        let mode = if batch_invariant { "batch_invariant" } else { "default" };
        Ok(Bench { engine, mode, shape, ceilings: options.ceilings })
    }

    fn case(&self, what: String) -> String {
        format!("{what}, {} layers, {}", self.shape.layers, self.mode)
    }

    fn add(&self, seed: usize, tokens: usize, max_tokens: usize) -> Result<RequestId> {
        let vocab = self.shape.vocab;
        let prompt = (0..tokens).map(|i| ((i * 7919 + seed * 104_729) % vocab) as u32).collect();
        let sampling = SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::greedy() };
        Ok(self.engine.add_request(Request::new(Prompt::Tokens(prompt), sampling))?)
    }

    fn step(&self) -> Result<Step> {
        let start = Instant::now();
        let report = self.engine.step()?;
        let seconds = start.elapsed().as_secs_f64();
        // A full queue would pause the sequences.
        if self.engine.queue().poll(Some(Duration::ZERO))?.iter().any(|output| output.error.is_some()) {
            return Err("a request ended with an error".into());
        }
        Ok(Step { seconds, decoded: report.decode_tokens, unfinished: report.unfinished as usize })
    }

    /// Measures tokens per second of one prompt that is computed in one step.
    fn prefill(&self, options: &Options) -> Result<()> {
        for &tokens in options.sizes(&PROMPTS, &[64]) {
            let mut times = Vec::new();
            for seed in 0..=REPETITIONS {
                self.add(seed, tokens, 1)?;
                times.push(self.step()?.seconds);
            }
            let value = tokens as f64 / median(times.split_off(1));
            let limit = tokens as f64 / self.ceilings.min_seconds(self.weight_bytes(), self.prefill_flops(tokens));
            let (case, shape) = (self.case(format!("{tokens} tokens")), json!({"tokens": tokens}));
            Line { part: PREFILL, case, shape, value, unit: "tokens/s", limit }.print();
        }
        Ok(())
    }

    /// Measures milliseconds of a decode step, by number of sequences.
    fn decode(&self, options: &Options) -> Result<()> {
        let context = if options.small { 20 } else { CONTEXT };
        let (mut running, mut requests) = (0, Vec::new());
        for &batch in options.sizes(&BATCHES, &[1, 3]) {
            for seed in running..batch {
                requests.push(self.add(seed, context, MAX_TOKENS)?);
            }
            running = batch;
            while self.step()?.decoded < batch as u64 {
                self.expect_no_preemption()?;
            }
            let steps: Result<Vec<f64>> = (0..WARM_UP + STEPS).map(|_| Ok(self.step()?.seconds)).collect();
            let limit = self.ceilings.min_seconds(self.weight_bytes() + self.kv_bytes(), self.decode_flops(batch));
            let value = 1e3 * median(steps?.split_off(WARM_UP));
            let (case, shape) = (self.case(format!("batch {batch}")), json!({"batch": batch, "context": self.cached_tokens() / batch}));
            Line { part: DECODE, case, shape, value, unit: "ms", limit: 1e3 * limit }.print();
        }
        requests.into_iter().try_for_each(|request| Ok(self.engine.abort(request)?))
    }

    /// Measures output tokens per second of requests that arrive together, with their prompts.
    fn throughput(&self, options: &Options) -> Result<()> {
        let (context, output) = if options.small { (20, 4) } else { (CONTEXT, OUTPUT) };
        for &batch in options.sizes(&TOGETHER, &[1, 3]) {
            let start = Instant::now();
            for seed in 0..batch {
                self.add(seed, context, output)?;
            }
            while self.step()?.unfinished > 0 {}
            self.expect_no_preemption()?;
            let value = (batch * output) as f64 / start.elapsed().as_secs_f64();
            let case = self.case(format!("{batch} requests of {context} and {output} tokens"));
            let shape = json!({"batch": batch, "context": context, "output": output});
            Line { part: THROUGHPUT, case, shape, value, unit: "tokens/s", limit: f64::INFINITY }.print();
        }
        Ok(())
    }

    /// Steps with recomputed sequences could not be compared.
    fn expect_no_preemption(&self) -> Result<()> {
        let stats = self.engine.stats();
        match stats.preemptions {
            0 => Ok(()),
            n => Err(format!("{n} sequences were preempted; the pool of {} blocks is too small", stats.blocks_total).into()),
        }
    }

    /// Bytes of weights that every step reads. It reads only some rows of the embedding.
    fn weight_bytes(&self) -> f64 {
        self.engine.info().memory.weight_bytes as f64 - self.shape.table_bytes()
    }

    fn kv_bytes(&self) -> f64 {
        (self.engine.stats().blocks_used * self.engine.info().memory.block_bytes) as f64
    }

    /// Tokens in the KV cache, rounded up to blocks.
    fn cached_tokens(&self) -> usize {
        self.engine.stats().blocks_used as usize * self.engine.info().memory.block_size
    }

    /// A weight in bf16 has two bytes, and two operations per token. The head computes one token.
    fn prefill_flops(&self, tokens: usize) -> f64 {
        let Shape { layers, heads, head_dim, .. } = *self.shape;
        let body = (self.weight_bytes() - self.shape.table_bytes()) * tokens as f64;
        let attention = 2 * layers * heads * head_dim * tokens * tokens;
        body + self.shape.table_bytes() + attention as f64
    }

    fn decode_flops(&self, batch: usize) -> f64 {
        self.weight_bytes() * batch as f64
    }
}
