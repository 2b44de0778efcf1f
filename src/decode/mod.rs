//! From logits to a token: pure functions of the logits, the request's parameters and the place in the sequence.

mod random;
mod sampler;
mod stops;

pub use random::uniform;
pub use sampler::{NoChoice, Rules, Sampler, logprob};
pub use stops::StopMatcher;
