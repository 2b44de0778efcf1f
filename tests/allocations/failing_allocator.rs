//! An allocator that identifies its callers. It counts the allocated bytes of each thread. On
//! request it fails fallible allocations, records the callers of infallible ones, or counts all
//! allocations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicIsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Minimum bytes of a large allocation. The size of each large allocation depends on options,
/// models or requests.
pub const LARGE: usize = 2048;
/// The starts of the names of the threads that encode exports, and that write files.
const HELPERS: [&[u8]; 3] = [b"pagedllm-transf", b"pagedllm-log", b"pagedllm-swap"];

thread_local! {
    static LIVE: Live = const { Live(Cell::new(0)) };
    static WATCH: Cell<Watch> = const { Cell::new(Watch::Off) };
    static FOUND: RefCell<BTreeMap<Site, usize>> = const { RefCell::new(BTreeMap::new()) };
    /// Cached callers by the innermost return addresses, because symbol lookup is slow.
    static KNOWN: RefCell<BTreeMap<[usize; FRAMES], Caller>> = const { RefCell::new(BTreeMap::new()) };
}

/// The bytes that a thread has allocated and not freed.
struct Live(Cell<isize>);

/// The bytes that the ended helpers have allocated and not freed. They take memory of the stepping
/// thread and return other memory to it. Tests that use helpers or measure hold `alone`.
static ENDED_HELPERS: AtomicIsize = AtomicIsize::new(0);

