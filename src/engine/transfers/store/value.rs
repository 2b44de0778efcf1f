//! The names and the values of blocks in a store.
//!
//! A value has a header and the bytes of a block. The header begins with a magic number that names
//! the version of the format. The length, the key and the checksum follow.

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use crate::kv::BlockHash;
use crate::types::kv_store::BlockKey;

/// The first bytes of a value. Another format has another number.
const MAGIC: &[u8; 8] = b"PLLMKVB1";
const LENGTH: usize = MAGIC.len();
const KEY: usize = LENGTH + 8;
const CHECKSUM: usize = KEY + 32;
/// Size of the header in bytes.
pub const HEADER: usize = CHECKSUM + 32;

/// What the contents of a block depend on, apart from its tokens and its salt.
pub struct Contents<'a> {
    /// Fingerprint of the model.
    pub model: &'a [u8; 32],
    /// Storage layout of K and V, with the type.
    pub layout: &'a str,
    /// Instruction path that computes K and V.
    pub isa: &'a str,
    pub block_size: usize,
    pub groups: usize,
    /// Bytes of one block in each array of the device.
    pub parts: &'a [usize],
}

/// The format of the values of one engine.
#[derive(Clone)]
pub struct ValueFormat {
    namespace: [u8; 32],
    secret: Option<Vec<u8>>,
    block_bytes: usize,
}

impl ValueFormat {
    pub fn new(contents: &Contents, secret: Option<&[u8]>) -> ValueFormat {
        let Contents { model, layout, isa, block_size, groups, parts } = contents;
        let mut hash = Sha256::new().chain_update(MAGIC).chain_update(model);
        for text in [layout, isa] {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        }
        for &number in [block_size, groups].into_iter().chain(*parts) {
            hash.update((number as u64).to_le_bytes());
        }
        ValueFormat { namespace: hash.finalize().into(), secret: secret.map(<[u8]>::to_vec), block_bytes: parts.iter().sum() }
    }

    /// Returns the bytes of a block, of all workers.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Returns the size of a value in bytes.
    pub fn value_bytes(&self) -> usize {
        HEADER + self.block_bytes
    }

    /// Returns the key of a block. With a secret, the store cannot derive the tokens from it.
    pub fn key(&self, hash: &BlockHash) -> BlockKey {
        self.digest(&[b"key", &self.namespace, hash.bytes()])
    }

    /// Writes the header of a value whose block is complete.
    pub fn seal(&self, key: &BlockKey, value: &mut [u8]) {
        let length = (value.len() as u64).to_le_bytes();
        value[..LENGTH].copy_from_slice(MAGIC);
        value[LENGTH..KEY].copy_from_slice(&length);
        value[KEY..CHECKSUM].copy_from_slice(key);
        let checksum = self.checksum(value);
        value[CHECKSUM..HEADER].copy_from_slice(&checksum);
    }

    /// Returns whether the value is complete, undamaged and that of the key.
    pub fn is_valid(&self, key: &BlockKey, value: &[u8]) -> bool {
        value.len() == self.value_bytes()
            && value[..LENGTH] == *MAGIC
            && value[LENGTH..KEY] == (value.len() as u64).to_le_bytes()
            && value[KEY..CHECKSUM] == *key
            && value[CHECKSUM..HEADER] == self.checksum(value)
    }

    fn checksum(&self, value: &[u8]) -> [u8; 32] {
        self.digest(&[b"value", &value[..CHECKSUM], &value[HEADER..]])
    }

    fn digest(&self, parts: &[&[u8]]) -> [u8; 32] {
        match &self.secret {
            None => parts.iter().fold(Sha256::new(), |hash, part| hash.chain_update(part)).finalize().into(),
            Some(secret) => {
                let mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC accepts a key of any length");
                parts.iter().fold(mac, |mac, part| mac.chain_update(part)).finalize().into_bytes().into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents() -> Contents<'static> {
        Contents { model: &[7; 32], layout: "rows bf16", isa: "avx2", block_size: 16, groups: 1, parts: &[8, 8] }
    }

    fn hash() -> BlockHash {
        BlockHash::root(&[7; 32], b"salt").next(&[1, 2, 3])
    }

    #[test]
    fn any_changed_byte_or_length_makes_a_value_invalid() {
        for secret in [None, Some(&b"sixteen bytes..."[..])] {
            let format = ValueFormat::new(&contents(), secret);
            let key = format.key(&hash());
            let mut value = vec![9; format.value_bytes()];
            format.seal(&key, &mut value);
            assert!(format.is_valid(&key, &value));
            for byte in 0..value.len() {
                value[byte] ^= 1;
                assert!(!format.is_valid(&key, &value), "byte {byte}");
                value[byte] ^= 1;
            }
            assert!(!format.is_valid(&key, &value[..value.len() - 1]) && !format.is_valid(&[0; 32], &value));
        }
    }

    #[test]
    fn keys_differ_between_contents_secrets_and_groups() {
        let mut keys = vec![
            ValueFormat::new(&contents(), None).key(&hash()),
            ValueFormat::new(&contents(), Some(b"sixteen bytes...")).key(&hash()),
            ValueFormat::new(&contents(), Some(b"sixteen others..")).key(&hash()),
            ValueFormat::new(&contents(), None).key(&hash().for_group(1)),
            ValueFormat::new(&Contents { model: &[8; 32], ..contents() }, None).key(&hash()),
            ValueFormat::new(&Contents { layout: "rows f32", ..contents() }, None).key(&hash()),
            ValueFormat::new(&Contents { isa: "avx512", ..contents() }, None).key(&hash()),
            ValueFormat::new(&Contents { block_size: 32, ..contents() }, None).key(&hash()),
            ValueFormat::new(&Contents { groups: 2, ..contents() }, None).key(&hash()),
            ValueFormat::new(&Contents { parts: &[16], ..contents() }, None).key(&hash()),
        ];
        let count = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), count);
    }
}
