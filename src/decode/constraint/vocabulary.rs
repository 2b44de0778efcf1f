//! The model's tokens, as data.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::earley::{BiasComputer, ParserRecognizer, SlicedBiasComputer};
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use super::compile;
use crate::error::{Error, Result, try_vec};

/// What each row of the model's logits stands for.
#[derive(Debug, Clone, Default)]
pub struct Vocabulary {
    /// The bytes of each token: of a special one its name. Nothing for a row that no token has: a grammar never allows it.
    pub tokens: Vec<Vec<u8>>,
    /// Tokens that are no text. A grammar allows them only where it names them.
    pub special: Vec<bool>,
    /// The tokens that end a sequence.
    pub eos: Vec<u32>,
}

impl Vocabulary {
    /// The trie counts a token's bytes in ten bits, and no text needs tokens as long.
    const LONGEST_TOKEN: usize = 1000;

    /// One bit per token that a grammar may allow.
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
                return Err(Error::model(format!("end-of-sequence token {id} is beyond the vocabulary of {rows} tokens")));
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
        // The trie marks special tokens with a byte that begins no text.
        let confusing = !self.is_special(token) && bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
        !bytes.is_empty() && bytes.len() <= Self::LONGEST_TOKEN && !confusing
    }

    /// The tokens as the trie wants them.
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

/// Allows nothing, and takes no time for it.
pub(super) struct Nothing(pub TokEnv);

impl BiasComputer for Nothing {
    fn compute_bias(&self, _: &mut ParserRecognizer<'_>, _: &[u8]) -> SimpleVob {
        SimpleVob::new()
    }

    fn trie(&self) -> &TokTrie {
        self.0.tok_trie()
    }
}

/// llguidance's side of a vocabulary. Its tokenizer is only asked where tokens are forced, which nobody here asks for.
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
