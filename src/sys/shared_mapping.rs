//! Memory that processes share through a file, and waits for changes of its words.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use crate::error::{Error, Result};

/// The mapping of a file. Other processes change its contents at any time, so there are no
/// references to its bytes: they are copied, and words are atomic.
pub struct SharedMapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this object, and its contents are only copied or accessed as
// atomic words.
unsafe impl Send for SharedMapping {}
// SAFETY: as above.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps the first `len` bytes of a file, which must have as many for as long as it is mapped.
    pub fn new(file: &File, len: usize) -> Result<SharedMapping> {
        // SAFETY: a new mapping at an address that the system chooses affects no existing memory.
        let start = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, file.as_raw_fd(), 0)
        };
        if start == libc::MAP_FAILED {
            return Err(Error::io(format!("cannot map {len} bytes: {}", std::io::Error::last_os_error())));
        }
        let start = NonNull::new(start.cast()).ok_or_else(Error::out_of_memory)?;
        Ok(SharedMapping { start, len })
    }

    /// Returns the address of a range. The offsets are computed by the library, so an invalid one
    /// is a defect.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.len && len <= self.len - offset, "{len} bytes at {offset} exceed {}", self.len);
        // SAFETY: the range is within the mapping.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// Returns the word at an offset.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        let word = self.at(offset, size_of::<u32>()).cast::<u32>();
        assert!(word.is_aligned());
        // SAFETY: an aligned word of the live mapping, which all processes access atomically.
        unsafe { AtomicU32::from_ptr(word) }
    }

    /// Copies bytes into the mapping.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        // SAFETY: the range is within the mapping, and `bytes` is no part of it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(offset, bytes.len()), bytes.len()) };
    }

    /// Copies bytes out of the mapping.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(self.at(offset, bytes.len()), bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Adds the numbers at an offset, a multiple of 4, to `sums`.
    pub fn add_numbers(&self, offset: usize, sums: &mut [f32]) {
        let numbers = self.at(offset, size_of_val(sums)).cast::<f32>();
        assert!(numbers.is_aligned());
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the range is within the mapping and aligned, and every pattern of bits is a
            // number.
            *sum += unsafe { numbers.add(i).read() };
        }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: this object owns the mapping, and no borrow of it exists.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Sleeps while the word has this value: until `wake_all`, at most for `timeout`. It may return
/// earlier.
pub fn wait_while(word: &AtomicU32, value: u32, timeout: Duration) {
    let timeout = libc::timespec { tv_sec: timeout.as_secs().min(1 << 30) as libc::time_t, tv_nsec: timeout.subsec_nanos() as _ };
    // SAFETY: an aligned word of live memory, and a valid time.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const timeout) };
}

/// Wakes all threads of all processes that sleep in `wait_while`.
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: an aligned word of live memory.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::sys::files;

    #[test]
    fn mappings_of_one_file_have_the_same_bytes() {
        let file = files::nameless(&std::env::temp_dir(), 8192).unwrap();
        let (one, two) = (SharedMapping::new(&file, 8192).unwrap(), SharedMapping::new(&file, 8192).unwrap());
        one.write(4096, &1.5f32.to_ne_bytes());
        let mut sums = [2.0];
        two.add_numbers(4096, &mut sums);
        assert_eq!(sums, [3.5]);
        two.word(0).store(7, Ordering::Relaxed);
        let mut bytes = [0; 4];
        one.read(0, &mut bytes);
        assert_eq!(u32::from_ne_bytes(bytes), 7);
    }

    #[test]
    #[should_panic(expected = "exceed 4096")]
    fn a_range_beyond_the_mapping_is_refused() {
        let file = files::nameless(&std::env::temp_dir(), 4096).unwrap();
        SharedMapping::new(&file, 4096).unwrap().write(4090, &[0; 7]);
    }

    #[test]
    fn a_wait_ends_with_the_wake_the_timeout_or_another_value() {
        let file = files::nameless(&std::env::temp_dir(), 4096).unwrap();
        let (here, there) = (SharedMapping::new(&file, 4096).unwrap(), SharedMapping::new(&file, 4096).unwrap());
        wait_while(here.word(0), 1, Duration::from_secs(3600));
        wait_while(here.word(0), 0, Duration::from_millis(1));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                while here.word(0).load(Ordering::Acquire) == 0 {
                    wait_while(here.word(0), 0, Duration::from_secs(3600));
                }
            });
            there.word(0).store(1, Ordering::Release);
            wake_all(there.word(0));
            waiting.join().unwrap();
        });
    }
}
