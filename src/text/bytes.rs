//! The bytes of each token within a text. Grammars work on these bytes.

use std::collections::HashMap;

use tokenizers::DecoderWrapper;

use super::tokenizer::Tokenizer;
use crate::error::Result;

/// One entry per row of the model's logits.
#[derive(Debug, Clone)]
pub struct TokenBytes {
    /// Bytes of each token. A special token has its name. A row that the tokenizer does not know is
    /// empty.
    pub bytes: Vec<Vec<u8>>,
    /// Whether each token is special.
    pub special: Vec<bool>,
}

/// A neighbour of the decoded token. Its text is known and can be removed.
const NEIGHBOUR: &str = "a";

impl TokenBytes {
    pub(super) fn from_tokenizer(tokenizer: &Tokenizer, rows: usize) -> Result<TokenBytes> {
        let spelling = Spelling::from_tokenizer(tokenizer);
        let mut all = TokenBytes { bytes: Vec::new(), special: Vec::new() };
        all.bytes.try_reserve_exact(rows)?;
        all.special.try_reserve_exact(rows)?;
        for token in 0..rows as u32 {
            let piece = tokenizer.piece(token, false).ok().flatten();
            let special = piece.is_some() && !tokenizer.shows(token, true);
            let bytes = match piece {
                Some(name) if special => name.into_bytes(),
                Some(piece) => spelling.bytes(tokenizer, piece),
                None => Vec::new(),
            };
            all.bytes.push(bytes);
            all.special.push(special);
        }
        Ok(all)
    }
}

/// The form in which a vocabulary stores bytes.
enum Spelling {
    /// One character per byte.
    ByteLevel(HashMap<char, u8>),
    /// Text in the form of the decoder. Some tokens may be single bytes.
    Text { byte_fallback: bool, after: String },
}

impl Spelling {
    fn from_tokenizer(tokenizer: &Tokenizer) -> Spelling {
        if tokenizer.decodes_with(&|decoder| matches!(decoder, DecoderWrapper::ByteLevel(_))) {
            return Spelling::ByteLevel(byte_level_alphabet());
        }
        let byte_fallback = tokenizer.decodes_with(&|decoder| matches!(decoder, DecoderWrapper::ByteFallback(_)));
        let two = tokenizer.join(vec![NEIGHBOUR.into(); 2]).unwrap_or_default();
        Spelling::Text { byte_fallback, after: two.strip_prefix(NEIGHBOUR).unwrap_or(NEIGHBOUR).into() }
    }

    fn bytes(&self, tokenizer: &Tokenizer, piece: String) -> Vec<u8> {
        match self {
            Spelling::ByteLevel(alphabet) => {
                let bytes: Option<Vec<u8>> = piece.chars().map(|c| alphabet.get(&c).copied()).collect();
                // The decoder does not change other tokens, such as added ones.
                bytes.unwrap_or_else(|| piece.into_bytes())
            }
            Spelling::Text { byte_fallback, after } => {
                let single = byte_of(&piece).filter(|_| *byte_fallback).map(|byte| vec![byte]);
                single.or_else(|| between(tokenizer, piece, after)).unwrap_or_default()
            }
        }
    }
}

/// Returns the decoded bytes of a token between two others. At the edges of a text, a decoder may
/// remove spaces.
fn between(tokenizer: &Tokenizer, piece: String, after: &str) -> Option<Vec<u8>> {
    let text = tokenizer.join(vec![NEIGHBOUR.into(), piece, NEIGHBOUR.into()]).ok()?;
    Some(text.strip_prefix(NEIGHBOUR)?.strip_suffix(after)?.as_bytes().to_vec())
}

