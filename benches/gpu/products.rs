//! Matrix products of LLaMA-3-8B, for 1 to 4,096 rows. In the default mode cuBLASLt computes
//! products of many rows. In the mode `batch_invariant` the bits do not depend on the number of
//! rows. Thresholds compare the library's kernels with cuBLASLt for few rows.

use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{Alloc, BackendTypes, Ops, RowSource, Section};
use pagedllm::error;
use pagedllm::types::options::{Dtype, WeightFormat};
use serde_json::json;

use crate::Result;
use crate::line::{Line, peer, skipped};
use crate::options::Options;
use crate::random::{Weights, numbers};
use crate::timing::seconds;

const PART: &str = "products";
const ROWS: [usize; 11] = [1, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 4096];
/// (name, outputs, inputs)
const MATRICES: [(&str, usize, usize); 5] = [
    ("qkv", 6144, 4096),
    ("attention's output", 4096, 4096),
    ("gate and up", 28_672, 4096),
    ("down", 4096, 14_336),
    ("head", 128_256, 4096),
];
const SMALL: [(&str, usize, usize); 1] = [("small", 96, 200)];
/// All formats are compared with torch in bf16.
const FORMATS: [WeightFormat; 4] =
    [WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Int8, WeightFormat::Int4 { group: 64, offsets: true }];
/// More bytes than the caches of any device hold.
const BEYOND_CACHES: usize = 256 << 20;

/// Numbers of rows near the one from which on cuBLASLt is faster.
const THRESHOLDS: &str = "thresholds";
const THRESHOLD_ROWS: [usize; 9] = [8, 16, 17, 24, 32, 48, 64, 96, 128];

/// Environment variable for experiments: the number of rows from which on products use cuBLASLt.
const MIN_BLAS_ROWS: &str = "MIN_BLAS_ROWS";

type Buf = <CudaBackend as BackendTypes>::Buf;
type Matrix = <CudaBackend as BackendTypes>::Matrix;

pub fn bench(options: &Options) -> Result<()> {
    for invariant in [false, true] {
        let mut backend = CudaBackend::new(0, invariant)?;
        if let Ok(rows) = std::env::var(MIN_BLAS_ROWS) {
            backend.use_blas_from(rows.parse()?);
        }
        if !invariant && !uses_blas(&backend) {
            skipped(PART, "default", "cuBLASLt was not found, so both modes are the same");
            continue;
        }
        let mode = if invariant { "batch_invariant" } else { "default" };
        // Both modes multiply integers by the same kernels.
        for format in FORMATS.into_iter().filter(|&format| invariant || by_blas(format)) {
            for &matrix in options.sizes(&MATRICES, &SMALL) {
                matrices(options, &backend, mode, format, matrix)?;
            }
        }
    }
    Ok(())
}

/// Returns whether cuBLASLt multiplies weights in this format.
fn by_blas(format: WeightFormat) -> bool {
    !matches!(format, WeightFormat::Int8 | WeightFormat::Int4 { .. })
}

/// Without cuBLASLt a backend reserves no workspace for it.
fn uses_blas(backend: &CudaBackend) -> bool {
    backend.reserved_rows_bytes(1, 1) != 0
}

/// A matrix in a format, as an operand of products.
struct Operands {
    matrices: Vec<Matrix>,
    x: Buf,
    out: Buf,
}

impl Operands {
    fn new(backend: &CudaBackend, format: WeightFormat, max_rows: usize, outs: usize, cols: usize) -> Result<Operands> {
        backend.reserve_rows(max_rows, cols)?;
        let (x, out) = (backend.vector(&numbers(max_rows * cols))?, backend.buffer(max_rows * outs)?);
        Ok(Operands { matrices: copies(backend, format, outs, cols)?, x, out })
    }

    fn seconds(&mut self, backend: &CudaBackend, rows: usize) -> Result<f64> {
        let Operands { matrices, x, out } = self;
        seconds(backend, |call| backend.matmul(rows, x, &matrices[call % matrices.len()], None, out))
    }
}

