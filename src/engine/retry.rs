//! A step that could not be computed is tried again, without those that may be to blame.

use std::time::{Duration, Instant};

use super::StepReport;
use super::beams::request_of_beam;
use super::core::Core;
use crate::error::{Error, Result};
use crate::sched::FinishReason;

/// For how long, and over how many steps, nobody's absence may help before the engine gives up.
const PATIENCE: Duration = Duration::from_secs(1);
const TRIES: u32 = 3;

/// Steps of which nothing could be computed, whoever was left out, since this one.
pub struct Trouble {
    since: Instant,
    steps: u32,
}

impl Core {
    /// A step of all that are ready. What can be computed is committed, the rest is as it was before.
    pub(super) fn advance(&mut self) -> Result<StepReport> {
        self.take_commands();
        let result = self.attempt(|_| true).or_else(|error| self.go_on_without_culprit(error));
        match &result {
            Ok(_) => self.trouble = None,
            Err(error) => self.bear(error),
        }
        result
    }

    /// Tries half of the groups that were in the step at a time, until one is left. It ends with the error if it cannot go on and
    /// others can. A fault that does not come again is nobody's.
    fn go_on_without_culprit(&mut self, mut error: Error) -> Result<StepReport> {
        let all = std::mem::take(&mut self.suspects);
        let (mut suspects, mut done) = (&all[..], StepReport::default());
        while suspects.len() > 1 {
            let (half, rest) = suspects.split_at(suspects.len() / 2);
            suspects = match self.attempt_of(half, &mut done) {
                Ok(()) => rest,
                Err(again) => {
                    error = again;
                    half
                }
            };
        }
        let culprit = suspects[0];
        if let Err(again) = self.attempt_of(suspects, &mut done) {
            error = again;
            if done.sequences == 0 {
                let others: Vec<u64> = all.iter().copied().filter(|&other| other != culprit).collect();
                // Whether that helps is told by what is done.
                let _ = self.attempt_of(&others, &mut done);
            }
            if done.sequences > 0 {
                self.end_group(culprit, &error);
            }
        }
        self.suspects = all;
        if done.sequences > 0 { Ok(done) } else { Err(error) }
    }

    /// A step of these groups alone; what it did is added to `done`.
    fn attempt_of(&mut self, groups: &[u64], done: &mut StepReport) -> Result<()> {
        let report = self.attempt(|group| groups.contains(&group))?;
        *done = StepReport {
            prefill_tokens: done.prefill_tokens + report.prefill_tokens,
            decode_tokens: done.decode_tokens + report.decode_tokens,
            sequences: done.sequences + report.sequences,
            ..report
        };
        Ok(())
    }

    /// Nothing is lost, and the next step tries again; but not for ever.
    fn bear(&mut self, error: &Error) {
        let trouble = self.trouble.get_or_insert_with(|| Trouble { since: Instant::now(), steps: 0 });
        trouble.steps += 1;
        if trouble.steps < TRIES || trouble.since.elapsed() < PATIENCE {
            return;
        }
        self.trouble = None;
        match self.suspects[..] {
            [only] => self.end_group(only, error),
            _ => self.fail_with(&Error::new(
                error.code(),
                format!(
                    "no step could be computed for {PATIENCE:?}, whichever requests were left out: {}; free this engine",
                    error.message()
                ),
            )),
        }
    }

    /// Ends what goes on together; `group` is the first of it.
    fn end_group(&mut self, group: u64, error: &Error) {
        self.unpin(group);
        match request_of_beam(&self.beams, group) {
            Some(request) => self.end_request(request, FinishReason::Error, |output| output.failed(error.clone())),
            None => {
                for seq in self.scheduler.members(group).to_vec() {
                    self.end_sequence(seq, FinishReason::Error, |output| output.failed(error.clone()));
                }
            }
        }
    }
}
