//! When things happened to a sequence, counted from the call that asked for it.

use std::time::Duration;

use crate::sched::Past;

/// How a sequence's turn went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timing {
    /// When the host asked for it, by the engine's clock. The others count from here.
    pub asked: Duration,
    /// Until the first step that it took part in began. None: it never did.
    pub queued: Option<Duration>,
    /// Until its first token was there. None: it has none.
    pub first_token: Option<Duration>,
    pub last_token: Option<Duration>,
    /// How often its blocks were taken from it.
    pub preemptions: u64,
    /// Tokens that it began with and that were found in the prefix cache.
    pub cached_tokens: u64,
}

/// A token is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tick {
    /// The first one, so long after the call.
    First(Duration),
    /// So long after the one before it.
    Next(Duration),
}

impl Timing {
    pub fn new(asked: Duration) -> Timing {
        Timing { asked, ..Timing::default() }
    }

    pub(super) fn tick(&mut self, now: Duration) -> Tick {
        let since = now.saturating_sub(self.asked);
        let before = self.last_token.replace(since);
        self.first_token.get_or_insert(since);
        before.map_or(Tick::First(since), |before| Tick::Next(since.saturating_sub(before)))
    }

    pub(super) fn set_past(&mut self, past: Past) {
        (self.preemptions, self.cached_tokens) = (past.preemptions, past.cached);
    }
}
