//! The commands that the stepping thread has not taken. Their work in one step is bounded, so that
//! many calls of the host delay no token by more than a few milliseconds.

use std::collections::VecDeque;

use super::command::Command;
use crate::error::Result;

/// Work of a command without tokens. The unit is the copy of one token.
const COMMAND_WORK: usize = 1024;
/// Maximum work of the commands of a step, a few milliseconds. Each step takes at least one
/// command.
const STEP_WORK: usize = 1024 * COMMAND_WORK;

/// Commands in the order of their calls, except for the urgent ones.
#[derive(Default)]
pub struct Inbox {
    /// Commands that the next step takes before all others.
    urgent: VecDeque<Command>,
    /// The other commands with their work.
    commands: VecDeque<(Command, usize)>,
    /// Number of commands that were appended to `commands`, and number of those that were taken.
    appended: u64,
    taken: u64,
    /// Number of commands that the last step has left.
    left: usize,
    /// Whether each step takes all commands in the order of their calls. A replay calls only the
    /// commands of one step before that step.
    in_order: bool,
}

impl Inbox {
    /// Reserves space for one command.
    pub fn reserve(&mut self) -> Result<()> {
        self.urgent.try_reserve(1)?;
        Ok(self.commands.try_reserve(1)?)
    }

    /// Appends a command that copies or checks `tokens` tokens. Returns its number, from 1.
    pub fn push(&mut self, command: Command, tokens: usize) -> u64 {
        self.commands.push_back((command, COMMAND_WORK.saturating_add(tokens)));
        self.appended += 1;
        self.appended
    }

    /// Appends a command that precedes all those with a number above `after`.
    pub fn push_urgent(&mut self, command: Command, after: u64) {
        match self.is_taken(after) && !self.in_order {
            true => self.urgent.push_back(command),
            false => _ = self.push(command, 0),
        }
    }

    /// Returns whether a step has taken the command with this number.
    pub fn is_taken(&self, number: u64) -> bool {
        number <= self.taken
    }

    /// Moves the commands of a step to `step`. Without memory for all of them, the rest follows in
    /// later steps.
    pub fn take(&mut self, step: &mut VecDeque<Command>) {
        let mut work = 0;
        while !self.urgent.is_empty() && work < STEP_WORK && step.try_reserve(1).is_ok() {
            step.extend(self.urgent.pop_front());
            work += COMMAND_WORK;
        }
        let first = self.taken;
        while let Some((_, next)) = self.commands.front()
            && (self.in_order || self.taken == first || work.saturating_add(*next) <= STEP_WORK)
            && step.try_reserve(1).is_ok()
        {
            work = work.saturating_add(*next);
            step.extend(self.commands.pop_front().map(|(command, _)| command));
            self.taken += 1;
        }
        self.left = self.urgent.len() + self.commands.len();
    }

    /// Returns the number of commands that the last step has left.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Discards all commands.
    pub fn clear(&mut self) {
        self.urgent.clear();
        self.commands.clear();
        (self.taken, self.left) = (self.appended, 0);
    }

    /// Makes each step take all commands in the order of their calls.
    pub fn keep_order(&mut self) {
        self.in_order = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{RequestId, SeqId};

    fn end(seq: u64) -> Command {
        Command::End { seq: SeqId::from_raw(seq) }
    }

    fn abort(request: u64) -> Command {
        Command::Abort { request: RequestId::from_raw(request) }
    }

    /// Takes the commands of one step and returns the ids in them.
    fn step(inbox: &mut Inbox) -> Vec<u64> {
        let mut step = VecDeque::new();
        inbox.take(&mut step);
        let id = |command| match command {
            Command::End { seq } => seq.get(),
            Command::Abort { request } => request.get(),
            _ => unreachable!(),
        };
        step.into_iter().map(id).collect()
    }

    #[test]
    fn a_step_takes_a_bounded_number_of_commands_in_order() {
        let mut inbox = Inbox::default();
        (0..2500).for_each(|seq| _ = inbox.push(end(seq), 0));
        assert_eq!(step(&mut inbox), (0..1024).collect::<Vec<_>>());
        assert_eq!((step(&mut inbox).len(), inbox.left()), (1024, 452));
        assert_eq!((step(&mut inbox).len(), inbox.left()), (452, 0));
        assert!(step(&mut inbox).is_empty());
    }

    #[test]
    fn the_tokens_of_commands_count() {
        let mut inbox = Inbox::default();
        for (seq, tokens) in [(1, 600_000), (2, 400_000), (3, 400_000), (4, 10 << 20), (5, usize::MAX), (6, 0)] {
            inbox.push(end(seq), tokens);
        }
        let steps: Vec<_> = (0..5).map(|_| step(&mut inbox)).collect();
        assert_eq!(steps, [vec![1, 2], vec![3], vec![4], vec![5], vec![6]], "a command that is too large is alone in its step");
    }

    #[test]
    fn an_abort_precedes_commands_that_do_not_concern_it() {
        let mut inbox = Inbox::default();
        let first = inbox.push(end(1), 0);
        inbox.push_urgent(abort(10), first);
        assert_eq!(step(&mut inbox), [1, 10], "the abort follows the command of its request");
        (0..2000).for_each(|seq| _ = inbox.push(end(seq), 0));
        inbox.push_urgent(abort(5000), first);
        let next = step(&mut inbox);
        assert_eq!((next[0], next.len()), (5000, 1024));
    }

    #[test]
    fn a_replay_takes_all_commands_in_order() {
        let mut inbox = Inbox::default();
        inbox.keep_order();
        (0..2000).for_each(|seq| _ = inbox.push(end(seq), 1000));
        inbox.push_urgent(abort(5000), 0);
        assert_eq!(step(&mut inbox), (0..2000).chain([5000]).collect::<Vec<_>>());
    }
}
