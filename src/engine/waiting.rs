//! What waits for its first step, and how much of it there may be.

use crate::error::{Error, Result};
use crate::options::EngineOptions;

/// Beyond these a host is told to come back later. The largest number: no limit.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    pub requests: usize,
    pub tokens: usize,
}

impl QueueLimits {
    pub fn of(options: &EngineOptions) -> QueueLimits {
        QueueLimits {
            requests: options.max_waiting_requests.unwrap_or(usize::MAX),
            tokens: options.max_waiting_tokens.unwrap_or(usize::MAX),
        }
    }
}

/// Turns that were asked for and of which no step has computed anything, and the tokens that these have to compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waiting {
    pub requests: usize,
    pub tokens: usize,
}

impl Waiting {
    /// Whether `requests` more, with `tokens` in all, may wait. Where nothing waits, one may in any case.
    pub fn check(&self, limits: QueueLimits, requests: usize, tokens: usize) -> Result<()> {
        if self.requests == 0 && requests == 1 {
            return Ok(());
        }
        if requests > limits.requests.saturating_sub(self.requests) {
            return Err(Error::capacity(format!(
                "{} requests wait and max_waiting_requests is {}: no room for {requests} more, try again later",
                self.requests, limits.requests
            )));
        }
        if tokens > limits.tokens.saturating_sub(self.tokens) {
            return Err(Error::capacity(format!(
                "requests with {} tokens wait and max_waiting_tokens is {}: no room for {tokens} more, try again later",
                self.tokens, limits.tokens
            )));
        }
        Ok(())
    }

    pub fn enter(&mut self, tokens: usize) {
        self.requests += 1;
        self.tokens += tokens;
    }

    /// Where `tokens` is 0, it did not wait.
    pub fn leave(&mut self, tokens: usize) {
        self.requests -= (tokens > 0) as usize;
        self.tokens -= tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_is_full_at_its_limits_and_says_the_numbers() {
        let limits = QueueLimits { requests: 2, tokens: 100 };
        let mut waiting = Waiting::default();
        waiting.check(limits, 1, 1000).unwrap();
        waiting.enter(60);
        waiting.check(limits, 1, 40).unwrap();
        let error = waiting.check(limits, 1, 41).unwrap_err();
        assert!(error.message().contains("60 tokens wait and max_waiting_tokens is 100"), "{error}");
        waiting.enter(40);
        let error = waiting.check(limits, 1, 1).unwrap_err();
        assert!(error.message().contains("2 requests wait and max_waiting_requests is 2"), "{error}");
        waiting.leave(60);
        waiting.leave(0);
        assert_eq!(waiting, Waiting { requests: 1, tokens: 40 });
    }
}
