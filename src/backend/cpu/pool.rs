//! The engine's thread pool: threads share the tasks of one kernel, spin briefly for the next
//! kernel, and then sleep.
//!
//! A kernel ends when its tasks are done. It waits for the workers that take part, not for those
//! that the system has not scheduled yet: on a busy machine, that could take milliseconds.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crossbeam::utils::CachePadded;

use crate::error::{Error, Result};
use crate::sys;

/// Number of polls before a thread sleeps: some tens of microseconds, longer than the gap between
/// two kernels of a step.
const SPINS: u32 = 2_000;

pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Serializes kernels.
    running: Mutex<()>,
}

struct Shared {
    /// Number of kernels started; a change is the signal to start.
    epoch: CachePadded<AtomicU64>,
    next_task: CachePadded<AtomicUsize>,
    /// Workers that take part in the current kernel. Increased under the lock of `state`.
    busy: CachePadded<AtomicUsize>,
    state: Mutex<PoolState>,
    wake: Condvar,
}

struct PoolState {
    /// The current kernel, until all its tasks have been taken.
    job: Option<Job>,
    sleeping: usize,
    stop: bool,
    panic: Option<Box<dyn Any + Send>>,
}

/// The current kernel: `run(task, worker)` for each task.
#[derive(Clone, Copy)]
struct Job {
    run: *const (dyn Fn(usize, usize) + Sync),
    tasks: usize,
}

// SAFETY: the pointee is Sync, and `Pool::run` keeps it alive until no worker uses it.
unsafe impl Send for Job {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data is valid after a panic: `run` propagates panics of tasks to its caller.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Creates a pool of `threads` threads, including the caller of `run`.
    pub fn new(threads: usize) -> Result<Pool> {
        Pool::start(threads, |_| None)
    }

    /// Creates a pool with one thread per CPU in `cpus`. The first CPU is for the calling thread,
    /// which the caller pins itself.
    pub fn pinned(cpus: &[usize]) -> Result<Pool> {
        Pool::start(cpus.len(), |worker| Some(cpus[worker]))
    }

