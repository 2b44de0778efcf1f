//! Threads that do not affect the host.

use std::io;
use std::ops::Range;
use std::os::unix::thread::JoinHandleExt;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::float::StandardMode;
use super::quiet;
use crate::error::{Error, Result};

/// The number of CPUs that a `cpu_set_t` can represent.
pub const MAX_CPUS: usize = libc::CPU_SETSIZE as usize;

/// The CPUs on which this thread may run, as limited by a container or by the host.
pub struct AllowedCpus(libc::cpu_set_t);

impl AllowedCpus {
    pub fn read() -> Result<AllowedCpus> {
        // SAFETY: the set is initialized plain data of the given size. 0 is this thread.
        let (set, code) = unsafe {
            let mut set = std::mem::zeroed::<libc::cpu_set_t>();
            let code = libc::sched_getaffinity(0, size_of_val(&set), &mut set);
            (set, code)
        };
        match code {
            0 => Ok(AllowedCpus(set)),
            _ => Err(Error::unsupported(format!("cannot read the allowed CPUs: {}", io::Error::last_os_error()))),
        }
    }

    pub fn has(&self, cpu: usize) -> bool {
        // SAFETY: `cpu` is within the set.
        cpu < MAX_CPUS && unsafe { libc::CPU_ISSET(cpu, &self.0) }
    }

    pub fn iter(&self) -> impl Iterator<Item = usize> {
        (0..MAX_CPUS).filter(|&cpu| self.has(cpu))
    }
}

/// Pins the thread to one CPU.
pub fn pin(thread: &JoinHandle<()>, cpu: usize) -> Result<()> {
    assert!(cpu < MAX_CPUS, "CPU {cpu} is outside of a cpu_set_t");
    // SAFETY: the set is plain data of the given size. The handle keeps the id of the thread valid.
    let code = unsafe {
        let mut set = std::mem::zeroed::<libc::cpu_set_t>();
        libc::CPU_SET(cpu, &mut set);
        libc::pthread_setaffinity_np(thread.as_pthread_t(), size_of_val(&set), &set)
    };
    match code {
        0 => Ok(()),
        code => Err(Error::unsupported(format!("cannot pin a thread to CPU {cpu}: {}", io::Error::from_raw_os_error(code)))),
    }
}

/// Starts a thread that runs no signal handler of the host, prints nothing when it panics, and
/// computes in the standard floating-point mode.
pub fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let builder = Builder::new().name(name);
    with_signals_blocked(|| builder.spawn(|| isolated(body)))
}

/// Starts a function on a thread of the library. Its result comes through the receiver. If the
/// receiver is dropped before, the thread is left behind with everything that the function owns.
pub fn start<T: Send + 'static>(name: &str, body: impl FnOnce() -> T + Send + 'static) -> Result<Receiver<T>> {
    let (sender, receiver) = channel();
    let thread = spawn(name.into(), move || drop(sender.send(body())));
    thread.map(|_| receiver).map_err(|e| Error::internal(format!("cannot start the thread {name}: {e}")))
}

/// Priority of threads whose work must not take time from the steps of engines. The system gives
/// such a thread about a tenth of the time of a thread of the host if both compete for a CPU.
const LOW_PRIORITY: libc::c_int = 10;

/// Lowers the priority of the calling thread, which the library has started. On other systems than
/// Linux it does nothing, since priorities there belong to the process.
pub fn lower_priority() {
    #[cfg(target_os = "linux")]
    // SAFETY: the calls have no memory arguments. On Linux, the id of a thread selects this thread
    // alone. A system that refuses leaves the priority as it is.
    unsafe {
        let thread = libc::syscall(libc::SYS_gettid) as libc::id_t;
        libc::setpriority(libc::PRIO_PROCESS, thread, LOW_PRIORITY);
    }
}

/// Returns the CPU time of the calling thread.
pub fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the write of one timespec.
    match unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) } {
        0 => Duration::new(time.tv_sec as u64, time.tv_nsec as u32),
        _ => Duration::ZERO,
    }
}

/// Starts a thread as `spawn` does, with a stack of `stack` bytes.
pub fn spawn_deep(name: String, stack: usize, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let builder = Builder::new().name(name).stack_size(stack);
    with_signals_blocked(|| builder.spawn(|| isolated(body)))
}

/// Runs `body` with at least `bytes` of free stack, in the standard floating-point mode: on the
/// calling thread if its stack has them, otherwise on a temporary thread. The inner error is the
/// message of a panic in `body`.
pub fn with_stack<T: Send>(bytes: usize, body: impl FnOnce() -> T + Send) -> Result<std::result::Result<T, String>> {
    if stack_left() >= bytes {
        let _mode = StandardMode::enter();
        return Ok(quiet::during(|| quiet::no_panic(body)));
    }
    std::thread::scope(|scope| {
        let builder = Builder::new().name("pagedllm-stack".into()).stack_size(bytes);
        let thread = with_signals_blocked(|| builder.spawn_scoped(scope, || isolated(|| quiet::no_panic(body))));
        let thread = thread.map_err(|e| {
            Error::capacity(format!("cannot start a thread with a stack of {bytes} bytes: {e}; free memory or raise the limit of threads"))
        })?;
        // `no_panic` has caught the panic of `body`. The join fails only if the drop of that
        // panic's payload panics.
        Ok(thread.join().unwrap_or_else(|_| Err("a panic during the handling of a panic".into())))
    })
}

