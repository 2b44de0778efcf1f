//! The step that comes next, begun before it is asked for: while the host decides what becomes of the tokens that were drawn, and writes the next
//! plan down, the device goes on with them. Where the plan is what was foreseen, or that without some of its rows, it has been computed already;
//! where not, it is computed as any other. What was computed in vain lies behind the ends of sequences, where nobody looks.

use std::ops::Range;

use super::device::{Address, Device, Shape, launch};
use super::graphs::decodes;
use super::inputs::{Inputs, rounded_up};
use crate::backend::BatchSize;
use crate::batch::draws::{Drawn, Outcome};
use crate::batch::{Batch, NOWHERE};
use crate::error::Result;

/// Of the one block of threads that makes the next inputs.
const THREADS: u32 = 256;

#[derive(Default)]
pub struct Ahead {
    /// The batch that was computed last, if it foresaw what follows; then, that.
    batch: Batch,
    next: Next,
    /// Rows of the device's step in which those of the batch are. Empty: in these, one by one.
    rows: Vec<u32>,
}

/// What can be said of what follows.
#[derive(Debug, Clone, Copy, Default)]
enum Next {
    #[default]
    Unknown,
    Foreseen(Places),
    UnderWay,
}

/// Where the inputs of a step lie on the device, and how many rows it is made.
#[derive(Debug, Clone, Copy)]
pub struct Places {
    rows: usize,
    tokens: Address,
    positions: Address,
    slots: Address,
    next_slots: Address,
    longest: Address,
}

impl Ahead {
    /// Makes room for the largest batch of which anything can be foreseen.
    pub fn reserve(&mut self, most: &BatchSize) -> Result<()> {
        self.batch.reserve(most.logits, most.sequences, most.places, most.groups)?;
        Ok(self.rows.try_reserve(most.logits)?)
    }

    /// A batch has come. True: it has been computed, or soon will be.
    pub fn has(&mut self, batch: &Batch) -> bool {
        self.rows.clear();
        let next = std::mem::take(&mut self.next);
        let found = matches!(next, Next::UnderWay) && self.find_rows(batch);
        if !found {
            self.rows.clear();
        }
        found
    }

    /// What is under way is no use. True: something was.
    pub fn forget(&mut self) -> bool {
        matches!(std::mem::take(&mut self.next), Next::UnderWay)
    }

    /// The batch is the last one from now on, of which `inputs` has been made, for a step of so many rows that is kept.
    pub fn look_at(&mut self, batch: &Batch, inputs: &Inputs, kept: Option<usize>) -> Result<()> {
        let Some(rows) = kept.filter(|_| !batch.next_slots.is_empty()) else { return Ok(()) };
        self.batch.copy_from(batch)?;
        self.next = Next::Foreseen(Places {
            rows,
            tokens: inputs.address(inputs.tokens),
            positions: inputs.address(inputs.positions),
            slots: inputs.address(inputs.slots),
            next_slots: inputs.address(inputs.next_slots),
            longest: inputs.address(inputs.longest),
        });
        Ok(())
    }

    /// In which row of the device's step the batch's row is.
    pub fn row(&self, row: usize) -> usize {
        self.rows.get(row).map_or(row, |&row| row as usize)
    }

    /// The same of a run of rows: runs of them, and where each begins.
    pub fn runs(&self, run: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let (whole, single) = if self.rows.is_empty() { (Some((run.clone(), run.start)), 0..0) } else { (None, run) };
        whole.into_iter().chain(single.map(|row| (row..row + 1, self.row(row))))
    }

    /// Queues what makes the next step's inputs, if `draws` are those of all rows, and says how many rows it is made.
    pub fn go_on(&self, device: &Device, draws: usize, drawn: Address) -> Option<usize> {
        let Next::Foreseen(Places { rows: kept, tokens, positions, slots, next_slots, longest }) = self.next else { return None };
        if draws != self.batch.rows() {
            return None;
        }
        let (rows, groups) = (draws as u32, self.batch.groups() as u32);
        let stay = self.batch.next_slots.chunks_exact(groups as usize).zip(&self.batch.positions).filter(|(slots, _)| slots[0] != NOWHERE);
        let most = rounded_up(stay.map(|(_, position)| position + 2));
        let shape = Shape::new((1, 1, 1), THREADS);
        launch!(device, device.kernels.go_on, shape, tokens, positions, slots, longest, next_slots, drawn, rows, groups, most);
        Some(kept)
    }

    /// The next step is under way, with these tokens.
    pub fn went_on(&mut self, drawn: &[Drawn]) {
        let Batch { tokens, positions, slots, next_slots, .. } = &mut self.batch;
        for ((token, position), drawn) in tokens.iter_mut().zip(positions).zip(drawn) {
            *token = if drawn.outcome == Outcome::TOKEN { drawn.token } else { 0 };
            *position += 1;
        }
        std::mem::swap(slots, next_slots);
        self.next = Next::UnderWay;
    }

    pub fn is_under_way(&self) -> bool {
        matches!(self.next, Next::UnderWay)
    }

