//! The side of a store's thread that the engine uses.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};

use super::board::Board;
use super::value::ValueFormat;
use super::worker::{Job, Worker};
use crate::engine::clock::Clock;
use crate::error::{Error, Result};
use crate::kv::Paging;
use crate::output::wakeup::Wakeup;
use crate::sys::threads;
use crate::types::kv_store::KvStore;
use crate::types::options::KvStoreOptions;

/// Time for which the end of an engine waits, beyond the time for the last writes, for a store that
/// does not return.
const CLOSE_TIME: Duration = Duration::from_secs(2);

/// A store and its thread. Dropping the client writes the blocks that wait, within the time limit
/// of the options, and closes the store. If the store does not return, its thread is left behind.
pub struct StoreClient {
    pub board: Arc<Board>,
    jobs: Option<Sender<Job>>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
    grace: Duration,
}

impl StoreClient {
    pub fn start(
        store: Box<dyn KvStore>,
        options: &KvStoreOptions,
        format: ValueFormat,
        paging: Paging,
        wakeup: Arc<Wakeup>,
        clock: Arc<dyn Clock>,
    ) -> Result<StoreClient> {
        let board = Arc::new(Board::new(wakeup, clock, options.timeout, options.max_bytes, format.value_bytes()));
        let (jobs, waiting) = unbounded();
        let (alive, ended) = bounded::<()>(1);
        let grace = options.timeout;
        let worker = Worker::new(store, board.clone(), format, paging, options.max_operations);
        let thread = threads::spawn("pagedllm-store".into(), move || {
            let _alive = alive;
            worker.run(&waiting, grace);
        });
        let thread = thread.map_err(|e| Error::capacity(format!("the system starts no thread for kv_store: {e}")))?;
        Ok(StoreClient { board, jobs: Some(jobs), ended, thread: Some(thread), grace })
    }

    /// Passes a job to the thread.
    pub fn submit(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            // If the store has panicked, the thread has ended, and the lookup ends at its time limit.
            let _ = jobs.send(job);
        }
    }
}

impl Drop for StoreClient {
    fn drop(&mut self) {
        self.jobs = None;
        let has_ended = self.ended.recv_timeout(self.grace + CLOSE_TIME) != Err(RecvTimeoutError::Timeout);
        if let Some(thread) = self.thread.take().filter(|_| has_ended) {
            let _ = thread.join(); // a panic of the store ends its thread only
        }
    }
}
