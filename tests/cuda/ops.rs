//! Every op of the CUDA backend, compared with the CPU backend on random shapes. The kernels run on
//! the host (tests/cuda). Buffers end at a guard page, and contain NaN until they are written.

#[path = "../support/mod.rs"]
mod support;

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagedllm::backend::cpu::CpuBackend;
use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{
    Act, Activation, Addition, Alloc, AttentionShape, Backend, BackendTypes, BatchSize, Branch, ExpertGroups, Extent, Glu, Graphs,
    GroupScore, Heads, InputLimits, KvOps, KvShape, MlpOf, NormKind, NormOf, Ops, Pairs, RotaryEmbedding, Routing, RowSource, Sampling,
    Scores, Section, Strips, Values,
};
use pagedllm::error::{Code, Error};
use pagedllm::generation::sampler;
use pagedllm::generation::sampler::{Context, NoChoice, ResolvedSampling, Sampler, SamplingHistory, plan_draw};
use pagedllm::types::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits};
use pagedllm::types::batch::{Batch, BlockCopy, BlockMove, Placeholder, Span, Tail};
use pagedllm::types::options::{Dry, Dtype, Isa, KvDtype, Mirostat, SamplingParams, WeightFormat};
use support::distance::relative_distance;
use support::fp8::in_fp8;
use support::{Random, cuda};

/// A sequence of ops that runs on any backend.
trait Case {
    /// Returns the results, each of which is compared by its own norm.
    fn run<B: Backend>(&self, backend: &B) -> Vec<Vec<f32>>;
}

/// Bound of relative distances of results that were rounded to bf16 on the way.
const ROUNDED: f64 = 4e-3;

fn assert_equal_on_both_backends(name: &str, bound: f64, case: &impl Case) {
    assert_equal_on_backend(name, bound, case, cuda::backend());
}

/// Checks that each result has a relative distance of at most `bound` from that of the CPU, and the same
/// elements that are NaN.
fn assert_equal_on_backend(name: &str, bound: f64, case: &impl Case, backend: &CudaBackend) {
    let cpu = CpuBackend::new(1, Some(Isa::Portable)).unwrap();
    cpu.reserve_rows(64, 640).unwrap();
    let (expected, found) = (case.run(&cpu), case.run(backend));
    assert_eq!(found.len(), expected.len(), "{name}");
    for (result, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let one_is_nan = (0..expected.len()).find(|&i| found[i].is_nan() != expected[i].is_nan());
        if let Some(i) = one_is_nan {
            panic!("{name}: element {i} of result {result} is {}, on the CPU {}", found[i], expected[i]);
        }
        let distance = relative_distance(found, expected);
        assert!(
            distance <= bound,
            "{name}: result {result} has a relative distance of {distance:e} from that of the CPU, more than {bound}"
        );
    }
}

