//! What one rendering may take: steps, and bytes of values that live at the same time.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::rc::Rc;

use super::failure::{Failure, Result};
use super::{MAX_DEPTH, MAX_STEPS, MAX_VALUE_BYTES};

/// Bytes that are copied or compared for the price of one step.
const BYTES_PER_STEP: usize = 256;
/// Bytes that are looked at one by one, or hashed, for the price of one step.
pub const SCANNED_BYTES_PER_STEP: usize = 32;

#[derive(Debug, Default)]
pub struct Budget {
    steps: Cell<u64>,
    live_bytes: Cell<usize>,
    depth: Cell<usize>,
}

impl Budget {
    pub fn step(&self) -> Result<()> {
        self.steps(1)
    }

    /// Counts work on `elements` elements of a container, or the like.
    pub fn steps(&self, elements: usize) -> Result<()> {
        let steps = self.steps.get().saturating_add(elements as u64);
        self.steps.set(steps);
        if steps > MAX_STEPS {
            return Err(Failure::limit(format!(
                "rendering takes too long (more than {MAX_STEPS} steps); shorten the chat or the template"
            )));
        }
        Ok(())
    }

    /// Counts work on `bytes` bytes of text that looks at each.
    pub fn scan(&self, bytes: usize) -> Result<()> {
        self.steps(bytes / SCANNED_BYTES_PER_STEP)
    }

    /// Counts copying or comparing `bytes` bytes of text.
    pub fn work(&self, bytes: usize) -> Result<()> {
        self.steps(bytes / BYTES_PER_STEP)
    }

    /// Fails if `bytes` more bytes may not live now. Check before allocating anything whose size a template decides.
    pub fn check(&self, bytes: usize) -> Result<()> {
        if bytes > MAX_VALUE_BYTES - self.live_bytes.get() {
            let message = format!("the template's values take too much memory (more than {MAX_VALUE_BYTES} bytes); shorten them");
            return Err(Failure::limit(message));
        }
        Ok(())
    }

    /// Takes `bytes` until the lease is dropped.
    pub fn lease(self: &Rc<Budget>, bytes: usize) -> Result<Lease> {
        self.check(bytes)?;
        self.work(bytes)?;
        self.live_bytes.set(self.live_bytes.get() + bytes);
        Ok(Lease { budget: self.clone(), bytes })
    }

    /// Runs `work` one level deeper, which bounds the stack.
    pub fn deeper(&self) -> Result<()> {
        self.depth.set(self.depth.get() + 1);
        if self.depth.get() > MAX_DEPTH {
            return Err(Failure::limit(format!("the template recurses too deep (more than {MAX_DEPTH} levels); nest less")));
        }
        Ok(())
    }

    pub fn shallower(&self) {
        self.depth.set(self.depth.get().saturating_sub(1));
    }
}

/// Bytes taken from a budget.
#[derive(Debug)]
pub struct Lease {
    budget: Rc<Budget>,
    bytes: usize,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.budget.live_bytes.set(self.budget.live_bytes.get() - self.bytes);
    }
}

/// A string under construction whose size a template decides.
pub struct Builder<'a> {
    budget: &'a Rc<Budget>,
    text: String,
}

impl<'a> Builder<'a> {
    pub fn new(budget: &'a Rc<Budget>) -> Builder<'a> {
        Builder { budget, text: String::new() }
    }

    pub fn push(&mut self, text: &str) -> Result<()> {
        self.budget.check(self.text.len() + text.len())?;
        let before = self.text.len() / BYTES_PER_STEP;
        self.text.push_str(text);
        self.budget.steps(self.text.len() / BYTES_PER_STEP - before)
    }

    /// Counts reading `text` character by character.
    pub fn scan(&self, text: &str) -> Result<()> {
        self.budget.scan(text.len())
    }

    pub fn push_char(&mut self, c: char) -> Result<()> {
        self.push(c.encode_utf8(&mut [0; 4]))
    }

    /// Adds `text` `times` times.
    pub fn repeat(&mut self, text: &str, times: usize) -> Result<()> {
        self.budget.check(text.len().saturating_mul(times).saturating_add(self.text.len()))?;
        self.budget.work(text.len().saturating_mul(times))?;
        (0..times).for_each(|_| self.text.push_str(text));
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.text.len()
    }

    pub fn finish(self) -> String {
        self.text
    }
}
