//! The few system calls of the library. A leaf: it imports nothing of the house but the error.
#![allow(unsafe_code)]

#[cfg(test)]
#[path = "../../tests/common/counting.rs"]
pub mod counting;
pub mod event;
pub mod files;
pub mod float;
pub mod process;
pub mod quiet;
pub mod threads;

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::error::{Error, Result};

/// Zeroed memory straight from the system: page-aligned, in huge pages where they help, given back
/// on drop. The system lends a page when it is first touched, so an unused KV block costs nothing.
pub struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: Pages owns its memory; sharing follows the ordinary rules of & and &mut.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

/// No page is larger, unless it is a huge one, which the system can split.
const PAGE: usize = 64 << 10;

/// Below this size a huge page would waste more than it saves.
const HUGE_FROM: usize = 4 << 20;

/// And below this one, where the end may never be touched: what a huge page takes of it, up to 2 MiB, is not to weigh.
const PARTLY_HUGE_FROM: usize = 64 << 20;

impl Pages {
    /// All of which may well be used.
    pub fn zeroed(len: usize) -> Result<Pages> {
        Self::map(len, HUGE_FROM)
    }

    /// Which will be used from the beginning on, as far as need be.
    pub fn partly_used(len: usize) -> Result<Pages> {
        Self::map(len, PARTLY_HUGE_FROM)
    }

    fn map(len: usize, huge_from: usize) -> Result<Pages> {
        if len == 0 {
            return Ok(Pages::default());
        }
        // SAFETY: an anonymous private mapping at an address of the system's choice touches no memory of ours.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(Error::out_of_memory());
        }
        #[cfg(target_os = "linux")]
        // SAFETY: the range is the mapping just made; the call is a hint and its failure harmless.
        unsafe {
            libc::madvise(start, len, if len >= huge_from { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE })
        };
        // A mapping is never at address zero.
        let start = NonNull::new(start.cast()).ok_or_else(Error::out_of_memory)?;
        Ok(Pages { start, len })
    }

    /// Gives the pages from byte `from` on back to the system; whoever touches them again finds zeros. The system may keep them, as where
    /// the host has locked its memory: then they hold what they held.
    pub fn discard(&mut self, from: usize) -> Result<()> {
        let from = from.next_multiple_of(PAGE);
        if from >= self.len {
            return Ok(());
        }
        // SAFETY: a page-aligned part of our live mapping, which nobody else borrows; private anonymous pages come back zeroed.
        match unsafe { libc::madvise(self.start.as_ptr().add(from).cast(), self.len - from, libc::MADV_DONTNEED) } {
            0 => Ok(()),
            _ => Err(Error::io(format!("the system did not take {} bytes back: {}", self.len - from, std::io::Error::last_os_error()))),
        }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: start..start+len is our live mapping (or empty), always initialized.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and &mut self makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// None.
impl Default for Pages {
    fn default() -> Pages {
        Pages { start: NonNull::<u64>::dangling().cast(), len: 0 }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping is ours and nothing borrows it any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

/// A plain number.
/// # Safety
/// Any bits of its size are one, none of them can be changed through a shared reference, and it is aligned to no more than a u64.
pub unsafe trait Number {}
// SAFETY: so it is.
unsafe impl Number for f32 {}
// SAFETY: so it is.
unsafe impl Number for u32 {}

/// Numbers in pages of their own, at first zeros.
#[derive(Default)]
pub struct Numbers<T> {
    pages: Pages,
    kind: PhantomData<T>,
}

impl<T: Number> Numbers<T> {
    /// As `Pages::zeroed`.
    pub fn zeroed(len: usize) -> Result<Numbers<T>> {
        Ok(Numbers { pages: Pages::zeroed(Self::bytes(len)?)?, kind: PhantomData })
    }

    /// As `Pages::partly_used`.
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
        // SAFETY: pages begin where a page does (or are none, at an address for a u64), hold so many, and any bits are a number.
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
    fn memory_that_the_system_does_not_take_back_is_told() {
        let mut pages = Pages::zeroed(2 * PAGE).unwrap();
        pages.bytes_mut().fill(7);
        // SAFETY: the second page of our mapping.
        let locked = unsafe { libc::mlock(pages.start.as_ptr().add(PAGE).cast(), PAGE) };
        assert_eq!(locked, 0, "this test locks {PAGE} bytes");
        let error = pages.discard(PAGE).unwrap_err();
        assert!(error.message().contains("did not take 65536 bytes back"), "{error}");
        assert_eq!(pages.bytes()[PAGE], 7);
        // SAFETY: as above.
        unsafe { libc::munlock(pages.start.as_ptr().add(PAGE).cast(), PAGE) };
        pages.discard(1).unwrap();
        assert_eq!((pages.bytes()[PAGE - 1], pages.bytes()[PAGE]), (7, 0));
        pages.discard(2 * PAGE).unwrap();
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_may_not_be_used_to_its_end_is_in_huge_pages_only_where_it_is_large() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return eprintln!("skipped: this system has no huge pages");
        }
        // The flags of the mapping, as the system tells them.
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
    fn a_size_beyond_the_machine_is_an_error() {
        assert_eq!(Pages::zeroed(usize::MAX / 2).err(), Some(Error::out_of_memory()));
    }
}
