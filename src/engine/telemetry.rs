//! Telemetry: measurements of the running engine. No decision depends on them.

use std::sync::Arc;
use std::time::Duration;

use super::active_sequence::ActiveSequence;
use super::clock::Clock;
use super::metrics::Histograms;
use super::outputs::Output;
use super::timing::TokenLatency;
use super::trace::{Phase, Trace};
use super::{Stats, StepReport};
use crate::error::Result;
use crate::scheduler::{SequenceStats, StepPlan};

/// The histograms and the trace of an engine.
pub struct Telemetry {
    pub histograms: Histograms,
    /// Number of prompt tokens that the prefix cache had.
    pub cached_tokens: u64,
    trace: Option<Trace>,
    clock: Arc<dyn Clock>,
    /// Time at which the tokens of the step were sampled.
    told: Duration,
}

impl Telemetry {
    pub fn new(clock: Arc<dyn Clock>, trace: Option<Trace>) -> Telemetry {
        Telemetry { histograms: Histograms::default(), cached_tokens: 0, trace, clock, told: Duration::ZERO }
    }

    /// Returns 1 if the trace has stopped because of a disk error.
    pub fn traces_stopped(&self) -> u64 {
        self.trace.as_ref().is_some_and(Trace::has_stopped) as u64
    }

    pub fn step_begins(&mut self, now: Duration) {
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
        if let Some(trace) = &mut self.trace {
            trace.end(result.as_ref().ok(), stats, self.clock.now());
        }
    }

    /// Records the first step of a turn.
    pub fn started(&mut self, stream: &mut ActiveSequence, now: Duration) {
        let timing = &mut stream.timing;
        if timing.queued.is_some() {
            return;
        }
        timing.queued = Some(now.saturating_sub(timing.asked));
        if let Some(trace) = &mut self.trace {
            trace.span("queued", stream.sequence, timing.asked, now);
        }
    }

    /// Records a computed plan. Its tokens have been sampled.
    pub fn computed(&mut self, plan: &StepPlan) {
        self.told = self.clock.now();
        self.histograms.step(plan.batch.rows());
        if let Some(trace) = &mut self.trace {
            trace.computed(plan);
        }
    }

    /// Records one token of the stream.
    pub fn token(&mut self, stream: &mut ActiveSequence, past: SequenceStats) {
        let timing = &mut stream.timing;
        timing.set_stats(past);
        let tick = timing.record_token(self.told);
        self.histograms.token(tick);
        let TokenLatency::First(_) = tick else { return };
        if stream.index == 0 {
            // Samples share the cached blocks of their request, which counts once.
            self.cached_tokens += timing.cached_tokens;
        }
        if let Some(trace) = &mut self.trace {
            trace.span("prefill", stream.sequence, timing.asked + timing.queued.unwrap_or_default(), self.told);
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
