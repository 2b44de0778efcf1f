use super::Allocation;

/// Reserves blocks for the maximum length of a sequence, so that its growth causes no preemption.
/// Forks and appended tokens of running sequences are not part of the reservation.
///
/// With `contiguous`, the memory of a sequence is one piece, rounded up to a power of two of
/// blocks. Systems before PagedAttention worked this way, and the paper compares with it.
pub struct MaxTokens {
    pub contiguous: bool,
}

impl Allocation for MaxTokens {
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
        self.contiguous
    }
}
