//! Outputs between the engine core and the queues of the host.

use std::mem::take;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::observability::journal::digests::OutputDigests;
use crate::output::queue::OutputSender;
use crate::types::outputs::Output;
use crate::types::{RequestId, SeqId};

/// The outputs of a step that are not delivered yet, and the readers to notify.
#[derive(Default)]
pub struct Delivery {
    /// Requests with outputs that could not be queued for lack of memory. They end.
    undeliverable: Vec<(RequestId, Error)>,
    /// Answers that could not be queued for lack of memory and end no request. They are retried.
    deferred: Vec<(Arc<OutputSender>, Output)>,
    /// An output whose buffers the next output reuses.
    reusable: Output,
    /// Queues whose readers must be notified at the end of the step.
    unannounced: Vec<Arc<OutputSender>>,
    /// Whether the step has delivered an output.
    has_delivered: bool,
    /// Digests of the outputs for a journal.
    digests: Option<OutputDigests>,
}

impl Delivery {
    /// Creates the state for steps of at most `max_seqs` sequences. `journal` is set if an output
    /// must have a digest.
    pub fn new(max_seqs: usize, journal: bool) -> Result<Delivery> {
        let digests = journal.then(|| OutputDigests::new(max_seqs)).transpose()?;
        let mut delivery = Delivery { digests, ..Delivery::default() };
        delivery.undeliverable.try_reserve(max_seqs)?;
        delivery.unannounced.try_reserve(max_seqs)?;
        Ok(delivery)
    }

    pub fn begin_step(&mut self) {
        self.has_delivered = false;
        self.digests.iter_mut().for_each(OutputDigests::begin_step);
    }

    /// Returns whether the step has delivered an output.
    pub fn has_delivered(&self) -> bool {
        self.has_delivered
    }

    /// Returns the digests of the outputs of the step. `None` without a journal.
    pub fn digests(&self) -> Option<&OutputDigests> {
        self.digests.as_ref()
    }

    /// Forgets a sequence that has no further outputs.
    pub fn forget(&mut self, seq: SeqId) {
        self.digests.iter_mut().for_each(|digests| digests.forget(seq));
    }

    /// Returns an empty output, with the buffers of an earlier one.
    pub fn empty_output(&mut self) -> Output {
        take(&mut self.reusable)
    }

    /// Keeps the buffers of an output for `empty_output`.
    pub fn reuse(&mut self, output: Output) {
        self.reusable = output.cleared();
    }

    /// Queues an output. If the system has no memory, it is deferred, or its request ends.
    pub fn push(&mut self, sender: &Arc<OutputSender>, mut output: Output) {
        self.digests.iter_mut().for_each(|digests| digests.add(&output));
        match sender.push(&mut output) {
            Ok(first) => self.queued(sender, first, output),
            // The output answers a completed command and can be delivered later.
            Err(_) if output.error.is_some() || !output.sequence_state.is_empty() => self.deferred.push((sender.clone(), output)),
            Err(error) => self.undeliverable.push((output.request, error)),
        }
    }

    /// Queues the last output of a sequence, for which its queue has reserved memory.
    pub fn push_last(&mut self, sender: &Arc<OutputSender>, mut output: Output) {
        self.digests.iter_mut().for_each(|digests| digests.add(&output));
        let first = sender.push_last(&mut output);
        self.queued(sender, first, output);
    }

    fn queued(&mut self, sender: &Arc<OutputSender>, first: bool, output: Output) {
        self.has_delivered = true;
        if first {
            self.unannounced.push(sender.clone());
        }
        self.reuse(output);
    }

    /// Returns the next request whose outputs could not be queued.
    pub fn next_undeliverable(&mut self) -> Option<(RequestId, Error)> {
        self.undeliverable.pop()
    }

    /// Ends the step: retries deferred outputs, and notifies the readers of changed queues.
    pub fn finish_step(&mut self) {
        let Delivery { deferred, unannounced, .. } = self;
        deferred.retain_mut(|(sender, output)| match sender.push(output) {
            Ok(first) => {
                if first {
                    unannounced.push(sender.clone());
                }
                false
            }
            Err(_) => true,
        });
        unannounced.drain(..).for_each(|sender| sender.notify());
    }
}
