//! The ids of requests, sequences and prefix pins.

mod ids;

pub(crate) use ids::IdAllocator;
pub use ids::{PinId, RequestId, SeqId};
