//! Types without logic of their own, which all modules may use: ids, options, batches, outputs.

#[doc(hidden)]
pub mod batch; // the input of one forward pass as flat data
#[doc(hidden)]
pub mod blocks;
pub(crate) mod debug;
pub(crate) mod hex;
pub(crate) mod id_map;
mod ids;
pub mod kv_store;
pub mod options;
pub mod outputs;
#[doc(hidden)]
pub mod parallel; // the division of an engine among workers
pub(crate) mod sequence_state;
pub mod timing;

pub(crate) use ids::{IdAllocator, QueueId};
pub use ids::{PinId, RequestId, SeqId};
