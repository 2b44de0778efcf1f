//! Turns the tokens of a sequence into the contents of its outputs.

use std::ops::Range;

use super::beam::{Ended, Hypothesis};
use super::sampler::{ResolvedSampling, Sample};
use super::{SamplingState, StopMatcher};
use crate::error::{Error, Result, try_copy, try_refill, try_vec};
use crate::text::{Detokenizer, Text};
use crate::types::options::{OutputKind, SamplingParams};
use crate::types::outputs::{FinishReason, Logprobs, Output, OutputContent, OutputView, StopReason};
use crate::types::sequence_state::{Header, InsertedRange, SerializedLogprobs, bits, numbers};

/// The text, the log probabilities and the cumulative outputs of one generation.
#[derive(Default)]
pub struct OutputProcessor {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Log probability of each generated token, 0 if not requested.
    logprobs: Vec<f32>,
    score: f64,
    /// Ranges of generated tokens whose text is treated specially, in order.
    inserted: Vec<InsertedRange>,
    /// Contents so far, if outputs are not deltas.
    accumulated: OutputContent,
    /// New text before the search for stop strings.
    fresh: String,
}

/// A sampled token and the data that its output reports.
#[derive(Debug, Clone, Default)]
pub struct NewToken {
    pub sample: Sample,
    pub logprob: f32,
    /// Range of the most probable alternatives in the list of the step.
    pub top: Range<usize>,
}

impl OutputProcessor {
    /// Starts a generation after `prompt`.
    pub fn start(&mut self, sampling: &SamplingState, skip_special: bool, prompt: &[u32]) {
        self.detokenizer = Detokenizer::new(skip_special);
        self.detokenizer.prime(prompt);
        self.stops = StopMatcher::new(sampling.resolved.clone());
        self.logprobs.clear();
        self.score = 0.0;
        self.inserted.clear();
        self.accumulated.clear();
    }

    /// Reserves memory for `more` tokens, so that no step allocates it.
    pub fn reserve(&mut self, params: &SamplingParams, more: usize) -> Result<()> {
        const TEXT: usize = 64; // longer than the text of most tokens
        self.logprobs.try_reserve_exact(more)?;
        self.inserted.try_reserve(1)?;
        self.fresh.try_reserve(TEXT)?;
        self.stops.reserve_held(TEXT)?;
        self.detokenizer.reserve()?;
        if is_cumulative(params) {
            self.accumulated.tokens.try_reserve_exact(more)?;
        }
        Ok(())
    }

    /// Makes this a copy of `other`, in the existing memory if it suffices.
    pub fn copy(&mut self, other: &OutputProcessor) -> Result<()> {
        self.score = other.score;
        self.detokenizer.copy(&other.detokenizer)?;
        self.stops.copy(&other.stops)?;
        try_refill(&mut self.logprobs, &other.logprobs)?;
        try_refill(&mut self.inserted, &other.inserted)?;
        self.accumulated.clear();
        self.accumulated.add(other.accumulated.all())
    }

    /// Returns the log probabilities that cumulative outputs repeat, with those of the echoed
    /// prompt first. `None` if outputs are deltas.
    pub fn accumulated_logprobs(&mut self, params: &SamplingParams) -> Option<&mut Logprobs> {
        is_cumulative(params).then_some(&mut self.accumulated.logprobs)
    }

    /// Returns the sum of the log probabilities of all generated tokens.
    pub fn score(&self) -> f64 {
        self.score
    }

    /// Adds a committed token to `output`. `top` are its most probable alternatives. A stop string
    /// can end the sequence here. `complete` is whether the grammar is complete.
    pub fn advance(
        &mut self,
        sampling: &SamplingState,
        new: &NewToken,
        top: &[(u32, f32)],
        complete: Result<bool>,
        text: Option<&Text>,
        output: &mut Output,
    ) -> Result<()> {
        let token = new.sample.token;
        self.score += new.logprob as f64;
        output.score = self.score;
        let logprobs = if sampling.params().logprobs.is_some() { &[new.logprob][..] } else { &[] };
        output.set_view(OutputView { tokens: &[token], logprobs, top, ..OutputView::default() })?;
        output.stop = (output.finish == Some(FinishReason::Stop)).then(|| sampling.resolved.stop_reason(token));
        self.logprobs.try_reserve(1)?;
        self.logprobs.push(new.logprob);
        let complete = complete?;
        text.map_or(Ok(()), |text| self.write(sampling, token, complete, text, output))
    }

