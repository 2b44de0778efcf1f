//! The connections of a device with those of other workers, by NCCL.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::context::Context;
use super::errors::failed;
use super::memory::{Address, Memory};
use super::nccl::{ID_BYTES, Nccl, NcclRank, NcclTransfer, UniqueId};
use crate::backend::Workers;
use crate::error::{Error, Result, try_vec, try_with_capacity};
use crate::sys::bytes::{as_bytes, as_bytes_mut};
use crate::sys::threads;
use crate::types::parallel::{Division, WorkerPlace};

/// The connections of a worker, until they are aborted. Every pair of workers that exchange data
/// has one.
pub struct Connections(Mutex<Option<NcclRank>>);

/// Bytes of the first message to each peer.
const FIRST_BYTES: usize = 16;
/// Minimum limit of the time to connect, which takes seconds on some machines.
const MIN_CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time between two looks for ended workers.
const POLL: Duration = Duration::from_millis(50);

/// What a worker needs to connect.
struct Prepared {
    nccl: &'static Nccl,
    version: u32,
    /// The identity of the communicator, on rank 0.
    id: UniqueId,
    /// Memory for the first messages.
    scratch: Memory,
}

impl Connections {
    /// Connects all workers, which call this at the same time. The returned memory is in use until
    /// the first exchange, which is queued, is complete.
    pub fn open(context: &Arc<Context>, workers: &Workers) -> Result<(Connections, Memory)> {
        let (place, limit) = (place(workers), workers.timeout.max(MIN_CONNECT_TIMEOUT));
        // A worker that fails alone after this ends, and so do the others.
        let Prepared { nccl, version, mut id, scratch } = workers.agree(prepare(context, workers, limit))?;
        compare_versions(version, workers)?;
        workers.world.broadcast(&mut id.0, 0, Some(workers.timeout))?;
        let (context, timeout) = (context.clone(), workers.timeout);
        let connect = move || {
            let ranks = [place.rank(), place.division.workers()];
            let mut rank = NcclRank::new(nccl, &context, id, ranks, timeout)?;
            first_exchange(&mut rank, place, scratch.address())?;
            Ok((rank, scratch))
        };
        let (rank, scratch) = wait_for(&threads::start("pagedllm-connect", connect)?, workers, limit)?;
        Ok((Connections(Mutex::new(Some(rank))), scratch))
    }

    fn lock(&self) -> MutexGuard<'_, Option<NcclRank>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues an exchange. Peers are ranks among all workers.
    ///
    /// # Safety
    /// The addresses have their numbers of bytes on the device, until the work is complete.
    pub unsafe fn exchange(&self, transfers: impl Iterator<Item = NcclTransfer>) -> Result<()> {
        match &mut *self.lock() {
            // SAFETY: the caller guarantees the addresses.
            Some(rank) => unsafe { rank.exchange(transfers) },
            None => Err(Error::internal("the connections with other workers were ended")),
        }
    }

    /// Returns the error of earlier work, if there is one.
    pub fn check(&self) -> Result<()> {
        self.lock().as_ref().map_or(Ok(()), NcclRank::async_error)
    }

    /// Ends all exchanges, also unfinished ones.
    pub fn abort(&self) {
        let rank = self.lock().take();
        drop(rank);
    }
}

/// Returns the place of this worker.
pub fn place(Workers { world, tensor, .. }: &Workers) -> WorkerPlace {
    let tensor = tensor.size();
    Division { tensor, pipeline: world.size() / tensor }.place(world.rank())
}

/// Makes everything that can fail on one worker alone.
fn prepare(context: &Arc<Context>, Workers { world, .. }: &Workers, limit: Duration) -> Result<Prepared> {
    let nccl = Nccl::load()?;
    let scratch = Memory::new(context, (2 * FIRST_BYTES * world.size()) as u64);
    let scratch = scratch.map_err(|e| failed("allocate device memory", e))?;
    let id = match world.rank() {
        // On a thread of the library, because a thread that NCCL starts inherits its signal mask.
        0 => {
            let created = threads::start("pagedllm-identity", || nccl.unique_id())?.recv_timeout(limit);
            created.map_err(|_| Error::internal(format!("NCCL has not created an identity within {limit:?}")))??
        }
        _ => UniqueId([0; ID_BYTES]),
    };
    Ok(Prepared { nccl, version: nccl.version()?, id, scratch })
}