#[test]
fn distances_are_relative_and_find_what_is_not_finite() {
    assert_eq!(relative_distance(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
    assert_eq!(relative_distance(&[3.0, 4.5], &[3.0, 4.0]), 0.1);
    assert_eq!(relative_distance(&[0.0, f32::NAN, f32::INFINITY], &[0.0, f32::NAN, f32::INFINITY]), 0.0);
    let wrong =
        [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::INFINITY, 1.0), (1.0, f32::INFINITY), (f32::INFINITY, f32::NEG_INFINITY), (1.0, 0.0)];
    for (found, expected) in wrong {
        assert_eq!(relative_distance(&[found, 0.0], &[expected, 0.0]), f64::INFINITY, "{found} {expected}");
    }
}

/// Random numbers of a test. The environment variable PAGEDLLM_SEED selects other inputs.
fn seeded(number: usize) -> Random {
    let fresh = std::env::var("PAGEDLLM_SEED").map_or(0, |seed| seed.parse::<u64>().expect("PAGEDLLM_SEED is a number"));
    Random((number as u64).wrapping_add(fresh.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
}

/// Numbers in -1..1 that bf16 represents.
fn numbers(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| random.below(129) as f32 / 64.0 - 1.0).collect()
}

/// Reads a buffer.
fn read<B: Backend>(backend: &B, mut buf: B::Buf, len: usize) -> Vec<f32> {
    backend.read(&mut buf, len).unwrap_or_else(|e| panic!("{e}: {}", cuda::shim().last_error())).to_vec()
}

/// A buffer of NaN, which reveals elements that an op does not write. CPU buffers would otherwise
/// be zero.
fn unwritten<B: Backend>(backend: &B, len: usize) -> B::Buf {
    backend.vector(&vec![f32::NAN; len]).unwrap()
}

/// The CPU has no fp8, and rounds activations for integers, so it gets the rounded values.
fn matrix<B: Backend>(backend: &B, values: &[f32], rows: usize, cols: usize, format: WeightFormat) -> B::Matrix {
    match format {
        WeightFormat::Fp8 if is_cpu(backend) => matrix(backend, &in_fp8(values, cols), rows, cols, WeightFormat::F32),
        _ if format.is_whole() && is_cpu(backend) => {
            let numbers = embeddings(backend, &load(backend, values, rows, cols, format).unwrap(), rows, cols);
            matrix(backend, &numbers, rows, cols, WeightFormat::F32)
        }
        _ => load(backend, values, rows, cols, format).unwrap(),
    }
}

/// Returns the numbers of a matrix, by embedding a token for each row.
fn embeddings<B: Backend>(backend: &B, table: &B::Matrix, rows: usize, cols: usize) -> Vec<f32> {
    let mut inputs = B::Inputs::default();
    let batch = Batch { tokens: (0..rows as u32).collect(), positions: vec![0; rows], ..Batch::default() };
    backend.upload(&batch, &mut inputs).unwrap();
    let mut out = unwritten(backend, rows * cols);
    backend.embed(&inputs, table, 0, 1.0, &mut out);
    read(backend, out, rows * cols)
}

fn load<B: Backend>(backend: &B, values: &[f32], rows: usize, cols: usize, format: WeightFormat) -> Result<B::Matrix, Error> {
    let read = |first: usize, out: &mut [u8]| {
        let values = &values[first * cols..][..out.len() / 4];
        out.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(out, value)| *out = value.to_le_bytes());
        Ok(())
    };
    backend.matrix(cols, &[Section::numbers(rows, Dtype::F32, format)], RowSource { read: &read, advance: &mut |_| Ok(()) })
}

fn is_cpu<B: Backend>(backend: &B) -> bool {
    backend.matrix_layout().starts_with("cpu")
}

const FLOATS: [WeightFormat; 3] = [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16];

struct Product {
    rows: usize,
    cols: usize,
    outs: usize,
    format: WeightFormat,
    bias: bool,
    /// Whether rows are rounded to fp8 too.
    rounded: bool,
}

impl Case for Product {
    fn run<B: Backend>(&self, backend: &B) -> Vec<Vec<f32>> {
        let Product { rows, cols, outs, format, bias, rounded } = *self;
        backend.reserve_rows(rows, cols).unwrap();
        let mut random = seeded(rows * 1000 + cols * 10 + outs);
        let (mut x, mut w) = (numbers(&mut random, rows * cols), numbers(&mut random, outs * cols));
        x[..cols].fill(0.0);
        w[..cols].fill(0.0);
        if rounded && is_cpu(backend) {
            x = in_fp8(&x, cols);
        }
        let (x, w) = (backend.vector(&x).unwrap(), matrix(backend, &w, outs, cols, format));
        let bias = bias.then(|| backend.vector(&numbers(&mut random, outs)).unwrap());
        let mut out = unwritten(backend, rows * outs);
        backend.matmul(rows, &x, &w, bias.as_ref(), &mut out);
        vec![read(backend, out, rows * outs)]
    }
}

#[test]
fn products_equal_those_of_the_cpu() {
    for (rows, cols, outs) in shapes_of_products() {
        for format in FLOATS {
            let bias = cols % 2 == 0;
            assert_equal_on_both_backends(
                &format!("{format:?} {rows}x{cols}x{outs}"),
                1e-5,
                &Product { rows, cols, outs, format, bias, rounded: false },
            );
        }
    }
}

/// (rows, columns, outputs): random shapes, and shapes at the limits of tiles.
fn shapes_of_products() -> impl Iterator<Item = (usize, usize, usize)> {
    let mut random = seeded(1);
    let edges = [
        (1, 64, 33),
        (8, 200, 31),
        (9, 131, 65),
        (2, 1, 2),
        (2, 64, 64),
        (16, 128, 32),
        (17, 40, 65),
        (64, 64, 64),
        (65, 96, 129),
        (129, 33, 128),
    ];
    edges.into_iter().chain((0..20).map(move |_| (2 + random.below(150), 1 + random.below(300), 2 + random.below(200))))
}

/// bf16 represents all numbers, so results differ only by the order of sums.
#[test]
fn products_in_fp8_equal_those_of_the_cpu() {
    let small = cuda::open_small();
    for (rows, cols, outs) in shapes_of_products() {
        let case = Product { rows, cols, outs, format: WeightFormat::Fp8, bias: cols % 2 == 0, rounded: false };
        let name = format!("{rows}x{cols}x{outs}");
        assert_equal_on_backend(&name, 1e-5, &case, cuda::invariant());
        assert_equal_on_backend(&format!("{name}, one multiprocessor"), 1e-5, &case, &small);
    }
}

/// Up to 16 rows are multiplied in bf16 in both modes.
#[test]
fn products_of_few_rows_in_fp8_equal_those_of_the_cpu() {
    for (rows, cols, outs) in shapes_of_products().filter(|(rows, ..)| *rows <= 16) {
        let case = Product { rows, cols, outs, format: WeightFormat::Fp8, bias: cols % 2 == 0, rounded: false };
        assert_equal_on_both_backends(&format!("{rows}x{cols}x{outs}"), 1e-5, &case);
    }
}

/// The integer formats, with groups that divide the columns.
fn integers(cols: usize) -> impl Iterator<Item = WeightFormat> {
    let groups = WeightFormat::GROUPS.into_iter().filter(move |group| cols.is_multiple_of(*group));
    let int4 = groups.flat_map(|group| [false, true].map(|offsets| WeightFormat::Int4 { group, offsets }));
    [WeightFormat::Int8].into_iter().chain(int4)
}

/// Rows are multiplied in bf16, which represents them, so results differ only by the order of sums.
#[test]
fn products_with_integers_equal_those_of_the_cpu_with_their_numbers() {
    let small = cuda::open_small();
    let shapes = [(1, 64, 33), (8, 96, 31), (3, 640, 70), (16, 131, 65), (17, 256, 65), (65, 128, 129), (130, 384, 40), (129, 33, 128)];
    for (rows, cols, outs) in shapes {
        for format in integers(cols) {
            let case = Product { rows, cols, outs, format, bias: cols % 2 == 0, rounded: false };
            let name = format!("{format:?} {rows}x{cols}x{outs}");
            assert_equal_on_both_backends(&name, 1e-5, &case);
            assert_equal_on_backend(&format!("{name}, one multiprocessor"), 1e-5, &case, &small);
        }
    }
}

/// The numbers of the device are those of the CPU, bit for bit.
#[test]
fn embeddings_in_integers_equal_those_of_the_cpu() {
    let (rows, cpu) = (37, CpuBackend::new(1, None).unwrap());
    for cols in [45, 96, 320, 512] {
        let mut random = seeded(cols);
        let mut values: Vec<f32> = (0..rows * cols).map(|_| random.unit() - 0.4).collect();
        values[..cols].fill(0.0);
        values[cols..2 * cols].fill(-0.75);
        for format in integers(cols) {
            let on_cpu = embeddings(&cpu, &load(&cpu, &values, rows, cols, format).unwrap(), rows, cols);
            let backend = cuda::backend();
            let on_device = embeddings(backend, &load(backend, &values, rows, cols, format).unwrap(), rows, cols);
            assert_eq!(on_device, on_cpu, "{format:?}, {cols} columns");
        }
    }
}

/// Matrices of several transfers, so that buffers are filled again. The last transfer is shorter.
#[test]
fn large_matrices_have_their_numbers() {
    let (rows, cols) = (300, 1 << 14);
    let values: Vec<f32> = (0..rows * cols).map(|i| (i % 251) as f32).collect();
    for format in [WeightFormat::F32, WeightFormat::Bf16] {
        let backend = cuda::backend();
        assert_eq!(embeddings(backend, &load(backend, &values, rows, cols, format).unwrap(), rows, cols), values, "{format:?}");
    }
}

/// Rows that are longer than what the warps of a block load ahead.
#[test]
fn long_products_of_few_rows_equal_those_of_the_cpu() {
    for (rows, cols, format) in
        [(2, 2100, WeightFormat::Bf16), (16, 4100, WeightFormat::F16), (9, 4224, WeightFormat::Fp8), (5, 4227, WeightFormat::Int8)]
    {
        let case = Product { rows, cols, outs: 40, format, bias: true, rounded: false };
        assert_equal_on_both_backends(&format!("{format:?} {rows}x{cols}"), 1e-4, &case);
    }
}

/// The compute capability and planned failures affect all threads, so these tests run one at a time.
fn capability() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Rows become fp8, each with a scale. Results differ by the order of factors.
#[test]
fn products_of_many_rows_round_rows_to_fp8() {
    if !cuda::shim().pretends() {
        return; // a device may not support fp8, and sums in fewer bits
    }
    let _one = capability();
    for (rows, cols, outs) in [(65, 16, 16), (70, 1, 32), (66, 200, 48), (130, 300, 128), (200, 33, 16)] {
        for bias in [false, true] {
            let case = Product { rows, cols, outs, format: WeightFormat::Fp8, bias, rounded: true };
            assert_equal_on_both_backends(&format!("{rows}x{cols}x{outs}"), 1e-5, &case);
        }
    }
}

/// Each row has its own scale. A row with NaN gives NaN, and does not change other rows.
#[test]
fn a_row_with_nan_does_not_change_other_rows_in_fp8() {
    let _one = capability();
    let (backend, rows, cols, outs) = (cuda::backend(), 70, 64, 48);
    let mut random = seeded(6);
    let w = matrix(backend, &numbers(&mut random, outs * cols), outs, cols, WeightFormat::Fp8);
    let x = numbers(&mut random, rows * cols);
    backend.reserve_rows(rows, cols).unwrap();
    let product = |x: &[f32]| {
        let mut out = unwritten(backend, rows * outs);
        backend.matmul(rows, &backend.vector(x).unwrap(), &w, None, &mut out);
        read(backend, out, rows * outs)
    };
    let mut special = x.clone();
    (special[3 * cols + 5], special[7 * cols], special[69 * cols + 63]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let (plain, found) = (product(&x), product(&special));
    for (row, (found, plain)) in found.chunks(outs).zip(plain.chunks(outs)).enumerate() {
        match [3, 7, 69].contains(&row) {
            true => assert!(found.iter().all(|x| !x.is_finite()), "row {row}: {found:?}"),
            false => assert!(found == plain, "row {row}"),
        }
    }
}

/// Devices before 8.9 have no fp8, and only 9.0 has scales per row. Some numbers of outputs are not
/// supported either.
#[test]
fn products_that_cublaslt_does_not_support_use_the_own_kernels() {
    let _one = capability();
    for ((major, minor), outs, rounded) in
        [((8, 0), 48, false), ((8, 9), 48, true), ((12, 0), 48, true), ((9, 0), 48, true), ((9, 0), 50, false)]
    {
        if !cuda::shim().pretends() {
            return;
        }
        cuda::shim().pretend_capability(major, minor);
        let backend = cuda::open(false);
        for bias in [true, false] {
            let case = Product { rows: 100, cols: 120, outs, format: WeightFormat::Fp8, bias, rounded };
            assert_equal_on_backend(&format!("{outs} outputs on {major}.{minor}"), 1e-5, &case, &backend);
        }
    }
}

/// Returns the error for a matrix with NaN in row 3.
fn refusal<B: Backend>(backend: &B, format: WeightFormat) -> Error {
    let mut values = vec![0.5; 5 * 32];
    values[3 * 32 + 7] = f32::NAN;
    load(backend, &values, 5, 32, format).err().unwrap()
}

#[test]
fn unsupported_weights_are_refused_with_their_name() {
    let refused = |error: Error, code: Code, words: &[&str]| {
        assert!(error.code() == code && words.iter().all(|word| error.message().contains(word)), "{error}");
    };
    refused(refusal(cuda::backend(), WeightFormat::Fp8), Code::Model, &["row 3", "weight_format fp8"]);
    refused(refusal(cuda::backend(), WeightFormat::Int8), Code::Model, &["row 3", "weight_format int8"]);
    let int4 = |group, offsets| WeightFormat::Int4 { group, offsets };
    refused(refusal(cuda::backend(), int4(32, false)), Code::Model, &["row 3", "weight_format int4"]);
    refused(refusal(cuda::backend(), int4(32, true)), Code::Model, &["row 3", "weight_format int4_asymmetric"]);
    refused(refusal(cuda::backend(), int4(64, false)), Code::Unsupported, &["weight_group is 64", "32 columns", "int8"]);
    refused(refusal(cuda::backend(), int4(16, false)), Code::Unsupported, &["weight_group is 16", "[32, 64, 128]"]);
    // Twice the number is beyond f16, in which the scales are.
    let large = load(cuda::backend(), &[40_000.0; 32], 1, 32, int4(32, false)).err().unwrap();
    refused(large, Code::Model, &["row 0", "weight_format int4"]);
    let cpu = CpuBackend::new(1, Some(Isa::Portable)).unwrap();
    refused(refusal(&cpu, WeightFormat::Fp8), Code::Unsupported, &["fp8", "CUDA devices", "int8"]);
}

/// A row has the same bits alone and in tiles of any size. With one multiprocessor, products of more than
/// 32 rows use the larger tiles.
#[test]
fn a_row_of_a_product_has_the_same_bits_in_any_batch() {
    let (cols, outs, rows) = (192, 70, 130);
    let (backend, small) = (cuda::invariant(), cuda::open_small());
    for format in FLOATS.into_iter().chain([WeightFormat::Fp8]).chain(integers(cols)) {
        let mut random = seeded(5);
        let values: Vec<f32> = (0..outs * cols).map(|_| random.unit()).collect();
        let w = matrix(backend, &values, outs, cols, format);
        let x: Vec<f32> = (0..rows * cols).map(|_| random.unit()).collect();
        let product_on = |backend: &CudaBackend, w: &_, rows: &[f32]| {
            let count = rows.len() / cols;
            let mut out = unwritten(backend, count * outs);
            backend.matmul(count, &backend.vector(rows).unwrap(), w, None, &mut out);
            read(backend, out, count * outs)
        };
        let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let all = bits(&product_on(backend, &w, &x));
        let on_small = matrix(&small, &values, outs, cols, format);
        for (first, count) in [(0, 1), (3, 1), (5, 16), (20, 17), (60, 32), (7, 33), (60, 64), (0, 65), (0, 130)] {
            let (some, wanted) = (&x[first * cols..][..count * cols], &all[first * outs..][..count * outs]);
            assert_eq!(bits(&product_on(backend, &w, some)), wanted, "{format:?}: {count} rows from {first} on");
            let by_large_tiles = bits(&product_on(&small, &on_small, some));
            assert_eq!(by_large_tiles, wanted, "{format:?}: {count} rows from {first} on, one multiprocessor");
        }
    }
}

struct Tables {
    cols: usize,
    format: WeightFormat,
    /// The first token of the table.
    first: usize,
}

impl Case for Tables {
    fn run<B: Backend>(&self, backend: &B) -> Vec<Vec<f32>> {
        let (cols, mut random) = (self.cols, seeded(self.cols));
        let table = matrix(backend, &numbers(&mut random, 9 * cols), 9, cols, self.format);
        let mut inputs = B::Inputs::default();
        let batch = Batch { tokens: vec![8, 0, 3], positions: vec![0, 5, 6], ..Batch::default() };
        backend.upload(&batch, &mut inputs).unwrap();
        let mut out = unwritten(backend, 3 * cols);
        backend.embed(&inputs, &table, self.first, 0.75, &mut out);
        backend.add_positions(&inputs, &table, 2, &mut out);
        vec![read(backend, out, 3 * cols)]
    }
}

#[test]
fn embeddings_equal_those_of_the_cpu() {
    for (cols, format) in [1, 7, 64, 300].into_iter().flat_map(|cols| FLOATS.map(|format| (cols, format))) {
        // The table begins with token 0, with the last token, or after it.
        for first in [0, 8, 9] {
            assert_equal_on_both_backends(&format!("{cols} {format:?} from {first}"), 1e-6, &Tables { cols, format, first });
        }
    }
}

struct Norms {
    kind: NormKind,
    width: usize,
    bias: bool,
}

impl Case for Norms {
    fn run<B: Backend>(&self, backend: &B) -> Vec<Vec<f32>> {
        let Norms { kind, width, bias } = *self;
        let (rows, mut random) = (3, seeded(width));
        let mut vector = |len| backend.vector(&numbers(&mut random, len)).unwrap();
        let (mut x, y, weight, shift) = (vector(rows * width), vector(rows * width), vector(width), vector(width));
        let norm = NormOf { kind, eps: 1e-5, weight: &weight, bias: bias.then_some(&shift) };
        let (mut plain, mut added) = (unwritten(backend, rows * width), unwritten(backend, rows * width));
        backend.norm(rows, width, norm, &[], &x, &mut plain);
        backend.add_norm(rows, width, 0.5, &y, norm, &[], &mut x, &mut added);
        // Three heads between two other numbers, with one weight per head or one for all.
        let (dim, stride) = (width, 3 * width + 2);
        let mut heads = vector(rows * stride);
        backend.norm_heads(rows, Heads { first: 1, count: 3, dim, stride }, norm, &mut heads);
        let own = vector(3 * dim);
        backend.norm_heads(rows, Heads { first: 2, count: 3, dim, stride }, NormOf { weight: &own, bias: None, ..norm }, &mut heads);
        vec![
            read(backend, plain, rows * width),
            read(backend, added, rows * width),
            read(backend, x, rows * width),
            read(backend, heads, rows * stride),
        ]
    }
}

#[test]
fn norms_equal_those_of_the_cpu() {
    for kind in [NormKind::Rms { unit_offset: false }, NormKind::Rms { unit_offset: true }, NormKind::Layer] {
        for (width, bias) in [(1, false), (5, true), (32, false), (100, true), (1030, true), (4200, true)] {
            assert_equal_on_both_backends(&format!("{kind:?} {width}"), 1e-4, &Norms { kind, width, bias });
        }
    }
}

/// A gated MLP. The hidden rows are rounded to bf16 before the second product, so results are not
/// exact.
struct Mlp {
    rows: usize,
    width: usize,
    glu: Glu,
    format: WeightFormat,
}

impl Case for Mlp {
    fn run<B: Backend>(&self, backend: &B) -> Vec<Vec<f32>> {
        let Mlp { rows, width, glu, format } = *self;
        let (hidden, mut random) = (72, seeded(rows * width));
        backend.reserve_rows(rows, hidden.max(width)).unwrap();
        let x = backend.vector(&numbers(&mut random, rows * hidden)).unwrap();
        let mut weights = |outs, cols| matrix(backend, &numbers(&mut random, outs * cols), outs, cols, format);
        let (up, down) = (weights(2 * width, hidden), weights(hidden, width));
        let bias = backend.vector(&numbers(&mut random, 2 * width)).unwrap();
        let mlp = MlpOf { up: (&up, Some(&bias)), activation: Activation::Gated(glu), width, down: (&down, None) };
        let mut out = unwritten(backend, rows * hidden);
        let [mut wide, mut narrow] = [2, 1].map(|halves| unwritten(backend, rows * halves * width));
        backend.mlp(rows, &x, mlp, &mut wide, &mut narrow, &mut out);
        vec![read(backend, out, rows * hidden)]
    }
}

#[test]
fn gated_mlps_equal_those_of_the_cpu() {
    for glu in [Glu::Of(Act::Silu), Glu::Of(Act::GeluTanh), Glu::Clamped { alpha: 1.7, limit: 7.0 }] {
        for (rows, width) in [(1, 40), (8, 16), (9, 100), (16, 33), (20, 40)] {
            for format in [WeightFormat::F32, WeightFormat::Bf16] {
                assert_equal_on_both_backends(&format!("{rows}x{width}, {format:?}"), ROUNDED, &Mlp { rows, width, glu, format });
            }
        }
    }
}

/// Norms that only a product reads, and products that are added to a residual stream.
struct Branches {
    rows: usize,
    hidden: usize,
    kind: NormKind,
    /// Size of the numbers before the norm.
    size: f32,
    /// Of matrices after the norm.
    up: WeightFormat,
    /// Of the first and of the other rows of matrices before the addition.
    down: [WeightFormat; 2],
}

impl Branches {
    /// Returns 0.75 times a branch, added to a stream.
    fn sum<B: Backend>(&self, backend: &B, x: &[f32], add: impl FnOnce(Branch<B::Buf>) -> Addition) -> Vec<f32> {
        let (mut sum, mut delta) = (backend.vector(x).unwrap(), unwritten(backend, x.len()));
        if add(Branch { scale: 0.75, x: &mut sum, delta: &mut delta }) == Addition::Pending {
            backend.add(x.len(), 0.75, &mut sum, &delta);
        }
        read(backend, sum, x.len())
    }

    fn down<B: Backend>(&self, backend: &B, values: &[f32], cols: usize) -> B::Matrix {
        match self.down {
            [first, second] if first != second => in_two_parts(backend, values, self.hidden, cols, [first, second]),
            [format, _] => matrix(backend, values, self.hidden, cols, format),
        }
    }
}

impl Case for Branches {
    fn run<B: Backend>(&self, backend: &B) -> Vec<Vec<f32>> {
        let Branches { rows, hidden, kind, size, up, .. } = *self;
        let (width, mut random) = (48, seeded(rows * hidden));
        backend.reserve_rows(rows, hidden.max(2 * width)).unwrap();
        let mut values = |len| numbers(&mut random, len);
        let before: Vec<f32> = values(rows * hidden).iter().map(|x| x * size).collect();
        let [x, y] = [hidden, 2 * width].map(|each| values(rows * each));
        let [weight, of_up, of_down] = [hidden, 2 * width, hidden].map(|len| backend.vector(&values(len)).unwrap());
        let up = matrix(backend, &values(2 * width * hidden), 2 * width, hidden, up);
        let [narrow_down, wide_down] = [width, 2 * width].map(|cols| self.down(backend, &values(hidden * cols), cols));
        let [before, y] = [&before, &y].map(|numbers| backend.vector(numbers).unwrap());
        let norm = NormOf { kind, eps: 1e-5, weight: &weight, bias: None };
        let [mut normed, mut wide, mut narrow] = [hidden, 2 * width, width].map(|each| unwritten(backend, rows * each));

        let mut all = vec![self.sum(backend, &x, |to| backend.matmul_add(rows, &y, (&wide_down, Some(&of_down)), to))];
        let gated = MlpOf { up: (&up, Some(&of_up)), activation: Activation::Gated(Glu::Of(Act::Silu)), width, down: (&narrow_down, None) };
        let plain = MlpOf { up: (&up, None), activation: Activation::Plain(Act::Relu), width: 2 * width, down: (&wide_down, None) };
        for mlp in [gated, plain] {
            backend.norm_for_product(rows, hidden, norm, &up, &before, &mut normed);
            all.push(self.sum(backend, &x, |to| backend.mlp_add(rows, &normed, mlp, &mut wide, &mut narrow, to)));
        }
        backend.norm_for_product(rows, hidden, norm, &up, &before, &mut normed);
        backend.matmul(rows, &normed, &up, Some(&of_up), &mut wide);
        all.push(read(backend, wide, rows * 2 * width));
        all
    }
}

/// Returns a matrix whose first 24 rows have another format than the others, which represents the values.
fn in_two_parts<B: Backend>(backend: &B, values: &[f32], rows: usize, cols: usize, [first, second]: [WeightFormat; 2]) -> B::Matrix {
    let read = |from: usize, out: &mut [u8]| {
        let values = &values[from * cols..][..out.len() / 4];
        out.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(out, value)| *out = value.to_le_bytes());
        Ok(())
    };
    let sections = [(24, first), (rows - 24, second)].map(|(rows, format)| Section::numbers(rows, Dtype::F32, format));
    backend.matrix(cols, &sections, RowSource { read: &read, advance: &mut |_| Ok(()) }).unwrap()
}

const RMS: NormKind = NormKind::Rms { unit_offset: false };

#[test]
fn products_with_norms_and_additions_equal_those_of_the_cpu() {
    use WeightFormat::{Bf16, F16, F32, Fp8, Int8};
    let formats = [(Bf16, [Bf16, F16]), (Fp8, [Fp8; 2]), (Int8, [Int8; 2]), (F16, [F16; 2]), (F32, [Bf16, F32])];
    let sized = formats.into_iter().map(|formats| (formats, 1.0)).chain([((Bf16, [Bf16; 2]), 1e6), ((Bf16, [Bf16; 2]), 1e-2)]);
    for ((up, down), size) in sized {
        for (rows, hidden) in [(1, 72), (4, 147), (5, 72), (17, 72), (2, 2312)] {
            if rows > 16 && up == Fp8 {
                continue; // cuBLASLt multiplies rows in fp8
            }
            for kind in [RMS, NormKind::Rms { unit_offset: true }, NormKind::Layer] {
                let case = Branches { rows, hidden, kind, size, up, down };
                assert_equal_on_both_backends(&format!("{rows}x{hidden}, {kind:?}, {up:?}, {down:?}, {size}"), 2.0 * ROUNDED, &case);
            }
        }
    }
}

/// Products of few rows in bf16 begin with RMS norms. Nothing else reads the rows.
#[test]
fn norms_are_left_to_products_of_few_rows() {
    use WeightFormat::{Bf16, F16, F32, Fp8, Int8};
    let (hidden, mut of_16) = (64, cuda::open(false));
    of_16.norm_in_products_up_to(16);
    let is_left = |backend: &CudaBackend, rows: usize, format: WeightFormat, kind: NormKind| {
        let [x, weight] = [rows * hidden, hidden].map(|len| backend.vector(&vec![0.5; len]).unwrap());
        let (w, mut normed) = (matrix(backend, &vec![0.25; 8 * hidden], 8, hidden, format), unwritten(backend, rows * hidden));
        let norm = NormOf { kind, eps: 1e-5, weight: &weight, bias: None };
        backend.norm_for_product(rows, hidden, norm, &w, &x, &mut normed);
        let error = backend.read(&mut normed, 1).map(<[f32]>::to_vec).err();
        error.is_some_and(|error| error.to_string().contains("rows whose norm was left to a product"))
    };
    let default = cuda::backend();
    for format in [Bf16, Fp8, Int8] {
        let most = if format == Bf16 { 8 } else { 4 };
        assert_eq!([1, most, most + 1].map(|rows| is_left(default, rows, format, RMS)), [true, true, false], "{format:?}");
        assert_eq!([8, 9].map(|rows| is_left(&of_16, rows, format, RMS)), [true, false], "{format:?}: not for 16 rows");
        assert!(!is_left(default, 1, format, NormKind::Layer), "{format:?}");
        assert!(!is_left(cuda::invariant(), 1, format, RMS), "{format:?}");
    }
    // Numbers before their norm may exceed f16.
    assert_eq!([F16, F32].map(|format| is_left(default, 1, format, RMS)), [false; 2]);
}

#[test]
fn products_of_few_rows_are_added_at_once() {
    use WeightFormat::{Bf16, F16, F32, Fp8, Int8};
    let added = |backend: &CudaBackend, rows: usize, down: [WeightFormat; 2]| {
        let case = Branches { rows, hidden: 72, kind: RMS, size: 1.0, up: Bf16, down };
        let (w, y) = (case.down(backend, &vec![0.25; 72 * 48], 48), backend.vector(&vec![0.5; rows * 48]).unwrap());
        let [mut x, mut delta] = [0.0, f32::NAN].map(|number| backend.vector(&vec![number; rows * 72]).unwrap());
        let added = backend.matmul_add(rows, &y, (&w, None), Branch { scale: 2.0, x: &mut x, delta: &mut delta });
        let (sum, pending) = if added == Addition::Done { (x, delta) } else { (delta, x) };
        let factor = if added == Addition::Done { 2.0 } else { 1.0 };
        assert!(read(backend, sum, rows * 72).iter().all(|sum| (sum - 6.0 * factor).abs() < 1e-4), "{rows}, {down:?}");
        let unchanged = read(backend, pending, rows * 72);
        assert!(unchanged.iter().all(|number| number.is_nan() || *number == 0.0), "{rows}, {down:?}");
        added == Addition::Done
    };
    let default = cuda::backend();
    for down in [[Bf16; 2], [F16; 2], [Fp8; 2], [Int8; 2], [Bf16, F16]] {
        assert_eq!([1, 16, 17].map(|rows| added(default, rows, down)), [true, true, false], "{down:?}");
        assert!(!added(cuda::invariant(), 1, down), "{down:?}");
    }
    assert!(!added(default, 1, [F32; 2]) && !added(default, 1, [Bf16, F32]));
}

/// The elementwise ops.
struct Elementwise {
    rows: usize,
    width: usize,
}

impl Case for Elementwise {
    fn run<B: Backend>(&self, backend: &B) -> Vec<Vec<f32>> {
        let Elementwise { rows, width } = *self;
        let mut random = seeded(rows * width);
        // Some values exceed every limit.
        let mut vector = |len| backend.vector(&numbers(&mut random, len).iter().map(|x| x * 9.0).collect::<Vec<_>>()).unwrap();
        let (len, mut all) = (rows * width, Vec::new());
        for act in [Act::Relu, Act::Silu, Act::Gelu, Act::GeluTanh] {
            let mut x = vector(len);
            backend.activate(len, act, &mut x);
            all.push(read(backend, x, len));
        }
        let both = vector(2 * len);
        for glu in [Glu::Of(Act::Silu), Glu::Of(Act::GeluTanh), Glu::Clamped { alpha: 1.7, limit: 7.0 }] {
            let mut out = unwritten(backend, len);
            backend.gate(rows, width, glu, &[], &both, &mut out);
            all.push(read(backend, out, len));
        }
        let (mut x, y, gates) = (vector(len), vector(len), vector(rows));
        backend.add(len, 0.25, &mut x, &y);
        backend.add_gated(rows, width, &gates, &mut x, &y);
        for cap in [None, Some(3.0)] {
            backend.scale_and_cap(len, 0.7, cap, &mut x);
        }
        all.push(read(backend, x, len));
        all
    }
}

#[test]
fn elementwise_ops_equal_those_of_the_cpu() {
    for (rows, width) in [(1, 1), (3, 5), (7, 64), (30, 700)] {
        assert_equal_on_both_backends(&format!("{rows}x{width}"), 1e-5, &Elementwise { rows, width });
    }
}

struct Rows(WeightFormat);

impl Case for Rows {
    fn run<B: Backend>(&self, backend: &B) -> Vec<Vec<f32>> {
        let (rows, mut random) = (5, seeded(3));
        let strips = Strips { first: 2, count: 3, dim: 4, pitch: 5, stride: 20 };
        let x = backend.vector(&numbers(&mut random, rows * strips.stride)).unwrap();
        let mut split = unwritten(backend, strips.count * rows * strips.dim);
        backend.split_strips(rows, strips, &x, &mut split);
        let mut joined = backend.vector(&vec![0.0; rows * strips.stride]).unwrap();
        backend.join_strips(rows, Strips { first: 1, pitch: 6, ..strips }, &split, &mut joined);
        let weights: Vec<_> = (0..3).map(|_| matrix(backend, &numbers(&mut random, 7 * 4), 7, 4, self.0)).collect();
        let mut products = unwritten(backend, 3 * rows * 7);
        backend.matmul_strips(rows, 3, &split, &|strip| &weights[strip], &mut products);
        let mut inputs = B::Inputs::default();
        let batch = Batch { tokens: vec![0; rows], positions: vec![0; rows], logit_rows: vec![4, 0], ..Batch::default() };
        backend.upload(&batch, &mut inputs).unwrap();
        let mut gathered = unwritten(backend, 2 * strips.stride);
        backend.gather(&inputs, strips.stride, &x, &mut gathered);
        vec![
            read(backend, split, strips.count * rows * strips.dim),
            read(backend, joined, rows * strips.stride),
            read(backend, products, 3 * rows * 7),
            read(backend, gathered, 2 * strips.stride),
        ]
    }
}

#[test]
fn strips_and_selected_rows_equal_those_of_the_cpu() {
    for format in [WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Int8] {
        assert_equal_on_both_backends(&format!("strips, {format:?}"), 1e-5, &Rows(format));
    }
}

struct Experts {
    rows: usize,
    routing: Routing,
    local: Range<usize>,
    format: WeightFormat,
}

impl Case for Experts {
    fn run<B: Backend>(&self, backend: &B) -> Vec<Vec<f32>> {
        let Experts { rows, routing, local: Range { start: first, end }, format } = *self;
        let (width, outs, mut random) = (24, 17, seeded(rows));
        let count = rows * routing.top_k;
        let mut routes = backend.routes(rows + 2, Routing { experts: routing.experts + 1, top_k: routing.top_k + 1, ..routing }).unwrap();
        // Some scores are equal.
        let logits = backend.vector(&numbers(&mut random, rows * routing.experts)).unwrap();
        let correction = backend.vector(&numbers(&mut random, routing.experts)).unwrap();
        let corrects = routing.scores == Scores::Sigmoid;
        backend.route(rows, routing, first..end, corrects.then_some(&correction), &logits, &mut routes);
        let x = backend.vector(&numbers(&mut random, rows * width)).unwrap();
        let mut gathered = unwritten(backend, count * width);
        backend.gather_routes(&routes, width, &x, &mut gathered);
        let experts: Vec<_> = (0..routing.experts)
            .map(|_| {
                (
                    matrix(backend, &numbers(&mut random, outs * width), outs, width, format),
                    backend.vector(&numbers(&mut random, outs)).unwrap(),
                )
            })
            .collect();
        let mut products = unwritten(backend, count * outs);
        backend.matmul_routes(&routes, &gathered, &|expert| (&experts[expert].0, Some(&experts[expert].1)), &mut products);
        let mut out = unwritten(backend, rows * outs);
        backend.combine_routes(&routes, outs, &products, &mut out);
        vec![read(backend, gathered, count * width), read(backend, products, count * outs), read(backend, out, rows * outs)]
    }
}

#[test]
fn experts_equal_those_of_the_cpu() {
    let groups = |count, chosen, score| Some(ExpertGroups { count, chosen, score });
    let routings = [
        Routing::softmax(1, 1, true),
        Routing::softmax(4, 2, false),
        Routing::softmax(60, 4, true),
        Routing { groups: groups(4, 2, GroupScore::Best), scale: 1.5, ..Routing::softmax(16, 3, false) },
        Routing { scores: Scores::Sigmoid, scale: 2.5, groups: groups(8, 3, GroupScore::BestTwo), ..Routing::softmax(64, 6, true) },
        Routing { scores: Scores::Sigmoid, ..Routing::softmax(7, 7, false) },
    ];
    for (rows, routing) in [1, 5, 40].into_iter().flat_map(|rows| routings.map(|routing| (rows, routing))) {
        for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Int8] {
            // All experts, those of one of two ranks, and none.
            let half = routing.experts / 2;
            for local in [0..routing.experts, 0..half, half..routing.experts] {
                let name = format!("{rows} rows, {format:?}, {local:?} of {routing:?}");
                assert_equal_on_both_backends(&name, 1e-5, &Experts { rows, routing, local, format });
            }
        }
    }
}

