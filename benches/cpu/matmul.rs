//! Matrix products with the matrices of some layers of a model, for 1 to 512 rows.

use std::time::Instant;

use pagedllm::backend::cpu::CpuBackend;
use pagedllm::backend::{Alloc, BackendTypes, Ops, RowSource, Section};
use pagedllm::types::options::{Dtype, WeightFormat};

use crate::common::median;
use crate::noise::NoiseMonitor;
use crate::{Options, Result, best_without_noise, probes};

const ROWS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 512];
/// More than any cache holds, even in the smallest format.
const LAYERS: usize = 4;

type Matrix = <CpuBackend as BackendTypes>::Matrix;

pub fn bench(options: &Options) -> Result<()> {
    let memory = probes::Memory::new(options.probe_bytes(), options.threads);
    println!("model {}, {} threads, {}", options.shape.name, options.threads, options.isa.name());
    println!("| weights | rows | GFLOP/s | GFLOP/s limit | GB/s | GB/s limit | share of the lower limit |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for format in options.formats() {
        let products = Products::new(options, format)?;
        let arithmetic = best_without_noise(options, format);
        for rows in ROWS {
            let monitor = NoiseMonitor::start(None);
            let before = memory.bandwidth();
            let seconds = products.seconds(rows, if options.quick { 1 } else { 3 * options.reps })?;
            let bandwidth = median(vec![before, memory.bandwidth()]);
            let (operations, bytes) = (products.operations * rows as f64, products.bytes);
            println!(
                "| {} | {rows} | {:.0} | {:.0} | {:.1} | {:.1} | {:.0} % |{}",
                format.name(),
                operations / seconds / 1e9,
                arithmetic / 1e9,
                bytes / seconds / 1e9,
                bandwidth / 1e9,
                100.0 * (operations / arithmetic).max(bytes / bandwidth) / seconds,
                if monitor.stop(None).is_noisy() { " noisy" } else { "" }
            );
        }
    }
    Ok(())
}

struct Products {
    backend: CpuBackend,
    matrices: Vec<(Matrix, usize, usize)>,
    bytes: f64,
    /// Operations per row.
    operations: f64,
}

impl Products {
    fn new(options: &Options, format: WeightFormat) -> Result<Products> {
        let (shape, backend) = (options.shape, CpuBackend::new(options.threads, Some(options.isa))?);
        let (hidden, inner) = (shape.hidden, shape.inner);
        let of_layer = [(hidden + 2 * shape.kv_width(), hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)];
        let mut products = Products { backend, matrices: Vec::new(), bytes: 0.0, operations: 0.0 };
        products.backend.reserve_rows(ROWS[ROWS.len() - 1], inner)?;
        for (width, cols) in (0..LAYERS).flat_map(|_| of_layer) {
            let read = |first: usize, out: &mut [u8]| {
                let mut random = first as u32 + 1;
                for two in out.as_chunks_mut::<2>().0 {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    *two = half::bf16::from_f32((random >> 16) as f32 / 1e6 - 0.03).to_le_bytes();
                }
                Ok(())
            };
            let source = RowSource { read: &read, advance: &mut |_| Ok(()) };
            let sections = [Section::numbers(width, Dtype::Bf16, format)];
            let matrix = products.backend.matrix(cols, &sections, source)?;
            products.bytes += products.backend.matrix_bytes(cols, &sections) as f64;
            products.operations += (2 * width * cols) as f64;
            products.matrices.push((matrix, width, cols));
        }
        Ok(products)
    }

    /// Minimum time of several passes over all matrices.
    fn seconds(&self, rows: usize, passes: usize) -> Result<f64> {
        let widest = |of: fn(&(Matrix, usize, usize)) -> usize| self.matrices.iter().map(of).max().unwrap_or(0);
        let x: Vec<f32> = (0..rows * widest(|(_, _, cols)| *cols)).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect();
        let (x, mut out) = (self.backend.vector(&x)?, self.backend.buffer(rows * widest(|(_, width, _)| *width))?);
        let mut pass = || {
            let start = Instant::now();
            self.matrices.iter().for_each(|(matrix, ..)| self.backend.matmul(rows, &x, matrix, None, &mut out));
            start.elapsed().as_secs_f64()
        };
        pass(); // wakes the threads and touches the pages
        Ok((0..passes).map(|_| pass()).fold(f64::INFINITY, f64::min))
    }
}
