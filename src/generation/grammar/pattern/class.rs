//! Sets of characters.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

use llguidance::derivre::RegexBuilder;
use once_cell::sync::Lazy;
use unicode_general_category::{GeneralCategory, get_general_category};

/// One character out of a set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Class {
    /// Sorted and disjoint. A range may contain surrogates, because no text has them.
    ranges: Vec<(u32, u32)>,
    /// Names of Unicode properties, each with true if it is negated.
    properties: Vec<(String, bool)>,
    negated: bool,
    /// If true, characters that differ only in case are in the set, too.
    folded: bool,
}

pub const MAX_CHAR: u32 = char::MAX as u32;
const SURROGATES: (u32, u32) = (0xD800, 0xDFFF);

impl Class {
    pub fn new(ranges: impl IntoIterator<Item = (u32, u32)>) -> Class {
        let mut class = Class { ranges: ranges.into_iter().collect(), ..Class::default() };
        class.ranges.sort_unstable();
        class.ranges.dedup_by(|next, last| {
            let joined = next.0 <= last.1.saturating_add(1);
            last.1 = if joined { last.1.max(next.1) } else { last.1 };
            joined
        });
        class
    }

    pub fn char(c: u32) -> Class {
        Class::new([(c, c)])
    }

    pub fn any() -> Class {
        Class::new([(0, MAX_CHAR)])
    }

    pub fn with_properties(mut self, properties: Vec<(String, bool)>) -> Class {
        self.properties = properties;
        self
    }

    pub fn folded(mut self, folded: bool) -> Class {
        self.folded = folded;
        self
    }

    pub fn ranges(&self) -> &[(u32, u32)] {
        &self.ranges
    }

    pub fn properties(&self) -> &[(String, bool)] {
        &self.properties
    }

    /// Returns the complement. Without properties it consists of ranges again.
    pub fn complement(mut self) -> Class {
        if !self.is_plain() {
            self.negated = !self.negated;
            return self;
        }
        let mut start = 0;
        let mut others = Vec::with_capacity(self.ranges.len() + 1);
        for (low, high) in self.ranges {
            others.extend((start < low).then(|| (start, low - 1)));
            start = high + 1;
        }
        others.extend((start <= MAX_CHAR).then_some((start, MAX_CHAR)));
        Class { ranges: others, ..Class::default() }
    }

    /// Returns true if the set consists of ranges only, so that `contains` and `chars` are exact.
    pub fn is_plain(&self) -> bool {
        self.properties.is_empty() && !self.negated && !self.folded
    }

    /// Returns true if two plain sets have a character in common.
    fn overlaps(&self, other: &Class) -> bool {
        let mut others = other.ranges.iter().peekable();
        self.ranges.iter().any(|&(low, high)| {
            while others.next_if(|other| other.1 < low).is_some() {}
            others.peek().is_some_and(|other| other.0 <= high)
        })
    }

    pub fn contains(&self, c: u32) -> bool {
        self.ranges.iter().any(|&(low, high)| (low..=high).contains(&c)) != self.negated
    }

    /// Returns all characters, if there are at most `limit`.
    pub fn chars(&self, limit: usize) -> Option<Vec<char>> {
        let count: u64 = self.ranges.iter().map(|(low, high)| u64::from(high - low) + 1).sum();
        (self.is_plain() && count <= limit as u64).then(|| {
            let all = self.ranges.iter().flat_map(|&(low, high)| low..=high);
            all.filter_map(char::from_u32).collect()
        })
    }

    /// Returns the control characters of the set if it lacks the backslash or the quote. In JSON
    /// strings, llguidance 1.9 adds both to a set that has every control character, or all but the
    /// line feed.
    pub fn risky_controls(&self) -> Option<u32> {
        if !self.is_plain() {
            return Some(u32::MAX);
        }
        let controls = (0..32).filter(|&c| self.contains(c)).fold(0, |set, c| set | 1 << c);
        (!self.contains('\\' as u32) || !self.contains('"' as u32)).then_some(controls)
    }

    /// Writes the set in the Rust dialect. `without_nul` excludes U+0000.
    pub fn write(&self, out: &mut String, without_nul: bool) {
        let ranges = cut(&self.ranges, u32::from(without_nul && self.is_plain()));
        if self.is_plain() && ranges.len() == 1 && ranges[0].0 == ranges[0].1 {
            return write_char(out, ranges[0].0);
        }
        if self.is_plain() && ranges.is_empty() {
            return out.push_str(r"[^\x{0}-\x{10FFFF}]");
        }
        out.push_str(if self.folded { "(?i:" } else { "" });
        out.push_str(if without_nul && !self.is_plain() { r"[[^\x{0}]&&" } else { "" });
        out.push_str(if self.negated { "[^" } else { "[" });
        let ranges = if self.is_plain() && !without_nul { cut(&shortened(&self.ranges, out), 0) } else { ranges };
        for (low, high) in ranges {
            write_char(out, low);
            if low < high {
                out.push('-');
                write_char(out, high);
            }
        }
        for (name, negated) in &self.properties {
            let _ = write!(out, "\\{}{{{name}}}", if *negated { 'P' } else { 'p' });
        }
        out.push(']');
        out.push_str(if without_nul && !self.is_plain() { "]" } else { "" });
        out.push_str(if self.folded { ")" } else { "" });
    }

