//! What comes out: records in a queue that any thread may poll.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
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

/// Outputs in the order they were made.
#[derive(Default)]
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    outputs: VecDeque<Output>,
    /// Why no more will come.
    closed: Option<Error>,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves a step's outputs in, and wakes who waits for them.
    pub(super) fn append(&self, outputs: &mut VecDeque<Output>) {
        if !outputs.is_empty() {
            self.lock().outputs.append(outputs);
            self.changed.notify_all();
        }
    }

    /// No more will come: who polls gets what there is, then `error`.
    pub(super) fn close(&self, error: Error) {
        self.lock().closed = Some(error);
        self.changed.notify_all();
    }

    /// Everything there is; waits up to `timeout` (None: as long as it takes) for the first. Empty: time ran out.
    pub fn poll(&self, timeout: Option<Duration>) -> Result<VecDeque<Output>> {
        self.poll_with(timeout, |_| Ok(()))
    }

    /// As `poll`; where `make_room` for so many outputs fails, they stay in the queue.
    pub fn poll_with(&self, timeout: Option<Duration>, make_room: impl FnOnce(usize) -> Result<()>) -> Result<VecDeque<Output>> {
        let state = self.lock();
        let none = |state: &mut State| state.outputs.is_empty() && state.closed.is_none();
        let mut state = match timeout {
            Some(timeout) => self.changed.wait_timeout_while(state, timeout, none).unwrap_or_else(PoisonError::into_inner).0,
            None => self.changed.wait_while(state, none).unwrap_or_else(PoisonError::into_inner),
        };
        if let Some(error) = state.closed.clone().filter(|_| state.outputs.is_empty()) {
            return Err(error);
        }
        make_room(state.outputs.len())?;
        Ok(std::mem::take(&mut state.outputs))
    }
}
