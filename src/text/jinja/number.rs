//! Writes, rounds and combines numbers like Python.

use super::ast::Operator;
use super::failure::{Result, fail};
use super::value::Value;

/// Returns `repr(float)`: the shortest digits that round-trip, with an exponent from 1e16 on and
/// below 1e-4.
pub fn float_repr(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let text = format!("{number}");
    if text.contains('.') { text } else { text + ".0" }
}

/// Returns `json.dumps` of a float.
pub fn float_json(number: f64) -> String {
    match number {
        number if number.is_nan() => "NaN".into(),
        number if number.is_infinite() => if number > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        number => float_repr(number),
    }
}

/// Returns `round(number, digits)`, rounded to even if both neighbours are equally near.
pub fn round(number: f64, digits: i128) -> f64 {
    if !number.is_finite() || digits > 320 {
        return number;
    }
    if digits >= 0 {
        return format!("{number:.*}", digits as usize).parse().unwrap_or(number);
    }
    if digits < -310 {
        return 0.0 * number;
    }
    // The exact decimal digits determine the result, with the decimal point moved.
    let scientific = format!("{number:.0}");
    let (sign, whole) = scientific.strip_prefix('-').map_or(("", &scientific[..]), |whole| ("-", whole));
    let cut = (-digits) as usize;
    let padded = format!("{whole:0>width$}", width = cut + 1);
    let (kept, dropped) = padded.split_at(padded.len() - cut);
    let half = format!("5{}", "0".repeat(cut - 1));
    let is_exact = number.fract() == 0.0;
    let odd = kept.ends_with(['1', '3', '5', '7', '9']);
    let up = dropped > &half[..] || (dropped == half && (odd || !is_exact));
    let kept: f64 = kept.parse().unwrap_or(0.0);
    let rounded = kept + if up { 1.0 } else { 0.0 };
    format!("{sign}{rounded:.0}e{cut}").parse().unwrap_or(number)
}

/// Returns an integer rounded to a negative number of digits.
pub fn round_int(number: i128, digits: i128) -> Result<i128> {
    if digits >= 0 {
        return Ok(number);
    }
    let Some(unit) = digits.checked_neg().and_then(|digits| u32::try_from(digits).ok()).and_then(|digits| 10i128.checked_pow(digits))
    else {
        return Ok(0);
    };
    let (quotient, rest) = (number.div_euclid(unit), number.rem_euclid(unit));
    let up = rest > unit - rest || (rest == unit - rest && quotient % 2 != 0);
    (quotient + i128::from(up)).checked_mul(unit).map_or_else(too_large, Ok)
}

/// Returns `int(float)`.
pub fn truncate(number: f64) -> Result<i128> {
    if number.is_nan() || number.is_infinite() {
        return fail(format_args!("cannot convert float {} to integer", float_repr(number)));
    }
    if number.abs() < 1.7e38 { Ok(number as i128) } else { too_large() }
}

fn too_large<T>() -> Result<T> {
    fail("an integer is too large; at most 128 bits are supported")
}

/// Applies an operator to two numbers.
pub fn arithmetic(operator: Operator, left: &Value, right: &Value) -> Option<Result<Value>> {
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        return Some(integers(operator, a, b));
    }
    let (a, b) = left.as_float().zip(right.as_float())?;
    Some(floats(operator, a, b).map(Value::Float))
}

fn integers(operator: Operator, a: i128, b: i128) -> Result<Value> {
    let result = match operator {
        Operator::Add => a.checked_add(b),
        Operator::Subtract => a.checked_sub(b),
        Operator::Multiply => a.checked_mul(b),
        Operator::Divide if b == 0 => return fail("division by zero"),
        Operator::Divide => return Ok(Value::Float(divide(a, b))),
        Operator::FloorDivide | Operator::Modulo if b == 0 => return fail("integer division or modulo by zero"),
        Operator::FloorDivide => a.checked_div(b).map(|quotient| quotient - i128::from(a % b != 0 && (a < 0) != (b < 0))),
        Operator::Modulo => a.checked_rem(b).map(|rest| if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }),
        Operator::Power if b < 0 => return floats(Operator::Power, a as f64, b as f64).map(Value::Float),
        Operator::Power => power(a, b),
    };
    result.map_or_else(too_large, |number| Ok(Value::Int(number)))
}

fn power(a: i128, b: i128) -> Option<i128> {
    match a {
        0 | 1 => Some(if b == 0 { 1 } else { a }),
        -1 => Some(if b % 2 == 0 { 1 } else { -1 }),
        _ => a.checked_pow(u32::try_from(b).ok()?),
    }
}

/// Returns the quotient of two integers, rounded once if both are exact in a float.
fn divide(a: i128, b: i128) -> f64 {
    match a.checked_rem(b) {
        Some(0) if a == 0 && b < 0 => -0.0,
        Some(0) => (a / b) as f64,
        _ => a as f64 / b as f64,
    }
}

