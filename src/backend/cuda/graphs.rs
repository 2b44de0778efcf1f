//! CUDA graphs of decode steps, which are captured once and launched repeatedly. A step consists of
//! hundreds of launches. With few sequences, a launch costs the host more time than its kernel
//! costs the device; a graph is a single launch.
//!
//! Graphs are captured when an engine is created, for several numbers of rows. A step with fewer
//! rows is padded to one of these sizes, so that the same kernels access the same addresses.

use std::collections::BTreeMap;

use super::device::{Device, Graph};
use crate::backend::BatchSize;
use crate::types::batch::Batch;

/// Steps with more rows are long enough to hide their launches.
const MAX_ROWS: usize = 256;

/// Returns the numbers of rows to capture, within `max`. More sizes mean less padding, but each
/// takes device memory and time to capture.
fn kept_rows(max: &BatchSize) -> Vec<usize> {
    let max = max.tokens.min(max.logits).min(MAX_ROWS);
    let few = (1..8).chain((8..64).step_by(8)).chain((64..128).step_by(16)).chain((128..MAX_ROWS).step_by(32));
    few.take_while(|&rows| rows < max).chain((max > 0).then_some(max)).collect()
}

/// Returns true if each sequence has one row and all logits are wanted.
pub fn decodes(batch: &Batch) -> bool {
    batch.spans.iter().all(|span| span.tokens == 1) && batch.logit_rows.len() == batch.token_count() && batch.copies.is_empty()
}

#[derive(Default)]
pub struct CapturedGraphs {
    /// Graphs by number of rows.
    kept: BTreeMap<usize, Graph>,
    /// Number of rows of the last warm-up run before a capture.
    ran: usize,
    now: Now,
}

/// The handling of the current step's ops.
#[derive(Debug, Clone, Copy, Default)]
enum Now {
    #[default]
    Run,
    /// They are captured.
    Recorded(usize),
    /// They are skipped, and a captured graph is launched instead.
    Played(usize),
}

impl CapturedGraphs {
    /// Returns the padded number of rows of a graph for a batch.
    pub fn rows_for(&self, batch: &Batch) -> Option<usize> {
        let (&rows, _) = self.kept.range(batch.token_count()..).next()?;
        decodes(batch).then_some(rows)
    }

    /// Returns the next number of rows to capture.
    pub fn next_rows(&self, max: &BatchSize) -> Option<usize> {
        kept_rows(max).into_iter().find(|rows| !self.kept.contains_key(rows))
    }

    /// Starts the capture of a step with this many rows. If `runs_first` is set, the first call
    /// runs the ops instead, as a warm-up, and the second call captures them.
    pub fn begin_recording(&mut self, device: &Device, rows: usize, runs_first: bool) {
        if runs_first && self.ran != rows {
            self.ran = rows;
        } else if device.begin_recording() {
            self.now = Now::Recorded(rows);
        }
    }

    /// Starts a step that the graph of `rows` rows replaces.
    pub fn begin(&mut self, device: &Device, rows: usize) {
        device.skip(true);
        self.now = Now::Played(rows);
    }

    /// Ends the ops of a step.
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
        }
    }

    fn play(&self, device: &Device, rows: usize) {
        if let Some(graph) = self.kept.get(&rows) {
            device.play(graph);
        }
    }

    /// Discards an unfinished step, which ended before its results were read.
    pub fn abandon(&mut self, device: &Device) {
        match std::mem::take(&mut self.now) {
            Now::Run => {}
            Now::Recorded(_) => drop(device.end_recording()),
            Now::Played(_) => device.skip(false),
        }
    }

    /// Discards all graphs, because the addresses of the inputs have changed.
    pub fn clear(&mut self) {
        self.kept.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_rows_has_a_recorded_step_of_similar_size() {
        let kept = |rows, logits| kept_rows(&BatchSize { tokens: rows, sequences: logits, logits, table_entries: 0, groups: 1 });
        assert_eq!(kept(4096, 5), [1, 2, 3, 4, 5]);
        assert_eq!(kept(20, 100), [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]);
        assert!(kept(8, 0).is_empty());
        for (rows, logits) in (1..=500).map(|logits| (kept(4096, logits), logits)) {
            assert!(rows.is_sorted() && rows.last() == Some(&logits.min(MAX_ROWS)), "{rows:?}");
            assert!(rows.windows(2).all(|two| two[1] - two[0] <= (two[0] / 4).max(8)), "{rows:?}");
        }
    }
}
