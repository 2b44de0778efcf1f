//! Retries of failed steps, without the groups that may have caused the failure.

use std::time::Duration;

use super::StepReport;
use super::beams::request_of_beam;
use super::core::EngineCore;
use super::trace::Phase;
use crate::error::{Error, Result};
use crate::scheduler::FinishReason;
use crate::types::SeqId;

/// Retry timeout: the time and the number of failed steps after which the requests end.
const RETRY_TIMEOUT: Duration = Duration::from_secs(1);
const TRIES: u32 = 3;

/// A series of steps in which no group could be computed.
pub struct FailureStreak {
    since: Duration,
    steps: u32,
    /// Largest group id in the first step of the series. Later groups have a timeout of their own.
    latest: SeqId,
}

/// The result of retrying the groups of a failed step separately.
struct RetryResult {
    /// Result of the groups that succeeded.
    done: StepReport,
    failing_groups: Vec<(SeqId, Error)>,
    /// The last error.
    error: Error,
    /// Number of failures before the first success.
    fruitless: u32,
}

/// Number of failures without a success after which the retry stops: the cause is not a request.
const MAX_FRUITLESS: u32 = 100;

impl EngineCore {
    /// Runs a step of all ready groups. Commits what can be computed. The rest stays unchanged.
    pub(super) fn advance(&mut self) -> Result<StepReport> {
        self.pass_costs();
        self.take_commands();
        self.end_overdue();
        self.check_budget(true);
        self.swap_or_preempt_for_retry();
        self.telemetry.end_phase(Phase::Commands);
        let result = self.attempt(None).or_else(|error| match self.runner.is_lost() {
            true => Err(error),
            false => self.continue_without_failing_groups(error),
        });
        self.end_undeliverable();
        match &result {
            Ok(_) => self.failure_streak = None,
            Err(error) if self.runner.is_lost() => self.lose_device(error),
            Err(error) => self.record_failure(error),
        }
        result
    }

    /// Checks the paused groups only if a reader has emptied a full queue, since there may be many.
    fn swap_or_preempt_for_retry(&mut self) {
        let rooms = self.shared.table.wakeup.space_count();
        let changed = std::mem::replace(&mut self.space_count, rooms) != rooms;
        if self.scheduler.paused() > 0 && self.journal.as_ref().map_or(changed, |journal| journal.ready(changed)) {
            self.scheduler.recheck_paused();
        }
    }

    /// Retries the groups of a failed step separately. If some succeed, those that failed alone end
    /// with their error.
    fn continue_without_failing_groups(&mut self, error: Error) -> Result<StepReport> {
        let groups = std::mem::take(&mut self.batch_groups);
        let mut trial = RetryResult { done: StepReport::default(), failing_groups: Vec::new(), error, fruitless: 0 };
        self.bisect(&groups, &mut trial);
        self.batch_groups = groups;
        if trial.done.sequences == 0 {
            return Err(trial.error);
        }
        trial.failing_groups.into_iter().for_each(|(group, error)| self.end_group(group, &error));
        Ok(trial.done)
    }

    /// Tries both halves of groups that failed together. A group that fails alone gets one more
    /// attempt, since a transient failure has no cause in the request.
    fn bisect(&mut self, groups: &[SeqId], trial: &mut RetryResult) {
        if let &[alone] = groups {
            if !self.try_some(groups, trial) {
                trial.failing_groups.push((alone, trial.error.clone()));
            }
            return;
        }
        let (left, right) = groups.split_at(groups.len() / 2);
        for half in [left, right] {
            if trial.fruitless < MAX_FRUITLESS && !self.try_some(half, trial) {
                self.bisect(half, trial);
            }
        }
    }

    /// Runs a step of these groups. Returns false if it failed.
    fn try_some(&mut self, groups: &[SeqId], trial: &mut RetryResult) -> bool {
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

    /// Records a step in which no group succeeded. The next step tries again. After the timeout,
    /// the groups of the step end, since the failure may be caused by them or by the device. Later
    /// groups are tried without them.
    fn record_failure(&mut self, error: &Error) {
        let latest = self.batch_groups.iter().copied().max().unwrap_or_default();
        let streak = self.failure_streak.get_or_insert(FailureStreak { since: self.now, steps: 0, latest });
        streak.steps += 1;
        if streak.steps < TRIES || self.now.saturating_sub(streak.since) < RETRY_TIMEOUT {
            return;
        }
        let latest = streak.latest;
        self.failure_streak = None;
        let error =
            Error::new(error.code(), format!("no step with this request could be computed for {RETRY_TIMEOUT:?}: {}", error.message()));
        let groups = std::mem::take(&mut self.batch_groups);
        // Groups that arrived after the first failure have a timeout of their own.
        groups.iter().filter(|group| **group <= latest).for_each(|&group| self.end_group(group, &error));
        self.batch_groups = groups;
    }

    /// Ends the sequences of a group. `group` is its first sequence.
    fn end_group(&mut self, group: SeqId, error: &Error) {
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
