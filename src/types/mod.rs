//! The ids of requests, sequences, prefix pins and queues.

mod ids;

pub(crate) use ids::{IdAllocator, QueueId};
pub use ids::{PinId, RequestId, SeqId};
