//! The sampling state of a sequence that depends on its past tokens.

use super::breaks::Breaks;
use super::mirostat;
use super::outcome::Sample;
use super::resolved::ResolvedSampling;
use crate::error::{Result, try_refill};

/// A summary of a sequence's tokens, as far as its parameters require it. It is plain data in
/// flat vectors, which a fork copies.
///
/// It is a function of the tokens and the prompt's length, except for the state of mirostat, which
/// also depends on the surprise of each sampled token. All tokens after the prompt count as
/// generated, including tokens that the host appended. To count them as prompt, call `rewind` with
/// a longer prompt.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplingHistory {
    /// Counts by token id. Empty if no penalty counts tokens.
    counts: Vec<Count>,
    /// Position of the first element of `mus`.
    first: usize,
    /// State of mirostat at each position, including the next one. Empty without mirostat.
    mus: Vec<f32>,
    /// Sequence breakers of DRY in all tokens.
    breaks: Breaks,
}

/// The count of one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Count {
    pub token: u32,
    /// Number of occurrences after the prompt.
    pub generated: u32,
}

impl SamplingHistory {
    pub fn new(rules: &ResolvedSampling, tokens: &[u32], prompt_len: usize) -> Result<SamplingHistory> {
        let mut history = SamplingHistory::default();
        history.count_all(rules, tokens, prompt_len)?;
        history.start_mirostat(rules, tokens.len())?;
        history.breaks.reserve(rules, tokens.len())?;
        history.breaks.extend(rules, tokens);
        Ok(history)
    }

    /// Reserves memory for `more` tokens, so that `advance` does not allocate.
    pub fn reserve(&mut self, rules: &ResolvedSampling, more: usize) -> Result<()> {
        if rules.params.counts_tokens() {
            self.counts.try_reserve(more)?;
        }
        if rules.params.mirostat.is_some() {
            self.mus.try_reserve(more)?;
        }
        self.breaks.reserve(rules, more)
    }

    /// Like `clone`, but returns an error if memory runs out.
    pub fn try_clone(&self) -> Result<SamplingHistory> {
        let mut copy = SamplingHistory::default();
        copy.copy(self)?;
        Ok(copy)
    }

    /// Makes this a copy of `other`, in the existing memory if it suffices.
    pub fn copy(&mut self, other: &SamplingHistory) -> Result<()> {
        self.first = other.first;
        self.breaks.copy(&other.breaks)?;
        try_refill(&mut self.counts, &other.counts)?;
        try_refill(&mut self.mus, &other.mus)
    }

    /// Adds a sampled token to the sequence.
    pub fn advance(&mut self, rules: &ResolvedSampling, chosen: &Sample) -> Result<()> {
        self.reserve(rules, 1)?;
        self.breaks.extend(rules, &[chosen.token]);
        if rules.params.counts_tokens() {
            match self.counts.binary_search_by_key(&chosen.token, |count| count.token) {
                Ok(at) => self.counts[at].generated += 1,
                Err(at) => self.counts.insert(at, Count { token: chosen.token, generated: 1 }),
            }
        }
        if let Some(mirostat) = rules.params.mirostat {
            let mu = self.mu().unwrap_or(mirostat::first_mu(mirostat));
            self.mus.push(mirostat::next_mu(mirostat, mu, chosen.surprise));
        }
        Ok(())
    }

    /// Adds tokens that were not sampled to the sequence.
    pub fn extend(&mut self, rules: &ResolvedSampling, tokens: &[u32]) -> Result<()> {
        self.reserve(rules, tokens.len())?;
        self.breaks.extend(rules, tokens);
        if rules.params.counts_tokens() {
            self.count(tokens, 1)?;
        }
        if let Some(mu) = self.mu() {
            self.mus.resize(self.mus.len() + tokens.len(), mu);
        }
        Ok(())
    }

