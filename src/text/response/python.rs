//! Lists of calls in the syntax of Python, whose arguments are converted to JSON.

use super::json::escape_into;
use super::{DeltaKind, Deltas, ResponseParser, State, is_name};

/// Maximum depth of a value.
const MAX_DEPTH: usize = 128;
/// Maximum length in bytes of a number or word.
const MAX_WORD: usize = 128;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Part {
    #[default]
    List,
    Name,
    /// A keyword, or the end of the call.
    Keyword,
    Value,
    Word,
    /// A string with this quote.
    Text(char),
    AfterValue,
    /// A colon of a dictionary.
    Colon,
    /// A comma or the end of the list.
    AfterCall,
}

/// The calls of one list.
#[derive(Debug, Default)]
pub struct Python {
    part: Part,
    word: String,
    name: String,
    /// The open brackets of the value.
    open: Vec<char>,
    /// A comma precedes the next item.
    comma: bool,
    /// The next string is a key of a dictionary.
    key: bool,
    begun: bool,
    /// An escape of a string that is not complete.
    escape: String,
}

struct Malformed;

impl Python {
    /// Advances inside of a value and appends its JSON to `json`.
    fn value(&mut self, c: char, json: &mut String) -> Result<(), Malformed> {
        match self.part {
            Part::Text(quote) => {
                if self.escape.is_empty() && c == quote {
                    json.push('"');
                    self.part = if std::mem::take(&mut self.key) { Part::Colon } else { Part::AfterValue };
                } else {
                    self.text(c, json);
                }
                Ok(())
            }
            Part::Word if c.is_ascii_alphanumeric() || "_.+-".contains(c) => {
                self.word.push(c);
                if self.word.len() > MAX_WORD { Err(Malformed) } else { Ok(()) }
            }
            Part::Word => {
                json.push_str(&literal(&std::mem::take(&mut self.word))?);
                self.part = Part::AfterValue;
                self.value(c, json)
            }
            _ if c.is_whitespace() => Ok(()),
            Part::Value => self.begin(c, json),
            Part::Colon if c == ':' => {
                json.push_str(": ");
                self.part = Part::Value;
                Ok(())
            }
            Part::AfterValue => self.after(c, json),
            _ => Err(Malformed),
        }
    }

    fn begin(&mut self, c: char, json: &mut String) -> Result<(), Malformed> {
        if Some(&c)
            == self.open.last().map(|open| match open {
                '{' => &'}',
                '[' => &']',
                _ => &')',
            })
        {
            return self.close(json);
        }
        if std::mem::take(&mut self.comma) {
            json.push_str(", ");
        }
        let key = self.key;
        match c {
            '\'' | '"' => {
                json.push('"');
                self.part = Part::Text(c);
            }
            _ if key => return Err(Malformed),
            '{' | '[' | '(' if self.open.len() < MAX_DEPTH => {
                json.push(if c == '{' { '{' } else { '[' });
                self.open.push(c);
                self.key = c == '{';
            }
            c if c.is_ascii_alphanumeric() || "+-.".contains(c) => {
                self.word.push(c);
                self.part = Part::Word;
            }
            _ => return Err(Malformed),
        }
        Ok(())
    }

    fn close(&mut self, json: &mut String) -> Result<(), Malformed> {
        let open = self.open.pop().ok_or(Malformed)?;
        json.push(if open == '{' { '}' } else { ']' });
        (self.comma, self.key, self.part) = (false, false, Part::AfterValue);
        Ok(())
    }

    fn after(&mut self, c: char, json: &mut String) -> Result<(), Malformed> {
        match (c, self.open.last()) {
            (',', Some(open)) => {
                (self.comma, self.key, self.part) = (true, *open == '{', Part::Value);
                Ok(())
            }
            ('}', Some('{')) | (']', Some('[')) | (')', Some('(')) => self.close(json),
            _ => Err(Malformed),
        }
    }

    fn text(&mut self, c: char, json: &mut String) {
        if self.escape.is_empty() && c != '\\' {
            return escape_into(json, c);
        }
        self.escape.push(c);
        let digits = match self.escape.chars().nth(1) {
            None => return,
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(_) => 0,
        };
        if self.escape.chars().count() < digits + 2 {
            return;
        }
        let escape = std::mem::take(&mut self.escape);
        let plain = match c {
            _ if digits > 0 => u32::from_str_radix(escape.get(2..).unwrap_or_default(), 16).ok().and_then(char::from_u32),
            'n' => Some('\n'),
            't' => Some('\t'),
            'r' => Some('\r'),
            'b' => Some('\u{8}'),
            'f' => Some('\u{c}'),
            '0' => Some('\0'),
            '\\' | '\'' | '"' => Some(c),
            _ => None,
        };
        match plain {
            Some(c) => escape_into(json, c),
            None => escape.chars().for_each(|c| escape_into(json, c)),
        }
    }
}

