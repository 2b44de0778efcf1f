//! The items of a value. They are created on demand, so iteration takes no memory.

use std::rc::Rc;

use super::budget::{Buffer, Drain, RenderBudget};
use super::failure::{Result, fail};
use super::value::{Dict, Items, Range, Text, Value, View};

/// Yields items from both ends. Each costs a step.
#[derive(Debug)]
pub struct Iteration {
    budget: Rc<RenderBudget>,
    source: Source,
    /// The numbers of the remaining items.
    left: std::ops::Range<usize>,
}

#[derive(Debug)]
enum Source {
    /// A string, with the byte range of the remaining characters.
    Text(Text, std::ops::Range<usize>),
    Items(Items),
    Entries(View, Dict),
    Range(Range),
    Owned(Drain<Value>),
}

/// Returns `len(value)`.
pub fn len(budget: &RenderBudget, value: &Value) -> Result<usize> {
    Ok(match value {
        Value::Undefined(_) => 0,
        Value::Str(text) => {
            budget.scan(text.as_str().len())?;
            text.as_str().chars().count()
        }
        Value::List(items) | Value::Tuple(items) => items.len(),
        Value::Dict(dict) | Value::View(_, dict) => dict.len(),
        Value::Range(range) => range.len(),
        value => return fail(format_args!("object of type '{}' has no len()", value.type_name())),
    })
}

impl Iteration {
    /// Returns the items of a value whose items do not change.
    pub fn from_value(budget: &Rc<RenderBudget>, value: &Value) -> Result<Iteration> {
        let source = match value {
            Value::Undefined(_) => return Ok(Iteration::over(Buffer::new(budget))),
            Value::Str(text) => Source::Text(text.clone(), 0..text.as_str().len()),
            Value::List(items) | Value::Tuple(items) => Source::Items(items.clone()),
            Value::Dict(dict) => Source::Entries(View::Keys, dict.clone()),
            Value::View(view, dict) => Source::Entries(*view, dict.clone()),
            Value::Range(range) => Source::Range(*range),
            value => return fail(format_args!("'{}' object is not iterable", value.type_name())),
        };
        Ok(Iteration { budget: budget.clone(), source, left: 0..len(budget, value)? })
    }

    pub fn over(items: Buffer<Value>) -> Iteration {
        Iteration { budget: items.budget().clone(), left: 0..items.len(), source: Source::Owned(items.into_iter()) }
    }

    /// Returns the number of remaining items.
    pub fn len(&self) -> usize {
        self.left.len()
    }

    /// Returns the remaining items.
    pub fn collect(self) -> Result<Buffer<Value>> {
        let mut items = Buffer::with_capacity(&self.budget, self.len())?;
        for item in self {
            items.push(item?)?;
        }
        Ok(items)
    }

    fn item(&mut self, number: usize, last: bool) -> Result<Value> {
        self.budget.step()?;
        let none = Value::None;
        match &mut self.source {
            Source::Text(text, bytes) => {
                let rest = &text.as_str()[bytes.clone()];
                let c = if last { rest.chars().next_back() } else { rest.chars().next() };
                let (c, mut utf8) = (c.unwrap_or_default(), [0; 4]);
                if last {
                    bytes.end -= c.len_utf8()
                } else {
                    bytes.start += c.len_utf8()
                }
                self.budget.text(c.encode_utf8(&mut utf8))
            }
            Source::Items(items) => Ok(items[number].clone()),
            Source::Entries(view, dict) => {
                let (key, value) = dict.get_index(number).map_or((&none, &none), |(key, value)| (key.value(), value));
                match view {
                    View::Keys => Ok(key.clone()),
                    View::Values => Ok(value.clone()),
                    View::Items => self.budget.pair(key.clone(), value.clone()),
                }
            }
            Source::Range(range) => Ok(range.get(number)),
            Source::Owned(items) => Ok(if last { items.next_back() } else { items.next() }.unwrap_or(none)),
        }
    }
}

impl Iterator for Iteration {
    type Item = Result<Value>;
    fn next(&mut self) -> Option<Result<Value>> {
        let number = self.left.next()?;
        Some(self.item(number, false))
    }
}

impl DoubleEndedIterator for Iteration {
    fn next_back(&mut self) -> Option<Result<Value>> {
        let number = self.left.next_back()?;
        Some(self.item(number, true))
    }
}
