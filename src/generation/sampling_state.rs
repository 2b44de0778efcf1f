//! The sampling state of one sequence.

use std::sync::Arc;

use super::grammar::Constraint;
use super::grammar::MaskId;
use super::sampler::Context;
use super::sampler::ResolvedSampling;
use super::sampler::SamplingHistory;
use super::sampler::branch_seed;
use super::sampler::{NoChoice, Sample};
use super::sampler::{Sampler, drawing};
use crate::error::{Error, Result};
use crate::types::SeqId;
use crate::types::batch::device_sampling::DeviceSampling;
use crate::types::options::SamplingParams;

/// A logits hook: gets the id and the tokens of a sequence and edits the logits of its next token.
/// It runs on the stepping thread.
pub type LogitsHook = Arc<dyn Fn(SeqId, &[u32], &mut [f32]) + Send + Sync>;

/// The grammar of a generation.
#[derive(Default)]
pub enum ConstraintState {
    #[default]
    Unconstrained,
    Present(Constraint),
    /// Another thread computes its mask.
    Away(MaskId),
    /// A defect has destroyed it.
    Lost(Error),
}

impl ConstraintState {
    /// Takes the constraint, whose mask gets this id.
    pub fn take(&mut self, id: MaskId) -> Option<Constraint> {
        match std::mem::replace(self, ConstraintState::Away(id)) {
            ConstraintState::Present(constraint) => Some(constraint),
            other => {
                *self = other;
                None
            }
        }
    }

    /// Returns a constraint that was taken. Does nothing if the generation is another one now.
    pub fn put_back(&mut self, id: MaskId, constraint: Result<Constraint>) {
        if matches!(self, ConstraintState::Away(away) if *away == id) {
            *self = constraint.map_or_else(ConstraintState::Lost, ConstraintState::Present);
        }
    }

    /// Returns the constraint, or `None` if there is none. Fails if it is away or lost.
    pub fn get(&mut self) -> Result<Option<&mut Constraint>> {
        match self {
            ConstraintState::Unconstrained => Ok(None),
            ConstraintState::Present(constraint) => Ok(Some(constraint)),
            ConstraintState::Away(_) => Err(Error::internal("the grammar of the sequence is used by another thread")),
            ConstraintState::Lost(error) => Err(error.clone()),
        }
    }

    fn fork(&self) -> Result<ConstraintState> {
        Ok(match self {
            ConstraintState::Unconstrained => ConstraintState::Unconstrained,
            ConstraintState::Present(constraint) => ConstraintState::Present(constraint.fork()?),
            ConstraintState::Away(_) => return Err(Error::internal("the grammar of the sequence is used by another thread")),
            ConstraintState::Lost(error) => ConstraintState::Lost(error.clone()),
        })
    }
}

/// The parameters of one generation, and the state that its tokens have left.
pub struct SamplingState {
    pub resolved: Arc<ResolvedSampling>,
    /// Seed. The n-th random number of the seed selects the n-th token.
    pub seed: u64,
    /// Hook of the host that edits the logits.
    pub hook: Option<LogitsHook>,
    /// Grammar that the text must match.
    pub constraint: ConstraintState,
    history: SamplingHistory,
    prompt_len: usize,
    generated: usize,
}

impl SamplingState {
    /// Creates the state of a generation that has no tokens yet. `start` adds its prompt.
    pub fn new(resolved: Arc<ResolvedSampling>, seed: u64, hook: Option<LogitsHook>, constraint: Option<Constraint>) -> SamplingState {
        let constraint = constraint.map_or(ConstraintState::Unconstrained, ConstraintState::Present);
        SamplingState { resolved, seed, hook, constraint, history: SamplingHistory::default(), prompt_len: 0, generated: 0 }
    }

    pub fn params(&self) -> &SamplingParams {
        &self.resolved.params
    }

    /// Returns the number of tokens at the start of the generation.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Returns the number of tokens since the start of the generation.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// Returns the state of mirostat, as `SamplingHistory::mirostat` does.
    pub fn mirostat(&self) -> Option<(usize, &[f32])> {
        self.history.mirostat()
    }