/// Attention over sequences in chunks: step i has chunk i of each sequence.
#[derive(Clone)]
struct Attend {
    shape: AttentionShape,
    dtype: KvDtype,
    block_size: usize,
    groups: usize,
    rotated: usize,
    pairs: Pairs,
    sinks: bool,
    sizes: [f32; 3],              // of queries, keys and values
    special: Option<f32>,         // value of some keys and values
    reader: Option<WeightFormat>, // of a product, whose results are then returned
    at_once: bool,                // rows are stored and attended to by one operation
    chunks: Vec<Vec<usize>>,      // [sequences][steps]
    seed: usize,
}

impl Attend {
    /// Short and long sequences with different chunks.
    fn new(shape: AttentionShape, dtype: KvDtype) -> Attend {
        let chunks = vec![vec![1, 1, 1], vec![70, 1, 3], vec![9, 80, 1], vec![150, 1, 1]];
        Attend {
            shape,
            dtype,
            block_size: 16,
            groups: 1,
            rotated: shape.head_dim / 4 * 2,
            pairs: Pairs::Halves,
            sinks: false,
            sizes: [1.0; 3],
            special: None,
            reader: None,
            at_once: false,
            chunks,
            seed: 1,
        }
    }

    /// Returns rows of queries, keys and values.
    fn rows(&self, random: &mut Random, rows: usize) -> Vec<f32> {
        let [queries, keys] = [self.shape.q_width(), self.shape.q_width() + self.shape.kv_width()];
        let mut all = numbers(random, rows * self.shape.qkv_width());
        for (i, x) in all.iter_mut().enumerate() {
            let at = i % self.shape.qkv_width();
            *x *= self.sizes[(at >= queries) as usize + (at >= keys) as usize];
        }
        for (row, special) in (20..rows).step_by(50).flat_map(|row| self.special.map(|special| (row, special))) {
            // The special value is in keys of the second head, or in values of the first.
            all[row * self.shape.qkv_width() + if row % 100 == 20 { queries + self.shape.head_dim } else { keys }] = special;
        }
        all
    }

