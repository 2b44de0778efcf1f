//! Where outputs wait for their reader. The engine writes to an `Outbox`; its reader holds the `Queue`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::driver::Wakeup;
use super::outputs::Output;
use super::registry::Registry;
use crate::error::{Error, Result};
use crate::sys::event::EventFd;

/// Outputs in the order they were made. Any thread may poll; requests whose queue is full pause.
/// Dropping it aborts what still writes to it.
pub struct Queue {
    outbox: Arc<Outbox>,
    registry: Weak<Registry>,
}

impl Queue {
    pub(super) fn new(outbox: Arc<Outbox>, registry: &Arc<Registry>) -> Queue {
        Queue { outbox, registry: Arc::downgrade(registry) }
    }

    pub(super) fn outbox(&self) -> &Arc<Outbox> {
        &self.outbox
    }

    pub(super) fn belongs_to(&self, registry: &Arc<Registry>) -> bool {
        std::ptr::eq(self.registry.as_ptr(), Arc::as_ptr(registry))
    }

    /// Everything there is; waits up to `timeout` (None: as long as it takes) for the first. Empty: time ran out.
    pub fn poll(&self, timeout: Option<Duration>) -> Result<VecDeque<Output>> {
        self.poll_with(timeout, |_| Ok(()))
    }

    /// As `poll`; where `make_room` for the outputs fails, they stay in the queue.
    pub fn poll_with(
        &self,
        timeout: Option<Duration>,
        make_room: impl FnOnce(&VecDeque<Output>) -> Result<()>,
    ) -> Result<VecDeque<Output>> {
        self.outbox.take(timeout, make_room)
    }

    /// A descriptor that is readable while a poll would not have to wait.
    pub fn event_fd(&self) -> Result<i32> {
        self.outbox.event_fd()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.outbox.abandon();
        if let Some(registry) = self.registry.upgrade() {
            registry.forget_queue(&self.outbox);
        }
    }
}

pub struct Outbox {
    capacity: usize,
    /// Beyond the capacity: what steps under way and requests that end early may add before new requests are refused.
    slack: usize,
    state: Mutex<State>,
    changed: Condvar,
    /// As many outputs as the capacity, or more. Written under the lock, read without it.
    full: AtomicBool,
    /// Who sleeps while all queues are full.
    writer: Arc<Wakeup>,
}

#[derive(Default)]
struct State {
    outputs: VecDeque<Output>,
    /// Readers have not been told of the newest outputs.
    unannounced: bool,
    /// The reader is gone: outputs go nowhere.
    abandoned: bool,
    /// Why no more will come.
    closed: Option<Error>,
    event: Option<EventFd>,
}

