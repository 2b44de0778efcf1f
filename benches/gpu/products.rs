//! Matrix products of LLaMA-3-8B, for 1 to 4,096 rows. In the default mode cuBLASLt computes
//! products of many rows. In the mode `batch_invariant` the bits do not depend on the number of
//! rows.

use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{Alloc, BackendTypes, Ops, RowSource, Section};
use pagedllm::types::options::{Dtype, WeightFormat};
use serde_json::json;

use crate::Result;
use crate::line::{Line, skipped};
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
/// Products in fp8 are compared with torch in bf16, too.
const FORMATS: [WeightFormat; 2] = [WeightFormat::Bf16, WeightFormat::Fp8];
/// More bytes than the caches of any device hold.
const BEYOND_CACHES: usize = 256 << 20;

/// Environment variable for experiments: the number of rows from which on products use cuBLASLt.
const MIN_BLAS_ROWS: &str = "MIN_BLAS_ROWS";

type Matrix = <CudaBackend as BackendTypes>::Matrix;

pub fn bench(options: &Options) -> Result<()> {
    for invariant in [false, true] {
        let mut backend = CudaBackend::new(0, invariant)?;
        if let Ok(rows) = std::env::var(MIN_BLAS_ROWS) {
            backend.use_blas_from(rows.parse()?);
        }
        // Without cuBLASLt the backend reserves no workspace for it.
        if !invariant && backend.reserved_rows_bytes(1, 1) == 0 {
            skipped(PART, "default", "cuBLASLt was not found, so both modes are the same");
            continue;
        }
        for (&matrix, format) in options.sizes(&MATRICES, &SMALL).iter().flat_map(|matrix| FORMATS.map(|format| (matrix, format))) {
            matrices(options, &backend, if invariant { "batch_invariant" } else { "default" }, format, matrix)?;
        }
    }
    Ok(())
}

fn matrices(
    options: &Options,
    backend: &CudaBackend,
    mode: &str,
    format: WeightFormat,
    (name, outs, cols): (&str, usize, usize),
) -> Result<()> {
    // Bytes per weight, and arithmetic rate relative to bf16.
    let (weight, speed) = if format == WeightFormat::Fp8 { (1, 2.0) } else { (2, 1.0) };
    let max_rows = *options.sizes(&ROWS, &[1, 70]).last().unwrap_or(&1);
    backend.reserve_rows(max_rows, cols)?;
    let (matrices, x) = (copies(backend, format, outs, cols)?, backend.vector(&numbers(max_rows * cols))?);
    let mut out = backend.buffer(max_rows * outs)?;
    for &rows in options.sizes(&ROWS, &[1, 70]) {
        let seconds = seconds(backend, |call| backend.matmul(rows, &x, &matrices[call % matrices.len()], None, &mut out))?;
        let bytes = weight * outs * cols + size_of::<f32>() * rows * (outs + cols);
        let limit = options.ceilings.min_seconds(bytes as f64, 2.0 / speed * (rows * outs * cols) as f64);
        let (case, shape) =
            (format!("{name} in {}, {rows} rows, {mode}", format.name()), json!({"rows": rows, "outs": outs, "cols": cols}));
        Line { part: PART, case, shape, value: 1e6 * seconds, unit: "us", limit: 1e6 * limit }.print();
    }
    Ok(())
}

/// Returns more copies of the matrix than the caches of the device hold.
fn copies(backend: &CudaBackend, format: WeightFormat, outs: usize, cols: usize) -> Result<Vec<Matrix>> {
    let weights = Weights::new();
    let count = BEYOND_CACHES.div_ceil(outs * cols).min(8);
    let copy = |_| {
        let read = |first: usize, out: &mut [u8]| {
            weights.fill(first, out);
            Ok(())
        };
        Ok(backend.matrix(cols, &[Section::numbers(outs, Dtype::Bf16, format)], RowSource { read: &read, advance: &mut |_| Ok(()) })?)
    };
    (0..count).map(copy).collect()
}
