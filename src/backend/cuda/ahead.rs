//! Lookahead execution of the next decode step. While the host processes the sampled tokens and
//! plans the next step, the device already computes it with these tokens.
//!
//! If the next batch is the predicted one, or the predicted one without some of its rows, it is
//! already computed. Otherwise, it is computed like any other batch. Superfluous results are stored
//! beyond the ends of sequences, where they are not read.

use std::ops::Range;

use super::device::Device;
use super::function::{Shape, launch};
use super::graphs::decodes;
use super::inputs::{Inputs, rounded_up};
use super::memory::Address;
use crate::backend::BatchSize;
use crate::batch::device_sampling::{DeviceSample, SampleStatus};
use crate::batch::{Batch, NO_SLOT};
use crate::error::Result;

/// Threads of the single block that prepares the next inputs.
const THREADS: u32 = 256;

#[derive(Default)]
pub struct NextStep {
    /// The last batch, if it predicts its successor. Once the successor is in flight: the
    /// successor.
    batch: Batch,
    next: Next,
    /// For each row of the batch, its row in the step in flight. Empty: the rows are identical.
    rows: Vec<u32>,
}

/// The state of the prediction.
#[derive(Debug, Clone, Copy, Default)]
enum Next {
    #[default]
    Unknown,
    Foreseen(Places),
    UnderWay,
}

/// The addresses of a step's inputs on the device, and its padded number of rows.
#[derive(Debug, Clone, Copy)]
pub struct Places {
    rows: usize,
    tokens: Address,
    positions: Address,
    slots: Address,
    next_slots: Address,
    max_len: Address,
}

impl NextStep {
    /// Reserves memory for the largest batch with a prediction.
    pub fn reserve(&mut self, max: &BatchSize) -> Result<()> {
        self.batch.reserve(max.logits, max.sequences, max.table_entries, max.groups)?;
        Ok(self.rows.try_reserve(max.logits)?)
    }

    /// Returns true if the batch is the step in flight, or a subset of its rows. Call it once per
    /// batch.
    pub fn has(&mut self, batch: &Batch) -> bool {
        self.rows.clear();
        let next = std::mem::take(&mut self.next);
        let found = matches!(next, Next::UnderWay) && self.find_rows(batch);
        if !found {
            self.rows.clear();
        }
        found
    }

    /// Discards the prediction. Returns true if a step was in flight.
    pub fn forget(&mut self) -> bool {
        matches!(std::mem::take(&mut self.next), Next::UnderWay)
    }

    /// Makes `batch` the base of the next prediction. `inputs` are its inputs, and `kept` is the
    /// padded number of rows of its captured graph.
    pub fn look_at(&mut self, batch: &Batch, inputs: &Inputs, kept: Option<usize>) -> Result<()> {
        let Some(rows) = kept.filter(|_| !batch.next_slots.is_empty()) else { return Ok(()) };
        self.batch.copy_from(batch)?;
        self.next = Next::Foreseen(Places {
            rows,
            tokens: inputs.address(inputs.tokens),
            positions: inputs.address(inputs.positions),
            slots: inputs.address(inputs.slots),
            next_slots: inputs.address(inputs.next_slots),
            max_len: inputs.address(inputs.max_decode_len),
        });
        Ok(())
    }

    /// Returns the row of the device's step that holds a row of the batch.
    pub fn row(&self, row: usize) -> usize {
        self.rows.get(row).map_or(row, |&row| row as usize)
    }

    /// Returns the same for a range of rows, as ranges with their first rows in the device's step.
    pub fn runs(&self, run: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let (whole, single) = if self.rows.is_empty() { (Some((run.clone(), run.start)), 0..0) } else { (None, run) };
        whole.into_iter().chain(single.map(|row| (row..row + 1, self.row(row))))
    }

