//! `text.format(...)` and format specifications.

use super::super::arguments::{self, Args};
use super::super::attributes;
use super::super::budget::Builder;
use super::super::context::Context;
use super::super::failure::{Failure, Result, fail};
use super::super::repr;
use super::super::value::Value;
use super::{NumberStyle, float_digits, int_digits, limited};

/// Returns `format.format(*args)`. `mapping` has the keywords of `format_map`.
pub fn format(context: &mut dyn Context, format: &str, args: &Args, mapping: Option<&Value>) -> Result<Value> {
    let mut formatter = Formatter { context, args, mapping, automatic: 0, manual: false };
    formatter.format(format, 3)?.into_text(false)
}

struct Formatter<'a, 'b> {
    context: &'a mut dyn Context,
    args: &'b Args,
    mapping: Option<&'b Value>,
    /// The next argument of a field without a number.
    automatic: usize,
    manual: bool,
}

impl Formatter<'_, '_> {
    fn format(&mut self, format: &str, depth: usize) -> Result<Builder> {
        if depth == 0 {
            return fail("max string recursion exceeded");
        }
        let budget = self.context.budget();
        let mut out = Builder::new(&budget);
        let mut rest = format;
        while let Some(at) = rest.find(['{', '}']) {
            budget.step()?;
            out.push(&rest[..at])?;
            let brace = &rest[at..at + 1];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                out.push(brace)?;
                rest = after;
            } else if brace == "}" {
                return fail("single '}' encountered in format string");
            } else {
                let end = field_end(rest)?;
                out.push(&self.field(&rest[..end], depth)?)?;
                rest = &rest[end + 1..];
            }
        }
        out.push(rest)?;
        Ok(out)
    }

    /// Formats one field, without its braces: `name!conversion:specification`.
    fn field(&mut self, field: &str, depth: usize) -> Result<Builder> {
        let name_end = name_end(field);
        let (name, rest) = field.split_at(name_end);
        let (conversion, spec) = match rest.strip_prefix('!') {
            Some(rest) => {
                let Some(conversion) = rest.chars().next() else { return fail("end of string while looking for conversion specifier") };
                match &rest[conversion.len_utf8()..] {
                    "" => (Some(conversion), ""),
                    rest => match rest.strip_prefix(':') {
                        Some(spec) => (Some(conversion), spec),
                        None => return fail("expected ':' after conversion specifier"),
                    },
                }
            }
            None => (None, rest.strip_prefix(':').unwrap_or("")),
        };
        let value = self.value(name)?;
        let spec = self.format(spec, depth - 1)?;
        let budget = self.context.budget();
        let objects = &self.context.objects();
        match conversion {
            None => format_value(self.context, &value, &spec),
            Some('s') => format_text(&self.context.str(&value)?, &spec, &budget),
            Some('r') => format_text(&repr::to_repr(&budget, objects, &value)?, &spec, &budget),
            Some('a') => format_text(&repr::to_ascii(&budget, objects, &value)?, &spec, &budget),
            Some(other) => fail(format_args!("unknown conversion specifier {other}")),
        }
    }

    /// Returns the value of `first.attribute[item]`.
    fn value(&mut self, name: &str) -> Result<Value> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(end);
        let mut value = self.first(first)?;
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('.') {
                let end = after.find(['.', '[']).unwrap_or(after.len());
                if end == 0 {
                    return fail("empty attribute in format string");
                }
                value = attributes::attribute(self.context, &value, &after[..end])?;
                rest = &after[end..];
            } else {
                let Some((index, after)) = rest[1..].split_once(']').filter(|(index, _)| rest.starts_with('[') && !index.is_empty()) else {
                    return fail("missing ']' in format string");
                };
                let index = match index.parse::<i128>() {
                    Ok(number) if index.bytes().all(|c| c.is_ascii_digit()) => Value::Int(number),
                    _ => self.context.budget().text(index)?,
                };
                value = attributes::item(self.context, &value, &index)?;
                rest = after;
            }
        }
        Ok(value)
    }

    fn first(&mut self, name: &str) -> Result<Value> {
        let number = name.bytes().all(|c| c.is_ascii_digit());
        if number && (name.is_empty() == self.manual) && (self.automatic > 0 || self.manual) {
            return fail("cannot switch between manual and automatic field numbering");
        }
        if number {
            let index = if name.is_empty() { self.automatic } else { name.parse().unwrap_or(usize::MAX) };
            self.automatic += usize::from(name.is_empty());
            self.manual |= !name.is_empty();
            let value = self.args.positional.get(index).cloned();
            return value.map_or_else(|| fail(format_args!("replacement index {index} out of range for positional args tuple")), Ok);
        }
        let found = match self.mapping {
            Some(Value::Dict(dict)) => dict.get_str(name).cloned(),
            Some(_) => None,
            None => {
                self.context.objects().budget.steps(self.args.named.len() / 16)?;
                self.args.named.iter().find(|(known, _)| known.as_str() == name).map(|(_, value)| value.clone())
            }
        };
        found.map_or_else(|| fail(format_args!("KeyError: '{name}'")), Ok)
    }
}

