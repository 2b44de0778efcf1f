//! Sampling on the device.

use super::BackendTypes;
use crate::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits};
use crate::error::{Error, Result};

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
    /// Samples a token from each row of `logits` that `sampling` names, and waits for the results.
    /// `logits` is `[rows, vocab]`. The contents of the named rows are unspecified afterwards.
    ///
    /// Errors: `Internal` if the backend does not sample or the limits of the sampler are exceeded,
    /// and the pending error of the device.
    fn sample<'a>(
        &'a self,
        _sampler: &'a mut Self::Sampler,
        _vocab: usize,
        _logits: &mut Self::Buf,
        _sampling: &DeviceSampling,
    ) -> Result<&'a [DeviceSample]> {
        Err(Error::internal("this backend does not support device sampling"))
    }
}
