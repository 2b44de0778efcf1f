//! The outputs of a sequence by its length.

use std::collections::BTreeMap;
use std::fmt::Debug;

use pagedllm::engine::Output;
use pagedllm::types::options::{OutputKind, SamplingParams};
use pagedllm::types::outputs::FinishReason;

/// Recorded outputs, by the length of the sequence at the time.
#[derive(Debug, Clone, Default)]
pub struct Script {
    pub prompt_len: usize,
    pub echo: bool,
    pub tokens: BTreeMap<usize, u32>,
    /// Bits of the log probabilities.
    pub logprobs: BTreeMap<usize, u32>,
    pub ends: BTreeMap<usize, (Option<FinishReason>, Option<u64>)>,
    /// The text of delta outputs.
    pub pieces: BTreeMap<usize, String>,
    /// The text of cumulative and final outputs.
    pub totals: BTreeMap<usize, String>,
    /// The whole text of a sequence that was aborted at this length.
    pub aborted: BTreeMap<usize, String>,
    /// Tokens up to this length cannot be regenerated: the host appended them, or they were sampled
    /// with another seed.
    pub foreign: usize,
    /// Another script, and the length up to which both are equal.
    pub origin: Option<(usize, usize)>,
}

/// Records the first value at a length. All later values must equal it. Returns the number of
/// comparisons.
fn same<T: PartialEq + Debug>(recorded: &mut BTreeMap<usize, T>, len: usize, now: T, what: &str) -> usize {
    if let Some(before) = recorded.get(&len) {
        assert_eq!(now, *before, "{what} at {len} tokens differs from an earlier output");
        return 1;
    }
    recorded.insert(len, now);
    0
}

impl Script {
    pub fn new(prompt_len: usize, echo: bool) -> Script {
        Script { prompt_len, echo, ..Script::default() }
    }

    /// The text of all deltas up to `len`, if all of them are known.
    fn whole(&self, len: usize) -> Option<String> {
        let first = if self.echo { self.prompt_len } else { self.prompt_len + 1 };
        (first..=len).map(|len| self.pieces.get(&len).map(String::as_str)).collect()
    }

    /// Returns a copy that keeps the outputs up to `len` tokens.
    #[must_use]
    pub fn diverges(&self, len: usize) -> Script {
        let mut script = self.clone();
        script.tokens.retain(|&place, _| place <= len);
        script.logprobs.retain(|&place, _| place <= len);
        script.ends.retain(|&place, _| place <= len);
        script.pieces.retain(|&place, _| place <= len);
        script.totals.retain(|&place, _| place <= len);
        script.aborted.retain(|&place, _| place < len);
        script
    }

    /// Records an output and returns the number of comparisons. `text_flushed`: an abort has
    /// emitted held-back text.
    pub fn record(&mut self, output: &Output, params: &SamplingParams, text_flushed: bool) -> usize {
        let len = length(output);
        let scored = params.logprobs.is_some();
        let mut known = 0;
        assert!(output.tokens.len() <= len, "more tokens than the sequence has: {output:?}");
        for (i, &token) in output.tokens.iter().enumerate() {
            let at = len - output.tokens.len() + i + 1;
            known += same(&mut self.tokens, at, token, "the token");
            // NaN: not computed yet when the sequence ended, or not sampled.
            if let Some(logprob) = output.logprobs.tokens.get(i).filter(|logprob| scored && !logprob.is_nan()) {
                known += same(&mut self.logprobs, at, logprob.to_bits(), "the log probability");
            }
        }
        let unfinished = matches!(output.finish, Some(FinishReason::Abort | FinishReason::Error));
        // Without a generated token, an echo and the end have the same length.
        if !unfinished && !output.tokens.is_empty() && output.generated_tokens > 0 && !params.is_prompt_only() {
            let end = (output.finish, scored.then_some(output.score.to_bits()));
            known += same(&mut self.ends, len, end, "the end");
        }
        known + if text_flushed { self.record_flushed_text(output, params) } else { self.record_text(output, params) }
    }

    fn record_text(&mut self, output: &Output, params: &SamplingParams) -> usize {
        let (len, text) = (length(output), output.text.clone());
        match (params.output, output.finish) {
            (_, Some(FinishReason::Error)) => 0,
            (OutputKind::Delta, Some(FinishReason::Abort)) => match self.whole(len) {
                Some(whole) => same(&mut self.aborted, len, whole_characters(whole + &text), "the text of an abort"),
                None => 0,
            },
            (_, Some(FinishReason::Abort)) => same(&mut self.aborted, len, whole_characters(text), "the text of an abort"),
            (OutputKind::Delta, _) if output.tokens.is_empty() => 0,
            (OutputKind::Delta, _) => same(&mut self.pieces, len, text, "the new text"),
            _ => same(&mut self.totals, len, text, "the text so far"),
        }
    }

    /// Compares the text of a sequence whose held-back text was emitted early.
    fn record_flushed_text(&mut self, output: &Output, params: &SamplingParams) -> usize {
        if matches!(output.finish, Some(FinishReason::Abort | FinishReason::Error)) || output.tokens.is_empty() {
            return 0;
        }
        let (len, text) = (length(output), output.text.as_str());
        let known = match params.output {
            OutputKind::Delta => self.pieces.get(&len).map(|piece| (piece, piece.ends_with(text))),
            _ => self.totals.get(&len).map(|total| (total, text.starts_with(total.as_str()))),
        };
        known.map_or(0, |(before, same)| {
            assert!(same, "the text at {len} tokens is {text:?} and was {before:?} before");
            1
        })
    }

    /// Asserts that the concatenated deltas equal the cumulative texts. Returns the number of
    /// comparisons.
    pub fn check(&self) -> usize {
        let compare = |(&len, total): (&usize, &String)| {
            self.whole(len).map(|whole| assert_eq!(whole, *total, "the deltas up to {len} tokens differ from the whole text"))
        };
        self.totals.iter().filter_map(compare).count()
    }
}

/// Returns the number of tokens that a sequence has according to an output.
pub fn length(output: &Output) -> usize {
    (output.prompt_tokens + output.generated_tokens) as usize
}

/// Removes an incomplete last character, because a sequence that continues holds it back.
fn whole_characters(text: String) -> String {
    text.trim_end_matches('\u{FFFD}').into()
}
