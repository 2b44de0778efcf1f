//! A budget of KV bytes, for one engine or for several that share it, which the host may change while they run.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// Engines take from it what they need, and give back what they do not. Each keeps its floor, with which it can always go on.
pub struct Arena {
    state: Mutex<State>,
}

struct State {
    bytes: u64,
    most: u64,
    last_id: u64,
    tenants: Vec<Tenant>,
}

/// Has an engine look at its lease soon.
type Call = Arc<dyn Fn() + Send + Sync>;

struct Tenant {
    id: u64,
    /// What its longest sequence needs.
    least: u64,
    /// It holds whole blocks of so many bytes.
    block: u64,
    /// What requests that are on their way need, where it is more.
    promises: Vec<u64>,
    held: u64,
    /// To so much it is on its way down.
    ceiling: u64,
    /// It would like more than there is.
    hungry: bool,
    call: Option<Call>,
}

/// An arena as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaInfo {
    pub bytes: u64,
    /// It can be resized up to this.
    pub most_bytes: u64,
    /// It can be resized down to this, for the engines and requests there are.
    pub least_bytes: u64,
    /// What the engines hold; more than `bytes` while they are on their way down.
    pub held_bytes: u64,
    pub engines: usize,
}

impl Tenant {
    fn floor(&self) -> u64 {
        self.promises.iter().copied().fold(self.least, u64::max)
    }
}

impl State {
    fn tenant(&mut self, id: u64) -> &mut Tenant {
        self.tenants.iter_mut().find(|tenant| tenant.id == id).expect("a lease has its tenant")
    }

    fn others(&self, id: u64) -> impl Iterator<Item = &Tenant> {
        self.tenants.iter().filter(move |tenant| tenant.id != id)
    }

    /// The bytes of so many blocks, where the tenant could have them and they need a promise.
    fn promisable(&mut self, id: u64, blocks: usize) -> Result<Option<u64>> {
        let theirs: u64 = self.others(id).map(|tenant| tenant.held).sum();
        let (all, engines) = (self.bytes, self.tenants.len());
        let tenant = self.tenant(id);
        let bytes = blocks as u64 * tenant.block;
        if bytes > tenant.least && bytes > tenant.held.min(tenant.ceiling) && bytes > all.saturating_sub(theirs) {
            return Err(Error::capacity(format!(
                "the request's sequences may need {bytes} bytes of K and V at once, and of the arena's {all} the other {} engines hold {theirs}: lower max_tokens or n, or make the arena larger",
                engines - 1
            )));
        }
        Ok((bytes > tenant.least).then_some(bytes))
    }

    fn floors(&self) -> u64 {
        self.tenants.iter().map(Tenant::floor).sum()
    }

    /// Where more is held than there is, each goes down by the same share of what it holds above its floor.
    fn share_the_loss(&mut self) {
        let (held, floors) = (self.tenants.iter().map(|tenant| tenant.held).sum::<u64>(), self.floors());
        if held <= self.bytes {
            return;
        }
        let (left, above) = (u128::from(self.bytes - floors), u128::from(held - floors));
        for tenant in &mut self.tenants {
            let floor = tenant.floor();
            let ceiling = floor + (u128::from(tenant.held - floor) * left / above) as u64;
            tenant.ceiling = if ceiling < tenant.held { ceiling } else { u64::MAX };
        }
    }

    fn calls(&self, which: impl Fn(&Tenant) -> bool) -> Vec<Call> {
        self.tenants.iter().filter(|tenant| which(tenant)).filter_map(|tenant| tenant.call.clone()).collect()
    }
}

