use super::Allocation;

/// Allocates blocks for the current tokens of a sequence, without a reservation for its growth.
pub struct OnDemand;

/// Admission leaves 1 block in 100 free, so that a new group does not cause a preemption at once.
const WATERMARK_PARTS: usize = 100;

impl Allocation for OnDemand {
    fn length(&self, len: usize, _: usize) -> usize {
        len
    }

    fn watermark(&self, total: usize) -> usize {
        total.div_ceil(WATERMARK_PARTS)
    }

    fn reserved(&self, _: &mut dyn Iterator<Item = usize>) -> usize {
        0
    }
}