impl Drop for Live {
    fn drop(&mut self) {
        let mut name = [0_u8; 16];
        // SAFETY: the buffer has the size that the system requires.
        unsafe { libc::pthread_getname_np(libc::pthread_self(), name.as_mut_ptr().cast(), name.len()) };
        if HELPERS.iter().any(|helper| name.starts_with(helper)) {
            ENDED_HELPERS.fetch_add(self.0.get(), SeqCst);
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Watch {
    Off,
    /// Fails one large fallible allocation of this crate after the given number of others.
    FailAfter(usize),
    /// One allocation has failed.
    Failed,
    /// Fails all large fallible allocations of this crate.
    FailAll,
    /// Records the callers of large infallible allocations.
    RecordInfallible,
    /// Records the callers of all allocations of any size.
    Count,
}

/// This crate.
const OWN: &str = "pagedllm";

/// The crate and the source line of an allocation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site {
    pub package: String,
    pub place: String,
}

/// The site of an allocation, None for the test itself, and whether the allocation is fallible.
type Caller = (Option<Site>, bool);

impl Site {
    /// Returns the name of the crate, or the file for this crate.
    pub fn name(&self) -> String {
        let file = self.place.split(':').next().unwrap_or_default();
        if self.package == OWN { format!("src/{file}") } else { self.package.clone() }
    }
}

/// Number of stack frames that reach beyond the standard library.
const FRAMES: usize = 24;

pub struct FailingAllocator;

// SAFETY: all calls go to the system's allocator, and an allocation may always fail.
unsafe impl GlobalAlloc for FailingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if must_fail(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract.
        let start = unsafe { System.alloc(layout) };
        count(if start.is_null() { 0 } else { layout.size() as isize });
        start
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if must_fail(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract.
        let start = unsafe { System.alloc_zeroed(layout) };
        count(if start.is_null() { 0 } else { layout.size() as isize });
        start
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > layout.size() && must_fail(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract.
        let moved = unsafe { System.realloc(start, layout, size) };
        count(if moved.is_null() { 0 } else { size as isize - layout.size() as isize });
        moved
    }
}

fn count(bytes: isize) {
    // A thread that exits may have destroyed its counter.
    let _ = LIVE.try_with(|live| live.0.set(live.0.get() + bytes));
}

fn must_fail(size: usize) -> bool {
    let watch = WATCH.try_with(Cell::get).unwrap_or(Watch::Off);
    // The panic handler already holds the lock that reading the stack needs.
    watch != Watch::Off && (size >= LARGE || watch == Watch::Count) && !std::thread::panicking() && decide(watch)
}

/// Decides on one allocation. Allocations of this function itself are not watched.
fn decide(watch: Watch) -> bool {
    WATCH.set(Watch::Off);
    let before = LIVE.with(|live| live.0.get());
    let (next, failed) = match (watch, caller()) {
        (Watch::FailAfter(0), (Some(site), true)) if site.package == OWN => (Watch::Failed, true),
        (Watch::FailAfter(more), (Some(site), true)) if site.package == OWN => (Watch::FailAfter(more - 1), false),
        (Watch::FailAll, (Some(site), true)) if site.package == OWN => (watch, true),
        (Watch::RecordInfallible | Watch::FailAll, (Some(site), false)) | (Watch::Count, (Some(site), _)) => {
            FOUND.with_borrow_mut(|found| *found.entry(site).or_default() += 1);
            (watch, false)
        }
        _ => (watch, false),
    };
    LIVE.with(|live| live.0.set(before)); // the records of this function are not counted
    WATCH.set(next);
    failed
}

fn caller() -> Caller {
    let mut stack = [std::ptr::null_mut(); FRAMES];
    // SAFETY: the function writes at most FRAMES addresses.
    unsafe { libc::backtrace(stack.as_mut_ptr(), FRAMES as i32) };
    let stack = stack.map(|address| address.addr());
    let known = KNOWN.with_borrow(|known| known.get(&stack).cloned());
    known.unwrap_or_else(|| {
        let found = read_stack();
        KNOWN.with_borrow_mut(|known| known.insert(stack, found.clone()));
        found
    })
}

/// Does not use std::backtrace, because the allocation may come from std::backtrace and hold its
/// lock.
fn read_stack() -> Caller {
    let mut caller = (None, false);
    let mut below = false;
    backtrace::trace(|frame| {
        let mut found = false;
        backtrace::resolve_frame(frame, |symbol| {
            found = found || is_caller(symbol, &mut below, &mut caller);
        });
        !found
    });
    caller
}

/// Returns whether the frame is the caller. The innermost frames are those of this file, and
/// `below` them are those of the standard library.
fn is_caller(symbol: &backtrace::Symbol, below: &mut bool, caller: &mut Caller) -> bool {
    let Some(place) = symbol.filename().and_then(Path::to_str) else { return false };
    let is_std = place.contains("/library/") || place.contains("/hashbrown-");
    *below |= is_std;
    if !*below {
        return false;
    }
    caller.1 |= symbol.name().is_some_and(|name| name.to_string().contains("try_reserve"));
    // Frames of the test itself are skipped, too.
    if is_std || place.contains("tests/allocations/") {
        return false;
    }
    caller.0 = site(place, symbol.lineno().unwrap_or_default());
    true
}

fn site(place: &str, line: u32) -> Option<Site> {
    let registry = place.split_once("/registry/src/").and_then(|(_, rest)| rest.split_once('/')).and_then(|(_, rest)| rest.split_once('/'));
    if let Some((package, rest)) = registry {
        // name-1.2.3
        let name = package.rsplit_once('-').map_or(package, |(name, _)| name);
        return Some(Site { package: name.into(), place: format!("{rest}:{line}") });
    }
    let (_, own) = place.split_once("src/")?;
    Some(Site { package: OWN.into(), place: format!("{own}:{line}") })
}

/// Keeps other tests that export or measure memory from running.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of bytes that this thread and the ended helpers have allocated and not freed.
pub fn live_bytes() -> isize {
    LIVE.with(|live| live.0.get()) + ENDED_HELPERS.load(SeqCst)
}

/// Runs `act` and fails its large fallible allocation after `passed` others. Returns the result and
/// whether an allocation failed.
pub fn fail_allocation<T>(passed: usize, act: impl FnOnce() -> T) -> (T, bool) {
    WATCH.set(Watch::FailAfter(passed));
    let result = act();
    (result, WATCH.replace(Watch::Off) == Watch::Failed)
}

/// Runs `act` and fails all its large fallible allocations. Returns the result and the sites of
/// large infallible allocations.
pub fn fail_all_allocations<T>(act: impl FnOnce() -> T) -> (T, BTreeSet<Site>) {
    WATCH.set(Watch::FailAll);
    let result = act();
    WATCH.set(Watch::Off);
    (result, FOUND.take().into_keys().collect())
}

/// Runs `act` and returns the sites of its large infallible allocations.
pub fn record_infallible(act: impl FnOnce()) -> BTreeSet<Site> {
    WATCH.set(Watch::RecordInfallible);
    act();
    WATCH.set(Watch::Off);
    FOUND.take().into_keys().collect()
}

/// Runs `act` and adds the number of its allocations by site to `found`.
pub fn count_allocations<T>(found: &mut BTreeMap<Site, usize>, act: impl FnOnce() -> T) -> T {
    start_counting();
    let result = act();
    stop_counting(found);
    result
}

/// Counts the allocations of this thread from now on.
pub fn start_counting() {
    WATCH.set(Watch::Count);
}

/// Stops `start_counting`, and adds the number of allocations by site to `found`.
pub fn stop_counting(found: &mut BTreeMap<Site, usize>) {
    WATCH.set(Watch::Off);
    FOUND.take().into_iter().for_each(|(site, count)| *found.entry(site).or_default() += count);
}
