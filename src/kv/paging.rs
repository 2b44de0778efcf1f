//! How the K and V of sequences are cut into blocks: by their tokens, and by groups of layers.

use std::sync::Arc;

use super::first;
use super::size::BlockSize;

/// Layers that look back equally far form groups of equally many, and a block holds the K and V that so many tokens have in the
/// layers of one group. So any block can be any group's, and what a window has left behind serves whoever needs it.
#[derive(Debug, Clone)]
pub struct Paging {
    size: BlockSize,
    windows: Arc<[Option<usize>]>, // [groups]
    slides: bool,
}

impl Paging {
    /// `windows`: of each group, how many positions a token looks back on, its own included. None: on all.
    pub fn new(block_size: usize, windows: &[Option<usize>]) -> Paging {
        assert!(!windows.is_empty(), "a model has layers");
        Paging { size: BlockSize::new(block_size), windows: windows.into(), slides: windows.iter().any(Option::is_some) }
    }

    /// All layers look back on all.
    pub fn plain(block_size: usize) -> Paging {
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

    /// Some layers look back on some positions only.
    #[inline]
    pub fn slides(&self) -> bool {
        self.slides
    }

    pub(super) fn windows(&self) -> &[Option<usize>] {
        &self.windows
    }

    /// Blocks of a table of so many tokens, those that are gone included.
    #[inline]
    pub fn entries(&self, tokens: usize) -> usize {
        self.size.blocks_for(tokens) * self.groups()
    }

    /// Blocks that a sequence has at once, at most, until it has so many tokens, of which a step computes at most `rows`.
    pub fn most(&self, tokens: usize, rows: usize) -> usize {
        self.most_of(1, 0, tokens, rows)
    }

    /// As `most`, of `branches` sequences together whose first `shared` tokens are the same.
    pub fn most_of(&self, branches: usize, shared: usize, tokens: usize, rows: usize) -> usize {
        let (shared, all) = (self.size.full(shared), self.size.blocks_for(tokens));
        let together = shared + branches * all.saturating_sub(shared);
        self.windows.iter().map(|window| together.min(branches.saturating_mul(self.span(*window, rows)))).sum()
    }

    /// Blocks that one that has as many tokens as its parent, and shares its blocks, needs until it has `tokens`, beside those that are full.
    pub fn more(&self, shared: usize, tokens: usize) -> usize {
        let more = self.size.blocks_for(tokens).saturating_sub(self.size.full(shared));
        self.windows.iter().map(|window| more.min(self.span(*window, 1))).sum()
    }

    /// Blocks that one of `computed` tokens looks back on.
    pub fn looked_back_on(&self, computed: usize) -> usize {
        let all = self.size.blocks_for(computed);
        self.windows.iter().map(|window| all - self.out_of(*window, computed)).sum()
    }

    /// The longest sequence, of at most `longest` tokens, that never has more than so many blocks.
    pub fn fitting(&self, blocks: usize, longest: usize, rows: usize) -> usize {
        first(1..longest + 1, |tokens| self.most(tokens, rows) > blocks) - 1
    }

    /// Blocks of a group that a step of so many rows may look at or write.
    #[inline]
    pub(super) fn span(&self, window: Option<usize>, rows: usize) -> usize {
        window.map_or(usize::MAX, |window| self.size.blocks_for(window + rows - 1) + 1)
    }

    /// Blocks of the first tokens that layers with this window can do without when `computed` tokens are computed: the last of these may
    /// be computed once more.
    #[inline]
    pub(super) fn out_of(&self, window: Option<usize>, computed: usize) -> usize {
        window.map_or(0, |window| self.size.full(computed.saturating_sub(window)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_bounds_what_a_sequence_has_and_all_else_grows_with_it() {
        let all = Paging::new(16, &[None]);
        assert_eq!((all.most(100, 64), all.entries(100)), (7, 7));
        let mixed = Paging::new(16, &[None, Some(32), Some(32)]);
        // 32 positions before and with the first of the rows, and 15 more rows, may touch four blocks.
        assert_eq!((mixed.most(1600, 16), mixed.entries(1600)), (100 + 4 + 4, 300));
        assert_eq!(mixed.most(20, 16), 6, "no more than there are tokens");
    }

    #[test]
    fn branches_share_what_they_begin_with_unless_it_has_left_the_window() {
        let mixed = Paging::new(16, &[None, Some(16)]);
        assert_eq!(mixed.most_of(3, 40, 80, 1), (2 + 3 * 3) + 3 * 2);
        assert_eq!(mixed.most_of(1, 40, 80, 1), mixed.most(80, 1));
    }

    #[test]
    fn the_longest_that_fits_is_one_whose_next_token_does_not() {
        for windows in [&[None][..], &[None, Some(20)], &[None, None, Some(7), Some(40)]] {
            let paging = Paging::new(8, windows);
            for blocks in 0..60 {
                let fits = paging.fitting(blocks, 300, 5);
                assert!(fits == 0 || paging.most(fits, 5) <= blocks);
                assert!(fits == 300 || paging.most(fits + 1, 5) > blocks, "{windows:?} {blocks}: {fits}");
            }
        }
        assert_eq!(Paging::new(8, &[Some(20)]).fitting(5, 10_000, 5), 10_000, "nothing grows beyond the window");
    }

    #[test]
    fn what_leaves_the_window_of_the_last_token_is_not_needed() {
        let paging = Paging::new(8, &[Some(10)]);
        assert_eq!([0, 10, 17, 18, 26].map(|computed| paging.out_of(Some(10), computed)), [0, 0, 0, 1, 2]);
        assert_eq!(paging.out_of(None, 1000), 0);
    }
}
