//! Activations on the device.

use std::ops::Range;

use super::CudaBackend;
use super::context::{Event, Stream};
use super::device::Device;
use super::matrix::Part;
use super::memory::{Address, Memory, Pinned};
use crate::error::{Error, Result};
use crate::types::options::Dtype;

/// Numbers on the device: in f32, or as the operand of a product in the type that it multiplies.
pub struct Buf {
    memory: Memory,
    /// The length in f32 numbers.
    pub len: usize,
    /// The type of the numbers that the last operation has written.
    dtype: Dtype,
    /// Rows in another buffer and their norm, which the product that reads this buffer computes. This
    /// buffer then has no numbers.
    pending_norm: Option<PendingNorm>,
    read: Option<Read>,
}

/// Rows of f32 numbers, and the RMS norm that a product of few rows applies to them.
#[derive(Debug, Clone, Copy)]
pub struct PendingNorm {
    pub x: Address,
    pub weight: Address,
    /// Is added to the weights.
    pub offset: f32,
    pub eps: f32,
}

/// The memory for reads of a buffer.
struct Read {
    pinned: Pinned,
    /// Event after the copies of the last read.
    copied: Event,
    is_pending: bool,
}

const NUMBER: usize = size_of::<f32>();

impl Buf {
    pub fn new(device: &Device, len: usize) -> Result<Buf> {
        let bytes = len.checked_mul(size_of::<f32>()).ok_or_else(Error::out_of_memory)?;
        Ok(Buf { memory: device.memory(bytes as u64)?, len, dtype: Dtype::F32, pending_norm: None, read: None })
    }

    /// Creates a buffer with these numbers.
    pub fn from_numbers(device: &Device, values: &[f32]) -> Result<Buf> {
        let buf = Buf::new(device, values.len())?;
        // SAFETY: the slice covers the numbers, and is borrowed as long as they are.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
        device.write(&buf.memory, 0, bytes)?;
        Ok(buf)
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the address for an operation that reads f32 numbers.
    pub fn input(&self) -> Result<Address> {
        self.operand(Dtype::F32)
    }

    /// Returns the address for an operation that reads numbers of a type.
    pub fn operand(&self, dtype: Dtype) -> Result<Address> {
        if self.pending_norm.is_some() {
            return Err(Error::internal("an operation reads rows whose norm was left to a product of few rows"));
        }
        if self.dtype != dtype {
            let [found, wanted] = [self.dtype, dtype].map(Dtype::name);
            return Err(Error::internal(format!("an operation reads {wanted} from a buffer in {found}")));
        }
        Ok(self.memory.address())
    }

    /// Returns the address for an operation that writes f32 numbers.
    pub fn output(&mut self) -> Address {
        self.output_in(Dtype::F32)
    }

    /// Returns the address for an operation that writes numbers of a type.
    pub fn output_in(&mut self, dtype: Dtype) -> Address {
        self.dtype = dtype;
        self.pending_norm = None;
        self.memory.address()
    }

    pub fn pending_norm(&self) -> Option<PendingNorm> {
        self.pending_norm
    }

    /// Leaves the norm of other rows to the product that reads this buffer.
    pub fn leave_norm(&mut self, norm: PendingNorm) {
        self.dtype = Dtype::F32;
        self.pending_norm = Some(norm);
    }

    /// Queues copies of these ranges of the first `len` numbers to pinned memory. The pinned memory
    /// has the size of the reads, because most buffers are never read completely.
    pub fn start_read(&mut self, device: &Device, len: usize, runs: impl Iterator<Item = Range<usize>>) -> Result<()> {
        if len > self.len {
            return Err(Error::internal(format!("read of {len} numbers from a buffer of {}", self.len)));
        }
        self.input()?;
        let read = match &mut self.read {
            Some(read) if read.pinned.bytes().len() >= len * NUMBER => read,
            read => {
                read.insert(Read { pinned: device.pinned(len * NUMBER, "lower max_seqs")?, copied: device.event()?, is_pending: false })
            }
        };
        for run in runs.filter(|run| !run.is_empty()) {
            device.fetch(Stream::Compute, &self.memory, &mut read.pinned, run.start * NUMBER..run.end * NUMBER);
            read.is_pending = true;
        }
        if read.is_pending {
            device.record(&read.copied, Stream::Compute);
        }
        Ok(())
    }

    /// Waits for the copies of `start_read`. Without ranges, it does not wait.
    pub fn finish_read<'a>(&'a mut self, device: &Device, len: usize) -> Result<&'a [f32]> {
        let read = self.read.as_mut().filter(|read| read.pinned.bytes().len() >= len * NUMBER);
        let read = read.ok_or_else(|| Error::internal("a buffer was not read"))?;
        match std::mem::take(&mut read.is_pending) {
            // After an error, a copy may still be in flight.
            true => device.wait_for(&read.copied).or_else(|error| device.wait().and(Err(error)))?,
            false => device.check()?,
        }
        // SAFETY: pinned memory is zeroed when it is allocated, page-aligned, and every bit pattern
        // is a valid float.
        Ok(unsafe { std::slice::from_raw_parts(read.pinned.bytes().as_ptr().cast(), len) })
    }
}

/// The rows that a product reads.
pub struct Operand {
    pub address: Address,
    /// 1 if they are in the type in which the product multiplies, 0 if they are in f32.
    pub rounded: u32,
}

impl CudaBackend {
    /// Returns the rows for a product with a part of a matrix.
    pub(super) fn operand(&self, x: &Buf, part: &Part) -> Operand {
        let dtype = if x.dtype() == Dtype::F32 { Dtype::F32 } else { part.stored.multiplied() };
        let address = self.or_refuse(x.operand(dtype)).unwrap_or(Address::NULL);
        Operand { address, rounded: u32::from(dtype != Dtype::F32) }
    }

    /// Returns the address for an operation that reads f32 numbers. If the buffer has another type,
    /// nothing is launched until the next `check` reports it.
    pub(super) fn input(&self, buf: &Buf) -> Address {
        self.or_refuse(buf.input()).unwrap_or(Address::NULL)
    }

    /// Returns the address of a buffer as `input` does, or null.
    pub(super) fn optional(&self, buf: Option<&Buf>) -> Address {
        buf.map_or(Address::NULL, |buf| self.input(buf))
    }
}
