//! Runs the statements of a template. Expressions are in `evaluate.rs`.

use std::rc::Rc;

use serde_json::Value as Json;

use super::arguments::{Args, string};
use super::ast::{ExprId, For, MacroDef, Modifier, Name, Statement, StatementKind, Target, Tree};
use super::budget::{Buffer, Builder, Drain, RenderBudget};
use super::context::Context;
use super::failure::{Result, fail};
use super::globals::Global;
use super::iteration::{self, Iteration};
use super::objects::{Loop, Macro, Objects};
use super::value::{Entries, Key, Object, Text, Value};
use super::{filters, json, repr};

/// Number of variables of a scope that are searched in one step.
const VARIABLES_PER_STEP: usize = 16;

pub struct Interpreter<'a> {
    pub(super) tree: &'a Tree,
    pub(super) objects: Objects,
    /// Variables of the host and of Jinja, by name.
    globals: Vec<Option<Value>>,
    scopes: Vec<Scope>,
    /// The current scope.
    scope: usize,
    /// The output, and the text of macros and blocks before it is used.
    outputs: Vec<Builder>,
    special: SpecialNames,
    /// The statements of `Objects::loops`.
    loops: Vec<&'a For>,
}

struct Scope {
    parent: Option<usize>,
    variables: Buffer<(Name, Value)>,
    /// True if a macro refers to the scope. The scope then outlives its block.
    captured: bool,
}

/// Names that Jinja defines, if the template mentions them.
struct SpecialNames {
    of_loop: Option<Name>,
    caller: Option<Name>,
    kwargs: Option<Name>,
    varargs: Option<Name>,
}

impl SpecialNames {
    fn new(tree: &Tree) -> SpecialNames {
        let name = |name: &str| tree.names.iter().position(|known| known == name).map(|index| Name(index as u32));
        SpecialNames { of_loop: name("loop"), caller: name("caller"), kwargs: name("kwargs"), varargs: name("varargs") }
    }
}

impl Scope {
    fn new(budget: &Rc<RenderBudget>, parent: Option<usize>) -> Result<Scope> {
        // The overhead includes the spare capacity of the vector of scopes.
        let variables = Buffer::new(budget).with_overhead(3 * size_of::<Scope>())?;
        Ok(Scope { parent, variables, captured: false })
    }
}

/// The way in which a list of statements ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Normal,
    Break,
    Continue,
}