    fn blocks_each(&self) -> usize {
        self.chunks.iter().map(|chunks| chunks.iter().sum::<usize>().div_ceil(self.block_size)).max().unwrap_or(0)
    }

    /// The number of blocks is not a multiple of 5, so that no two entries are equal.
    fn blocks(&self) -> usize {
        let needed = self.chunks.len() * self.blocks_each() * self.groups;
        if needed.is_multiple_of(5) { needed + 1 } else { needed }
    }

    /// Entries of the block table of a sequence. The blocks of all sequences are interleaved.
    fn table(&self, sequence: usize) -> impl Iterator<Item = u32> {
        let (entries, sequences, blocks) = (self.blocks_each() * self.groups, self.chunks.len(), self.blocks());
        (0..entries).map(move |entry| ((entry * sequences + sequence) as u32 * 5 + 3) % blocks as u32)
    }

    fn batch(&self, step: usize) -> Batch {
        let mut batch = Batch::default();
        for (sequence, chunks) in self.chunks.iter().enumerate() {
            let (start, rows) = (chunks[..step].iter().sum::<usize>(), chunks[step]);
            let table: Vec<u32> = self.table(sequence).collect();
            batch.spans.push(Span { first_token: batch.tokens.len() as u32, tokens: rows as u32, table: batch.tables.len() as u32 });
            for position in start..start + rows {
                batch.tokens.push(0);
                batch.positions.push(position as u32);
                let blocks = &table[position / self.block_size * self.groups..][..self.groups];
                batch.slots.extend(blocks.iter().map(|block| block * self.block_size as u32 + (position % self.block_size) as u32));
            }
            batch.tables.extend(table);
        }
        batch
    }
}

impl Attend {
    /// Returns the results of all steps, and the bytes of K and V afterwards.
    fn results<B: Backend>(&self, backend: &B) -> (Vec<Vec<f32>>, Vec<u8>) {
        let (shape, mut random) = (&self.shape, seeded(self.seed));
        let AttentionShape { kv_heads, head_dim, values, .. } = *shape;
        let kv_shape = KvShape { blocks: self.blocks(), block_size: self.block_size, kv_heads, head_dim, values, dtype: self.dtype };
        backend.reserve(shape).unwrap();
        let mut kv = backend.kv(kv_shape).unwrap();
        let frequencies: Vec<f32> = (0..self.rotated / 2).map(|i| 0.7 / (i + 1) as f32).collect();
        let frequencies = backend.vector(&frequencies).unwrap();
        let sinks = self.sinks.then(|| backend.vector(&numbers(&mut random, shape.heads)).unwrap());
        let (mut inputs, mut all) = (B::Inputs::default(), Vec::new());
        for step in 0..self.chunks[0].len() {
            let batch = self.batch(step);
            let rows = batch.token_count();
            backend.upload(&batch, &mut inputs).unwrap();
            let mut angles = unwritten(backend, rows * self.rotated);
            backend.angles(&inputs, &frequencies, 1.25, &mut angles);
            let turn = (self.rotated > 0).then_some(RotaryEmbedding { rotated: self.rotated, pairs: self.pairs, angles: &angles });
            let mut scaled = |len, size| numbers(&mut random, len).iter().map(|x| x * size).collect::<Vec<_>>();
            let mut queries = backend.vector(&scaled(rows * shape.row_width(), self.sizes[0])).unwrap();
            let group = step % self.groups;
            // The visible positions are in the blocks of each group.
            for stored in 0..self.groups {
                let mut random = seeded(step + 77);
                match values {
                    Values::Own => {
                        let mut rows = backend.vector(&self.rows(&mut random, rows)).unwrap();
                        if !(self.at_once && stored == group) {
                            backend.store_kv(&inputs, stored, shape, turn, &mut rows, &mut kv);
                        }
                        if stored == group {
                            queries = rows;
                        }
                    }
                    Values::OfKeys(_) => {
                        let latents: Vec<f32> = numbers(&mut random, rows * shape.kv_width()).iter().map(|x| x * self.sizes[1]).collect();
                        backend.store_kv(&inputs, stored, shape, None, &mut backend.vector(&latents).unwrap(), &mut kv);
                    }
                }
            }
            let mut out = unwritten(backend, rows * shape.out_width());
            let mut attend = |readers: &[&B::Matrix], out: &mut B::Buf| match self.at_once {
                true => backend.store_and_attend(&inputs, group, shape, turn, sinks.as_ref(), readers, &mut queries, &mut kv, out),
                false => backend.attention(&inputs, group, shape, sinks.as_ref(), readers, &queries, &kv, out),
            };
            let Some(reader) = self.reader else {
                attend(&[], &mut out);
                all.push(read(backend, out, rows * shape.out_width()).iter().map(|x| x / self.sizes[2]).collect());
                continue;
            };
            let w = numbers(&mut random, 24 * shape.out_width());
            let w = matrix(backend, &w, 24, shape.out_width(), reader);
            backend.reserve_rows(rows, shape.out_width()).unwrap();
            attend(&[&w], &mut out);
            let mut projected = unwritten(backend, rows * 24);
            backend.matmul(rows, &out, &w, None, &mut projected);
            all.push(read(backend, projected, rows * 24));
        }
        let (blocks, mut bytes) = ((0..self.blocks() as u32).collect::<Vec<_>>(), Vec::new());
        backend.read_blocks(&blocks, Tail { blocks: 0, slots: 0 }, &kv, &mut bytes).unwrap();
        (all, bytes)
    }
}

impl Case for Attend {
    fn run<B: Backend>(&self, backend: &B) -> Vec<Vec<f32>> {
        self.results(backend).0
    }
}

/// The formats of matrices that round their rows, and f32.
const FORMATS: [WeightFormat; 5] = [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Int8];

/// Runs a case on a backend and on one that stores all activations in f32. Results have the same bits.
fn assert_same_bits_in_f32(name: &str, case: &impl Case) {
    for invariant in [false, true] {
        let mut in_f32 = cuda::open(invariant);
        in_f32.keep_f32();
        let wanted = case.run(&in_f32).concat();
        let found = case.run(if invariant { cuda::invariant() } else { cuda::backend() }).concat();
        assert!(wanted.iter().all(|x| x.is_finite()), "{name}");
        let same = found.iter().zip(&wanted).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!((found.len(), same), (wanted.len(), None), "{name}, batch-invariant: {invariant}");
    }
}

/// Norms, gates and routed rows that only products read.
struct ReadByProducts {
    rows: usize,
    format: WeightFormat,
    hidden: usize,
}

impl Case for ReadByProducts {
    fn run<B: Backend>(&self, backend: &B) -> Vec<Vec<f32>> {
        let ReadByProducts { rows, format, hidden } = *self;
        let (width, mut random) = (48, seeded(rows + hidden));
        backend.reserve_rows(2 * rows, hidden.max(width)).unwrap();
        let mut vector = |len: usize| backend.vector(&(0..len).map(|_| random.unit()).collect::<Vec<_>>()).unwrap();
        let (mut x, y, weight) = (vector(rows * hidden), vector(rows * hidden), vector(hidden));
        let norm = NormOf { kind: NormKind::Layer, eps: 1e-5, weight: &weight, bias: None };
        let mut weights = |outs, cols| matrix(backend, &numbers(&mut random, outs * cols), outs, cols, format);
        let (up, down, router) = (weights(2 * width, hidden), weights(hidden, width), weights(3, hidden));
        let experts: Vec<_> = (0..3).map(|_| (weights(2 * width, hidden), weights(hidden, width))).collect();
        let (glu, routing) = (Glu::Of(Act::Silu), Routing::softmax(3, 2, true));
        let routed = rows * routing.top_k;
        let mut all = Vec::new();

        let mut normed = unwritten(backend, rows * hidden);
        backend.norm(rows, hidden, norm, &[&up, &up], &x, &mut normed);
        let mlp = MlpOf { up: (&up, None), activation: Activation::Gated(glu), width, down: (&down, None) };
        let [mut wide, mut narrow, mut out] = [2 * width, width, hidden].map(|each| unwritten(backend, rows * each));
        backend.mlp(rows, &normed, mlp, &mut wide, &mut narrow, &mut out);
        all.push(read(backend, out, rows * hidden));

        let mut routes = backend.routes(rows, routing).unwrap();
        let [mut wide, mut narrow, mut gathered] = [2 * width, width, hidden].map(|each| unwritten(backend, routed * each));
        let (mut logits, mut out) = (unwritten(backend, rows * 3), unwritten(backend, rows * hidden));
        backend.add_norm(rows, hidden, 0.5, &y, norm, &[&router, &experts[0].0], &mut x, &mut normed);
        backend.matmul(rows, &normed, &router, None, &mut logits);
        backend.route(rows, routing, 0..3, None, &logits, &mut routes);
        backend.gather_routes(&routes, hidden, &normed, &mut gathered);
        backend.matmul_routes(&routes, &gathered, &|expert| (&experts[expert].0, None), &mut wide);
        backend.gate(routed, width, glu, &[&experts[0].1], &wide, &mut narrow);
        backend.matmul_routes(&routes, &narrow, &|expert| (&experts[expert].1, None), &mut gathered);
        backend.combine_routes(&routes, hidden, &gathered, &mut out);
        for (buf, len) in [(x, rows * hidden), (logits, rows * 3), (out, rows * hidden)] {
            all.push(read(backend, buf, len));
        }
        all
    }
}

