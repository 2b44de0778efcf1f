//! Steps that are recorded once and then played. A decode step is hundreds of launches, each of which costs the host more than the device needs
//! for it where few sequences run; what was recorded is one.
//!
//! A step may be played where another had the same shape: then the same kernels read and write the same places. The first of a shape runs as it is, for
//! it makes what later ones find; the second is recorded.

use std::collections::HashMap;

use super::device::{Device, Graph};
use crate::batch::Batch;

/// Of more rows a step is long enough for its launches.
const MOST_ROWS: usize = 256;
/// Each takes some memory of the device.
const MOST_GRAPHS: usize = 512;

/// What steps have in common that are computed alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    rows: usize,
    groups: usize,
    /// By which attention is cut.
    longest: u32,
}

impl Key {
    /// None: a step like this one will hardly come again, or does what cannot be recorded.
    pub fn of(batch: &Batch, longest: u32) -> Option<Key> {
        let (rows, groups) = (batch.rows(), batch.groups());
        let decodes = batch.spans.iter().all(|span| span.rows == 1) && batch.logit_rows.len() == rows;
        (decodes && (1..=MOST_ROWS).contains(&rows) && batch.copies.is_empty()).then_some(Key { rows, groups, longest })
    }
}

#[derive(Default)]
pub struct Graphs {
    /// None: seen once.
    known: HashMap<Key, Option<Graph>>,
    now: Now,
}

/// What becomes of the ops of the step that is under way.
#[derive(Debug, Clone, Copy, Default)]
enum Now {
    #[default]
    Run,
    Recorded(Key),
    /// They are skipped: what was recorded stands for them.
    Played(Key),
}

impl Graphs {
    /// A step of this shape begins, after the last one was ended or abandoned.
    pub fn begin(&mut self, device: &Device, key: Key) {
        self.now = match self.known.get(&key) {
            Some(Some(_)) => {
                device.skip(true);
                Now::Played(key)
            }
            Some(None) if device.begin_recording() => Now::Recorded(key),
            None if self.known.len() < MOST_GRAPHS => {
                self.known.insert(key, None);
                Now::Run
            }
            _ => Now::Run,
        };
    }

    /// All its ops have been queued, or recorded, or skipped.
    pub fn end(&mut self, device: &Device) {
        match std::mem::take(&mut self.now) {
            Now::Run => {}
            Now::Recorded(key) => match device.end_recording() {
                Some(graph) => {
                    device.play(&graph);
                    self.known.insert(key, Some(graph));
                }
                // The step is told that it failed, and what comes of trying again is recorded another time.
                None => drop(self.known.remove(&key)),
            },
            Now::Played(key) => {
                device.skip(false);
                if let Some(Some(graph)) = self.known.get(&key) {
                    device.play(graph);
                }
            }
        }
    }

    /// Where a step ended before it was read, what was recorded of it is nothing.
    pub fn abandon(&mut self, device: &Device) {
        match std::mem::take(&mut self.now) {
            Now::Run => {}
            Now::Recorded(key) => {
                drop(device.end_recording());
                self.known.remove(&key);
            }
            Now::Played(_) => device.skip(false),
        }
    }

    /// What they read of a batch lies elsewhere from now on.
    pub fn forget(&mut self) {
        self.known.clear();
    }
}
