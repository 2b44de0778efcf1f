//! Compares every kernel with an f64 reference, on odd shapes and on every path. Paths that this CPU
//! lacks are emulated with AVX2.

mod attention;
mod blocks;
mod cache;
mod elementwise;
mod loading;
mod products;
mod quantize;

use super::*;
use crate::backend::e4m3::E4m3;
use crate::backend::{NormKind, PACKED_PIECE, Pairs, Values};
use crate::types::batch::{Span, Tail};
use crate::types::options::{Dtype, KvDtype, WeightFormat};

/// Rows and columns that products reserve. Some products have more rows, so that they are packed in
/// pieces.
const ROOM: (usize, usize) = (16, 640);

fn backends() -> impl Iterator<Item = CpuBackend> {
    let with_room = |isa| {
        let backend = CpuBackend::new(2, Some(isa)).unwrap();
        backend.reserve_rows(ROOM.0, ROOM.1).unwrap();
        backend
    };
    Isa::ALL.into_iter().filter(|isa| isa.can_run()).map(with_room)
}

/// Returns pseudo-random numbers in -1..=1.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let number = |i: u64| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed.wrapping_mul(0xBF58_476D_1CE4_E5B9)) >> 33) as u32;
    (0..len as u64).map(|i| (number(i * i + 1 + seed) % 20_001) as f32 / 10_000.0 - 1.0).collect()
}

fn buf(backend: &CpuBackend, values: &[f32]) -> Buf {
    backend.vector(values).unwrap()
}

/// Returns an output filled with NaN, to detect elements that are not written.
fn poisoned(backend: &CpuBackend, len: usize) -> Buf {
    buf(backend, &vec![f32::NAN; len])
}

fn stored(values: &[f32], dtype: Dtype) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = Vec::new();
    let mut rounded = Vec::new();
    for &x in values {
        let value = match dtype {
            Dtype::F32 => x,
            Dtype::F16 => half::f16::from_f32(x).to_f32(),
            Dtype::Bf16 => half::bf16::from_f32(x).to_f32(),
        };
        match dtype {
            Dtype::F32 => bytes.extend(x.to_le_bytes()),
            Dtype::F16 => bytes.extend(half::f16::from_f32(x).to_le_bytes()),
            Dtype::Bf16 => bytes.extend(half::bf16::from_f32(x).to_le_bytes()),
        }
        rounded.push(value);
    }
    (bytes, rounded)
}

fn matrix(backend: &CpuBackend, values: &[f32], rows: usize, cols: usize, dtype: Dtype) -> (Matrix, Vec<f32>) {
    let (bytes, rounded) = stored(values, dtype);
    (matrix_in(backend, &bytes, rows, cols, dtype, dtype.into()).unwrap(), rounded)
}

fn matrix_in(backend: &CpuBackend, bytes: &[u8], rows: usize, cols: usize, dtype: Dtype, format: WeightFormat) -> Result<Matrix> {
    let read = |first: usize, out: &mut [u8]| {
        out.copy_from_slice(&bytes[first * cols * dtype.bytes()..][..out.len()]);
        Ok(())
    };
    backend.matrix(cols, &[Section::numbers(rows, dtype, format)], RowSource { read: &read, advance: &mut |_| Ok(()) })
}

fn assert_near(name: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (*found as f64 - expected).abs();
        assert!(error <= tolerance * expected.abs().max(1.0), "{name}: element {i} is {found}, not {expected}");
    }
}

/// Returns the formats that matrices with this many columns support.
fn formats_for(cols: usize, group: usize) -> impl Iterator<Item = WeightFormat> {
    let fits = move |format: &WeightFormat| !matches!(format, WeightFormat::Int4 { .. }) || cols.is_multiple_of(group);
    WeightFormat::all(group).into_iter().filter(fits)
}

/// Returns the matrix as stored, row by row.
fn as_stored(w: &Matrix) -> Vec<f64> {
    let mut row = vec![0.0; w.cols];
    let mut read = |n| {
        w.read_row(n, 1.0, &mut row);
        row.iter().map(|&x| x as f64).collect::<Vec<_>>()
    };
    (0..w.rows).flat_map(&mut read).collect()
}

/// Returns K or V of one head and token, as the cache stores it.
fn as_cached(numbers: &[f32], dtype: KvDtype) -> Vec<f32> {
    let max = numbers.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    match dtype {
        KvDtype::F32 => numbers.to_vec(),
        KvDtype::Bf16 => stored(numbers, Dtype::Bf16).1,
        KvDtype::Int8 => {
            let scale = max / 127.0;
            numbers.iter().map(|x| (x / scale).round_ties_even() * scale).collect()
        }
        KvDtype::F16 => stored(numbers, Dtype::F16).1,
        KvDtype::Fp8 => {
            let scale = max / E4m3::MAX;
            numbers.iter().map(|x| E4m3::nearest(x / scale).to_f32() * scale).collect()
        }
    }
}

#[test]
fn the_widest_available_path_is_the_default() {
    assert_eq!(Isa::ALL, [Isa::Portable, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Avx512Vnni, Isa::Avx512Bf16]);
    let widest = Isa::ALL.into_iter().rfind(|isa| isa.is_present());
    assert_eq!(Some(CpuBackend::new(1, None).unwrap().isa()), widest);
}
