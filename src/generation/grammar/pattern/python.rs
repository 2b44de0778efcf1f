//! Patterns of Python's `re` for `str`, as of Python 3.11.

use std::collections::BTreeSet;

use super::class::{DIGITS, MAX_CHAR, WORD, is_property};
use super::fold::fold;
use super::reader::Reader;
use super::{Class, MAX_DEPTH, Node, PatternError, reader};

pub const LANGUAGE: &str = "Python";

/// The maximum number of repetitions, which Python treats as unlimited.
const MAX_REPEAT: u32 = u32::MAX;

/// Flags of `re.compile`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags {
    pub ascii: bool,
    pub ignore_case: bool,
    pub multiline: bool,
    pub dot_all: bool,
    pub verbose: bool,
    /// `\p{Name}` is a Unicode property, which Python does not have.
    pub properties: bool,
}

pub fn parse(pattern: &str, flags: Flags) -> Result<Node, PatternError> {
    let mut parser = Parser { reader: Reader::new(pattern, LANGUAGE), flags, names: BTreeSet::new(), groups: 0, depth: 0 };
    parser.global_flags()?;
    let node = parser.alternatives()?;
    match parser.reader.peek() {
        None => Ok(node),
        Some(_) => Err(parser.reader.syntax("unbalanced parenthesis", parser.reader.at(), "write \"\\\\)\" for the character")),
    }
}

struct Parser<'a> {
    reader: Reader<'a>,
    flags: Flags,
    names: BTreeSet<String>,
    groups: u32,
    depth: usize,
}

enum Member {
    Char(u32),
    Set(Class),
}

