//! Methods of strings. Positions count characters.

use std::collections::HashSet;
use std::rc::Rc;

use super::super::arguments::{self, Args, given, integer, optional_text, size, string};
use super::super::budget::{Buffer, Builder, RenderBudget};
use super::super::context::Context;
use super::super::failure::{Result, fail};
use super::super::format::brace;
use super::super::ops;
use super::super::unicode;
use super::super::value::{Key, Text, Value};

pub fn call(context: &mut dyn Context, text: &Text, method: &str, args: Args) -> Result<Value> {
    if !text.is_safe() {
        return call_plain(context, text, method, args);
    }
    let args = escaped(context, method, args)?;
    let result = call_plain(context, text, method, args)?;
    mark_safe(&context.budget(), result)
}

/// Escapes the arguments of a method of an HTML-safe string.
fn escaped(context: &mut dyn Context, method: &str, mut args: Args) -> Result<Args> {
    let first = match method {
        "format" => 0,
        "replace" => 1,
        "join" => {
            let [items] = args.bind(method, [""], 1)?;
            let mut all = Buffer::new(&context.objects().budget);
            for item in context.objects_mut().iterate(&items.unwrap_or(Value::None))? {
                all.push(ops::escaped(context.objects(), &item?)?)?;
            }
            args.positional[0] = all.into_list()?;
            return Ok(args);
        }
        _ => return Ok(args),
    };
    for value in args.positional.iter_mut().skip(first).chain(args.named.iter_mut().map(|(_, value)| value)) {
        *value = ops::escaped(context.objects(), value)?;
    }
    Ok(args)
}

/// Returns the strings of a result as HTML-safe strings.
fn mark_safe(budget: &Rc<RenderBudget>, value: Value) -> Result<Value> {
    let all = |items: &[Value]| {
        let mut all = Buffer::with_capacity(budget, items.len())?;
        items.iter().try_for_each(|item| all.push(mark_safe(budget, item.clone())?))?;
        Ok(all)
    };
    match &value {
        Value::Str(text) => budget.safe_text(text),
        Value::List(items) => all(items)?.into_list(),
        Value::Tuple(items) => all(items)?.into_tuple(),
        _ => Ok(value),
    }
}

fn call_plain(context: &mut dyn Context, text: &Text, method: &str, args: Args) -> Result<Value> {
    let budget = context.budget();
    let text = text.as_str();
    budget.scan(text.len())?;
    args.scan()?;
    match method {
        "format" => brace::format(context, text, &args, None),
        "format_map" => {
            let [mapping] = args.bind(method, [""], 1)?;
            brace::format(context, text, &Args::new(Buffer::new(&budget)), mapping.as_ref())
        }
        "join" => join(context, text, &args),
        "translate" => translate(&budget, text, &args),
        "split" | "rsplit" => split(&budget, text, method == "rsplit", &args)?.into_list(),
        "splitlines" => splitlines(&budget, text, &args),
        "partition" | "rpartition" => partition(&budget, text, method == "rpartition", &args),
        "replace" => {
            let [old, new, count] = args.bind(method, ["", "", ""], 2)?;
            let count = count.map_or(Ok(-1), |count| integer(&count))?;
            replace(&budget, text, string(&old.unwrap_or(Value::None))?, string(&new.unwrap_or(Value::None))?, count)
        }
        "count" | "find" | "rfind" | "index" | "rindex" => find(text, method, &args),
        "startswith" | "endswith" => affix(&budget, text, method, &args),
        "removeprefix" | "removesuffix" => {
            let [affix] = args.bind(method, [""], 1)?;
            let affix = affix.unwrap_or(Value::None);
            let affix = string(&affix)?;
            let rest = if method == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            budget.text(rest.unwrap_or(text))
        }
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.bind(method, [""], 0)?;
            budget.text(strip(&budget, text, method, optional_text(&chars)?)?)
        }
        "center" | "ljust" | "rjust" | "zfill" | "expandtabs" => padded(&budget, text, method, &args),
        "isalnum" | "isalpha" | "isascii" | "isdecimal" | "isdigit" | "isidentifier" | "islower" | "isnumeric" | "isprintable"
        | "isspace" | "istitle" | "isupper" => {
            args.none(method)?;
            Ok(Value::Bool(is(text, method)))
        }
        _ => {
            args.none(method)?;
            budget.recased(text, recase(method))
        }
    }
}

