//! The limit of waits for other workers.
//!
//! A device waits for the data of another worker without a limit, and the host waits for the
//! device. So a thread watches the waits of the host. If one takes too long, NCCL reports an error
//! or another worker has ended, the thread ends the exchanges, and the wait returns.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::connections::Connections;
use crate::backend::Workers;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::sys::threads;

/// Time between two looks for errors during a wait.
const POLL: Duration = Duration::from_millis(50);
/// Limit of waits after another worker has ended. It may be the first to do so, when the engine is
/// freed and this worker completes its last step.
const MAX_LAST_STEP: Duration = Duration::from_secs(5);

pub struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    connections: Arc<Connections>,
    world: Arc<dyn Communicator>,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// End of the current wait.
    deadline: Option<Instant>,
    /// True if the thread sleeps until it is notified.
    sleeps: bool,
    ended: bool,
    /// The end of another worker, and when it was noticed.
    other_ended: Option<(Error, Instant)>,
    /// Why the exchanges were ended.
    failure: Option<Error>,
}

impl Watchdog {
    /// Starts the thread.
    pub fn start(connections: Arc<Connections>, Workers { world, timeout, .. }: &Workers) -> Result<Watchdog> {
        let (world, timeout) = (world.clone(), *timeout);
        let shared = Arc::new(Shared { connections, world, timeout, state: Mutex::default(), changed: Condvar::new() });
        let watching = shared.clone();
        let thread = threads::spawn("pagedllm-watchdog".into(), move || watching.run());
        let thread = thread.map_err(|e| Error::internal(format!("cannot start the thread that watches other workers: {e}")))?;
        Ok(Watchdog { shared, thread: Some(thread) })
    }

    /// Watches a wait.
    pub fn watch<T>(&self, wait: impl FnOnce() -> T) -> T {
        let mut state = self.shared.lock();
        state.deadline = Instant::now().checked_add(self.shared.timeout);
        if state.sleeps {
            self.shared.changed.notify_one();
        }
        drop(state);
        let result = wait();
        self.shared.lock().deadline = None;
        result
    }

    /// Returns why the exchanges were ended.
    pub fn failure(&self) -> Option<Error> {
        self.shared.lock().failure.clone()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        while !state.ended {
            let Some(deadline) = state.deadline else {
                state.sleeps = true;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleeps = false;
                continue;
            };
            if let Err(failure) = self.check(&mut state, deadline) {
                state.failure = Some(failure);
                drop(state);
                self.connections.abort();
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now()).min(POLL);
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Fails if the current wait cannot end, or takes too long.
    fn check(&self, state: &mut State, deadline: Instant) -> Result<()> {
        if state.other_ended.is_none() {
            state.other_ended = self.world.check().err().map(|error| (error, Instant::now()));
        }
        match &state.other_ended {
            Some((error, noticed)) if noticed.elapsed() > MAX_LAST_STEP => Err(error.clone()),
            _ if Instant::now() >= deadline => {
                Err(Error::internal(format!("another worker has not responded for {:?} (worker_timeout_ms)", self.timeout)))
            }
            _ => self.connections.check(),
        }
    }
}