    /// Starts the generation after `tokens`.
    pub fn start(&mut self, tokens: &[u32]) -> Result<()> {
        self.history = SamplingHistory::new(&self.resolved, tokens, tokens.len())?;
        (self.prompt_len, self.generated) = (tokens.len(), 0);
        Ok(())
    }

    /// Restores the state of an exported sequence, whose grammar is at the end of the prompt.
    pub fn restore(&mut self, tokens: &[u32], prompt_len: usize, mirostat: Option<(usize, Vec<f32>)>) -> Result<()> {
        let generated = &tokens[prompt_len..];
        if let Some(constraint) = self.constraint.get()? {
            constraint.append_later(generated)?;
        }
        self.history = SamplingHistory::restore(&self.resolved, tokens, prompt_len, mirostat)?;
        (self.prompt_len, self.generated) = (prompt_len, generated.len());
        Ok(())
    }

    /// Reserves memory for `more` tokens, so that `advance` does not allocate.
    pub fn reserve(&mut self, more: usize) -> Result<()> {
        self.history.reserve(&self.resolved, more)?;
        match &mut self.constraint {
            ConstraintState::Present(constraint) => constraint.reserve(more),
            _ => Ok(()),
        }
    }

    /// Reserves memory for a copy of `other` and `more` tokens. A copy of a grammar still
    /// allocates.
    pub fn reserve_copy(&mut self, other: &SamplingState, more: usize) -> Result<()> {
        self.history.copy(&other.history)?;
        self.history.reserve(&self.resolved, more)
    }

    /// Makes this a copy of `other`, in the existing memory if it suffices.
    pub fn copy(&mut self, other: &SamplingState) -> Result<()> {
        (self.resolved, self.seed, self.hook) = (other.resolved.clone(), other.seed, other.hook.clone());
        self.constraint = other.constraint.fork()?;
        (self.prompt_len, self.generated) = (other.prompt_len, other.generated);
        self.history.copy(&other.history)
    }

    /// Returns the logits after the hook, if there is one. `edited` is a buffer for them.
    pub fn apply_hook<'a>(&self, seq: SeqId, tokens: &[u32], logits: &'a [f32], edited: &'a mut Vec<f32>) -> Result<&'a [f32]> {
        let Some(hook) = &self.hook else { return Ok(logits) };
        edited.clear();
        edited.try_reserve(logits.len())?;
        edited.extend_from_slice(logits);
        hook(seq, tokens, edited);
        Ok(edited)
    }

    /// Samples the next token of sample `i`. `logits` are those after the hook.
    pub fn choose(&mut self, sampler: &mut Sampler, logits: &[f32], tokens: &[u32], i: usize) -> Result<Sample> {
        let (resolved, context) = self.context(tokens, i)?;
        sampler.choose(logits, resolved, &context).map_err(|why| match why {
            NoChoice::NotFinite if self.hook.is_some() => {
                Error::invalid("no token can be sampled: after the logits hook some logits are NaN or infinite; correct the hook")
            }
            why => why.into(),
        })
    }

    /// Plans the sampling of the next token on the device, as `plan_draw` does.
    pub fn plan_draw(&mut self, draws: &mut DeviceSampling, row: u32, vocab: usize, logprobs: Option<u32>, tokens: &[u32]) -> Result<bool> {
        let (resolved, context) = self.context(tokens, 0)?;
        Ok(drawing::plan_draw(draws, row, vocab, logprobs, resolved, &context))
    }

