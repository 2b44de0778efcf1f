//! The exchange of activations between the workers of an engine.

use std::sync::Arc;
use std::time::Duration;

use super::BackendTypes;
use crate::communicator::Communicator;
use crate::error::{Code, Error, Result, try_vec, try_with_capacity};
use crate::sys::bytes::{as_bytes, as_bytes_mut};

/// Maximum number of bytes in the record of a worker.
const MAX_RECORD: u64 = 1 << 20;

/// The groups of workers to which a device belongs.
#[derive(Clone)]
pub struct Workers {
    /// The workers that divide the same layers. Dropped before `world`, of which they may be a
    /// part.
    pub tensor: Arc<dyn Communicator>,
    /// All workers.
    pub world: Arc<dyn Communicator>,
    /// Limit of each wait for other workers.
    pub timeout: Duration,
}

impl Workers {
    /// Returns the bytes of each worker, which may differ in length.
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut lens = try_vec(self.world.size(), 0u64)?;
        self.world.all_gather(as_bytes(&[bytes.len() as u64]), as_bytes_mut(&mut lens), Some(self.timeout))?;
        let longest = lens.iter().copied().max().unwrap_or(0);
        if lens[self.world.rank()] != bytes.len() as u64 {
            return Err(Error::internal("the communicator has changed the bytes of this rank"));
        }
        if longest > MAX_RECORD {
            return Err(Error::internal(format!("a worker has sent a record of {longest} bytes; the limit is {MAX_RECORD}")));
        }
        let mut own = try_vec(longest as usize, 0)?;
        own[..bytes.len()].copy_from_slice(bytes);
        let mut all = try_vec(own.len() * self.world.size(), 0)?;
        if longest > 0 {
            self.world.all_gather(&own, &mut all, Some(self.timeout))?;
        }
        let mut records = try_with_capacity(self.world.size())?;
        for (rank, &len) in lens.iter().enumerate() {
            let mut record = try_with_capacity(len as usize)?;
            record.extend_from_slice(&all[rank * own.len()..][..len as usize]);
            records.push(record);
        }
        Ok(records)
    }

    /// Returns the result of this worker if no worker has failed. Otherwise all workers fail.
    pub fn agree<T>(&self, result: Result<T>) -> Result<T> {
        let mut record = try_with_capacity(0)?;
        if let Err(error) = &result {
            record.extend((error.code() as i32).to_le_bytes());
            record.extend(error.message().bytes());
        }
        let records = match self.gather(&record) {
            Ok(records) => records,
            Err(error) => return result.and(Err(error)),
        };
        match records.iter().enumerate().find_map(|(rank, record)| Some((rank, record.split_first_chunk()?))) {
            Some((rank, (code, message))) if result.is_ok() => {
                let code = Code::from_number(i32::from_le_bytes(*code)).unwrap_or(Code::Internal);
                Err(Error::new(code, String::from_utf8_lossy(message).into_owned()).of_rank(rank))
            }
            _ => result,
        }
    }
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
    /// Makes this device one of several workers, which call this at the same time.
    ///
    /// Errors: `Unsupported` if a library is missing. If one worker fails, all of them fail,
    /// because they agree or because a worker that has failed ends.
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
