//! The pieces of a response, in the shape of the deltas of a chat completion.

use std::ops::Range;

use serde_json::{Value as Json, json};

/// What a delta adds to the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaKind {
    /// Text of the answer.
    Content,
    /// Text of the reasoning.
    Reasoning,
    /// Begins a tool call. The text is the name of the function.
    ToolCall,
    /// Text of the arguments of a tool call.
    Arguments,
    /// The arguments of a tool call are complete. Its text is empty.
    ToolCallEnd,
}

#[derive(Debug, Clone)]
struct Entry {
    kind: DeltaKind,
    call: u32,
    text: Range<usize>,
    id: Range<usize>,
}

/// One delta of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delta<'a> {
    /// What the delta adds.
    pub kind: DeltaKind,
    /// Index of the tool call, from 0. 0 for content and reasoning.
    pub call: u32,
    /// Text, or the name of the function.
    pub text: &'a str,
    /// Id of the tool call, if `kind` is `ToolCall`. Else empty.
    pub id: &'a str,
}

impl Delta<'_> {
    /// Returns the delta of a chat completion. None: it has none for the end of a call.
    fn to_json(self) -> Option<Json> {
        let Delta { kind, call, text, id } = self;
        match kind {
            DeltaKind::Content => Some(json!({"content": text})),
            DeltaKind::Reasoning => Some(json!({"reasoning_content": text})),
            DeltaKind::ToolCall => {
                let function = json!({"name": text, "arguments": ""});
                Some(json!({"tool_calls": [{"index": call, "id": id, "type": "function", "function": function}]}))
            }
            DeltaKind::Arguments => Some(json!({"tool_calls": [{"index": call, "function": {"arguments": text}}]})),
            DeltaKind::ToolCallEnd => None,
        }
    }
}

/// A list of deltas. Neighbours of the same kind are one delta.
#[derive(Debug, Clone, Default)]
pub struct Deltas {
    entries: Vec<Entry>,
    text: String,
}

impl Deltas {
    /// Removes all deltas.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.text.clear();
    }

    /// Returns the number of deltas.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there is no delta.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the deltas in order.
    pub fn iter(&self) -> impl Iterator<Item = Delta<'_>> {
        self.entries.iter().map(|entry| Delta {
            kind: entry.kind,
            call: entry.call,
            text: &self.text[entry.text.clone()],
            id: &self.text[entry.id.clone()],
        })
    }

    /// Returns the deltas as a JSON array of deltas of a chat completion.
    pub fn to_json(&self) -> String {
        Json::from_iter(self.iter().filter_map(Delta::to_json)).to_string()
    }

    /// Appends text of a kind that is not `ToolCall`.
    pub(super) fn push(&mut self, kind: DeltaKind, call: u32, text: &str) {
        if text.is_empty() && kind != DeltaKind::ToolCallEnd {
            return;
        }
        let start = self.text.len();
        self.text.push_str(text);
        let end = self.text.len();
        match self.entries.last_mut() {
            Some(last) if last.kind == kind && last.call == call => last.text.end = end,
            _ => self.entries.push(Entry { kind, call, text: start..end, id: end..end }),
        }
    }

    pub(super) fn push_char(&mut self, kind: DeltaKind, call: u32, c: char) {
        self.push(kind, call, c.encode_utf8(&mut [0; 4]));
    }

    pub(super) fn begin_call(&mut self, call: u32, name: &str, id: &str) {
        let start = self.text.len();
        self.text.push_str(name);
        let middle = self.text.len();
        self.text.push_str(id);
        self.entries.push(Entry { kind: DeltaKind::ToolCall, call, text: start..middle, id: middle..self.text.len() });
    }
}