    fn write(&mut self, sampling: &SamplingState, token: u32, complete: bool, text: &Text, output: &mut Output) -> Result<()> {
        let (params, generated) = (sampling.params(), sampling.generated());
        self.fresh.clear();
        let stopped = output.finish == Some(FinishReason::Stop);
        // The token that ends a sequence is reported. Its text is reported only with
        // `include_stop`.
        match stopped && !params.include_stop {
            true => self.inserted.push(InsertedRange { from: generated - 1, to: generated, hidden: true }),
            false => self.detokenizer.push(text, token, &mut self.fresh)?,
        }
        if complete && !stopped {
            (output.finish, output.stop) = (Some(FinishReason::Stop), Some(StopReason::Grammar));
        }
        if output.finish.is_some() {
            self.detokenizer.finish(text, &mut self.fresh)?;
        }
        self.stops.reserve(&self.fresh, &mut output.text)?;
        if generated < params.min_tokens {
            self.stops.pass(&self.fresh, &mut output.text);
        } else if let Some(which) = self.stops.push(&self.fresh, &mut output.text) {
            let stops = sampling.resolved.stop_texts.clone();
            (output.finish, output.stop) = (Some(FinishReason::Stop), Some(StopReason::Text(stops, which)));
            return Ok(());
        }
        if output.finish.is_some() {
            self.stops.finish(&mut output.text);
        }
        Ok(())
    }

    /// Reserves memory for `tokens` tokens of the host.
    pub fn reserve_append(&mut self, tokens: usize) -> Result<()> {
        self.inserted.try_reserve(1)?;
        Ok(self.logprobs.try_reserve(tokens)?)
    }

    /// Adds tokens of the host after `SamplingState::append`. No output reports them, except that
    /// cumulative outputs repeat them.
    pub fn append(&mut self, sampling: &SamplingState, tokens: &[u32], text: Option<&Text>) -> Result<()> {
        let to = sampling.generated();
        self.inserted.push(InsertedRange { from: to - tokens.len(), to, hidden: false });
        self.logprobs.resize(self.logprobs.len() + tokens.len(), 0.0);
        let mut appended = Output::default();
        if let Some(text) = text {
            self.fresh.clear();
            for &token in tokens {
                self.detokenizer.push(text, token, &mut self.fresh)?;
            }
            self.stops.reserve(&self.fresh, &mut appended.text)?;
            self.stops.pass(&self.fresh, &mut appended.text);
        }
        if is_cumulative(sampling.params()) {
            (appended.tokens, appended.logprobs) = (try_copy(tokens)?, unscored(sampling.params(), tokens)?);
            self.accumulated.add(appended.view())?;
        }
        Ok(())
    }

    /// Restores the state after `tokens`, to which the sequence was truncated, except its text.
    pub fn rewind(&mut self, sampling: &SamplingState, tokens: &[u32]) -> Result<()> {
        let (prompt_len, generated) = (sampling.prompt_len(), sampling.generated());
        self.logprobs.truncate(generated);
        self.inserted.iter_mut().for_each(|inserted| inserted.to = inserted.to.min(generated));
        self.inserted.retain(|inserted| inserted.from < inserted.to);
        self.score = sum(&self.logprobs);
        self.accumulated.prompt_logprobs.truncate(prompt_len.saturating_sub(sampling.params().first_scored()));
        self.accumulate_tokens(sampling, tokens)?;
        self.accumulated.logprobs.truncate(self.accumulated.tokens.len());
        Ok(())
    }

    fn accumulate_tokens(&mut self, sampling: &SamplingState, tokens: &[u32]) -> Result<()> {
        let params = sampling.params();
        if is_cumulative(params) {
            self.accumulated.tokens = try_copy(&tokens[if params.echo { 0 } else { sampling.prompt_len() }..])?;
        }
        Ok(())
    }

    /// Restores the text and the stop-string state after `tokens`.
    pub fn restore_text(&mut self, sampling: &SamplingState, tokens: &[u32], text: Option<&Text>) -> Result<()> {
        let params = sampling.params();
        let (prompt, generated) = tokens.split_at(sampling.prompt_len());
        self.stops = StopMatcher::new(sampling.resolved.clone());
        self.detokenizer.prime(prompt);
        let Some(text) = text else { return Ok(()) };
        let mut again = match params.echo {
            true => text.decode(prompt, self.detokenizer.skips_special())?,
            false => String::new(),
        };
        let mut inserted_ranges = self.inserted.iter().peekable();
        for (place, &token) in generated.iter().enumerate() {
            while inserted_ranges.next_if(|inserted| inserted.to <= place).is_some() {}
            let inserted = inserted_ranges.peek().filter(|inserted| inserted.from <= place);
            if inserted.is_some_and(|inserted| inserted.hidden) {
                continue;
            }
            self.fresh.clear();
            self.detokenizer.push(text, token, &mut self.fresh)?;
            self.stops.reserve(&self.fresh, &mut again)?;
            match inserted.is_some() || place + 1 < params.min_tokens {
                true => self.stops.pass(&self.fresh, &mut again),
                false => _ = self.stops.push(&self.fresh, &mut again),
            }
        }
        if is_cumulative(params) {
            self.accumulated.text = again;
        }
        Ok(())
    }

    /// Adds the state to the header of an export.
    pub fn export<'a>(&'a self, header: Header<'a>) -> Result<Header<'a>> {
        Ok(Header {
            skip_special: self.detokenizer.skips_special(),
            history: bits(&self.logprobs)?,
            inserted: (&self.inserted).into(),
            logprobs: SerializedLogprobs::new(&self.accumulated.logprobs)?,
            prompt_logprobs: SerializedLogprobs::new(&self.accumulated.prompt_logprobs)?,
            ..header
        })
    }

