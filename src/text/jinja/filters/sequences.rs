//! Filters of lists and other iterables.

use std::collections::VecDeque;

use super::super::arguments::{Args, given, integer};
use super::super::ast::Operator;
use super::super::budget::Builder;
use super::super::failure::{Failure, Result, fail};
use super::super::interpreter::Interpreter;
use super::super::json::try_sort;
use super::super::ops;
use super::super::repr;
use super::super::tests;
use super::super::value::{Object, Value};
use super::{Getter, flag, fold};

pub fn apply(interpreter: &mut Interpreter, name: &str, value: Value, args: Args) -> Result<Value> {
    match name {
        "map" => return map(interpreter, &value, args),
        "select" | "reject" | "selectattr" | "rejectattr" => return select(interpreter, name, &value, args),
        "join" => return join(interpreter, &value, &args),
        "sum" => return sum(interpreter, &value, &args),
        "min" | "max" => return extreme(interpreter, name, &value, &args),
        "sort" => return sort(interpreter, &value, &args),
        "unique" => return unique(interpreter, &value, &args),
        "groupby" => return groupby(interpreter, &value, &args),
        "dictsort" => return dictsort(interpreter, &value, &args),
        "batch" | "slice" => return pieces(interpreter, name, &value, &args),
        _ => args.none(name)?,
    }
    let budget = interpreter.budget();
    match name {
        "first" => {
            let first = match value {
                Value::Object(Object::Iterator, index) => interpreter.objects.next(index)?,
                value => ops::iterate(&mut interpreter.objects, &value)?.pop_front(),
            };
            Ok(first.unwrap_or_else(|| Value::Undefined("No first item, sequence was empty.".into())))
        }
        "last" => {
            if matches!(value, Value::Object(..)) {
                return fail(format!("'{}' object is not reversible", value.type_name()));
            }
            let last = ops::iterate(&mut interpreter.objects, &value)?.pop_back();
            Ok(last.unwrap_or_else(|| Value::Undefined("No last item, sequence was empty.".into())))
        }
        "list" => budget.list(ops::iterate(&mut interpreter.objects, &value)?.into()),
        "items" => match &value {
            Value::Undefined(_) => interpreter.objects.add_iterator([], None),
            Value::Dict(dict) => {
                let pairs = dict.iter().map(|(key, value)| budget.tuple(vec![key.value().clone(), value.clone()]));
                let pairs = pairs.collect::<Result<Vec<_>>>()?;
                interpreter.objects.add_iterator(pairs, None)
            }
            _ => interpreter.objects.add_iterator([], Some(Failure::new("Can only get item pairs from a mapping."))),
        },
        _ => match &value {
            Value::Str(text) => budget.text(text.as_str().chars().rev().collect::<String>()),
            value => {
                let items = ops::iterate(&mut interpreter.objects, value)?;
                let reversed = items.into_iter().rev();
                match value {
                    Value::Object(..) => budget.list(reversed.collect()),
                    _ => interpreter.objects.add_iterator(reversed, None),
                }
            }
        },
    }
}

/// Applies `work` to each item, for an iterator that raises a failure only when it is reached.
fn lazily(
    interpreter: &mut Interpreter,
    value: &Value,
    mut work: impl FnMut(&mut Interpreter, Value) -> Result<Option<Value>>,
) -> Result<Value> {
    let (mut done, mut failure) = (Vec::new(), None);
    let items = match ops::iterate(&mut interpreter.objects, value) {
        Ok(items) => items,
        Err(e) => {
            failure = Some(e);
            VecDeque::new()
        }
    };
    for item in items {
        match work(interpreter, item) {
            Ok(item) => done.extend(item),
            Err(e) => {
                failure = Some(e);
                break;
            }
        }
    }
    // A limit is a limit, whether the item is reached or not.
    if let Some(e) = failure.take_if(|e| e.kind == super::super::Kind::Limit) {
        return Err(e);
    }
    interpreter.objects.add_iterator(done, failure)
}

