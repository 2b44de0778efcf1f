//! Admission: predicts whether and when a request would be served, without adding it.

use std::time::Duration;

use super::Engine;
use super::request::Request;
use crate::error::Result;
use crate::output::queue::Queue;
use crate::scheduler::simulate::{CandidateRequest, StepLoad, WaitingEntry};

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
        let (now, snapshot) = (self.shared.clock.now(), self.shared.admission().try_clone()?);
        let candidate = CandidateRequest { waiting: WaitingEntry::new(prompt, max_len - prompt, request.priority, now), width };
        let step_costs = snapshot.step_time.solve();
        let seconds = step_costs.as_ref().map(|costs| |load: StepLoad| costs.seconds(load));
        let step_cost = seconds.as_ref().map(|seconds| seconds as &dyn Fn(StepLoad) -> f64);
        let forecast = snapshot.scheduler.forecast(&self.capacity, &waiting, candidate, step_cost)?;
        let rest_of_step = match (&step_costs, snapshot.step) {
            (Some(costs), Some((load, began))) => (costs.seconds(load) - now.saturating_sub(began).as_secs_f64()).max(0.0),
            _ => 0.0,
        };
        Ok(Admission {
            admits,
            fits_now: admits && forecast.fits_now,
            first_token: forecast.first_token.and_then(|seconds| Duration::try_from_secs_f64(rest_of_step + seconds).ok()),
            waiting_requests: forecast.requests_before,
            waiting_tokens: forecast.tokens_before,
        })
    }
}
