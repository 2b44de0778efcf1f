//! The exchange of activations with other workers, through the memory of the host.

use std::sync::{Mutex, PoisonError};

use crate::backend::{ColumnPart, Workers};
use crate::communicator::OrderedSum;
use crate::error::{Error, Result, try_vec};
use crate::sys::bytes::{as_bytes, as_bytes_mut};

/// The other workers, and the memory for exchanges with them.
#[derive(Default)]
pub struct Exchange {
    workers: Option<Workers>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sums: OrderedSum,
    received: Vec<f32>,
    /// The first error. All further exchanges are skipped.
    failure: Option<Error>,
}

impl Exchange {
    pub fn new(workers: Workers) -> Exchange {
        Exchange { workers: Some(workers), state: Mutex::default() }
    }

    /// Makes an exchange, unless an earlier one has failed or there are no other workers.
    fn run(&self, exchange: impl FnOnce(&Workers, &mut State) -> Result<()>) {
        let Some(workers) = &self.workers else { return };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.failure.is_none() {
            state.failure = exchange(workers, &mut state).err();
        }
    }

    /// Returns the error of a failed exchange.
    pub fn check(&self) -> Result<()> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failure.clone().map_or(Ok(()), Err)
    }

    /// Allocates memory for exchanges of up to `len` numbers at once, so that no step allocates.
    pub fn reserve(&self, len: usize) -> Result<()> {
        let Some(workers) = &self.workers else { return Ok(()) };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.received = try_vec(len, 0.0)?;
        state.sums.reserve(len, workers.tensor.size())
    }

    /// Returns the bytes that `reserve` allocates if `ranks` workers divide each layer.
    pub fn reserved_bytes(len: usize, ranks: usize) -> u64 {
        (len * size_of::<f32>()) as u64 + OrderedSum::bytes(len, ranks)
    }

    pub fn all_reduce(&self, x: &mut [f32]) {
        self.run(|workers, state| workers.tensor.all_reduce(x, &mut state.sums, Some(workers.timeout)));
    }

    pub fn all_gather(&self, x: &[f32], out: &mut [f32]) {
        self.run(|Workers { tensor, timeout, .. }, _| {
            let out = &mut out[..tensor.size() * x.len()];
            tensor.all_gather(as_bytes(x), as_bytes_mut(out), Some(*timeout))
        });
    }

    pub fn send(&self, x: &[f32], to: usize) {
        self.run(|workers, _| workers.world.send(as_bytes(x), to, Some(workers.timeout)));
    }

    pub fn receive(&self, x: &mut [f32], from: usize) {
        self.run(|workers, _| workers.world.receive(as_bytes_mut(x), from, Some(workers.timeout)));
    }

    pub fn receive_columns(&self, rows: usize, width: usize, parts: &[ColumnPart], x: &mut [f32]) {
        self.run(|Workers { world, timeout, .. }, State { received, .. }| {
            if let Some(own) = parts.iter().find(|part| part.rank == world.rank()) {
                spread(rows, width, own, x);
            }
            for part in parts.iter().filter(|part| part.rank != world.rank() && part.count > 0) {
                let len = rows * part.count;
                world.receive(as_bytes_mut(&mut received[..len]), part.rank, Some(*timeout))?;
                for (row, columns) in received[..len].chunks_exact(part.count).enumerate() {
                    x[row * width + part.first..][..part.count].copy_from_slice(columns);
                }
            }
            Ok(())
        });
    }
}

/// Moves the rows of `[rows, part]` to their places in `[rows, width]`, the last one first, so that
/// no row is overwritten before it has moved.
fn spread(rows: usize, width: usize, part: &ColumnPart, x: &mut [f32]) {
    for row in (0..rows).rev() {
        x.copy_within(row * part.count..(row + 1) * part.count, row * width + part.first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_this_worker_move_to_their_places() {
        for first in [0, 1, 3] {
            let mut x = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
            spread(3, 5, &ColumnPart { rank: 0, first, count: 2 }, &mut x);
            for row in 0..3 {
                assert_eq!(x[row * 5 + first..][..2], [2.0 * row as f32 + 1.0, 2.0 * row as f32 + 2.0], "{first}");
            }
        }
    }
}
