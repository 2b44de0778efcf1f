//! The earlier occurrences of the last tokens of a sequence. Each call reads the whole sequence, so
//! that a fork or a rewind has no index to copy or to repair. It costs 0.01 to 0.25 ms for 100,000
//! tokens of any contents.

use crate::types::options::SamplingParams;

/// Tokens that are compared in parallel for many places before the others follow one by one.
const PREFIX: usize = 8;
/// Number of places that are compared in parallel.
const BLOCK: usize = u64::BITS as usize;
/// Maximum length of the searched tokens.
const MAX_LEN: usize = SamplingParams::MAX_NGRAM - 1;

const _: () = assert!(MAX_LEN <= u8::MAX as usize);

/// Calls `found` with each token that followed an earlier occurrence of the last `n - 1` tokens.
pub fn continuations(tokens: &[u32], n: usize, mut found: impl FnMut(u32)) {
    if n == 0 || tokens.len() < n || n > MAX_LEN + 1 {
        return;
    }
    let gram = &tokens[tokens.len() - (n - 1)..];
    let prefix = &gram[..gram.len().min(PREFIX)];
    let borders = borders(gram);
    let places = tokens.len() - n + 1;
    // No occurrence before `undecided` is left to report.
    let (mut block, mut undecided) = (0, 0);
    while block < places {
        let mut begun = places_of(prefix, &tokens[block..], (places - block).min(BLOCK));
        while begun != 0 {
            let place = block + begun.trailing_zeros() as usize;
            begun &= begun - 1;
            match gram.len() <= PREFIX {
                true => found(tokens[place + n - 1]),
                false if place < undecided => {}
                false => undecided = compare(tokens, gram, &borders, place, &mut found),
            }
        }
        block = (block + BLOCK).max(undecided / BLOCK * BLOCK);
    }
}

/// Returns the places among the first `count` of `tokens` at which `prefix` occurs, one bit each.
/// The compiler vectorizes the comparisons.
fn places_of(prefix: &[u32], tokens: &[u32], count: usize) -> u64 {
    let mut equal = [u32::MAX; BLOCK];
    equal[count..].fill(0);
    for (offset, &wanted) in prefix.iter().enumerate() {
        let mut any = 0;
        for (equal, &token) in equal.iter_mut().zip(&tokens[offset..][..count]) {
            *equal &= if token == wanted { u32::MAX } else { 0 };
            any |= *equal;
        }
        if any == 0 {
            return 0;
        }
    }
    equal.iter().rev().fold(0, |bits, &equal| bits << 1 | (equal & 1) as u64)
}

/// Continues the comparison with `gram` at a place where its first `PREFIX` tokens occur, as Knuth,
/// Morris and Pratt do. Returns the first place that is not decided: its prefix must be compared.
fn compare(tokens: &[u32], gram: &[u32], borders: &[u8; MAX_LEN + 1], place: usize, found: &mut impl FnMut(u32)) -> usize {
    let (mut at, mut equal) = (place + PREFIX, PREFIX);
    while equal >= PREFIX && at < tokens.len() {
        if equal == gram.len() {
            found(tokens[at]);
            equal = borders[equal] as usize;
        } else if tokens[at] == gram[equal] {
            (at, equal) = (at + 1, equal + 1);
        } else {
            equal = borders[equal] as usize;
        }
    }
    at - equal
}

/// Returns for each length the longest shorter beginning of `gram` that is also the end of its
/// beginning of that length.
fn borders(gram: &[u32]) -> [u8; MAX_LEN + 1] {
    let mut borders = [0; MAX_LEN + 1];
    let mut border = 0;
    for at in 1..gram.len() {
        while border > 0 && gram[at] != gram[border] {
            border = borders[border] as usize;
        }
        border += usize::from(gram[at] == gram[border]);
        borders[at + 1] = border as u8;
    }
    borders
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::sampler::random::{Lane, uniform};

    fn assert_defined(tokens: &[u32], n: usize) {
        let (mut calls, mut expected) = (Vec::new(), Vec::new());
        continuations(tokens, n, |token| calls.push(token));
        let last = &tokens[tokens.len().saturating_sub(n - 1)..];
        expected.extend(tokens.windows(n).filter(|run| run.starts_with(last)).map(|run| run[n - 1]));
        assert_eq!(calls, expected, "n-grams of {n} in {tokens:?}");
    }

    #[test]
    fn random_sequences_equal_a_comparison_of_all_places() {
        for seed in 0..3000 {
            let number = |i: u64, below: u64| (uniform(seed, i, Lane::Token) * below as f64) as u64;
            let (len, kinds, noise) = (number(0, 400), 1 + number(1, 3), number(2, 40));
            let period = 1 + number(3, 30);
            // A period with some noise has long and overlapping occurrences.
            let token = |i: u64| if number(1000 + i, 40) < noise { number(2000 + i, kinds) } else { number(3000 + i % period, kinds) };
            let tokens: Vec<u32> = (0..len).map(|i| token(i) as u32).collect();
            for n in [1, 2, 3, 8, 9, 10, 11, 17, 40, 255, 256, 1 + number(4, 256) as usize] {
                assert_defined(&tokens, n);
            }
        }
    }

    #[test]
    fn repetitions_of_any_length_are_found() {
        for len in [1, 8, 9, 63, 64, 65, 128, 256, 257, 1000] {
            for n in [1, 2, 9, 10, 65, 256] {
                assert_defined(&vec![7; len], n);
                assert_defined(&(0..len as u32).map(|i| i / 13 % 2).collect::<Vec<u32>>(), n);
            }
        }
    }

    #[test]
    fn a_size_of_0_and_short_sequences_have_no_continuations() {
        for (tokens, n) in [(&[][..], 0), (&[1, 1], 0), (&[], 1), (&[1], 2)] {
            continuations(tokens, n, |token| panic!("{token}"));
        }
    }
}
