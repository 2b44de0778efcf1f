//! What a sequence says.

use std::collections::BTreeMap;
use std::fmt::Debug;

use pagedllm::engine::Output;
use pagedllm::options::{OutputKind, SamplingParams};
use pagedllm::scheduler::FinishReason;

/// What was said, by the length that the sequence had then.
#[derive(Debug, Clone, Default)]
pub struct Script {
    pub prompt_len: usize,
    pub echo: bool,
    pub tokens: BTreeMap<usize, (u32, Option<u32>)>,
    pub ends: BTreeMap<usize, (Option<FinishReason>, Option<u64>)>,
    /// The text of deltas.
    pub pieces: BTreeMap<usize, String>,
    /// The text of outputs that say everything so far.
    pub totals: BTreeMap<usize, String>,
    /// The same of a sequence that was aborted at this length.
    pub aborted: BTreeMap<usize, String>,
    /// What comes up to this length would not come again: the host appended it, or it was drawn with another seed.
    pub foreign: usize,
    /// Up to a length it is this other script.
    pub origin: Option<(usize, usize)>,
}

/// Whoever says it first is believed; the others must say the same.
fn same<T: PartialEq + Debug>(said: &mut BTreeMap<usize, T>, len: usize, now: T, what: &str) -> usize {
    if let Some(before) = said.get(&len) {
        assert_eq!(now, *before, "{what} at {len} tokens differs from what was said before");
        return 1;
    }
    said.insert(len, now);
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

    /// The same up to `len`, and another one from there on.
    #[must_use]
    pub fn diverges(&self, len: usize) -> Script {
        let mut script = self.clone();
        script.tokens.retain(|&place, _| place <= len);
        script.ends.retain(|&place, _| place <= len);
        script.pieces.retain(|&place, _| place <= len);
        script.totals.retain(|&place, _| place <= len);
        script.aborted.retain(|&place, _| place < len);
        script
    }

    /// Returns how much of it was known before; `ahead`: some of the text was told early.
    pub fn hear(&mut self, output: &Output, params: &SamplingParams, ahead: bool) -> usize {
        let len = length(output);
        let scored = params.logprobs.is_some();
        let mut known = 0;
        assert!(output.tokens.len() <= len, "more tokens than it has: {output:?}");
        for (i, &token) in output.tokens.iter().enumerate() {
            let bits = scored.then(|| output.logprobs.tokens[i].to_bits());
            known += same(&mut self.tokens, len - output.tokens.len() + i + 1, (token, bits), "the token");
        }
        let unfinished = matches!(output.finish, Some(FinishReason::Abort | FinishReason::Error));
        if !unfinished && !output.tokens.is_empty() {
            let end = (output.finish, scored.then_some(output.score.to_bits()));
            known += same(&mut self.ends, len, end, "the end");
        }
        known + if ahead { self.hear_late(output, params) } else { self.hear_text(output, params) }
    }

    fn hear_text(&mut self, output: &Output, params: &SamplingParams) -> usize {
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

    /// Some of the text has been told already.
    fn hear_late(&mut self, output: &Output, params: &SamplingParams) -> usize {
        if matches!(output.finish, Some(FinishReason::Abort | FinishReason::Error)) || output.tokens.is_empty() {
            return 0;
        }
        let (len, text) = (length(output), output.text.as_str());
        let told = match params.output {
            OutputKind::Delta => self.pieces.get(&len).map(|piece| (piece, piece.ends_with(text))),
            _ => self.totals.get(&len).map(|total| (total, text.starts_with(total.as_str()))),
        };
        told.map_or(0, |(before, same)| {
            assert!(same, "the text at {len} tokens is {text:?} and was {before:?} before");
            1
        })
    }

    /// Deltas and the other outputs have said the same.
    pub fn check(&self) -> usize {
        let compare = |(&len, total): (&usize, &String)| {
            self.whole(len).map(|whole| assert_eq!(whole, *total, "the deltas up to {len} tokens, and the whole text"))
        };
        self.totals.iter().filter_map(compare).count()
    }
}

/// Tokens of a sequence as of an output of it.
pub fn length(output: &Output) -> usize {
    (output.prompt_tokens + output.generated_tokens) as usize
}

/// One that may go on keeps the half of a character to itself.
fn whole_characters(text: String) -> String {
    text.trim_end_matches('\u{FFFD}').into()
}
