use std::mem::take;

use super::timing::Timing;
use crate::error::{Error, Result, try_concat, try_copy, try_grow};
use crate::sched::FinishReason;

/// News of one sequence: new tokens, new text, or its end.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Output {
    pub request: u64,
    pub sequence: u64,
    /// Which of the request's results, from 0.
    pub index: u32,
    /// The request's own word, returned.
    pub user_data: u64,
    pub tokens: Vec<u32>,
    /// Of `tokens`, where the request asked for them.
    pub logprobs: Logprobs,
    /// Of the prompt's tokens but the first, where the request asked for them; as they become known.
    pub prompt_logprobs: Logprobs,
    /// Valid UTF-8, never half a character; it may lag behind the tokens.
    pub text: String,
    /// None: more will come.
    pub finish: Option<FinishReason>,
    /// Why, where `finish` is `Error`.
    pub error: Option<Error>,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    /// The sum of the log probabilities of all generated tokens, under the distribution they were chosen from by the model;
    /// of a beam, its score.
    pub score: f64,
    /// An exported sequence.
    pub blob: Vec<u8>,
    /// In the last one.
    pub timing: Timing,
}

/// Log probabilities under the model's own distribution, token by token.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Logprobs {
    /// Of the tokens themselves.
    pub tokens: Vec<f32>,
    /// Of the most probable tokens in each one's place, so many for each, most probable first.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    fn reserve(&mut self, tokens: usize, top: usize) -> Result<()> {
        try_grow(&mut self.tokens, tokens)?;
        try_grow(&mut self.top, top)
    }

    /// Adds what room was made for.
    fn extend(&mut self, tokens: &[f32], top: &[(u32, f32)]) {
        self.tokens.extend_from_slice(tokens);
        self.top.extend_from_slice(top);
    }

    pub fn try_clone(&self) -> Result<Logprobs> {
        Ok(Logprobs { tokens: try_copy(&self.tokens)?, top: try_copy(&self.top)? })
    }

    /// Keeps those of the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        if len < self.tokens.len() {
            self.top.truncate(self.top.len() / self.tokens.len() * len);
            self.tokens.truncate(len);
        }
    }
}

/// What an output tells, wherever that lies.
#[derive(Debug, Clone, Copy, Default)]
pub struct Told<'a> {
    pub tokens: &'a [u32],
    pub logprobs: &'a [f32],
    pub top: &'a [(u32, f32)],
    pub prompt_logprobs: &'a [f32],
    pub prompt_top: &'a [(u32, f32)],
    pub text: &'a str,
}

impl<'a> Told<'a> {
    fn of(tokens: &'a [u32], logprobs: &'a Logprobs, prompt: &'a Logprobs, text: &'a str) -> Told<'a> {
        let (logprobs, top) = (&logprobs.tokens, &logprobs.top);
        Told { tokens, logprobs, top, prompt_logprobs: &prompt.tokens, prompt_top: &prompt.top, text }
    }
}

/// What one or several outputs tell, one after the other.
#[derive(Debug, Default)]
pub struct Content {
    pub tokens: Vec<u32>,
    pub logprobs: Logprobs,
    pub prompt_logprobs: Logprobs,
    pub text: String,
}

impl Content {
    /// All of it or nothing.
    pub fn add(&mut self, told: Told) -> Result<()> {
        try_grow(&mut self.tokens, told.tokens.len())?;
        self.logprobs.reserve(told.logprobs.len(), told.top.len())?;
        self.prompt_logprobs.reserve(told.prompt_logprobs.len(), told.prompt_top.len())?;
        let text = told.text.len();
        self.text.try_reserve(text).or_else(|_| self.text.try_reserve_exact(text))?;
        self.tokens.extend_from_slice(told.tokens);
        self.logprobs.extend(told.logprobs, told.top);
        self.prompt_logprobs.extend(told.prompt_logprobs, told.prompt_top);
        self.text.push_str(told.text);
        Ok(())
    }

    /// The lists keep their room.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.logprobs.truncate(0);
        self.prompt_logprobs.truncate(0);
        self.text.clear();
    }

    pub fn all(&self) -> Told<'_> {
        Told::of(&self.tokens, &self.logprobs, &self.prompt_logprobs, &self.text)
    }
}

impl Output {
    /// All that it tells.
    pub fn told(&self) -> Told<'_> {
        Told::of(&self.tokens, &self.logprobs, &self.prompt_logprobs, &self.text)
    }

    /// It tells this, and nothing else. Where there is no memory for that, it tells nothing.
    pub fn tell(&mut self, told: Told) -> Result<()> {
        let mut content = self.take_content();
        content.clear();
        let result = content.add(told);
        self.put(content);
        result
    }

    /// Nothing is left of it but the room of its lists.
    pub fn emptied(mut self) -> Output {
        let mut content = self.take_content();
        content.clear();
        self = Output::default();
        self.put(content);
        self
    }

    /// All but what it tells, which stays.
    pub fn take_head(&mut self) -> Output {
        let content = self.take_content();
        let head = take(self);
        self.put(content);
        head
    }

    /// This output, and what another one tells.
    pub fn with_content_of(mut self, other: &mut Output) -> Output {
        self.put(other.take_content());
        self
    }

    fn take_content(&mut self) -> Content {
        let Output { tokens, logprobs, prompt_logprobs, text, .. } = self;
        Content { tokens: take(tokens), logprobs: take(logprobs), prompt_logprobs: take(prompt_logprobs), text: take(text) }
    }

    fn put(&mut self, content: Content) {
        Content { tokens: self.tokens, logprobs: self.logprobs, prompt_logprobs: self.prompt_logprobs, text: self.text } = content;
    }

    /// This output, made the last one of a sequence that failed. What it already holds is not lost.
    pub fn failed(self, error: Error) -> Output {
        Output { finish: Some(FinishReason::Error), error: Some(error), ..self }
    }

    /// The same of another of the request's sequences, which has nothing to tell yet.
    pub fn of(&self, index: u32) -> Output {
        let Output { request, user_data, finish, prompt_tokens, generated_tokens, score, .. } = *self;
        let (sequence, error) = (request + index as u64, self.error.clone());
        Output { request, sequence, index, user_data, finish, error, prompt_tokens, generated_tokens, score, ..Output::default() }
    }

    /// The same prompt as it was told, for another of the request's sequences.
    pub fn try_echo(&self) -> Result<Output> {
        let (tokens, logprobs, text) = (try_copy(&self.tokens)?, self.logprobs.try_clone()?, try_concat(&[&self.text])?);
        Ok(Output { tokens, logprobs, text, ..self.of(self.index) })
    }
}