    fn start(threads: usize, cpu: impl Fn(usize) -> Option<usize>) -> Result<Pool> {
        let shared = Arc::new(Shared {
            epoch: CachePadded::new(AtomicU64::new(0)),
            next_task: CachePadded::new(AtomicUsize::new(0)),
            busy: CachePadded::new(AtomicUsize::new(0)),
            state: Mutex::new(PoolState { job: None, sleeping: 0, stop: false, panic: None }),
            wake: Condvar::new(),
        });
        let mut pool = Pool { shared, workers: Vec::new(), running: Mutex::new(()) };
        for worker in 1..threads {
            let shared = pool.shared.clone();
            let thread = sys::threads::spawn(format!("pagedllm-{worker}"), move || shared.work(worker));
            // On failure, dropping the pool joins the threads that were started.
            let thread = thread.map_err(|e| Error::capacity(format!("cannot start thread {worker} of {threads}: {e}; lower threads")))?;
            let pinned = cpu(worker).map_or(Ok(()), |cpu| sys::threads::pin(&thread, cpu));
            pool.workers.push(thread);
            pinned?;
        }
        Ok(pool)
    }

    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `run(task, worker)` once for every task below `tasks`, on any thread in any order.
    /// Returns when all calls have returned.
    pub fn run(&self, tasks: usize, run: &(dyn Fn(usize, usize) + Sync)) {
        if tasks <= 1 || self.workers.is_empty() {
            return (0..tasks).for_each(|task| run(task, 0));
        }
        let _one_at_a_time = lock(&self.running);
        // SAFETY: only the lifetime changes. Below, the job is removed, so that no further worker
        // takes part, and `busy` becomes 0 when the last of the others has finished.
        let run: &'static (dyn Fn(usize, usize) + Sync) = unsafe { std::mem::transmute(run) };
        let job = Job { run, tasks };
        let sleeping = {
            let mut state = lock(&self.shared.state);
            state.job = Some(job);
            self.shared.next_task.store(0, Ordering::Relaxed);
            self.shared.epoch.fetch_add(1, Ordering::Release);
            state.sleeping
        };
        if sleeping > 0 {
            self.shared.wake.notify_all();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| self.shared.share(job, 0)));
        lock(&self.shared.state).job = None;
        let mut spins = 0;
        while self.shared.busy.load(Ordering::Acquire) > 0 {
            relax(&mut spins);
        }
        let theirs = lock(&self.shared.state).panic.take();
        if let Some(panic) = mine.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    /// Like `run`, for fallible tasks. Returns the error of the first failing task in task order,
    /// independent of the threads. All tasks before it have run; most tasks after it are skipped.
    pub fn try_run(&self, tasks: usize, run: &(dyn Fn(usize, usize) -> Result<()> + Sync)) -> Result<()> {
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        let is_after = |failed: &Option<(usize, Error)>, task| failed.as_ref().is_some_and(|(first, _)| *first < task);
        self.run(tasks, &|task, worker| {
            if is_after(&lock(&failed), task) {
                return;
            }
            if let Err(error) = run(task, worker) {
                let mut failed = lock(&failed);
                if !is_after(&failed, task) {
                    *failed = Some((task, error));
                }
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), |(_, error)| Err(error))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.epoch.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// Spins, and yields the core after a while, so that more threads than cores make progress.
fn relax(spins: &mut u32) {
    *spins += 1;
    match *spins {
        ..SPINS => std::hint::spin_loop(),
        _ => std::thread::yield_now(),
    }
}

impl Shared {
    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            self.await_epoch(seen);
            let job = {
                let state = lock(&self.state);
                if state.stop {
                    return;
                }
                seen = self.epoch.load(Ordering::Acquire);
                let Some(job) = state.job else { continue };
                self.busy.fetch_add(1, Ordering::Relaxed);
                job
            };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.share(job, worker))) {
                lock(&self.state).panic = Some(panic);
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }

    fn share(&self, job: Job, worker: usize) {
        loop {
            let task = self.next_task.fetch_add(1, Ordering::Relaxed);
            if task >= job.tasks {
                return;
            }
            // SAFETY: `Pool::run` waits for the workers that take part before the closure is
            // dropped.
            unsafe { (*job.run)(task, worker) };
        }
    }

    fn await_epoch(&self, seen: u64) {
        for _ in 0..SPINS {
            if self.epoch.load(Ordering::Acquire) != seen {
                return;
            }
            std::hint::spin_loop();
        }
        let mut state = lock(&self.state);
        state.sleeping += 1;
        while self.epoch.load(Ordering::Acquire) == seen && !state.stop {
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.sleeping -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_for_any_number_of_threads() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            for tasks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|task, worker| {
                    assert!(worker < threads);
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_remains_usable() {
        let pool = Pool::new(3).unwrap();
        for bad in [0, 50, 99] {
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(100, &|task, _| assert_ne!(task, bad))));
            assert!(caught.is_err());
        }
        pool.run(10, &|_, _| ());
    }

    #[test]
    fn try_run_returns_the_first_error_and_starts_no_later_tasks() {
        let pools = [1, 3].map(|threads| Pool::new(threads).unwrap());
        for pool in pools.iter().cycle().take(600) {
            let started: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
            let error = pool.try_run(started.len(), &|task, _| {
                started[task].fetch_add(1, Ordering::Relaxed);
                if task < 7 { Ok(()) } else { Err(Error::internal(format!("task {task}"))) }
            });
            assert_eq!(error.unwrap_err().message(), "internal error: task 7");
            let started: Vec<usize> = started.into_iter().map(AtomicUsize::into_inner).collect();
            assert_eq!(started[..8], [1; 8]);
            assert!(started[8..].iter().sum::<usize>() < pool.threads(), "each thread can have started one task before the error");
            pool.try_run(10, &|_, _| Ok(())).unwrap();
        }
    }

    #[test]
    fn a_kernel_does_not_wait_for_a_worker_that_is_never_scheduled() {
        let mut pool = Pool::new(1).unwrap();
        let shared = pool.shared.clone();
        let absent = move || {
            while !lock(&shared.state).stop {
                std::thread::yield_now();
            }
        };
        pool.workers.push(std::thread::spawn(absent));
        let done = AtomicUsize::new(0);
        pool.run(100, &|_, _| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 100);
    }

    #[test]
    fn a_sleeping_pool_wakes_up() {
        let pool = Pool::new(2).unwrap();
        pool.run(4, &|_, _| ());
        let asleep = || lock(&pool.shared.state).sleeping == 1;
        assert!(
            (0..10_000).any(|_| asleep() || {
                std::thread::sleep(std::time::Duration::from_millis(1));
                false
            }),
            "the thread never slept"
        );
        pool.run(4, &|_, _| ());
    }
}
