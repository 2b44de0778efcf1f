//! Operators on values.

use std::cmp::Ordering;

use super::ast::{Comparison, Operator};
use super::budget::{Buffer, Builder};
use super::failure::{Result, fail};
use super::format::percent;
use super::objects::Objects;
use super::value::{Range, Text, Value, View};
use super::{arguments, number};

/// Returns `left operator right`.
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
        (Operator::Add, Value::Str(a), Value::Str(b)) => {
            let safe = a.is_safe() || b.is_safe();
            let mut sum = Builder::new(&budget);
            for text in [a, b] {
                if safe && !text.is_safe() { push_escaped(&mut sum, text.as_str())? } else { sum.push(text.as_str())? }
            }
            sum.into_text(safe)
        }
        (Operator::Add, Value::List(a), Value::List(b)) => joined(objects, [a, b])?.into_list(),
        (Operator::Add, Value::Tuple(a), Value::Tuple(b)) => joined(objects, [a, b])?.into_tuple(),
        (Operator::Multiply, _, _) => match (repeatable(left), right.as_int(), repeatable(right), left.as_int()) {
            (true, Some(times), _, _) => repeat(objects, left, arguments::size(times)),
            (_, _, true, Some(times)) => repeat(objects, right, arguments::size(times)),
            _ => unsupported(operator.symbol(), left, right),
        },
        _ => unsupported(operator.symbol(), left, right),
    }
}

fn joined(objects: &Objects, lists: [&[Value]; 2]) -> Result<Buffer<Value>> {
    let mut sum = Buffer::with_capacity(&objects.budget, lists[0].len() + lists[1].len())?;
    lists.iter().try_for_each(|list| sum.extend(list.iter().cloned()))?;
    Ok(sum)
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
            builder.into_text(text.is_safe())
        }
        Value::List(items) | Value::Tuple(items) => {
            let mut repeated = Buffer::with_capacity(budget, items.len().saturating_mul(times))?;
            let times = if items.is_empty() { 0 } else { times };
            (0..times).try_for_each(|_| repeated.extend(items.iter().cloned()))?;
            if matches!(value, Value::List(_)) { repeated.into_list() } else { repeated.into_tuple() }
        }
        value => unsupported("*", value, value),
    }
}

fn unsupported<T>(symbol: &str, left: &Value, right: &Value) -> Result<T> {
    fail(format_args!("unsupported operand types for {symbol}: '{}' and '{}'", left.type_name(), right.type_name()))
}

/// Returns `-value` or `+value`
pub fn sign(value: &Value, negative: bool) -> Result<Value> {
    match (value.defined()?.as_int(), value) {
        (Some(number), _) => match if negative { number.checked_neg() } else { Some(number) } {
            Some(number) => Ok(Value::Int(number)),
            None => fail("an integer is too large; at most 128 bits are supported"),
        },
        (None, Value::Float(number)) => Ok(Value::Float(if negative { -number } else { *number })),
        _ => fail(format_args!("bad operand type for unary {}: '{}'", if negative { '-' } else { '+' }, value.type_name())),
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

/// Returns true for an item of a list by Python's rule: `item is wanted or item == wanted`.
pub fn is_item(objects: &Objects, item: &Value, wanted: &Value) -> Result<bool> {
    // Here, equal strings are identical, so the first comparison charges the work of `same`.
    Ok(equal(objects, item, wanted)? || item.same(wanted))
}

/// Returns the order of two values, or None if one is not a number.
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
        _ => fail(format_args!("'{symbol}' not supported between instances of '{}' and '{}'", left.type_name(), right.type_name())),
    }
}

/// Returns `item in container`.
pub fn contains(objects: &mut Objects, container: &Value, item: &Value) -> Result<bool> {
    match container {
        Value::Str(text) => match item {
            Value::Str(part) => {
                objects.budget.scan(text.as_str().len() + part.as_str().len())?;
                Ok(text.as_str().contains(part.as_str()))
            }
            item => fail(format_args!("'in <string>' requires string as left operand, not {}", item.type_name())),
        },
        Value::Dict(dict) | Value::View(View::Keys, dict) => Ok(dict.contains_key(&objects.budget.key(item.clone())?)),
        Value::Range(range) => Ok(in_range(range, item)),
        container => {
            for candidate in objects.iterate(container)? {
                if is_item(objects, &candidate?, item)? {
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

/// Adds text, escaped for HTML.
pub fn push_escaped(out: &mut Builder, text: &str) -> Result<()> {
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
    Ok(())
}

/// Returns the text as HTML-safe text.
pub fn escape(objects: &Objects, text: &str) -> Result<Value> {
    let mut out = Builder::new(&objects.budget);
    push_escaped(&mut out, text)?;
    out.into_text(true)
}

/// Returns a value in the form in which it is added to an HTML-safe string: other strings are
/// escaped.
pub fn escaped(objects: &Objects, value: &Value) -> Result<Value> {
    match value {
        Value::Str(text) if !text.is_safe() => escape(objects, text.as_str()),
        Value::Tuple(items) => {
            let mut all = Buffer::with_capacity(&objects.budget, items.len())?;
            items.iter().try_for_each(|item| all.push(escaped(objects, item)?))?;
            all.into_tuple()
        }
        value => Ok(value.clone()),
    }
}

/// Returns `format % values`. An HTML-safe format escapes the values.
pub fn percent_format(objects: &mut Objects, format: &Text, values: &Value) -> Result<Value> {
    if !format.is_safe() {
        return percent::format(objects, format.as_str(), values)?.into_text(false);
    }
    let values = escaped(objects, values)?;
    percent::format(objects, format.as_str(), &values)?.into_text(true)
}

/// Returns the indices that a slice selects of a sequence, like Python's `slice.indices`.
pub fn slice_indices(parts: &[Value; 3], len: usize) -> Result<Range> {
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
    Ok(Range { start, stop, step })
}
