//! The requests that have not ended, the sequences there are, and the commands for them: what other threads touch, under one
//! short lock.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::LogitsHook;
use super::blob::Blob;
use super::driver::Wakeup;
use super::forecast::Waits;
use super::journal::Forked;
use super::outputs::Output;
use super::queue::{Outbox, Queue};
use super::request::Work;
use super::sequences::GoOn;
use super::stream::Turn;
use super::waiting::{QueueLimits, Waiting};
use crate::arena::Promise;
use crate::error::{Error, Result};

/// What the next step will do first.
pub enum Command {
    Add { id: u64, work: Box<Work> },
    Abort { request: u64 },
    End { seq: u64 },
    Fork { parent: u64, len: Option<usize>, children: Vec<Child>, idle: bool },
    Append { seq: u64, tokens: Vec<u32> },
    Rewind { seq: u64, len: usize },
    Resume { seq: u64, turn: Box<Turn>, open: Box<Open> },
    Free { seq: u64 },
    GoOn { seq: u64, keep: bool, hook: Option<LogitsHook>, deadline: Option<Duration>, open: Box<Open>, asked: Duration },
    Export { seq: u64, open: Box<Open> },
    Import { id: u64, turn: Box<Turn>, blob: Box<Blob<'static>> },
    Pin { id: u64, tokens: Vec<u32>, priority: u32, salt: Vec<u8>, until: Option<Duration> },
    Unpin { id: u64 },
}

/// A sequence that a fork is to make.
pub struct Child {
    pub id: u64,
    /// None: it draws the same random numbers as its parent.
    pub seed: Option<u64>,
    pub user_data: u64,
    pub outbox: Arc<Outbox>,
    /// When the host asked for it.
    pub asked: Duration,
}

pub struct Registry {
    limits: QueueLimits,
    state: Mutex<State>,
    /// Wakes the driver: there are commands.
    pub wakeup: Arc<Wakeup>,
}

#[derive(Default)]
struct State {
    last_id: u64,
    live: HashMap<u64, Live>,
    sequences: HashMap<u64, Known>,
    /// Pins, by id.
    pins: Vec<u64>,
    inbox: VecDeque<Command>,
    waiting: Waiting,
    /// Requests that were refused for lack of room in a queue.
    rejections: u64,
    /// All that have a reader.
    outboxes: Vec<Weak<Outbox>>,
    failure: Option<Error>,
}

/// A request that has not ended.
#[derive(Default)]
struct Live {
    open: Vec<Open>,
    aborting: bool,
    /// Kept as long as it lives: that there is room for its sequences.
    _promise: Option<Promise>,
}

/// One of its sequences whose last output is still to come.
#[derive(Clone)]
pub struct Open {
    /// Where it goes.
    pub outbox: Arc<Outbox>,
    /// What it says if the sequence ends before it has begun.
    pub last: Output,
    /// The tokens for which it waits; 0 once a step has computed some of them, and for those that begin with another.
    waits: usize,
    /// How many tokens the host allows it.
    max_tokens: Option<usize>,
}

impl Command {
    /// The sequence whose length it changes.
    fn changes(&self) -> Option<u64> {
        match self {
            Command::Append { seq, .. } | Command::Rewind { seq, .. } => Some(*seq),
            _ => None,
        }
    }
}

/// A sequence as of the last committed step, and of the commands since.
#[derive(Clone)]
pub struct Known {
    pub request: u64,
    pub index: u32,
    /// Its tokens.
    pub len: usize,
    /// It waits for the host to resume or free it.
    pub idle: bool,
    /// One of several that are chosen together: it cannot be taken out of them.
    pub beam: bool,
    /// Its K and V come from another instruction path: its bits are not those of this one.
    pub inexact: bool,
    /// Tokens that were appended while it was idle.
    pub fresh: usize,
    pub outbox: Arc<Outbox>,
    pub user_data: u64,
}

impl Known {
    fn open(&self) -> Open {
        let (request, index, user_data) = (self.request, self.index, self.user_data);
        let last = Output { request, sequence: request, user_data, prompt_tokens: self.len as u64, ..Output::default() };
        Open { outbox: self.outbox.clone(), last: last.of(index), waits: self.fresh.max(1), max_tokens: None }
    }
}

impl State {
    fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Whether so much more may wait, of which the outputs go to `outbox`. A refusal is counted.
    fn check_room(&mut self, limits: QueueLimits, outbox: &Outbox, requests: usize, tokens: usize) -> Result<()> {
        let result = outbox.check_room().and_then(|()| self.waiting.check(limits, requests, tokens));
        self.rejections += result.is_err() as u64;
        result
    }

