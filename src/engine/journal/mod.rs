//! The journal: all inputs of an engine, from which its steps can be repeated bit for bit. It has
//! no output tokens, only digests that show whether they are the same.
//!
//! The inputs of a step are its commands, its time, the full queues, the size of the pool, and the
//! failures of the device: of plans, of transfers between the tiers, of exports and imports.
//! `recording` has the decorators that record them, `replay` those that repeat them.

mod digests;
mod reader;
mod recording;
mod records;
mod replay;
mod replayed;
mod step_recorder;
mod writer;

pub(super) use digests::OutputDigests;
pub use reader::{Ending, JournalFile};
pub(super) use recording::Recording;
pub use records::{Header, RecordedRequest};
pub use replay::{Difference, Replay, Summary};
pub(super) use writer::JournalWriter;