/// Returns a word of Python as JSON.
fn literal(word: &str) -> Result<String, Malformed> {
    let text = match word {
        "True" | "true" => return Ok("true".into()),
        "False" | "false" => return Ok("false".into()),
        "None" | "null" => return Ok("null".into()),
        _ => word.trim_start_matches('+').replace('_', ""),
    };
    if serde_json::from_str::<serde_json::Number>(&text).is_ok() {
        return Ok(text);
    }
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && text.contains(['.', 'e', 'E']));
    number.map(|number| format!("{number:?}")).ok_or(Malformed)
}

impl ResponseParser {
    pub(super) fn step_python(&mut self, mut python: Python, c: char, out: &mut Deltas) {
        let mut json = String::new();
        if !python.begun {
            self.raw.push(c);
        }
        let stepped = match python.part {
            Part::List | Part::Name | Part::Keyword | Part::AfterCall => self.outside(&mut python, c, &mut json, out),
            Part::AfterValue if python.open.is_empty() && c == ',' => {
                python.part = Part::Keyword;
                Ok(())
            }
            Part::AfterValue if python.open.is_empty() && c == ')' => {
                self.end_python(&mut python, &mut json, out);
                Ok(())
            }
            Part::Word if python.open.is_empty() && (c == ',' || c == ')') => match literal(&std::mem::take(&mut python.word)) {
                Ok(text) => {
                    self.argue(&text, out);
                    python.part = Part::AfterValue;
                    return self.step_python(python, c, out);
                }
                Err(error) => Err(error),
            },
            _ => python.value(c, &mut json),
        };
        if python.begun {
            self.argue(&json, out);
        }
        match stepped {
            Ok(()) if python.part == Part::AfterCall && c == ']' => {
                self.state = State::Text;
                self.fresh = true;
                self.trim = !self.has_content;
                self.activate();
            }
            Ok(()) => self.state = State::Python(python),
            Err(Malformed) if python.begun => {
                self.argue(&std::mem::take(&mut python.word), out);
                self.state = State::Rest;
                self.step(c, out);
            }
            Err(Malformed) => {
                if !self.raw.is_empty() {
                    self.raw.pop();
                }
                self.fall_back(out);
                self.step(c, out);
            }
        }
    }

    /// Outside of the values: names, keywords and the list itself.
    fn outside(&mut self, python: &mut Python, c: char, json: &mut String, out: &mut Deltas) -> Result<(), Malformed> {
        match (python.part, c) {
            (_, c) if c.is_whitespace() => {}
            (Part::List, '[') => python.part = Part::Name,
            (Part::Name, '(') if is_name(&python.word) => {
                python.name = std::mem::take(&mut python.word);
                python.part = Part::Keyword;
            }
            (Part::Keyword, ')') if python.word.is_empty() => {
                if !python.begun {
                    self.begin_python(python, out);
                    self.argue("{}", out);
                    out.push(DeltaKind::ToolCallEnd, self.calls - 1, "");
                    (python.begun, python.comma, python.part) = (false, false, Part::AfterCall);
                    return Ok(());
                }
                self.end_python(python, json, out);
            }
            (Part::Keyword, '=') if is_name(&python.word) => {
                let first = !python.begun;
                if first {
                    self.begin_python(python, out);
                }
                json.push_str(if first { "{\"" } else { ", \"" });
                json.push_str(&std::mem::take(&mut python.word));
                json.push_str("\": ");
                python.part = Part::Value;
            }
            (Part::Name | Part::Keyword, c) if (c.is_alphanumeric() || c == '_' || c == '.') && python.word.len() < MAX_WORD => {
                python.word.push(c);
            }
            (Part::AfterCall, ',') => python.part = Part::Name,
            (Part::AfterCall, ']') => {}
            _ => return Err(Malformed),
        }
        Ok(())
    }

    fn begin_python(&mut self, python: &mut Python, out: &mut Deltas) {
        python.begun = true;
        let name = std::mem::take(&mut python.name);
        self.begin_call(&name, None, out);
    }

    fn end_python(&mut self, python: &mut Python, json: &mut String, out: &mut Deltas) {
        json.push('}');
        self.argue(json, out);
        json.clear();
        out.push(DeltaKind::ToolCallEnd, self.calls - 1, "");
        (python.begun, python.comma, python.part) = (false, false, Part::AfterCall);
        self.raw.clear();
    }

    pub(super) fn finish_python(&mut self, python: Python, out: &mut Deltas) {
        if python.begun {
            return self.argue(&python.word, out);
        }
        self.fall_back(out);
    }
}
