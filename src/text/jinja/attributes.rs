//! Attributes and items: `value.name` and `value[index]`, as Jinja's sandbox finds them.

use std::rc::Rc;

use super::failure::{Kind, Result, fail};
use super::interpreter::Interpreter;
use super::methods;
use super::number::float_repr;
use super::ops;
use super::value::{Object, Value, View};

/// `value.name`: the attribute, or else the item.
pub fn attribute(interpreter: &mut Interpreter, value: &Value, name: &str) -> Result<Value> {
    if let Some(found) = own_attribute(interpreter, value.defined()?, name)? {
        return Ok(found);
    }
    let text = interpreter.budget().text(name)?;
    Ok(own_item(interpreter, value, &text)?.unwrap_or_else(|| missing(value, name)))
}

/// `value[index]`: the item, or else the attribute.
pub fn item(interpreter: &mut Interpreter, value: &Value, index: &Value) -> Result<Value> {
    if let Some(found) = own_item(interpreter, value.defined()?, index)? {
        return Ok(found);
    }
    let Some(name) = index.as_str() else {
        let reason = format!("{} has no element {}", object_name(value), short(index));
        return Ok(Value::Undefined(reason.into()));
    };
    Ok(own_attribute(interpreter, value, name)?.unwrap_or_else(|| missing(value, name)))
}

/// `value[start:stop:step]`
pub fn slice(interpreter: &mut Interpreter, value: &Value, index: &Value) -> Result<Value> {
    match (own_item(interpreter, value.defined()?, index)?, value) {
        (Some(found), _) => Ok(found),
        (None, Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Range(_)) => fail("slice indices must be integers or none"),
        (None, value) => fail(format!("'{}' object is not subscriptable by a slice", value.type_name())),
    }
}

/// `value|attr(name)`: the attribute alone.
pub fn only_attribute(interpreter: &mut Interpreter, value: &Value, name: &str) -> Result<Value> {
    Ok(own_attribute(interpreter, value.defined()?, name)?.unwrap_or_else(|| missing(value, name)))
}

