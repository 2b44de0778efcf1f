//! Attributes and items: `value.name` and `value[index]`, by the rules of Jinja's sandbox.

use std::rc::Rc;

use super::budget::{Buffer, Builder, RenderBudget};
use super::context::Context;
use super::failure::{Kind, Result, fail};
use super::iteration;
use super::methods;
use super::number::float_repr;
use super::ops;
use super::value::{Object, Range, Text, Value};

/// Returns `value.name`: the attribute, or else the item.
pub fn attribute(context: &mut dyn Context, value: &Value, name: &str) -> Result<Value> {
    if let Some(found) = own_attribute(context, value.defined()?, name)? {
        return Ok(found);
    }
    let text = context.budget().text(name)?;
    own_item(context, value, &text)?.map_or_else(|| missing(context, value, name), Ok)
}

/// Returns `value[index]`: the item, or else the attribute.
pub fn item(context: &mut dyn Context, value: &Value, index: &Value) -> Result<Value> {
    if let Some(found) = own_item(context, value.defined()?, index)? {
        return Ok(found);
    }
    let Some(name) = index.as_str() else {
        let reason = format!("{} has no element {}", object_name(value), short(index));
        return context.budget().undefined(&reason);
    };
    own_attribute(context, value, name)?.map_or_else(|| missing(context, value, name), Ok)
}

/// Returns `value[start:stop:step]`.
pub fn slice(context: &mut dyn Context, value: &Value, index: &Value) -> Result<Value> {
    match (own_item(context, value.defined()?, index)?, value) {
        (Some(found), _) => Ok(found),
        (None, Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Range(_)) => fail("slice indices must be integers or none"),
        (None, value) => fail(format_args!("'{}' object is not subscriptable by a slice", value.type_name())),
    }
}

/// Returns `value|attr(name)`: the attribute only.
pub fn only_attribute(context: &mut dyn Context, value: &Value, name: &str) -> Result<Value> {
    own_attribute(context, value.defined()?, name)?.map_or_else(|| missing(context, value, name), Ok)
}

fn missing(context: &dyn Context, value: &Value, name: &str) -> Result<Value> {
    context.budget().undefined(&format!("'{}' has no attribute '{}'", object_name(value), shortened(name)))
}

/// Returns the first 100 characters.
fn shortened(name: &str) -> &str {
    name.char_indices().nth(100).map_or(name, |(end, _)| &name[..end])
}

fn object_name(value: &Value) -> String {
    match value {
        Value::None => "None".into(),
        Value::Object(object, _) => format!("jinja2 {object:?} object"),
        value => format!("{} object", value.type_name()),
    }
}

fn short(index: &Value) -> String {
    match index {
        Value::Int(number) => number.to_string(),
        Value::Float(number) => float_repr(*number),
        index => format!("of type {}", index.type_name()),
    }
}

