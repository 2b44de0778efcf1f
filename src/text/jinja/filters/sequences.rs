//! Filters of lists and other iterables.

use super::super::arguments::{Args, given, integer};
use super::super::ast::Operator;
use super::super::budget::{Buffer, Builder};
use super::super::context::Context;
use super::super::failure::{Failure, Kind, Result, fail};
use super::super::ops;
use super::super::repr;
use super::super::sorting::sorted;
use super::super::tests;
use super::super::value::{Entries, Object, Value, View};
use super::{Getter, flag, fold};

pub fn apply(context: &mut dyn Context, name: &str, value: Value, args: Args) -> Result<Value> {
    match name {
        "map" => return map(context, &value, args),
        "select" | "reject" | "selectattr" | "rejectattr" => return select(context, name, &value, args),
        "join" => return join(context, &value, &args),
        "sum" => return sum(context, &value, &args),
        "min" | "max" => return extreme(context, name, &value, &args),
        "sort" => return sort(context, &value, &args),
        "unique" => return unique(context, &value, &args),
        "groupby" => return groupby(context, &value, &args),
        "dictsort" => return dictsort(context, &value, &args),
        "batch" | "slice" => return pieces(context, name, &value, &args),
        _ => args.none(name)?,
    }
    let budget = context.budget();
    match name {
        "first" => {
            let first = match value {
                Value::Object(Object::Iterator, index) => context.objects_mut().next(index)?,
                value => context.objects_mut().iterate(&value)?.next().transpose()?,
            };
            first.map_or_else(|| budget.undefined("No first item, sequence was empty."), Ok)
        }
        "last" => {
            if matches!(value, Value::Object(..)) {
                return fail(format_args!("'{}' object is not reversible", value.type_name()));
            }
            let last = context.objects_mut().iterate(&value)?.next_back().transpose()?;
            last.map_or_else(|| budget.undefined("No last item, sequence was empty."), Ok)
        }
        "list" => context.objects_mut().iterate(&value)?.collect()?.into_list(),
        "items" => match &value {
            Value::Undefined(_) => context.objects_mut().add_iterator(Buffer::new(&budget)),
            Value::Dict(dict) => {
                let pairs = context.objects_mut().iterate(&Value::View(View::Items, dict.clone()))?.collect()?;
                context.objects_mut().add_iterator(pairs)
            }
            _ => failing(context, Failure::new("Can only get item pairs from a mapping.")),
        },
        _ => match &value {
            Value::Str(text) => {
                let mut reversed = Builder::new(&budget);
                text.as_str().chars().rev().try_for_each(|c| reversed.push_char(c))?;
                reversed.into_text(false)
            }
            value => {
                let mut items = context.objects_mut().iterate(value)?.collect()?;
                items.reverse();
                if matches!(value, Value::Object(..)) { items.into_list() } else { context.objects_mut().add_iterator(items) }
            }
        },
    }
}

/// Returns an iterator that fails at once when it is visited.
fn failing(context: &mut dyn Context, failure: Failure) -> Result<Value> {
    let none = Buffer::new(&context.objects().budget);
    context.objects_mut().add_failing_iterator(none, failure)
}

/// Applies `work` to each item. A failure is raised only when the iterator reaches it.
fn lazily(
    context: &mut dyn Context,
    value: &Value,
    mut work: impl FnMut(&mut dyn Context, Value) -> Result<Option<Value>>,
) -> Result<Value> {
    let mut done = Buffer::new(&context.objects().budget);
    let result = context.objects_mut().iterate(value).and_then(|mut items| {
        items.try_for_each(|item| match work(context, item?)? {
            Some(item) => done.push(item),
            None => Ok(()),
        })
    });
    match result {
        Ok(()) => context.objects_mut().add_iterator(done),
        // A limit fails at once, also if the item is never reached.
        Err(e) if e.kind != Kind::Template => Err(e),
        Err(e) => context.objects_mut().add_failing_iterator(done, e),
    }
}

fn map(context: &mut dyn Context, value: &Value, mut args: Args) -> Result<Value> {
    if !value.is_true() {
        let none = Buffer::new(&context.objects().budget);
        return context.objects_mut().add_iterator(none);
    }
    let attribute = args.named.iter().position(|(name, _)| name.as_str() == "attribute");
    if let Some(found) = attribute.filter(|_| args.positional.is_empty()) {
        let attribute = args.named.remove(found).1;
        let default = args.named.iter().position(|(name, _)| name.as_str() == "default").map(|found| args.named.remove(found).1);
        if let Some((name, _)) = args.named.first() {
            let failure = Failure::new(format_args!("Unexpected keyword argument '{}'", name.as_str()));
            return failing(context, failure);
        }
        let getter = Getter::new(context, Some(attribute), default, false)?;
        return lazily(context, value, |context, item| getter.get(context, &item).map(Some));
    }
    if args.positional.is_empty() {
        return failing(context, Failure::new("map requires a filter argument"));
    }
    let filter = args.positional.remove(0);
    lazily(context, value, |context, item| {
        let Some(name) = filter.as_str() else { return fail("the name of a filter must be a string") };
        super::apply(context, name, item, args.copy()?).map(Some)
    })
}

