//! Checks of patterns: the regular expressions that Oniguruma runs.
//!
//! Oniguruma recurses as deep as a pattern nests, and backtracks: it gives up after ten million steps at one position.

use onig::{MatchParam, Regex, SearchOptions};
use serde_json::Value as Json;

use super::{MAX_AFFIX_BYTES, SAVE_AGAIN, refusal, string};

const MAX_BYTES: usize = 4096;
/// Groups and classes within each other.
const MAX_NESTING: usize = 16;
/// Numbers of a quantifier such as `{1,3}`.
const MAX_REPEATS: u32 = 256;
/// The product of such numbers that apply to each other.
const MAX_NESTED_REPEATS: u32 = 1024;
/// Characters of a text with which a pattern is tried, and the steps back that one search may take in it. Patterns of published
/// tokenizers take at most about two for each character; one for each pair of characters would be 32,640.
const PROBE_CHARS: usize = 256;
const PROBE_STEPS: u32 = 8192;
/// Positions to which a search may be able to step back at once.
const PROBE_STACK: u32 = 16_384;
/// Characters of a pattern of which texts are made to try it.
const PROBES: usize = 32;
const SIMPLIFY: &str = "write a simpler pattern";

/// Checks a pattern: `{"String": text}` or `{"Regex": expression}`.
pub fn check(pattern: &Json, field: &str) -> Result<(), String> {
    if let Some(text) = pattern.get("String") {
        return string(text, &format!("{field}.String"), MAX_BYTES).map(drop);
    }
    let field = format!("{field}.Regex");
    let regex = string(&pattern["Regex"], &field, MAX_BYTES)?;
    Scan::new(regex).run().and_then(|()| probe(regex)).map_err(|problem| refusal(&field, &problem, SIMPLIFY))
}

/// Tries a pattern on runs of characters, on which backtracking takes the longest.
fn probe(regex: &str) -> Result<(), String> {
    let compiled = Regex::new(regex).map_err(|e| format!("not a regular expression ({})", e.description()))?;
    let mut chars: Vec<char> = "aA1 \n.-_é中".chars().collect();
    for c in regex.chars() {
        if !chars.contains(&c) && chars.len() < PROBES {
            chars.push(c);
        }
    }
    let runs = chars.iter().map(|&c| c.to_string().repeat(PROBE_CHARS));
    let cycle: String = regex.chars().cycle().take(PROBE_CHARS).collect();
    for mut text in runs.chain([cycle]) {
        // Oniguruma does not search a text without the characters that each match has, so they follow the run.
        for end in ["", "\u{1}", regex] {
            text.push_str(end);
            let mut limits = MatchParam::default();
            limits.set_retry_limit_in_match(PROBE_STEPS);
            limits.set_match_stack_limit(PROBE_STACK);
            let found = compiled.search_with_param(text.as_str(), 0, text.len(), SearchOptions::SEARCH_OPTION_NONE, None, limits);
            if let Err(e) = found {
                let run: String = text.chars().take(4).collect();
                return Err(format!("a search in {PROBE_CHARS} characters ({run:?}..) takes too long ({})", e.description()));
            }
        }
    }
    Ok(())
}

/// Checks a part `Replace` and returns how many times longer it can make a text.
pub fn replacement(part: &Json, field: &str) -> Result<u64, String> {
    check(&part["pattern"], &format!("{field}.pattern"))?;
    let content = string(&part["content"], &format!("{field}.content"), MAX_AFFIX_BYTES)?.len() as u64;
    match part["pattern"]["String"].as_str() {
        Some("") => Err(refusal(&format!("{field}.pattern.String"), "matches between all characters", SAVE_AGAIN)),
        Some(text) => Ok(content.div_ceil(text.len() as u64).max(1)),
        // The expression may match between characters, which stay.
        None => Ok(1 + content),
    }
}

/// What has been read of an open group.
#[derive(Clone, Copy, Default)]
struct Group {
    /// A part of the group repeats without limit.
    unbounded: bool,
    /// Most repetitions of a part of the group, as a product over the quantifiers with limits within each other. 0 stands for 1.
    repeats: u32,
}

/// One pass over an expression, without building it.
struct Scan<'a> {
    rest: std::iter::Peekable<std::str::Chars<'a>>,
    open: Vec<Group>,
    /// The group that has just ended, if a quantifier would apply to it.
    last: Group,
    /// Quantifiers in a row.
    quantifiers: usize,
}

