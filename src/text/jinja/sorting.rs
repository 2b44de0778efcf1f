//! Sorts by orders that templates decide: they may fail, and contradict themselves where NaN is compared.

use std::cmp::Ordering;

use super::budget::Buffer;
use super::failure::Result;

/// The items in their order. Equal ones, and those without an order, keep theirs.
pub fn sorted<T: Clone>(items: Buffer<T>, mut order: impl FnMut(&T, &T) -> Result<Option<Ordering>>) -> Result<Buffer<T>> {
    let (mut from, mut to) = (items, None);
    let mut width = 1;
    while width < from.len() {
        let mut merged = match to.take() {
            Some(buffer) => buffer,
            None => copy(&from)?,
        };
        for start in (0..from.len()).step_by(2 * width) {
            let middle = (start + width).min(from.len());
            let end = (middle + width).min(from.len());
            merge(&from[start..middle], &from[middle..end], &mut merged[start..end], &mut order)?;
        }
        to = Some(std::mem::replace(&mut from, merged));
        width *= 2;
    }
    Ok(from)
}

fn copy<T: Clone>(items: &Buffer<T>) -> Result<Buffer<T>> {
    let mut copy = Buffer::with_capacity(items.budget(), items.len())?;
    copy.extend(items.iter().cloned())?;
    Ok(copy)
}

/// Merges two sorted lists. `out` has their length.
fn merge<T: Clone>(left: &[T], right: &[T], out: &mut [T], order: &mut impl FnMut(&T, &T) -> Result<Option<Ordering>>) -> Result<()> {
    let (mut i, mut k) = (0, 0);
    // Lists that are sorted already are not compared item by item.
    let in_order = match (left.last(), right.first()) {
        (Some(last), Some(first)) => order(first, last)? != Some(Ordering::Less),
        _ => true,
    };
    for place in out {
        let takes_right = match (left.get(i), right.get(k)) {
            (Some(_), Some(_)) if in_order => false,
            (Some(a), Some(b)) => order(b, a)? == Some(Ordering::Less),
            (left, _) => left.is_none(),
        };
        let (list, next) = if takes_right { (right, &mut k) } else { (left, &mut i) };
        *place = list[*next].clone();
        *next += 1;
    }
    Ok(())
}
