//! Tokens drawn on the device: what is asked for goes there in one copy, what came of it comes back in another, and the logits stay.

use super::Buf;
use super::device::{Address, Device, Memory, Pinned, Shape, launch};
use crate::batch::draws::{Draw, DrawLimits, Drawn, Draws, Edit};
use crate::error::{Error, Result};

/// As `kernels/draw.cu` has it.
const THREADS: u32 = 512;
const REMEDY: &str = "lower max_seqs";

pub struct Drawing {
    asked: Memory,
    staging: Pinned,
    drawn: Memory,
    read: Pinned,
}

/// Plain numbers, of 32 bits or two of them, with nothing between: any bytes are some.
///
/// # Safety
/// They are.
unsafe trait Numbers: Copy {}
// SAFETY: as the trait says.
unsafe impl Numbers for Draw {}
// SAFETY: as above.
unsafe impl Numbers for Edit {}
// SAFETY: as above.
unsafe impl Numbers for u32 {}

fn bytes_of<T: Numbers>(numbers: &[T]) -> &[u8] {
    // SAFETY: numbers without padding, borrowed as long as their bytes.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

fn asked_bytes(DrawLimits { draws, edits, mask }: DrawLimits) -> usize {
    draws * size_of::<Draw>() + edits * size_of::<Edit>() + mask * size_of::<u32>()
}

impl Drawing {
    pub fn new(device: &Device, limits: DrawLimits) -> Result<Drawing> {
        let (asked, drawn) = (asked_bytes(limits), limits.draws * size_of::<Drawn>());
        Ok(Drawing {
            asked: device.memory(asked as u64)?,
            staging: device.pinned(asked, REMEDY)?,
            drawn: device.memory(drawn as u64)?,
            read: device.pinned(drawn, REMEDY)?,
        })
    }

    /// On the device.
    pub fn bytes(limits: DrawLimits) -> u64 {
        (asked_bytes(limits) + limits.draws * size_of::<Drawn>()) as u64
    }

    pub fn draw(&mut self, device: &Device, vocab: usize, logits: &Buf, asked: &Draws) -> Result<&[Drawn]> {
        let Draws { draws, edits, masks, .. } = asked;
        let bytes = draws.len() * size_of::<Drawn>();
        if bytes > self.read.bytes().len() {
            return Err(no_room(bytes));
        }
        let parts = [bytes_of(draws), bytes_of(edits), bytes_of(masks)];
        let [draws_at, edits_at, masks_at] = self.stage(device, parts)?;
        let shape = Shape::new((draws.len() as u32, 1, 1), THREADS);
        let (drawn, logits) = (self.drawn.address(), logits.address());
        launch!(device, device.kernels.draw_rows, shape, drawn, logits, draws_at, edits_at, masks_at, vocab as u32);
        // SAFETY: there is room for so many, here and on the device.
        unsafe { device.read(drawn, self.read.bytes_mut(), std::iter::once(0..bytes))? };
        // SAFETY: so many were just read, aligned to a page; all their fields are numbers.
        Ok(unsafe { std::slice::from_raw_parts(self.read.bytes().as_ptr().cast(), draws.len()) })
    }

    /// Queues what is asked for, part behind part, and tells where each will be.
    fn stage(&mut self, device: &Device, parts: [&[u8]; 3]) -> Result<[Address; 3]> {
        let mut end = 0;
        let mut addresses = [self.asked.address(); 3];
        for (part, address) in parts.into_iter().zip(&mut addresses) {
            *address = address.at(end as u64);
            let room = self.staging.bytes_mut().get_mut(end..end + part.len()).ok_or_else(|| no_room(part.len()))?;
            room.copy_from_slice(part);
            end += part.len();
        }
        device.send(&self.asked, &self.staging, 0..end);
        Ok(addresses)
    }
}

fn no_room(bytes: usize) -> Error {
    Error::internal(format!("there is no room for {bytes} bytes of draws"))
}
