//! Time of work on a device that runs asynchronously.

use std::time::Instant;

use pagedllm::backend::Alloc;
use pagedllm::backend::cuda::CudaBackend;

use crate::Result;
use crate::common::median;

const ROUNDS: usize = 7;
/// Long enough that the wait at the end of a round does not matter.
const ROUND_SECONDS: f64 = 0.03;
const MAX_CALLS: f64 = 500.0;

/// Returns the seconds per call of `queue`, which queues work and gets the index of the call: the
/// median of rounds of many calls. Each round waits for the device.
pub fn seconds(backend: &CudaBackend, mut queue: impl FnMut(usize)) -> Result<f64> {
    let mut end = backend.vector(&[0.0])?;
    let mut numbers = 0..;
    let mut round = |calls: usize| -> Result<f64> {
        let start = Instant::now();
        numbers.by_ref().take(calls).for_each(&mut queue);
        backend.read(&mut end, 1)?;
        Ok(start.elapsed().as_secs_f64() / calls as f64)
    };
    round(2)?; // does all one-time work
    let calls = (ROUND_SECONDS / round(2)?).clamp(2.0, MAX_CALLS) as usize;
    let rounds: Result<Vec<f64>> = (0..ROUNDS).map(|_| round(calls)).collect();
    Ok(median(rounds?))
}