fn own_item(context: &mut dyn Context, value: &Value, index: &Value) -> Result<Option<Value>> {
    let budget = context.budget();
    if let Value::Dict(dict) = value {
        return Ok(match index {
            Value::Str(key) => {
                budget.scan(key.as_str().len())?;
                dict.get_str(key.as_str()).cloned()
            }
            index => match budget.key(index.clone()) {
                Ok(key) => dict.get(&key).cloned(),
                Err(failure) if failure.kind != Kind::Template => return Err(failure),
                Err(_) => None,
            },
        });
    }
    if !matches!(value, Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Range(_)) {
        return Ok(None);
    }
    if let Value::Slice(parts) = index {
        // Wrong parts are a TypeError, so the item is undefined. A step of zero is a ValueError.
        let len = iteration::len(&context.objects().budget, value)?;
        if parts.iter().any(|part| !matches!(part, Value::None) && part.as_int().is_none()) {
            return Ok(None);
        }
        let indices = ops::slice_indices(parts, len)?;
        budget.steps(indices.len())?;
        return Ok(Some(match value {
            Value::Str(text) => sliced_text(&budget, text, indices, len)?,
            Value::List(items) => sliced(&budget, items, indices)?.into_list()?,
            Value::Tuple(items) => sliced(&budget, items, indices)?.into_tuple()?,
            Value::Range(range) => Value::Range(sliced_range(range, parts, indices)),
            _ => return Ok(None),
        }));
    }
    let Some(index) = index.as_int() else { return Ok(None) };
    let len = iteration::len(&context.objects().budget, value)?;
    let index = if index < 0 { index + len as i128 } else { index };
    let Some(index) = usize::try_from(index).ok().filter(|&index| index < len) else { return Ok(None) };
    Ok(match value {
        Value::Str(text) => {
            let mut item = Builder::new(&budget);
            item.push_char(text.as_str().chars().nth(index).unwrap_or_default())?;
            Some(item.into_text(text.is_safe())?)
        }
        Value::List(items) | Value::Tuple(items) => items.get(index).cloned(),
        Value::Range(range) => Some(range.get(index)),
        _ => None,
    })
}

fn sliced(budget: &Rc<RenderBudget>, items: &[Value], indices: Range) -> Result<Buffer<Value>> {
    let mut sliced = Buffer::with_capacity(budget, indices.len())?;
    for i in 0..indices.len() {
        sliced.push(items[indices.at(i) as usize].clone())?;
    }
    Ok(sliced)
}

fn sliced_text(budget: &Rc<RenderBudget>, text: &Text, indices: Range, len: usize) -> Result<Value> {
    let mut sliced = Builder::new(budget);
    let step = usize::try_from(indices.step.unsigned_abs()).unwrap_or(usize::MAX);
    let first = indices.start as usize;
    let push = |c: char| sliced.push_char(c);
    match indices.step > 0 {
        _ if indices.len() == 0 => {}
        true => text.as_str().chars().skip(first).step_by(step).take(indices.len()).try_for_each(push)?,
        false => text.as_str().chars().rev().skip(len - 1 - first).step_by(step).take(indices.len()).try_for_each(push)?,
    }
    sliced.into_text(text.is_safe())
}

fn sliced_range(range: &Range, parts: &[Value; 3], indices: Range) -> Range {
    // A step beyond the range selects one item. Clamping prevents an overflow.
    let step = parts[2].as_int().unwrap_or(1).clamp(-(1 << 60), 1 << 60);
    let whole = range.len() as i128;
    let first = match indices.len() {
        0 => parts[0].as_int().unwrap_or(0).clamp(-whole, whole).rem_euclid(whole.max(1)),
        _ => indices.start,
    };
    let start = range.at(first as usize);
    let step = range.step.saturating_mul(step);
    Range { start, stop: start.saturating_add(step.saturating_mul(indices.len() as i128)), step }
}

/// Returns the attribute that Python's `getattr` finds, if the sandbox allows it.
fn own_attribute(context: &mut dyn Context, value: &Value, name: &str) -> Result<Option<Value>> {
    if let Value::Object(object, index) = value {
        if *object == Object::Namespace {
            context.objects().budget.scan(name.len())?;
            let attributes = &context.objects().namespaces[*index];
            return Ok(attributes.get_str(name).cloned());
        }
        if let Some(found) = object_attribute(context, *object, *index, name)? {
            return Ok(Some(found));
        }
    }
    if name.starts_with("__") && name.ends_with("__") || methods::is_mutating(value, name) {
        let reason = format!("access to attribute '{}' of '{}' object is unsafe", shortened(name), value.type_name());
        return context.budget().undefined(&reason).map(Some);
    }
    if let Some(method) = methods::find(value, name) {
        return context.budget().method(value.clone(), method).map(Some);
    }
    Ok(data_attribute(value, name))
}