fn map(interpreter: &mut Interpreter, value: &Value, mut args: Args) -> Result<Value> {
    if !value.is_true() {
        return interpreter.objects.add_iterator([], None);
    }
    let attribute = args.named.iter().position(|(name, _)| name == "attribute");
    if let Some(found) = attribute.filter(|_| args.positional.is_empty()) {
        let attribute = args.named.remove(found).1;
        let default = args.named.iter().position(|(name, _)| name == "default").map(|found| args.named.remove(found).1);
        if let Some((name, _)) = args.named.first() {
            let failure = Failure::new(format!("Unexpected keyword argument '{name}'"));
            return interpreter.objects.add_iterator([], Some(failure));
        }
        let getter = Getter::new(interpreter, Some(attribute), default, false)?;
        return lazily(interpreter, value, |interpreter, item| getter.get(interpreter, &item).map(Some));
    }
    if args.positional.is_empty() {
        return interpreter.objects.add_iterator([], Some(Failure::new("map requires a filter argument")));
    }
    let filter = args.positional.remove(0);
    lazily(interpreter, value, |interpreter, item| {
        let Some(name) = filter.as_str() else { return fail("the name of a filter must be a string") };
        super::apply(interpreter, name, item, args.clone()).map(Some)
    })
}

fn select(interpreter: &mut Interpreter, name: &str, value: &Value, mut args: Args) -> Result<Value> {
    let by_attribute = name.ends_with("attr");
    let wanted = name.starts_with("select");
    if !value.is_true() {
        return interpreter.objects.add_iterator([], None);
    }
    let attribute = match by_attribute {
        true if args.positional.is_empty() => {
            return interpreter.objects.add_iterator([], Some(Failure::new("Missing parameter for attribute name")));
        }
        true => Some(args.positional.remove(0)),
        false => None,
    };
    let getter = Getter::new(interpreter, attribute, None, false)?;
    let test = if args.positional.is_empty() { None } else { Some(args.positional.remove(0)) };
    lazily(interpreter, value, |interpreter, item| {
        let selected = getter.get(interpreter, &item)?;
        let holds = match &test {
            None => selected.is_true(),
            Some(name) => match name.as_str() {
                Some(name) => tests::apply(interpreter, name, &selected, &args)?,
                None => return fail("the name of a test must be a string"),
            },
        };
        Ok((holds == wanted).then_some(item))
    })
}

fn join(interpreter: &mut Interpreter, value: &Value, args: &Args) -> Result<Value> {
    let [separator, attribute] = args.bind("join", ["d", "attribute"], 0)?;
    let getter = Getter::new(interpreter, attribute, None, false)?;
    let separator = separator.map_or(Ok(String::new()), |separator| interpreter.str(&separator))?;
    let budget = interpreter.budget();
    let mut out = Builder::new(&budget);
    for (i, item) in ops::iterate(&mut interpreter.objects, value)?.into_iter().enumerate() {
        let item = getter.get(interpreter, &item)?;
        out.push(if i > 0 { &separator } else { "" })?;
        repr::push_str(&mut out, &interpreter.objects, &item)?;
    }
    budget.text(out.finish())
}

fn sum(interpreter: &mut Interpreter, value: &Value, args: &Args) -> Result<Value> {
    let [attribute, start] = args.bind("sum", ["attribute", "start"], 0)?;
    let getter = Getter::new(interpreter, attribute, None, false)?;
    let mut total = start.unwrap_or(Value::Int(0));
    if matches!(total, Value::Str(_)) {
        return fail("sum() can't sum strings [use ''.join(seq) instead]");
    }
    for item in ops::iterate(&mut interpreter.objects, value)? {
        let item = getter.get(interpreter, &item)?;
        total = ops::binary(&mut interpreter.objects, Operator::Add, &total, &item)?;
    }
    Ok(total)
}

