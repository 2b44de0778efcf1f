//! Calls with the name and each parameter between tags.

use super::formats::{Body, Tags};
use super::json::escape_into;
use super::markers::{Found, Held};
use super::{Deltas, MAX_HELD, ResponseParser, State, is_name};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Part {
    #[default]
    BeforeName,
    Name,
    BetweenParameters,
    Key,
    BeforeValue,
    /// A value that is no string: its text is collected and converted.
    Typed,
    /// A string, whose text is passed on. True: nothing of it has come.
    Text(bool),
}

/// One call.
#[derive(Debug, Default)]
pub struct Tagged {
    part: Part,
    held: Held,
    name: String,
    text: String,
    parameters: usize,
    /// A newline that belongs to the format if the value ends after it.
    newline: bool,
}

impl ResponseParser {
    fn tags(&self) -> Option<&'static Tags> {
        match &self.format.body {
            Body::Tagged(tags) => Some(tags),
            _ => None,
        }
    }

    /// A call began with `marker`, which can be its opening tag.
    pub(super) fn after_tag(&mut self, marker: &str) {
        if let (Some(tags), State::Tagged(tagged)) = (self.tags(), &mut self.state)
            && (tags.name_open.is_empty() || tags.name_open == marker)
        {
            tagged.part = Part::Name;
        }
    }

    pub(super) fn step_tagged(&mut self, mut tagged: Tagged, c: char, out: &mut Deltas) {
        let Some(tags) = self.tags() else { return };
        if matches!(tagged.part, Part::BeforeName | Part::Name) {
            return self.step_name(tags, tagged, c, out);
        }
        let key_ends = [tags.key_close];
        let openers = [tags.key_open, tags.end];
        let value_ends = [tags.value_close, tags.key_open, tags.end];
        let before_value = [tags.value_open, tags.end];
        let markers: &[&str] = match tagged.part {
            Part::Key => &key_ends,
            Part::BeforeValue => &before_value,
            Part::Typed | Part::Text(_) => &value_ends,
            _ => &openers,
        };
        let mut plain = String::new();
        let found = tagged.held.push(c, markers.iter().copied(), &mut plain);
        match tagged.part {
            Part::Key | Part::Typed => tagged.text.push_str(&plain),
            Part::Text(_) => self.pass_on(tags, &mut tagged, &plain, out),
            _ => {} // between the tags
        }
        if tagged.text.len() > MAX_HELD {
            self.give_up_type(tags, &mut tagged, out);
        }
        let Found::Marker(i) = found else {
            self.state = State::Tagged(tagged);
            return;
        };
        self.after_marker(tags, tagged, markers[i], out);
    }

    fn after_marker(&mut self, tags: &'static Tags, mut tagged: Tagged, marker: &str, out: &mut Deltas) {
        match tagged.part {
            Part::Key => self.begin_value(tags, &mut tagged, out),
            Part::BeforeValue if marker == tags.value_open => self.open_value(&mut tagged, out),
            Part::Typed | Part::Text(_) => self.close_value(tags, &mut tagged, out),
            _ => {}
        }
        if marker == tags.key_open {
            tagged.part = Part::Key;
        } else if marker == tags.end {
            let text = if tagged.parameters == 0 { "{}" } else { "}" };
            self.argue(text, out);
            self.end_call(out);
            if self.format.end.contains(&marker) {
                self.section = super::Section::Ended;
            }
            return;
        }
        self.state = State::Tagged(tagged);
    }

    fn step_name(&mut self, tags: &'static Tags, mut tagged: Tagged, c: char, out: &mut Deltas) {
        let mut plain = String::new();
        let opening = tagged.part == Part::BeforeName;
        let open = [tags.name_open];
        let markers: &[&str] = if opening { &open } else { tags.name_close };
        // A newline before the name is no end of it.
        let skip = tagged.held.is_empty() && tagged.name.is_empty() && c.is_whitespace();
        let found = if skip { Found::Text } else { tagged.held.push(c, markers.iter().copied(), &mut plain) };
        tagged.name.push_str(&plain);
        let bad = if opening { !tagged.name.is_empty() } else { tagged.name.len() > 256 || tagged.name.contains(['{', '"', '<']) };
        let Found::Marker(i) = found else {
            if bad {
                self.fall_back(out);
                return self.step(c, out);
            }
            self.raw.push(c);
            self.state = State::Tagged(tagged);
            return;
        };
        if opening {
            self.raw.push(c);
            tagged.part = Part::Name;
            self.state = State::Tagged(tagged);
            return;
        }
        tagged.name.truncate(tagged.name.trim_end().len());
        if !is_name(&tagged.name) {
            self.raw.push(c);
            return self.fall_back(out);
        }
        self.begin_call(&tagged.name, None, out);
        tagged.part = Part::BetweenParameters;
        self.after_marker(tags, tagged, markers[i], out);
    }

    /// The key is complete.
    fn begin_value(&mut self, tags: &Tags, tagged: &mut Tagged, out: &mut Deltas) {
        let mut text = String::from(if tagged.parameters == 0 { "{\"" } else { ", \"" });
        let key = std::mem::take(&mut tagged.text);
        key.trim().chars().for_each(|c| escape_into(&mut text, c));
        text.push_str("\": ");
        self.argue(&text, out);
        tagged.parameters += 1;
        let typed = self.settings.typed.get(&tagged.name).is_some_and(|keys| keys.iter().any(|typed| typed == key.trim()));
        tagged.newline = typed; // until the value opens
        tagged.part = Part::BeforeValue;
        if tags.value_open.is_empty() {
            self.open_value(tagged, out);
        }
    }

    fn open_value(&mut self, tagged: &mut Tagged, out: &mut Deltas) {
        let typed = std::mem::take(&mut tagged.newline);
        tagged.part = if typed { Part::Typed } else { Part::Text(true) };
        if !typed {
            self.argue("\"", out);
        }
    }

    /// Passes a part of a string on. One newline at each end can belong to the format.
    fn pass_on(&mut self, tags: &Tags, tagged: &mut Tagged, plain: &str, out: &mut Deltas) {
        let mut text = String::new();
        for c in plain.chars() {
            let first = std::mem::replace(&mut tagged.part, Part::Text(false)) == Part::Text(true);
            if tags.lines && first && c == '\n' {
                continue;
            }
            if std::mem::take(&mut tagged.newline) {
                escape_into(&mut text, '\n');
            }
            if tags.lines && c == '\n' {
                tagged.newline = true;
            } else {
                escape_into(&mut text, c);
            }
        }
        self.argue(&text, out);
    }

    /// A value is too long to be converted: it is passed on as a string.
    fn give_up_type(&mut self, tags: &Tags, tagged: &mut Tagged, out: &mut Deltas) {
        let text = std::mem::take(&mut tagged.text);
        if tagged.part == Part::Typed {
            self.argue("\"", out);
            tagged.part = Part::Text(true);
            self.pass_on(tags, tagged, &text, out);
        }
    }

    fn close_value(&mut self, _tags: &Tags, tagged: &mut Tagged, out: &mut Deltas) {
        if tagged.part == Part::Typed {
            self.argue(&convert(&std::mem::take(&mut tagged.text)), out);
        } else {
            self.argue("\"", out);
        }
        tagged.newline = false;
        tagged.part = Part::BetweenParameters;
    }

    pub(super) fn finish_tagged(&mut self, mut tagged: Tagged, out: &mut Deltas) {
        if matches!(tagged.part, Part::BeforeName | Part::Name) {
            return self.fall_back(out);
        }
        let Some(tags) = self.tags() else { return };
        let mut plain = String::new();
        tagged.held.flush(&mut plain);
        match tagged.part {
            Part::Text(_) => self.pass_on(tags, &mut tagged, &plain, out),
            Part::Typed => self.argue(tagged.text.trim(), out),
            _ => {}
        }
    }
}

/// Returns a value that is no string as JSON: its own text if that is JSON, else as a string.
fn convert(text: &str) -> String {
    let text = text.trim();
    let lower = match text {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        text => text,
    };
    if serde_json::from_str::<serde::de::IgnoredAny>(lower).is_ok() {
        return lower.into();
    }
    let mut quoted = String::from("\"");
    text.chars().for_each(|c| escape_into(&mut quoted, c));
    quoted.push('"');
    quoted
}
