//! Parses patterns of ECMA-262 like `new RegExp(pattern, "u")`, or by the rules of annex B if that
//! is a syntax error.

use std::collections::BTreeSet;

use super::class::{MAX_CHAR, is_property};
use super::reader::Reader;
use super::{Class, MAX_DEPTH, Node, PatternError, reader};

pub const LANGUAGE: &str = "ECMA-262";

const DIGITS: [(u32, u32); 1] = [(0x30, 0x39)];
const WORD: [(u32, u32); 4] = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)];
/// WhiteSpace and LineTerminator of the standard.
const SPACES: [(u32, u32); 10] = [
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
];
const LINE_ENDS: [(u32, u32); 3] = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)];
const SYNTAX_CHARS: &str = "^$\\.*+?()[]{}|/";

pub fn parse(pattern: &str) -> Result<Node, PatternError> {
    let unicode = match Parser::new(pattern, None).parse() {
        Err(error) if error.is_syntax => error,
        outcome => return outcome,
    };
    Parser::new(pattern, Some(unicode)).parse()
}

#[derive(Debug, Clone, Copy, Default)]
struct Modifiers {
    ignore_case: bool,
    multiline: bool,
    dot_all: bool,
}

struct Parser<'a> {
    reader: Reader<'a>,
    /// Error of the pattern in Unicode mode, if it is read by annex B.
    not_unicode: Option<PatternError>,
    /// Number of all capturing groups of the pattern, including later ones.
    groups: u32,
    has_names: bool,
    names: BTreeSet<String>,
    modifiers: Modifiers,
    depth: usize,
}

/// A member of a class: one character, or a set.
enum Member {
    Char(u32),
    Set(Class),
}

