use std::ops::Range;

use super::sequence_kv::SequenceKv;
use super::slab::Slot;
use crate::kv::{BlockId, BlockManager, NULL_BLOCK, Paging};
use crate::types::SeqId;
use crate::types::batch::{Batch, Placeholder, Span};

/// The plan of one step as data. `commit` or `rollback` consumes it.
#[must_use]
#[derive(Debug, Default)]
pub struct StepPlan {
    pub batch: Batch,
    pub sequences: Vec<ScheduledSequence>,
    /// Whether some scheduled sequences are beams. Beams that no sampled token continues are
    /// dropped.
    pub has_beams: bool,
}

/// One scheduled sequence of a plan.
#[derive(Debug, Clone, Copy)]
pub struct ScheduledSequence {
    pub seq: SeqId,
    pub(super) slot: Slot,
    /// Position of its first token in the step.
    pub first: usize,
    pub tokens: usize,
    /// Number of tokens whose logits are computed, counted from the end.
    pub logits: usize,
    /// Whether the last row is the newest token, so that its logits select the next one.
    pub samples: bool,
    /// Number of tokens generated so far.
    pub generated: usize,
    /// Whether this is its first step since it was added, forked or resumed.
    pub begins: bool,
    /// Index of the device sample of its token. `None` if the host samples it, or before sampling
    /// is planned.
    pub device_sample: Option<u32>,
    /// Whether it has ended or changed since the step was launched, so that its results are
    /// ignored.
    pub is_stale: bool,
    /// Value of `InFlight::version` at the launch.
    pub(super) version: u32,
}

impl ScheduledSequence {
    /// Returns whether the scheduled sequence is a decode: one row of a sequence that has generated
    /// tokens.
    pub fn decodes(&self) -> bool {
        self.tokens == 1 && self.generated > 0
    }
}

impl StepPlan {
    pub fn clear(&mut self) {
        self.batch.clear();
        self.sequences.clear();
        self.has_beams = false;
    }

    /// Appends the tokens of `sequence`, which is in `slot`, at `positions`. If `samples` is set,
    /// the logits of the last one select the next token.
    pub(super) fn push(&mut self, slot: Slot, sequence: &SequenceKv, positions: Range<usize>, samples: bool, blocks: &BlockManager) {
        let batch = &mut self.batch;
        let (first_token, tokens) = (batch.token_count() as u32, positions.len());
        batch.spans.push(Span { first_token, tokens: tokens as u32, table: batch.tables.len() as u32 });
        push_table(&mut batch.tables, sequence.table.blocks(), blocks.paging());
        for position in positions.clone() {
            let token = sequence.tokens.get(position).copied();
            if token.is_none() {
                let sample = sequence.in_flight.device_sample.expect("only known tokens and device samples are planned");
                batch.placeholders.push(Placeholder { token: batch.tokens.len() as u32, sample });
            }
            batch.tokens.push(token.unwrap_or(0));
            batch.positions.push(position as u32);
            batch.slots.extend(blocks.slots(&sequence.table, position));
        }
        let logits = match sequence.logits_from {
            Some(from) => positions.end.saturating_sub(from.max(positions.start)).max(samples as usize),
            None => samples as usize,
        };
        let end = batch.tokens.len();
        (end - logits..end).for_each(|row| batch.logit_rows.push(row as u32));
        self.sequences.push(ScheduledSequence {
            seq: sequence.id,
            slot,
            first: positions.start,
            tokens,
            logits,
            samples,
            generated: sequence.generated + sequence.in_flight.sampled,
            begins: !sequence.started,
            device_sample: None,
            is_stale: false,
            version: 0,
        });
    }

    /// Returns the scheduled sequences that sample a token.
    pub fn sampled(&self) -> impl Iterator<Item = &ScheduledSequence> {
        self.sequences.iter().filter(|scheduled| scheduled.samples && !scheduled.is_stale)
    }
}

/// Appends a block table. Null entries are replaced with the newest block of their group, which
/// occurs only once otherwise.
pub(super) fn push_table(tables: &mut Vec<u32>, table: &[BlockId], paging: &Paging) {
    if !paging.has_windows() {
        return tables.extend_from_slice(table);
    }
    let newest = table[table.len() - paging.groups()..].iter().cycle();
    tables.extend(table.iter().zip(newest).map(|(&block, &newest)| if block == NULL_BLOCK { newest } else { block }));
}
