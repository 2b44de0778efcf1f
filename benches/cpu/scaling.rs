//! The same work with 1, 2, 4 and more threads, up to all of this machine: a prompt, one sequence and a
//! batch. Prints lines of JSON for benches/gpu/report.py.

use serde_json::json;

use crate::cell::Cell;
use crate::probes::Memory;
use crate::report::Report;
use crate::run::{Run, decode, prefill};
use crate::{Options, Result, arithmetic};

const PART: &str = "CPU scaling";

pub fn bench(mut options: Options) -> Result<()> {
    let all = options.threads;
    for cell in options.cells() {
        let mut of_one = Report::default();
        for threads in (0..).map(|power| 1 << power).take_while(|&threads| threads < all).chain([all]) {
            options.threads = threads;
            let mut report = Report::default();
            measure(&cell, &options, &mut report)?;
            if threads == 1 {
                of_one = report;
                print(&cell, threads, &of_one, &of_one);
            } else {
                print(&cell, threads, &report, &of_one);
            }
        }
    }
    Ok(())
}

fn measure(cell: &Cell, options: &Options, report: &mut Report) -> Result<()> {
    let (prompt, batch) = if options.quick { (64, 4) } else { (512, 32) };
    let memory = Memory::new(options.probe_bytes(), options.threads);
    let engine = cell.engine(options, batch as usize)?;
    let mut run = Run::start(cell, &engine, &memory, arithmetic(options, cell.weights.arithmetic()))?;
    prefill(&mut run, prompt, 1, report)?;
    run.worker.abort_all()?;
    decode(&mut run, &[1, batch], report)
}

/// Prints the rates, with those of one thread beside them. The limit is that of as many threads.
fn print(cell: &Cell, threads: usize, report: &Report, of_one: &Report) {
    let plural = if threads == 1 { "" } else { "s" };
    for row in report.rows() {
        let shape = json!({"cell": cell.name(), "threads": threads, "row": row.name});
        let noisy = if row.is_noisy() { ", noisy" } else { "" };
        let case = format!("{}, {}, {threads} thread{plural}{noisy}", row.name, cell.name());
        println!("{}", json!({"part": PART, "case": case, "shape": shape, "value": row.value(), "unit": "tokens/s", "limit": row.limit()}));
        if let Some(one) = of_one.value(&row.name).filter(|_| threads > 1) {
            println!("{}", json!({"part": PART, "shape": shape, "value": one, "unit": "tokens/s", "peer": "one thread"}));
        }
    }
}
