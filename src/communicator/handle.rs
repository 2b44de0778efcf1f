//! A communicator in the options of an engine.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::Communicator;

/// A communicator that the options of an engine refer to. The engine or the worker takes it when it
/// starts.
#[derive(Clone)]
pub struct CommunicatorHandle(Arc<Mutex<Option<Arc<dyn Communicator>>>>);

impl CommunicatorHandle {
    /// Creates a handle of a communicator.
    pub fn new(communicator: Arc<dyn Communicator>) -> CommunicatorHandle {
        CommunicatorHandle(Arc::new(Mutex::new(Some(communicator))))
    }

    /// Returns the communicator. `None` if an engine or a worker has taken it.
    pub fn take(&self) -> Option<Arc<dyn Communicator>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl fmt::Debug for CommunicatorHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CommunicatorHandle")
    }
}
