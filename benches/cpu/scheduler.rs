//! Share of a step that is not spent in the model, from the trace of the engine.

use std::path::Path;

use pagedllm::types::options::EngineOptions;
use serde_json::Value;

use crate::cell::{Cell, target};
use crate::common::median;
use crate::worker::{Command, Worker};
use crate::{Options, Result};

const SEQUENCES: usize = 32;
const CONTEXT: u64 = 128;
const STEPS: usize = 32;
/// Phases of a step, in order. The model computes in phase `RUN`.
const PHASES: [&str; 5] = ["commands", "schedule", "run", "decide", "commit"];
const RUN: usize = 2;

pub fn bench(options: &Options) -> Result<()> {
    let sequences = if options.quick { 4 } else { SEQUENCES };
    println!("{sequences} decoding sequences, {} threads, {}; microseconds per step, medians", options.threads, options.isa.name());
    println!("| | step | {} | rest | outside the model | goal |", PHASES.join(" | "));
    println!("| --- |{}", " --- |".repeat(PHASES.len() + 4));
    for cell in options.cells() {
        let mut steps = Vec::new();
        for _ in 0..options.reps {
            steps.extend(traced(&cell, options, sequences)?);
        }
        print(&cell, &steps);
    }
    Ok(())
}

/// Times of a step, in microseconds.
struct Step {
    whole: f64,
    phases: [f64; PHASES.len()],
}

impl Step {
    fn rest(&self) -> f64 {
        self.whole - self.phases.iter().sum::<f64>()
    }

    fn share(&self) -> f64 {
        1.0 - self.phases[RUN] / self.whole
    }
}

fn print(cell: &Cell, steps: &[Step]) {
    let of = |number: &dyn Fn(&Step) -> f64| median(steps.iter().map(number).collect());
    let goal = if cell.shape.name == "S" { 5 } else { 1 };
    let phases: String = (0..PHASES.len()).map(|phase| format!(" {:.0} |", of(&|step| step.phases[phase]))).collect();
    let (whole, rest, share) = (of(&|step| step.whole), of(&Step::rest), 100.0 * of(&Step::share));
    println!("| {} | {whole:.0} |{phases} {rest:.0} | {share:.2} % | {goal} % |", cell.name());
}

/// Returns the steps in which all sequences decode.
fn traced(cell: &Cell, options: &Options, sequences: usize) -> Result<Vec<Step>> {
    let path = target()?.join(format!("bench-results/trace-{}.json", cell.name()));
    std::fs::create_dir_all(path.parent().ok_or("the path of the trace has no parent")?)?;
    let engine = EngineOptions { trace_path: Some(path.clone()), ..cell.engine(options, sequences)? };
    let (mut worker, _) = Worker::start(&engine)?;
    worker.steps(&Command::Add { sequences: sequences as u64, tokens: CONTEXT })?;
    worker.steps(&Command::Decode { steps: STEPS })?;
    drop(worker);
    let steps = read(&path, sequences)?;
    match steps.len() >= STEPS {
        true => Ok(steps),
        false => Err(format!("{} has {} decode steps, expected {STEPS}", path.display(), steps.len()).into()),
    }
}

/// Reads a trace, in which the phases follow their step.
fn read(trace: &Path, sequences: usize) -> Result<Vec<Step>> {
    let events: Vec<Value> = serde_json::from_reader(std::io::BufReader::new(std::fs::File::open(trace)?))?;
    let (mut steps, mut counts) = (Vec::<Step>::new(), false);
    for event in events.iter().filter(|event| event["cat"] == "step") {
        let micros = event["dur"].as_f64().ok_or("an event of the trace has no duration")?;
        let args = &event["args"];
        match PHASES.iter().position(|phase| event["name"] == *phase) {
            Some(phase) if counts => steps.last_mut().ok_or("a phase of the trace has no step")?.phases[phase] += micros,
            Some(_) => {}
            None => {
                counts = args["decode_tokens"] == sequences && args["prefill_tokens"] == 0;
                steps.extend(counts.then_some(Step { whole: micros, phases: Default::default() }));
            }
        }
    }
    Ok(steps)
}