impl<'a> Parser<'a> {
    fn new(pattern: &'a str, not_unicode: Option<PatternError>) -> Parser<'a> {
        let (groups, has_names) = count_groups(pattern);
        let reader = Reader::new(pattern, LANGUAGE);
        Parser { reader, not_unicode, groups, has_names, names: BTreeSet::new(), modifiers: Modifiers::default(), depth: 0 }
    }

    fn is_unicode(&self) -> bool {
        self.not_unicode.is_none()
    }

    fn parse(mut self) -> Result<Node, PatternError> {
        let node = self.alternatives()?;
        match self.reader.peek() {
            None => Ok(node),
            Some(_) => Err(self.reader.syntax("unmatched \")\"", self.reader.at(), "write \"\\\\)\" for the character")),
        }
    }

    fn alternatives(&mut self) -> Result<Node, PatternError> {
        reader::alternatives(self, |parser| &mut parser.reader, Parser::sequence)
    }

    fn sequence(&mut self) -> Result<Node, PatternError> {
        let mut nodes = Vec::new();
        while let Some(next) = self.reader.peek().filter(|c| !matches!(c, '|' | ')')) {
            let at = self.reader.at();
            let node = self.term(next)?;
            let is_anchor = matches!(node, Node::Start | Node::End);
            match self.quantifier(at)? {
                Some(_) if is_anchor => return Err(self.nothing_to_repeat(at)),
                Some((min, max)) => nodes.push(Node::Repeat(Box::new(node), min, max)),
                None => nodes.push(node),
            }
        }
        Ok(if nodes.len() == 1 { nodes.swap_remove(0) } else { Node::Concat(nodes) })
    }

    fn term(&mut self, next: char) -> Result<Node, PatternError> {
        let at = self.reader.at();
        match next {
            '(' => return self.group(),
            '[' => return Ok(Node::Class(self.class()?)),
            '\\' => return self.escape(),
            '*' | '+' | '?' => return Err(self.nothing_to_repeat(at)),
            '{' if self.is_unicode() || self.braces().is_some() => return Err(self.nothing_to_repeat(at)),
            '}' | ']' if self.is_unicode() => {
                return Err(self.reader.syntax(format!("unescaped \"{next}\""), at, "put a backslash before it"));
            }
            _ => {}
        }
        self.reader.next();
        match next {
            '^' | '$' if self.modifiers.multiline => Err(self.reader.unsupported("an anchor of lines", at, "leave the modifier m out")),
            '^' => Ok(Node::Start),
            '$' => Ok(Node::End),
            '.' if self.modifiers.dot_all => Ok(Node::Class(Class::any())),
            '.' => Ok(Node::Class(Class::new(LINE_ENDS).complement())),
            other => Ok(Node::Class(self.char(other as u32))),
        }
    }

    fn char(&self, c: u32) -> Class {
        Class::char(c).folded(self.modifiers.ignore_case)
    }

    fn nothing_to_repeat(&self, at: usize) -> PatternError {
        self.reader.syntax("a quantifier with nothing to repeat", at, "put a backslash before it if it is a character")
    }

    /// Reads a quantifier. A lazy quantifier matches the same texts.
    fn quantifier(&mut self, at: usize) -> Result<Option<(u32, Option<u32>)>, PatternError> {
        let found = match self.reader.peek() {
            Some('*') => (0, None, 1),
            Some('+') => (1, None, 1),
            Some('?') => (0, Some(1), 1),
            Some('{') => match self.braces() {
                Some(found) => found,
                None if self.is_unicode() => return Err(self.nothing_to_repeat(self.reader.at())),
                None => return Ok(None),
            },
            _ => return Ok(None),
        };
        let (min, max, chars) = found;
        self.reader.go_to(self.reader.at() + chars);
        self.reader.take("?");
        if max.is_some_and(|max| max < min) {
            return Err(self.reader.syntax(
                format!("a quantifier whose limits are out of order ({min}, {})", max.unwrap_or(0)),
                at,
                "swap them",
            ));
        }
        Ok(Some((min, max)))
    }

    /// Returns the limits between the next braces, if they are a quantifier, and the number of its
    /// characters. Reads nothing.
    fn braces(&mut self) -> Option<(u32, Option<u32>, usize)> {
        let start = self.reader.at();
        let found = self.read_braces();
        let chars = self.reader.at() - start;
        self.reader.go_to(start);
        found.map(|(min, max)| (min, max, chars))
    }

    fn read_braces(&mut self) -> Option<(u32, Option<u32>)> {
        let finite = |n: u32| (n < u32::MAX).then_some(n);
        self.reader.next();
        let min = self.reader.number()?;
        if self.reader.take("}") {
            return Some((min, finite(min)));
        }
        if !self.reader.take(",") {
            return None;
        }
        let max = self.reader.number();
        self.reader.take("}").then_some((min, max.and_then(finite)))
    }

    fn group(&mut self) -> Result<Node, PatternError> {
        let at = self.reader.at();
        self.reader.next();
        for (mark, what) in [("?=", "a lookahead"), ("?!", "a lookahead"), ("?<=", "a lookbehind"), ("?<!", "a lookbehind")] {
            if self.reader.take(mark) {
                return Err(self.reader.unsupported(what, at, "write the texts that match without it"));
            }
        }
        let before = self.modifiers;
        if self.reader.take("?<") {
            self.group_name(at)?;
        } else if self.reader.take("?") {
            self.modifiers(at)?;
        }
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            let problem = format!("groups within groups ({}, limit {MAX_DEPTH})", self.depth);
            return Err(self.reader.unsupported(problem, at, "nest fewer"));
        }
        let node = self.alternatives()?;
        self.depth -= 1;
        self.modifiers = before;
        if !self.reader.take(")") {
            return Err(self.reader.syntax("unclosed group", at, "write \"\\\\(\" for the character"));
        }
        // A separate node, so that a quantifier can repeat an anchor within it.
        Ok(Node::Concat(vec![node]))
    }

