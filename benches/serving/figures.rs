//! Results of a simulated run.

use std::time::Duration;

use pagedllm::types::options::{EngineOptions, Policies};

use super::Result;
use super::simulation::{Job, Machine, Served, Simulation};

/// Options of the engine. The prefix cache is off, because the systems of the paper had none and
/// all simulated prompts are equal.
pub fn options(policies: Policies) -> EngineOptions {
    EngineOptions { max_seqs: 512, max_batch_tokens: 2048, prefix_cache: false, policies, ..Default::default() }
}

pub struct Figures {
    pub served: Vec<Served>,
    /// Times between tokens, in ascending order.
    pub gaps: Vec<Duration>,
    /// From the first arrival to the last token.
    pub span: Duration,
    pub preemptions: u64,
    /// Average share of used and reserved slots that held a token, over the steps in which requests
    /// waited.
    pub slots: Option<f64>,
}

impl Figures {
    pub fn measure(options: &EngineOptions, jobs: &[Job]) -> Result<Figures> {
        let simulation = Simulation::new(options, Machine::PAPER)?;
        let (mut gaps, mut slots, mut saturated) = (Vec::new(), 0.0, 0u32);
        let on_step = |engine: &pagedllm::engine::Engine, _: &_| {
            let stats = engine.stats();
            if stats.waiting > 0 {
                slots += stats.slot_utilization;
                saturated += 1;
            }
        };
        let served = simulation.serve_with_gaps(jobs, on_step, |gap| gaps.push(gap))?;
        gaps.sort_unstable();
        let last = served.iter().map(|served| served.last_token).max().unwrap_or_default();
        Ok(Figures {
            span: last - jobs[0].at,
            served,
            gaps,
            preemptions: simulation.engine.stats().preemptions,
            slots: (saturated > 100).then(|| slots / saturated as f64),
        })
    }

    /// Output tokens per second.
    pub fn throughput(&self) -> f64 {
        self.served.iter().map(|served| served.tokens).sum::<usize>() as f64 / self.span.as_secs_f64()
    }

    pub fn times_to_first_token(&self) -> Vec<Duration> {
        let mut times: Vec<Duration> = self.served.iter().map(Served::time_to_first_token).collect();
        times.sort_unstable();
        times
    }

    pub fn normalized_latency(&self) -> Duration {
        mean(&self.served.iter().map(Served::normalized_latency).collect::<Vec<_>>())
    }
}

pub fn mean(times: &[Duration]) -> Duration {
    times.iter().sum::<Duration>() / times.len().max(1) as u32
}

pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    percentile(&times, 50)
}

/// Returns a percentile of times in ascending order.
pub fn percentile(times: &[Duration], percent: usize) -> Duration {
    times.get((times.len() * percent / 100).min(times.len().saturating_sub(1))).copied().unwrap_or_default()
}
