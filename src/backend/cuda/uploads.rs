//! Transfers of weights to the device, through two buffers of pinned memory: one is filled while the
//! other is copied.

use super::context::{Event, Stream};
use super::device::Device;
use super::memory::{Memory, Pinned};
use crate::error::Result;

/// Bytes of a buffer. It grows for rows that are longer.
const BYTES: usize = 8 << 20;

/// The buffers. They exist while a model is loaded.
pub struct Uploads {
    buffers: [Buffer; 2],
    /// The buffer to fill next.
    next: usize,
}

struct Buffer {
    pinned: Pinned,
    /// After its last copy.
    copied: Event,
}

impl Uploads {
    pub fn new(device: &Device) -> Result<Uploads> {
        Ok(Uploads { buffers: [Buffer::new(device)?, Buffer::new(device)?], next: 0 })
    }

    /// Returns the number of rows of this size that a buffer has, at least 1.
    pub fn rows(row_bytes: usize) -> usize {
        (BYTES / row_bytes.max(1)).max(1)
    }

    /// Returns `len` bytes of the next buffer, after its last copy. `send` queues their copy.
    pub fn fill(&mut self, device: &Device, len: usize) -> Result<&mut [u8]> {
        let buffer = &mut self.buffers[self.next];
        device.wait_for(&buffer.copied)?;
        if buffer.pinned.bytes().len() < len {
            buffer.pinned = pinned(device, len)?;
        }
        Ok(&mut buffer.pinned.bytes_mut()[..len])
    }

    /// Queues the copy of the first `len` bytes of the next buffer to an offset.
    pub fn send(&mut self, device: &Device, to: &Memory, offset: u64, len: usize) {
        let buffer = &self.buffers[self.next];
        device.send_to(Stream::Compute, to, offset, &buffer.pinned, 0..len);
        device.record(&buffer.copied, Stream::Compute);
        self.next ^= 1;
    }
}

impl Buffer {
    fn new(device: &Device) -> Result<Buffer> {
        Ok(Buffer { pinned: pinned(device, BYTES)?, copied: device.event()? })
    }
}

fn pinned(device: &Device, bytes: usize) -> Result<Pinned> {
    device.pinned(bytes, "free host memory")
}
