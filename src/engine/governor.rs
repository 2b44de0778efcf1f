//! Keeps the engine within its part of the arena: before each step, and when others call.

use std::cmp::Ordering;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, TryLockError};

use super::core::Core;
use super::driver::Wakeup;
use super::journal::Journal;
use crate::arena::Need;
use crate::error::Error;

impl Core {
    /// The pool becomes as large as the lease lets it.
    pub(super) fn govern(&mut self) {
        if let Some(told) = self.journal.as_mut().and_then(Journal::pool) {
            told.into_iter().for_each(|told| self.resize(told.blocks, told.worked));
            return;
        }
        let blocks = self.scheduler.blocks();
        let need = Need { used: blocks.used_blocks(), cached: blocks.cached_blocks(), next: self.scheduler.next_need() };
        let total = self.lease.settle(need).min(blocks.capacity());
        self.resize(total, true);
    }

    /// `works`: not so where a journal says that the device failed to.
    pub(super) fn resize(&mut self, total: usize, works: bool) {
        match total.cmp(&self.scheduler.blocks().total()) {
            Ordering::Less => self.shrink(total, works),
            Ordering::Equal => return,
            Ordering::Greater => self.scheduler.grow(total),
        }
        let worked = self.scheduler.blocks().total() == total;
        self.journal.iter_mut().for_each(|journal| journal.resized(total, worked));
    }

    /// What there is no room for gives way. Where that fails, the pool stays as it is, and the next step tries again.
    fn shrink(&mut self, total: usize, works: bool) {
        let mut moves = std::mem::take(&mut self.moves);
        let smaller = self.scheduler.make_smaller(total, &mut moves);
        // Who gave way may be on the way to the host tier.
        self.move_blocks();
        let moved = smaller.and_then(|()| match works {
            true => self.runner.shrink(&moves, total),
            false => Err(Error::out_of_memory()),
        });
        if moved.is_ok() {
            self.scheduler.shrink(total, &moves);
            self.lease.give_back(total);
        }
        self.moves = moves;
    }

    /// Nobody steps, and others need room.
    pub(super) fn answer_call(&mut self) {
        if self.has_failed() {
            return;
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.govern())) {
            self.fail(panic);
        }
        self.publish();
    }
}

/// What the arena calls: at once where nobody steps, otherwise whoever does will see to it before the next step.
pub fn on_call(core: &Arc<Mutex<Core>>, wakeup: &Arc<Wakeup>) -> Arc<dyn Fn() + Send + Sync> {
    let (core, wakeup) = (Arc::downgrade(core), wakeup.clone());
    Arc::new(move || {
        let Some(core) = core.upgrade() else { return };
        match core.try_lock() {
            Ok(mut core) => core.answer_call(),
            Err(TryLockError::Poisoned(core)) => core.into_inner().answer_call(),
            Err(TryLockError::WouldBlock) => wakeup.wake(),
        }
    })
}
