//! One repetition of one cell: every measurement with a new engine.

use pagedllm::engine::{Engine, MemoryPlan};
use pagedllm::types::options::EngineOptions;

use crate::cell::Cell;
use crate::common::median;
use crate::limits::{Arithmetic, Costs, Step};
use crate::noise::{Noise, NoiseMonitor};
use crate::report::{Report, Sample, Unit};
use crate::worker::{Command, Loaded, Peak, Steps, Worker};
use crate::{Options, Result, probes, workload};

/// Prompt length of the sequences that decode together.
const CONTEXT: u64 = 128;
const BATCH_STEPS: usize = 16;
/// Steps of one sequence that decodes alone: at least a second.
const ALONE_STEPS: usize = 64;
/// Number of timed short prompts. Each takes a tenth of a second, and the speed of a shared machine
/// varies more within that time.
const SHORT_PROMPTS: usize = 3;

/// An engine in a worker process, and the speed of the machine.
pub struct Run<'a> {
    pub worker: Worker,
    pub costs: Costs,
    pub loaded: Loaded,
    plan: MemoryPlan,
    memory: &'a probes::Memory,
    pub arithmetic: Arithmetic,
}

/// Measured steps, with the bandwidth and the noise during them.
pub struct Measured {
    pub seconds: f64,
    pub steps: Vec<Step>,
    pub bandwidth: f64,
    pub noise: Noise,
}

impl Measured {
    pub fn tokens(&self) -> u64 {
        self.steps.iter().map(|step| step.logits).sum()
    }
}

impl<'a> Run<'a> {
    /// Starts a worker that loads the model.
    pub fn start(cell: &Cell, engine: &EngineOptions, memory: &'a probes::Memory, arithmetic: Arithmetic) -> Result<Run<'a>> {
        let plan = Engine::plan(engine)?;
        probes::touch_memory(plan.weight_bytes as usize + memory.bytes(), engine.threads.unwrap_or(1));
        let (worker, loaded) = Worker::start(engine)?;
        let mut run = Run { worker, costs: Costs::new(cell, &plan), loaded, plan, memory, arithmetic };
        run.warm_up(16)?;
        Ok(run)
    }

    /// Runs a prompt that is not counted. It wakes the threads and touches the pages.
    fn warm_up(&mut self, tokens: u64) -> Result<()> {
        self.worker.steps(&Command::Add { sequences: 1, tokens })?;
        self.worker.abort_all()
    }

    /// Measures the bandwidth just before and just after the steps.
    pub fn measure(&mut self, command: &Command) -> Result<Measured> {
        let before = self.memory.bandwidth();
        let monitor = NoiseMonitor::start(Some(self.worker.id()));
        let Steps { seconds, steps } = self.worker.steps(command)?;
        let noise = monitor.stop(Some(self.worker.id()));
        Ok(Measured { seconds, steps, bandwidth: median(vec![before, self.memory.bandwidth()]), noise })
    }

    /// Sum of the limits of all steps, in seconds.
    pub fn min_seconds(&self, measured: &Measured) -> f64 {
        measured.steps.iter().map(|step| self.costs.seconds(step, measured.bandwidth, self.arithmetic)).sum()
    }

    /// Tokens per second, with the limit.
    pub fn rate(&self, tokens: u64, measured: &Measured) -> Sample {
        let Measured { seconds, bandwidth, noise, .. } = *measured;
        let rate = |seconds: f64| tokens as f64 / seconds;
        Sample { value: rate(seconds), limit: rate(self.min_seconds(measured)), bandwidth, noise }
    }
}

/// Batch sizes of the decode rows. `all` selects every size instead of 1.
fn batches(options: &Options, all: bool) -> &'static [u64] {
    match (all, options.quick) {
        (false, _) => &[1],
        (true, true) => &[1, 4],
        (true, false) => &[1, 2, 4, 8, 16, 32],
    }
}

