//! The engine in a process of its own, so that its peak memory is its own: it does what the lines on its input
//! say and answers each with a line of JSON.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use pagedllm::engine::{Engine, Prompt, Request, StepReport};
use pagedllm::options::{EngineOptions, SamplingParams};
use pagedllm::sched::FinishReason;
use serde_json::{Value, json};

use crate::model::{VOCAB, weights_file};
use crate::{Options, Result};

/// The benchmark's end of the line.
pub struct Worker {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// What it said of itself after loading.
    pub loaded: Value,
}

impl Worker {
    /// Runs this program again as a worker.
    pub fn start(dir: &Path) -> Result<Worker> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args_os().skip(1)).arg("--worker").arg(dir);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let (input, output) = (input.ok_or("no input")?, BufReader::new(output.ok_or("no output")?));
        let mut worker = Worker { process, input, output, loaded: Value::Null };
        worker.loaded = worker.answer()?;
        Ok(worker)
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn ask(&mut self, question: &str) -> Result<Value> {
        writeln!(self.input, "{question}")?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let answer: Value =
            serde_json::from_str(&line).map_err(|e| format!("the engine's process ended or spoke nonsense ({e}): {line:?}"))?;
        match answer["error"].as_str() {
            Some(error) => Err(error.into()),
            None => Ok(answer),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = writeln!(self.input, "quit");
        let _ = self.process.wait();
    }
}

/// The worker's own main.
pub fn serve(options: &Options, dir: &Path) -> Result<()> {
    let mut engine = say_errors(Bench::load(options, dir))?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match words[..] {
            ["prefill", tokens] => engine.prefill(tokens.parse()?),
            ["join", sequences, tokens] => engine.join(sequences.parse()?, tokens.parse()?),
            ["decode", steps] => engine.decode(steps.parse()?),
            ["leave"] => engine.leave(),
            ["memory"] => Ok(engine.memory()),
            _ => return Ok(()),
        };
        say(&say_errors(answer)?)?;
    }
    Ok(())
}

fn say(answer: &Value) -> Result<()> {
    println!("{answer}");
    Ok(std::io::stdout().flush()?)
}

fn say_errors<T>(result: Result<T>) -> Result<T> {
    if let Err(error) = &result {
        say(&json!({"error": error.to_string()}))?;
    }
    result
}

struct Bench {
    engine: Engine,
    /// Each running sequence's length, and the tokens it made since the last look.
    sequences: HashMap<u64, Progress>,
    random: u64,
    most_blocks: u64,
}

#[derive(Default, Clone, Copy)]
struct Progress {
    length: u64,
    fresh: u64,
    finish: Option<FinishReason>,
}

impl Bench {
    /// Reads the weights once to know what the file alone costs now, then loads them, and says both.
    fn load(options: &Options, dir: &Path) -> Result<Bench> {
        let read_seconds = read_whole(&weights_file(dir))?;
        let head_dim = options.shape.head_dim();
        let options = EngineOptions {
            model_dir: dir.to_path_buf(),
            threads: Some(options.threads),
            isa: Some(options.isa),
            weight_format: options.weights.map(|_| options.formats()[0]),
            kv_dtype: options.kv_dtype,
            max_seqs: options.most_sequences(),
            skip_tokenizer: true,
            ..Default::default()
        };
        let plan = Engine::plan(&options)?;
        let start = Instant::now();
        let engine = Engine::create(&options)?;
        say(&json!({
            "read_seconds": read_seconds,
            "load_seconds": start.elapsed().as_secs_f64(),
            "weight_bytes": plan.weight_bytes,
            "work_bytes": plan.work_bytes,
            "kv_dtype": plan.kv_dtype.name(),
            "kv_head_bytes": plan.kv_dtype.head_bytes(head_dim),
        }))?;
        Ok(Bench { engine, sequences: HashMap::new(), random: 1, most_blocks: 0 })
    }