#[test]
fn results_that_only_products_read_are_rounded_without_a_change_of_bits() {
    for (rows, hidden) in [(1, 72), (8, 200), (9, 136), (16, 72), (17, 72), (64, 264), (200, 72), (5, 70)] {
        for format in FORMATS {
            assert_same_bits_in_f32(&format!("{rows}x{hidden}, {format:?}"), &ReadByProducts { rows, format, hidden });
        }
    }
}

#[test]
fn attention_that_only_a_product_reads_is_rounded_without_a_change_of_bits() {
    let shapes = [(8, 2, 64, KvDtype::Bf16), (3, 1, 80, KvDtype::Int8), (4, 2, 128, KvDtype::F16), (2, 1, 40, KvDtype::F32)];
    for (heads, kv_heads, head_dim, dtype) in shapes {
        let shape = AttentionShape::new(heads, kv_heads, head_dim, 0.125);
        for reader in [WeightFormat::F16, WeightFormat::Bf16] {
            let mut case = Attend { reader: Some(reader), ..Attend::new(shape, dtype) };
            assert_same_bits_in_f32(&format!("prefill, {head_dim}, {dtype:?}, {reader:?}"), &case);
            // Sequences in several parts and in one, without longer chunks.
            case.chunks = vec![vec![1; 2], vec![1; 2]];
            assert_same_bits_in_f32(&format!("decode, {head_dim}, {dtype:?}, {reader:?}"), &case);
        }
    }
}

/// Rows that a product rounds are its operand, and no other operation reads them.
#[test]
fn rounded_rows_are_read_by_products_of_their_type_only() {
    let backend = cuda::open(false);
    let (rows, width) = (3, 64);
    let ([x, weight], mut out) =
        ([rows * width, width].map(|len| backend.vector(&vec![0.5; len]).unwrap()), unwritten(&backend, rows * width));
    let [bf16, f16] = [WeightFormat::Bf16, WeightFormat::F16].map(|format| matrix(&backend, &vec![0.25; 8 * width], 8, width, format));
    let norm = NormOf { kind: NormKind::Layer, eps: 1e-5, weight: &weight, bias: None };
    let mut normed = unwritten(&backend, rows * width);
    let mut check = |misuse: &dyn Fn(&CudaBackend, &mut <CudaBackend as BackendTypes>::Buf), message: &str| {
        backend.norm(rows, width, norm, &[&bf16], &x, &mut normed);
        misuse(&backend, &mut normed);
        let error = backend.read(&mut out, 1).map(<[f32]>::to_vec).unwrap_err();
        assert_eq!(error.code(), Code::Internal, "{error}");
        assert!(error.to_string().contains(message), "{error}");
    };
    let in_f32 = "an operation reads f32 from a buffer in bf16";
    check(&|backend, normed| backend.activate(rows * width, Act::Relu, normed), in_f32);
    check(&|backend, normed| backend.add(rows * width, 1.0, normed, &x), in_f32);
    let other = "an operation reads f16 from a buffer in bf16";
    check(&|backend, normed| backend.matmul(rows, normed, &f16, None, &mut unwritten(backend, rows * 8)), other);
    let error = backend.read(&mut normed, 1).map(<[f32]>::to_vec).unwrap_err();
    assert!(error.to_string().contains(in_f32), "{error}");
    // Readers of different types, and other readers.
    for readers in [&[&bf16, &f16][..], &[]] {
        backend.norm(rows, width, norm, readers, &x, &mut normed);
        backend.activate(rows * width, Act::Relu, &mut normed);
        assert_eq!(backend.read(&mut normed, 1).unwrap(), [0.0]);
    }
}

/// KV types with a tensor core kernel.
const ON_TENSOR_CORES: [KvDtype; 4] = [KvDtype::Bf16, KvDtype::F16, KvDtype::Int8, KvDtype::Fp8];

/// NaN and infinities affect results from their token on, and not before. Zeros and subnormals
/// count as 0. In f16, too large values become the largest number.
#[test]
fn attention_to_special_values_equals_the_cpu() {
    for (head_dim, dtype) in [64, 20].into_iter().flat_map(|dim| ON_TENSOR_CORES.map(|dtype| (dim, dtype))) {
        let attend = Attend::new(AttentionShape::new(4, 2, head_dim, 0.125), dtype);
        let bytes = matches!(dtype, KvDtype::Int8 | KvDtype::Fp8);
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().filter(|_| bytes) {
            let case = Attend { special: Some(special), ..attend.clone() };
            assert_equal_on_both_backends(&format!("{special} in {dtype:?}, {head_dim}"), tensor(dtype), &case);
        }
        for sizes in [[1.0, 0.0, 1.0], [1.0, 1.0, 1e-42], [1.0, 1e-40, 1.0]] {
            assert_equal_on_both_backends(
                &format!("{sizes:?} in {dtype:?}, {head_dim}"),
                tensor(dtype),
                &Attend { sizes, ..attend.clone() },
            );
        }
        if dtype == KvDtype::F16 {
            let case = Attend { sizes: [1.0, 1.0, 1e6], ..attend.clone() };
            assert_equal_on_both_backends(&format!("values beyond f16, {head_dim}"), tensor(dtype), &case);
        }
    }
}

/// Bound for queries and probabilities that tensor cores round to f16 or bf16.
fn tensor(dtype: KvDtype) -> f64 {
    if dtype == KvDtype::F16 { 1e-3 } else { ROUNDED }
}

#[test]
fn attention_on_tensor_cores_equals_the_cpu() {
    for (heads, kv_heads, head_dim) in [(4, 4, 64), (8, 2, 64), (3, 1, 80), (4, 2, 96), (2, 1, 112), (7, 1, 128), (20, 1, 64), (2, 1, 256)]
    {
        let shape = AttentionShape::new(heads, kv_heads, head_dim, 1.0 / (head_dim as f32).sqrt());
        for dtype in ON_TENSOR_CORES {
            assert_equal_on_both_backends(&format!("{heads} heads of {head_dim}, {dtype:?}"), tensor(dtype), &Attend::new(shape, dtype));
        }
    }
}

/// Queries, weights and scales that are outside the range of 16-bit numbers.
#[test]
fn attention_with_very_large_and_very_small_values_equals_the_cpu() {
    let far = [(KvDtype::F16, [1e8, 1e-3, 1e3]), (KvDtype::F16, [1e-9, 1e2, 1e-2])];
    let farther = [KvDtype::Bf16, KvDtype::Int8, KvDtype::Fp8].into_iter();
    let farther = farther.flat_map(|dtype| [[1e20, 1e-15, 1e30], [1e-12, 1e20, 1e-30]].map(|sizes| (dtype, sizes)));
    for (dtype, sizes) in far.into_iter().chain(farther) {
        let shape = AttentionShape::new(4, 2, 64, 0.125 / sizes[0] / sizes[1]);
        assert_equal_on_both_backends(&format!("{dtype:?} {sizes:?}"), tensor(dtype), &Attend { sizes, ..Attend::new(shape, dtype) });
    }
}

#[test]
fn attention_with_windows_sinks_slopes_and_caps_equals_the_cpu() {
    let on_tensor_cores = [64, 64, 80, 112].into_iter().zip(ON_TENSOR_CORES).map(|(head_dim, dtype)| (head_dim, dtype, tensor(dtype)));
    for (head_dim, dtype, tolerance) in on_tensor_cores.chain([(40, KvDtype::Bf16, 1e-4), (24, KvDtype::F32, 1e-4)]) {
        let plain = AttentionShape::new(4, 2, head_dim, 0.125);
        let with = |shape: AttentionShape| Attend::new(shape, dtype);
        let cases = [
            ("a window", with(AttentionShape { window: Some(37), ..plain })),
            ("a cap", with(AttentionShape { soft_cap: Some(2.0), ..plain })),
            ("ALiBi", with(AttentionShape { alibi: Some(0.5), ..plain })),
            ("ALiBi and a cap", with(AttentionShape { alibi: Some(0.5), soft_cap: Some(2.0), ..plain })),
            ("sinks", Attend { sinks: true, ..with(plain) }),
            ("sinks and a window", Attend { sinks: true, ..with(AttentionShape { window: Some(3), ..plain }) }),
            ("neighbours that turn together", Attend { pairs: Pairs::Neighbours, ..with(plain) }),
            ("no positions", Attend { rotated: 0, ..with(plain) }),
            ("groups of layers", Attend { groups: 3, ..with(plain) }),
            ("the smallest blocks", Attend { block_size: 8, ..with(plain) }),
            ("the largest blocks", Attend { block_size: 256, ..with(plain) }),
        ];
        for (name, case) in cases {
            assert_equal_on_both_backends(&format!("{name}, {dtype:?}, {head_dim}"), tolerance, &case);
        }
    }
}

#[test]
fn attention_of_any_width_and_type_equals_the_cpu() {
    for (heads, kv_heads, head_dim) in [(1, 1, 1), (3, 3, 5), (71, 1, 8), (6, 2, 33), (2, 2, 160), (2, 1, 576)] {
        for dtype in [KvDtype::F32, KvDtype::Int8, KvDtype::F16, KvDtype::Fp8] {
            let shape = AttentionShape::new(heads, kv_heads, head_dim, 0.2);
            let chunks = vec![vec![1, 1], vec![70, 1], vec![9, 20]];
            assert_equal_on_both_backends(
                &format!("{heads} heads of {head_dim}, {dtype:?}"),
                1e-3,
                &Attend { chunks, ..Attend::new(shape, dtype) },
            );
        }
    }
}

#[test]
fn attention_over_latents_equals_the_cpu() {
    for dtype in KvDtype::ALL {
        let shape = AttentionShape { values: Values::OfKeys(32), ..AttentionShape::new(5, 1, 40, 0.3) };
        assert_equal_on_both_backends(&format!("{dtype:?}"), 1e-3, &Attend { rotated: 0, ..Attend::new(shape, dtype) });
    }
}

/// The shape of DeepSeek models, which has a tensor core kernel.
fn latents(heads: usize) -> AttentionShape {
    AttentionShape { values: Values::OfKeys(512), ..AttentionShape::new(heads, 1, 576, 0.06) }
}

fn attend_latents(heads: usize, dtype: KvDtype) -> Attend {
    let chunks = vec![vec![1, 1], vec![37, 1], vec![9, 20]];
    Attend { rotated: 0, chunks, ..Attend::new(latents(heads), dtype) }
}

#[test]
fn attention_over_latents_on_tensor_cores_equals_the_cpu() {
    for dtype in KvDtype::ALL {
        assert_equal_on_both_backends(&format!("{dtype:?}"), tensor(dtype), &attend_latents(3, dtype));
    }
    let case = Attend { chunks: vec![vec![1, 1], vec![20, 1]], ..attend_latents(70, KvDtype::Bf16) };
    assert_equal_on_both_backends("70 heads", ROUNDED, &case);
    for sizes in [[1e8, 1e-3, 1e-3], [1e-9, 1e2, 1e2]] {
        let case = attend_latents(5, KvDtype::F16);
        let shape = AttentionShape { scale: 0.06 / sizes[0] / sizes[1], ..case.shape };
        assert_equal_on_both_backends(&format!("{sizes:?}"), tensor(KvDtype::F16), &Attend { sizes, shape, ..case });
    }
}

/// The kernel for devices with less shared memory. A worker has a context of its own, and so the
/// kernels for this capability.
#[test]
fn attention_over_latents_with_little_shared_memory_equals_the_cpu() {
    if !cuda::shim().pretends() {
        return;
    }
    let _one = capability();
    cuda::shim().pretend_capability(8, 6);
    let backend = CudaBackend::for_worker(0, false).unwrap();
    cuda::shim().pretend_capability(9, 0);
    for (heads, dtype) in [(3, KvDtype::F16), (20, KvDtype::Bf16)] {
        let case = attend_latents(heads, dtype);
        assert_equal_on_backend(&format!("{heads} heads, {dtype:?}"), tensor(dtype), &case, &backend);
    }
}

