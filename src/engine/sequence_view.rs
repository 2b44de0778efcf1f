//! The state of a sequence as calls of the host see it.

use std::sync::Arc;
use std::time::Duration;

use super::command::PendingOutput;
use super::sequence::{Generation, Sequence};
use super::wait_queue::WaitingEntry;
use crate::output::queue::OutputSender;
use crate::types::outputs::Output;
use crate::types::{RequestId, SeqId};

/// A sequence after the last step and the commands since then. Calls of the host read and change it
/// while a step uses the `Sequence` on another thread.
#[derive(Clone)]
pub struct SequenceView {
    pub request: RequestId,
    pub index: u32,
    /// Number of tokens.
    pub len: usize,
    /// Whether it waits for the host to resume or free it.
    pub idle: bool,
    /// Whether it is a beam. Beams are chosen together and cannot be used alone.
    pub beam: bool,
    /// Whether K and V come from another instruction path, so that results are not bit-identical.
    pub inexact: bool,
    /// Whether its generation computes the prompt only.
    pub prompt_only: bool,
    /// Number of tokens that were appended while it was idle.
    pub fresh: usize,
    /// Priority of the request, or of the parent.
    pub priority: i32,
    /// Number of the last command for it.
    pub last_command: u64,
    pub sender: Arc<OutputSender>,
    pub user_data: u64,
}

impl SequenceView {
    /// Creates an entry for a sequence that has not run.
    pub fn new(request: RequestId, index: u32, len: usize, sender: Arc<OutputSender>, user_data: u64) -> SequenceView {
        let (idle, beam, inexact, prompt_only) = (false, false, false, false);
        SequenceView { request, index, len, idle, beam, inexact, prompt_only, fresh: 0, priority: 0, last_command: 0, sender, user_data }
    }

    /// Creates an entry for a sequence of `len` tokens.
    pub fn from_sequence(sequence: &Sequence, len: usize) -> SequenceView {
        let Generation { sender, user_data, .. } = &sequence.generation;
        let view = SequenceView::new(sequence.request, sequence.index, len, sender.clone(), *user_data);
        SequenceView { prompt_only: sequence.params().is_prompt_only(), ..view }
    }

    /// Returns the last output of a generation that has not started.
    pub fn pending_output(&self) -> PendingOutput {
        let (request, index, user_data) = (self.request, self.index, self.user_data);
        let last = Output { request, user_data, prompt_tokens: self.len as u64, ..Output::default() };
        PendingOutput { sender: self.sender.clone(), last: last.for_sample(index), ticket: None }
    }

    /// Creates an entry for a fork.
    pub fn fork_entry(&self, id: SeqId, len: usize, sender: Arc<OutputSender>, user_data: u64) -> SequenceView {
        let SequenceView { inexact, prompt_only, priority, .. } = *self;
        SequenceView { inexact, prompt_only, priority, ..SequenceView::new(id.own_request(), 0, len, sender, user_data) }
    }

    /// Returns the waiting entry for a generation that starts at `at` and generates up to
    /// `max_new_tokens` tokens.
    pub fn waiting_entry(&self, max_new_tokens: usize, at: Duration) -> WaitingEntry {
        let max_new_tokens = if self.prompt_only { 0 } else { max_new_tokens };
        WaitingEntry::new(self.fresh.max(1), max_new_tokens, self.priority, at)
    }
}
