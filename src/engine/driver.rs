//! The stepping thread of the library: it steps while there is work and sleeps otherwise.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::core::EngineCore;
use crate::error::{Error, Result};
use crate::output::wakeup::Wakeup;
use crate::sys::threads;

/// Delay after a failed step.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// The stepping thread. Its drop joins the thread after the current step.
pub struct Driver {
    stop: Arc<AtomicBool>,
    wakeup: Arc<Wakeup>,
    thread: Option<JoinHandle<()>>,
}

impl Driver {
    /// Starts the thread, pinned to `cpu` if one is given.
    pub fn start(core: Arc<Mutex<EngineCore>>, wakeup: Arc<Wakeup>, cpu: Option<usize>) -> Result<Driver> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, calls) = (stop.clone(), wakeup.clone());
        let thread = threads::spawn("pagedllm-driver".into(), move || {
            // The lock is held for the lifetime of the thread, so that steps of the host return
            // `Busy`.
            let mut core = core.lock().unwrap_or_else(PoisonError::into_inner);
            // A step catches its own panics. This catches panics between steps.
            if catch_unwind(AssertUnwindSafe(|| step_loop(&mut core, &calls, &stopped))).is_err() {
                core.fail_without_core();
            }
            if core.has_failed() {
                core.answer_caller();
            }
        });
        let thread = thread.map_err(|e| Error::capacity(format!("the system starts no thread for the engine: {e}")))?;
        let driver = Driver { stop, wakeup, thread: Some(thread) };
        // If the pinning fails, the drop of `driver` ends the thread.
        driver.thread.iter().zip(cpu).try_for_each(|(thread, cpu)| threads::pin(thread, cpu))?;
        Ok(driver)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.wakeup.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // panics of steps are caught and reported
        }
    }
}

fn step_loop(core: &mut EngineCore, wakeup: &Wakeup, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        match core.step() {
            Ok(report) if report.sequences == 0 => wakeup.wait(core.max_sleep()),
            Ok(_) => {}
            // all requests have ended and all queues report the error
            Err(_) if core.has_failed() => return,
            Err(_) => {
                let again = Instant::now() + RETRY_AFTER;
                while Instant::now() < again && !stop.load(Ordering::Acquire) {
                    wakeup.wait(Some(RETRY_AFTER));
                }
            }
        }
    }
}
