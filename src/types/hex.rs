//! Bytes as text.

use std::fmt;

/// Displays bytes as hexadecimal digits.
pub struct Hex<'a>(pub &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_has_two_digits() {
        assert_eq!(Hex(&[0, 7, 255, 16]).to_string(), "0007ff10");
        assert_eq!(Hex(&[]).to_string(), "");
    }
}