    /// Returns what sampling reads for sample `i`.
    fn context<'a>(&'a mut self, tokens: &'a [u32], i: usize) -> Result<(&'a ResolvedSampling, Context<'a>)> {
        let allowed = self.constraint.get()?.map(Constraint::mask).transpose()?;
        let (prompt_len, generated, seed) = (self.prompt_len, self.generated, branch_seed(self.seed, i));
        Ok((&self.resolved, Context { tokens, prompt_len, generated, seed, history: &self.history, allowed }))
    }

    /// Returns whether `token` ends the sequence if it is appended next.
    pub fn stops_at(&self, token: u32) -> bool {
        self.resolved.stops_at(token) && !self.resolved.must_go_on(self.generated)
    }

    /// Adds a sampled token, except to the grammar.
    pub fn advance(&mut self, sample: &Sample) -> Result<()> {
        self.generated += 1;
        self.history.advance(&self.resolved, sample)
    }

    /// Adds tokens of the host. They count as generated tokens.
    pub fn append(&mut self, tokens: &[u32]) -> Result<()> {
        self.history.reserve(&self.resolved, tokens.len())?;
        if let Some(constraint) = self.constraint.get()? {
            constraint.append_later(tokens)?;
        }
        self.history.extend(&self.resolved, tokens)?;
        self.generated += tokens.len();
        Ok(())
    }

    /// Restores the state after `tokens`, to which the sequence was truncated.
    pub fn rewind(&mut self, tokens: &[u32]) -> Result<()> {
        self.prompt_len = self.prompt_len.min(tokens.len());
        let generated = tokens.len() - self.prompt_len;
        if let Some(constraint) = self.constraint.get()? {
            constraint.rewind_later(self.generated.saturating_sub(generated))?;
        }
        self.history.rewind(&self.resolved, tokens, self.prompt_len)?;
        self.generated = generated;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::options::Mirostat;

    fn state(tokens: &[u32]) -> SamplingState {
        let mirostat = Some(Mirostat { tau: 3.0, eta: 0.5 });
        let params = SamplingParams { repetition_penalty: 1.2, min_tokens: 3, stop_token_ids: vec![9], mirostat, ..Default::default() };
        let mut state = SamplingState::new(Arc::new(ResolvedSampling { params, ..Default::default() }), 5, None, None);
        state.start(tokens).unwrap();
        state
    }

    fn assert_equal(one: &SamplingState, other: &SamplingState) {
        assert_eq!(one.history, other.history);
        assert_eq!((one.seed, one.prompt_len, one.generated), (other.seed, other.prompt_len, other.generated));
    }

    #[test]
    fn a_rewound_state_is_that_of_the_remaining_tokens() {
        let mut state = state(&[1, 2, 3]);
        state.advance(&Sample { token: 4, surprise: Some(1.0) }).unwrap();
        let mut before = SamplingState::new(state.resolved.clone(), 0, None, None);
        before.copy(&state).unwrap();
        state.advance(&Sample { token: 2, surprise: Some(2.0) }).unwrap();
        state.append(&[7, 7]).unwrap();
        assert_eq!((state.prompt_len(), state.generated()), (3, 4));
        state.rewind(&[1, 2, 3, 4]).unwrap();
        assert_equal(&state, &before);
        state.rewind(&[1, 2]).unwrap();
        assert_eq!((state.prompt_len(), state.generated()), (2, 0), "a rewind into the prompt makes the prompt shorter");
    }

    #[test]
    fn a_restored_state_equals_the_exported_one() {
        let mut exported = state(&[1, 2, 3]);
        exported.advance(&Sample { token: 4, surprise: Some(1.0) }).unwrap();
        exported.append(&[5, 1]).unwrap();
        let mirostat = exported.mirostat().map(|(first, mus)| (first, mus.to_vec()));
        let mut restored = state(&[1, 2, 3]);
        restored.restore(&[1, 2, 3, 4, 5, 1], 3, mirostat).unwrap();
        assert_equal(&restored, &exported);
    }

    #[test]
    fn a_stop_token_ends_a_sequence_only_after_min_tokens() {
        let mut state = state(&[1]);
        state.append(&[9, 9]).unwrap();
        assert!(!state.stops_at(9));
        state.append(&[9]).unwrap();
        assert!(state.stops_at(9) && !state.stops_at(8));
    }
}
