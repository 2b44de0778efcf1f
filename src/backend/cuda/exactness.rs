//! The check of a device for the batch-invariant mode.

use super::device::Device;
use super::function::{Shape, launch};
use crate::error::{Error, Result};

/// Thread blocks of 128 threads (`kernels/exactness.cu`): more than a thousand products for each
/// instruction.
const BLOCKS: u32 = 8;
/// Bytes of dynamic shared memory of the check of wgmma.
const SHARED: u32 = 2 * 16 * 128 + 1024;

/// Checks that tensor cores return the sums to which they add with the same bits where the product is
/// zero. Equal bits in any batch rest on that, and NVIDIA does not document it.
///
/// Errors: `Unsupported` if an instruction changes a sum.
pub fn check(device: &Device) -> Result<()> {
    let kernels = &device.kernels.exactness;
    let shape = Shape::new((BLOCKS, 1, 1), 128);
    let wgmma = kernels.sums_after_wgmma.map(|function| ("wgmma", function, Shape { shared: SHARED, ..shape }));
    for (instruction, function, shape) in [("mma.sync", kernels.sums_after_mma, shape)].into_iter().chain(wgmma) {
        let (changed, mut flag) = (device.memory(size_of::<u32>() as u64)?, [0; size_of::<u32>()]);
        device.write(&changed, 0, &flag)?;
        launch!(device, function, shape, changed.address());
        let whole = 0..flag.len();
        // SAFETY: the memory has the bytes of the flag.
        unsafe { device.read(changed.address(), &mut flag, [(whole, 0)].into_iter()) }?;
        if flag != [0; size_of::<u32>()] {
            return Err(Error::unsupported(format!(
                "PLLM_ENGINE_BATCH_INVARIANT is set, but the tensor cores of this device change sums when they add zero ({instruction}), \
                 so rows would have other bits in other batches; create the engine without it, or set device to \"cpu\""
            )));
        }
    }
    Ok(())
}
