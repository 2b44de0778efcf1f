//! Passes over a whole row of logits, in loops that the compiler vectorizes.

const LANES: usize = 8;
/// Lanes of loops with dependent comparisons, and of loops that test a whole part before processing
/// it.
const MANY_LANES: usize = 32;

/// Returns true if the row has neither NaN nor plus infinity.
pub fn are_logits(row: &[f32]) -> bool {
    row.iter().fold(true, |good, &logit| good & (logit < f32::INFINITY))
}

pub fn reaches(row: &[f32], floor: f32) -> bool {
    row.iter().fold(false, |found, &logit| found | (logit >= floor))
}

/// Returns the largest logit, or minus infinity for an empty row.
pub fn largest(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; MANY_LANES];
    let chunks = row.chunks_exact(MANY_LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, logit);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}

/// Returns the index of the first logit that equals `wanted`.
pub fn first(row: &[f32], wanted: f32) -> Option<usize> {
    let is_in = |part: &[f32]| part.iter().fold(false, |found, &logit| found | (logit == wanted));
    let part = row.chunks(MANY_LANES).position(is_in)? * MANY_LANES;
    row[part..].iter().position(|&logit| logit == wanted).map(|place| part + place)
}

/// Returns the sum of e^(logit - max).
pub fn sum_of_powers(row: &[f32], max: f32) -> f64 {
    let mut lanes = [0.0; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest: f64 = chunks.remainder().iter().map(|&logit| exp(logit - max) as f64).sum();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane += exp(logit - max) as f64;
        }
    }
    lanes.iter().sum::<f64>() + rest
}

/// Returns e^x for x <= 0, to the precision of f32. Returns 0 for x below -87, which is negligible
/// in every sum.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const MIN_EXPONENT: f32 = -87.0;
    // Adding it rounds to the nearest integer, which is then in the lowest bits.
    const ROUNDER: f32 = 12_582_912.0; // 1.5 * 2^23
    // ln 2 in two parts: products of the first part with small integers are exact.
    const LN2_HIGH: f32 = 0.693_359_4; // 355 / 512
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let rounded = x.max(MIN_EXPONENT) * std::f32::consts::LOG2_E + ROUNDER;
    let n = rounded - ROUNDER;
    let r = x.max(MIN_EXPONENT) - n * LN2_HIGH - n * LN2_LOW;
    // The Taylor series of e^r, for |r| <= ln 2 / 2.
    let series = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let power = series.iter().fold(1.0 / 5040.0, |sum, coefficient| sum * r + coefficient);
    // 2^n, assembled from its bits.
    let scale = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    if x < MIN_EXPONENT { 0.0 } else { power * scale }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_accurate_to_the_last_two_bits() {
        assert_eq!(exp(0.0), 1.0);
        for i in 0..=870_000 {
            let x = -(i as f32) / 10_000.0;
            let expected = libm::exp(x as f64);
            let error = (exp(x) as f64 - expected).abs() / expected;
            assert!(error < 2.4e-7, "e^{x} is off by {error}");
        }
        for x in [-87.1, -1e10, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(exp(x), 0.0, "{x}");
        }
    }

    #[test]
    fn rows_of_any_length_are_read_completely() {
        for len in 0..80 {
            let row: Vec<f32> = (0..len).map(|i| i as f32 / 8.0).collect();
            assert_eq!(largest(&row), row.last().copied().unwrap_or(f32::NEG_INFINITY));
            assert!(
                row.iter()
                    .enumerate()
                    .all(|(place, &x)| first(&row, x) == Some(place) && first(&[&row[..], &[x]].concat(), x) == Some(place))
            );
            assert_eq!(first(&row, -1.0), None);
            let expected: f64 = row.iter().map(|&x| libm::exp(x as f64 - 10.0)).sum();
            assert!((sum_of_powers(&row, 10.0) - expected).abs() < 1e-6);
            assert!(are_logits(&row));
            assert_eq!(reaches(&row, (len as f32 - 1.0) / 8.0), len > 0);
            assert!(!reaches(&row, len as f32 / 8.0));
            for bad in [f32::NAN, f32::INFINITY] {
                assert!(!are_logits(&[&row[..], &[bad]].concat()));
            }
        }
        assert!(are_logits(&[f32::NEG_INFINITY; 9]));
    }
}