    fn group_name(&mut self, at: usize) -> Result<(), PatternError> {
        let name = self.reader.take_while(usize::MAX, |c| c.is_alphanumeric() || c == '_' || c == '$');
        let is_valid = name.chars().next().is_some_and(|c| !c.is_numeric()) && self.reader.take(">");
        if !is_valid {
            return Err(self.reader.syntax("an invalid group name", at, "write (?<name>...) with a name of letters and digits"));
        }
        if !self.names.insert(name) {
            return Err(self.reader.syntax("a group name that is used twice", at, "choose another name"));
        }
        Ok(())
    }

    /// `i`, `m` and `s`, on and off, before the colon of a group (ECMA-262 of 2025).
    fn modifiers(&mut self, at: usize) -> Result<(), PatternError> {
        let on = self.reader.take_while(3, |c| "ims".contains(c));
        let minus = self.reader.take("-");
        let off = if minus { self.reader.take_while(3, |c| "ims".contains(c)) } else { String::new() };
        let all: Vec<char> = on.chars().chain(off.chars()).collect();
        let is_repeated = all.iter().collect::<BTreeSet<_>>().len() < all.len();
        if !self.reader.take(":") || is_repeated || (minus && all.is_empty()) {
            return Err(self.reader.syntax("an invalid group", at, "begin groups with \"(\", \"(?:\", \"(?<name>\" or \"(?i:\""));
        }
        for (letters, value) in [(on, true), (off, false)] {
            self.modifiers.ignore_case = if letters.contains('i') { value } else { self.modifiers.ignore_case };
            self.modifiers.multiline = if letters.contains('m') { value } else { self.modifiers.multiline };
            self.modifiers.dot_all = if letters.contains('s') { value } else { self.modifiers.dot_all };
        }
        Ok(())
    }

    /// Reads an escape outside of a class.
    fn escape(&mut self) -> Result<Node, PatternError> {
        let at = self.reader.at();
        self.reader.next();
        let Some(next) = self.reader.peek() else {
            return Err(self.reader.syntax("the pattern ends in a backslash that escapes nothing", at, "leave it out, or write two"));
        };
        match next {
            'b' | 'B' => {
                return Err(self.reader.unsupported(format!("a word boundary \"\\{next}\""), at, "write the characters around it"));
            }
            '<' | '>' => {
                let problem = format!("\"\\{next}\", a word boundary in other languages");
                return Err(self.reader.unsupported(problem, at, "write the character without the backslash"));
            }
            '1'..='9' => {
                let start = self.reader.at();
                let number = self.reader.number().unwrap_or(0);
                if self.is_unicode() || number <= self.groups {
                    return Err(self.backreference(at, number <= self.groups));
                }
                self.reader.go_to(start);
            }
            'k' if self.is_unicode() || self.has_names => return Err(self.backreference(at, self.has_names)),
            _ => {}
        }
        Ok(Node::Class(match self.escaped(at, false)? {
            Member::Char(c) => self.char(c),
            Member::Set(set) => set.folded(self.modifiers.ignore_case),
        }))
    }

    fn backreference(&self, at: usize, exists: bool) -> PatternError {
        if exists {
            return self.reader.unsupported("a backreference", at, "backreferences are not supported: write out what can be repeated");
        }
        self.reader.syntax("a backreference to a group that does not exist", at, "backreferences are not supported")
    }

