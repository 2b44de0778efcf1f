//! A budget of KV bytes for one or several engines. The host may resize it at run time.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// A budget of KV bytes that is divided among engines.
///
/// Each engine holds a lease. It takes bytes as it needs them and returns bytes that it does not
/// need. An engine always keeps its minimum, with which its longest sequence can run.
pub struct MemoryBudget {
    state: Mutex<BudgetState>,
}

/// The state of a budget, under its lock.
struct BudgetState {
    bytes: u64,
    max_bytes: u64,
    last_id: u64,
    /// The engines that share the budget, sorted by id.
    users: Vec<BudgetUser>,
}

/// A callback that makes an engine check its lease soon.
///
/// The caller is a thread of the host, or the thread of another engine in the middle of a step.
pub type Call = Arc<dyn Fn(Caller) + Send + Sync>;

/// The caller of an engine's callback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// A thread of the host.
    Host,
    /// An engine that needs bytes.
    Engine,
    /// An engine that has called before and starts another step with less memory than it needs.
    StillWaiting,
}

/// An engine that shares the budget.
struct BudgetUser {
    id: u64,
    /// Bytes that the longest sequence of the engine needs.
    min: u64,
    /// Bytes per block. The engine holds whole blocks.
    block: u64,
    /// Reservations of pending requests, in bytes. The largest one raises the minimum of the
    /// engine.
    reservations: Vec<u64>,
    held: u64,
    /// Target of a shrink in progress, in bytes. `u64::MAX` if the engine need not shrink.
    target_bytes: u64,
    /// Whether the engine needs more bytes than it could get.
    wants_more: bool,
    call: Option<Call>,
}

/// The state of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BudgetInfo {
    /// Size of the budget in bytes.
    pub bytes: u64,
    /// The largest size in bytes to which the budget can be resized.
    pub max_bytes: u64,
    /// The smallest size in bytes to which the budget can be resized with the current engines and
    /// requests.
    pub min_bytes: u64,
    /// Bytes that the engines hold. It exceeds `bytes` while engines are still shrinking.
    pub held_bytes: u64,
    /// Number of engines that share the budget.
    pub engines: usize,
}

impl BudgetUser {
    fn min_bytes(&self) -> u64 {
        self.reservations.iter().copied().fold(self.min, u64::max)
    }

    /// Returns the bytes that the engine holds when its shrink is complete.
    fn final_bytes(&self) -> u64 {
        self.held.min(self.target_bytes.max(self.min_bytes()))
    }
}

impl BudgetState {
    fn user(&mut self, id: u64) -> &mut BudgetUser {
        self.users.iter_mut().find(|user| user.id == id).expect("a lease has its user")
    }

    fn others(&self, id: u64) -> impl Iterator<Item = &BudgetUser> {
        self.users.iter().filter(move |user| user.id != id)
    }

    /// Returns the bytes of `blocks` blocks if they exceed the minimum of the engine, so that they
    /// need a reservation. Fails if the other engines hold too much.
    fn reservable(&mut self, id: u64, blocks: usize) -> Result<Option<u64>> {
        let theirs: u64 = self.others(id).map(|user| user.held).sum();
        let (all, engines) = (self.bytes, self.users.len());
        let user = self.user(id);
        let bytes = blocks as u64 * user.block;
        if bytes > user.min && bytes > user.final_bytes() && bytes > all.saturating_sub(theirs) {
            return Err(Error::full(format!(
                "budget too small: the request may need {bytes} bytes of K and V at once (budget {all}, the other {} engines hold {theirs}); retry later, lower max_tokens or n, or raise the budget",
                engines - 1
            )));
        }
        Ok((bytes > user.min).then_some(bytes))
    }

    fn total_min_bytes(&self) -> u64 {
        self.users.iter().map(BudgetUser::min_bytes).sum()
    }

    /// Sets the shrink targets. If the engines hold more than the budget, each loses the same share
    /// of what it holds above its minimum.
    fn set_shrink_targets(&mut self) {
        self.users.iter_mut().for_each(|user| user.target_bytes = u64::MAX);
        let (held, total_min_bytes) = (self.users.iter().map(|user| user.held).sum::<u64>(), self.total_min_bytes());
        if held <= self.bytes {
            return;
        }
        let (left, above) =
            (u128::from(self.bytes.saturating_sub(total_min_bytes)), u128::from(held.saturating_sub(total_min_bytes).max(1)));
        for user in &mut self.users {
            let min_bytes = user.min_bytes();
            let target_bytes = min_bytes + (u128::from(user.held.saturating_sub(min_bytes)) * left / above) as u64;
            user.target_bytes = if target_bytes < user.held { target_bytes } else { u64::MAX };
        }
    }
}

