//! Telemetry: measurements of the running engine. No decision depends on them.

use std::sync::Arc;
use std::time::Duration;

use super::clock::Clock;
use super::sequence::Sequence;
use crate::error::Result;
use crate::observability::metrics::Histograms;
use crate::observability::stats::{RecentSteps, Stats, StepRecord, StepReport};
use crate::observability::trace::{Phase, Trace};
use crate::scheduler::StepPlan;
use crate::types::outputs::Output;
use crate::types::timing::{SequenceStats, TokenLatency};

/// The counters, the histograms and the trace of an engine.
pub struct Telemetry {
    /// The counters of the statistics. The gauges are 0.
    pub counts: Stats,
    pub histograms: Histograms,
    /// Number of prompt tokens that the prefix cache had.
    pub cached_tokens: u64,
    pub recent_steps: RecentSteps,
    /// Time at which the step began.
    began_at: Duration,
    trace: Option<Trace>,
    clock: Arc<dyn Clock>,
    /// Time at which the tokens of the step were sampled.
    published_at: Duration,
}

impl Telemetry {
    pub fn new(clock: Arc<dyn Clock>, trace: Option<Trace>) -> Telemetry {
        Telemetry {
            counts: Stats::default(),
            histograms: Histograms::default(),
            cached_tokens: 0,
            recent_steps: RecentSteps::default(),
            began_at: Duration::ZERO,
            trace,
            clock,
            published_at: Duration::ZERO,
        }
    }

    /// Returns 1 if the trace has stopped because of a disk error.
    pub fn traces_stopped(&self) -> u64 {
        self.trace.as_ref().is_some_and(Trace::has_stopped) as u64
    }

    pub fn step_begins(&mut self, now: Duration) {
        self.began_at = now;
        if let Some(trace) = &mut self.trace {
            trace.begin(now);
        }
    }

    /// Ends a phase of the step. `phase` covers the time since the last call.
    pub fn end_phase(&mut self, phase: Phase) {
        if let Some(trace) = &mut self.trace {
            trace.end_phase(phase, self.clock.now());
        }
    }

    pub fn step_ends(&mut self, result: &Result<StepReport>, stats: &Stats) {
        if let Ok(StepReport { sequences: sequences @ 1.., prefill_tokens, decode_tokens, .. }) = *result {
            let (start, duration) = (self.began_at, self.clock.now().saturating_sub(self.began_at));
            self.recent_steps.push(StepRecord { start, duration, prefill_tokens, decode_tokens, sequences });
        }
        if let Some(trace) = &mut self.trace {
            trace.end(result.as_ref().ok(), stats, self.clock.now());
        }
    }

    /// Records the first step of a generation.
    pub fn started(&mut self, sequence: &mut Sequence, now: Duration) {
        let timing = &mut sequence.generation.timing;
        if timing.queued.is_some() {
            return;
        }
        timing.queued = Some(now.saturating_sub(timing.requested_at));
        if let Some(trace) = &mut self.trace {
            trace.span("queued", sequence.id, timing.requested_at, now);
        }
    }

    /// Records a computed plan. Its tokens have been sampled.
    pub fn computed(&mut self, plan: &StepPlan) {
        self.published_at = self.clock.now();
        self.histograms.step(plan.batch.token_count());
        if let Some(trace) = &mut self.trace {
            trace.computed(&plan.batch);
        }
    }

    /// Records one token of the sequence.
    pub fn token(&mut self, sequence: &mut Sequence, stats: SequenceStats) {
        let timing = &mut sequence.generation.timing;
        timing.set_stats(stats);
        let tick = timing.record_token(self.published_at);
        self.histograms.token(tick);
        if let TokenLatency::First(_) = tick {
            self.prompt_ends(sequence);
        }
    }

    /// Records that the prompt of the sequence has been computed.
    pub fn prompt_ends(&mut self, sequence: &Sequence) {
        let timing = &sequence.generation.timing;
        if sequence.index == 0 {
            // Samples share the cached blocks of their request, which counts once.
            self.cached_tokens += timing.cached_tokens;
        }
        if let Some(trace) = &mut self.trace {
            trace.span("prefill", sequence.id, timing.requested_at + timing.queued.unwrap_or_default(), self.published_at);
        }
    }

    /// Records the last output of a sequence.
    pub fn ended(&mut self, last: &Output) {
        self.histograms.ended(last);
        if let Some(trace) = &mut self.trace {
            trace.ended(last, self.clock.now());
        }
    }
}
