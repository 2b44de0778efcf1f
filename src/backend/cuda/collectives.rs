//! The exchange of activations with other workers, from device to device. All work is queued on the
//! stream of the kernels.
//!
//! Sums are added in the order of the ranks by a kernel, so that their bits depend on neither the length
//! nor the algorithm that NCCL would choose. NCCL only copies.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::CudaBackend;
use super::buffer::Buf;
use super::connections::{Among, Connections, place};
use super::context::{Event, Stream};
use super::device::Device;
use super::function::{Shape, launch};
use super::memory::{Address, Memory};
use super::nccl::{Nccl, NcclTransfer};
use super::watchdog::Watchdog;
use crate::backend::{Collectives, ColumnPart, Strips, Workers};
use crate::error::{Error, Result};
use crate::types::parallel::{WorkerPlace, part_of};

/// Sums of at most this many bytes over all ranks are exchanged at once: each rank sends all of its
/// numbers. This takes one exchange instead of two. The limit is not measured.
const DIRECT_BYTES: usize = 512 << 10;
/// Exchanges after which the host waits for the device. If a worker does not respond, the queues of the
/// driver and of NCCL do not become full, so the host waits only where the watchdog ends its wait.
const WINDOW: usize = 16;
const NUMBER: usize = size_of::<f32>();

/// The connections with other workers, and memory for exchanges.
pub struct Exchange {
    connections: Arc<Connections>,
    place: WorkerPlace,
    state: Mutex<State>,
}

struct State {
    scratch: Option<Memory>,
    /// Exchanges in the current window.
    count: usize,
    /// Events after the last exchanges of the previous window and of the one before.
    windows: [Event; 2],
}

/// How a sum is exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SumBy {
    /// Each rank adds all numbers.
    All,
    /// Each rank adds one part of them, at most this many numbers.
    Parts(usize),
}

impl SumBy {
    fn new(len: usize, ranks: usize) -> SumBy {
        if len * ranks * NUMBER <= DIRECT_BYTES { SumBy::All } else { SumBy::Parts(len.div_ceil(ranks)) }
    }

    /// Returns the numbers that a rank receives from each other rank.
    fn pitch(self, len: usize) -> usize {
        match self {
            SumBy::All => len,
            SumBy::Parts(part) => part,
        }
    }
}

/// Returns the numbers that a worker receives at once for sums of up to `len` numbers.
fn scratch_len(len: usize, ranks: usize) -> usize {
    let direct = (DIRECT_BYTES / NUMBER).min(len * ranks);
    direct.max(len.next_multiple_of(ranks))
}

