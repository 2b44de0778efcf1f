//! A journal: what the host asked for, and all that a step learned from outside of it, so that the same steps can be run again
//! elsewhere, bit for bit. The tokens themselves are not in it, only what tells whether they are the same.
//!
//! A step learns from outside: the commands, the time, which queues are full when it asks, and whether the device failed: at a plan, at
//! moves between the tiers, at an export or import.

mod reader;
mod recorder;
mod records;
mod replay;
mod witness;

use std::cell::Cell;

pub use reader::{Ending, JournalFile};
pub use recorder::Recorder;
pub use records::{Forked, Header, Wanted};
pub use replay::{Difference, Replay, Summary};
use witness::Witness;

use self::records::{Asked, Ended, Fault, Resized, Step, Stuck};
use super::StepReport;
use super::outputs::Output;
use super::registry::Command;
use crate::error::{Error, Result};
use crate::sched::Costs;

/// Between a step and its outside.
pub struct Journal {
    witness: Witness,
    role: Role,
}

enum Role {
    Records(Recorder),
    /// What the step under way is told instead of what is; and the next of these that it will meet.
    Replays {
        told: Step,
        next_refusal: Cell<usize>,
    },
}

impl Journal {
    /// Of an engine that runs so many sequences at once.
    pub fn recorded(recorder: Recorder, seqs: usize) -> Result<Journal> {
        Ok(Journal { witness: Witness::new(seqs)?, role: Role::Records(recorder) })
    }

    fn replayed() -> Journal {
        Journal { witness: Witness::default(), role: Role::Replays { told: Step::default(), next_refusal: Cell::new(0) } }
    }

    /// A journal that the disk did not take.
    pub fn has_stopped(&self) -> bool {
        matches!(&self.role, Role::Records(recorder) if recorder.has_stopped())
    }

    pub fn begin(&mut self, now: std::time::Duration) {
        self.witness.begin(now);
    }

    /// The step takes a command.
    pub fn takes(&mut self, command: &Command) {
        self.witness.touched = true;
        if let Command::Free { seq } = command {
            self.witness.forget(*seq);
        }
        if let Role::Records(recorder) = &mut self.role {
            recorder.asked(&Asked::of(command));
        }
    }

    /// Whether a group may take part, as far as its queue is concerned; or whether any of those that have paused may.
    pub fn ready(&self, is_ready: bool) -> bool {
        let ask = self.witness.ask();
        let ready = match &self.role {
            Role::Records(_) => is_ready,
            Role::Replays { told, next_refusal } => {
                let refused = told.refused.get(next_refusal.get()) == Some(&ask);
                next_refusal.set(next_refusal.get() + refused as usize);
                !refused
            }
        };
        if !ready {
            self.witness.refused(ask);
        }
        ready
    }

    /// Before a plan is computed: how the device failed it, where it is told and not found out.
    pub fn fault(&mut self) -> Option<Error> {
        let attempt = self.witness.attempt();
        let Role::Replays { told, .. } = &self.role else { return None };
        told.faults.iter().find(|fault| fault.attempt == attempt).map(Fault::error)
    }

    /// The plan could not be computed.
    pub fn failed(&mut self, error: &Error) {
        self.witness.failed(error);
    }

    /// A pin has expired: nothing but the clock says when.
    pub fn touched(&mut self) {
        self.witness.touched = true;
    }

    /// What a step makes of its pool, where that is told and not found out.
    pub fn pool(&mut self) -> Option<Option<Resized>> {
        let Role::Replays { told, .. } = &mut self.role else { return None };
        let place = told.resized.iter().position(|resized| !resized.between);
        Some(place.map(|place| told.resized.remove(place)))
    }

    pub fn resized(&mut self, blocks: usize, worked: bool) {
        self.witness.resized(blocks, worked);
    }

    /// Blocks were moved between the tiers: what came of it, or what is said to have come of it.
    pub fn moved(&mut self, out: bool, back: bool) -> (bool, bool) {
        let number = self.witness.moves();
        let (out, back) = match &self.role {
            Role::Records(_) => (out, back),
            Role::Replays { told, .. } => match told.stuck.iter().find(|stuck| stuck.number == number) {
                Some(stuck) => (out && !stuck.out, back && !stuck.back),
                None => (out, back),
            },
        };
        if !(out && back) {
            self.witness.stuck(Stuck { number, out: !out, back: !back });
        }
        (out, back)
    }

    /// A sequence's K and V were read to be exported, or written as they were imported: what came of it, or is said to have come of it.
    pub fn exchanged(&mut self, result: Result<()>) -> Result<()> {
        let number = self.witness.exchange();
        let result = match &self.role {
            Role::Records(_) => result,
            Role::Replays { told, .. } => {
                told.unmoved.iter().find(|fault| fault.attempt == number).map_or(result, |fault| Err(fault.error()))
            }
        };
        self.witness.step.unmoved.extend(result.as_ref().err().map(|error| Fault::new(number, error)));
        result
    }

    /// What moving and computing cost: as measured, or as it is said to have been.
    pub fn costs(&mut self, measured: Option<Costs>) -> Option<Costs> {
        let costs = match &self.role {
            Role::Records(_) => measured,
            Role::Replays { told, .. } => {
                told.costs.map(|(block, token)| Costs { block: f64::from_bits(block), token: f64::from_bits(token) })
            }
        };
        self.witness.step.costs = costs.map(|costs| (costs.block.to_bits(), costs.token.to_bits()));
        costs
    }

    pub fn says(&mut self, output: &Output) {
        self.witness.says(output);
    }

    /// The sequence is gone, and what was just said of it, if anything, was the last.
    pub fn forget(&mut self, sequence: u64) {
        self.witness.forget(sequence);
    }

    /// Panics if it keeps anything of a sequence that is gone. For tests.
    pub fn check(&self, is_known: impl Fn(u64) -> bool) {
        self.witness.remembered().for_each(|sequence| assert!(is_known(sequence), "sequence {sequence} is gone and the journal keeps it"));
    }

    /// The step is over. One that did nothing, and saw nothing that the one before did not, leaves no trace.
    pub fn end(&mut self, result: &Result<StepReport>) {
        let idle = result.as_ref().is_ok_and(|report| report.sequences == 0);
        let worth = self.witness.end(idle);
        let Role::Records(recorder) = &mut self.role else { return };
        if worth {
            self.witness.ended.iter().for_each(|ended| recorder.ended(ended));
            recorder.step(&self.witness.step);
        }
        recorder.settle(self.witness.step.now, idle);
    }

    /// The engine is being freed.
    pub fn close(&mut self) {
        if let Role::Records(recorder) = &mut self.role {
            recorder.close();
        }
    }

    /// What the next step is told.
    fn tell(&mut self, step: Step) {
        self.role = Role::Replays { told: step, next_refusal: Cell::new(0) };
    }

    /// What the last step said, and which sequences ended in it.
    fn seen(&self) -> (&Step, &[Ended]) {
        (&self.witness.step, &self.witness.ended)
    }
}
