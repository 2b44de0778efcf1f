//! The budget of one rendering: steps, and bytes of values that live at the same time.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::rc::Rc;

use super::failure::{Failure, Result};
use super::{MAX_DEPTH, MAX_STEPS, MAX_VALUE_BYTES};

/// Number of bytes that can be copied or compared in one step.
const BYTES_PER_STEP: usize = 256;
/// Number of bytes that can be examined one by one, or hashed, in one step.
pub const SCANNED_BYTES_PER_STEP: usize = 32;

#[derive(Debug, Default)]
pub struct RenderBudget {
    steps: Cell<u64>,
    live_bytes: Cell<usize>,
    depth: Cell<usize>,
    /// The maximum of `live_bytes`.
    #[cfg(test)]
    peak: Cell<usize>,
}

impl RenderBudget {
    pub fn step(&self) -> Result<()> {
        self.steps(1)
    }

    /// Counts work on `elements` elements, such as those of a container.
    pub fn steps(&self, elements: usize) -> Result<()> {
        let steps = self.steps.get().saturating_add(elements as u64);
        self.steps.set(steps);
        if steps > MAX_STEPS {
            return Err(Failure::limit(format_args!(
                "rendering takes too long (more than {MAX_STEPS} steps); shorten the chat or the template"
            )));
        }
        Ok(())
    }

    /// Counts work that examines each of `bytes` bytes of text.
    pub fn scan(&self, bytes: usize) -> Result<()> {
        self.steps(bytes / SCANNED_BYTES_PER_STEP)
    }

    /// Counts copying or comparing `bytes` bytes of text.
    pub fn work(&self, bytes: usize) -> Result<()> {
        self.steps(bytes / BYTES_PER_STEP)
    }

    /// Fails if the budget does not allow `bytes` more bytes. Call it before each allocation whose
    /// size a template determines.
    pub fn check(&self, bytes: usize) -> Result<()> {
        if bytes > MAX_VALUE_BYTES - self.live_bytes.get() {
            let message = format!("the template's values take too much memory (more than {MAX_VALUE_BYTES} bytes); shorten them");
            return Err(Failure::limit(message));
        }
        Ok(())
    }

    /// Charges `bytes` until the lease is dropped.
    pub fn lease(self: &Rc<RenderBudget>, bytes: usize) -> Result<Lease> {
        self.work(bytes)?;
        let mut lease = Lease { budget: self.clone(), bytes: 0 };
        lease.resize(bytes)?;
        Ok(lease)
    }

    /// Enters one level of recursion. Fails if there are too many levels.
    pub fn deeper(&self) -> Result<()> {
        self.depth.set(self.depth.get() + 1);
        if self.depth.get() > MAX_DEPTH {
            return Err(Failure::limit(format_args!("the template recurses too deep (more than {MAX_DEPTH} levels); nest less")));
        }
        Ok(())
    }

    pub fn shallower(&self) {
        self.depth.set(self.depth.get().saturating_sub(1));
    }
}

/// Bytes that are charged to a budget.
#[derive(Debug)]
pub struct Lease {
    budget: Rc<RenderBudget>,
    bytes: usize,
}

impl Lease {
    /// Changes the number of charged bytes.
    pub fn resize(&mut self, bytes: usize) -> Result<()> {
        self.budget.check(bytes.saturating_sub(self.bytes))?;
        self.budget.live_bytes.set(self.budget.live_bytes.get() - self.bytes + bytes);
        self.bytes = bytes;
        #[cfg(test)]
        self.budget.peak.set(self.budget.peak.get().max(self.budget.live_bytes.get()));
        Ok(())
    }

    /// Resizes the lease for a block that `grow` changes from `old` to `new` bytes. During the
    /// copy, both blocks exist. An error of `grow` means that memory ran out and the block is
    /// unchanged.
    pub fn grow<E>(&mut self, old: usize, new: usize, grow: impl FnOnce() -> std::result::Result<(), E>) -> Result<()> {
        let before = self.bytes;
        self.resize(before.saturating_add(new))?;
        let grown = grow().map_err(|_| Failure::out_of_memory());
        self.resize(if grown.is_ok() { before - old + new } else { before })?;
        grown
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.budget.live_bytes.set(self.budget.live_bytes.get() - self.bytes);
    }
}

/// A string whose size a template determines. Its bytes are charged as it grows.
#[derive(Debug)]
pub struct Builder {
    text: String,
    lease: Lease,
}

impl Builder {
    pub fn new(budget: &Rc<RenderBudget>) -> Builder {
        Builder { text: String::new(), lease: Lease { budget: budget.clone(), bytes: 0 } }
    }

    pub fn push(&mut self, text: &str) -> Result<()> {
        self.reserve(text.len())?;
        let before = self.text.len() / BYTES_PER_STEP;
        self.text.push_str(text);
        self.lease.budget.steps(self.text.len() / BYTES_PER_STEP - before)
    }

