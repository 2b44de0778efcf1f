//! A communicator that a test watches or ends.

use std::sync::Arc;
use std::time::Duration;

use pagedllm::communicator::{Communicator, OrderedSum};
use pagedllm::error::Result;

/// Calls a function before each operation. If the function fails, the operation fails.
pub struct Intercepted<F> {
    pub world: Arc<dyn Communicator>,
    pub before: F,
}

impl<F: Fn() -> Result<()> + Send + Sync> Communicator for Intercepted<F> {
    fn rank(&self) -> usize {
        self.world.rank()
    }

    fn size(&self) -> usize {
        self.world.size()
    }

    fn broadcast(&self, bytes: &mut [u8], root: usize, timeout: Option<Duration>) -> Result<()> {
        (self.before)()?;
        self.world.broadcast(bytes, root, timeout)
    }

    fn all_gather(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()> {
        (self.before)()?;
        self.world.all_gather(bytes, out, timeout)
    }

    fn all_to_all(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()> {
        (self.before)()?;
        self.world.all_to_all(bytes, out, timeout)
    }

    fn send(&self, bytes: &[u8], to: usize, timeout: Option<Duration>) -> Result<()> {
        (self.before)()?;
        self.world.send(bytes, to, timeout)
    }

    fn receive(&self, bytes: &mut [u8], from: usize, timeout: Option<Duration>) -> Result<()> {
        (self.before)()?;
        self.world.receive(bytes, from, timeout)
    }

    fn split(&self, color: usize, timeout: Option<Duration>) -> Result<Arc<dyn Communicator>> {
        (self.before)()?;
        self.world.split(color, timeout)
    }

    /// Is not an operation of the group, so it does not call `before`.
    fn check_split(&self) -> Result<()> {
        self.world.check_split()
    }

    /// Is not an operation of the group, so it does not call `before`.
    fn check(&self) -> Result<()> {
        self.world.check()
    }

    /// Calls that of the other communicator, because all ranks must make the same calls.
    fn all_reduce(&self, x: &mut [f32], scratch: &mut OrderedSum, timeout: Option<Duration>) -> Result<()> {
        (self.before)()?;
        self.world.all_reduce(x, scratch, timeout)
    }
}
