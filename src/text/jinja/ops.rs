//! Operators on values.

use std::cmp::Ordering;
use std::collections::VecDeque;

use super::ast::{Comparison, Operator};
use super::budget::Builder;
use super::failure::{Result, fail};
use super::format::percent;
use super::objects::Objects;
use super::value::{Object, Range, Text, Value, View};
use super::{arguments, number};

/// `left operator right`
pub fn binary(objects: &mut Objects, operator: Operator, left: &Value, right: &Value) -> Result<Value> {
    if let (Operator::Modulo, Value::Str(format)) = (operator, left) {
        return percent_format(objects, format, right);
    }
    left.defined()?;
    right.defined()?;
    if let Some(result) = number::arithmetic(operator, left, right) {
        return result;
    }
    let budget = objects.budget.clone();
    match (operator, left, right) {
        (Operator::Add, Value::Str(a), Value::Str(b)) if a.is_safe() || b.is_safe() => {
            let escaped = |text: &Text| {
                if text.is_safe() { Ok(text.as_str().to_string()) } else { escape(objects, text.as_str()) }
            };
            budget.safe_text(escaped(a)? + &escaped(b)?)
        }
        (Operator::Add, Value::Str(a), Value::Str(b)) => {
            budget.check(a.as_str().len() + b.as_str().len())?;
            budget.text([a.as_str(), b.as_str()].concat())
        }
        (Operator::Add, Value::List(a), Value::List(b)) => {
            budget.check((a.len() + b.len()) * size_of::<Value>())?;
            budget.list([&a[..], &b[..]].concat())
        }
        (Operator::Add, Value::Tuple(a), Value::Tuple(b)) => {
            budget.check((a.len() + b.len()) * size_of::<Value>())?;
            budget.tuple([&a[..], &b[..]].concat())
        }
        (Operator::Multiply, _, _) => match (repeatable(left), right.as_int(), repeatable(right), left.as_int()) {
            (true, Some(times), _, _) => repeat(objects, left, arguments::size(times)),
            (_, _, true, Some(times)) => repeat(objects, right, arguments::size(times)),
            _ => unsupported(operator.symbol(), left, right),
        },
        _ => unsupported(operator.symbol(), left, right),
    }
}

fn repeatable(value: &Value) -> bool {
    matches!(value, Value::Str(_) | Value::List(_) | Value::Tuple(_))
}

fn repeat(objects: &Objects, value: &Value, times: usize) -> Result<Value> {
    let budget = &objects.budget;
    match value {
        Value::Str(text) => {
            let mut builder = Builder::new(budget);
            builder.repeat(text.as_str(), times)?;
            if text.is_safe() { budget.safe_text(builder.finish()) } else { budget.text(builder.finish()) }
        }
        Value::List(items) | Value::Tuple(items) => {
            budget.check(items.len().saturating_mul(times).saturating_mul(size_of::<Value>()))?;
            let repeated: Vec<Value> = (0..times).flat_map(|_| items.iter().cloned()).collect();
            if matches!(value, Value::List(_)) { budget.list(repeated) } else { budget.tuple(repeated) }
        }
        value => unsupported("*", value, value),
    }
}

fn unsupported<T>(symbol: &str, left: &Value, right: &Value) -> Result<T> {
    fail(format!("unsupported operand types for {symbol}: '{}' and '{}'", left.type_name(), right.type_name()))
}

/// `-value` or `+value`
pub fn sign(value: &Value, negative: bool) -> Result<Value> {
    match (value.defined()?.as_int(), value) {
        (Some(number), _) => match if negative { number.checked_neg() } else { Some(number) } {
            Some(number) => Ok(Value::Int(number)),
            None => fail("an integer is too large; at most 128 bits are supported"),
        },
        (None, Value::Float(number)) => Ok(Value::Float(if negative { -number } else { *number })),
        _ => fail(format!("bad operand type for unary {}: '{}'", if negative { '-' } else { '+' }, value.type_name())),
    }
}

