//! Waits for other ranks. They end if a rank fails, its process ends, or the time has passed.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use super::SharedMemory;
use super::segment::{Counter, Failure, JOINED, LEFT};
use crate::error::{Code, Error, Result};

/// Tests of a counter before a wait sleeps. Between two kernels, a rank is late by microseconds.
const SPINS: u32 = 2_000;
/// The same if there are more ranks than CPUs, so that the others need this one.
const SHORT_SPINS: u32 = 50;
/// Time after which a sleeping wait looks for ended processes, at first and later.
const MIN_SLICE: Duration = Duration::from_millis(5);
const MAX_SLICE: Duration = Duration::from_millis(100);

/// How long a call waits.
pub struct Limits<'a> {
    started: Instant,
    timeout: Option<Duration>,
    /// What the other rank has not done in time.
    action: &'static str,
    /// The group whose failure ends the wait too.
    parent: Option<&'a SharedMemory>,
}

/// Returns an error that another rank has caused. It is no defect of the library, although the
/// engine stops.
pub fn group_error(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(Code::Internal, message)
}

impl Limits<'_> {
    pub fn new(timeout: Option<Duration>) -> Limits<'static> {
        Limits { started: Instant::now(), timeout, action: "done its part", parent: None }
    }

    /// Limits for joining a group: that of a path, or a part of another one.
    pub fn to_join(timeout: Option<Duration>, parent: Option<&SharedMemory>) -> Limits<'_> {
        Limits { started: Instant::now(), timeout, action: "joined", parent }
    }

    /// Returns why the group of which this is a part cannot continue.
    pub fn obstacle(&self) -> Option<Error> {
        let parent = self.parent?;
        parent.obstacle(parent.rank)
    }

    pub fn left(&self) -> Duration {
        self.timeout.map_or(Duration::MAX, |timeout| timeout.saturating_sub(self.started.elapsed()))
    }

    pub fn timed_out(&self, rank: usize) -> Error {
        let (action, elapsed) = (self.action, self.started.elapsed());
        group_error(format!("rank {rank} has not {action} within {elapsed:.1?}"))
    }
}

/// Returns how often a wait of one of `size` ranks tests a counter before it sleeps.
pub fn spins(size: usize) -> u32 {
    match std::thread::available_parallelism() {
        Ok(cpus) if cpus.get() >= size => SPINS,
        _ => SHORT_SPINS,
    }
}

impl SharedMemory {
    /// Waits until a counter of rank `of` meets a condition. Returns its value.
    pub(super) fn wait(&self, counter: Counter, of: usize, limits: &Limits, is_met: impl Fn(u32) -> bool) -> Result<u32> {
        for _ in 0..self.spins {
            let value = counter.load();
            if is_met(value) {
                return Ok(value);
            }
            std::hint::spin_loop();
        }
        let mut slice = MIN_SLICE;
        loop {
            let value = counter.load();
            if is_met(value) {
                return Ok(value);
            }
            counter.sleep(value, slice.min(limits.left()));
            let value = counter.load();
            if is_met(value) {
                return Ok(value);
            }
            // The counter is read after the state of the rank, which may have changed both.
            let obstacle = self.obstacle(of).or_else(|| limits.obstacle());
            let value = counter.load();
            match obstacle {
                _ if is_met(value) => return Ok(value),
                Some(error) => return Err(error),
                None if limits.left().is_zero() => return Err(limits.timed_out(of)),
                None => slice = (2 * slice).min(MAX_SLICE),
            }
        }
    }

    /// Returns why a wait for rank `of` cannot end. The end of the process of any rank is a reason,
    /// since the ranks wait for each other in turn. A rank that has left may be the first to end.
    pub(super) fn obstacle(&self, of: usize) -> Option<Error> {
        if let Some(error) = self.failure_of_group() {
            return Some(error);
        }
        for rank in (0..self.segment.size()).filter(|&rank| rank != self.rank) {
            match self.segment.state(rank).load() {
                LEFT if rank == of => return Some(group_error(format!("rank {rank} has left the group"))),
                // The rank may have left since its state was read.
                JOINED if self.has_ended(rank) && self.segment.state(rank).load() == JOINED => {
                    return Some(group_error(format!("the process of rank {rank} has ended")));
                }
                _ => {}
            }
        }
        None
    }

    /// Fails if another rank has left, ended or failed.
    pub(super) fn check_others(&self) -> Result<()> {
        let left = (0..self.segment.size()).find(|&rank| self.segment.state(rank).load() == LEFT);
        self.obstacle(left.unwrap_or(self.rank)).map_or(Ok(()), Err)
    }

    fn has_ended(&self, rank: usize) -> bool {
        let process = self.processes.get(rank).and_then(Option::as_ref);
        process.is_some_and(|process| process.has_ended()) || !self.segment.is_locked(rank)
    }

    pub(super) fn failure_of_group(&self) -> Option<Error> {
        let (failure, rank) = self.segment.failure()?;
        let size = self.segment.size();
        Some(match failure {
            Failure::Call => group_error(format!("a call of rank {rank} has failed")),
            Failure::Size(other) => {
                Error::invalid(format!("rank {rank} expects {other} ranks, not {size}; start all ranks with the same size"))
            }
            Failure::Version(version) => Error::unsupported(format!(
                "rank {rank} has version {version} of the format of {}; use one library for all ranks",
                self.path.display()
            )),
        })
    }
}