fn recase(method: &str) -> fn(&str) -> String {
    match method {
        "capitalize" => unicode::capitalize,
        "casefold" => unicode::casefold,
        "lower" => str::to_lowercase,
        "swapcase" => unicode::swapcase,
        "title" => unicode::title,
        _ => str::to_uppercase,
    }
}

fn is(text: &str, method: &str) -> bool {
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    match method {
        "isalnum" => all(unicode::is_alphanumeric),
        "isalpha" => all(unicode::is_alpha),
        "isascii" => text.is_ascii(),
        "isdecimal" => all(unicode::is_decimal),
        "isdigit" => all(unicode::is_digit),
        "isidentifier" => all(|c| c == '_' || c.is_alphanumeric()) && !text.starts_with(|c: char| c.is_numeric()),
        "islower" => unicode::is_lower(text),
        "isnumeric" => all(unicode::is_numeric),
        "isprintable" => text.chars().all(unicode::is_printable),
        "isspace" => all(unicode::is_space),
        "istitle" => unicode::is_title(text),
        _ => unicode::is_upper(text),
    }
}

fn join(context: &mut dyn Context, separator: &str, args: &Args) -> Result<Value> {
    let [items] = args.bind("join", [""], 1)?;
    let budget = context.budget();
    let mut out = Builder::new(&budget);
    for (i, item) in context.objects_mut().iterate(&items.unwrap_or(Value::None))?.enumerate() {
        let item = item?;
        let Some(text) = item.as_str() else {
            return fail(format_args!("sequence item {i}: expected str instance, {} found", item.type_name()));
        };
        out.push(if i > 0 { separator } else { "" })?;
        out.push(text)?;
    }
    out.into_text(false)
}

fn translate(budget: &Rc<RenderBudget>, text: &str, args: &Args) -> Result<Value> {
    let [table] = args.bind("translate", [""], 1)?;
    let Some(Value::Dict(table)) = table else { return fail("translate() takes a dictionary") };
    // Each character is hashed.
    budget.steps(text.len() / 8)?;
    let mut out = Builder::new(budget);
    for c in text.chars() {
        match table.get(&Key::new(Value::Int(c as i128))?) {
            None => out.push_char(c)?,
            Some(Value::None) => {}
            Some(Value::Str(text)) => out.push(text.as_str())?,
            Some(value) => match value.as_int().and_then(|code| u32::try_from(code).ok()).and_then(char::from_u32) {
                Some(c) => out.push_char(c)?,
                None => return fail("character mapping must return integer, none or str"),
            },
        }
    }
    out.into_text(false)
}

/// Returns `text.replace(old, new, count)`. A negative count replaces all occurrences.
pub fn replace(budget: &Rc<RenderBudget>, text: &str, old: &str, new: &str, count: i128) -> Result<Value> {
    let max_count = if count < 0 { usize::MAX } else { size(count) };
    let mut out = Builder::new(budget);
    let mut end = 0;
    for (at, found) in text.match_indices(old).take(max_count) {
        budget.step()?;
        out.push(&text[end..at])?;
        out.push(new)?;
        end = at + found.len();
    }
    out.push(&text[end..])?;
    out.into_text(false)
}

/// Returns `text.split(sep, maxsplit)`.
fn split(budget: &Rc<RenderBudget>, text: &str, from_right: bool, args: &Args) -> Result<Buffer<Value>> {
    let [separator, max_count] = args.bind("split", ["sep", "maxsplit"], 0)?;
    let max_count = max_count.map_or(Ok(-1), |max_count| integer(&max_count))?;
    let max_count = if max_count < 0 { usize::MAX - 1 } else { size(max_count).min(usize::MAX - 1) };
    let mut parts = Buffer::new(budget);
    let mut push = |part: &str| parts.push(budget.text(part)?);
    match optional_text(&separator)? {
        Some("") => return fail("empty separator"),
        Some(separator) if from_right => text.rsplitn(max_count + 1, separator).try_for_each(&mut push)?,
        Some(separator) => text.splitn(max_count + 1, separator).try_for_each(&mut push)?,
        None if from_right => words_from_right(text, max_count).try_for_each(&mut push)?,
        None => words(text, max_count).try_for_each(&mut push)?,
    }
    if from_right {
        parts.reverse();
    }
    Ok(parts)
}

