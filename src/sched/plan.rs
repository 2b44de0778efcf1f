use std::ops::Range;

use super::sequence::{Past, SeqId, Sequence};
use super::slab::Slot;
use crate::batch::{Batch, Span};
use crate::kv::{BlockId, BlockManager, GONE, Paging};

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
    /// The time that the host gave it has passed.
    Deadline,
}

impl FinishReason {
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

/// One iteration as data. Consumed once, by `commit` or by `rollback`.
#[must_use]
#[derive(Debug, Default)]
pub struct StepPlan {
    pub batch: Batch,
    pub parts: Vec<Part>,
    /// Some of the parts are beams: those that no choice goes on with are dropped.
    pub has_beams: bool,
    /// Whoever waited was not asked to join.
    pub(super) is_closed: bool,
}

/// One sequence's share of a plan.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    pub seq: SeqId,
    pub(super) slot: Slot,
    /// Position of its first row's token.
    pub first: usize,
    pub rows: usize,
    /// Of them, counted from the end: those whose logits come back.
    pub logits: usize,
    /// Its last row reads the newest token, so that its logits choose the next one.
    pub samples: bool,
    /// Tokens generated so far.
    pub generated: usize,
    /// It has waited for this step since it was added, forked or resumed.
    pub begins: bool,
}

impl Part {
    /// One row, of a sequence that has begun to choose tokens.
    pub fn decodes(&self) -> bool {
        self.rows == 1 && self.generated > 0
    }
}

impl StepPlan {
    pub fn clear(&mut self) {
        self.batch.clear();
        self.parts.clear();
        (self.has_beams, self.is_closed) = (false, false);
    }

    /// Appends the tokens of `sequence`, which lies in `slot`, at `positions`; `samples`: the logits of the last one choose the next
    /// token.
    pub(super) fn push(&mut self, slot: Slot, sequence: &Sequence, positions: Range<usize>, samples: bool, blocks: &BlockManager) {
        let batch = &mut self.batch;
        let (first_row, rows) = (batch.rows() as u32, positions.len());
        batch.spans.push(Span { first_row, rows: rows as u32, table: batch.tables.len() as u32 });
        push_table(&mut batch.tables, sequence.table.blocks(), blocks.paging());
        for (position, &token) in positions.clone().zip(&sequence.tokens[positions.clone()]) {
            batch.tokens.push(token);
            batch.positions.push(position as u32);
            batch.slots.extend(blocks.slots(&sequence.table, position));
        }
        let logits = match sequence.logits_from {
            Some(from) => positions.end.saturating_sub(from.max(positions.start)).max(samples as usize),
            None => samples as usize,
        };
        let end = batch.tokens.len();
        (end - logits..end).for_each(|row| batch.logit_rows.push(row as u32));
        self.parts.push(Part {
            seq: sequence.id,
            slot,
            first: positions.start,
            rows,
            logits,
            samples,
            generated: sequence.generated,
            begins: !sequence.begun,
        });
    }

    /// The parts that choose a token.
    pub fn sampled(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(|part| part.samples)
    }
}

/// In place of what is gone stands the newest of the group, which no table has twice otherwise.
pub(super) fn push_table(tables: &mut Vec<u32>, table: &[BlockId], paging: &Paging) {
    if !paging.slides() {
        return tables.extend_from_slice(table);
    }
    let newest = table[table.len() - paging.groups()..].iter().cycle();
    tables.extend(table.iter().zip(newest).map(|(&block, &newest)| if block == GONE { newest } else { block }));
}

/// What was decided for one row of logits. Two with the same parent make it fork.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Whose logits chose.
    pub parent: SeqId,
    /// Who goes on with the token: the parent itself, or a new sequence that shares all its tokens so far.
    pub child: SeqId,
    pub verdict: Verdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Token(u32),
    /// This token ends the sequence.
    Stop(u32),
    /// No token could be chosen.
    Fail,
}

/// What a commit did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The child of choice `choice` shares its parent's blocks.
    Forked { choice: usize },
    /// A beam that does not go on as itself is gone. Where a fork has its id, that is another one.
    Dropped { seq: SeqId },
    /// Choice `choice` was applied, and may have ended its sequence, of which this was the past.
    Advanced { choice: usize, finish: Option<FinishReason>, past: Past },
    /// Choice `choice` wanted a fork for which the machine had no memory.
    Failed { choice: usize },
}
