//! The tests of a template: `value is name(...)`.

use super::arguments::Args;
use super::ast::{Comparison, Operator};
use super::context::Context;
use super::failure::{Result, fail};
use super::value::{Object, Value};
use super::{filters, ops, unicode};

pub const NAMES: &[&str] = &[
    "odd",
    "even",
    "divisibleby",
    "defined",
    "undefined",
    "filter",
    "test",
    "none",
    "boolean",
    "false",
    "true",
    "integer",
    "float",
    "lower",
    "upper",
    "string",
    "mapping",
    "number",
    "sequence",
    "iterable",
    "callable",
    "sameas",
    "escaped",
    "in",
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    ">",
    "gt",
    "greaterthan",
    "ge",
    ">=",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
];

pub fn exists(name: &str) -> bool {
    NAMES.contains(&name)
}

pub fn apply(context: &mut dyn Context, name: &str, value: &Value, args: &Args) -> Result<bool> {
    if !exists(name) {
        return fail(format_args!("no test named '{name}'"));
    }
    if let Some(comparison) = comparison(name) {
        let [other] = args.bind(name, [""], 1)?;
        return ops::compare(context.objects_mut(), comparison, value, &other.unwrap_or(Value::None));
    }
    match name {
        "divisibleby" => {
            let [number] = args.bind(name, ["num"], 1)?;
            return remainder_is(context, value, &number.unwrap_or(Value::None), 0);
        }
        "sameas" => {
            let [other] = args.bind(name, ["other"], 1)?;
            let other = other.unwrap_or(Value::None);
            // Here, equal strings are identical.
            return Ok(if value.as_str().is_some() { ops::equal(context.objects(), value, &other)? } else { value.same(&other) });
        }
        "in" => {
            let [container] = args.bind(name, ["seq"], 1)?;
            return ops::contains(context.objects_mut(), &container.unwrap_or(Value::None), value);
        }
        _ => args.none(name)?,
    }
    match name {
        "odd" => remainder_is(context, value, &Value::Int(2), 1),
        "even" => remainder_is(context, value, &Value::Int(2), 0),
        "filter" | "test" => {
            context.objects().budget.key(value.clone())?;
            Ok(value.as_str().is_some_and(if name == "filter" { filters::exists } else { exists }))
        }
        "lower" | "upper" => {
            let text = context.str(value)?;
            context.budget().scan(text.len())?;
            Ok(if name == "lower" { unicode::is_lower(&text) } else { unicode::is_upper(&text) })
        }
        name => Ok(has_type(name, value)),
    }
}

fn comparison(name: &str) -> Option<Comparison> {
    Some(match name {
        "==" | "eq" | "equalto" => Comparison::Equal,
        "!=" | "ne" => Comparison::NotEqual,
        ">" | "gt" | "greaterthan" => Comparison::Greater,
        ">=" | "ge" => Comparison::GreaterOrEqual,
        "<" | "lt" | "lessthan" => Comparison::Less,
        "<=" | "le" => Comparison::LessOrEqual,
        _ => return None,
    })
}

fn remainder_is(context: &mut dyn Context, value: &Value, divisor: &Value, expected: i128) -> Result<bool> {
    let remainder = ops::binary(context.objects_mut(), Operator::Modulo, value, divisor)?;
    Ok(remainder.equals(&Value::Int(expected)))
}

fn has_type(name: &str, value: &Value) -> bool {
    match name {
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "false" => matches!(value, Value::Bool(false)),
        "true" => matches!(value, Value::Bool(true)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "number" => value.as_float().is_some(),
        "escaped" => matches!(value, Value::Str(text) if text.is_safe()),
        // Python requires a length and items by index. An undefined value has both.
        "sequence" => {
            matches!(value, Value::Undefined(_) | Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Dict(_) | Value::Range(_))
        }
        "iterable" => matches!(
            value,
            Value::Undefined(_)
                | Value::Str(_)
                | Value::List(_)
                | Value::Tuple(_)
                | Value::Dict(_)
                | Value::View(..)
                | Value::Range(_)
                | Value::Object(Object::Iterator | Object::Loop, _)
        ),
        "callable" => matches!(
            value,
            Value::Undefined(_) | Value::Global(_) | Value::Method(_) | Value::Object(Object::Macro | Object::Joiner | Object::Loop, _)
        ),
        _ => false,
    }
}
