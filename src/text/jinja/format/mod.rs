//! Python's formatting: `str.format`, the `%` operator, and the numbers of both.

pub mod brace;
pub mod percent;

use super::failure::{Result, fail};
use super::number::float_repr;

/// The style of a number, without sign and padding.
#[derive(Debug, Clone, Copy, Default)]
pub struct NumberStyle {
    /// One of `e E f F g G`, or nothing for the shortest form that round-trips.
    pub kind: Option<char>,
    pub precision: Option<usize>,
    /// Keep the decimal point and trailing zeros.
    pub alternate: bool,
}

/// Maximum precision. Further digits of a float are zeros.
const MAX_PRECISION: usize = 1_100;

/// Returns the precision of a number, if it is not too large.
pub fn limited(precision: usize) -> Result<usize> {
    match precision <= MAX_PRECISION {
        true => Ok(precision),
        false => fail(format_args!("a precision is too large ({precision}, at most {MAX_PRECISION}); lower it")),
    }
}

/// Returns the absolute value of a float.
pub fn float_digits(number: f64, style: NumberStyle) -> String {
    let number = number.abs();
    let upper = style.kind.is_some_and(|kind| kind.is_ascii_uppercase());
    let text = match style.kind.map(|kind| kind.to_ascii_lowercase()) {
        _ if !number.is_finite() => float_repr(number),
        None if style.precision.is_none() => float_repr(number),
        Some('e') => with_exponent(number, style.precision.unwrap_or(6), style.alternate),
        Some('f') => {
            let text = format!("{number:.*}", style.precision.unwrap_or(6));
            if style.alternate && !text.contains('.') { text + "." } else { text }
        }
        kind => general(number, style, kind.is_none()),
    };
    if upper { text.to_uppercase() } else { text }
}

fn with_exponent(number: f64, precision: usize, alternate: bool) -> String {
    let text = format!("{number:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let point = if alternate && !digits.contains('.') { "." } else { "" };
    format!("{digits}{point}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// Formats like `g`, with the precision as number of significant digits. With `keeps_fraction`,
/// formats like the form without a type, which keeps `.0`.
fn general(number: f64, style: NumberStyle, keeps_fraction: bool) -> String {
    let precision = style.precision.unwrap_or(6).max(1);
    let text = format!("{number:.*e}", precision - 1);
    let exponent: i32 = text.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    let limit = precision as i32 - i32::from(keeps_fraction);
    if number != 0.0 && !(-4..limit).contains(&exponent) {
        let text = with_exponent(number, precision - 1, style.alternate);
        return match text.split_once('e') {
            Some((digits, exponent)) if !style.alternate => format!("{}e{exponent}", without_zeros(digits)),
            _ => text,
        };
    }
    let text = format!("{number:.*}", (precision as i32 - 1 - exponent).max(0) as usize);
    let text = match style.alternate {
        true if text.contains('.') => text,
        true => text + ".",
        false => without_zeros(&text).to_string(),
    };
    if keeps_fraction && !text.contains('.') { text + ".0" } else { text }
}

fn without_zeros(digits: &str) -> &str {
    if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits }
}

/// Returns the digits of an integer's absolute value, with the prefix of its base.
pub fn int_digits(number: i128, kind: char, alternate: bool) -> (String, &'static str) {
    let number = number.unsigned_abs();
    let (digits, prefix) = match kind {
        'b' => (format!("{number:b}"), "0b"),
        'o' => (format!("{number:o}"), "0o"),
        'x' => (format!("{number:x}"), "0x"),
        'X' => (format!("{number:X}"), "0X"),
        _ => (number.to_string(), ""),
    };
    (digits, if alternate { prefix } else { "" })
}
