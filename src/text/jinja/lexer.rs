//! Converts template source to tokens, with the settings of transformers: `trim_blocks` and
//! `lstrip_blocks`.

use super::failure::{Failure, Result};
use super::unicode::is_space;

#[derive(Debug, Clone, PartialEq)]
pub enum Token {
    Text(String),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(String),
    Str(String),
    Int(i128),
    Float(f64),
    Symbol(&'static str),
    End,
}

#[derive(Debug, Clone)]
pub struct Spanned {
    pub line: u32,
    pub token: Token,
}

/// Longest first, since the first match counts.
const SYMBOLS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".", ":", "|", ",", ";",
];

/// The kind of a tag.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tag {
    Variable,
    Block,
    Comment,
    Raw,
}

pub fn tokenize(source: &str) -> Result<Vec<Spanned>> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { rest: source, line: 1, line_starts: true, tokens: Vec::new() };
    lexer.text()?;
    lexer.push(Token::End);
    Ok(lexer.tokens)
}

struct Lexer<'a> {
    rest: &'a str,
    line: u32,
    /// True if the text so far ends in a newline or is empty.
    line_starts: bool,
    tokens: Vec<Spanned>,
}

impl<'a> Lexer<'a> {
    fn push(&mut self, token: Token) {
        self.tokens.push(Spanned { line: self.line, token });
    }

