//! The error type: a stable code, and a message with the values and the remedy.

use std::borrow::Cow;
use std::fmt;

/// The kind of an error, as a number that never changes its meaning (`PLLM_E_*` in the C header).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Code {
    /// An argument has an invalid value, range or encoding.
    InvalidArgument = 1,
    /// No live request or sequence has this id.
    NotFound = 2,
    /// A file cannot be opened or read.
    Io = 3,
    /// The files of the model are damaged, incomplete or inconsistent.
    Model = 4,
    /// This build, model or machine does not support the option.
    Unsupported = 5,
    /// The budget of memory, blocks or requests is exhausted.
    Capacity = 6,
    /// Another thread is stepping this engine.
    Busy = 7,
    /// The system refused an allocation.
    OutOfMemory = 8,
    /// A defect of the library. The engine that detects it stops.
    Internal = 9,
    /// The engine that owns this object has been freed.
    Closed = 10,
    /// The host cancelled the operation.
    Cancelled = 11,
}

impl Code {
    const ALL: [Code; 11] = [
        Code::InvalidArgument,
        Code::NotFound,
        Code::Io,
        Code::Model,
        Code::Unsupported,
        Code::Capacity,
        Code::Busy,
        Code::OutOfMemory,
        Code::Internal,
        Code::Closed,
        Code::Cancelled,
    ];

    /// Returns the code with this number.
    pub fn from_number(number: i32) -> Option<Code> {
        Code::ALL.into_iter().find(|&code| code as i32 == number)
    }
}

/// An error of the library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    code: Code,
    message: Cow<'static, str>,
    prompt: Option<PromptLength>,
    is_temporary: bool,
    is_of_other_rank: bool,
}

/// The numbers of an error about a prompt that is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLength {
    /// Number of tokens of the prompt.
    pub tokens: usize,
    /// Maximum length of a sequence in tokens, prompt and output together.
    pub max_model_len: usize,
}

/// The result of a function that can fail.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates an error. Long messages are truncated.
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Error {
        Error { code, message: shortened(message.into()), prompt: None, is_temporary: false, is_of_other_rank: false }
    }

    /// Creates a `Capacity` error of a call that can succeed later without a change.
    pub fn full(message: impl Into<Cow<'static, str>>) -> Error {
        Error { is_temporary: true, ..Error::new(Code::Capacity, message) }
    }

    /// Returns whether the same call can succeed later without a change of arguments or options.
    pub fn is_temporary(&self) -> bool {
        self.is_temporary || matches!(self.code, Code::Busy | Code::OutOfMemory)
    }

    /// Makes it the error that another worker has reported.
    #[must_use]
    pub fn of_rank(self, rank: usize) -> Error {
        Error { is_of_other_rank: true, ..self.within(format_args!("rank {rank}")) }
    }

    /// Returns whether another worker has reported the error.
    pub fn is_of_other_rank(&self) -> bool {
        self.is_of_other_rank
    }

    /// Adds the numbers of a prompt that is too long.
    #[must_use]
    pub fn with_prompt(self, prompt: PromptLength) -> Error {
        Error { prompt: Some(prompt), ..self }
    }

    /// Returns the numbers of a prompt that is too long.
    pub fn prompt(&self) -> Option<PromptLength> {
        self.prompt
    }

    /// Creates an `InvalidArgument` error.
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Code::InvalidArgument, message)
    }

    /// Creates a `NotFound` error.
    pub fn not_found(message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Code::NotFound, message)
    }

    /// Creates an `Io` error.
    pub fn io(message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Code::Io, message)
    }

    /// Creates a `Model` error.
    pub fn model(message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Code::Model, message)
    }

    /// Creates an `Unsupported` error.
    pub fn unsupported(message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Code::Unsupported, message)
    }

    /// Creates a `Capacity` error.
    pub fn capacity(message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Code::Capacity, message)
    }

    /// Creates a `Busy` error. The static message needs no allocation.
    pub fn busy() -> Error {
        Error::new(Code::Busy, "another thread, or the engine's own, is stepping this engine; step it from one thread at a time")
    }

    /// Creates an `Internal` error. Prefixes the message with `internal error: `.
    pub fn internal(message: impl fmt::Display) -> Error {
        Error::new(Code::Internal, format!("internal error: {message}"))
    }

    /// Creates a `Closed` error.
    pub fn closed(message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Code::Closed, message)
    }

    /// Creates a `Cancelled` error.
    pub fn cancelled(message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Code::Cancelled, message)
    }

    /// Creates an `OutOfMemory` error. The static message needs no allocation.
    pub fn out_of_memory() -> Error {
        Error::new(Code::OutOfMemory, "the system refused an allocation; lower the budgets or free memory")
    }

    /// Returns the code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// Returns the message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Prefixes the message with the location of the error: `config.json: num_hidden_layers is 0`.
    pub fn within(self, place: impl fmt::Display) -> Error {
        Error { message: format!("{place}: {}", self.message).into(), ..self }
    }
}

