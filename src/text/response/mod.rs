//! Parses the text of a response into reasoning, content and tool calls, while it is generated.
//!
//! The parser is a state machine over characters. The deltas of a text, concatenated, are therefore
//! the same however the text is split. It never fails: text that is no complete beginning of a call
//! is content. Once a call has begun (its name and the beginning of its arguments are known), its
//! deltas are final, and malformed text up to the end of the call belongs to its arguments.
//!
//! The work per character is bounded, and so is the text that is held back (`MAX_HELD`).

mod calls;
mod deltas;
mod formats;
mod harmony;
mod json;
mod markers;
mod object;
mod python;
mod settings;
mod tagged;
#[cfg(test)]
mod tests;

pub use deltas::{Delta, DeltaKind, Deltas};
pub use formats::{FORMATS, Format};
pub use settings::Settings;

use formats::Body;
use markers::{Found, Held};

/// Maximum size in bytes of text that is held back until its meaning is known. Longer text becomes
/// content, or a part of a string.
pub const MAX_HELD: usize = 64 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Open,
    Close,
    Section,
    Begin,
    End,
    Drop,
}

/// What the next character belongs to.
#[derive(Debug)]
enum State {
    Text,
    /// After the marker of a JSON call: a list or an object follows. True: the list has begun.
    Open(bool),
    Object(object::Object),
    Header(calls::Header),
    Arguments(calls::Arguments),
    /// Malformed arguments, up to the end of the call.
    Rest,
    Tagged(tagged::Tagged),
    Python(python::Python),
    Harmony(harmony::Harmony),
}

/// The parser of one response.
#[derive(Debug)]
pub struct ResponseParser {
    format: &'static Format,
    settings: Settings,
    state: State,
    reasoning: bool,
    /// Markers of the present state of the text.
    active: Vec<(&'static str, Mark)>,
    held: Held,
    /// White space that is dropped if a call or the end of the reasoning follows.
    spaces: String,
    /// Text of a call that has not begun for certain.
    raw: String,
    /// Number of calls that have begun.
    calls: u32,
    /// A call has begun and its end marker can follow.
    section: Section,
    /// Only white space and separators have come since the beginning, the reasoning or a call.
    fresh: bool,
    /// White space at the beginning of the text is dropped.
    trim: bool,
    has_content: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Section {
    None,
    Open,
    /// An end marker has come, and others can follow.
    Ended,
}

impl ResponseParser {
    /// Creates the parser of a response in `format`.
    pub fn new(format: &'static Format, settings: Settings) -> Self {
        let reasoning = format.think.is_some_and(|think| think.always_open || settings.in_reasoning);
        let state = match format.body {
            Body::Harmony => State::Harmony(harmony::Harmony::default()),
            _ => State::Text,
        };
        let mut parser = ResponseParser {
            format,
            settings,
            state,
            reasoning,
            active: Vec::new(),
            held: Held::default(),
            spaces: String::new(),
            raw: String::new(),
            calls: 0,
            section: Section::None,
            fresh: true,
            trim: reasoning,
            has_content: false,
        };
        parser.activate();
        parser
    }

    /// Parses the next piece of text and appends its deltas to `out`.
    pub fn feed(&mut self, text: &str, out: &mut Deltas) {
        for c in text.chars() {
            self.step(c, out);
        }
    }

    /// Ends the response: text that is held back gets its meaning.
    pub fn finish(&mut self, out: &mut Deltas) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => {}
            State::Tagged(tagged) => self.finish_tagged(tagged, out),
            State::Python(python) => self.finish_python(python, out),
            State::Harmony(harmony) => self.finish_harmony(harmony, out),
            State::Object(object) if object.has_begun() => {}
            State::Arguments(_) | State::Rest => self.finish_rest(out),
            State::Open(_) | State::Object(_) | State::Header(_) => self.fall_back(out),
        }
        let mut plain = String::new();
        self.held.flush(&mut plain);
        self.state = State::Text;
        self.text(&plain, out);
        if self.trim || (self.fresh && self.calls > 0) {
            self.spaces.clear();
        }
        self.flush_spaces(out);
    }

    /// Returns the number of calls that have begun.
    pub fn calls(&self) -> u32 {
        self.calls
    }