/// Waits for the thread that connects this worker, since NCCL has no limit of its own.
fn wait_for<T>(connecting: &Receiver<Result<T>>, workers: &Workers, limit: Duration) -> Result<T> {
    let start = Instant::now();
    loop {
        match connecting.recv_timeout(POLL) {
            Ok(connected) => return connected,
            Err(RecvTimeoutError::Disconnected) => return Err(Error::internal("the thread that connects the workers has failed")),
            Err(RecvTimeoutError::Timeout) if start.elapsed() < limit => workers.world.check()?,
            Err(RecvTimeoutError::Timeout) => {
                let limits = "worker_timeout_ms, and at least 60 s";
                return Err(Error::internal(format!("NCCL has not connected the workers within {limit:?} ({limits})")));
            }
        }
    }
}

/// Fails on all workers if their versions of NCCL differ.
fn compare_versions(own: u32, Workers { world, timeout, .. }: &Workers) -> Result<()> {
    let mut all = try_vec(world.size(), 0u32)?;
    world.all_gather(as_bytes(&[own]), as_bytes_mut(&mut all), Some(*timeout))?;
    match all.iter().position(|&version| version != all[0]) {
        None => Ok(()),
        Some(rank) => Err(Error::unsupported(format!(
            "rank 0 has NCCL {}, rank {rank} has NCCL {}; install the same version for all ranks",
            version_name(all[0]),
            version_name(all[rank])
        ))),
    }
}

/// Returns a name such as "2.27.3".
fn version_name(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// Exchanges a message with each peer, for which NCCL allocates memory and connects to it.
fn first_exchange(rank: &mut NcclRank, place: WorkerPlace, scratch: Address) -> Result<()> {
    let peers = peers(place)?;
    let transfers = peers.iter().enumerate().flat_map(|(index, &peer)| {
        let [from, to] = [2 * index, 2 * index + 1].map(|part| scratch.at((part * FIRST_BYTES) as u64));
        [NcclTransfer::Send { to: peer, from, bytes: FIRST_BYTES }, NcclTransfer::Receive { from: peer, to, bytes: FIRST_BYTES }]
    });
    // SAFETY: `scratch` has two messages for each worker. The caller keeps it until the exchange is
    // complete.
    unsafe { rank.exchange(transfers) }
}

/// Returns the workers with which a worker exchanges data: those of its stage, its neighbors in the
/// pipeline, and for logits rank 0 and the last stage.
fn peers(place: WorkerPlace) -> Result<Vec<usize>> {
    let (rank, Division { tensor, pipeline }) = (place.rank(), place.division);
    let is_peer = |&other: &usize| {
        let other_place = place.division.place(other);
        let is_neighbor = other.abs_diff(rank) == tensor;
        let of_logits = (rank == 0 && other_place.is_last_stage()) || (other == 0 && place.is_last_stage());
        other != rank && (other_place.stage == place.stage || is_neighbor || of_logits)
    };
    let mut peers = try_with_capacity(tensor * pipeline)?;
    peers.extend((0..tensor * pipeline).filter(is_peer));
    Ok(peers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_connect_to_those_with_which_they_exchange_data() {
        let peers = |tensor, pipeline, rank| super::peers(Division { tensor, pipeline }.place(rank)).unwrap();
        assert_eq!(peers(4, 1, 1), [0, 2, 3]);
        assert_eq!(peers(1, 4, 0), [1, 3]);
        assert_eq!(peers(1, 4, 1), [0, 2]);
        assert_eq!(peers(1, 4, 3), [0, 2]);
        assert_eq!(peers(2, 3, 0), [1, 2, 4, 5]);
        assert_eq!(peers(2, 3, 2), [0, 3, 4]);
        assert_eq!(peers(2, 3, 5), [0, 3, 4]);
        for (tensor, pipeline) in [(1, 2), (2, 2), (3, 3), (1, 5)] {
            for rank in 0..tensor * pipeline {
                assert!(peers(tensor, pipeline, rank).into_iter().all(|peer| peers(tensor, pipeline, peer).contains(&rank)));
            }
        }
    }

    #[test]
    fn versions_are_named_as_nvidia_does() {
        assert_eq!(version_name(22703), "2.27.3");
        assert_eq!(version_name(23004), "2.30.4");
    }
}
