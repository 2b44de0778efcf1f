//! The messages of gpt-oss: a header with channel and recipient, and a body.

use super::markers::{Found, Held};
use super::{DeltaKind, Deltas, ResponseParser, State};

/// Maximum length in bytes of a header. A longer one is content.
const MAX_HEADER: usize = 1024;
const MARKERS: &[&str] = &["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"];
const START: usize = 0;
const CHANNEL: usize = 1;
const MESSAGE: usize = 2;
const CONSTRAIN: usize = 3;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Part {
    /// After `<|start|>assistant` of the prompt.
    #[default]
    Begin,
    Header,
    Reasoning,
    Content,
    Arguments,
    /// After the end of a message.
    Between,
}

/// The position within a message.
#[derive(Debug, Default)]
pub struct Harmony {
    part: Part,
    held: Held,
    header: String,
    /// A message of reasoning has ended.
    reasoned: bool,
}

impl ResponseParser {
    pub(super) fn step_harmony(&mut self, mut harmony: Harmony, c: char, out: &mut Deltas) {
        let mut plain = String::new();
        let found = harmony.held.push(c, MARKERS.iter().copied(), &mut plain);
        self.body(&mut harmony, &plain, out);
        if let Found::Marker(i) = found {
            self.harmony_marker(&mut harmony, i, out);
        }
        self.state = State::Harmony(harmony);
    }

    fn body(&mut self, harmony: &mut Harmony, plain: &str, out: &mut Deltas) {
        match harmony.part {
            Part::Begin => {
                harmony.header.push_str(plain);
                let text = harmony.header.trim_start();
                if !"to=".starts_with(text) && !text.starts_with("to=") {
                    self.header_is_content(harmony, out);
                }
            }
            Part::Header => harmony.header.push_str(plain),
            Part::Reasoning => out.push(DeltaKind::Reasoning, 0, plain),
            Part::Content => out.push(DeltaKind::Content, 0, plain),
            Part::Arguments => self.argue(plain, out),
            Part::Between => out.push(DeltaKind::Content, 0, plain.trim()),
        }
        if harmony.header.len() > MAX_HEADER {
            self.header_is_content(harmony, out);
        }
    }

    fn header_is_content(&mut self, harmony: &mut Harmony, out: &mut Deltas) {
        out.push(DeltaKind::Content, 0, &std::mem::take(&mut harmony.header));
        harmony.part = Part::Content;
    }

    fn harmony_marker(&mut self, harmony: &mut Harmony, marker: usize, out: &mut Deltas) {
        let in_header = matches!(harmony.part, Part::Begin | Part::Header);
        match marker {
            MESSAGE if in_header => self.begin_message(harmony, out),
            CHANNEL | CONSTRAIN if in_header => {
                harmony.header.push_str(MARKERS[marker]);
                harmony.part = Part::Header;
            }
            START | CHANNEL => {
                self.end_message(harmony, out);
                harmony.header.clear();
                harmony.part = Part::Header;
                if marker == CHANNEL {
                    harmony.header.push_str(MARKERS[CHANNEL]);
                }
            }
            MESSAGE | CONSTRAIN => self.body(harmony, MARKERS[marker], out),
            _ => {
                self.end_message(harmony, out);
                harmony.header.clear();
                harmony.part = Part::Between;
            }
        }
    }

    /// The header is complete.
    fn begin_message(&mut self, harmony: &mut Harmony, out: &mut Deltas) {
        let header = std::mem::take(&mut harmony.header);
        let word = |text: &str| text.split([' ', '<', '\n']).next().unwrap_or_default().to_string();
        let recipient = header.split("to=").nth(1).map(word).filter(|name| !name.is_empty());
        let channel = header.split(MARKERS[CHANNEL]).nth(1).map(|text| word(text.trim_start()));
        harmony.part = match (recipient, channel.as_deref()) {
            (Some(name), _) => {
                self.begin_call(name.strip_prefix("functions.").unwrap_or(&name), None, out);
                Part::Arguments
            }
            (None, Some("analysis")) => {
                if harmony.reasoned {
                    out.push(DeltaKind::Reasoning, 0, "\n");
                }
                Part::Reasoning
            }
            _ => Part::Content,
        };
    }

    fn end_message(&mut self, harmony: &mut Harmony, out: &mut Deltas) {
        match harmony.part {
            Part::Arguments => out.push(DeltaKind::ToolCallEnd, self.calls - 1, ""),
            Part::Reasoning => harmony.reasoned = true,
            _ => {}
        }
    }

    pub(super) fn finish_harmony(&mut self, mut harmony: Harmony, out: &mut Deltas) {
        let mut plain = String::new();
        harmony.held.flush(&mut plain);
        self.body(&mut harmony, &plain, out);
        if matches!(harmony.part, Part::Begin | Part::Header) {
            self.header_is_content(&mut harmony, out);
        }
    }
}