fn extreme(interpreter: &mut Interpreter, name: &str, value: &Value, args: &Args) -> Result<Value> {
    let [case_sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
    let getter = Getter::new(interpreter, attribute, None, false)?;
    let case_sensitive = flag(case_sensitive);
    let wanted = if name == "min" { std::cmp::Ordering::Less } else { std::cmp::Ordering::Greater };
    let mut best: Option<(Value, Value)> = None;
    for item in ops::iterate(&mut interpreter.objects, value)? {
        let key = getter.get(interpreter, &item)?;
        let key = fold(interpreter, key, case_sensitive)?;
        let better = match &best {
            None => true,
            Some((known, _)) => ops::order(&interpreter.objects, "<", &key, known)? == Some(wanted),
        };
        if better {
            best = Some((key, item));
        }
    }
    Ok(best.map_or_else(|| Value::Undefined("No aggregated item, sequence was empty.".into()), |(_, item)| item))
}

/// Sorts items by their keys. Equal items keep their order, also where the order is reversed.
/// A single key is compared as it is; several are compared as a list, whose equal elements are skipped.
fn sort_by_keys(
    interpreter: &mut Interpreter,
    mut items: Vec<(Vec<Value>, Value)>,
    reverse: bool,
    as_list: bool,
) -> Result<Vec<(Vec<Value>, Value)>> {
    if reverse {
        items.reverse();
    }
    let objects = &interpreter.objects;
    try_sort(&mut items, |(a, _), (b, _)| {
        for (a, b) in a.iter().zip(b) {
            if !as_list || !ops::equal(objects, a, b)? {
                return ops::order(objects, "<", a, b);
            }
        }
        Ok(Some(std::cmp::Ordering::Equal))
    })?;
    if reverse {
        items.reverse();
    }
    Ok(items)
}

fn sort(interpreter: &mut Interpreter, value: &Value, args: &Args) -> Result<Value> {
    let [reverse, case_sensitive, attribute] = args.bind("sort", ["reverse", "case_sensitive", "attribute"], 0)?;
    let getter = Getter::new(interpreter, attribute, None, true)?;
    let case_sensitive = flag(case_sensitive);
    let mut items = Vec::new();
    for item in ops::iterate(&mut interpreter.objects, value)? {
        items.push((getter.get_all(interpreter, &item, case_sensitive)?, item));
    }
    let sorted = sort_by_keys(interpreter, items, flag(reverse), true)?;
    interpreter.budget().list(sorted.into_iter().map(|(_, item)| item).collect())
}

fn dictsort(interpreter: &mut Interpreter, value: &Value, args: &Args) -> Result<Value> {
    let [case_sensitive, by, reverse] = args.bind("dictsort", ["case_sensitive", "by", "reverse"], 0)?;
    let by_value = match by.as_ref().map_or(Some("key"), Value::as_str) {
        Some("key") => false,
        Some("value") => true,
        _ => return fail("You can only sort by either \"key\" or \"value\""),
    };
    let Value::Dict(dict) = value.defined()? else { return fail(format!("'{}' object has no attribute 'items'", value.type_name())) };
    let case_sensitive = flag(case_sensitive);
    let budget = interpreter.budget();
    let mut items = Vec::new();
    for (key, value) in dict.iter() {
        let sorted_by = fold(interpreter, if by_value { value.clone() } else { key.value().clone() }, case_sensitive)?;
        items.push((vec![sorted_by], budget.tuple(vec![key.value().clone(), value.clone()])?));
    }
    let sorted = sort_by_keys(interpreter, items, flag(reverse), false)?;
    budget.list(sorted.into_iter().map(|(_, item)| item).collect())
}

fn unique(interpreter: &mut Interpreter, value: &Value, args: &Args) -> Result<Value> {
    let [case_sensitive, attribute] = args.bind("unique", ["case_sensitive", "attribute"], 0)?;
    let getter = Getter::new(interpreter, attribute, None, false)?;
    let case_sensitive = flag(case_sensitive);
    let mut seen = indexmap::IndexSet::new();
    lazily(interpreter, value, |interpreter, item| {
        let key = getter.get(interpreter, &item)?;
        let key = fold(interpreter, key, case_sensitive)?;
        Ok(seen.insert(interpreter.budget().key(key)?).then_some(item))
    })
}

fn groupby(interpreter: &mut Interpreter, value: &Value, args: &Args) -> Result<Value> {
    let [attribute, default, case_sensitive] = args.bind("groupby", ["attribute", "default", "case_sensitive"], 1)?;
    let getter = Getter::new(interpreter, attribute, default, false)?;
    let case_sensitive = flag(case_sensitive);
    let mut items = Vec::new();
    for item in ops::iterate(&mut interpreter.objects, value)? {
        let key = getter.get(interpreter, &item)?;
        items.push((vec![fold(interpreter, key, case_sensitive)?], item));
    }
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for (key, item) in sort_by_keys(interpreter, items, false, false)? {
        match groups.last_mut() {
            Some((known, items)) if ops::equal(&interpreter.objects, known, &key[0])? => items.push(item),
            _ => groups.push((key[0].clone(), vec![item])),
        }
    }
    let budget = interpreter.budget();
    let mut out = Vec::new();
    for (key, items) in groups {
        // The key as the first item writes it.
        let key = if case_sensitive { key } else { getter.get(interpreter, &items[0])? };
        out.push(budget.tuple(vec![key, budget.list(items)?])?);
    }
    budget.list(out)
}

/// `batch` and `slice`: lists of a number of items, or a number of lists.
fn pieces(interpreter: &mut Interpreter, name: &str, value: &Value, args: &Args) -> Result<Value> {
    let [count, fill] = args.bind(name, [if name == "batch" { "linecount" } else { "slices" }, "fill_with"], 1)?;
    let count = integer(&count.unwrap_or(Value::None))?;
    let fill = given(fill);
    let budget = interpreter.budget();
    let items: Vec<Value> = match ops::iterate(&mut interpreter.objects, value) {
        Ok(items) => items.into(),
        Err(e) => return interpreter.objects.add_iterator([], Some(e)),
    };
    let mut out = Vec::new();
    if name == "batch" {
        // A count that no list reaches puts all items in one.
        let size = usize::try_from(count).ok().filter(|&size| size > 0);
        let size = size.unwrap_or(if count == 0 { 0 } else { usize::MAX });
        if size == 0 && !items.is_empty() {
            // Python yields an empty list first, and then never reaches the count again.
            out.push(budget.list(Vec::new())?);
        }
        for piece in items.chunks(if size == 0 { usize::MAX } else { size }) {
            let mut piece = piece.to_vec();
            if let Some(fill) = fill.clone().filter(|_| size < usize::MAX) {
                budget.check(size.saturating_mul(size_of::<Value>()))?;
                piece.resize(size.max(piece.len()), fill);
            }
            out.push(budget.list(piece)?);
        }
        return interpreter.objects.add_iterator(out, None);
    }
    if count == 0 {
        return interpreter.objects.add_iterator([], Some(Failure::new("integer division or modulo by zero")));
    }
    let count = usize::try_from(count).unwrap_or(0);
    budget.steps(count)?;
    budget.check(count.saturating_mul(128))?;
    let size = items.len().checked_div(count).unwrap_or(0);
    let extra = items.len().checked_rem(count).unwrap_or(0);
    let mut start = 0;
    for i in 0..count {
        let end = start + size + usize::from(i < extra);
        let mut piece = items[start..end].to_vec();
        piece.extend(fill.clone().filter(|_| i >= extra));
        out.push(budget.list(piece)?);
        start = end;
    }
    interpreter.objects.add_iterator(out, None)
}
