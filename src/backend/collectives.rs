//! The exchange of activations between the workers of an engine.

use std::sync::Arc;
use std::time::Duration;

use super::BackendTypes;
use crate::communicator::Communicator;
use crate::error::Result;

/// The groups of workers to which a device belongs.
#[derive(Clone)]
pub struct Workers {
    /// The workers that divide the same layers. Dropped before `world`, of which they may be a part.
    pub tensor: Arc<dyn Communicator>,
    /// All workers.
    pub world: Arc<dyn Communicator>,
    /// Limit of each wait for other workers.
    pub timeout: Duration,
}

/// Columns of a matrix that one worker computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnPart {
    /// Rank among all workers.
    pub rank: usize,
    /// Index of the first column.
    pub first: usize,
    /// Number of columns.
    pub count: usize,
}

/// Exchanges buffers with other workers, which call the same functions in the same order. If a
/// worker fails or does not respond in time, the device is lost: all further exchanges are skipped,
/// and the next function that returns a `Result` reports the error.
pub trait Collectives: BackendTypes {
    /// Checks that the device can exchange buffers, before all workers `join` at the same time.
    ///
    /// Errors: `Unsupported` if a library is missing.
    fn check_collectives(&self) -> Result<()> {
        Ok(())
    }
    /// Makes this device one of several workers.
    fn join(&mut self, workers: Workers) -> Result<()>;
    /// Allocates memory for exchanges of up to `_len` numbers at once.
    fn reserve_exchange(&self, _len: usize) -> Result<()> {
        Ok(())
    }
    /// Returns the bytes that `reserve_exchange` allocates if `_ranks` workers divide each layer.
    fn reserved_exchange_bytes(&self, _len: usize, _ranks: usize) -> u64 {
        0
    }
    /// `x` becomes the sum over the workers of the same layers, added in the order of their ranks;
    /// over `len` numbers.
    fn all_reduce(&self, _len: usize, _x: &mut Self::Buf) {}
    /// `out` becomes `x` of all workers of the same layers, as `[workers, len]`.
    fn all_gather(&self, _len: usize, _x: &Self::Buf, _out: &mut Self::Buf) {}
    /// Sends `len` numbers to the worker with rank `to` among all.
    fn send(&self, _len: usize, _x: &Self::Buf, _to: usize) {}
    /// Receives `len` numbers from the worker with rank `from` among all.
    fn receive(&self, _len: usize, _x: &mut Self::Buf, _from: usize) {}
    /// Completes `x`, `[rows, width]`, from the columns of several workers. If this worker has one
    /// of the parts, `x` holds it, as `[rows, count]`. The others come from their workers.
    fn receive_columns(&self, _rows: usize, _width: usize, _parts: &[ColumnPart], _x: &mut Self::Buf) {}
}