/// Features that no model with latents has use the plain kernel.
#[test]
fn attention_over_latents_with_windows_sinks_slopes_and_caps_equals_the_cpu() {
    let case = attend_latents(3, KvDtype::Bf16);
    let with = |shape: AttentionShape| Attend { shape, ..case.clone() };
    let plain = case.shape;
    let cases = [
        ("a window", with(AttentionShape { window: Some(5), ..plain })),
        ("a cap", with(AttentionShape { soft_cap: Some(0.5), ..plain })),
        ("ALiBi", with(AttentionShape { alibi: Some(0.5), ..plain })),
        ("sinks", Attend { sinks: true, ..case.clone() }),
        ("other values", with(AttentionShape { values: Values::OfKeys(511), ..plain })),
    ];
    for (name, case) in cases {
        assert_equal_on_both_backends(name, 1e-3, &case);
    }
}

#[test]
fn attention_over_latents_in_parts_equals_the_cpu() {
    for (dtype, heads, long) in [(KvDtype::Bf16, 2, 280), (KvDtype::F16, 1, 530)] {
        let case = Attend { chunks: vec![vec![long, 1, 1], vec![3, 1, 1]], ..attend_latents(heads, dtype) };
        assert_equal_on_both_backends(&format!("{dtype:?}"), tensor(dtype), &case);
    }
}

/// A few long sequences are split into parts, whose results are merged.
#[test]
fn attention_in_parts_equals_the_cpu() {
    let cases = [(false, None), (true, None), (false, Some(500)), (false, Some(501)), (true, None), (false, None)];
    let dtypes = [KvDtype::Bf16, KvDtype::Bf16, KvDtype::Bf16, KvDtype::Int8, KvDtype::Fp8, KvDtype::F16];
    for ((sinks, window), dtype) in cases.into_iter().zip(dtypes) {
        let shape = AttentionShape { window, ..AttentionShape::new(8, 2, 64, 0.125) };
        let chunks = vec![vec![2000, 1, 1], vec![3, 1, 1], vec![700, 1, 1]];
        let case = Attend { chunks, sinks, ..Attend::new(shape, dtype) };
        assert_equal_on_both_backends(&format!("sinks {sinks}, window {window:?}, {dtype:?}"), tensor(dtype), &case);
    }
}

/// Checks that results, K and V have the bits of two operations if one stores the rows and attends to
/// them.
fn assert_stored_at_once(name: &str, case: &Attend) {
    let (at_once, two) = (Attend { at_once: true, ..case.clone() }, Attend { at_once: false, ..case.clone() });
    let bits = |(results, kv): (Vec<Vec<f32>>, Vec<u8>)| (results.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>(), kv);
    let ((found, kv), (wanted, wanted_kv)) = (bits(at_once.results(cuda::backend())), bits(two.results(cuda::backend())));
    assert!(wanted.iter().all(|&x| f32::from_bits(x).is_finite()), "{name}");
    assert_eq!(found.iter().zip(&wanted).position(|(a, b)| a != b), None, "{name}");
    // On a device, unused slots have any bytes.
    if cuda::shim().pretends() {
        assert_eq!(kv.iter().zip(&wanted_kv).position(|(a, b)| a != b), None, "{name}, K and V");
    }
}

#[test]
fn rows_that_are_stored_by_attention_have_the_same_bits() {
    let steps = vec![vec![1, 1, 1], vec![33, 1, 1], vec![15, 1, 3], vec![64, 1, 1], vec![78, 1, 1]];
    for (heads, kv_heads, head_dim) in [(8, 2, 64), (3, 1, 80), (4, 2, 96), (2, 1, 112), (4, 1, 128), (20, 1, 64), (2, 2, 256)] {
        for dtype in ON_TENSOR_CORES {
            let shape = AttentionShape::new(heads, kv_heads, head_dim, 0.125);
            let case = Attend { chunks: steps.clone(), ..Attend::new(shape, dtype) };
            assert_stored_at_once(&format!("{heads} heads of {head_dim}, {dtype:?}"), &case);
        }
    }
    let plain = AttentionShape::new(4, 2, 64, 0.125);
    let with = |shape: AttentionShape| Attend { chunks: steps.clone(), ..Attend::new(shape, KvDtype::Bf16) };
    let parts = vec![vec![300, 1, 1], vec![3, 1, 1], vec![520, 1, 1]];
    let cases = [
        ("a window", with(AttentionShape { window: Some(17), ..plain })),
        ("a window of one token", with(AttentionShape { window: Some(1), ..plain })),
        ("ALiBi and a cap", Attend { rotated: 0, ..with(AttentionShape { alibi: Some(0.5), soft_cap: Some(2.0), ..plain }) }),
        ("sinks", Attend { sinks: true, ..with(plain) }),
        ("neighbours that turn together", Attend { pairs: Pairs::Neighbours, ..with(plain) }),
        ("all dimensions turn", Attend { rotated: 64, ..with(plain) }),
        ("groups of layers", Attend { groups: 3, ..with(plain) }),
        ("the largest blocks", Attend { block_size: 256, ..with(plain) }),
        ("sequences that begin", Attend { chunks: vec![vec![1; 3]; 2], ..with(plain) }),
        ("parts", Attend { chunks: parts.clone(), sinks: true, ..with(plain) }),
        ("parts and a window", Attend { chunks: parts, ..with(AttentionShape { window: Some(100), ..plain }) }),
        ("heads in two tiles", Attend { chunks: vec![vec![260, 1, 1]; 2], ..with(AttentionShape { heads: 40, ..plain }) }),
        ("a product that reads the results", Attend { reader: Some(WeightFormat::Bf16), ..with(plain) }),
    ];
    for ((name, case), dtype) in cases.into_iter().zip(ON_TENSOR_CORES.into_iter().cycle()) {
        assert_stored_at_once(&format!("{name}, {dtype:?}"), &Attend { dtype, ..case });
    }
    for (head_dim, dtype) in [(20, KvDtype::Bf16), (64, KvDtype::F32)] {
        let case = Attend { chunks: steps.clone(), ..Attend::new(AttentionShape::new(4, 2, head_dim, 0.125), dtype) };
        assert_stored_at_once(&format!("without tensor cores, {head_dim}, {dtype:?}"), &case);
    }
}

#[test]
fn prefill_has_the_same_bits_in_any_batch_and_with_any_chunks() {
    let on_tensor_cores = [128, 64, 80, 112].into_iter().zip(ON_TENSOR_CORES);
    for (head_dim, dtype) in on_tensor_cores.chain([(64, KvDtype::Bf16), (256, KvDtype::Fp8), (20, KvDtype::F32)]) {
        let shape = AttentionShape { window: Some(90), ..AttentionShape::new(6, 2, head_dim, 0.2) };
        let case = |chunks| Attend { chunks, ..Attend::new(shape, dtype) };
        let backend = cuda::invariant();
        let bits = |case: &Attend| case.run(backend).concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        // The values of a row depend only on its step, so a sequence has the same values in both
        // runs.
        let (alone, together) = (bits(&case(vec![vec![150]])), bits(&case(vec![vec![150], vec![40], vec![2]])));
        assert!(together.starts_with(&alone), "{head_dim} {dtype:?}");
    }
}

/// A row of latents has the same bits in prompts and alone, in batch-invariant mode.
#[test]
fn latents_have_the_same_bits_in_any_batch() {
    let bits = |heads, dtype, chunks| {
        let case = Attend { chunks, ..attend_latents(heads, dtype) };
        case.run(cuda::invariant()).concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    for (heads, dtype) in [(5, KvDtype::Bf16), (3, KvDtype::F16)] {
        let [alone, together] = [vec![vec![50]], vec![vec![50], vec![20], vec![2]]].map(|chunks| bits(heads, dtype, chunks));
        assert!(together.starts_with(&alone), "{heads} {dtype:?}");
    }
}

/// Boxes have the tokens of up to 32 rows of a block, and the chunks of a prompt 128.
#[test]
fn prefill_that_copies_boxes_has_the_same_bits() {
    let plain = AttentionShape::new(2, 1, 64, 0.125);
    let with = |shape: AttentionShape, dtype, block_size| Attend {
        chunks: vec![vec![300, 3], vec![1, 140]],
        block_size,
        ..Attend::new(shape, dtype)
    };
    let wide = AttentionShape { head_dim: 128, ..plain };
    let cases = [
        ("boxes of 8 tokens", with(plain, KvDtype::F16, 8)),
        ("boxes of 16 tokens", with(wide, KvDtype::Bf16, 16)),
        ("boxes of 32 tokens", with(plain, KvDtype::Bf16, 32)),
        ("blocks of several boxes", with(wide, KvDtype::F16, 64)),
        ("blocks of several chunks", with(plain, KvDtype::Bf16, 256)),
        ("a window", with(AttentionShape { window: Some(200), ..wide }, KvDtype::Bf16, 16)),
        ("groups of layers", Attend { groups: 3, ..with(plain, KvDtype::F16, 16) }),
        ("many heads", with(AttentionShape { heads: 6, kv_heads: 3, ..plain }, KvDtype::F16, 16)),
    ];
    let _one = capability();
    let mut boxes = cuda::open(false);
    boxes.copy_boxes(true);
    for (name, case) in cases {
        let bits = |backend: &CudaBackend| case.run(backend).concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let (wanted, before) = (bits(cuda::backend()), cuda::shim().boxes());
        assert!(wanted.iter().all(|&x| f32::from_bits(x).is_finite()), "{name}");
        assert_eq!(bits(&boxes).iter().zip(&wanted).position(|(a, b)| a != b), None, "{name}");
        assert!(cuda::shim().boxes() > before || !cuda::shim().pretends(), "{name}");
    }
}

/// Kernels for other widths and types copy no boxes. If a pool has no tensor map that its kernel needs, it is
/// not created.
#[test]
fn only_pools_whose_kernel_copies_boxes_have_tensor_maps() {
    if !cuda::shim().pretends() {
        return;
    }
    let _one = capability();
    let mut backend = cuda::open(false);
    backend.copy_boxes(true);
    let kv = |head_dim, dtype| backend.kv(KvShape { blocks: 2, block_size: 16, kv_heads: 1, head_dim, values: Values::Own, dtype });
    cuda::shim().fail("cuTensorMapEncodeTiled", 1, 1);
    for (head_dim, dtype) in [(80, KvDtype::Bf16), (64, KvDtype::Int8), (128, KvDtype::F32)] {
        kv(head_dim, dtype).unwrap();
    }
    let error = kv(64, KvDtype::Bf16).err().unwrap().to_string();
    assert!(error.contains("failed to encode a KV pool as a tensor: CUDA_ERROR_INVALID_VALUE"), "{error}");
    kv(64, KvDtype::Bf16).unwrap();
}

/// Devices of other compute capabilities than 9.0 have no kernels with wgmma. A worker has a context of its
/// own, and so the kernels for this capability.
#[test]
fn prefill_without_wgmma_equals_the_cpu() {
    if !cuda::shim().pretends() {
        return;
    }
    let _one = capability();
    cuda::shim().pretend_capability(8, 6);
    let backend = CudaBackend::for_worker(0, true).unwrap();
    cuda::shim().pretend_capability(9, 0);
    for (head_dim, dtype) in [64, 128].into_iter().flat_map(|dim| [KvDtype::Bf16, KvDtype::F16].map(|dtype| (dim, dtype))) {
        let case = Attend::new(AttentionShape::new(6, 2, head_dim, 0.125), dtype);
        assert_equal_on_backend(&format!("heads of {head_dim}, {dtype:?}"), tensor(dtype), &case, &backend);
    }
}

/// KV blocks of layers with different widths.
fn layers<B: Backend>(backend: &B, dtype: KvDtype) -> (Vec<B::Kv>, u64) {
    let shape = |kv_heads| KvShape { blocks: 6, block_size: 8, kv_heads, head_dim: 3, values: Values::Own, dtype };
    let bytes = [2, 1, 4].map(|kv_heads| backend.kv_block_bytes(&shape(kv_heads))).iter().sum();
    ([2, 1, 4].map(|kv_heads| backend.kv(shape(kv_heads)).unwrap()).into(), bytes)
}

fn bytes_of<B: Backend>(backend: &B, layers: &[B::Kv], block: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    layers.iter().for_each(|layer| backend.read_blocks(&[block], Tail { blocks: 0, slots: 0 }, layer, &mut bytes).unwrap());
    bytes
}

fn fill<B: Backend>(backend: &B, layers: &mut [B::Kv], block: u32, seed: u8, bytes: u64) {
    let numbers: Vec<u8> = (0..bytes).map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed)).collect();
    let rest = layers.iter_mut().fold(&numbers[..], |bytes, layer| backend.write_blocks(&[block], layer, bytes).unwrap());
    assert!(rest.is_empty());
}

