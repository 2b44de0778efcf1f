//! Processes: the one that owns an engine, since threads and locks do not survive a fork, and
//! others that may end.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use crate::error::{Error, Result};

/// The id of the process that created an object.
#[derive(Debug, Clone, Copy)]
pub struct Owner(u32);

impl Owner {
    pub fn this_process() -> Owner {
        Owner(std::process::id())
    }

    /// Returns whether this is that process, and no fork of it.
    pub fn is_this_process(self) -> bool {
        std::process::id() == self.0
    }

    /// Fails in a forked child. Call it before any lock that the parent may have held during the
    /// fork.
    pub fn check(self) -> Result<()> {
        let this = std::process::id();
        if this == self.0 {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "the engine belongs to process {}, of which this process ({this}) is a fork; create an engine after the fork",
            self.0
        )))
    }
}

/// Another process. Its end is detected even if its children are alive.
pub struct ProcessHandle(OwnedFd);

impl ProcessHandle {
    /// Opens the process with this id.
    ///
    /// # Errors
    /// `ESRCH` if there is none. Others if the system does not support this.
    pub fn open(pid: u32) -> io::Result<ProcessHandle> {
        // SAFETY: a call without pointers. The descriptor is closed by exec.
        let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is open and has no other owner.
        Ok(ProcessHandle(unsafe { OwnedFd::from_raw_fd(descriptor as i32) }))
    }

    /// Returns whether the process has ended. Its parent need not have waited for it.
    pub fn has_ended(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one writable entry.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }
}

/// Returns the number of the namespace in which the ids of processes are valid. 0 if it is unknown.
pub fn pid_namespace() -> u32 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_process_is_seen_before_its_parent_waits_for_it() {
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let handle = ProcessHandle::open(child.id()).unwrap();
        assert!(!handle.has_ended());
        drop(child.stdin.take());
        while !handle.has_ended() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert_eq!(ProcessHandle::open(child.id()).err().unwrap().raw_os_error(), Some(libc::ESRCH));
        assert_ne!(pid_namespace(), 0);
    }
}
