//! The engine in a separate process, so that its peak memory can be measured. Commands and replies
//! are lines of JSON.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{self, Child, ChildStdin, ChildStdout, Stdio};

use pagedllm::types::options::EngineOptions;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::limits::Step;
use crate::workload::Request;

/// Argument that starts the program as a worker.
pub const ARGUMENT: &str = "--worker";

/// The first line that the worker reads.
#[derive(Serialize, Deserialize)]
pub struct Load {
    pub options: EngineOptions,
    /// `options` does not serialize these two paths.
    pub model_dir: PathBuf,
    pub trace_path: Option<PathBuf>,
}

/// Reply to `Load`.
#[derive(Serialize, Deserialize)]
pub struct Loaded {
    /// Time to read the file of the weights just before loading.
    pub read_seconds: f64,
    pub load_seconds: f64,
}

#[derive(Serialize, Deserialize)]
pub enum Command {
    /// Adds sequences, and steps until each has its first token.
    Add { sequences: u64, tokens: u64 },
    /// Runs steps in which every sequence decodes one token.
    Decode { steps: usize },
    /// Adds requests together, and steps until the last has ended.
    Batch { requests: Vec<Request> },
    /// Aborts all requests.
    AbortAll,
    /// Returns the peak memory of the process.
    PeakMemory,
}

/// Reply to every command that runs steps.
#[derive(Serialize, Deserialize)]
pub struct Steps {
    pub seconds: f64,
    pub steps: Vec<Step>,
}

#[derive(Serialize, Deserialize)]
pub struct Peak {
    /// None if the system does not report it.
    pub bytes: Option<u64>,
    /// Maximum number of used KV blocks.
    pub blocks: u64,
}

/// Connection to a worker process.
pub struct Worker {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts this program again as a worker, which loads the model.
    pub fn start(options: &EngineOptions) -> Result<(Worker, Loaded)> {
        let mut command = process::Command::new(std::env::current_exe()?);
        let mut process = command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let (input, output) = (input.ok_or("the worker has no input")?, BufReader::new(output.ok_or("the worker has no output")?));
        let mut worker = Worker { process, input, output };
        let EngineOptions { model_dir, trace_path, .. } = options.clone();
        let loaded = worker.send(&Load { options: options.clone(), model_dir, trace_path })?;
        Ok((worker, loaded))
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn send<T: DeserializeOwned>(&mut self, command: &impl Serialize) -> Result<T> {
        writeln!(self.input, "{}", serde_json::to_string(command)?)?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let reply: std::result::Result<T, String> =
            serde_json::from_str(&line).map_err(|e| format!("the worker ended or wrote an invalid reply ({e}): {line:?}"))?;
        Ok(reply?)
    }

    pub fn steps(&mut self, command: &Command) -> Result<Steps> {
        self.send(command)
    }

    pub fn abort_all(&mut self) -> Result<()> {
        self.send(&Command::AbortAll)
    }
}

/// Waits for the end of the process, so that its trace is complete.
impl Drop for Worker {
    fn drop(&mut self) {
        let _ = writeln!(self.input); // an empty line ends the worker
        let _ = self.process.wait();
    }
}
