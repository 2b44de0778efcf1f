//! The parameters of a sequence, resolved against its model.

use std::sync::Arc;

use crate::types::options::SamplingParams;

/// The sampling parameters and end conditions of a sequence.
#[derive(Debug, Clone, Default)]
pub struct ResolvedSampling {
    pub params: SamplingParams,
    /// End-of-sequence tokens of the model. Empty with `ignore_eos`.
    pub eos: Arc<[u32]>,
    /// `params.bad_words` as tokens, in all tokenizations.
    pub bad_words: Vec<Vec<u32>>,
    /// Text of each token, in which DRY searches for breakers.
    pub token_bytes: Arc<Vec<Vec<u8>>>,
}

impl ResolvedSampling {
    pub fn stops_at(&self, token: u32) -> bool {
        self.eos.contains(&token) || self.params.stop_token_ids.contains(&token)
    }

    /// Returns true if a sequence with `generated` tokens must not end with the next token.
    pub fn must_go_on(&self, generated: usize) -> bool {
        generated < self.params.min_tokens
    }
}
