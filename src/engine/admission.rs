//! Whether a request would be let in, and when it would be served, without adding it.

use std::time::Duration;

use super::Engine;
use super::queue::Queue;
use super::request::Request;
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
    /// As of the last step, and as if nothing of its prompt were in the prefix cache. What could never run is refused; grammars are not
    /// looked at.
    pub fn admit(&self, queue: &Queue, mut request: Request) -> Result<Admission> {
        let (prompt, max_len, branching) = self.checked(queue, &mut request)?;
        let (waiting, admits, before) = self.shared.registry.would_admit(queue.outbox(), prompt.len())?;
        let admits = admits && self.lease.could_promise(self.most_blocks(prompt.len(), max_len, branching));
        let (now, outlook) = (self.shared.clock.now(), self.shared.outlook().clone());
        let first_token = outlook.first_token(self.capacity, before.into_iter(), prompt.len(), now);
        Ok(Admission {
            admits,
            fits_now: admits && outlook.fits_now(self.capacity.block_size, branching.width(), prompt.len(), waiting.requests > 0),
            first_token: first_token.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
            waiting_requests: waiting.requests,
            waiting_tokens: waiting.tokens,
        })
    }
}
