use super::Allocation;

/// Room for the tokens that a sequence has: blocks are taken as it grows, and nothing is set aside.
pub struct OnDemand;

/// So that those already running need not go at once, admission leaves 1 block in 100 free.
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
