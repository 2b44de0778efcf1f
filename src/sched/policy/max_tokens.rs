use super::Allocation;

/// Room for all that a sequence may come to have: whoever was admitted can grow to its end, and nobody has to go for it.
/// What the host adds to a running sequence, by a fork or more tokens, was not foreseen.
pub struct MaxTokens;

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
}
