//! Admission: predicts whether and when a request would be served, without adding it.

use std::time::Duration;

use super::Engine;
use super::queue::Queue;
use super::request::Request;
use super::simulation::CandidateRequest;
use super::wait_queue::WaitingEntry;
use crate::error::Result;

/// The predicted admission of a request that would be added now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Admission {
    /// Whether the waiting queue has space for the request.
    pub admits: bool,
    /// Whether the next step would start the request: no request is before it, and there are places
    /// and blocks for it.
    pub fits_now: bool,
    /// Predicted time to first token. `None` if no step has been measured yet.
    pub first_token: Option<Duration>,
    /// Number of requests before it, and the number of tokens that they must compute before they
    /// start to decode.
    pub waiting_requests: usize,
    /// Number of tokens of the waiting requests.
    pub waiting_tokens: usize,
}

impl Engine {
    /// Predicts admission and time to first token for a request without adding it.
    ///
    /// The prediction uses the state after the last step. It assumes that the prefix cache has no
    /// block of the prompt, and that no later request overtakes this one. A request that can never
    /// run is refused. Grammars are not checked. The function copies the waiting queue in pieces
    /// and simulates it on the thread of the caller. With 100,000 waiting requests this takes
    /// milliseconds and blocks no other thread.
    pub fn predict_admission(&self, queue: &Queue, mut request: Request) -> Result<Admission> {
        let (prompt, max_len, branching) = self.checked(queue, &mut request)?;
        let (prompt, width) = (prompt.len(), branching.max_members());
        let admits =
            self.shared.table.would_admit(queue.sender(), prompt) && self.lease.could_reserve(self.max_blocks(prompt, max_len, branching));
        let waiting = self.shared.table.waiting()?;
        let (now, snapshot) = (self.shared.clock.now(), self.shared.snapshot().try_clone()?);
        let candidate = CandidateRequest { waiting: WaitingEntry::new(prompt, max_len - prompt, request.priority, now), width };
        let forecast = snapshot.forecast(&self.capacity, &waiting, candidate, now)?;
        Ok(Admission {
            admits,
            fits_now: admits && forecast.fits_now,
            first_token: forecast.first_token.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
            waiting_requests: forecast.before.requests,
            waiting_tokens: forecast.before.tokens,
        })
    }
}
