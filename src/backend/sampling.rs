//! Sampling on the device.

use super::BackendTypes;
use crate::error::{Error, Result};
use crate::types::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits};

/// Samples tokens on the device. The default implementation does not sample.
pub trait Sampling: BackendTypes {
    /// Allocates the state of on-device sampling; no step allocates more. None: the backend does
    /// not sample, and the caller samples from the logits.
    ///
    /// Errors: `OutOfMemory`.
    fn sampler(&self, _limits: DeviceSamplingLimits) -> Result<Option<Self::Sampler>> {
        Ok(None)
    }
    /// Returns the bytes of device memory that `sampler` allocates.
    fn sampler_bytes(&self, _limits: DeviceSamplingLimits) -> u64 {
        0
    }
    /// Starts to sample a token from each row of `logits` that `sampling` names. `logits` is
    /// `[rows, vocab]`. The contents of the named rows are unspecified afterwards. The samples are
    /// those of the placeholders in the next batch.
    ///
    /// Errors: `Internal` if the backend does not sample or the limits of the sampler are exceeded.
    fn start_sampling(
        &self,
        _sampler: &mut Self::Sampler,
        _vocab: usize,
        _logits: &mut Self::Buf,
        _sampling: &DeviceSampling,
    ) -> Result<()> {
        Err(Error::internal("this backend does not support device sampling"))
    }
    /// Waits for the `samples` samples of the last `start_sampling`, in the order of its rows.
    ///
    /// Errors: the pending error of the device.
    fn finish_sampling<'a>(&'a self, _sampler: &'a mut Self::Sampler, _samples: usize) -> Result<&'a [DeviceSample]> {
        Err(Error::internal("this backend does not support device sampling"))
    }
}