    /// One prompt from nothing to its first token.
    fn prefill(&mut self, tokens: u64) -> Result<Value> {
        let start = Instant::now();
        let id = self.add(tokens, 1)?;
        let mut steps = 0;
        while self.sequences[&id].finish.is_none() {
            self.step()?;
            steps += 1;
        }
        let seconds = start.elapsed().as_secs_f64();
        let Progress { length, finish, .. } = self.sequences[&id];
        expect("tokens of a finished prefill", length, tokens + 1)?;
        if finish != Some(FinishReason::Length) {
            return Err(format!("the prefill ended with {finish:?}").into());
        }
        self.sequences.clear();
        Ok(json!({"seconds": seconds, "steps": steps}))
    }

    /// More sequences, stepped until every one of them has its first token.
    fn join(&mut self, sequences: u64, tokens: u64) -> Result<Value> {
        let most = self.engine.info().memory.max_model_len as u64 - tokens;
        let ids = (0..sequences).map(|_| self.add(tokens, most)).collect::<Result<Vec<_>>>()?;
        while ids.iter().any(|id| self.sequences[id].length == tokens) {
            self.step()?;
        }
        Ok(json!({}))
    }

    /// Steps in which every sequence makes one token, and nothing else happens.
    fn decode(&mut self, steps: u64) -> Result<Value> {
        let sequences = self.sequences.len() as u64;
        self.sequences.values_mut().for_each(|progress| progress.fresh = 0);
        let mut positions = 0;
        let start = Instant::now();
        for _ in 0..steps {
            positions += self.sequences.values().map(|progress| progress.length).sum::<u64>();
            let report = self.step()?;
            expect("prompt tokens in a decode step", report.prefill_tokens, 0)?;
            expect("tokens in a decode step", report.decode_tokens, sequences)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        for progress in self.sequences.values() {
            expect("tokens of one sequence", progress.fresh, steps)?;
        }
        Ok(json!({"seconds": seconds, "steps": steps, "tokens": steps * sequences, "positions": positions}))
    }

    fn leave(&mut self) -> Result<Value> {
        self.sequences.keys().try_for_each(|&id| self.engine.abort(id))?;
        let report = self.step()?;
        expect("requests left", report.unfinished, 0)?;
        self.sequences.clear();
        Ok(json!({}))
    }

    fn memory(&self) -> Value {
        let plan = &self.engine.info().memory;
        json!({"peak_bytes": peak_bytes(), "plan_bytes": plan.weight_bytes + plan.work_bytes + self.most_blocks * plan.block_bytes})
    }

    fn add(&mut self, tokens: u64, max_tokens: u64) -> Result<u64> {
        let prompt = (0..tokens).map(|_| self.random_token()).collect();
        let sampling = SamplingParams { max_tokens: Some(max_tokens as usize), ignore_eos: true, ..SamplingParams::greedy() };
        let id = self.engine.add_request(Request::new(Prompt::Tokens(prompt), sampling))?;
        self.sequences.insert(id, Progress { length: tokens, ..Default::default() });
        Ok(id)
    }

    fn random_token(&mut self) -> u32 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as u32 % VOCAB as u32
    }

    fn step(&mut self) -> Result<StepReport> {
        let report = self.engine.step()?;
        self.most_blocks = self.most_blocks.max(self.engine.stats().blocks_used);
        for output in self.engine.queue().poll(Some(Duration::ZERO)).unwrap() {
            if let Some(error) = output.error {
                return Err(error.into());
            }
            let progress = self.sequences.get_mut(&output.request).ok_or("an output of an unknown request")?;
            progress.length += output.tokens.len() as u64;
            progress.fresh += output.tokens.len() as u64;
            progress.finish = output.finish;
        }
        Ok(report)
    }
}

fn expect(what: &str, found: u64, wanted: u64) -> Result<()> {
    if found == wanted {
        return Ok(());
    }
    Err(format!("{what}: {found}, not {wanted}").into())
}

/// Seconds to read a file from its start to its end.
fn read_whole(path: &Path) -> Result<f64> {
    let mut piece = vec![0u8; 4 << 20];
    let start = Instant::now();
    let mut file = File::open(path)?;
    while file.read(&mut piece)? > 0 {}
    Ok(start.elapsed().as_secs_f64())
}

/// The most memory that this process ever had, where the system tells.
fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}
