//! The exchange of activations with other workers, from device to device. All work is queued on the
//! stream of the kernels.
//!
//! Sums are added in the order of the ranks by a kernel, so that their bits depend on neither the
//! length nor the algorithm that NCCL would choose. NCCL only copies.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::buffer::Buf;
use super::connections::{Connections, place};
use super::device::Device;
use super::function::{Shape, launch};
use super::memory::{Address, Memory};
use super::nccl::NcclTransfer;
use super::watchdog::Watchdog;
use super::{CudaBackend, backlog};
use crate::backend::{Collectives, ColumnPart, Strips, Workers};
use crate::error::{Error, Result};
use crate::types::parallel::WorkerPlace;

/// Sums of at most this many bytes over all ranks are exchanged at once: each rank sends all of its
/// numbers. This takes one exchange instead of two. The limit is not measured.
const DIRECT_BYTES: usize = 512 << 10;
const NUMBER: usize = size_of::<f32>();
/// Numbers of 16 bytes.
const ALIGNED: usize = 4;

/// The connections with other workers, and memory for exchanges.
pub struct Exchange {
    connections: Arc<Connections>,
    place: WorkerPlace,
    scratch: Mutex<Option<Memory>>,
}

/// How a sum is exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SumBy {
    /// Each rank adds all numbers.
    All,
    /// Each rank adds one part of them.
    Parts,
}

/// The division of a sum among ranks. Parts are multiples of 16 bytes, except for the end of the
/// sum, because NCCL copies aligned bytes faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum {
    by: SumBy,
    len: usize,
    /// Numbers of a part, and of the memory for what a rank receives from each other one.
    pitch: usize,
}

impl Sum {
    fn new(len: usize, ranks: usize) -> Sum {
        let (by, part) = if len <= direct_len(ranks) { (SumBy::All, len) } else { (SumBy::Parts, len.div_ceil(ranks)) };
        Sum { by, len, pitch: part.next_multiple_of(ALIGNED) }
    }

    /// Returns the numbers that a rank adds.
    fn part(&self, rank: usize) -> Range<usize> {
        match self.by {
            SumBy::All => 0..self.len,
            SumBy::Parts => (rank * self.pitch).min(self.len)..((rank + 1) * self.pitch).min(self.len),
        }
    }
}

/// Returns the length of the longest sum that is exchanged at once.
fn direct_len(ranks: usize) -> usize {
    DIRECT_BYTES / NUMBER / ranks
}

/// Returns the numbers that a worker receives at once for sums of up to `len` numbers.
fn scratch_len(len: usize, ranks: usize) -> usize {
    let [longest, direct] = [len, len.min(direct_len(ranks))].map(|len| Sum::new(len, ranks).pitch * ranks);
    longest.max(direct)
}

impl Exchange {
    /// Connects the workers, which call this at the same time.
    fn new(device: &Device, workers: &Workers) -> Result<Exchange> {
        // The memory of the first exchange is dropped after the connections, so it is not freed while in
        // use.
        let (connections, scratch) = Connections::open(device.context(), workers)?;
        let scratch = Mutex::new(Some(scratch));
        let connections = Arc::new(connections);
        device.set_watchdog(Watchdog::start(connections.clone(), workers)?)?;
        device.wait()?;
        Ok(Exchange { connections, place: place(workers), scratch })
    }

    fn memory(&self) -> MutexGuard<'_, Option<Memory>> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the address of the scratch memory. If it is too small, the device is lost.
    fn scratch(&self, device: &Device, len: usize) -> Option<Address> {
        let memory = self.memory();
        let (bytes, address) = memory.as_ref().map(|memory| (memory.bytes(), memory.address())).unzip();
        if bytes.unwrap_or(0) < (len * NUMBER) as u64 {
            self.fail(device, Error::internal(format!("no memory for an exchange of {len} numbers (it has {bytes:?} bytes)")));
            return None;
        }
        address
    }

    /// Marks the device as lost, because other workers depend on the failed exchange, and ends
    /// those that are unfinished.
    fn fail(&self, device: &Device, error: Error) {
        device.lose(error);
        self.connections.abort();
    }

    /// Queues an exchange. If an earlier operation has failed, or this one does, the device is
    /// lost.
    ///
    /// # Safety
    /// The addresses have their numbers of bytes on the device.
    unsafe fn run(&self, device: &Device, transfers: impl Iterator<Item = NcclTransfer>) {
        let queued = match device.takes_ops() {
            // SAFETY: the caller guarantees the addresses.
            true => unsafe { self.connections.exchange(transfers) },
            false => Err(Error::internal("an exchange with other workers was skipped")),
        };
        match queued {
            Ok(()) => device.count_launches(backlog::OF_EXCHANGE),
            Err(error) => self.fail(device, error),
        }
    }

