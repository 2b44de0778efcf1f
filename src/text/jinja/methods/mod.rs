//! The methods of Python's strings, lists, tuples, dictionaries and numbers.

pub use text::{center, lines, replace, strip};

mod containers;
mod text;

use super::arguments::Args;
use super::context::Context;
use super::failure::{Result, fail};
use super::ops;
use super::value::{Object, Value};

pub const TEXT: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
pub const LIST: &[&str] = &["copy", "count", "index"];
pub const TUPLE: &[&str] = &["count", "index"];
pub const DICT: &[&str] = &["copy", "fromkeys", "get", "items", "keys", "values"];
pub const KEYS: &[&str] = &["isdisjoint"];
pub const INT: &[&str] = &["bit_count", "bit_length", "conjugate"];
pub const FLOAT: &[&str] = &["conjugate", "is_integer"];
pub const CYCLER: &[&str] = &["next", "reset"];
pub const LOOP: &[&str] = &["changed", "cycle"];

/// Returns the method of a value with this name.
pub fn find(value: &Value, name: &str) -> Option<&'static str> {
    let methods = match value {
        Value::Str(_) => TEXT,
        Value::List(_) => LIST,
        Value::Tuple(_) | Value::Range(_) => TUPLE,
        Value::Dict(_) => DICT,
        Value::View(..) => KEYS,
        Value::Int(_) | Value::Bool(_) => INT,
        Value::Float(_) => FLOAT,
        Value::Object(Object::Cycler, _) => CYCLER,
        Value::Object(Object::Loop, _) => LOOP,
        _ => return None,
    };
    methods.iter().find(|method| **method == name).copied()
}

/// Returns true if a method of this name changes the value, which the sandbox forbids.
pub fn is_mutating(value: &Value, name: &str) -> bool {
    match value {
        Value::List(_) => ["append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove"].contains(&name),
        Value::Dict(_) => ["clear", "pop", "popitem", "setdefault", "update"].contains(&name),
        _ => false,
    }
}

/// Returns `value.method(*args)`.
pub fn call(context: &mut dyn Context, value: &Value, method: &str, args: Args) -> Result<Value> {
    match value {
        Value::Str(text) => text::call(context, text, method, args),
        Value::List(_) | Value::Tuple(_) | Value::Range(_) => containers::sequence(context, value, method, &args),
        Value::Dict(dict) => containers::dict(context, dict, method, &args),
        Value::View(..) => containers::is_disjoint(context, value, &args),
        Value::Int(_) | Value::Bool(_) | Value::Float(_) => number(value, method, &args),
        Value::Object(Object::Cycler, index) => cycler(context, *index, method, &args),
        Value::Object(Object::Loop, index) => of_loop(context, *index, method, args),
        value => fail(format_args!("'{}' object has no method '{method}'", value.type_name())),
    }
}

fn number(value: &Value, method: &str, args: &Args) -> Result<Value> {
    args.none(method)?;
    Ok(match (method, value) {
        ("is_integer", Value::Float(number)) => Value::Bool(number.is_finite() && number.fract() == 0.0),
        ("conjugate", Value::Float(_)) => value.clone(),
        ("bit_length", value) => Value::Int(128 - value.as_int().unwrap_or(0).unsigned_abs().leading_zeros() as i128),
        ("bit_count", value) => Value::Int(value.as_int().unwrap_or(0).unsigned_abs().count_ones() as i128),
        (_, value) => Value::Int(value.as_int().unwrap_or(0)),
    })
}

fn cycler(context: &mut dyn Context, index: usize, method: &str, args: &Args) -> Result<Value> {
    args.none(method)?;
    let cycler = &mut context.objects_mut().cyclers[index];
    if method == "reset" {
        cycler.position = 0;
        return Ok(Value::None);
    }
    let current = cycler.items[cycler.position].clone();
    cycler.position = (cycler.position + 1) % cycler.items.len();
    Ok(current)
}

fn of_loop(context: &mut dyn Context, index: usize, method: &str, args: Args) -> Result<Value> {
    if !args.named.is_empty() {
        return fail(format_args!("loop.{method}() takes no keyword arguments"));
    }
    let state = &mut context.objects_mut().loops[index];
    if method == "cycle" {
        if args.positional.is_empty() {
            return fail("no items for cycling given");
        }
        let position = state.started.saturating_sub(1) % args.positional.len();
        return Ok(args.positional[position].clone());
    }
    let last = state.last_changed.take();
    let mut changed = last.as_ref().is_none_or(|last| last.len() != args.positional.len());
    for (a, b) in last.iter().flat_map(|last| last.iter()).zip(args.positional.iter()) {
        changed = changed || !ops::is_item(context.objects(), a, b)?;
    }
    context.objects_mut().loops[index].last_changed = Some(args.positional);
    Ok(Value::Bool(changed))
}
