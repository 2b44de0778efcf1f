//! Tests that measure the whole process, and therefore have a process of their own: its memory, its threads and their time.

#[path = "../support/mod.rs"]
mod support;

mod budget;
mod threads;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The tests of this binary run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
