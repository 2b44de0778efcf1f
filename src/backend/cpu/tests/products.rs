//! Matrix products, and the accuracy of weight formats.

use super::*;

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

/// Quantizes rows as integer products do: groups of columns to -127..=127, to the nearest.
pub(super) fn quantized(x: &[f32], cols: usize, group: usize) -> Vec<f64> {
    let of_group = |x: &[f32]| {
        let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let inverse = if max == 0.0 { 0.0 } else { 127.0 / max };
        x.iter().map(|x| ((x * inverse).round_ties_even() * (max / 127.0)) as f64).collect::<Vec<_>>()
    };
    x.chunks_exact(cols).flat_map(|row| row.chunks(group).flat_map(of_group)).collect()
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
