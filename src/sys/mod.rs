//! The system calls of the library. This module imports nothing from the library except the error
//! type.
#![allow(unsafe_code)]

pub mod bytes;
#[cfg(test)]
#[path = "../../tests/support/counting.rs"]
pub mod counting;
#[cfg(test)]
#[path = "../../tests/support/cpu_time.rs"]
#[allow(dead_code)] // the integration tests use all of it
pub mod cpu_time;
pub mod event;
pub mod file_locks;
pub mod files;
pub mod float;
pub mod process;
pub mod quiet;
#[cfg(test)]
#[path = "../../tests/support/random.rs"]
#[allow(dead_code)] // the integration tests use all of it
pub mod random;
pub mod shared_mapping;
pub mod threads;

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::error::{Error, Result};

/// Zeroed, page-aligned memory from the system, with huge pages if they help. It is unmapped on
/// drop. The system allocates a page at the first access, so an unused KV block costs nothing.
pub struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: Pages owns its memory. Sharing follows the ordinary rules of & and &mut.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

/// The largest page size, except huge pages, which the system can split.
const PAGE: usize = 64 << 10;

/// The size from which huge pages are used. Below it they would waste more than they save.
const HUGE_FROM: usize = 4 << 20;

/// The same for memory whose end may never be accessed, so that the up to 2 MiB of the last huge
/// page are negligible.
const PARTLY_HUGE_FROM: usize = 64 << 20;

impl Pages {
    /// Maps memory that will be used completely.
    pub fn zeroed(len: usize) -> Result<Pages> {
        Self::map(len, HUGE_FROM)
    }

    /// Maps memory that will be used from the start up to an unknown point.
    pub fn partly_used(len: usize) -> Result<Pages> {
        Self::map(len, PARTLY_HUGE_FROM)
    }

