//! `str` and `repr` of values.

use std::rc::Rc;

use super::MAX_VALUE_DEPTH;
use super::budget::{Builder, RenderBudget};
use super::failure::{Failure, Result};
use super::number::float_repr;
use super::objects::Objects;
use super::unicode::is_printable;
use super::value::{Object, Value, View};

/// Returns `str(value)`.
pub fn to_str(budget: &Rc<RenderBudget>, objects: &Objects, value: &Value) -> Result<Builder> {
    let mut builder = Builder::new(budget);
    push_str(&mut builder, objects, value)?;
    Ok(builder)
}

/// Appends `str(value)`.
pub fn push_str(out: &mut Builder, objects: &Objects, value: &Value) -> Result<()> {
    match value {
        Value::Undefined(_) => Ok(()),
        Value::Str(text) => out.push(text.as_str()),
        value => push_repr(out, objects, value, 0),
    }
}

/// Returns `repr(value)`.
pub fn to_repr(budget: &Rc<RenderBudget>, objects: &Objects, value: &Value) -> Result<Builder> {
    let mut builder = Builder::new(budget);
    push_repr(&mut builder, objects, value, 0)?;
    Ok(builder)
}

fn push_repr(out: &mut Builder, objects: &Objects, value: &Value, depth: usize) -> Result<()> {
    objects.budget.step()?;
    if depth > MAX_VALUE_DEPTH {
        return Err(Failure::limit(format_args!("a printed value contains itself, or is nested more than {MAX_VALUE_DEPTH} levels deep")));
    }
    match value {
        Value::Undefined(_) => out.push("Undefined"),
        Value::None => out.push("None"),
        Value::Bool(true) => out.push("True"),
        Value::Bool(false) => out.push("False"),
        Value::Int(number) => out.push(&number.to_string()),
        Value::Float(number) => out.push(&float_repr(*number)),
        Value::Str(text) if text.is_safe() => {
            out.push("Markup(")?;
            push_quoted(out, text.as_str())?;
            out.push(")")
        }
        Value::Str(text) => push_quoted(out, text.as_str()),
        Value::List(items) => push_items(out, objects, items, depth, "[", "]"),
        Value::Tuple(items) => push_items(out, objects, items, depth, "(", if items.len() == 1 { ",)" } else { ")" }),
        Value::Dict(dict) => push_pairs(out, objects, dict.iter().map(|(key, value)| (key.value(), value)), depth),
        Value::View(view, dict) => push_view(out, objects, *view, dict, depth),
        Value::Range(range) if range.step == 1 => out.push(&format!("range({}, {})", range.start, range.stop)),
        Value::Range(range) => out.push(&format!("range({}, {}, {})", range.start, range.stop, range.step)),
        Value::Slice(parts) => push_items(out, objects, &parts[..], depth, "slice(", ")"),
        Value::Global(global) => out.push(global.repr()),
        Value::Method(method) => out.push(&format!("<built-in method {} of {} object>", method.name, method.value.type_name())),
        Value::Object(Object::Namespace, index) => {
            out.push("<Namespace ")?;
            push_pairs(out, objects, objects.namespaces[*index].iter().map(|(key, value)| (key.value(), value)), depth)?;
            out.push(">")
        }
        Value::Object(Object::Macro, index) => match &objects.macros[*index].name {
            Some(name) => {
                out.push("<Macro ")?;
                push_quoted(out, name.as_str())?;
                out.push(">")
            }
            None => out.push("<Macro anonymous>"),
        },
        Value::Object(..) => out.push(&format!("<{} object>", value.type_name())),
    }
}

fn push_items(out: &mut Builder, objects: &Objects, items: &[Value], depth: usize, open: &str, close: &str) -> Result<()> {
    out.push(open)?;
    for (i, item) in items.iter().enumerate() {
        out.push(if i > 0 { ", " } else { "" })?;
        push_repr(out, objects, item, depth + 1)?;
    }
    out.push(close)
}

fn push_pairs<'a>(out: &mut Builder, objects: &Objects, pairs: impl Iterator<Item = (&'a Value, &'a Value)>, depth: usize) -> Result<()> {
    out.push("{")?;
    for (i, (key, value)) in pairs.enumerate() {
        out.push(if i > 0 { ", " } else { "" })?;
        push_repr(out, objects, key, depth + 1)?;
        out.push(": ")?;
        push_repr(out, objects, value, depth + 1)?;
    }
    out.push("}")
}

fn push_view(out: &mut Builder, objects: &Objects, view: View, dict: &super::value::Dict, depth: usize) -> Result<()> {
    out.push(match view {
        View::Keys => "dict_keys([",
        View::Values => "dict_values([",
        View::Items => "dict_items([",
    })?;
    for (i, (key, value)) in dict.iter().enumerate() {
        out.push(if i > 0 { ", " } else { "" })?;
        match view {
            View::Keys => push_repr(out, objects, key.value(), depth + 1)?,
            View::Values => push_repr(out, objects, value, depth + 1)?,
            View::Items => push_items(out, objects, &[key.value().clone(), value.clone()], depth, "(", ")")?,
        }
    }
    out.push("])")
}

/// Writes a string with Python's choice of quotes and its escapes.
fn push_quoted(out: &mut Builder, text: &str) -> Result<()> {
    out.scan(text)?;
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push_char(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.push("\\\\")?,
            '\n' => out.push("\\n")?,
            '\r' => out.push("\\r")?,
            '\t' => out.push("\\t")?,
            c if c == quote => out.push(&format!("\\{c}"))?,
            c if is_printable(c) => out.push_char(c)?,
            c if (c as u32) < 0x100 => out.push(&format!("\\x{:02x}", c as u32))?,
            c if (c as u32) < 0x10000 => out.push(&format!("\\u{:04x}", c as u32))?,
            c => out.push(&format!("\\U{:08x}", c as u32))?,
        }
    }
    out.push_char(quote)
}

/// Returns `ascii(value)`.
pub fn to_ascii(budget: &Rc<RenderBudget>, objects: &Objects, value: &Value) -> Result<Builder> {
    let repr = to_repr(budget, objects, value)?;
    let mut out = Builder::new(budget);
    for c in repr.chars() {
        match c as u32 {
            code if code < 0x80 => out.push_char(c)?,
            code if code < 0x100 => out.push(&format!("\\x{code:02x}"))?,
            code if code < 0x10000 => out.push(&format!("\\u{code:04x}"))?,
            code => out.push(&format!("\\U{code:08x}"))?,
        }
    }
    Ok(out)
}