impl MemoryBudget {
    /// Creates a budget of `bytes` that can later grow to `max_bytes`.
    pub fn new(bytes: u64, max_bytes: u64) -> Result<Arc<MemoryBudget>> {
        if bytes == 0 || bytes > max_bytes {
            return Err(Error::invalid(format!("bytes is {bytes}; must be 1 to {}", max_bytes.max(1))));
        }
        Ok(Arc::new(MemoryBudget { state: Mutex::new(BudgetState { bytes, max_bytes, last_id: 0, users: Vec::new() }) }))
    }

    fn lock(&self) -> MutexGuard<'_, BudgetState> {
        // Each critical section leaves the state consistent, so a poisoned lock is safe to use.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the engines that `which` selects, without holding the lock, since a callback may call
    /// this budget again. The function does not allocate.
    fn call(&self, caller: Caller, which: impl Fn(&BudgetUser) -> bool) {
        let mut last = 0;
        let next = |last: u64| {
            let state = self.lock();
            let user = state.users.iter().find(|user| user.id > last && which(user))?;
            Some((user.id, user.call.clone()))
        };
        while let Some((id, call)) = next(last) {
            last = id;
            call.iter().for_each(|call| call(caller));
        }
    }

    /// Returns the current state of the budget.
    pub fn info(&self) -> BudgetInfo {
        let state = self.lock();
        BudgetInfo {
            bytes: state.bytes,
            max_bytes: state.max_bytes,
            min_bytes: state.total_min_bytes(),
            held_bytes: state.users.iter().map(|user| user.held).sum(),
            engines: state.users.len(),
        }
    }

    /// Returns the bytes that a new engine could get now, and the largest size of the budget.
    pub fn available(&self) -> (u64, u64) {
        let state = self.lock();
        (state.bytes.saturating_sub(state.total_min_bytes()), state.max_bytes)
    }

    /// Sets the size of the budget.
    ///
    /// Engines that hold too much shrink: at once if no step is running, otherwise before their
    /// next step. They evict cached blocks first, then take the blocks of idle sequences, then
    /// preempt running ones. No request ends.
    pub fn resize(&self, bytes: u64) -> Result<()> {
        let mut state = self.lock();
        if bytes > state.max_bytes {
            return Err(Error::capacity(format!("bytes is {bytes}; the budget was created with max_bytes {}", state.max_bytes)));
        }
        let min_bytes = state.total_min_bytes();
        if bytes < min_bytes.max(1) {
            return Err(Error::capacity(format!(
                "budget too small ({bytes} bytes): {} engines need {min_bytes} bytes for their longest sequences; resize it to at least {min_bytes}",
                state.users.len()
            )));
        }
        state.bytes = bytes;
        state.set_shrink_targets();
        drop(state);
        self.call(Caller::Host, |_| true);
        Ok(())
    }

    /// Adds an engine with blocks of `block` bytes that needs at least `min_blocks` blocks.
    pub fn join(self: &Arc<MemoryBudget>, block: u64, min_blocks: u64) -> Result<Lease> {
        let (block, min_bytes) = (block.max(1), min_blocks * block.max(1));
        let mut state = self.lock();
        let total_min_bytes = state.total_min_bytes();
        if min_bytes > state.bytes.saturating_sub(total_min_bytes) {
            return Err(Error::capacity(format!(
                "budget too small: one sequence of max_model_len needs {min_bytes} bytes, other engines hold {total_min_bytes} of {}; raise the budget or lower max_model_len",
                state.bytes
            )));
        }
        state.users.try_reserve(1)?;
        state.last_id += 1;
        let id = state.last_id;
        state.users.push(BudgetUser {
            id,
            block,
            min: min_bytes,
            reservations: Vec::new(),
            held: min_bytes,
            target_bytes: u64::MAX,
            wants_more: false,
            call: None,
        });
        state.set_shrink_targets();
        drop(state);
        self.call(Caller::Host, |_| true);
        Ok(Lease { budget: self.clone(), id })
    }
}

impl fmt::Debug for MemoryBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info().fmt(f)
    }
}

/// The part of a budget that one engine holds.
pub struct Lease {
    budget: Arc<MemoryBudget>,
    id: u64,
}

/// The block usage of an engine, from which its lease is computed.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// Blocks in the pool of the engine.
    pub pool: usize,
    /// Blocks that sequences use.
    pub used: usize,
    /// Blocks that only the prefix cache holds.
    pub cached: usize,
    /// Blocks that the next step may allocate.
    pub next: usize,
    /// Whether a step starts now.
    pub steps: bool,
}

