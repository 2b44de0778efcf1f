//! Which process something belongs to: threads and locks do not survive a fork.

use crate::error::{Error, Result};

/// The process that made it.
#[derive(Debug, Clone, Copy)]
pub struct Owner(u32);

impl Owner {
    pub fn this_process() -> Owner {
        Owner(std::process::id())
    }

    /// An error in a forked child, before any lock is touched that the parent may have held.
    pub fn check(self) -> Result<()> {
        let this = std::process::id();
        if this == self.0 {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "the engine belongs to process {} and this is process {this}, forked from it: create an engine after the fork",
            self.0
        )))
    }
}
