//! A set of texts, as a regular expression without anchors.

use std::collections::BTreeSet;
use std::rc::Rc;

use super::Class;

/// Parts are shared, because the removal of anchors copies them.
#[derive(Debug, Clone)]
pub struct Language(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    kind: Kind,
    /// True if the set contains the empty text.
    nullable: bool,
    /// True if the set contains the text of one line feed.
    newline: bool,
    /// Upper bound of the length of the regular expression in bytes.
    size: usize,
    /// Nesting of the parts.
    depth: usize,
}

#[derive(Debug)]
enum Kind {
    Class(Class),
    Concat(Vec<Language>),
    Or(Vec<Language>),
    Repeat(Language, u32, Option<u32>),
}

/// Maximum nesting, because the functions here recurse.
const MAX_DEPTH: usize = 1_000;

/// The largest set of control characters without backslash or quote: all but U+0000 and the line
/// feed.
const NEARLY_ALL_CONTROLS: u32 = !(1 << 0 | 1 << b'\n');

impl Language {
    fn new(kind: Kind, nullable: bool, newline: bool, size: usize) -> Language {
        let deepest = |parts: &[Language]| parts.iter().map(|part| part.0.depth).max().unwrap_or(0);
        let depth = match &kind {
            Kind::Class(_) => 0,
            Kind::Concat(parts) | Kind::Or(parts) => deepest(parts),
            Kind::Repeat(part, ..) => part.0.depth,
        };
        if depth >= MAX_DEPTH {
            // Exceeds every limit, so that the pattern is refused.
            return Language(Rc::new(Inner { kind: Kind::Class(Class::default()), nullable, newline, size: usize::MAX, depth: 0 }));
        }
        Language(Rc::new(Inner { kind, nullable, newline, size, depth: depth + 1 }))
    }

    pub fn empty_text() -> Language {
        Language::concat(Vec::new())
    }

    /// Returns the empty set.
    pub fn nothing() -> Language {
        Language::class(Class::default())
    }

    /// Returns the set of all texts.
    pub fn anything() -> Language {
        Language::repeat(&Language::class(Class::any()), 0, None)
    }

    pub fn class(class: Class) -> Language {
        let (newline, size) = (class.contains('\n' as u32), class.size());
        Language::new(Kind::Class(class), false, newline, size)
    }

    pub fn concat(mut parts: Vec<Language>) -> Language {
        // The removal of anchors leaves empty parts, of which a pattern may have many.
        parts.retain(|part| !matches!(&part.0.kind, Kind::Concat(parts) if parts.is_empty()));
        if parts.len() == 1 {
            return parts.swap_remove(0);
        }
        let nullable = parts.iter().all(Language::is_nullable);
        let needed = parts.iter().filter(|part| !part.is_nullable()).count();
        let newline = match needed {
            0 => parts.iter().any(Language::has_newline),
            1 => parts.iter().any(|part| !part.is_nullable() && part.has_newline()),
            _ => false,
        };
        let size = parts.iter().fold(0usize, |sum, part| sum.saturating_add(part.size()));
        Language::new(Kind::Concat(parts), nullable, newline, size)
    }

    pub fn or(parts: Vec<Language>) -> Language {
        let nullable = parts.iter().any(Language::is_nullable);
        let newline = parts.iter().any(Language::has_newline);
        let size = parts.iter().fold(0usize, |sum, part| sum.saturating_add(part.size()));
        // A bar after each part, and a group around them.
        let size = size.saturating_add(parts.len() + 24);
        Language::new(Kind::Or(parts), nullable, newline, size)
    }

    pub fn repeat(part: &Language, min: u32, max: Option<u32>) -> Language {
        let nullable = min == 0 || part.is_nullable();
        let newline = part.has_newline() && max != Some(0) && (min <= 1 || part.is_nullable());
        Language::new(Kind::Repeat(part.clone(), min, max), nullable, newline, part.size().saturating_add(32))
    }

    pub fn is_nullable(&self) -> bool {
        self.0.nullable
    }

    pub fn has_newline(&self) -> bool {
        self.0.newline
    }

