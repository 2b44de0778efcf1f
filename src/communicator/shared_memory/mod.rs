//! Ranks that are processes, or threads, of one host. They share a file, usually below /dev/shm.
//!
//! Each rank holds a lock of its own byte of the file, which the system releases when the process
//! ends. The other ranks also watch the process itself if they can see it: a forked child of a rank
//! has the descriptor of the file, and keeps the lock while it lives. Between containers, where
//! processes do not see each other, a rank with forked children counts as alive until they end.
//!
//! A process that can write the file can make calls fail or change what they carry. It can do no
//! other harm, unless it truncates the file. The file has mode 0600.

mod collectives;
mod join;
mod messages;
mod segment;
#[cfg(test)]
mod tests;
mod waiting;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use self::collectives::{Access, Operation};
use self::join::Group;
use self::segment::{LEFT, SLOT_BYTES, Segment, rank_lock};
use self::waiting::{Limits, group_error, spins};
use super::{Communicator, OrderedSum};
use crate::error::{Code, Error, Result};
use crate::sys::bytes::{as_bytes, as_bytes_mut};
use crate::sys::process::{Owner, ProcessHandle};
use crate::sys::{file_locks, files};

/// Ranks up to which all of them add all numbers. More ranks share the work for long messages:
/// each rank then reads every number about twice, instead of once from each rank.
const MAX_DIRECT_RANKS: usize = 4;

/// A rank of a group of processes of this host. If a rank is dropped, waits for it fail.
pub struct SharedMemory {
    segment: Segment,
    path: PathBuf,
    rank: usize,
    owner: Owner,
    /// The processes of the ranks that this process can watch.
    processes: Vec<Option<ProcessHandle>>,
    /// The first error of this rank.
    failed: OnceLock<Error>,
    /// The receivers to which this rank has a ring, one bit each.
    rings: AtomicU64,
    splits: AtomicUsize,
    /// Tests of a counter before a wait sleeps.
    spins: u32,
}

impl SharedMemory {
    /// Joins the group of a path. Rank 0 creates the file and replaces that of a group whose rank 0
    /// has ended. All ranks wait for each other, at most for `timeout` (`None`: no limit).
    ///
    /// # Errors
    /// `InvalidArgument` if the size is not 1 to 64, the rank is not below it or already in use, or
    /// other ranks have another size. `Capacity` if the file cannot be allocated. `Io` if it cannot
    /// be created, or if a rank has not joined in time or has ended.
    pub fn join(path: &Path, rank: usize, size: usize, timeout: Option<Duration>) -> Result<SharedMemory> {
        let group = SharedMemory::join_group(&Group { path, rank, size }, &Limits::to_join(timeout, None));
        // No engine stops because of it yet.
        group.map_err(|error| match error.code() {
            Code::Internal => Error::io(error.message().to_string()),
            _ => error,
        })
    }

    fn join_group(group: &Group, limits: &Limits) -> Result<SharedMemory> {
        let mut rank = SharedMemory {
            segment: group.open(limits)?,
            path: group.path.to_path_buf(),
            rank: group.rank,
            owner: Owner::this_process(),
            processes: Vec::with_capacity(group.size),
            failed: OnceLock::new(),
            rings: AtomicU64::new(0),
            splits: AtomicUsize::new(0),
            spins: spins(group.size),
        };
        let met = rank.meet(limits);
        rank.call(|| met).map_err(|error| error.within(group.path.display()))?;
        Ok(rank)
    }

