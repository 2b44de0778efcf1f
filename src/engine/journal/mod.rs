//! The journal of an engine: all inputs of its steps, from which they can be repeated bit for bit.
//! It has no output tokens, only digests that show whether they are the same.
//!
//! The inputs of a step are its commands, its time, the full queues, the size of the pool, late
//! masks, finished masks and transfers, and the failures of the device: of plans, of transfers
//! between the tiers, of exports and imports.
//! `recording` has the decorators that record them, `replay` repeats them, and
//! `observability::journal` has the format of the file.

mod recording;
mod replay;
mod replayed;
mod step_recorder;

pub(super) use recording::Recording;
pub use replay::{Difference, Replay, Summary};

use super::ModelInfo;
pub use crate::observability::journal::reader::{Ending, JournalFile};
use crate::observability::journal::records::Header;
use crate::types::options::EngineOptions;

/// Returns the header of the journal of an engine.
pub(super) fn header(options: &EngineOptions, info: &ModelInfo, layout: &str) -> Header {
    Header {
        library: env!("CARGO_PKG_VERSION").into(),
        options: options.clone(),
        model: info.fingerprint,
        isa: info.isa_name().into(),
        threads: info.threads,
        layout: layout.into(),
        blocks: info.memory.max_blocks,
        block_bytes: info.memory.block_bytes,
        block_size: info.memory.block_size,
        max_model_len: info.memory.max_model_len,
    }
}
