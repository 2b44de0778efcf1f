//! What was measured, as lines of JSON: report.py makes a table of them.

use serde_json::{Value, json};

use crate::Result;

/// A rate, or a time, beside the best that there could be.
pub struct Line<'a> {
    pub part: &'a str,
    pub case: String,
    /// In numbers, so that peers.py can measure the same.
    pub shape: Value,
    pub value: f64,
    pub unit: &'a str,
    pub limit: f64,
}

impl Line<'_> {
    pub fn print(self) {
        let Line { part, case, shape, value, unit, limit } = self;
        // Infinite where nobody said what there could be; JSON has no such number.
        let limit = limit.is_normal().then_some(limit);
        println!("{}", json!({"part": part, "case": case, "shape": shape, "value": value, "unit": unit, "limit": limit}));
    }
}

pub fn skipped(part: &str, case: &str, why: &str) {
    println!("{}", json!({"part": part, "case": case, "skipped": why}));
}

/// Whether something holds, and why not.
pub fn verdict(part: &str, case: &str, held: Result<()>) {
    let error = held.err().map_or(Value::Null, |error| error.to_string().into());
    println!("{}", json!({"part": part, "case": case, "ok": error.is_null(), "why": error}));
}
