//! Results as lines of JSON, from which report.py makes a table.

use serde_json::{Value, json};

use crate::Result;

/// A rate or a time, with its limit.
pub struct Line<'a> {
    pub part: &'a str,
    pub case: String,
    /// The case as numbers, so that peers.py can measure the same.
    pub shape: Value,
    pub value: f64,
    pub unit: &'a str,
    pub limit: f64,
}

impl Line<'_> {
    pub fn print(self) {
        let Line { part, case, shape, value, unit, limit } = self;
        // Without a known limit it is infinite, which JSON cannot represent.
        let limit = limit.is_normal().then_some(limit);
        println!("{}", json!({"part": part, "case": case, "shape": shape, "value": value, "unit": unit, "limit": limit}));
    }
}

/// Prints the number of another engine, or of another way to compute the same, for the same shape.
pub fn peer(part: &str, shape: &Value, value: f64, unit: &str, name: &str) {
    println!("{}", json!({"part": part, "shape": shape, "value": value, "unit": unit, "peer": name}));
}

pub fn skipped(part: &str, case: &str, why: &str) {
    println!("{}", json!({"part": part, "case": case, "skipped": why}));
}

/// Prints whether a property holds, and the reason if it does not.
pub fn verdict(part: &str, case: &str, result: Result<()>) {
    let error = result.err().map_or(Value::Null, |error| error.to_string().into());
    println!("{}", json!({"part": part, "case": case, "ok": error.is_null(), "why": error}));
}
