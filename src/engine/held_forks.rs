//! Forks with so many children that they take several steps. A hidden idle sequence holds the state
//! that the parent had when the command was applied, so that the parent continues meanwhile.

use std::collections::VecDeque;

use super::command::{Command, ForkedSequence};
use super::deferred_commands::DeferredCommands;
use super::sequence::Sequence;
use crate::types::SeqId;

/// Work of a child without tokens. The unit is the copy of one token.
pub const CHILD_WORK: usize = 1024;
/// Maximum work for the children of a step, a few milliseconds. Each step creates at least one.
pub const STEP_WORK: usize = 1024 * CHILD_WORK;

/// The forks that have children to create, in the order of their commands.
#[derive(Default)]
pub struct HeldForks {
    pub forks: VecDeque<HeldFork>,
    /// Work that the rest of this step may do.
    pub work_left: usize,
}

/// A fork that has children to create.
pub struct HeldFork {
    pub holder: SeqId,
    /// State of the holder, from which children are copied.
    pub sequence: Sequence,
    /// Whether the children run. If not, they are idle because the host asked for it, or because
    /// the parent was idle.
    pub runs: bool,
    pub idle: bool,
    /// Children in the order of their ids.
    pub children: VecDeque<ForkedSequence>,
    /// Commands for the children.
    pub deferred: DeferredCommands,
}

impl HeldFork {
    fn concerns(&self, seq: SeqId) -> bool {
        let creates = self.children.front().zip(self.children.back()).is_some_and(|(first, last)| (first.id..=last.id).contains(&seq));
        creates || self.deferred.creates(seq)
    }
}

impl HeldForks {
    pub fn begin_step(&mut self) {
        self.work_left = STEP_WORK;
    }

    /// Returns the number of forks that have children to create.
    pub fn pending(&self) -> usize {
        self.forks.len()
    }

    /// Returns the hidden sequences.
    pub fn holders(&self) -> impl Iterator<Item = SeqId> {
        self.forks.iter().map(|fork| fork.holder)
    }

    pub fn clear(&mut self) {
        self.forks.clear();
    }

    /// Returns the commands after which this one must wait. `None` if it need not wait.
    pub fn commands_before(&mut self, command: &Command) -> Option<&mut DeferredCommands> {
        if self.forks.is_empty() {
            return None;
        }
        let target = command.target()?;
        self.forks.iter_mut().find(|fork| fork.concerns(target)).map(|fork| &mut fork.deferred)
    }
}
