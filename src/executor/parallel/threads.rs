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
    failure: WorkerFailure,
}

/// The first error of a worker that no other rank has reported, or caused by its end.
#[derive(Clone, Default)]
pub struct WorkerFailure(Arc<Mutex<Option<Error>>>);

impl WorkerFailure {
    pub fn get(&self) -> Option<Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, error: Error) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
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
            let result = result.unwrap_or_else(|_| Err(Error::internal("the worker has panicked")));
            match (result, kept.check()) {
                (Err(error), Ok(())) if !error.is_of_other_rank() => failure.set(error.of_rank(rank)),
                _ => {}
            }
            drop(kept);
        };
        let thread = threads::spawn(format!("pagedllm-rank-{rank}"), run);
        let thread = thread.map_err(|e| Error::internal(format!("cannot start the thread of rank {rank}: {e}")))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Returns the place of the first error.
    pub fn failure(&self) -> &WorkerFailure {
        &self.failure
    }
}

impl Drop for WorkerThreads {
    fn drop(&mut self) {
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::local::Local;

    fn failure_of(error: Error) -> Option<Error> {
        let mut threads = WorkerThreads::default();
        let mut ranks = Local::group(2);
        threads.spawn(Arc::new(ranks.remove(1)), |_| Err(error)).unwrap();
        let failure = threads.failure().clone();
        drop(threads);
        failure.get()
    }

    /// Rank 0 has reported its own error, so it needs no other reason.
    #[test]
    fn an_error_of_another_rank_is_no_failure_of_a_worker() {
        let error = Error::io("no file");
        assert_eq!(failure_of(error.clone().of_rank(0)), None);
        assert_eq!(failure_of(error).unwrap().message(), "rank 1: no file");
    }
}
