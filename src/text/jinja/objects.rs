//! The state of one rendering that changes: what `Value::Object` refers to.

use std::collections::VecDeque;
use std::rc::Rc;

use indexmap::IndexMap;

use super::ast::ExprId;
use super::budget::{Budget, Lease};
use super::failure::{Failure, Result};
use super::value::{Key, Object, Value};

#[derive(Default)]
pub struct Objects {
    pub budget: Rc<Budget>,
    pub namespaces: Vec<IndexMap<Key, Value>>,
    pub iterators: Vec<Iterator>,
    pub macros: Vec<Macro>,
    pub loops: Vec<Loop>,
    pub cyclers: Vec<Cycler>,
    pub joiners: Vec<Joiner>,
    /// What the objects above take, to the end of the rendering.
    leases: Vec<Lease>,
}

/// What a generator of Python yields. Its items are computed at once; an error is raised only when it is reached.
pub struct Iterator {
    pub items: VecDeque<Value>,
    pub failure: Option<Failure>,
}

/// A macro, with the scope in which it was defined.
pub struct Macro {
    pub name: Option<String>,
    /// The index in `Tree::macros`.
    pub definition: usize,
    pub scope: usize,
}

/// The variable `loop`.
#[derive(Default)]
pub struct Loop {
    pub items: VecDeque<Value>,
    /// The condition that an item must meet, until all items are known to meet it.
    pub condition: Option<ExprId>,
    /// The scope around the loop.
    pub scope: usize,
    pub length: Option<usize>,
    /// How many items were visited, the present one included.
    pub started: usize,
    /// How many recursive loops are around this one.
    pub depth: usize,
    pub previous: Option<Value>,
    pub current: Option<Value>,
    /// The next item, once it was looked at.
    pub peeked: Option<Option<Value>>,
    /// The arguments of the last `loop.changed(...)`.
    pub last_changed: Option<Vec<Value>>,
    pub ended: bool,
}

pub struct Cycler {
    pub items: Vec<Value>,
    pub position: usize,
}

pub struct Joiner {
    pub separator: Value,
    pub used: bool,
}

impl Objects {
    /// Charges an object with so many values.
    fn charge(&mut self, values: usize) -> Result<()> {
        let lease = self.budget.lease(256 + values * 2 * size_of::<Value>())?;
        self.leases.push(lease);
        Ok(())
    }

    pub fn add_namespace(&mut self, attributes: IndexMap<Key, Value>) -> Result<Value> {
        self.charge(attributes.len())?;
        self.namespaces.push(attributes);
        Ok(Value::Object(Object::Namespace, self.namespaces.len() - 1))
    }

    pub fn add_iterator(&mut self, items: impl IntoIterator<Item = Value>, failure: Option<Failure>) -> Result<Value> {
        let items: VecDeque<Value> = items.into_iter().collect();
        self.charge(items.len())?;
        self.iterators.push(Iterator { items, failure });
        Ok(Value::Object(Object::Iterator, self.iterators.len() - 1))
    }

    pub fn add_macro(&mut self, new: Macro) -> Result<Value> {
        self.charge(0)?;
        self.macros.push(new);
        Ok(Value::Object(Object::Macro, self.macros.len() - 1))
    }

    pub fn add_loop(&mut self, new: Loop) -> Result<usize> {
        self.charge(new.items.len())?;
        self.loops.push(new);
        Ok(self.loops.len() - 1)
    }

    /// Frees the items of a loop that has ended.
    pub fn end_loop(&mut self, index: usize) {
        let Loop { started, length, depth, .. } = self.loops[index];
        self.loops[index] = Loop { started, length, depth, ended: true, ..Loop::default() };
    }

    pub fn add_cycler(&mut self, items: Vec<Value>) -> Result<Value> {
        self.charge(items.len())?;
        self.cyclers.push(Cycler { items, position: 0 });
        Ok(Value::Object(Object::Cycler, self.cyclers.len() - 1))
    }

    pub fn add_joiner(&mut self, separator: Value) -> Result<Value> {
        self.charge(1)?;
        self.joiners.push(Joiner { separator, used: false });
        Ok(Value::Object(Object::Joiner, self.joiners.len() - 1))
    }

    /// Takes the items that an iterator has left.
    pub fn drain(&mut self, iterator: usize) -> Result<VecDeque<Value>> {
        let iterator = &mut self.iterators[iterator];
        let items = std::mem::take(&mut iterator.items);
        iterator.failure.take().map_or(Ok(items), Err)
    }

    /// The next item of an iterator.
    pub fn next(&mut self, iterator: usize) -> Result<Option<Value>> {
        let iterator = &mut self.iterators[iterator];
        match iterator.items.pop_front() {
            Some(item) => Ok(Some(item)),
            None => iterator.failure.take().map_or(Ok(None), Err),
        }
    }
}