    /// Launches the preparation of the next step's inputs if `draws` covers all rows. Returns the
    /// padded number of rows of the next step.
    pub fn prepare_next(&self, device: &Device, draws: usize, drawn: Address) -> Option<usize> {
        let Next::Foreseen(Places { rows: kept, tokens, positions, slots, next_slots, max_len }) = self.next else { return None };
        if draws != self.batch.token_count() {
            return None;
        }
        let (rows, groups) = (draws as u32, self.batch.groups() as u32);
        let stay = self.batch.next_slots.chunks_exact(groups as usize).zip(&self.batch.positions).filter(|(slots, _)| slots[0] != NO_SLOT);
        let next_max_len = rounded_up(stay.map(|(_, position)| position + 2));
        let shape = Shape::new((1, 1, 1), THREADS);
        launch!(
            device,
            device.kernels.sampling.prepare_next,
            shape,
            tokens,
            positions,
            slots,
            max_len,
            next_slots,
            drawn,
            rows,
            groups,
            next_max_len
        );
        Some(kept)
    }

    /// Records that the next step is in flight with these tokens.
    pub fn mark_launched(&mut self, drawn: &[DeviceSample]) {
        let Batch { tokens, positions, slots, next_slots, .. } = &mut self.batch;
        for ((token, position), drawn) in tokens.iter_mut().zip(positions).zip(drawn) {
            *token = if drawn.outcome == SampleStatus::TOKEN { drawn.token } else { 0 };
            *position += 1;
        }
        std::mem::swap(slots, next_slots);
        self.next = Next::UnderWay;
    }

    pub fn is_under_way(&self) -> bool {
        matches!(self.next, Next::UnderWay)
    }

    /// Looks up each row of the batch in the step in flight, in order.
    fn find_rows(&mut self, batch: &Batch) -> bool {
        let NextStep { batch: ours, rows, .. } = self;
        if !decodes(batch) || batch.groups() != ours.groups() || rows.try_reserve(batch.token_count()).is_err() {
            return false;
        }
        let mut candidates = 0..ours.token_count();
        (0..batch.token_count()).all(|row| {
            let found = candidates.find(|&candidate| slots_of(ours, candidate) == slots_of(batch, row));
            rows.extend(found.map(|found| found as u32));
            found.is_some_and(|found| is_same(ours, found, batch, row))
        })
    }
}

fn slots_of(batch: &Batch, row: usize) -> &[u32] {
    let groups = batch.groups();
    &batch.slots[row * groups..][..groups]
}

fn is_same(ours: &Batch, found: usize, batch: &Batch, row: usize) -> bool {
    ours.tokens[found] == batch.tokens[row]
        && ours.positions[found] == batch.positions[row]
        && continues(table_of(ours, found), table_of(batch, row), batch.groups())
}

fn table_of(batch: &Batch, row: usize) -> &[u32] {
    let end = batch.spans.get(row + 1).map_or(batch.tables.len(), |next| next.table as usize);
    &batch.tables[batch.spans[row].table as usize..end]
}

