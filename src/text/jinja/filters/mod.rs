//! The filters of a template: `value|name(...)`.

mod numbers;
mod sequences;
mod text;
mod web;
mod wrap;

use super::arguments::{Args, given, string};
use super::ast::Operator;
use super::attributes;
use super::budget::Buffer;
use super::context::Context;
use super::failure::{Failure, Result, fail};
use super::value::{Entries, Key, Value};
use super::{iteration, json, ops};

pub const NAMES: &[&str] = &[
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap",
    "xmlattr",
];

pub fn exists(name: &str) -> bool {
    NAMES.contains(&name)
}

/// Filters whose result is HTML-safe if their input is.
const KEEP_SAFE: [&str; 7] = ["capitalize", "center", "lower", "reverse", "trim", "truncate", "upper"];

pub fn apply(context: &mut dyn Context, name: &str, value: Value, args: Args) -> Result<Value> {
    let keeps_safe = KEEP_SAFE.contains(&name) && matches!(&value, Value::Str(text) if text.is_safe());
    match apply_plain(context, name, value, args)? {
        Value::Str(text) if keeps_safe => context.budget().safe_text(&text),
        result => Ok(result),
    }
}

fn apply_plain(context: &mut dyn Context, name: &str, value: Value, args: Args) -> Result<Value> {
    let budget = context.budget();
    budget.scan(value.as_str().map_or(0, str::len))?;
    args.scan()?;
    match name {
        "default" | "d" => {
            let [default, boolean] = args.bind(name, ["default_value", "boolean"], 0)?;
            let missing = value.is_undefined() || (boolean.is_some_and(|boolean| boolean.is_true()) && !value.is_true());
            if !missing {
                return Ok(value);
            }
            default.map_or_else(|| budget.text(""), Ok)
        }
        "attr" => {
            let [attribute] = args.bind(name, ["name"], 1)?;
            attributes::only_attribute(context, &value, string(&attribute.unwrap_or(Value::None))?)
        }
        "length" | "count" => {
            args.none(name)?;
            Ok(Value::Int(iteration::len(&context.objects().budget, &value)? as i128))
        }
        "string" => {
            args.none(name)?;
            if matches!(value, Value::Str(_)) { Ok(value) } else { context.str(&value)?.into_text(false) }
        }
        "tojson" => json::tojson(context, &value, &args),
        "format" => format(context, &value, args),
        "abs" | "round" | "int" | "float" | "filesizeformat" => numbers::apply(context, name, &value, &args),
        "sum" | "min" | "max" | "first" | "last" | "list" | "items" | "reverse" | "batch" | "slice" | "sort" | "unique" | "dictsort"
        | "groupby" | "map" | "select" | "reject" | "selectattr" | "rejectattr" | "join" => sequences::apply(context, name, value, args),
        "e" | "escape" | "forceescape" | "safe" | "striptags" | "urlencode" | "xmlattr" => web::apply(context, name, &value, &args),
        "random" | "urlize" | "pprint" => fail(format_args!("the filter '{name}' is not supported")),
        name if exists(name) => text::apply(context, name, &value, &args),
        name => fail(format_args!("no filter named '{name}'")),
    }
}

/// Applies `text|format(...)`: the `%` operator.
fn format(context: &mut dyn Context, value: &Value, args: Args) -> Result<Value> {
    let budget = context.budget();
    let text = if matches!(value, Value::Str(_)) { value.clone() } else { context.str(value)?.into_text(false)? };
    if !args.positional.is_empty() && !args.named.is_empty() {
        return fail("can't handle positional and keyword arguments at the same time");
    }
    let values = if args.named.is_empty() {
        args.positional.into_tuple()?
    } else {
        let mut entries = Entries::new(&budget)?;
        for (name, value) in args.named {
            entries.insert(Key::new(Value::Str(name))?, value)?;
        }
        budget.dict(entries)?
    };
    ops::binary(context.objects_mut(), Operator::Modulo, &text, &values)
}

/// Maximum size in bytes of the argument `attribute`, whose parts are values.
const MAX_ATTRIBUTE: usize = 1_024;

/// The argument `attribute` of a filter: `a.b.0`, or several separated by commas.
pub struct Getter {
    paths: Vec<Vec<Value>>,
    default: Option<Value>,
}

impl Getter {
    pub fn new(context: &dyn Context, attribute: Option<Value>, default: Option<Value>, several: bool) -> Result<Getter> {
        let budget = context.budget();
        let paths = match given(attribute) {
            None => vec![Vec::new()],
            Some(Value::Str(text)) if text.as_str().len() > MAX_ATTRIBUTE => {
                let len = text.as_str().len();
                return Err(Failure::limit(format_args!("an attribute is too long ({len} bytes, at most {MAX_ATTRIBUTE}); shorten it")));
            }
            Some(Value::Str(text)) => {
                budget.steps(text.as_str().len() / 4)?;
                let paths: Vec<&str> = if several { text.as_str().split(',').collect() } else { vec![text.as_str()] };
                let part = |part: &str| match part.parse() {
                    Ok(index) if part.bytes().all(|c| c.is_ascii_digit()) => Ok(Value::Int(index)),
                    _ => budget.text(part),
                };
                paths.into_iter().map(|path| path.split('.').map(part).collect()).collect::<Result<_>>()?
            }
            Some(index) => vec![vec![index]],
        };
        Ok(Getter { paths, default: given(default) })
    }

    /// Returns the selected value of an item.
    pub fn get(&self, context: &mut dyn Context, item: &Value) -> Result<Value> {
        self.follow(context, item, &self.paths[0])
    }

    /// Returns the selected values of an item, as a list that can be compared.
    pub fn get_all(&self, context: &mut dyn Context, item: &Value, case_sensitive: bool) -> Result<Value> {
        let mut values = Buffer::with_capacity(&context.objects().budget, self.paths.len())?;
        for path in &self.paths {
            let value = self.follow(context, item, path)?;
            values.push(fold(context, value, case_sensitive)?)?;
        }
        values.into_list()
    }

    fn follow(&self, context: &mut dyn Context, item: &Value, path: &[Value]) -> Result<Value> {
        let mut value = item.clone();
        context.objects().budget.steps(path.len())?;
        for part in path {
            value = attributes::item(context, &value, part)?;
            if let (true, Some(default)) = (value.is_undefined(), &self.default) {
                value = default.clone();
            }
        }
        Ok(value)
    }
}

/// Returns strings in lower case, unless `case_sensitive`.
fn fold(context: &dyn Context, value: Value, case_sensitive: bool) -> Result<Value> {
    match value.as_str() {
        Some(text) if !case_sensitive => {
            context.objects().budget.scan(text.len())?;
            context.budget().recased(text, str::to_lowercase)
        }
        _ => Ok(value),
    }
}

/// Returns true if an optional argument is given and true.
fn flag(argument: Option<Value>) -> bool {
    argument.is_some_and(|argument| argument.is_true())
}
