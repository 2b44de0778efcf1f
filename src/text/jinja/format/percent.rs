//! `text % values`

use super::super::arguments::{size, width};
use super::super::budget::Builder;
use super::super::failure::{Result, fail};
use super::super::objects::Objects;
use super::super::value::Value;
use super::super::{number, repr};
use super::{NumberStyle, float_digits, int_digits, limited};

/// Formats `format % values`.
pub fn format(objects: &mut Objects, format: &str, values: &Value) -> Result<Builder> {
    let budget = objects.budget.clone();
    budget.scan(format.len())?;
    let positional = match values {
        Value::Tuple(items) => items,
        value => std::slice::from_ref(value),
    };
    let mut formatter = Formatter { objects, rest: format, values, positional, next: 0, named: false, out: Builder::new(&budget) };
    while let Some(at) = formatter.rest.find('%') {
        let (text, rest) = formatter.rest.split_at(at);
        formatter.out.push(text)?;
        formatter.rest = &rest[1..];
        formatter.conversion()?;
    }
    let rest = formatter.rest;
    formatter.out.push(rest)?;
    // A value with items by key or index may be a mapping that the format does not use.
    let is_mapping = matches!(values, Value::Dict(_) | Value::List(_) | Value::Range(_) | Value::Undefined(_));
    let uses_mapping = formatter.named || is_mapping;
    if formatter.next < formatter.positional.len() && !uses_mapping {
        return fail("not all arguments converted during string formatting");
    }
    Ok(formatter.out)
}

struct Formatter<'a> {
    objects: &'a Objects,
    rest: &'a str,
    values: &'a Value,
    positional: &'a [Value],
    next: usize,
    named: bool,
    out: Builder,
}

#[derive(Default)]
struct Flags {
    left: bool,
    plus: bool,
    space: bool,
    zero: bool,
    alternate: bool,
}