/// Returns true if the table `now` extends `before`. Entries outside the window are replaced by the
/// newest block. The newest block itself, to which the row's K and V go, is compared by its slot.
fn continues(before: &[u32], now: &[u32], groups: usize) -> bool {
    let Some(newest) = now.len().checked_sub(groups.max(1)).map(|first| &now[first..]) else { return before.is_empty() };
    let is_same = |((i, before), now): ((usize, &u32), &u32)| before == now || *now == newest[i % groups];
    before.len() <= now.len() && before.iter().enumerate().zip(now).all(is_same)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Span;
    use crate::batch::device_sampling::MAX_TOPS;

    /// Creates rows of sequences with blocks of 4 tokens at these positions. The blocks of sequence
    /// 1 are 10, 11, ..., those of sequence 2 are 20, 21, ...
    fn batch(positions: &[(u32, u32)]) -> Batch {
        let mut batch = Batch::default();
        for (row, &(sequence, position)) in positions.iter().enumerate() {
            let block = |place: u32| 10 * sequence + place;
            batch.spans.push(Span { first_token: row as u32, tokens: 1, table: batch.tables.len() as u32 });
            batch.tokens.push(100 * sequence + position);
            batch.positions.push(position);
            batch.slots.push(block(position / 4) * 4 + position % 4);
            batch.next_slots.push(block((position + 1) / 4) * 4 + (position + 1) % 4);
            batch.tables.extend((0..=(position + 1) / 4).map(block));
            batch.logit_rows.push(row as u32);
        }
        batch
    }

    fn sample(token: u32) -> DeviceSample {
        DeviceSample { outcome: SampleStatus::TOKEN, token, logit: 0.0, greatest: 0.0, powers: 0, tops: [Default::default(); MAX_TOPS] }
    }

    /// Returns the state after sequences 1, 2 and 3 at positions 3, 7 and 5 have sampled the tokens
    /// that `batch` has next.
    fn ahead() -> NextStep {
        let mut ahead = NextStep { batch: batch(&[(1, 3), (2, 7), (3, 5)]), ..NextStep::default() };
        ahead.mark_launched(&[sample(104), sample(208), sample(306)]);
        ahead
    }

    #[test]
    fn a_precomputed_step_also_serves_a_subset_of_its_rows() {
        for (rows, found) in [(&[(1, 4), (2, 8), (3, 6)][..], &[0, 1, 2][..]), (&[(1, 4), (3, 6)], &[0, 2]), (&[(3, 6)], &[2])] {
            let mut ahead = ahead();
            assert!(ahead.is_under_way() && ahead.has(&batch(rows)), "{rows:?}");
            assert_eq!((0..rows.len()).map(|row| ahead.row(row)).collect::<Vec<_>>(), found);
            assert!(!ahead.is_under_way() && !ahead.has(&batch(rows)), "the result is used once");
            assert_eq!(ahead.row(0), 0, "a newly computed step keeps its row order");
        }
    }

    #[test]
    fn a_batch_that_differs_does_not_use_the_precomputed_step() {
        let differs = |change: fn(&mut Batch)| {
            let mut batch = batch(&[(1, 4), (2, 8), (3, 6)]);
            change(&mut batch);
            !ahead().has(&batch)
        };
        assert!(!differs(|_| {}));
        assert!(differs(|batch| batch.tokens[1] += 1));
        assert!(differs(|batch| batch.positions[2] += 1));
        assert!(differs(|batch| batch.slots[0] += 1));
        assert!(differs(|batch| batch.tables[0] += 70), "a block was copied or moved");
        assert!(differs(|batch| batch.tables.truncate(batch.tables.len() - 1)), "a table became shorter");
        assert!(differs(|batch| batch.copies.push(crate::batch::BlockCopy { from: 0, to: 1 })));
        assert!(differs(|batch| batch.logit_rows.truncate(2)));
        assert!(differs(|batch| batch.spans[2].tokens = 2));
        assert!(!ahead().has(&batch(&[(2, 8), (1, 4)])), "the rows have another order");
        assert!(!ahead().has(&batch(&[(1, 4), (2, 8), (3, 6), (4, 0)])), "a sequence was added");
    }

    #[test]
    fn a_table_continues_with_null_blocks_in_front_and_new_blocks_at_the_end() {
        assert!(continues(&[10, 11, 12], &[10, 11, 12, 13], 1));
        assert!(continues(&[10, 11, 12], &[13, 13, 12, 13], 1), "the first two blocks left the window");
        assert!(!continues(&[10, 11, 12], &[12, 11, 12, 13], 1), "only the newest block stands for released ones");
        assert!(
            continues(&[1, 2, 3, 4], &[1, 6, 3, 4, 5, 6], 2) && !continues(&[1, 2, 3, 4], &[1, 5, 3, 4, 5, 6], 2),
            "each layer group has its own newest block"
        );
        assert!(!continues(&[10, 11], &[10], 1));
    }
}
