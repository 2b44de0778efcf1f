//! Sampling: pure functions of the logits, the request's parameters and the sequence so far.

mod beam;
mod constraint;
mod context;
mod drawing;
mod dry;
mod exclude;
#[cfg(test)]
mod goldens;
mod history;
mod log_softmax;
mod logprobs;
mod masker;
mod mirostat;
mod outcome;
mod penalties;
mod random;
mod resolved;
mod rows;
mod sampler;
mod sampling_state;
mod stops;
mod truncate;

pub use beam::{Beam, BeamScratch, BeamSearch, BeamStep, Ended, Ending, Hypothesis, Next, Process};
pub use constraint::{Constraint, GrammarPace, Grammars, Vocabulary};
pub use context::Context;
pub use drawing::{chosen, logprob_of, plan_draw};
pub use history::SamplingHistory;
pub use log_softmax::log_softmax;
pub use logprobs::{logprob, logprob_and_top, top_logprobs};
pub use masker::{MaskId, Masked, Masker};
pub use outcome::{NoChoice, Sample};
pub use random::{Lane, branch_seed, uniform};
pub use resolved::ResolvedSampling;
pub use sampler::Sampler;
pub use sampling_state::{ConstraintState, LogitsHook, SamplingState};
pub use stops::StopMatcher;