    fn skip(&mut self, bytes: usize) -> &'a str {
        let (read, rest) = self.rest.split_at(bytes);
        self.line += read.matches('\n').count() as u32;
        self.rest = rest;
        read
    }

    fn fail<T>(&self, message: impl std::fmt::Display) -> Result<T> {
        Err(Failure::new(message).at(self.line))
    }

    /// Reads text and tags to the end of the source.
    fn text(&mut self) -> Result<()> {
        while let Some((start, tag, opening)) = next_tag(self.rest) {
            let sign = self.rest[start + 2..].chars().next();
            self.text_before(start, sign, tag);
            let read = self.skip(opening);
            self.line_starts = read.ends_with('\n');
            match tag {
                Tag::Variable => self.code(Token::VariableBegin)?,
                Tag::Block => self.code(Token::BlockBegin)?,
                Tag::Comment => self.comment()?,
                Tag::Raw => self.raw()?,
            }
        }
        let text = self.skip(self.rest.len());
        if !text.is_empty() {
            self.push(Token::Text(text.to_string()));
        }
        Ok(())
    }

    /// Adds the text before a tag, after whitespace control.
    fn text_before(&mut self, len: usize, sign: Option<char>, tag: Tag) {
        let text = &self.rest[..len];
        let kept = match sign {
            Some('-') => text.trim_end_matches(is_space),
            Some('+') => text,
            _ if tag == Tag::Variable => text,
            _ => {
                let line = text.rfind('\n').map_or(0, |newline| newline + 1);
                let indented = line > 0 || self.line_starts;
                if indented && text[line..].chars().all(is_space) { &text[..line] } else { text }
            }
        };
        if !kept.is_empty() {
            self.push(Token::Text(kept.to_string()));
        }
        self.skip(len);
    }

    fn comment(&mut self) -> Result<()> {
        let Some(end) = self.rest.find("#}") else { return self.fail("missing end of comment tag") };
        let sign = self.rest[..end].chars().next_back();
        self.skip(end + 2);
        self.after_tag(sign, true);
        Ok(())
    }

    /// Applies whitespace control after a tag whose end has been read.
    fn after_tag(&mut self, sign: Option<char>, trims: bool) {
        let skipped = match sign {
            Some('-') => self.rest.len() - self.rest.trim_start_matches(is_space).len(),
            Some('+') => 0,
            _ => usize::from(trims && self.rest.starts_with('\n')),
        };
        self.line_starts = self.skip(skipped).ends_with('\n');
    }

    /// Reads the body of a raw block, whose opening tag has been read.
    fn raw(&mut self) -> Result<()> {
        let mut from = 0;
        while let Some(start) = self.rest[from..].find("{%").map(|at| at + from) {
            if let Some((len, sign)) = tag_named(&self.rest[start..], "endraw") {
                self.text_before(start, self.rest[start + 2..].chars().next(), Tag::Raw);
                self.skip(len);
                self.after_tag(sign, true);
                return Ok(());
            }
            from = start + 2;
        }
        self.fail("missing end of raw directive")
    }

    /// Reads a block or an expression to its end.
    fn code(&mut self, begin: Token) -> Result<()> {
        let (ends, end) = match begin {
            Token::VariableBegin => (["}}", "-}}", "}}"], Token::VariableEnd),
            _ => (["%}", "-%}", "+%}"], Token::BlockEnd),
        };
        self.push(begin);
        let mut open: Vec<&'static str> = Vec::new();
        loop {
            let space = self.rest.len() - self.rest.trim_start_matches(is_space).len();
            self.skip(space);
            if self.rest.is_empty() {
                return Ok(());
            }
            let found = ends.iter().find(|end| self.rest.starts_with(**end));
            if let Some(found) = found.filter(|_| open.is_empty()) {
                let trims = end == Token::BlockEnd;
                self.push(end);
                self.skip(found.len());
                self.after_tag(found.chars().next().filter(|c| "+-".contains(*c)), trims);
                return Ok(());
            }
            self.code_token(&mut open)?;
        }
    }

    fn code_token(&mut self, open: &mut Vec<&'static str>) -> Result<()> {
        let rest = self.rest;
        let first = rest.chars().next().unwrap_or('\0');
        if first.is_ascii_digit() {
            return self.number();
        }
        if first == '_' || first.is_alphabetic() {
            let len = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
            self.push(Token::Name(rest[..len].to_string()));
            self.skip(len);
            return Ok(());
        }
        if first == '\'' || first == '"' {
            return self.string(first);
        }
        let Some(symbol) = SYMBOLS.into_iter().find(|symbol| rest.starts_with(symbol)) else {
            return self.fail(format_args!("unexpected character {first:?}"));
        };
        match symbol {
            "(" => open.push(")"),
            "[" => open.push("]"),
            "{" => open.push("}"),
            ")" | "]" | "}" => match open.pop() {
                Some(expected) if expected == symbol => {}
                Some(expected) => return self.fail(format_args!("unexpected '{symbol}', expected '{expected}'")),
                None => return self.fail(format_args!("unexpected '{symbol}'")),
            },
            _ => {}
        }
        self.push(Token::Symbol(symbol));
        self.skip(symbol.len());
        Ok(())
    }

    fn number(&mut self) -> Result<()> {
        let after_dot = matches!(self.tokens.last(), Some(Spanned { token: Token::Symbol("."), .. }));
        if let Some(len) = float_len(self.rest).filter(|_| !after_dot) {
            let digits = self.rest[..len].replace('_', "");
            self.push(Token::Float(digits.parse().unwrap_or(f64::INFINITY)));
            self.skip(len);
            return Ok(());
        }
        let (radix, prefix) = match self.rest.as_bytes().get(1).map(u8::to_ascii_lowercase) {
            Some(b'b') if self.rest.starts_with('0') => (2, 2),
            Some(b'o') if self.rest.starts_with('0') => (8, 2),
            Some(b'x') if self.rest.starts_with('0') => (16, 2),
            _ => (10, 0),
        };
        let mut len = prefix + digits_len(&self.rest[prefix..], radix, prefix > 0);
        let (radix, prefix) = if len == prefix { (10, 0) } else { (radix, prefix) };
        if prefix == 0 {
            // A decimal number begins with no zero, unless it is zero.
            let zeros = self.rest.starts_with('0');
            len = if zeros { digits_len(self.rest, 1, false) } else { digits_len(self.rest, 10, false) };
        }
        let digits = self.rest[prefix..len].replace('_', "");
        let Ok(number) = i128::from_str_radix(&digits, radix) else {
            return self.fail(format_args!("the integer {digits} is too large; at most 128 bits are supported"));
        };
        self.push(Token::Int(number));
        self.skip(len);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<()> {
        let mut escaped = false;
        let end = self.rest[1..].find(|c| {
            let ends = c == quote && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let Some(len) = end else { return self.fail(format_args!("unexpected character {quote:?}: the string does not end")) };
        let text = unescape(&self.rest[1..=len]).map_err(|e| e.at(self.line))?;
        self.push(Token::Str(text));
        self.skip(len + 2);
        Ok(())
    }
}

/// Returns the start, the kind and the length of the opening of the next tag.
fn next_tag(text: &str) -> Option<(usize, Tag, usize)> {
    let starts = text.match_indices('{');
    starts.map(|(start, _)| (start, &text[start..])).find_map(|(start, rest)| {
        let signed = 2 + usize::from(rest[1..].chars().nth(1).is_some_and(|sign| "+-".contains(sign)));
        match rest.as_bytes().get(1)? {
            b'{' => Some((start, Tag::Variable, signed)),
            b'#' => Some((start, Tag::Comment, signed)),
            b'%' => match tag_named(rest, "raw") {
                Some((len, sign)) => {
                    let space = rest[len..].len() - rest[len..].trim_start_matches(is_space).len();
                    Some((start, Tag::Raw, len + if sign == Some('-') { space } else { 0 }))
                }
                None => Some((start, Tag::Block, signed)),
            },
            _ => None,
        }
    })
}

/// If `text` begins with the tag `{% name %}`, returns its length and the sign before its end.
fn tag_named(text: &str, name: &str) -> Option<(usize, Option<char>)> {
    let inner = text.strip_prefix("{%")?;
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start_matches(is_space);
    let inner = inner.strip_prefix(name)?.trim_start_matches(is_space);
    let signs: &[char] = if name == "raw" { &['-'] } else { &['-', '+'] };
    let sign = inner.chars().next().filter(|c| signs.contains(c));
    let end = inner[sign.map_or(0, char::len_utf8)..].strip_prefix("%}")?;
    Some((text.len() - end.len(), sign))
}

/// Returns the length of the digits, which single underscores may separate. Radix 1 has only zeros.
fn digits_len(text: &str, radix: u32, underscore_first: bool) -> usize {
    let is_digit = |c: u8| if radix == 1 { c == b'0' } else { (c as char).is_digit(radix) };
    let bytes = text.as_bytes();
    let mut len = 0;
    loop {
        let underscore = usize::from((len > 0 || underscore_first) && bytes.get(len) == Some(&b'_'));
        match bytes.get(len + underscore) {
            Some(&c) if is_digit(c) => len += underscore + 1,
            _ => return len,
        }
    }
}

/// Returns the length of a float at the start of `text`: with a fraction, an exponent, or both.
fn float_len(text: &str) -> Option<usize> {
    let whole = digits_len(text, 10, false);
    let fraction = match text[whole..].strip_prefix('.') {
        Some(rest) => match digits_len(rest, 10, false) {
            0 => 0,
            digits => 1 + digits,
        },
        None => 0,
    };
    let mut len = whole + fraction;
    if let Some(rest) = text[len..].strip_prefix(['e', 'E']) {
        let sign = usize::from(rest.starts_with(['+', '-']));
        let digits = digits_len(&rest[sign..], 10, false);
        len += if digits > 0 { 1 + sign + digits } else { 0 };
    }
    (len > whole).then_some(len)
}

/// Decodes Python's escapes. An unknown escape is not changed.
fn unescape(text: &str) -> Result<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let Some(c) = rest.chars().next() else { break };
        let simple = "\n\\'\"abfnrtv".find(c).map(|i| ["", "\\", "'", "\"", "\x07", "\x08", "\x0c", "\n", "\r", "\t", "\x0b"][i]);
        if let Some(simple) = simple {
            out.push_str(simple);
            rest = &rest[1..];
            continue;
        }
        let (radix, skip, len) = match c {
            'x' => (16, 1, 2),
            'u' => (16, 1, 4),
            'U' => (16, 1, 8),
            '0'..='7' => (8, 0, rest.chars().take(3).take_while(|c| c.is_digit(8)).count()),
            'N' => return Err(Failure::new("the escape \\N in a string is not supported; write \\u or \\U")),
            _ => {
                out.push('\\');
                continue;
            }
        };
        let digits = rest.get(skip..skip + len).filter(|digits| digits.chars().all(|c| c.is_digit(radix)));
        let code = digits.and_then(|digits| u32::from_str_radix(digits, radix).ok());
        let Some(decoded) = code.and_then(char::from_u32) else {
            return Err(Failure::new(format_args!("the escape \\{c} in a string is truncated or not a Unicode character")));
        };
        out.push(decoded);
        rest = &rest[skip + len..];
    }
    out.push_str(rest);
    Ok(out)
}
