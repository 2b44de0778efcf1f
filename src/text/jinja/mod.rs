//! Jinja templates, rendered as Jinja2 3.1 renders them in the sandbox of transformers.
//!
//! Chat templates are code that model publishers test with Python alone, so they depend on Python's
//! strings, formats and scoping down to details that a translation to another value model loses. And
//! they come with untrusted models, so a rendering has a budget of steps, bytes and depth. That is why
//! this is an interpreter of our own. `tests/data/templates` compares it with Jinja2.
//!
//! `parse` makes a `Tree`; `Interpreter` renders it. Values and their operations are in `value`, `ops`,
//! `number` and `repr`; `attributes` finds attributes, methods and items; `filters`, `tests`, `methods`
//! and `globals` are the library of a template.

mod arguments;
mod ast;
mod attributes;
mod budget;
mod evaluate;
mod failure;
mod filters;
mod format;
mod globals;
#[cfg(test)]
mod goldens;
mod interpreter;
mod iteration;
mod json;
mod lexer;
mod methods;
mod number;
mod objects;
mod ops;
mod parser;
mod repr;
mod sorting;
mod strftime;
mod tests;
mod unicode;
mod value;

pub use ast::Tree;
pub use failure::{Failure, Kind};

use objects::Objects;
use serde_json::Value as Json;

/// Bytes of a template's source.
pub const MAX_SOURCE: usize = 1 << 20;
/// Names of variables, macros and attributes that a template assigns. A scope is searched from end to end.
const MAX_NAMES: usize = 1_000;
/// Levels of nested blocks.
const MAX_BLOCK_DEPTH: usize = 64;
/// Levels of an expression's tree, which operators, attributes and filters in a row add to.
const MAX_EXPRESSION_DEPTH: usize = 500;
/// Steps of one rendering: expressions, elements, and blocks of 256 bytes. A message takes some hundred.
const MAX_STEPS: u64 = 10_000_000;
/// Bytes of all values that live at the same time, the output included.
const MAX_VALUE_BYTES: usize = 256 << 20;
/// Characters of padding: of a width in a format, of `ljust` and its kin, and of an indent.
const MAX_WIDTH: usize = 1 << 20;
/// Levels of lists and dictionaries in a value. Those that a chat's JSON may have, and some.
const MAX_VALUE_DEPTH: usize = 300;
/// Levels of recursion while rendering: statements, expressions and macros together.
const MAX_DEPTH: usize = 4_000;
/// Stack that parsing and rendering need at these limits.
pub const STACK_BYTES: usize = 64 << 20;

/// Compiles a template.
///
/// # Errors
/// The source is not a template, or exceeds a limit.
pub fn parse(source: &str) -> Result<Tree, Failure> {
    parser::parse(source)
}

/// Renders a template with variables, the later of which replace earlier ones of the same name.
///
/// # Errors
/// The template raises an error for these variables, or exceeds its budget.
pub fn render<'a>(tree: &Tree, variables: impl IntoIterator<Item = (&'a str, &'a Json)>) -> Result<String, Failure> {
    interpreter::Interpreter::new(tree, variables)?.render()
}
