//! An allocator that knows who asks. Of each thread it counts the bytes alive, and while the thread watches it can refuse one
//! large allocation that its caller is ready to do without, write down those whose caller is not, or count all that there are.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Large enough that only what options, models or requests ask for is.
pub const LARGE: usize = 2048;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static WATCH: Cell<Watch> = const { Cell::new(Watch::Off) };
    static FOUND: RefCell<BTreeMap<Site, usize>> = const { RefCell::new(BTreeMap::new()) };
    /// Who asked before, by the return addresses nearest to the allocator: names are slow to find.
    static KNOWN: RefCell<BTreeMap<[usize; FRAMES], Asker>> = const { RefCell::new(BTreeMap::new()) };
}

#[derive(Clone, Copy, PartialEq)]
enum Watch {
    Off,
    /// Refuses what comes after so many large fallible allocations of this crate.
    RefuseAfter(usize),
    /// One was refused.
    Refused,
    /// Refuses all of them.
    RefuseAll,
    /// Writes down who could not be refused.
    Census,
    /// Writes down everybody, and the smallest too.
    Count,
}

/// This crate.
const OWN: &str = "pagedllm";

/// Who allocates: a crate and a line of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site {
    pub package: String,
    pub place: String,
}

/// Who asks, none for the test itself; and whether it is ready to be refused.
type Asker = (Option<Site>, bool);

impl Site {
    /// The crate; of this one, the file.
    pub fn name(&self) -> String {
        let file = self.place.split(':').next().unwrap_or_default();
        if self.package == OWN { format!("src/{file}") } else { self.package.clone() }
    }
}

/// Enough to be out of the standard library.
const FRAMES: usize = 24;

pub struct Refusing;

// SAFETY: the system's allocator, which may always fail.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_refused(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract.
        let start = unsafe { System.alloc(layout) };
        count(if start.is_null() { 0 } else { layout.size() as isize });
        start
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_refused(layout.size()) {
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
        if size > layout.size() && is_refused(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract.
        let moved = unsafe { System.realloc(start, layout, size) };
        count(if moved.is_null() { 0 } else { size as isize - layout.size() as isize });
        moved
    }
}

fn count(bytes: isize) {
    // A thread that ends has no place to count in any more.
    let _ = LIVE.try_with(|live| live.set(live.get() + bytes));
}

fn is_refused(size: usize) -> bool {
    let watch = WATCH.try_with(Cell::get).unwrap_or(Watch::Off);
    // Whoever tells of a panic already holds what it takes to read the stack.
    watch != Watch::Off && (size >= LARGE || watch == Watch::Count) && !std::thread::panicking() && judge(watch)
}

/// Nothing that is allocated meanwhile is looked at.
fn judge(watch: Watch) -> bool {
    WATCH.set(Watch::Off);
    let before = LIVE.get();
    let (next, refused) = match (watch, asker()) {
        (Watch::RefuseAfter(0), (Some(site), true)) if site.package == OWN => (Watch::Refused, true),
        (Watch::RefuseAfter(more), (Some(site), true)) if site.package == OWN => (Watch::RefuseAfter(more - 1), false),
        (Watch::RefuseAll, (Some(site), true)) if site.package == OWN => (watch, true),
        (Watch::Census | Watch::RefuseAll, (Some(site), false)) | (Watch::Count, (Some(site), _)) => {
            FOUND.with_borrow_mut(|found| *found.entry(site).or_default() += 1);
            (watch, false)
        }
        _ => (watch, false),
    };
    LIVE.set(before); // its own notes are no loss
    WATCH.set(next);
    refused
}

fn asker() -> Asker {
    let mut stack = [std::ptr::null_mut(); FRAMES];
    // SAFETY: it writes at most so many addresses.
    unsafe { libc::backtrace(stack.as_mut_ptr(), FRAMES as i32) };
    let stack = stack.map(|address| address.addr());
    let known = KNOWN.with_borrow(|known| known.get(&stack).cloned());
    known.unwrap_or_else(|| {
        let asker = read_stack();
        KNOWN.with_borrow_mut(|known| known.insert(stack, asker.clone()));
        asker
    })
}

/// Not by the standard library: who asks may be that, at the same, and hold its lock.
fn read_stack() -> Asker {
    let mut asker = (None, false);
    let mut below = false;
    backtrace::trace(|frame| {
        let mut found = false;
        backtrace::resolve_frame(frame, |symbol| {
            found = found || is_asker(symbol, &mut below, &mut asker);
        });
        !found
    });
    asker
}

/// True: it is this one who asks. The first frames are this file's, and `below` them come the standard library's.
fn is_asker(symbol: &backtrace::Symbol, below: &mut bool, asker: &mut Asker) -> bool {
    let Some(place) = symbol.filename().and_then(Path::to_str) else { return false };
    let of_std = place.contains("/library/") || place.contains("/hashbrown-");
    *below |= of_std;
    if !*below {
        return false;
    }
    asker.1 |= symbol.name().is_some_and(|name| name.to_string().contains("try_reserve"));
    // Nor do the test's own count.
    if of_std || place.contains("tests/allocations/") {
        return false;
    }
    asker.0 = site(place, symbol.lineno().unwrap_or_default());
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

/// Bytes that this thread has allocated and not freed.
pub fn live() -> isize {
    LIVE.get()
}

/// Runs `act`, of whose large fallible allocations the one after `passed` others is refused; and whether there was one.
pub fn refusing<T>(passed: usize, act: impl FnOnce() -> T) -> (T, bool) {
    WATCH.set(Watch::RefuseAfter(passed));
    let result = act();
    (result, WATCH.replace(Watch::Off) == Watch::Refused)
}

/// Runs `act`, of whose large fallible allocations none is granted; and tells whose could not have been refused.
pub fn refusing_all<T>(act: impl FnOnce() -> T) -> (T, BTreeSet<Site>) {
    WATCH.set(Watch::RefuseAll);
    let result = act();
    WATCH.set(Watch::Off);
    (result, FOUND.take().into_keys().collect())
}

/// Runs `act` and tells whose large allocations could not have been refused.
pub fn census(act: impl FnOnce()) -> BTreeSet<Site> {
    WATCH.set(Watch::Census);
    act();
    WATCH.set(Watch::Off);
    FOUND.take().into_keys().collect()
}

/// Runs `act` and adds to `found` who allocated, and how often.
pub fn counting<T>(found: &mut BTreeMap<Site, usize>, act: impl FnOnce() -> T) -> T {
    WATCH.set(Watch::Count);
    let result = act();
    WATCH.set(Watch::Off);
    FOUND.take().into_iter().for_each(|(site, count)| *found.entry(site).or_default() += count);
    result
}