impl Arena {
    /// A budget of `bytes`, which may later become as large as `most`.
    pub fn new(bytes: u64, most: u64) -> Result<Arc<Arena>> {
        if bytes == 0 || bytes > most {
            return Err(Error::invalid(format!("an arena of {bytes} bytes that may have up to {most}: give it from 1 to {most}")));
        }
        Ok(Arc::new(Arena { state: Mutex::new(State { bytes, most, last_id: 0, tenants: Vec::new() }) }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is whole between any two statements below.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn info(&self) -> ArenaInfo {
        let state = self.lock();
        ArenaInfo {
            bytes: state.bytes,
            most_bytes: state.most,
            least_bytes: state.floors(),
            held_bytes: state.tenants.iter().map(|tenant| tenant.held).sum(),
            engines: state.tenants.len(),
        }
    }

    /// What another engine could have at most, and the most that this will ever be.
    pub fn room(&self) -> (u64, u64) {
        let state = self.lock();
        (state.bytes - state.floors(), state.most)
    }

    /// From now on there are so many bytes. Engines that hold more go down: at once where nobody steps them, otherwise before
    /// their next step. What they cache goes first, then idle sequences lose their blocks, then running ones are preempted;
    /// nothing ends.
    pub fn resize(&self, bytes: u64) -> Result<()> {
        let mut state = self.lock();
        if bytes > state.most {
            return Err(Error::capacity(format!("the arena was made for up to {} bytes: it cannot have {bytes}", state.most)));
        }
        let least = state.floors();
        if bytes < least.max(1) {
            return Err(Error::capacity(format!(
                "{} engines with the requests they have need {least} bytes to go on, for their longest sequences: the arena cannot shrink to {bytes}",
                state.tenants.len()
            )));
        }
        state.bytes = bytes;
        state.share_the_loss();
        let calls = state.calls(|_| true);
        drop(state);
        calls.iter().for_each(|call| call());
        Ok(())
    }

    /// One more engine, which holds blocks of so many bytes, and needs the `least` to go on at all.
    pub fn join(self: &Arc<Arena>, block: u64, least: u64) -> Result<Lease> {
        let (block, least) = (block.max(1), least * block.max(1));
        let mut state = self.lock();
        let floors = state.floors();
        if least > state.bytes - floors {
            return Err(Error::capacity(format!(
                "the engine needs {least} bytes for its longest sequence, and of the arena's {} others need {floors}: make it larger, or max_model_len smaller",
                state.bytes
            )));
        }
        state.tenants.try_reserve(1)?;
        state.last_id += 1;
        let id = state.last_id;
        state.tenants.push(Tenant { id, block, least, promises: Vec::new(), held: least, ceiling: u64::MAX, hungry: false, call: None });
        state.share_the_loss();
        let calls = state.calls(|_| true);
        drop(state);
        calls.iter().for_each(|call| call());
        Ok(Lease { arena: self.clone(), id })
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info().fmt(f)
    }
}

/// One engine's part of an arena.
pub struct Lease {
    arena: Arc<Arena>,
    id: u64,
}

/// What an engine does with its part, in blocks.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// For sequences.
    pub used: usize,
    /// Kept in case somebody begins alike.
    pub cached: usize,
    /// What the next step may add.
    pub next: usize,
}

impl Lease {
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// What is to be done when others need something, or the budget has changed.
    pub fn on_call(&self, call: Call) {
        self.arena.lock().tenant(self.id).call = Some(call);
    }

    /// How many blocks the engine should hold from now on. More than before are its own at once; of fewer it says when it has
    /// given the rest back.
    pub fn settle(&self, need: Need) -> usize {
        let mut state = self.arena.lock();
        let (bytes, alone) = (state.bytes, state.tenants.len() == 1);
        let they_are_hungry = state.others(self.id).any(|tenant| tenant.hungry);
        let theirs: u64 = state.others(self.id).map(|tenant| tenant.held.min(tenant.ceiling)).sum();
        let theirs_still: u64 = state.others(self.id).map(|tenant| tenant.held).sum();
        let tenant = state.tenant(self.id);
        let (held, floor) = (tenant.held, tenant.floor());
        let in_bytes = |blocks: usize| blocks as u64 * tenant.block;
        let (urgent, kept) = (in_bytes(need.used + need.next), in_bytes(need.cached));
        let wanted = match (alone, they_are_hungry) {
            (true, _) => bytes,
            (false, true) => urgent,
            (false, false) => held.max(urgent + kept),
        };
        let lasting = wanted.min(bytes.saturating_sub(theirs)).min(tenant.ceiling).max(floor);
        // What others have yet to give back cannot be taken before.
        let target = lasting.min(held.max(bytes.saturating_sub(theirs_still)));
        let target = target - target % tenant.block;
        tenant.held = held.max(target);
        let was_hungry = std::mem::replace(&mut tenant.hungry, !alone && urgent > target);
        let calls = if tenant.hungry && !was_hungry { state.calls(|other| other.id != self.id) } else { Vec::new() };
        let blocks = target / state.tenant(self.id).block;
        drop(state);
        calls.iter().for_each(|call| call());
        blocks as usize
    }

    /// The engine holds no more than so many blocks any more.
    pub fn give_back(&self, blocks: usize) {
        let mut state = self.arena.lock();
        let tenant = state.tenant(self.id);
        tenant.held = tenant.held.min(blocks as u64 * tenant.block);
        if tenant.held <= tenant.ceiling {
            tenant.ceiling = u64::MAX;
        }
        let calls = state.calls(|other| other.hungry && other.id != self.id);
        drop(state);
        calls.iter().for_each(|call| call());
    }

    /// Whether so many blocks could be promised now.
    pub fn could_promise(&self, blocks: usize) -> bool {
        self.arena.lock().promisable(self.id, blocks).is_ok()
    }

    /// Sees to it that the engine can have so many blocks as long as the promise lives. None: it always can.
    pub fn promise(self: &Arc<Lease>, blocks: usize) -> Result<Option<Promise>> {
        let mut state = self.arena.lock();
        let Some(bytes) = state.promisable(self.id, blocks)? else { return Ok(None) };
        let tenant = state.tenant(self.id);
        tenant.promises.try_reserve(1)?;
        tenant.promises.push(bytes);
        tenant.held = tenant.held.max(bytes);
        Ok(Some(Promise { lease: self.clone(), bytes }))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.arena.lock();
        state.tenants.retain(|tenant| tenant.id != self.id);
        let calls = state.calls(|other| other.hungry);
        drop(state);
        calls.iter().for_each(|call| call());
    }
}

/// A request that can go on only with more than the engine's least.
pub struct Promise {
    lease: Arc<Lease>,
    bytes: u64,
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut state = self.lease.arena.lock();
        let promises = &mut state.tenant(self.lease.id).promises;
        if let Some(place) = promises.iter().position(|&other| other == self.bytes) {
            promises.swap_remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(used: usize, cached: usize, next: usize) -> Need {
        Need { used, cached, next }
    }

    #[test]
    fn who_is_alone_has_everything() {
        let arena = Arena::new(1000, 2000).unwrap();
        let lease = arena.join(1, 100).unwrap();
        assert_eq!(lease.settle(need(0, 0, 10)), 1000);
        arena.resize(1500).unwrap();
        assert_eq!(lease.settle(need(0, 0, 10)), 1500);
        arena.resize(300).unwrap();
        assert_eq!((lease.settle(need(900, 0, 10)), arena.info().held_bytes), (300, 1500));
        lease.give_back(300);
        assert_eq!(arena.info(), ArenaInfo { bytes: 300, most_bytes: 2000, least_bytes: 100, held_bytes: 300, engines: 1 });
    }

    #[test]
    fn a_budget_that_cannot_be_is_refused_with_the_one_that_could() {
        for (bytes, most) in [(0, 0), (0, 9), (10, 9)] {
            assert!(Arena::new(bytes, most).unwrap_err().message().contains("give it from 1"));
        }
        let arena = Arena::new(1000, 2000).unwrap();
        let (_first, _second) = (arena.join(1, 300).unwrap(), arena.join(1, 400).unwrap());
        assert!(arena.resize(699).unwrap_err().message().contains("need 700 bytes to go on"));
        assert!(arena.resize(2001).unwrap_err().message().contains("up to 2000"));
        assert!(arena.join(1, 301).err().unwrap().message().contains("others need 700"));
        arena.resize(700).unwrap();
    }

    #[test]
    fn what_one_does_not_use_another_can_have() {
        let arena = Arena::new(1000, 1000).unwrap();
        let first = arena.join(1, 100).unwrap();
        assert_eq!(first.settle(need(0, 0, 10)), 1000);
        first.give_back(1000);
        let second = arena.join(1, 100).unwrap();
        // The first has filled its part with what it caches, and has yet to make room.
        assert_eq!(second.settle(need(90, 0, 50)), 100);
        assert_eq!(first.settle(need(200, 600, 50)), 250);
        first.give_back(250);
        assert_eq!(second.settle(need(90, 0, 50)), 140);
        assert_eq!(second.settle(need(600, 0, 50)), 650);
        // Nobody is hungry: what is there may be kept.
        assert_eq!(first.settle(need(200, 100, 50)), 350);
        assert_eq!(first.settle(need(200, 300, 50)), 350);
        assert_eq!(arena.info().held_bytes, 1000);
        drop(second);
        assert_eq!(first.settle(need(200, 300, 50)), 1000);
    }

    #[test]
    fn all_share_a_loss_and_keep_their_floors() {
        let arena = Arena::new(1000, 1000).unwrap();
        let (first, second) = (Arc::new(arena.join(1, 100).unwrap()), Arc::new(arena.join(1, 100).unwrap()));
        let promise = second.promise(200).unwrap();
        assert_eq!((first.settle(need(500, 0, 0)), second.settle(need(500, 0, 0))), (500, 500));
        arena.resize(600).unwrap();
        assert_eq!((first.settle(need(500, 0, 0)), second.settle(need(500, 0, 0))), (271, 328));
        first.give_back(271);
        // The second still has its own.
        assert_eq!((first.settle(need(271, 0, 99)), arena.info().held_bytes), (271, 771));
        second.give_back(328);
        assert!(arena.resize(299).is_err());
        drop(promise);
        arena.resize(200).unwrap();
        assert_eq!((first.settle(need(271, 0, 0)), second.settle(need(328, 0, 0))), (100, 100));
    }

    #[test]
    fn blocks_are_held_whole() {
        let arena = Arena::new(1000, 1000).unwrap();
        let lease = arena.join(300, 1).unwrap();
        assert_eq!((lease.settle(need(0, 0, 1)), arena.info().held_bytes), (3, 900));
    }

    #[test]
    fn a_promise_is_given_only_where_it_can_be_kept() {
        let arena = Arena::new(1000, 1000).unwrap();
        let (first, second) = (Arc::new(arena.join(1, 100).unwrap()), Arc::new(arena.join(1, 100).unwrap()));
        assert!(first.promise(100).unwrap().is_none());
        second.settle(need(500, 0, 0));
        assert!(first.promise(501).err().unwrap().message().contains("hold 500"));
        let promise = first.promise(500).unwrap().unwrap();
        assert_eq!(second.settle(need(900, 0, 0)), 500, "it is held for the one that it was promised to");
        drop(promise);
    }
}