    fn abort(&mut self, request: u64) -> Result<()> {
        self.inbox.try_reserve(1)?;
        let live = self.live.get_mut(&request).ok_or_else(|| Error::not_found(format!("request {request} is unknown or has ended")))?;
        if !std::mem::replace(&mut live.aborting, true) {
            self.inbox.push_back(Command::Abort { request });
        }
        Ok(())
    }

    fn end(&mut self, seq: u64) -> Result<()> {
        self.inbox.try_reserve(1)?;
        self.inbox.push_back(Command::End { seq });
        Ok(())
    }

    fn sequence(&mut self, seq: u64) -> Result<&mut Known> {
        let known = self.sequences.get_mut(&seq).ok_or_else(|| unknown(seq))?;
        if known.beam {
            return Err(Error::invalid(format!(
                "sequence {seq} is one of the beams of request {}: they are chosen together",
                known.request
            )));
        }
        Ok(known)
    }

    fn idle(&mut self, seq: u64) -> Result<Known> {
        let known = self.sequence(seq)?.clone();
        match known.idle {
            true => Ok(known),
            false => Err(Error::invalid(format!("sequence {seq} runs already: it can be resumed when it has ended"))),
        }
    }

    fn awake(&mut self, limits: QueueLimits, seq: u64, known: Known) -> Result<Box<Open>> {
        known.outbox.check_open()?;
        self.check_room(limits, &known.outbox, 1, known.fresh.max(1))?;
        let open = self.open(&known)?;
        let known = Known { idle: false, fresh: 0, ..known };
        self.sequences.insert(seq, known);
        Ok(Box::new(open))
    }

    /// The sequence runs from now on, and owes a last output.
    fn open(&mut self, known: &Known) -> Result<Open> {
        self.live.try_reserve(1)?;
        let live = self.live.entry(known.request).or_default();
        live.open.try_reserve(1)?;
        let open = known.open();
        self.waiting.enter(open.waits);
        live.open.push(open.clone());
        // An abort from before this does not reach it.
        live.aborting = false;
        Ok(open)
    }
}

impl Registry {
    pub fn new(limits: QueueLimits) -> Registry {
        Registry { limits, state: Mutex::default(), wakeup: Arc::default() }
    }

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

    /// Runs `act` on the state of an engine that has not failed; what it left in the inbox is announced.
    fn command<T>(&self, act: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        let mut state = self.lock();
        state.check()?;
        state.inbox.try_reserve(1)?;
        let result = act(&mut state)?;
        drop(state);
        self.wakeup.wake();
        Ok(result)
    }

    /// Gives a request its id, and the following ones to the sequences it may branch into, and leaves its command. Ids follow
    /// the order of commands.
    pub fn add(&self, work: impl FnOnce(u64) -> Result<Work>) -> Result<u64> {
        self.command(|state| {
            state.live.try_reserve(1)?;
            state.sequences.try_reserve(1)?;
            let id = state.last_id + 1;
            let mut work = Box::new(work(id)?);
            let promise = work.promise.take();
            let stream = &work.stream;
            let tokens = work.prompt.len();
            state.check_room(self.limits, &stream.outbox, 1, tokens)?;
            let mut open = Vec::new();
            open.try_reserve_exact(work.wanted)?;
            let waits = |index| if index == 0 { tokens } else { 0 };
            let last = |index| Open {
                outbox: stream.outbox.clone(),
                last: stream.output().of(index),
                waits: waits(index),
                max_tokens: stream.rules.params.max_tokens,
            };
            open.extend((0..work.wanted as u32).map(last));
            state.waiting.enter(tokens);
            state.last_id += work.branching.width() as u64;
            state.live.insert(id, Live { open, aborting: false, _promise: promise });
            state.sequences.insert(id, Known { beam: work.beams.is_some(), ..stream.known(work.prompt.len()) });
            state.inbox.push_back(Command::Add { id, work });
            Ok(id)
        })
    }

    pub fn abort(&self, request: u64) -> Result<()> {
        self.command(|state| state.abort(request))
    }

