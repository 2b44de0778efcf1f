//! A map from ids, with a cheap hash.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map with a cheap hash. The ids are a counter, so a host cannot choose colliding ids. One
/// multiplication is enough. The default hash would take a significant part of a step.
pub type IdMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;

/// The hasher of `IdMap`.
#[derive(Debug, Default, Clone, Copy)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte as u64));
    }

    fn write_u64(&mut self, id: u64) {
        let product = (self.0 ^ id >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        // Sixteen consecutive ids are adjacent in the map. Running sequences often have consecutive
        // ids, so a step accesses few pages however many sequences wait. The map derives the bucket
        // from the lowest bits and distinguishes neighbours by the highest.
        self.0 = ((product ^ product >> 32) & !15 | id & 15) ^ id << 60;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::BuildHasher;

    use super::*;
    use crate::types::{RequestId, SeqId};

    fn hash(id: u64) -> u64 {
        let mut hasher = IdHasher::default();
        hasher.write_u64(id);
        hasher.finish()
    }

    #[test]
    fn a_typed_id_has_the_hash_of_its_number() {
        let map = BuildHasherDefault::<IdHasher>::default();
        for number in [1, 300, u64::MAX] {
            assert_eq!(map.hash_one(SeqId::from_raw(number)), hash(number));
            assert_eq!(map.hash_one(RequestId::from_raw(number)), hash(number));
        }
    }

    #[test]
    fn adjacent_ids_have_adjacent_hashes_and_distant_ids_are_spread() {
        assert!((32..47).all(|id| hash(id + 1) & 0xFFFF == (hash(id) & 0xFFFF) + 1));
        let tags: HashSet<u64> = (32..48).map(|id| hash(id) >> 57).collect();
        assert_eq!(tags.len(), 16, "the tags of the hash map differ");
        for stride in [16, 64, 1024, 1 << 20] {
            let groups: HashSet<u64> = (0..4096).map(|i| hash(i * stride) >> 4 & 0xFFFF).collect();
            assert!(groups.len() > 3600, "{stride}: {} of 4096", groups.len());
        }
    }
}