/// Runs `body` quietly and in the standard floating-point mode, on a thread of the library.
fn isolated<T>(body: impl FnOnce() -> T) -> T {
    quiet::this_thread();
    let _mode = StandardMode::enter();
    body()
}

/// Blocks all signals while `start` runs, since a new thread inherits the signal mask of its
/// creator.
fn with_signals_blocked<T>(start: impl FnOnce() -> T) -> T {
    // SAFETY: the sets are plain data that the calls fill. The mask is restored below.
    let mut old = unsafe {
        let (mut all, mut old) = (std::mem::zeroed::<libc::sigset_t>(), std::mem::zeroed::<libc::sigset_t>());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        old
    };
    let started = start();
    // SAFETY: `old` is the previous mask of this thread.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw mut old, std::ptr::null_mut()) };
    started
}

thread_local! {
    // The addresses of the stack of this thread. Empty if the system does not report them.
    static STACK: Range<usize> = stack_range();
}

/// Returns the bytes of stack below the calling function. 0 if the thread runs on a stack that the
/// system did not provide, such as that of a coroutine.
fn stack_left() -> usize {
    let here = 0u8;
    let here = &raw const here as usize;
    STACK.try_with(|stack| if stack.contains(&here) { here - stack.start } else { 0 }).unwrap_or(0)
}

#[cfg(target_os = "linux")]
fn stack_range() -> Range<usize> {
    // SAFETY: `attributes` is plain data that the first call fills and the last one frees. The
    // output arguments have the right types.
    unsafe {
        let mut attributes = std::mem::zeroed::<libc::pthread_attr_t>();
        if libc::pthread_getattr_np(libc::pthread_self(), &mut attributes) != 0 {
            return 0..0;
        }
        let (mut start, mut len) = (std::ptr::null_mut(), 0);
        let code = libc::pthread_attr_getstack(&attributes, &mut start, &mut len);
        libc::pthread_attr_destroy(&mut attributes);
        if code == 0 { start as usize..(start as usize).saturating_add(len) } else { 0..0 }
    }
}

#[cfg(not(target_os = "linux"))]
fn stack_range() -> Range<usize> {
    0..0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_priority_concerns_only_its_thread() {
        // SAFETY: the call has no memory arguments. 0 is the calling thread.
        let priority = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = priority();
        let (_, lowered) = std::thread::spawn(move || (lower_priority(), priority())).join().unwrap();
        assert_eq!((priority(), lowered), (before, LOW_PRIORITY));
    }

    #[test]
    fn cpu_time_counts_work_and_no_sleep() {
        let start = cpu_time();
        std::thread::sleep(Duration::from_millis(50));
        let slept = cpu_time() - start;
        let until = std::time::Instant::now() + Duration::from_secs(5);
        while cpu_time() - start < slept + Duration::from_millis(5) {
            assert!(std::time::Instant::now() < until);
        }
        assert!(slept < Duration::from_millis(25), "{slept:?}");
    }

    #[test]
    fn started_functions_return_a_result_or_are_left_behind() {
        assert_eq!(start("pagedllm-test", || 7).unwrap().recv(), Ok(7));
        let (release, released) = channel::<()>();
        let stuck = start("pagedllm-test", move || released.recv().is_ok()).unwrap();
        assert!(stuck.recv_timeout(Duration::from_millis(20)).is_err());
        release.send(()).unwrap();
        assert_eq!(stuck.recv(), Ok(true));
    }

    #[test]
    fn with_stack_stays_on_a_thread_with_enough_stack() {
        let here = std::thread::current().id();
        assert_eq!(with_stack(16 << 10, || std::thread::current().id()).unwrap(), Ok(here));
        assert_ne!(with_stack(64 << 20, || std::thread::current().id()).unwrap(), Ok(here));
    }

    #[test]
    fn with_stack_gives_the_requested_stack() {
        fn depth(n: usize) -> usize {
            let frame = std::hint::black_box([n as u8; 1024]);
            if n == 0 { frame[0] as usize } else { 1 + depth(n - 1) }
        }
        let thread = Builder::new().stack_size(64 << 10).spawn(|| with_stack(16 << 20, || depth(4_000))).unwrap();
        assert_eq!(thread.join().unwrap().unwrap(), Ok(4_000));
    }

    #[test]
    fn with_stack_reports_panics_and_refused_stacks() {
        let panic = with_stack(64 << 20, || panic!("as planned")).unwrap();
        assert_eq!(panic.map(|()| 0), Err("as planned".into()));
        let error = with_stack(usize::MAX / 4, || ()).unwrap_err();
        assert!(error.message().contains("cannot start a thread with a stack of"), "{error}");
    }
}
