//! Filters of numbers.

use super::super::arguments::{Args, integer};
use super::super::context::Context;
use super::super::failure::{Result, fail};
use super::super::number;
use super::super::value::Value;
use super::flag;

pub fn apply(context: &mut dyn Context, name: &str, value: &Value, args: &Args) -> Result<Value> {
    match name {
        "abs" => {
            args.none(name)?;
            match (value.defined()?.as_int(), value) {
                (Some(number), _) => Ok(Value::Int(number.saturating_abs())),
                (None, Value::Float(number)) => Ok(Value::Float(number.abs())),
                _ => fail(format_args!("bad operand type for abs(): '{}'", value.type_name())),
            }
        }
        "round" => round(value, args),
        "int" => int(value, args),
        "float" => {
            let [default] = args.bind(name, ["default"], 0)?;
            let number = match value.defined()? {
                Value::Str(text) => number::parse_float(text.as_str()),
                value => value.as_float(),
            };
            Ok(number.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float))
        }
        _ => filesize(context, value, args),
    }
}

fn round(value: &Value, args: &Args) -> Result<Value> {
    let [precision, method] = args.bind("round", ["precision", "method"], 0)?;
    let precision = precision.map_or(Ok(0), |precision| integer(&precision))?;
    let method = method.as_ref().map_or(Some("common"), Value::as_str).unwrap_or("");
    if !["common", "ceil", "floor"].contains(&method) {
        return fail("method must be common, ceil or floor");
    }
    let Some(number) = value.defined()?.as_float() else {
        return fail(format_args!("type {} doesn't define __round__ method", value.type_name()));
    };
    if method == "common" {
        return match value.as_int() {
            Some(number) => number::round_int(number, precision).map(Value::Int),
            None => Ok(Value::Float(number::round(number, precision))),
        };
    }
    let scale = 10f64.powi(precision.clamp(-400, 400) as i32);
    let scaled = number * scale;
    let rounded = if method == "ceil" { scaled.ceil() } else { scaled.floor() };
    number::truncate(rounded)?;
    // An integer has no negative zero.
    Ok(Value::Float((rounded + 0.0) / scale))
}

fn int(value: &Value, args: &Args) -> Result<Value> {
    let [default, base] = args.bind("int", ["default", "base"], 0)?;
    let base = base.map_or(Ok(10), |base| integer(&base))?;
    let number = match value.defined()? {
        Value::Str(text) => {
            let whole = u32::try_from(base).ok().and_then(|base| number::parse_int(text.as_str(), base));
            whole.or_else(|| number::parse_float(text.as_str()).and_then(|number| number::truncate(number).ok()))
        }
        Value::Float(number) if number.is_nan() => None,
        Value::Float(number) => Some(number::truncate(*number)?),
        value => value.as_int(),
    };
    Ok(number.map_or_else(|| default.unwrap_or(Value::Int(0)), Value::Int))
}

/// Returns a size such as `13 kB` or `4.1 MB`.
fn filesize(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [binary] = args.bind("filesizeformat", ["binary"], 0)?;
    let binary = flag(binary);
    let number = match value.defined()? {
        Value::Str(text) => number::parse_float(text.as_str()),
        value => value.as_float(),
    };
    let Some(bytes) = number else { return fail("could not convert the value to a float") };
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    let budget = context.budget();
    if bytes == 1.0 {
        return budget.text("1 Byte");
    }
    if bytes < base {
        return budget.text(&format!("{} Bytes", number::truncate(bytes)?));
    }
    let prefixes =
        if binary { ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"] } else { ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"] };
    let fits = |i: &usize| bytes < base.powi(*i as i32 + 2);
    let i = (0..prefixes.len()).find(fits).unwrap_or(prefixes.len() - 1);
    budget.text(&format!("{:.1} {}", base * bytes / base.powi(i as i32 + 2), prefixes[i]))
}
