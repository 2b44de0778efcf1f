//! The table of live requests and sequences, and the commands for them. All threads use it, under
//! one lock that is held briefly.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::LogitsHook;
use super::active_sequence::Generation;
use super::driver::Wakeup;
use super::journal::RecordedFork;
use super::outputs::Output;
use super::queue::{OutputSender, Queue};
use super::request::PreparedRequest;
use super::sequence_calls::Continue;
use super::sequence_state::SequenceState;
use super::wait_queue::{QueueLimits, Ticket, WaitQueue, WaitingEntry};
use crate::budget::Reservation;
use crate::error::{Error, Result};
use crate::scheduler::{IdMap, PreparedGroup};
use crate::types::{IdAllocator, PinId, RequestId, SeqId};

/// A command that the next step applies.
pub enum Command {
    Add {
        id: RequestId,
        work: Box<PreparedRequest>,
    },
    Abort {
        request: RequestId,
    },
    End {
        seq: SeqId,
    },
    Fork {
        parent: SeqId,
        len: Option<usize>,
        children: Vec<ForkedSequence>,
        idle: bool,
    },
    Append {
        seq: SeqId,
        tokens: Vec<u32>,
    },
    Rewind {
        seq: SeqId,
        len: usize,
    },
    Resume {
        seq: SeqId,
        generation: Box<Generation>,
        open: Box<PendingOutput>,
    },
    Free {
        seq: SeqId,
    },
    Continue {
        seq: SeqId,
        keep: bool,
        hook: Option<LogitsHook>,
        deadline: Option<Duration>,
        open: Box<PendingOutput>,
        requested_at: Duration,
    },
    Export {
        seq: SeqId,
        open: Box<PendingOutput>,
    },
    Import {
        id: SeqId,
        generation: Box<Generation>,
        sequence_state: Box<SequenceState<'static>>,
    },
    Pin {
        id: PinId,
        candidate: Box<PreparedGroup>,
        priority: u32,
        salt: Vec<u8>,
        until: Option<Duration>,
    },
    Unpin {
        id: PinId,
    },
}

/// A sequence that a fork creates.
pub struct ForkedSequence {
    pub id: SeqId,
    /// Seed of the child. `None` selects the random numbers of the parent.
    pub seed: Option<u64>,
    pub user_data: u64,
    pub sender: Arc<OutputSender>,
    /// Time of the call.
    pub requested_at: Duration,
}

/// The live requests, the known sequences and the pending commands.
pub struct SequenceTable {
    limits: QueueLimits,
    /// Maximum length of a sequence in tokens.
    max_len: usize,
    state: Mutex<TableState>,
    /// Wakes the stepping thread when there are commands.
    pub wakeup: Arc<Wakeup>,
}

/// The contents of the table, under its lock.
#[derive(Default)]
struct TableState {
    ids: IdAllocator,
    requests: IdMap<RequestId, RequestEntry>,
    sequences: IdMap<SeqId, SequenceView>,
    /// Ids of the pins.
    pins: Vec<PinId>,
    inbox: VecDeque<Command>,
    /// Number of times that the inbox was emptied.
    round: u64,
    waiting: WaitQueue,
    /// Number of requests that were refused because a queue was full.
    rejections: u64,
    /// All outboxes with a reader.
    outboxes: Vec<Weak<OutputSender>>,
    failure: Option<Error>,
}

/// A request that has not ended.
#[derive(Default)]
struct RequestEntry {
    pending: Vec<PendingOutput>,
    /// Its running sequences are among its first `width` samples or beams.
    width: u32,
    aborting: bool,
    /// Reservation of KV blocks, kept for the lifetime of the request.
    _promise: Option<Reservation>,
}

/// A generation whose last output is pending.
#[derive(Clone)]
pub struct PendingOutput {
    /// Receiver of the last output.
    pub sender: Arc<OutputSender>,
    /// The last output if the generation ends before it starts.
    pub last: Output,
    /// Ticket in the waiting queue. `None` after its first step, and for samples that start with
    /// another one.
    ticket: Option<Ticket>,
}

