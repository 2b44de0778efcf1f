//! The table of live requests and sequences, and the commands for them. All threads use it, under
//! one lock that is held briefly.

mod updates;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::LogitsHook;
use super::command::{Command, ForkedSequence, ImportedSequence, PendingOutput};
use super::held_forks::CHILD_WORK;
use super::inbox::Inbox;
use super::request::PreparedRequest;
use super::sequence::Generation;
use super::sequence_view::SequenceView;
use super::wait_queue::{QueueLimits, WaitQueue, WaitingEntry};
use crate::error::{Error, Result};
use crate::memory::budget::Reservation;
use crate::output::batch::SparePages;
use crate::output::queue::OutputSender;
use crate::output::wakeup::Wakeup;
use crate::scheduler::PreparedGroup;
use crate::types::id_map::IdMap;
use crate::types::outputs::Output;
use crate::types::{IdAllocator, PinId, QueueId, RequestId, SeqId};

/// The requests that have not ended, their sequences and the pending commands.
pub struct SequenceTable {
    limits: QueueLimits,
    /// Maximum length of a sequence in tokens.
    max_len: usize,
    state: Mutex<TableState>,
    /// Wakes the stepping thread when there are commands.
    pub wakeup: Arc<Wakeup>,
    spare_pages: Arc<SparePages>,
}

/// The contents of the table, under its lock.
#[derive(Default)]
struct TableState {
    ids: IdAllocator,
    requests: IdMap<RequestId, RequestEntry>,
    sequences: IdMap<SeqId, SequenceView>,
    pins: Vec<Pin>,
    /// Id of the last queue.
    last_queue: QueueId,
    inbox: Inbox,
    waiting: WaitQueue,
    /// Number of requests that were refused because a queue was full.
    rejections: u64,
    /// Senders of all queues with a reader.
    senders: Vec<Weak<OutputSender>>,
    failure: Option<Error>,
}

/// A prompt whose blocks stay in the prefix cache until `until`.
struct Pin {
    id: PinId,
    until: Option<Duration>,
}

/// A request that has not ended. If the stepping thread fails, the table ends it without the
/// sequences of that thread.
#[derive(Default)]
struct RequestEntry {
    pending: Vec<PendingOutput>,
    /// Its running sequences are among its first `width` samples or beams.
    width: u32,
    aborting: bool,
    /// Number of the last command for one of its sequences.
    last_command: u64,
    /// Reservation of KV blocks, kept for the lifetime of the request.
    _reservation: Option<Reservation>,
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
        self.inbox.reserve()?;
        let entry =
            self.requests.get_mut(&request).ok_or_else(|| Error::not_found(format!("request {request} is unknown or has ended")))?;
        if std::mem::replace(&mut entry.aborting, true) {
            return Ok(());
        }
        // The abort of a running request takes effect in the next step, even if many commands wait.
        match entry.pending.iter().all(|pending| pending.ticket.is_none()) {
            true => self.inbox.push_urgent(Command::Abort { request }, entry.last_command),
            false => _ = self.inbox.push(Command::Abort { request }, 0),
        }
        Ok(())
    }

    fn end(&mut self, seq: SeqId) -> Result<()> {
        self.inbox.reserve()?;
        self.push(seq, Command::End { seq }, 0);
        Ok(())
    }

    /// Appends a command for a sequence that copies or checks `tokens` tokens.
    fn push(&mut self, seq: SeqId, command: Command, tokens: usize) {
        let number = self.inbox.push(command, tokens);
        let Some(view) = self.sequences.get_mut(&seq) else { return };
        if let Some(entry) = self.requests.get_mut(&view.request) {
            entry.last_command = number;
        }
        view.last_command = number;
    }

    fn sequence(&mut self, seq: SeqId) -> Result<&mut SequenceView> {
        let view = self.sequences.get_mut(&seq).ok_or_else(|| unknown(seq))?;
        if view.beam {
            return Err(Error::invalid(format!(
                "sequence {seq} is a beam of request {}; beams cannot be changed individually",
                view.request
            )));
        }
        Ok(view)
    }

    fn idle(&mut self, seq: SeqId) -> Result<SequenceView> {
        let view = self.sequence(seq)?.clone();
        match view.idle {
            true => Ok(view),
            false => Err(Error::invalid(format!("sequence {seq} runs already; resume it after its end"))),
        }
    }

    fn activate(
        &mut self,
        limits: QueueLimits,
        seq: SeqId,
        view: SequenceView,
        max_new_tokens: usize,
        at: Duration,
    ) -> Result<Box<PendingOutput>> {
        view.sender.check_open()?;
        self.check_space(limits, &view.sender, 1, view.fresh.max(1))?;
        let pending = self.start_generation(&view, max_new_tokens, at)?;
        let view = SequenceView { idle: false, fresh: 0, ..view };
        self.sequences.insert(seq, view);
        Ok(Box::new(pending))
    }

    /// Starts a generation of the sequence: reserves its last output and adds it to the waiting
    /// queue.
    fn start_generation(&mut self, view: &SequenceView, max_new_tokens: usize, at: Duration) -> Result<PendingOutput> {
        // Everything that can fail comes first.
        self.requests.try_reserve(1)?;
        self.waiting.reserve()?;
        let mut new_entry = RequestEntry::default();
        self.requests.get_mut(&view.request).unwrap_or(&mut new_entry).pending.try_reserve(1)?;
        view.sender.reserve_final(1)?;
        let entry = self.requests.entry(view.request).or_insert(new_entry);
        entry.width = entry.width.max(view.index + 1);
        let ticket = self.waiting.enter(view.waiting_entry(max_new_tokens, at));
        let pending = PendingOutput { ticket: Some(ticket), ..view.pending_output() };
        entry.pending.push(pending.clone());
        // An earlier abort does not apply to this generation.
        entry.aborting = false;
        Ok(pending)
    }

    /// Reverts `start_generation` for a fork.
    fn revert_start(&mut self, id: SeqId) {
        for pending in self.requests.remove(&id.own_request()).into_iter().flat_map(|entry| entry.pending) {
            self.waiting.leave(pending.ticket);
            pending.sender.release_final(1);
        }
        self.sequences.remove(&id);
    }
}

