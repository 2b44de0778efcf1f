//! The hashes of full blocks.

use sha2::{Digest, Sha256};

use crate::types::SeqId;

/// Tokens that are passed to the hash function at once.
const AT_ONCE: usize = 16;

/// The hash of a full block: of its tokens and of all tokens before them. SHA-256 excludes
/// collisions that an attacker could construct.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// Returns the initial hash for a model and a salt. Sequences with different models or salts
    /// share no blocks.
    pub fn root(model: &[u8; 32], salt: &[u8]) -> BlockHash {
        BlockHash(Sha256::new().chain_update(model).chain_update(b"salt").chain_update(salt).finalize().into())
    }

    /// Returns the initial hash for one sequence. No salt can produce it, so that the sequence
    /// shares blocks only with its forks.
    pub fn for_sequence(model: &[u8; 32], sequence: SeqId) -> BlockHash {
        BlockHash(Sha256::new().chain_update(model).chain_update(b"sequence").chain_update(sequence.get().to_le_bytes()).finalize().into())
    }

    /// Returns the hash of the next block, which holds `tokens`.
    pub fn next(&self, tokens: &[u32]) -> BlockHash {
        let mut hash = Sha256::new().chain_update(self.0);
        for tokens in tokens.chunks(AT_ONCE) {
            let mut bytes = [0; 4 * AT_ONCE];
            bytes.chunks_exact_mut(4).zip(tokens).for_each(|(bytes, token)| bytes.copy_from_slice(&token.to_le_bytes()));
            hash.update(&bytes[..4 * tokens.len()]);
        }
        BlockHash(hash.finalize().into())
    }

    /// Returns the bytes of the hash.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the hash of the block of a layer group for the same tokens.
    pub fn for_group(mut self, group: usize) -> BlockHash {
        self.0.iter_mut().zip((group as u32).to_le_bytes()).for_each(|(byte, number)| *byte ^= number);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_depend_on_model_salt_tokens_and_position() {
        let root = BlockHash::root(&[0; 32], b"");
        let one = root.next(&[1, 2]);
        let others = [
            root,
            root.next(&[2, 1]),
            one.next(&[1, 2]),
            BlockHash::root(&[1; 32], b"").next(&[1, 2]),
            BlockHash::root(&[0; 32], b"tenant").next(&[1, 2]),
            BlockHash::for_sequence(&[0; 32], SeqId::from_raw(0)).next(&[1, 2]),
            BlockHash::for_sequence(&[0; 32], SeqId::from_raw(1)).next(&[1, 2]),
            // A salt that imitates the hash of a sequence.
            BlockHash::root(&[0; 32], &[&b"sequence"[..], &[0; 8]].concat()).next(&[1, 2]),
        ];
        assert!(others.iter().all(|other| *other != one));
        assert_eq!(root.next(&[1, 2]), one);
    }
}
