//! What comes out: records in a queue that any thread may poll.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::Error;
use crate::sched::FinishReason;

/// News of one sequence: new tokens, new text, or its end.
#[derive(Debug, Clone, PartialEq)]
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

/// Outputs in the order they were made.
#[derive(Default)]
pub struct Queue {
    outputs: Mutex<VecDeque<Output>>,
    arrived: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Output>> {
        self.outputs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, output: Output) {
        self.lock().push_back(output);
        self.arrived.notify_all();
    }

    /// Everything there is; waits up to `timeout` (None: as long as it takes) for the first. Empty: time ran out.
    pub fn poll(&self, timeout: Option<Duration>) -> VecDeque<Output> {
        let outputs = self.lock();
        let none = |outputs: &mut VecDeque<Output>| outputs.is_empty();
        let mut outputs = match timeout {
            Some(timeout) => self.arrived.wait_timeout_while(outputs, timeout, none).unwrap_or_else(PoisonError::into_inner).0,
            None => self.arrived.wait_while(outputs, none).unwrap_or_else(PoisonError::into_inner),
        };
        std::mem::take(&mut *outputs)
    }
}
