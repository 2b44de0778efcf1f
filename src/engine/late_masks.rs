//! Sequences whose mask is late: their outputs and their commands.

use std::collections::VecDeque;

use super::command::Command;
use super::deferred_commands::DeferredCommands;
use super::device::Device;
use super::lifecycle::Lifecycle;
use super::step_inputs::Inputs;
use crate::generation::grammar::MaskId;
use crate::scheduler::StepPlan;

/// Maximum number of commands that a step applies after masks, imports and forks have released
/// them.
const MAX_RELEASED: usize = 1024;

impl Lifecycle {
    /// Waits for the masks of a launched plan, as `Masks::collect` does. The rows of late ones
    /// become stale.
    pub fn collect_masks(&mut self, source: &mut dyn Inputs, plan: &mut StepPlan) {
        if self.masks.collect(source, &mut self.live, &mut self.scheduler) {
            self.scheduler.mark_stale(plan);
        }
    }

    /// Continues the sequences whose late masks have been computed: delivers pending tokens, and
    /// releases the commands that have waited.
    pub fn complete_masks(&mut self, finished: &[MaskId], device: &mut Device) {
        self.masks.may_apply = MAX_RELEASED;
        for &id in finished {
            let Some((late, masked)) = self.masks.finish(id) else { continue };
            if let Some(sequence) = self.live.sequences.get_mut(&late.seq) {
                sequence.generation.sampling.constraint.put_back(id, masked.constraint);
            }
            if let Some(token) = late.token {
                self.emit_pending_token(late.seq, token, masked.complete);
            }
            self.release_deferred(late.deferred, device);
            // The group has paused.
            self.scheduler.recheck_paused();
        }
    }

    /// Releases commands that have waited for a mask, an import or a fork. Without memory, applies
    /// them now.
    pub(super) fn release_deferred(&mut self, deferred: DeferredCommands, device: &mut Device) {
        let refused = self.masks.release(deferred);
        refused.into_iter().flatten().for_each(|command| self.apply_after_mask(command, device));
    }

    /// Applies the commands of a step. Commands that have waited for a mask, an import or a fork
    /// precede them, a bounded number in each step.
    pub fn apply_all(&mut self, commands: &mut VecDeque<Command>, device: &mut Device) {
        while let Some(command) = commands.pop_front() {
            // A command may release others. Without memory, these wait longer.
            match self.masks.released.is_empty() || self.masks.released.try_reserve(1).is_err() {
                true => self.apply(command, device),
                false => self.masks.released.push_back(command),
            }
        }
        self.apply_released(device);
    }

    /// Applies released commands, as many as the step may still apply.
    pub fn apply_released(&mut self, device: &mut Device) {
        while self.masks.may_apply > 0
            && let Some(command) = self.masks.released.pop_front()
        {
            self.masks.may_apply -= 1;
            self.apply(command, device);
        }
    }

    /// Applies a command, or defers it while another thread uses the grammar of its sequence. The
    /// end of a generation waits only after other commands.
    pub(super) fn apply_after_mask(&mut self, command: Command, device: &mut Device) {
        let refused = match self.masks.commands_before(&command) {
            Some(deferred) => deferred.defer(command).err(),
            None => Some(command),
        };
        if let Some(command) = refused {
            self.apply_after_fork(command, device);
        }
    }

    /// Applies a command, or defers it until its sequence has been created.
    fn apply_after_fork(&mut self, command: Command, device: &mut Device) {
        if !self.forks.must_wait(&command) {
            return self.apply_now(command, device);
        }
        if let Err(command) = self.forks.defer(command) {
            self.finish_forks(device);
            while let Some(earlier) = self.masks.released.pop_front() {
                self.apply(earlier, device);
            }
            self.apply(command, device);
        }
    }
}
