//! The maximum length of a sequence.

use crate::error::Result;

/// The length in tokens at which a sequence ends. Appended tokens raise it, and a rewind behind
/// them reverts that.
#[derive(Debug, Default)]
pub(super) struct LengthLimit {
    max_len: usize,
    /// Extensions by appended tokens, in order.
    extensions: Vec<Extension>,
}

/// A record that tokens appended at `at` raised the limit by `more`.
#[derive(Debug, Clone, Copy)]
struct Extension {
    at: usize,
    more: usize,
}

impl LengthLimit {
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    pub fn set(&mut self, max_len: usize) {
        self.max_len = max_len;
    }

    /// Empties an unused limit and reserves space for the extensions of `parent`.
    pub fn reserve_for_fork(&mut self, parent: &LengthLimit) -> Result<()> {
        self.extensions.clear();
        Ok(self.extensions.try_reserve_exact(parent.extensions.len())?)
    }

    /// Makes this a copy of `parent`, for which space has been reserved.
    pub fn copy_from(&mut self, parent: &LengthLimit) {
        self.max_len = parent.max_len;
        self.extensions.clear();
        self.extensions.extend_from_slice(&parent.extensions);
    }

    /// Reserves space for one more extension.
    pub fn reserve_extension(&mut self) -> Result<()> {
        Ok(self.extensions.try_reserve(1)?)
    }

    /// Raises the limit to `max_len` for `tokens` tokens appended at `at`.
    pub fn extend(&mut self, max_len: usize, at: usize, tokens: usize) {
        let more = max_len.saturating_sub(self.max_len).min(tokens);
        self.max_len = max_len;
        self.extensions.extend((more > 0).then_some(Extension { at, more }));
    }

    /// Reverts the extensions by tokens that were appended from `len` on.
    pub fn revert_extensions(&mut self, len: usize) {
        while let Some(Extension { at, more }) = self.extensions.last_mut() {
            let kept = (*more).min(len.saturating_sub(*at));
            self.max_len -= *more - kept;
            *more = kept;
            if kept > 0 {
                return;
            }
            self.extensions.pop();
        }
    }
}
