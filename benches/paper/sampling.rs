//! Figures 14 and 15: parallel sampling and beam search.

use serde_json::{Value, json};

use crate::panels::{Entry, Panel, measure};
use crate::rates::jobs;
use crate::simulation::workload::{ALPACA, Branching, Lengths, MAX_LEN, SHAREGPT};
use crate::simulation::{Job, Simulation};
use crate::systems::*;
use crate::{Result, Scale, map, round};

const SYSTEMS: [System; 5] = [OURS, VLLM, ORACLE, POW2, MAX];
const WIDTHS: [u32; 3] = [2, 4, 6];
/// Scale of the random scores of beam search. The best token has a mean probability of 0.66.
const SCALE: f32 = 2.0;
/// Scales with which the best token has a mean probability of 0.38, 0.66 and 0.82.
const SCALES: [f32; 3] = [1.0, SCALE, 4.0];

fn branched(lengths: Lengths, branching: Branching) -> impl Fn(f64, f64) -> Vec<Job> + Sync {
    let jobs = jobs(lengths);
    move |rate, seconds| {
        let mut jobs = jobs(rate, seconds);
        for job in &mut jobs {
            job.branching = branching;
            // The simulation writes the length of a beam search into three tokens of its prompt, and an
            // output of one token has no beams.
            job.prompt = job.prompt.max(3);
            job.output = job.output.clamp(2, MAX_LEN - job.prompt);
        }
        jobs
    }
}

fn name(branching: Branching) -> String {
    match branching {
        Branching::One => "one sequence".into(),
        Branching::Samples(n) => format!("{n} samples"),
        Branching::Beams { width, .. } => format!("beam search, width {width}"),
    }
}

pub fn figure_14(scale: &Scale) -> Result<Value> {
    let samples = WIDTHS.map(Branching::Samples);
    let beams = WIDTHS.map(|width| Branching::Beams { width, scale: SCALE });
    let branchings = [Branching::One].into_iter().chain(samples).chain(beams).take(scale.of(7, 2));
    let panel = |branching: Branching| {
        Ok(Panel {
            about: json!({ "branching": name(branching) }),
            machine: OPT_13B.machine()?,
            jobs: Box::new(branched(ALPACA, branching)),
            max_output: MAX_LEN,
            guess: 20.0 / branching.sequences() as f64,
            entries: SYSTEMS.map(Entry::from).into(),
        })
    };
    let panels = branchings.map(panel).collect::<Result<Vec<_>>>()?;
    Ok(json!({ "panels": measure(&panels, scale)? }))
}

/// Requests arrive so slowly that none waits.
pub fn figure_15(scale: &Scale) -> Result<Value> {
    let samples = WIDTHS.map(Branching::Samples);
    let beams = |scale: f32| WIDTHS.map(|width| Branching::Beams { width, scale });
    let branchings: Vec<Branching> = samples.into_iter().chain(SCALES.into_iter().flat_map(beams)).collect();
    let runs: Vec<(Lengths, Branching)> =
        [ALPACA, SHAREGPT].into_iter().flat_map(|lengths| branchings.iter().map(move |&branching| (lengths, branching))).collect();
    let rows = map(&runs, |&(lengths, branching)| {
        let mut jobs = branched(lengths, branching)(0.2, f64::from(scale.of(1000, 50)));
        jobs.iter_mut().for_each(|job| job.max_tokens = MAX_LEN - job.prompt);
        let simulation = Simulation::new(&OURS.options(), OPT_13B.machine()?)?;
        simulation.sharing.count();
        simulation.serve(&jobs, &mut ())?;
        let scale = if let Branching::Beams { scale, .. } = branching { json!(scale) } else { Value::Null };
        let saved = round(100.0 * simulation.sharing.saved());
        let width = branching.sequences();
        Ok(json!({ "data": lengths.name, "branching": name(branching), "width": width, "scale": scale, "saved": saved }))
    })?;
    Ok(json!({ "rows": rows }))
}
