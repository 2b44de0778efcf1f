//! The statistics of steps and of an engine.

use std::time::Duration;

use crate::types::outputs::FinishReason;

/// The result of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Number of requests, exports and imports that have not ended, including those that have not
    /// started, and of commands left to the next steps.
    pub unfinished: u64,
    /// Number of prompt tokens in the step.
    pub prefill_tokens: u64,
    /// Number of decode tokens in the step.
    pub decode_tokens: u64,
    /// Number of sequences in the step.
    pub sequences: u64,
    /// Number of sequences that were not scheduled because their queue is full.
    pub paused: u64,
}

/// The time and the contents of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepRecord {
    /// Time of its start on the clock of the engine.
    pub start: Duration,
    pub duration: Duration,
    pub prefill_tokens: u64,
    pub decode_tokens: u64,
    pub sequences: u64,
}

/// The last steps that had sequences.
#[derive(Debug)]
pub struct RecentSteps {
    records: [StepRecord; RecentSteps::LEN],
    /// Number of steps recorded so far.
    count: usize,
}

impl RecentSteps {
    /// Maximum number of steps.
    pub const LEN: usize = 128;

    pub fn push(&mut self, record: StepRecord) {
        self.records[self.count % RecentSteps::LEN] = record;
        self.count += 1;
    }

    /// Returns the steps, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &StepRecord> {
        (self.count.saturating_sub(RecentSteps::LEN)..self.count).map(|step| &self.records[step % RecentSteps::LEN])
    }
}

impl Default for RecentSteps {
    fn default() -> RecentSteps {
        RecentSteps { records: [StepRecord::default(); RecentSteps::LEN], count: 0 }
    }
}

/// Counters since the creation of the engine, and its state after the last step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stats {
    /// Number of waiting sequences.
    pub waiting: u64,
    /// Number of running sequences.
    pub running: u64,
    /// Number of waiting sequences that the last step skipped because their queue is full, or
    /// because they wait for a slow grammar.
    pub paused: u64,
    /// Number of idle sequences, which wait to be resumed or freed.
    pub idle: u64,
    /// Size of the KV pool in blocks.
    pub blocks_total: u64,
    /// Number of blocks that sequences use.
    pub blocks_used: u64,
    /// Blocks of the prefix cache without an owner, which are evicted when needed.
    pub blocks_cached: u64,
    /// Number of free blocks.
    pub blocks_free: u64,
    /// Fraction of slots that hold a token, in blocks that are used or reserved for running
    /// sequences. 1 if there are no such blocks.
    pub slot_utilization: f64,
    /// Number of steps.
    pub steps: u64,
    /// Number of steps that failed and were retried, in part or as a whole.
    pub steps_failed: u64,
    /// Number of prompt tokens of all requests.
    pub prompt_tokens: u64,
    /// Number of prompt tokens that the prefix cache had.
    pub prompt_tokens_cached: u64,
    /// Number of generated tokens.
    pub generated_tokens: u64,
    /// Number of preemptions.
    pub preemptions: u64,
    /// Number of preemptions that swapped to the host tier. The others are recomputed.
    pub preemptions_swapped: u64,
    /// Number of sequences in the host tier.
    pub swapped: u64,
    /// Size of the host tier in blocks.
    pub swap_blocks_total: u64,
    /// Number of used blocks of the host tier.
    pub swap_blocks_used: u64,
    /// Number of blocks swapped out.
    pub blocks_swapped_out: u64,
    /// Number of blocks swapped in.
    pub blocks_swapped_in: u64,
    /// Number of failed transfers, for example on a full disk. The affected sequences are
    /// recomputed.
    pub swap_failures: u64,
    /// Number of shrinks after which the system did not take the memory back, for example because
    /// the host has locked it.
    pub discard_failures: u64,
    /// Number of blocks that the sequences would additionally hold without windows. Blocks of forks
    /// count once per fork.
    pub blocks_out_of_window: u64,
    /// Number of blocks copied because a sequence wrote to a shared one.
    pub blocks_copied: u64,
    /// Number of tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Number of tokens found in the prefix cache.
    pub prefix_hits: u64,
    /// Number of sequences that ended at a stop token, a stop string or the end of a grammar.
    pub finished_stop: u64,
    /// Number of sequences that reached their maximum length.
    pub finished_length: u64,
    /// Number of sequences that were aborted.
    pub finished_abort: u64,
    /// Number of sequences that ended with an error.
    pub finished_error: u64,
    /// Number of sequences that reached their deadline.
    pub finished_deadline: u64,
    /// Number of requests refused because of `max_waiting_requests`, `max_waiting_tokens` or a full
    /// queue.
    pub admission_rejections: u64,
    /// Number of traces that have stopped because of a disk error: 0 or 1.
    pub traces_stopped: u64,
    /// Number of journals that have stopped because of a disk error: 0 or 1.
    pub journals_stopped: u64,
    /// Counters of the KV store.
    pub store: StoreStats,
}

/// Counters of the operations of a KV store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Number of blocks looked up.
    pub queries: u64,
    /// Number of blocks read, with a valid checksum.
    pub hits: u64,
    /// Number of blocks written.
    pub stored: u64,
    /// Number of full blocks that were not written, because the store was too slow or the pool had
    /// evicted them.
    pub dropped: u64,
    /// Number of operations that failed or took too long, and of damaged blocks.
    pub failures: u64,
    /// Number of bytes read.
    pub bytes_read: u64,
    /// Number of bytes written.
    pub bytes_written: u64,
}

impl Stats {
    /// Counts the end of a generation.
    pub fn count(&mut self, finish: Option<FinishReason>) {
        match finish {
            Some(FinishReason::Stop) => self.finished_stop += 1,
            Some(FinishReason::Length) => self.finished_length += 1,
            Some(FinishReason::Abort) => self.finished_abort += 1,
            Some(FinishReason::Error) => self.finished_error += 1,
            Some(FinishReason::Deadline) => self.finished_deadline += 1,
            None => {}
        }
    }
}
