//! Operations on single rows: embeddings, norms, rotary embeddings, activations and gates.

use super::*;

#[test]
fn an_embedding_equals_the_row_of_the_table() {
    for backend in backends() {
        let (table, rounded) = matrix(&backend, &numbers(50 * 11, 4), 50, 11, Dtype::F16);
        let mut inputs = Inputs::default();
        backend.upload(&Batch { tokens: vec![0, 49, 31, 32], positions: vec![0, 1, 2, 3], ..Default::default() }, &mut inputs).unwrap();
        let mut out = poisoned(&backend, 4 * 11);
        backend.embed(&inputs, &table, 0, 2.0, &mut out);
        backend.add_positions(&inputs, &table, 3, &mut out);
        for (row, (token, position)) in [(0, 3), (49, 4), (31, 5), (32, 6)].into_iter().enumerate() {
            for k in 0..11 {
                assert_eq!(out[row * 11 + k], 2.0 * rounded[token * 11 + k] + rounded[position * 11 + k]);
            }
        }
    }
}

#[test]
fn tokens_outside_of_a_table_give_zeros() {
    for backend in backends() {
        let (table, rounded) = matrix(&backend, &numbers(10 * 11, 4), 10, 11, Dtype::F16);
        let mut inputs = Inputs::default();
        backend.upload(&Batch { tokens: vec![19, 20, 29, 30], positions: vec![0, 1, 2, 3], ..Default::default() }, &mut inputs).unwrap();
        let mut out = poisoned(&backend, 4 * 11);
        backend.embed(&inputs, &table, 20, 1.0, &mut out);
        assert_eq!(out[..11], [0.0; 11]);
        assert_eq!(out[11..22], rounded[..11]);
        assert_eq!(out[22..33], rounded[9 * 11..]);
        assert_eq!(out[33..], [0.0; 11]);

        let (empty, _) = matrix(&backend, &[], 0, 11, Dtype::F16);
        backend.embed(&inputs, &empty, 0, 1.0, &mut out);
        assert_eq!(out[..], [0.0; 44]);
    }
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
                backend.norm(3, width, norm, &[], &buf(&backend, &x), &mut out);
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
                        backend.gate(rows, width, glu, &[], &wide, &mut narrow);
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
        backend.norm(7, 50, norm, &[], &sum, &mut expected);
        backend.add_norm(7, 50, 0.3, &y, norm, &[], &mut of_sum, &mut out);
        assert!(out[..] == expected[..] && of_sum[..] == sum[..], "a fused sum and norm");
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
            backend.gate(2, 37, Glu::Of(act), &[], &buf(&backend, &x), &mut gated);
            let expected: Vec<f64> =
                (0..74).map(|i| (i / 37 * 74 + i % 37, i)).map(|(at, _)| exact(x[at] as f64) * x[at + 37] as f64).collect();
            assert_near(&format!("gated {act:?}"), &gated, &expected, 2e-6);
        }
        let mut gated = poisoned(&backend, 2 * 37);
        backend.gate(2, 37, Glu::Clamped { alpha: 1.7, limit: 7.0 }, &[], &buf(&backend, &x), &mut gated);
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
            backend.gate(1, WIDTH, glu, &[], &buf(&backend, &x), &mut out);
            let bad: Vec<usize> = (0..WIDTH).filter(|i| out[*i].is_nan()).collect();
            assert_eq!(bad, [place % WIDTH], "{} {glu:?}: NaN at {place}", backend.isa().name());
        }
        // The clamp bounds both sides.
        let mut out = poisoned(&backend, 2);
        backend.gate(1, 2, glu, &[], &buf(&backend, &[f32::INFINITY, 1.0, 1.0, f32::INFINITY]), &mut out);
        let expected = if glu == clamped {
            [7.0 / (1.0 + (-1.702f32 * 7.0).exp()) * 2.0, 8.0 / (1.0 + (-1.702f32).exp())]
        } else {
            [f32::INFINITY; 2]
        };
        assert!(out.iter().zip(expected).all(|(x, y)| x == &y || (x - y).abs() < 1e-4), "{} {glu:?}: {:?}", backend.isa().name(), &out[..]);
    }
}