/// Returns the index of the closing brace of the field at the start of `text`.
fn field_end(text: &str) -> Result<usize> {
    let (mut depth, mut bracket) = (0, false);
    for (at, c) in text.char_indices() {
        match c {
            '[' if depth == 0 => bracket = true,
            ']' => bracket = false,
            '{' if !bracket => depth += 1,
            '}' if !bracket && depth == 0 => return Ok(at),
            '}' if !bracket => depth -= 1,
            _ => {}
        }
    }
    fail("expected '}' before end of string")
}

/// Returns the end of a field's name: the first `!` or `:` outside of brackets.
fn name_end(field: &str) -> usize {
    let mut bracket = false;
    let end = field.find(|c| {
        bracket = (bracket || c == '[') && c != ']';
        !bracket && (c == '!' || c == ':')
    });
    end.unwrap_or(field.len())
}

/// Maximum size of a format specification in bytes. Useful ones are shorter.
const MAX_SPEC: usize = 256;

#[derive(Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    zero: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

fn parse_spec(text: &str) -> Result<Spec> {
    if text.len() > MAX_SPEC {
        let len = text.len();
        return Err(Failure::limit(format_args!("a format specification is too long ({len} bytes, at most {MAX_SPEC}); shorten it")));
    }
    let chars: Vec<char> = text.chars().collect();
    let is_align = |i: usize| chars.get(i).is_some_and(|c| "<>=^".contains(*c));
    let mut spec = Spec::default();
    let mut at = 0;
    if is_align(1) {
        (spec.fill, spec.align, at) = (Some(chars[0]), Some(chars[1]), 2);
    } else if is_align(0) {
        (spec.align, at) = (Some(chars[0]), 1);
    }
    let take = |wanted: &str, at: &mut usize| {
        let found = chars.get(*at).copied().filter(|c| wanted.contains(*c));
        *at += usize::from(found.is_some());
        found
    };
    spec.sign = take("+- ", &mut at);
    take("z", &mut at);
    spec.alternate = take("#", &mut at).is_some();
    spec.zero = take("0", &mut at).is_some();
    let number = |at: &mut usize| -> Result<Option<usize>> {
        let digits: String = chars[*at..].iter().take_while(|c| c.is_ascii_digit()).collect();
        *at += digits.len();
        if digits.is_empty() {
            return Ok(None);
        }
        digits.parse().map_or_else(|_| fail("too many decimal digits in format string"), |number| Ok(Some(number)))
    };
    spec.width = arguments::width(number(&mut at)?.map_or(0, |width| width as i128))?;
    if let Some(grouping) = chars.get(at).copied().filter(|c| ",_".contains(*c)) {
        (spec.grouping, at) = (Some(grouping), at + 1);
    }
    if chars.get(at) == Some(&'.') {
        at += 1;
        spec.precision = number(&mut at)?;
        if spec.precision.is_none() {
            return fail("format specifier missing precision");
        }
    }
    match chars[at.min(chars.len())..] {
        [] => {}
        [kind] => spec.kind = Some(kind),
        _ => return fail("invalid format specifier"),
    }
    Ok(spec)
}

/// Returns `format(value, spec)`.
fn format_value(context: &dyn Context, value: &Value, spec: &str) -> Result<Builder> {
    let budget = context.budget();
    match value {
        Value::Str(text) => format_text(text.as_str(), spec, &budget),
        value if spec.is_empty() => context.str(value),
        Value::Int(number) => format_int(*number, &parse_spec(spec)?, &budget),
        Value::Bool(flag) => format_int(*flag as i128, &parse_spec(spec)?, &budget),
        Value::Float(number) => format_float(*number, &parse_spec(spec)?, &budget),
        value => fail(format_args!("unsupported format string passed to {}.__format__", value.type_name())),
    }
}

type Shared = std::rc::Rc<super::super::budget::RenderBudget>;

fn format_text(text: &str, spec: &str, budget: &Shared) -> Result<Builder> {
    budget.scan(text.len())?;
    let spec = parse_spec(spec)?;
    if spec.kind.is_some_and(|kind| kind != 's')
        || spec.sign.is_some()
        || spec.alternate
        || spec.grouping.is_some()
        || spec.align == Some('=')
    {
        return fail("the format specifier is not allowed for a string");
    }
    let kept = spec.precision.map_or(text.len(), |max| text.char_indices().nth(max).map_or(text.len(), |(at, _)| at));
    let fill = spec.fill.unwrap_or(if spec.zero { '0' } else { ' ' });
    pad("", &text[..kept], spec.align.unwrap_or('<'), fill, spec.width, budget)
}

