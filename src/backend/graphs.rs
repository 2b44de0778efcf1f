//! The execution of whole steps: deferred and captured steps, lookahead, and the loss of the
//! device.

use super::{BackendTypes, BatchSize, Extent};
use crate::batch::Batch;
use crate::error::Result;

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
    /// Returns true if the device can start the step after a decode step with this many rows, and
    /// therefore uses its `Batch::next_slots`.
    fn can_run_ahead(&self, _rows: usize) -> bool {
        false
    }
    /// Returns true if the lookahead step, predicted from the last step, is in flight.
    fn step_in_flight(&self) -> bool {
        false
    }
    /// Cancels the lookahead step: waits for the step in flight and discards it. Required if the
    /// predicted step does not follow, or if blocks are about to change.
    fn cancel_in_flight(&self) {}
    /// Returns true if the device has failed and every further operation fails too.
    fn is_lost(&self) -> bool {
        false
    }
}