    /// Updates the state after the sequence was truncated to `tokens`, or after the prompt's length
    /// has changed.
    pub fn rewind(&mut self, rules: &ResolvedSampling, tokens: &[u32], prompt_len: usize) -> Result<()> {
        if rules.params.counts_tokens() {
            self.counts.try_reserve(tokens.len())?;
            self.counts.clear();
            self.count_all(rules, tokens, prompt_len)?;
        }
        self.breaks.rewind(rules, tokens);
        match (tokens.len().checked_sub(self.first), self.mu()) {
            (Some(since), Some(mu)) => {
                self.mus.try_reserve((since + 1).saturating_sub(self.mus.len()))?;
                self.mus.resize(since + 1, mu);
            }
            // If the sequence was truncated to before the first known position, mirostat starts
            // anew.
            _ => self.start_mirostat(rules, tokens.len())?,
        }
        Ok(())
    }

    /// Like `new`, for a sequence with a saved state of mirostat.
    pub fn restore(
        rules: &ResolvedSampling,
        tokens: &[u32],
        prompt_len: usize,
        mirostat: Option<(usize, Vec<f32>)>,
    ) -> Result<SamplingHistory> {
        let mut history = SamplingHistory::new(rules, tokens, prompt_len)?;
        if let Some((first, mus)) = mirostat {
            (history.first, history.mus) = (first, mus);
        }
        Ok(history)
    }

    /// Returns the first position with a known state of mirostat, and the states from there on.
    pub fn mirostat(&self) -> Option<(usize, &[f32])> {
        (!self.mus.is_empty()).then_some((self.first, &self.mus))
    }

    pub(super) fn counts(&self) -> &[Count] {
        &self.counts
    }

    pub(super) fn breaks(&self) -> &Breaks {
        &self.breaks
    }

    /// Returns the state of mirostat for the next token.
    pub(super) fn mu(&self) -> Option<f32> {
        self.mus.last().copied()
    }

    fn count_all(&mut self, rules: &ResolvedSampling, tokens: &[u32], prompt_len: usize) -> Result<()> {
        if !rules.params.counts_tokens() {
            return Ok(());
        }
        let (prompt, generated) = tokens.split_at(prompt_len.min(tokens.len()));
        // The other penalties ignore the prompt.
        if rules.params.repetition_penalty != 1.0 {
            self.count(prompt, 0)?;
        }
        self.count(generated, 1)
    }

    fn count(&mut self, tokens: &[u32], generated: u32) -> Result<()> {
        self.counts.try_reserve(tokens.len())?;
        self.counts.extend(tokens.iter().map(|&token| Count { token, generated }));
        self.counts.sort_unstable_by_key(|count| count.token);
        self.counts.dedup_by(|next, kept| {
            let same = next.token == kept.token;
            kept.generated += if same { next.generated } else { 0 };
            same
        });
        Ok(())
    }