    /// Restores the state of an exported sequence after `SamplingState::restore`.
    pub fn restore(&mut self, sampling: &SamplingState, header: &Header, text: Option<&Text>) -> Result<()> {
        self.logprobs = numbers(&header.history)?;
        self.inserted = try_copy(&header.inserted)?;
        self.score = sum(&self.logprobs);
        self.accumulated.logprobs = header.logprobs.logprobs()?;
        self.accumulated.prompt_logprobs = header.prompt_logprobs.logprobs()?;
        self.accumulate_tokens(sampling, &header.tokens)?;
        // Hosts read one log probability per token.
        let wanted = sampling.params().logprobs.map_or(0, |_| self.accumulated.tokens.len());
        if self.accumulated.logprobs.tokens.len() != wanted {
            return Err(Error::invalid("the sequence state is damaged: its log probabilities do not match its tokens"));
        }
        self.restore_text(sampling, &header.tokens, text)
    }

    /// Adds the text that was held back to the last output of a generation that ends without a new
    /// token. If the sequence stays, its detokenizer and stop-string state do not change, so that
    /// it can continue.
    pub fn close(&mut self, stays: bool, text: Option<&Text>, output: &mut Output) -> Result<()> {
        self.fresh.clear();
        if let Some(text) = text.filter(|_| !stays) {
            // Errors are ignored, since an end is never refused.
            let _ = self.detokenizer.finish(text, &mut self.fresh);
        }
        self.stops.reserve(&self.fresh, &mut output.text)?;
        match stays {
            true => self.stops.tell_held(&mut output.text),
            false => self.stops.pass(&self.fresh, &mut output.text),
        }
        Ok(())
    }

    /// Adds a result of a beam search to `output`.
    pub fn write_hypothesis(
        &self,
        resolved: &ResolvedSampling,
        hypothesis: &Hypothesis,
        text: Option<&Text>,
        output: &mut Output,
    ) -> Result<()> {
        let params = &resolved.params;
        let shown = match hypothesis.ended {
            Ended::AtEos if !params.include_stop => &hypothesis.tokens[..hypothesis.tokens.len() - 1],
            _ => &hypothesis.tokens[..],
        };
        if let Some(text) = text {
            let mut detokenizer = self.detokenizer.clone();
            shown.iter().try_for_each(|&token| detokenizer.push(text, token, &mut output.text))?;
            detokenizer.finish(text, &mut output.text)?;
        }
        if let (Ended::AtEos, Some(&last)) = (hypothesis.ended, hypothesis.tokens.last()) {
            output.stop = Some(resolved.stop_reason(last));
        }
        output.generated_tokens = hypothesis.tokens.len() as u64;
        output.tokens = try_copy(&hypothesis.tokens)?;
        if params.logprobs.is_some() {
            output.logprobs.tokens = try_copy(&hypothesis.logprobs)?;
        }
        output.score = hypothesis.score as f64;
        Ok(())
    }

    /// Converts an output to the requested kind: as it is, or with all contents so far. Without
    /// memory for the contents, it becomes the last output with an error.
    pub fn emit(&mut self, params: &SamplingParams, mut output: Output) -> Output {
        if !is_cumulative(params) {
            return output;
        }
        let added = self.accumulated.add(output.view());
        match added.and_then(|()| if is_delivered(params, &output) { output.set_view(self.accumulated.all()) } else { Ok(()) }) {
            Ok(()) => output,
            Err(error) => output.failed(error),
        }
    }
}

/// Returns whether the host gets this output. With `OutputKind::Final` it gets only the last one.
pub fn is_delivered(params: &SamplingParams, output: &Output) -> bool {
    params.output != OutputKind::Final || output.finish.is_some()
}

/// Returns whether an output repeats the contents of the earlier ones.
pub fn is_cumulative(params: &SamplingParams) -> bool {
    params.output != OutputKind::Delta
}

/// Returns NaN as the log probability of tokens that have none or whose value is not known, so that
/// each token has one. Each alternative is the token itself, with NaN.
pub fn unscored(params: &SamplingParams, tokens: &[u32]) -> Result<Logprobs> {
    let Some(k) = params.logprobs else { return Ok(Logprobs::default()) };
    let mut unknown = Logprobs { tokens: try_vec(tokens.len(), f32::NAN)?, top: Vec::new() };
    unknown.top.try_reserve_exact(tokens.len() * k as usize)?;
    unknown.top.extend(tokens.iter().flat_map(|&token| std::iter::repeat_n((token, f32::NAN), k as usize)));
    Ok(unknown)
}

/// Sums from 0.0, since `Iterator::sum` of no values is -0.0.
fn sum(logprobs: &[f32]) -> f64 {
    logprobs.iter().fold(0.0, |sum, &logprob| sum + logprob as f64)
}
