//! Filters for HTML and URLs.

use std::rc::Rc;

use super::super::arguments::{Args, string};
use super::super::budget::{Builder, RenderBudget};
use super::super::context::Context;
use super::super::failure::{Result, fail};
use super::super::unicode::is_space;
use super::super::value::{Object, Value, View};
use super::super::{methods, ops};

pub fn apply(context: &mut dyn Context, name: &str, value: &Value, args: &Args) -> Result<Value> {
    let budget = context.budget();
    match name {
        "xmlattr" => return xmlattr(context, value, args),
        "urlencode" => {
            args.none(name)?;
            return urlencode(context, value);
        }
        _ => args.none(name)?,
    }
    let text = context.str(value)?;
    match (name, value) {
        ("safe", _) => text.into_text(true),
        ("striptags", _) => striptags(&budget, &text),
        ("e" | "escape", Value::Str(known)) if known.is_safe() => Ok(value.clone()),
        _ => ops::escape(context.objects(), &text),
    }
}

fn striptags(budget: &Rc<RenderBudget>, text: &str) -> Result<Value> {
    let plain = without(budget, text, "<!--", "-->")?;
    let plain = without(budget, &plain, "<", ">")?;
    let mut out = Builder::new(budget);
    for word in plain.split(is_space).filter(|word| !word.is_empty()) {
        out.push(if out.is_empty() { "" } else { " " })?;
        out.push(word)?;
    }
    let entities = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#34;", "\""), ("&#39;", "'"), ("&nbsp;", "\u{a0}"), ("&amp;", "&")];
    let text = out.into_text(false)?;
    entities.iter().try_fold(text, |text, (entity, c)| methods::replace(budget, string(&text)?, entity, c, -1))
}

/// Returns the text without the parts between `open` and `close`.
fn without(budget: &Rc<RenderBudget>, text: &str, open: &str, close: &str) -> Result<Builder> {
    budget.scan(text.len())?;
    let mut out = Builder::new(budget);
    let mut rest = text;
    while let Some((before, tag)) = rest.split_once(open) {
        let Some((_, after)) = tag.split_once(close) else { break };
        out.push(before)?;
        rest = after;
    }
    out.push(rest)?;
    Ok(out)
}

fn xmlattr(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [autospace] = args.bind("xmlattr", ["autospace"], 0)?;
    let Value::Dict(dict) = value.defined()? else { return fail("xmlattr takes a mapping") };
    let budget = context.budget();
    let mut out = Builder::new(&budget);
    for (key, value) in dict.iter().filter(|(_, value)| !matches!(value, Value::None | Value::Undefined(_))) {
        let Some(name) = key.value().as_str() else { return fail("an attribute name must be a string") };
        if name.contains(|c: char| c.is_ascii_whitespace() || "\x0b/>=".contains(c)) {
            return fail(format_args!("Invalid character in attribute name: '{name}'"));
        }
        let space = !out.is_empty() || autospace.as_ref().is_none_or(Value::is_true);
        out.push(if space { " " } else { "" })?;
        ops::push_escaped(&mut out, name)?;
        out.push("=\"")?;
        ops::push_escaped(&mut out, &context.str(value)?)?;
        out.push("\"")?;
    }
    out.into_text(false)
}

fn urlencode(context: &mut dyn Context, value: &Value) -> Result<Value> {
    let budget = context.budget();
    let mut out = Builder::new(&budget);
    let pairs = match value {
        Value::Dict(dict) => context.objects_mut().iterate(&Value::View(View::Items, dict.clone()))?,
        Value::List(_) | Value::Tuple(_) | Value::View(..) | Value::Object(Object::Iterator, _) | Value::Range(_) | Value::Undefined(_) => {
            context.objects_mut().iterate(value)?
        }
        value => {
            let text = context.str(value)?;
            quote(&mut out, &text, false)?;
            return out.into_text(false);
        }
    };
    for (i, pair) in pairs.enumerate() {
        let pair = context.objects_mut().iterate(&pair?)?.collect()?;
        let [key, value] = &pair[..] else { return fail("urlencode takes a mapping or pairs") };
        out.push(if i > 0 { "&" } else { "" })?;
        quote(&mut out, &context.str(key)?, true)?;
        out.push("=")?;
        quote(&mut out, &context.str(value)?, true)?;
    }
    out.into_text(false)
}

fn quote(out: &mut Builder, text: &str, in_query: bool) -> Result<()> {
    out.scan(text)?;
    for byte in text.bytes() {
        match byte {
            b' ' if in_query => out.push("+")?,
            b'/' if !in_query => out.push("/")?,
            byte if byte.is_ascii_alphanumeric() || b"_.-~".contains(&byte) => out.push_char(byte as char)?,
            byte => {
                let hex = |digit: u8| char::from(b"0123456789ABCDEF"[digit as usize]);
                out.push("%")?;
                out.push_char(hex(byte >> 4))?;
                out.push_char(hex(byte & 15))?;
            }
        }
    }
    Ok(())
}
