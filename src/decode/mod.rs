//! From logits to a token: pure functions of the logits, the request's parameters and the place in the sequence.

mod constraint;
mod masker;
mod random;
mod sampler;
mod stops;

pub use constraint::{Constraint, Grammars, Vocabulary};
pub use masker::{Masked, Masker};
pub use random::uniform;
pub use sampler::{NoChoice, Rules, Sampler, logprob};
pub use stops::StopMatcher;
