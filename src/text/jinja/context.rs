//! The boundary between the interpreter and the library of templates.

use std::rc::Rc;

use super::ast::Tree;
use super::budget::{Builder, RenderBudget};
use super::failure::Result;
use super::objects::Objects;
use super::repr;
use super::value::Value;

/// The rendering, as filters, tests, methods and functions see it. They do not use the interpreter
/// itself, which calls them.
pub trait Context {
    fn tree(&self) -> &Tree;

    fn objects(&self) -> &Objects;

    fn objects_mut(&mut self) -> &mut Objects;

    /// Returns the next item of a loop without moving to it. Evaluates the condition of the loop.
    fn peek_item(&mut self, index: usize) -> Result<Option<Value>>;

    /// Returns the number of items of a loop. Evaluates its condition for all remaining items.
    fn loop_length(&mut self, index: usize) -> Result<usize>;

    fn budget(&self) -> Rc<RenderBudget> {
        self.objects().budget.clone()
    }

    /// Returns `str(value)`.
    fn str(&self, value: &Value) -> Result<Builder> {
        repr::to_str(&self.objects().budget, self.objects(), value)
    }
}
