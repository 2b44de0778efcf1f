//! A step that could not be computed is tried again, without those that may be to blame.

use std::time::Duration;

use super::StepReport;
use super::beams::request_of_beam;
use super::core::Core;
use super::trace::Phase;
use crate::error::{Error, Result};
use crate::sched::FinishReason;

/// For how long, and over how many steps, nobody's absence may help before the engine gives the requests up.
const PATIENCE: Duration = Duration::from_secs(1);
const TRIES: u32 = 3;

/// Steps of which nothing could be computed, whoever was left out, since this one.
pub struct Trouble {
    since: Duration,
    steps: u32,
    /// Who came after this one was not in the first of them.
    latest: u64,
}

/// What came of trying the groups of a failed step apart.
struct Trial {
    /// By those that could go on.
    done: StepReport,
    culprits: Vec<(u64, Error)>,
    /// The last one.
    error: Error,
    /// Failures before the first success.
    fruitless: u32,
}

/// After so many failures nobody is tried any more: it is not the requests.
const MOST_FRUITLESS: u32 = 100;

impl Core {
    /// A step of all that are ready. What can be computed is committed, the rest is as it was before.
    pub(super) fn advance(&mut self) -> Result<StepReport> {
        self.tell_costs();
        self.take_commands();
        self.end_overdue();
        self.govern(true);
        self.look_for_room();
        self.insight.lap(Phase::Commands);
        let result = self.attempt(None).or_else(|error| match self.runner.is_lost() {
            true => Err(error),
            false => self.go_on_without_culprits(error),
        });
        self.end_unheard();
        match &result {
            Ok(_) => self.trouble = None,
            Err(error) if self.runner.is_lost() => self.stop(error),
            Err(error) => self.bear(error),
        }
        result
    }

    /// Those whose queues were full are looked at only where a reader has made room since: there may be many.
    fn look_for_room(&mut self) {
        let rooms = self.shared.registry.wakeup.rooms();
        let changed = std::mem::replace(&mut self.rooms, rooms) != rooms;
        if self.scheduler.paused() > 0 && self.journal.as_ref().map_or(changed, |journal| journal.ready(changed)) {
            self.scheduler.look_again();
        }
    }

    /// Who cannot go on alone, while others can, ends with the error.
    fn go_on_without_culprits(&mut self, error: Error) -> Result<StepReport> {
        let groups = std::mem::take(&mut self.suspects);
        let mut trial = Trial { done: StepReport::default(), culprits: Vec::new(), error, fruitless: 0 };
        self.try_apart(&groups, &mut trial);
        self.suspects = groups;
        if trial.done.sequences == 0 {
            return Err(trial.error);
        }
        trial.culprits.into_iter().for_each(|(group, error)| self.end_group(group, &error));
        Ok(trial.done)
    }

    /// These groups failed together: each half is tried without the other. One that is alone gets another chance, since a fault
    /// that does not come again is nobody's.
    fn try_apart(&mut self, groups: &[u64], trial: &mut Trial) {
        if let &[alone] = groups {
            if !self.try_some(groups, trial) {
                trial.culprits.push((alone, trial.error.clone()));
            }
            return;
        }
        let (left, right) = groups.split_at(groups.len() / 2);
        for half in [left, right] {
            if trial.fruitless < MOST_FRUITLESS && !self.try_some(half, trial) {
                self.try_apart(half, trial);
            }
        }
    }

    /// A step of these groups alone. False: it failed.
    fn try_some(&mut self, groups: &[u64], trial: &mut Trial) -> bool {
        match self.attempt(Some(groups)) {
            Ok(report) => {
                trial.done.prefill_tokens += report.prefill_tokens;
                trial.done.decode_tokens += report.decode_tokens;
                trial.done.sequences += report.sequences;
                trial.done.paused = report.paused;
                true
            }
            Err(error) => {
                trial.fruitless += (trial.done.sequences == 0) as u32;
                trial.error = error;
                false
            }
        }
    }

    /// Nothing is lost, and the next step tries again; but not for ever. Whether these requests are to blame or the device cannot be
    /// told: it is asked again with whoever comes next.
    fn bear(&mut self, error: &Error) {
        let latest = self.suspects.iter().copied().max().unwrap_or(0);
        let trouble = self.trouble.get_or_insert(Trouble { since: self.now, steps: 0, latest });
        trouble.steps += 1;
        if trouble.steps < TRIES || self.now.saturating_sub(trouble.since) < PATIENCE {
            return;
        }
        let latest = trouble.latest;
        self.trouble = None;
        let error = Error::new(error.code(), format!("no step could be computed with it for {PATIENCE:?}: {}", error.message()));
        let groups = std::mem::take(&mut self.suspects);
        // Whoever came since has its own second.
        groups.iter().filter(|group| **group <= latest).for_each(|&group| self.end_group(group, &error));
        self.suspects = groups;
    }

    /// Ends what goes on together; `group` is the first of it.
    fn end_group(&mut self, group: u64, error: &Error) {
        self.unpin(group);
        match request_of_beam(&self.beams, group) {
            Some(request) => self.end_request(request, FinishReason::Error, |output| output.failed(error.clone())),
            None => {
                for seq in self.scheduler.members(group).collect::<Vec<_>>() {
                    self.end_sequence(seq, FinishReason::Error, |output| output.failed(error.clone()));
                }
            }
        }
    }
}
