//! The times of a generation, relative to the call that started it.

use std::time::Duration;

/// Statistics of a sequence since it started or was resumed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SequenceStats {
    /// Number of preemptions.
    pub preemptions: u64,
    /// Number of prompt tokens that the prefix cache had.
    pub cached: u64,
}

/// The times and statistics of a generation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timing {
    /// Time of the call, on the clock of the engine. The other times are relative to it.
    pub requested_at: Duration,
    /// Time to the start of its first step. `None` if it never started.
    pub queued: Option<Duration>,
    /// Time to its first token. `None` if it has none.
    pub first_token: Option<Duration>,
    /// Time to its last token. `None` if it has none.
    pub last_token: Option<Duration>,
    /// Number of preemptions.
    pub preemptions: u64,
    /// Number of prompt tokens that the prefix cache had.
    pub cached_tokens: u64,
}

/// The latency of a new token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenLatency {
    /// Time from the call to the first token.
    First(Duration),
    /// Time from the previous token.
    Next(Duration),
}

impl Timing {
    /// Creates the times of a generation that starts now.
    pub fn new(requested_at: Duration) -> Timing {
        Timing { requested_at, ..Timing::default() }
    }

    pub(crate) fn record_token(&mut self, now: Duration) -> TokenLatency {
        let since = now.saturating_sub(self.requested_at);
        let before = self.last_token.replace(since);
        self.first_token.get_or_insert(since);
        before.map_or(TokenLatency::First(since), |before| TokenLatency::Next(since.saturating_sub(before)))
    }

    pub(crate) fn set_stats(&mut self, stats: SequenceStats) {
        (self.preemptions, self.cached_tokens) = (stats.preemptions, stats.cached);
    }
}