fn floats(operator: Operator, a: f64, b: f64) -> Result<f64> {
    let divides = matches!(operator, Operator::Divide | Operator::FloorDivide | Operator::Modulo);
    if divides && b == 0.0 {
        return fail(if operator == Operator::Divide { "float division by zero" } else { "float floor division by zero" });
    }
    Ok(match operator {
        Operator::Add => a + b,
        Operator::Subtract => a - b,
        Operator::Multiply => a * b,
        Operator::Divide => a / b,
        Operator::FloorDivide => floor_divide(a, b).0,
        Operator::Modulo => floor_divide(a, b).1,
        Operator::Power => {
            if a == 0.0 && b < 0.0 {
                return fail("0.0 cannot be raised to a negative power");
            }
            if a < 0.0 && b.fract() != 0.0 && a.is_finite() && b.is_finite() {
                return fail("complex numbers are not supported");
            }
            let result = a.powf(b);
            if result.is_infinite() && a.is_finite() && b.is_finite() {
                return fail("the result of ** is too large");
            }
            result
        }
    })
}

/// Returns Python's `divmod` of floats.
fn floor_divide(a: f64, b: f64) -> (f64, f64) {
    let mut rest = a % b;
    let mut quotient = (a - rest) / b;
    if rest == 0.0 {
        rest = 0f64.copysign(b);
    } else if (b < 0.0) != (rest < 0.0) {
        rest += b;
        quotient -= 1.0;
    }
    let floor = quotient.floor();
    let floor = if quotient == 0.0 {
        0f64.copysign(a / b)
    } else if quotient - floor > 0.5 {
        floor + 1.0
    } else {
        floor
    };
    (floor, rest)
}

/// Maximum length of a number in a text in bytes. Python's integers have at most as many digits.
const MAX_DIGITS: usize = 4_300;

/// Returns the text without white space around it, if it is not too long for a number.
fn trimmed(text: &str) -> Option<&str> {
    Some(text.trim_matches(super::unicode::is_space)).filter(|text| text.len() <= MAX_DIGITS)
}

/// Returns `int(text, base)`.
pub fn parse_int(text: &str, base: u32) -> Option<i128> {
    let text = trimmed(text)?;
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = digits.to_lowercase();
    let prefixed = [("0b", 2), ("0o", 8), ("0x", 16)].into_iter().find(|(prefix, _)| lower.starts_with(prefix));
    let (base, digits) = match (base, prefixed) {
        (0, Some((_, radix))) => (radix, &lower[2..]),
        (base, Some((_, radix))) if base == radix => (base, &lower[2..]),
        (0, None) if lower.len() > 1 && lower.starts_with('0') && lower.bytes().any(|c| c != b'0' && c != b'_') => return None,
        (0, None) => (10, &lower[..]),
        (base, _) => (base, &lower[..]),
    };
    let digits = if prefixed.is_some() { digits.strip_prefix('_').unwrap_or(digits) } else { digits };
    let valid = !digits.is_empty() && !digits.starts_with('_') && !digits.ends_with('_') && !digits.contains("__");
    if !valid || !(2..=36).contains(&base) {
        return None;
    }
    let mut number = 0i128;
    for c in digits.chars().filter(|&c| c != '_') {
        let digit = c.to_digit(base).or_else(|| decimal_digit(c).filter(|&digit| digit < base))?;
        number = number.checked_mul(base.into())?.checked_add(digit.into())?;
    }
    Some(if negative { -number } else { number })
}

/// Returns the value of a decimal digit of any script. The digits of a script are consecutive.
fn decimal_digit(c: char) -> Option<u32> {
    use super::unicode::is_decimal;
    if !is_decimal(c) {
        return None;
    }
    let mut zero = c as u32;
    while zero > 0 && c as u32 - zero < 9 && char::from_u32(zero - 1).is_some_and(is_decimal) {
        zero -= 1;
    }
    // Runs of several scripts begin at multiples of ten from their first digit.
    Some((c as u32 - zero) % 10)
}

/// Returns `float(text)`.
pub fn parse_float(text: &str) -> Option<f64> {
    let text = trimmed(text)?;
    let underscores = text.split('_').collect::<Vec<_>>();
    let between_digits =
        underscores.windows(2).all(|w| w[0].ends_with(|c: char| c.is_ascii_digit()) && w[1].starts_with(|c: char| c.is_ascii_digit()));
    if !between_digits {
        return None;
    }
    let text = underscores.concat();
    let unsigned = text.trim_start_matches(['+', '-']).to_ascii_lowercase();
    let named = ["inf", "infinity", "nan"].contains(&unsigned.as_str());
    let digits = unsigned.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if (named || digits) && text.len() - unsigned.len() <= 1 { text.parse().ok() } else { None }
}

/// Compares two numbers like Python's `<` and similar operators.
pub fn compare(left: &Value, right: &Value) -> Option<Option<std::cmp::Ordering>> {
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        return Some(Some(a.cmp(&b)));
    }
    let (a, b) = left.as_float().zip(right.as_float())?;
    Some(a.partial_cmp(&b))
}
