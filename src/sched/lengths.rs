//! How many tokens turns choose, as far as those that ended by themselves tell.

/// Hosts ask alike for what is alike: turns that might have chosen about as many tokens (up to the same power of two) are of one
/// kind, and the next one of a kind chooses about as many as those before it. Where nearly all of a kind choose as many as they may,
/// hosts know the length beforehand, and what they say is believed.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    /// The last ones that ended, of any kind.
    last: [u32; LISTED],
    kinds: [u8; LISTED],
    ended: usize,
    known: [Option<Kind>; KINDS],
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Kind {
    /// Running averages, where newer ones count more: of what was chosen, and of how many chose as many as they might.
    chosen: f64,
    reached: f64,
}

const LISTED: usize = 256;
const KINDS: usize = 33;
/// Some sixteen turns are remembered.
const NEWEST: f64 = 1.0 / 16.0;

fn kind(most: usize) -> usize {
    (usize::BITS - most.leading_zeros()).min(KINDS as u32 - 1) as usize
}

impl Default for Lengths {
    fn default() -> Lengths {
        Lengths { last: [0; LISTED], kinds: [0; LISTED], ended: 0, known: [None; KINDS] }
    }
}

impl Lengths {
    /// A turn that might have chosen `most` tokens ended by itself after `chosen`.
    pub fn observe(&mut self, most: usize, chosen: usize) {
        let kind = kind(most);
        let (chosen, reached) = (chosen.min(u32::MAX as usize), f64::from(chosen >= most));
        (self.last[self.ended % LISTED], self.kinds[self.ended % LISTED]) = (chosen as u32, kind as u8);
        self.ended += 1;
        let known = self.known[kind].get_or_insert(Kind { chosen: chosen as f64, reached });
        known.chosen += (chosen as f64 - known.chosen) * NEWEST;
        known.reached += (reached - known.reached) * NEWEST;
    }

    /// Of the last ones, those of a kind.
    fn of(&self, kind: usize) -> impl Iterator<Item = usize> {
        let listed = self.ended.min(LISTED);
        self.last[..listed].iter().zip(&self.kinds).filter(move |&(_, &other)| other as usize == kind).map(|(&chosen, _)| chosen as usize)
    }

    /// What is known of a turn's kind, unless it is what hosts say.
    fn guess(&self, most: usize) -> Option<Kind> {
        self.known[kind(most)].filter(|known| known.reached <= 0.5)
    }

    /// Tokens still to come, at least 1, of a turn that has chosen `chosen` of `most`: as many as of those that were longer than it is
    /// already. Where nothing is known of its kind, it may choose all.
    pub fn expect(&self, most: usize, chosen: usize) -> usize {
        let expected = self.guess(most).map_or(most, |known| {
            let longer = self.of(kind(most)).filter(|&length| length > chosen);
            match longer.fold((0, 0), |(count, sum), length| (count + 1, sum + length)) {
                (0, _) if known.chosen > chosen as f64 => known.chosen as usize,
                // Longer than all: as long again.
                (0, _) => 2 * chosen,
                (count, sum) => sum / count,
            }
        });
        expected.min(most).saturating_sub(chosen).max(1)
    }

    /// The lengths of many that have not begun.
    pub fn drawn(&self) -> Drawn {
        let mut drawn = Drawn { lengths: *self, by_kind: [0; LISTED], starts: [0; KINDS + 1], next: [0; KINDS] };
        let mut at = 0;
        for kind in 0..KINDS {
            for chosen in self.of(kind) {
                drawn.by_kind[at] = chosen as u32;
                at += 1;
            }
            drawn.starts[kind + 1] = at;
        }
        drawn
    }
}

/// Together those that have not begun are as different as those that ended: each is expected to be as long as another one of its kind.
pub struct Drawn {
    lengths: Lengths,
    by_kind: [u32; LISTED],
    /// Where each kind begins, and how many were drawn of it.
    starts: [usize; KINDS + 1],
    next: [usize; KINDS],
}

impl Drawn {
    pub fn draw(&mut self, most: usize) -> usize {
        let kind = kind(most);
        let listed = &self.by_kind[self.starts[kind]..self.starts[kind + 1]];
        if listed.is_empty() || self.lengths.guess(most).is_none() {
            return self.lengths.expect(most, 0);
        }
        self.next[kind] += 1;
        (listed[self.next[kind] % listed.len()] as usize).clamp(1, most.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_turns_alike_have_chosen_is_expected_of_the_next() {
        let mut lengths = Lengths::default();
        assert_eq!(lengths.expect(1000, 0), 1000, "nothing is known: it may choose all that it is allowed");
        lengths.observe(900, 40);
        assert_eq!(lengths.expect(1000, 0), 40);
        (0..200).for_each(|_| lengths.observe(600, 80));
        assert_eq!(lengths.expect(1000, 0), 79);
        assert_eq!(lengths.expect(30, 0), 30, "it is allowed less, and is of another kind");
        // Others ended since, and the list has none of its kind any more.
        (0..LISTED).for_each(|_| lengths.observe(60, 20));
        assert_eq!(lengths.expect(1000, 0), 79);
        assert_eq!((lengths.expect(1000, 100), lengths.expect(150, 100)), (100, 50), "it is longer than any before it");
    }

    #[test]
    fn the_longer_a_turn_is_the_longer_it_becomes() {
        let mut lengths = Lengths::default();
        (0..100).for_each(|i| lengths.observe(100, 20 + i % 2 * 20));
        assert_eq!((lengths.expect(100, 0), lengths.expect(100, 25), lengths.expect(100, 45)), (30, 15, 45));
        assert_eq!(lengths.expect(70, 60), 10, "and no longer than it may");
        let mut drawn = lengths.drawn();
        let mut both = [drawn.draw(100), drawn.draw(100)];
        both.sort_unstable();
        assert_eq!((both, drawn.draw(1000)), ([20, 40], 1000));
    }

    #[test]
    fn hosts_that_know_the_length_are_believed_and_those_that_no_longer_do_are_not() {
        let mut lengths = Lengths::default();
        (0..50).for_each(|i| lengths.observe(64 + i, 64 + i));
        assert_eq!((lengths.expect(100, 10), lengths.drawn().draw(65)), (90, 65));
        (0..50).for_each(|_| lengths.observe(100, 10));
        assert!(lengths.expect(100, 0) < 60, "{}", lengths.expect(100, 0));
    }
}
