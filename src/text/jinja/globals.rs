//! The functions that every template can call.

use super::arguments::{Args, integer, string};
use super::failure::{Failure, Result, fail};
use super::interpreter::Interpreter;
use super::iteration::iterate;
use super::strftime;
use super::value::{Entries, Key, Range, Value};

/// Maximum number of elements of a range, as in Jinja's sandbox.
const MAX_RANGE: usize = 100_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Global {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    Lipsum,
    RaiseException,
    StrftimeNow,
}

impl Global {
    pub fn named(name: &str) -> Option<Global> {
        Some(match name {
            "range" => Global::Range,
            "dict" => Global::Dict,
            "namespace" => Global::Namespace,
            "cycler" => Global::Cycler,
            "joiner" => Global::Joiner,
            "lipsum" => Global::Lipsum,
            "raise_exception" => Global::RaiseException,
            "strftime_now" => Global::StrftimeNow,
            _ => return None,
        })
    }

    pub fn repr(self) -> &'static str {
        match self {
            Global::Range => "<function safe_range>",
            Global::Dict => "<class 'dict'>",
            Global::Namespace => "<class 'jinja2.utils.Namespace'>",
            Global::Cycler => "<class 'jinja2.utils.Cycler'>",
            Global::Joiner => "<class 'jinja2.utils.Joiner'>",
            Global::Lipsum => "<function generate_lorem_ipsum>",
            Global::RaiseException => "<function raise_exception>",
            Global::StrftimeNow => "<function strftime_now>",
        }
    }
}

pub fn call(interpreter: &mut Interpreter, global: Global, args: Args) -> Result<Value> {
    match global {
        Global::Range => range(&args),
        Global::Dict => dict(interpreter, args),
        Global::Namespace => match dict(interpreter, args)? {
            Value::Dict(dict) => {
                let mut attributes = Entries::new(&interpreter.objects.budget)?;
                attributes.extend(&dict)?;
                interpreter.objects.add_namespace(attributes)
            }
            _ => fail("namespace() takes a mapping"),
        },
        Global::Cycler if args.positional.is_empty() => fail("at least one item has to be provided"),
        Global::Cycler => interpreter.objects.add_cycler(args.positional),
        Global::Joiner => {
            let [separator] = args.bind("joiner", ["sep"], 0)?;
            let separator = separator.map_or_else(|| interpreter.budget().text(", "), Ok)?;
            interpreter.objects.add_joiner(separator)
        }
        Global::Lipsum => fail("lipsum() is not supported: its text is random"),
        Global::RaiseException => {
            let [message] = args.bind("raise_exception", ["message"], 1)?;
            Err(Failure::new(&*interpreter.str(&message.unwrap_or(Value::None))?))
        }
        Global::StrftimeNow => {
            let [format] = args.bind("strftime_now", ["format"], 1)?;
            let format = format.unwrap_or(Value::None);
            let format = string(&format)?;
            let budget = interpreter.budget();
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
fn dict(interpreter: &mut Interpreter, args: Args) -> Result<Value> {
    let [source] = Args::new(args.positional).bind("dict", [""], 0)?;
    let budget = interpreter.budget();
    let mut entries = Entries::new(&budget)?;
    match source {
        None => {}
        Some(Value::Dict(dict)) => entries.extend(&dict)?,
        Some(pairs) => {
            for pair in iterate(&mut interpreter.objects, &pairs)? {
                let pair = iterate(&mut interpreter.objects, &pair?)?.collect()?;
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
pub fn call_joiner(interpreter: &mut Interpreter, index: usize, args: &Args) -> Result<Value> {
    args.none("joiner")?;
    let joiner = &mut interpreter.objects.joiners[index];
    match std::mem::replace(&mut joiner.used, true) {
        true => Ok(joiner.separator.clone()),
        false => interpreter.budget().text(""),
    }
}

/// Returns `argument` as text, or nothing for `none`.
pub fn optional_text(argument: &Option<Value>) -> Result<Option<&str>> {
    argument.as_ref().filter(|value| !matches!(value, Value::None)).map(string).transpose()
}