/// Returns the words of a text, and after `max_count` of them the rest.
fn words(text: &str, max_count: usize) -> impl Iterator<Item = &str> {
    let mut rest = text.trim_start_matches(unicode::is_space);
    let mut count = 0;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = if count == max_count { rest.len() } else { rest.find(unicode::is_space).unwrap_or(rest.len()) };
        let word = &rest[..end];
        rest = rest[end..].trim_start_matches(unicode::is_space);
        count += 1;
        Some(word)
    })
}

/// Returns the words of a text from its end, and before `max_count` of them the rest.
fn words_from_right(text: &str, max_count: usize) -> impl Iterator<Item = &str> {
    let mut rest = text.trim_end_matches(unicode::is_space);
    let mut count = 0;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let space = rest.char_indices().rev().find(|(_, c)| unicode::is_space(*c));
        let start = if count == max_count { 0 } else { space.map_or(0, |(at, c)| at + c.len_utf8()) };
        let word = &rest[start..];
        rest = rest[..start].trim_end_matches(unicode::is_space);
        count += 1;
        Some(word)
    })
}

/// Returns the lines of a text, with their ends.
pub fn lines(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (at, c) = rest.char_indices().find(|(_, c)| unicode::is_line_end(*c)).or((!rest.is_empty()).then_some((rest.len(), '\0')))?;
        let end = match &rest[at..] {
            "" => 0,
            tail if tail.starts_with("\r\n") => 2,
            _ => c.len_utf8(),
        };
        let line = (&rest[..at], &rest[at..at + end]);
        rest = &rest[at + end..];
        Some(line)
    })
}

fn splitlines(budget: &Rc<RenderBudget>, text: &str, args: &Args) -> Result<Value> {
    let [keep] = args.bind("splitlines", ["keepends"], 0)?;
    let keep = keep.is_some_and(|keep| keep.is_true());
    let lines = lines(text).map(|(line, end)| if keep { &text[offset(text, line)..][..line.len() + end.len()] } else { line });
    let mut parts = Buffer::new(budget);
    for line in lines {
        parts.push(budget.text(line)?)?;
    }
    parts.into_list()
}

fn offset(text: &str, part: &str) -> usize {
    part.as_ptr() as usize - text.as_ptr() as usize
}

fn partition(budget: &Rc<RenderBudget>, text: &str, from_right: bool, args: &Args) -> Result<Value> {
    let [separator] = args.bind("partition", [""], 1)?;
    let separator = separator.unwrap_or(Value::None);
    let separator = string(&separator)?;
    if separator.is_empty() {
        return fail("empty separator");
    }
    let found = if from_right { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    };
    let mut texts = Buffer::with_capacity(budget, parts.len())?;
    parts.iter().try_for_each(|part| texts.push(budget.text(part)?))?;
    texts.into_tuple()
}

/// Returns the part of `text` from character `start` to `stop`, and the number of its first
/// character. Returns None if `start` is beyond the end.
fn between(text: &str, start: Option<Value>, stop: Option<Value>) -> Result<Option<(&str, usize)>> {
    let len = text.chars().count() as i128;
    let bound = |argument: Option<Value>, default: i128| -> Result<i128> {
        let index = given(argument).map_or(Ok(default), |argument| integer(&argument))?;
        Ok(if index < 0 { (index + len).max(0) } else { index })
    };
    let (start, stop) = (bound(start, 0)?, bound(stop, len)?.min(len));
    if start > stop {
        return Ok(None);
    }
    let byte = |index: i128| text.char_indices().nth(index as usize).map_or(text.len(), |(at, _)| at);
    Ok(Some((&text[byte(start)..byte(stop)], start as usize)))
}

fn find(text: &str, method: &str, args: &Args) -> Result<Value> {
    let [part, start, stop] = args.bind(method, ["", "", ""], 1)?;
    let part = part.unwrap_or(Value::None);
    let part = string(&part)?;
    let within = between(text, start, stop)?;
    if method == "count" {
        let count = within.map_or(0, |(text, _)| text.matches(part).count());
        return Ok(Value::Int(count as i128));
    }
    let found = within.and_then(|(text, first)| {
        let at = if method.starts_with('r') { text.rfind(part) } else { text.find(part) }?;
        Some(first + text[..at].chars().count())
    });
    match found {
        Some(at) => Ok(Value::Int(at as i128)),
        None if method.ends_with("find") => Ok(Value::Int(-1)),
        None => fail("substring not found"),
    }
}

