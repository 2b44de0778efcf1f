//! The trace: a file in Chrome's trace event format for Perfetto, with the times of steps and
//! sequences.

use std::path::Path;
use std::time::Duration;

use super::log_file::LogFile;
use super::stats::{Stats, StepReport};
use crate::error::Result;
use crate::types::SeqId;
use crate::types::batch::Batch;
use crate::types::outputs::{FinishReason, Output};
use crate::types::timing::Timing;

/// The phases of a step in order. If a step is retried, some occur several times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Commands are applied, and expired deadlines are handled.
    Commands,
    Schedule,
    /// The model computes.
    Run,
    /// Tokens are sampled.
    Decide,
    Commit,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Phase::Commands => "commands",
            Phase::Schedule => "schedule",
            Phase::Run => "run",
            Phase::Decide => "decide",
            Phase::Commit => "commit",
        }
    }
}

/// Maximum number of recorded phases per step.
const MAX_LAPS: usize = 1024;

/// A trace file.
pub struct Trace {
    file: LogFile,
    /// Start of the current step, and end of its last phase.
    began: Duration,
    mark: Duration,
    laps: Vec<(Phase, Duration, Duration)>,
    copies: usize,
    /// Number of preemptions so far.
    preemptions: u64,
}

/// The start of the file. The format allows an array without its end, so the file is readable even
/// if the process is killed.
const START: &[u8] = br#"[
{"name":"process_name","ph":"M","pid":1,"tid":1,"args":{"name":"pagedllm"}},
{"name":"thread_name","ph":"M","pid":1,"tid":1,"args":{"name":"steps"}}"#;

impl Trace {
    pub fn create(path: &Path) -> Result<Trace> {
        let mut laps = Vec::new();
        laps.try_reserve_exact(MAX_LAPS)?;
        let (mut file, zero) = (LogFile::create(path, b"", |_| {})?, Duration::ZERO);
        file.push(START);
        Ok(Trace { file, began: zero, mark: zero, laps, copies: 0, preemptions: 0 })
    }

    pub fn has_stopped(&self) -> bool {
        self.file.has_stopped()
    }

    fn event(&mut self, event: std::fmt::Arguments) {
        self.file.push(b",\n");
        self.file.print(event);
    }

    pub fn begin(&mut self, now: Duration) {
        (self.began, self.mark, self.copies) = (now, now, 0);
        self.laps.clear();
    }

    /// Ends a phase of the step. `phase` covers the time since the last call.
    pub fn end_phase(&mut self, phase: Phase, now: Duration) {
        let since = std::mem::replace(&mut self.mark, now);
        if self.laps.len() < MAX_LAPS {
            self.laps.push((phase, since, now));
        }
    }

    /// Counts the block copies of a batch that was computed.
    pub fn computed(&mut self, batch: &Batch) {
        self.copies += batch.copies.len();
    }

    /// Records a completed step. A failed step has no report. A step without sequences is not
    /// recorded.
    pub fn end(&mut self, report: Option<&StepReport>, stats: &Stats, now: Duration) {
        let preemptions = stats.preemptions - std::mem::replace(&mut self.preemptions, stats.preemptions);
        if report.is_none_or(|report| report.sequences > 0) {
            let StepReport { prefill_tokens, decode_tokens, sequences, paused, .. } = report.copied().unwrap_or_default();
            let (ts, dur, copies) = (micros(self.began), micros(now.saturating_sub(self.began)), self.copies);
            let Stats { blocks_used, blocks_cached, blocks_free, waiting, .. } = *stats;
            let failed = report.is_none();
            self.event(format_args!(
                r#"{{"name":"step","cat":"step","ph":"X","pid":1,"tid":1,"ts":{ts},"dur":{dur},"args":{{"prefill_tokens":{prefill_tokens},"decode_tokens":{decode_tokens},"sequences":{sequences},"waiting":{waiting},"paused":{paused},"blocks_used":{blocks_used},"blocks_cached":{blocks_cached},"blocks_free":{blocks_free},"copies":{copies},"preemptions":{preemptions},"failed":{failed}}}}}"#
            ));
            for place in 0..self.laps.len() {
                let (phase, from, to) = self.laps[place];
                let (name, ts, dur) = (phase.name(), micros(from), micros(to.saturating_sub(from)));
                self.event(format_args!(r#"{{"name":"{name}","cat":"step","ph":"X","pid":1,"tid":1,"ts":{ts},"dur":{dur}}}"#));
            }
        }
        match report {
            // The stepping thread may sleep now.
            Some(StepReport { sequences: 0, .. }) => self.file.send_buffer(),
            _ => self.file.settle(now),
        }
    }

    /// Records a completed phase of a sequence.
    pub fn span(&mut self, name: &str, sequence: SeqId, from: Duration, to: Duration) {
        for (kind, ts) in [("b", micros(from)), ("e", micros(to))] {
            self.event(format_args!(r#"{{"name":"{name}","cat":"sequence","ph":"{kind}","id":{sequence},"pid":1,"tid":1,"ts":{ts}}}"#));
        }
    }

    /// Records the last output of a sequence, and its last phase.
    pub fn ended(&mut self, last: &Output, now: Duration) {
        let Timing { requested_at, queued, first_token, preemptions, cached_tokens, .. } = last.timing;
        let (name, since) = match (queued, first_token) {
            (_, Some(first)) => ("decode", first),
            (Some(queued), None) => ("prefill", queued),
            (None, None) => ("queued", Duration::ZERO),
        };
        self.span(name, last.sequence, requested_at + since, now);
        let Output { sequence, request, index, prompt_tokens, generated_tokens, .. } = *last;
        let (finish, ts) = (last.finish.map_or("", FinishReason::name), micros(now));
        self.event(format_args!(
            r#"{{"name":"end","cat":"sequence","ph":"n","id":{sequence},"pid":1,"tid":1,"ts":{ts},"args":{{"request":{request},"index":{index},"finish":"{finish}","prompt_tokens":{prompt_tokens},"generated_tokens":{generated_tokens},"cached_tokens":{cached_tokens},"preemptions":{preemptions}}}}}"#
        ));
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.file.push(b"\n]\n");
    }
}

/// Converts to microseconds, the unit of the format, with the resolution of nanoseconds.
fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1000.0
}
