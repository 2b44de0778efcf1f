//! Products of few rows that begin with a norm, or end with the addition to a residual stream, compared
//! with a kernel for each of the two. The matrices are those of LLaMA-3-8B.

use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{Addition, Alloc, Branch, NormKind, NormOf, Ops};
use pagedllm::types::options::WeightFormat;
use serde_json::json;

use crate::Result;
use crate::line::{Line, peer};
use crate::options::Options;
use crate::products::{copies, min_seconds};
use crate::random::numbers;
use crate::timing::seconds;

const PART: &str = "fusions";
const ROWS: [usize; 4] = [1, 2, 4, 8];
const FORMATS: [WeightFormat; 2] = [WeightFormat::Bf16, WeightFormat::Fp8];
/// Columns and rows of the matrices.
const QKV: [usize; 2] = [4096, 6144];
const OUT: [usize; 2] = [4096, 4096];
const SMALL: [usize; 2] = [200, 96];

/// Environment variable for experiments: the number of rows up to which products begin with a norm.
const MAX_NORMED_ROWS: &str = "MAX_NORMED_ROWS";

pub fn bench(options: &Options) -> Result<()> {
    let [qkv, out] = if options.small { [SMALL; 2] } else { [QKV, OUT] };
    for format in FORMATS {
        with_norm(options, format, qkv)?;
        with_addition(options, format, out)?;
    }
    Ok(())
}

fn with_norm(options: &Options, format: WeightFormat, [cols, outs]: [usize; 2]) -> Result<()> {
    let [mut backend, mut separate] = [CudaBackend::new(0, false)?, CudaBackend::new(0, false)?];
    if let Ok(rows) = std::env::var(MAX_NORMED_ROWS) {
        backend.norm_in_products_up_to(rows.parse()?);
    }
    separate.norm_in_products_up_to(0);
    let [one, two] = [&backend, &separate].map(|backend| by_rows(options, backend, format, [cols, outs]));
    for ((&rows, one), two) in options.sizes(&ROWS, &[1]).iter().zip(one?).zip(two?) {
        print(options, format, ("norm and product", rows), [cols, outs], [one, two]);
    }
    Ok(())
}

/// Returns the microseconds of a norm and a product, for each number of rows.
fn by_rows(options: &Options, backend: &CudaBackend, format: WeightFormat, [cols, outs]: [usize; 2]) -> Result<Vec<f64>> {
    let (matrices, weight) = (copies(backend, format, outs, cols)?, backend.vector(&numbers(cols))?);
    let norm = NormOf { kind: NormKind::Rms { unit_offset: false }, eps: 1e-5, weight: &weight, bias: None };
    let microseconds = |&rows: &usize| {
        let x = backend.vector(&numbers(rows * cols))?;
        let (mut normed, mut out) = (backend.buffer(rows * cols)?, backend.buffer(rows * outs)?);
        let seconds = seconds(backend, |call| {
            let matrix = &matrices[call % matrices.len()];
            backend.norm_for_product(rows, cols, norm, matrix, &x, &mut normed);
            backend.matmul(rows, &normed, matrix, None, &mut out);
        })?;
        Ok(1e6 * seconds)
    };
    options.sizes(&ROWS, &[1]).iter().map(microseconds).collect()
}

fn with_addition(options: &Options, format: WeightFormat, [cols, outs]: [usize; 2]) -> Result<()> {
    let backend = CudaBackend::new(0, false)?;
    let matrices = copies(&backend, format, outs, cols)?;
    for &rows in options.sizes(&ROWS, &[1]) {
        let y = backend.vector(&numbers(rows * cols))?;
        let (mut x, mut delta) = (backend.vector(&numbers(rows * outs))?, backend.buffer(rows * outs)?);
        // Factors of 0 keep the stream finite.
        let one = seconds(&backend, |call| {
            let to = Branch { scale: 0.0, x: &mut x, delta: &mut delta };
            let added = backend.matmul_add(rows, &y, (&matrices[call % matrices.len()], None), to);
            assert_eq!(added, Addition::Done);
        })?;
        let two = seconds(&backend, |call| {
            backend.matmul(rows, &y, &matrices[call % matrices.len()], None, &mut delta);
            backend.add(rows * outs, 0.0, &mut x, &delta);
        })?;
        print(options, format, ("product and addition", rows), [cols, outs], [1e6 * one, 1e6 * two]);
    }
    Ok(())
}

/// Prints the microseconds of one kernel and of two.
fn print(options: &Options, format: WeightFormat, (what, rows): (&str, usize), [cols, outs]: [usize; 2], [one, two]: [f64; 2]) {
    let shape = json!({"what": what, "rows": rows, "outs": outs, "cols": cols, "format": format.name()});
    peer(PART, &shape, two, "us", "two kernels");
    let (case, limit) = (format!("{what} in {}, {rows} rows", format.name()), 1e6 * min_seconds(options, format, rows, outs, cols));
    Line { part: PART, case, shape, value: one, unit: "us", limit }.print();
}
