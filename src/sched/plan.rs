use std::ops::Range;

use super::sequence::{SeqId, Sequence};
use crate::batch::{Batch, Span};

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token or a stop string.
    Stop,
    /// `max_tokens`, or the longest sequence the engine allows.
    Length,
    /// The host asked for it.
    Abort,
    /// Its computation failed; the output carries the message.
    Error,
}

/// One iteration as data. Consumed once, by `commit` or by `rollback`.
#[must_use]
#[derive(Debug, Default)]
pub struct StepPlan {
    pub batch: Batch,
    pub parts: Vec<Part>,
}

/// One sequence's share of a plan.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    pub seq: SeqId,
    pub rows: usize,
    /// Its last row reads the newest token, so that its logits choose the next one.
    pub samples: bool,
    /// Tokens generated so far.
    pub generated: usize,
}

impl StepPlan {
    pub fn clear(&mut self) {
        self.batch.clear();
        self.parts.clear();
    }

    /// Appends the tokens of `sequence` at `positions`.
    pub fn push(&mut self, sequence: &Sequence, positions: Range<usize>, slot: impl Fn(usize) -> u32) {
        let batch = &mut self.batch;
        let (first_row, rows) = (batch.rows() as u32, positions.len());
        batch.spans.push(Span { first_row, rows: rows as u32, table: batch.tables.len() as u32 });
        batch.tables.extend_from_slice(sequence.table.blocks());
        batch.tokens.extend_from_slice(&sequence.tokens[positions.clone()]);
        batch.positions.extend(positions.clone().map(|position| position as u32));
        batch.slots.extend(positions.clone().map(slot));
        let samples = positions.end == sequence.tokens.len();
        if samples {
            batch.logit_rows.push(batch.tokens.len() as u32 - 1);
        }
        let generated = sequence.tokens.len() - sequence.prompt_len;
        self.parts.push(Part { seq: sequence.id, rows, samples, generated });
    }

    /// The parts whose logits come back, in the order of the logits' rows.
    pub fn sampled(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(|part| part.samples)
    }
}

/// What was decided for one row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    pub seq: SeqId,
    pub verdict: Verdict,
    /// Log probability of the token under the model's own distribution, where the request asked for it.
    pub logprob: Option<f32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Token(u32),
    /// This token ends the sequence.
    Stop(u32),
    /// No token could be chosen.
    Fail,
}

/// What a commit did to one chosen sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    pub seq: SeqId,
    pub finish: Option<FinishReason>,
}