#[test]
fn many_moves_are_sent_in_several_parts() {
    let backend = cuda::backend();
    let shape = KvShape { blocks: 5000, block_size: 8, kv_heads: 1, head_dim: 2, values: Values::Own, dtype: KvDtype::Bf16 };
    let (mut layers, bytes) = (vec![backend.kv(shape).unwrap()], backend.kv_block_bytes(&shape));
    let mut host = backend.host(5000, bytes).unwrap();
    let number = |block: u32| (block % 251) as u8;
    (0..5000).for_each(|block| fill(backend, &mut layers, block, number(block), bytes));
    let moves = |to: fn(u32) -> u32| (0..5000).map(|host| BlockMove { device: to(host), host }).collect::<Vec<_>>();
    backend.swap_out(&moves(|block| block), &layers, &mut host).unwrap();
    backend.swap_in(&moves(|block| 4999 - block), &mut host, &mut layers).unwrap();
    assert!((0..5000).all(|block| bytes_of(backend, &layers, block)[0] == number(4999 - block)));
    for block in 0..2500 {
        backend.copy_blocks(&[BlockCopy { from: block, to: 2500 }, BlockCopy { from: block, to: 2501 }], &mut layers);
    }
    assert!([2500, 2501].iter().all(|&block| bytes_of(backend, &layers, block)[0] == number(2500)));
}

#[test]
fn copied_and_swapped_blocks_keep_their_bytes() {
    let backend = cuda::backend();
    for dtype in KvDtype::ALL {
        let (mut layers, bytes) = layers(backend, dtype);
        let mut host = backend.host(4, bytes).unwrap();
        (0..6).for_each(|block| fill(backend, &mut layers, block, block as u8, bytes));
        let before: Vec<_> = (0..6).map(|block| bytes_of(backend, &layers, block)).collect();
        let moves = |pairs: [(u32, u32); 3]| pairs.map(|(device, host)| BlockMove { device, host });
        backend.swap_out(&moves([(5, 0), (0, 3), (2, 1)]), &layers, &mut host).unwrap();
        (0..6).for_each(|block| fill(backend, &mut layers, block, 100 + block as u8, bytes));
        backend.copy_blocks(&[BlockCopy { from: 5, to: 2 }], &mut layers);
        backend.swap_in(&moves([(1, 3), (4, 0), (0, 1)]), &mut host, &mut layers).unwrap();
        let after = |block| bytes_of(backend, &layers, block);
        assert!([after(1), after(4), after(0)] == [&before[0], &before[5], &before[2]].map(Clone::clone));
        assert!(after(2) == after(5) && after(3) != before[3], "{dtype:?}");
    }
}

#[test]
fn unwritten_slots_are_read_as_zeros() {
    let backend = cuda::backend();
    for dtype in KvDtype::ALL {
        let shape = KvShape { blocks: 2, block_size: 8, kv_heads: 2, head_dim: 5, values: Values::Own, dtype };
        let mut kv = backend.kv(shape).unwrap();
        let bytes = vec![9; 2 * backend.kv_block_bytes(&shape) as usize];
        backend.write_blocks(&[0, 1], &mut kv, &bytes).unwrap();
        let mut read = Vec::new();
        backend.read_blocks(&[1, 0], Tail { blocks: 1, slots: 3 }, &kv, &mut read).unwrap();
        let (full, tail) = read.split_at(read.len() / 2);
        assert!(full.iter().all(|byte| *byte == 9));
        assert_eq!(tail.iter().filter(|byte| **byte == 9).count() * 8, 3 * tail.len(), "{dtype:?}");
        let error = backend.write_blocks(&[0], &mut kv, &bytes[..7]).unwrap_err();
        assert!(error.message().contains("truncated in its K and V"), "{error}");
    }
}

/// Random sampling parameters, with every one that a device supports.
fn random_rules(random: &mut Random, vocab: usize) -> ResolvedSampling {
    let mut params = SamplingParams { temperature: [0.0, 0.3, 1.0, 4.0][random.below(4)], ..Default::default() };
    let one_in = |random: &mut Random, n: usize| random.below(n) == 0;
    let token = |random: &mut Random| random.below(vocab) as u32;
    if one_in(random, 2) {
        params.top_k = 1 + random.below(2 * vocab) as u32;
    }
    if one_in(random, 2) {
        params.top_p = [1e-6, 0.5, 0.9, 0.999][random.below(4)];
    }
    if one_in(random, 3) {
        params.min_p = [1e-5, 0.05, 1.0][random.below(3)];
    }
    if one_in(random, 3) {
        params.repetition_penalty = 0.5 + random.unit();
        params.frequency_penalty = random.unit();
        params.presence_penalty = random.unit() - 0.5;
    }
    if one_in(random, 4) {
        params.logit_bias = (0..vocab.min(9) as u32).rev().map(|token| (token, 20.0 * random.unit() - 10.0)).collect();
    }
    if one_in(random, 4) {
        params.allowed_token_ids = (0..5).map(|_| token(random)).collect();
    }
    if one_in(random, 4) {
        params.bad_words_ids = (0..3).map(|_| vec![token(random)]).collect();
    }
    params.logprobs = one_in(random, 2).then(|| random.below(vocab.min(21)) as u32);
    ResolvedSampling { params, ..ResolvedSampling::default() }
}

/// Random logits, with equal values and with tokens that cannot be selected.
fn random_logits(random: &mut Random, vocab: usize) -> Vec<f32> {
    let (spread, grain) = ([0.0, 1.0, 12.0, 60.0][random.below(4)], [4.0, 4096.0][random.below(2)]);
    let logit = |random: &mut Random| match random.below(50) {
        0 => f32::NEG_INFINITY,
        1 => -0.0,
        _ => ((random.unit() - 0.5) * spread * grain).round() / grain,
    };
    (0..vocab).map(|_| logit(random)).collect()
}

/// Rows of logits, and the samples that the host takes from them.
struct Samples {
    vocab: usize,
    rows: Vec<Vec<f32>>,
    planned: DeviceSampling,
    /// The rows that the device samples, with their parameters and the token of the host.
    expected: Vec<(usize, SamplingParams, Result<u32, NoChoice>)>,
}

impl Samples {
    /// Plans samples from all rows but row 3, whose logits the host reads.
    fn plan(random: &mut Random, vocab: usize, rows: Vec<Vec<f32>>, rules: impl IntoIterator<Item = ResolvedSampling>) -> Samples {
        let planned = DeviceSampling::new(DeviceSamplingLimits::for_rows(rows.len(), vocab)).unwrap();
        let mut samples = Samples { vocab, rows, planned, expected: vec![] };
        for (row, (logits, rules)) in samples.rows.iter().zip(rules).enumerate() {
            let tokens: Vec<u32> = (0..random.below(40)).map(|_| random.below(vocab) as u32).collect();
            let prompt_len = tokens.len() / 2;
            let history = SamplingHistory::new(&rules, &tokens, prompt_len).unwrap();
            let context = Context { tokens: &tokens, prompt_len, generated: 0, seed: random.next(), history: &history, allowed: None };
            if row == 3 || !plan_draw(&mut samples.planned, row as u32, vocab, rules.params.logprobs, &rules, &context) {
                continue;
            }
            let token = Sampler::new(vocab).unwrap().choose(logits, &rules, &context).map(|chosen| chosen.token);
            samples.expected.push((row, rules.params, token));
        }
        samples
    }

    /// Compares the samples of a device with those of the host, and returns them.
    fn check(&self, backend: &CudaBackend) -> Vec<DeviceSample> {
        let Samples { vocab, rows, planned, expected } = self;
        let mut sampler = backend.sampler(DeviceSamplingLimits::for_rows(rows.len(), *vocab)).unwrap().unwrap();
        let mut logits = backend.vector(&rows.concat()).unwrap();
        backend.start_sampling(&mut sampler, *vocab, &mut logits, planned).unwrap();
        backend.start_read(&mut logits, *vocab, rows.len(), planned.other_rows(rows.len())).unwrap();
        let drawn = backend.finish_sampling(&mut sampler, planned.rows.len());
        let drawn = drawn.unwrap_or_else(|e| panic!("{e}: {}", cuda::shim().last_error())).to_vec();
        assert_eq!(drawn.len(), expected.len());
        for (drawn, (row, params, token)) in drawn.iter().zip(expected) {
            assert_eq!(sampler::chosen(drawn).map(|chosen| chosen.token), *token, "row {row} of {vocab}: {params:?}");
            let (Ok(token), Some(k)) = (token, params.logprobs) else { continue };
            let mut top = vec![];
            let logprob = sampler::logprob_and_top(&rows[*row], *token, k as usize, &mut top).unwrap();
            let near = |found: f32, expected: f32| found == expected || (found - expected).abs() <= 2e-6 * expected.abs().max(1.0);
            assert!(near(sampler::logprob_of(drawn, drawn.logit), logprob), "row {row} of {vocab}: {params:?}");
            let sampled = drawn.tops[..k as usize].iter();
            assert!(
                sampled
                    .zip(&top)
                    .all(|(found, expected)| found.token == expected.0 && near(sampler::logprob_of(drawn, found.logit), expected.1)),
                "row {row} of {vocab}: {params:?}"
            );
        }
        let left = backend.finish_read(&mut logits, rows.len() * vocab).unwrap();
        assert_eq!(left[3 * vocab..][..*vocab], rows[3], "rows without a sample do not change");
        drawn
    }

    fn logprobs(&self) -> usize {
        self.expected.iter().filter(|(_, params, token)| token.is_ok() && params.logprobs.is_some()).count()
    }
}

/// Compares sampling on a device with the sampler of the host. The last vocabulary has two parts.
#[test]
fn sampling_equals_the_sampler_of_the_host() {
    let (backend, mut random, mut several) = (cuda::backend(), seeded(77), 0);
    for round in 0..40 {
        let vocab = [1, 31, 64, 700, 5000][round % 5];
        let rows = (0..6).map(|_| random_logits(&mut random, vocab)).collect();
        let rules: Vec<_> = (0..6).map(|_| random_rules(&mut random, vocab)).collect();
        let samples = Samples::plan(&mut random, vocab, rows, rules);
        samples.check(backend);
        several += samples.logprobs();
    }
    assert!(several > 40, "only {several} log probabilities were compared");
}

/// Logits of `vocab` tokens in `parts` parts: the largest ones at both ends of each part; all equal; all
/// but those of the last part impossible; random.
fn logits_of_parts(random: &mut Random, vocab: usize, parts: usize) -> [Vec<f32>; 4] {
    let ends: Vec<usize> = (0..=parts).flat_map(|part| (part * vocab / parts).saturating_sub(9)..(part * vocab / parts + 9)).collect();
    let mut at_ends = vec![-1.0; vocab];
    ends.into_iter().filter(|&token| token < vocab).for_each(|token| at_ends[token] = [1.0, 1.5][random.below(2)]);
    let last = (0..vocab).map(|token| if token < vocab - vocab / parts { f32::NEG_INFINITY } else { (random.unit() - 0.5) * 12.0 });
    let last = last.collect();
    [at_ends, vec![0.25; vocab], last, (0..vocab).map(|_| (random.unit() - 0.5) * 12.0).collect()]
}

/// Sampling parameters for rows in parts. Some allow tokens of one part only.
fn rules_of_parts(vocab: usize, parts: usize) -> Vec<ResolvedSampling> {
    let greedy = SamplingParams { temperature: 0.0, logprobs: Some(20), ..SamplingParams::default() };
    let all = SamplingParams::default();
    let allowed = |part: usize| (part * vocab / parts..(part + 1) * vocab / parts).map(|token| token as u32).collect();
    let biases = |bias: f32| (0..parts as u32).rev().map(|part| (part * vocab as u32 / parts as u32, bias)).collect();
    let params = [
        greedy.clone(),
        SamplingParams { allowed_token_ids: allowed(parts / 2), ..greedy.clone() },
        SamplingParams { logit_bias: biases(9.0), repetition_penalty: 1.3, presence_penalty: 0.5, ..greedy },
        all.clone(), // of the row that the host reads
        all.clone(),
        SamplingParams { temperature: 0.7, min_p: 0.01, logprobs: Some(0), ..all.clone() },
        SamplingParams { top_k: 7, ..all.clone() },
        SamplingParams { top_k: 600, top_p: 0.9, ..all.clone() },
        SamplingParams { top_p: 0.3, logprobs: Some(5), logit_bias: biases(-9.0), ..all.clone() },
        SamplingParams { top_p: 0.999, allowed_token_ids: allowed(parts - 1), ..all.clone() },
        SamplingParams { top_k: 40, top_p: 0.5, allowed_token_ids: allowed(0), ..all },
    ];
    params.into_iter().map(|params| ResolvedSampling { params, ..ResolvedSampling::default() }).collect()
}