    fn all_reduce(&self, device: &Device, len: usize, x: Address) {
        let (own, ranks) = (self.place.tensor_rank, self.place.division.tensor);
        if ranks == 1 || len == 0 {
            return;
        }
        let sum = Sum::new(len, ranks);
        let Some(scratch) = self.scratch(device, sum.pitch * ranks) else { return };
        let (peers, owned) = ((0..ranks).filter(|&peer| peer != own), sum.part(own));
        let numbers = |start: Address, first: usize| start.at((first * NUMBER) as u64);
        let gather = peers.clone().flat_map(|peer| {
            let theirs = sum.part(peer);
            let (rank, bytes) = (self.place.rank_in_stage(peer), owned.len() * NUMBER);
            let send = NcclTransfer::Send { to: rank, from: numbers(x, theirs.start), bytes: theirs.len() * NUMBER };
            [send, NcclTransfer::Receive { from: rank, to: numbers(scratch, peer * sum.pitch), bytes }]
        });
        // SAFETY: `x` has `len` numbers, and the scratch memory a part of each rank.
        unsafe { self.run(device, gather.filter(NcclTransfer::has_bytes)) };
        self.add(device, numbers(x, owned.start), owned.len(), scratch, sum.pitch);
        if sum.by == SumBy::All {
            return;
        }
        let spread = peers.flat_map(|peer| {
            let theirs = sum.part(peer);
            let (rank, bytes) = (self.place.rank_in_stage(peer), owned.len() * NUMBER);
            let receive = NcclTransfer::Receive { from: rank, to: numbers(x, theirs.start), bytes: theirs.len() * NUMBER };
            [NcclTransfer::Send { to: rank, from: numbers(x, owned.start), bytes }, receive]
        });
        // SAFETY: the parts are disjoint parts of the `len` numbers of `x`.
        unsafe { self.run(device, spread.filter(NcclTransfer::has_bytes)) };
    }

    /// x = the sum over all ranks. The numbers of the others are in `received`, as `[ranks,
    /// pitch]`.
    fn add(&self, device: &Device, x: Address, len: usize, received: Address, pitch: usize) {
        let shape = Shape::for_numbers(1, len);
        let shape = Shape::new((shape.grid.1.min(32 * device.multiprocessors), 1, 1), shape.threads);
        let (len, pitch) = (len as u64, pitch as u64);
        let (ranks, own) = (self.place.division.tensor as u32, self.place.tensor_rank as u32);
        launch!(device, device.kernels.elementwise.sum_ranks, shape, x, received, len, pitch, ranks, own);
    }

    fn all_gather(&self, device: &Device, len: usize, x: Address, out: Address) {
        let (own, ranks, bytes) = (self.place.tensor_rank, self.place.division.tensor, len * NUMBER);
        let place = |rank: usize| out.at((rank * bytes) as u64);
        // SAFETY: `x` has `len` numbers, and `out` as many for each rank.
        unsafe { device.copy(place(own), x, bytes) };
        let transfers = (0..ranks).filter(|&peer| peer != own).flat_map(|peer| {
            let rank = self.place.rank_in_stage(peer);
            [NcclTransfer::Send { to: rank, from: x, bytes }, NcclTransfer::Receive { from: rank, to: place(peer), bytes }]
        });
        // SAFETY: as above.
        unsafe { self.run(device, transfers.filter(NcclTransfer::has_bytes)) };
    }

    /// Copies bytes of rank 0 to all workers.
    pub fn broadcast(&self, device: &Device, bytes: usize, x: Address) {
        let (own, ranks) = (self.place.rank(), self.place.division.workers());
        let peers = if own == 0 { 1..ranks } else { 0..1 };
        let transfers = peers.map(|peer| match own {
            0 => NcclTransfer::Send { to: peer, from: x, bytes },
            _ => NcclTransfer::Receive { from: peer, to: x, bytes },
        });
        // SAFETY: the caller of this module gives a buffer of this many bytes.
        unsafe { self.run(device, transfers.filter(NcclTransfer::has_bytes)) };
    }

    /// Returns whether this worker has rank 0.
    pub fn is_first(&self) -> bool {
        self.place.rank() == 0
    }
}

impl CudaBackend {
    /// Copies `len` numbers by a message of this rank to itself. Only benchmarks and tests call it.
    pub fn exchange_with_itself(&self, len: usize, x: &Buf, out: &mut Buf) {
        let Some(exchange) = &self.exchange else { return };
        let (rank, bytes) = (exchange.place.rank(), len * NUMBER);
        let send = NcclTransfer::Send { to: rank, from: self.input(x), bytes };
        let receive = NcclTransfer::Receive { from: rank, to: out.output(), bytes };
        // SAFETY: both buffers have `len` numbers.
        unsafe { exchange.run(&self.device, [send, receive].into_iter()) };
    }
}

