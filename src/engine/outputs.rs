use super::timing::Timing;
use crate::error::{Error, Result, try_concat, try_copy};
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
    /// Makes room for what another one holds.
    pub fn reserve(&mut self, other: &Logprobs) -> Result<()> {
        self.tokens.try_reserve(other.tokens.len())?;
        Ok(self.top.try_reserve(other.top.len())?)
    }

    /// Adds what room was made for.
    pub fn extend(&mut self, other: &Logprobs) {
        self.tokens.extend_from_slice(&other.tokens);
        self.top.extend_from_slice(&other.top);
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

impl Output {
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
