//! 8-bit floating-point numbers in OCP E4M3: one sign bit, four exponent bits, three fraction bits.
//! Magnitudes range from 2^-9 to 448; there are no infinities.
//!
//! The code that OCP defines as NaN is never stored: the scale of a group carries non-finite
//! numbers. Decoding that code gives 480, on all CPU paths and devices.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct E4m3(pub u8);

impl E4m3 {
    pub const MAX: f32 = 448.0;

    /// Rounds to the nearest code, ties to even. Saturates at the largest magnitude. NaN becomes 0.
    #[inline(always)]
    pub fn nearest(x: f32) -> E4m3 {
        const MIN_NORMAL: f32 = 0.015625;
        // The spacing of f32 at this number equals the spacing of E4M3 subnormals.
        const LAST_PLACE: f32 = 16384.0;
        if x.is_nan() {
            return E4m3(0);
        }
        let size = x.abs().min(Self::MAX);
        let code = match size < MIN_NORMAL {
            true => (size + LAST_PLACE).to_bits() - LAST_PLACE.to_bits(),
            false => {
                let bits = size.to_bits() - (120 << 23); // difference of the exponent biases
                (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20
            }
        };
        E4m3(code as u8 | (x.to_bits() >> 24 & 0x80) as u8)
    }

    /// Decodes through f16. The exponent bias of f16 is larger by 8, so the same bits represent
    /// 2^-8 times the number.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        half::f16::from_bits((self.0 as i8 as u16) << 7 & 0xbfff).to_f32() * 256.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes a code by the definition of the format.
    fn value(code: u8) -> f32 {
        let (exponent, fraction) = ((code >> 3 & 15) as i32, (code & 7) as f32);
        let size = if exponent == 0 { fraction / 8.0 * 2f32.powi(-6) } else { (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7) };
        if code & 0x80 == 0 { size } else { -size }
    }

    #[test]
    fn each_code_decodes_to_its_value() {
        (0..=255).for_each(|code| assert_eq!(E4m3(code).to_f32().to_bits(), value(code).to_bits(), "{code}"));
    }

    #[test]
    fn a_number_rounds_to_the_nearest_code_and_a_tie_to_the_even_one() {
        for code in 0..0x7e {
            let (low, high) = (value(code), value(code + 1));
            let middle = (low + high) / 2.0; // exact
            let even = code + code % 2;
            for (x, expected) in [(low, code), (middle.next_down(), code), (middle, even), (middle.next_up(), code + 1), (high, code + 1)] {
                assert_eq!(E4m3::nearest(x), E4m3(expected), "{x}");
                assert_eq!(E4m3::nearest(-x), E4m3(expected | 0x80), "-{x}");
            }
        }
    }

    #[test]
    fn large_numbers_saturate_and_nan_becomes_zero() {
        for x in [448.0, 449.0, 464.0, 480.0, 1e30, f32::INFINITY] {
            assert_eq!((E4m3::nearest(x), E4m3::nearest(-x)), (E4m3(0x7e), E4m3(0xfe)), "{x}");
        }
        assert_eq!([f32::NAN, f32::MIN_POSITIVE, 0.0, 1e-45].map(E4m3::nearest), [E4m3(0); 4]);
        assert_eq!(E4m3::nearest(-0.0), E4m3(0x80));
    }
}