pub fn compare(objects: &mut Objects, comparison: Comparison, left: &Value, right: &Value) -> Result<bool> {
    Ok(match comparison {
        Comparison::Equal => equal(objects, left, right)?,
        Comparison::NotEqual => !equal(objects, left, right)?,
        Comparison::Less => order(objects, "<", left, right)? == Some(Ordering::Less),
        Comparison::LessOrEqual => matches!(order(objects, "<=", left, right)?, Some(Ordering::Less | Ordering::Equal)),
        Comparison::Greater => order(objects, ">", left, right)? == Some(Ordering::Greater),
        Comparison::GreaterOrEqual => matches!(order(objects, ">=", left, right)?, Some(Ordering::Greater | Ordering::Equal)),
        Comparison::In => contains(objects, right, left)?,
        Comparison::NotIn => !contains(objects, right, left)?,
    })
}

/// Counts the work of comparing two values.
pub fn equal(objects: &Objects, left: &Value, right: &Value) -> Result<bool> {
    objects.budget.steps(left.weight().min(right.weight()))?;
    Ok(left.equals(right))
}

/// The order of two values, or nothing where one is not a number.
pub fn order(objects: &Objects, symbol: &str, left: &Value, right: &Value) -> Result<Option<Ordering>> {
    objects.budget.step()?;
    left.defined()?;
    right.defined()?;
    if let Some(order) = number::compare(left, right) {
        return Ok(order);
    }
    match (left, right) {
        (Value::Str(a), Value::Str(b)) => {
            objects.budget.work(a.as_str().len().min(b.as_str().len()))?;
            Ok(Some(a.as_str().cmp(b.as_str())))
        }
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
            for (a, b) in a.iter().zip(b.iter()) {
                if !equal(objects, a, b)? {
                    return order(objects, symbol, a, b);
                }
            }
            Ok(Some(a.len().cmp(&b.len())))
        }
        _ => fail(format!("'{symbol}' not supported between instances of '{}' and '{}'", left.type_name(), right.type_name())),
    }
}

