//! Prediction of output lengths from the sequences that have ended by themselves.

/// The output length predictor.
///
/// Turns with a similar limit (the same power of two) form a kind. The prediction for a generation
/// is based on recent generations of its kind. If most generations of a kind reach their limit, the
/// limit itself is the prediction.
#[derive(Debug, Clone, Copy)]
pub struct OutputLengthPredictor {
    /// Output lengths of the last generations of any kind: a ring buffer.
    last: [u32; LISTED],
    kinds: [u8; LISTED],
    ended: usize,
    classes: [Option<LimitClass>; KINDS],
}

/// The averages of the generations with similar limits.
#[derive(Debug, Clone, Copy, PartialEq)]
struct LimitClass {
    /// Moving averages: `generated` of the output length, `reached` of the fraction that reached
    /// its limit.
    generated: f64,
    reached: f64,
}

const LISTED: usize = 256;
const KINDS: usize = 33;
/// Weight of the newest generation. About sixteen generations are remembered.
const NEWEST: f64 = 1.0 / 16.0;

fn class_of(max_tokens: usize) -> usize {
    (usize::BITS - max_tokens.leading_zeros()).min(KINDS as u32 - 1) as usize
}

impl Default for OutputLengthPredictor {
    fn default() -> OutputLengthPredictor {
        OutputLengthPredictor { last: [0; LISTED], kinds: [0; LISTED], ended: 0, classes: [None; KINDS] }
    }
}

impl OutputLengthPredictor {
    /// Records that a generation with the limit `max_tokens` ended by itself after `generated`
    /// tokens.
    pub fn observe(&mut self, max_tokens: usize, generated: usize) {
        let kind = class_of(max_tokens);
        let (generated, reached) = (generated.min(u32::MAX as usize), f64::from(generated >= max_tokens));
        (self.last[self.ended % LISTED], self.kinds[self.ended % LISTED]) = (generated as u32, kind as u8);
        self.ended += 1;
        let known = self.classes[kind].get_or_insert(LimitClass { generated: generated as f64, reached });
        known.generated += (generated as f64 - known.generated) * NEWEST;
        known.reached += (reached - known.reached) * NEWEST;
    }

    /// Returns the recorded lengths of a kind.
    fn lengths_of(&self, kind: usize) -> impl Iterator<Item = usize> {
        let listed = self.ended.min(LISTED);
        self.last[..listed].iter().zip(&self.kinds).filter(move |&(_, &other)| other as usize == kind).map(|(&length, _)| length as usize)
    }

    /// Returns the averages of the kind, unless its limits predict the length.
    fn class_averages(&self, max_tokens: usize) -> Option<LimitClass> {
        self.classes[class_of(max_tokens)].filter(|known| known.reached <= 0.5)
    }

    /// Returns the expected number of remaining tokens, at least 1, of a generation that has
    /// generated `generated` of at most `max_tokens` tokens.
    ///
    /// The expectation is the average of the recorded generations that were longer than
    /// `generated`.
    /// Without a record, it is the limit.
    pub fn expect(&self, max_tokens: usize, generated: usize) -> usize {
        let expected = self.class_averages(max_tokens).map_or(max_tokens, |known| {
            let longer = self.lengths_of(class_of(max_tokens)).filter(|&length| length > generated);
            match longer.fold((0, 0), |(count, sum), length| (count + 1, sum + length)) {
                (0, _) if known.generated > generated as f64 => known.generated as usize,
                // The generation is longer than all records: its length is expected to double.
                (0, _) => 2 * generated,
                (count, sum) => sum / count,
            }
        });
        expected.min(max_tokens).saturating_sub(generated).max(1)
    }

    /// Returns a generator of lengths for many generations that have not started.
    pub fn generator(&self) -> LengthGenerator {
        let mut drawn = LengthGenerator { predictor: *self, by_kind: [0; LISTED], starts: [0; KINDS + 1], next: [0; KINDS] };
        let mut at = 0;
        for kind in 0..KINDS {
            for length in self.lengths_of(kind) {
                drawn.by_kind[at] = length as u32;
                at += 1;
            }
            drawn.starts[kind + 1] = at;
        }
        drawn
    }
}

/// A generator that assigns to each new generation the length of another recorded generation of its
/// kind, so that the lengths have the recorded distribution.
pub struct LengthGenerator {
    predictor: OutputLengthPredictor,
    by_kind: [u32; LISTED],
    /// Start of each kind in `by_kind`, and number of lengths drawn per kind.
    starts: [usize; KINDS + 1],
    next: [usize; KINDS],
}

impl LengthGenerator {
    pub fn draw(&mut self, max_tokens: usize) -> usize {
        let kind = class_of(max_tokens);
        let listed = &self.by_kind[self.starts[kind]..self.starts[kind + 1]];
        if listed.is_empty() || self.predictor.class_averages(max_tokens).is_none() {
            return self.predictor.expect(max_tokens, 0);
        }
        self.next[kind] += 1;
        (listed[self.next[kind] % listed.len()] as usize).clamp(1, max_tokens.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prediction_is_the_mean_of_recent_turns_with_a_similar_limit() {
        let mut lengths = OutputLengthPredictor::default();
        assert_eq!(lengths.expect(1000, 0), 1000, "without records the prediction is the limit");
        lengths.observe(900, 40);
        assert_eq!(lengths.expect(1000, 0), 40);
        (0..200).for_each(|_| lengths.observe(600, 80));
        assert_eq!(lengths.expect(1000, 0), 79);
        assert_eq!(lengths.expect(30, 0), 30, "a generation of another class, limited to 30 tokens");
        // Turns of other kinds have replaced all records of this kind.
        (0..LISTED).for_each(|_| lengths.observe(60, 20));
        assert_eq!(lengths.expect(1000, 0), 79);
        assert_eq!((lengths.expect(1000, 100), lengths.expect(150, 100)), (100, 50), "the generation is longer than all recorded ones");
    }

    #[test]
    fn the_prediction_grows_with_the_tokens_already_generated() {
        let mut lengths = OutputLengthPredictor::default();
        (0..100).for_each(|i| lengths.observe(100, 20 + i % 2 * 20));
        assert_eq!((lengths.expect(100, 0), lengths.expect(100, 25), lengths.expect(100, 45)), (30, 15, 45));
        assert_eq!(lengths.expect(70, 60), 10, "the prediction stays within the limit");
        let mut drawn = lengths.generator();
        let mut both = [drawn.draw(100), drawn.draw(100)];
        both.sort_unstable();
        assert_eq!((both, drawn.draw(1000)), ([20, 40], 1000));
    }

    #[test]
    fn exact_limits_are_predicted_until_turns_end_earlier() {
        let mut lengths = OutputLengthPredictor::default();
        (0..50).for_each(|i| lengths.observe(64 + i, 64 + i));
        assert_eq!((lengths.expect(100, 10), lengths.generator().draw(65)), (90, 65));
        (0..50).for_each(|_| lengths.observe(100, 10));
        assert!(lengths.expect(100, 0) < 60, "{}", lengths.expect(100, 0));
    }
}
