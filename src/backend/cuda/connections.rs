//! The connections of a device with those of other workers, by NCCL.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::context::Context;
use super::memory::{Address, Memory};
use super::nccl::{ID_BYTES, Nccl, NcclRank, NcclTransfer, UniqueId};
use crate::backend::Workers;
use crate::communicator::Communicator;
use crate::error::{Error, Result, try_vec, try_with_capacity};
use crate::sys::bytes::{as_bytes, as_bytes_mut};
use crate::sys::threads;
use crate::types::parallel::{Division, WorkerPlace};

/// A group of workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Among {
    /// All workers.
    All,
    /// The workers that divide the same layers.
    Stage,
}

/// The ranks of this worker.
struct Ranks {
    world: NcclRank,
    /// Its rank in the stage. None: the stage has all workers, or only this one.
    stage: Option<NcclRank>,
}

/// The connections of a worker, until they are aborted.
pub struct Connections(Mutex<Option<Ranks>>);

/// Bytes of the first message to each peer.
const FIRST_BYTES: usize = 16;

impl Connections {
    /// Connects all workers, which call this at the same time. NCCL has no limit for this, so another
    /// thread connects them. If it does not end in time, it is left behind.
    pub fn open(nccl: &'static Nccl, context: &Arc<Context>, workers: &Workers) -> Result<Connections> {
        let place = place(workers);
        compare_versions(nccl, workers)?;
        let world = (share_id(nccl, &*workers.world, workers.timeout)?, place.rank(), place.division.workers());
        let stage = match place.division {
            Division { tensor: 1, .. } | Division { pipeline: 1, .. } => None,
            Division { tensor, .. } => Some((share_id(nccl, &*workers.tensor, workers.timeout)?, place.tensor_rank, tensor)),
        };
        let scratch = Memory::new(context, (2 * FIRST_BYTES * place.division.workers()) as u64);
        let scratch = scratch.map_err(|e| super::errors::failed("allocate device memory", e))?;
        let (context, (sender, receiver)) = (context.clone(), channel());
        let connect = move || {
            let create = |(id, rank, size)| NcclRank::new(nccl, &context, id, rank, size);
            let ranks = create(world).and_then(|world| Ok(Ranks { world, stage: stage.map(create).transpose()? }));
            let ranks = ranks.and_then(|mut ranks| first_exchange(&mut ranks, place, scratch.address()).map(|()| ranks));
            // If the receiver has given up, this frees the ranks.
            let _ = sender.send(ranks.map(|ranks| (ranks, scratch)));
        };
        let thread = threads::spawn("pagedllm-connect".into(), connect);
        thread.map_err(|e| Error::internal(format!("cannot start the thread that connects the workers: {e}")))?;
        let (ranks, scratch) = receiver.recv_timeout(workers.timeout).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                Error::internal(format!("NCCL has not connected the workers for {:?} (worker_timeout_ms)", workers.timeout))
            }
            RecvTimeoutError::Disconnected => Error::internal("the thread that connects the workers has failed"),
        })??;
        let connections = Connections(Mutex::new(Some(ranks)));
        // The memory is freed when the first exchange is complete.
        drop(scratch);
        Ok(connections)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Ranks>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues an exchange.
    ///
    /// # Safety
    /// The addresses have their numbers of bytes on the device, until the work is complete.
    pub unsafe fn exchange(&self, among: Among, transfers: impl Iterator<Item = NcclTransfer>) -> Result<()> {
        let mut ranks = self.lock();
        let Some(Ranks { world, stage }) = &mut *ranks else {
            return Err(Error::internal("the connections with other workers were ended"));
        };
        let rank = if among == Among::Stage { stage.as_mut().unwrap_or(world) } else { world };
        // SAFETY: the caller guarantees the addresses.
        unsafe { rank.exchange(transfers) }
    }

    /// Returns the error of earlier work, if there is one.
    pub fn check(&self) -> Result<()> {
        let ranks = self.lock();
        let Some(Ranks { world, stage }) = &*ranks else { return Ok(()) };
        stage.iter().chain([world]).try_for_each(NcclRank::async_error)
    }

    /// Ends all exchanges, also unfinished ones.
    pub fn abort(&self) {
        let ranks = self.lock().take();
        drop(ranks);
    }
}

