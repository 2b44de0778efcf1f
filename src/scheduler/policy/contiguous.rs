use super::Allocation;

/// Reserves contiguous memory for the maximum length of a sequence, rounded up to a power of two of
/// blocks. Systems before PagedAttention worked this way, and the paper compares with it.
pub struct Contiguous;

impl Allocation for Contiguous {
    fn length(&self, _: usize, max_len: usize) -> usize {
        max_len
    }

    fn watermark(&self, _: usize) -> usize {
        0
    }

    fn reserved(&self, needs: &mut dyn Iterator<Item = usize>) -> usize {
        needs.sum()
    }

    fn is_contiguous(&self) -> bool {
        true
    }
}
