//! Methods of lists, tuples, ranges and dictionaries.

use super::super::arguments::{Args, integer};
use super::super::context::Context;
use super::super::failure::{Result, fail};
use super::super::ops;
use super::super::value::{Dict, Entries, Value, View};

pub fn sequence(context: &mut dyn Context, value: &Value, method: &str, args: &Args) -> Result<Value> {
    let objects = context.objects_mut();
    let items = objects.iterate(value)?;
    match method {
        "copy" => {
            args.none(method)?;
            items.collect()?.into_list()
        }
        "count" => {
            let [wanted] = args.bind(method, [""], 1)?;
            let wanted = wanted.unwrap_or(Value::None);
            let mut count = 0;
            for item in items {
                count += i128::from(ops::is_item(objects, &item?, &wanted)?);
            }
            Ok(Value::Int(count))
        }
        _ => {
            let [wanted, start, stop] = args.bind(method, ["", "", ""], 1)?;
            let wanted = wanted.unwrap_or(Value::None);
            let len = items.len() as i128;
            let bound = |argument: Option<Value>, default: i128| -> Result<usize> {
                let index = argument.map_or(Ok(default), |argument| integer(&argument))?;
                Ok((if index < 0 { index + len } else { index }).clamp(0, len) as usize)
            };
            let (start, stop) = (bound(start, 0)?, bound(stop, len)?);
            for (i, item) in items.enumerate().take(stop) {
                if i >= start && ops::is_item(objects, &item?, &wanted)? {
                    return Ok(Value::Int(i as i128));
                }
            }
            fail(format_args!("the value is not in the {}", value.type_name()))
        }
    }
}

pub fn dict(context: &mut dyn Context, dict: &Dict, method: &str, args: &Args) -> Result<Value> {
    if let Some(view) = View::named(method) {
        args.none(method)?;
        return Ok(Value::View(view, dict.clone()));
    }
    match method {
        "get" => {
            let [key, default] = args.bind(method, ["", ""], 1)?;
            let found = dict.get(&context.budget().key(key.unwrap_or(Value::None))?).cloned();
            Ok(found.or(default).unwrap_or(Value::None))
        }
        "fromkeys" => {
            let [keys, value] = args.bind(method, ["", ""], 1)?;
            let value = value.unwrap_or(Value::None);
            let budget = context.budget();
            let mut entries = Entries::new(&budget)?;
            for key in context.objects_mut().iterate(&keys.unwrap_or(Value::None))? {
                entries.insert(budget.key(key?)?, value.clone())?;
            }
            budget.dict(entries)
        }
        _ => {
            args.none(method)?;
            Ok(Value::Dict(dict.clone()))
        }
    }
}

pub fn is_disjoint(context: &mut dyn Context, view: &Value, args: &Args) -> Result<Value> {
    let [other] = args.bind("isdisjoint", [""], 1)?;
    for item in context.objects_mut().iterate(&other.unwrap_or(Value::None))? {
        if ops::contains(context.objects_mut(), view, &item?)? {
            return Ok(Value::Bool(false));
        }
    }
    Ok(Value::Bool(true))
}
