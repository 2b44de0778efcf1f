//! Rows of weights in fp8: OCP E4M3, with one f32 scale per row.

use crate::backend::e4m3::E4m3;

/// Rows below are quantized to 0, because the inverse of their scale would overflow.
const MIN_MAGNITUDE: f32 = 1e-30;

/// Stores a row and returns its scale. None: a number is not finite.
pub fn store_row(row: &[f32], out: &mut [u8]) -> Option<f32> {
    // Compared as bits: magnitudes keep their order, and non-finite numbers are the greatest.
    let max_abs = f32::from_bits(row.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0));
    if !max_abs.is_finite() {
        return None;
    }
    let (scale, inverse) = if max_abs < MIN_MAGNITUDE { (0.0, 0.0) } else { (max_abs / E4m3::MAX, E4m3::MAX / max_abs) };
    for (x, out) in row.iter().zip(out) {
        *out = E4m3::nearest(x * inverse).0;
    }
    Some(scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_accurate_to_three_bits_of_fraction() {
        let row: Vec<f32> = (0..200).map(|i| (i as f32 - 90.5) * 3e-4).collect();
        let mut bytes = [0; 200];
        let scale = store_row(&row, &mut bytes).unwrap();
        assert_eq!(scale, 108.5 * 3e-4 / 448.0);
        for (x, byte) in row.iter().zip(bytes) {
            let error = (f64::from(*x) - f64::from(E4m3(byte).to_f32()) * f64::from(scale)).abs();
            assert!(error <= f64::from(x.abs() / 16.0).max(f64::from(scale) / 1024.0) * 1.000001, "{x}: error {error}");
        }
    }

    #[test]
    fn rows_of_zeros_have_a_zero_scale_and_rows_that_are_not_finite_are_refused() {
        let mut bytes = [9; 3];
        assert_eq!((store_row(&[0.0, -0.0, 1e-31], &mut bytes), bytes), (Some(0.0), [0, 0x80, 0]));
        assert_eq!(store_row(&[f32::MAX, 0.0, f32::MIN], &mut bytes), Some(f32::MAX / 448.0));
        assert_eq!(bytes, [0x7e, 0, 0xfe]);
        for none in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(store_row(&[0.0, none, 1.0], &mut bytes), None);
        }
    }
}
