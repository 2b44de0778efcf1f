//! The execution of whole steps: captured graphs, and two steps in flight.
//!
//! All work of a step is queued on one stream, so a step reads what the previous one has written:
//! the sampled tokens replace the placeholders of the next batch before its first op.

use super::CudaBackend;
use super::graphs::CapturedGraphs;
use super::inputs::Inputs;
use super::memory::Address;
use crate::backend::{BatchSize, Extent, Graphs};
use crate::error::Result;
use crate::types::batch::Batch;

/// The captured graphs, and the samples of the last step.
pub struct Steps {
    pub graphs: CapturedGraphs,
    /// The samples that the device draws last. They replace the placeholders of the next batch.
    pub samples: Address,
}

impl Default for Steps {
    fn default() -> Steps {
        Steps { graphs: CapturedGraphs::default(), samples: Address::NULL }
    }
}

impl Graphs for CudaBackend {
    /// Launches the captured graph if the step has one.
    fn launch_step(&self) {
        self.steps().graphs.end(&self.device);
    }

    fn capture(&self, max: &BatchSize, batch: &Batch, inputs: &mut Inputs) -> Result<Option<Extent>> {
        if self.exchange.is_some() {
            // The steps of all workers would have to be captured at the same time.
            return Ok(None);
        }
        let mut steps = self.steps();
        steps.graphs.abandon(&self.device);
        self.device.check()?; // reports the errors of the last capture
        let Some(rows) = steps.graphs.next_rows(max) else { return self.device.wait().map(|()| None) };
        let extent = inputs.take(&self.device, batch, &self.head_groups(), Some(rows))?;
        // The first cuBLASLt call for a number of rows may not be capturable.
        let is_new = rows >= self.min_blas_rows && self.blas.is_ok();
        steps.graphs.begin_recording(&self.device, rows, is_new);
        Ok(Some(extent))
    }

    fn max_steps_in_flight(&self) -> usize {
        2
    }

    fn check(&self) -> Result<()> {
        self.device.check()
    }

    fn wait(&self) -> Result<()> {
        self.device.wait()
    }

    fn is_lost(&self) -> bool {
        self.device.is_lost()
    }
}