    fn map(len: usize, huge_from: usize) -> Result<Pages> {
        if len == 0 {
            return Ok(Pages::default());
        }
        // SAFETY: an anonymous private mapping at an address that the system chooses affects no
        // existing memory.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(Error::out_of_memory());
        }
        #[cfg(target_os = "linux")]
        // SAFETY: the range is the new mapping. The call is a hint, and its failure is harmless.
        unsafe {
            libc::madvise(start, len, if len >= huge_from { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE })
        };
        // A mapping is never at address zero.
        let start = NonNull::new(start.cast()).ok_or_else(Error::out_of_memory)?;
        Ok(Pages { start, len })
    }

    /// Returns the pages from byte `from` on to the system, so that they read as zeros again. The
    /// system may refuse, for example if the host has locked its memory. Then the contents stay.
    pub fn discard(&mut self, from: usize) -> Result<()> {
        let from = from.next_multiple_of(PAGE);
        if from >= self.len {
            return Ok(());
        }
        // SAFETY: a page-aligned part of the live mapping, without other borrows. Private anonymous
        // pages come back zeroed.
        match unsafe { libc::madvise(self.start.as_ptr().add(from).cast(), self.len - from, libc::MADV_DONTNEED) } {
            0 => Ok(()),
            _ => Err(Error::io(format!("cannot release {} bytes of memory: {}", self.len - from, std::io::Error::last_os_error()))),
        }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: start..start+len is the live mapping (or empty) and always initialized.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and &mut self makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// An empty range.
impl Default for Pages {
    fn default() -> Pages {
        Pages { start: NonNull::<u64>::dangling().cast(), len: 0 }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: this object owns the mapping, and no borrow of it exists.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

/// A plain number.
/// # Safety
/// Every bit pattern of its size is valid, it has no interior mutability, and its alignment is at
/// most that of u64.
pub unsafe trait Number {}
// SAFETY: f32 fulfils the contract.
unsafe impl Number for f32 {}
// SAFETY: u32 fulfils the contract.
unsafe impl Number for u32 {}

/// An array of numbers in pages of its own, initially zero.
#[derive(Default)]
pub struct Numbers<T> {
    pages: Pages,
    kind: PhantomData<T>,
}

impl<T: Number> Numbers<T> {
    /// Allocates as `Pages::zeroed` does.
    pub fn zeroed(len: usize) -> Result<Numbers<T>> {
        Ok(Numbers { pages: Pages::zeroed(Self::bytes(len)?)?, kind: PhantomData })
    }

    /// Allocates as `Pages::partly_used` does.
    pub fn partly_used(len: usize) -> Result<Numbers<T>> {
        Ok(Numbers { pages: Pages::partly_used(Self::bytes(len)?)?, kind: PhantomData })
    }

    fn bytes(len: usize) -> Result<usize> {
        len.checked_mul(size_of::<T>()).ok_or_else(Error::out_of_memory)
    }
}

impl<T: Number> Deref for Numbers<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: the start is page-aligned (or dangling and aligned for u64), the length covers
        // the pages, and every bit pattern is a number.
        unsafe { std::slice::from_raw_parts(self.pages.start.as_ptr().cast(), self.pages.len / size_of::<T>()) }
    }
}

impl<T: Number> DerefMut for Numbers<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and &mut self makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.pages.start.as_ptr().cast(), self.pages.len / size_of::<T>()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_zeroed_and_writable() {
        let mut pages = Pages::zeroed(10_000).unwrap();
        assert!(pages.bytes().iter().all(|&b| b == 0));
        pages.bytes_mut()[9_999] = 7;
        assert_eq!(pages.bytes()[9_999], 7);
        assert!(Pages::zeroed(0).unwrap().bytes().is_empty());
    }

    #[test]
    fn an_error_reports_memory_that_the_system_does_not_take_back() {
        let mut pages = Pages::zeroed(2 * PAGE).unwrap();
        pages.bytes_mut().fill(7);
        // SAFETY: the second page of the mapping.
        let locked = unsafe { libc::mlock(pages.start.as_ptr().add(PAGE).cast(), PAGE) };
        assert_eq!(locked, 0, "this test locks {PAGE} bytes");
        let error = pages.discard(PAGE).unwrap_err();
        assert!(error.message().contains("cannot release 65536 bytes of memory"), "{error}");
        assert_eq!(pages.bytes()[PAGE], 7);
        // SAFETY: as above.
        unsafe { libc::munlock(pages.start.as_ptr().add(PAGE).cast(), PAGE) };
        pages.discard(1).unwrap();
        assert_eq!((pages.bytes()[PAGE - 1], pages.bytes()[PAGE]), (7, 0));
        pages.discard(2 * PAGE).unwrap();
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn sparsely_used_memory_has_huge_pages_only_if_it_is_large() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return eprintln!("skipped: this system has no huge pages");
        }
        // The flags of the mapping, as the system reports them.
        let is_huge = |pages: &Pages| {
            let start = pages.start.as_ptr() as usize;
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let within = |line: &str| {
                let range = line.split(' ').next()?.split_once('-')?;
                let [first, end] = [range.0, range.1].map(|address| usize::from_str_radix(address, 16));
                Some((first.ok()?..end.ok()?).contains(&start))
            };
            let flags = smaps.lines().skip_while(|line| within(line) != Some(true)).find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
            flags.split(' ').any(|flag| flag == "hg")
        };
        let [small, large] = [HUGE_FROM, PARTLY_HUGE_FROM];
        assert!(is_huge(&Pages::zeroed(small).unwrap()) && !is_huge(&Pages::zeroed(small - 1).unwrap()));
        assert!(is_huge(&Pages::partly_used(large).unwrap()) && !is_huge(&Pages::partly_used(large - 1).unwrap()));
    }

    #[test]
    fn a_size_that_exceeds_the_machine_is_an_error() {
        assert_eq!(Pages::zeroed(usize::MAX / 2).err(), Some(Error::out_of_memory()));
    }
}
