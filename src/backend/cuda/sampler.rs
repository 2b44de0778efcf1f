//! On-device sampling: one copy transfers the parameters to the device, another transfers the
//! tokens back, and the logits stay on the device. Both copies run concurrently with computation:
//! the first with the step before sampling, the second with the next step.

use super::CudaBackend;
use super::buffer::Buf;
use super::context::{Event, Stream};
use super::device::Device;
use super::function::{Shape, launch};
use super::memory::{Address, Memory, Pinned};
use super::steps::Steps;
use crate::backend::{Graphs, Sampling};
use crate::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits, LogitEdit, SamplingRow};
use crate::error::{Error, Result};

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

    /// Samples from rows of `logits`; `row` maps a row of the batch to its row on the device.
    /// `prepare_next` receives the address of the results, and queues the next step before the host
    /// waits for the tokens.
    pub fn draw(
        &mut self,
        device: &Device,
        vocab: usize,
        logits: &Buf,
        sampling: &DeviceSampling,
        row: impl Fn(usize) -> usize,
        prepare_next: impl FnOnce(Address),
    ) -> Result<&[DeviceSample]> {
        let bytes = sampling.rows.len() * size_of::<DeviceSample>();
        if bytes > self.read.bytes().len() {
            return Err(buffer_too_small(bytes));
        }
        let [draws_at, edits_at, masks_at] = self.stage(device, sampling, row)?;
        let [sent, drew, fetched] = &self.events;
        device.record(sent, Stream::Copies);
        device.hold_up(Stream::Compute, sent);
        let shape = Shape::new((sampling.rows.len() as u32, 1, 1), THREADS);
        let (drawn, logits) = (self.drawn.address(), logits.address());
        launch!(device, device.kernels.sampling.draw_rows, shape, drawn, logits, draws_at, edits_at, masks_at, vocab as u32);
        device.record(drew, Stream::Compute);
        device.hold_up(Stream::Copies, drew);
        device.fetch(Stream::Copies, &self.drawn, &mut self.read, bytes);
        device.record(fetched, Stream::Copies);
        prepare_next(drawn);
        // After an error, a copy to `read` may still be in flight.
        device.wait_for(fetched).or_else(|error| device.wait().and(Err(error)))?;
        // SAFETY: this many results were just copied to page-aligned memory. All fields are
        // numbers, valid for every bit pattern.
        Ok(unsafe { std::slice::from_raw_parts(self.read.bytes().as_ptr().cast(), sampling.rows.len()) })
    }

    /// Queues the copy of draws, edits and masks, one after the other. Returns their addresses on
    /// the device.
    fn stage(
        &mut self,
        device: &Device,
        DeviceSampling { rows: draws, edits, masks }: &DeviceSampling,
        row: impl Fn(usize) -> usize,
    ) -> Result<[Address; 3]> {
        let mut end = 0;
        let mut push = |bytes: &[u8]| {
            let target = self.staging.bytes_mut().get_mut(end..end + bytes.len()).ok_or_else(|| buffer_too_small(bytes.len()))?;
            target.copy_from_slice(bytes);
            end += bytes.len();
            Ok::<(), Error>(())
        };
        for draw in draws {
            push(bytes_of(&[SamplingRow { row: row(draw.row as usize) as u32, ..*draw }]))?;
        }
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

    fn sample<'a>(
        &'a self,
        drawing: &'a mut DeviceSampler,
        vocab: usize,
        logits: &mut Buf,
        draws: &DeviceSampling,
    ) -> Result<&'a [DeviceSample]> {
        self.launch_step();
        let mut steps = self.steps();
        let Steps { graphs, ahead } = &mut *steps;
        let mut step_started = false;
        let prepare_next = |drawn| {
            if let Some(rows) = ahead.prepare_next(&self.device, draws.rows.len(), drawn) {
                graphs.play(&self.device, rows);
                step_started = true;
            }
        };
        let drawn = drawing.draw(&self.device, vocab, logits, draws, |row| ahead.row(row), prepare_next)?;
        if step_started {
            ahead.mark_launched(drawn);
        }
        Ok(drawn)
    }
}

fn buffer_too_small(bytes: usize) -> Error {
    Error::internal(format!("no buffer for {bytes} bytes of device sampling"))
}
