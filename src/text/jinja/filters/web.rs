//! Filters for HTML and URLs.

use super::super::arguments::Args;
use super::super::budget::Builder;
use super::super::failure::{Result, fail};
use super::super::interpreter::Interpreter;
use super::super::ops;
use super::super::unicode::is_space;
use super::super::value::{Object, Value};

pub fn apply(interpreter: &mut Interpreter, name: &str, value: &Value, args: &Args) -> Result<Value> {
    let budget = interpreter.budget();
    match name {
        "xmlattr" => return xmlattr(interpreter, value, args),
        "urlencode" => {
            args.none(name)?;
            return urlencode(interpreter, value);
        }
        _ => args.none(name)?,
    }
    let text = interpreter.str(value)?;
    match (name, value) {
        ("safe", _) => budget.safe_text(text),
        ("striptags", _) => budget.text(striptags(&text)),
        ("e" | "escape", Value::Str(known)) if known.is_safe() => Ok(value.clone()),
        _ => budget.safe_text(ops::escape(&interpreter.objects, &text)?),
    }
}

fn striptags(text: &str) -> String {
    let mut plain = text.to_string();
    for (open, close) in [("<!--", "-->"), ("<", ">")] {
        let mut out = String::with_capacity(plain.len());
        let mut rest = plain.as_str();
        while let Some((before, tag)) = rest.split_once(open) {
            let Some((_, after)) = tag.split_once(close) else { break };
            out.push_str(before);
            rest = after;
        }
        out.push_str(rest);
        plain = out;
    }
    let words: Vec<&str> = plain.split(is_space).filter(|word| !word.is_empty()).collect();
    let text = words.join(" ");
    let entities = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#34;", "\""), ("&#39;", "'"), ("&nbsp;", "\u{a0}"), ("&amp;", "&")];
    entities.iter().fold(text, |text, (entity, c)| text.replace(entity, c))
}

fn xmlattr(interpreter: &mut Interpreter, value: &Value, args: &Args) -> Result<Value> {
    let [autospace] = args.bind("xmlattr", ["autospace"], 0)?;
    let Value::Dict(dict) = value.defined()? else { return fail("xmlattr takes a mapping") };
    let budget = interpreter.budget();
    let mut out = Builder::new(&budget);
    for (key, value) in dict.iter().filter(|(_, value)| !matches!(value, Value::None | Value::Undefined(_))) {
        let Some(name) = key.value().as_str() else { return fail("an attribute name must be a string") };
        if name.contains(|c: char| c.is_ascii_whitespace() || "\x0b/>=".contains(c)) {
            return fail(format!("Invalid character in attribute name: '{name}'"));
        }
        let space = out.len() > 0 || autospace.as_ref().is_none_or(Value::is_true);
        out.push(if space { " " } else { "" })?;
        out.push(&ops::escape(&interpreter.objects, name)?)?;
        out.push("=\"")?;
        out.push(&ops::escape(&interpreter.objects, &interpreter.str(value)?)?)?;
        out.push("\"")?;
    }
    budget.text(out.finish())
}

fn urlencode(interpreter: &mut Interpreter, value: &Value) -> Result<Value> {
    let budget = interpreter.budget();
    let mut out = Builder::new(&budget);
    let pairs = match value {
        Value::Dict(dict) => {
            let pairs = dict.iter().map(|(key, value)| budget.tuple(vec![key.value().clone(), value.clone()]));
            pairs.collect::<Result<Vec<_>>>()?
        }
        Value::List(_) | Value::Tuple(_) | Value::View(..) | Value::Object(Object::Iterator, _) | Value::Range(_) | Value::Undefined(_) => {
            ops::iterate(&mut interpreter.objects, value)?.into()
        }
        value => {
            let text = interpreter.str(value)?;
            budget.scan(text.len())?;
            quote(&mut out, &text, false)?;
            return budget.text(out.finish());
        }
    };
    for (i, pair) in pairs.iter().enumerate() {
        let pair: Vec<Value> = ops::iterate(&mut interpreter.objects, pair)?.into();
        let [key, value] = &pair[..] else { return fail("urlencode takes a mapping or pairs") };
        out.push(if i > 0 { "&" } else { "" })?;
        quote(&mut out, &interpreter.str(key)?, true)?;
        out.push("=")?;
        quote(&mut out, &interpreter.str(value)?, true)?;
    }
    budget.text(out.finish())
}

fn quote(out: &mut Builder, text: &str, in_query: bool) -> Result<()> {
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
