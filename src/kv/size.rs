//! Arithmetic of the block size.

/// The number of tokens per block. It is a power of two, so that slot computations need no
/// division.
#[derive(Debug, Clone, Copy)]
pub struct BlockSize {
    shift: u32,
}

impl BlockSize {
    pub fn new(tokens: usize) -> BlockSize {
        assert!(tokens.is_power_of_two(), "block_size is not a power of two ({tokens})");
        BlockSize { shift: tokens.trailing_zeros() }
    }

    #[inline]
    pub fn tokens(self) -> usize {
        1 << self.shift
    }

    /// Returns the number of blocks for `tokens` tokens.
    #[inline]
    pub fn blocks_for(self, tokens: usize) -> usize {
        self.full(tokens + self.tokens() - 1)
    }

    /// Returns the number of blocks that `tokens` tokens fill completely. For a position, this is
    /// the place of its block in the table.
    #[inline]
    pub fn full(self, tokens: usize) -> usize {
        tokens >> self.shift
    }

    /// Returns the offset of a position in its block.
    #[inline]
    pub fn offset(self, position: usize) -> usize {
        position & (self.tokens() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks_for;
    use super::*;

    #[test]
    fn shifts_give_the_results_of_division() {
        for tokens in [1, 4, 8, 16, 256] {
            let size = BlockSize::new(tokens);
            assert_eq!(size.tokens(), tokens);
            for n in 0..600 {
                assert_eq!((size.blocks_for(n), size.full(n), size.offset(n)), (blocks_for(n, tokens), n / tokens, n % tokens));
            }
        }
    }
}
