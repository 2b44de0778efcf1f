//! The library's own stepping thread: it steps while there is work, and sleeps while there is none.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::core::Core;
use crate::error::{Error, Result};
use crate::sys::threads;

/// Between a step that failed and the next.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// Wakes the sleeping driver. A call before it sleeps is not lost.
#[derive(Default)]
pub struct Wakeup {
    called: Mutex<bool>,
    changed: Condvar,
    /// How often a reader has made room in a queue that was full.
    rooms: AtomicU64,
}

impl Wakeup {
    /// A queue is not full any more: whoever asks after this is told.
    pub fn made_room(&self) {
        self.rooms.fetch_add(1, Ordering::Release);
        self.wake();
    }

    pub fn rooms(&self) -> u64 {
        self.rooms.load(Ordering::Acquire)
    }

    pub fn wake(&self) {
        *self.called.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }

    fn wait(&self, timeout: Option<Duration>) {
        let called = self.called.lock().unwrap_or_else(PoisonError::into_inner);
        let not_yet = |called: &mut bool| !*called;
        let mut called = match timeout {
            Some(timeout) => self.changed.wait_timeout_while(called, timeout, not_yet).unwrap_or_else(PoisonError::into_inner).0,
            None => self.changed.wait_while(called, not_yet).unwrap_or_else(PoisonError::into_inner),
        };
        *called = false;
    }
}

/// Dropping it ends its thread, after the step under way.
pub struct Driver {
    stop: Arc<AtomicBool>,
    wakeup: Arc<Wakeup>,
    thread: Option<JoinHandle<()>>,
}

impl Driver {
    /// On this CPU, if one is named.
    pub fn start(core: Arc<Mutex<Core>>, wakeup: Arc<Wakeup>, cpu: Option<usize>) -> Result<Driver> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, calls) = (stop.clone(), wakeup.clone());
        let thread = threads::spawn("pagedllm-driver".into(), move || {
            // Held for good: who steps beside it is told that the engine is busy.
            let mut core = core.lock().unwrap_or_else(PoisonError::into_inner);
            // A step catches its own panics; this is for what lies between them.
            if catch_unwind(AssertUnwindSafe(|| drive(&mut core, &calls, &stopped))).is_err() {
                core.fail_hard();
            }
            if core.has_failed() {
                core.answer_call();
            }
        });
        let thread = thread.map_err(|e| Error::capacity(format!("could not start the engine's thread: {e}")))?;
        let driver = Driver { stop, wakeup, thread: Some(thread) };
        // Where that fails the driver is dropped, which ends its thread.
        driver.thread.iter().zip(cpu).try_for_each(|(thread, cpu)| threads::pin(thread, cpu))?;
        Ok(driver)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.wakeup.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a step's panic has been caught and told
        }
    }
}

fn drive(core: &mut Core, wakeup: &Wakeup, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        match core.step() {
            Ok(report) if report.sequences == 0 => wakeup.wait(core.rest_at_most()),
            Ok(_) => {}
            Err(_) if core.has_failed() => return, // every request has ended and every queue says why
            Err(_) => {
                let again = Instant::now() + RETRY_AFTER;
                while Instant::now() < again && !stop.load(Ordering::Acquire) {
                    wakeup.wait(Some(RETRY_AFTER));
                }
            }
        }
    }
}
