//! Commands that wait until a sequence can take them.

use std::collections::VecDeque;

use super::command::Command;
use crate::types::SeqId;

/// Commands for a sequence and for the forks that they create, in the order of the calls.
#[derive(Default)]
pub struct DeferredCommands {
    commands: VecDeque<Command>,
    /// Forks that `commands` create: the first and the last id of each command.
    children: Vec<(SeqId, SeqId)>,
}

impl DeferredCommands {
    /// Adds a command. Returns the command if there is no memory.
    pub fn defer(&mut self, command: Command) -> std::result::Result<(), Command> {
        let children = if let Command::Fork { children, .. } = &command { &children[..] } else { &[] };
        if self.commands.try_reserve(1).is_err() || self.children.try_reserve(1).is_err() {
            return Err(command);
        }
        self.children.extend(children.first().zip(children.last()).map(|(first, last)| (first.id, last.id)));
        self.commands.push_back(command);
        Ok(())
    }

    /// Returns whether the sequence is a fork that the commands create.
    pub fn creates(&self, seq: SeqId) -> bool {
        self.children.iter().any(|&(first, last)| (first..=last).contains(&seq))
    }

    /// Returns the number of commands.
    pub fn len(&self) -> usize {
        self.commands.len()
    }

    pub fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }
}

impl IntoIterator for DeferredCommands {
    type Item = Command;
    type IntoIter = std::collections::vec_deque::IntoIter<Command>;

    fn into_iter(self) -> Self::IntoIter {
        self.commands.into_iter()
    }
}
