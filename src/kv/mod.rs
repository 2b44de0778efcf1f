//! The KV blocks: which block holds which tokens. It does not know the contents of blocks.

mod block_hash;
mod block_manager;
mod block_pool;
pub mod connector;
pub mod events;
mod paging;
mod prefix_cache;
mod size;

use std::ops::Range;

pub use block_hash::BlockHash;
pub use block_manager::{BlockManager, BlockTable, SwapLoad};
pub use paging::Paging;
pub use prefix_cache::{HashedTokens, Origin, PrefixIndex};

/// The index of a block in its tier.
pub type BlockId = u32;

/// Returns the number of blocks for `tokens` tokens.
pub fn blocks_for(tokens: usize, block_size: usize) -> usize {
    tokens.div_ceil(block_size)
}

/// Returns the first element of the range for which the monotonic predicate `is` holds, or the end
/// of the range.
fn first(range: Range<usize>, is: impl Fn(usize) -> bool) -> usize {
    let (mut start, mut end) = (range.start, range.end);
    while start < end {
        let middle = start + (end - start) / 2;
        if is(middle) { end = middle } else { start = middle + 1 }
    }
    end
}

/// The pool has too few available blocks. The failed call has changed nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoSpace;

/// The null block: an entry whose block is out of the window, so that no token attends to it.
pub const NULL_BLOCK: BlockId = BlockId::MAX;