impl Lease {
    /// Returns the budget of this lease.
    pub fn budget(&self) -> &Arc<MemoryBudget> {
        &self.budget
    }

    /// Sets the callback for requests of other engines and for changes of the budget.
    pub fn on_call(&self, call: Call) {
        self.budget.lock().user(self.id).call = Some(call);
    }

    /// Computes how many blocks the engine should hold from now on.
    ///
    /// A larger pool is granted at once. For a smaller pool, the engine calls `give_back` after it
    /// has freed the blocks.
    pub fn request(&self, need: Need) -> usize {
        let mut state = self.budget.lock();
        let (bytes, alone) = (state.bytes, state.users.len() == 1);
        let they_are_hungry = state.others(self.id).any(|user| user.wants_more);
        let theirs: u64 = state.others(self.id).map(BudgetUser::final_bytes).sum();
        let theirs_still: u64 = state.others(self.id).map(|user| user.held).sum();
        let user = state.user(self.id);
        let (held, min_bytes, block) = (user.held, user.min_bytes(), user.block);
        let in_bytes = |blocks: usize| blocks as u64 * block;
        let (urgent, kept) = (in_bytes(need.used + need.next), in_bytes(need.cached));
        let wanted = match (alone, they_are_hungry) {
            (true, _) => bytes,
            (false, true) => urgent,
            (false, false) => held.max(urgent + kept),
        };
        let lasting = wanted.min(bytes.saturating_sub(theirs)).min(user.target_bytes).max(min_bytes);
        // Blocks that other engines have not returned yet are not available.
        let target = lasting.min(held.max(bytes.saturating_sub(theirs_still)));
        let target = target - target % block;
        // This also returns bytes of reservations that have been released.
        user.held = in_bytes(need.pool).max(target);
        if target < in_bytes(need.pool) {
            user.target_bytes = target;
        }
        let wanted_more = std::mem::replace(&mut user.wants_more, !alone && urgent > target);
        let (wants_more, gave) = (user.wants_more, user.held < held);
        drop(state);
        self.call_others(wants_more && !wanted_more, wants_more && need.steps, gave);
        (target / block) as usize
    }

    /// Repeats a call only for an engine that steps, once per step. Otherwise two engines that both
    /// lack memory would call each other forever.
    fn call_others(&self, wants_more_now: bool, still_wants_more: bool, gave: bool) {
        if wants_more_now || gave {
            self.budget.call(Caller::Engine, |other| other.id != self.id && (wants_more_now || other.wants_more));
        }
        if still_wants_more && !wants_more_now {
            self.budget.call(Caller::StillWaiting, |other| other.id != self.id);
        }
    }

    /// Records that the engine holds at most `blocks` blocks.
    pub fn release(&self, blocks: usize) {
        let mut state = self.budget.lock();
        let user = state.user(self.id);
        // A reservation may have raised the minimum in the meantime.
        user.held = user.held.min(blocks as u64 * user.block).max(user.min_bytes());
        if user.held == user.final_bytes() {
            user.target_bytes = u64::MAX;
        }
        drop(state);
        self.budget.call(Caller::Engine, |other| other.wants_more && other.id != self.id);
    }

    /// Returns all bytes of an engine that has failed.
    pub fn release_all(&self) {
        let mut state = self.budget.lock();
        let user = state.user(self.id);
        user.reservations.clear();
        (user.min, user.held, user.target_bytes, user.wants_more) = (0, 0, u64::MAX, false);
        drop(state);
        self.budget.call(Caller::Engine, |other| other.wants_more && other.id != self.id);
    }

    /// Returns whether `blocks` blocks could be reserved now, without eviction in other engines.
    pub fn could_reserve(&self, blocks: usize) -> bool {
        self.budget.lock().reservable(self.id, blocks).is_ok()
    }

    /// Reserves `blocks` blocks for the lifetime of the result. Returns `None` if the minimum of
    /// the engine covers them.
    ///
    /// If other engines hold too much, they are called: an engine without work evicts its cached
    /// blocks at once, the others before their next step.
    pub fn reserve(self: &Arc<Lease>, blocks: usize) -> Result<Option<Reservation>> {
        self.try_reserve(blocks).or_else(|_| {
            // The flag stays set until the next `settle`.
            self.budget.lock().user(self.id).wants_more = true;
            self.budget.call(Caller::Engine, |other| other.id != self.id);
            self.try_reserve(blocks)
        })
    }