    fn step(&mut self, c: char, out: &mut Deltas) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.step_text(c, out),
            State::Open(listed) => self.step_open(listed, c, out),
            State::Object(object) => self.step_object(object, c, out),
            State::Header(header) => self.step_header(header, c, out),
            State::Arguments(arguments) => self.step_arguments(arguments, c, out),
            State::Rest => self.step_rest(c, out),
            State::Tagged(tagged) => self.step_tagged(tagged, c, out),
            State::Python(python) => self.step_python(python, c, out),
            State::Harmony(harmony) => self.step_harmony(harmony, c, out),
        }
        if self.raw.len() > MAX_HELD {
            self.fall_back(out);
        }
    }

    /// Collects the markers of the present state.
    fn activate(&mut self) {
        self.active.clear();
        let format = self.format;
        let mut add = |markers: &[&'static str], mark| self.active.extend(markers.iter().map(|marker| (*marker, mark)));
        if let Some(think) = format.think {
            if self.reasoning {
                add(think.close, Mark::Close);
            }
            if self.fresh {
                add(think.open, Mark::Open);
            }
        }
        add(format.section, Mark::Section);
        add(format.begin, Mark::Begin);
        add(format.drop, Mark::Drop);
        if self.section != Section::None {
            add(format.end, Mark::End);
        }
    }

    fn step_text(&mut self, c: char, out: &mut Deltas) {
        if self.held.is_empty() && self.begins_bare(c) {
            self.raw.push_str(&self.spaces);
            self.spaces.clear();
            self.begin_body();
            return self.step(c, out);
        }
        if self.held.is_empty() && !self.active.iter().any(|(marker, _)| marker.starts_with(c)) {
            return self.text(c.encode_utf8(&mut [0; 4]), out);
        }
        let mut plain = String::new();
        let found = self.held.push(c, self.active.iter().map(|(marker, _)| *marker), &mut plain);
        self.text(&plain, out);
        if let Found::Marker(i) = found {
            let (marker, mark) = self.active[i];
            self.apply(marker, mark);
        }
    }

    /// `c` begins a call that has no marker.
    fn begins_bare(&self, c: char) -> bool {
        let first = match &self.format.body {
            Body::Json => c == '{' || c == '[',
            Body::Named(named) => named.brace && c == '{',
            Body::Python => c == '[',
            _ => return false,
        };
        let again = self.section != Section::None && c == '{';
        first && !self.reasoning && self.fresh && (self.format.bare || again)
    }

    fn apply(&mut self, marker: &'static str, mark: Mark) {
        match mark {
            Mark::Open | Mark::Close => {
                self.spaces.clear();
                self.reasoning = mark == Mark::Open;
                self.trim = true;
                self.fresh = true;
            }
            Mark::Section => self.section = Section::Open,
            Mark::End => self.section = Section::Ended,
            Mark::Drop => {}
            Mark::Begin => {
                self.raw.push_str(&self.spaces);
                self.spaces.clear();
                self.raw.push_str(marker);
                self.begin_body();
                if matches!(self.format.body, Body::Tagged(_)) {
                    self.after_tag(marker);
                }
            }
        }
        self.activate();
    }

    fn begin_body(&mut self) {
        self.state = match &self.format.body {
            Body::None | Body::Harmony => State::Text,
            Body::Json => State::Open(false),
            Body::Python => State::Python(python::Python::default()),
            Body::Tagged(_) => State::Tagged(tagged::Tagged::default()),
            Body::Named(_) => State::Header(calls::Header::default()),
        };
    }

    /// Adds text without markers. White space is held back until other text follows.
    fn text(&mut self, plain: &str, out: &mut Deltas) {
        for c in plain.chars() {
            if c.is_whitespace() {
                self.spaces.push(c);
                if self.spaces.len() > MAX_HELD {
                    self.flush_spaces(out);
                }
                continue;
            }
            if self.fresh && self.section != Section::None && matches!(c, ',' | ';' | ']') {
                self.spaces.clear(); // between the calls of a list
                continue;
            }
            if self.trim {
                self.spaces.clear();
            }
            self.flush_spaces(out);
            out.push_char(self.kind(), 0, c);
            self.trim = false;
            self.has_content |= !self.reasoning;
            if self.fresh || self.section == Section::Ended {
                self.fresh = false;
                if self.section == Section::Ended {
                    self.section = Section::None;
                }
                self.activate();
            }
        }
    }

    fn flush_spaces(&mut self, out: &mut Deltas) {
        out.push(self.kind(), 0, &self.spaces);
        self.spaces.clear();
    }

    fn kind(&self) -> DeltaKind {
        if self.reasoning { DeltaKind::Reasoning } else { DeltaKind::Content }
    }

    /// What looked like a call is none: its text is content, or reasoning inside of the reasoning.
    fn fall_back(&mut self, out: &mut Deltas) {
        self.state = State::Text;
        let raw = std::mem::take(&mut self.raw);
        self.text(&raw, out);
        self.fresh = false;
        self.activate();
    }

    /// Begins the next call. Its text is no longer held back.
    fn begin_call(&mut self, name: &str, id: Option<&str>, out: &mut Deltas) {
        let prefix = if self.settings.id_prefix.is_empty() { "call_" } else { &self.settings.id_prefix };
        let own = format!("{prefix}{}", self.calls);
        out.begin_call(self.calls, name, id.unwrap_or(&own));
        self.calls += 1;
        self.raw.clear();
        self.reasoning = false;
        self.section = Section::Open;
    }

    /// Appends to the arguments of the present call.
    fn argue(&self, text: &str, out: &mut Deltas) {
        out.push(DeltaKind::Arguments, self.calls - 1, text);
    }

    fn end_call(&mut self, out: &mut Deltas) {
        out.push(DeltaKind::ToolCallEnd, self.calls - 1, "");
        self.state = State::Text;
        self.fresh = true;
        self.trim = !self.has_content;
        self.activate();
    }
}

/// A name that a function can have.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= 256 && name.chars().all(|c| c.is_alphanumeric() || "_-.:/".contains(c))
}
