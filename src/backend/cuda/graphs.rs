//! Decode steps that are recorded once and then played. One is hundreds of launches, each of which costs the host more than the device needs
//! for it where few sequences run; what was recorded is one.
//!
//! They are recorded when an engine is created, each for a number of rows. A step of fewer rows is made one of so many: then the same kernels read and
//! write the same places.

use std::collections::BTreeMap;

use super::device::{Device, Graph};
use crate::backend::BatchSize;
use crate::batch::Batch;

/// Of more rows a step is long enough for its launches.
const MOST_ROWS: usize = 256;

/// The numbers of rows, in this room. The more there are the less is computed in vain; each takes some memory of the device, and the time to record it.
fn kept_rows(most: &BatchSize) -> Vec<usize> {
    let most = most.rows.min(most.logits).min(MOST_ROWS);
    let few = (1..8).chain((8..64).step_by(8)).chain((64..128).step_by(16)).chain((128..MOST_ROWS).step_by(32));
    few.take_while(|&rows| rows < most).chain((most > 0).then_some(most)).collect()
}

/// Whether each sequence has one row, and all of these are wanted.
pub fn decodes(batch: &Batch) -> bool {
    batch.spans.iter().all(|span| span.rows == 1) && batch.logit_rows.len() == batch.rows() && batch.copies.is_empty()
}

#[derive(Default)]
pub struct Graphs {
    /// By their rows.
    kept: BTreeMap<usize, Graph>,
    /// Of so many rows the last one ran that is to be kept.
    ran: usize,
    now: Now,
}

/// What becomes of the ops of the step that is under way.
#[derive(Debug, Clone, Copy, Default)]
enum Now {
    #[default]
    Run,
    /// To be played later.
    Recorded(usize),
    /// They are skipped: what was recorded stands for them.
    Played(usize),
    /// They are skipped: what they would do is done already.
    Done,
}

impl Graphs {
    /// How many rows the step is that stands for a batch.
    pub fn rows_for(&self, batch: &Batch) -> Option<usize> {
        let (&rows, _) = self.kept.range(batch.rows()..).next()?;
        decodes(batch).then_some(rows)
    }

    pub fn has_rows_for(&self, rows: usize) -> bool {
        self.kept.range(rows..).next().is_some()
    }

    /// How many rows the next step is that is to be kept.
    pub fn next_rows(&self, most: &BatchSize) -> Option<usize> {
        kept_rows(most).into_iter().find(|rows| !self.kept.contains_key(rows))
    }

    /// The ops of a step of so many rows follow, to be recorded; `runs_first`: where they have run once.
    pub fn begin_recording(&mut self, device: &Device, rows: usize, runs_first: bool) {
        if runs_first && self.ran != rows {
            self.ran = rows;
        } else if device.begin_recording() {
            self.now = Now::Recorded(rows);
        }
    }

    /// The ops of a step follow for which one stands of so many rows, which is kept.
    pub fn begin(&mut self, device: &Device, rows: usize) {
        device.skip(true);
        self.now = Now::Played(rows);
    }

    /// Those of a step follow that has been computed.
    pub fn pass_over(&mut self, device: &Device) {
        device.skip(true);
        self.now = Now::Done;
    }

    /// All its ops have been queued, or recorded, or skipped.
    pub fn end(&mut self, device: &Device) {
        match std::mem::take(&mut self.now) {
            Now::Run => {}
            Now::Recorded(rows) => {
                if let Some(graph) = device.end_recording() {
                    self.kept.insert(rows, graph);
                }
            }
            Now::Played(rows) => {
                device.skip(false);
                self.play(device, rows);
            }
            Now::Done => device.skip(false),
        }
    }

    pub fn play(&self, device: &Device, rows: usize) {
        if let Some(graph) = self.kept.get(&rows) {
            device.play(graph);
        }
    }

    /// Where a step ended before it was read, what was recorded of it is nothing.
    pub fn abandon(&mut self, device: &Device) {
        match std::mem::take(&mut self.now) {
            Now::Run => {}
            Now::Recorded(_) => drop(device.end_recording()),
            Now::Played(_) | Now::Done => device.skip(false),
        }
    }

    /// What they read of a batch lies elsewhere from now on.
    pub fn forget(&mut self) {
        self.kept.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_rows_has_a_step_that_is_not_much_larger() {
        let kept = |rows, logits| kept_rows(&BatchSize { rows, sequences: logits, logits, places: 0, groups: 1 });
        assert_eq!(kept(4096, 5), [1, 2, 3, 4, 5]);
        assert_eq!(kept(20, 100), [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]);
        assert!(kept(8, 0).is_empty());
        for (rows, most) in (1..=500).map(|most| (kept(4096, most), most)) {
            assert!(rows.is_sorted() && rows.last() == Some(&most.min(MOST_ROWS)), "{rows:?}");
            assert!(rows.windows(2).all(|two| two[1] - two[0] <= (two[0] / 4).max(8)), "{rows:?}");
        }
    }
}
