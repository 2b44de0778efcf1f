//! Output queues. The engine writes to an `OutputSender`, and the reader holds the `Queue`.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::batch::{OutputBatch, SparePages};
use super::wakeup::Wakeup;
use crate::error::{Error, Result};
use crate::sys::event::EventFd;
use crate::types::QueueId;
use crate::types::outputs::{Output, OutputContent};

/// A queue of outputs in the order of their creation. Any thread may poll it. Requests pause while
/// their queue is full. Dropping the queue aborts the requests that write to it.
pub struct Queue {
    sender: Arc<OutputSender>,
    /// `None` only in tests of this file.
    writers: Option<Weak<dyn Writers>>,
}

/// The requests that write to the queues of an engine.
pub trait Writers: Send + Sync {
    /// Ends the requests that write to a queue whose reader is gone.
    fn abort_writers(&self, queue: &Arc<OutputSender>);
}

impl Queue {
    pub(crate) fn new<W: Writers + 'static>(sender: Arc<OutputSender>, writers: &Arc<W>) -> Queue {
        let writers: Weak<W> = Arc::downgrade(writers);
        Queue { sender, writers: Some(writers) }
    }

    pub(crate) fn sender(&self) -> &Arc<OutputSender> {
        &self.sender
    }

    /// Returns whether the queue was created by the engine of these requests.
    pub(crate) fn belongs_to<W>(&self, writers: &Arc<W>) -> bool {
        self.writers.as_ref().is_some_and(|own| own.as_ptr().cast::<()>() == Arc::as_ptr(writers).cast())
    }

    /// Returns all outputs. If there are none, waits up to `timeout` (`None`: without limit).
    /// Returns an empty list if the time has expired.
    pub fn poll(&self, timeout: Option<Duration>) -> Result<VecDeque<Output>> {
        self.sender.take(timeout, |state| state.outputs.take_outputs(self.sender.places(state.owed)))
    }

    /// Returns all outputs as a batch. If `make_room` fails, the outputs stay in the
    /// queue.
    pub fn poll_batch(&self, timeout: Option<Duration>, make_room: impl FnOnce(&OutputBatch) -> Result<()>) -> Result<Outputs> {
        let (batch, owed) = self.sender.take(timeout, |state| {
            make_room(&state.outputs)?;
            let (places, spare) = (self.sender.places(state.owed), self.sender.take_spare(state.owed));
            Ok((state.outputs.take(places, spare)?, state.owed))
        })?;
        Ok(Outputs { batch, owed, home: self.sender.clone() })
    }

    /// Returns an eventfd that is readable while the queue is not empty or is closed.
    pub fn event_fd(&self) -> Result<i32> {
        self.sender.event_fd()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.sender.close_readers();
        if let Some(writers) = self.writers.as_ref().and_then(Weak::upgrade) {
            writers.abort_writers(&self.sender);
        }
    }
}

/// Outputs taken from a queue. Dropping them returns their lists to the queue for reuse.
pub struct Outputs {
    batch: OutputBatch,
    /// Number of sequences with a pending last output when the batch was taken.
    owed: usize,
    home: Arc<OutputSender>,
}

impl Deref for Outputs {
    type Target = OutputBatch;

    fn deref(&self) -> &OutputBatch {
        &self.batch
    }
}

impl Drop for Outputs {
    fn drop(&mut self) {
        self.home.return_content(self.batch.take_content(), self.owed);
    }
}

/// The sending half of a queue.
pub struct OutputSender {
    id: QueueId,
    capacity: usize,
    /// Number of outputs beyond the capacity, for the current step and for requests that end early,
    /// before new requests are refused.
    slack: usize,
    state: Mutex<QueueState>,
    /// Empty lists for reuse.
    spare: Mutex<OutputContent>,
    changed: Condvar,
    /// The stepping thread. It may sleep while all queues are full.
    writer: Arc<Wakeup>,
}

/// The contents of a queue, under its lock.
struct QueueState {
    outputs: OutputBatch,
    /// Number of sequences whose last output is pending. Space for one output each, without
    /// contents, is reserved.
    owed: usize,
    /// Whether the queue contains at least `capacity` outputs, so that its requests must pause.
    full: bool,
    /// Whether readers have not been notified of the newest outputs.
    unannounced: bool,
    /// Whether the reader is gone. Outputs are then discarded.
    abandoned: bool,
    /// Error that readers get after the last output.
    closed: Option<Error>,
    event: Option<EventFd>,
}

impl OutputSender {
    /// Creates an empty queue. It takes pages for its outputs from `spare`.
    pub fn new(id: QueueId, capacity: usize, slack: usize, spare: Arc<SparePages>, writer: Arc<Wakeup>) -> OutputSender {
        let outputs = OutputBatch::new(spare);
        let state = QueueState { outputs, owed: 0, full: false, unannounced: false, abandoned: false, closed: None, event: None };
        OutputSender { id, capacity, slack, state: Mutex::new(state), spare: Mutex::default(), changed: Condvar::new(), writer }
    }

