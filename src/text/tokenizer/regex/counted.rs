//! Rewrites expressions so that Oniguruma counts each repetition.

use std::iter::Peekable;
use std::str::Chars;

/// Maximum nesting of groups and classes. Oniguruma recurses to this depth.
const MAX_NESTING: usize = 16;
/// Maximum number in a quantifier such as `{1,3}`.
const MAX_REPEATS: u32 = 256;
/// Maximum product of the numbers of nested quantifiers.
const MAX_NESTED_REPEATS: u32 = 1024;

/// A class without characters. Each attempt to match it is a step that Oniguruma counts.
const COUNT: &str = r"[^\d\D]";
/// Number of consecutive characters, classes and groups after which a counted step is inserted. It
/// is an error if no step can be inserted there.
const UNCOUNTED: usize = 8;
const MAX_UNCOUNTED: usize = 64;

/// Returns an expression that matches the same texts. `x*` becomes `(?:[^\d\D]|x)*`, and other
/// quantifiers likewise. Long sequences get a `(?:[^\d\D]|)` at intervals, which matches the empty
/// text.
pub fn counted(regex: &str) -> Result<String, String> {
    let mut translator = Translator {
        rest: regex.chars().peekable(),
        out: String::with_capacity(2 * regex.len()),
        open: Vec::new(),
        last: Element::default(),
        before: None,
        uncounted: 0,
        quantifiers: 0,
    };
    translator.run()?;
    Ok(translator.out)
}

/// The operand of a quantifier: a character, a class or a group.
#[derive(Clone, Copy, Default)]
struct Element {
    /// Start in the output.
    start: usize,
    /// Maximum number of repetitions of a part of it: the product over nested quantifiers with
    /// limits. 0 means 1.
    repeats: u32,
}

struct Translator<'a> {
    rest: Peekable<Chars<'a>>,
    out: String,
    /// Open groups.
    open: Vec<Element>,
    /// The last complete element.
    last: Element,
    /// The preceding element, if it is a character.
    before: Option<char>,
    /// Number of elements since the last counted step.
    uncounted: usize,
    /// Number of consecutive quantifiers.
    quantifiers: usize,
}