fn affix(budget: &RenderBudget, text: &str, method: &str, args: &Args) -> Result<Value> {
    let [affixes, start, stop] = args.bind(method, ["", "", ""], 1)?;
    let affixes = affixes.unwrap_or(Value::None);
    let affixes = match &affixes {
        Value::Tuple(items) => items,
        value => std::slice::from_ref(value),
    };
    let within = between(text, start, stop)?;
    let mut found = false;
    budget.steps(affixes.len())?;
    for affix in affixes {
        let affix = string(affix)?;
        budget.work(affix.len())?;
        found |= within.is_some_and(|(text, _)| if method == "startswith" { text.starts_with(affix) } else { text.ends_with(affix) });
    }
    Ok(Value::Bool(found))
}

/// Applies `strip`, `lstrip` or `rstrip`. Without characters, removes white space.
pub fn strip<'a>(budget: &RenderBudget, text: &'a str, method: &str, chars: Option<&str>) -> Result<&'a str> {
    // Hashing a character takes longer than examining it.
    budget.scan(4 * (text.len() + chars.map_or(0, str::len)))?;
    let set = chars.map(|chars| {
        let mut set = HashSet::new();
        // If characters are inserted one by one, the set allocates for the distinct ones only.
        for c in chars.chars() {
            set.insert(c);
        }
        set
    });
    let stripped = |c: char| set.as_ref().map_or_else(|| unicode::is_space(c), |set| set.contains(&c));
    let text = if method == "rstrip" { text } else { text.trim_start_matches(stripped) };
    Ok(if method == "lstrip" { text } else { text.trim_end_matches(stripped) })
}

fn padded(budget: &Rc<RenderBudget>, text: &str, method: &str, args: &Args) -> Result<Value> {
    if method == "expandtabs" {
        return expandtabs(budget, text, args);
    }
    let parameters = if method == "zfill" { 1 } else { 2 };
    if args.positional.len() > parameters {
        return fail(format_args!("{method}() takes at most {parameters} arguments"));
    }
    let [width, fill] = args.bind(method, ["", ""], 1)?;
    let width = arguments::width(integer(&width.unwrap_or(Value::None))?)?;
    let fill = fill.as_ref().map_or(Ok(" "), string)?;
    if fill.chars().count() != 1 {
        return fail("the fill character must be exactly one character long");
    }
    let padding = width.saturating_sub(text.chars().count());
    let mut out = Builder::new(budget);
    match method {
        "ljust" => out.push(text).and_then(|()| out.repeat(fill, padding))?,
        "rjust" => out.repeat(fill, padding).and_then(|()| out.push(text))?,
        "zfill" => {
            let sign = usize::from(text.starts_with(['+', '-']));
            out.push(&text[..sign])?;
            out.repeat("0", padding)?;
            out.push(&text[sign..])?;
        }
        _ => return center(budget, text, width, fill),
    }
    out.into_text(false)
}

/// Returns `text.center(width, fill)`. If the width is odd, the extra space is on the left.
pub fn center(budget: &Rc<RenderBudget>, text: &str, width: usize, fill: &str) -> Result<Value> {
    let padding = width.saturating_sub(text.chars().count());
    let left = padding / 2 + (padding & width & 1);
    let mut out = Builder::new(budget);
    out.repeat(fill, left)?;
    out.push(text)?;
    out.repeat(fill, padding - left)?;
    out.into_text(false)
}

fn expandtabs(budget: &Rc<RenderBudget>, text: &str, args: &Args) -> Result<Value> {
    let [tab] = args.bind("expandtabs", ["tabsize"], 0)?;
    let tab = arguments::width(tab.map_or(Ok(8), |tab| integer(&tab))?)?;
    let mut out = Builder::new(budget);
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = if tab > 0 { tab - column % tab } else { 0 };
                out.repeat(" ", spaces)?;
                column += spaces;
            }
            '\n' | '\r' => {
                out.push_char(c)?;
                column = 0;
            }
            c => {
                out.push_char(c)?;
                column += 1;
            }
        }
    }
    out.into_text(false)
}
