//! Outputs: new tokens, new text, or the end of a sequence.

use std::mem::take;
use std::sync::Arc;

use super::timing::Timing;
use super::{RequestId, SeqId};
use crate::error::{Error, Result, try_concat, try_copy, try_grow};

/// The reason why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token or a stop string.
    Stop,
    /// `max_tokens`, or the maximum length of a sequence.
    Length,
    /// The host aborted it.
    Abort,
    /// Its computation failed. The output has the message.
    Error,
    /// Its deadline has passed.
    Deadline,
}

/// What ended a sequence with `FinishReason::Stop`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// An end-of-sequence token of the model.
    Eos(u32),
    /// A stop token of the request.
    Token(u32),
    /// A stop string of the request: the list of them, and an index.
    Text(Arc<Vec<String>>, usize),
    /// The grammar is complete.
    Grammar,
}

impl FinishReason {
    /// Returns the name in metrics and traces.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::Error => "error",
            FinishReason::Deadline => "deadline",
        }
    }
}

/// An output: new tokens, new text, or the end of one sequence.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Output {
    /// Id of the request.
    pub request: RequestId,
    /// Id of the sequence.
    pub sequence: SeqId,
    /// Index of the result within the request, from 0.
    pub index: u32,
    /// Number that the host passed with the request.
    pub user_data: u64,
    /// New tokens, or all tokens so far if the request wants them.
    pub tokens: Vec<u32>,
    /// Log probabilities of `tokens`, if the request wants them.
    pub logprobs: Logprobs,
    /// Log probabilities of the prompt tokens except the first, if the request wants them. They
    /// arrive as prefill chunks are computed.
    pub prompt_logprobs: Logprobs,
    /// Valid UTF-8 with complete characters only. It may lag behind the tokens.
    pub text: String,
    /// Finish reason. `None` if more outputs follow.
    pub finish: Option<FinishReason>,
    /// What ended the sequence if `finish` is `Stop`.
    pub stop: Option<StopReason>,
    /// Error message if `finish` is `Error`.
    pub error: Option<Error>,
    /// Number of tokens of the prompt.
    pub prompt_tokens: u64,
    /// Number of tokens generated so far.
    pub generated_tokens: u64,
    /// Number of tokens whose K and V are computed. Only in outputs of `prefill_progress`, which
    /// have nothing else. Otherwise 0.
    pub computed_tokens: u64,
    /// Sum of the log probabilities of all generated tokens under the distribution of the model.
    /// For a beam, its score.
    pub score: f64,
    /// State of an exported sequence.
    pub sequence_state: Vec<u8>,
    /// Times of the generation, in its last output only.
    pub timing: Timing,
}

/// Log probabilities under the distribution of the model, token by token.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Logprobs {
    /// Log probabilities of the tokens themselves.
    pub tokens: Vec<f32>,
    /// The most probable alternatives of each token with their log probabilities, the same number
    /// for each token, the most probable first.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    fn reserve(&mut self, tokens: usize, top: usize) -> Result<()> {
        try_grow(&mut self.tokens, tokens)?;
        try_grow(&mut self.top, top)
    }

    /// Appends values for which space has been reserved.
    fn extend(&mut self, tokens: &[f32], top: &[(u32, f32)]) {
        self.tokens.extend_from_slice(tokens);
        self.top.extend_from_slice(top);
    }

    /// Copies the values. Fails if the system has no memory.
    pub fn try_clone(&self) -> Result<Logprobs> {
        Ok(Logprobs { tokens: try_copy(&self.tokens)?, top: try_copy(&self.top)? })
    }

    /// Appends the first `wanted` alternatives of each token from a list with `k` for each.
    pub fn push_top(&mut self, top: &[(u32, f32)], k: usize, wanted: usize) -> Result<()> {
        if wanted > 0 {
            try_grow(&mut self.top, top.len() / k * wanted)?;
            top.chunks_exact(k).for_each(|all| self.top.extend_from_slice(&all[..wanted]));
        }
        Ok(())
    }

    /// Replaces the values of the tokens from `place` on, which have `wanted` alternatives each.
    /// `top` has `k` alternatives for each of them.
    pub fn set(&mut self, place: usize, wanted: usize, logprobs: &[f32], top: &[(u32, f32)], k: usize) {
        for (i, &logprob) in logprobs.iter().enumerate() {
            let Some(to) = self.tokens.get_mut(place + i) else { return };
            *to = logprob;
            let alternatives = self.top.iter_mut().skip((place + i) * wanted).take(wanted);
            alternatives.zip(&top[i * k..]).for_each(|(to, &from)| *to = from);
        }
    }

    /// Keeps the values of the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        if len < self.tokens.len() {
            self.top.truncate(self.top.len() / self.tokens.len() * len);
            self.tokens.truncate(len);
        }
    }
}

/// A view of the contents of an output.
#[derive(Debug, Clone, Copy, Default)]
pub struct OutputView<'a> {
    /// New tokens.
    pub tokens: &'a [u32],
    /// Log probabilities of the tokens.
    pub logprobs: &'a [f32],
    /// The most probable alternatives of the tokens.
    pub top: &'a [(u32, f32)],
    /// Log probabilities of prompt tokens.
    pub prompt_logprobs: &'a [f32],
    /// The most probable alternatives of prompt tokens.
    pub prompt_top: &'a [(u32, f32)],
    /// New text.
    pub text: &'a str,
}

