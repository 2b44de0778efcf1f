//! The worker's own main: an engine that does what it is asked, and counts what each step consisted of.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use pagedllm::engine::{Engine, Output, Prompt, Request, StepReport};
use pagedllm::options::{EngineOptions, SamplingParams};
use pagedllm::sched::FinishReason;
use serde::Serialize;

use crate::Result;
use crate::common::read_whole;
use crate::limits::Step;
use crate::model::{VOCAB, weights_file};
use crate::worker::{Load, Loaded, Peak, Question, Steps};
use crate::workload;

pub fn serve() -> Result<()> {
    let mut lines = std::io::stdin().lock().lines();
    let first = lines.next().ok_or("nothing was asked")??;
    let mut server = match serde_json::from_str(&first).map_err(Into::into).and_then(Server::load) {
        Ok((server, loaded)) => {
            say(Ok(loaded))?;
            server
        }
        Err(error) => return say(Err::<(), _>(error)),
    };
    for line in lines {
        let Ok(question) = serde_json::from_str(&line?) else { break };
        server.answer(question)?;
    }
    Ok(())
}

/// Straight into the pipe: what an answer takes on its way would count as the engine's memory. After an error nothing else is said.
fn say(answer: Result<impl Serialize>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, &answer.as_ref().map_err(ToString::to_string))?;
    out.write_all(b"\n")?;
    out.flush()?;
    answer.map(|_| ())
}

struct Server {
    engine: Engine,
    /// Those that have not ended, in the order in which they came.
    streams: BTreeMap<u64, Stream>,
    random: u64,
    max_blocks: u64,
}

/// One sequence's tokens.
struct Stream {
    prompt: u64,
    generated: u64,
    wanted: u64,
    /// Rows that steps have computed.
    computed: u64,
}

impl Server {
    /// Reads the weights once to know what the file alone costs now, then loads them.
    fn load(Load { options, model_dir, trace_path }: Load) -> Result<(Server, Loaded)> {
        let read_seconds = read_whole(&weights_file(&model_dir))?;
        let start = Instant::now();
        let engine = Engine::create(&EngineOptions { model_dir, trace_path, ..options })?;
        let loaded = Loaded { read_seconds, load_seconds: start.elapsed().as_secs_f64() };
        Ok((Server { engine, streams: BTreeMap::new(), random: 1, max_blocks: 0 }, loaded))
    }

    fn answer(&mut self, question: Question) -> Result<()> {
        match question {
            Question::Join { sequences, tokens } => say(self.join(sequences, tokens)),
            Question::Decode { steps } => say(self.decode(steps)),
            Question::Batch { requests } => say(self.batch(requests)),
            Question::Leave => say(self.leave()),
            Question::Memory => say(Ok(Peak { bytes: peak_bytes(), blocks: self.max_blocks })),
        }
    }

    fn join(&mut self, sequences: u64, tokens: u64) -> Result<Steps> {
        let wanted = self.engine.info().memory.max_model_len as u64 - tokens;
        let start = Instant::now();
        (0..sequences).try_for_each(|_| self.add(tokens, wanted))?;
        self.steps(start, |server, _| server.streams.values().any(|stream| stream.generated == 0))
    }

    fn decode(&mut self, steps: usize) -> Result<Steps> {
        let sequences = self.streams.len() as u64;
        let answer = self.steps(Instant::now(), |_, so_far| so_far < steps)?;
        for step in &answer.steps {
            expect("rows of a decode step", step.rows, sequences)?;
            expect("tokens of a decode step", step.logits, sequences)?;
        }
        Ok(answer)
    }

    fn batch(&mut self, requests: Vec<workload::Request>) -> Result<Steps> {
        let start = Instant::now();
        requests.iter().try_for_each(|request| self.add(request.prompt, request.output))?;
        self.steps(start, |server, _| !server.streams.is_empty())
    }

    fn leave(&mut self) -> Result<()> {
        self.streams.keys().try_for_each(|&request| self.engine.abort(request))?;
        expect("requests left", self.engine.step()?.unfinished, 0)?;
        self.engine.queue().poll(Some(Duration::ZERO))?;
        self.streams.clear();
        Ok(())
    }

    /// A prompt of random tokens that is answered with as many as are wanted.
    fn add(&mut self, prompt: u64, wanted: u64) -> Result<()> {
        let tokens = (0..prompt).map(|_| self.random_token()).collect();
        let sampling = SamplingParams { max_tokens: Some(wanted as usize), ignore_eos: true, ..SamplingParams::greedy() };
        let request = self.engine.add_request(Request::new(Prompt::Tokens(tokens), sampling))?;
        self.streams.insert(request, Stream { prompt, generated: 0, wanted, computed: 0 });
        Ok(())
    }

    fn random_token(&mut self) -> u32 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as u32 % VOCAB as u32
    }

    fn steps(&mut self, start: Instant, goes_on: impl Fn(&Server, usize) -> bool) -> Result<Steps> {
        let mut steps = Vec::new();
        while goes_on(self, steps.len()) {
            steps.push(self.step()?);
        }
        Ok(Steps { seconds: start.elapsed().as_secs_f64(), steps })
    }

    fn step(&mut self) -> Result<Step> {
        let report = self.engine.step()?;
        self.max_blocks = self.max_blocks.max(self.engine.stats().blocks_used);
        let mut step = self.computed(&report)?;
        for output in self.engine.queue().poll(Some(Duration::ZERO))? {
            step.logits += self.hear(output)?;
        }
        Ok(step)
    }

    /// Who decodes has a row, and prompts are computed in the order in which they came; `hear` would find it otherwise.
    fn computed(&mut self, report: &StepReport) -> Result<Step> {
        let (mut step, mut prefill, mut decode) = (Step::default(), report.prefill_tokens, 0);
        for stream in self.streams.values_mut() {
            let rows = match stream.prompt.saturating_sub(stream.computed) {
                0 => 1,
                left => left.min(prefill),
            };
            match stream.computed < stream.prompt {
                true => prefill -= rows,
                false => decode += rows,
            }
            if rows > 0 {
                step.add(stream.computed, rows);
            }
            stream.computed += rows;
        }
        expect("prompt tokens of nobody", prefill, 0)?;
        expect("tokens of those who decode", report.decode_tokens, decode)?;
        Ok(step)
    }

    /// How many tokens it brings.
    fn hear(&mut self, output: Output) -> Result<u64> {
        if let Some(error) = output.error {
            return Err(error.into());
        }
        let stream = self.streams.get_mut(&output.request).ok_or("an output of an unknown request")?;
        let fresh = output.tokens.len() as u64;
        stream.generated += fresh;
        expect("rows computed for the tokens that came", stream.computed, stream.prompt + stream.generated - 1)?;
        if let Some(finish) = output.finish {
            expect("tokens of an answer", stream.generated, stream.wanted)?;
            if finish != FinishReason::Length {
                return Err(format!("a request ended with {finish:?}").into());
            }
            self.streams.remove(&output.request);
        }
        Ok(fresh)
    }
}

fn expect(what: &str, found: u64, wanted: u64) -> Result<()> {
    match found == wanted {
        true => Ok(()),
        false => Err(format!("{what}: {found}, not {wanted}").into()),
    }
}

/// The most memory that this process ever had, where the system tells.
fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}
