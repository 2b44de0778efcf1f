//! The group of rank 0. The loading shares it with the executor until the engine exists.

use std::sync::atomic::{AtomicBool, Ordering};

use super::group::Group;
use super::threads::WorkerThreads;
use crate::error::Result;

/// The group of rank 0, and the workers that are threads of its process.
pub struct Lead {
    pub group: Group,
    /// Whether the engine exists. Before, the other ranks wait for the result of its creation, and
    /// after it for commands.
    has_engine: AtomicBool,
    /// The threads end after `group` is dropped, so this field comes later.
    pub threads: WorkerThreads,
}

impl Lead {
    pub fn new(group: Group, threads: WorkerThreads) -> Lead {
        Lead { group, has_engine: AtomicBool::new(false), threads }
    }

    /// Ends the loading of all ranks with the engine, or with the error that all of them return.
    pub fn agree_on_engine<T>(&self, engine: Result<T>) -> Result<T> {
        let engine = self.group.agree(engine)?;
        self.has_engine.store(true, Ordering::Release);
        Ok(engine)
    }

    /// Returns whether the other ranks wait for commands.
    pub fn has_engine(&self) -> bool {
        self.has_engine.load(Ordering::Acquire)
    }
}
