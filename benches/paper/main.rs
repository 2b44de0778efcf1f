//! The evaluation of the PagedAttention paper (Kwon et al., SOSP 2023), repeated with the
//! production scheduler and block manager on simulated machines, and with the CPU engine. Writes
//! every number as JSON; report.py makes the page and the plots.

mod ablation;
mod blocks;
mod chat;
mod engine;
mod kernel;
mod lengths;
mod panels;
mod prefix;
mod rates;
mod sampling;
#[path = "../simulation/mod.rs"]
mod simulation;
mod swapping;
mod systems;
mod today;
mod waste;

use std::time::Instant;

use serde_json::{Map, Value, json};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
/// Computes the numbers of a figure.
type Figure = fn(&Scale) -> Result<Value>;

/// The size of the experiments.
pub struct Scale {
    /// Whether only a short form runs, which shows that everything works.
    pub quick: bool,
}

impl Scale {
    /// Returns the first value, or the second one in the short form.
    pub fn of<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Length of a trace in simulated seconds. Slow systems have longer ones (`trace_len`).
    pub fn seconds(&self) -> f64 {
        self.of(400.0, 40.0)
    }
}

/// Returns the number of requests of a trace: at least 1,000 for traces of 400 s.
pub fn trace_len(rate: f64, seconds: f64) -> usize {
    (seconds * rate.max(2.5)).ceil() as usize
}

const FIGURES: [(&str, Figure); 16] = [
    ("table_1", lengths::table_1),
    ("figure_2", waste::figure_2),
    ("figure_11", lengths::figure_11),
    ("figure_12", rates::figure_12),
    ("figure_13", waste::figure_13),
    ("figure_14", sampling::figure_14),
    ("figure_15", sampling::figure_15),
    ("figure_16", prefix::figure_16),
    ("figure_17", chat::figure_17),
    ("figure_18a", kernel::figure_18a),
    ("figure_18b", blocks::figure_18b),
    ("figure_19a", swapping::figure_19a),
    ("figure_19b", swapping::figure_19b),
    ("ablation", ablation::ablation),
    ("today", today::today),
    ("engine", engine::engine),
];

/// Arguments: `--quick`, `--out FILE`, and names of figures; the default is all. Figures of FILE
/// that are not named stay as they are.
fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let (mut scale, mut out, mut named) = (Scale { quick: false }, None, Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => scale.quick = true,
            "--out" => out = Some(arguments.next().ok_or("--out has no value; pass a file")?),
            name if FIGURES.iter().any(|(figure, _)| *figure == name) => named.push(argument),
            _ => return Err(format!("{argument} is no figure; pass one of {}", FIGURES.map(|(name, _)| name).join(", ")).into()),
        }
    }
    let mut numbers: Map<String, Value> = match out.as_ref().filter(|_| !named.is_empty()).map(std::fs::read) {
        Some(Ok(text)) => serde_json::from_slice(&text)?,
        _ => Map::new(),
    };
    numbers.insert("quick".into(), json!(scale.quick));
    for (name, figure) in FIGURES {
        if named.is_empty() || named.iter().any(|named| named == name) {
            let start = Instant::now();
            let mut values = figure(&scale)?;
            values["seconds"] = json!(start.elapsed().as_secs());
            eprintln!("{name}: {} s", values["seconds"]);
            numbers.insert(name.into(), values);
        }
    }
    let text = serde_json::to_string_pretty(&numbers)? + "\n";
    match out {
        Some(path) => std::fs::write(path, text)?,
        None => print!("{text}"),
    }
    Ok(())
}

/// Rounds to four digits, so that the JSON stays readable.
pub fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let digits = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * digits).round() / digits
}

/// Calls a function for every item, on all cores, and returns the results in order.
pub fn map<T: Sync, R: Send>(items: &[T], function: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<Result<R>>>> = items.iter().map(|_| Mutex::new(None)).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { break };
                    *results[index].lock().expect("no thread panics") = Some(function(item));
                }
            });
        }
    });
    results.into_iter().map(|result| result.into_inner().expect("no thread panics").expect("every item was visited")).collect()
}
