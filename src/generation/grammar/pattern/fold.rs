//! Case-insensitive matching of Python's `re`.

use std::collections::BTreeMap;

use once_cell::sync::Lazy;

use super::Class;

/// Lowercase letters that are equal in Python (`_EXTRA_CASES` of its module `re._casefix`).
const SAME_LOWERCASE: &[&[u32]] = &[
    &[0x69, 0x131],
    &[0x73, 0x17F],
    &[0xB5, 0x3BC],
    &[0x345, 0x3B9, 0x1FBE],
    &[0x390, 0x1FD3],
    &[0x3B0, 0x1FE3],
    &[0x3B2, 0x3D0],
    &[0x3B5, 0x3F5],
    &[0x3B8, 0x3D1],
    &[0x3BA, 0x3F0],
    &[0x3C0, 0x3D6],
    &[0x3C1, 0x3F1],
    &[0x3C2, 0x3C3],
    &[0x3C6, 0x3D5],
    &[0x432, 0x1C80],
    &[0x434, 0x1C81],
    &[0x43E, 0x1C82],
    &[0x441, 0x1C83],
    &[0x442, 0x1C84, 0x1C85],
    &[0x44A, 0x1C86],
    &[0x463, 0x1C87],
    &[0x1C88, 0xA64B],
    &[0x1E61, 0x1E9B],
    &[0xFB05, 0xFB06],
];

/// Characters with others in their case group, by the key of the group.
static GROUPS: Lazy<BTreeMap<u32, Vec<u32>>> = Lazy::new(|| {
    let mut groups: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for c in '\0'..=char::MAX {
        let key = key(c as u32);
        if key != c as u32 {
            groups.entry(key).or_insert_with(|| vec![key]).push(c as u32);
        }
    }
    groups
});

/// Returns the key of a case group, which is one of its characters.
fn key(c: u32) -> u32 {
    // Only U+0130 has a lowercase of two characters. Python compares the first one.
    let lower = char::from_u32(c).and_then(|c| c.to_lowercase().next()).map_or(c, |lower| lower as u32);
    SAME_LOWERCASE.iter().find(|group| group.contains(&lower)).map_or(lower, |group| group[0])
}

/// Returns the set with all characters that differ only in case from one of its characters. With
/// `ascii`, only letters of ASCII have a case.
pub fn fold(class: &Class, ascii: bool) -> Class {
    let mut ranges = class.ranges().to_vec();
    if ascii {
        for (lower, upper) in ('a'..='z').zip('A'..='Z') {
            let (lower, upper) = (lower as u32, upper as u32);
            ranges.extend(class.contains(lower).then_some((upper, upper)));
            ranges.extend(class.contains(upper).then_some((lower, lower)));
        }
        return Class::new(ranges);
    }
    for (&key, others) in GROUPS.iter() {
        let members = others.iter().copied().chain([key]);
        if members.clone().any(|c| class.contains(c)) {
            ranges.extend(members.map(|c| (c, c)));
        }
    }
    Class::new(ranges)
}
