//! Changes of a constraint that take too long for a step: the thread that computes masks applies
//! them before the next mask.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use super::Constraint;
use crate::error::{Result, try_copy};

/// A change that the parser has not seen.
pub(super) enum Change {
    /// A token of the output.
    Token(u32),
    /// Tokens of the host.
    Appended(Vec<u32>),
    /// Removes this many of the last tokens.
    Removed(usize),
}

/// Returns a copy of the changes. Fails if the system has no memory.
pub(super) fn try_copy_changes(changes: &VecDeque<Change>) -> Result<VecDeque<Change>> {
    let mut copies = VecDeque::new();
    copies.try_reserve(changes.len())?;
    for change in changes {
        copies.push_back(match change {
            Change::Token(token) => Change::Token(*token),
            Change::Appended(tokens) => Change::Appended(try_copy(tokens)?),
            Change::Removed(tokens) => Change::Removed(*tokens),
        });
    }
    Ok(copies)
}

/// Whether the masks of a grammar take long. All constraints of the grammar share it, since they
/// share the lexer and its lock.
#[derive(Default)]
pub struct GrammarPace {
    /// Number of quick masks since the first mask or the last slow one, at most `SLOW_FOR`.
    quick_masks: AtomicU32,
    /// Whether a mask has been slow.
    was_slow: AtomicBool,
    /// Number of masks for which no step waits. Their thread may hold the lock.
    late: AtomicU32,
    /// Number of masks that the thread for slow masks computes.
    slow_masks: AtomicU32,
}

/// A mask that the thread for slow masks computes. The drop removes it from the count of its
/// grammar.
pub(super) struct SlowMask(Arc<GrammarPace>);

impl SlowMask {
    pub fn new(pace: Arc<GrammarPace>) -> SlowMask {
        pace.slow_masks.fetch_add(1, Relaxed);
        SlowMask(pace)
    }
}

impl Drop for SlowMask {
    fn drop(&mut self) {
        self.0.slow_masks.fetch_sub(1, Relaxed);
    }
}

impl GrammarPace {
    /// CPU time from which a mask takes long. A token takes no longer than the mask before it, so
    /// that the tokens of quick grammars can be consumed in a step.
    const SLOW_FROM: Duration = Duration::from_millis(1);
    /// Number of quick masks until a slow grammar counts as quick.
    const SLOW_FOR: u32 = 32;
    /// Number of quick masks until a new grammar is proven.
    const NEW_FOR: u32 = 4;

    /// Returns whether the last masks took long, or the thread for slow masks may hold the lock.
    fn is_slow(&self) -> bool {
        (self.was_slow.load(Relaxed) && self.quick_masks.load(Relaxed) < Self::SLOW_FOR) || self.slow_masks.load(Relaxed) > 0
    }

    /// Returns whether there were several masks, and the last ones were quick.
    fn is_proven(&self) -> bool {
        !self.is_slow() && self.quick_masks.load(Relaxed) >= Self::NEW_FOR
    }

    /// Records that no step waits for a mask.
    pub fn begin_late(&self) {
        self.late.fetch_add(1, Relaxed);
    }

    /// Records that such a mask has come, or is not needed.
    pub fn end_late(&self) {
        self.late.fetch_sub(1, Relaxed);
    }

    /// Records the CPU time of a mask.
    fn record(&self, time: Duration) {
        match time >= Self::SLOW_FROM {
            true => {
                self.was_slow.store(true, Relaxed);
                self.quick_masks.store(0, Relaxed);
            }
            // The grammar is proven already if this fails.
            false => drop(self.quick_masks.fetch_update(Relaxed, Relaxed, |masks| Some(masks + 1).filter(|_| masks < Self::SLOW_FOR))),
        }
    }
}

impl Constraint {
    /// Returns whether the mask is known, or the error that there is instead.
    pub fn has_mask(&self) -> bool {
        self.failure.is_some() || (self.pending.is_empty() && (self.fresh || self.strayed.is_some()))
    }

    /// Returns whether the next mask must not be computed beside quick ones. One token of a proven
    /// grammar may precede it.
    pub fn is_slow(&self) -> bool {
        let is_quick = |change: &Change| match change {
            Change::Removed(_) => true,
            Change::Token(_) => self.pending.len() == 1 && self.compiled.pace.is_proven(),
            Change::Appended(_) => false,
        };
        self.compiled.pace.is_slow() || self.needs_replay || !self.pending.iter().all(is_quick)
    }

