//! Transfers of blocks: exports, imports, and the moves to the host tier and back.

mod exports;
mod imports;
#[cfg(test)]
mod tests;
mod tier_moves;
mod worker;

pub use exports::{Export, Exports};
pub use imports::{Import, Imports};
pub use tier_moves::{MovedBlocks, TierMoves};
pub use worker::Completions;

use crate::kv::connector::{Connector, Progress};

/// The pending exports and imports.
pub struct Transfers {
    pub exports: Exports,
    pub imports: Imports,
}

impl Transfers {
    /// Creates the state for steps that copy at most `max_bytes` bytes in each direction.
    pub fn new(completions: Completions, max_bytes: usize) -> Transfers {
        Transfers { exports: Exports::new(completions, max_bytes), imports: Imports::new(max_bytes) }
    }

    /// Begins a step, which may copy again.
    pub fn begin_step(&mut self) {
        self.exports.begin_step();
        self.imports.begin_step();
    }

    /// Returns the number of transfers without a result.
    pub fn pending(&self) -> usize {
        self.exports.pending() + self.imports.pending()
    }

    pub fn progress(&self) -> Progress {
        self.exports.progress().max(self.imports.progress())
    }

    pub fn cancel_all(&mut self) {
        self.exports.cancel_all();
        self.imports.cancel_all();
    }
}
