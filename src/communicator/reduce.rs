//! Sums whose bits do not depend on the length of a message.

use std::time::Duration;

use super::Communicator;
use crate::error::Result;
use crate::sys::bytes::{as_bytes, as_bytes_mut};

/// Working memory of sums over all ranks.
#[derive(Default)]
pub struct OrderedSum {
    parts: Vec<f32>,    // [size, part] one part for each rank, padded with zeros
    received: Vec<f32>, // [size, part] this rank's part of all ranks
}

impl OrderedSum {
    /// Reserves memory for sums of up to `len` numbers over `size` ranks. A single rank needs none.
    pub fn reserve(&mut self, len: usize, size: usize) -> Result<()> {
        let padded = OrderedSum::padded(len, size);
        self.parts.try_reserve(padded.saturating_sub(self.parts.len()))?;
        Ok(self.received.try_reserve(padded.saturating_sub(self.received.len()))?)
    }

    /// Returns the bytes that `reserve` allocates.
    pub fn bytes(len: usize, size: usize) -> u64 {
        (2 * OrderedSum::padded(len, size) * size_of::<f32>()) as u64
    }

    fn padded(len: usize, size: usize) -> usize {
        if size == 1 { 0 } else { len.next_multiple_of(size) }
    }

    /// Each rank adds one part of the numbers in the order of the ranks, and all ranks gather the
    /// sums. A rank sends and receives twice the numbers, as in a ring.
    pub fn all_reduce<C: Communicator + ?Sized>(&mut self, group: &C, x: &mut [f32], timeout: Option<Duration>) -> Result<()> {
        let (size, len) = (group.size(), x.len());
        if size == 1 || len == 0 {
            return Ok(());
        }
        let part = len.div_ceil(size);
        self.reserve(len, size)?;
        self.parts.clear();
        self.parts.extend_from_slice(x);
        self.parts.resize(part * size, 0.0);
        self.received.resize(part * size, 0.0);
        group.all_to_all(as_bytes(&self.parts), as_bytes_mut(&mut self.received[..part * size]), timeout)?;
        let (sum, others) = self.received[..part * size].split_at_mut(part);
        for other in others.chunks_exact(part) {
            sum.iter_mut().zip(other).for_each(|(sum, number)| *sum += number);
        }
        group.all_gather(as_bytes(sum), as_bytes_mut(&mut self.parts), timeout)?;
        x.copy_from_slice(&self.parts[..len]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::local::Local;
    use super::*;

    #[test]
    fn sums_are_added_in_the_order_of_the_ranks_whatever_the_length() {
        // In another order, the small numbers would be lost or kept.
        let numbers = [1e8f32, 3.0, -1e8, 0.25];
        let expected = numbers.iter().fold(0.0, |sum, number| sum + number);
        for size in 1..=numbers.len() {
            let expected = if size == 4 { expected } else { numbers[..size].iter().sum() };
            for len in [0, 1, 2, 5, 64] {
                let ranks: Vec<_> = Local::group(size)
                    .into_iter()
                    .map(|group| {
                        thread::spawn(move || {
                            let mut x = vec![numbers[group.rank()]; len];
                            group.all_reduce(&mut x, &mut OrderedSum::default(), None).unwrap();
                            x
                        })
                    })
                    .collect();
                for rank in ranks {
                    assert_eq!(rank.join().unwrap(), vec![expected; len], "{size} ranks");
                }
            }
        }
    }
}
