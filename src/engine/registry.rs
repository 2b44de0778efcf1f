//! The requests that have not ended, and the commands for them: what other threads touch, under one short lock.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

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
}

#[derive(Default)]
struct State {
    last_id: u64,
    live: HashMap<u64, Live>,
    inbox: VecDeque<Command>,
    failure: Option<Error>,
}

struct Live {
    user_data: u64,
    aborting: bool,
}

impl State {
    fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
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

    /// Gives a request its id and leaves its command. Ids follow the order of commands.
    pub fn add(&self, user_data: u64, command: impl FnOnce(u64) -> Command) -> Result<u64> {
        let mut state = self.lock();
        state.check()?;
        state.live.try_reserve(1)?;
        state.inbox.try_reserve(1)?;
        state.last_id += 1;
        let id = state.last_id;
        state.live.insert(id, Live { user_data, aborting: false });
        state.inbox.push_back(command(id));
        Ok(id)
    }

    pub fn abort(&self, id: u64) -> Result<()> {
        let mut state = self.lock();
        state.check()?;
        state.inbox.try_reserve(1)?;
        let live = state.live.get_mut(&id).ok_or_else(|| Error::not_found(format!("request {id} is unknown or has ended")))?;
        if !std::mem::replace(&mut live.aborting, true) {
            state.inbox.push_back(Command::Abort { id });
        }
        Ok(())
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

    /// From now on every command is refused with `error`. Returns those that were live, with their user data.
    pub fn fail(&self, error: &Error) -> Vec<(u64, u64)> {
        let mut state = self.lock();
        state.failure.get_or_insert_with(|| error.clone());
        state.inbox.clear();
        state.live.drain().map(|(id, live)| (id, live.user_data)).collect()
    }
}