/// Measures every row of the cell.
pub fn repeat(
    cell: &Cell,
    options: &Options,
    all: bool,
    memory: &probes::Memory,
    arithmetic: Arithmetic,
    report: &mut Report,
) -> Result<()> {
    let requests = workload::requests(cell.shape.name, options)?;
    let batches = batches(options, all);
    let max_seqs = batches.iter().fold(requests.len(), |max, &batch| max.max(batch as usize));
    let (bandwidth, monitor) = (memory.bandwidth(), NoiseMonitor::start(None));
    let mut run = Run::start(cell, &cell.engine(options, max_seqs)?, memory, arithmetic)?;
    let noise = monitor.stop(Some(run.worker.id()));
    let Loaded { read_seconds, load_seconds } = run.loaded;
    report.add("load", Unit::Seconds, Sample { value: load_seconds, limit: read_seconds, bandwidth, noise });
    let [short, long] = if options.quick { [64, 600] } else { [512, 2048] };
    prefill(&mut run, short, SHORT_PROMPTS, report)?;
    prefill(&mut run, long, 1, report)?;
    let alone = run.measure(&Command::Decode { steps: ALONE_STEPS })?;
    run.worker.abort_all()?;
    decode(&mut run, batches, report)?;
    report.add(format!("decode at {long}"), Unit::TokensPerSecond, run.rate(alone.tokens(), &alone));
    let output = requests.iter().map(|request| request.output).sum();
    let batch = run.measure(&Command::Batch { requests })?;
    if batch.tokens() != output {
        return Err(format!("the batch has a wrong number of tokens ({}, expected {output})", batch.tokens()).into());
    }
    report.add("batch", Unit::TokensPerSecond, run.rate(output, &batch));
    peak_memory(&mut run, report)
}

/// Measures prompts, one at a time, each until its first token. A warm-up of the same length comes
/// first, as in benches/peers. The median counts. The last sequence stays in the engine.
pub fn prefill(run: &mut Run, tokens: u64, times: usize, report: &mut Report) -> Result<()> {
    run.warm_up(tokens)?;
    let mut samples = Vec::new();
    for _ in 0..times {
        run.worker.abort_all()?;
        let measured = run.measure(&Command::Add { sequences: 1, tokens })?;
        samples.push(run.rate(tokens, &measured));
    }
    samples.sort_by(|one, other| one.value.total_cmp(&other.value));
    report.add(format!("prefill {tokens}"), Unit::TokensPerSecond, samples.swap_remove(times / 2));
    Ok(())
}

/// Adds sequences for each batch size. Earlier sequences are longer by the steps already measured.
pub fn decode(run: &mut Run, batches: &[u64], report: &mut Report) -> Result<()> {
    let mut sequences = 0;
    for &batch in batches {
        run.worker.steps(&Command::Add { sequences: batch - sequences, tokens: CONTEXT })?;
        sequences = batch;
        let (name, steps) = match batch {
            1 => (format!("decode at {CONTEXT}"), ALONE_STEPS),
            _ => (format!("decode {batch}"), BATCH_STEPS),
        };
        let measured = run.measure(&Command::Decode { steps })?;
        report.add(name, Unit::TokensPerSecond, run.rate(measured.tokens(), &measured));
    }
    run.worker.abort_all()
}

/// The limit is the size of the weights and of the used KV blocks.
fn peak_memory(run: &mut Run, report: &mut Report) -> Result<()> {
    let monitor = NoiseMonitor::start(Some(run.worker.id()));
    let Peak { bytes, blocks } = run.worker.send(&Command::PeakMemory)?;
    let noise = monitor.stop(Some(run.worker.id()));
    let mebibytes = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    let needed = run.plan.weight_bytes + blocks * run.plan.block_bytes;
    let value = bytes.map_or(f64::NAN, mebibytes);
    report.add("peak memory", Unit::Mebibytes, Sample { value, limit: mebibytes(needed), bandwidth: run.memory.bandwidth(), noise });
    Ok(())
}