impl<'a> Scan<'a> {
    fn new(regex: &'a str) -> Scan<'a> {
        Scan { rest: regex.chars().peekable(), open: vec![Group::default()], last: Group::default(), quantifiers: 0 }
    }

    fn run(mut self) -> Result<(), String> {
        while let Some(c) = self.rest.next() {
            match c {
                '*' | '+' => self.quantifier(None)?,
                '?' => self.quantifier(Some(1))?,
                '{' => {
                    if let Some(limit) = self.braces()? {
                        self.quantifier(limit)?;
                    }
                }
                _ => {
                    self.quantifiers = 0;
                    self.last = Group::default();
                    self.atom(c)?;
                }
            }
        }
        Ok(())
    }

    fn atom(&mut self, c: char) -> Result<(), String> {
        match c {
            '\\' => self.escape(),
            '[' => self.class(),
            '(' => self.group(),
            ')' => {
                if self.open.len() > 1 {
                    self.last = self.open.pop().unwrap_or_default();
                    let outer = self.open.last_mut().expect("the outermost group stays open");
                    outer.unbounded |= self.last.unbounded;
                    outer.repeats = outer.repeats.max(self.last.repeats);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// A quantifier with its upper limit, or the `?` or `+` after one that makes it lazy or possessive.
    fn quantifier(&mut self, limit: Option<u32>) -> Result<(), String> {
        self.quantifiers += 1;
        if self.quantifiers > 2 {
            return Err("more than two quantifiers in a row".into());
        }
        if limit.is_none() && self.quantifiers == 1 && self.last.unbounded {
            return Err("an unlimited repetition within an unlimited repetition".into());
        }
        self.last.repeats = self.last.repeats.max(1) * limit.unwrap_or(1).max(1);
        if self.last.repeats > MAX_NESTED_REPEATS {
            let repeats = self.last.repeats;
            return Err(format!("too many repetitions within repetitions ({repeats}, limit {MAX_NESTED_REPEATS})"));
        }
        let outer = self.open.last_mut().expect("the outermost group stays open");
        outer.unbounded |= limit.is_none();
        outer.repeats = outer.repeats.max(self.last.repeats);
        Ok(())
    }

    /// The upper limit of `{n,m}`, which is `None` in `{n,}`, or nothing if these braces are ordinary characters.
    fn braces(&mut self) -> Result<Option<Option<u32>>, String> {
        let mut ahead = self.rest.clone();
        let mut body = String::new();
        loop {
            match ahead.next() {
                Some('}') => break,
                Some(c) if c.is_ascii_digit() || c == ',' => body.push(c),
                _ => return Ok(None),
            }
        }
        self.rest = ahead;
        let mut limit = None;
        for number in body.split(',').filter(|number| !number.is_empty()) {
            limit = number.parse().ok().filter(|&number: &u32| number <= MAX_REPEATS);
            if limit.is_none() {
                return Err(format!("too many repetitions ({number}, limit {MAX_REPEATS})"));
            }
        }
        Ok(Some(limit.filter(|_| !body.ends_with(','))))
    }

    fn escape(&mut self) -> Result<(), String> {
        match self.rest.next() {
            Some('g' | 'k') => Err("calls and back references are not supported (\\g, \\k)".into()),
            Some(c @ '1'..='9') => Err(format!("back references are not supported (\\{c})")),
            Some('p' | 'P' | 'x' | 'u' | 'o') if self.rest.peek() == Some(&'{') => {
                self.rest.by_ref().find(|&c| c == '}');
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn class(&mut self) -> Result<(), String> {
        let mut depth = 1;
        while depth > 0 {
            match self.rest.next() {
                Some('\\') => self.escape()?,
                Some('[') => depth += 1,
                Some(']') => depth -= 1,
                Some(_) => {}
                None => return Ok(()),
            }
            if depth > MAX_NESTING {
                return Err(format!("classes nest too deep (more than {MAX_NESTING})"));
            }
        }
        Ok(())
    }

    fn group(&mut self) -> Result<(), String> {
        if self.open.len() > MAX_NESTING {
            return Err(format!("groups nest too deep (more than {MAX_NESTING})"));
        }
        self.open.push(Group::default());
        let mut ahead = self.rest.clone();
        match (ahead.next(), ahead.next()) {
            (Some('*'), _) => return Err("callouts are not supported ((*...))".into()),
            (Some('?'), Some(c @ ('{' | '~' | '('))) => return Err(format!("not supported ((?{c}...)")),
            (Some('?'), _) => {
                self.rest.next();
                self.rest.next();
            }
            _ => {}
        }
        Ok(())
    }
}