    fn start_mirostat(&mut self, rules: &ResolvedSampling, position: usize) -> Result<()> {
        self.mus.clear();
        if let Some(mirostat) = rules.params.mirostat {
            self.mus.try_reserve(1)?;
            self.mus.push(mirostat::first_mu(mirostat));
            self.first = position;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::generation::sampler::random::{Lane, uniform};
    use crate::generation::sampler::token_texts::TokenTexts;
    use crate::types::options::{Dry, Mirostat, SamplingParams};

    fn rules(params: SamplingParams) -> ResolvedSampling {
        ResolvedSampling { params, ..ResolvedSampling::default() }
    }

    fn all_rules() -> [ResolvedSampling; 5] {
        let dry = Some(Dry { sequence_breakers: Some(vec!["27".into(), "5".into(), "1213".into()]), ..Dry::default() });
        let texts: Vec<Vec<u8>> = (0..30).map(|token| format!("{token}").into()).collect();
        [
            rules(SamplingParams { repetition_penalty: 1.2, ..Default::default() }),
            rules(SamplingParams { presence_penalty: 0.5, ..Default::default() }),
            rules(SamplingParams { frequency_penalty: 0.5, repetition_penalty: 0.9, ..Default::default() }),
            rules(SamplingParams::default()),
            ResolvedSampling::new(
                SamplingParams { dry, ..Default::default() },
                [].into(),
                vec![],
                Arc::new(TokenTexts::new(&texts).unwrap()),
            )
            .unwrap(),
        ]
    }

    fn random_tokens(seed: u64, len: u64) -> Vec<u32> {
        (0..len).map(|i| (uniform(seed, i, Lane::Token) * 30.0) as u32).collect()
    }

    #[test]
    fn the_history_does_not_depend_on_how_tokens_were_added() {
        for (seed, rules) in all_rules().iter().enumerate() {
            let tokens = random_tokens(seed as u64, 200);
            let whole = SamplingHistory::new(rules, &tokens, 40).unwrap();
            let mut stepwise = SamplingHistory::new(rules, &tokens[..40], 40).unwrap();
            for &token in &tokens[40..120] {
                stepwise.advance(rules, &Sample { token, surprise: None }).unwrap();
            }
            let middle = stepwise.clone();
            stepwise.extend(rules, &tokens[120..]).unwrap();
            assert_eq!(stepwise, whole);
            stepwise.rewind(rules, &tokens[..120], 40).unwrap();
            assert_eq!(stepwise, middle);
            assert_eq!(stepwise.try_clone().unwrap(), middle);
        }
    }

    #[test]
    fn only_tokens_that_a_penalty_needs_are_counted() {
        let [repetition, presence, _, none, _] = all_rules();
        let counts = |rules: &ResolvedSampling| SamplingHistory::new(rules, &[7, 7, 3, 7, 3, 3], 2).unwrap().counts;
        assert_eq!(counts(&repetition), [Count { token: 3, generated: 3 }, Count { token: 7, generated: 1 }]);
        assert_eq!(counts(&presence), [Count { token: 3, generated: 3 }, Count { token: 7, generated: 1 }]);
        assert_eq!(SamplingHistory::new(&presence, &[7, 7, 3], 2).unwrap().counts, [Count { token: 3, generated: 1 }]);
        assert_eq!(SamplingHistory::new(&repetition, &[7, 7, 3], 2).unwrap().counts[1], Count { token: 7, generated: 0 });
        assert!(counts(&none).is_empty());
    }

    #[test]
    fn rewinding_restores_the_mu_of_that_position() {
        let rules = rules(SamplingParams { mirostat: Some(Mirostat { tau: 3.0, eta: 0.5 }), ..Default::default() });
        let tokens = random_tokens(1, 30);
        let mut history = SamplingHistory::new(&rules, &tokens[..10], 10).unwrap();
        assert_eq!(history.mu(), Some(6.0));
        let mut before = vec![];
        for (i, &token) in tokens[10..].iter().enumerate() {
            before.push(history.mu());
            history.advance(&rules, &Sample { token, surprise: Some(i as f32) }).unwrap();
        }
        for len in (10..30).rev() {
            history.rewind(&rules, &tokens[..len], 10).unwrap();
            assert_eq!(history.mu(), before[len - 10], "{len}");
        }
        history.advance(&rules, &Sample { token: 1, surprise: Some(0.0) }).unwrap();
        assert_eq!(history.mu(), Some(7.5));
        history.extend(&rules, &[1, 2, 3]).unwrap();
        assert_eq!(history.mu(), Some(7.5), "tokens that were not sampled do not change mu");
        history.rewind(&rules, &tokens[..12], 10).unwrap();
        assert_eq!(history.mu(), Some(7.5));
        history.rewind(&rules, &tokens[..14], 14).unwrap();
        assert_eq!(history.mu(), Some(7.5), "a longer prompt keeps mu");
        history.rewind(&rules, &tokens[..5], 5).unwrap();
        assert_eq!(history.mu(), Some(6.0), "rewinding into the prompt resets mu");
        history.advance(&rules, &Sample { token: 1, surprise: Some(0.0) }).unwrap();
        history.rewind(&rules, &tokens[..6], 5).unwrap();
        assert_eq!(history.mu(), Some(7.5));
    }

    #[test]
    fn advancing_allocates_nothing_after_reserve() {
        let mirostat = Some(Mirostat { tau: 3.0, eta: 0.5 });
        let rules = rules(SamplingParams { mirostat, repetition_penalty: 1.1, ..Default::default() });
        let mut history = SamplingHistory::new(&rules, &[1, 2, 3], 3).unwrap();
        history.reserve(&rules, 100).unwrap();
        let before = (history.counts.as_ptr(), history.mus.as_ptr());
        for token in 0..100 {
            history.advance(&rules, &Sample { token, surprise: Some(1.0) }).unwrap();
        }
        assert_eq!((history.counts.as_ptr(), history.mus.as_ptr()), before);
    }
}
