//! Pins: computed prompts whose blocks stay owned.

use super::slab::Slot;
use crate::error::Result;

/// The pins and their priorities.
#[derive(Debug, Default)]
pub(super) struct Pins(Vec<(u32, Slot)>); // in ascending order of priority

impl Pins {
    /// Reserves space for `total` pins.
    pub fn try_reserve(&mut self, total: usize) -> Result<()> {
        Ok(self.0.try_reserve(total.saturating_sub(self.0.len()))?)
    }

    pub fn insert(&mut self, slot: Slot, priority: u32) {
        let place = self.0.partition_point(|&(other, _)| other <= priority);
        self.0.insert(place, (priority, slot));
    }

    pub fn remove(&mut self, slot: Slot) {
        self.0.retain(|&(_, other)| other != slot);
    }

    /// Iterates over the pins, the lowest priority first.
    pub fn iter(&self) -> impl Iterator<Item = Slot> {
        self.0.iter().map(|&(_, slot)| slot)
    }

    pub fn contains(&self, slot: Slot) -> bool {
        self.iter().any(|other| other == slot)
    }
}
