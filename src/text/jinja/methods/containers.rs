//! Methods of lists, tuples, ranges and dictionaries.

use super::super::arguments::{Args, integer};
use super::super::attributes::view_named;
use super::super::failure::{Result, fail};
use super::super::interpreter::Interpreter;
use super::super::iteration::iterate;
use super::super::ops;
use super::super::value::{Dict, Entries, Value};

pub fn sequence(interpreter: &mut Interpreter, value: &Value, method: &str, args: &Args) -> Result<Value> {
    let objects = &mut interpreter.objects;
    let items = iterate(objects, value)?;
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

pub fn dict(interpreter: &mut Interpreter, dict: &Dict, method: &str, args: &Args) -> Result<Value> {
    if let Some(view) = view_named(method) {
        args.none(method)?;
        return Ok(Value::View(view, dict.clone()));
    }
    match method {
        "get" => {
            let [key, default] = args.bind(method, ["", ""], 1)?;
            let found = dict.get(&interpreter.budget().key(key.unwrap_or(Value::None))?).cloned();
            Ok(found.or(default).unwrap_or(Value::None))
        }
        "fromkeys" => {
            let [keys, value] = args.bind(method, ["", ""], 1)?;
            let value = value.unwrap_or(Value::None);
            let budget = interpreter.budget();
            let mut entries = Entries::new(&budget)?;
            for key in iterate(&mut interpreter.objects, &keys.unwrap_or(Value::None))? {
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

pub fn is_disjoint(interpreter: &mut Interpreter, view: &Value, args: &Args) -> Result<Value> {
    let [other] = args.bind("isdisjoint", [""], 1)?;
    for item in iterate(&mut interpreter.objects, &other.unwrap_or(Value::None))? {
        if ops::contains(&mut interpreter.objects, view, &item?)? {
            return Ok(Value::Bool(false));
        }
    }
    Ok(Value::Bool(true))
}
