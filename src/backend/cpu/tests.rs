//! Compares every kernel with an f64 reference, on odd shapes and on every path of this CPU.

use super::*;
use crate::backend::e4m3::E4m3;
use crate::backend::{NormKind, PACKED_PIECE, Pairs, Values};
use crate::batch::{Span, Tail};
use crate::options::KvDtype;

/// Rows and columns that products reserve. Some products have more rows, so that they are packed in
/// pieces.
const ROOM: (usize, usize) = (16, 640);

fn backends() -> impl Iterator<Item = CpuBackend> {
    let with_room = |isa| {
        let backend = CpuBackend::new(2, Some(isa)).unwrap();
        backend.reserve_rows(ROOM.0, ROOM.1).unwrap();
        backend
    };
    Isa::ALL.into_iter().filter(|isa| isa.is_present()).map(with_room)
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
    backend.matrix(rows, cols, dtype, format, RowSource { read: &read, advance: &mut |_| Ok(()) })
}

fn assert_near(name: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (*found as f64 - expected).abs();
        assert!(error <= tolerance * expected.abs().max(1.0), "{name}: element {i} is {found}, not {expected}");
    }
}

#[test]
fn matmul_is_correct_for_all_shapes_types_and_paths() {
    for backend in backends() {
        for (rows, cols, outs) in
            [(1, 1, 1), (1, 37, 33), (2, 64, 31), (3, 5, 100), (12, 129, 64), (13, 48, 65), (29, 96, 7), (65, 33, 161), (30, 301, 40)]
        {
            for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                let x = numbers(rows * cols, 1);
                let bias = numbers(outs, 3);
                let (w, rounded) = matrix(&backend, &numbers(outs * cols, 2), outs, cols, dtype);
                let mut out = poisoned(&backend, rows * outs);
                backend.matmul(rows, &buf(&backend, &x), &w, Some(&buf(&backend, &bias)), &mut out);
                // Factors of bf16 products are rounded to bf16.
                let pairs = backend.isa() == Isa::Avx512Bf16 && dtype == Dtype::Bf16;
                let x = if pairs { stored(&x, dtype).1 } else { x };
                let dot = |r: usize, n: usize| (0..cols).map(|k| x[r * cols + k] as f64 * rounded[n * cols + k] as f64).sum::<f64>();
                let expected: Vec<f64> = (0..rows * outs).map(|i| dot(i / outs, i % outs) + bias[i % outs] as f64).collect();
                assert_near(&format!("{} {dtype:?} {rows}x{cols}x{outs}", backend.isa().name()), &out, &expected, 1e-5);
            }
        }
    }
}

/// Returns the formats that matrices with this many columns support.
fn formats_for(cols: usize, group: usize) -> impl Iterator<Item = WeightFormat> {
    let fits = move |format: &WeightFormat| !matches!(format, WeightFormat::Int4 { .. }) || cols.is_multiple_of(group);
    WeightFormat::all(group).into_iter().filter(fits)
}

/// Packed weights are cached on disk. If this test fails, cached bytes would be misread, so
/// increase the version in `Matrix::LAYOUT`.
#[test]
fn the_layout_of_packed_weights_is_unchanged_for_its_version() {
    assert_eq!(Matrix::LAYOUT, "cpu panels of 32, 2");
    let (outs, cols) = (70, 128);
    let (bytes, _) = stored(&numbers(outs * cols, 2), Dtype::F32);
    let expected = [2219603078, 64443527, 2261333450, 2644511432, 1536834312, 1263857848];
    let of_other_groups = [[611903422, 708610732], [134496689, 2986639555]];
    let int4 = |group| [false, true].map(|offsets| WeightFormat::Int4 { group, offsets });
    for backend in backends() {
        let sum = |format| {
            let matrix = matrix_in(&backend, &bytes, outs, cols, Dtype::F32, format).unwrap();
            let packed = backend.packed_bytes(&matrix).unwrap();
            assert_eq!(packed.len() as u64, backend.matrix_bytes(outs, cols, format));
            crc32fast::hash(packed)
        };
        assert_eq!(WeightFormat::all(64).map(sum), expected, "{}", backend.isa().name());
        assert_eq!([32, 128].map(|group| int4(group).map(sum)), of_other_groups, "{}", backend.isa().name());
    }
}

#[test]
fn a_matrix_is_restored_from_packed_bytes_and_a_missing_piece_is_an_error() {
    let backend = CpuBackend::new(3, None).unwrap();
    // Several pieces, the last one short.
    let (outs, cols) = (1100, 300);
    let (matrix, _) = matrix(&backend, &numbers(outs * cols, 5), outs, cols, Dtype::Bf16);
    let packed = backend.packed_bytes(&matrix).unwrap();
    assert!(packed.len() > 2 * PACKED_PIECE);
    let again = |missing: usize| {
        backend.matrix_of_packed(outs, cols, WeightFormat::Bf16, &|piece, out| match piece == missing {
            true => Err(Error::io(format!("piece {piece}"))),
            false => {
                out.copy_from_slice(&packed[piece * PACKED_PIECE..][..out.len()]);
                Ok(())
            }
        })
    };
    assert!(backend.packed_bytes(&again(usize::MAX).unwrap()).unwrap() == packed);
    for missing in [0, 2] {
        assert_eq!(again(missing).err().unwrap().message(), format!("piece {missing}"));
    }
}

