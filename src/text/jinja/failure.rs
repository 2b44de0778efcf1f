//! Errors of templates.

use std::fmt::{Display, Write};

/// The kind of a failure, which determines the error code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The template is invalid, or refuses these messages.
    Template,
    /// The template exceeds a limit of this library.
    Limit,
    /// The system has no memory left.
    Memory,
}

#[derive(Debug, Clone)]
pub struct Failure {
    pub kind: Kind,
    pub message: String,
    /// The line of the template, from 1.
    pub line: Option<u32>,
}

/// Maximum size of a message in bytes. Templates create messages of any length, and iterators store
/// them.
const MAX_MESSAGE: usize = 4096;

pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn new(message: impl Display) -> Failure {
        Failure { kind: Kind::Template, message: Message::bounded(message), line: None }
    }

    pub fn limit(message: impl Display) -> Failure {
        Failure { kind: Kind::Limit, message: Message::bounded(message), line: None }
    }

    pub fn out_of_memory() -> Failure {
        Failure { kind: Kind::Memory, message: String::new(), line: None }
    }

    /// Adds the line, unless an inner statement has set it.
    pub fn at(mut self, line: u32) -> Failure {
        self.line.get_or_insert(line);
        self
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) => write!(f, "{} (line {line})", self.message),
            None => f.write_str(&self.message),
        }
    }
}

/// A message that is cut at its maximum size.
struct Message(String);

impl Message {
    fn bounded(message: impl Display) -> String {
        let mut kept = Message(String::new());
        if write!(kept, "{message}").is_err() {
            kept.0.push_str("...");
        }
        kept.0.shrink_to_fit();
        kept.0
    }
}

impl Write for Message {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let max_len = text.len().min(MAX_MESSAGE - self.0.len());
        let kept = (0..=max_len).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        self.0.push_str(&text[..kept]);
        if kept < text.len() { Err(std::fmt::Error) } else { Ok(()) }
    }
}

pub fn fail<T>(message: impl Display) -> Result<T> {
    Err(Failure::new(message))
}
