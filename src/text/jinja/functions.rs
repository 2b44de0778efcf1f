//! Calls the functions that every template can call.

use super::arguments::{Args, integer, string};
use super::context::Context;
use super::failure::{Failure, Result, fail};
use super::globals::Global;
use super::strftime;
use super::value::{Entries, Key, Range, Value};

/// Maximum number of elements of a range, as in Jinja's sandbox.
const MAX_RANGE: usize = 100_000;

pub fn call(context: &mut dyn Context, global: Global, args: Args) -> Result<Value> {
    match global {
        Global::Range => range(&args),
        Global::Dict => dict(context, args),
        Global::Namespace => match dict(context, args)? {
            Value::Dict(dict) => {
                let mut attributes = Entries::new(&context.objects().budget)?;
                attributes.extend(&dict)?;
                context.objects_mut().add_namespace(attributes)
            }
            _ => fail("namespace() takes a mapping"),
        },
        Global::Cycler if args.positional.is_empty() => fail("at least one item has to be provided"),
        Global::Cycler => context.objects_mut().add_cycler(args.positional),
        Global::Joiner => {
            let [separator] = args.bind("joiner", ["sep"], 0)?;
            let separator = separator.map_or_else(|| context.budget().text(", "), Ok)?;
            context.objects_mut().add_joiner(separator)
        }
        Global::Lipsum => fail("lipsum() is not supported: its text is random"),
        Global::RaiseException => {
            let [message] = args.bind("raise_exception", ["message"], 1)?;
            Err(Failure::new(&*context.str(&message.unwrap_or(Value::None))?))
        }
        Global::StrftimeNow => {
            let [format] = args.bind("strftime_now", ["format"], 1)?;
            let format = format.unwrap_or(Value::None);
            let format = string(&format)?;
            let budget = context.budget();
            budget.steps(format.len())?;
            // A directive of five bytes can write a thousand, into a string whose capacity doubles.
            let _scratch = budget.lease(format.len().saturating_mul(600))?;
            budget.text(&strftime::now(format)?)
        }
    }
}

fn range(args: &Args) -> Result<Value> {
    let [first, second, step] = args.bind("range", ["", "", ""], 1)?;
    let first = integer(&first.unwrap_or(Value::None))?;
    let (start, stop) = match second {
        Some(stop) => (first, integer(&stop)?),
        None => (0, first),
    };
    let step = step.map_or(Ok(1), |step| integer(&step))?;
    if step == 0 {
        return fail("range() arg 3 must not be zero");
    }
    if [start, stop, step].iter().any(|number| number.unsigned_abs() > i64::MAX as u128) {
        return fail("range() takes numbers of at most 63 bits");
    }
    let range = Range { start, stop, step };
    if range.len() > MAX_RANGE {
        return fail(format_args!("range() is too long ({} elements, at most {MAX_RANGE}); shorten it", range.len()));
    }
    Ok(Value::Range(range))
}

/// Returns `dict(mapping_or_pairs, **named)`.
fn dict(context: &mut dyn Context, args: Args) -> Result<Value> {
    let [source] = Args::new(args.positional).bind("dict", [""], 0)?;
    let budget = context.budget();
    let mut entries = Entries::new(&budget)?;
    match source {
        None => {}
        Some(Value::Dict(dict)) => entries.extend(&dict)?,
        Some(pairs) => {
            for pair in context.objects_mut().iterate(&pairs)? {
                let pair = context.objects_mut().iterate(&pair?)?.collect()?;
                let [key, value] = &pair[..] else { return fail("dict() takes a mapping or pairs") };
                entries.insert(budget.key(key.clone())?, value.clone())?;
            }
        }
    }
    for (name, value) in args.named {
        entries.insert(Key::new(Value::Str(name))?, value)?;
    }
    budget.dict(entries)
}

/// Returns the separator, except at the first call.
pub fn call_joiner(context: &mut dyn Context, index: usize, args: &Args) -> Result<Value> {
    args.none("joiner")?;
    let joiner = &mut context.objects_mut().joiners[index];
    match std::mem::replace(&mut joiner.used, true) {
        true => Ok(joiner.separator.clone()),
        false => context.budget().text(""),
    }
}