impl SequenceTable {
    pub fn new(limits: QueueLimits, max_len: usize, max_seqs: usize) -> SequenceTable {
        let spare_pages = Arc::new(SparePages::new(max_seqs));
        SequenceTable { limits, max_len, state: Mutex::default(), wakeup: Arc::default(), spare_pages }
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
        self.sender(None, capacity, slack)
    }

    /// Creates a queue that is never full, with the id that a queue has in a journal.
    pub fn replay_sender(&self, id: QueueId) -> Result<Arc<OutputSender>> {
        self.sender(Some(id), usize::MAX, 0)
    }

    fn sender(&self, id: Option<QueueId>, capacity: usize, slack: usize) -> Result<Arc<OutputSender>> {
        let mut state = self.lock();
        state.check()?;
        state.senders.try_reserve(1)?;
        self.wakeup.reserve(state.senders.len() + 1)?;
        let id = id.unwrap_or(state.last_queue.next());
        let sender = Arc::new(OutputSender::new(id, capacity, slack, self.spare_pages.clone(), self.wakeup.clone()));
        state.senders.push(Arc::downgrade(&sender));
        state.last_queue = id;
        Ok(sender)
    }

    /// Runs `act` on the state if the engine has not failed, then wakes the stepping thread.
    fn command<T>(&self, act: impl FnOnce(&mut TableState) -> Result<T>) -> Result<T> {
        let mut state = self.lock();
        state.check()?;
        state.inbox.reserve()?;
        let result = act(&mut state)?;
        drop(state);
        self.wakeup.wake();
        Ok(result)
    }