    fn try_reserve(self: &Arc<Lease>, blocks: usize) -> Result<Option<Reservation>> {
        let mut state = self.budget.lock();
        let Some(bytes) = state.reservable(self.id, blocks)? else { return Ok(None) };
        let user = state.user(self.id);
        user.reservations.try_reserve(1)?;
        user.reservations.push(bytes);
        user.held = user.held.max(bytes);
        Ok(Some(Reservation { lease: self.clone(), bytes }))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.users.retain(|user| user.id != self.id);
        drop(state);
        self.budget.call(Caller::Host, |other| other.wants_more);
    }
}

/// A reservation for a request that needs more than the minimum of its engine.
pub struct Reservation {
    lease: Arc<Lease>,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.lease.budget.lock();
        let promises = &mut state.user(self.lease.id).reservations;
        if let Some(place) = promises.iter().position(|&other| other == self.bytes) {
            promises.swap_remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// The part of an engine that a budget can observe.
    struct Engine {
        lease: Arc<Lease>,
        pool: Cell<usize>,
    }

    impl Engine {
        fn join(budget: &Arc<MemoryBudget>, block: u64, min_bytes: u64) -> Engine {
            Engine { lease: Arc::new(budget.join(block, min_bytes).unwrap()), pool: Cell::new(min_bytes as usize) }
        }

        /// Returns the target size of the pool. A larger pool is granted immediately.
        fn request(&self, used: usize, cached: usize, next: usize) -> usize {
            let target = self.lease.request(Need { pool: self.pool.get(), used, cached, next, steps: true });
            self.pool.set(self.pool.get().max(target));
            target
        }

        /// Shrinks the pool to `blocks` and returns the rest.
        fn shrink(&self, blocks: usize) {
            self.pool.set(blocks);
            self.lease.release(blocks);
        }
    }

    #[test]
    fn a_single_engine_gets_the_whole_budget() {
        let budget = MemoryBudget::new(1000, 2000).unwrap();
        let engine = Engine::join(&budget, 1, 100);
        assert_eq!(engine.request(0, 0, 10), 1000);
        budget.resize(1500).unwrap();
        assert_eq!(engine.request(0, 0, 10), 1500);
        budget.resize(300).unwrap();
        assert_eq!((engine.request(900, 0, 10), budget.info().held_bytes), (300, 1500));
        engine.shrink(300);
        assert_eq!(budget.info(), BudgetInfo { bytes: 300, max_bytes: 2000, min_bytes: 100, held_bytes: 300, engines: 1 });
    }

    #[test]
    fn an_invalid_budget_is_refused_with_the_valid_range() {
        for (bytes, max_bytes) in [(0, 0), (0, 9), (10, 9)] {
            assert!(MemoryBudget::new(bytes, max_bytes).unwrap_err().message().contains("must be 1 to"));
        }
        let budget = MemoryBudget::new(1000, 2000).unwrap();
        let (_first, _second) = (Engine::join(&budget, 1, 300), Engine::join(&budget, 1, 400));
        assert!(budget.resize(699).unwrap_err().message().contains("need 700 bytes for their longest sequences"));
        assert!(budget.resize(2001).unwrap_err().message().contains("max_bytes 2000"));
        assert!(budget.join(1, 301).err().unwrap().message().contains("other engines hold 700"));
        budget.resize(700).unwrap();
    }

    #[test]
    fn unused_memory_of_one_engine_goes_to_another() {
        let budget = MemoryBudget::new(1000, 1000).unwrap();
        let first = Engine::join(&budget, 1, 100);
        assert_eq!(first.request(0, 0, 10), 1000);
        first.shrink(1000);
        let second = Engine::join(&budget, 1, 100);
        // The first engine has filled its part with cached blocks and has not evicted them yet.
        assert_eq!(second.request(90, 0, 50), 100);
        assert_eq!(first.request(200, 600, 50), 250);
        first.shrink(250);
        assert_eq!(second.request(90, 0, 50), 140);
        assert_eq!(second.request(600, 0, 50), 650);
        // If no engine lacks memory, an engine may keep its cached blocks.
        assert_eq!(first.request(200, 100, 50), 350);
        assert_eq!(first.request(200, 300, 50), 350);
        assert_eq!(budget.info().held_bytes, 1000);
        drop(second);
        assert_eq!(first.request(200, 300, 50), 1000);
    }

    #[test]
    fn all_engines_share_a_reduction_and_keep_their_minimum() {
        let budget = MemoryBudget::new(1000, 1000).unwrap();
        let (first, second) = (Engine::join(&budget, 1, 100), Engine::join(&budget, 1, 100));
        let reservation = second.lease.reserve(200).unwrap();
        assert_eq!((first.request(500, 0, 0), second.request(500, 0, 0)), (500, 500));
        budget.resize(600).unwrap();
        assert_eq!((first.request(500, 0, 0), second.request(500, 0, 0)), (271, 328));
        first.shrink(271);
        // The second engine has not shrunk yet.
        assert_eq!((first.request(271, 0, 99), budget.info().held_bytes), (271, 771));
        second.shrink(328);
        assert!(budget.resize(299).is_err());
        drop(reservation);
        budget.resize(200).unwrap();
        assert_eq!((first.request(271, 0, 0), second.request(328, 0, 0)), (100, 100));
    }

    #[test]
    fn blocks_are_held_whole() {
        let budget = MemoryBudget::new(1000, 1000).unwrap();
        let engine = Engine::join(&budget, 300, 1);
        assert_eq!((engine.request(0, 0, 1), budget.info().held_bytes), (3, 900));
    }

    #[test]
    fn a_reservation_is_granted_only_if_the_bytes_are_available() {
        let budget = MemoryBudget::new(1000, 1000).unwrap();
        let (first, second) = (Engine::join(&budget, 1, 100), Engine::join(&budget, 1, 100));
        assert!(first.lease.reserve(100).unwrap().is_none());
        second.request(500, 0, 0);
        assert!(first.lease.reserve(501).err().unwrap().message().contains("hold 500"));
        let reservation = first.lease.reserve(500).unwrap().unwrap();
        assert_eq!(second.request(900, 0, 0), 500, "the reserved bytes are held for the first engine");
        drop(reservation);
    }

    #[test]
    fn a_dropped_reservation_returns_its_bytes() {
        let budget = MemoryBudget::new(1000, 1000).unwrap();
        let (first, second) = (Engine::join(&budget, 1, 100), Engine::join(&budget, 1, 100));
        drop(first.lease.reserve(500).unwrap());
        assert_eq!((second.request(900, 0, 0), first.request(0, 0, 0)), (500, 100));
        assert_eq!(second.request(900, 0, 0), 900);
    }

    #[test]
    fn bytes_reserved_during_a_shrink_stay_available() {
        let budget = MemoryBudget::new(1000, 1000).unwrap();
        let (first, second) = (Engine::join(&budget, 1, 100), Engine::join(&budget, 1, 100));
        assert_eq!(first.request(0, 800, 100), 900);
        assert_eq!(second.request(900, 0, 0), 100);
        assert_eq!(first.request(0, 800, 100), 100);
        let reservation = first.lease.reserve(400).unwrap();
        first.shrink(100);
        assert!(second.lease.reserve(850).err().unwrap().message().contains("hold 400"));
        assert_eq!((second.request(900, 0, 0), first.request(0, 0, 0)), (600, 400));
        drop(reservation);
        assert_eq!(budget.info().min_bytes, 200);
    }

    #[test]
    fn an_engine_that_lacks_memory_calls_again_before_each_step() {
        let budget = MemoryBudget::new(1000, 1000).unwrap();
        let (first, second) = (Engine::join(&budget, 1, 100), Engine::join(&budget, 1, 100));
        let calls = Arc::new(Mutex::new(Vec::new()));
        let recorded = calls.clone();
        first.lease.on_call(Arc::new(move |caller| recorded.lock().unwrap().push(caller)));
        assert_eq!(first.request(900, 0, 0), 900);
        assert_eq!((second.request(200, 0, 0), second.request(200, 0, 0)), (100, 100));
        second.lease.request(Need { pool: 100, used: 200, cached: 0, next: 0, steps: false });
        assert_eq!(*calls.lock().unwrap(), [Caller::Engine, Caller::StillWaiting]);
    }

    #[test]
    fn an_engine_that_releases_all_leaves_the_budget_to_the_others() {
        let budget = MemoryBudget::new(1000, 1000).unwrap();
        let (first, second) = (Engine::join(&budget, 1, 100), Engine::join(&budget, 1, 100));
        let reservation = first.lease.reserve(800).unwrap();
        assert_eq!(first.request(900, 0, 0), 900);
        first.lease.release_all();
        drop(reservation);
        assert_eq!(budget.info(), BudgetInfo { bytes: 1000, max_bytes: 1000, min_bytes: 100, held_bytes: 100, engines: 2 });
        assert_eq!(second.request(1000, 0, 0), 1000);
    }

    #[test]
    fn a_revoked_reduction_needs_no_shrink() {
        let budget = MemoryBudget::new(1000, 1000).unwrap();
        let engine = Engine::join(&budget, 1, 100);
        assert_eq!(engine.request(0, 0, 0), 1000);
        budget.resize(300).unwrap();
        budget.resize(1000).unwrap();
        assert_eq!(engine.request(0, 0, 0), 1000);
    }
}
