//! Lists of addresses and sizes that kernels read.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::device::Device;
use super::memory::{Address, Memory};
use crate::error::Result;

/// Device-side lists of addresses and sizes. A list is created at its first use, and again if its
/// contents change, because an address may be reused.
#[derive(Default)]
pub struct Tables(Mutex<HashMap<Key, Table>>);

struct Table {
    numbers: Vec<u64>,
    memory: Memory,
}

impl Tables {
    /// Returns the address of the list with this key.
    pub fn get(&self, device: &Device, key: Key, numbers: impl Iterator<Item = u64> + Clone) -> Result<Address> {
        let mut tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = tables.get(&key).filter(|table| table.numbers.iter().copied().eq(numbers.clone())) {
            return Ok(table.memory.address());
        }
        let numbers: Vec<u64> = numbers.collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        let memory = device.memory(bytes.len() as u64)?;
        device.write(&memory, 0, &bytes)?;
        let address = memory.address();
        tables.insert(key, Table { numbers, memory });
        Ok(address)
    }
}

/// The identity of a list, by the address of its first object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Key {
    /// Base addresses of the levels of the tier at this address.
    Bases(Address),
    /// Strides of the levels of the tier at this address.
    Strides(Address),
    /// Bytes per block of each level of the pool at this address.
    Levels(Address),
    Matrices(Address),
    Biases(Address),
    /// ALiBi slopes, by number of heads and bits of the factor.
    Slopes(usize, u32),
}
