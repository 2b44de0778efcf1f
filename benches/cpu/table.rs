//! Measures cells, repetition by repetition, and prints them with their limits.

use std::fs;
use std::path::Path;

use pagedllm::engine::Engine;
use serde_json::{Value, json};

use crate::cell::{Cell, target};
use crate::limits::Arithmetic;
use crate::options::Mode;
use crate::report::Report;
use crate::{Options, Result, arithmetic, probes, run};

/// Minimum ratio of the tokens per second of a batch of 32 to those of one sequence.
const GOAL: f64 = 5.0;

/// A cell and its results.
struct Line {
    cell: Cell,
    arithmetic: Arithmetic,
    report: Report,
}

pub fn bench(options: &Options) -> Result<()> {
    let line = |cell| Line { cell, arithmetic: Arithmetic::default(), report: Report::default() };
    let mut lines: Vec<Line> = options.cells().into_iter().map(line).collect();
    let memory = probes::Memory::new(options.probe_bytes(), options.threads);
    for rep in 0..options.reps {
        for Line { cell, arithmetic: best, report } in &mut lines {
            eprintln!("repetition {} of {}: {}", rep + 1, options.reps, cell.name());
            *best = best.max(arithmetic(options, cell.weights.arithmetic()));
            run::repeat(cell, options, options.mode == Mode::Cell, &memory, *best, report)?;
        }
    }
    print(options, &lines)?;
    let path = options.json.clone().map_or_else(|| Ok(target()?.join("bench-results/cpu.json")), Result::Ok)?;
    save(&path, &json(options, &lines)?)?;
    println!("saved as {}", path.display());
    Ok(())
}

fn print(options: &Options, lines: &[Line]) -> Result<()> {
    println!(
        "{}, {} threads, {}, KV in {}, medians of {} repetitions",
        cpu_name(),
        options.threads,
        options.isa.name(),
        kv(options, lines)?,
        options.reps
    );
    for Line { cell, arithmetic: Arithmetic { weights, attention }, .. } in lines {
        println!("{}: arithmetic {:.0} GFLOP/s (weights), {:.0} GFLOP/s (attention)", cell.name(), weights / 1e9, attention / 1e9);
    }
    match options.mode {
        Mode::Cell => lines.iter().for_each(|line| print_alone(&line.report)),
        _ => print_table(lines),
    }
    Report::print_conditions(lines.iter().map(|line| &line.report));
    Ok(())
}

fn print_alone(report: &Report) {
    report.print();
    if let (Some(alone), Some(batch)) = (report.value("decode at 128"), report.value("decode 32")) {
        println!("batch of 32 / one sequence: {:.1} (goal: at least {GOAL})", batch / alone);
    }
}

/// Prints one line per cell and one column per measurement.
fn print_table(lines: &[Line]) {
    let Some(first) = lines.first() else { return };
    println!("| value / limit (share) | {} |", first.report.titles().join(" | "));
    println!("| --- |{}", " --- |".repeat(first.report.titles().len()));
    for Line { cell, report, .. } in lines {
        println!("| {} | {} |", cell.name(), report.cells().join(" | "));
    }
}

fn json(options: &Options, lines: &[Line]) -> Result<Value> {
    let giga = |rate: f64| (rate / 1e9).round();
    let cell = |Line { cell, arithmetic, report }: &Line| {
        json!({
            "cell": cell.name(), "model": cell.shape.name, "weights": cell.weights.name(), "group": cell.group(), "arithmetic_gflop_s": giga(arithmetic.weights),
            "attention_gflop_s": giga(arithmetic.attention), "rows": report.json(),
        })
    };
    Ok(json!({
        "version": env!("CARGO_PKG_VERSION"), "cpu": cpu_name(), "threads": options.threads, "isa": options.isa.name(),
        "kv_dtype": kv(options, lines)?, "reps": options.reps, "cells": lines.iter().map(cell).collect::<Vec<_>>(),
    }))
}

/// KV format: the option, or the engine's default.
fn kv(options: &Options, lines: &[Line]) -> Result<&'static str> {
    let first = lines.first().ok_or("no cell to measure")?;
    Ok(Engine::plan(&first.cell.engine(options, 1)?)?.kv_dtype.name())
}

fn save(path: &Path, results: &Value) -> Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    Ok(fs::write(path, serde_json::to_string_pretty(results)? + "\n")?)
}

fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")).and_then(|rest| rest.split_once(':'));
    name.map_or("unknown", |(_, name)| name.trim()).to_string()
}
