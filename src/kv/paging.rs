//! The division of KV into blocks: by tokens and by layer groups.

use std::sync::Arc;

use super::first;
use super::size::BlockSize;

/// The block size and the layer groups.
///
/// Layers with the same window form groups of equal size. A block holds K and V of `block_size`
/// tokens in the layers of one group. All blocks have the same size, so a block that leaves the
/// window of one group can be allocated to any other group.
#[derive(Debug, Clone)]
pub struct Paging {
    size: BlockSize,
    windows: Arc<[Option<usize>]>, // [groups] window of each group
    slides: bool,
}

impl Paging {
    /// Creates a paging. `windows` holds, for each group, the number of positions that a token
    /// attends to, including its own. `None` means all positions.
    pub fn new(block_size: usize, windows: &[Option<usize>]) -> Paging {
        assert!(!windows.is_empty(), "a model has layers");
        Paging { size: BlockSize::new(block_size), windows: windows.into(), slides: windows.iter().any(Option::is_some) }
    }

    /// Creates a paging in which all layers attend to all positions.
    pub fn without_windows(block_size: usize) -> Paging {
        Paging::new(block_size, &[None])
    }

    pub(super) fn size(&self) -> BlockSize {
        self.size
    }

    pub fn block_size(&self) -> usize {
        self.size.tokens()
    }

    #[inline]
    pub fn groups(&self) -> usize {
        self.windows.len()
    }

    /// Returns whether a group has a window.
    #[inline]
    pub fn has_windows(&self) -> bool {
        self.slides
    }

    pub(super) fn windows(&self) -> &[Option<usize>] {
        &self.windows
    }

    /// Returns the number of entries in a table of `tokens` tokens, including null entries.
    #[inline]
    pub fn entries(&self, tokens: usize) -> usize {
        self.size.blocks_for(tokens) * self.groups()
    }

    /// Returns the maximum number of blocks that a sequence holds at once until it has `tokens`
    /// tokens, if a step computes at most `rows` of them.
    pub fn max_blocks(&self, tokens: usize, rows: usize) -> usize {
        self.max_blocks_of(1, 0, tokens, rows)
    }

    /// Returns the same maximum for `branches` sequences that share their first `shared` tokens.
    pub fn max_blocks_of(&self, branches: usize, shared: usize, tokens: usize, rows: usize) -> usize {
        let (shared, all) = (self.size.full(shared), self.size.blocks_for(tokens));
        let together = shared + branches * all.saturating_sub(shared);
        self.windows.iter().map(|window| together.min(branches.saturating_mul(self.span(*window, rows)))).sum()
    }

    /// Returns the blocks beyond the shared full ones that a fork of `shared` tokens needs until it
    /// has `tokens` tokens.
    pub fn blocks_beyond_shared(&self, shared: usize, tokens: usize) -> usize {
        let more = self.size.blocks_for(tokens).saturating_sub(self.size.full(shared));
        self.windows.iter().map(|window| more.min(self.span(*window, 1))).sum()
    }

    /// Returns the number of blocks that are visible to a sequence with `computed` tokens.
    pub fn visible_blocks(&self, computed: usize) -> usize {
        let all = self.size.blocks_for(computed);
        self.windows.iter().map(|window| all - self.blocks_out_of(*window, computed)).sum()
    }

    /// Returns the length of the longest sequence, at most `max_len`, that never holds more than
    /// `blocks` blocks.
    pub fn max_len_in(&self, blocks: usize, max_len: usize, rows: usize) -> usize {
        first(1..max_len + 1, |tokens| self.max_blocks(tokens, rows) > blocks) - 1
    }

    /// Returns the maximum number of blocks of a group that a step of `rows` tokens reads or
    /// writes.
    #[inline]
    pub(super) fn span(&self, window: Option<usize>, rows: usize) -> usize {
        window.map_or(usize::MAX, |window| self.size.blocks_for(window + rows - 1) + 1)
    }

    /// Returns the first place whose block is visible to the group after `places` computed places.
    pub fn first_visible(&self, group: usize, places: usize) -> usize {
        self.blocks_out_of(self.windows[group], places * self.block_size())
    }

    /// Returns the end of the longest prefix of `places` places after which a sequence can
    /// continue, if the blocks for which `has(place, group)` holds are there. The places before
    /// `from` are there. All groups must have the other blocks that are visible at this end.
    pub fn usable_prefix(&self, from: usize, places: usize, has: impl Fn(usize, usize) -> bool) -> usize {
        let mut end = places;
        for group in (0..self.groups()).filter(|&group| self.windows[group].is_none()) {
            end = (from..end).find(|&place| !has(place, group)).unwrap_or(end);
        }
        // A block that is missing in a window is missing for every end at which it is visible.
        let lacking = |end: usize| {
            let lacks = |group| (self.first_visible(group, end).max(from)..end).rev().find(|&place| !has(place, group));
            (0..self.groups()).filter(|&group| self.windows[group].is_some()).find_map(lacks)
        };
        while let Some(place) = lacking(end) {
            end = place;
        }
        end.max(from)
    }

    /// Returns the number of leading blocks that are out of the window after `computed` tokens. The
    /// last of these tokens may be recomputed, so its window is kept.
    #[inline]
    pub(super) fn blocks_out_of(&self, window: Option<usize>, computed: usize) -> usize {
        window.map_or(0, |window| self.size.full(computed.saturating_sub(window)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_windowed_groups_have_a_bounded_number_of_blocks() {
        let all = Paging::new(16, &[None]);
        assert_eq!((all.max_blocks(100, 64), all.entries(100)), (7, 7));
        let mixed = Paging::new(16, &[None, Some(32), Some(32)]);
        // The window of the first of 16 rows covers 32 positions. With 15 more rows it can touch
        // four blocks.
        assert_eq!((mixed.max_blocks(1600, 16), mixed.entries(1600)), (100 + 4 + 4, 300));
        assert_eq!(mixed.max_blocks(20, 16), 6, "at most the blocks of the tokens");
    }

    #[test]
    fn branches_share_prompt_blocks_except_in_windowed_groups() {
        let mixed = Paging::new(16, &[None, Some(16)]);
        assert_eq!(mixed.max_blocks_of(3, 40, 80, 1), (2 + 3 * 3) + 3 * 2);
        assert_eq!(mixed.max_blocks_of(1, 40, 80, 1), mixed.max_blocks(80, 1));
    }

    #[test]
    fn one_more_token_than_max_len_in_does_not_fit() {
        for windows in [&[None][..], &[None, Some(20)], &[None, None, Some(7), Some(40)]] {
            let paging = Paging::new(8, windows);
            for blocks in 0..60 {
                let fits = paging.max_len_in(blocks, 300, 5);
                assert!(fits == 0 || paging.max_blocks(fits, 5) <= blocks);
                assert!(fits == 300 || paging.max_blocks(fits + 1, 5) > blocks, "{windows:?} {blocks}: {fits}");
            }
        }
        assert_eq!(Paging::new(8, &[Some(20)]).max_len_in(5, 10_000, 5), 10_000, "the number of blocks is bounded by the window");
    }

    #[test]
    fn blocks_out_of_the_window_of_the_last_token_are_not_needed() {
        let paging = Paging::new(8, &[Some(10)]);
        assert_eq!([0, 10, 17, 18, 26].map(|computed| paging.blocks_out_of(Some(10), computed)), [0, 0, 0, 1, 2]);
        assert_eq!(paging.blocks_out_of(None, 1000), 0);
    }
}
