//! The parameters of a sequence, resolved against its model.

use std::sync::Arc;

use super::text_matcher::TextMatcher;
use super::token_texts::TokenTexts;
use crate::error::{Result, try_texts};
use crate::types::options::SamplingParams;
use crate::types::outputs::StopReason;

/// The sampling parameters and end conditions of a sequence.
#[derive(Debug, Clone, Default)]
pub struct ResolvedSampling {
    pub params: SamplingParams,
    /// End-of-sequence tokens of the model. Empty with `ignore_eos`.
    pub eos: Arc<[u32]>,
    /// `params.bad_words` as tokens, in all tokenizations.
    pub bad_words: Vec<Vec<u32>>,
    /// Text of each token, in which DRY searches for breakers.
    pub token_texts: Arc<TokenTexts>,
    /// `params.stop` as an automaton.
    pub stops: TextMatcher,
    /// `params.stop`, shared with the outputs that report them.
    pub stop_texts: Arc<Vec<String>>,
    /// The sequence breakers of `params.dry` as an automaton. Empty if DRY is off.
    pub breakers: TextMatcher,
}

impl ResolvedSampling {
    /// Builds the automata of the parameters.
    pub fn new(
        params: SamplingParams,
        eos: Arc<[u32]>,
        bad_words: Vec<Vec<u32>>,
        token_texts: Arc<TokenTexts>,
    ) -> Result<ResolvedSampling> {
        let stops = TextMatcher::new(&params.stop)?;
        let stop_texts = Arc::new(try_texts(&params.stop)?);
        let dry = params.dry.as_ref().filter(|dry| dry.is_on());
        let breakers = TextMatcher::new(dry.and_then(|dry| dry.sequence_breakers.as_deref()).unwrap_or_default())?;
        Ok(ResolvedSampling { params, eos, bad_words, token_texts, stops, stop_texts, breakers })
    }

    /// Returns the text of a token, in which DRY searches for breakers.
    pub fn bytes_of(&self, token: u32) -> &[u8] {
        self.token_texts.get(token)
    }

    /// Returns the reason why a token has ended the sequence.
    pub fn stop_reason(&self, token: u32) -> StopReason {
        match self.params.stop_token_ids.contains(&token) {
            true => StopReason::Token(token),
            false => StopReason::Eos(token),
        }
    }

    pub fn stops_at(&self, token: u32) -> bool {
        self.eos.contains(&token) || self.params.stop_token_ids.contains(&token)
    }

    /// Returns true if a sequence with `generated` tokens must not end with the next token.
    pub fn must_go_on(&self, generated: usize) -> bool {
        generated < self.params.min_tokens
    }
}