/// A sequence after the last step and the commands since then.
#[derive(Clone)]
pub struct SequenceView {
    pub request: RequestId,
    pub index: u32,
    /// Number of tokens.
    pub len: usize,
    /// Whether it waits for the host to resume or free it.
    pub idle: bool,
    /// Whether it is a beam. Beams are chosen together and cannot be used alone.
    pub beam: bool,
    /// Whether K and V come from another instruction path, so that results are not bit-identical.
    pub inexact: bool,
    /// Number of tokens that were appended while it was idle.
    pub fresh: usize,
    /// Priority of the request, or of the parent.
    pub priority: i32,
    /// Value of `round` when a command last changed its length.
    changed: u64,
    pub sender: Arc<OutputSender>,
    pub user_data: u64,
}

impl SequenceView {
    /// Creates an entry for a sequence that has not run.
    pub fn new(request: RequestId, index: u32, len: usize, sender: Arc<OutputSender>, user_data: u64) -> SequenceView {
        let (idle, beam, inexact) = (false, false, false);
        SequenceView { request, index, len, idle, beam, inexact, fresh: 0, priority: 0, changed: 0, sender, user_data }
    }

    fn open(&self) -> PendingOutput {
        let (request, index, user_data) = (self.request, self.index, self.user_data);
        let last = Output { request, user_data, prompt_tokens: self.len as u64, ..Output::default() };
        PendingOutput { sender: self.sender.clone(), last: last.for_sample(index), ticket: None }
    }

    /// Creates an entry for a fork.
    fn fork_entry(&self, id: SeqId, len: usize, sender: Arc<OutputSender>, user_data: u64) -> SequenceView {
        SequenceView { inexact: self.inexact, priority: self.priority, ..SequenceView::new(id.own_request(), 0, len, sender, user_data) }
    }

    /// Returns the waiting entry for a generation that starts at `at` and generates up to
    /// `max_new_tokens` tokens.
    fn waiting_entry(&self, max_new_tokens: usize, at: Duration) -> WaitingEntry {
        WaitingEntry::new(self.fresh.max(1), max_new_tokens, self.priority, at)
    }
}

impl TableState {
    fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Checks whether more requests may wait and whether `sender` has space. Counts a refusal.
    fn check_space(&mut self, limits: QueueLimits, sender: &OutputSender, requests: usize, tokens: usize) -> Result<()> {
        let result = sender.check_space().and_then(|()| self.waiting.total().check(limits, requests, tokens));
        self.rejections += result.is_err() as u64;
        result
    }

    fn abort(&mut self, request: RequestId) -> Result<()> {
        self.inbox.try_reserve(1)?;
        let live = self.requests.get_mut(&request).ok_or_else(|| Error::not_found(format!("request {request} is unknown or has ended")))?;
        if !std::mem::replace(&mut live.aborting, true) {
            self.inbox.push_back(Command::Abort { request });
        }
        Ok(())
    }

    fn end(&mut self, seq: SeqId) -> Result<()> {
        self.inbox.try_reserve(1)?;
        self.inbox.push_back(Command::End { seq });
        Ok(())
    }

    fn sequence(&mut self, seq: SeqId) -> Result<&mut SequenceView> {
        let known = self.sequences.get_mut(&seq).ok_or_else(|| unknown(seq))?;
        if known.beam {
            return Err(Error::invalid(format!(
                "sequence {seq} is a beam of request {}; beams cannot be changed individually",
                known.request
            )));
        }
        Ok(known)
    }

    fn idle(&mut self, seq: SeqId) -> Result<SequenceView> {
        let known = self.sequence(seq)?.clone();
        match known.idle {
            true => Ok(known),
            false => Err(Error::invalid(format!("sequence {seq} runs already; resume it after its end"))),
        }
    }

    fn activate(
        &mut self,
        limits: QueueLimits,
        seq: SeqId,
        known: SequenceView,
        max_new_tokens: usize,
        at: Duration,
    ) -> Result<Box<PendingOutput>> {
        known.sender.check_open()?;
        self.check_space(limits, &known.sender, 1, known.fresh.max(1))?;
        let open = self.open(&known, max_new_tokens, at)?;
        let known = SequenceView { idle: false, fresh: 0, ..known };
        self.sequences.insert(seq, known);
        Ok(Box::new(open))
    }