fn format_int(number: i128, spec: &Spec, budget: &Shared) -> Result<Builder> {
    let kind = spec.kind.unwrap_or('d');
    match kind {
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%' => return format_float(number as f64, spec, budget),
        'b' | 'c' | 'd' | 'n' | 'o' | 'x' | 'X' => {}
        kind => return fail(format_args!("unknown format code '{kind}' for object of type 'int'")),
    }
    if spec.precision.is_some() {
        return fail("precision not allowed in integer format specifier");
    }
    if kind == 'c' {
        let Some(c) = u32::try_from(number).ok().and_then(char::from_u32) else { return fail("%c arg not in range(0x110000)") };
        return pad("", &c.to_string(), spec.align.unwrap_or('<'), spec.fill.unwrap_or(' '), spec.width, budget);
    }
    let (digits, prefix) = int_digits(number, kind, spec.alternate);
    let size = if "dn".contains(kind) { 3 } else { 4 };
    if spec.grouping == Some(',') && size == 4 {
        return fail(format_args!("cannot specify ',' with '{kind}'"));
    }
    finish_number(number < 0, prefix, &digits, "", size, spec, budget)
}

fn format_float(number: f64, spec: &Spec, budget: &Shared) -> Result<Builder> {
    let (kind, percent) = match spec.kind {
        Some('%') => (Some('f'), "%"),
        Some('n') => (Some('g'), ""),
        Some(kind) if !"eEfFgG".contains(kind) => return fail(format_args!("unknown format code '{kind}' for object of type 'float'")),
        kind => (kind, ""),
    };
    let scaled = if percent.is_empty() { number } else { number * 100.0 };
    let style = NumberStyle { kind, precision: spec.precision.map(limited).transpose()?, alternate: spec.alternate };
    let text = float_digits(scaled, style);
    let whole = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (whole, rest) = text.split_at(whole);
    finish_number(number.is_sign_negative() && !number.is_nan(), "", whole, &format!("{rest}{percent}"), 3, spec, budget)
}

fn finish_number(negative: bool, prefix: &str, whole: &str, rest: &str, group: usize, spec: &Spec, budget: &Shared) -> Result<Builder> {
    let sign = match (negative, spec.sign) {
        (true, _) => "-",
        (false, Some('+')) => "+",
        (false, Some(' ')) => " ",
        _ => "",
    };
    let sign = format!("{sign}{prefix}");
    let align = spec.align.unwrap_or(if spec.zero { '=' } else { '>' });
    let fill = spec.fill.unwrap_or(if spec.zero { '0' } else { ' ' });
    let mut digits = whole.to_string();
    if let Some(separator) = spec.grouping.filter(|_| !whole.is_empty()) {
        digits = grouped(whole, separator, group);
        if align == '=' && fill == '0' {
            let _scratch = budget.lease(4 * spec.width)?;
            // Zeros are grouped too, and may exceed the width by one.
            let free = spec.width.saturating_sub(sign.len() + rest.len());
            let mut zeros = "0".repeat((free * group / (group + 1)).saturating_sub(whole.len())) + whole;
            digits = grouped(&zeros, separator, group);
            while sign.len() + digits.len() + rest.len() < spec.width {
                zeros.insert(0, '0');
                digits = grouped(&zeros, separator, group);
                budget.work(digits.len())?;
            }
        }
    }
    pad(&sign, &format!("{digits}{rest}"), align, fill, spec.width, budget)
}

fn grouped(digits: &str, separator: char, group: usize) -> String {
    let mut out = String::with_capacity(digits.len() * 4 / 3 + 1);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(group) {
            out.push(separator);
        }
        out.push(c);
    }
    out
}

fn pad(sign: &str, body: &str, align: char, fill: char, width: usize, budget: &Shared) -> Result<Builder> {
    let padding = width.saturating_sub(sign.chars().count() + body.chars().count());
    let (left, inner, right) = match align {
        '<' => (0, 0, padding),
        '^' => (padding / 2, 0, padding - padding / 2),
        '=' => (0, padding, 0),
        _ => (padding, 0, 0),
    };
    let fill = fill.to_string();
    let mut out = Builder::new(budget);
    out.repeat(&fill, left)?;
    out.push(sign)?;
    out.repeat(&fill, inner)?;
    out.push(body)?;
    out.repeat(&fill, right)?;
    Ok(out)
}
