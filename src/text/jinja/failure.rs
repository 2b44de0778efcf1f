//! Why a template does not compile or render.

/// The kind of a failure decides the error code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The template is wrong, or does not accept these messages.
    Template,
    /// The template exceeds a limit of this library.
    Limit,
}

#[derive(Debug, Clone)]
pub struct Failure {
    pub kind: Kind,
    pub message: String,
    /// The line of the template, from 1.
    pub line: Option<u32>,
}

pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn new(message: impl Into<String>) -> Failure {
        Failure { kind: Kind::Template, message: message.into(), line: None }
    }

    pub fn limit(message: impl Into<String>) -> Failure {
        Failure { kind: Kind::Limit, message: message.into(), line: None }
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

pub fn fail<T>(message: impl Into<String>) -> Result<T> {
    Err(Failure::new(message))
}
