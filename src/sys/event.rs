//! An eventfd for event loops such as epoll, libuv, Asio and Go's netpoller.

use std::io;

/// An eventfd that is closed on drop and not inherited over exec.
#[cfg(target_os = "linux")]
pub struct EventFd(std::os::fd::OwnedFd);

#[cfg(target_os = "linux")]
impl EventFd {
    pub fn new() -> io::Result<EventFd> {
        use std::os::fd::FromRawFd;
        // SAFETY: a call without pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is open and has no other owner.
        Ok(EventFd(unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) }))
    }

    pub fn fd(&self) -> i32 {
        std::os::fd::AsRawFd::as_raw_fd(&self.0)
    }

    /// Makes the descriptor readable.
    pub fn signal(&self) {
        let one = 1u64;
        // The call fails only if the counter is full. In that case the descriptor is readable
        // already.
        // SAFETY: eight readable bytes.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }

    /// Makes the descriptor unreadable until the next signal.
    pub fn clear(&self) {
        let mut count = 0u64;
        // The call fails only if there is nothing to clear.
        // SAFETY: eight writable bytes.
        unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
    }
}

/// A type without values, since only Linux has eventfd.
#[cfg(not(target_os = "linux"))]
pub enum EventFd {}

#[cfg(not(target_os = "linux"))]
impl EventFd {
    pub fn new() -> io::Result<EventFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn fd(&self) -> i32 {
        match *self {}
    }

    pub fn signal(&self) {
        match *self {}
    }

    pub fn clear(&self) {
        match *self {}
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_event_is_readable_from_the_signal_until_it_is_cleared() {
        let event = EventFd::new().unwrap();
        let readable = || {
            let mut poll = libc::pollfd { fd: event.fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one writable entry.
            unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
        };
        assert!(!readable());
        event.signal();
        event.signal();
        assert!(readable());
        event.clear();
        event.clear();
        assert!(!readable());
    }
}
