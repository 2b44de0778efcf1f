//! The requests that have not ended, and the commands for them: what other threads touch, under one short lock.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::driver::Wakeup;
use super::outputs::Output;
use super::queue::Outbox;
use super::stream::Stream;
use crate::error::{Error, Result};

/// What the next step will do first.
pub enum Command {
    Add { id: u64, prompt: Vec<u32>, max_len: usize, stream: Box<Stream> },
    Abort { id: u64 },
}

#[derive(Default)]
pub struct Registry {
    state: Mutex<State>,
    /// Wakes the driver: there are commands.
    pub wakeup: Arc<Wakeup>,
}

#[derive(Default)]
struct State {
    last_id: u64,
    live: HashMap<u64, Live>,
    inbox: VecDeque<Command>,
    /// All that have a reader.
    outboxes: Vec<Weak<Outbox>>,
    failure: Option<Error>,
}

struct Live {
    outbox: Arc<Outbox>,
    /// The last output of a request that has not begun.
    last: Output,
    aborting: bool,
}

impl State {
    fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn abort(&mut self, id: u64) -> Result<()> {
        self.inbox.try_reserve(1)?;
        let live = self.live.get_mut(&id).ok_or_else(|| Error::not_found(format!("request {id} is unknown or has ended")))?;
        if !std::mem::replace(&mut live.aborting, true) {
            self.inbox.push_back(Command::Abort { id });
        }
        Ok(())
    }
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is whole between any two statements below.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ok unless the engine has failed.
    pub fn check(&self) -> Result<()> {
        self.lock().check()
    }

    pub fn new_outbox(&self, capacity: usize, slack: usize) -> Result<Arc<Outbox>> {
        let mut state = self.lock();
        state.check()?;
        state.outboxes.try_reserve(1)?;
        let outbox = Arc::new(Outbox::new(capacity, slack, self.wakeup.clone()));
        state.outboxes.push(Arc::downgrade(&outbox));
        Ok(outbox)
    }

    /// Gives a request its id and leaves its command. Ids follow the order of commands.
    pub fn add(&self, prompt: Vec<u32>, max_len: usize, stream: impl FnOnce(u64, &[u32]) -> Stream) -> Result<u64> {
        let mut state = self.lock();
        state.check()?;
        state.live.try_reserve(1)?;
        state.inbox.try_reserve(1)?;
        let id = state.last_id + 1;
        let stream = Box::new(stream(id, &prompt));
        stream.outbox.check_room()?;
        state.last_id = id;
        state.live.insert(id, Live { outbox: stream.outbox.clone(), last: stream.output(), aborting: false });
        state.inbox.push_back(Command::Add { id, prompt, max_len, stream });
        drop(state);
        self.wakeup.wake();
        Ok(id)
    }

    pub fn abort(&self, id: u64) -> Result<()> {
        let mut state = self.lock();
        state.check()?;
        state.abort(id)?;
        drop(state);
        self.wakeup.wake();
        Ok(())
    }

    /// The reader of an outbox is gone: what still writes to it ends.
    pub fn forget_queue(&self, outbox: &Arc<Outbox>) {
        let mut state = self.lock();
        state.outboxes.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(outbox)));
        // Whoever writes to it holds it too.
        if Arc::strong_count(outbox) == 1 {
            return;
        }
        let orphans: Vec<u64> = state.live.iter().filter(|(_, live)| Arc::ptr_eq(&live.outbox, outbox)).map(|(&id, _)| id).collect();
        for &id in &orphans {
            // Without memory for the command the request runs to its end, unheard.
            let _ = state.abort(id);
        }
        drop(state);
        if !orphans.is_empty() {
            self.wakeup.wake();
        }
    }

    /// Swaps the commands so far for the empty `inbox`.
    pub fn take_commands(&self, inbox: &mut VecDeque<Command>) {
        std::mem::swap(&mut self.lock().inbox, inbox);
    }

    pub fn remove(&self, id: u64) {
        self.lock().live.remove(&id);
    }

    pub fn unfinished(&self) -> u64 {
        self.lock().live.len() as u64
    }

    /// From now on every command is refused with `error`. Returns for each request that was live where its outputs go, and
    /// what would be the last one if it has not begun.
    pub fn fail(&self, error: &Error) -> Vec<(Arc<Outbox>, Output)> {
        let mut state = self.lock();
        state.failure.get_or_insert_with(|| error.clone());
        state.inbox.clear();
        state.live.drain().map(|(_, live)| (live.outbox, live.last)).collect()
    }

    /// After `fail`, and after the last outputs: every queue says that no more will come.
    pub fn close_queues(&self, error: &Error) {
        let outboxes = self.lock().outboxes.clone();
        outboxes.iter().filter_map(Weak::upgrade).for_each(|outbox| outbox.close(error));
    }
}
