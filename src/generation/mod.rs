//! Generation: from logits to tokens and text. It depends on the parameters of one request and on
//! its sequence so far.

pub mod beam;
pub mod grammar;
pub mod output_processor;
pub mod sampler;
mod sampling_state;
mod stops;

pub use sampling_state::{ConstraintState, LogitsHook, SamplingState};
pub use stops::StopMatcher;