impl Outbox {
    pub fn new(capacity: usize, slack: usize, writer: Arc<Wakeup>) -> Outbox {
        Outbox { capacity, slack, state: Mutex::default(), changed: Condvar::new(), full: AtomicBool::new(false), writer }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its requests pause until the reader has taken what there is.
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Acquire)
    }

    /// Ok unless so much is unread that no request may be added.
    pub fn check_room(&self) -> Result<()> {
        let unread = self.lock().outputs.len();
        if unread < self.capacity.saturating_add(self.slack) {
            return Ok(());
        }
        Err(Error::capacity(format!(
            "{unread} outputs wait in the queue, its capacity is {}: read it before adding requests",
            self.capacity
        )))
    }

    /// Ok unless the reader is gone.
    pub fn check_open(&self) -> Result<()> {
        match self.lock().abandoned {
            true => Err(Error::invalid("the sequence's queue has been freed: name another one")),
            false => Ok(()),
        }
    }

    /// Leaves an output. True when readers must now be told by `announce`, once for any number of outputs.
    pub fn push(&self, output: Output) -> bool {
        let mut state = self.lock();
        if state.abandoned {
            return false;
        }
        state.outputs.push_back(output);
        self.full.store(state.outputs.len() >= self.capacity, Ordering::Release);
        !std::mem::replace(&mut state.unannounced, true)
    }

    pub fn announce(&self) {
        let mut state = self.lock();
        state.unannounced = false;
        // A quick reader may have them already.
        if !state.outputs.is_empty() {
            self.wake_readers(&state);
        }
    }

    /// No more will come: who polls gets what there is, then `error`.
    pub fn close(&self, error: &Error) {
        let mut state = self.lock();
        state.closed.get_or_insert_with(|| error.clone());
        self.wake_readers(&state);
    }

    fn wake_readers(&self, state: &State) {
        self.changed.notify_all();
        if let Some(event) = &state.event {
            event.signal();
        }
    }

    fn abandon(&self) {
        let mut state = self.lock();
        state.abandoned = true;
        state.outputs = VecDeque::new();
        state.event = None; // closed now, not when the last request lets go of the outbox
        self.full.store(false, Ordering::Release);
    }

    fn take(&self, timeout: Option<Duration>, make_room: impl FnOnce(&VecDeque<Output>) -> Result<()>) -> Result<VecDeque<Output>> {
        let state = self.lock();
        let none = |state: &mut State| state.outputs.is_empty() && state.closed.is_none();
        let mut state = match timeout {
            Some(Duration::ZERO) => state,
            Some(timeout) => self.changed.wait_timeout_while(state, timeout, none).unwrap_or_else(PoisonError::into_inner).0,
            None => self.changed.wait_while(state, none).unwrap_or_else(PoisonError::into_inner),
        };
        if let Some(error) = state.closed.as_ref().filter(|_| state.outputs.is_empty()) {
            state.event.iter().for_each(EventFd::signal); // a host may have read it
            return Err(error.clone());
        }
        make_room(&state.outputs)?;
        let outputs = std::mem::take(&mut state.outputs);
        if let Some(event) = state.event.as_ref().filter(|_| !outputs.is_empty()) {
            // A host may have read the descriptor; where a poll finds the end it must be readable again.
            if state.closed.is_some() { event.signal() } else { event.clear() }
        }
        if self.full.swap(false, Ordering::AcqRel) {
            self.writer.wake();
        }
        Ok(outputs)
    }

    fn event_fd(&self) -> Result<i32> {
        let mut state = self.lock();
        if let Some(event) = &state.event {
            return Ok(event.fd());
        }
        let event =
            EventFd::new().map_err(|e| Error::capacity(format!("no descriptor for the queue: {e}; raise the limit (ulimit -n)")))?;
        if !state.outputs.is_empty() || state.closed.is_some() {
            event.signal();
        }
        Ok(state.event.insert(event).fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outbox(capacity: usize) -> Outbox {
        Outbox::new(capacity, 2, Arc::default())
    }

    #[test]
    fn it_is_full_from_its_capacity_until_its_reader_takes_what_there_is() {
        let outbox = outbox(2);
        assert!(outbox.push(Output::default()), "readers must be told of the first");
        assert!(!outbox.push(Output::default()), "and once is enough");
        assert!(outbox.is_full());
        outbox.announce();
        assert!(outbox.push(Output::default()), "a step under way is not refused");
        assert_eq!(outbox.take(None, |_| Ok(())).unwrap().len(), 3);
        assert!(!outbox.is_full());
    }

    #[test]
    fn where_too_much_is_unread_no_request_may_be_added() {
        let outbox = outbox(2);
        for _ in 0..4 {
            outbox.check_room().unwrap();
            outbox.push(Output::default());
        }
        let error = outbox.check_room().unwrap_err();
        assert!(error.message().contains("4 outputs") && error.message().contains("capacity is 2"), "{error}");
        outbox.take(None, |_| Ok(())).unwrap();
        outbox.check_room().unwrap();
    }

    #[test]
    fn what_there_is_no_room_for_stays() {
        let outbox = outbox(9);
        outbox.push(Output::default());
        assert_eq!(outbox.take(None, |_| Err(Error::out_of_memory())).unwrap_err(), Error::out_of_memory());
        assert_eq!(outbox.take(None, |_| Ok(())).unwrap().len(), 1);
    }

    #[test]
    fn a_closed_one_gives_what_it_has_and_then_says_why() {
        let outbox = outbox(9);
        outbox.push(Output::default());
        outbox.close(&Error::closed("first"));
        outbox.close(&Error::closed("second"));
        assert_eq!(outbox.take(None, |_| Ok(())).unwrap().len(), 1);
        assert_eq!(outbox.take(None, |_| Ok(())).unwrap_err(), Error::closed("first"));
    }

    #[test]
    fn nothing_gathers_where_the_reader_is_gone() {
        let outbox = outbox(1);
        outbox.push(Output::default());
        outbox.abandon();
        assert!(!outbox.push(Output::default()) && !outbox.is_full());
    }
}
