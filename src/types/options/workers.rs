//! The division of an engine among several workers.

use std::time::Duration;

use super::EngineOptions;
use crate::communicator::CommunicatorHandle;
use crate::error::{Error, Result};
use crate::types::parallel::Division;

/// How several workers compute one model. Each is a process or a thread with its own device.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The numbers of workers.
    pub division: Division,
    /// The connection to the other workers. Needed if there are several.
    pub communicator: Option<CommunicatorHandle>,
    /// Limit of each wait for other workers, also while they load the model.
    pub timeout: Duration,
}

impl Default for WorkerOptions {
    fn default() -> WorkerOptions {
        WorkerOptions { division: Division::default(), communicator: None, timeout: WorkerOptions::DEFAULT_TIMEOUT }
    }
}

impl WorkerOptions {
    /// Default of `timeout`.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
    /// Maximum of `tensor` and `pipeline`.
    pub const MAX_WORKERS: usize = 1024;

    /// Makes the communicator belong to the library, when nothing can fail any more.
    pub(crate) fn adopt(&self) {
        self.communicator.iter().for_each(CommunicatorHandle::adopt);
    }

    /// Checks the values together with the other options.
    pub(super) fn validate(&self, options: &EngineOptions) -> Result<()> {
        super::within("tensor_parallel", self.division.tensor, Self::MAX_WORKERS)?;
        super::within("pipeline_parallel", self.division.pipeline, Self::MAX_WORKERS)?;
        if self.timeout.is_zero() {
            return Err(Error::invalid("worker_timeout_ms is 0; give at least 1"));
        }
        if self.division.workers() > 1 && options.swap_dir.is_some() {
            return Err(Error::unsupported(
                "swap_path is set and several workers divide the model, which keep the host tier in memory; unset swap_path",
            ));
        }
        Ok(())
    }
}