impl Parser<'_> {
    fn alternatives(&mut self) -> Result<Node, PatternError> {
        reader::alternatives(self, |parser| &mut parser.reader, Parser::sequence)
    }

    fn sequence(&mut self) -> Result<Node, PatternError> {
        // Each node, with true if it is a repetition.
        let mut nodes: Vec<(Node, bool)> = Vec::new();
        loop {
            self.skip_comments();
            let Some(next) = self.reader.peek().filter(|c| !matches!(c, '|' | ')')) else { break };
            let at = self.reader.at();
            if let Some((min, max)) = self.quantifier(next)? {
                let remedy = "put a backslash before it if it is a character";
                match nodes.pop() {
                    Some((_, true)) => return Err(self.reader.syntax("multiple repeat", at, remedy)),
                    None | Some((Node::Start | Node::End | Node::EndOrNewline, _)) => {
                        return Err(self.reader.syntax("nothing to repeat", at, remedy));
                    }
                    Some((node, false)) => nodes.push((Node::Repeat(Box::new(node), min, max), true)),
                }
            } else if let Some(node) = self.term(next)? {
                nodes.push((node, false));
            }
        }
        let mut nodes: Vec<Node> = nodes.into_iter().map(|(node, _)| node).collect();
        Ok(if nodes.len() == 1 { nodes.swap_remove(0) } else { Node::Concat(nodes) })
    }

    /// Skips white space and comments of verbose patterns.
    fn skip_comments(&mut self) {
        while self.flags.verbose {
            let blanks = self.reader.take_while(usize::MAX, |c| " \t\n\r\x0B\x0C".contains(c));
            let is_comment = self.reader.take("#");
            if is_comment {
                self.reader.take_while(usize::MAX, |c| c != '\n');
            }
            if blanks.is_empty() && !is_comment {
                break;
            }
        }
    }

    /// Reads a term. Returns None for a comment.
    fn term(&mut self, next: char) -> Result<Option<Node>, PatternError> {
        let at = self.reader.at();
        match next {
            '(' => return self.group(),
            '[' => return Ok(Some(Node::Class(self.class()?))),
            '\\' => return self.escape().map(Some),
            _ => {}
        }
        self.reader.next();
        Ok(Some(match next {
            '^' | '$' if self.flags.multiline => {
                return Err(self.reader.unsupported("an anchor of lines", at, "leave the flag m out, or use \\A and \\Z"));
            }
            '^' => Node::Start,
            '$' => Node::EndOrNewline,
            '.' if self.flags.dot_all => Node::Class(Class::any()),
            '.' => Node::Class(Class::char('\n' as u32).complement()),
            other => Node::Class(self.char(other as u32)),
        }))
    }

    fn char(&self, c: u32) -> Class {
        self.folded(Class::char(c))
    }

    fn folded(&self, class: Class) -> Class {
        if self.flags.ignore_case { fold(&class, self.flags.ascii) } else { class }
    }

    fn quantifier(&mut self, next: char) -> Result<Option<(u32, Option<u32>)>, PatternError> {
        let at = self.reader.at();
        let (min, max) = match next {
            '*' => (0, None),
            '+' => (1, None),
            '?' => (0, Some(1)),
            '{' => match self.braces() {
                Some(limits) => limits,
                None => {
                    self.reader.go_to(at);
                    return Ok(None);
                }
            },
            _ => return Ok(None),
        };
        if next != '{' {
            self.reader.next();
        }
        if max.is_some_and(|max| max < min) {
            let problem = format!("min repeat greater than max repeat ({min}, {})", max.unwrap_or(0));
            return Err(self.reader.syntax(problem, at, "swap them"));
        }
        if self.reader.take("+") {
            return Err(self.reader.unsupported("a possessive quantifier", at, "leave the second \"+\" out"));
        }
        self.reader.take("?");
        Ok(Some((min, max)))
    }

    /// Returns the limits between braces, if they are a quantifier.
    fn braces(&mut self) -> Option<(u32, Option<u32>)> {
        self.reader.next();
        let finite = |n: u32| (n < MAX_REPEAT).then_some(n);
        let min = self.reader.number();
        if self.reader.take("}") {
            return min.map(|min| (min, finite(min)));
        }
        if !self.reader.take(",") {
            return None;
        }
        let max = self.reader.number();
        self.reader.take("}").then_some((min.unwrap_or(0), max.and_then(finite)))
    }

    fn group(&mut self) -> Result<Option<Node>, PatternError> {
        let at = self.reader.at();
        self.reader.next();
        let before = self.flags;
        if self.reader.take("?#") {
            self.reader.take_while(usize::MAX, |c| c != ')');
            return if self.reader.take(")") { Ok(None) } else { Err(self.unclosed(at)) };
        }
        if self.reader.take("?") {
            self.extension(at)?;
        } else {
            self.groups += 1;
        }
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            let problem = format!("groups within groups ({}, limit {MAX_DEPTH})", self.depth);
            return Err(self.reader.unsupported(problem, at, "nest fewer"));
        }
        let node = self.alternatives()?;
        self.depth -= 1;
        self.flags = before;
        if !self.reader.take(")") {
            return Err(self.unclosed(at));
        }
        // A separate node, so that a quantifier can repeat an anchor or a repetition within it.
        Ok(Some(Node::Concat(vec![node])))
    }

    fn unclosed(&self, at: usize) -> PatternError {
        self.reader.syntax("unclosed group (missing \")\")", at, "write \"\\\\(\" for the character")
    }

    /// Reads the text after "(?", up to the pattern of the group.
    fn extension(&mut self, at: usize) -> Result<(), PatternError> {
        let others = [
            ("=", "a lookahead"),
            ("!", "a lookahead"),
            ("<=", "a lookbehind"),
            ("<!", "a lookbehind"),
            (">", "an atomic group"),
            ("P=", "a backreference"),
            ("(", "a condition"),
        ];
        for (mark, what) in others {
            if self.reader.take(mark) {
                return Err(self.reader.unsupported(what, at, "write the texts that match without it"));
            }
        }
        if self.reader.take("P<") {
            self.groups += 1;
            return self.group_name(at);
        }
        if self.reader.take(":") { Ok(()) } else { self.group_flags(at) }
    }

    fn group_name(&mut self, at: usize) -> Result<(), PatternError> {
        let name = self.reader.take_while(usize::MAX, |c| c.is_alphanumeric() || c == '_');
        let is_valid = name.chars().next().is_some_and(|c| !c.is_numeric()) && self.reader.take(">");
        if !is_valid {
            return Err(self.reader.syntax("bad character in group name", at, "write (?P<name>...) with a name of letters and digits"));
        }
        if !self.names.insert(name) {
            return Err(self.reader.syntax("redefinition of group name", at, "choose another name"));
        }
        Ok(())
    }

    /// Reads flags for the whole pattern, which must be at its start.
    fn global_flags(&mut self) -> Result<(), PatternError> {
        let mut all = String::new();
        loop {
            self.skip_comments();
            let start = self.reader.at();
            let letters =
                if self.reader.take("(?") { self.reader.take_while(usize::MAX, |c| "aiLmsux".contains(c)) } else { String::new() };
            if letters.is_empty() || !self.reader.take(")") {
                self.reader.go_to(start);
                return Ok(());
            }
            all.push_str(&letters);
            if all.contains('a') && all.contains('u') {
                return Err(self.reader.syntax("ASCII and UNICODE flags are incompatible", start, "leave one of a and u out"));
            }
            self.set_flags(&letters, true, start)?;
        }
    }

    /// Reads the flags that a group sets and clears, before its colon.
    fn group_flags(&mut self, at: usize) -> Result<(), PatternError> {
        let on = self.reader.take_while(usize::MAX, |c| "aiLmsux".contains(c));
        let minus = self.reader.take("-");
        let off = if minus { self.reader.take_while(usize::MAX, |c| "imsx".contains(c)) } else { String::new() };
        if !on.is_empty() && !minus && self.reader.peek() == Some(')') {
            return Err(self.reader.syntax("global flags not at the start of the expression", at, "put them first, or write (?i:...)"));
        }
        let is_valid = (!on.is_empty() || !off.is_empty()) && (!minus || !off.is_empty()) && !on.chars().any(|c| off.contains(c));
        if !self.reader.take(":") || !is_valid || (on.contains('a') && on.contains('u')) {
            return Err(self.reader.syntax("unknown extension", at, "begin groups with \"(\", \"(?:\", \"(?P<name>\" or \"(?i:\""));
        }
        self.set_flags(&on, true, at)?;
        self.set_flags(&off, false, at)
    }

    fn set_flags(&mut self, letters: &str, value: bool, at: usize) -> Result<(), PatternError> {
        for letter in letters.chars() {
            match letter {
                'a' => self.flags.ascii = true,
                'u' => self.flags.ascii = false,
                'i' => self.flags.ignore_case = value,
                'm' => self.flags.multiline = value,
                's' => self.flags.dot_all = value,
                'x' => self.flags.verbose = value,
                _ => return Err(self.reader.syntax("the flag L with text", at, "leave it out")),
            }
        }
        Ok(())
    }

    /// Reads an escape outside of a class.
    fn escape(&mut self) -> Result<Node, PatternError> {
        let at = self.reader.at();
        self.reader.next();
        let Some(next) = self.reader.peek() else { return Err(self.ends_in_backslash(at)) };
        match next {
            'A' | 'Z' => {
                self.reader.next();
                return Ok(if next == 'A' { Node::Start } else { Node::End });
            }
            'b' | 'B' => {
                return Err(self.reader.unsupported(format!("a word boundary \"\\{next}\""), at, "write the characters around it"));
            }
            '<' | '>' => {
                let problem = format!("\"\\{next}\", a word boundary in other languages");
                return Err(self.reader.unsupported(problem, at, "write the character without the backslash"));
            }
            '0' => {
                let digits = self.reader.take_while(3, |c| ('0'..='7').contains(&c));
                return Ok(Node::Class(self.char(u32::from_str_radix(&digits, 8).unwrap_or(0))));
            }
            '1'..='9' => return self.octal_or_reference(at),
            _ => {}
        }
        Ok(Node::Class(match self.escaped(at, false)? {
            Member::Char(c) => self.char(c),
            Member::Set(set) => set,
        }))
    }

    fn ends_in_backslash(&self, at: usize) -> PatternError {
        self.reader.syntax("bad escape (the pattern ends in a backslash that escapes nothing)", at, "leave it out, or write two")
    }

    fn octal_or_reference(&mut self, at: usize) -> Result<Node, PatternError> {
        let start = self.reader.at();
        let octal = self.reader.take_while(3, |c| ('0'..='7').contains(&c));
        if octal.len() == 3 {
            return Ok(Node::Class(self.char(self.octal(&octal, at)?)));
        }
        self.reader.go_to(start);
        let digits = self.reader.take_while(2, |c| c.is_ascii_digit());
        let exists = digits.parse().is_ok_and(|group: u32| group <= self.groups);
        let remedy = "backreferences are not supported: write out what can be repeated";
        Err(match exists {
            true => self.reader.unsupported("a backreference", at, remedy),
            false => self.reader.syntax(format!("invalid group reference {digits}"), at, remedy),
        })
    }

    fn octal(&self, digits: &str, at: usize) -> Result<u32, PatternError> {
        match u32::from_str_radix(digits, 8) {
            Ok(c) if c <= 0o377 => Ok(c),
            _ => {
                Err(self.reader.syntax(format!("octal escape value \\{digits} outside of range 0-0o377"), at, "write \\u and four digits"))
            }
        }
    }

    /// Reads the rest of an escape, within or outside of a class.
    fn escaped(&mut self, at: usize, in_class: bool) -> Result<Member, PatternError> {
        let Some(next) = self.reader.next() else { return Err(self.ends_in_backslash(at)) };
        Ok(match next {
            'd' | 'D' | 'w' | 'W' | 's' | 'S' => {
                let set = category(next.to_ascii_lowercase(), self.flags.ascii);
                Member::Set(if next.is_ascii_uppercase() { set.complement() } else { set })
            }
            'a' => Member::Char(0x07),
            'b' if in_class => Member::Char(0x08),
            'f' => Member::Char(0x0C),
            'n' => Member::Char(0x0A),
            'r' => Member::Char(0x0D),
            't' => Member::Char(0x09),
            'v' => Member::Char(0x0B),
            'x' | 'u' | 'U' => {
                let digits = [('x', 2), ('u', 4), ('U', 8)].into_iter().find(|(letter, _)| *letter == next).map_or(0, |(_, digits)| digits);
                match self.reader.hex(digits).filter(|&c| c <= MAX_CHAR) {
                    Some(c) => Member::Char(c),
                    None => return Err(self.reader.syntax(format!("incomplete escape \\{next}"), at, "give all its hexadecimal digits")),
                }
            }
            '0'..='7' if in_class => {
                let digits = format!("{next}{}", self.reader.take_while(2, |c| ('0'..='7').contains(&c)));
                Member::Char(self.octal(&digits, at)?)
            }
            'N' => return Err(self.reader.unsupported("a character by its name (\\N)", at, "write the character, or \\u and four digits")),
            'p' | 'P' if self.flags.properties => self.property(next == 'P', at)?,
            other if other.is_ascii_alphanumeric() => {
                return Err(self.reader.syntax(format!("bad escape \\{other}"), at, "write two backslashes for a backslash"));
            }
            other => Member::Char(other as u32),
        })
    }

    fn property(&mut self, negated: bool, at: usize) -> Result<Member, PatternError> {
        let in_braces = self.reader.take("{");
        let limit = if in_braces { usize::MAX } else { 1 };
        let name = self.reader.take_while(limit, |c| c.is_ascii_alphanumeric() || c == '_' || c == '=');
        if name.is_empty() || (in_braces && !self.reader.take("}")) {
            return Err(self.reader.syntax("an invalid Unicode property", at, "write \\p{Name} or \\p{Name=Value}"));
        }
        if !is_property(&name) {
            return Err(self.reader.syntax(format!("an unknown Unicode property ({name})"), at, "write a name of Unicode, as \\p{L}"));
        }
        Ok(Member::Set(Class::default().with_properties(vec![(name, negated)])))
    }

    fn class(&mut self) -> Result<Class, PatternError> {
        let start = self.reader.at();
        self.reader.next();
        let negated = self.reader.take("^");
        let first = self.reader.at();
        let (mut ranges, mut sets) = (Vec::new(), Vec::new());
        loop {
            let at = self.reader.at();
            // A first bracket is a character.
            if at > first && self.reader.take("]") {
                break;
            }
            let low = self.class_member(start)?;
            let is_range = self.reader.peek() == Some('-') && self.reader.peek_at(1) != Some(']');
            match low {
                Member::Char(low) if is_range => {
                    self.reader.next();
                    match self.class_member(start)? {
                        Member::Char(high) if low <= high => ranges.push((low, high)),
                        _ => {
                            return Err(self.reader.syntax(
                                "bad character range",
                                at,
                                "swap its ends, or put a backslash before the \"-\"",
                            ));
                        }
                    }
                }
                Member::Set(_) if is_range => {
                    return Err(self.reader.syntax("bad character range", at, "put a backslash before the \"-\""));
                }
                Member::Char(c) => ranges.push((c, c)),
                Member::Set(set) => sets.push(set),
            }
        }
        let folded = self.folded(Class::new(ranges));
        let all = sets.iter().flat_map(|set| set.ranges().iter().copied()).chain(folded.ranges().iter().copied());
        let properties = sets.iter().flat_map(|set| set.properties().iter().cloned()).collect();
        let class = Class::new(all).with_properties(properties);
        Ok(if negated { class.complement() } else { class })
    }

    fn class_member(&mut self, start: usize) -> Result<Member, PatternError> {
        let at = self.reader.at();
        match self.reader.next() {
            Some('\\') => self.escaped(at, true),
            Some(c) => Ok(Member::Char(c as u32)),
            None => Err(self.reader.syntax("unterminated character set", start, "write \"\\\\[\" for the character")),
        }
    }
}

/// Returns the set of `\d`, `\w` or `\s`.
fn category(letter: char, ascii: bool) -> Class {
    match (letter, ascii) {
        ('d', false) => DIGITS.clone(),
        ('d', true) => Class::new([(0x30, 0x39)]),
        ('w', false) => WORD.clone(),
        ('w', true) => Class::new([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]),
        (_, false) => Class::new(SPACES),
        (_, true) => Class::new([(0x09, 0x0D), (0x20, 0x20)]),
    }
}

/// `str.isspace`
const SPACES: [(u32, u32); 10] = [
    (0x09, 0x0D),
    (0x1C, 0x20),
    (0x85, 0x85),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
];
