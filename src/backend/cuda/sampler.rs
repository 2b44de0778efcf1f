//! On-device sampling: one copy transfers the parameters to the device, another transfers the
//! tokens back, and the logits stay on the device. Both copies run concurrently with computation:
//! the first with the step before sampling, the second with the next step.

use super::CudaBackend;
use super::buffer::Buf;
use super::context::{Event, Stream};
use super::device::Device;
use super::function::{Shape, launch};
use super::memory::{Address, Memory, Pinned};
use crate::backend::Sampling;
use crate::error::{Error, Result};
use crate::types::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits, LogitEdit, SamplingRow};

/// Block size of the kernel in `kernels/draw.cu`.
const THREADS: u32 = 512;
const REMEDY: &str = "lower max_seqs";

pub struct DeviceSampler {
    parameters: Memory,
    staging: Pinned,
    drawn: Memory,
    read: Pinned,
    /// Events after the copy to the device, after sampling, and after the copy to the host.
    events: [Event; 3],
}

/// A type of plain numbers.
///
/// # Safety
/// The type consists of 32-bit or 64-bit numbers without padding, and is valid for every bit
/// pattern.
unsafe trait Numbers: Copy {}
// SAFETY: 32-bit numbers without padding.
unsafe impl Numbers for SamplingRow {}
// SAFETY: 32-bit numbers without padding.
unsafe impl Numbers for LogitEdit {}
// SAFETY: a 32-bit number.
unsafe impl Numbers for u32 {}

fn bytes_of<T: Numbers>(numbers: &[T]) -> &[u8] {
    // SAFETY: the numbers have no padding, and the bytes are borrowed as long as the numbers.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

fn parameter_bytes(DeviceSamplingLimits { max_rows: draws, edits, mask }: DeviceSamplingLimits) -> usize {
    draws * size_of::<SamplingRow>() + edits * size_of::<LogitEdit>() + mask * size_of::<u32>()
}

impl DeviceSampler {
    pub fn new(device: &Device, limits: DeviceSamplingLimits) -> Result<DeviceSampler> {
        let (parameters, drawn) = (parameter_bytes(limits), limits.max_rows * size_of::<DeviceSample>());
        Ok(DeviceSampler {
            parameters: device.memory(parameters as u64)?,
            staging: device.pinned(parameters, REMEDY)?,
            drawn: device.memory(drawn as u64)?,
            read: device.pinned(drawn, REMEDY)?,
            events: [device.event()?, device.event()?, device.event()?],
        })
    }

    /// Returns the bytes on the device.
    pub fn bytes(limits: DeviceSamplingLimits) -> u64 {
        (parameter_bytes(limits) + limits.max_rows * size_of::<DeviceSample>()) as u64
    }

    /// Queues sampling from rows of `logits`, and the copy of the samples to the host. Returns the
    /// address of the samples on the device.
    pub fn start(&mut self, device: &Device, vocab: usize, logits: &Buf, sampling: &DeviceSampling) -> Result<Address> {
        let bytes = sampling.rows.len() * size_of::<DeviceSample>();
        if bytes > self.read.bytes().len() {
            return Err(buffer_too_small(bytes));
        }
        let [draws_at, edits_at, masks_at] = self.stage(device, sampling)?;
        let [sent, drew, fetched] = &self.events;
        device.record(sent, Stream::Copies);
        device.hold_up(Stream::Compute, sent);
        let shape = Shape::new((sampling.rows.len() as u32, 1, 1), THREADS);
        let (drawn, logits) = (self.drawn.address(), logits.input()?);
        launch!(device, device.kernels.sampling.draw_rows, shape, drawn, logits, draws_at, edits_at, masks_at, vocab as u32);
        device.record(drew, Stream::Compute);
        device.hold_up(Stream::Copies, drew);
        device.fetch(Stream::Copies, &self.drawn, &mut self.read, 0..bytes);
        device.record(fetched, Stream::Copies);
        Ok(drawn)
    }

    /// Waits for the first `samples` samples.
    pub fn finish(&mut self, device: &Device, samples: usize) -> Result<&[DeviceSample]> {
        let bytes = self.read.bytes().len();
        if samples * size_of::<DeviceSample>() > bytes {
            return Err(buffer_too_small(samples * size_of::<DeviceSample>()));
        }
        let [.., fetched] = &self.events;
        // After an error, a copy to `read` may still be in flight.
        device.wait_for(fetched).or_else(|error| device.wait().and(Err(error)))?;
        // SAFETY: this many results were just copied to page-aligned memory. All fields are
        // numbers, valid for every bit pattern.
        Ok(unsafe { std::slice::from_raw_parts(self.read.bytes().as_ptr().cast(), samples) })
    }

    /// Queues the copy of draws, edits and masks, one after the other. Returns their addresses on
    /// the device.
    fn stage(&mut self, device: &Device, DeviceSampling { rows: draws, edits, masks }: &DeviceSampling) -> Result<[Address; 3]> {
        let mut end = 0;
        let mut push = |bytes: &[u8]| {
            let target = self.staging.bytes_mut().get_mut(end..end + bytes.len()).ok_or_else(|| buffer_too_small(bytes.len()))?;
            target.copy_from_slice(bytes);
            end += bytes.len();
            Ok::<(), Error>(())
        };
        push(bytes_of(draws))?;
        push(bytes_of(edits))?;
        push(bytes_of(masks))?;
        device.send(Stream::Copies, &self.parameters, &self.staging, 0..end);
        let (draws_at, edits_at) = (self.parameters.address(), self.parameters.address().at(size_of_val(&draws[..]) as u64));
        Ok([draws_at, edits_at, edits_at.at(size_of_val(&edits[..]) as u64)])
    }
}

impl Sampling for CudaBackend {
    fn sampler(&self, limits: DeviceSamplingLimits) -> Result<Option<DeviceSampler>> {
        DeviceSampler::new(&self.device, limits).map(Some)
    }

    fn sampler_bytes(&self, limits: DeviceSamplingLimits) -> u64 {
        DeviceSampler::bytes(limits)
    }

    fn start_sampling(&self, sampler: &mut DeviceSampler, vocab: usize, logits: &mut Buf, sampling: &DeviceSampling) -> Result<()> {
        self.steps().samples = sampler.start(&self.device, vocab, logits, sampling)?;
        Ok(())
    }

    fn finish_sampling<'a>(&'a self, sampler: &'a mut DeviceSampler, samples: usize) -> Result<&'a [DeviceSample]> {
        sampler.finish(&self.device, samples)
    }
}

fn buffer_too_small(bytes: usize) -> Error {
    Error::internal(format!("no buffer for {bytes} bytes of device sampling"))
}