/// Returns the byte of a token such as `<0x0A>`.
fn byte_of(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// Returns the byte alphabet of GPT-2. Printable bytes are themselves, and the others start at
/// U+0100.
fn byte_level_alphabet() -> HashMap<char, u8> {
    let prints = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..=255u8).filter(|byte| !prints(byte)).zip('\u{100}'..).map(|(byte, c)| (c, byte));
    (0..=255u8).filter(prints).map(|byte| (byte as char, byte)).chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Text;
    use super::super::tests::{fresh_dir, golden_cases, golden_dir};
    use super::*;
    use serde_json::json;

    fn load(name: &str) -> Text {
        Text::load(&golden_dir().join(name)).unwrap()
    }

    fn joined(all: &TokenBytes, tokens: &[u32]) -> Vec<u8> {
        tokens.iter().flat_map(|&token| all.bytes[token as usize].clone()).collect()
    }

    #[test]
    fn the_bytes_of_tokens_equal_the_bytes_of_their_text() {
        let mut seen = 0;
        for case in golden_cases("cases.json") {
            let Some(given) = case["text"].as_str() else { continue };
            let text = load(case["tokenizer"].as_str().unwrap());
            let all = text.token_bytes(text.vocab_size()).unwrap();
            let tokens = text.encode(given, false).unwrap();
            // Compared with the decoded text, because some tokenizers read U+2581 as a space.
            let wanted = text.decode(&tokens, false).unwrap();
            let bytes = joined(&all, &tokens);
            // A sentencepiece tokenizer adds a space before the first word, and its decoder removes
            // it.
            assert!(bytes == wanted.as_bytes() || bytes.strip_prefix(b" ") == Some(wanted.as_bytes()), "{case}: {bytes:?}");
            seen += 1;
        }
        assert!(seen > 50, "only {seen} cases");
    }

    #[test]
    fn every_token_has_the_bytes_of_its_decoded_text() {
        for name in ["byte_level", "llama2", "metaspace"] {
            let text = load(name);
            let all = text.token_bytes(text.vocab_size()).unwrap();
            let anchor = text.encode("x", false).unwrap();
            let before = text.decode(&anchor, false).unwrap();
            for token in (0..text.vocab_size() as u32).filter(|&token| !all.special[token as usize]) {
                let shown = text.decode(&[anchor.clone(), vec![token]].concat(), false).unwrap();
                // An incomplete character is decoded to a replacement character.
                if let Ok(own) = std::str::from_utf8(&all.bytes[token as usize]) {
                    assert_eq!(shown, before.clone() + own, "{name}: {token}");
                }
            }
        }
    }

    #[test]
    fn all_256_bytes_can_be_written_where_the_vocabulary_has_them() {
        for name in ["byte_level", "llama2", "metaspace"] {
            let text = load(name);
            let all = text.token_bytes(text.vocab_size()).unwrap();
            for byte in 0..=255u8 {
                assert!(all.bytes.contains(&vec![byte]), "{name} has no token for {byte}");
            }
        }
    }

    #[test]
    fn special_tokens_are_marked_and_rows_beyond_the_tokenizer_are_empty() {
        let text = load("byte_level");
        let all = text.token_bytes(text.vocab_size() + 12).unwrap();
        assert_eq!(all.special.iter().filter(|special| **special).count(), 2);
        let end = all.bytes.iter().position(|bytes| bytes == b"<|end|>").unwrap();
        assert!(all.special[end]);
        assert!(all.bytes[text.vocab_size()..].iter().all(Vec::is_empty));
        assert_eq!(all.bytes.len(), text.vocab_size() + 12);
    }

    #[test]
    fn a_plain_vocabulary_has_words_with_a_leading_space() {
        let dir = fresh_dir("plain");
        let decoder = json!({"type": "WordPiece", "prefix": "##", "cleanup": false});
        let file = json!({"version": "1.0", "decoder": decoder,
            "model": {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9,
                "vocab": {"?": 0, "go": 1, "##ing": 2}}});
        std::fs::write(dir.join("tokenizer.json"), file.to_string()).unwrap();
        let all = Text::load(&dir).unwrap().token_bytes(3).unwrap();
        assert_eq!(all.bytes, [b" ?".to_vec(), b" go".to_vec(), b"ing".to_vec()]);
    }
}