impl<'a> Interpreter<'a> {
    pub fn new<'v>(tree: &'a Tree, variables: impl IntoIterator<Item = (&'v str, &'v Json)>) -> Result<Interpreter<'a>> {
        let objects = Objects::new();
        let budget = objects.budget.clone();
        let mut interpreter = Interpreter {
            tree,
            objects,
            globals: tree.names.iter().map(|name| Global::named(name).map(Value::Global)).collect(),
            scopes: vec![Scope::new(&budget, None)?],
            scope: 0,
            outputs: vec![Builder::new(&budget)],
            special: SpecialNames::new(tree),
            loops: Vec::new(),
        };
        for (name, value) in variables {
            if let Some(index) = tree.names.iter().position(|known| known == name) {
                interpreter.globals[index] = Some(json::from_json(&budget, value)?);
            }
        }
        Ok(interpreter)
    }

    pub fn render(mut self) -> Result<String> {
        self.run(&self.tree.body)?;
        self.outputs.pop().map_or(Ok(String::new()), |output| output.finish().map(|(text, _)| text.into()))
    }

    pub(super) fn lookup(&self, name: Name) -> Result<Value> {
        let mut at = Some(self.scope);
        while let Some(scope) = at.map(|index| &self.scopes[index]) {
            self.objects.budget.steps(scope.variables.len() / VARIABLES_PER_STEP)?;
            if let Some((_, value)) = scope.variables.iter().find(|(known, _)| *known == name) {
                return Ok(value.clone());
            }
            at = scope.parent;
        }
        match &self.globals[name.0 as usize] {
            Some(value) => Ok(value.clone()),
            None => self.budget().undefined(&format!("'{}' is undefined", self.tree.name(name))),
        }
    }

    fn define(&mut self, name: Name, value: Value) -> Result<()> {
        let variables = &mut self.scopes[self.scope].variables;
        match variables.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => variables.push((name, value))?,
        }
        Ok(())
    }

    /// Runs `work` in a new scope below `parent`.
    fn in_scope<T>(&mut self, parent: usize, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let (outer, count) = (self.scope, self.scopes.len());
        self.scopes.push(Scope::new(&self.objects.budget, Some(parent))?);
        self.scope = count;
        let result = work(self);
        self.scope = outer;
        while self.scopes.len() > count && self.scopes.last().is_some_and(|scope| !scope.captured) {
            self.scopes.pop();
        }
        result
    }

    /// Runs `work`, and returns its output.
    fn collect(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<Builder> {
        self.outputs.push(Builder::new(&self.objects.budget));
        let result = work(self);
        let text = self.outputs.pop().unwrap_or_else(|| Builder::new(&self.objects.budget));
        result.map(|()| text)
    }

    fn print(&mut self, text: &str) -> Result<()> {
        self.outputs.last_mut().map_or(Ok(()), |output| output.push(text))
    }

    fn run(&mut self, statements: &'a [Statement]) -> Result<Flow> {
        for statement in statements {
            self.objects.budget.step()?;
            self.objects.budget.deeper()?;
            let flow = self.statement(&statement.kind).map_err(|e| e.at(statement.line));
            self.objects.budget.shallower();
            let flow = flow?;
            if flow != Flow::Normal {
                return Ok(flow);
            }
        }
        Ok(Flow::Normal)
    }

    fn statement(&mut self, statement: &'a StatementKind) -> Result<Flow> {
        match statement {
            StatementKind::Text(text) => self.print(text)?,
            StatementKind::Print(value) => {
                let value = self.evaluate(*value)?;
                if let Some(output) = self.outputs.last_mut() {
                    repr::push_str(output, &self.objects, &value)?;
                }
            }
            StatementKind::If { branches, otherwise } => {
                for (test, body) in branches {
                    if self.evaluate(*test)?.is_true() {
                        return self.run(body);
                    }
                }
                return self.run(otherwise);
            }
            StatementKind::For(statement) => self.for_loop(statement)?,
            StatementKind::Set { target, value } => {
                let value = self.evaluate(*value)?;
                self.assign(target, value)?;
            }
            StatementKind::SetBlock { target, filters, body } => match self.filtered_block(filters, body)? {
                Ok(value) => self.assign(target, value)?,
                Err(flow) => return Ok(flow),
            },
            StatementKind::With { assignments, body } => return self.with(assignments, body),
            StatementKind::FilterBlock { filters, body } => match self.filtered_block(filters, body)? {
                Ok(value) => self.print(string(&value)?)?,
                Err(flow) => return Ok(flow),
            },
            StatementKind::Macro(index) => {
                let value = self.make_macro(*index)?;
                if let Some(name) = self.tree.macros[*index].name {
                    self.define(name, value)?;
                }
            }
            StatementKind::CallBlock { caller, callee, arguments } => {
                let callee = self.evaluate(*callee)?;
                let mut args = self.arguments(arguments)?;
                let caller = self.make_macro(*caller)?;
                args.named.push((self.budget().new_text("caller")?, caller))?;
                let value = self.call(&callee, args)?;
                self.print(string(&value)?)?;
            }
            StatementKind::Scope { from_root, body } => {
                let parent = if *from_root { 0 } else { self.scope };
                return self.in_scope(parent, |interpreter| interpreter.run(body));
            }
            StatementKind::Break => return Ok(Flow::Break),
            StatementKind::Continue => return Ok(Flow::Continue),
            StatementKind::NeedsLoader(name) => {
                return fail(format_args!("'{name}' is not supported: a chat template cannot load other templates"));
            }
        }
        Ok(Flow::Normal)
    }

    fn assign(&mut self, target: &Target, value: Value) -> Result<()> {
        match target {
            Target::Name(name) => self.define(*name, value)?,
            Target::Attribute(name, attribute) => {
                let Value::Object(Object::Namespace, index) = self.lookup(*name)? else {
                    return fail(format_args!("cannot assign attribute '{attribute}' on a non-namespace object"));
                };
                let key = Key::new(self.budget().text(attribute)?)?;
                self.objects.namespaces[index].insert(key, value)?;
            }
            Target::Tuple(targets) => {
                let values = self.objects.iterate(value.defined()?)?;
                if values.len() != targets.len() {
                    return fail(format_args!("cannot unpack {} values into {} names", values.len(), targets.len()));
                }
                targets.iter().zip(values).try_for_each(|(target, value)| self.assign(target, value?))?;
            }
        }
        Ok(())
    }

    fn with(&mut self, assignments: &'a [(Target, ExprId)], body: &'a [Statement]) -> Result<Flow> {
        let values: Vec<Value> = assignments.iter().map(|(_, value)| self.evaluate(*value)).collect::<Result<_>>()?;
        self.in_scope(self.scope, |interpreter| {
            assignments.iter().zip(values).try_for_each(|((target, _), value)| interpreter.assign(target, value))?;
            interpreter.run(body)
        })
    }

    /// Returns the filtered text of a body. If the body leaves its loop, there is none.
    fn filtered_block(&mut self, modifiers: &'a [Modifier], body: &'a [Statement]) -> Result<std::result::Result<Value, Flow>> {
        let scope = self.scope;
        let mut flow = Flow::Normal;
        let text = self.collect(|interpreter| {
            flow = interpreter.in_scope(scope, |interpreter| interpreter.run(body))?;
            Ok(())
        })?;
        if flow != Flow::Normal {
            return Ok(Err(flow));
        }
        let mut value = text.into_text(false)?;
        for filter in modifiers {
            let args = self.arguments(&filter.arguments)?;
            value = filters::apply(self, &filter.name, value, args)?;
        }
        Ok(Ok(value))
    }

    fn for_loop(&mut self, statement: &'a For) -> Result<()> {
        let iterable = self.evaluate(statement.iterable)?;
        if !statement.recursive {
            return self.run_loop(statement, &iterable, self.scope, 0);
        }
        let scope = self.scope;
        let text = self.collect(|interpreter| interpreter.run_loop(statement, &iterable, scope, 0))?;
        self.print(&text)
    }

    /// Returns the text of a recursive loop over `iterable`, one level below the loop `index`.
    pub(super) fn recurse_loop(&mut self, index: usize, iterable: &Value) -> Result<Value> {
        let (statement, state) = (self.loops[index], &self.objects.loops[index]);
        let (scope, depth) = (state.scope, state.depth + 1);
        if !statement.recursive {
            return fail("the loop must have the 'recursive' marker to be called recursively");
        }
        if state.ended {
            return fail("the loop has ended");
        }
        self.collect(|interpreter| interpreter.run_loop(statement, iterable, scope, depth))?.into_text(false)
    }

    fn run_loop(&mut self, statement: &'a For, iterable: &Value, scope: usize, depth: usize) -> Result<()> {
        let known = statement.condition.is_none() && !matches!(iterable, Value::Object(..));
        let length = if known { iteration::len(&self.objects.budget, iterable).ok() } else { None };
        let items = self.objects.iterate(iterable)?;
        let index =
            self.objects.add_loop(Loop { items: Some(items), condition: statement.condition, length, scope, depth, ..Loop::default() })?;
        self.loops.push(statement);
        let mut empty = true;
        while let Some(item) = self.next_item(index)? {
            empty = false;
            let flow = self.in_scope(scope, |interpreter| {
                if let Some(name) = interpreter.special.of_loop {
                    interpreter.define(name, Value::Object(Object::Loop, index))?;
                }
                interpreter.assign(&statement.target, item)?;
                interpreter.run(&statement.body)
            })?;
            if flow == Flow::Break {
                break;
            }
        }
        self.objects.end_loop(index);
        if empty {
            self.in_scope(scope, |interpreter| interpreter.run(&statement.otherwise))?;
        }
        Ok(())
    }

    /// Moves to the next item of the loop.
    fn next_item(&mut self, index: usize) -> Result<Option<Value>> {
        self.objects.budget.step()?;
        let next = match self.objects.loops[index].peeked.take() {
            Some(peeked) => peeked,
            None => self.pull_item(index)?,
        };
        if let Some(item) = &next {
            let state = &mut self.objects.loops[index];
            state.started += 1;
            state.previous = state.current.replace(item.clone());
        }
        Ok(next)
    }

    /// Returns the next item that meets the loop's condition.
    fn pull_item(&mut self, index: usize) -> Result<Option<Value>> {
        loop {
            let state = &mut self.objects.loops[index];
            let (condition, scope) = (state.condition, state.scope);
            let Some(item) = state.items.as_mut().and_then(Iteration::next).transpose()? else { return Ok(None) };
            let Some(condition) = condition else { return Ok(Some(item)) };
            self.objects.budget.step()?;
            let target = &self.loops[index].target;
            let accepted = self.in_scope(scope, |interpreter| {
                interpreter.assign(target, item.clone())?;
                Ok(interpreter.evaluate(condition)?.is_true())
            })?;
            if accepted {
                return Ok(Some(item));
            }
        }
    }

    fn make_macro(&mut self, definition: usize) -> Result<Value> {
        let mut at = Some(self.scope);
        while let Some(index) = at.filter(|&index| !self.scopes[index].captured) {
            self.scopes[index].captured = true;
            at = self.scopes[index].parent;
        }
        let name = self.tree.macros[definition].name.map(|name| self.budget().new_text(self.tree.name(name))).transpose()?;
        self.objects.add_macro(Macro { name, definition, scope: self.scope })
    }

    pub(super) fn call_macro(&mut self, index: usize, args: Args) -> Result<Value> {
        let Macro { definition, scope, .. } = self.objects.macros[index];
        let definition: &'a MacroDef = &self.tree.macros[definition];
        let text = self.collect(|interpreter| {
            interpreter.in_scope(scope, |interpreter| {
                interpreter.bind_macro(definition, args)?;
                interpreter.run(&definition.body).map(drop)
            })
        })?;
        text.into_text(false)
    }

    /// Defines the parameters of a macro in the current scope.
    fn bind_macro(&mut self, definition: &'a MacroDef, args: Args) -> Result<()> {
        let budget = self.budget();
        let count = definition.parameters.len();
        let first_default = count - definition.defaults.len();
        let mut named = args.named;
        budget.steps(count * (1 + named.len() / VARIABLES_PER_STEP))?;
        let mut positional = args.positional.into_iter();
        // A default that reads its own parameter does not see an outer variable.
        for &parameter in &definition.parameters {
            let reason = budget.undefined(&format!("parameter '{}' was not provided", self.tree.name(parameter)))?;
            self.define(parameter, reason)?;
        }
        for (i, &parameter) in definition.parameters.iter().enumerate() {
            let given = if positional.len() == 0 { find(&named, self.tree.name(parameter)) } else { None };
            let value = match (positional.next(), given) {
                (Some(value), _) => value,
                (None, Some(found)) => named.remove(found).1,
                (None, None) if i >= first_default => self.evaluate(definition.defaults[i - first_default])?,
                (None, None) => continue,
            };
            self.define(parameter, value)?;
        }
        if definition.takes.caller {
            let caller = match find(&named, "caller") {
                Some(found) => named.remove(found).1,
                None => budget.undefined("No caller defined")?,
            };
            self.define_special(self.special.caller, caller)?;
        }
        self.bind_rest(definition, positional, named)
    }

    /// Defines `varargs` and `kwargs`. Fails if the macro gets some and does not accept them.
    fn bind_rest(&mut self, definition: &MacroDef, positional: Drain<Value>, named: Buffer<(Text, Value)>) -> Result<()> {
        let budget = self.budget();
        let title = definition.name.map_or("the caller", |name| self.tree.name(name));
        if !definition.takes.kwargs
            && let Some((name, _)) = named.first()
        {
            return fail(format_args!("macro '{title}' takes no keyword argument '{}'", name.as_str()));
        }
        if !definition.takes.varargs && positional.len() > 0 {
            return fail(format_args!("macro '{title}' takes not more than {} argument(s)", definition.parameters.len()));
        }
        if definition.takes.kwargs {
            let mut kwargs = Entries::new(&budget)?;
            for (name, value) in named {
                kwargs.insert(Key::new(Value::Str(name))?, value)?;
            }
            self.define_special(self.special.kwargs, budget.dict(kwargs)?)?;
        }
        if definition.takes.varargs {
            let mut varargs = Buffer::new(&budget);
            varargs.extend(positional)?;
            self.define_special(self.special.varargs, varargs.into_tuple()?)?;
        }
        Ok(())
    }

    fn define_special(&mut self, name: Option<Name>, value: Value) -> Result<()> {
        name.map_or(Ok(()), |name| self.define(name, value))
    }
}

