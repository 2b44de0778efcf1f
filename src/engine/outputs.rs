use crate::error::Error;
use crate::sched::FinishReason;

/// News of one sequence: new tokens, new text, or its end.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Output {
    pub request: u64,
    pub sequence: u64,
    /// Which of the request's sequences, from 0.
    pub index: u32,
    /// The request's own word, returned.
    pub user_data: u64,
    pub tokens: Vec<u32>,
    /// One per token where the request asked for them, else empty.
    pub logprobs: Vec<f32>,
    /// Valid UTF-8, never half a character; it may lag behind the tokens.
    pub text: String,
    /// None: more will come.
    pub finish: Option<FinishReason>,
    /// Why, where `finish` is `Error`.
    pub error: Option<Error>,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
}

impl Output {
    /// This output, made the last one of a sequence that failed. What it already holds is not lost.
    pub fn failed(self, error: Error) -> Output {
        Output { finish: Some(FinishReason::Error), error: Some(error), ..self }
    }
}
