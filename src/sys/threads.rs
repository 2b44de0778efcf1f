//! Threads that a host does not notice.

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::thread::{Builder, JoinHandle};

use super::quiet;
use crate::error::{Error, Result};

/// CPUs that a set has a place for.
pub const MOST_CPUS: usize = libc::CPU_SETSIZE as usize;

/// The CPUs on which this thread may run: what a container, or the host's own pinning, leaves of the machine.
pub struct AllowedCpus(libc::cpu_set_t);

impl AllowedCpus {
    pub fn read() -> Result<AllowedCpus> {
        // SAFETY: the set is plain data, whole, and of the size that is told; 0 is this thread.
        let (set, code) = unsafe {
            let mut set = std::mem::zeroed::<libc::cpu_set_t>();
            let code = libc::sched_getaffinity(0, size_of_val(&set), &mut set);
            (set, code)
        };
        match code {
            0 => Ok(AllowedCpus(set)),
            _ => {
                Err(Error::unsupported(format!("the system does not tell on which CPUs a thread may run: {}", io::Error::last_os_error())))
            }
        }
    }

    pub fn has(&self, cpu: usize) -> bool {
        // SAFETY: the set has a place for it.
        cpu < MOST_CPUS && unsafe { libc::CPU_ISSET(cpu, &self.0) }
    }

    pub fn iter(&self) -> impl Iterator<Item = usize> {
        (0..MOST_CPUS).filter(|&cpu| self.has(cpu))
    }
}

/// From now on the thread runs on this CPU alone.
pub fn pin(thread: &JoinHandle<()>, cpu: usize) -> Result<()> {
    assert!(cpu < MOST_CPUS, "CPU {cpu} has no place in a set");
    // SAFETY: the set is plain data of the size that is told; the handle keeps the thread's id valid.
    let code = unsafe {
        let mut set = std::mem::zeroed::<libc::cpu_set_t>();
        libc::CPU_SET(cpu, &mut set);
        libc::pthread_setaffinity_np(thread.as_pthread_t(), size_of_val(&set), &set)
    };
    match code {
        0 => Ok(()),
        code => Err(Error::unsupported(format!("a thread cannot be pinned to CPU {cpu}: {}", io::Error::from_raw_os_error(code)))),
    }
}

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
