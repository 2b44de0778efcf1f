//! Metrics in the OpenMetrics text format. The names after the prefix are those of vLLM.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::stats::Stats;
use crate::error::{Error, Result, Text};
use crate::memory::budget::BudgetInfo;
use crate::memory::plan::MemoryPlan;
use crate::types::outputs::{FinishReason, Output};
use crate::types::timing::{Timing, TokenLatency};

const BOUNDS: usize = 21;

/// Bucket bounds of all durations in seconds. They use one scale, so that they can be compared.
const SECONDS: [f64; BOUNDS] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0];

/// Bucket bounds of all token counts: powers of two up to the maximum of `max_batch_tokens`.
const TOKENS: [f64; BOUNDS] = [
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0,
    262144.0, 524288.0, 1048576.0,
];

/// A histogram of plain numbers, updated only by the stepping thread without locks or allocations.
#[derive(Debug, Clone, Copy)]
pub struct Histogram {
    bounds: &'static [f64; BOUNDS],
    /// Number of values per bucket. The last entry counts values above all bounds.
    counts: [u64; BOUNDS + 1],
    sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64; BOUNDS]) -> Histogram {
        Histogram { bounds, counts: [0; BOUNDS + 1], sum: 0.0 }
    }

    fn observe(&mut self, value: f64) {
        self.counts[self.bounds.partition_point(|&bound| bound < value)] += 1;
        self.sum += value;
    }

    fn observe_time(&mut self, time: Option<Duration>) {
        time.into_iter().for_each(|time| self.observe(time.as_secs_f64()));
    }
}

/// The histograms of an engine.
#[derive(Debug, Clone, Copy)]
pub struct Histograms {
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    iteration_tokens: Histogram,
    time_to_first_token: Histogram,
    inter_token_latency: Histogram,
    e2e_latency: Histogram,
    queue_time: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
}

impl Default for Histograms {
    fn default() -> Histograms {
        let (tokens, seconds) = (Histogram::new(&TOKENS), Histogram::new(&SECONDS));
        Histograms {
            prompt_tokens: tokens,
            generation_tokens: tokens,
            iteration_tokens: tokens,
            time_to_first_token: seconds,
            inter_token_latency: seconds,
            e2e_latency: seconds,
            queue_time: seconds,
            prefill_time: seconds,
            decode_time: seconds,
        }
    }
}

impl Histograms {
    pub fn step(&mut self, rows: usize) {
        self.iteration_tokens.observe(rows as f64);
    }

    pub fn token(&mut self, tick: TokenLatency) {
        match tick {
            TokenLatency::First(time) => self.time_to_first_token.observe_time(Some(time)),
            TokenLatency::Next(time) => self.inter_token_latency.observe_time(Some(time)),
        }
    }

    /// Records the end of a sequence. Durations are missing if it never started or has no token.
    pub fn ended(&mut self, last: &Output) {
        let Timing { queued, first_token, last_token, .. } = last.timing;
        self.prompt_tokens.observe(last.prompt_tokens as f64);
        self.generation_tokens.observe(last.generated_tokens as f64);
        self.queue_time.observe_time(queued);
        self.e2e_latency.observe_time(last_token);
        self.prefill_time.observe_time(first_token.zip(queued).map(|(first, queued)| first.saturating_sub(queued)));
        self.decode_time.observe_time(last_token.zip(first_token).map(|(last, first)| last.saturating_sub(first)));
    }

    fn all(&self) -> [(&'static str, &'static str, &Histogram); 9] {
        [
            ("request_prompt_tokens", "Prompt tokens of each ended sequence", &self.prompt_tokens),
            ("request_generation_tokens", "Generated tokens of each ended sequence", &self.generation_tokens),
            ("iteration_tokens_total", "Tokens computed in each step, prompt and decode", &self.iteration_tokens),
            ("time_to_first_token_seconds", "Seconds from the request to its first token", &self.time_to_first_token),
            ("inter_token_latency_seconds", "Seconds between two tokens of a sequence", &self.inter_token_latency),
            ("e2e_request_latency_seconds", "Seconds from the request to its last token", &self.e2e_latency),
            ("request_queue_time_seconds", "Seconds from the request to its first step", &self.queue_time),
            ("request_prefill_time_seconds", "Seconds from the first step to the first token", &self.prefill_time),
            ("request_decode_time_seconds", "Seconds from the first token to the last token", &self.decode_time),
        ]
    }
}

