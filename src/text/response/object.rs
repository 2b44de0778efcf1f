//! Calls that are JSON objects with the name and the arguments.

use super::json::{Recognizer, Unescape, escape_into};
use super::{Deltas, ResponseParser, State};

/// Maximum length in bytes of a key that is looked at.
const MAX_KEY: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Other,
    Name,
    /// The arguments. True: as a string that contains their JSON.
    Arguments(bool),
}

/// The object of one call.
#[derive(Debug)]
pub struct Object {
    json: Recognizer,
    /// Depth of the object with the name: 2 inside of "function".
    level: usize,
    key: String,
    slot: Slot,
    /// A value of `slot` has begun.
    inside: bool,
    name: Option<String>,
    value: String,
    unescape: Unescape,
    arguments: Option<String>,
    begun: bool,
}

impl Object {
    fn new() -> Self {
        Object {
            json: Recognizer::new(),
            level: 1,
            key: String::new(),
            slot: Slot::Other,
            inside: false,
            name: None,
            value: String::new(),
            unescape: Unescape::default(),
            arguments: None,
            begun: false,
        }
    }

    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Advances by `c`. Returns false if it is malformed.
    fn advance(&mut self, c: char) -> bool {
        let (depth, in_key, in_string, expects_value) =
            (self.json.depth(), self.json.is_in_key(), self.json.is_in_string(), self.json.expects_value());
        if self.json.step(c).is_err() {
            return false;
        }
        if !self.inside {
            if depth == self.level && in_key && self.json.is_in_key() && self.key.len() < MAX_KEY {
                self.key.push(c);
            } else if depth == self.level && !in_key && self.json.is_in_key() {
                self.key.clear();
            } else if depth == self.level && expects_value && !c.is_whitespace() {
                self.begin_value(c);
            } else if depth == self.level && self.level == 2 && self.json.depth() == 1 {
                self.level = 1;
            }
            return true;
        }
        let ended = self.json.is_between() && self.json.depth() <= self.level;
        let scalar_ended = ended && !in_string && depth == self.level;
        if !scalar_ended {
            self.add(c, in_string && !(ended && depth == self.level));
        }
        if ended || self.json.depth() < self.level {
            self.end_value();
        }
        true
    }

    fn begin_value(&mut self, c: char) {
        self.slot = match (&self.key[..], c) {
            ("function", '{') if self.level == 1 => {
                self.level = 2;
                return;
            }
            ("name" | "tool_name" | "function", '"') => Slot::Name,
            ("arguments" | "parameters", _) if self.arguments.is_none() => Slot::Arguments(c == '"'),
            _ => Slot::Other,
        };
        self.inside = self.json.depth() > self.level || !self.json.is_between();
        if matches!(self.slot, Slot::Arguments(_)) {
            self.arguments = Some(String::new());
        }
        if self.slot == Slot::Arguments(false) {
            self.add(c, false);
        }
    }

    /// Adds a character of the value. A string's last quote is not `within` it.
    fn add(&mut self, c: char, within: bool) {
        match (self.slot, &mut self.arguments) {
            (Slot::Name, _) if within => self.unescape.push(c, &mut self.value),
            (Slot::Arguments(true), Some(arguments)) if within => self.unescape.push(c, arguments),
            (Slot::Arguments(false), Some(arguments)) if within && c < ' ' => escape_into(arguments, c),
            (Slot::Arguments(false), Some(arguments)) => arguments.push(c),
            _ => {}
        }
    }

    fn end_value(&mut self) {
        match (self.slot, &mut self.arguments) {
            (Slot::Name, _) => {
                self.unescape.flush(&mut self.value);
                self.name = Some(std::mem::take(&mut self.value));
            }
            (Slot::Arguments(true), Some(arguments)) => self.unescape.flush(arguments),
            _ => {}
        }
        self.inside = false;
        self.slot = Slot::Other;
        if self.json.depth() < self.level {
            self.level = 1;
        }
    }
}

impl ResponseParser {
    /// Before a list or an object.
    pub(super) fn step_open(&mut self, listed: bool, c: char, out: &mut Deltas) {
        match c {
            '{' => self.step_object(Object::new(), c, out),
            c if c.is_whitespace() || (c == '[' && !listed) => {
                self.raw.push(c);
                self.state = State::Open(listed || c == '[');
            }
            _ => {
                self.fall_back(out);
                self.step(c, out);
            }
        }
    }

    /// The call that is held back has no marker, and can be an answer that is JSON.
    fn is_bare(&self) -> bool {
        self.format.bare && !self.format.begin.iter().any(|marker| self.raw.trim_start().starts_with(marker))
    }

    pub(super) fn step_object(&mut self, mut object: Object, c: char, out: &mut Deltas) {
        let bad = !object.advance(c);
        if bad && !object.begun {
            self.fall_back(out);
            return self.step(c, out);
        }
        if bad {
            self.state = State::Rest;
            return self.step(c, out);
        }
        if !object.begun {
            self.raw.push(c);
        }
        let done = object.json.is_done();
        if !object.begun && object.name.as_deref().is_some_and(super::is_name) && (object.arguments.is_some() || (done && !self.is_bare()))
        {
            object.begun = true;
            let name = object.name.take().unwrap_or_default();
            self.begin_call(&name, None, out);
            if object.arguments.is_none() {
                self.argue("{}", out);
            }
        }
        if object.begun
            && let Some(arguments) = &mut object.arguments
        {
            self.argue(arguments, out);
            arguments.clear();
        }
        match (done, object.begun) {
            (true, true) => self.end_call(out),
            (true, false) => self.fall_back(out),
            (false, _) => self.state = State::Object(object),
        }
    }
}
