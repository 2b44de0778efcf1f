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
use crate::types::batch::device_sampling::{
    DeviceSample, DeviceSampling, DeviceSamplingLimits, LogitEdit, NO_LOGPROBS, NO_MASK, SamplingRow,
};

/// Block size of the kernels in `kernels/draw.cu`.
const THREADS: u32 = 512;
/// The maximum number of parts of a row, and the bytes that a block writes about its part, as in
/// `kernels/draw.cuh`.
const MAX_PARTS: usize = 16;
const PART_BYTES: usize = 8512;
/// The fewest tokens of a part: a load of 16 bytes for each thread.
const MIN_PART: usize = 4 * THREADS as usize;
const REMEDY: &str = "lower max_seqs";

pub struct DeviceSampler {
    /// What the blocks find in the parts of the rows.
    parts: Memory,
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

/// Returns the number of parts into which each of `rows` rows is divided: so many that each multiprocessor
/// has a block. It is a power of two.
fn parts_of_row(rows: usize, vocab: usize, multiprocessors: u32) -> usize {
    let parts = (multiprocessors as usize / rows.max(1)).min(vocab / MIN_PART).clamp(1, MAX_PARTS);
    1 << parts.ilog2()
}

/// Returns the bytes for the parts of up to `max_rows` rows.
fn bytes_of_parts(max_rows: usize, multiprocessors: u32) -> usize {
    max_rows.max(multiprocessors as usize).min(max_rows * MAX_PARTS) * PART_BYTES
}

/// Returns whether the kernel `draw_edit` has work for a row.
fn needs_edit(row: &SamplingRow) -> bool {
    row.logprobs != NO_LOGPROBS || row.biases + row.counts > 0 || row.mask != NO_MASK
}

impl DeviceSampler {
    pub fn new(device: &Device, limits: DeviceSamplingLimits) -> Result<DeviceSampler> {
        let (parameters, drawn) = (parameter_bytes(limits), limits.max_rows * size_of::<DeviceSample>());
        Ok(DeviceSampler {
            parts: device.memory(bytes_of_parts(limits.max_rows, device.multiprocessors) as u64)?,
            parameters: device.memory(parameters as u64)?,
            staging: device.pinned(parameters, REMEDY)?,
            drawn: device.memory(drawn as u64)?,
            read: device.pinned(drawn, REMEDY)?,
            events: [device.event()?, device.event()?, device.event()?],
        })
    }

    /// Returns the bytes on the device.
    pub fn bytes(limits: DeviceSamplingLimits, multiprocessors: u32) -> u64 {
        let samples = limits.max_rows * size_of::<DeviceSample>();
        (bytes_of_parts(limits.max_rows, multiprocessors) + parameter_bytes(limits) + samples) as u64
    }

    /// Queues sampling from rows of `logits`, and the copy of the samples to the host. Returns the
    /// address of the samples on the device.
    pub fn start(&mut self, device: &Device, vocab: usize, logits: &Buf, sampling: &DeviceSampling) -> Result<Address> {
        let bytes = sampling.rows.len() * size_of::<DeviceSample>();
        let count = parts_of_row(sampling.rows.len(), vocab, device.multiprocessors);
        let bytes_of_parts = sampling.rows.len() * count * PART_BYTES;
        if bytes > self.read.bytes().len() || bytes_of_parts as u64 > self.parts.bytes() {
            return Err(buffer_too_small(bytes.max(bytes_of_parts)));
        }
        let [draws_at, edits_at, masks_at] = self.stage(device, sampling)?;
        let [sent, drew, fetched] = &self.events;
        device.record(sent, Stream::Copies);
        device.hold_up(Stream::Compute, sent);
        let (rows, count, vocab) = (sampling.rows.len() as u32, count as u32, vocab as u32);
        let [of_parts, of_rows] = [(count, rows, 1), (rows, 1, 1)].map(|grid| Shape::new(grid, THREADS));
        let (drawn, parts, logits) = (self.drawn.address(), self.parts.address(), logits.input()?);
        let kernels = &device.kernels.sampling;
        launch!(device, kernels.draw_best, of_parts, parts, logits, draws_at, vocab);
        if sampling.rows.iter().any(needs_edit) {
            launch!(device, kernels.draw_edit, of_parts, parts, logits, draws_at, edits_at, masks_at, vocab);
        }
        if sampling.rows.iter().any(|row| row.temperature > 0.0) {
            launch!(device, kernels.draw_weigh, of_parts, parts, logits, draws_at, vocab);
        }
        launch!(device, kernels.draw_choose, of_rows, drawn, parts, logits, draws_at, edits_at, vocab, count);
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
        DeviceSampler::bytes(limits, self.device.multiprocessors)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_occupy_the_multiprocessors_and_fit_the_buffer() {
        const LLAMA_3: usize = 128_256;
        for (rows, vocab, multiprocessors, parts) in [
            (1, LLAMA_3, 132, 16),
            (8, LLAMA_3, 132, 16),
            (9, LLAMA_3, 132, 8),
            (64, LLAMA_3, 132, 2),
            (67, LLAMA_3, 132, 1),
            (256, LLAMA_3, 132, 1),
            (1, LLAMA_3, 1, 1),
            (1, 500, 132, 1),
            (1, 2 * MIN_PART - 1, 132, 1),
            (1, 2 * MIN_PART, 132, 2),
            (1, 7 * MIN_PART, 132, 4),
        ] {
            assert_eq!(parts_of_row(rows, vocab, multiprocessors), parts, "{rows} rows of {vocab} tokens");
        }
        for max_rows in 1..300 {
            let most = (1..=max_rows).map(|rows| rows * parts_of_row(rows, LLAMA_3, 132)).max().unwrap();
            assert!(most * PART_BYTES <= bytes_of_parts(max_rows, 132), "{max_rows} rows");
        }
    }
}