fn select(context: &mut dyn Context, name: &str, value: &Value, mut args: Args) -> Result<Value> {
    let by_attribute = name.ends_with("attr");
    let wanted = name.starts_with("select");
    if !value.is_true() {
        let none = Buffer::new(&context.objects().budget);
        return context.objects_mut().add_iterator(none);
    }
    let attribute = match by_attribute {
        true if args.positional.is_empty() => {
            return failing(context, Failure::new("Missing parameter for attribute name"));
        }
        true => Some(args.positional.remove(0)),
        false => None,
    };
    let getter = Getter::new(context, attribute, None, false)?;
    let test = if args.positional.is_empty() { None } else { Some(args.positional.remove(0)) };
    lazily(context, value, |context, item| {
        let selected = getter.get(context, &item)?;
        let holds = match &test {
            None => selected.is_true(),
            Some(name) => match name.as_str() {
                Some(name) => tests::apply(context, name, &selected, &args)?,
                None => return fail("the name of a test must be a string"),
            },
        };
        Ok((holds == wanted).then_some(item))
    })
}

fn join(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [separator, attribute] = args.bind("join", ["d", "attribute"], 0)?;
    let getter = Getter::new(context, attribute, None, false)?;
    let budget = context.budget();
    let separator = separator.map_or_else(|| Ok(Builder::new(&budget)), |separator| context.str(&separator))?;
    let mut out = Builder::new(&budget);
    for (i, item) in context.objects_mut().iterate(value)?.enumerate() {
        let item = getter.get(context, &item?)?;
        out.push(if i > 0 { &separator } else { "" })?;
        repr::push_str(&mut out, context.objects(), &item)?;
    }
    out.into_text(false)
}

fn sum(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [attribute, start] = args.bind("sum", ["attribute", "start"], 0)?;
    let getter = Getter::new(context, attribute, None, false)?;
    let mut total = start.unwrap_or(Value::Int(0));
    if matches!(total, Value::Str(_)) {
        return fail("sum() can't sum strings [use ''.join(seq) instead]");
    }
    for item in context.objects_mut().iterate(value)? {
        let item = getter.get(context, &item?)?;
        total = ops::binary(context.objects_mut(), Operator::Add, &total, &item)?;
    }
    Ok(total)
}

