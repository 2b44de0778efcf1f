//! The state from which the admission of a request is forecast.

use std::time::Duration;

use super::step_time::StepTimeModel;
use crate::error::Result;
use crate::scheduler::simulate::{SchedulerSnapshot, StepLoad};

/// A snapshot of the scheduler and of the step times after the last step.
#[derive(Debug, Default)]
pub struct AdmissionSnapshot {
    pub scheduler: SchedulerSnapshot,
    pub step_time: StepTimeModel,
    /// The current step: its load and its start time.
    pub step: Option<(StepLoad, Duration)>,
}

impl AdmissionSnapshot {
    pub fn try_clone(&self) -> Result<AdmissionSnapshot> {
        Ok(AdmissionSnapshot { scheduler: self.scheduler.try_clone()?, ..*self })
    }
}