    /// Returns the number of bytes that `write` writes.
    pub fn size(&self) -> usize {
        let mut out = String::new();
        self.write(&mut out, false);
        out.len()
    }
}

/// Returns the ranges without surrogates and without characters below `min`.
fn cut(ranges: &[(u32, u32)], min: u32) -> Vec<(u32, u32)> {
    let mut cut = Vec::with_capacity(ranges.len() + 1);
    for &(low, high) in ranges {
        let parts = [(low.max(min), high.min(SURROGATES.0 - 1)), (low.max(SURROGATES.1 + 1), high)];
        cut.extend(parts.into_iter().filter(|(low, high)| low <= high));
    }
    cut
}

/// Known Unicode properties by normalized name. Unicode has few names, so the map stays small.
static PROPERTIES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Returns true if the crate `regex-syntax` has a Unicode property of this name.
pub fn is_property(name: &str) -> bool {
    // A lookup builds the tables of the property (0.4 ms), and a pattern may name properties 30,000
    // times.
    let key = name.replace('_', "").to_ascii_lowercase();
    let mut known = PROPERTIES.lock().unwrap_or_else(PoisonError::into_inner);
    let is_property = known.contains(&key) || RegexBuilder::new().mk_regex(&format!("\\p{{{name}}}")).is_ok();
    if is_property {
        known.insert(key);
    }
    is_property
}

/// Writes large sets by their names, and returns the remaining ranges.
fn shortened(ranges: &[(u32, u32)], out: &mut String) -> Vec<(u32, u32)> {
    const MIN_RANGES: usize = 40;
    if ranges.len() < MIN_RANGES {
        return ranges.to_vec();
    }
    let names = [(&*WORD, r"\p{L}\p{N}_", r"[^\p{L}\p{N}_]"), (&*DIGITS, r"\p{Nd}", r"\P{Nd}")];
    let others = Class::new(ranges.iter().copied()).complement();
    for (set, name, opposite) in names {
        if !set.overlaps(&others) {
            out.push_str(name);
            return Class::new(others.ranges.iter().chain(&set.ranges).copied()).complement().ranges;
        }
        let rest = set.clone().complement();
        if !rest.overlaps(&others) {
            out.push_str(opposite);
            return Class::new(others.ranges.iter().chain(&rest.ranges).copied()).complement().ranges;
        }
    }
    ranges.to_vec()
}

/// Python's `\d`: `str.isdecimal`.
pub static DIGITS: Lazy<Class> = Lazy::new(|| of_categories(&[GeneralCategory::DecimalNumber]));

/// Python's `\w`: `str.isalnum`, and the underscore.
pub static WORD: Lazy<Class> = Lazy::new(|| {
    use GeneralCategory::*;
    let letters = [LowercaseLetter, UppercaseLetter, TitlecaseLetter, ModifierLetter, OtherLetter];
    let numbers = [DecimalNumber, LetterNumber, OtherNumber];
    let both = of_categories(&[&letters[..], &numbers].concat());
    Class::new(both.ranges.into_iter().chain([('_' as u32, '_' as u32)]))
});

fn of_categories(categories: &[GeneralCategory]) -> Class {
    let chars = (0..=MAX_CHAR).filter_map(char::from_u32).filter(|&c| categories.contains(&get_general_category(c)));
    Class::new(chars.map(|c| (c as u32, c as u32)))
}

fn write_char(out: &mut String, c: u32) {
    match char::from_u32(c).filter(char::is_ascii_alphanumeric) {
        Some(c) => out.push(c),
        None => drop(write!(out, "\\x{{{c:X}}}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unicode_property_is_looked_up_once() {
        let spellings = (0..1000).map(|n| format!("Script=Osma{}nya", "_".repeat(n)));
        assert!(spellings.chain(["script=OSMANYA".into()]).all(|name| is_property(&name)));
        let known = PROPERTIES.lock().unwrap();
        assert_eq!(known.iter().filter(|name| name.contains("osma")).count(), 1);
        drop(known);
        assert!(!is_property("Osmanya_of_no_script"));
    }
}