fn missing(value: &Value, name: &str) -> Value {
    // The reason lives as long as the value, and a template decides the name's length.
    let end = name.char_indices().nth(100).map_or(name.len(), |(at, _)| at);
    Value::Undefined(format!("'{}' has no attribute '{}'", object_name(value), &name[..end]).into())
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

fn own_item(interpreter: &mut Interpreter, value: &Value, index: &Value) -> Result<Option<Value>> {
    let budget = interpreter.budget();
    if let Value::Dict(dict) = value {
        return Ok(match index {
            Value::Str(key) => {
                budget.scan(key.as_str().len())?;
                dict.get_str(key.as_str()).cloned()
            }
            index => match budget.key(index.clone()) {
                Ok(key) => dict.get(&key).cloned(),
                Err(failure) if failure.kind == Kind::Limit => return Err(failure),
                Err(_) => None,
            },
        });
    }
    if !matches!(value, Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Range(_)) {
        return Ok(None);
    }
    if let Value::Slice(parts) = index {
        // Wrong parts are a TypeError, which leaves the item undefined; a step of zero is a ValueError.
        let len = ops::len(&interpreter.objects, value)?;
        if parts.iter().any(|part| !matches!(part, Value::None) && part.as_int().is_none()) {
            return Ok(None);
        }
        let indices = ops::slice_indices(parts, len)?;
        budget.steps(indices.len())?;
        return Ok(Some(match value {
            Value::Str(text) => {
                let chars: Vec<char> = text.as_str().chars().collect();
                let sliced: String = indices.iter().map(|&i| chars[i]).collect();
                if text.is_safe() { budget.safe_text(sliced)? } else { budget.text(sliced)? }
            }
            Value::List(items) => budget.list(indices.iter().map(|&i| items[i].clone()).collect())?,
            Value::Tuple(items) => budget.tuple(indices.iter().map(|&i| items[i].clone()).collect())?,
            Value::Range(range) => Value::Range(sliced_range(range, parts, indices.len())?),
            _ => return Ok(None),
        }));
    }
    let Some(index) = index.as_int() else { return Ok(None) };
    let len = ops::len(&interpreter.objects, value)?;
    let index = if index < 0 { index + len as i128 } else { index };
    let Some(index) = usize::try_from(index).ok().filter(|&index| index < len) else { return Ok(None) };
    Ok(match value {
        Value::Str(text) => {
            let item = text.as_str().chars().nth(index).map(|c| c.to_string());
            item.map(|item| if text.is_safe() { budget.safe_text(item) } else { budget.text(item) }).transpose()?
        }
        Value::List(items) | Value::Tuple(items) => items.get(index).cloned(),
        Value::Range(range) => Some(range.get(index)),
        _ => None,
    })
}

fn sliced_range(range: &super::value::Range, parts: &[Value; 3], len: usize) -> Result<super::value::Range> {
    // A step beyond the range selects one item; it must not overflow.
    let step = parts[2].as_int().unwrap_or(1).clamp(-(1 << 60), 1 << 60);
    let whole = range.len() as i128;
    let first = match ops::slice_indices(parts, range.len())?.first() {
        Some(&first) => first as i128,
        None => parts[0].as_int().unwrap_or(0).clamp(-whole, whole).rem_euclid(whole.max(1)),
    };
    let start = range.start + range.step * first;
    Ok(super::value::Range { start, stop: start + range.step * step * len as i128, step: range.step * step })
}

/// The attribute that Python's `getattr` finds, if the sandbox allows it.
fn own_attribute(interpreter: &mut Interpreter, value: &Value, name: &str) -> Result<Option<Value>> {
    if let Value::Object(object, index) = value {
        if *object == Object::Namespace {
            let attributes = &interpreter.objects.namespaces[*index];
            return Ok(super::value::get_str(attributes, name).cloned());
        }
        if let Some(found) = object_attribute(interpreter, *object, *index, name)? {
            return Ok(Some(found));
        }
    }
    if name.starts_with("__") && name.ends_with("__") || methods::is_mutating(value, name) {
        let reason = format!("access to attribute '{name}' of '{}' object is unsafe", value.type_name());
        return Ok(Some(Value::Undefined(reason.into())));
    }
    if let Some(method) = methods::find(value, name) {
        return Ok(Some(Value::Method(Rc::new((value.clone(), method)))));
    }
    Ok(data_attribute(value, name))
}

/// Attributes that are no methods.
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

fn object_attribute(interpreter: &mut Interpreter, object: Object, index: usize, name: &str) -> Result<Option<Value>> {
    match object {
        Object::Loop => loop_attribute(interpreter, index, name),
        Object::Macro => macro_attribute(interpreter, index, name),
        Object::Cycler => {
            let cycler = &interpreter.objects.cyclers[index];
            Ok(match name {
                "current" => Some(cycler.items[cycler.position].clone()),
                "pos" => Some(Value::Int(cycler.position as i128)),
                "items" => Some(interpreter.budget().tuple(cycler.items.clone())?),
                _ => None,
            })
        }
        Object::Joiner => {
            let joiner = &interpreter.objects.joiners[index];
            Ok(match name {
                "sep" => Some(joiner.separator.clone()),
                "used" => Some(Value::Bool(joiner.used)),
                _ => None,
            })
        }
        Object::Namespace | Object::Iterator => Ok(None),
    }
}

fn loop_attribute(interpreter: &mut Interpreter, index: usize, name: &str) -> Result<Option<Value>> {
    let state = &interpreter.objects.loops[index];
    let (started, depth) = (state.started as i128, state.depth as i128);
    let undefined = |reason: &str| Value::Undefined(reason.into());
    Ok(Some(match name {
        "index" => Value::Int(started),
        "index0" => Value::Int(started - 1),
        "first" => Value::Bool(started == 1),
        "depth" => Value::Int(depth + 1),
        "depth0" => Value::Int(depth),
        "previtem" => state.previous.clone().filter(|_| started > 1).unwrap_or_else(|| undefined("there is no previous item")),
        "last" => Value::Bool(interpreter.peek_item(index)?.is_none()),
        "nextitem" => interpreter.peek_item(index)?.unwrap_or_else(|| undefined("there is no next item")),
        "length" => Value::Int(interpreter.loop_length(index)? as i128),
        "revindex" => Value::Int(interpreter.loop_length(index)? as i128 - started + 1),
        "revindex0" => Value::Int(interpreter.loop_length(index)? as i128 - started),
        _ => return Ok(None),
    }))
}

fn macro_attribute(interpreter: &mut Interpreter, index: usize, name: &str) -> Result<Option<Value>> {
    let budget = interpreter.budget();
    let known = &interpreter.objects.macros[index];
    let definition = &interpreter.tree.macros[known.definition];
    Ok(Some(match name {
        "name" => known.name.as_ref().map_or(Ok(Value::None), |name| budget.text(name.as_str()))?,
        "arguments" => {
            let names = definition.parameters.iter().map(|&name| budget.text(interpreter.tree.name(name)));
            budget.tuple(names.collect::<Result<_>>()?)?
        }
        "catch_kwargs" => Value::Bool(definition.takes.kwargs),
        "catch_varargs" => Value::Bool(definition.takes.varargs),
        "caller" => Value::Bool(definition.takes.caller),
        _ => return Ok(None),
    }))
}

/// The view of a dictionary that one of its methods returns.
pub fn view_named(name: &str) -> Option<View> {
    match name {
        "keys" => Some(View::Keys),
        "values" => Some(View::Values),
        "items" => Some(View::Items),
        _ => None,
    }
}
