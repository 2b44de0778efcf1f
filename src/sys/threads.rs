//! Threads that a host does not notice.

use std::thread::JoinHandle;

use super::quiet;

/// Starts a thread that no signal handler of the host will run on, that prints nothing when it panics,
/// and that computes in the standard floating-point mode.
pub fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
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
    let thread = std::thread::Builder::new().name(name).spawn(body);
    // SAFETY: `old` is this thread's mask of a moment ago.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw mut old, std::ptr::null_mut()) };
    thread
}
