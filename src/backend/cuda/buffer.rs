//! Activations on the device.

use std::ops::Range;

use super::device::Device;
use super::memory::{Address, Memory, Pinned};
use crate::error::{Error, Result};

/// f32 numbers on the device.
pub struct Buf {
    memory: Memory,
    pub len: usize,
    /// Pinned memory for reads.
    read: Option<Pinned>,
}

impl Buf {
    pub fn new(device: &Device, len: usize) -> Result<Buf> {
        let bytes = len.checked_mul(size_of::<f32>()).ok_or_else(Error::out_of_memory)?;
        Ok(Buf { memory: device.memory(bytes as u64)?, len, read: None })
    }

    /// Creates a buffer with these numbers.
    pub fn from_numbers(device: &Device, values: &[f32]) -> Result<Buf> {
        let buf = Buf::new(device, values.len())?;
        // SAFETY: the slice covers the numbers, and is borrowed as long as they are.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
        device.write(&buf.memory, 0, bytes)?;
        Ok(buf)
    }

    pub fn address(&self) -> Address {
        self.memory.address()
    }

    /// Reads ranges of the first `len` numbers; each range comes with its offset on the device.
    /// Without ranges, it does not wait. The pinned memory has the size of the reads, because most
    /// buffers are never read completely.
    pub fn read<'a>(&'a mut self, device: &Device, len: usize, runs: impl Iterator<Item = (Range<usize>, usize)>) -> Result<&'a [f32]> {
        const BYTES: usize = size_of::<f32>();
        if len > self.len {
            return Err(Error::internal(format!("read of {len} numbers from a buffer of {}", self.len)));
        }
        let pinned = match &mut self.read {
            Some(pinned) if pinned.bytes().len() >= len * BYTES => pinned,
            read => read.insert(device.pinned(len * BYTES, "lower max_seqs")?),
        };
        let mut runs = runs.map(|(run, from)| (run.start * BYTES..run.end * BYTES, from * BYTES)).peekable();
        match runs.peek() {
            None => device.check()?,
            // SAFETY: `len` is at most `self.len`, and the offsets are rows of the same buffer.
            Some(_) => unsafe { device.read(self.memory.address(), pinned.bytes_mut(), runs)? },
        }
        // SAFETY: pinned memory is zeroed when it is allocated, page-aligned, and every bit pattern
        // is a valid float.
        Ok(unsafe { std::slice::from_raw_parts(pinned.bytes().as_ptr().cast(), len) })
    }
}

/// Returns the address of a buffer, or null.
pub fn address_of(buf: Option<&Buf>) -> Address {
    buf.map_or(Address::NULL, Buf::address)
}
