//! Communication between the workers of one engine: rank 0, which schedules, and the others, which
//! follow it.

mod handle;
pub mod local;
mod reduce;
pub mod shared_memory;

use std::sync::Arc;
use std::time::Duration;

pub use handle::CommunicatorHandle;
pub use reduce::OrderedSum;

use crate::error::Result;

/// Carries bytes between the ranks of a group. All ranks call the same functions in the same order,
/// each from one thread at a time.
///
/// A function waits until the other ranks have done their part, at most for `timeout` (`None`: no
/// limit). Errors: `Internal` if another rank has ended or has not done its part in time. After an
/// error, all later calls fail too.
pub trait Communicator: Send + Sync {
    /// Returns the number of this rank, below `size`.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Copies the bytes of rank `root` to all ranks.
    fn broadcast(&self, bytes: &mut [u8], root: usize, timeout: Option<Duration>) -> Result<()>;

    /// Copies the bytes of each rank to all ranks. `out` is `[size, bytes.len()]`.
    fn all_gather(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()>;

    /// Copies part `r` of the bytes to rank `r`. Both `bytes` and `out` have `size` parts of equal
    /// length; part `r` of `out` comes from rank `r`.
    fn all_to_all(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()>;

    /// Sends bytes to another rank. May return before the other rank has received them.
    fn send(&self, bytes: &[u8], to: usize, timeout: Option<Duration>) -> Result<()>;

    /// Receives the bytes that another rank sends, in the order in which it sends them. Both ranks
    /// give the same length.
    fn receive(&self, bytes: &mut [u8], from: usize, timeout: Option<Duration>) -> Result<()>;

    /// Divides the group: ranks with the same color form a new group, in the order of their ranks.
    ///
    /// Errors: `Unsupported` if the communicator cannot be divided.
    fn split(&self, color: usize, timeout: Option<Duration>) -> Result<Arc<dyn Communicator>>;

    /// Returns an error if `split` is not supported.
    fn check_split(&self) -> Result<()> {
        Ok(())
    }

    /// Returns an error if another rank has ended or failed, as far as the communicator notices it.
    /// Any thread may call it, also during another call.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Adds the numbers of all ranks: `x[i]` becomes the sum of the ranks' `x[i]`, added in the
    /// order of the ranks, so that the result depends neither on the length nor on the time of
    /// arrival. `scratch` keeps its memory for the next call.
    fn all_reduce(&self, x: &mut [f32], scratch: &mut OrderedSum, timeout: Option<Duration>) -> Result<()> {
        scratch.all_reduce(self, x, timeout)
    }
}
