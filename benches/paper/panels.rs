//! Panels of figures: normalized latency by request rate, a curve per system.

use pagedllm::types::options::EngineOptions;
use serde_json::{Value, json};

use crate::simulation::{Job, Machine};
use crate::systems::{Load, System};
use crate::{Result, Scale, map, round};

/// The normalized latency at which the plots end.
const END: f64 = 0.5;

/// A curve of a panel. Ratios compare with the first one.
pub struct Entry {
    pub name: &'static str,
    pub system: System,
    pub options: EngineOptions,
}

impl From<System> for Entry {
    fn from(system: System) -> Entry {
        Entry { name: system.name, system, options: system.options() }
    }
}

pub struct Panel {
    /// What the panel shows, as members of an object.
    pub about: Value,
    pub machine: Machine,
    pub jobs: Box<dyn Fn(f64, f64) -> Vec<Job> + Sync>,
    pub max_output: usize,
    /// A rate near those which the systems sustain.
    pub guess: f64,
    pub entries: Vec<Entry>,
}

struct Curve {
    sustained: f64,
    /// Rates and latencies.
    points: Vec<[f64; 2]>,
}

/// Measures all curves of all panels.
pub fn measure(panels: &[Panel], scale: &Scale) -> Result<Vec<Value>> {
    let runs: Vec<(&Panel, &Entry)> = panels.iter().flat_map(|panel| panel.entries.iter().map(move |entry| (panel, entry))).collect();
    let mut curves = map(&runs, |(panel, entry)| curve(panel, entry, scale))?.into_iter();
    let values = panels.iter().map(|panel| {
        let curves: Vec<Curve> = curves.by_ref().take(panel.entries.len()).collect();
        let system = |(entry, curve): (&Entry, &Curve)| {
            let ratio = round(curves[0].sustained / curve.sustained);
            json!({ "name": entry.name, "sustained": round(curve.sustained), "ratio": ratio, "curve": curve.points })
        };
        let mut value = panel.about.clone();
        value["systems"] = panel.entries.iter().zip(&curves).map(system).collect();
        value
    });
    Ok(values.collect())
}

/// Measures eight rates up to 1.2 times the sustained one, and stops above `END`.
fn curve(panel: &Panel, entry: &Entry, scale: &Scale) -> Result<Curve> {
    let load = Load { machine: panel.machine, jobs: &panel.jobs, seconds: scale.seconds(), max_output: panel.max_output };
    let sustained = load.sustained(&entry.options, &entry.system, panel.guess)?;
    let mut points = Vec::new();
    let count = scale.of(8, 3);
    for point in 1..=count {
        let rate = 1.2 * sustained * f64::from(point) / f64::from(count);
        let latency = load.run(&entry.options, &entry.system, rate)?.normalized_latency().as_secs_f64();
        points.push([round(rate), round(latency)]);
        if latency > END {
            break;
        }
    }
    Ok(Curve { sustained, points })
}
