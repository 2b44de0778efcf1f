//! Forks: the creation of their children, and the portions of those with many.

use super::command::ForkedSequence;
use super::device::Device;
use super::held_forks::{CHILD_WORK, HeldFork};
use super::lifecycle::Lifecycle;
use super::sequence::Sequence;
use crate::error::{Error, Result};
use crate::types::SeqId;
use crate::types::id_map::IdMap;
use crate::types::outputs::{FinishReason, Output};
use crate::types::timing::Timing;

impl Lifecycle {
    /// Applies a fork: creates all children, or as many as this step may create.
    pub(super) fn fork(&mut self, parent: SeqId, len: Option<usize>, children: Vec<ForkedSequence>, idle: bool, device: &mut Device) {
        let runs = !idle && self.scheduler.find(parent).is_some_and(|sequence| sequence.group.is_some());
        let tokens = len.or_else(|| Some(self.scheduler.find(parent)?.tokens.len())).unwrap_or_default();
        let work = children.len().saturating_mul(CHILD_WORK.saturating_add(tokens));
        // Without memory, or if the parent is gone, each child reports it.
        if work > self.forks.work_left
            && children.len() > 1
            && let Ok((holder, sequence)) = self.hold(parent, len)
        {
            let (children, deferred) = (children.into(), IdMap::default());
            self.forks.all.push_back(HeldFork { holder, sequence, runs, idle, children, deferred });
            return self.continue_forks(device);
        }
        self.forks.work_left = self.forks.work_left.saturating_sub(work);
        for child in children {
            let sequence = self.try_fork(parent, len, &child, runs);
            self.finish_fork(child, sequence, idle, runs);
        }
    }

    /// Copies the state of a sequence to a hidden idle one.
    fn hold(&mut self, parent: SeqId, len: Option<usize>) -> Result<(SeqId, Box<Sequence>)> {
        self.forks.all.try_reserve(1)?;
        let sequence = self.copy_sequence(parent)?;
        let holder = self.transfers.exports.next_holder();
        self.scheduler.fork(parent, len, holder, false)?;
        match self.rewind_copy(sequence, parent, holder) {
            Ok(sequence) => Ok((holder, sequence)),
            Err(error) => {
                self.scheduler.remove(holder);
                Err(error)
            }
        }
    }

    /// Creates further children, as many as this step may create.
    pub(super) fn continue_forks(&mut self, device: &mut Device) {
        while self.forks.work_left > 0
            && let Some(fork) = self.forks.all.front_mut()
        {
            let (holder, runs, idle) = (fork.holder, fork.runs, fork.idle);
            let Some(child) = fork.children.pop_front() else {
                self.forks.all.pop_front();
                self.scheduler.remove(holder);
                continue;
            };
            let (sequence, deferred) = (fork.sequence.fork(), fork.deferred.remove(&child.id));
            let work = CHILD_WORK + self.scheduler.find(holder).map_or(0, |sequence| sequence.tokens.len());
            self.forks.work_left = self.forks.work_left.saturating_sub(work);
            let sequence = sequence.and_then(|sequence| self.add_fork(sequence, holder, None, &child, runs));
            self.finish_fork(child, sequence, idle, runs);
            deferred.into_iter().for_each(|deferred| self.release_deferred(deferred, device));
        }
    }

    /// Creates all children of all forks, because there is no memory to defer a command for one of
    /// them.
    pub(super) fn finish_forks(&mut self, device: &mut Device) {
        while self.forks.pending() > 0 {
            self.forks.work_left = usize::MAX;
            self.continue_forks(device);
        }
        self.forks.work_left = 0;
    }

    /// Copies a sequence for a child that shares the first `len` tokens (`None`: all), and adds the
    /// child to the scheduler.
    fn try_fork(&mut self, parent: SeqId, len: Option<usize>, child: &ForkedSequence, runs: bool) -> Result<Box<Sequence>> {
        let sequence = self.copy_sequence(parent)?;
        self.add_fork(sequence, parent, len, child, runs)
    }

    fn copy_sequence(&self, parent: SeqId) -> Result<Box<Sequence>> {
        let gone = || {
            Error::not_found(format!(
                "sequence {parent} ended before the fork and was not kept; set PLLM_REQUEST_KEEP to fork sequences that have ended"
            ))
        };
        self.live.sequences.get(&parent).ok_or_else(gone)?.fork()
    }

    /// Adds the child of a sequence, with `sequence` as a copy of its state.
    fn add_fork(
        &mut self,
        sequence: Box<Sequence>,
        parent: SeqId,
        len: Option<usize>,
        child: &ForkedSequence,
        runs: bool,
    ) -> Result<Box<Sequence>> {
        self.live.sequences.try_reserve(1)?;
        self.live.watch(child.id.own_request(), sequence.generation.deadline)?;
        self.scheduler.fork(parent, len, child.id, runs)?;
        self.rewind_copy(sequence, parent, child.id)
    }

    /// Rewinds the copy of `parent` to the tokens that `child` shares.
    fn rewind_copy(&self, mut sequence: Box<Sequence>, parent: SeqId, child: SeqId) -> Result<Box<Sequence>> {
        let tokens = &self.scheduler.get(child)?.tokens;
        if tokens.len() < self.scheduler.get(parent)?.tokens.len() {
            sequence.rewind(tokens, self.text.as_deref())?;
        }
        Ok(sequence)
    }

    /// Ends the creation of a child.
    fn finish_fork(&mut self, child: ForkedSequence, sequence: Result<Box<Sequence>>, idle: bool, runs: bool) {
        let ForkedSequence { id, seed, user_data, sender, requested_at } = child;
        let last = Output { request: id.own_request(), sequence: id, user_data, ..Output::default() };
        let mut sequence = match sequence {
            Ok(sequence) => sequence,
            Err(error) if idle => return self.fail_import(&sender, last.failed(error)),
            Err(error) => {
                self.scheduler.remove(id);
                return self.end(&sender, last.failed(error));
            }
        };
        (sequence.request, sequence.id, sequence.index) = (id.own_request(), id, 0);
        let generation = &mut sequence.generation;
        (generation.user_data, generation.sender, generation.timing) = (user_data, sender.clone(), Timing::new(requested_at));
        generation.sampling.seed = seed.unwrap_or(generation.sampling.seed);
        // The parent may have ended after the host asked for the fork. Its children have then ended
        // too.
        let has_ended = !idle && !runs;
        let output = has_ended.then(|| sequence.close(FinishReason::Abort, true, self.text.as_deref(), Output::default()));
        self.live.sequences.insert(id, sequence);
        self.update_length(id);
        output.into_iter().for_each(|output| self.end(&sender, output));
    }
}
