//! How long work takes on a device that works behind the host's back.

use std::time::Instant;

use pagedllm::backend::Backend;
use pagedllm::backend::cuda::CudaBackend;

use crate::Result;
use crate::common::median;

const ROUNDS: usize = 7;
/// Beside this, waiting for the end of a round is short.
const ROUND_SECONDS: f64 = 0.03;
const MOST_CALLS: f64 = 500.0;

/// Seconds of one call of `queue`, which queues work and is told the number of the call: the median of rounds of many calls, whose end is
/// waited for.
pub fn seconds(backend: &CudaBackend, mut queue: impl FnMut(usize)) -> Result<f64> {
    let mut end = backend.vector(&[0.0])?;
    let mut numbers = 0..;
    let mut round = |calls: usize| -> Result<f64> {
        let begun = Instant::now();
        numbers.by_ref().take(calls).for_each(&mut queue);
        backend.read(&mut end, 1)?;
        Ok(begun.elapsed().as_secs_f64() / calls as f64)
    };
    round(2)?; // whatever is made when it is first needed
    let calls = (ROUND_SECONDS / round(2)?).clamp(2.0, MOST_CALLS) as usize;
    let rounds: Result<Vec<f64>> = (0..ROUNDS).map(|_| round(calls)).collect();
    Ok(median(rounds?))
}
