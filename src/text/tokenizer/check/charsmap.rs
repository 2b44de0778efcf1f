//! Checks of `precompiled_charsmap`: a trie as a double array, and the texts of its leaves.

use std::collections::VecDeque;

use super::refusal;

/// Maximum size of the decoded map in bytes. That of `nmt_nfkc` has about 240,000.
const MAX_BYTES: usize = 1 << 20;
const REMEDY: &str = "convert the SentencePiece model again";

/// Checks a map. Returns the maximum ratio of the length of a replacement to the length of the
/// replaced bytes.
pub fn check(text: &str, field: &str) -> Result<u64, String> {
    if text.len() > MAX_BYTES / 3 * 4 {
        return Err(refusal(field, &format!("too long ({} bytes of base64, limit {})", text.len(), MAX_BYTES / 3 * 4), REMEDY));
    }
    let Some(bytes) = decode(text) else { return Err(refusal(field, "not base64", REMEDY)) };
    let Some((declared, rest)) = bytes.split_first_chunk::<4>() else {
        return Err(refusal(field, &format!("too short ({} bytes, at least 4)", bytes.len()), REMEDY));
    };
    let declared = u32::from_le_bytes(*declared) as usize;
    if declared > rest.len() || declared < 4 {
        let problem = format!("declares a trie of the wrong size ({declared} bytes, 4 to {})", rest.len());
        return Err(refusal(field, &problem, REMEDY));
    }
    let (trie, texts) = rest.split_at(declared / 4 * 4);
    let Ok(texts) = std::str::from_utf8(texts) else { return Err(refusal(field, "the replacements are not UTF-8", REMEDY)) };
    let units: Vec<u32> = trie.as_chunks::<4>().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    check_trie(&units, texts).map_err(|problem| refusal(field, &problem, REMEDY))
}

/// Follows each edge that a text can take, short paths first. The crate follows them without bounds
/// checks.
fn check_trie(units: &[u32], texts: &str) -> Result<u64, String> {
    let mut seen = vec![false; units.len()];
    let mut open = VecDeque::from([(offset(units[0]), 1)]);
    let mut expansion = 1;
    while let Some((base, depth)) = open.pop_front() {
        if base >= units.len() {
            return Err(format!("a node of the trie is outside of it ({base}, {} units)", units.len()));
        }
        if std::mem::replace(&mut seen[base], true) {
            continue;
        }
        for byte in 1..=255 {
            let Some(&unit) = units.get(base ^ byte) else {
                return Err(format!("an edge of the trie leads outside of it ({}, {} units)", base ^ byte, units.len()));
            };
            if unit & (1 << 31 | 0xFF) != byte as u32 {
                continue;
            }
            let next = base ^ byte ^ offset(unit);
            if unit >> 8 & 1 == 1 {
                let leaf = units.get(next).map(|leaf| (leaf & !(1 << 31)) as usize);
                let Some(replacement) = leaf.and_then(|leaf| texts.get(leaf..)) else {
                    return Err(format!("a leaf of the trie points outside of the replacements ({leaf:?}, {} bytes)", texts.len()));
                };
                let length = replacement.find('\0').unwrap_or(replacement.len()) as u64;
                expansion = expansion.max(length.div_ceil(depth));
            }
            open.push_back((next, depth + 1));
        }
    }
    Ok(expansion)
}

fn offset(unit: u32) -> usize {
    (unit as usize >> 10) << ((unit & 1 << 9) >> 6)
}

/// Decodes base64 as the crate does: the standard alphabet, with padding.
fn decode(text: &str) -> Option<Vec<u8>> {
    let (groups, []) = text.as_bytes().as_chunks::<4>() else { return None };
    let mut bytes = Vec::with_capacity(groups.len() * 3);
    for (i, group) in groups.iter().enumerate() {
        let padding = group.iter().rev().take_while(|&&c| c == b'=').count();
        if padding > 2 || padding > 0 && i + 1 != groups.len() {
            return None;
        }
        let mut bits = 0_u32;
        for &c in &group[..4 - padding] {
            bits = bits << 6 | digit(c)?;
        }
        bits <<= 6 * padding;
        bytes.extend_from_slice(&bits.to_be_bytes()[1..4 - padding]);
    }
    Some(bytes)
}

fn digit(c: u8) -> Option<u32> {
    let digit = match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(digit.into())
}
