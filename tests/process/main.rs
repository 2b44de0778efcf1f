//! Tests that measure the memory, the threads and the CPU time of the whole process. They need a
//! process of their own.

#[path = "../support/mod.rs"]
mod support;

mod budget;
mod communicator;
mod threads;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The tests of this binary run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