    /// Adds a request: allocates its id and those of its samples, and appends its command.
    /// Ids have the order of commands.
    pub fn add(&self, mut prepared: Box<PreparedRequest>, seed_of: impl Fn(RequestId) -> u64) -> Result<RequestId> {
        self.command(|state| {
            state.requests.try_reserve(1)?;
            state.sequences.try_reserve(1)?;
            // A refused request uses no ids.
            let mut ids = state.ids.clone();
            let width = prepared.group.branching().max_members() as u32;
            let id = ids.request(width);
            prepared.set_id(id, seed_of(id));
            let reservation = prepared.reservation.take();
            let Generation { sender, timing, .. } = &prepared.sequence.generation;
            let tokens = prepared.group.prompt().len();
            state.check_space(self.limits, sender, 1, tokens)?;
            let (mut pending, priority) = (Vec::new(), prepared.group.priority());
            pending.try_reserve_exact(prepared.returned)?;
            let entry = WaitingEntry::new(tokens, prepared.group.max_new_tokens(), priority, timing.requested_at);
            state.waiting.reserve()?;
            sender.reserve_final(prepared.returned)?;
            let ticket = state.waiting.enter(entry);
            let last = |index| PendingOutput {
                sender: sender.clone(),
                last: prepared.sequence.output().for_sample(index),
                ticket: (index == 0).then_some(ticket),
            };
            pending.extend((0..prepared.returned as u32).map(last));
            state.ids = ids;
            state.requests.insert(id, RequestEntry { pending, width, _reservation: reservation, ..RequestEntry::default() });
            state.sequences.insert(
                id.sequence(0),
                SequenceView { beam: prepared.beams.is_some(), priority, ..SequenceView::from_sequence(&prepared.sequence, tokens) },
            );
            state.push(id.sequence(0), Command::Add { id, prepared }, tokens);
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
            let view = state.sequence(parent)?.clone();
            let idle = idle || view.idle;
            let at = len.unwrap_or(view.len);
            if at == 0 || at > view.len {
                return Err(Error::invalid(format!(
                    "sequence {parent} has {} tokens and cannot be forked at {at}; must be 1 to {}",
                    view.len, view.len
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
                let child = child(i, id, &view)?;
                match idle {
                    true => child.sender.check_space()?,
                    false => state.check_space(self.limits, &child.sender, n - i, n - i)?,
                }
                ids.push(id);
                children.push(child);
            }
            for child in &children {
                let (sender, user_data) = (child.sender.clone(), child.user_data);
                let forked = SequenceView { idle, ..view.fork_entry(child.id, at, sender, user_data) };
                if !idle && let Err(error) = state.start_generation(&forked, self.max_len - at, child.requested_at) {
                    // All or nothing.
                    ids.iter().for_each(|&id| state.revert_start(id));
                    return Err(error);
                }
                state.sequences.insert(child.id, forked);
            }
            state.ids = allocator;
            state.push(parent, Command::Fork { parent, len, children, idle }, at.saturating_add(CHILD_WORK).saturating_mul(n));
            Ok(ids)
        })
    }

    pub fn append(&self, seq: SeqId, tokens: Vec<u32>) -> Result<()> {
        self.command(|state| {
            let view = state.sequence(seq)?;
            // A running sequence needs space for the token that it samples next.
            let max_len = if view.idle || view.prompt_only { self.max_len } else { self.max_len - 1 };
            if tokens.len() > max_len.saturating_sub(view.len) {
                return Err(Error::invalid(format!(
                    "sequence {seq} has {} tokens and max_model_len is {}; {} more do not fit",
                    view.len,
                    self.max_len,
                    tokens.len()
                )));
            }
            view.len += tokens.len();
            view.fresh += if view.idle { tokens.len() } else { 0 };
            let len = tokens.len();
            state.push(seq, Command::Append { seq, tokens }, len);
            Ok(())
        })
    }

    pub fn rewind(&self, seq: SeqId, len: usize) -> Result<()> {
        self.command(|state| {
            let view = state.sequence(seq)?;
            if len == 0 || len > view.len {
                return Err(Error::invalid(format!(
                    "sequence {seq} cannot be rewound to {len} tokens (it has {}); must be 1 to {}",
                    view.len, view.len
                )));
            }
            view.fresh = view.fresh.saturating_sub(view.len - len);
            view.len = len;
            state.push(seq, Command::Rewind { seq, len }, len);
            Ok(())
        })
    }

    pub fn resume(&self, seq: SeqId, keep: bool, generation: impl FnOnce(&SequenceView) -> Result<Generation>) -> Result<()> {
        self.command(|state| {
            let view = state.idle(seq)?;
            let generation = Box::new(generation(&view)?);
            let max_new_tokens = generation.sampling.params().max_tokens.unwrap_or(self.max_len).min(self.max_len.saturating_sub(view.len));
            let len = view.len;
            let (sender, user_data) = (generation.sender.clone(), generation.user_data);
            let view = SequenceView { sender, user_data, prompt_only: generation.sampling.params().is_prompt_only(), ..view };
            let pending = state.activate(self.limits, seq, view, max_new_tokens, generation.timing.requested_at)?;
            state.push(seq, Command::Resume { seq, keep, generation, pending }, len);
            Ok(())
        })
    }

    /// Continues an idle sequence. `sender` and `user_data` are those of the last generation if
    /// they are `None`.
    pub fn continue_sequence(
        &self,
        seq: SeqId,
        keep: bool,
        sender: Option<&Arc<OutputSender>>,
        user_data: Option<u64>,
        hook: Option<LogitsHook>,
        (requested_at, deadline): (Duration, Option<Duration>),
    ) -> Result<()> {
        self.command(|state| {
            let view = state.idle(seq)?;
            let (sender, user_data) = (sender.unwrap_or(&view.sender).clone(), user_data.unwrap_or(view.user_data));
            let (len, max_new_tokens) = (view.len, self.max_len.saturating_sub(view.len));
            let pending = state.activate(self.limits, seq, SequenceView { sender, user_data, ..view }, max_new_tokens, requested_at)?;
            state.push(seq, Command::Continue { seq, keep, hook, deadline, pending, requested_at }, len);
            Ok(())
        })
    }

    /// Makes each step take all commands in the order of their calls.
    pub fn keep_order(&self) {
        self.lock().inbox.keep_order();
    }

    /// Makes sure that the table has the idle sequence of a journal's command. The sequence may
    /// have failed to be created after the original call, which then ends with an error.
    pub fn replay_idle(&self, seq: SeqId, sender: &Arc<OutputSender>) -> Result<()> {
        let mut state = self.lock();
        state.sequences.try_reserve(1)?;
        let lost = || SequenceView { idle: true, ..SequenceView::new(seq.own_request(), 0, 1, sender.clone(), 0) };
        state.sequences.entry(seq).or_insert_with(lost);
        Ok(())
    }

    /// Appends a command of a journal, which was checked when it was recorded.
    pub fn replay(&self, command: Command) -> Result<()> {
        self.command(|state| {
            state.inbox.push(command, 0);
            Ok(())
        })
    }

    /// Appends a fork of a journal. The parent may have ended after the original call.
    pub fn replay_fork(&self, parent: SeqId, len: Option<usize>, children: Vec<ForkedSequence>, idle: bool) -> Result<()> {
        self.command(|state| {
            let view = state.sequences.get(&parent).cloned();
            for child in &children {
                let (sender, user_data) = (child.sender.clone(), child.user_data);
                let view = view.clone().unwrap_or_else(|| SequenceView::new(parent.own_request(), 0, 0, sender.clone(), 0));
                let at = len.unwrap_or(view.len);
                state.ids.continue_after(child.id);
                let forked = SequenceView { idle, ..view.fork_entry(child.id, at, sender, user_data) };
                if !idle {
                    state.start_generation(&forked, self.max_len.saturating_sub(at), child.requested_at)?;
                }
                state.sequences.insert(child.id, forked);
            }
            state.inbox.push(Command::Fork { parent, len, children, idle }, 0);
            Ok(())
        })
    }

    /// Appends an export of a journal. The sequence may have ended after the original call.
    pub fn replay_export(&self, seq: SeqId, sender: &Arc<OutputSender>) -> Result<()> {
        self.command(|state| {
            let view = state.sequences.get(&seq).map(SequenceView::pending_output);
            let last =
                view.map_or_else(|| Output { request: seq.own_request(), sequence: seq, ..Output::default() }, |pending| pending.last);
            state.inbox.push(Command::Export { seq, pending: Box::new(PendingOutput { sender: sender.clone(), last, ticket: None }) }, 0);
            Ok(())
        })
    }

    /// Frees a sequence. Its id is unknown from now on.
    pub fn free(&self, seq: SeqId) -> Result<()> {
        self.command(|state| {
            state.sequence(seq)?;
            state.push(seq, Command::Free { seq }, 0);
            state.sequences.remove(&seq);
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
            let view = state.sequence(seq)?;
            let pending = PendingOutput { sender: sender.unwrap_or(&view.sender).clone(), ..view.pending_output() };
            pending.sender.check_open()?;
            pending.sender.check_space()?;
            state.push(seq, Command::Export { seq, pending: Box::new(pending) }, 0);
            Ok(())
        })
    }

    pub fn import(&self, mut imported: Box<ImportedSequence>) -> Result<SeqId> {
        self.command(|state| {
            state.sequences.try_reserve(1)?;
            let id = state.ids.sequence();
            let ImportedSequence { sequence, header, .. } = &mut *imported;
            (sequence.request, sequence.id) = (id.own_request(), id);
            let (sender, len) = (sequence.generation.sender.clone(), header.tokens.len());
            let view = SequenceView::new(id.own_request(), 0, len, sender, sequence.generation.user_data);
            state.sequences.insert(
                id,
                SequenceView { idle: true, inexact: sequence.inexact, prompt_only: sequence.params().is_prompt_only(), ..view },
            );
            state.push(id, Command::Import { id, imported }, len);
            Ok(id)
        })
    }

    pub fn pin(&self, group: Box<PreparedGroup>, priority: u32, salt: Vec<u8>, until: Option<Duration>) -> Result<PinId> {
        self.command(|state| {
            state.pins.try_reserve(1)?;
            let id = state.ids.pin();
            state.pins.push(Pin { id, until });
            let tokens = group.prompt().len();
            state.inbox.push(Command::Pin { id, group, priority, salt }, tokens);
            Ok(id)
        })
    }

    pub fn unpin(&self, id: PinId) -> Result<()> {
        self.command(|state| {
            let place = state.pins.iter().position(|pin| pin.id == id);
            let place = place.ok_or_else(|| Error::not_found(format!("pin {id} is unknown, expired or evicted")))?;
            state.pins.swap_remove(place);
            state.inbox.push(Command::Unpin { id }, 0);
            Ok(())
        })
    }
}

fn unknown(seq: SeqId) -> Error {
    Error::not_found(format!("sequence {seq} is unknown, has not started, or has ended and was not kept"))
}
