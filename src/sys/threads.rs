//! Threads that a host does not notice.

use std::thread::{Builder, JoinHandle};

use super::quiet;

/// Starts a thread that no signal handler of the host will run on, that prints nothing when it panics,
/// and that computes in the standard floating-point mode.
pub fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    spawn_from(Builder::new().name(name), body)
}

/// As `spawn`, with a stack of so many bytes.
pub fn spawn_deep(name: String, stack: usize, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    spawn_from(Builder::new().name(name).stack_size(stack), body)
}

fn spawn_from(builder: Builder, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    let body = move || {
        quiet::this_thread();
        let _mode = super::float::StandardMode::enter();
        body();
    };
    // A new thread inherits the mask, so this one blocks everything for a moment.
    // SAFETY: the sets are plain data that the calls fill; the mask is put back below.
    let mut old = unsafe {
        let (mut all, mut old) = (std::mem::zeroed::<libc::sigset_t>(), std::mem::zeroed::<libc::sigset_t>());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        old
    };
    let thread = builder.spawn(body);
    // SAFETY: `old` is this thread's mask of a moment ago.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw mut old, std::ptr::null_mut()) };
    thread
}
