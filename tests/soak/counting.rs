//! Counts the allocated and the resident bytes of the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

struct CountingAllocator;

static LIVE: AtomicI64 = AtomicI64::new(0);

// SAFETY: all calls go to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Makes all threads share one heap. Otherwise the fragmentation would depend on the number of
/// threads.
pub fn share_one_heap() {
    // SAFETY: mallopt may be called at any time.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

pub fn live_bytes() -> i64 {
    LIVE.load(Relaxed)
}

pub fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}