/// Returns the place of this worker.
pub fn place(Workers { world, tensor, .. }: &Workers) -> WorkerPlace {
    let tensor = tensor.size();
    Division { tensor, pipeline: world.size() / tensor }.place(world.rank())
}

/// Fails on all workers if their versions of NCCL differ.
fn compare_versions(nccl: &Nccl, Workers { world, timeout, .. }: &Workers) -> Result<()> {
    let (own, mut all) = (nccl.version()?, try_vec(world.size(), 0u32)?);
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

/// Returns the identity of a new communicator, which rank 0 of the group creates.
fn share_id(nccl: &Nccl, group: &dyn Communicator, timeout: Duration) -> Result<UniqueId> {
    let mut record = [0; 1 + ID_BYTES]; // whether there is an identity, and the identity
    let own = if group.rank() == 0 { Some(nccl.unique_id()) } else { None };
    if let Some(Ok(UniqueId(id))) = &own {
        record[0] = 1;
        record[1..].copy_from_slice(id);
    }
    // Also after an error, because the others wait.
    group.broadcast(&mut record, 0, Some(timeout))?;
    let [is_valid, id @ ..] = record;
    match own {
        Some(own) => own,
        None if is_valid == 0 => Err(Error::internal("the first rank cannot connect to the others by NCCL")),
        None => Ok(UniqueId(id)),
    }
}

/// Exchanges a message with each peer, for which NCCL allocates memory and connects to it.
fn first_exchange(ranks: &mut Ranks, place: WorkerPlace, scratch: Address) -> Result<()> {
    let exchange = |rank: &mut NcclRank, peers: Vec<usize>| {
        let transfers = peers.iter().enumerate().flat_map(|(index, &peer)| {
            let [from, to] = [2 * index, 2 * index + 1].map(|part| scratch.at((part * FIRST_BYTES) as u64));
            [NcclTransfer::Send { to: peer, from, bytes: FIRST_BYTES }, NcclTransfer::Receive { from: peer, to, bytes: FIRST_BYTES }]
        });
        // SAFETY: `scratch` has two messages for each worker. The caller frees it after the exchange.
        unsafe { rank.exchange(transfers) }
    };
    exchange(&mut ranks.world, world_peers(place)?)?;
    match &mut ranks.stage {
        Some(stage) => exchange(stage, others(place.tensor_rank, place.division.tensor)?),
        None => Ok(()),
    }
}

fn others(rank: usize, size: usize) -> Result<Vec<usize>> {
    let mut peers = try_with_capacity(size)?;
    peers.extend((0..size).filter(|&other| other != rank));
    Ok(peers)
}

/// Returns the workers with which a worker exchanges data among all: its neighbors in the pipeline, and
/// for logits rank 0 and the last stage. With one stage, all others.
fn world_peers(place: WorkerPlace) -> Result<Vec<usize>> {
    let (rank, Division { tensor, pipeline }) = (place.rank(), place.division);
    if pipeline == 1 {
        return others(rank, tensor);
    }
    let last_stage = (pipeline - 1) * tensor..pipeline * tensor;
    let is_peer = |other: &usize| {
        let neighbors = other.abs_diff(rank) == tensor;
        let of_logits = (rank == 0 && last_stage.contains(other)) || (*other == 0 && last_stage.contains(&rank));
        neighbors || of_logits
    };
    let mut peers = others(rank, place.division.workers())?;
    peers.retain(is_peer);
    Ok(peers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_connect_to_those_with_which_they_exchange_data() {
        let peers = |tensor, pipeline, rank| world_peers(Division { tensor, pipeline }.place(rank)).unwrap();
        assert_eq!(peers(4, 1, 1), [0, 2, 3]);
        assert_eq!(peers(1, 4, 0), [1, 3]);
        assert_eq!(peers(1, 4, 1), [0, 2]);
        assert_eq!(peers(1, 4, 3), [0, 2]);
        assert_eq!(peers(2, 3, 0), [2, 4, 5]);
        assert_eq!(peers(2, 3, 5), [0, 3]);
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