fn extreme(context: &mut dyn Context, name: &str, value: &Value, args: &Args) -> Result<Value> {
    let [case_sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
    let getter = Getter::new(context, attribute, None, false)?;
    let case_sensitive = flag(case_sensitive);
    let wanted = if name == "min" { std::cmp::Ordering::Less } else { std::cmp::Ordering::Greater };
    let mut best: Option<(Value, Value)> = None;
    for item in context.objects_mut().iterate(value)? {
        let item = item?;
        let key = getter.get(context, &item)?;
        let key = fold(context, key, case_sensitive)?;
        let better = match &best {
            None => true,
            Some((known, _)) => ops::order(context.objects(), "<", &key, known)? == Some(wanted),
        };
        if better {
            best = Some((key, item));
        }
    }
    best.map_or_else(|| context.budget().undefined("No aggregated item, sequence was empty."), |(_, item)| Ok(item))
}

/// Sorts items by their keys. Equal items keep their order, also in reversed order.
fn sort_by_keys(context: &dyn Context, mut items: Buffer<(Value, Value)>, reverse: bool) -> Result<Buffer<(Value, Value)>> {
    if reverse {
        items.reverse();
    }
    let mut items = sorted(items, |(a, _), (b, _)| ops::order(context.objects(), "<", a, b))?;
    if reverse {
        items.reverse();
    }
    Ok(items)
}

/// Returns the items without their keys, as a list.
fn without_keys(items: Buffer<(Value, Value)>) -> Result<Value> {
    let mut list = Buffer::new(items.budget());
    list.extend(items.into_iter().map(|(_, item)| item))?;
    list.into_list()
}

fn sort(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [reverse, case_sensitive, attribute] = args.bind("sort", ["reverse", "case_sensitive", "attribute"], 0)?;
    let getter = Getter::new(context, attribute, None, true)?;
    let case_sensitive = flag(case_sensitive);
    let mut items = Buffer::new(&context.objects().budget);
    for item in context.objects_mut().iterate(value)? {
        let item = item?;
        items.push((getter.get_all(context, &item, case_sensitive)?, item))?;
    }
    without_keys(sort_by_keys(context, items, flag(reverse))?)
}

fn dictsort(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [case_sensitive, by, reverse] = args.bind("dictsort", ["case_sensitive", "by", "reverse"], 0)?;
    let by_value = match by.as_ref().map_or(Some("key"), Value::as_str) {
        Some("key") => false,
        Some("value") => true,
        _ => return fail("You can only sort by either \"key\" or \"value\""),
    };
    let Value::Dict(dict) = value.defined()? else { return fail(format_args!("'{}' object has no attribute 'items'", value.type_name())) };
    let case_sensitive = flag(case_sensitive);
    let budget = context.budget();
    let mut items = Buffer::new(&budget);
    for (key, value) in dict.iter() {
        budget.step()?;
        let sorted_by = fold(context, if by_value { value.clone() } else { key.value().clone() }, case_sensitive)?;
        items.push((sorted_by, budget.pair(key.value().clone(), value.clone())?))?;
    }
    without_keys(sort_by_keys(context, items, flag(reverse))?)
}

fn unique(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [case_sensitive, attribute] = args.bind("unique", ["case_sensitive", "attribute"], 0)?;
    let getter = Getter::new(context, attribute, None, false)?;
    let case_sensitive = flag(case_sensitive);
    let mut seen = Entries::new(&context.objects().budget)?;
    lazily(context, value, |context, item| {
        let key = getter.get(context, &item)?;
        let key = fold(context, key, case_sensitive)?;
        let key = context.objects().budget.key(key)?;
        let is_new = !seen.contains_key(&key);
        seen.insert(key, Value::None)?;
        Ok(is_new.then_some(item))
    })
}

fn groupby(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [attribute, default, case_sensitive] = args.bind("groupby", ["attribute", "default", "case_sensitive"], 1)?;
    let getter = Getter::new(context, attribute, default, false)?;
    let case_sensitive = flag(case_sensitive);
    let budget = context.budget();
    let mut items = Buffer::new(&budget);
    for item in context.objects_mut().iterate(value)? {
        let item = item?;
        let key = getter.get(context, &item)?;
        items.push((fold(context, key, case_sensitive)?, item))?;
    }
    let mut groups: Buffer<(Value, Buffer<Value>)> = Buffer::new(&budget);
    for (key, item) in sort_by_keys(context, items, false)? {
        match groups.last_mut() {
            Some((known, items)) if ops::equal(context.objects(), known, &key)? => items.push(item)?,
            _ => {
                let mut items = Buffer::new(&budget);
                items.push(item)?;
                groups.push((key, items))?;
            }
        }
    }
    let mut out = Buffer::new(&budget);
    for (key, items) in groups {
        // The key in the form of the first item.
        let key = if case_sensitive { key } else { getter.get(context, &items[0])? };
        out.push(budget.pair(key, items.into_list()?)?)?;
    }
    out.into_list()
}

/// Applies `batch` and `slice`: returns lists with a number of items, or a number of lists.
fn pieces(context: &mut dyn Context, name: &str, value: &Value, args: &Args) -> Result<Value> {
    let [count, fill] = args.bind(name, [if name == "batch" { "linecount" } else { "slices" }, "fill_with"], 1)?;
    let count = integer(&count.unwrap_or(Value::None))?;
    let fill = given(fill);
    let budget = context.budget();
    let items = match context.objects_mut().iterate(value) {
        Ok(items) => items.collect()?,
        Err(e) => return failing(context, e),
    };
    let mut out = Buffer::new(&budget);
    if name == "batch" {
        // If no list can have this length, all items are in one list.
        let size = usize::try_from(count).ok().filter(|&size| size > 0);
        let size = size.unwrap_or(if count == 0 { 0 } else { usize::MAX });
        if size == 0 && !items.is_empty() {
            // Python yields an empty list first, after which the count never matches.
            out.push(Buffer::new(&budget).into_list()?)?;
        }
        for piece in items.chunks(if size == 0 { usize::MAX } else { size }) {
            let mut list = Buffer::new(&budget);
            list.extend(piece.iter().cloned())?;
            if let Some(fill) = fill.as_ref().filter(|_| size < usize::MAX) {
                list.extend((0..size.saturating_sub(piece.len())).map(|_| fill.clone()))?;
            }
            out.push(list.into_list()?)?;
        }
        return context.objects_mut().add_iterator(out);
    }
    if count == 0 {
        return failing(context, Failure::new("integer division or modulo by zero"));
    }
    let count = usize::try_from(count).unwrap_or(0);
    budget.steps(count)?;
    let size = items.len().checked_div(count).unwrap_or(0);
    let extra = items.len().checked_rem(count).unwrap_or(0);
    let mut start = 0;
    for i in 0..count {
        let end = start + size + usize::from(i < extra);
        let mut piece = Buffer::new(&budget);
        piece.extend(items[start..end].iter().cloned())?;
        fill.iter().filter(|_| i >= extra).try_for_each(|fill| piece.push(fill.clone()))?;
        out.push(piece.into_list()?)?;
        start = end;
    }
    context.objects_mut().add_iterator(out)
}
