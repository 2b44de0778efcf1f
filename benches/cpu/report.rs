//! The results as a table and as JSON.

use serde_json::{Value, json};

use crate::common::median;
use crate::noise::Noise;

/// One repetition of one measurement, with its limit at that time.
pub struct Sample {
    pub value: f64,
    pub limit: f64,
    pub bandwidth: f64,
    pub noise: Noise,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Unit {
    TokensPerSecond,
    Seconds,
    Mebibytes,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::TokensPerSecond => "tokens/s",
            Unit::Seconds => "s",
            Unit::Mebibytes => "MiB",
        }
    }
}

pub struct Row {
    pub name: String,
    pub unit: Unit,
    pub samples: Vec<Sample>,
}

impl Row {
    fn median_of(&self, number: impl Fn(&Sample) -> f64) -> f64 {
        median(self.samples.iter().map(number).collect())
    }

    pub fn value(&self) -> f64 {
        self.median_of(|sample| sample.value)
    }

    pub fn limit(&self) -> f64 {
        self.median_of(|sample| sample.limit)
    }

    pub fn is_noisy(&self) -> bool {
        self.samples.iter().any(|sample| sample.noise.is_noisy())
    }

    /// Ratio to the limit. 1 is the best possible value.
    fn share(&self) -> f64 {
        self.median_of(|sample| match self.unit {
            Unit::TokensPerSecond => sample.value / sample.limit,
            Unit::Seconds | Unit::Mebibytes => sample.limit / sample.value,
        })
    }

    fn decimals(&self) -> usize {
        if self.value() < 100.0 { 2 } else { 0 }
    }

    fn noisy(&self) -> &'static str {
        if self.is_noisy() { " noisy" } else { "" }
    }

    fn line(&self) -> String {
        let (value, limit, unit, decimals) = (self.value(), self.limit(), self.unit.name(), self.decimals());
        format!("{:<18} {value:>10.decimals$} {limit:>10.decimals$} {unit:<9} {:>5.1} % {}", self.name, 100.0 * self.share(), self.noisy())
    }

    fn cell(&self) -> String {
        let (value, limit, decimals) = (self.value(), self.limit(), self.decimals());
        format!("{value:.decimals$} / {limit:.decimals$} ({:.0} %){}", 100.0 * self.share(), self.noisy())
    }

    fn json(&self) -> Value {
        let samples: Vec<Value> = self.samples.iter().map(Sample::json).collect();
        let (value, limit) = (round(self.value()), round(self.limit()));
        json!({"name": self.name, "unit": self.unit.name(), "value": value, "limit": limit, "share": round(self.share()), "samples": samples})
    }
}

impl Sample {
    fn json(&self) -> Value {
        let (value, limit, bandwidth) = (round(self.value), round(self.limit), round(self.bandwidth / 1e9));
        json!({"value": value, "limit": limit, "bandwidth_gb_s": bandwidth, "noise": self.noise.json()})
    }
}

fn round(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

/// Rows in the order of their first sample.
#[derive(Default)]
pub struct Report {
    rows: Vec<Row>,
}

impl Report {
    pub fn add(&mut self, name: impl Into<String>, unit: Unit, sample: Sample) {
        let name = name.into();
        match self.rows.iter_mut().find(|row| row.name == name) {
            Some(row) => row.samples.push(sample),
            None => self.rows.push(Row { name, unit, samples: vec![sample] }),
        }
    }

    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    pub fn value(&self, name: &str) -> Option<f64> {
        self.rows.iter().find(|row| row.name == name).map(Row::value)
    }

    /// Prints one line per row.
    pub fn print(&self) {
        println!("{:<18} {:>10} {:>10} {:<9} {:>7}", "", "value", "limit", "", "share");
        self.rows.iter().for_each(|row| println!("{}", row.line()));
    }

    pub fn titles(&self) -> Vec<String> {
        self.rows.iter().map(|row| format!("{}, {}", row.name, row.unit.name())).collect()
    }

    /// Each row's value, limit and share.
    pub fn cells(&self) -> Vec<String> {
        self.rows.iter().map(Row::cell).collect()
    }

    /// Prints the bandwidth during the measurements, and whether rows are noisy.
    pub fn print_conditions<'a>(reports: impl Iterator<Item = &'a Report>) {
        let samples: Vec<&Sample> = reports.flat_map(|report| &report.rows).flat_map(|row| &row.samples).collect();
        let bandwidths = || samples.iter().map(|sample| sample.bandwidth / 1e9);
        let (min, max) = (bandwidths().fold(f64::INFINITY, f64::min), bandwidths().fold(0.0, f64::max));
        println!("memory bandwidth: {min:.1} to {max:.1} GB/s");
        if samples.iter().any(|sample| sample.noise.is_noisy()) {
            println!("warning: other processes used more than 10 % of the cores in the rows marked noisy; repeat them on an idle machine");
        }
    }

    pub fn json(&self) -> Vec<Value> {
        self.rows.iter().map(Row::json).collect()
    }
}