/// Truncates a message, since it may quote a file or a request of any size.
fn shortened(message: Cow<'static, str>) -> Cow<'static, str> {
    const MAX_BYTES: usize = 1000;
    if message.len() <= MAX_BYTES {
        return message;
    }
    let end = (0..=MAX_BYTES).rev().find(|&i| message.is_char_boundary(i)).unwrap_or(0);
    format!("{}...", &message[..end]).into()
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<std::collections::TryReserveError> for Error {
    fn from(_: std::collections::TryReserveError) -> Error {
        Error::out_of_memory()
    }
}

/// Copies a slice whose length depends on options, a model file or a request.
pub fn try_copy<T: Copy>(values: &[T]) -> Result<Vec<T>> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(values.len())?;
    copy.extend_from_slice(values);
    Ok(copy)
}

/// Reserves space for `more` elements: with amortized growth, or exactly that many if memory is
/// short.
pub fn try_grow<T>(list: &mut Vec<T>, more: usize) -> Result<()> {
    Ok(list.try_reserve(more).or_else(|_| list.try_reserve_exact(more))?)
}

/// Makes `list` a copy of `values` and reuses its allocation.
pub fn try_refill<T: Copy>(list: &mut Vec<T>, values: &[T]) -> Result<()> {
    list.clear();
    list.try_reserve(values.len())?;
    list.extend_from_slice(values);
    Ok(())
}

/// Concatenates strings whose length depends on options, a model file or a request.
pub fn try_concat(texts: &[&str]) -> Result<String> {
    let mut all = String::new();
    all.try_reserve_exact(texts.iter().map(|text| text.len()).sum())?;
    texts.iter().for_each(|text| all.push_str(text));
    Ok(all)
}

/// Copies a list of strings.
pub fn try_texts(texts: &[String]) -> Result<Vec<String>> {
    let mut copies = Vec::new();
    copies.try_reserve_exact(texts.len())?;
    for text in texts {
        copies.push(try_concat(&[text])?);
    }
    Ok(copies)
}

/// A string that reports a failed allocation as a formatting error.
#[derive(Default)]
pub struct Text(pub String);

impl fmt::Write for Text {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        self.0.try_reserve(part.len()).map_err(|_| fmt::Error)?;
        self.0.push_str(part);
        Ok(())
    }
}

/// Formats values whose size depends on a model file.
pub fn try_format(what: fmt::Arguments) -> Result<String> {
    let mut text = Text::default();
    fmt::write(&mut text, what).map_err(|_| Error::out_of_memory())?;
    Ok(text.0)
}

/// Returns an empty vector with space for `capacity` elements, or an out-of-memory error.
pub fn try_with_capacity<T>(capacity: usize) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    vec.try_reserve_exact(capacity)?;
    Ok(vec)
}

/// Returns `len` copies of `value`, or an out-of-memory error. For every size that depends on
/// options, a model file or a request.
pub fn try_vec<T: Clone>(len: usize, value: T) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    vec.try_reserve_exact(len)?;
    vec.resize(len, value);
    Ok(vec)
}
