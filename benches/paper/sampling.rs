//! Figures 14 and 15: parallel sampling and beam search.

use serde_json::{Value, json};

use crate::rates::jobs;
use crate::simulation::workload::{ALPACA, Branching, Lengths, MAX_LEN, SHAREGPT};
use crate::simulation::{Job, Simulation};
use crate::systems::*;
use crate::{Result, Scale, map, round};

const SYSTEMS: [System; 5] = [OURS, VLLM, ORACLE, POW2, MAX];
const WIDTHS: [u32; 3] = [2, 4, 6];
/// Scales of the random scores of beam search. The best token has a mean probability of 0.38, 0.66
/// and 0.82 with them.
const SCALES: [f32; 3] = [1.0, 2.0, 4.0];

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
    let beams = WIDTHS.map(|width| Branching::Beams { width, scale: SCALES[1] });
    let panels: Vec<Branching> = [Branching::One].into_iter().chain(samples).chain(beams).take(scale.of(7, 2)).collect();
    let runs: Vec<(Branching, System)> = panels.iter().flat_map(|&branching| SYSTEMS.map(|system| (branching, system))).collect();
    let results = map(&runs, |&(branching, system)| {
        let jobs = branched(ALPACA, branching);
        let load = Load { machine: OPT_13B.machine()?, jobs: &jobs, seconds: scale.seconds(), max_output: MAX_LEN };
        let guess = 20.0 / branching.sequences() as f64;
        let sustained = load.sustained(&system.options(), &system, guess)?;
        Ok((sustained, curve(&load, &system.options(), &system, 1.2 * sustained, scale)?))
    })?;
    let panel = |(number, branching): (usize, &Branching)| {
        let of = |system: usize| &results[number * SYSTEMS.len() + system];
        let systems: Vec<Value> = (0..SYSTEMS.len())
            .map(|system| {
                let (sustained, curve) = of(system);
                let ratio = of(0).0 / sustained;
                json!({ "name": SYSTEMS[system].name, "sustained": round(*sustained), "ratio": round(ratio), "curve": curve })
            })
            .collect();
        json!({ "branching": name(*branching), "systems": systems })
    };
    Ok(json!({ "trace_seconds": scale.seconds(), "panels": panels.iter().enumerate().map(panel).collect::<Vec<_>>() }))
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
        Ok(json!({ "data": lengths.name, "branching": name(branching), "width": branching.sequences(), "scale": scale, "saved": saved }))
    })?;
    Ok(json!({ "rows": rows }))
}
