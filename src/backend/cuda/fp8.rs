//! Rows of weights in fp8: OCP's E4M3, as `kernels/fp8.cuh` tells, each row with a scale in f32.

const MOST: f32 = 448.0;
/// Below it everything is 0: its scale would have no inverse.
const LEAST: f32 = 1e-30;

/// Stores a row, and returns its scale. None: a number is infinite or none.
pub fn store_row(row: &[f32], out: &mut [u8]) -> Option<f32> {
    // Bits of magnitudes have the order of these; what is not finite has the greatest.
    let most = f32::from_bits(row.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0));
    if !most.is_finite() {
        return None;
    }
    let (scale, inverse) = if most < LEAST { (0.0, 0.0) } else { (most / MOST, MOST / most) };
    for (x, out) in row.iter().zip(out) {
        *out = nearest(x * inverse);
    }
    Some(scale)
}

/// The nearest number there is, of two the even one. What is beyond the most becomes that.
fn nearest(x: f32) -> u8 {
    let size = x.abs().min(MOST);
    let bits = size.to_bits();
    let normal = (bits + 0x7_ffff + (bits >> 20 & 1)).wrapping_sub(120 << 23) >> 20;
    // Below 2^-6 there are multiples of 2^-9, to which the addition rounds.
    let small = (size + 16384.0).to_bits() - 16384f32.to_bits();
    let number = if size < 1.0 / 64.0 { small } else { normal };
    (x.to_bits() >> 24 & 0x80 | number) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the format says of each byte.
    fn value(byte: u8) -> f64 {
        let (exponent, fraction) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
        let size = if exponent == 0 { fraction / 8.0 * 2f64.powi(-6) } else { (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7) };
        if byte >> 7 == 1 { -size } else { size }
    }

    #[test]
    fn every_number_is_stored_as_itself_and_what_lies_between_two_as_the_nearer() {
        for byte in (0..=255u8).filter(|byte| byte & 0x7f != 0x7f) {
            assert_eq!(nearest(value(byte) as f32), byte);
            let next = value(byte + 1);
            if byte & 0x7f < 0x7e {
                let (middle, even) = ((value(byte) + next) / 2.0, byte + byte % 2);
                assert_eq!(nearest(middle as f32), even, "between {} and {next}", value(byte));
                assert_eq!(nearest((middle * (1.0 - 1e-6)) as f32), byte);
                assert_eq!(nearest((middle * (1.0 + 1e-6)) as f32), byte + 1);
            }
        }
        assert_eq!([nearest(449.0), nearest(-1e30)], [0x7e, 0xfe]);
    }

    #[test]
    fn a_row_is_as_near_as_three_bits_of_fraction_are() {
        let row: Vec<f32> = (0..200).map(|i| (i as f32 - 90.5) * 3e-4).collect();
        let mut bytes = [0; 200];
        let scale = store_row(&row, &mut bytes).unwrap();
        assert_eq!(scale, 108.5 * 3e-4 / 448.0);
        for (x, byte) in row.iter().zip(bytes) {
            let missed = (f64::from(*x) - value(byte) * f64::from(scale)).abs();
            assert!(missed <= f64::from(x.abs() / 16.0).max(f64::from(scale) / 1024.0) * 1.000001, "{x} by {missed}");
        }
    }

    #[test]
    fn rows_of_nothing_have_no_scale_and_rows_of_no_numbers_are_refused() {
        let mut bytes = [9; 3];
        assert_eq!((store_row(&[0.0, -0.0, 1e-31], &mut bytes), bytes), (Some(0.0), [0, 0x80, 0]));
        assert_eq!(store_row(&[f32::MAX, 0.0, f32::MIN], &mut bytes), Some(f32::MAX / 448.0));
        assert_eq!(bytes, [0x7e, 0, 0xfe]);
        for none in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(store_row(&[0.0, none, 1.0], &mut bytes), None);
        }
    }
}
