//! Products and embeddings of quantized blocks on the CUDA backend, compared with the numbers of
//! the blocks. The kernels run on the host (tests/cuda).

#[path = "../support/mod.rs"]
mod support;

use half::f16;

use pagedllm::backend::cpu::CpuBackend;
use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{Alloc, Backend, NormKind, NormOf, Ops, Routing, RowSource, Section, Storage};
use pagedllm::error::{Code, Result};
use pagedllm::types::batch::Batch;
use pagedllm::types::blocks::BlockType;
use pagedllm::types::options::{Dtype, Isa, WeightFormat};
use support::distance::relative_distance;
use support::{Random, cuda};

fn types() -> impl Iterator<Item = BlockType> {
    BlockType::all().filter(|kind| kind.codes().is_some())
}

/// Returns the places of the f16 numbers of a block.
fn halves(kind: BlockType) -> &'static [usize] {
    match kind {
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        BlockType::Q2_K => &[80, 82],
        BlockType::Q3_K => &[108],
        BlockType::Q6_K => &[208],
        _ => &[0],
    }
}

/// Numbers in -1..1 that bf16 represents.
fn numbers(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| random.below(129) as f32 / 64.0 - 1.0).collect()
}

/// The rows of one section, as files have them.
#[derive(Clone)]
struct Rows {
    section: Section,
    bytes: Vec<u8>,
}

impl Rows {
    fn blocks(kind: BlockType, rows: usize, cols: usize, random: &mut Random) -> Rows {
        let mut bytes: Vec<u8> = (0..kind.row_bytes(cols) * rows).map(|_| random.below(256) as u8).collect();
        for block in bytes.chunks_exact_mut(kind.block_bytes()) {
            for &at in halves(kind) {
                block[at..at + 2].copy_from_slice(&f16::from_f32(random.unit() / 100.0).to_le_bytes());
            }
        }
        Rows { section: Section { rows, storage: Storage::Blocks(kind) }, bytes }
    }

    fn floats(rows: usize, cols: usize, random: &mut Random) -> Rows {
        let bytes = numbers(random, rows * cols).iter().flat_map(|number| number.to_le_bytes()).collect();
        Rows { section: Section::numbers(rows, Dtype::F32, WeightFormat::F32), bytes }
    }

    /// Returns the numbers. The CPU embeds blocks without rounding.
    fn numbers(&self, cols: usize) -> Vec<f32> {
        let cpu = CpuBackend::new(1, Some(Isa::Portable)).unwrap();
        let table = load(&cpu, cols, std::slice::from_ref(self)).unwrap();
        embedded(&cpu, &table, 0, &(0..self.section.rows as u32).collect::<Vec<_>>(), cols)
    }
}

fn load<B: Backend>(backend: &B, cols: usize, parts: &[Rows]) -> Result<B::Matrix> {
    let read = |first: usize, out: &mut [u8]| {
        let mut before = 0;
        for part in parts {
            let row_bytes = part.section.row_bytes(cols);
            if first < before + part.section.rows {
                out.copy_from_slice(&part.bytes[(first - before) * row_bytes..][..out.len()]);
                return Ok(());
            }
            before += part.section.rows;
        }
        unreachable!("row {first} is in no section")
    };
    let sections: Vec<Section> = parts.iter().map(|part| part.section).collect();
    backend.matrix(cols, &sections, RowSource { read: &read, advance: &mut |_| Ok(()) })
}

/// Returns the embeddings of tokens. `first` is the first token of the table.
fn embedded<B: Backend>(backend: &B, table: &B::Matrix, first: usize, tokens: &[u32], cols: usize) -> Vec<f32> {
    let mut inputs = B::Inputs::default();
    let positions = vec![0; tokens.len()];
    backend.upload(&Batch { tokens: tokens.to_vec(), positions, ..Batch::default() }, &mut inputs).unwrap();
    let mut out = backend.vector(&vec![f32::NAN; tokens.len() * cols]).unwrap();
    backend.embed(&inputs, table, first, 1.0, &mut out);
    backend.read(&mut out, tokens.len() * cols).unwrap().to_vec()
}

/// Bound of an error relative to the magnitudes of the terms.
const TOLERANCE: f64 = 2e-6;

