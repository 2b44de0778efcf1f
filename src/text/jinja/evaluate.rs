//! Evaluates expressions and calls.

use std::collections::HashSet;

use super::arguments::Args;
use super::ast::{Arguments, Comparison, Constant, Expr, ExprId, Modifier};
use super::budget::{Buffer, Builder, SCANNED_BYTES_PER_STEP};
use super::context::Context;
use super::failure::{Failure, Result, fail};
use super::interpreter::Interpreter;
use super::value::{Entries, Object, Value};
use super::{attributes, filters, functions, methods, ops, repr, tests};

/// Maximum number of named arguments of a call. Parameters are searched among them.
const MAX_NAMED: usize = 1_000;

/// Fails if two arguments have the same name, or there are too many named arguments.
fn check_names(args: &Args) -> Result<()> {
    let count = args.named.len();
    if count > MAX_NAMED {
        return Err(Failure::limit(format_args!("too many named arguments ({count}, at most {MAX_NAMED}); pass a dictionary")));
    }
    let budget = args.named.budget();
    let mut seen = HashSet::new();
    for (name, _) in args.named.iter() {
        let name = name.as_str();
        budget.steps(1 + name.len() / SCANNED_BYTES_PER_STEP)?;
        if !seen.insert(name) {
            return fail(format_args!("got multiple values for keyword argument '{name}'"));
        }
    }
    Ok(())
}

