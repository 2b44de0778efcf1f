//! Sorts by orders of templates, which may fail, and are inconsistent if NaN is compared.

use std::cmp::Ordering;

use super::budget::Buffer;
use super::failure::Result;

/// Returns the sorted items. Equal items, and items without an order, keep their order.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::jinja::failure::fail;
    use std::rc::Rc;

    fn buffer<T>(items: impl ExactSizeIterator<Item = T>) -> Buffer<T> {
        let mut buffer = Buffer::new(&Rc::default());
        buffer.extend(items).unwrap();
        buffer
    }

    #[test]
    fn equal_items_keep_their_order() {
        for len in 0..200usize {
            let items = (0..len).map(|i| (i * 7919 % 13, i));
            let mut wanted: Vec<(usize, usize)> = items.clone().collect();
            wanted.sort_by_key(|(key, _)| *key);
            let found = sorted(buffer(items), |(a, _), (b, _)| Ok(Some(a.cmp(b)))).unwrap();
            assert_eq!(found[..], wanted[..], "{len} items");
        }
    }

    #[test]
    fn inconsistent_order_keeps_all_items() {
        let numbers = (0..1000).map(|i| if i % 3 == 0 { f64::NAN } else { f64::from(i * 7919 % 1000) });
        let bits = |numbers: &mut dyn Iterator<Item = f64>| {
            let mut bits: Vec<u64> = numbers.map(f64::to_bits).collect();
            bits.sort();
            bits
        };
        let found = sorted(buffer(numbers.clone()), |a, b| Ok(a.partial_cmp(b))).unwrap();
        assert_eq!(bits(&mut found.iter().copied()), bits(&mut numbers.into_iter()));
    }

    #[test]
    fn first_failure_ends_the_sort() {
        let mut compared = 0;
        let order = |a: &i32, b: &i32| {
            compared += 1;
            if compared == 5 { fail("no order") } else { Ok(Some(a.cmp(b))) }
        };
        assert!(sorted(buffer(0..1000), order).is_err());
        assert_eq!(compared, 5);
    }
}