    /// Counts reading `text` character by character.
    pub fn scan(&self, text: &str) -> Result<()> {
        self.lease.budget.scan(text.len())
    }

    pub fn push_char(&mut self, c: char) -> Result<()> {
        self.push(c.encode_utf8(&mut [0; 4]))
    }

    /// Adds `text` `times` times.
    pub fn repeat(&mut self, text: &str, times: usize) -> Result<()> {
        let bytes = text.len().saturating_mul(times);
        self.reserve(bytes)?;
        self.lease.budget.work(bytes)?;
        let times = if text.is_empty() { 0 } else { times };
        (0..times).for_each(|_| self.text.push_str(text));
        Ok(())
    }

    fn reserve(&mut self, more: usize) -> Result<()> {
        let (len, capacity) = (self.text.len(), self.text.capacity());
        let needed = len.saturating_add(more);
        if needed <= capacity {
            return Ok(());
        }
        let new = needed.max(2 * capacity);
        self.lease.grow(capacity, new, || self.text.try_reserve_exact(new - len))
    }

    /// Returns the text without spare capacity, and its lease.
    pub fn finish(mut self) -> Result<(Box<str>, Lease)> {
        let (len, capacity) = (self.text.len(), self.text.capacity());
        if len < capacity {
            self.lease.grow(capacity, len, || {
                // Shrinking in place could abort the process.
                let mut exact = String::new();
                exact.try_reserve_exact(len)?;
                exact.push_str(&self.text);
                self.text = exact;
                Ok::<(), std::collections::TryReserveError>(())
            })?;
        }
        Ok((self.text.into_boxed_str(), self.lease))
    }
}

impl std::ops::Deref for Builder {
    type Target = str;
    fn deref(&self) -> &str {
        &self.text
    }
}

/// A list whose length a template determines. Its own bytes are charged as it grows.
#[derive(Debug)]
pub struct Buffer<T> {
    items: Vec<T>,
    lease: Lease,
}

impl<T> Buffer<T> {
    pub fn new(budget: &Rc<RenderBudget>) -> Buffer<T> {
        Buffer { items: Vec::new(), lease: Lease { budget: budget.clone(), bytes: 0 } }
    }

    pub fn with_capacity(budget: &Rc<RenderBudget>, capacity: usize) -> Result<Buffer<T>> {
        let mut buffer = Buffer::new(budget);
        buffer.reserve(capacity)?;
        Ok(buffer)
    }

    /// Charges `bytes` more for the owner of the buffer.
    pub fn with_overhead(mut self, bytes: usize) -> Result<Buffer<T>> {
        self.lease.resize(self.lease.bytes.saturating_add(bytes))?;
        Ok(self)
    }

    pub fn push(&mut self, item: T) -> Result<()> {
        self.reserve(1)?;
        self.items.push(item);
        Ok(())
    }

    pub fn extend(&mut self, items: impl ExactSizeIterator<Item = T>) -> Result<()> {
        self.reserve(items.len())?;
        self.lease.budget.steps(items.len())?;
        self.items.extend(items);
        Ok(())
    }

    pub fn budget(&self) -> &Rc<RenderBudget> {
        &self.lease.budget
    }

    pub fn pop_if(&mut self, test: impl FnOnce(&mut T) -> bool) -> Option<T> {
        self.items.pop_if(test)
    }

    pub fn clear(&mut self) {
        self.items.clear();
    }

    pub fn remove(&mut self, index: usize) -> T {
        self.items.remove(index)
    }

    fn reserve(&mut self, more: usize) -> Result<()> {
        let (len, capacity) = (self.items.len(), self.items.capacity());
        let needed = len.saturating_add(more);
        if needed <= capacity || size_of::<T>() == 0 {
            return Ok(());
        }
        let new = needed.max(2 * capacity);
        self.lease.grow(capacity * size_of::<T>(), new.saturating_mul(size_of::<T>()), || self.items.try_reserve_exact(new - len))
    }
}

impl<T> std::ops::Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.items
    }
}

impl<T> std::ops::DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items
    }
}

impl<T> IntoIterator for Buffer<T> {
    type Item = T;
    type IntoIter = Drain<T>;
    fn into_iter(self) -> Drain<T> {
        Drain { items: self.items.into_iter(), _lease: self.lease }
    }
}

/// The remaining items of a buffer.
#[derive(Debug)]
pub struct Drain<T> {
    items: std::vec::IntoIter<T>,
    _lease: Lease,
}

impl<T> Iterator for Drain<T> {
    type Item = T;
    fn next(&mut self) -> Option<T> {
        self.items.next()
    }
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.items.size_hint()
    }
}

impl<T> DoubleEndedIterator for Drain<T> {
    fn next_back(&mut self) -> Option<T> {
        self.items.next_back()
    }
}

impl<T> ExactSizeIterator for Drain<T> {}