    /// Reads the rest of an escape, within or outside of a class.
    fn escaped(&mut self, at: usize, in_class: bool) -> Result<Member, PatternError> {
        let Some(next) = self.reader.next() else {
            return Err(self.reader.syntax("the pattern ends in a backslash that escapes nothing", at, "leave it out, or write two"));
        };
        let set = |ranges: &[(u32, u32)], negated: bool| {
            let class = Class::new(ranges.iter().copied());
            Ok(Member::Set(if negated { class.complement() } else { class }))
        };
        let control = |c: char| Ok(Member::Char(c as u32 % 32));
        match next {
            'd' | 'D' => set(&DIGITS, next == 'D'),
            'w' | 'W' => set(&WORD, next == 'W'),
            's' | 'S' => set(&SPACES, next == 'S'),
            'f' => Ok(Member::Char(0x0C)),
            'n' => Ok(Member::Char(0x0A)),
            'r' => Ok(Member::Char(0x0D)),
            't' => Ok(Member::Char(0x09)),
            'v' => Ok(Member::Char(0x0B)),
            'b' if in_class => Ok(Member::Char(0x08)),
            '-' if in_class => Ok(Member::Char('-' as u32)),
            '0' if !self.reader.peek().is_some_and(|c| c.is_ascii_digit()) => Ok(Member::Char(0)),
            '0'..='7' if !self.is_unicode() => Ok(Member::Char(self.octal(next))),
            'c' => match self.reader.peek() {
                Some(letter) if letter.is_ascii_alphabetic() => self.reader.next().map_or(control('@'), control),
                Some(c) if in_class && !self.is_unicode() && (c.is_ascii_digit() || c == '_') => {
                    self.reader.next().map_or(control('@'), control)
                }
                _ if self.is_unicode() => Err(self.invalid_escape(next, at)),
                _ => {
                    // In annex B, the backslash is a character, and "c" is the next one.
                    self.reader.go_to(self.reader.at() - 1);
                    Ok(Member::Char('\\' as u32))
                }
            },
            'x' => match self.reader.hex(2) {
                Some(c) => Ok(Member::Char(c)),
                None => self.identity(next, at),
            },
            'u' => self.code_point(at),
            'p' | 'P' => self.property(next, at),
            other => self.identity(other, at),
        }
    }

    fn octal(&mut self, first: char) -> u32 {
        let limit = if first <= '3' { 2 } else { 1 };
        let digits = format!("{first}{}", self.reader.take_while(limit, |c| ('0'..='7').contains(&c)));
        u32::from_str_radix(&digits, 8).unwrap_or(0)
    }

    fn invalid_escape(&self, c: char, at: usize) -> PatternError {
        self.reader.syntax(format!("an invalid escape \"\\{c}\""), at, "write two backslashes for a backslash")
    }

    /// Returns a character that has no special meaning after a backslash.
    fn identity(&self, c: char, at: usize) -> Result<Member, PatternError> {
        let is_valid = if self.is_unicode() { SYNTAX_CHARS.contains(c) } else { c != 'k' || !self.has_names };
        if is_valid { Ok(Member::Char(c as u32)) } else { Err(self.invalid_escape(c, at)) }
    }

    fn code_point(&mut self, at: usize) -> Result<Member, PatternError> {
        if self.reader.peek() == Some('{') {
            if let Some(error) = self.only_unicode("\\u{...}", at) {
                return Err(error);
            }
            self.reader.next();
            let digits = self.reader.take_while(usize::MAX, |c| c.is_ascii_hexdigit());
            let c = u32::from_str_radix(&digits, 16).ok().filter(|&c| c <= MAX_CHAR);
            return match c {
                Some(c) if self.reader.take("}") => Ok(Member::Char(c)),
                _ => Err(self.reader.syntax("an invalid escape \"\\u{...}\"", at, "give a code point up to 10FFFF")),
            };
        }
        let Some(first) = self.reader.hex(4) else { return self.identity('u', at) };
        let start = self.reader.at();
        // The two halves of a pair are one character in Unicode mode. In annex B, they match the
        // same text.
        if (0xD800..0xDC00).contains(&first) && self.reader.take("\\u") {
            match self.reader.hex(4) {
                Some(second @ 0xDC00..=0xDFFF) => return Ok(Member::Char(0x10000 + ((first - 0xD800) << 10) + second - 0xDC00)),
                _ => self.reader.go_to(start),
            }
        }
        Ok(Member::Char(first))
    }

    /// Returns the error for `\p{L}` and `\u{61}` in annex B, which reads them as a letter and
    /// braces. Authors do not mean that.
    fn only_unicode(&self, what: &str, at: usize) -> Option<PatternError> {
        let error = self.not_unicode.as_ref()?;
        let problem = format!("{what} in a pattern that is invalid in Unicode mode: {} at character {}", error.problem, error.position);
        Some(self.reader.unsupported(problem, at, "correct that place"))
    }

