//! Calls that are a name, a marker and a JSON object, and the rest of malformed arguments.

use super::formats::{Body, Named};
use super::json::{Recognizer, escape_into};
use super::markers::{Found, Held};
use super::{Deltas, ResponseParser, State, is_name};

/// Maximum length in bytes of the text before the arguments.
const MAX_HEADER: usize = 512;

/// The text before the arguments of a call.
#[derive(Debug, Default)]
pub struct Header {
    held: Held,
    name: String,
    id: Option<String>,
    /// The marker between name and arguments has come.
    ended: bool,
}

/// The arguments of a call, a JSON object.
#[derive(Debug)]
pub struct Arguments {
    json: Recognizer,
}

impl ResponseParser {
    fn named(&self) -> Option<&'static Named> {
        match &self.format.body {
            Body::Named(named) => Some(named),
            _ => None,
        }
    }

    pub(super) fn step_header(&mut self, mut header: Header, c: char, out: &mut Deltas) {
        let Some(named) = self.named() else { return };
        let blank = header.name.trim().is_empty() && header.held.is_empty();
        if named.brace && blank && header.id.is_none() && !header.ended && (c == '{' || (c == '[' && !self.raw.ends_with('['))) {
            self.state = State::Open(false);
            return self.step(c, out);
        }
        if c == '{' && (header.ended || named.brace) {
            return self.end_header(header, c, out);
        }
        let mut plain = String::new();
        let markers = named.arguments.iter().chain(named.id).copied();
        let found = header.held.push(c, markers, &mut plain);
        header.id.as_mut().unwrap_or(&mut header.name).push_str(&plain);
        self.raw.push(c);
        match found {
            Found::Marker(i) if i < named.arguments.len() => header.ended = true,
            Found::Marker(_) => header.id = Some(String::new()),
            Found::Text => {}
        }
        let len = header.name.len() + header.id.as_ref().map_or(0, String::len);
        self.state = State::Header(header);
        if len > MAX_HEADER {
            self.fall_back(out);
        }
    }

    /// The arguments begin with `c`. In the format of DeepSeek V3 the name stands between the
    /// marker and the fence before the arguments, and a type before the marker.
    fn end_header(&mut self, header: Header, c: char, out: &mut Deltas) {
        let text = header.name.trim();
        let text = text.strip_suffix("```json").unwrap_or(text).trim_end();
        let mut name = text.strip_prefix("function").filter(|_| header.name.contains("```")).unwrap_or(text);
        let mut id = header.id.as_deref().map(str::trim).filter(|id| !id.is_empty());
        if self.named().is_some_and(|named| named.name_in_id) && text.contains(':') {
            id = Some(text);
            name = text.split(':').next().unwrap_or(text);
            name = name.strip_prefix("functions.").unwrap_or(name);
        }
        if !is_name(name) {
            self.fall_back(out);
            return self.step(c, out);
        }
        self.begin_call(name, id, out);
        self.step_arguments(Arguments { json: Recognizer::new() }, c, out);
    }

    pub(super) fn step_arguments(&mut self, mut arguments: Arguments, c: char, out: &mut Deltas) {
        let in_string = arguments.json.is_in_string();
        if arguments.json.step(c).is_err() {
            self.state = State::Rest;
            return self.step(c, out);
        }
        let mut text = String::new();
        if in_string && c < ' ' {
            escape_into(&mut text, c)
        } else {
            text.push(c)
        }
        self.argue(&text, out);
        if arguments.json.is_done() {
            return self.end_call(out);
        }
        self.state = State::Arguments(arguments);
    }

    /// After a defect: everything up to a marker belongs to the arguments.
    pub(super) fn step_rest(&mut self, c: char, out: &mut Deltas) {
        let mut plain = String::new();
        let markers = self.format.end.iter().chain(self.format.begin).copied();
        let found = self.held.push(c, markers, &mut plain);
        self.argue(&plain, out);
        self.state = State::Rest;
        if let Found::Marker(i) = found {
            self.end_call(out);
            match i.checked_sub(self.format.end.len()) {
                None => self.apply(self.format.end[i], super::Mark::End),
                Some(i) => self.apply(self.format.begin[i], super::Mark::Begin),
            }
        }
    }

    pub(super) fn finish_rest(&mut self, out: &mut Deltas) {
        let mut plain = String::new();
        self.held.flush(&mut plain);
        self.argue(&plain, out);
    }
}
