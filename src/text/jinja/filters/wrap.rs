//! The filter `wordwrap`: Python's `textwrap.wrap` for each line.

use std::rc::Rc;

use super::super::arguments::{Args, given, integer, size, string};
use super::super::budget::{Buffer, Builder, RenderBudget};
use super::super::context::Context;
use super::super::failure::{Result, fail};
use super::super::methods;
use super::super::unicode::is_space;
use super::super::value::Value;

pub fn wordwrap(context: &mut dyn Context, value: &Value, args: &Args) -> Result<Value> {
    let [width, long, separator, hyphens] = args.bind("wordwrap", ["width", "break_long_words", "wrapstring", "break_on_hyphens"], 0)?;
    let width = size(width.map_or(Ok(79), |width| integer(&width))?);
    if width == 0 {
        return fail("wordwrap: the width must be positive");
    }
    let separator = given(separator);
    let separator = separator.as_ref().map_or(Ok("\n"), string)?;
    let breaks_long = long.is_none_or(|long| long.is_true());
    let on_hyphens = hyphens.is_none_or(|hyphens| hyphens.is_true());
    let budget = context.budget();
    let mut out = Builder::new(&budget);
    for (i, (line, _)) in methods::lines(string(value)?).enumerate() {
        out.push(if i > 0 { separator } else { "" })?;
        budget.steps(line.len())?;
        let mut wrapper = Wrapper { out: &mut out, separator, lines: 0 };
        wrapper.wrap(chunks(&budget, line, on_hyphens)?, width, breaks_long, on_hyphens)?;
    }
    out.into_text(false)
}

/// Returns true for white space that separates words. At the ends of lines, all white space is
/// removed.
fn separates(c: char) -> bool {
    "\t\n\x0b\x0c\r ".contains(c)
}

/// Returns white space and words alternately, in reverse order. Words end after an inner hyphen.
fn chunks<'a>(budget: &Rc<RenderBudget>, line: &'a str, on_hyphens: bool) -> Result<Buffer<&'a str>> {
    let mut chars = Buffer::with_capacity(budget, line.chars().count())?;
    for (at, c) in line.char_indices() {
        chars.push((at, c))?;
    }
    let letter = |i: usize| chars.get(i).is_some_and(|(_, c)| c.is_alphabetic() || *c == '_');
    let word = |i: usize| chars.get(i).is_some_and(|(_, c)| c.is_alphanumeric() || *c == '_');
    let (mut chunks, mut start) = (Buffer::new(budget), 0);
    for (i, &(at, c)) in chars.iter().enumerate().skip(1) {
        let before = chars[i - 1].1;
        let after_hyphen = on_hyphens && i >= 3 && before == '-' && letter(i - 2) && word(i - 3) && word(i) && letter(i + 1);
        if separates(c) != separates(before) || (after_hyphen && !separates(c)) {
            chunks.push(&line[start..at])?;
            start = at;
        }
    }
    if start < line.len() {
        chunks.push(&line[start..])?;
    }
    chunks.reverse();
    Ok(chunks)
}

/// Returns the number of characters, if it is at most `width`. A longer text is not counted to its
/// end.
fn fits(text: &str, width: usize) -> Option<usize> {
    let counted = text.chars().take(width.saturating_add(1)).count();
    (counted <= width).then_some(counted)
}

/// Removes the last chunk, if it is all white space.
fn pop_blank(chunks: &mut Buffer<&str>) -> Result<()> {
    if let Some(chunk) = chunks.last() {
        let spaces = chunk.find(|c| !is_space(c)).unwrap_or(chunk.len());
        // A long word that begins with spaces is examined for each line.
        chunks.budget().scan(spaces)?;
        chunks.pop_if(|chunk| spaces == chunk.len());
    }
    Ok(())
}

/// Writes the lines of a text like Python's `textwrap`.
struct Wrapper<'a> {
    out: &'a mut Builder,
    separator: &'a str,
    lines: usize,
}

impl Wrapper<'_> {
    fn wrap(&mut self, mut pending: Buffer<&str>, width: usize, breaks_long: bool, on_hyphens: bool) -> Result<()> {
        let mut current = Buffer::new(pending.budget());
        while !pending.is_empty() {
            if self.lines > 0 {
                pop_blank(&mut pending)?;
            }
            let mut used = 0;
            while let Some(len) = pending.last().and_then(|chunk| fits(chunk, width - used)) {
                used += len;
                pending.pop_if(|_| true).map_or(Ok(()), |chunk| current.push(chunk))?;
            }
            if let Some(long) = pending.pop_if(|chunk| fits(chunk, width).is_none()) {
                if breaks_long {
                    // An empty piece counts as a chunk. It is removed below instead of the white
                    // space before it.
                    let (kept, rest) = long.split_at(break_at(long, width - used, on_hyphens));
                    current.push(kept)?;
                    pending.push(rest)?;
                } else if current.is_empty() {
                    current.push(long)?;
                } else {
                    pending.push(long)?;
                }
            }
            pop_blank(&mut current)?;
            self.write(&mut current)?;
        }
        Ok(())
    }

    /// Writes and removes the pieces of a line, if any.
    fn write(&mut self, line: &mut Buffer<&str>) -> Result<()> {
        if !line.is_empty() {
            self.out.push(if self.lines > 0 { self.separator } else { "" })?;
            line.iter().try_for_each(|piece| self.out.push(piece))?;
            self.lines += 1;
            line.clear();
        }
        Ok(())
    }
}

/// Returns the position in bytes at which a long word is broken: after its last hyphen that fits,
/// if allowed.
fn break_at(long: &str, space: usize, on_hyphens: bool) -> usize {
    let end = long.char_indices().nth(space).map_or(long.len(), |(at, _)| at);
    match long[..end].rfind('-') {
        Some(at) if on_hyphens && long[..at].chars().any(|c| c != '-') => at + 1,
        _ => end,
    }
}
