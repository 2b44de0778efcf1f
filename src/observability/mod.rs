//! What the host can observe: statistics, metrics, traces, and the files of journals. No decision
//! of the engine depends on them.

pub mod journal;
pub mod log_file;
pub mod metrics;
pub mod stats;
pub mod trace;