    /// Gives `n` children their ids and leaves the command to make them; `child` says how, and sees the parent.
    pub fn fork(
        &self,
        parent: u64,
        len: Option<usize>,
        idle: bool,
        n: usize,
        child: impl Fn(usize, u64, &Known) -> Result<Child>,
    ) -> Result<Vec<u64>> {
        self.command(|state| {
            let known = state.sequence(parent)?.clone();
            let idle = idle || known.idle;
            let at = len.unwrap_or(known.len);
            if at == 0 || at > known.len {
                return Err(Error::invalid(format!("sequence {parent} has {} tokens: it cannot fork at {at}", known.len)));
            }
            let (mut ids, mut children) = (Vec::new(), Vec::new());
            ids.try_reserve_exact(n)?;
            children.try_reserve_exact(n)?;
            state.sequences.try_reserve(n)?;
            state.live.try_reserve(n)?;
            for i in 0..n {
                let id = state.last_id + 1 + i as u64;
                let child = child(i, id, &known)?;
                match idle {
                    true => child.outbox.check_room()?,
                    false => state.check_room(self.limits, &child.outbox, n - i, n - i)?,
                }
                ids.push(id);
                children.push(child);
            }
            state.last_id += n as u64;
            for child in &children {
                let (outbox, user_data) = (child.outbox.clone(), child.user_data);
                let made = Known { request: child.id, index: 0, len: at, idle, beam: false, fresh: 0, outbox, user_data, ..known };
                if !idle && let Err(error) = state.open(&made) {
                    // All or none.
                    for id in &ids {
                        state.live.remove(id).into_iter().flat_map(|live| live.open).for_each(|open| state.waiting.leave(open.waits));
                        state.sequences.remove(id);
                    }
                    return Err(error);
                }
                state.sequences.insert(child.id, made);
            }
            state.inbox.push_back(Command::Fork { parent, len, children, idle });
            Ok(ids)
        })
    }

    pub fn append(&self, seq: u64, tokens: Vec<u32>, longest: usize) -> Result<()> {
        self.command(|state| {
            let known = state.sequence(seq)?;
            // One that runs needs room for the token it will choose.
            let most = if known.idle { longest } else { longest - 1 };
            if tokens.len() > most.saturating_sub(known.len) {
                return Err(Error::invalid(format!(
                    "sequence {seq} has {} tokens and max_model_len is {longest}: {} more do not fit",
                    known.len,
                    tokens.len()
                )));
            }
            known.len += tokens.len();
            known.fresh += if known.idle { tokens.len() } else { 0 };
            state.inbox.push_back(Command::Append { seq, tokens });
            Ok(())
        })
    }

    pub fn rewind(&self, seq: u64, len: usize) -> Result<()> {
        self.command(|state| {
            let known = state.sequence(seq)?;
            if len == 0 || len > known.len {
                return Err(Error::invalid(format!(
                    "sequence {seq} has {} tokens: it can be rewound to 1 to {}, not to {len}",
                    known.len, known.len
                )));
            }
            known.fresh = known.fresh.saturating_sub(known.len - len);
            known.len = len;
            state.inbox.push_back(Command::Rewind { seq, len });
            Ok(())
        })
    }

    pub fn resume(&self, seq: u64, turn: impl FnOnce(&Known) -> Result<Turn>) -> Result<()> {
        self.command(|state| {
            let known = state.idle(seq)?;
            let turn = Box::new(turn(&known)?);
            let open = state.awake(self.limits, seq, Known { outbox: turn.outbox.clone(), user_data: turn.user_data, ..known })?;
            state.inbox.push_back(Command::Resume { seq, turn, open });
            Ok(())
        })
    }

    pub fn go_on(&self, seq: u64, how: GoOn, asked: Duration, deadline: Option<Duration>) -> Result<()> {
        let GoOn { keep, queue, user_data, hook, .. } = how;
        self.command(|state| {
            let known = state.idle(seq)?;
            let (outbox, user_data) = (queue.map_or(&known.outbox, Queue::outbox).clone(), user_data.unwrap_or(known.user_data));
            let open = state.awake(self.limits, seq, Known { outbox, user_data, ..known })?;
            state.inbox.push_back(Command::GoOn { seq, keep, hook, deadline, open, asked });
            Ok(())
        })
    }

    /// A command of a journal: it was checked when it was first asked for.
    pub fn leave(&self, command: Command) -> Result<()> {
        self.command(|state| {
            state.inbox.push_back(command);
            Ok(())
        })
    }

    /// As `leave`. The parent may have ended since it was asked to fork.
    pub fn fork_again(&self, parent: u64, len: Option<usize>, forked: &[Forked], idle: bool, outbox: &Arc<Outbox>) -> Result<()> {
        self.command(|state| {
            let known = state.sequences.get(&parent);
            let (at, inexact) = (len.or(known.map(|known| known.len)).unwrap_or(0), known.is_some_and(|known| known.inexact));
            let mut children = Vec::new();
            for &Forked { id, seed, user_data, at: asked } in forked {
                let outbox = outbox.clone();
                state.last_id = id;
                let made =
                    Known { request: id, index: 0, len: at, fresh: 0, idle, beam: false, inexact, outbox: outbox.clone(), user_data };
                if !idle {
                    state.open(&made)?;
                }
                state.sequences.insert(id, made);
                children.push(Child { id, seed, user_data, outbox, asked });
            }
            state.inbox.push_back(Command::Fork { parent, len, children, idle });
            Ok(())
        })
    }

