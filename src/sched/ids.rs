//! Maps by ids that the engine gave out itself.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Ids are counted up, so that no host can choose them to collide: one multiplication is enough, where the default hash would be a
/// good part of a step.
pub type IdMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;

#[derive(Debug, Default, Clone, Copy)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte as u64));
    }

    fn write_u64(&mut self, id: u64) {
        // The map looks at the highest bits and at the lowest.
        let product = (self.0 ^ id).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ product >> 32;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