fn matrices(
    options: &Options,
    backend: &CudaBackend,
    mode: &str,
    format: WeightFormat,
    (name, outs, cols): (&str, usize, usize),
) -> Result<()> {
    let all = options.sizes(&ROWS, &[1, 70]);
    let mut operands = Operands::new(backend, format, all[all.len() - 1], outs, cols)?;
    for &rows in all {
        let seconds = operands.seconds(backend, rows)?;
        let (case, shape) =
            (format!("{name} in {}, {rows} rows, {mode}", format.name()), json!({"rows": rows, "outs": outs, "cols": cols}));
        let limit = 1e6 * min_seconds(options, format, rows, outs, cols);
        Line { part: PART, case, shape, value: 1e6 * seconds, unit: "us", limit }.print();
    }
    Ok(())
}

pub fn min_seconds(options: &Options, format: WeightFormat, rows: usize, outs: usize, cols: usize) -> f64 {
    // Bytes per weight, and arithmetic rate relative to bf16, in which integers are multiplied.
    let (weight, speed) = match format {
        WeightFormat::Fp8 => (1.0, 2.0),
        WeightFormat::Int8 => (1.0, 1.0),
        WeightFormat::Int4 { group, offsets } => (0.5 + if offsets { 4.0 } else { 2.0 } / group as f64, 1.0),
        _ => (2.0, 1.0),
    };
    let bytes = weight * (outs * cols) as f64 + (size_of::<f32>() * rows * (outs + cols)) as f64;
    options.ceilings.min_seconds(bytes, 2.0 / speed * (rows * outs * cols) as f64)
}

/// Compares the library's kernels with cuBLASLt, and reports the number of rows from which on
/// cuBLASLt is always faster.
pub fn thresholds(options: &Options) -> Result<()> {
    let mut backend = CudaBackend::new(0, false)?;
    if !uses_blas(&backend) {
        skipped(THRESHOLDS, "all", "cuBLASLt was not found");
        return Ok(());
    }
    for format in FORMATS.into_iter().filter(|&format| by_blas(format)) {
        for &(name, outs, cols) in options.sizes(&MATRICES, &SMALL) {
            let all = options.sizes(&THRESHOLD_ROWS, &[8, 32]);
            let mut operands = Operands::new(&backend, format, all[all.len() - 1], outs, cols)?;
            let mut from = None;
            for &rows in all {
                let [own, blas] = by_both(&mut backend, &mut operands, rows)?;
                from = if blas < own { from.or(Some(rows)) } else { None };
                let shape = json!({"rows": rows, "outs": outs, "cols": cols, "format": format.name()});
                let limit = 1e6 * min_seconds(options, format, rows, outs, cols);
                peer(THRESHOLDS, &shape, 1e6 * blas, "us", "cuBLASLt");
                let case = format!("{name} in {}, {rows} rows", format.name());
                Line { part: THRESHOLDS, case, shape, value: 1e6 * own, unit: "us", limit }.print();
            }
            let case = format!("{name} in {}: cuBLASLt from", format.name());
            match from {
                Some(rows) => Line { part: THRESHOLDS, case, shape: json!({}), value: rows as f64, unit: "rows", limit: 0.0 }.print(),
                None => skipped(THRESHOLDS, &case, "it is never faster"),
            }
        }
    }
    Ok(())
}

/// Returns the seconds of a product by the library's kernels and by cuBLASLt.
fn by_both(backend: &mut CudaBackend, operands: &mut Operands, rows: usize) -> Result<[f64; 2]> {
    backend.use_blas_from(usize::MAX);
    let own = operands.seconds(backend, rows)?;
    backend.use_blas_from(1);
    Ok([own, operands.seconds(backend, rows)?])
}

/// Returns more copies of the matrix than the caches of the device hold.
pub fn copies(backend: &CudaBackend, format: WeightFormat, outs: usize, cols: usize) -> Result<Vec<Matrix>> {
    let weights = Weights::new();
    let count = BEYOND_CACHES.div_ceil(outs * cols).min(8);
    (0..count).map(|_| Ok(matrix(backend, &weights, format, outs, cols)?)).collect()
}

/// Returns a matrix of random numbers.
pub fn matrix(backend: &CudaBackend, weights: &Weights, format: WeightFormat, outs: usize, cols: usize) -> error::Result<Matrix> {
    let read = |first: usize, out: &mut [u8]| {
        weights.fill(first, out);
        Ok(())
    };
    backend.matrix(cols, &[Section::numbers(outs, Dtype::Bf16, format)], RowSource { read: &read, advance: &mut |_| Ok(()) })
}
