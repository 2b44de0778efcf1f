//! Main function of the worker process: executes commands on an engine, and counts the work of each
//! step.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use pagedllm::engine::{Engine, Output, Prompt, Request, StepReport};
use pagedllm::types::RequestId;
use pagedllm::types::options::{EngineOptions, SamplingParams};
use pagedllm::types::outputs::FinishReason;
use serde::Serialize;

use crate::common::read_whole;
use crate::limits::Step;
use crate::model::{VOCAB, weights_file};
use crate::worker::{Command, Load, Loaded, Peak, Steps};
use crate::{Result, workload};

pub fn serve() -> Result<()> {
    let mut lines = std::io::stdin().lock().lines();
    let first = lines.next().ok_or("the worker received no command")??;
    let mut server = match serde_json::from_str(&first).map_err(Into::into).and_then(Server::load) {
        Ok((server, loaded)) => {
            reply(Ok(loaded))?;
            server
        }
        Err(error) => return reply(Err::<(), _>(error)),
    };
    for line in lines {
        let Ok(command) = serde_json::from_str(&line?) else { break };
        server.execute(command)?;
    }
    Ok(())
}

/// Writes a reply. It goes directly into the pipe, because a buffer would count as the engine's
/// memory. An error is the last reply.
fn reply(answer: Result<impl Serialize>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, &answer.as_ref().map_err(ToString::to_string))?;
    out.write_all(b"\n")?;
    out.flush()?;
    answer.map(|_| ())
}

struct Server {
    engine: Engine,
    /// Sequences that have not ended, in the order of their requests.
    sequences: BTreeMap<RequestId, Sequence>,
    random: u64,
    max_blocks: u64,
}

/// Token counts of one sequence.
struct Sequence {
    prompt: u64,
    generated: u64,
    wanted: u64,
    /// Tokens that steps have computed.
    computed: u64,
}

impl Server {
    /// Reads the file of the weights once to measure that time, then loads the model.
    fn load(Load { options, model_dir, trace_path }: Load) -> Result<(Server, Loaded)> {
        let read_seconds = read_whole(&weights_file(&model_dir))?;
        let start = Instant::now();
        let engine = Engine::create(&EngineOptions { model_dir, trace_path, ..options })?;
        let loaded = Loaded { read_seconds, load_seconds: start.elapsed().as_secs_f64() };
        Ok((Server { engine, sequences: BTreeMap::new(), random: 1, max_blocks: 0 }, loaded))
    }

    fn execute(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Add { sequences, tokens } => reply(self.add_all(sequences, tokens)),
            Command::Decode { steps } => reply(self.decode(steps)),
            Command::Batch { requests } => reply(self.batch(requests)),
            Command::AbortAll => reply(self.abort_all()),
            Command::PeakMemory => reply(Ok(Peak { bytes: peak_bytes(), blocks: self.max_blocks })),
        }
    }

    fn add_all(&mut self, sequences: u64, tokens: u64) -> Result<Steps> {
        let wanted = self.engine.info().memory.max_model_len as u64 - tokens;
        let start = Instant::now();
        (0..sequences).try_for_each(|_| self.add(tokens, wanted))?;
        self.steps(start, |server, _| server.sequences.values().any(|sequence| sequence.generated == 0))
    }

    fn decode(&mut self, steps: usize) -> Result<Steps> {
        let sequences = self.sequences.len() as u64;
        let decoded = self.steps(Instant::now(), |_, so_far| so_far < steps)?;
        for step in &decoded.steps {
            expect("rows of a decode step", step.rows, sequences)?;
            expect("tokens of a decode step", step.logits, sequences)?;
        }
        Ok(decoded)
    }

    fn batch(&mut self, requests: Vec<workload::Request>) -> Result<Steps> {
        let start = Instant::now();
        requests.iter().try_for_each(|request| self.add(request.prompt, request.output))?;
        self.steps(start, |server, _| !server.sequences.is_empty())
    }

    fn abort_all(&mut self) -> Result<()> {
        self.sequences.keys().try_for_each(|&request| self.engine.abort(request))?;
        expect("unfinished requests", self.engine.step()?.unfinished, 0)?;
        self.engine.queue().poll(Some(Duration::ZERO))?;
        self.sequences.clear();
        Ok(())
    }

    /// Adds a request with a prompt of random tokens and `wanted` output tokens.
    fn add(&mut self, prompt: u64, wanted: u64) -> Result<()> {
        let tokens = (0..prompt).map(|_| self.random_token()).collect();
        let sampling = SamplingParams { max_tokens: Some(wanted as usize), ignore_eos: true, ..SamplingParams::greedy() };
        let request = self.engine.add_request(Request::new(Prompt::Tokens(tokens), sampling))?;
        self.sequences.insert(request, Sequence { prompt, generated: 0, wanted, computed: 0 });
        Ok(())
    }

    fn random_token(&mut self) -> u32 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as u32 % VOCAB as u32
    }

    fn steps(&mut self, start: Instant, more: impl Fn(&Server, usize) -> bool) -> Result<Steps> {
        let mut steps = Vec::new();
        while more(self, steps.len()) {
            steps.push(self.step()?);
        }
        Ok(Steps { seconds: start.elapsed().as_secs_f64(), steps })
    }

    fn step(&mut self) -> Result<Step> {
        let report = self.engine.step()?;
        self.max_blocks = self.max_blocks.max(self.engine.stats().blocks_used);
        let mut step = self.computed(&report)?;
        for output in self.engine.queue().poll(Some(Duration::ZERO))? {
            step.logits += self.record(output)?;
        }
        Ok(step)
    }

    /// Distributes the tokens of a step: one per decoding sequence, and prompts in the order of
    /// their requests. `record` fails if that is wrong.
    fn computed(&mut self, report: &StepReport) -> Result<Step> {
        let (mut step, mut prefill, mut decode) = (Step::default(), report.prefill_tokens, 0);
        for sequence in self.sequences.values_mut() {
            let rows = match sequence.prompt.saturating_sub(sequence.computed) {
                0 => 1,
                left => left.min(prefill),
            };
            match sequence.computed < sequence.prompt {
                true => prefill -= rows,
                false => decode += rows,
            }
            if rows > 0 {
                step.add(sequence.computed, rows);
            }
            sequence.computed += rows;
        }
        expect("prompt tokens without a sequence", prefill, 0)?;
        expect("decode tokens", report.decode_tokens, decode)?;
        Ok(step)
    }

    /// Records an output and returns the number of its tokens.
    fn record(&mut self, output: Output) -> Result<u64> {
        if let Some(error) = output.error {
            return Err(error.into());
        }
        let sequence = self.sequences.get_mut(&output.request).ok_or("an output has an unknown request")?;
        let fresh = output.tokens.len() as u64;
        sequence.generated += fresh;
        expect("computed tokens", sequence.computed, sequence.prompt + sequence.generated - 1)?;
        if let Some(finish) = output.finish {
            expect("output tokens", sequence.generated, sequence.wanted)?;
            if finish != FinishReason::Length {
                return Err(format!("a request ended with {finish:?}").into());
            }
            self.sequences.remove(&output.request);
        }
        Ok(fresh)
    }
}

fn expect(what: &str, found: u64, wanted: u64) -> Result<()> {
    match found == wanted {
        true => Ok(()),
        false => Err(format!("{what}: {found}, expected {wanted}").into()),
    }
}

/// Peak memory of this process. None if the system does not report it.
fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}