    fn property(&mut self, letter: char, at: usize) -> Result<Member, PatternError> {
        if self.reader.peek() != Some('{') {
            return self.identity(letter, at);
        }
        if let Some(error) = self.only_unicode("a Unicode property", at) {
            return Err(error);
        }
        self.reader.next();
        let name = self.reader.take_while(usize::MAX, |c| c.is_ascii_alphanumeric() || c == '_' || c == '=');
        if !self.reader.take("}") || name.is_empty() {
            return Err(self.reader.syntax("an invalid Unicode property", at, "write \\p{Name} or \\p{Name=Value}"));
        }
        if !is_property(&name) {
            return Err(self.reader.syntax(format!("an unknown Unicode property ({name})"), at, "write a name of Unicode, as \\p{L}"));
        }
        Ok(Member::Set(Class::default().with_properties(vec![(name, letter == 'P')])))
    }

    fn class(&mut self) -> Result<Class, PatternError> {
        let start = self.reader.at();
        self.reader.next();
        let negated = self.reader.take("^");
        let (mut ranges, mut properties) = (Vec::new(), Vec::new());
        loop {
            let at = self.reader.at();
            let Some(next) = self.reader.peek() else {
                return Err(self.reader.syntax("unclosed character class", start, "write \"\\\\[\" for the character"));
            };
            if self.reader.take("]") {
                break;
            }
            let low = self.class_member(next)?;
            let is_range = self.reader.peek() == Some('-') && self.reader.peek_at(1).is_some_and(|c| c != ']');
            if !is_range {
                add(low, &mut ranges, &mut properties);
                continue;
            }
            self.reader.next();
            let next = self.reader.peek().unwrap_or(']');
            match (low, self.class_member(next)?) {
                (Member::Char(low), Member::Char(high)) if low <= high => ranges.push((low, high)),
                (Member::Char(_), Member::Char(_)) => return Err(self.reader.syntax("a range out of order", at, "swap its ends")),
                _ if self.is_unicode() => {
                    return Err(self.reader.syntax("a range that ends in a set", at, "put a backslash before the \"-\""));
                }
                (low, high) => {
                    add(low, &mut ranges, &mut properties);
                    add(high, &mut ranges, &mut properties);
                    ranges.push(('-' as u32, '-' as u32));
                }
            }
        }
        let class = Class::new(ranges).with_properties(properties).folded(self.modifiers.ignore_case);
        Ok(if negated { class.complement() } else { class })
    }

    fn class_member(&mut self, next: char) -> Result<Member, PatternError> {
        let at = self.reader.at();
        self.reader.next();
        if next == '\\' { self.escaped(at, true) } else { Ok(Member::Char(next as u32)) }
    }
}

fn add(member: Member, ranges: &mut Vec<(u32, u32)>, properties: &mut Vec<(String, bool)>) {
    match member {
        Member::Char(c) => ranges.push((c, c)),
        Member::Set(set) => {
            ranges.extend_from_slice(set.ranges());
            properties.extend_from_slice(set.properties());
        }
    }
}

/// Returns the number of capturing groups, and true if one has a name.
fn count_groups(pattern: &str) -> (u32, bool) {
    let chars: Vec<char> = pattern.chars().collect();
    let (mut groups, mut has_names, mut in_class, mut i) = (0, false, false, 0);
    while i < chars.len() {
        match chars[i] {
            '\\' => i += 1,
            '[' => in_class = true,
            ']' => in_class = false,
            '(' if !in_class => {
                let rest: String = chars[i + 1..].iter().take(3).collect();
                let is_named = rest.starts_with("?<") && !rest.starts_with("?<=") && !rest.starts_with("?<!");
                has_names |= is_named;
                groups += u32::from(is_named || !rest.starts_with('?'));
            }
            _ => {}
        }
        i += 1;
    }
    (groups, has_names)
}
