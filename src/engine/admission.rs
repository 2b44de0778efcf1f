//! Whether a request would be let in, and when it would be served, without adding it.

use std::time::Duration;

use super::Engine;
use super::forecast::Newcomer;
use super::queue::Queue;
use super::request::Request;
use super::waiting::Waits;
use crate::error::Result;

/// What would become of a request that was added now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Admission {
    /// The queue has room for it.
    pub admits: bool,
    /// Nobody is before it, and there is a place and room for its prompt: the next step would begin it.
    pub fits_now: bool,
    /// When its first token is expected, from now on. None: no step has shown yet how long steps take.
    pub first_token: Option<Duration>,
    /// Requests before it, and the tokens that these have to compute before their first step ends.
    pub waiting_requests: usize,
    pub waiting_tokens: usize,
}

impl Engine {
    /// As of the last step, as if nothing of its prompt were in the prefix cache, and as if nobody came after it who goes before it.
    /// What could never run is refused; grammars are not looked at. All that waits is copied, piece by piece, and played through on the
    /// caller's thread: with a hundred thousand waiting that takes milliseconds, in which nobody is held up.
    pub fn admit(&self, queue: &Queue, mut request: Request) -> Result<Admission> {
        let (prompt, max_len, branching) = self.checked(queue, &mut request)?;
        let (prompt, width) = (prompt.len(), branching.width());
        let admits = self.shared.registry.would_admit(queue.outbox(), prompt)
            && self.lease.could_promise(self.most_blocks(prompt, max_len, branching));
        let waiting = self.shared.registry.waiting()?;
        let (now, outlook) = (self.shared.clock.now(), self.shared.outlook().try_clone()?);
        let newcomer = Newcomer { waits: Waits::new(prompt, max_len - prompt, request.priority, now), width };
        let forecast = outlook.forecast(&self.capacity, &waiting, newcomer, now)?;
        Ok(Admission {
            admits,
            fits_now: admits && forecast.fits_now,
            first_token: forecast.first_token.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
            waiting_requests: forecast.before.requests,
            waiting_tokens: forecast.before.tokens,
        })
    }
}