    /// Runs a call. After an error, all later calls of all ranks fail.
    fn call<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        if !self.owner.is_this_process() {
            return Err(Error::unsupported("the communicator belongs to the parent of this process; create one after the fork"));
        }
        if let Some(error) = self.failed.get() {
            return Err(error.clone());
        }
        let result = match self.failure_of_group() {
            None => body(),
            Some(error) => Err(error),
        };
        if let Err(error) = &result {
            self.segment.fail(self.rank);
            self.failed.get_or_init(|| error.clone());
        }
        result
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        let size = self.segment.size();
        match rank < size {
            true => Ok(()),
            false => Err(group_error(format!("rank is {rank}; must be below {size}"))),
        }
    }

    fn check_other(&self, rank: usize) -> Result<()> {
        match rank == self.rank {
            true => Err(group_error(format!("rank {rank} sends to itself"))),
            false => self.check_rank(rank),
        }
    }

    fn check_lengths(&self, out: usize, expected: Option<usize>) -> Result<()> {
        match expected == Some(out) {
            true => Ok(()),
            false => Err(group_error(format!("out has {out} bytes, which is wrong for {} ranks", self.segment.size()))),
        }
    }

    fn reduce(&self, x: &mut [f32], limits: &Limits) -> Result<()> {
        const CHUNK: usize = SLOT_BYTES / size_of::<f32>();
        self.exchange(Operation::AllReduce, (x.len(), CHUNK), limits, |access, range, slot| match access {
            Access::Write => slot.write(0, as_bytes(&x[range])),
            Access::Read(0) => slot.read(0, as_bytes_mut(&mut x[range])),
            Access::Read(_) => slot.add_numbers(&mut x[range]),
        })
    }

    fn divide(&self, color: usize, timeout: Option<Duration>) -> Result<Arc<dyn Communicator>> {
        let limits = Limits::to_join(timeout, Some(self));
        let mut colors = [0; size_of::<usize>() * segment::MAX_RANKS];
        let colors = &mut colors[..size_of::<usize>() * self.segment.size()];
        self.gather(&color.to_ne_bytes(), colors, &limits)?;
        let same = |(_, bytes): &(usize, &[u8; size_of::<usize>()])| **bytes == color.to_ne_bytes();
        let members = colors.as_chunks().0.iter().enumerate().filter(same).map(|(rank, _)| rank);
        let rank = members.clone().take_while(|&rank| rank < self.rank).count();
        let mut path = self.path.clone().into_os_string();
        path.push(format!(".{}.{color}", self.splits.fetch_add(1, Ordering::Relaxed)));
        let group = Group { path: Path::new(&path), rank, size: members.count() };
        let part = SharedMemory::join_group(&group, &limits)?;
        // All members have joined, so nothing needs the name any more.
        part.remove_file();
        Ok(Arc::new(part))
    }

    fn gather(&self, bytes: &[u8], out: &mut [u8], limits: &Limits) -> Result<()> {
        let part = bytes.len();
        self.exchange(Operation::AllGather, (part, SLOT_BYTES), limits, |access, range, slot| match access {
            Access::Write => slot.write(0, &bytes[range]),
            Access::Read(rank) if rank == self.rank => out[rank * part..][range.clone()].copy_from_slice(&bytes[range]),
            Access::Read(rank) => slot.read(0, &mut out[rank * part..][range]),
        })
    }

    /// Removes the name of the file, if this is rank 0 and the name is not that of another file.
    fn remove_file(&self) {
        if self.rank == 0 && files::is_at(self.segment.file(), &self.path) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Communicator for SharedMemory {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.segment.size()
    }

    fn broadcast(&self, bytes: &mut [u8], root: usize, timeout: Option<Duration>) -> Result<()> {
        self.call(|| {
            self.check_rank(root)?;
            self.copy_to_all(bytes, root, &Limits::new(timeout))
        })
    }

    fn all_gather(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()> {
        self.call(|| {
            self.check_lengths(out.len(), bytes.len().checked_mul(self.size()))?;
            self.gather(bytes, out, &Limits::new(timeout))
        })
    }

    fn all_to_all(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()> {
        self.call(|| {
            let size = self.size();
            let part = bytes.len() / size;
            self.check_lengths(out.len(), Some(bytes.len()).filter(|len| len.is_multiple_of(size)))?;
            // A slot has a range of each part.
            let chunk = SLOT_BYTES / size;
            self.exchange(Operation::AllToAll, (part, chunk), &Limits::new(timeout), |access, range, slot| match access {
                Access::Write => {
                    let others = (0..size).filter(|&rank| rank != self.rank);
                    others.for_each(|rank| slot.write(rank * chunk, &bytes[rank * part..][range.clone()]));
                }
                Access::Read(rank) if rank == self.rank => {
                    out[rank * part..][range.clone()].copy_from_slice(&bytes[rank * part..][range]);
                }
                Access::Read(rank) => slot.read(self.rank * chunk, &mut out[rank * part..][range]),
            })
        })
    }

    fn send(&self, bytes: &[u8], to: usize, timeout: Option<Duration>) -> Result<()> {
        self.call(|| {
            self.check_other(to)?;
            self.write_message(bytes, to, &Limits::new(timeout))
        })
    }

    fn receive(&self, bytes: &mut [u8], from: usize, timeout: Option<Duration>) -> Result<()> {
        self.call(|| {
            self.check_other(from)?;
            self.read_message(bytes, from, &Limits::new(timeout))
        })
    }

    fn split(&self, color: usize, timeout: Option<Duration>) -> Result<Arc<dyn Communicator>> {
        self.call(|| self.divide(color, timeout))
    }

    fn check(&self) -> Result<()> {
        self.check_others()
    }

    fn all_reduce(&self, x: &mut [f32], scratch: &mut OrderedSum, timeout: Option<Duration>) -> Result<()> {
        let size = self.size();
        if size == 1 || x.is_empty() {
            return Ok(());
        }
        if size > MAX_DIRECT_RANKS && size_of_val(x) > SLOT_BYTES {
            return scratch.all_reduce(self, x, timeout);
        }
        self.call(|| self.reduce(x, &Limits::new(timeout)))
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // A forked child shares the lock with the parent, which still needs it.
        if self.owner.is_this_process() {
            self.remove_file();
            self.segment.state(self.rank).publish(LEFT);
            file_locks::unlock(self.segment.file(), rank_lock(self.rank));
        }
    }
}
