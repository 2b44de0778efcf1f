//! Filters of strings.

use super::super::arguments::{self, Args, given, integer, size, string};
use super::super::budget::Builder;
use super::super::context::Context;
use super::super::failure::{Result, fail};
use super::super::unicode;
use super::super::value::Value;
use super::super::{iteration, methods};
use super::{flag, wrap};

pub fn apply(context: &mut dyn Context, name: &str, value: &Value, args: &Args) -> Result<Value> {
    match name {
        "indent" => return indent(context, value, args),
        "truncate" => return truncate(context, value, args),
        "wordwrap" => return wrap::wordwrap(context, value, args),
        _ => {}
    }
    let text = context.str(value)?;
    let budget = context.budget();
    match name {
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
            let old = context.str(&old.unwrap_or(Value::None))?;
            let new = context.str(&new.unwrap_or(Value::None))?;
            let count = given(count).map_or(Ok(-1), |count| integer(&count))?;
            methods::replace(&budget, &text, &old, &new, count)
        }
        "trim" => {
            let [chars] = args.bind(name, ["chars"], 0)?;
            let chars = given(chars);
            let chars = chars.as_ref().map(string).transpose()?;
            budget.text(methods::strip(&budget, &text, "strip", chars)?)
        }
        "center" => {
            let [width] = args.bind(name, ["width"], 0)?;
            let width = arguments::width(width.map_or(Ok(80), |width| integer(&width))?)?;
            methods::center(&budget, &text, width, " ")
        }
        _ => {
            args.none(name)?;
            match name {
                "capitalize" => budget.recased(&text, unicode::capitalize),
                "lower" => budget.recased(&text, str::to_lowercase),
                "title" => budget.recased(&text, title),
                "upper" => budget.recased(&text, str::to_uppercase),
                _ => {
                    Ok(Value::Int(text.split(|c| c != '_' && !unicode::is_alphanumeric(c)).filter(|word| !word.is_empty()).count() as i128))
                }
            }
        }
    }
}

/// Words start after white space, hyphens and opening brackets.
fn title(text: &str) -> String {
    let begins = |c: char| unicode::is_space(c) || "-({[<".contains(c);
    let mut out = String::with_capacity(text.len());
    for word in text.split_inclusive(begins) {
        let mut chars = word.chars();
        out.extend(chars.next().into_iter().flat_map(char::to_uppercase));
        out.push_str(&chars.as_str().to_lowercase());
    }
    out
}

fn indent(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"], 0)?;
    let budget = context.budget();
    let text = string(value)?;
    let mut spaces = Builder::new(&budget);
    let indention = match &width {
        Some(Value::Str(text)) => text.as_str(),
        width => {
            spaces.repeat(" ", arguments::width(width.as_ref().map_or(Ok(4), integer)?)?)?;
            &*spaces
        }
    };
    let (first, blank) = (flag(first), flag(blank));
    let mut ended = Builder::new(&budget);
    ended.push(text)?;
    ended.push("\n")?;
    let mut out = Builder::new(&budget);
    for (i, (line, _)) in methods::lines(&ended).enumerate() {
        out.push(if i > 0 { "\n" } else { "" })?;
        let indented = if i == 0 { first } else { blank || !line.is_empty() };
        out.push(if indented { indention } else { "" })?;
        out.push(line)?;
    }
    out.into_text(matches!(value, Value::Str(text) if text.is_safe()))
}

fn truncate(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [length, kill, end, leeway] = args.bind("truncate", ["length", "killwords", "end", "leeway"], 0)?;
    let length = size(length.map_or(Ok(255), |length| integer(&length))?);
    let end = end.as_ref().map_or(Ok("..."), string)?;
    let leeway = given(leeway).map_or(Ok(5), |leeway| integer(&leeway))?;
    let end_len = end.chars().count();
    if length < end_len || leeway < 0 {
        return fail(format_args!("truncate: expected length >= {end_len} and leeway >= 0"));
    }
    if iteration::len(&context.objects().budget, value)? <= length.saturating_add(size(leeway)) {
        return Ok(value.clone());
    }
    let text = string(value)?;
    let cut = text.char_indices().nth(length - end_len).map_or(text.len(), |(at, _)| at);
    let cut = &text[..cut];
    let kept = if flag(kill) { cut } else { cut.rsplit_once(' ').map_or(cut, |(kept, _)| kept) };
    let mut out = Builder::new(&context.objects().budget);
    out.push(kept)?;
    out.push(end)?;
    out.into_text(false)
}
