//! The execution of whole steps: captured graphs, and lookahead.

use super::ahead::NextStep;
use super::graphs::CapturedGraphs;
use super::inputs::Inputs;
use super::{CudaBackend, MANY_ROWS};
use crate::backend::{BatchSize, Extent, Graphs};
use crate::batch::Batch;
use crate::error::Result;

/// The step in flight, and the captured graphs.
#[derive(Default)]
pub struct Steps {
    pub graphs: CapturedGraphs,
    pub ahead: NextStep,
}

impl Graphs for CudaBackend {
    /// Launches the captured graph if the step has one.
    fn launch_step(&self) {
        self.steps().graphs.end(&self.device);
    }

    fn capture(&self, max: &BatchSize, batch: &Batch, inputs: &mut Inputs) -> Result<Option<Extent>> {
        let mut steps = self.steps();
        steps.graphs.abandon(&self.device);
        self.device.check()?; // reports the errors of the last capture
        let Some(rows) = steps.graphs.next_rows(max) else { return self.device.wait().map(|()| None) };
        let extent = inputs.take(&self.device, batch, &self.heads_per_kv(), Some(rows))?;
        // The first cuBLASLt call for a number of rows may not be capturable.
        let is_new = rows > MANY_ROWS && self.blas.is_some();
        steps.graphs.begin_recording(&self.device, rows, is_new);
        Ok(Some(extent))
    }

    fn can_run_ahead(&self, rows: usize) -> bool {
        self.steps().graphs.has_rows_for(rows)
    }

    fn step_in_flight(&self) -> bool {
        self.steps().ahead.is_under_way()
    }

    fn cancel_in_flight(&self) {
        if self.steps().ahead.forget() {
            // Errors of the discarded step do not matter, unless the device is lost; in that case
            // every later call reports it.
            let _ = self.device.wait();
        }
    }

    fn is_lost(&self) -> bool {
        self.device.is_lost()
    }
}
