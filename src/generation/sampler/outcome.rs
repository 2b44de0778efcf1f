//! The result of sampling one token.

use std::collections::TryReserveError;

use crate::error::Error;

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sample {
    pub token: u32,
    /// Surprise in bits, with mirostat only.
    pub surprise: Option<f32>,
}

/// The reason why no token can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoChoice {
    /// The logits contain NaN or infinity.
    NotFinite,
    /// All tokens are excluded.
    Excluded,
    OutOfMemory,
}

impl From<TryReserveError> for NoChoice {
    fn from(_: TryReserveError) -> NoChoice {
        NoChoice::OutOfMemory
    }
}

impl From<NoChoice> for Error {
    fn from(why: NoChoice) -> Error {
        match why {
            NoChoice::NotFinite => {
                Error::model("no token can be chosen: the logits are not finite; check the model's weights for NaN, infinity and overflow")
            }
            NoChoice::Excluded => Error::invalid(
                "no token can be chosen: all are excluded, by min_tokens together with stop_token_ids and the end-of-sequence tokens, \
                 allowed_token_ids, bad_words, no_repeat_ngram_size or the grammar; loosen one of them",
            ),
            NoChoice::OutOfMemory => Error::out_of_memory(),
        }
    }
}
