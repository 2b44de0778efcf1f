//! The engine in a process of its own, so that its peak memory is its own: it is asked in lines of JSON, and answers each with one.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use pagedllm::options::EngineOptions;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::limits::Step;
use crate::workload::Request;

/// The argument of a process that is the engine's.
pub const ARGUMENT: &str = "--worker";

/// The first line.
#[derive(Serialize, Deserialize)]
pub struct Load {
    pub options: EngineOptions,
    /// What the options don't write of themselves.
    pub model_dir: PathBuf,
    pub trace_path: Option<PathBuf>,
}

/// Its answer.
#[derive(Serialize, Deserialize)]
pub struct Loaded {
    /// Reading the weights' file from its start to its end, just before.
    pub read_seconds: f64,
    pub load_seconds: f64,
}

#[derive(Serialize, Deserialize)]
pub enum Question {
    /// More sequences, stepped until every one of them has its first token.
    Join { sequences: u64, tokens: u64 },
    /// Steps in which every sequence makes one token, and nothing else happens.
    Decode { steps: usize },
    /// Requests that come together, until the last of them has ended.
    Batch { requests: Vec<Request> },
    /// Nobody is left.
    Leave,
    /// What the process took at the most.
    Memory,
}

/// The answer of all that computes.
#[derive(Serialize, Deserialize)]
pub struct Steps {
    pub seconds: f64,
    pub steps: Vec<Step>,
}

#[derive(Serialize, Deserialize)]
pub struct Peak {
    /// Where the system tells.
    pub bytes: Option<u64>,
    /// Of K and V, in use at once.
    pub blocks: u64,
}

/// The benchmark's end of the line.
pub struct Worker {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Worker {
    /// Runs this program again, and loads the model there.
    pub fn start(options: &EngineOptions) -> Result<(Worker, Loaded)> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut process = command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let (input, output) = (input.ok_or("no input")?, BufReader::new(output.ok_or("no output")?));
        let mut worker = Worker { process, input, output };
        let EngineOptions { model_dir, trace_path, .. } = options.clone();
        let loaded = worker.ask(&Load { options: options.clone(), model_dir, trace_path })?;
        Ok((worker, loaded))
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn ask<T: DeserializeOwned>(&mut self, question: &impl Serialize) -> Result<T> {
        writeln!(self.input, "{}", serde_json::to_string(question)?)?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let answer: std::result::Result<T, String> =
            serde_json::from_str(&line).map_err(|e| format!("the engine's process ended or spoke nonsense ({e}): {line:?}"))?;
        Ok(answer?)
    }

    pub fn steps(&mut self, question: &Question) -> Result<Steps> {
        self.ask(question)
    }

    pub fn leave(&mut self) -> Result<()> {
        self.ask(&Question::Leave)
    }
}

/// Then the process has ended, and what it wrote is whole.
impl Drop for Worker {
    fn drop(&mut self) {
        let _ = writeln!(self.input); // a line that asks nothing
        let _ = self.process.wait();
    }
}
