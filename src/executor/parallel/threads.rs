//! Workers that are threads of the process of rank 0.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::sys::{quiet, threads};

/// The threads of the other ranks. Dropping it waits for them, so drop the communicator of rank 0
/// before.
#[derive(Default)]
pub struct WorkerThreads {
    threads: Vec<JoinHandle<()>>,
    /// The first error of a worker.
    failure: Arc<Mutex<Option<Error>>>,
}

impl WorkerThreads {
    /// Runs a worker on a new thread.
    pub fn spawn<F>(&mut self, world: Arc<dyn Communicator>, work: F) -> Result<()>
    where
        F: FnOnce(Arc<dyn Communicator>) -> Result<()> + Send + 'static,
    {
        let (rank, failure) = (world.rank(), self.failure.clone());
        let run = move || {
            // Rank 0 notices the end of a rank when its communicator is dropped.
            let kept = world.clone();
            let result = quiet::no_panic(|| work(world));
            if let Err(error) = result.unwrap_or_else(|_| Err(Error::internal("the worker has panicked"))) {
                let error = Error::new(error.code(), format!("rank {rank}: {}", error.message()));
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
            drop(kept);
        };
        let thread = threads::spawn(format!("pagedllm-rank-{rank}"), run);
        let thread = thread.map_err(|e| Error::internal(format!("cannot start the thread of rank {rank}: {e}")))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Returns the first error of a worker.
    pub fn failure(&self) -> Option<Error> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for WorkerThreads {
    fn drop(&mut self) {
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