impl Collectives for CudaBackend {
    fn join(&mut self, workers: Workers) -> Result<()> {
        self.exchange = Some(Exchange::new(&self.device, &workers)?);
        Ok(())
    }

    fn reserve_exchange(&self, len: usize) -> Result<()> {
        let Some(exchange) = &self.exchange else { return Ok(()) };
        let bytes = self.reserved_exchange_bytes(len, exchange.place.division.tensor);
        self.device.grow(&mut exchange.memory(), bytes).map(|_| ())
    }

    fn reserved_exchange_bytes(&self, len: usize, ranks: usize) -> u64 {
        (scratch_len(len, ranks) * NUMBER) as u64
    }

    fn all_reduce(&self, len: usize, x: &mut Buf) {
        if let Some(exchange) = &self.exchange {
            exchange.all_reduce(&self.device, len, self.input(x));
        }
    }

    fn all_gather(&self, len: usize, x: &Buf, out: &mut Buf) {
        if let Some(exchange) = &self.exchange {
            exchange.all_gather(&self.device, len, self.input(x), out.output());
        }
    }

    fn send(&self, len: usize, x: &Buf, to: usize) {
        let transfer = NcclTransfer::Send { to, from: self.input(x), bytes: len * NUMBER };
        if let Some(exchange) = self.exchange.as_ref().filter(|_| len > 0) {
            // SAFETY: `x` has `len` numbers.
            unsafe { exchange.run(&self.device, [transfer].into_iter()) };
        }
    }

    fn receive(&self, len: usize, x: &mut Buf, from: usize) {
        let transfer = NcclTransfer::Receive { from, to: x.output(), bytes: len * NUMBER };
        if let Some(exchange) = self.exchange.as_ref().filter(|_| len > 0) {
            // SAFETY: `x` has `len` numbers.
            unsafe { exchange.run(&self.device, [transfer].into_iter()) };
        }
    }

    fn receive_columns(&self, rows: usize, width: usize, parts: &[ColumnPart], x: &mut Buf) {
        let Some(exchange) = &self.exchange else { return };
        let (rank, columns) = (exchange.place.rank(), x.output());
        // The own part first, because it is where the columns of others go.
        let (own, others) = (parts.iter().filter(|part| part.rank == rank), parts.iter().filter(|part| part.rank != rank));
        for part in own.chain(others).filter(|part| part.count > 0) {
            let len = rows * part.count;
            let Some(scratch) = exchange.scratch(&self.device, len) else { return };
            let bytes = len * NUMBER;
            if part.rank == rank {
                // SAFETY: `x` has `[rows, width]` numbers, and the size of the scratch memory was checked.
                unsafe { self.device.copy(scratch, columns, bytes) };
            } else {
                let transfer = NcclTransfer::Receive { from: part.rank, to: scratch, bytes };
                // SAFETY: the size of the scratch memory was checked.
                unsafe { exchange.run(&self.device, [transfer].into_iter()) };
            }
            let strips = Strips { first: part.first, count: 1, dim: part.count, pitch: part.count, stride: width };
            self.copy_strips(self.device.kernels.elementwise.join_strips, rows, strips, scratch, columns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_sums_are_complete_and_aligned() {
        for (len, ranks) in [(200_000, 2), (200_001, 3), (131_075, 5), (131_072, 6), (131_077, 64)] {
            let sum = Sum::new(len, ranks);
            let parts: Vec<_> = (0..ranks).map(|rank| sum.part(rank)).collect();
            assert_eq!((sum.by, parts[0].start, parts[ranks - 1].end), (SumBy::Parts, 0, len));
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start), "{parts:?}");
            assert!(parts.iter().all(|part| part.start % ALIGNED == 0 || part.is_empty()), "{parts:?}");
        }
        assert_eq!(Sum::new(7, 3), Sum { by: SumBy::All, len: 7, pitch: 8 });
    }

    #[test]
    fn scratch_memory_holds_every_sum() {
        for ranks in [2, 3, 8] {
            for max in [1, 7, 1 << 10, DIRECT_BYTES / NUMBER, 1 << 20] {
                for len in [1, max / 3, max / 2, max].into_iter().filter(|&len| len > 0) {
                    let needed = Sum::new(len, ranks).pitch * ranks;
                    assert!(needed <= scratch_len(max, ranks), "{len} of {max} numbers, {ranks} ranks");
                }
            }
        }
    }
}