impl Interpreter<'_> {
    pub(super) fn evaluate(&mut self, id: ExprId) -> Result<Value> {
        self.objects.budget.step()?;
        self.objects.budget.deeper()?;
        let value = self.expression(id);
        self.objects.budget.shallower();
        value
    }

    fn expression(&mut self, id: ExprId) -> Result<Value> {
        let budget = self.budget();
        match self.tree.expr(id) {
            Expr::Constant(constant) => self.constant(constant),
            Expr::Name(name) => self.lookup(*name),
            Expr::List(items) => self.evaluate_all(items)?.into_list(),
            Expr::Tuple(items) => self.evaluate_all(items)?.into_tuple(),
            Expr::Dict(items) => self.dict(items),
            Expr::Negative(value) => ops::sign(&self.evaluate(*value)?, true),
            Expr::Positive(value) => ops::sign(&self.evaluate(*value)?, false),
            Expr::Not(value) => Ok(Value::Bool(!self.evaluate(*value)?.is_true())),
            Expr::And(left, right) => {
                let left = self.evaluate(*left)?;
                if left.is_true() { self.evaluate(*right) } else { Ok(left) }
            }
            Expr::Or(left, right) => {
                let left = self.evaluate(*left)?;
                if left.is_true() { Ok(left) } else { self.evaluate(*right) }
            }
            Expr::Binary(operator, left, right) => {
                let (left, right) = (self.evaluate(*left)?, self.evaluate(*right)?);
                ops::binary(&mut self.objects, *operator, &left, &right)
            }
            Expr::Concat(parts) => self.concat(parts),
            Expr::Compare(first, others) => self.comparisons(*first, others).map(Value::Bool),
            Expr::Conditional { test, yes, no } => match (self.evaluate(*test)?.is_true(), no) {
                (true, _) => self.evaluate(*yes),
                (false, Some(no)) => self.evaluate(*no),
                (false, None) => budget.undefined("the inline if-expression evaluated to false and no else section was defined"),
            },
            Expr::Attribute(value, name) => {
                let value = self.evaluate(*value)?;
                attributes::attribute(self, &value, name)
            }
            Expr::Item(value, index) => self.item(*value, *index),
            Expr::Slice(start, stop, step) => {
                let mut part = |part: &Option<ExprId>| part.map_or(Ok(Value::None), |part| self.evaluate(part));
                Ok(Value::Slice([part(start)?, part(stop)?, part(step)?].into()))
            }
            Expr::Call(callee, arguments) => {
                let callee = self.evaluate(*callee)?;
                let args = self.arguments(arguments)?;
                self.call(&callee, args)
            }
            Expr::Filter(value, Modifier { name, arguments }) => {
                let value = self.evaluate(*value)?;
                let args = self.arguments(arguments)?;
                filters::apply(self, name, value, args)
            }
            Expr::Test(value, Modifier { name, arguments }) => {
                let value = self.evaluate(*value)?;
                let args = self.arguments(arguments)?;
                tests::apply(self, name, &value, &args).map(Value::Bool)
            }
        }
    }

    /// Returns `a < b <= c`. Operands after a false comparison are not evaluated.
    fn comparisons(&mut self, first: ExprId, others: &[(Comparison, ExprId)]) -> Result<bool> {
        let mut left = self.evaluate(first)?;
        for &(comparison, right) in others {
            let right = self.evaluate(right)?;
            if !ops::compare(&mut self.objects, comparison, &left, &right)? {
                return Ok(false);
            }
            left = right;
        }
        Ok(true)
    }

    fn item(&mut self, value: ExprId, index: ExprId) -> Result<Value> {
        let is_slice = matches!(self.tree.expr(index), Expr::Slice(..));
        let (value, index) = (self.evaluate(value)?, self.evaluate(index)?);
        // A slice follows the rules of Python: a value without slices is an error, not undefined.
        if is_slice { attributes::slice(self, &value, &index) } else { attributes::item(self, &value, &index) }
    }

    fn dict(&mut self, items: &[(ExprId, ExprId)]) -> Result<Value> {
        let budget = self.budget();
        let mut entries = Entries::new(&budget)?;
        for &(key, value) in items {
            entries.insert(budget.key(self.evaluate(key)?)?, self.evaluate(value)?)?;
        }
        budget.dict(entries)
    }

    fn constant(&self, constant: &Constant) -> Result<Value> {
        Ok(match constant {
            Constant::None => Value::None,
            Constant::Bool(flag) => Value::Bool(*flag),
            Constant::Int(number) => Value::Int(*number),
            Constant::Float(number) => Value::Float(*number),
            Constant::Str(text) => return self.budget().text(text),
        })
    }

    fn evaluate_all(&mut self, items: &[ExprId]) -> Result<Buffer<Value>> {
        let mut values = Buffer::with_capacity(&self.objects.budget, items.len())?;
        for &item in items {
            values.push(self.evaluate(item)?)?;
        }
        Ok(values)
    }

    fn concat(&mut self, parts: &[ExprId]) -> Result<Value> {
        let values = self.evaluate_all(parts)?;
        let budget = self.budget();
        let mut builder = Builder::new(&budget);
        values.iter().try_for_each(|value| repr::push_str(&mut builder, &self.objects, value))?;
        builder.into_text(false)
    }

    /// Returns the arguments of a call, with `*` and `**` unpacked.
    pub(super) fn arguments(&mut self, arguments: &Arguments) -> Result<Args> {
        let budget = self.budget();
        let mut args = Args::new(self.evaluate_all(&arguments.positional)?);
        for (name, value) in &arguments.named {
            let name = budget.new_text(name)?;
            args.named.push((name, self.evaluate(*value)?))?;
        }
        if let Some(spread) = arguments.spread {
            let spread = self.evaluate(spread)?;
            for value in self.objects.iterate(&spread)? {
                args.positional.push(value?)?;
            }
        }
        if let Some(spread) = arguments.spread_named {
            let Value::Dict(entries) = self.evaluate(spread)? else { return fail("the argument after ** must be a mapping") };
            for (key, value) in entries.iter() {
                let Value::Str(name) = key.value() else { return fail("keywords must be strings") };
                args.named.push((name.clone(), value.clone()))?;
            }
        }
        check_names(&args)?;
        Ok(args)
    }

    /// Returns `callee(*args)`.
    pub(super) fn call(&mut self, callee: &Value, args: Args) -> Result<Value> {
        let callee = callee.defined()?;
        self.objects.budget.step()?;
        self.objects.budget.deeper()?;
        let value = match callee {
            Value::Global(global) => functions::call(self, *global, args),
            Value::Method(method) => methods::call(self, &method.value, method.name, args),
            Value::Object(Object::Macro, index) => self.call_macro(*index, args),
            Value::Object(Object::Joiner, index) => functions::call_joiner(self, *index, &args),
            Value::Object(Object::Loop, index) => {
                let [iterable] = args.bind("loop", ["iterable"], 1)?;
                self.recurse_loop(*index, &iterable.unwrap_or(Value::None))
            }
            callee => fail(format_args!("'{}' object is not callable", callee.type_name())),
        };
        self.objects.budget.shallower();
        value
    }
}
