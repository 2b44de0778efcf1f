//! A slab: an array whose elements keep their index.

use std::ops::{Index, IndexMut};

use crate::error::Result;

/// The index of an element in its slab, valid until the element is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot(u32);

impl Slot {
    /// An index without an element.
    pub const NONE: Slot = Slot(u32::MAX);
}

/// An array whose elements keep their index.
#[derive(Debug)]
pub struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<Slot>, // the last one is used next
}

impl<T> Default for Slab<T> {
    fn default() -> Slab<T> {
        Slab { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Reserves space for `more` elements, and for the free list of all elements.
    pub fn try_reserve(&mut self, more: usize) -> Result<()> {
        let new = more.saturating_sub(self.free.len());
        self.slots.try_reserve(new)?;
        // All elements may be removed.
        Ok(self.free.try_reserve(self.len() + more)?)
    }

    /// Returns how many elements fit without an allocation. For tests.
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.slots.capacity()
    }

    /// Returns the slot of the next insertion.
    pub fn next(&self) -> Slot {
        self.free.last().copied().unwrap_or(Slot(self.slots.len() as u32))
    }

    pub fn insert(&mut self, value: T) -> Slot {
        let slot = self.next();
        match self.free.pop() {
            Some(Slot(slot)) => self.slots[slot as usize] = Some(value),
            None => self.slots.push(Some(value)),
        }
        slot
    }

    pub fn remove(&mut self, slot: Slot) -> T {
        let value = self.slots[slot.0 as usize].take().expect("what is taken out is there");
        self.free.push(slot);
        value
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    #[inline]
    pub fn get(&self, slot: Slot) -> Option<&T> {
        self.slots.get(slot.0 as usize)?.as_ref()
    }

    /// Returns all slots that have been used, including empty ones.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + use<T> {
        (0..self.slots.len() as u32).map(Slot)
    }

    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten()
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().flatten()
    }

    /// Returns two elements, the second one mutable.
    pub fn two(&mut self, one: Slot, other: Slot) -> (&T, &mut T) {
        let [one, other] = self.slots.get_disjoint_mut([one.0 as usize, other.0 as usize]).expect("two slots, and not the same");
        (one.as_ref().expect("a slot in use"), other.as_mut().expect("a slot in use"))
    }
}

impl<T> Index<Slot> for Slab<T> {
    type Output = T;

    #[inline]
    fn index(&self, slot: Slot) -> &T {
        self.slots[slot.0 as usize].as_ref().expect("a slot in use")
    }
}

impl<T> IndexMut<Slot> for Slab<T> {
    #[inline]
    fn index_mut(&mut self, slot: Slot) -> &mut T {
        self.slots[slot.0 as usize].as_mut().expect("a slot in use")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_their_slots_and_free_slots_are_reused() {
        let mut slab = Slab::default();
        slab.try_reserve(3).unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|value| slab.insert(value));
        assert_eq!((slab.remove(b), slab.len(), slab.next()), ("b", 2, b));
        assert_eq!((slab[a], slab.get(b), slab[c]), ("a", None, "c"));
        assert_eq!((slab.insert("d"), slab[b], slab.len()), (b, "d", 3));
        let (one, other) = slab.two(a, c);
        *other = one;
        assert_eq!(slab.values().copied().collect::<Vec<_>>(), ["a", "d", "a"]);
    }
}