/// Returns the error of a product relative to the magnitudes of its terms.
fn error_of(found: f32, x: &[f32], w: &[f32], bias: f32) -> f64 {
    let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
    let (sum, size) = terms.fold((f64::from(bias), 1.0), |(sum, size), term| (sum + term, size + term.abs()));
    // An error that is NaN is infinite.
    let error = (f64::from(found) - sum).abs() / size;
    if error.is_nan() { f64::INFINITY } else { error }
}

/// Checks products of `x` with a matrix of these numbers. Nothing is rounded but sums.
fn assert_products(what: &str, found: &[f32], x: &[f32], w: &[f32], cols: usize, bias: &[f32]) {
    let sum = |x: &[f32], w: &[f32], bias: f32| x.iter().zip(w).fold(f64::from(bias), |sum, (x, w)| sum + f64::from(*x) * f64::from(*w));
    let row = |x| w.chunks_exact(cols).zip(bias).map(move |(w, bias)| sum(x, w, *bias) as f32);
    let expected: Vec<f32> = x.chunks_exact(cols).flat_map(row).collect();
    let distance = relative_distance(found, &expected);
    assert!(distance <= 1e-5, "{what}: the products have a relative distance of {distance:e} from those of the numbers");
}

fn multiply(backend: &CudaBackend, cols: usize, parts: &[Rows], x: &[f32], bias: &[f32]) -> Vec<f32> {
    let (rows, outs) = (x.len() / cols, bias.len());
    let matrix = load(backend, cols, parts).unwrap();
    let mut out = backend.vector(&vec![f32::NAN; rows * outs]).unwrap();
    backend.matmul(rows, &backend.vector(x).unwrap(), &matrix, Some(&backend.vector(bias).unwrap()), &mut out);
    backend.read(&mut out, rows * outs).unwrap().to_vec()
}

/// One row, the limits of the tiles, and partial records.
#[test]
fn products_have_the_numbers_of_the_blocks() {
    let backend = cuda::backend();
    for kind in types() {
        let short = kind.block_len() == 32;
        for (rows, cols, outs) in [(1, 256, 32), (3, 768, 33), (16, 512, 8), (17, 768, 70), (65, 512, 65)] {
            let cols = if short { cols - 96 } else { cols };
            let mut random = Random((rows * outs) as u64);
            let w = Rows::blocks(kind, outs, cols, &mut random);
            let (x, bias) = (numbers(&mut random, rows * cols), numbers(&mut random, outs));
            let found = multiply(backend, cols, std::slice::from_ref(&w), &x, &bias);
            assert_products(&format!("{} {rows}x{cols}x{outs}", kind.name()), &found, &x, &w.numbers(cols), cols, &bias);
        }
    }
}

/// The larger tiles: their limits, and partial records.
#[test]
fn products_of_many_rows_have_the_numbers_of_the_blocks() {
    let backend = cuda::open_small();
    for kind in types() {
        let cols = if kind.block_len() == 32 { 160 } else { 256 };
        for (rows, outs) in [(50, 70), (130, 131)] {
            let mut random = Random(7);
            let w = Rows::blocks(kind, outs, cols, &mut random);
            let (x, bias) = (numbers(&mut random, rows * cols), numbers(&mut random, outs));
            let found = multiply(&backend, cols, std::slice::from_ref(&w), &x, &bias);
            assert_products(&format!("{} {rows}x{cols}x{outs}", kind.name()), &found, &x, &w.numbers(cols), cols, &bias);
        }
    }
}

