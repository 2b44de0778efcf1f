//! Contiguous memory for sequences, which systems before PagedAttention reserve. It limits
//! admission only: the blocks of a sequence lie anywhere, so that its results are those of every
//! policy.

use super::GroupId;
use crate::error::Result;

/// A buddy allocator: chunks of a power of two of blocks, each at a multiple of its size. A pool
/// that is no power of two consists of several.
#[derive(Debug)]
pub(super) struct Chunks {
    /// Positions of the free chunks of 1, 2, 4, ... blocks.
    free: Vec<Vec<usize>>,
    taken: Vec<Chunk>,
}

#[derive(Debug, Clone, Copy)]
struct Chunk {
    owner: GroupId,
    first: usize,
    order: usize,
}

impl Chunks {
    /// Creates a pool of `blocks` blocks, with all memory that it needs.
    pub fn new(blocks: usize) -> Result<Chunks> {
        let orders = blocks.checked_ilog2().map_or(0, |order| order as usize + 1);
        let mut free = Vec::new();
        free.try_reserve_exact(orders)?;
        free.resize_with(orders, Vec::new);
        free.iter_mut().enumerate().try_for_each(|(order, chunks)| chunks.try_reserve_exact(blocks >> order))?;
        let mut taken = Vec::new();
        taken.try_reserve_exact(blocks)?;
        let mut first = 0;
        for order in (0..orders).rev().filter(|order| blocks >> order & 1 == 1) {
            free[order].push(first);
            first += 1 << order;
        }
        Ok(Chunks { free, taken })
    }

    /// Takes `count` chunks of at least `blocks` blocks for a group, or none.
    pub fn take(&mut self, owner: GroupId, blocks: usize, count: usize) -> bool {
        let before = self.taken.len();
        for _ in 0..count {
            let Some((first, order)) = self.split(blocks) else {
                self.release_from(before, |_| false);
                return false;
            };
            self.taken.push(Chunk { owner, first, order });
        }
        true
    }

    /// Releases the chunks of the groups for which `stays` is false.
    pub fn retain(&mut self, stays: impl Fn(GroupId) -> bool) {
        self.release_from(0, stays);
    }

    fn release_from(&mut self, start: usize, stays: impl Fn(GroupId) -> bool) {
        let mut next = start;
        while let Some(&Chunk { owner, first, order }) = self.taken.get(next) {
            match stays(owner) {
                true => next += 1,
                false => {
                    self.taken.swap_remove(next);
                    self.merge(first, order);
                }
            }
        }
    }

    /// Removes the smallest sufficient chunk from the free ones. The rest of a larger one stays
    /// free.
    fn split(&mut self, blocks: usize) -> Option<(usize, usize)> {
        let order = blocks.next_power_of_two().ilog2() as usize;
        let mut larger = (order..self.free.len()).find(|&order| !self.free[order].is_empty())?;
        let first = self.free[larger].pop()?;
        while larger > order {
            larger -= 1;
            self.free[larger].push(first + (1 << larger));
        }
        Some((first, order))
    }

    /// Adds a chunk to the free ones, together with its neighbour of the same size if that is free.
    fn merge(&mut self, mut first: usize, mut order: usize) {
        while let Some(place) = self.free[order].iter().position(|&other| other == first ^ (1 << order)) {
            self.free[order].swap_remove(place);
            first &= !(1 << order);
            order += 1;
        }
        self.free[order].push(first);
    }
}

#[cfg(test)]
mod tests {
    use super::super::slab::Slot;
    use super::*;

    fn owner(number: u64) -> GroupId {
        GroupId::new(0, number, Slot::NONE)
    }

    fn free_blocks(chunks: &Chunks) -> usize {
        chunks.free.iter().enumerate().map(|(order, chunks)| chunks.len() << order).sum()
    }

    #[test]
    fn chunks_are_powers_of_two_and_merge_when_they_are_released() {
        let mut chunks = Chunks::new(16).unwrap();
        assert!(chunks.take(owner(1), 5, 1), "8 blocks");
        assert!(chunks.take(owner(2), 1, 2));
        assert!(!chunks.take(owner(3), 5, 1), "6 blocks are free, and no 8 together");
        assert!(!chunks.take(owner(3), 3, 2), "all or none");
        assert_eq!(free_blocks(&chunks), 6);
        chunks.retain(|group| group != owner(2));
        assert!(chunks.take(owner(3), 8, 1));
        chunks.retain(|_| false);
        assert_eq!((free_blocks(&chunks), chunks.free[4].len()), (16, 1));
        assert!(!chunks.take(owner(4), 17, 1));
    }

    #[test]
    fn the_pool_of_the_paper_holds_seven_sequences_of_the_maximum_length() {
        // Figure 13 of the PagedAttention paper: 7.00 requests at once with Orca (Max), of 2,048
        // tokens each in 15,700 slots.
        let mut chunks = Chunks::new(15_700 / 16).unwrap();
        let sequences = (0..).take_while(|&number| chunks.take(owner(number), 2048 / 16, 1)).count();
        assert_eq!(sequences, 7);
    }

    #[test]
    fn random_takes_and_releases_neither_overlap_nor_lose_blocks() {
        let mut random = 1u64;
        let mut below = |n: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % n
        };
        for blocks in [1, 7, 100, 981] {
            let mut chunks = Chunks::new(blocks).unwrap();
            for number in 0..2000 {
                match below(2) {
                    0 => _ = chunks.take(owner(number), 1 + below(blocks as u64) as usize, 1 + below(3) as usize),
                    _ => {
                        let lost = below(number + 1);
                        chunks.retain(|group| group != owner(lost) && lost % 5 != 0);
                    }
                }
                let mut used = vec![false; blocks];
                for chunk in &chunks.taken {
                    assert_eq!(chunk.first % (1 << chunk.order), 0);
                    for block in &mut used[chunk.first..chunk.first + (1 << chunk.order)] {
                        assert!(!std::mem::replace(block, true), "two chunks overlap");
                    }
                }
                assert_eq!(used.iter().filter(|used| !**used).count(), free_blocks(&chunks));
            }
        }
    }
}