    /// Returns an upper bound of the length of the regular expression in bytes.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Returns a regular expression in the Rust dialect that matches these texts as a whole.
    pub fn to_regex(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, false);
        out
    }

    /// Returns the same for the strings of a JSON text. If the workaround of
    /// `Class::risky_controls` is needed, the texts with U+0000 are excluded.
    pub fn to_json_regex(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, self.risky_controls() & NEARLY_ALL_CONTROLS == NEARLY_ALL_CONTROLS);
        out
    }

    /// Returns true if `is` is true for all characters of some set.
    pub fn needs(&self, is: &dyn Fn(u32) -> bool) -> bool {
        match &self.0.kind {
            Kind::Class(class) => class.chars(64).is_some_and(|chars| !chars.is_empty() && chars.iter().all(|&c| is(c as u32))),
            Kind::Concat(parts) | Kind::Or(parts) => parts.iter().any(|part| part.needs(is)),
            Kind::Repeat(part, ..) => part.needs(is),
        }
    }

    fn risky_controls(&self) -> u32 {
        match &self.0.kind {
            Kind::Class(class) => class.risky_controls().unwrap_or(0),
            Kind::Concat(parts) | Kind::Or(parts) => parts.iter().fold(0, |all, part| all | part.risky_controls()),
            Kind::Repeat(part, ..) => part.risky_controls(),
        }
    }

    fn write(&self, out: &mut String, without_nul: bool) {
        match &self.0.kind {
            Kind::Class(class) => class.write(out, without_nul && class.risky_controls().is_some()),
            Kind::Concat(parts) => parts.iter().for_each(|part| match &part.0.kind {
                Kind::Or(_) => part.write_group(out, without_nul),
                _ => part.write(out, without_nul),
            }),
            Kind::Or(parts) if parts.is_empty() => Language::nothing().write(out, false),
            Kind::Or(parts) => parts.iter().enumerate().for_each(|(i, part)| {
                out.push_str(if i > 0 { "|" } else { "" });
                part.write(out, without_nul);
            }),
            Kind::Repeat(part, min, max) => {
                part.write_group(out, without_nul);
                out.push_str(&match (min, max) {
                    (0, None) => "*".to_string(),
                    (1, None) => "+".to_string(),
                    (0, Some(1)) => "?".to_string(),
                    (min, None) => format!("{{{min},}}"),
                    (min, Some(max)) => format!("{{{min},{max}}}"),
                });
            }
        }
    }

    fn write_group(&self, out: &mut String, without_nul: bool) {
        if matches!(self.0.kind, Kind::Class(_)) {
            return self.write(out, without_nul);
        }
        out.push_str("(?:");
        self.write(out, without_nul);
        out.push(')');
    }

    /// Returns all texts, if there are at most `limit` and no set of characters has a Unicode
    /// property.
    pub fn texts(&self, limit: usize) -> Option<BTreeSet<String>> {
        let within = |texts: BTreeSet<String>| (texts.len() <= limit).then_some(texts);
        match &self.0.kind {
            Kind::Class(class) => within(class.chars(limit)?.into_iter().map(String::from).collect()),
            Kind::Or(parts) => parts.iter().try_fold(BTreeSet::new(), |mut all, part| {
                all.extend(part.texts(limit)?);
                within(all)
            }),
            Kind::Concat(parts) => {
                parts.iter().try_fold(BTreeSet::from([String::new()]), |all, part| joined(&all, &part.texts(limit)?, limit))
            }
            Kind::Repeat(part, min, max) => repeated(&part.texts(limit)?, *min, *max, limit),
        }
    }
}

fn joined(firsts: &BTreeSet<String>, seconds: &BTreeSet<String>, limit: usize) -> Option<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    for first in firsts {
        all.extend(seconds.iter().map(|second| format!("{first}{second}")));
        if all.len() > limit {
            return None;
        }
    }
    Some(all)
}

fn repeated(texts: &BTreeSet<String>, min: u32, max: Option<u32>, limit: usize) -> Option<BTreeSet<String>> {
    let empty = BTreeSet::from([String::new()]);
    if texts.iter().all(String::is_empty) {
        // Repetitions of the empty text add nothing, and the empty set has no repetitions.
        return Some(if min == 0 || !texts.is_empty() { empty } else { BTreeSet::new() });
    }
    // If a text is not empty, n repetitions give at least n texts, or one text of at least n bytes.
    let max = max.filter(|&max| max as usize <= limit)?;
    let mut last = empty;
    let mut all = BTreeSet::new();
    for count in 0..=max {
        if count >= min {
            all.extend(last.iter().cloned());
        }
        if all.len() > limit {
            return None;
        }
        if count < max {
            last = joined(&last, texts, limit)?;
        }
    }
    Some(all)
}
