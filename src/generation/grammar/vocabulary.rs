//! The tokens of a model.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::earley::{BiasComputer, ParserRecognizer, SlicedBiasComputer};
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use super::compile;
use crate::error::{Error, Result, try_vec};

/// The token of each row of the model's logits.
#[derive(Debug, Clone, Default)]
pub struct Vocabulary {
    /// Bytes of each token, or the name of a special token. Empty for a row without a token, which
    /// no grammar allows.
    pub tokens: Vec<Vec<u8>>,
    /// True for each special token, which is not text. A grammar allows special tokens only by
    /// name.
    pub special: Vec<bool>,
    /// The tokens that end a sequence.
    pub eos: Vec<u32>,
}

impl Vocabulary {
    /// Maximum length of a token in bytes. The trie has ten bits for it.
    const MAX_TOKEN_BYTES: usize = 1000;

    /// Returns the set of the tokens that a grammar may allow, one bit per token.
    pub(super) fn known(&self) -> Result<Vec<u32>> {
        let mut known = try_vec(self.tokens.len().div_ceil(32), 0)?;
        (0..self.tokens.len()).filter(|&i| self.is_known(i)).for_each(|i| known[i / 32] |= 1 << (i % 32));
        self.eos.iter().filter(|&&id| (id as usize) < self.tokens.len()).for_each(|id| known[*id as usize / 32] |= 1 << (id % 32));
        Ok(known)
    }

    pub(super) fn ends(&self) -> Result<Vec<u32>> {
        let mut ends = try_vec(self.tokens.len().div_ceil(32), 0)?;
        for &id in &self.eos {
            if id as usize >= self.tokens.len() {
                let rows = self.tokens.len();
                return Err(Error::model(format!(
                    "end-of-sequence token outside the vocabulary ({id}, {rows} tokens); correct the model's configuration"
                )));
            }
            ends[id as usize / 32] |= 1 << (id % 32);
        }
        Ok(ends)
    }

    fn is_special(&self, token: usize) -> bool {
        self.special.get(token).copied().unwrap_or(false)
    }

    fn is_known(&self, token: usize) -> bool {
        let bytes = &self.tokens[token];
        // The trie marks special tokens with a byte that does not begin a text.
        let confusing = !self.is_special(token) && bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
        !bytes.is_empty() && bytes.len() <= Self::MAX_TOKEN_BYTES && !confusing
    }

    /// Returns the tokens in the form of the trie.
    fn into_words(mut self) -> Vec<Vec<u8>> {
        for i in 0..self.tokens.len() {
            if !self.is_known(i) {
                self.tokens[i].clear();
            } else if self.is_special(i) {
                self.tokens[i].insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
            }
        }
        self.tokens
    }
}

/// Computes an empty mask without work.
pub(super) struct Nothing(pub TokEnv);

impl BiasComputer for Nothing {
    fn compute_bias(&self, _: &mut ParserRecognizer<'_>, _: &[u8]) -> SimpleVob {
        SimpleVob::new()
    }

    fn trie(&self) -> &TokTrie {
        self.0.tok_trie()
    }
}

/// Returns the vocabulary in the form of llguidance. Its tokenizer is not used, because only forced
/// tokens need it and they are not requested.
pub(super) fn factory(vocabulary: Vocabulary) -> std::result::Result<ParserFactory, String> {
    let eos = vocabulary.eos.clone();
    let words = vocabulary.into_words();
    let info = TokRxInfo::new(words.len() as u32, eos.first().copied().unwrap_or(INVALID_TOKEN));
    let mut trie = TokTrie::from(&info, &words);
    if eos.len() > 1 {
        trie = trie.with_eos_tokens(&eos);
    }
    let tokens = Arc::new(ApproximateTokEnv::new(trie));
    let slices = SlicedBiasComputer::general_slices();
    let mut factory = ParserFactory::new(&(tokens as _), InferenceCapabilities::default(), &slices).map_err(|e| e.to_string())?;
    *factory.limits_mut() = compile::limits();
    factory.quiet();
    Ok(factory)
}