/// Quantizes rows as integer products do: groups of columns to -127..=127, to the nearest.
fn quantized(x: &[f32], cols: usize, group: usize) -> Vec<f64> {
    let of_group = |x: &[f32]| {
        let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let inverse = if max == 0.0 { 0.0 } else { 127.0 / max };
        x.iter().map(|x| ((x * inverse).round_ties_even() * (max / 127.0)) as f64).collect::<Vec<_>>()
    };
    x.chunks_exact(cols).flat_map(|row| row.chunks(group).flat_map(of_group)).collect()
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

#[test]
fn products_are_correct_in_all_formats_on_all_paths() {
    for backend in backends() {
        for (rows, cols, outs, group) in [
            (1, 32, 1, 32),
            (2, 96, 33, 32),
            (7, 128, 65, 64),
            (13, 256, 32, 128),
            (45, 192, 70, 64),
            // Shapes with several tiles per panel and several stretches.
            (16, 640, 600, 32),
            (16, 640, 600, 64),
            (16, 640, 600, 128),
            (3, 288, 31, 32),
            (5, 1, 9, 32),
            (4, 37, 40, 32),
            (70, 130, 33, 64),
            (14, 255, 64, 32),
        ] {
            for format in formats_for(cols, group) {
                let (x, bias) = (numbers(rows * cols, 1), numbers(outs, 3));
                let w = matrix_in(&backend, &stored(&numbers(outs * cols, 2), Dtype::F32).0, outs, cols, Dtype::F32, format).unwrap();
                let mut out = poisoned(&backend, rows * outs);
                backend.matmul(rows, &buf(&backend, &x), &w, Some(&buf(&backend, &bias)), &mut out);
                let exact = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<_>>();
                let x = match format {
                    WeightFormat::Bf16 if backend.isa() == Isa::Avx512Bf16 => exact(&stored(&x, Dtype::Bf16).1),
                    WeightFormat::Int8 => quantized(&x, cols, 128),
                    WeightFormat::Int4 { group, .. } => quantized(&x, cols, group),
                    _ => exact(&x),
                };
                let w = as_stored(&w);
                let dot = |r: usize, n: usize| (0..cols).map(|k| x[r * cols + k] * w[n * cols + k]).sum::<f64>();
                let expected: Vec<f64> = (0..rows * outs).map(|i| dot(i / outs, i % outs) + bias[i % outs] as f64).collect();
                assert_near(&format!("{} {format:?} {rows}x{cols}x{outs}", backend.isa().name()), &out, &expected, 2e-5);
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_a_batch() {
    // The number of tiles decides whether they are multiplied with a panel together or alone. The
    // threshold depends on the rows per tile, which are 12, 6 or 3. The last group of a row may be
    // short.
    let edges = [12, 6, 3].map(|tile| [8 * tile, 8 * tile + 1].map(|rows| (rows, 96, 70)));
    let cases = [(41, 640, 300), (100, 96, 70), (41, 574, 70)].into_iter().chain(edges.into_iter().flatten());
    let all = WeightFormat::GROUPS.into_iter().flat_map(|group| cases.clone().map(move |case| (group, case)));
    let all: Vec<_> =
        all.flat_map(|(group, (rows, cols, outs))| formats_for(cols, group).map(move |format| (format, rows, cols, outs))).collect();
    for (isa, &(format, rows, cols, outs)) in backends().flat_map(|backend| all.iter().map(move |case| (backend.isa(), case))) {
        let backend = backends().find(|other| other.isa() == isa).unwrap();
        let w = matrix_in(&backend, &stored(&numbers(outs * cols, 2), Dtype::F32).0, outs, cols, Dtype::F32, format).unwrap();
        let x = numbers(rows * cols, 1);
        let mut all = poisoned(&backend, rows * outs);
        backend.matmul(rows, &buf(&backend, &x), &w, None, &mut all);
        for row in 0..rows {
            let mut one = poisoned(&backend, outs);
            backend.matmul(1, &buf(&backend, &x[row * cols..][..cols]), &w, None, &mut one);
            assert!(one.iter().map(|x| x.to_bits()).eq(all[row * outs..][..outs].iter().map(|x| x.to_bits())), "{isa:?} {format:?} {rows}");
        }
    }
}

#[test]
fn integer_products_have_the_same_bits_on_all_paths_with_fused_sums() {
    let (rows, cols, outs) = (5, 256, 40);
    for format in WeightFormat::all(32).into_iter().filter(|format| format.is_whole()) {
        let product = |backend: CpuBackend| {
            let w = matrix_in(&backend, &stored(&numbers(outs * cols, 2), Dtype::F32).0, outs, cols, Dtype::F32, format).unwrap();
            let mut out = poisoned(&backend, rows * outs);
            backend.matmul(rows, &buf(&backend, &numbers(rows * cols, 1)), &w, None, &mut out);
            out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let fused = backends().filter(|backend| backend.isa() != Isa::Portable);
        fused.map(product).reduce(|one, other| {
            assert_eq!(one, other, "{format:?}");
            one
        });
    }
}

#[test]
fn the_widest_available_path_is_the_default() {
    assert_eq!(Isa::ALL, [Isa::Portable, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Avx512Vnni, Isa::Avx512Bf16]);
    let widest = Isa::ALL.into_iter().rfind(|isa| isa.is_present());
    assert_eq!(Some(CpuBackend::new(1, None).unwrap().isa()), widest);
}

#[test]
fn gates_propagate_nan() {
    const WIDTH: usize = 37; // includes an end that is not a whole vector
    let clamped = Glu::Clamped { alpha: 1.702, limit: 7.0 };
    let all = [Act::Relu, Act::Silu, Act::Gelu, Act::GeluTanh].map(Glu::Of).into_iter().chain([clamped]);
    for (backend, glu) in backends().flat_map(|backend| all.clone().map(move |glu| (backend.isa(), glu))) {
        let backend = backends().find(|other| other.isa() == backend).unwrap();
        for place in 0..2 * WIDTH {
            let mut x = numbers(2 * WIDTH, 1);
            x[place] = f32::NAN;
            let mut out = poisoned(&backend, WIDTH);
            backend.gate(1, WIDTH, glu, &buf(&backend, &x), &mut out);
            let bad: Vec<usize> = (0..WIDTH).filter(|i| out[*i].is_nan()).collect();
            assert_eq!(bad, [place % WIDTH], "{} {glu:?}: NaN at {place}", backend.isa().name());
        }
        // The clamp bounds both sides.
        let mut out = poisoned(&backend, 2);
        backend.gate(1, 2, glu, &buf(&backend, &[f32::INFINITY, 1.0, 1.0, f32::INFINITY]), &mut out);
        let expected = if glu == clamped {
            [7.0 / (1.0 + (-1.702f32 * 7.0).exp()) * 2.0, 8.0 / (1.0 + (-1.702f32).exp())]
        } else {
            [f32::INFINITY; 2]
        };
        assert!(out.iter().zip(expected).all(|(x, y)| x == &y || (x - y).abs() < 1e-4), "{} {glu:?}: {:?}", backend.isa().name(), &out[..]);
    }
}

#[test]
fn inputs_that_are_not_finite_give_results_that_are_not_finite() {
    for (isa, format) in backends().flat_map(|backend| WeightFormat::all(32).map(|format| (backend.isa(), format))) {
        let backend = backends().find(|backend| backend.isa() == isa).unwrap();
        let w = matrix_in(&backend, &stored(&numbers(40 * 64, 2), Dtype::F32).0, 40, 64, Dtype::F32, format).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = numbers(3 * 64, 1);
            x[64 + 37] = bad;
            let mut out = poisoned(&backend, 3 * 40);
            backend.matmul(3, &buf(&backend, &x), &w, None, &mut out);
            let finite = |row: usize| out[row * 40..][..40].iter().filter(|x| x.is_finite()).count();
            assert_eq!([finite(0), finite(1), finite(2)], [40, 0, 40], "{isa:?} {format:?} {bad}");
        }
    }
}

#[test]
fn weights_do_not_depend_on_the_type_of_the_source() {
    let outs = 40;
    for (isa, cols) in backends().flat_map(|backend| [24, 37, 128, 300].map(|cols| (backend.isa(), cols))) {
        let backend = backends().find(|other| other.isa() == isa).unwrap();
        for (dtype, format) in
            [Dtype::F16, Dtype::Bf16].into_iter().flat_map(|dtype| formats_for(cols, 32).map(move |format| (dtype, format)))
        {
            let (bytes, rounded) = stored(&numbers(outs * cols, 2), dtype);
            let [one, other] = [(bytes, dtype), (stored(&rounded, Dtype::F32).0, Dtype::F32)]
                .map(|(bytes, dtype)| as_stored(&matrix_in(&backend, &bytes, outs, cols, dtype, format).unwrap()));
            assert!(one == other, "{isa:?} {dtype:?} {format:?} {cols}");
        }
    }
}

#[test]
fn groups_that_do_not_divide_the_columns_are_refused() {
    let backend = backends().next().unwrap();
    let int4 = WeightFormat::Int4 { group: 64, offsets: false };
    let error = matrix_in(&backend, &stored(&numbers(4 * 96, 2), Dtype::F32).0, 4, 96, Dtype::F32, int4).err().unwrap();
    assert!(error.message().contains("weight_group is 64, which does not divide 96 columns"), "{error}");
}

/// Bounds the quantization error of each format, relative to the greatest magnitude of the group or
/// row.
#[test]
fn weights_have_the_accuracy_of_their_format() {
    let backend = backends().next().unwrap();
    let (rows, cols) = (40, 256);
    let weights = numbers(rows * cols, 9);
    let bytes = stored(&weights, Dtype::F32).0;
    // Half a step, plus the rounding of the scale.
    for (format, bound) in WeightFormat::all(32).into_iter().zip([0.0, 1.0 / 2048.0, 1.0 / 256.0, 0.5 / 127.0, 1.0 / 8.0, 1.0 / 15.0]) {
        let w = as_stored(&matrix_in(&backend, &bytes, rows, cols, Dtype::F32, format).unwrap());
        for (found, x) in w.iter().zip(&weights) {
            let error = (found - *x as f64).abs();
            assert!(error <= bound * 1.02, "{format:?}: {x} became {found}");
        }
    }
}

/// Compares with round-to-nearest to -7..=7, the usual quantization of 4-bit groups.
#[test]
fn int4_errors_do_not_exceed_round_to_nearest() {
    let backend = backends().next().unwrap();
    let (rows, cols) = (64, 512);
    let weights = numbers(rows * cols, 9);
    let bytes = stored(&weights, Dtype::F32).0;
    for group in WeightFormat::GROUPS {
        let usual = |x: &[f32]| {
            let scale = half::f16::from_f32(x.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 7.0).to_f32();
            x.iter().map(|x| ((x / scale).round().clamp(-8.0, 7.0) * scale - x).powi(2) as f64).sum::<f64>()
        };
        let usual: f64 = weights.chunks_exact(group).map(usual).sum();
        for offsets in [false, true] {
            let w = as_stored(&matrix_in(&backend, &bytes, rows, cols, Dtype::F32, WeightFormat::Int4 { group, offsets }).unwrap());
            let error: f64 = w.iter().zip(&weights).map(|(found, x)| (found - *x as f64).powi(2)).sum();
            assert!(error <= usual, "groups of {group}, offsets: {offsets}: error {error}, round to nearest {usual}");
        }
    }
}

/// Rows and columns of a matrix that needs several rounds of reading.
const WIDE: (usize, usize) = (300, 16_384);

/// Generates rows of a matrix with the width of `WIDE`. Rows in `bad` are NaN.
fn read_wide(bad: &[usize], first: usize, out: &mut [u8]) {
    for (row, out) in (first..).zip(out.chunks_exact_mut(4 * WIDE.1)) {
        for (k, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let number = (row * 31 + k * 17) % 1009;
            *out = if bad.contains(&row) { f32::NAN } else { number as f32 - 500.0 }.to_le_bytes();
        }
    }
}

#[test]
fn a_loaded_matrix_does_not_depend_on_the_number_of_threads() {
    let (rows, cols) = WIDE;
    for format in [WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Int4 { group: 128, offsets: true }] {
        let loaded = [1, 2, 5].map(|threads| {
            let (backend, mut progress) = (CpuBackend::new(threads, None).unwrap(), Vec::new());
            let read = |first: usize, out: &mut [u8]| {
                read_wide(&[], first, out);
                Ok(())
            };
            let mut advance = |bytes| {
                progress.push(bytes);
                Ok(())
            };
            let matrix = backend.matrix(rows, cols, Dtype::F32, format, RowSource { read: &read, advance: &mut advance }).unwrap();
            assert!(progress.len() > 1 && progress.iter().sum::<usize>() == 4 * rows * cols, "{threads} threads: {progress:?}");
            crc32fast::hash(backend.packed_bytes(&matrix).unwrap())
        });
        assert_eq!(loaded, [loaded[0]; 3], "{format:?}");
    }
}

#[test]
fn loading_reports_the_first_error_and_progress_can_cancel_it() {
    let (rows, cols) = WIDE;
    let backend = CpuBackend::new(3, None).unwrap();
    let fault = |bad: &[usize], unread: usize, max_calls: usize| {
        let mut calls = 0;
        let read = |first: usize, out: &mut [u8]| {
            read_wide(bad, first, out);
            let here = first..first + out.len() / (4 * cols);
            if here.contains(&unread) { Err(Error::io(format!("row {unread} cannot be read"))) } else { Ok(()) }
        };
        let mut advance = |_| {
            calls += 1;
            if calls > max_calls { Err(Error::cancelled("enough")) } else { Ok(()) }
        };
        let loaded = backend.matrix(rows, cols, Dtype::F32, WeightFormat::Int8, RowSource { read: &read, advance: &mut advance });
        loaded.err().unwrap().message().to_string()
    };
    for _ in 0..5 {
        assert!(fault(&[297, 263], usize::MAX, 9).starts_with("row 263 has a number"));
        assert!(fault(&[70, 37], 133, 9).starts_with("row 37 has a number"));
        assert_eq!(fault(&[133], 40, 9), "row 40 cannot be read");
    }
    assert_eq!(fault(&[], usize::MAX, 1), "enough");
}

#[test]
fn an_error_names_the_row_of_a_weight_that_the_format_lacks() {
    let backend = backends().next().unwrap();
    let refusal = |bad: f32, format| {
        let mut weights = numbers(70 * 32, 5);
        weights[41 * 32 + 3] = bad;
        matrix_in(&backend, &stored(&weights, Dtype::F32).0, 70, 32, Dtype::F32, format).err().map(|error| error.message().to_string())
    };
    for format in WeightFormat::all(32) {
        let whole = format.is_whole();
        for bad in [f32::NAN, f32::INFINITY] {
            // Floating-point formats store non-finite numbers unchanged.
            assert_eq!(refusal(bad, format).map(|error| error.contains("row 41 has a number")), whole.then_some(true), "{format:?}");
        }
        let large = matches!(format, WeightFormat::F16 | WeightFormat::Int4 { .. });
        assert_eq!(refusal(1e6, format).is_some(), large, "{format:?}");
        assert_eq!(refusal(1e-40, format), None);
    }
}

#[test]
fn an_embedding_equals_the_row_of_the_table() {
    for backend in backends() {
        let (table, rounded) = matrix(&backend, &numbers(50 * 11, 4), 50, 11, Dtype::F16);
        let mut inputs = Inputs::default();
        backend.upload(&Batch { tokens: vec![0, 49, 31, 32], positions: vec![0, 1, 2, 3], ..Default::default() }, &mut inputs).unwrap();
        let mut out = poisoned(&backend, 4 * 11);
        backend.embed(&inputs, &table, 2.0, &mut out);
        backend.add_positions(&inputs, &table, 3, &mut out);
        for (row, (token, position)) in [(0, 3), (49, 4), (31, 5), (32, 6)].into_iter().enumerate() {
            for k in 0..11 {
                assert_eq!(out[row * 11 + k], 2.0 * rounded[token * 11 + k] + rounded[position * 11 + k]);
            }
        }
    }
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

/// A test case of attention with two sequences: one in the middle of its prompt, one decoding.
struct Case {
    shape: AttentionShape,
    /// [heads], or empty.
    sinks: Vec<f32>,
    block_size: usize,
    dtype: KvDtype,
    /// Emulates the path with pairs.
    plain_pairs: bool,
    /// Computes each row in a separate batch.
    alone: bool,
}

const CONTEXTS: [usize; 2] = [301, 140];
const ROWS: [usize; 2] = [19, 1];

impl Case {
    /// Stores all K and V, and then computes attention for the last rows of each sequence.
    fn run(&self, backend: &CpuBackend) -> (Vec<f32>, Vec<f64>) {
        let Case { shape, sinks, block_size, dtype, .. } = self;
        backend.reserve(shape).unwrap();
        let per_sequence = CONTEXTS[0].div_ceil(*block_size);
        let kv_shape = KvShape {
            blocks: 2 * per_sequence,
            block_size: *block_size,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            values: shape.values,
            dtype: *dtype,
        };
        let mut kv = backend.kv(kv_shape).unwrap();
        // Slots may hold anything before they are written: fill them with NaN.
        let stale = vec![0xff; 2 * per_sequence * kv.bytes()];
        kv.write(&Vec::from_iter(0..2 * per_sequence as u32), &stale).unwrap();
        // The sequences' blocks alternate, starting at the end of the pool.
        let tables: Vec<u32> = (0..2).flat_map(|s| (0..per_sequence).map(move |b| (2 * (per_sequence - b) - 1 - s) as u32)).collect();
        let slot = |s: usize, p: usize| tables[s * per_sequence + p / block_size] * *block_size as u32 + (p % block_size) as u32;
        let own = shape.values == Values::Own;
        let width = if own { shape.qkv_width() } else { shape.q_width() + shape.kv_width() };
        let all = numbers(2 * CONTEXTS[0] * width, 5); // [sequence, position, qkv or qk]
        let at = |s: usize, p: usize| &all[(s * CONTEXTS[0] + p) * width..][..width];

        let places: Vec<(usize, usize)> = (0..2).flat_map(|s| (0..CONTEXTS[s]).map(move |p| (s, p))).collect();
        let mut inputs = Inputs::default();
        let batch = Batch { tokens: vec![0; places.len()], slots: places.iter().map(|&(s, p)| slot(s, p)).collect(), ..Default::default() };
        backend.upload(&batch, &mut inputs).unwrap();
        let qkv: Vec<f32> = places.iter().flat_map(|&(s, p)| at(s, p)[if own { 0 } else { shape.q_width() }..].to_vec()).collect();
        backend.store_kv(&inputs, 0, shape, None, &mut buf(backend, &qkv), &mut kv);

        let rows: Vec<(usize, usize)> = (0..2).flat_map(|s| (CONTEXTS[s] - ROWS[s]..CONTEXTS[s]).map(move |p| (s, p))).collect();
        let span = |first_row: usize, rows: usize, s: usize| Span {
            first_token: first_row as u32,
            tokens: rows as u32,
            table: (s * per_sequence) as u32,
        };
        let spans = match self.alone {
            false => vec![span(0, ROWS[0], 0), span(ROWS[0], ROWS[1], 1)],
            true => rows.iter().enumerate().map(|(row, &(s, _))| span(row, 1, s)).collect(),
        };
        let positions = rows.iter().map(|row| row.1 as u32).collect();
        let batch = Batch { tokens: vec![0; rows.len()], positions, spans, tables, ..Default::default() };
        backend.upload(&batch, &mut inputs).unwrap();
        let qkv: Vec<f32> = rows.iter().flat_map(|&(s, p)| at(s, p)[..shape.row_width()].to_vec()).collect();
        let mut out = poisoned(backend, rows.len() * shape.out_width());
        let sinks = (!sinks.is_empty()).then(|| buf(backend, sinks));
        self.attend(backend, &inputs, sinks.as_ref(), &buf(backend, &qkv), &kv, &mut out);
        let expected = rows.iter().flat_map(|&(s, p)| self.reference(p, |i| at(s, i))).collect();
        (out.to_vec(), expected)
    }

    fn attend(&self, backend: &CpuBackend, inputs: &Inputs, sinks: Option<&Buf>, qkv: &Buf, kv: &kv::Kv, out: &mut Buf) {
        if !self.plain_pairs {
            return backend.attention(inputs, 0, &self.shape, sinks, qkv, kv, out);
        }
        let args = attention::Args { inputs, group: 0, groups: 1, shape: &self.shape, sinks: sinks.map(|sinks| &sinks[..]), qkv, kv };
        attention::attention_in_plain_pairs(&backend.pool, &backend.scratch, args, out);
    }

    /// Returns true if queries and probabilities are rounded to bf16.
    fn in_pairs(&self, backend: &CpuBackend) -> bool {
        let pairs = self.dtype == KvDtype::Bf16 && self.shape.values == Values::Own && self.shape.head_dim.is_multiple_of(2);
        pairs && (self.plain_pairs || backend.isa() == Isa::Avx512Bf16)
    }

    /// Computes one row for all heads in f64, over K and V as stored.
    fn reference<'a>(&self, position: usize, at: impl Fn(usize) -> &'a [f32]) -> Vec<f64> {
        let AttentionShape { heads, kv_heads, head_dim, values, scale, window, soft_cap, alibi } = self.shape;
        let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
        let mut out = Vec::new();
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let part = |p: usize, start: usize| &at(p)[start * head_dim..][..head_dim];
            let kept = |p: usize, start: usize| as_cached(part(p, start), self.dtype);
            let score = |p: usize| {
                let dot: f64 = part(position, head).iter().zip(kept(p, heads + kv_head)).map(|(q, k)| *q as f64 * k as f64).sum();
                let far = alibi.map_or(0.0, |alibi| alibi as f64 * self.shape.slope(head) as f64 * (position - p) as f64);
                let score = dot * scale as f64 - far;
                soft_cap.map_or(score, |cap| cap as f64 * (score / cap as f64).tanh())
            };
            let weights: Vec<f64> = (first..=position).map(|p| score(p).exp()).collect();
            let total = weights.iter().sum::<f64>() + self.sinks.get(head).map_or(0.0, |sink| (*sink as f64).exp());
            let beside = if values == Values::Own { kv_heads } else { 0 };
            let values: Vec<_> = (first..=position).map(|p| kept(p, heads + beside + kv_head)).collect();
            out.extend(
                (0..self.shape.value_dim()).map(|d| weights.iter().zip(&values).map(|(w, value)| w * value[d] as f64).sum::<f64>() / total),
            );
        }
        out
    }
}

#[test]
fn attention_is_correct_and_batch_invariant_for_all_features() {
    let shape = |heads, kv_heads, head_dim| AttentionShape::new(heads, kv_heads, head_dim, 1.7);
    let latent =
        |heads, head_dim, values| AttentionShape { values: Values::OfKeys(values), ..AttentionShape::new(heads, 1, head_dim, 0.4) };
    let plain = Vec::new;
    let shapes = [
        (shape(4, 4, 64), plain()),
        (shape(8, 1, 32), plain()),
        (AttentionShape { scale: 0.2, ..shape(2, 1, 128) }, plain()),
        (shape(6, 2, 20), plain()),
        (shape(3, 3, 7), plain()),
        (AttentionShape { window: Some(130), ..shape(4, 2, 16) }, plain()),
        (AttentionShape { window: Some(1), ..shape(2, 1, 80) }, plain()),
        (AttentionShape { soft_cap: Some(2.0), ..shape(5, 1, 48) }, plain()),
        (AttentionShape { alibi: Some(0.7), ..shape(6, 2, 20) }, plain()),
        (shape(4, 2, 16), vec![5.0, -3.0, 0.0, 12.0]),
        (AttentionShape { window: Some(20), ..shape(2, 1, 24) }, vec![40.0, 1.0]),
        (latent(4, 40, 32), plain()),
        // More heads than a task takes, and odd dimensions.
        (latent(34, 27, 19), plain()),
        (AttentionShape { window: Some(40), ..latent(3, 80, 64) }, vec![0.0, 2.0, -1.0]),
    ];
    for backend in backends() {
        for (i, (shape, sinks)) in shapes.iter().enumerate() {
            for block_size in [8, 16, 256] {
                for (dtype, plain_pairs) in KvDtype::ALL.map(|dtype| (dtype, false)).into_iter().chain([(KvDtype::Bf16, true)]) {
                    let case = Case { shape: *shape, sinks: sinks.clone(), block_size, dtype, plain_pairs, alone: false };
                    if plain_pairs && !(case.in_pairs(&backend) && backend.isa() == Isa::Portable) {
                        continue;
                    }
                    let tolerance = if case.in_pairs(&backend) { 8e-3 } else { 2e-5 };
                    let (found, expected) = case.run(&backend);
                    let pairs = if plain_pairs { ", in plain pairs" } else { "" };
                    let name = format!("{} shape {i}, blocks of {block_size}, {dtype:?}{pairs}", backend.isa().name());
                    assert_near(&name, &found, &expected, tolerance);
                    if block_size == 16 {
                        assert!(found == Case { alone: true, ..case }.run(&backend).0, "{name}: a single row has other bits");
                    }
                }
            }
        }
    }
}

#[test]
fn strips_are_split_multiplied_and_concatenated() {
    let strips = Strips { first: 3, count: 5, dim: 7, pitch: 9, stride: 51 };
    let (rows, wide) = (6, 4);
    let (x, w) = (numbers(rows * strips.stride, 1), numbers(strips.count * wide * strips.dim, 2));
    for backend in backends() {
        let bytes: Vec<Vec<u8>> = w.chunks_exact(wide * strips.dim).map(|w| w.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
        let matrix = |bytes: &Vec<u8>| matrix_in(&backend, bytes, wide, strips.dim, Dtype::F32, WeightFormat::F32);
        let matrices: Vec<Matrix> = bytes.iter().map(|bytes| matrix(bytes).unwrap()).collect();
        let mut split = poisoned(&backend, rows * strips.count * strips.dim);
        backend.split_strips(rows, strips, &buf(&backend, &x), &mut split);
        let mut product = poisoned(&backend, rows * strips.count * wide);
        backend.matmul_strips(rows, strips.count, &split, &|strip| &matrices[strip], &mut product);
        let to = Strips { first: 2, count: 5, dim: wide, pitch: 6, stride: 33 };
        let mut out = buf(&backend, &vec![-7.0; rows * to.stride]);
        backend.join_strips(rows, to, &product, &mut out);
        let mut expected = vec![-7.0; rows * to.stride];
        for (row, strip, n) in (0..rows).flat_map(|row| (0..5).flat_map(move |strip| (0..wide).map(move |n| (row, strip, n)))) {
            let x = &x[row * strips.stride + strips.first + strip * strips.pitch..][..strips.dim];
            let w = &w[(strip * wide + n) * strips.dim..][..strips.dim];
            expected[row * to.stride + to.first + strip * to.pitch + n] = x.iter().zip(w).map(|(x, w)| *x as f64 * *w as f64).sum();
        }
        assert_near("strips", &out, &expected, 2e-6);
    }
}

/// A layer's cache and its rows of `[q, k, v]`, in consecutive slots.
struct Cached {
    shape: AttentionShape,
    kv: kv::Kv,
    inputs: Inputs,
}

impl Cached {
    const SHAPE: AttentionShape =
        AttentionShape { heads: 2, kv_heads: 2, head_dim: 20, values: Values::Own, scale: 0.3, window: None, soft_cap: None, alibi: None };
    const BLOCK: usize = 16;
    const BLOCKS: usize = 4;

    fn new(backend: &CpuBackend, dtype: KvDtype, qkv: &[f32]) -> Cached {
        let shape = Self::SHAPE;
        backend.reserve(&shape).unwrap();
        let kv_shape = KvShape {
            blocks: Self::BLOCKS,
            block_size: Self::BLOCK,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            values: shape.values,
            dtype,
        };
        let rows = qkv.len() / shape.qkv_width();
        let mut cached = Cached { shape, kv: backend.kv(kv_shape).unwrap(), inputs: Inputs::default() };
        let slots = (0..rows as u32).collect();
        backend.upload(&Batch { tokens: vec![0; rows], slots, ..Default::default() }, &mut cached.inputs).unwrap();
        backend.store_kv(&cached.inputs, 0, &shape, None, &mut buf(backend, qkv), &mut cached.kv);
        cached
    }

    /// Computes attention of the last row of `qkv` over these blocks.
    fn attend(&mut self, backend: &CpuBackend, qkv: &[f32], blocks: &[u32]) -> Vec<f32> {
        let width = self.shape.qkv_width();
        let position = (qkv.len() / width - 1) as u32;
        let spans = vec![Span { first_token: 0, tokens: 1, table: 0 }];
        let batch = Batch { tokens: vec![0], positions: vec![position], spans, tables: blocks.to_vec(), ..Default::default() };
        backend.upload(&batch, &mut self.inputs).unwrap();
        let mut out = poisoned(backend, self.shape.q_width());
        backend.attention(&self.inputs, 0, &self.shape, None, &buf(backend, &qkv[qkv.len() - width..]), &self.kv, &mut out);
        out.to_vec()
    }

    /// Returns K and V of one head of a token in the first block, decoded from exported bytes.
    fn stored(&self, token: usize, head: usize) -> [Vec<f32>; 2] {
        let mut bytes = Vec::new();
        self.kv.read(&[0], Tail { blocks: 0, slots: 0 }, &mut bytes).unwrap();
        let (dims, block) = (self.shape.head_dim, Self::BLOCK);
        let halves = bytes.split_at(bytes.len() / 2);
        let number = |half: &[u8], at: usize| {
            let head = &half[head * block * (dims + 4)..];
            let scale = f32::from_le_bytes(*head[block * dims + token * 4..].first_chunk().unwrap());
            match self.kv.shape.dtype {
                KvDtype::Fp8 => E4m3(head[at]).to_f32() * scale,
                _ => head[at] as i8 as f32 * scale,
            }
        };
        let keys = (0..dims).map(|d| number(halves.0, d * block + token)).collect();
        [keys, (0..dims).map(|d| number(halves.1, token * dims + d)).collect()]
    }
}

fn with_scales() -> impl Iterator<Item = (CpuBackend, KvDtype)> {
    [KvDtype::Int8, KvDtype::Fp8].into_iter().flat_map(|dtype| backends().map(move |backend| (backend, dtype)))
}

/// The bound is half a step of rounding to the nearest. In int8, a step is 1/127 of the greatest
/// magnitude. In fp8, it is the last of four significant bits, or the smallest subnormal.
#[test]
fn one_byte_kv_is_accurate_to_half_a_unit_in_the_last_place() {
    for (backend, dtype) in with_scales() {
        let (shape, rows) = (Cached::SHAPE, 9);
        // Heads with very different magnitudes: each has its own scale.
        let size = |i: usize| [1e-30, 1.0, 3e4, 1e30][i / shape.head_dim % 4];
        let qkv: Vec<f32> = numbers(rows * shape.qkv_width(), 8).iter().enumerate().map(|(i, x)| x * size(i)).collect();
        let cached = Cached::new(&backend, dtype, &qkv);
        for (token, row) in qkv.chunks(shape.qkv_width()).enumerate() {
            for head in 0..2 {
                for (part, found) in [2 + head, 4 + head].into_iter().zip(cached.stored(token, head)) {
                    let given = &row[part * shape.head_dim..][..shape.head_dim];
                    let max = given.iter().fold(0.0f32, |max, x| max.max(x.abs())) as f64;
                    assert!(found.iter().any(|x| (x.abs() as f64 - max).abs() < 1e-6 * max), "the greatest number is exact");
                    for (given, found) in given.iter().zip(found) {
                        let error = (*given as f64 - found as f64).abs();
                        let bound = match dtype {
                            KvDtype::Fp8 => given.abs() as f64 / 16.0 + max / 448.0 / 1024.0,
                            _ => max / 254.0,
                        };
                        assert!(error <= bound * 1.0001, "{given} is stored as {found}, with numbers up to {max}");
                    }
                }
            }
        }
    }
}

#[test]
fn one_byte_kv_keeps_zeros_and_nan() {
    let shape = Cached::SHAPE;
    let (width, dims) = (shape.qkv_width(), shape.head_dim);
    // Index of the row whose second head gets a number that is not finite.
    const BAD: usize = 5;
    for (backend, dtype) in with_scales() {
        let mut qkv = numbers(9 * width, 8);
        for tiny in [0.0, -0.0, 1e-45, 1e-38] {
            qkv[2 * dims..4 * dims].fill(tiny);
            let cached = Cached::new(&backend, dtype, &qkv);
            assert!((0..2).all(|head| cached.stored(0, head)[0].iter().all(|&x| x == 0.0)), "{tiny}");
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for part in [3, 5] {
                let mut qkv = qkv.clone();
                qkv[BAD * width + part * dims + 7] = bad;
                let mut cached = Cached::new(&backend, dtype, &qkv);
                for rows in 1..=9 {
                    let out = cached.attend(&backend, &qkv[..rows * width], &[0]);
                    assert!(out[..dims].iter().all(|x| x.is_finite()), "{bad} does not affect the other head");
                    assert!(
                        out[dims..].iter().all(|x| x.is_nan() == (rows > BAD)),
                        "{bad} in part {part}, visible from row {rows}: {out:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn copied_and_exported_blocks_keep_their_scales() {
    for (backend, dtype) in with_scales() {
        let qkv = numbers(27 * Cached::SHAPE.qkv_width(), 8);
        let mut cached = Cached::new(&backend, dtype, &qkv);
        let expected = cached.attend(&backend, &qkv, &[0, 1]);
        backend.copy_blocks(&[BlockCopy { from: 0, to: 3 }, BlockCopy { from: 1, to: 2 }], std::slice::from_mut(&mut cached.kv));
        assert_eq!(cached.attend(&backend, &qkv, &[3, 2]), expected, "copied");
        let mut bytes = Vec::new();
        backend.read_blocks(&[3, 2], Tail { blocks: 0, slots: 0 }, &cached.kv, &mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, 2 * backend.kv_block_bytes(&cached.kv.shape));
        let mut other = Cached::new(&backend, dtype, &[]);
        assert!(backend.write_blocks(&[1, 3], &mut other.kv, &bytes).unwrap().is_empty());
        assert_eq!(other.attend(&backend, &qkv, &[1, 3]), expected, "after an export and an import");
    }
}

#[test]
fn f16_saturates_numbers_beyond_its_greatest() {
    let kept = |x| <half::f16 as kv::Cached>::nearest(x).to_f32();
    assert_eq!([65504.0, 65519.0, 65520.0, 1e30, f32::INFINITY, -1e30].map(kept), [65504.0, 65504.0, 65504.0, 65504.0, 65504.0, -65504.0]);
    assert!(kept(f32::NAN).is_nan());
}

#[test]
fn norms_are_correct() {
    for backend in backends() {
        for width in [1, 5, 16, 33, 160] {
            let (x, weight, bias) = (numbers(3 * width, 1), numbers(width, 2), numbers(width, 3));
            for (kind, offset) in
                [(NormKind::Layer, 0.0), (NormKind::Rms { unit_offset: false }, 0.0), (NormKind::Rms { unit_offset: true }, 1.0)]
            {
                let mut out = poisoned(&backend, 3 * width);
                let (weights, biases) = (buf(&backend, &weight), buf(&backend, &bias));
                let norm = NormOf { kind, eps: 1e-3, weight: &weights, bias: Some(&biases) };
                backend.norm(3, width, norm, &buf(&backend, &x), &mut out);
                let expected: Vec<f64> = x
                    .chunks(width)
                    .flat_map(|row| {
                        let mean = if kind == NormKind::Layer { row.iter().map(|x| *x as f64).sum::<f64>() / width as f64 } else { 0.0 };
                        let variance = row.iter().map(|x| (*x as f64 - mean).powi(2)).sum::<f64>() / width as f64;
                        let scaled = |(i, x): (usize, &f32)| {
                            (*x as f64 - mean) / (variance + 1e-3).sqrt() * (weight[i] as f64 + offset) + bias[i] as f64
                        };
                        row.iter().enumerate().map(scaled).collect::<Vec<_>>()
                    })
                    .collect();
                assert_near(&format!("{} {kind:?} of {width}", backend.isa().name()), &out, &expected, 1e-5);
            }
        }
    }
}

#[test]
fn head_norms_change_only_their_heads() {
    for backend in backends() {
        let x = numbers(2 * 50, 1);
        let heads = Heads { first: 20, count: 2, dim: 10, stride: 50 };
        // One weight for both heads, or one per head.
        for (weight, bias) in [(numbers(10, 2), None), (numbers(20, 2), Some(numbers(20, 3)))] {
            let mut out = buf(&backend, &x);
            let (weights, biases) = (buf(&backend, &weight), bias.as_ref().map(|bias| buf(&backend, bias)));
            let kind = NormKind::Rms { unit_offset: false };
            backend.norm_heads(2, heads, NormOf { kind, eps: 1e-6, weight: &weights, bias: biases.as_ref() }, &mut out);
            let expected: Vec<f64> = (0..100)
                .map(|i| {
                    let (row, column) = (i / 50, i % 50);
                    if !(20..40).contains(&column) {
                        return x[i] as f64;
                    }
                    let head = &x[row * 50 + column / 10 * 10..][..10];
                    let square = head.iter().map(|x| (*x as f64).powi(2)).sum::<f64>() / 10.0;
                    let own = (column - 20) % weight.len();
                    x[i] as f64 / (square + 1e-6).sqrt() * weight[own] as f64 + bias.as_ref().map_or(0.0, |bias| bias[own] as f64)
                })
                .collect();
            assert_near(backend.isa().name(), &out, &expected, 1e-5);
        }
    }
}

#[test]
fn rope_rotates_the_rotated_dimensions_by_position() {
    for backend in backends() {
        let (frequencies, x) = ([1.0f32, 0.1], numbers(2 * 18, 1));
        let mut inputs = Inputs::default();
        backend.upload(&Batch { tokens: vec![0; 2], positions: vec![0, 9], ..Default::default() }, &mut inputs).unwrap();
        let mut angles = poisoned(&backend, 2 * 4);
        backend.angles(&inputs, &buf(&backend, &frequencies), 1.0, &mut angles);
        for (pairs, first, second) in [(Pairs::Halves, [0, 1], [2, 3]), (Pairs::Neighbours, [0, 2], [1, 3])] {
            let mut out = buf(&backend, &x);
            // Two heads of 6 dimensions, of which 4 are rotated, and 6 other columns.
            backend.rope(
                2,
                Heads { first: 0, count: 2, dim: 6, stride: 18 },
                RotaryEmbedding { rotated: 4, pairs, angles: &angles },
                &mut out,
            );
            assert_eq!(out[..18], x[..18], "position 0 is not rotated");
            for head in [18, 24] {
                for (i, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = (9.0 * *frequency as f64).sin_cos();
                    let (low, high) = (head + first[i], head + second[i]);
                    let (a, b) = (x[low] as f64, x[high] as f64);
                    assert_near("rope", &[out[low], out[high]], &[a * cos - b * sin, b * cos + a * sin], 1e-6);
                }
                assert_eq!(out[head + 4..head + 6], x[head + 4..head + 6]);
            }
            assert_eq!(out[30..], x[30..]);
        }
    }
}

#[test]
fn fused_operations_have_the_bits_of_their_parts() {
    for backend in backends() {
        // More rows than an MLP processes at once, and widths that fill their panels or not.
        for (rows, [cols, width, outputs]) in [(3, [20, 64, 9]), (2 * MLP_ROWS + 1, [64, 96, 40]), (5, [40, 37, 33])] {
            let x = buf(&backend, &numbers(rows * cols, 1));
            let formats =
                WeightFormat::all(32).into_iter().filter(|format| !matches!(format, WeightFormat::Int4 { .. }) || rows > MLP_ROWS);
            for (format, activation) in formats.flat_map(|format| {
                [Activation::Plain(Act::Relu), Activation::Gated(Glu::Of(Act::Silu))].map(|activation| (format, activation))
            }) {
                let ups = if matches!(activation, Activation::Gated(_)) { 2 * width } else { width };
                let [up, down] = [(ups, cols, 3), (outputs, width, 4)].map(|(rows, cols, seed)| {
                    let bytes = stored(&numbers(rows * cols, seed), Dtype::F32).0;
                    let bias = buf(&backend, &numbers(rows, seed + 2));
                    (matrix_in(&backend, &bytes, rows, cols, Dtype::F32, format).unwrap(), bias)
                });
                let [mut out, mut expected] = [(), ()].map(|()| poisoned(&backend, rows * outputs));
                let [mut wide, mut narrow] = [ups, width].map(|width| poisoned(&backend, rows * width));
                backend.matmul(rows, &x, &up.0, Some(&up.1), &mut wide);
                match activation {
                    Activation::Plain(act) => {
                        backend.activate(rows * width, act, &mut wide);
                        backend.matmul(rows, &wide, &down.0, Some(&down.1), &mut expected);
                    }
                    Activation::Gated(glu) => {
                        backend.gate(rows, width, glu, &wide, &mut narrow);
                        backend.matmul(rows, &narrow, &down.0, Some(&down.1), &mut expected);
                    }
                }
                let [mut wide, mut narrow] = [ups, width].map(|width| poisoned(&backend, backend.mlp_rows(rows) * width));
                let mlp = MlpOf { up: (&up.0, Some(&up.1)), activation, width, down: (&down.0, Some(&down.1)) };
                backend.mlp(rows, &x, mlp, &mut wide, &mut narrow, &mut out);
                assert!(out[..] == expected[..], "{} {rows} rows of {width}, {format:?}", backend.isa().name());
            }
        }
        let (x, y, weight) = (numbers(7 * 50, 1), buf(&backend, &numbers(7 * 50, 2)), buf(&backend, &numbers(50, 3)));
        let norm = NormOf { kind: NormKind::Layer, eps: 1e-5, weight: &weight, bias: None };
        let [mut sum, mut of_sum] = [(), ()].map(|()| buf(&backend, &x));
        let [mut out, mut expected] = [(), ()].map(|()| poisoned(&backend, 7 * 50));
        backend.add(7 * 50, 0.3, &mut sum, &y);
        backend.norm(7, 50, norm, &sum, &mut expected);
        backend.add_norm(7, 50, 0.3, &y, norm, &mut of_sum, &mut out);
        assert!(out[..] == expected[..] && of_sum[..] == sum[..], "a fused sum and norm");
    }
}

#[test]
fn queries_and_keys_are_rotated_when_they_are_stored() {
    for backend in backends() {
        let (shape, rows) = (Cached::SHAPE, 5);
        let qkv = numbers(rows * shape.qkv_width(), 8);
        let angles = buf(&backend, &numbers(rows * 6, 9));
        let turn = RotaryEmbedding { rotated: 6, pairs: Pairs::Halves, angles: &angles };
        let mut turned = buf(&backend, &qkv);
        let heads = Heads { first: 0, count: shape.heads + shape.kv_heads, dim: shape.head_dim, stride: shape.qkv_width() };
        backend.rope(rows, heads, turn, &mut turned);
        let (mut found, mut expected) = (Cached::new(&backend, KvDtype::Int8, &turned), Cached::new(&backend, KvDtype::Int8, &turned));
        backend.store_kv(&expected.inputs, 0, &shape, None, &mut turned, &mut expected.kv);
        let mut at_once = buf(&backend, &qkv);
        found.kv.write(&[0], &vec![0; found.kv.bytes()]).unwrap();
        backend.store_kv(&found.inputs, 0, &shape, Some(turn), &mut at_once, &mut found.kv);
        assert!(at_once[..] == turned[..], "rows");
        assert!((0..rows).all(|token| (0..2).all(|head| found.stored(token, head) == expected.stored(token, head))), "K and V");
    }
}

#[test]
fn a_residual_sum_is_scaled() {
    for backend in backends() {
        let (x, y) = (numbers(5000, 1), numbers(5000, 2));
        let mut out = buf(&backend, &x);
        backend.add(5000, 0.25, &mut out, &buf(&backend, &y));
        let expected: Vec<f64> = x.iter().zip(&y).map(|(x, y)| *x as f64 + 0.25 * *y as f64).collect();
        assert_near(backend.isa().name(), &out, &expected, 1e-6);
    }
}

#[test]
fn activations_gates_and_caps_are_correct() {
    let gelu = |x: f64| 0.5 * x * (1.0 + libm::erf(x / 2f64.sqrt()));
    let gelu_tanh = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
    let acts: [(Act, &dyn Fn(f64) -> f64); 4] =
        [(Act::Relu, &|x| x.max(0.0)), (Act::Silu, &|x| x / (1.0 + (-x).exp())), (Act::Gelu, &gelu), (Act::GeluTanh, &gelu_tanh)];
    let x: Vec<f32> = numbers(2 * 2 * 37, 1).iter().map(|x| x * 12.0).collect();
    for backend in backends() {
        for (act, exact) in acts {
            let mut out = buf(&backend, &x);
            backend.activate(x.len(), act, &mut out);
            assert_near(&format!("{act:?}"), &out, &x.iter().map(|x| exact(*x as f64)).collect::<Vec<_>>(), 2e-6);
            let mut gated = poisoned(&backend, 2 * 37);
            backend.gate(2, 37, Glu::Of(act), &buf(&backend, &x), &mut gated);
            let expected: Vec<f64> =
                (0..74).map(|i| (i / 37 * 74 + i % 37, i)).map(|(at, _)| exact(x[at] as f64) * x[at + 37] as f64).collect();
            assert_near(&format!("gated {act:?}"), &gated, &expected, 2e-6);
        }
        let mut gated = poisoned(&backend, 2 * 37);
        backend.gate(2, 37, Glu::Clamped { alpha: 1.7, limit: 7.0 }, &buf(&backend, &x), &mut gated);
        let clamped = |i: usize| {
            let (gate, up) = ((x[i / 37 * 74 + i % 37] as f64).min(7.0), (x[i / 37 * 74 + i % 37 + 37] as f64).clamp(-7.0, 7.0));
            gate / (1.0 + (-1.7 * gate).exp()) * (up + 1.0)
        };
        assert_near("clamped", &gated, &(0..74).map(clamped).collect::<Vec<_>>(), 2e-6);
        let mut out = buf(&backend, &x);
        backend.scale_and_cap(x.len(), 0.5, Some(3.0), &mut out);
        assert_near("cap", &out, &x.iter().map(|x| 3.0 * (*x as f64 * 0.5 / 3.0).tanh()).collect::<Vec<_>>(), 2e-6);
    }
}