impl Context for Interpreter<'_> {
    fn tree(&self) -> &Tree {
        self.tree
    }

    fn objects(&self) -> &Objects {
        &self.objects
    }

    fn objects_mut(&mut self) -> &mut Objects {
        &mut self.objects
    }

    fn peek_item(&mut self, index: usize) -> Result<Option<Value>> {
        if self.objects.loops[index].peeked.is_none() {
            let next = self.pull_item(index)?;
            self.objects.loops[index].peeked = Some(next);
        }
        Ok(self.objects.loops[index].peeked.clone().flatten())
    }

    fn loop_length(&mut self, index: usize) -> Result<usize> {
        if let Some(length) = self.objects.loops[index].length {
            return Ok(length);
        }
        let mut items = Buffer::new(&self.objects.budget);
        while let Some(item) = self.pull_item(index)? {
            items.push(item)?;
        }
        let state = &mut self.objects.loops[index];
        let peeked = usize::from(matches!(state.peeked, Some(Some(_))));
        let length = state.started + peeked + items.len();
        (state.items, state.condition, state.length) = (Some(Iteration::over(items)), None, Some(length));
        Ok(length)
    }
}

/// Returns the index of a named argument.
fn find(named: &[(Text, Value)], name: &str) -> Option<usize> {
    named.iter().position(|(given, _)| given.as_str() == name)
}
