//! Keeps the engine within its part of the arena: before each step, after the last one, and when others call.

use std::cmp::Ordering;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use super::core::{Core, Shared};
use super::journal::Journal;
use crate::arena::{Call, Caller, Need};
use crate::error::Error;

impl Core {
    /// The pool becomes as large as the lease lets it. `steps`: for a step that begins now.
    pub(super) fn govern(&mut self, steps: bool) {
        self.shared.called.store(false, SeqCst);
        if let Some(told) = self.journal.as_mut().and_then(Journal::pool) {
            told.into_iter().for_each(|told| self.resize(told.blocks, told.worked));
            return;
        }
        let blocks = self.scheduler.blocks();
        let (pool, used, cached) = (blocks.total(), blocks.used_blocks(), blocks.cached_blocks());
        let need = Need { pool, used, cached, next: self.scheduler.next_need(), steps };
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
        if !self.has_failed() {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.govern(false))) {
                self.fail(panic);
            }
            self.publish();
        }
        if self.has_failed() {
            self.give_up();
        }
    }

    /// It has failed, and computes nothing any more.
    fn give_up(&mut self) {
        self.shared.called.store(false, SeqCst);
        // Nobody knows what the defect has left of the runner: where its memory does not go, the lease stays.
        if let Ok(Ok(())) = catch_unwind(AssertUnwindSafe(|| self.runner.shrink(&[], 0))) {
            self.lease.give_up();
        }
    }
}

/// Between two looks at whether they are gone.
const A_LITTLE: Duration = Duration::from_micros(50);

/// Who looks at an engine's lease between its steps.
#[derive(Default)]
pub struct Governors {
    begun: AtomicU64,
    over: AtomicU64,
    /// Those who wait until they are gone, to step: they see to it themselves.
    steppers: AtomicU64,
}

impl Governors {
    /// How many there were so far, if none is at it now.
    pub fn gone(&self) -> Option<u64> {
        // In this order: whoever begins later is not counted as gone.
        let over = self.over.load(SeqCst);
        (self.begun.load(SeqCst) == over).then_some(over)
    }

    /// Waits a little; meanwhile nobody else begins.
    pub fn wait(&self) {
        self.steppers.fetch_add(1, SeqCst);
        std::thread::sleep(A_LITTLE);
        self.steppers.fetch_sub(1, SeqCst);
    }

    fn with(&self, act: impl FnOnce()) {
        self.begun.fetch_add(1, SeqCst);
        let _over = Over(&self.over);
        act();
    }
}

/// Counts one more when it is dropped, as by a panic.
struct Over<'a>(&'a AtomicU64);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// What the arena calls. An engine that has something to do will be stepped by its host or its driver, and looks at its lease then: it
/// is only told to, and only once, so that no engine's step does another one's work. One that has nothing to do is stepped by
/// nobody. There the caller itself does it: it waits for the room. So does a host that changes the budget, wherever no step is under way.
pub fn on_call(core: &Arc<Mutex<Core>>, shared: &Shared) -> Call {
    let (core, called, governors) = (Arc::downgrade(core), shared.called.clone(), shared.governors.clone());
    let registry = Arc::downgrade(&shared.registry);
    Arc::new(move |caller| {
        let (Some(core), Some(registry)) = (core.upgrade(), registry.upgrade()) else { return };
        let again = caller == Caller::StillHungry;
        if again && registry.unfinished() > 0 {
            return;
        }
        // Before anything else is looked at: whoever steps, or ends its last request, looks at this afterwards.
        called.store(true, SeqCst);
        let will_step = governors.steppers.load(SeqCst) > 0 || (caller != Caller::Host && registry.unfinished() > 0);
        // A driver looks at its lease once more before it sleeps.
        let tell = || {
            if !again {
                registry.wakeup.wake()
            }
        };
        if will_step {
            return tell();
        }
        governors.with(|| match core.try_lock() {
            Ok(mut core) => core.answer_call(),
            Err(TryLockError::Poisoned(core)) => core.into_inner().answer_call(),
            Err(TryLockError::WouldBlock) => tell(),
        });
    })
}

/// After a step: what it was called for meanwhile, unless somebody else steps again. After the last one even uncalled: what it has
/// freed no other step will give back.
pub fn answer_calls(core: &Mutex<Core>, shared: &Shared) {
    if shared.registry.unfinished() == 0 {
        shared.called.store(true, SeqCst);
    }
    while shared.called.load(SeqCst) {
        match core.try_lock() {
            Ok(mut core) => core.answer_call(),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_governor_that_panics_is_gone() {
        let governors = Governors::default();
        let panic = catch_unwind(AssertUnwindSafe(|| governors.with(|| std::panic::resume_unwind(Box::new("a defect")))));
        assert!(panic.is_err());
        assert_eq!(governors.gone(), Some(1));
    }
}
