//! The texts of all tokens, in which DRY searches for sequence breakers.

use crate::error::{Error, Result};

/// The texts, one after the other, so that those of random tokens are in few cache lines.
#[derive(Debug, Clone, Default)]
pub struct TokenTexts {
    bytes: Vec<u8>,
    /// End of each token's text.
    ends: Vec<u32>,
}

impl TokenTexts {
    pub fn new(texts: &[Vec<u8>]) -> Result<TokenTexts> {
        let size = texts.iter().map(Vec::len).sum();
        if u32::try_from(size).is_err() {
            return Err(Error::model(format!("the texts of all tokens are too large ({size} bytes, limit {}); shorten tokens", u32::MAX)));
        }
        let mut all = TokenTexts::default();
        all.bytes.try_reserve_exact(size)?;
        all.ends.try_reserve_exact(texts.len())?;
        for text in texts {
            all.bytes.extend_from_slice(text);
            all.ends.push(all.bytes.len() as u32);
        }
        Ok(all)
    }

    /// Returns the text of a token. Tokens that are not in the tokenizer have none.
    pub fn get(&self, token: u32) -> &[u8] {
        let Some(&end) = self.ends.get(token as usize) else { return &[] };
        let start = (token as usize).checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start as usize..end as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_has_its_text_and_tokens_beyond_the_last_have_none() {
        let texts: Vec<Vec<u8>> = ["a", "", "xyz", "", "ä"].map(|text| text.into()).to_vec();
        let all = TokenTexts::new(&texts).unwrap();
        (0..5).for_each(|token| assert_eq!(all.get(token), texts[token as usize]));
        assert_eq!((all.get(5), all.get(u32::MAX)), (&[][..], &[][..]));
        assert!(TokenTexts::default().get(0).is_empty());
    }
}
