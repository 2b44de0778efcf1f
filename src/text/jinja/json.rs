//! Converts JSON to values, and values to JSON like `json.dumps`.

use std::rc::Rc;

use serde_json::Value as Json;

use super::arguments::{self, Args, given, integer, string};
use super::budget::{Buffer, Builder, RenderBudget};
use super::context::Context;
use super::failure::{Result, fail};
use super::number::float_json;
use super::objects::Objects;
use super::ops;
use super::sorting::sorted;
use super::value::{Dict, Entries, Key, Value};

/// Returns the value of JSON of the host.
pub fn from_json(budget: &Rc<RenderBudget>, json: &Json) -> Result<Value> {
    Ok(match json {
        Json::Null => Value::None,
        Json::Bool(flag) => Value::Bool(*flag),
        Json::Number(number) => match (number.as_i128(), number.as_f64()) {
            (Some(number), _) => Value::Int(number),
            (None, number) => Value::Float(number.unwrap_or(f64::NAN)),
        },
        Json::String(text) => budget.text(text)?,
        Json::Array(items) => {
            let mut list = Buffer::with_capacity(budget, items.len())?;
            items.iter().try_for_each(|item| list.push(from_json(budget, item)?))?;
            list.into_list()?
        }
        Json::Object(members) => {
            let mut entries = Entries::new(budget)?;
            for (name, value) in members {
                entries.insert(Key::new(budget.text(name)?)?, from_json(budget, value)?)?;
            }
            budget.dict(entries)?
        }
    })
}

/// Applies the filter `tojson` of transformers: `json.dumps(value, ensure_ascii, indent,
/// separators, sort_keys)`. Unlike Jinja's own filter, it does not escape for HTML.
pub fn tojson(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [ascii, indent, separators, sort] = args.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"], 0)?;
    let budget = context.budget();
    let mut spaces = Builder::new(&budget);
    let indent = given(indent);
    let indent = match &indent {
        Some(Value::Str(text)) => Some(text.as_str()),
        Some(width) => {
            spaces.repeat(" ", arguments::width(integer(width)?)?)?;
            Some(&*spaces)
        }
        None => None,
    };
    let separators = given(separators).map(|separators| context.objects_mut().iterate(&separators)?.collect()).transpose()?;
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([item, key]) => (string(item)?, string(key)?),
        Some(_) => return fail("separators must be two strings"),
    };
    let ascii = ascii.is_some_and(|ascii| ascii.is_true());
    let sort = sort.is_some_and(|sort| sort.is_true());
    let mut writer = Writer { objects: context.objects(), out: Builder::new(&budget), depth: 0, indent, item, key, ascii, sort };
    writer.value(value)?;
    writer.out.into_text(false)
}

struct Writer<'a> {
    objects: &'a Objects,
    out: Builder,
    depth: usize,
    indent: Option<&'a str>,
    item: &'a str,
    key: &'a str,
    ascii: bool,
    sort: bool,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value) -> Result<()> {
        self.objects.budget.step()?;
        match value {
            Value::None => self.out.push("null"),
            Value::Bool(flag) => self.out.push(if *flag { "true" } else { "false" }),
            Value::Int(number) => self.out.push(&number.to_string()),
            Value::Float(number) => self.out.push(&float_json(*number)),
            Value::Str(text) => self.string(text.as_str()),
            Value::List(items) | Value::Tuple(items) => {
                self.open("[")?;
                for (i, item) in items.iter().enumerate() {
                    self.separate(i == 0)?;
                    self.value(item)?;
                }
                self.close("]", items.is_empty())
            }
            Value::Dict(dict) => self.dict(dict),
            value => fail(format_args!("Object of type {} is not JSON serializable", value.type_name())),
        }
    }

    fn dict(&mut self, dict: &Dict) -> Result<()> {
        let objects = self.objects;
        let mut entries = Buffer::with_capacity(&objects.budget, dict.len())?;
        entries.extend(dict.iter())?;
        if self.sort {
            entries = sorted(entries, |a, b| ops::order(objects, "<", a.0.value(), b.0.value()))?;
        }
        self.open("{")?;
        for (i, (key, value)) in entries.into_iter().enumerate() {
            self.separate(i == 0)?;
            match key.value() {
                Value::Str(text) => self.string(text.as_str())?,
                Value::None => self.string("null")?,
                Value::Bool(flag) => self.string(if *flag { "true" } else { "false" })?,
                Value::Int(number) => self.string(&number.to_string())?,
                Value::Float(number) => self.string(&float_json(*number))?,
                key => return fail(format_args!("keys must be str, int, float, bool or None, not {}", key.type_name())),
            }
            self.out.push(self.key)?;
            self.value(value)?;
        }
        self.close("}", dict.is_empty())
    }

    fn open(&mut self, bracket: &str) -> Result<()> {
        self.depth += 1;
        self.out.push(bracket)
    }

    fn separate(&mut self, first: bool) -> Result<()> {
        if !first {
            self.out.push(self.item)?;
        }
        self.new_line()
    }

    fn close(&mut self, bracket: &str, empty: bool) -> Result<()> {
        self.depth -= 1;
        if !empty {
            self.new_line()?;
        }
        self.out.push(bracket)
    }

    fn new_line(&mut self) -> Result<()> {
        if let Some(indent) = self.indent {
            self.out.push("\n")?;
            self.out.repeat(indent, self.depth)?;
        }
        Ok(())
    }

    fn string(&mut self, text: &str) -> Result<()> {
        self.out.scan(text)?;
        self.out.push("\"")?;
        for c in text.chars() {
            match c {
                '"' => self.out.push("\\\"")?,
                '\\' => self.out.push("\\\\")?,
                '\n' => self.out.push("\\n")?,
                '\r' => self.out.push("\\r")?,
                '\t' => self.out.push("\\t")?,
                '\u{8}' => self.out.push("\\b")?,
                '\u{c}' => self.out.push("\\f")?,
                c if c < ' ' || (self.ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push(&format!("\\u{unit:04x}"))?;
                    }
                }
                c => self.out.push_char(c)?,
            }
        }
        self.out.push("\"")
    }
}