/// `item in container`
pub fn contains(objects: &mut Objects, container: &Value, item: &Value) -> Result<bool> {
    match container {
        Value::Str(text) => match item {
            Value::Str(part) => {
                objects.budget.scan(text.as_str().len())?;
                Ok(text.as_str().contains(part.as_str()))
            }
            item => fail(format!("'in <string>' requires string as left operand, not {}", item.type_name())),
        },
        Value::Dict(dict) | Value::View(View::Keys, dict) => Ok(dict.contains_key(&objects.budget.key(item.clone())?)),
        Value::Range(range) => Ok(in_range(range, item)),
        container => {
            for candidate in iterate(objects, container)? {
                objects.budget.step()?;
                if candidate.same(item) || equal(objects, &candidate, item)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}

fn in_range(range: &Range, item: &Value) -> bool {
    let number = item.as_int().or_else(|| item.as_float().filter(|n| n.fract() == 0.0).map(|n| n as i128));
    number.is_some_and(|number| {
        let offset = number.saturating_sub(range.start);
        let index = offset.checked_div(range.step).filter(|index| index * range.step == offset);
        index.is_some_and(|index| (0..range.len() as i128).contains(&index))
    })
}

/// The items that `for` visits. Iterators are used up by it.
pub fn iterate(objects: &mut Objects, value: &Value) -> Result<VecDeque<Value>> {
    let budget = objects.budget.clone();
    let items: VecDeque<Value> = match value {
        Value::Undefined(_) => VecDeque::new(),
        Value::Str(text) => {
            budget.check(text.as_str().len().saturating_mul(size_of::<Value>() + 64))?;
            text.as_str().chars().map(|c| budget.text(c.to_string())).collect::<Result<_>>()?
        }
        Value::List(items) | Value::Tuple(items) => {
            budget.check(items.len() * size_of::<Value>())?;
            items.iter().cloned().collect()
        }
        Value::Dict(dict) | Value::View(View::Keys, dict) => dict.keys().map(|key| key.value().clone()).collect(),
        Value::View(View::Values, dict) => dict.values().cloned().collect(),
        Value::View(View::Items, dict) => {
            dict.iter().map(|(key, value)| budget.tuple(vec![key.value().clone(), value.clone()])).collect::<Result<_>>()?
        }
        Value::Range(range) => (0..range.len()).map(|i| range.get(i)).collect(),
        Value::Object(Object::Iterator, index) => objects.drain(*index)?,
        value => return fail(format!("'{}' object is not iterable", value.type_name())),
    };
    budget.steps(items.len())?;
    Ok(items)
}

/// `len(value)`
pub fn len(objects: &Objects, value: &Value) -> Result<usize> {
    Ok(match value {
        Value::Undefined(_) => 0,
        Value::Str(text) => {
            objects.budget.scan(text.as_str().len())?;
            text.as_str().chars().count()
        }
        Value::List(items) | Value::Tuple(items) => items.len(),
        Value::Dict(dict) | Value::View(_, dict) => dict.len(),
        Value::Range(range) => range.len(),
        value => return fail(format!("object of type '{}' has no len()", value.type_name())),
    })
}

/// Escapes text for HTML.
pub fn escape(objects: &Objects, text: &str) -> Result<String> {
    let mut out = Builder::new(&objects.budget);
    out.scan(text)?;
    for c in text.chars() {
        match c {
            '&' => out.push("&amp;")?,
            '<' => out.push("&lt;")?,
            '>' => out.push("&gt;")?,
            '\'' => out.push("&#39;")?,
            '"' => out.push("&#34;")?,
            c => out.push_char(c)?,
        }
    }
    Ok(out.finish())
}

/// A value as it is added to an HTML-safe string: strings that are not safe are escaped.
pub fn escaped(objects: &Objects, value: &Value) -> Result<Value> {
    match value {
        Value::Str(text) if !text.is_safe() => objects.budget.safe_text(escape(objects, text.as_str())?),
        Value::Tuple(items) => objects.budget.tuple(items.iter().map(|item| escaped(objects, item)).collect::<Result<_>>()?),
        value => Ok(value.clone()),
    }
}

/// `format % values`. An HTML-safe format escapes the values.
pub fn percent_format(objects: &mut Objects, format: &Text, values: &Value) -> Result<Value> {
    if !format.is_safe() {
        return percent::format(objects, format.as_str(), values);
    }
    let values = escaped(objects, values)?;
    let formatted = percent::format(objects, format.as_str(), &values)?;
    objects.budget.safe_text(formatted.as_str().unwrap_or_default())
}

/// The indices that a slice selects of a sequence, as Python's `slice.indices` gives them.
pub fn slice_indices(parts: &[Value; 3], len: usize) -> Result<Vec<usize>> {
    let len = len as i128;
    let part = |value: &Value| match value {
        Value::None => Ok(None),
        value => match value.as_int() {
            Some(number) => Ok(Some(number)),
            None => fail("slice indices must be integers or none"),
        },
    };
    let [start, stop, step] = [part(&parts[0])?, part(&parts[1])?, part(&parts[2])?];
    let step = step.unwrap_or(1);
    if step == 0 {
        return fail("slice step cannot be zero");
    }
    let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |index: i128| (if index < 0 { index.saturating_add(len) } else { index }).clamp(lowest, highest);
    let start = start.map_or(if step > 0 { lowest } else { highest }, clamp);
    let stop = stop.map_or(if step > 0 { highest } else { lowest }, clamp);
    let range = Range { start, stop, step };
    Ok((0..range.len()).map(|i| (start + step * i as i128) as usize).collect())
}