/// Returns an attribute that is not a method.
fn data_attribute(value: &Value, name: &str) -> Option<Value> {
    Some(match (value, name) {
        (Value::Int(_) | Value::Bool(_), "real" | "numerator") => Value::Int(value.as_int()?),
        (Value::Int(_) | Value::Bool(_), "imag") => Value::Int(0),
        (Value::Int(_) | Value::Bool(_), "denominator") => Value::Int(1),
        (Value::Float(_), "real") => value.clone(),
        (Value::Float(_), "imag") => Value::Float(0.0),
        (Value::Range(range), "start") => Value::Int(range.start),
        (Value::Range(range), "stop") => Value::Int(range.stop),
        (Value::Range(range), "step") => Value::Int(range.step),
        (Value::View(_, dict), "mapping") => Value::Dict(dict.clone()),
        // The groups of the filter `groupby`.
        (Value::Tuple(items), "grouper") if items.len() == 2 => items[0].clone(),
        (Value::Tuple(items), "list") if items.len() == 2 => items[1].clone(),
        _ => return None,
    })
}

fn object_attribute(context: &mut dyn Context, object: Object, index: usize, name: &str) -> Result<Option<Value>> {
    match object {
        Object::Loop => loop_attribute(context, index, name),
        Object::Macro => macro_attribute(context, index, name),
        Object::Cycler => {
            let cycler = &context.objects().cyclers[index];
            Ok(match name {
                "current" => Some(cycler.items[cycler.position].clone()),
                "pos" => Some(Value::Int(cycler.position as i128)),
                "items" => {
                    let mut items = Buffer::new(&context.objects().budget);
                    items.extend(cycler.items.iter().cloned())?;
                    Some(items.into_tuple()?)
                }
                _ => None,
            })
        }
        Object::Joiner => {
            let joiner = &context.objects().joiners[index];
            Ok(match name {
                "sep" => Some(joiner.separator.clone()),
                "used" => Some(Value::Bool(joiner.used)),
                _ => None,
            })
        }
        Object::Namespace | Object::Iterator => Ok(None),
    }
}

fn loop_attribute(context: &mut dyn Context, index: usize, name: &str) -> Result<Option<Value>> {
    let state = &context.objects().loops[index];
    let (started, depth) = (state.started as i128, state.depth as i128);
    let budget = context.budget();
    Ok(Some(match name {
        "index" => Value::Int(started),
        "index0" => Value::Int(started - 1),
        "first" => Value::Bool(started == 1),
        "depth" => Value::Int(depth + 1),
        "depth0" => Value::Int(depth),
        "previtem" => state.previous.clone().filter(|_| started > 1).map_or_else(|| budget.undefined("there is no previous item"), Ok)?,
        "last" => Value::Bool(context.peek_item(index)?.is_none()),
        "nextitem" => context.peek_item(index)?.map_or_else(|| budget.undefined("there is no next item"), Ok)?,
        "length" => Value::Int(context.loop_length(index)? as i128),
        "revindex" => Value::Int(context.loop_length(index)? as i128 - started + 1),
        "revindex0" => Value::Int(context.loop_length(index)? as i128 - started),
        _ => return Ok(None),
    }))
}

fn macro_attribute(context: &mut dyn Context, index: usize, name: &str) -> Result<Option<Value>> {
    let budget = context.budget();
    let known = &context.objects().macros[index];
    let definition = &context.tree().macros[known.definition];
    Ok(Some(match name {
        "name" => known.name.clone().map_or(Value::None, Value::Str),
        "arguments" => {
            let mut names = Buffer::new(&budget);
            definition.parameters.iter().try_for_each(|&name| names.push(budget.text(context.tree().name(name))?))?;
            names.into_tuple()?
        }
        "catch_kwargs" => Value::Bool(definition.takes.kwargs),
        "catch_varargs" => Value::Bool(definition.takes.varargs),
        "caller" => Value::Bool(definition.takes.caller),
        _ => return Ok(None),
    }))
}