    /// Returns whether the last masks of the grammar were quick.
    pub fn is_proven(&self) -> bool {
        self.compiled.pace.is_proven()
    }

    /// Returns whether a token must not be consumed in a step. Another thread may hold the lock.
    pub fn is_slow_or_late(&self) -> bool {
        self.is_slow() || self.compiled.pace.late.load(Relaxed) > 0
    }

    /// Returns the pace of the grammar.
    pub fn pace(&self) -> Arc<GrammarPace> {
        self.compiled.pace.clone()
    }

    /// Records the CPU time of the last mask.
    pub fn record_time(&self, time: Duration) {
        self.compiled.pace.record(time);
    }

    /// Appends a token of the output if this needs no replay. Otherwise returns false: the token is
    /// pending until `catch_up`.
    pub fn try_advance(&mut self, token: u32) -> Result<bool> {
        self.check()?;
        if self.pending.is_empty() && !self.ended && !self.needs_replay && self.strayed.is_none() {
            self.tokens.try_reserve(1)?;
            if self.consume(token).is_ok() {
                self.tokens.push(token);
                self.fresh = false;
                return Ok(true);
            }
            // The parser has consumed a part of the token.
            (self.needs_replay, self.fresh) = (true, false);
        }
        self.advance_later(token).map(|()| false)
    }

    /// Appends a token of the output before the next mask.
    pub fn advance_later(&mut self, token: u32) -> Result<()> {
        self.add(Change::Token(token))
    }

    /// Appends tokens of the host before the next mask.
    pub fn append_later(&mut self, tokens: &[u32]) -> Result<()> {
        self.add(Change::Appended(try_copy(tokens)?))
    }

    /// Removes the last tokens before the next mask.
    pub fn rewind_later(&mut self, tokens: usize) -> Result<()> {
        if tokens == 0 { Ok(()) } else { self.add(Change::Removed(tokens)) }
    }

    fn add(&mut self, change: Change) -> Result<()> {
        self.pending.try_reserve(1)?;
        self.pending.push_back(change);
        Ok(())
    }

    /// Applies the pending changes. Returns whether only an end-of-sequence token can follow.
    pub fn catch_up(&mut self) -> Result<bool> {
        self.check()?;
        self.repair()?;
        while let Some(change) = self.pending.pop_front() {
            let applied = match change {
                Change::Token(token) => self.take(token),
                Change::Appended(tokens) => self.append_now(&tokens),
                Change::Removed(tokens) => self.remove(tokens),
            };
            if let Err(error) = applied {
                // Tokens after the end can be removed again.
                self.failure = self.failure.take().or_else(|| self.strayed.is_none().then(|| error.clone()));
                return Err(error);
            }
        }
        Ok(self.is_complete())
    }

    /// Replaces a parser that has consumed a part of a token.
    fn repair(&mut self) -> Result<()> {
        if std::mem::take(&mut self.needs_replay) {
            let ended = self.ended;
            self.replay(self.tokens.len()).inspect_err(|error| self.failure = Some(error.clone()))?;
            self.ended = ended;
        }
        Ok(())
    }

    /// Applies the pending changes that need no replay. Returns whether all are applied.
    pub fn try_catch_up(&mut self) -> bool {
        while let Some(Change::Removed(tokens)) = self.pending.front().filter(|_| !self.needs_replay && self.failure.is_none()) {
            let tokens = *tokens;
            if !self.rolls_back(tokens) {
                return false;
            }
            self.pending.pop_front();
        }
        if let Some(&Change::Token(token)) = self.pending.front().filter(|_| self.pending.len() == 1 && self.failure.is_none()) {
            self.pending.clear();
            return self.try_advance(token).unwrap_or_else(|_| {
                self.pending.push_back(Change::Token(token));
                false
            });
        }
        self.pending.is_empty() && !self.needs_replay
    }

    /// Computes the mask if this needs no replay, and returns whether it is known. Otherwise `mask`
    /// computes it.
    pub fn try_mask(&mut self) -> bool {
        let has_caught_up = self.try_catch_up();
        if self.has_mask() {
            return true;
        }
        if !has_caught_up {
            return false;
        }
        match self.compute() {
            Ok(()) => self.fresh = true,
            // Another request may have caused the error.
            Err(_) if !self.owns_lexer => return false,
            Err(error) => self.failure = Some(error),
        }
        true
    }
}