impl Formatter<'_> {
    fn next_value(&mut self) -> Result<Value> {
        self.next += 1;
        match self.positional.get(self.next - 1) {
            Some(value) => Ok(value.clone()),
            None => fail("not enough arguments for format string"),
        }
    }

    fn skip(&mut self) -> Option<char> {
        let c = self.rest.chars().next()?;
        self.rest = &self.rest[c.len_utf8()..];
        Some(c)
    }

    fn conversion(&mut self) -> Result<()> {
        self.objects.budget.step()?;
        let named = self.mapping_key()?;
        let mut flags = Flags::default();
        while let Some(c) = self.rest.chars().next().filter(|c| "-+ 0#".contains(*c)) {
            self.skip();
            match c {
                '-' => flags.left = true,
                '+' => flags.plus = true,
                ' ' => flags.space = true,
                '0' => flags.zero = true,
                _ => flags.alternate = true,
            }
        }
        let count = self.count()?.unwrap_or(0);
        flags.left |= count < 0;
        let width = width(count.saturating_abs())?;
        let mut precision = None;
        if let Some(rest) = self.rest.strip_prefix('.') {
            self.rest = rest;
            precision = Some(size(self.count()?.unwrap_or(0)));
        }
        self.rest = self.rest.strip_prefix(['h', 'l', 'L']).unwrap_or(self.rest);
        let Some(kind) = self.skip() else { return fail("incomplete format") };
        if kind == '%' {
            return self.out.push("%");
        }
        let value = match named {
            Some(value) => value,
            None => self.next_value()?,
        };
        self.convert(kind, &value, &flags, width, precision)
    }

    fn mapping_key(&mut self) -> Result<Option<Value>> {
        let Some(rest) = self.rest.strip_prefix('(') else { return Ok(None) };
        let mut depth = 1;
        let end = rest.find(|c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            depth == 0
        });
        let Some(end) = end else { return fail("incomplete format key") };
        let Value::Dict(dict) = self.values else { return fail("format requires a mapping") };
        let Some(value) = dict.get_str(&rest[..end]) else { return fail(format_args!("KeyError: '{}'", &rest[..end])) };
        (self.rest, self.named) = (&rest[end + 1..], true);
        Ok(Some(value.clone()))
    }

    /// Reads a width or a precision: a number, or `*` for the next value.
    fn count(&mut self) -> Result<Option<i128>> {
        if let Some(rest) = self.rest.strip_prefix('*') {
            self.rest = rest;
            let value = self.next_value()?;
            return value.as_int().map_or_else(|| fail("* wants int"), |number| Ok(Some(number)));
        }
        let len = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(len);
        self.rest = rest;
        if len == 0 {
            return Ok(None);
        }
        digits.parse().map_or_else(|_| fail("width or precision too big"), |number| Ok(Some(number)))
    }

    fn convert(&mut self, kind: char, value: &Value, flags: &Flags, width: usize, precision: Option<usize>) -> Result<()> {
        let budget = &self.objects.budget;
        let (sign, body, numeric) = match kind {
            's' | 'r' | 'a' => {
                let text = match kind {
                    's' => repr::to_str(budget, self.objects, value)?,
                    'r' => repr::to_repr(budget, self.objects, value)?,
                    _ => repr::to_ascii(budget, self.objects, value)?,
                };
                budget.scan(text.len())?;
                let kept = precision.map_or(text.len(), |max| text.char_indices().nth(max).map_or(text.len(), |(at, _)| at));
                return self.pad("", &text[..kept], false, flags, width);
            }
            'c' => (String::new(), character(value)?, false),
            'd' | 'i' | 'u' | 'o' | 'x' | 'X' => {
                let number = match value.defined()? {
                    Value::Float(number) if "diu".contains(kind) => number::truncate(*number)?,
                    value => match value.as_int() {
                        Some(number) => number,
                        None => return fail(format_args!("%{kind} format: a number is required, not {}", value.type_name())),
                    },
                };
                let (digits, prefix) = int_digits(number, kind, flags.alternate);
                let zeros = "0".repeat(limited(precision.unwrap_or(0))?.saturating_sub(digits.len()));
                (sign_of(number < 0, flags) + prefix, zeros + &digits, true)
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
                let Some(number) = value.defined()?.as_float() else {
                    return fail(format_args!("must be real number, not {}", value.type_name()));
                };
                let precision = Some(limited(precision.unwrap_or(6))?);
                let style = NumberStyle { kind: Some(kind), precision, alternate: flags.alternate };
                (sign_of(number.is_sign_negative() && !number.is_nan(), flags), float_digits(number, style), true)
            }
            kind => return fail(format_args!("unsupported format character '{kind}'")),
        };
        self.pad(&sign, &body, numeric, flags, width)
    }

    fn pad(&mut self, sign: &str, body: &str, numeric: bool, flags: &Flags, width: usize) -> Result<()> {
        let padding = width.saturating_sub(sign.chars().count() + body.chars().count());
        let zeros = flags.zero && numeric && !flags.left;
        if !flags.left && !zeros {
            self.out.repeat(" ", padding)?;
        }
        self.out.push(sign)?;
        if zeros {
            self.out.repeat("0", padding)?;
        }
        self.out.push(body)?;
        self.out.repeat(" ", if flags.left { padding } else { 0 })
    }
}

fn sign_of(negative: bool, flags: &Flags) -> String {
    match (negative, flags.plus, flags.space) {
        (true, ..) => "-",
        (false, true, _) => "+",
        (false, false, true) => " ",
        _ => "",
    }
    .into()
}

fn character(value: &Value) -> Result<String> {
    let c = match value {
        Value::Str(text) if text.as_str().chars().count() == 1 => text.as_str().chars().next(),
        value => value.as_int().and_then(|code| u32::try_from(code).ok()).and_then(char::from_u32),
    };
    c.map_or_else(|| fail("%c requires int or char"), |c| Ok(c.to_string()))
}
