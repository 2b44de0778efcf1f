//! Evaluates expressions and calls.

use std::collections::HashSet;

use super::arguments::Args;
use super::ast::{Arguments, Comparison, Constant, Expr, ExprId, Modifier};
use super::budget::Builder;
use super::failure::{Result, fail};
use super::interpreter::Interpreter;
use super::value::{Object, Value};
use super::{attributes, filters, globals, methods, ops, repr, tests};

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
            Expr::List(items) => budget.list(self.evaluate_all(items)?),
            Expr::Tuple(items) => budget.tuple(self.evaluate_all(items)?),
            Expr::Dict(items) => {
                let pairs = items.iter().map(|&(key, value)| Ok((budget.key(self.evaluate(key)?)?, self.evaluate(value)?)));
                budget.dict(pairs.collect::<Result<_>>()?)
            }
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
                (false, None) => Ok(Value::Undefined("the inline if-expression evaluated to false and no else section was defined".into())),
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

    /// `a < b <= c`: true if each comparison is. What follows a false one is not evaluated.
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
        // A slice is Python's own: a value without slices is an error, not undefined.
        if is_slice { attributes::slice(self, &value, &index) } else { attributes::item(self, &value, &index) }
    }

    fn constant(&self, constant: &Constant) -> Result<Value> {
        Ok(match constant {
            Constant::None => Value::None,
            Constant::Bool(flag) => Value::Bool(*flag),
            Constant::Int(number) => Value::Int(*number),
            Constant::Float(number) => Value::Float(*number),
            Constant::Str(text) => return self.budget().text(text.as_str()),
        })
    }

    fn evaluate_all(&mut self, items: &[ExprId]) -> Result<Vec<Value>> {
        items.iter().map(|&item| self.evaluate(item)).collect()
    }

    fn concat(&mut self, parts: &[ExprId]) -> Result<Value> {
        let values = self.evaluate_all(parts)?;
        let budget = self.budget();
        let mut builder = Builder::new(&budget);
        values.iter().try_for_each(|value| repr::push_str(&mut builder, &self.objects, value))?;
        budget.text(builder.finish())
    }

    /// The arguments of a call, with `*` and `**` unpacked.
    pub(super) fn arguments(&mut self, arguments: &Arguments) -> Result<Args> {
        let mut args = Args { positional: self.evaluate_all(&arguments.positional)?, named: Vec::new() };
        for (name, value) in &arguments.named {
            args.named.push((name.clone(), self.evaluate(*value)?));
        }
        if let Some(spread) = arguments.spread {
            let spread = self.evaluate(spread)?;
            args.positional.extend(ops::iterate(&mut self.objects, &spread)?);
        }
        if let Some(spread) = arguments.spread_named {
            let Value::Dict(entries) = self.evaluate(spread)? else { return fail("the argument after ** must be a mapping") };
            for (key, value) in entries.iter() {
                let Some(name) = key.value().as_str() else { return fail("keywords must be strings") };
                args.named.push((name.to_string(), value.clone()));
            }
        }
        self.objects.budget.steps(args.named.len())?;
        let mut seen = HashSet::new();
        if let Some((name, _)) = args.named.iter().find(|(name, _)| !seen.insert(name.as_str())) {
            return fail(format!("got multiple values for keyword argument '{name}'"));
        }
        Ok(args)
    }

    /// `callee(*args)`
    pub(super) fn call(&mut self, callee: &Value, args: Args) -> Result<Value> {
        let callee = callee.defined()?;
        self.objects.budget.step()?;
        self.objects.budget.deeper()?;
        let value = match callee {
            Value::Global(global) => globals::call(self, *global, args),
            Value::Method(method) => methods::call(self, &method.0, method.1, args),
            Value::Object(Object::Macro, index) => self.call_macro(*index, args),
            Value::Object(Object::Joiner, index) => globals::call_joiner(self, *index, &args),
            Value::Object(Object::Loop, index) => {
                let [iterable] = args.bind("loop", ["iterable"], 1)?;
                self.recurse_loop(*index, &iterable.unwrap_or(Value::None))
            }
            callee => fail(format!("'{}' object is not callable", callee.type_name())),
        };
        self.objects.budget.shallower();
        value
    }
}