impl Exchange {
    /// Connects the workers, which call this at the same time.
    fn new(device: &Device, workers: &Workers) -> Result<Exchange> {
        let connections = Arc::new(Connections::open(Nccl::load()?, device.context(), workers)?);
        device.set_watchdog(Watchdog::start(connections.clone(), workers.timeout)?);
        device.wait()?;
        let windows = [device.event()?, device.event()?];
        let state = Mutex::new(State { scratch: None, count: 0, windows });
        Ok(Exchange { connections, place: place(workers), state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the address of the scratch memory. If it is too small, the device is lost.
    fn scratch(&self, device: &Device, len: usize) -> Option<Address> {
        let state = self.state();
        let bytes = state.scratch.as_ref().map_or(0, Memory::bytes);
        if bytes < (len * NUMBER) as u64 {
            device.lose(Error::internal(format!("no memory for an exchange of {len} numbers (it has {bytes} bytes)")));
        }
        state.scratch.as_ref().map(Memory::address).filter(|_| device.is_sound())
    }

    /// Queues an exchange. If an earlier operation has failed, or this one does, the device is lost,
    /// because the other workers wait for this exchange.
    ///
    /// # Safety
    /// The addresses have their numbers of bytes on the device.
    unsafe fn run(&self, device: &Device, among: Among, transfers: impl Iterator<Item = NcclTransfer>) {
        if !device.takes_ops() {
            return device.lose(Error::internal("an exchange with other workers was skipped"));
        }
        // SAFETY: the caller guarantees the addresses.
        if let Err(error) = unsafe { self.connections.exchange(among, transfers) } {
            return device.lose(error);
        }
        let mut state = self.state();
        state.count += 1;
        if state.count == WINDOW {
            state.count = 0;
            state.windows.swap(0, 1);
            device.wait_for_pending(&state.windows[0]);
            device.record(&state.windows[0], Stream::Compute);
        }
    }

    fn all_reduce(&self, device: &Device, len: usize, x: Address) {
        let (own, ranks) = (self.place.tensor_rank, self.place.division.tensor);
        let by = SumBy::new(len, ranks);
        let pitch = by.pitch(len);
        if ranks == 1 || len == 0 {
            return;
        }
        let Some(scratch) = self.scratch(device, pitch * ranks) else { return };
        let part = |rank: usize| match by {
            SumBy::All => 0..len,
            SumBy::Parts(_) => part_of(len, rank, ranks),
        };
        let (peers, owned) = ((0..ranks).filter(|&peer| peer != own), part(own));
        let numbers = |start: Address, first: usize| start.at((first * NUMBER) as u64);
        let gather = peers.clone().flat_map(|peer| {
            let theirs = part(peer);
            let send = NcclTransfer::Send { to: peer, from: numbers(x, theirs.start), bytes: theirs.len() * NUMBER };
            [send, NcclTransfer::Receive { from: peer, to: numbers(scratch, peer * pitch), bytes: owned.len() * NUMBER }]
        });
        // SAFETY: `x` has `len` numbers, and the scratch memory a part of each rank.
        unsafe { self.run(device, Among::Stage, gather.filter(NcclTransfer::has_bytes)) };
        sum(device, numbers(x, owned.start), owned.len(), scratch, (pitch, ranks, own));
        if by == SumBy::All {
            return;
        }
        let spread = peers.flat_map(|peer| {
            let theirs = part(peer);
            let send = NcclTransfer::Send { to: peer, from: numbers(x, owned.start), bytes: owned.len() * NUMBER };
            [send, NcclTransfer::Receive { from: peer, to: numbers(x, theirs.start), bytes: theirs.len() * NUMBER }]
        });
        // SAFETY: the parts are disjoint parts of the `len` numbers of `x`.
        unsafe { self.run(device, Among::Stage, spread.filter(NcclTransfer::has_bytes)) };
    }

    fn all_gather(&self, device: &Device, len: usize, x: Address, out: Address) {
        let (own, ranks, bytes) = (self.place.tensor_rank, self.place.division.tensor, len * NUMBER);
        let place = |rank: usize| out.at((rank * bytes) as u64);
        // SAFETY: `x` has `len` numbers, and `out` as many for each rank.
        unsafe { device.copy(place(own), x, bytes) };
        let transfers = (0..ranks).filter(|&peer| peer != own).flat_map(|peer| {
            [NcclTransfer::Send { to: peer, from: x, bytes }, NcclTransfer::Receive { from: peer, to: place(peer), bytes }]
        });
        // SAFETY: as above.
        unsafe { self.run(device, Among::Stage, transfers.filter(NcclTransfer::has_bytes)) };
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
        unsafe { self.run(device, Among::All, transfers.filter(NcclTransfer::has_bytes)) };
    }

    /// Returns whether this worker has rank 0.
    pub fn is_first(&self) -> bool {
        self.place.rank() == 0
    }
}

/// x = the sum over all ranks. The numbers of the others are in `received`, as `[ranks, pitch]`.
fn sum(device: &Device, x: Address, len: usize, received: Address, (pitch, ranks, own): (usize, usize, usize)) {
    let shape = Shape::for_numbers(1, len);
    let shape = Shape::new((shape.grid.1.min(32 * device.multiprocessors), 1, 1), shape.threads);
    let (len, pitch, ranks, own) = (len as u64, pitch as u64, ranks as u32, own as u32);
    launch!(device, device.kernels.elementwise.sum_ranks, shape, x, received, len, pitch, ranks, own);
}

impl Collectives for CudaBackend {
    fn check_collectives(&self) -> Result<()> {
        Nccl::load().map(|_| ())
    }

    fn join(&mut self, workers: Workers) -> Result<()> {
        self.exchange = Some(Exchange::new(&self.device, &workers)?);
        Ok(())
    }

    fn reserve_exchange(&self, len: usize) -> Result<()> {
        let Some(exchange) = &self.exchange else { return Ok(()) };
        let bytes = self.reserved_exchange_bytes(len, exchange.place.division.tensor);
        self.device.grow(&mut exchange.state().scratch, bytes).map(|_| ())
    }

    fn reserved_exchange_bytes(&self, len: usize, ranks: usize) -> u64 {
        (scratch_len(len, ranks) * NUMBER) as u64
    }

    fn all_reduce(&self, len: usize, x: &mut Buf) {
        if let Some(exchange) = &self.exchange {
            exchange.all_reduce(&self.device, len, x.address());
        }
    }

    fn all_gather(&self, len: usize, x: &Buf, out: &mut Buf) {
        if let Some(exchange) = &self.exchange {
            exchange.all_gather(&self.device, len, x.address(), out.address());
        }
    }

    fn send(&self, len: usize, x: &Buf, to: usize) {
        let transfer = NcclTransfer::Send { to, from: x.address(), bytes: len * NUMBER };
        if let Some(exchange) = self.exchange.as_ref().filter(|_| len > 0) {
            // SAFETY: `x` has `len` numbers.
            unsafe { exchange.run(&self.device, Among::All, [transfer].into_iter()) };
        }
    }

    fn receive(&self, len: usize, x: &mut Buf, from: usize) {
        let transfer = NcclTransfer::Receive { from, to: x.address(), bytes: len * NUMBER };
        if let Some(exchange) = self.exchange.as_ref().filter(|_| len > 0) {
            // SAFETY: `x` has `len` numbers.
            unsafe { exchange.run(&self.device, Among::All, [transfer].into_iter()) };
        }
    }

    fn receive_columns(&self, rows: usize, width: usize, parts: &[ColumnPart], x: &mut Buf) {
        let Some(exchange) = &self.exchange else { return };
        let rank = exchange.place.rank();
        // The own part first, because it is where the columns of others go.
        let (own, others) = (parts.iter().filter(|part| part.rank == rank), parts.iter().filter(|part| part.rank != rank));
        for part in own.chain(others).filter(|part| part.count > 0) {
            let len = rows * part.count;
            let Some(scratch) = exchange.scratch(&self.device, len) else { return };
            let bytes = len * NUMBER;
            if part.rank == rank {
                // SAFETY: `x` has `[rows, width]` numbers, and the size of the scratch memory was checked.
                unsafe { self.device.copy(scratch, x.address(), bytes) };
            } else {
                let transfer = NcclTransfer::Receive { from: part.rank, to: scratch, bytes };
                // SAFETY: the size of the scratch memory was checked.
                unsafe { exchange.run(&self.device, Among::All, [transfer].into_iter()) };
            }
            let strips = Strips { first: part.first, count: 1, dim: part.count, pitch: part.count, stride: width };
            self.copy_strips(self.device.kernels.elementwise.join_strips, rows, strips, scratch, x.address());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_memory_holds_every_sum() {
        for ranks in [2, 3, 8] {
            for max in [1, 7, 1 << 10, DIRECT_BYTES / NUMBER, 1 << 20] {
                for len in [1, max / 3, max / 2, max].into_iter().filter(|&len| len > 0) {
                    let needed = SumBy::new(len, ranks).pitch(len) * ranks;
                    assert!(needed <= scratch_len(max, ranks), "{len} of {max} numbers, {ranks} ranks");
                }
            }
        }
    }
}