/// All metrics after one step.
#[derive(Debug)]
pub struct Snapshot {
    pub stats: Stats,
    pub histograms: Histograms,
    /// Budget of the engine. Engines that share it report the same values.
    pub budget: BudgetInfo,
    /// Labels of cache_config_info.
    pub config: [(&'static str, String); 5],
}

impl Snapshot {
    pub fn config(memory: &MemoryPlan, keeps_prefixes: bool) -> [(&'static str, String); 5] {
        [
            ("block_size", memory.block_size.to_string()),
            ("num_blocks", memory.max_blocks.to_string()),
            ("cache_dtype", memory.kv_dtype.name().into()),
            ("max_model_len", memory.max_model_len.to_string()),
            ("enable_prefix_caching", if keeps_prefixes { "True" } else { "False" }.into()),
        ]
    }

    /// Formats the metrics. `model` is the label that distinguishes the engines of a process.
    pub fn text(self, model: String) -> Result<String> {
        let labels = [("model_name".into(), Cow::Owned(model))];
        let mut registry = Registry::with_prefix_and_labels("pagedllm", labels.into_iter());
        registry.register_collector(Box::new(self));
        let mut out = Text::default();
        // A failed allocation is the only possible error.
        text::encode(&mut out, &registry).map_err(|_| Error::out_of_memory())?;
        Ok(out.0)
    }

    fn gauges(&self) -> [(&'static str, &'static str, f64); 12] {
        let Stats { running, waiting, swapped, idle, blocks_total, blocks_used, blocks_cached, .. } = self.stats;
        let Stats { blocks_out_of_window, swap_blocks_total, swap_blocks_used, .. } = self.stats;
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        [
            ("num_requests_running", "Running sequences", running as f64),
            ("num_requests_waiting", "Waiting sequences", waiting as f64),
            ("num_requests_swapped", "Sequences swapped to the host tier", swapped as f64),
            ("num_requests_idle", "Idle sequences, which wait to be resumed or freed", idle as f64),
            ("kv_cache_usage_perc", "Used fraction of the KV blocks, 0 to 1", share(blocks_used, blocks_total)),
            ("cpu_cache_usage_perc", "Used fraction of the host tier's KV blocks, 0 to 1", share(swap_blocks_used, swap_blocks_total)),
            ("kv_cache_blocks", "KV blocks of the pool", blocks_total as f64),
            ("kv_cache_blocks_cached", "KV blocks that only the prefix cache holds", blocks_cached as f64),
            ("kv_cache_blocks_out_of_window", "KV blocks saved because layers attend to a window", blocks_out_of_window as f64),
            ("budget_bytes", "Size of the memory budget in bytes", self.budget.bytes as f64),
            ("budget_held_bytes", "Bytes of the memory budget that engines hold", self.budget.held_bytes as f64),
            ("budget_engines", "Engines that share the memory budget", self.budget.engines as f64),
        ]
    }

    fn counters(&self) -> [(&'static str, &'static str, u64); 23] {
        let stats = &self.stats;
        [
            ("prefix_cache_queries", "Tokens looked up in the prefix cache", stats.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache", stats.prefix_hits),
            ("num_preemptions", "Preemptions of requests", stats.preemptions),
            ("num_preemptions_swapped", "Preemptions with a swap to the host tier", stats.preemptions_swapped),
            ("kv_blocks_swapped_out", "KV blocks swapped to the host tier", stats.blocks_swapped_out),
            ("kv_blocks_swapped_in", "KV blocks swapped back to the pool", stats.blocks_swapped_in),
            ("swap_failures", "Failed swaps in either direction", stats.swap_failures),
            ("discard_failures", "Failed returns of memory to the system after the pool shrank", stats.discard_failures),
            ("prompt_tokens", "Prompt tokens computed, including recomputation after a preemption", stats.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache", stats.prompt_tokens_cached),
            ("generation_tokens", "Generated tokens", stats.generated_tokens),
            ("admission_rejections", "Requests refused because the waiting queue was full", stats.admission_rejections),
            ("traces_stopped", "Traces ended by a write error", stats.traces_stopped),
            ("journals_stopped", "Journals ended by a write error", stats.journals_stopped),
            ("kv_store_queries", "KV blocks looked up in the KV store", stats.store.queries),
            ("kv_store_hits", "KV blocks read from the KV store", stats.store.hits),
            ("kv_store_stored", "KV blocks written to the KV store", stats.store.stored),
            ("kv_store_dropped", "Full KV blocks that were not written to the KV store", stats.store.dropped),
            ("kv_store_failures", "Failed or late operations of the KV store, and damaged blocks", stats.store.failures),
            ("kv_store_bytes_read", "Bytes read from the KV store", stats.store.bytes_read),
            ("kv_store_bytes_written", "Bytes written to the KV store", stats.store.bytes_written),
            ("steps", "Computed steps", stats.steps),
            ("steps_failed", "Failed steps, which were retried", stats.steps_failed),
        ]
    }

    fn endings(&self) -> [(&'static str, u64); 5] {
        let stats = &self.stats;
        [
            (FinishReason::Stop.name(), stats.finished_stop),
            (FinishReason::Length.name(), stats.finished_length),
            (FinishReason::Abort.name(), stats.finished_abort),
            (FinishReason::Error.name(), stats.finished_error),
            (FinishReason::Deadline.name(), stats.finished_deadline),
        ]
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        for (name, help, value) in self.gauges() {
            ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        for (name, help, value) in self.counters() {
            ConstCounter::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        let mut endings = encoder.encode_descriptor("request_success", "Ended sequences by finish reason", None, MetricType::Counter)?;
        for (reason, count) in self.endings() {
            ConstCounter::new(count).encode(endings.encode_family(&[("finished_reason", reason)])?)?;
        }
        for (name, help, Histogram { bounds, counts, sum }) in self.histograms.all() {
            let bounds = bounds.iter().copied().chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(counts.iter().copied()).collect();
            let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
            encoder.encode_histogram::<NoLabelSet>(*sum, counts.iter().sum(), &buckets, None)?;
        }
        let config = self.config.each_ref().map(|(key, value)| (*key, value.as_str()));
        encoder.encode_descriptor("cache_config", "Configuration of the KV cache", None, MetricType::Info)?.encode_info(&config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_on_a_bucket_bound_counts_in_the_lower_bucket() {
        let mut histogram = Histogram::new(&TOKENS);
        [0.0, 1.0, 1.5, 2.0, 3.0, 1048576.0, 1048577.0].iter().for_each(|&value| histogram.observe(value));
        assert_eq!((&histogram.counts[..3], &histogram.counts[BOUNDS - 1..]), (&[2, 2, 1][..], &[1, 1][..]));
        assert_eq!(histogram.sum, 2097160.5);
    }

    #[test]
    fn bucket_bounds_increase() {
        assert!(SECONDS.is_sorted_by(|a, b| a < b) && TOKENS.is_sorted_by(|a, b| a < b));
    }
}