    pub fn id(&self) -> QueueId {
        self.id
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails if the queue has so many unread outputs that no request may be added.
    pub fn check_space(&self) -> Result<()> {
        let unread = self.lock().outputs.len();
        if unread < self.capacity.saturating_add(self.slack) {
            return Ok(());
        }
        Err(Error::full(format!(
            "the output queue is full ({unread} outputs, its capacity is {}); poll it before adding requests",
            self.capacity
        )))
    }

    /// Reserves space for the last outputs of `sequences` sequences, and for a few other ones.
    pub fn reserve_final(&self, sequences: usize) -> Result<()> {
        let mut state = self.lock();
        self.spare.try_lock().map_or(Ok(()), |mut spare| spare.reserve_few())?;
        let owed = state.owed + sequences;
        state.outputs.reserve(self.places(owed))?;
        state.owed = owed;
        Ok(())
    }

    /// Returns the number of outputs for which there must be space: the last ones of `owed`
    /// sequences, and the other ones of a step.
    fn places(&self, owed: usize) -> usize {
        owed + owed.min(self.slack)
    }

    /// Releases the reservation for `sequences` last outputs that will not come.
    pub fn release_final(&self, sequences: usize) {
        self.lock().owed -= sequences;
    }

    /// Fails if the reader is gone.
    pub fn check_open(&self) -> Result<()> {
        match self.lock().abandoned {
            true => Err(Error::invalid("the sequence's queue has been freed; pass another queue")),
            false => Ok(()),
        }
    }

    /// Appends an output, which keeps the capacity of its lists. Returns true if the caller must
    /// call `notify`. If there is no memory, nothing changes.
    pub fn push(&self, output: &mut Output) -> Result<bool> {
        self.write(|state| state.outputs.add(output, state.owed))
    }

    /// Appends the last output of a sequence, as `push` does. If there is no memory for its
    /// contents, the output reports an error instead.
    pub fn push_last(&self, output: &mut Output) -> bool {
        let written = self.write(|state| {
            debug_assert!(state.owed > 0, "each is owed");
            state.owed = state.owed.saturating_sub(1);
            if let Err(error) = state.outputs.add(output, state.owed) {
                *output = std::mem::take(output).failed(error);
                state.outputs.add_header(output);
            }
            Ok(())
        });
        written.unwrap_or_default()
    }

    fn write(&self, write: impl FnOnce(&mut QueueState) -> Result<()>) -> Result<bool> {
        let mut state = self.lock();
        if state.abandoned {
            return Ok(false);
        }
        write(&mut state)?;
        if state.outputs.len() >= self.capacity && !std::mem::replace(&mut state.full, true) {
            self.writer.mark_full(self.id);
        }
        Ok(!std::mem::replace(&mut state.unannounced, true))
    }

    /// Takes the spare lists. The function never blocks, since in a forked child the owner of the
    /// lock may not exist.
    fn take_spare(&self, owed: usize) -> OutputContent {
        let spare = self.spare.try_lock().map(|mut spare| std::mem::take(&mut *spare)).unwrap_or_default();
        if is_oversized(&spare, owed) { OutputContent::default() } else { spare }
    }

    fn return_content(&self, content: OutputContent, owed: usize) {
        if !is_oversized(&content, owed)
            && let Ok(mut spare) = self.spare.try_lock()
        {
            *spare = content;
        }
    }

    pub fn notify(&self) {
        let mut state = self.lock();
        state.unannounced = false;
        // A fast reader may have taken the outputs already.
        if !state.outputs.is_empty() {
            self.wake_readers(&state);
        }
    }

    /// Closes the queue: readers get the remaining outputs, then `error`.
    pub fn close(&self, error: &Error) {
        let mut state = self.lock();
        state.closed.get_or_insert_with(|| error.clone());
        self.wake_readers(&state);
    }

    fn wake_readers(&self, state: &QueueState) {
        self.changed.notify_all();
        if let Some(event) = &state.event {
            event.signal();
        }
    }

    fn close_readers(&self) {
        let mut state = self.lock();
        state.abandoned = true;
        state.outputs.clear();
        state.event = None; // closed now, since requests may hold the sender longer
        self.clear_full(&mut state);
    }

    fn clear_full(&self, state: &mut QueueState) {
        if std::mem::take(&mut state.full) {
            self.writer.mark_emptied(self.id);
        }
    }

    /// Passes the outputs to `take`, which removes them from the queue unless it fails.
    fn take<T>(&self, timeout: Option<Duration>, take: impl FnOnce(&mut QueueState) -> Result<T>) -> Result<T> {
        let state = self.lock();
        let none = |state: &mut QueueState| state.outputs.is_empty() && state.closed.is_none();
        let mut state = match timeout {
            Some(Duration::ZERO) => state,
            Some(timeout) => self.changed.wait_timeout_while(state, timeout, none).unwrap_or_else(PoisonError::into_inner).0,
            None => self.changed.wait_while(state, none).unwrap_or_else(PoisonError::into_inner),
        };
        if let Some(error) = state.closed.as_ref().filter(|_| state.outputs.is_empty()) {
            state.event.iter().for_each(EventFd::signal); // the host may have read the eventfd
            return Err(error.clone());
        }
        let was_empty = state.outputs.is_empty();
        let outputs = take(&mut state)?;
        if let Some(event) = state.event.as_ref().filter(|_| !was_empty) {
            // The host may have read the eventfd. If the queue is closed, it must stay readable.
            if state.closed.is_some() { event.signal() } else { event.clear() }
        }
        self.clear_full(&mut state);
        Ok(outputs)
    }

    fn event_fd(&self) -> Result<i32> {
        let mut state = self.lock();
        if let Some(event) = &state.event {
            return Ok(event.fd());
        }
        let event =
            EventFd::new().map_err(|e| Error::capacity(format!("no descriptor for the queue ({e}); raise the limit (ulimit -n)")))?;
        if !state.outputs.is_empty() || state.closed.is_some() {
            event.signal();
        }
        Ok(state.event.insert(event).fd())
    }
}

/// Returns whether the lists are too large to be kept by a queue with `owed` running sequences. A
/// queue without any keeps little.
fn is_oversized(content: &OutputContent, owed: usize) -> bool {
    const IDLE_BYTES: usize = 1 << 10;
    const SEQUENCE_BYTES: usize = 16 << 10;
    content.allocated_bytes() > IDLE_BYTES + SEQUENCE_BYTES.saturating_mul(owed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_sender(capacity: usize) -> OutputSender {
        OutputSender::new(QueueId::default(), capacity, 2, Arc::default(), Arc::default())
    }

    fn push(sender: &OutputSender) -> bool {
        sender.push(&mut Output::default()).unwrap()
    }

    fn is_full(sender: &OutputSender) -> bool {
        let (mut never, mut full) = (u64::MAX, Vec::new());
        sender.writer.read_full_queues(&mut never, &mut full);
        full == [sender.id]
    }

    fn take_all(sender: &OutputSender) -> usize {
        sender.take(None, |state| state.outputs.take_outputs(state.owed)).unwrap().len()
    }

    #[test]
    fn a_queue_is_full_from_its_capacity_until_it_is_polled() {
        let sender = new_sender(2);
        assert!(push(&sender), "the first output must notify the readers");
        assert!(!push(&sender), "a second output needs no further notification");
        assert!(is_full(&sender));
        sender.notify();
        assert!(push(&sender), "a running step may exceed the capacity");
        assert_eq!(take_all(&sender), 3);
        assert!(!is_full(&sender));
        push(&sender);
        assert_eq!(take_all(&sender), 1);
        assert!(!sender.writer.read_full_queues(&mut 2, &mut Vec::new()), "the queue was not full, so no request has paused");
    }

    #[test]
    fn a_queue_with_too_many_unread_outputs_refuses_requests() {
        let sender = new_sender(2);
        for _ in 0..4 {
            sender.check_space().unwrap();
            push(&sender);
        }
        let error = sender.check_space().unwrap_err();
        assert!(error.message().contains("4 outputs") && error.message().contains("capacity is 2"), "{error}");
        take_all(&sender);
        sender.check_space().unwrap();
    }

    #[test]
    fn outputs_stay_in_the_queue_if_taking_them_fails() {
        let sender = new_sender(9);
        push(&sender);
        assert_eq!(sender.take(None, |_| Err::<(), _>(Error::out_of_memory())).unwrap_err(), Error::out_of_memory());
        assert_eq!(take_all(&sender), 1);
    }

    #[test]
    fn polled_lists_are_reused_unless_they_are_large() {
        let queue = Queue { sender: Arc::new(new_sender(9)), writers: None };
        let kept = |owed: usize, text: usize| {
            queue.sender.reserve_final(owed).unwrap();
            *queue.sender.spare.lock().unwrap() = OutputContent::default();
            queue.sender.push(&mut Output { text: "a".repeat(text), ..Output::default() }).unwrap();
            drop(queue.poll_batch(None, |_| Ok(())).unwrap());
            queue.sender.release_final(owed);
            queue.sender.spare.lock().unwrap().text.capacity()
        };
        for (owed, text) in [(0, 500), (1, 2000), (4, 50_000)] {
            assert!(kept(owed, text) >= text);
        }
        for (owed, text) in [(0, 2000), (1, 20_000), (4, 70_000)] {
            assert_eq!(kept(owed, text), 0, "{text} bytes for {owed} sequences");
        }
    }

    #[test]
    fn a_closed_queue_returns_its_outputs_and_then_the_first_error() {
        let sender = new_sender(9);
        push(&sender);
        sender.close(&Error::closed("first"));
        sender.close(&Error::closed("second"));
        assert_eq!(take_all(&sender), 1);
        assert_eq!(sender.take(None, |_| Ok(())).unwrap_err(), Error::closed("first"));
    }

    #[test]
    fn a_queue_without_readers_drops_outputs() {
        let sender = new_sender(1);
        push(&sender);
        assert!(is_full(&sender));
        sender.close_readers();
        assert!(!push(&sender) && !is_full(&sender), "paused requests are checked again");
    }
}
