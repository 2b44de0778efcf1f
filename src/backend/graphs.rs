//! The execution of whole steps: deferred and captured steps, steps in flight, and the loss of the
//! device.

use super::{BackendTypes, BatchSize, Extent};
use crate::error::Result;
use crate::types::batch::Batch;

/// Controls the execution of whole steps. The default implementation computes each operation when
/// it is called.
pub trait Graphs: BackendTypes {
    /// Launches the ops since `Alloc::upload`, if the device has deferred them. Call it after the
    /// last op of a step.
    fn launch_step(&self) {}
    /// Uploads a batch for the next decode size whose ops the device captures, so that later steps
    /// of that size replay them. `_max` bounds the sizes. `_batch` is a decode batch of one row;
    /// its results are discarded. None: all sizes are captured.
    ///
    /// Errors: the pending error of the device, for example of the last capture.
    fn capture(&self, _max: &BatchSize, _batch: &Batch, _inputs: &mut Self::Inputs) -> Result<Option<Extent>> {
        Ok(None)
    }
    /// Returns the number of steps that may be queued at once. With 2, a batch may have
    /// placeholders for the samples of the previous step, which are not known when it is uploaded.
    fn max_steps_in_flight(&self) -> usize {
        1
    }
    /// Reports the pending error of the device, without waiting.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// Waits until all queued work is complete, and reports the pending error of the device.
    fn wait(&self) -> Result<()> {
        Ok(())
    }
    /// Returns true if the device has failed and every further operation fails too.
    fn is_lost(&self) -> bool {
        false
    }
}
