//! Log probabilities from logits, fast enough for a whole vocabulary per beam: the compiler
//! vectorizes the loops.

use super::rows::largest;

const LANES: usize = 16;
/// Numbers that are summed in f32, before the sums are added in f64.
const CHUNK: usize = 32 * LANES;

/// Writes the log probability of every token under the softmax of `logits`, for all tokens of
/// `out`. Excluded tokens remain minus infinity, even if all are excluded. NaN remains NaN.
pub fn log_softmax(logits: &[f32], out: &mut [f32]) {
    let max = largest(logits);
    if max == f32::NEG_INFINITY {
        return out.copy_from_slice(logits);
    }
    let sum: f64 = logits.chunks(CHUNK).map(|chunk| sum_of_exps(chunk, max)).sum();
    let log_sum = libm::log(sum) as f32;
    for (out, &x) in out.iter_mut().zip(logits) {
        *out = x - max - log_sum;
    }
}

fn sum_of_exps(chunk: &[f32], max: f32) -> f64 {
    let (chunks, rest) = chunk.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += exp_of_negative(x - max);
        }
    }
    lanes.iter().map(|&x| x as f64).sum::<f64>() + rest.iter().map(|&x| exp_of_negative(x - max) as f64).sum::<f64>()
}

/// Returns e^x for x <= 0, to two units in the last place. Saturates at 1e-38. Contains no branches
/// or calls, so that it is vectorized.
fn exp_of_negative(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 355.0 / 512.0; // few significant bits, so that its products with integers of this range are exact
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const ROUNDER: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer, which is then in the lowest bits
    let x = if x > -87.0 { x } else { -87.0 };
    let rounded = x * std::f32::consts::LOG2_E + ROUNDER;
    let power = rounded - ROUNDER;
    let rest = (x - power * LN_2_HIGH) - power * LN_2_LOW;
    // The Taylor series of e^rest, for |rest| <= ln 2 / 2.
    let mut series = 1.0 / 5040.0;
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        series = series * rest + factor;
    }
    series * f32::from_bits(rounded.to_bits().wrapping_add(127) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_softmax_equals_the_logarithm_of_the_softmax() {
        let p = [0.15f32, 0.5, 0.1, 0.25];
        let shifted = p.map(|p| p.ln() + 40.0);
        let mut out = [0.0; 4];
        log_softmax(&shifted, &mut out);
        assert!(out.iter().zip(p).all(|(out, p)| (out - p.ln()).abs() < 1e-5), "{out:?}");
    }

    #[test]
    fn a_large_vocabulary_keeps_the_precision() {
        for count in [1, 15, 16, 17, 513, 50_257] {
            let logits: Vec<f32> = (0..count)
                .map(|i| 30.0 * crate::generation::sampler::uniform(1, i, crate::generation::sampler::Lane::Token) as f32 - 60.0)
                .collect();
            let mut out = vec![0.0; logits.len()];
            log_softmax(&logits, &mut out);
            let log_sum = logits.iter().map(|&x| (x as f64).exp()).sum::<f64>().ln();
            for (out, x) in out.iter().zip(&logits) {
                assert!((*out as f64 - (*x as f64 - log_sum)).abs() < 4e-6, "{count} logits: {out}, expected {}", *x as f64 - log_sum);
            }
        }
    }

    #[test]
    fn the_exponential_is_accurate_to_a_few_ulps_and_never_negative() {
        for i in 0..200_000 {
            let x = -(i as f32) * 90.0 / 200_000.0;
            let (found, expected) = (exp_of_negative(x) as f64, (x.max(-87.0) as f64).exp());
            assert!((found / expected - 1.0).abs() < 2.5e-7, "e to the {x}: {found}, expected {expected}");
        }
        assert!((0.0..1e-37).contains(&exp_of_negative(f32::NEG_INFINITY)));
    }

    #[test]
    fn log_softmax_keeps_exclusions_and_propagates_nan() {
        let mut out = [0.0; 3];
        log_softmax(&[f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY], &mut out);
        assert_eq!(out, [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY]);
        log_softmax(&[f32::NEG_INFINITY; 3], &mut out);
        assert_eq!(out, [f32::NEG_INFINITY; 3]);
        log_softmax(&[0.0, f32::NAN, 1.0], &mut out);
        assert!(out[1].is_nan());
        log_softmax(&[0.0, f32::INFINITY, 1.0], &mut out);
        assert!(out.iter().any(|x| x.is_nan()));
    }
}
