//! Sampling: pure functions of the logits, the request's parameters and the sequence so far.

mod beam;
mod breaks;
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
mod ngrams;
mod outcome;
mod penalties;
mod random;
mod resolved;
mod rows;
mod sampler;
mod sampling_state;
mod stops;
mod text_matcher;
mod token_texts;
mod truncate;

pub use beam::{Beam, BeamScratch, BeamSearch, BeamStep, Ended, Ending, Hypothesis, Next, Process};
pub use constraint::{Constraint, Grammars, Vocabulary};
pub use context::Context;
pub use drawing::{chosen, logprob_of, plan_draw};
pub use history::SamplingHistory;
pub use log_softmax::log_softmax;
pub use logprobs::{logprob, logprob_and_top, top_logprobs};
pub use masker::{Masked, Masker};
pub use outcome::{NoChoice, Sample};
pub use random::{Lane, branch_seed, uniform};
pub use resolved::ResolvedSampling;
pub use sampler::Sampler;
pub use sampling_state::{LogitsHook, SamplingState};
pub use stops::StopMatcher;
pub use token_texts::TokenTexts;
