//! Functions that several benchmarks use.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Instant;

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

/// Reads a file from its start to its end. Returns the time in seconds.
#[allow(dead_code)] // some benchmarks read no files
pub fn read_whole(path: &Path) -> std::io::Result<f64> {
    let mut piece = vec![0u8; 4 << 20];
    let start = Instant::now();
    let mut file = File::open(path)?;
    while file.read(&mut piece)? > 0 {}
    Ok(start.elapsed().as_secs_f64())
}
