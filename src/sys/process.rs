//! The process that owns an engine. Threads and locks do not survive a fork.

use crate::error::{Error, Result};

/// The id of the process that created an object.
#[derive(Debug, Clone, Copy)]
pub struct Owner(u32);

impl Owner {
    pub fn this_process() -> Owner {
        Owner(std::process::id())
    }

    /// Fails in a forked child. Call it before any lock that the parent may have held during the
    /// fork.
    pub fn check(self) -> Result<()> {
        let this = std::process::id();
        if this == self.0 {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "the engine belongs to process {}, of which this process ({this}) is a fork; create an engine after the fork",
            self.0
        )))
    }
}
