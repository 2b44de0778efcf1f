//! The thread that encodes and hashes exported sequences.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, unbounded};

use crate::error::{Error, Result};
use crate::kv::connector::TransferId;
use crate::output::wakeup::Wakeup;
use crate::sys::quiet::no_panic;
use crate::sys::{Pages, threads};
use crate::types::sequence_state::{Header, encode};

/// The ids of the transfers that other threads have completed. They are inputs of the next step.
#[derive(Clone)]
pub struct Completions {
    announce: Sender<TransferId>,
    announced: Receiver<TransferId>,
    wakeup: Arc<Wakeup>,
}

impl Completions {
    pub fn new(wakeup: Arc<Wakeup>) -> Completions {
        let (announce, announced) = unbounded();
        Completions { announce, announced, wakeup }
    }

    /// Announces that the result of a transfer is there, and wakes the stepping thread.
    fn announce(&self, id: TransferId) {
        // `announced` is a receiver of this channel, so the send cannot fail.
        let _ = self.announce.send(id);
        self.wakeup.wake();
    }

    /// Appends the ids that were announced since the last call. Without memory, they wait for the
    /// next one.
    pub fn take(&self, ids: &mut Vec<TransferId>) {
        receive_all(&self.announced, ids);
    }
}

/// Appends all messages of a channel. Without memory, they stay in it.
pub fn receive_all<T>(channel: &Receiver<T>, to: &mut Vec<T>) {
    while to.try_reserve(1).is_ok()
        && let Ok(message) = channel.try_recv()
    {
        to.push(message);
    }
}

/// An exported sequence that has been copied from the device.
pub struct EncodeJob {
    pub id: TransferId,
    pub header: Box<Header<'static>>,
    pub kv: Pages,
    /// Whether the completion is announced. Otherwise the step that submits the job waits for it.
    pub announces: bool,
}

/// Work of the thread.
enum Job {
    Encode(EncodeJob),
    /// Frees memory. To return large memory to the system takes too long for a step.
    Discard {
        _memory: Vec<u8>,
    },
}

/// A thread that processes jobs in their order. It starts with the first job. Dropping the worker
/// ends the thread after its current job.
pub struct Worker {
    completions: Completions,
    jobs: Option<Sender<Job>>,
    waiting: Receiver<Job>,
    answers: Sender<(TransferId, Result<Vec<u8>>)>,
    done: Receiver<(TransferId, Result<Vec<u8>>)>,
    /// Results that were received while another one was awaited.
    early: Vec<(TransferId, Result<Vec<u8>>)>,
    thread: Option<JoinHandle<()>>,
}

impl Job {
    fn run(self, answers: &Sender<(TransferId, Result<Vec<u8>>)>, completions: &Completions) {
        let Job::Encode(EncodeJob { id, header, kv, announces }) = self else { return };
        let encoded = no_panic(|| encode(&header, kv.bytes()))
            .unwrap_or_else(|panic| Err(Error::internal(format!("the exported sequence was lost: {panic}"))));
        drop(kv);
        // The worker holds a receiver. After its drop, nothing reads the result.
        let _ = answers.send((id, encoded));
        if announces {
            completions.announce(id);
        }
    }
}

impl Worker {
    pub fn new(completions: Completions) -> Worker {
        let (jobs, waiting) = unbounded();
        let (answers, done) = unbounded();
        Worker { completions, jobs: Some(jobs), waiting, answers, done, early: Vec::new(), thread: None }
    }

    pub fn encode(&mut self, job: EncodeJob) {
        self.submit(Job::Encode(job));
    }

    /// Frees memory on the thread.
    pub fn discard(&mut self, memory: Vec<u8>) {
        self.submit(Job::Discard { _memory: memory });
    }

    fn submit(&mut self, job: Job) {
        let Some(jobs) = &self.jobs else { return };
        if self.thread.is_none() {
            let (waiting, answers, completions) = (self.waiting.clone(), self.answers.clone(), self.completions.clone());
            let work = move || waiting.iter().for_each(|job| job.run(&answers, &completions));
            self.thread = threads::spawn("pagedllm-transfers".into(), work).ok();
        }
        match self.thread {
            // `waiting` is a receiver of this channel, so the send cannot fail.
            Some(_) => drop(jobs.send(job)),
            // The system starts no thread. A step that takes longer is better than no export.
            None => job.run(&self.answers, &self.completions),
        }
    }

    /// Waits for the result of a job.
    pub fn wait(&mut self, id: TransferId) -> Result<Vec<u8>> {
        if let Some(place) = self.early.iter().position(|(early, _)| *early == id) {
            return self.early.swap_remove(place).1;
        }
        loop {
            let (done, encoded) = self.done.recv().map_err(|_| Error::internal("the thread of the transfers has ended"))?;
            if done == id {
                return encoded;
            }
            self.early.push((done, encoded));
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        // Jobs that have not begun are dropped.
        while self.waiting.try_recv().is_ok() {}
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // panics of jobs are caught
        }
    }
}
