//! The journal: all inputs of an engine, from which its steps can be repeated bit for bit. It has
//! no output tokens, only digests that show whether they are the same.
//!
//! The inputs of a step are the commands, the time, which queues are full when the scheduler checks
//! them, and the failures of the device: of plans, of transfers between the tiers, of exports and
//! imports.

mod reader;
mod recorder;
mod records;
mod replay;
mod step_recorder;

use std::cell::Cell;

pub use reader::{Ending, JournalFile};
pub use recorder::Recorder;
pub use records::{Header, RecordedFork, RecordedRequest};
pub use replay::{Difference, Replay, Summary};
use step_recorder::StepRecorder;

use self::records::{FailedAttempt, FailedMove, RecordedCommand, RecordedEnd, Resized, Step};
use super::StepReport;
use super::outputs::Output;
use super::sequence_table::Command;
use crate::error::{Error, Result};
use crate::scheduler::Costs;
use crate::types::SeqId;

/// The journal of an engine, between a step and its inputs.
pub struct Journal {
    recorder: StepRecorder,
    role: Role,
}

/// The direction of a journal.
enum Role {
    Records(Recorder),
    /// A replay. `replayed` are the recorded inputs of the current step. `next_refusal` is the
    /// index of the next recorded refusal.
    Replays {
        replayed: Step,
        next_refusal: Cell<usize>,
    },
}

impl Journal {
    /// Creates the journal of an engine that runs up to `seqs` sequences at once.
    pub fn recorded(recorder: Recorder, seqs: usize) -> Result<Journal> {
        Ok(Journal { recorder: StepRecorder::new(seqs)?, role: Role::Records(recorder) })
    }

    fn replayed() -> Journal {
        Journal { recorder: StepRecorder::default(), role: Role::Replays { replayed: Step::default(), next_refusal: Cell::new(0) } }
    }

    /// Returns whether the recording has stopped because of a disk error.
    pub fn has_stopped(&self) -> bool {
        matches!(&self.role, Role::Records(recorder) if recorder.has_stopped())
    }

    pub fn begin(&mut self, now: std::time::Duration) {
        self.recorder.begin(now);
    }

    /// Records a command of the step.
    pub fn record_command(&mut self, command: &Command) {
        self.recorder.must_record = true;
        if let Command::Free { seq } = command {
            self.recorder.remove(*seq);
        }
        if let Role::Records(recorder) = &mut self.role {
            recorder.record_command(&RecordedCommand::from_command(command));
        }
    }

    /// Records whether a group may be scheduled, or whether the paused groups must be checked. A
    /// replay returns the recorded answer.
    pub fn ready(&self, is_ready: bool) -> bool {
        let index = self.recorder.next_command();
        let ready = match &self.role {
            Role::Records(_) => is_ready,
            Role::Replays { replayed, next_refusal } => {
                let refused = replayed.refused.get(next_refusal.get()) == Some(&index);
                next_refusal.set(next_refusal.get() + refused as usize);
                !refused
            }
        };
        if !ready {
            self.recorder.mark_refused(index);
        }
        ready
    }

    /// Counts an attempt to compute a plan. A replay returns the recorded failure of this attempt.
    pub fn fault(&mut self) -> Option<Error> {
        let attempt = self.recorder.attempt();
        let Role::Replays { replayed, .. } = &self.role else { return None };
        replayed.failed_attempts.iter().find(|fault| fault.attempt == attempt).map(FailedAttempt::error)
    }

    /// Records that the plan could not be computed.
    pub fn failed(&mut self, error: &Error) {
        self.recorder.failed(error);
    }

    /// Records that a pin has expired, since only the clock determines the time.
    pub fn record_expiry(&mut self) {
        self.recorder.must_record = true;
    }

    /// Returns the recorded resize of the step in a replay, otherwise `None`.
    pub fn recorded_resize(&mut self) -> Option<Option<Resized>> {
        let Role::Replays { replayed, .. } = &mut self.role else { return None };
        let place = replayed.resized.iter().position(|resized| !resized.between);
        Some(place.map(|place| replayed.resized.remove(place)))
    }

    pub fn resized(&mut self, blocks: usize, worked: bool) {
        self.recorder.resized(blocks, worked);
    }

    /// Records the result of transfers between the tiers. A replay adds the recorded failures.
    pub fn record_moves(&mut self, out: bool, back: bool) -> (bool, bool) {
        let number = self.recorder.moves();
        let (out, back) = match &self.role {
            Role::Records(_) => (out, back),
            Role::Replays { replayed, .. } => match replayed.failed_moves.iter().find(|stuck| stuck.number == number) {
                Some(stuck) => (out && !stuck.out_failed, back && !stuck.back_failed),
                None => (out, back),
            },
        };
        if !(out && back) {
            self.recorder.record_failed_move(FailedMove { number, out_failed: !out, back_failed: !back });
        }
        (out, back)
    }

    /// Records the result of an export or import of K and V. A replay returns the recorded failure.
    pub fn record_exchange(&mut self, result: Result<()>) -> Result<()> {
        let number = self.recorder.exchange();
        let result = match &self.role {
            Role::Records(_) => result,
            Role::Replays { replayed, .. } => {
                replayed.failed_exchanges.iter().find(|fault| fault.attempt == number).map_or(result, |fault| Err(fault.error()))
            }
        };
        self.recorder.step.failed_exchanges.extend(result.as_ref().err().map(|error| FailedAttempt::new(number, error)));
        result
    }

    /// Records the costs of swapping and recomputation. A replay returns the recorded ones.
    pub fn costs(&mut self, measured: Option<Costs>) -> Option<Costs> {
        let costs = match &self.role {
            Role::Records(_) => measured,
            Role::Replays { replayed, .. } => {
                replayed.costs.map(|(block, token)| Costs { block: f64::from_bits(block), token: f64::from_bits(token) })
            }
        };
        self.recorder.step.costs = costs.map(|costs| (costs.block.to_bits(), costs.token.to_bits()));
        costs
    }

    pub fn record_output(&mut self, output: &Output) {
        self.recorder.record_output(output);
    }

    /// Removes the digest of a sequence, after its last output.
    pub fn remove(&mut self, sequence: SeqId) {
        self.recorder.remove(sequence);
    }

    /// Panics if the journal keeps the digest of an unknown sequence. For tests.
    pub fn check(&self, is_known: impl Fn(SeqId) -> bool) {
        self.recorder.digested().for_each(|sequence| assert!(is_known(sequence), "sequence {sequence} is gone and the journal keeps it"));
    }

    /// Ends the record of a step. A step that did nothing and had the same inputs as the previous
    /// one is not written.
    pub fn end(&mut self, result: &Result<StepReport>) {
        let idle = result.as_ref().is_ok_and(|report| report.sequences == 0);
        let worth = self.recorder.end(idle);
        let Role::Records(recorder) = &mut self.role else { return };
        if worth {
            self.recorder.ended.iter().for_each(|ended| recorder.ended(ended));
            recorder.step(&self.recorder.step);
        }
        recorder.settle(self.recorder.step.now, idle);
    }

    /// Writes the final record when the engine is freed.
    pub fn close(&mut self) {
        if let Role::Records(recorder) = &mut self.role {
            recorder.close();
        }
    }

    /// Sets the recorded inputs of the next step.
    fn set_replayed(&mut self, step: Step) {
        self.role = Role::Replays { replayed: step, next_refusal: Cell::new(0) };
    }

    /// Returns the record of the last step, and the sequences that ended in it.
    fn last_step(&self) -> (&Step, &[RecordedEnd]) {
        (&self.recorder.step, &self.recorder.ended)
    }
}