    /// As `leave`. The sequence may have ended since it was asked for.
    pub fn export_again(&self, seq: u64, outbox: &Arc<Outbox>) -> Result<()> {
        self.command(|state| {
            let known = state.sequences.get(&seq).map(Known::open);
            let last = known.map_or_else(|| Output { request: seq, sequence: seq, ..Output::default() }, |open| open.last);
            state
                .inbox
                .push_back(Command::Export { seq, open: Box::new(Open { outbox: outbox.clone(), last, waits: 0, max_tokens: None }) });
            Ok(())
        })
    }

    /// The id is unknown from now on.
    pub fn free(&self, seq: u64) -> Result<()> {
        self.command(|state| {
            state.sequence(seq)?;
            state.sequences.remove(&seq);
            state.inbox.push_back(Command::Free { seq });
            Ok(())
        })
    }

    pub fn sequence(&self, seq: u64) -> Result<Known> {
        let state = self.lock();
        state.check()?;
        state.sequences.get(&seq).cloned().ok_or_else(|| unknown(seq))
    }

    /// The blob follows as an output.
    pub fn export(&self, seq: u64, outbox: Option<&Arc<Outbox>>) -> Result<()> {
        self.command(|state| {
            let known = state.sequence(seq)?;
            let open = Open { outbox: outbox.unwrap_or(&known.outbox).clone(), ..known.open() };
            open.outbox.check_open()?;
            open.outbox.check_room()?;
            state.inbox.push_back(Command::Export { seq, open: Box::new(open) });
            Ok(())
        })
    }

    pub fn import(&self, turn: Turn, blob: Blob<'static>, inexact: bool) -> Result<u64> {
        self.command(|state| {
            state.sequences.try_reserve(1)?;
            state.last_id += 1;
            let id = state.last_id;
            let (outbox, user_data, len) = (turn.outbox.clone(), turn.user_data, blob.header.tokens.len());
            state.sequences.insert(id, Known { request: id, index: 0, len, idle: true, beam: false, inexact, fresh: 0, outbox, user_data });
            state.inbox.push_back(Command::Import { id, turn: Box::new(turn), blob: Box::new(blob) });
            Ok(id)
        })
    }

    pub fn pin(&self, tokens: Vec<u32>, priority: u32, salt: Vec<u8>, until: Option<Duration>) -> Result<u64> {
        self.command(|state| {
            state.pins.try_reserve(1)?;
            state.last_id += 1;
            let id = state.last_id;
            state.pins.push(id);
            state.inbox.push_back(Command::Pin { id, tokens, priority, salt, until });
            Ok(id)
        })
    }

    pub fn unpin(&self, id: u64) -> Result<()> {
        self.command(|state| {
            let place = state.pins.iter().position(|&other| other == id);
            let place = place.ok_or_else(|| Error::not_found(format!("pin {id} is unknown, has expired or had to give way")))?;
            state.pins.swap_remove(place);
            state.inbox.push_back(Command::Unpin { id });
            Ok(())
        })
    }

