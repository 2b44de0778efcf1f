//! A communicator in the options of an engine.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Communicator;

/// A communicator that the options of an engine refer to. The engine or the worker takes it when it
/// starts.
#[derive(Clone)]
pub struct CommunicatorHandle(Arc<Mutex<State>>);

struct State {
    communicator: Option<Arc<dyn Communicator>>,
    adopt: Option<Box<dyn FnOnce() + Send>>,
}

impl CommunicatorHandle {
    /// Creates a handle of a communicator.
    pub fn new(communicator: Arc<dyn Communicator>) -> CommunicatorHandle {
        CommunicatorHandle(Arc::new(Mutex::new(State { communicator: Some(communicator), adopt: None })))
    }

    /// Creates a handle of a communicator that the host closes, unless `adopt` is called.
    pub fn with_owner(communicator: Arc<dyn Communicator>, adopt: impl FnOnce() + Send + 'static) -> CommunicatorHandle {
        let adopt: Box<dyn FnOnce() + Send> = Box::new(adopt);
        CommunicatorHandle(Arc::new(Mutex::new(State { communicator: Some(communicator), adopt: Some(adopt) })))
    }

    /// Returns the communicator. `None` if an engine or a worker has taken it.
    pub fn take(&self) -> Option<Arc<dyn Communicator>> {
        self.lock().communicator.take()
    }

    /// Makes the communicator belong to the library: it is closed when it is dropped. Call it when
    /// nothing can fail any more, since the host closes the communicator of a call that has failed.
    pub fn adopt(&self) {
        let adopt = self.lock().adopt.take();
        if let Some(adopt) = adopt {
            adopt();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for CommunicatorHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CommunicatorHandle")
    }
}