/// Rows that only products with blocks read are stored in bf16, which changes no bits.
#[test]
fn rounded_rows_have_the_products_of_rows_in_f32() {
    let (rounding, mut in_f32) = (cuda::backend(), cuda::open(false));
    in_f32.keep_f32();
    for kind in types() {
        for (rows, cols, outs) in [(1, 256, 32), (16, 512, 8), (17, 768, 70), (64, 256, 33), (200, 512, 20)] {
            let mut random = Random((rows * outs) as u64);
            let [w, other] = [outs, 8].map(|outs| Rows::blocks(kind, outs, cols, &mut random));
            let [x, weight] = [rows * cols, cols].map(|len| (0..len).map(|_| random.unit()).collect::<Vec<_>>());
            let [found, wanted] = [rounding, &in_f32].map(|backend| {
                let parts = [w.clone(), other.clone()];
                let (matrix, weight) = (load(backend, cols, &parts).unwrap(), backend.vector(&weight).unwrap());
                let norm = NormOf { kind: NormKind::Rms { unit_offset: false }, eps: 1e-5, weight: &weight, bias: None };
                let [mut normed, mut out] = [rows * cols, rows * (outs + 8)].map(|len| backend.vector(&vec![f32::NAN; len]).unwrap());
                backend.norm(rows, cols, norm, &[&matrix], &backend.vector(&x).unwrap(), &mut normed);
                backend.matmul(rows, &normed, &matrix, None, &mut out);
                backend.read(&mut out, rows * (outs + 8)).unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
            assert_eq!(found, wanted, "{} {rows}x{cols}x{outs}", kind.name());
        }
    }
}

/// Queries and keys in one type, values in another one, and floats. The second section begins at an
/// odd output.
#[test]
fn sections_of_a_matrix_have_their_own_types() {
    let (backend, cols) = (cuda::backend(), 512);
    for rows in [1, 20, 70] {
        let mut random = Random(rows as u64);
        let parts = [
            Rows::blocks(BlockType::Q4_K, 41, cols, &mut random),
            Rows::blocks(BlockType::Q6_K, 32, cols, &mut random),
            Rows::floats(5, cols, &mut random),
        ];
        let numbers_of: Vec<f32> = parts.iter().flat_map(|part| part.numbers(cols)).collect();
        let (x, bias) = (numbers(&mut random, rows * cols), numbers(&mut random, 78));
        let found = multiply(backend, cols, &parts, &x, &bias);
        assert_products(&format!("{rows} rows"), &found, &x, &numbers_of, cols, &bias);
    }
}

/// Experts with many rows, and experts with few rows or none. The second section begins at an odd
/// output.
#[test]
fn experts_multiply_their_rows_by_their_blocks() {
    for (rows, count) in [(40, 3), (3, 12)] {
        check_experts(rows, count);
    }
}

fn check_experts(rows: usize, count: usize) {
    let (backend, cols, outs) = (cuda::backend(), 256, 40);
    let mut random = Random(rows as u64);
    let routing = Routing::softmax(count, 2, true);
    let mut routes = backend.routes(rows, routing).unwrap();
    let logits = backend.vector(&numbers(&mut random, rows * count)).unwrap();
    backend.route(rows, routing, 0..routing.experts, None, &logits, &mut routes);
    let mut gathered = backend.vector(&vec![f32::NAN; rows * 2 * cols]).unwrap();
    let x = backend.vector(&numbers(&mut random, rows * cols)).unwrap();
    backend.gather_routes(&routes, cols, &x, &mut gathered);
    let experts: Vec<[Rows; 2]> = (0..count)
        .map(|_| [Rows::blocks(BlockType::Q5_K, 21, cols, &mut random), Rows::blocks(BlockType::Q3_K, 19, cols, &mut random)])
        .collect();
    let matrices: Vec<_> = experts.iter().map(|parts| load(backend, cols, parts).unwrap()).collect();
    let biases: Vec<_> = (0..count).map(|_| numbers(&mut random, outs)).collect();
    let of_experts: Vec<_> = biases.iter().map(|bias| backend.vector(bias).unwrap()).collect();
    let mut out = backend.vector(&vec![f32::NAN; rows * 2 * outs]).unwrap();
    backend.matmul_routes(&routes, &gathered, &|expert| (&matrices[expert], Some(&of_experts[expert])), &mut out);
    let found = backend.read(&mut out, rows * 2 * outs).unwrap().to_vec();
    let rows_of_routes = backend.read(&mut gathered, rows * 2 * cols).unwrap().to_vec();
    let weights: Vec<Vec<f32>> = experts.iter().map(|parts| parts.iter().flat_map(|part| part.numbers(cols)).collect()).collect();
    // Routes are sorted by expert. The products of a route are near those of one expert only.
    let mut last = 0;
    for (x, found) in rows_of_routes.chunks_exact(cols).zip(found.chunks_exact(outs)) {
        let is_near =
            |expert: usize, out: usize| error_of(found[out], x, &weights[expert][out * cols..][..cols], biases[expert][out]) <= TOLERANCE;
        let fits: Vec<usize> = (0..count).filter(|&expert| (0..outs).all(|out| is_near(expert, out))).collect();
        assert!(fits.len() == 1 && fits[0] >= last, "the products are those of the experts {fits:?}, after {last}");
        last = fits[0];
    }
}

#[test]
fn embeddings_have_the_numbers_of_the_blocks() {
    let backend = cuda::backend();
    for kind in types() {
        let cols = if kind.block_len() == 32 { 288 } else { 512 };
        let rows = Rows::blocks(kind, 9, cols, &mut Random(3));
        let table = load(backend, cols, std::slice::from_ref(&rows)).unwrap();
        let found = embedded(backend, &table, 0, &[8, 0, 3], cols);
        let all = rows.numbers(cols);
        let expected = [8, 0, 3].map(|row| &all[row * cols..][..cols]).concat();
        assert_eq!(found, expected, "{}", kind.name());
        // A shard of the table, which has tokens 20 to 28.
        let found = embedded(backend, &table, 20, &[19, 28, 20, 23, 29], cols);
        let zeros = vec![0.0; cols];
        assert_eq!(found, [&zeros[..], &expected, &zeros].concat(), "{}", kind.name());
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch() {
    let (backend, small, cols, outs, rows) = (cuda::invariant(), cuda::open_small(), 512, 40, 66);
    for kind in types() {
        let mut random = Random(5);
        let w = Rows::blocks(kind, outs, cols, &mut random);
        let x: Vec<f32> = (0..rows * cols).map(|_| random.unit()).collect();
        let bits_on = |backend: &CudaBackend, rows: &[f32]| {
            let found = multiply(backend, cols, std::slice::from_ref(&w), rows, &vec![0.0; outs]);
            found.iter().map(|number| number.to_bits()).collect::<Vec<_>>()
        };
        let bits = |rows: &[f32]| bits_on(backend, rows);
        let all = bits(&x);
        assert_eq!(bits_on(&small, &x), all, "{}: the tile of 128 rows", kind.name());
        assert_eq!(bits_on(&small, &x[..40 * cols]), all[..40 * outs], "{}: the tile of 64 rows", kind.name());
        for (first, count) in [(0, 1), (5, 16), (30, 32)] {
            let some = bits(&x[first * cols..][..count * cols]);
            assert_eq!(some, all[first * outs..][..count * outs], "{}: {count} rows from {first} on", kind.name());
        }
    }
}

#[test]
fn a_matrix_takes_the_planned_bytes_and_a_scale_that_is_not_finite_is_refused_with_its_row() {
    let (backend, mut random) = (cuda::open(false), Random(1));
    // Sections begin at multiples of 16 bytes: 5 rows of 512 numbers, and 3 of two records.
    let parts = [Rows::floats(5, 512, &mut random), Rows::blocks(BlockType::Q8_0, 3, 512, &mut random)];
    let sections: Vec<Section> = parts.iter().map(|part| part.section).collect();
    assert_eq!(backend.matrix_bytes(512, &sections), 5 * 512 * 4 + 3 * 2 * 272);
    // Records have 256 numbers. Scales: four bytes, and two for each group; or two or four for each
    // group.
    for (kind, record) in [(BlockType::Q4_0, 144), (BlockType::Q8_0, 272), (BlockType::Q4_K, 160), (BlockType::Q6_K, 224)] {
        let section = Section { rows: 3, storage: Storage::Blocks(kind) };
        assert_eq!(backend.matrix_bytes(512, &[section]), 3 * 2 * record, "{}", kind.name());
    }
    // In int4 the size depends on offsets, not on the group.
    for (offsets, record) in [(false, 144), (true, 160)] {
        for group in WeightFormat::GROUPS {
            let section = Section::numbers(3, Dtype::F32, WeightFormat::Int4 { group, offsets });
            assert_eq!(backend.matrix_bytes(640, &[section]), 3 * 3 * record, "groups of {group}");
        }
    }
    assert_eq!(backend.matrix_bytes(500, &[Section::numbers(3, Dtype::Bf16, WeightFormat::Int8)]), 3 * 512 + 16);
    let mut rows = Rows::blocks(BlockType::Q8_0, 4, 64, &mut random);
    rows.bytes[34 * 5..][..2].copy_from_slice(&f16::INFINITY.to_le_bytes());
    let error = load(&backend, 64, &[Rows::floats(2, 64, &mut random), rows]).err().unwrap();
    assert!(error.code() == Code::Model && error.message().contains("row 4: a scale of a block is inf"), "{error}");
}