    /// The reader of an outbox is gone: what still writes to it ends.
    pub fn forget_queue(&self, outbox: &Arc<Outbox>) {
        let mut state = self.lock();
        state.outboxes.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(outbox)));
        // Whoever writes to it holds it too.
        if Arc::strong_count(outbox) == 1 {
            return;
        }
        let mut orphans = Vec::new();
        for (&request, live) in &state.live {
            let writes = |open: &&Open| Arc::ptr_eq(&open.outbox, outbox);
            // Without memory they run to their end, unheard.
            if orphans.try_reserve(live.open.len()).is_err() {
                continue;
            }
            match live.open.iter().all(|open| writes(&open)) {
                true => orphans.push(Command::Abort { request }),
                // The others were resumed elsewhere.
                false => orphans.extend(live.open.iter().filter(writes).map(|open| Command::End { seq: open.last.sequence })),
            }
        }
        for orphan in &orphans {
            // Without memory for the command the sequence runs to its end, unheard.
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

    /// Swaps the commands so far for the empty `inbox`.
    pub fn take_commands(&self, inbox: &mut VecDeque<Command>) {
        std::mem::swap(&mut self.lock().inbox, inbox);
    }

    /// A sequence came into being by itself, as one of a request's samples.
    pub fn born(&self, seq: u64, known: Known) -> Result<()> {
        let mut state = self.lock();
        state.sequences.try_reserve(1)?;
        state.sequences.insert(seq, known);
        Ok(())
    }

    /// The sequences have so many tokens now.
    pub fn grown(&self, lens: impl Iterator<Item = (u64, usize)>) {
        let mut state = self.lock();
        let State { sequences, inbox, .. } = &mut *state;
        // What the host has asked for since counts already.
        let pending = |seq| inbox.iter().any(|command| command.changes() == Some(seq));
        for (seq, len) in lens {
            if let Some(known) = sequences.get_mut(&seq).filter(|_| !pending(seq)) {
                known.len = len;
            }
        }
    }

    /// The last output of a request's sequence is on its way; `kept`: the sequence stays.
    pub fn ended(&self, output: &Output, kept: Option<usize>) {
        let mut state = self.lock();
        match kept {
            Some(len) => {
                if let Some(known) = state.sequences.get_mut(&output.sequence) {
                    (known.len, known.idle) = (len, true);
                }
            }
            None => drop(state.sequences.remove(&output.sequence)),
        }
        let State { live, waiting, .. } = &mut *state;
        if let Some(ending) = live.get_mut(&output.request) {
            let is_over = |open: &mut Open| open.last.index == output.index;
            ending.open.extract_if(.., is_over).for_each(|open| waiting.leave(open.waits));
            if ending.open.is_empty() {
                live.remove(&output.request);
            }
        }
    }

    /// The indices of the request's sequences whose last output is still to come.
    pub fn open(&self, request: u64) -> Vec<u32> {
        self.lock().live.get(&request).map_or_else(Vec::new, |live| live.open.iter().map(|open| open.last.index).collect())
    }

    /// A sequence that nobody may use is gone.
    pub fn forget(&self, seq: u64) {
        self.lock().sequences.remove(&seq);
    }

    pub fn pin_ended(&self, id: u64) {
        self.lock().pins.retain(|&other| other != id);
    }

    /// A step has computed some of the sequence's turn.
    pub fn begun(&self, request: u64, seq: u64) {
        let mut state = self.lock();
        let State { live, waiting, .. } = &mut *state;
        if let Some(open) = live.get_mut(&request).and_then(|live| live.open.iter_mut().find(|open| open.last.sequence == seq)) {
            waiting.leave(std::mem::take(&mut open.waits));
        }
    }

    /// What waits, whether a request with so many tokens would be let in beside it, and all that is before it, in order.
    pub fn would_admit(&self, outbox: &Outbox, tokens: usize) -> Result<(Waiting, bool, Vec<Waits>)> {
        let state = self.lock();
        let room = outbox.check_room().and_then(|()| state.waiting.check(self.limits, 1, tokens));
        let mut before = Vec::new();
        before.try_reserve(state.waiting.requests)?;
        before.extend(state.live.iter().flat_map(|(&id, live)| live.open.iter().filter(|open| open.waits > 0).map(move |open| (id, open))));
        before.sort_unstable_by_key(|(id, _)| *id);
        Ok((state.waiting, room.is_ok(), before.into_iter().map(|(_, open)| (open.waits, open.max_tokens)).collect()))
    }

    pub fn rejections(&self) -> u64 {
        self.lock().rejections
    }

    pub fn unfinished(&self) -> u64 {
        self.lock().live.len() as u64
    }

    /// From now on every command is refused with `error`. Returns where the outputs of each live request go, and what would be
    /// the last one of each of its sequences if they have not begun.
    pub fn fail(&self, error: &Error) -> Vec<(Arc<Outbox>, Output)> {
        let mut state = self.lock();
        state.failure.get_or_insert_with(|| error.clone());
        state.inbox.clear();
        state.sequences.clear();
        state.waiting = Waiting::default();
        let live = std::mem::take(&mut state.live);
        live.into_values().flat_map(|live| live.open).map(|open| (open.outbox, open.last)).collect()
    }

    /// After `fail`, and after the last outputs: every queue says that no more will come.
    pub fn close_queues(&self, error: &Error) {
        let outboxes = self.lock().outboxes.clone();
        outboxes.iter().filter_map(Weak::upgrade).for_each(|outbox| outbox.close(error));
    }
}

fn unknown(seq: u64) -> Error {
    Error::not_found(format!("sequence {seq} is unknown, has not begun, or has ended and was not kept"))
}
