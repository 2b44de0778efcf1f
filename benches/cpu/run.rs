//! One repetition of one cell: a fresh engine through every measurement.

use pagedllm::engine::{Engine, MemoryPlan};
use pagedllm::options::EngineOptions;

use crate::cell::Cell;
use crate::common::median;
use crate::limits::{Arithmetic, Costs, Step};
use crate::noise::{Noise, Watch};
use crate::report::{Report, Sample, Unit};
use crate::worker::{Loaded, Peak, Question, Steps, Worker};
use crate::{Options, Result, probes, workload};

/// Prompt length of the sequences that decode together.
const CONTEXT: u64 = 128;
const BATCH_STEPS: usize = 16;
/// A second or more, where one sequence decodes alone.
const ALONE_STEPS: usize = 64;
/// How often a short prompt is timed: it takes a tenth of a second, in which a shared machine is now fast, now slow.
const SHORT_PROMPTS: usize = 3;

/// An engine in its process, and how fast its machine is.
pub struct Run<'a> {
    pub worker: Worker,
    pub costs: Costs,
    pub loaded: Loaded,
    plan: MemoryPlan,
    memory: &'a probes::Memory,
    pub arithmetic: Arithmetic,
}

/// Steps that were computed, and what the machine was like meanwhile.
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
    /// Loads the model.
    pub fn start(cell: &Cell, engine: &EngineOptions, memory: &'a probes::Memory, arithmetic: Arithmetic) -> Result<Run<'a>> {
        let plan = Engine::plan(engine)?;
        probes::have_memory_lent(plan.weight_bytes as usize + memory.bytes(), engine.threads.unwrap_or(1));
        let (worker, loaded) = Worker::start(engine)?;
        let mut run = Run { worker, costs: Costs::of(cell, &plan), loaded, plan, memory, arithmetic };
        run.warm_up(16)?;
        Ok(run)
    }

    /// A prompt that is not counted: threads awake, pages there.
    fn warm_up(&mut self, tokens: u64) -> Result<()> {
        self.worker.steps(&Question::Join { sequences: 1, tokens })?;
        self.worker.leave()
    }

    /// With the memory's speed taken just before and just after.
    pub fn measure(&mut self, question: &Question) -> Result<Measured> {
        let before = self.memory.bandwidth();
        let watch = Watch::start(Some(self.worker.id()));
        let Steps { seconds, steps } = self.worker.steps(question)?;
        let noise = watch.stop(Some(self.worker.id()));
        Ok(Measured { seconds, steps, bandwidth: median(vec![before, self.memory.bandwidth()]), noise })
    }

    /// The least time of steps.
    pub fn least_seconds(&self, measured: &Measured) -> f64 {
        measured.steps.iter().map(|step| self.costs.seconds(step, measured.bandwidth, self.arithmetic)).sum()
    }

    /// `tokens` a second.
    pub fn rate(&self, tokens: u64, measured: &Measured) -> Sample {
        let Measured { seconds, bandwidth, noise, .. } = *measured;
        let rate = |seconds: f64| tokens as f64 / seconds;
        Sample { value: rate(seconds), limit: rate(self.least_seconds(measured)), bandwidth, noise }
    }
}

/// Which sequences decode together: with batches of every size, or one alone.
fn batches(options: &Options, all: bool) -> &'static [u64] {
    match (all, options.quick) {
        (false, _) => &[1],
        (true, true) => &[1, 4],
        (true, false) => &[1, 2, 4, 8, 16, 32],
    }
}

/// Every row of the cell.
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
    let most = batches.iter().fold(requests.len(), |most, &batch| most.max(batch as usize));
    let (bandwidth, watch) = (memory.bandwidth(), Watch::start(None));
    let mut run = Run::start(cell, &cell.engine(options, most)?, memory, arithmetic)?;
    let noise = watch.stop(Some(run.worker.id()));
    let Loaded { read_seconds, load_seconds } = run.loaded;
    report.add("load", Unit::Seconds, Sample { value: load_seconds, limit: read_seconds, bandwidth, noise });
    let [short, long] = if options.quick { [64, 600] } else { [512, 2048] };
    prefill(&mut run, short, SHORT_PROMPTS, report)?;
    prefill(&mut run, long, 1, report)?;
    let alone = run.measure(&Question::Decode { steps: ALONE_STEPS })?;
    run.worker.leave()?;
    decode(&mut run, batches, report)?;
    report.add(format!("decode at {long}"), Unit::TokensPerSecond, run.rate(alone.tokens(), &alone));
    let output = requests.iter().map(|request| request.output).sum();
    let batch = run.measure(&Question::Batch { requests })?;
    if batch.tokens() != output {
        return Err(format!("the batch gave {} tokens, not {output}", batch.tokens()).into());
    }
    report.add("batch", Unit::TokensPerSecond, run.rate(output, &batch));
    peak_memory(&mut run, report)
}

/// Prompts, one at a time, each until its first token, after one of that length that is not counted: as the peers are measured. The
/// middle one counts, and the last stays.
fn prefill(run: &mut Run, tokens: u64, times: usize, report: &mut Report) -> Result<()> {
    run.warm_up(tokens)?;
    let mut samples = Vec::new();
    for _ in 0..times {
        run.worker.leave()?;
        let measured = run.measure(&Question::Join { sequences: 1, tokens })?;
        samples.push(run.rate(tokens, &measured));
    }
    samples.sort_by(|one, other| one.value.total_cmp(&other.value));
    report.add(format!("prefill {tokens}"), Unit::TokensPerSecond, samples.swap_remove(times / 2));
    Ok(())
}

/// Fills up the batch with fresh sequences; those already there have grown a little.
fn decode(run: &mut Run, batches: &[u64], report: &mut Report) -> Result<()> {
    let mut there = 0;
    for &batch in batches {
        run.worker.steps(&Question::Join { sequences: batch - there, tokens: CONTEXT })?;
        there = batch;
        let (name, steps) = match batch {
            1 => (format!("decode at {CONTEXT}"), ALONE_STEPS),
            _ => (format!("decode {batch}"), BATCH_STEPS),
        };
        let measured = run.measure(&Question::Decode { steps })?;
        report.add(name, Unit::TokensPerSecond, run.rate(measured.tokens(), &measured));
    }
    run.worker.leave()
}

/// Beside the weights and the K and V that were in use.
fn peak_memory(run: &mut Run, report: &mut Report) -> Result<()> {
    let watch = Watch::start(Some(run.worker.id()));
    let Peak { bytes, blocks } = run.worker.ask(&Question::Memory)?;
    let noise = watch.stop(Some(run.worker.id()));
    let mebibytes = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    let needed = run.plan.weight_bytes + blocks * run.plan.block_bytes;
    let value = bytes.map_or(f64::NAN, mebibytes);
    report.add("peak memory", Unit::Mebibytes, Sample { value, limit: mebibytes(needed), bandwidth: run.memory.bandwidth(), noise });
    Ok(())
}
