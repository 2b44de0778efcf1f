//! Results of a simulated run.

use std::time::Duration;

use pagedllm::engine::{Engine, StepReport};
use pagedllm::error::Result;
use pagedllm::types::options::{EngineOptions, Policies};

use super::{Job, Machine, Observer, Served, Simulation};

/// Options of the engine. The prefix cache is off, because the systems of the paper had none and
/// all simulated prompts are equal.
pub fn options(policies: Policies) -> EngineOptions {
    EngineOptions { max_seqs: 512, max_batch_tokens: 2048, prefix_cache: false, policies, ..Default::default() }
}

/// Averages over steps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Averages {
    pub steps: u32,
    pub running: f64,
    pub waiting: f64,
    /// Share of the pool's blocks that are used.
    pub used: f64,
    /// Share of used and reserved slots that hold a token.
    pub filled: f64,
}

impl Averages {
    fn add(&mut self, engine: &Engine) {
        let stats = engine.stats();
        let used = stats.blocks_used as f64 / stats.blocks_total as f64;
        self.steps += 1;
        let weight = 1.0 / f64::from(self.steps);
        let values = [stats.running as f64, stats.waiting as f64, used, stats.slot_utilization];
        let averages = [&mut self.running, &mut self.waiting, &mut self.used, &mut self.filled];
        averages.into_iter().zip(values).for_each(|(average, value)| *average += weight * (value - *average));
    }
}

pub struct Measurement {
    pub served: Vec<Served>,
    /// Times between tokens, in ascending order.
    pub gaps: Vec<Duration>,
    /// From the first arrival to the last token.
    pub span: Duration,
    pub preemptions: u64,
    /// Over all steps with running requests.
    pub busy: Averages,
    /// Over the steps in which requests waited.
    pub saturated: Averages,
}

#[derive(Default)]
struct Recorder {
    gaps: Vec<Duration>,
    busy: Averages,
    saturated: Averages,
}

impl Observer for Recorder {
    fn step(&mut self, engine: &Engine, _: &StepReport, _: &[Served]) {
        let stats = engine.stats();
        if stats.running > 0 {
            self.busy.add(engine);
        }
        if stats.waiting > 0 {
            self.saturated.add(engine);
        }
    }

    fn gap(&mut self, gap: Duration) {
        self.gaps.push(gap);
    }
}

impl Measurement {
    pub fn run(options: &EngineOptions, machine: Machine, jobs: &[Job]) -> Result<Measurement> {
        let simulation = Simulation::new(options, machine)?;
        let mut recorder = Recorder::default();
        let served = simulation.serve(jobs, &mut recorder)?;
        let Recorder { mut gaps, busy, saturated } = recorder;
        gaps.sort_unstable();
        let last = served.iter().map(|served| served.last_token).max().unwrap_or_default();
        let first = jobs.first().map_or(last, |job| job.at);
        Ok(Measurement { span: last - first, served, gaps, preemptions: simulation.engine.stats().preemptions, busy, saturated })
    }

    /// Output tokens per second.
    pub fn throughput(&self) -> f64 {
        self.served.iter().map(|served| served.tokens).sum::<usize>() as f64 / self.span.as_secs_f64()
    }

    /// Returns a time of every request, in ascending order.
    pub fn times(&self, time: fn(&Served) -> Duration) -> Vec<Duration> {
        let mut times: Vec<Duration> = self.served.iter().map(time).collect();
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