    /// Finds each row of the batch in what is under way, in their order.
    fn find_rows(&mut self, batch: &Batch) -> bool {
        let Ahead { batch: ours, rows, .. } = self;
        if !decodes(batch) || batch.groups() != ours.groups() || rows.try_reserve(batch.rows()).is_err() {
            return false;
        }
        let mut candidates = 0..ours.rows();
        (0..batch.rows()).all(|row| {
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

/// Whether what the first table has the second has too, but for what is gone: there stands the newest. Of the newest itself, where K and V of the row go,
/// slots tell.
fn continues(before: &[u32], now: &[u32], groups: usize) -> bool {
    let Some(newest) = now.len().checked_sub(groups.max(1)).map(|first| &now[first..]) else { return before.is_empty() };
    let is_same = |((i, before), now): ((usize, &u32), &u32)| before == now || *now == newest[i % groups];
    before.len() <= now.len() && before.iter().enumerate().zip(now).all(is_same)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Span;
    use crate::batch::draws::MOST_TOPS;

    /// Rows of sequences with blocks of 4, at these positions; the blocks of the first are 10, 11, ..., of the second 20, ...
    fn batch(positions: &[(u32, u32)]) -> Batch {
        let mut batch = Batch::default();
        for (row, &(sequence, position)) in positions.iter().enumerate() {
            let block = |place: u32| 10 * sequence + place;
            batch.spans.push(Span { first_row: row as u32, rows: 1, table: batch.tables.len() as u32 });
            batch.tokens.push(100 * sequence + position);
            batch.positions.push(position);
            batch.slots.push(block(position / 4) * 4 + position % 4);
            batch.next_slots.push(block((position + 1) / 4) * 4 + (position + 1) % 4);
            batch.tables.extend((0..=(position + 1) / 4).map(block));
            batch.logit_rows.push(row as u32);
        }
        batch
    }

    fn drawn(token: u32) -> Drawn {
        Drawn { outcome: Outcome::TOKEN, token, logit: 0.0, greatest: 0.0, powers: 0, tops: [Default::default(); MOST_TOPS] }
    }

    /// What is under way once sequences 1, 2 and 3 are at 3, 7 and 5, and each drew what its next token is in `batch`.
    fn ahead() -> Ahead {
        let mut ahead = Ahead { batch: batch(&[(1, 3), (2, 7), (3, 5)]), ..Ahead::default() };
        ahead.went_on(&[drawn(104), drawn(208), drawn(306)]);
        ahead
    }

    #[test]
    fn what_was_foreseen_is_there_also_without_some_of_its_rows() {
        for (rows, found) in [(&[(1, 4), (2, 8), (3, 6)][..], &[0, 1, 2][..]), (&[(1, 4), (3, 6)], &[0, 2]), (&[(3, 6)], &[2])] {
            let mut ahead = ahead();
            assert!(ahead.is_under_way() && ahead.has(&batch(rows)), "{rows:?}");
            assert_eq!((0..rows.len()).map(|row| ahead.row(row)).collect::<Vec<_>>(), found);
            assert!(!ahead.is_under_way() && !ahead.has(&batch(rows)), "it is there once");
            assert_eq!(ahead.row(0), 0, "what is computed now is in the rows it says");
        }
    }

    #[test]
    fn whatever_differs_is_computed() {
        let differs = |change: fn(&mut Batch)| {
            let mut batch = batch(&[(1, 4), (2, 8), (3, 6)]);
            change(&mut batch);
            !ahead().has(&batch)
        };
        assert!(!differs(|_| {}));
        assert!(differs(|batch| batch.tokens[1] += 1));
        assert!(differs(|batch| batch.positions[2] += 1));
        assert!(differs(|batch| batch.slots[0] += 1));
        assert!(differs(|batch| batch.tables[0] += 70), "a block was copied, or moved");
        assert!(differs(|batch| batch.tables.truncate(batch.tables.len() - 1)), "a table became shorter");
        assert!(differs(|batch| batch.copies.push(crate::batch::BlockCopy { from: 0, to: 1 })));
        assert!(differs(|batch| batch.logit_rows.truncate(2)));
        assert!(differs(|batch| batch.spans[2].rows = 2));
        assert!(!ahead().has(&batch(&[(2, 8), (1, 4)])), "in another order");
        assert!(!ahead().has(&batch(&[(1, 4), (2, 8), (3, 6), (4, 0)])), "one has joined");
    }

    #[test]
    fn blocks_that_are_gone_are_not_missed_and_new_ones_are_behind() {
        assert!(continues(&[10, 11, 12], &[10, 11, 12, 13], 1));
        assert!(continues(&[10, 11, 12], &[13, 13, 12, 13], 1), "the first two are gone");
        assert!(!continues(&[10, 11, 12], &[12, 11, 12, 13], 1), "only the newest stands for what is gone");
        assert!(
            continues(&[1, 2, 3, 4], &[1, 6, 3, 4, 5, 6], 2) && !continues(&[1, 2, 3, 4], &[1, 5, 3, 4, 5, 6], 2),
            "each group has its own"
        );
        assert!(!continues(&[10, 11], &[10], 1));
    }
}