/// A row has the same sample in one part and in several, which is that of the host. A device with one
/// multiprocessor has one part, and one with 2,112 has as many as the vocabulary permits.
#[test]
fn samples_do_not_depend_on_the_parts_of_a_row() {
    let (mut many, one, mut random) = (cuda::open(false), cuda::open_small(), seeded(78));
    many.assume_multiprocessors(2112);
    for (vocab, parts) in [(4095, 1), (4096, 2), (4099, 2), (8203, 4), (33_001, 16)] {
        for logits in logits_of_parts(&mut random, vocab, parts) {
            let rules = rules_of_parts(vocab, parts);
            let rows = vec![logits; rules.len()];
            let samples = Samples::plan(&mut random, vocab, rows, rules);
            assert_eq!(samples.check(&many), samples.check(&one), "{vocab} tokens in {parts} parts and in one");
        }
    }
}

/// The part with a logit that is not finite is not the one with the best token.
#[test]
fn a_logit_that_is_not_finite_is_found_in_any_part() {
    let (backend, vocab) = (cuda::backend(), 16 * 2048);
    for (token, logit) in [(0, f32::NAN), (vocab - 1, f32::INFINITY), (5000, f32::NAN), (20_000, f32::INFINITY)] {
        let mut row = vec![0.5; vocab];
        (row[9000], row[token]) = (1.0, logit);
        let rules =
            [SamplingParams::default(), SamplingParams { logprobs: Some(3), logit_bias: vec![(7, 1.0)], ..SamplingParams::default() }];
        let rules = rules.map(|params| ResolvedSampling { params, ..ResolvedSampling::default() });
        let samples = Samples::plan(&mut seeded(1), vocab, vec![row.clone(), row, vec![0.5; vocab], vec![0.5; vocab]], rules);
        assert!(samples.expected.iter().all(|(.., token)| *token == Err(NoChoice::NotFinite)));
        samples.check(backend);
    }
}

#[test]
fn nan_logits_and_excluded_vocabularies_are_reported() {
    let (backend, vocab) = (cuda::backend(), 300);
    let limits = DeviceSamplingLimits::for_rows(3, vocab);
    let (mut drawing, mut draws) = (backend.sampler(limits).unwrap().unwrap(), DeviceSampling::new(limits).unwrap());
    let mut rows = vec![0.5; 3 * vocab];
    (rows[299], rows[301]) = (f32::NAN, f32::INFINITY);
    let history = SamplingHistory::default();
    let context = Context { tokens: &[1], prompt_len: 1, generated: 0, seed: 1, history: &history, allowed: Some(&[]) };
    for row in 0..3 {
        assert!(plan_draw(&mut draws, row, vocab, None, &ResolvedSampling::default(), &context));
    }
    let mut logits = backend.vector(&rows).unwrap();
    backend.start_sampling(&mut drawing, vocab, &mut logits, &draws).unwrap();
    let drawn = backend.finish_sampling(&mut drawing, draws.rows.len()).unwrap();
    let outcomes: Vec<_> = drawn.iter().map(|drawn| sampler::chosen(drawn).unwrap_err()).collect();
    assert_eq!(outcomes, [NoChoice::NotFinite, NoChoice::NotFinite, NoChoice::Excluded]);
}

/// A decode step with these rows (token, position, slot). Each sequence has a block table of two
/// blocks.
fn decodes(rows: &[[u32; 3]]) -> Batch {
    let mut batch = Batch::default();
    for (row, &[token, position, slot]) in (0..).zip(rows) {
        batch.tokens.push(token);
        batch.positions.push(position);
        batch.slots.push(slot);
        batch.spans.push(Span { first_token: row, tokens: 1, table: 2 * row });
        batch.tables.extend([slot / 16, slot / 16 + 1]);
        batch.logit_rows.push(row);
    }
    batch
}

/// A recorded decode step that outputs the embedded tokens and the cosine and sine of their
/// positions.
struct Kept {
    backend: CudaBackend,
    inputs: <CudaBackend as BackendTypes>::Inputs,
    drawing: <CudaBackend as BackendTypes>::Sampler,
    table: <CudaBackend as BackendTypes>::Matrix,
    frequencies: <CudaBackend as BackendTypes>::Buf,
    tokens: <CudaBackend as BackendTypes>::Buf,
    angles: <CudaBackend as BackendTypes>::Buf,
    logits: <CudaBackend as BackendTypes>::Buf,
}

impl Kept {
    const VOCAB: usize = 32;
    const ROWS: usize = 20;

    fn new() -> Kept {
        let backend = cuda::open(false);
        let max = BatchSize { tokens: Kept::ROWS, sequences: Kept::ROWS, logits: Kept::ROWS, table_entries: 2 * Kept::ROWS, groups: 1 };
        let names: Vec<f32> = (0..Kept::VOCAB).map(|token| token as f32).collect();
        let mut inputs = Default::default();
        backend.reserve_inputs(&InputLimits { max, heads: vec![] }, &mut inputs).unwrap();
        let mut kept = Kept {
            drawing: backend.sampler(DeviceSamplingLimits::for_rows(Kept::ROWS, Kept::VOCAB)).unwrap().unwrap(),
            table: matrix(&backend, &names, Kept::VOCAB, 1, WeightFormat::F32),
            frequencies: backend.vector(&[1.0]).unwrap(),
            tokens: unwritten(&backend, Kept::ROWS),
            angles: unwritten(&backend, 2 * Kept::ROWS),
            logits: unwritten(&backend, 1),
            backend,
            inputs,
        };
        while let Some(Extent { rows, logits }) = kept.backend.capture(&max, &decodes(&[[0, 0, 0]]), &mut kept.inputs).unwrap() {
            assert_eq!(rows, logits);
            kept.ops();
        }
        kept
    }

    fn ops(&mut self) {
        self.backend.embed(&self.inputs, &self.table, 0, 1.0, &mut self.tokens);
        self.backend.angles(&self.inputs, &self.frequencies, 1.0, &mut self.angles);
        self.backend.launch_step();
    }

    /// Returns the tokens of a step, and their positions as a cosine.
    fn step(&mut self, batch: &Batch) -> Vec<(u32, i32)> {
        let Extent { rows, .. } = self.backend.upload(batch, &mut self.inputs).unwrap();
        self.ops();
        let tokens = self.backend.read(&mut self.tokens, rows).unwrap().to_vec();
        let angles = self.backend.read(&mut self.angles, 2 * rows).unwrap();
        tokens.iter().map(|&token| token as u32).zip(angles.iter().step_by(2).map(|cosine| (cosine * 1000.0).round() as i32)).collect()
    }

    /// Starts to sample these tokens, one row each. The logits of an invalid token are NaN.
    fn sample(&mut self, tokens: &[u32]) {
        let logit = |token: u32, other: u32| if (token as usize) < Kept::VOCAB { (other == token) as u32 as f32 } else { f32::NAN };
        let likely = |&token: &u32| (0..Kept::VOCAB as u32).map(move |other| logit(token, other));
        self.logits = self.backend.vector(&tokens.iter().flat_map(likely).collect::<Vec<_>>()).unwrap();
        let (history, mut rules) = (SamplingHistory::default(), ResolvedSampling::default());
        rules.params.temperature = 0.0;
        let mut draws = DeviceSampling::new(DeviceSamplingLimits::for_rows(tokens.len(), Kept::VOCAB)).unwrap();
        for row in 0..tokens.len() as u32 {
            let context = Context { tokens: &[1], prompt_len: 1, generated: 0, seed: 1, history: &history, allowed: None };
            assert!(plan_draw(&mut draws, row, Kept::VOCAB, None, &rules, &context));
        }
        self.backend.start_sampling(&mut self.drawing, Kept::VOCAB, &mut self.logits, &draws).unwrap();
    }

    /// Returns the sampled tokens.
    fn sampled(&mut self, samples: usize) -> Vec<u32> {
        let samples = self.backend.finish_sampling(&mut self.drawing, samples).unwrap();
        samples.iter().map(|sample| sampler::chosen(sample).map_or(u32::MAX, |chosen| chosen.token)).collect()
    }
}

/// The form in which `Kept::step` returns a position.
fn at(position: u32) -> i32 {
    ((position as f32).cos() * 1000.0).round() as i32
}

/// A step that is uploaded before the host knows the tokens of the previous one has them in place
/// of its placeholders, whatever the order of its rows.
#[test]
fn placeholders_are_replaced_by_the_samples_of_the_previous_step() {
    let mut kept = Kept::new();
    let first = decodes(&[[3, 0, 0], [5, 15, 63], [7, 8, 88]]);
    assert_eq!(kept.step(&first), [(3, at(0)), (5, at(15)), (7, at(8))]);
    kept.sample(&[4, u32::MAX, 2]);
    let mut next = decodes(&[[0, 9, 89], [6, 3, 3], [0, 1, 1], [0, 16, 64]]);
    next.placeholders = [(0, 2), (2, 0), (3, 1)].map(|(token, sample)| Placeholder { token, sample }).into();
    let step = kept.step(&next);
    assert_eq!(step[..4], [(2, at(9)), (6, at(3)), (4, at(1)), (0, at(16))], "a failed sample is replaced by token 0");
    assert_eq!(kept.sampled(3), [4, u32::MAX, 2], "the samples reach the host after the next step was started");
}

#[test]
fn placeholders_of_a_prompt_batch_are_replaced_too() {
    let mut kept = Kept::new();
    kept.step(&decodes(&[[3, 0, 0]]));
    kept.sample(&[4]);
    let batch = Batch {
        tokens: vec![1, 2, 0],
        positions: vec![0, 1, 1],
        slots: vec![32, 33, 1],
        spans: vec![Span { first_token: 0, tokens: 2, table: 0 }, Span { first_token: 2, tokens: 1, table: 1 }],
        tables: vec![2, 0],
        logit_rows: vec![1, 2],
        placeholders: vec![Placeholder { token: 2, sample: 0 }],
        ..Batch::default()
    };
    assert_eq!(kept.step(&batch), [(1, at(0)), (2, at(1)), (4, at(1))]);
    assert_eq!(kept.sampled(1), [4]);
}

#[test]
fn other_batches_are_padded_to_the_recorded_rows() {
    let mut kept = Kept::new();
    let rows: Vec<[u32; 3]> = (0..10).map(|row| [row, row, 32 * row + row]).collect();
    let step = kept.step(&decodes(&rows));
    assert_eq!(step.len(), 16);
    assert!(
        step.iter().enumerate().all(|(i, &(token, angle))| (token, angle) == if i < 10 { (i as u32, at(i as u32)) } else { (0, at(0)) })
    );
    assert_eq!(kept.step(&decodes(&[[6, 2, 2]])), [(6, at(2))]);
}

/// The host samples with parameters that a device does not support, or that exceed its limits.
#[test]
fn unsupported_sampling_parameters_are_left_to_the_host() {
    let limits = DeviceSamplingLimits::for_rows(2, 100);
    let history = SamplingHistory::default();
    let context = Context { tokens: &[1, 2], prompt_len: 1, generated: 0, seed: 1, history: &history, allowed: None };
    let planned = |change: &dyn Fn(&mut SamplingParams)| {
        let mut rules = ResolvedSampling::default();
        change(&mut rules.params);
        plan_draw(&mut DeviceSampling::new(limits).unwrap(), 0, 100, rules.params.logprobs, &rules, &context)
    };
    assert!(planned(&|_| {}));
    assert!(planned(&|p| (p.temperature, p.typical_p) = (0.0, 0.5)), "filters do not matter for greedy decoding");
    assert!(planned(&|p| p.logprobs = Some(20)));
    assert!(!planned(&|p| p.logprobs = Some(21)));
    assert!(!planned(&|p| p.typical_p = 0.5));
    assert!(!planned(&|p| p.top_n_sigma = 1.0));
    assert!(!planned(&|p| p.xtc_probability = 0.1));
    assert!(!planned(&|p| p.mirostat = Some(Mirostat { tau: 3.0, eta: 0.1 })));
    assert!(
        !planned(&|p| (p.temperature, p.mirostat) = (0.0, Some(Mirostat { tau: 3.0, eta: 0.1 }))),
        "mirostat needs the probability of the token"
    );
    assert!(!planned(&|p| p.dry = Some(Dry { multiplier: 1.0, ..Dry::default() })));
    assert!(!planned(&|p| p.logit_bias = vec![(3, 1.0), (1, 1.0), (3, 1.0)]), "a token named twice");
    assert!(!planned(&|p| p.logit_bias = (0..4097).map(|_| (3, 1.0)).collect()));
}
