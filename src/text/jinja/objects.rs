//! The mutable state of a rendering, to which `Value::Object` refers.

use std::rc::Rc;

use super::ast::ExprId;
use super::budget::{Buffer, Lease, RenderBudget};
use super::failure::{Failure, Result};
use super::iteration::Iteration;
use super::value::{Entries, Object, Text, Value};

pub struct Objects {
    pub budget: Rc<RenderBudget>,
    pub namespaces: Buffer<Entries>,
    pub iterators: Buffer<Iterator>,
    pub macros: Buffer<Macro>,
    pub loops: Buffer<Loop>,
    pub cyclers: Buffer<Cycler>,
    pub joiners: Buffer<Joiner>,
}

/// The values of a Python generator. They are computed at once, but an error is raised only when it
/// is reached.
pub struct Iterator {
    items: Iteration,
    failure: Option<KeptFailure>,
}

struct KeptFailure {
    failure: Failure,
    _lease: Lease,
}

/// A macro, with the scope in which it was defined.
pub struct Macro {
    pub name: Option<Text>,
    /// The index in `Tree::macros`.
    pub definition: usize,
    pub scope: usize,
}

/// The variable `loop`.
#[derive(Default)]
pub struct Loop {
    /// None before the loop begins and when it has ended.
    pub items: Option<Iteration>,
    /// The condition on the items, until all items are known to meet it.
    pub condition: Option<ExprId>,
    /// The scope around the loop.
    pub scope: usize,
    pub length: Option<usize>,
    /// Number of visited items, including the current one.
    pub started: usize,
    /// Number of recursive loops around this one.
    pub depth: usize,
    pub previous: Option<Value>,
    pub current: Option<Value>,
    /// The next item, if it is known.
    pub peeked: Option<Option<Value>>,
    /// The arguments of the last `loop.changed(...)`.
    pub last_changed: Option<Buffer<Value>>,
    pub ended: bool,
}

pub struct Cycler {
    pub items: Buffer<Value>,
    pub position: usize,
}

pub struct Joiner {
    pub separator: Value,
    pub used: bool,
}

impl Objects {
    pub fn new() -> Objects {
        let budget = Rc::<RenderBudget>::default();
        Objects {
            namespaces: Buffer::new(&budget),
            iterators: Buffer::new(&budget),
            macros: Buffer::new(&budget),
            loops: Buffer::new(&budget),
            cyclers: Buffer::new(&budget),
            joiners: Buffer::new(&budget),
            budget,
        }
    }

    pub fn add_namespace(&mut self, attributes: Entries) -> Result<Value> {
        self.namespaces.push(attributes)?;
        Ok(Value::Object(Object::Namespace, self.namespaces.len() - 1))
    }

    pub fn add_iterator(&mut self, items: Buffer<Value>) -> Result<Value> {
        self.add(Iterator { items: Iteration::over(items), failure: None })
    }

    /// Returns an iterator that yields `items`, and then fails.
    pub fn add_failing_iterator(&mut self, items: Buffer<Value>, failure: Failure) -> Result<Value> {
        let failure = KeptFailure { _lease: self.budget.lease(failure.message.len())?, failure };
        self.add(Iterator { items: Iteration::over(items), failure: Some(failure) })
    }

    fn add(&mut self, iterator: Iterator) -> Result<Value> {
        self.iterators.push(iterator)?;
        Ok(Value::Object(Object::Iterator, self.iterators.len() - 1))
    }

    pub fn add_macro(&mut self, new: Macro) -> Result<Value> {
        self.macros.push(new)?;
        Ok(Value::Object(Object::Macro, self.macros.len() - 1))
    }

    pub fn add_loop(&mut self, new: Loop) -> Result<usize> {
        self.loops.push(new)?;
        Ok(self.loops.len() - 1)
    }

    /// Frees the items of a loop that has ended.
    pub fn end_loop(&mut self, index: usize) {
        let Loop { started, length, depth, .. } = self.loops[index];
        self.loops[index] = Loop { started, length, depth, ended: true, ..Loop::default() };
    }

    pub fn add_cycler(&mut self, items: Buffer<Value>) -> Result<Value> {
        self.cyclers.push(Cycler { items, position: 0 })?;
        Ok(Value::Object(Object::Cycler, self.cyclers.len() - 1))
    }

    pub fn add_joiner(&mut self, separator: Value) -> Result<Value> {
        self.joiners.push(Joiner { separator, used: false })?;
        Ok(Value::Object(Object::Joiner, self.joiners.len() - 1))
    }

    /// Returns the items of a value. An iterator is consumed.
    pub fn iterate(&mut self, value: &Value) -> Result<Iteration> {
        match value {
            Value::Object(Object::Iterator, index) => self.drain(*index),
            value => Iteration::from_value(&self.budget, value),
        }
    }

    /// Removes and returns the remaining items of an iterator.
    fn drain(&mut self, iterator: usize) -> Result<Iteration> {
        let iterator = &mut self.iterators[iterator];
        let items = std::mem::replace(&mut iterator.items, Iteration::over(Buffer::new(&self.budget)));
        iterator.failure.take().map_or(Ok(items), |kept| Err(kept.failure))
    }

    /// Returns the next item of an iterator.
    pub fn next(&mut self, iterator: usize) -> Result<Option<Value>> {
        let iterator = &mut self.iterators[iterator];
        match iterator.items.next() {
            Some(item) => item.map(Some),
            None => iterator.failure.take().map_or(Ok(None), |kept| Err(kept.failure)),
        }
    }
}
