//! Recognizes one JSON value, character by character.

/// Maximum depth of a value. Deeper values count as malformed.
const MAX_DEPTH: usize = 128;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expect {
    Value,
    /// After `[`.
    ItemOrEnd,
    /// After `{`.
    KeyOrEnd,
    /// After a comma of an object.
    Key,
    Colon,
    CommaOrEnd,
    /// Inside a string. `escape`: 0 outside of an escape, 1 after `\`, 2 to 5 digits of `\u`.
    Text {
        key: bool,
        escape: u8,
    },
    Number(Number),
    /// The rest of `true`, `false` or `null`.
    Word(&'static str),
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

/// A character that no JSON value continues with.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed;

/// A recognizer of one value. Unlike the standard it accepts control characters in strings, since
/// models write them; `is_in_string` lets the caller escape them.
#[derive(Debug)]
pub struct Recognizer {
    /// The open containers; true for an object.
    open: Vec<bool>,
    expect: Expect,
}

impl Recognizer {
    pub fn new() -> Self {
        Recognizer { open: Vec::new(), expect: Expect::Value }
    }

    pub fn depth(&self) -> usize {
        self.open.len()
    }

    pub fn is_in_string(&self) -> bool {
        matches!(self.expect, Expect::Text { .. })
    }

    pub fn is_in_key(&self) -> bool {
        matches!(self.expect, Expect::Text { key: true, .. })
    }

    /// The next character that is not a space begins a value or ends an empty list.
    pub fn expects_value(&self) -> bool {
        matches!(self.expect, Expect::Value | Expect::ItemOrEnd)
    }

    /// No value is open at the present depth: a comma or an end follows.
    pub fn is_between(&self) -> bool {
        matches!(self.expect, Expect::CommaOrEnd | Expect::Done)
    }

    pub fn is_done(&self) -> bool {
        self.expect == Expect::Done
    }

    /// Advances by `c`. The recognizer is of no use after an error.
    pub fn step(&mut self, c: char) -> Result<(), Malformed> {
        match self.expect {
            Expect::Text { key, escape } => self.in_text(key, escape, c),
            Expect::Number(state) => self.in_number(state, c),
            Expect::Word(rest) => match rest.strip_prefix(c) {
                Some("") => self.end_value(),
                Some(rest) => self.set(Expect::Word(rest)),
                None => Err(Malformed),
            },
            _ if matches!(c, ' ' | '\t' | '\n' | '\r') => Ok(()),
            Expect::Value => self.begin_value(c),
            Expect::ItemOrEnd if c == ']' => self.close(false),
            Expect::ItemOrEnd => self.begin_value(c),
            Expect::KeyOrEnd if c == '}' => self.close(true),
            Expect::KeyOrEnd | Expect::Key if c == '"' => self.set(Expect::Text { key: true, escape: 0 }),
            Expect::Colon if c == ':' => self.set(Expect::Value),
            Expect::CommaOrEnd => match (c, self.open.last()) {
                (',', Some(true)) => self.set(Expect::Key),
                (',', Some(false)) => self.set(Expect::Value),
                ('}', _) => self.close(true),
                (']', _) => self.close(false),
                _ => Err(Malformed),
            },
            Expect::KeyOrEnd | Expect::Key | Expect::Colon | Expect::Done => Err(Malformed),
        }
    }

    fn set(&mut self, expect: Expect) -> Result<(), Malformed> {
        self.expect = expect;
        Ok(())
    }

    fn begin_value(&mut self, c: char) -> Result<(), Malformed> {
        let expect = match c {
            '{' | '[' if self.open.len() == MAX_DEPTH => return Err(Malformed),
            '{' => {
                self.open.push(true);
                Expect::KeyOrEnd
            }
            '[' => {
                self.open.push(false);
                Expect::ItemOrEnd
            }
            '"' => Expect::Text { key: false, escape: 0 },
            '-' => Expect::Number(Number::Minus),
            '0' => Expect::Number(Number::Zero),
            '1'..='9' => Expect::Number(Number::Digits),
            't' => Expect::Word("rue"),
            'f' => Expect::Word("alse"),
            'n' => Expect::Word("ull"),
            _ => return Err(Malformed),
        };
        self.set(expect)
    }

    fn end_value(&mut self) -> Result<(), Malformed> {
        self.set(if self.open.is_empty() { Expect::Done } else { Expect::CommaOrEnd })
    }

    fn close(&mut self, object: bool) -> Result<(), Malformed> {
        if self.open.pop() != Some(object) {
            return Err(Malformed);
        }
        self.end_value()
    }

    fn in_text(&mut self, key: bool, escape: u8, c: char) -> Result<(), Malformed> {
        let escape = match (escape, c) {
            (0, '"') if key => return self.set(Expect::Colon),
            (0, '"') => return self.end_value(),
            (0, '\\') => 1,
            (0, _) => 0,
            (1, 'u') => 2,
            (1, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => 0,
            (2..=4, c) if c.is_ascii_hexdigit() => escape + 1,
            (5, c) if c.is_ascii_hexdigit() => 0,
            _ => return Err(Malformed),
        };
        self.set(Expect::Text { key, escape })
    }

    fn in_number(&mut self, state: Number, c: char) -> Result<(), Malformed> {
        use Number::*;
        let next = match (state, c) {
            (Minus, '0') => Zero,
            (Minus, '1'..='9') | (Digits, '0'..='9') => Digits,
            (Zero | Digits, '.') => Point,
            (Point | Fraction, '0'..='9') => Fraction,
            (Zero | Digits | Fraction, 'e' | 'E') => Exponent,
            (Exponent, '+' | '-') => ExponentSign,
            (Exponent | ExponentSign | ExponentDigits, '0'..='9') => ExponentDigits,
            (Zero | Digits | Fraction | ExponentDigits, _) => {
                self.end_value()?;
                return self.step(c);
            }
            _ => return Err(Malformed),
        };
        self.set(Expect::Number(next))
    }
}

/// Appends `c` as a character of a JSON string.
pub fn escape_into(out: &mut String, c: char) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\u{8}' => out.push_str("\\b"),
        '\u{c}' => out.push_str("\\f"),
        c if c < ' ' => out.push_str(&format!("\\u{:04x}", c as u32)),
        c => out.push(c),
    }
}

/// Decodes the content of a JSON string, character by character.
#[derive(Debug, Default)]
pub struct Unescape {
    /// An escape that is not complete: one, or two if the first is a high surrogate.
    pending: String,
}

impl Unescape {
    /// Advances by a character that the recognizer accepted as a part of a string, and appends what
    /// is decoded.
    pub fn push(&mut self, c: char, out: &mut String) {
        if self.pending.len() == 6 && c != '\\' {
            self.flush(out); // a high surrogate without its low one
        }
        if self.pending.is_empty() && c != '\\' {
            out.push(c);
            return;
        }
        self.pending.push(c);
        let second = self.pending.get(6..).unwrap_or_default();
        let unicode = |text: &str| text.len() == 6 && text.as_bytes()[1] == b'u';
        match self.pending.len() {
            2 if c != 'u' => self.flush(out),
            6 if !is_high_surrogate(&self.pending) => self.flush(out),
            8 if c != 'u' => self.flush(out),
            12 if unicode(second) => self.flush(out),
            _ => {}
        }
    }

    /// Appends what is pending. An incomplete escape becomes U+FFFD.
    pub fn flush(&mut self, out: &mut String) {
        if self.pending.is_empty() {
            return;
        }
        let whole: Result<String, _> = serde_json::from_str(&format!("\"{}\"", self.pending));
        match whole {
            Ok(text) => out.push_str(&text),
            Err(_) => {
                out.push('\u{fffd}');
                let second = self.pending.get(6..).unwrap_or_default();
                if let Ok(text) = serde_json::from_str::<String>(&format!("\"{second}\"")) {
                    out.push_str(&text);
                }
            }
        }
        self.pending.clear();
    }
}

fn is_high_surrogate(escape: &str) -> bool {
    escape.get(2..6).and_then(|digits| u32::from_str_radix(digits, 16).ok()).is_some_and(|unit| (0xd800..0xdc00).contains(&unit))
}