impl Translator<'_> {
    fn run(&mut self) -> Result<(), String> {
        while let Some(c) = self.rest.next() {
            match c {
                '*' | '+' => self.quantifier(&c.to_string(), 1)?,
                '?' => self.quantifier("?", 1)?,
                '{' => match self.braces()? {
                    Some((text, repeats)) => self.quantifier(&text, repeats)?,
                    None => self.element(c)?,
                },
                _ => self.element(c)?,
            }
        }
        Ok(())
    }

    fn element(&mut self, c: char) -> Result<(), String> {
        self.quantifiers = 0;
        self.count(c)?;
        self.last = Element { start: self.out.len(), repeats: 0 };
        self.out.push(c);
        match c {
            '\\' => self.escape(),
            '[' => self.class(),
            '(' => self.group(),
            ')' => {
                self.last = self.open.pop().ok_or("an unmatched parenthesis")?;
                self.repeat_outer();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Inserts a counted step before `next`, if enough elements were not counted.
    fn count(&mut self, next: char) -> Result<(), String> {
        self.uncounted += 1;
        // If case is ignored, one character can match two adjacent ones: ff, fi, fl, ss, st.
        let joins = |c: char| !c.is_ascii() || "fsFS".contains(c);
        // A parenthesis may end a group of options, which has no content.
        let is_apart = next.is_ascii() && next != ')' && !self.before.is_some_and(joins);
        self.before = (!"\\[()|".contains(next)).then_some(next);
        if self.uncounted > UNCOUNTED && is_apart {
            self.out.push_str(&format!("(?:{COUNT}|)"));
            self.uncounted = 0;
        }
        if self.uncounted > MAX_UNCOUNTED {
            return Err(format!("too many characters in a row (more than {MAX_UNCOUNTED} of f, s or beyond ASCII)"));
        }
        Ok(())
    }

    /// Writes a quantifier with its upper limit, or the `?` or `+` after one that makes it lazy or
    /// possessive.
    fn quantifier(&mut self, text: &str, repeats: u32) -> Result<(), String> {
        self.quantifiers += 1;
        if self.quantifiers > 2 {
            return Err("more than two quantifiers in a row".into());
        }
        self.last.repeats = self.last.repeats.max(1) * repeats.max(1);
        if self.last.repeats > MAX_NESTED_REPEATS {
            let repeats = self.last.repeats;
            return Err(format!("too many repetitions within repetitions ({repeats}, limit {MAX_NESTED_REPEATS})"));
        }
        self.repeat_outer();
        // Oniguruma removes `{1}` and joins the characters around it.
        if self.quantifiers == 1 && !["{1}", "{1,1}"].contains(&text) {
            self.out.insert_str(self.last.start, &format!("(?:{COUNT}|"));
            self.out.push(')');
        }
        self.out.push_str(text);
        Ok(())
    }

    fn repeat_outer(&mut self) {
        if let Some(outer) = self.open.last_mut() {
            outer.repeats = outer.repeats.max(self.last.repeats);
        }
    }

    /// Reads the rest of `{n,m}`. Returns it with its larger number, or None if the braces are
    /// ordinary characters.
    fn braces(&mut self) -> Result<Option<(String, u32)>, String> {
        let mut ahead = self.rest.clone();
        let mut body = String::new();
        loop {
            match ahead.next() {
                Some('}') => break,
                Some(c) if c.is_ascii_digit() || c == ',' => body.push(c),
                _ => return Ok(None),
            }
        }
        // `{}`, `{,}` and `{1,2,3}` are ordinary characters.
        if body.chars().all(|c| c == ',') || body.matches(',').count() > 1 {
            return Ok(None);
        }
        let mut repeats = 1;
        for number in body.split(',').filter(|number| !number.is_empty()) {
            let limited = number.parse().ok().filter(|&number: &u32| number <= MAX_REPEATS);
            repeats = limited.ok_or_else(|| format!("too many repetitions ({number}, limit {MAX_REPEATS})"))?.max(repeats);
        }
        self.rest = ahead;
        Ok(Some((format!("{{{body}}}"), repeats)))
    }

    fn escape(&mut self) -> Result<(), String> {
        let Some(c) = self.rest.next() else { return Ok(()) };
        self.out.push(c);
        match c {
            'g' | 'k' => return Err("calls and back references are not supported (\\g, \\k)".into()),
            '1'..='9' => return Err(format!("back references are not supported (\\{c})")),
            'c' | 'C' | 'G' | 'K' | 'M' | 'X' | 'Y' | 'y' => return Err(format!("\\{c} is not supported")),
            'p' | 'P' | 'x' | 'u' | 'o' if self.rest.peek() == Some(&'{') => self.copy_through('}'),
            'x' => self.copy_digits(2, 16),
            'u' => self.copy_digits(4, 16),
            '0' => self.copy_digits(2, 8),
            _ => {}
        }
        Ok(())
    }

    fn copy_digits(&mut self, max: usize, radix: u32) {
        for _ in 0..max {
            self.out.extend(self.rest.next_if(|c| c.is_digit(radix)));
        }
    }

    fn copy_through(&mut self, end: char) {
        for c in self.rest.by_ref() {
            self.out.push(c);
            if c == end {
                break;
            }
        }
    }

    fn class(&mut self) -> Result<(), String> {
        let mut depth = 1;
        self.begin_class();
        while depth > 0 {
            let Some(c) = self.rest.next() else { return Ok(()) };
            self.out.push(c);
            match c {
                '\\' => self.escape()?,
                '[' => {
                    depth += 1;
                    self.begin_class();
                }
                ']' => depth -= 1,
                _ => {}
            }
            if depth > MAX_NESTING {
                return Err(format!("classes nest too deep (more than {MAX_NESTING})"));
            }
        }
        Ok(())
    }

    /// The first character of a class may be the bracket that would end it.
    fn begin_class(&mut self) {
        self.out.extend(self.rest.next_if_eq(&'^'));
        self.out.extend(self.rest.next_if_eq(&']'));
    }

    fn group(&mut self) -> Result<(), String> {
        if self.open.len() == MAX_NESTING {
            return Err(format!("groups nest too deep (more than {MAX_NESTING})"));
        }
        if self.rest.peek() == Some(&'*') {
            return Err("callouts are not supported ((*...))".into());
        }
        self.open.push(self.last);
        if self.rest.next_if_eq(&'?').is_none() {
            return Ok(());
        }
        self.out.push('?');
        let Some(c) = self.rest.next() else { return Ok(()) };
        self.out.push(c);
        match c {
            ':' | '=' | '!' | '>' => {}
            '<' if matches!(self.rest.peek(), Some('=' | '!')) => self.out.extend(self.rest.next()),
            '<' => self.copy_through('>'),
            '\'' => self.copy_through('\''),
            'i' | 'm' | 'a' | 's' | '-' => self.options()?,
            _ => return Err(format!("not supported ((?{c}...)")),
        }
        Ok(())
    }

    /// Reads the rest of `(?i-m:` or `(?i-m)`. The latter counts as an empty group, which does not
    /// change the number of repetitions.
    fn options(&mut self) -> Result<(), String> {
        while let Some(c) = self.rest.next_if(|&c| c != ')') {
            self.out.push(c);
            match c {
                ':' => break,
                'i' | 'm' | 'a' | 's' | '-' => {}
                _ => return Err(format!("not supported ((?..{c}...)")),
            }
        }
        Ok(())
    }
}
