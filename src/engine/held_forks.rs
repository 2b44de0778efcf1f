//! Forks with so many children that they take several steps. A hidden idle sequence holds the state
//! that the parent had when the command was applied, so that the parent continues meanwhile.

use std::collections::VecDeque;

use super::command::{Command, ForkedSequence};
use super::deferred_commands::DeferredCommands;
use super::sequence::Sequence;
use crate::types::SeqId;
use crate::types::id_map::IdMap;

/// Work of a child without tokens. The unit is the copy of one token.
pub const CHILD_WORK: usize = 1024;
/// Maximum work for the children of a step, a few milliseconds. Each step creates at least one.
const STEP_WORK: usize = 1024 * CHILD_WORK;

/// The forks that have children to create, in the order of their commands.
#[derive(Default)]
pub struct HeldForks {
    pub all: VecDeque<HeldFork>,
    /// Work that the rest of this step may do.
    pub work_left: usize,
}

/// A fork that has children to create.
pub struct HeldFork {
    pub holder: SeqId,
    /// State of the holder, from which children are copied.
    pub sequence: Box<Sequence>,
    /// Whether the children run. If not, they are idle because the host asked for it, or because
    /// the parent was idle.
    pub runs: bool,
    pub idle: bool,
    /// Children in the order of their ids, which are contiguous.
    pub children: VecDeque<ForkedSequence>,
    /// Commands for each child, and for its forks. They are released when it has been created.
    pub deferred: IdMap<SeqId, DeferredCommands>,
}

impl HeldFork {
    /// Returns the child whose creation a command for `seq` must await.
    fn child_before(&self, seq: SeqId) -> Option<SeqId> {
        let (first, last) = self.children.front().zip(self.children.back())?;
        match (first.id..=last.id).contains(&seq) {
            true => Some(seq),
            false => self.deferred.iter().find(|(_, deferred)| deferred.creates(seq)).map(|(&child, _)| child),
        }
    }
}

impl HeldForks {
    pub fn begin_step(&mut self) {
        self.work_left = STEP_WORK;
    }

    /// Returns the number of forks that have children to create.
    pub fn pending(&self) -> usize {
        self.all.len()
    }

    /// Returns the hidden sequences.
    pub fn holders(&self) -> impl Iterator<Item = SeqId> {
        self.all.iter().map(|fork| fork.holder)
    }

    pub fn clear(&mut self) {
        self.all.clear();
    }

    /// Returns whether the command must wait until its sequence has been created.
    pub fn must_wait(&self, command: &Command) -> bool {
        !self.all.is_empty() && command.target().is_some_and(|seq| self.all.iter().any(|fork| fork.child_before(seq).is_some()))
    }

    /// Defers a command until its sequence has been created. Returns the command if there is no
    /// memory.
    pub fn defer(&mut self, command: Command) -> std::result::Result<(), Command> {
        let Some(target) = command.target() else { return Err(command) };
        for fork in &mut self.all {
            if let Some(child) = fork.child_before(target) {
                return match fork.deferred.try_reserve(1) {
                    Ok(()) => fork.deferred.entry(child).or_default().defer(command),
                    Err(_) => Err(command),
                };
            }
        }
        Err(command)
    }
}