impl<'a> OutputView<'a> {
    fn from_lists(tokens: &'a [u32], logprobs: &'a Logprobs, prompt: &'a Logprobs, text: &'a str) -> OutputView<'a> {
        let (logprobs, top) = (&logprobs.tokens, &logprobs.top);
        OutputView { tokens, logprobs, top, prompt_logprobs: &prompt.tokens, prompt_top: &prompt.top, text }
    }
}

/// The concatenated contents of one or several outputs.
#[derive(Debug, Default)]
pub struct OutputContent {
    /// Tokens.
    pub tokens: Vec<u32>,
    /// Log probabilities of the tokens.
    pub logprobs: Logprobs,
    /// Log probabilities of prompt tokens.
    pub prompt_logprobs: Logprobs,
    /// Text.
    pub text: String,
}

impl OutputContent {
    /// Appends contents, all or nothing.
    pub fn add(&mut self, view: OutputView) -> Result<()> {
        try_grow(&mut self.tokens, view.tokens.len())?;
        self.logprobs.reserve(view.logprobs.len(), view.top.len())?;
        self.prompt_logprobs.reserve(view.prompt_logprobs.len(), view.prompt_top.len())?;
        let text = view.text.len();
        self.text.try_reserve(text).or_else(|_| self.text.try_reserve_exact(text))?;
        self.tokens.extend_from_slice(view.tokens);
        self.logprobs.extend(view.logprobs, view.top);
        self.prompt_logprobs.extend(view.prompt_logprobs, view.prompt_top);
        self.text.push_str(view.text);
        Ok(())
    }

    /// Removes the contents and keeps the capacity of the lists.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.logprobs.truncate(0);
        self.prompt_logprobs.truncate(0);
        self.text.clear();
    }

    /// Reserves space for a few tokens and their text, so that the first outputs do not allocate.
    pub fn reserve_few(&mut self) -> Result<()> {
        const TOKENS: usize = 8;
        const TEXT: usize = 128;
        self.tokens.try_reserve(TOKENS)?;
        self.logprobs.reserve(TOKENS, 0)?;
        Ok(self.text.try_reserve(TEXT)?)
    }

    /// Returns the size of the lists in bytes, with the capacity that is not used.
    pub fn allocated_bytes(&self) -> usize {
        let logprobs = |list: &Logprobs| size_of::<f32>() * list.tokens.capacity() + size_of::<(u32, f32)>() * list.top.capacity();
        size_of::<u32>() * self.tokens.capacity() + logprobs(&self.logprobs) + logprobs(&self.prompt_logprobs) + self.text.capacity()
    }

    /// Returns a view of all contents.
    pub fn all(&self) -> OutputView<'_> {
        OutputView::from_lists(&self.tokens, &self.logprobs, &self.prompt_logprobs, &self.text)
    }
}

impl Output {
    /// Returns a view of the contents.
    pub fn view(&self) -> OutputView<'_> {
        OutputView::from_lists(&self.tokens, &self.logprobs, &self.prompt_logprobs, &self.text)
    }

    /// Replaces the contents. If there is no memory for them, the output is left without contents.
    pub fn set_view(&mut self, view: OutputView) -> Result<()> {
        let mut content = self.take_content();
        content.clear();
        let result = content.add(view);
        self.set_content(content);
        result
    }

    /// Returns an empty output that reuses the lists of this one.
    pub fn cleared(mut self) -> Output {
        let mut content = self.take_content();
        content.clear();
        self = Output::default();
        self.set_content(content);
        self
    }

    /// Returns everything except the contents, which stay in place.
    pub fn take_header(&mut self) -> Output {
        let content = self.take_content();
        let head = take(self);
        self.set_content(content);
        head
    }

    /// Moves the contents of `other` into this output.
    pub fn with_content_from(mut self, other: &mut Output) -> Output {
        self.set_content(other.take_content());
        self
    }

    fn take_content(&mut self) -> OutputContent {
        let Output { tokens, logprobs, prompt_logprobs, text, .. } = self;
        OutputContent { tokens: take(tokens), logprobs: take(logprobs), prompt_logprobs: take(prompt_logprobs), text: take(text) }
    }

    fn set_content(&mut self, content: OutputContent) {
        OutputContent { tokens: self.tokens, logprobs: self.logprobs, prompt_logprobs: self.prompt_logprobs, text: self.text } = content;
    }

    /// Turns this output into the last one of a failed sequence. Its contents are kept.
    pub fn failed(self, error: Error) -> Output {
        Output { finish: Some(FinishReason::Error), stop: None, error: Some(error), ..self }
    }

    /// Returns the same output without contents, for another sequence of the request.
    pub fn for_sample(&self, index: u32) -> Output {
        let Output { request, user_data, finish, prompt_tokens, generated_tokens, score, .. } = *self;
        let (sequence, error) = (request.sequence(index), self.error.clone());
        Output { request, sequence, index, user_data, finish, error, prompt_tokens, generated_tokens, score, ..Output::default() }
    }

    /// Returns a copy of an echoed prompt for another sequence of the request.
    pub fn try_echo(&self) -> Result<Output> {
        let (tokens, logprobs, text) = (try_copy(&self.tokens)?, self.logprobs.try_clone()?, try_concat(&[&self.text])?);
        Ok(Output { tokens, logprobs, text, ..self.for_sample(self.index) })
    }
}
