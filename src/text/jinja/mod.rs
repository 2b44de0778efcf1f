//! Renders Jinja templates like Jinja2 3.1 in the sandbox of transformers.
//!
//! Publishers test chat templates with Python only. Templates therefore depend on details of
//! Python's strings, formats and scoping, which a translation to other values loses. They may come
//! with untrusted models, so a rendering has a budget of steps, bytes and depth. This module is
//! therefore a separate interpreter. `tests/data/templates` compares it with Jinja2.
//!
//! `parse` creates a `Tree`, and `Interpreter` renders it. Values and their operations are in
//! `value`, `ops`, `number` and `repr`. `attributes` finds attributes, methods and items.
//! `filters`, `tests`, `methods` and `functions` are the library of templates, which
//! sees the interpreter as a `Context`.

mod arguments;
mod ast;
mod attributes;
mod budget;
mod context;
mod evaluate;
mod failure;
mod filters;
mod format;
mod functions;
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

use serde_json::Value as Json;

/// Maximum size of a template's source in bytes.
pub const MAX_SOURCE: usize = 1 << 20;
/// Maximum number of names of variables, macros and attributes that a template assigns. The search
/// in a scope is linear.
const MAX_NAMES: usize = 1_000;
/// Maximum nesting of blocks.
const MAX_BLOCK_DEPTH: usize = 64;
/// Maximum depth of an expression's tree. A chain of operators, attributes and filters adds to it.
const MAX_EXPRESSION_DEPTH: usize = 500;
/// Maximum number of steps of a rendering: expressions, elements, and blocks of 256 bytes. A
/// message takes some hundred.
const MAX_STEPS: u64 = 10_000_000;
/// Maximum size in bytes of all values that live at the same time, including the output.
const MAX_VALUE_BYTES: usize = 256 << 20;
/// Maximum number of characters of padding: of a width in a format, of methods such as `ljust`, and
/// of an indent.
const MAX_WIDTH: usize = 1 << 20;
/// Maximum nesting of lists and dictionaries in a value: more than the JSON of a chat may have.
const MAX_VALUE_DEPTH: usize = 300;
/// Maximum recursion of a rendering: statements, expressions and macros together.
const MAX_DEPTH: usize = 4_000;
/// Size of the stack that parsing and rendering need at these limits.
pub const STACK_BYTES: usize = 64 << 20;

/// Compiles a template.
///
/// # Errors
/// The source is not a template, or exceeds a limit.
pub fn parse(source: &str) -> Result<Tree, Failure> {
    parser::parse(source)
}

/// Renders a template with variables. Later variables replace earlier ones of the same name.
///
/// # Errors
/// The template raises an error for these variables, or exceeds its budget.
pub fn render<'a>(tree: &Tree, variables: impl IntoIterator<Item = (&'a str, &'a Json)>) -> Result<String, Failure> {
    interpreter::Interpreter::new(tree, variables)?.render()
}