    /// Starts a generation of the sequence: reserves its last output and adds it to the waiting
    /// queue.
    fn open(&mut self, known: &SequenceView, max_new_tokens: usize, at: Duration) -> Result<PendingOutput> {
        // Everything that can fail comes first.
        self.requests.try_reserve(1)?;
        self.waiting.reserve()?;
        let mut made = RequestEntry::default();
        self.requests.get_mut(&known.request).unwrap_or(&mut made).pending.try_reserve(1)?;
        known.sender.reserve_final(1)?;
        let live = self.requests.entry(known.request).or_insert(made);
        live.width = live.width.max(known.index + 1);
        let open = PendingOutput { ticket: Some(self.waiting.enter(known.waiting_entry(max_new_tokens, at))), ..known.open() };
        live.pending.push(open.clone());
        // An earlier abort does not apply to this generation.
        live.aborting = false;
        Ok(open)
    }

    /// Reverts `open` for a fork.
    fn revert_open(&mut self, id: SeqId) {
        for open in self.requests.remove(&id.own_request()).into_iter().flat_map(|live| live.pending) {
            self.waiting.leave(open.ticket);
            open.sender.release_final(1);
        }
        self.sequences.remove(&id);
    }
}

impl SequenceTable {
    pub fn new(limits: QueueLimits, max_len: usize) -> SequenceTable {
        SequenceTable { limits, max_len, state: Mutex::default(), wakeup: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, TableState> {
        // Each critical section leaves the state consistent, so a poisoned lock is safe to use.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails if the engine has failed.
    pub fn check(&self) -> Result<()> {
        self.lock().check()
    }

    pub fn new_sender(&self, capacity: usize, slack: usize) -> Result<Arc<OutputSender>> {
        let mut state = self.lock();
        state.check()?;
        state.outboxes.try_reserve(1)?;
        let sender = Arc::new(OutputSender::new(capacity, slack, self.wakeup.clone())?);
        state.outboxes.push(Arc::downgrade(&sender));
        Ok(sender)
    }

    /// Runs `act` on the state if the engine has not failed, then wakes the stepping thread.
    fn command<T>(&self, act: impl FnOnce(&mut TableState) -> Result<T>) -> Result<T> {
        let mut state = self.lock();
        state.check()?;
        state.inbox.try_reserve(1)?;
        let result = act(&mut state)?;
        drop(state);
        self.wakeup.wake();
        Ok(result)
    }

    /// Adds a request: allocates its id and those of its samples, and appends its command.
    /// Ids have the order of commands.
    pub fn add(&self, mut work: Box<PreparedRequest>, seed_of: impl Fn(RequestId) -> u64) -> Result<RequestId> {
        self.command(|state| {
            state.requests.try_reserve(1)?;
            state.sequences.try_reserve(1)?;
            // A refused request uses no ids.
            let mut ids = state.ids.clone();
            let width = work.group.branching().max_members() as u32;
            let id = ids.request(width);
            work.name(id, seed_of(id));
            let reservation = work.reservation.take();
            let sequence = &work.sequence;
            let tokens = work.group.prompt().len();
            state.check_space(self.limits, &sequence.sender, 1, tokens)?;
            let (mut open, priority) = (Vec::new(), work.group.priority());
            open.try_reserve_exact(work.returned)?;
            let waits = WaitingEntry::new(tokens, work.group.max_new_tokens(), priority, sequence.timing.requested_at);
            state.waiting.reserve()?;
            sequence.sender.reserve_final(work.returned)?;
            let place = state.waiting.enter(waits);
            let last = |index| PendingOutput {
                sender: sequence.sender.clone(),
                last: sequence.output().for_sample(index),
                ticket: (index == 0).then_some(place),
            };
            open.extend((0..work.returned as u32).map(last));
            state.ids = ids;
            state.requests.insert(id, RequestEntry { pending: open, width, aborting: false, _promise: reservation });
            state.sequences.insert(id.sequence(0), SequenceView { beam: work.beams.is_some(), priority, ..sequence.view(tokens) });
            state.inbox.push_back(Command::Add { id, work });
            Ok(id)
        })
    }

    pub fn abort(&self, request: RequestId) -> Result<()> {
        self.command(|state| state.abort(request))
    }

    /// Assigns ids to `n` children and appends the command that creates them. `child` returns the
    /// parameters of each child.
    pub fn fork(
        &self,
        parent: SeqId,
        len: Option<usize>,
        idle: bool,
        n: usize,
        child: impl Fn(usize, SeqId, &SequenceView) -> Result<ForkedSequence>,
    ) -> Result<Vec<SeqId>> {
        self.command(|state| {
            let known = state.sequence(parent)?.clone();
            let idle = idle || known.idle;
            let at = len.unwrap_or(known.len);
            if at == 0 || at > known.len {
                return Err(Error::invalid(format!(
                    "sequence {parent} has {} tokens and cannot be forked at {at}; must be 1 to {}",
                    known.len, known.len
                )));
            }
            let (mut ids, mut children) = (Vec::new(), Vec::new());
            // A refused fork uses no ids.
            let mut allocator = state.ids.clone();
            ids.try_reserve_exact(n)?;
            children.try_reserve_exact(n)?;
            state.sequences.try_reserve(n)?;
            state.requests.try_reserve(n)?;
            for i in 0..n {
                let id = allocator.sequence();
                let child = child(i, id, &known)?;
                match idle {
                    true => child.sender.check_space()?,
                    false => state.check_space(self.limits, &child.sender, n - i, n - i)?,
                }
                ids.push(id);
                children.push(child);
            }
            for child in &children {
                let (sender, user_data) = (child.sender.clone(), child.user_data);
                let made = SequenceView { idle, ..known.fork_entry(child.id, at, sender, user_data) };
                if !idle && let Err(error) = state.open(&made, self.max_len - at, child.requested_at) {
                    // All or nothing.
                    ids.iter().for_each(|&id| state.revert_open(id));
                    return Err(error);
                }
                state.sequences.insert(child.id, made);
            }
            state.ids = allocator;
            state.inbox.push_back(Command::Fork { parent, len, children, idle });
            Ok(ids)
        })
    }

    pub fn append(&self, seq: SeqId, tokens: Vec<u32>) -> Result<()> {
        self.command(|state| {
            let round = state.round;
            let known = state.sequence(seq)?;
            // A running sequence needs space for the token that it samples next.
            let max_len = if known.idle { self.max_len } else { self.max_len - 1 };
            if tokens.len() > max_len.saturating_sub(known.len) {
                return Err(Error::invalid(format!(
                    "sequence {seq} has {} tokens and max_model_len is {}; {} more do not fit",
                    known.len,
                    self.max_len,
                    tokens.len()
                )));
            }
            known.changed = round;
            known.len += tokens.len();
            known.fresh += if known.idle { tokens.len() } else { 0 };
            state.inbox.push_back(Command::Append { seq, tokens });
            Ok(())
        })
    }

    pub fn rewind(&self, seq: SeqId, len: usize) -> Result<()> {
        self.command(|state| {
            let round = state.round;
            let known = state.sequence(seq)?;
            if len == 0 || len > known.len {
                return Err(Error::invalid(format!(
                    "sequence {seq} cannot be rewound to {len} tokens (it has {}); must be 1 to {}",
                    known.len, known.len
                )));
            }
            known.fresh = known.fresh.saturating_sub(known.len - len);
            (known.len, known.changed) = (len, round);
            state.inbox.push_back(Command::Rewind { seq, len });
            Ok(())
        })
    }

    pub fn resume(&self, seq: SeqId, generation: impl FnOnce(&SequenceView) -> Result<Generation>) -> Result<()> {
        self.command(|state| {
            let known = state.idle(seq)?;
            let generation = Box::new(generation(&known)?);
            let max_new_tokens = generation.sampling.params.max_tokens.unwrap_or(self.max_len).min(self.max_len.saturating_sub(known.len));
            let known = SequenceView { sender: generation.sender.clone(), user_data: generation.user_data, ..known };
            let open = state.activate(self.limits, seq, known, max_new_tokens, generation.requested_at)?;
            state.inbox.push_back(Command::Resume { seq, generation, open });
            Ok(())
        })
    }

    pub fn continue_sequence(&self, seq: SeqId, how: Continue, requested_at: Duration, deadline: Option<Duration>) -> Result<()> {
        let Continue { keep, queue, user_data, hook, .. } = how;
        self.command(|state| {
            let known = state.idle(seq)?;
            let (sender, user_data) = (queue.map_or(&known.sender, Queue::sender).clone(), user_data.unwrap_or(known.user_data));
            let max_new_tokens = self.max_len.saturating_sub(known.len);
            let open = state.activate(self.limits, seq, SequenceView { sender, user_data, ..known }, max_new_tokens, requested_at)?;
            state.inbox.push_back(Command::Continue { seq, keep, hook, deadline, open, requested_at });
            Ok(())
        })
    }

    /// Appends a command of a journal, which was checked when it was recorded.
    pub fn replay(&self, command: Command) -> Result<()> {
        self.command(|state| {
            state.inbox.push_back(command);
            Ok(())
        })
    }

    /// Appends a fork of a journal. The parent may have ended after the original call.
    pub fn replay_fork(
        &self,
        parent: SeqId,
        len: Option<usize>,
        forked: &[RecordedFork],
        idle: bool,
        sender: &Arc<OutputSender>,
    ) -> Result<()> {
        self.command(|state| {
            let known =
                state.sequences.get(&parent).cloned().unwrap_or_else(|| SequenceView::new(parent.own_request(), 0, 0, sender.clone(), 0));
            let at = len.unwrap_or(known.len);
            let mut children = Vec::new();
            for &RecordedFork { id, seed, user_data, at: requested_at } in forked {
                let sender = sender.clone();
                state.ids.continue_after(id);
                let made = SequenceView { idle, ..known.fork_entry(id, at, sender.clone(), user_data) };
                if !idle {
                    state.open(&made, self.max_len.saturating_sub(at), requested_at)?;
                }
                state.sequences.insert(id, made);
                children.push(ForkedSequence { id, seed, user_data, sender, requested_at });
            }
            state.inbox.push_back(Command::Fork { parent, len, children, idle });
            Ok(())
        })
    }

    /// Appends an export of a journal. The sequence may have ended after the original call.
    pub fn replay_export(&self, seq: SeqId, sender: &Arc<OutputSender>) -> Result<()> {
        self.command(|state| {
            let known = state.sequences.get(&seq).map(SequenceView::open);
            let last = known.map_or_else(|| Output { request: seq.own_request(), sequence: seq, ..Output::default() }, |open| open.last);
            state.inbox.push_back(Command::Export { seq, open: Box::new(PendingOutput { sender: sender.clone(), last, ticket: None }) });
            Ok(())
        })
    }

    /// Frees a sequence. Its id is unknown from now on.
    pub fn free(&self, seq: SeqId) -> Result<()> {
        self.command(|state| {
            state.sequence(seq)?;
            state.sequences.remove(&seq);
            state.inbox.push_back(Command::Free { seq });
            Ok(())
        })
    }

    pub fn sequence(&self, seq: SeqId) -> Result<SequenceView> {
        let state = self.lock();
        state.check()?;
        state.sequences.get(&seq).cloned().ok_or_else(|| unknown(seq))
    }

    /// Exports a sequence. Its state follows as an output.
    pub fn export(&self, seq: SeqId, sender: Option<&Arc<OutputSender>>) -> Result<()> {
        self.command(|state| {
            let known = state.sequence(seq)?;
            let open = PendingOutput { sender: sender.unwrap_or(&known.sender).clone(), ..known.open() };
            open.sender.check_open()?;
            open.sender.check_space()?;
            state.inbox.push_back(Command::Export { seq, open: Box::new(open) });
            Ok(())
        })
    }

    pub fn import(&self, generation: Generation, sequence_state: SequenceState<'static>, inexact: bool) -> Result<SeqId> {
        self.command(|state| {
            state.sequences.try_reserve(1)?;
            let id = state.ids.sequence();
            let (sender, user_data, len) = (generation.sender.clone(), generation.user_data, sequence_state.header.tokens.len());
            state
                .sequences
                .insert(id, SequenceView { idle: true, inexact, ..SequenceView::new(id.own_request(), 0, len, sender, user_data) });
            state.inbox.push_back(Command::Import { id, generation: Box::new(generation), sequence_state: Box::new(sequence_state) });
            Ok(id)
        })
    }

    pub fn pin(&self, candidate: Box<PreparedGroup>, priority: u32, salt: Vec<u8>, until: Option<Duration>) -> Result<PinId> {
        self.command(|state| {
            state.pins.try_reserve(1)?;
            let id = state.ids.pin();
            state.pins.push(id);
            state.inbox.push_back(Command::Pin { id, candidate, priority, salt, until });
            Ok(id)
        })
    }

    pub fn unpin(&self, id: PinId) -> Result<()> {
        self.command(|state| {
            let place = state.pins.iter().position(|&other| other == id);
            let place = place.ok_or_else(|| Error::not_found(format!("pin {id} is unknown, expired or evicted")))?;
            state.pins.swap_remove(place);
            state.inbox.push_back(Command::Unpin { id });
            Ok(())
        })
    }

    /// Removes a queue whose reader is gone, and ends the generations that write to it.
    pub fn remove_queue(&self, sender: &Arc<OutputSender>) {
        let mut state = self.lock();
        state.outboxes.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(sender)));
        // Writers hold a reference too.
        if Arc::strong_count(sender) == 1 {
            return;
        }
        let mut orphans = Vec::new();
        for (&request, live) in &state.requests {
            let writes = |open: &&PendingOutput| Arc::ptr_eq(&open.sender, sender);
            // Without memory for the command, the sequence runs to its end, and its outputs are
            // discarded.
            if orphans.try_reserve(live.pending.len()).is_err() {
                continue;
            }
            match live.pending.iter().all(|open| writes(&open)) {
                true => orphans.push(Command::Abort { request }),
                // Other sequences of the request were resumed with another queue.
                false => orphans.extend(live.pending.iter().filter(writes).map(|open| Command::End { seq: open.last.sequence })),
            }
        }
        for orphan in &orphans {
            // As above, without memory the sequence runs to its end.
            let _ = match *orphan {
                Command::Abort { request } => state.abort(request),
                Command::End { seq } => state.end(seq),
                _ => Ok(()),
            };
        }
        drop(state);
        if !orphans.is_empty() {
            self.wakeup.wake();
        }
    }

    /// Swaps the pending commands with the empty `inbox`.
    pub fn take_commands(&self, inbox: &mut VecDeque<Command>) {
        let mut state = self.lock();
        state.round += 1;
        std::mem::swap(&mut state.inbox, inbox);
    }

    /// Adds a sequence that was created by a step, as one of the samples of a request.
    pub fn insert_fork(&self, seq: SeqId, known: SequenceView) -> Result<()> {
        let mut state = self.lock();
        state.sequences.try_reserve(1)?;
        let priority = state.sequences.get(&known.request.sequence(0)).map_or(0, |first| first.priority);
        state.sequences.insert(seq, SequenceView { priority, ..known });
        Ok(())
    }

    /// Updates the lengths of sequences after a step.
    pub fn update_lengths(&self, lens: impl Iterator<Item = (SeqId, usize)>) {
        let mut state = self.lock();
        let TableState { sequences, round, .. } = &mut *state;
        for (seq, len) in lens {
            // The length already includes commands that the step has not applied.
            if let Some(known) = sequences.get_mut(&seq).filter(|known| known.changed != *round) {
                known.len = len;
            }
        }
    }

    /// Records the end of a generation. If the sequence is kept, `kept` is its length.
    pub fn mark_ended(&self, output: &Output, kept: Option<usize>) {
        let mut state = self.lock();
        match kept {
            Some(len) => {
                if let Some(known) = state.sequences.get_mut(&output.sequence) {
                    (known.len, known.idle) = (len, true);
                }
            }
            None => drop(state.sequences.remove(&output.sequence)),
        }
        let TableState { requests: live, waiting, .. } = &mut *state;
        if let Some(ending) = live.get_mut(&output.request) {
            let is_over = |open: &mut PendingOutput| open.last.index == output.index;
            ending.pending.extract_if(.., is_over).for_each(|open| waiting.leave(open.ticket));
            if ending.pending.is_empty() {
                live.remove(&output.request);
            }
        }
    }

    /// Returns the index of the first sequence of the request with a pending last output, except
    /// `beside`.
    pub fn open(&self, request: RequestId, beside: Option<u32>) -> Option<u32> {
        let state = self.lock();
        state.requests.get(&request)?.pending.iter().map(|open| open.last.index).find(|&index| Some(index) != beside)
    }

    /// Returns ids that include those of all running sequences of the request.
    pub fn ids(&self, request: RequestId) -> impl Iterator<Item = SeqId> + use<> {
        request.sequences(self.lock().requests.get(&request).map_or(0, |live| live.width))
    }

    /// Removes a sequence that was never created or is not returned.
    pub fn remove(&self, seq: SeqId) {
        self.lock().sequences.remove(&seq);
    }

    pub fn remove_pin(&self, id: PinId) {
        self.lock().pins.retain(|&other| other != id);
    }

    /// Removes a generation from the waiting queue after its first step.
    pub fn mark_started(&self, request: RequestId, seq: SeqId) {
        let mut state = self.lock();
        let TableState { requests: live, waiting, .. } = &mut *state;
        if let Some(open) = live.get_mut(&request).and_then(|live| live.pending.iter_mut().find(|open| open.last.sequence == seq)) {
            waiting.leave(open.ticket.take());
        }
    }

    /// Returns whether a request with `tokens` tokens would be admitted to the waiting queue.
    pub fn would_admit(&self, sender: &OutputSender, tokens: usize) -> bool {
        sender.check_space().and_then(|()| self.lock().waiting.total().check(self.limits, 1, tokens)).is_ok()
    }

    /// Returns all waiting entries in order of arrival.
    ///
    /// The lock is held for at most `AT_ONCE` entries (100 KB, some microseconds), so that the call
    /// delays neither the stepping thread nor other callers. Entries that come or go during the
    /// call may be missing or included.
    pub fn waiting(&self) -> Result<Vec<WaitingEntry>> {
        const AT_ONCE: usize = 4096;
        let (mut all, mut last) = (Vec::new(), None);
        loop {
            all.try_reserve(AT_ONCE)?;
            let seen = self.lock().waiting.copy(last, AT_ONCE, &mut all);
            if seen.is_none() {
                return Ok(all);
            }
            last = seen;
        }
    }

    pub fn rejections(&self) -> u64 {
        self.lock().rejections
    }

    pub fn unfinished(&self) -> u64 {
        self.lock().requests.len() as u64
    }

    /// Makes all later commands fail with `error`. Calls `last` for each pending generation, with
    /// its queue and its last output if it has not started.
    pub fn fail(&self, error: &Error, mut last: impl FnMut(Arc<OutputSender>, Output)) {
        let mut state = self.lock();
        state.failure.get_or_insert_with(|| error.clone());
        state.inbox.clear();
        state.sequences.clear();
        state.waiting = WaitQueue::default();
        let mut live = std::mem::take(&mut state.requests);
        drop(state);
        // Sorted by id, so that a replay has the same order. Without memory for the ids, the order
        // is undefined.
        let mut ids = Vec::new();
        if ids.try_reserve_exact(live.len()).is_ok() {
            ids.extend(live.keys().copied());
            ids.sort_unstable();
        }
        let mut end = |live: RequestEntry| live.pending.into_iter().for_each(|open| last(open.sender, open.last));
        ids.into_iter().filter_map(|id| live.remove(&id)).for_each(&mut end);
        live.into_values().for_each(end);
    }

    /// Closes all queues, after `fail` and the last outputs.
    pub fn close_queues(&self, error: &Error) {
        let outboxes = self.lock().outboxes.clone();
        outboxes.iter().filter_map(Weak::upgrade).for_each(|sender| sender.close(error));
    }
}

fn unknown(seq: SeqId) -> Error {
    Error::not_found(format!("sequence {seq} is unknown, has not started, or has ended and was not kept"))
}
