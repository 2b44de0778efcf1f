//! Delivery of outputs: the queues from which the host reads, and their batches.

pub mod batch;
pub mod queue;
pub mod wakeup;
