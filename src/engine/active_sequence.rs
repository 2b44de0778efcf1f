//! The state of a sequence beside its tokens: sampling state, detokenizer, stop strings and
//! outputs.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::LogitsHook;
use super::outputs::{Logprobs, Output, OutputContent, OutputView};
use super::queue::OutputSender;
use super::sequence_state::{Header, InsertedRange, SerializedLogprobs, bits, numbers};
use super::timing::Timing;
use crate::decode::{Constraint, Ended, Hypothesis, ResolvedSampling, Sample, SamplingHistory, StopMatcher};
use crate::error::{Error, Result, try_copy, try_refill, try_vec};
use crate::options::OutputKind;
use crate::scheduler::FinishReason;
use crate::text::{Detokenizer, Text};
use crate::types::{RequestId, SeqId};

/// A generation: the parameters of a sequence from its start or resume to its next end.
pub struct Generation {
    pub user_data: u64,
    /// Receiver of the outputs.
    pub sender: Arc<OutputSender>,
    pub sampling: Arc<ResolvedSampling>,
    pub seed: u64,
    /// Grammar that the text must match.
    pub constraint: Option<Constraint>,
    /// Hook of the host that edits the logits.
    pub hook: Option<LogitsHook>,
    pub skip_special: bool,
    pub keep: bool,
    /// Time at which the generation ends, on the clock of the engine.
    pub deadline: Option<Duration>,
    /// Time of the call.
    pub requested_at: Duration,
}

/// The state of one sequence in the engine.
pub struct ActiveSequence {
    pub request: RequestId,
    pub sequence: SeqId,
    pub index: u32,
    pub user_data: u64,
    pub sender: Arc<OutputSender>,
    pub sampling: Arc<ResolvedSampling>,
    /// Seed. The n-th random number of the seed selects the n-th token.
    pub seed: u64,
    pub sampling_history: SamplingHistory,
    /// Grammar state. `None` while the worker computes its mask.
    pub constraint: Option<Constraint>,
    pub hook: Option<LogitsHook>,
    pub deadline: Option<Duration>,
    /// Number of samples that the first token forks, including this sequence.
    pub branches: usize,
    /// Preallocated sequences for the other samples.
    pub unstarted_samples: Vec<ActiveSequence>,
    /// Whether it is part of a best-of group.
    pub ranked: bool,
    /// Number of tokens at the start of this generation.
    pub prompt_len: usize,
    pub generated: usize,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Log probability of each generated token, 0 if not requested.
    history: Vec<f32>,
    score: f64,
    /// Ranges of generated tokens whose text is treated specially, in order.
    inserted: Vec<InsertedRange>,
    /// Whether a part of its K and V comes from another instruction path.
    pub inexact: bool,
    /// Contents so far, if outputs are not deltas.
    accumulated: OutputContent,
    /// The echoed prompt, for samples that are not forked yet.
    echoed: Option<Box<Output>>,
    /// New text before the search for stop strings.
    fresh: String,
    pub timing: Timing,
}

/// A sampled token and the data that its output reports.
#[derive(Debug, Clone, Default)]
pub struct NewToken {
    pub sample: Sample,
    pub logprob: f32,
    /// Range of the most probable alternatives in the list of the step.
    pub top: Range<usize>,
}

impl ActiveSequence {
    /// Creates a sequence without an id that generates at most `max_new_tokens` tokens after the
    /// prompt.
    pub fn new(generation: Generation, prompt: &[u32], max_new_tokens: usize) -> Result<ActiveSequence> {
        let mut sequence = ActiveSequence::empty(generation.sender.clone(), generation.sampling.clone());
        sequence.resume(generation, prompt, max_new_tokens)?;
        Ok(sequence)
    }

    fn empty(sender: Arc<OutputSender>, sampling: Arc<ResolvedSampling>) -> ActiveSequence {
        ActiveSequence {
            request: RequestId::default(),
            sequence: SeqId::default(),
            index: 0,
            user_data: 0,
            sender,
            sampling,
            seed: 0,
            sampling_history: SamplingHistory::default(),
            constraint: None,
            hook: None,
            deadline: None,
            branches: 1,
            unstarted_samples: Vec::new(),
            ranked: false,
            prompt_len: 0,
            generated: 0,
            detokenizer: Detokenizer::default(),
            stops: StopMatcher::default(),
            history: Vec::new(),
            score: 0.0,
            inserted: Vec::new(),
            inexact: false,
            accumulated: OutputContent::default(),
            echoed: None,
            fresh: String::new(),
            timing: Timing::default(),
        }
    }

    /// Preallocates the sequences of `branches` samples, so that no step allocates them.
    pub fn reserve_samples(&mut self, branches: usize, max_new_tokens: usize) -> Result<()> {
        self.branches = branches;
        self.unstarted_samples.try_reserve_exact(branches - 1)?;
        for _ in 1..branches {
            let mut child = ActiveSequence::empty(self.sender.clone(), self.sampling.clone());
            child.sampling_history.copy(&self.sampling_history)?;
            child.reserve(max_new_tokens)?;
            self.unstarted_samples.push(child);
        }
        Ok(())
    }

    /// Reserves memory for `max_new_tokens` more tokens, so that no step allocates it.
    fn reserve(&mut self, max_new_tokens: usize) -> Result<()> {
        const TEXT: usize = 64; // longer than the text of most tokens
        self.sampling_history.reserve(&self.sampling, max_new_tokens)?;
        self.history.try_reserve_exact(max_new_tokens)?;
        self.constraint.as_mut().map_or(Ok(()), |constraint| constraint.reserve(max_new_tokens))?;
        self.inserted.try_reserve(1)?;
        self.fresh.try_reserve(TEXT)?;
        self.stops.reserve_held(TEXT)?;
        self.detokenizer.reserve()?;
        if self.is_cumulative() {
            self.accumulated.tokens.try_reserve_exact(max_new_tokens)?;
        }
        Ok(())
    }

    /// Starts a generation of at most `max_new_tokens` tokens after `tokens`.
    pub fn resume(&mut self, generation: Generation, tokens: &[u32], max_new_tokens: usize) -> Result<()> {
        let Generation { user_data, sender, sampling, seed, constraint, hook, skip_special, deadline, requested_at, keep: _ } = generation;
        // If there is no memory, the sequence is unchanged and can be exported.
        let memory = SamplingHistory::new(&sampling, tokens, tokens.len())?;
        self.timing = Timing::new(requested_at);
        (self.user_data, self.sender, self.seed, self.constraint, self.hook) = (user_data, sender, seed, constraint, hook);
        self.deadline = deadline;
        (self.sampling, self.sampling_history) = (sampling, memory);
        (self.prompt_len, self.generated, self.score) = (tokens.len(), 0, 0.0);
        self.exclude_samples();
        self.detokenizer = Detokenizer::new(skip_special);
        self.detokenizer.prime(tokens);
        self.stops = StopMatcher::new(self.sampling.clone());
        self.history.clear();
        self.inserted.clear();
        self.accumulated.clear();
        self.reserve(max_new_tokens)
    }

    /// Returns a copy for a fork.
    pub fn fork(&self) -> Result<ActiveSequence> {
        let mut child = ActiveSequence::empty(self.sender.clone(), self.sampling.clone());
        child.copy(self)?;
        Ok(child)
    }

    /// Copies everything from `other`, except its future samples.
    pub fn copy(&mut self, other: &ActiveSequence) -> Result<()> {
        (self.request, self.sequence, self.index, self.user_data) = (other.request, other.sequence, other.index, other.user_data);
        (self.sender, self.sampling, self.seed) = (other.sender.clone(), other.sampling.clone(), other.seed);
        self.sampling_history.copy(&other.sampling_history)?;
        self.constraint = other.constraint.as_ref().map(Constraint::fork).transpose()?;
        (self.hook, self.deadline, self.timing) = (other.hook.clone(), other.deadline, other.timing);
        (self.branches, self.ranked) = (1, other.ranked);
        (self.prompt_len, self.generated, self.score, self.inexact) = (other.prompt_len, other.generated, other.score, other.inexact);
        self.detokenizer.copy(&other.detokenizer)?;
        self.stops.copy(&other.stops)?;
        try_refill(&mut self.history, &other.history)?;
        try_refill(&mut self.inserted, &other.inserted)?;
        self.accumulated.clear();
        self.accumulated.add(other.accumulated.all())?;
        self.echoed = other.echoed.as_ref().map(|echoed| echoed.try_echo().map(Box::new)).transpose()?;
        Ok(())
    }

    /// Restores the state that the sequence had after `tokens`, to which the sequence was
    /// truncated.
    pub fn rewind(&mut self, tokens: &[u32], text: Option<&Text>) -> Result<()> {
        self.prompt_len = self.prompt_len.min(tokens.len());
        let generated = tokens.len() - self.prompt_len;
        if let Some(constraint) = &mut self.constraint {
            constraint.rewind(self.generated.saturating_sub(generated))?;
        }
        self.sampling_history.rewind(&self.sampling, tokens, self.prompt_len)?;
        self.generated = generated;
        self.history.truncate(generated);
        self.inserted.iter_mut().for_each(|inserted| inserted.to = inserted.to.min(generated));
        self.inserted.retain(|inserted| inserted.from < inserted.to);
        self.score = sum(&self.history);
        self.accumulated.prompt_logprobs.truncate(self.prompt_len - 1);
        self.accumulate_again(tokens)?;
        self.accumulated.logprobs.truncate(self.accumulated.tokens.len());
        if self.echoed.is_some() {
            self.echoed = Some(Box::new(self.echo_output(&tokens[..self.prompt_len], text)?));
        }
        self.restore_text(tokens, text)
    }

    /// Restores the text and the stop-string state after `tokens`.
    fn restore_text(&mut self, tokens: &[u32], text: Option<&Text>) -> Result<()> {
        self.stops = StopMatcher::new(self.sampling.clone());
        self.detokenizer.prime(&tokens[..self.prompt_len]);
        let Some(text) = text else { return Ok(()) };
        let mut again = match self.sampling.params.echo {
            true => text.decode(&tokens[..self.prompt_len], self.detokenizer.skips_special())?,
            false => String::new(),
        };
        let mut inserted_ranges = self.inserted.iter().peekable();
        for (place, &token) in tokens[self.prompt_len..].iter().enumerate() {
            while inserted_ranges.next_if(|inserted| inserted.to <= place).is_some() {}
            let inserted = inserted_ranges.peek().filter(|inserted| inserted.from <= place);
            if inserted.is_some_and(|inserted| inserted.hidden) {
                continue;
            }
            self.fresh.clear();
            self.detokenizer.push(text, token, &mut self.fresh)?;
            self.stops.reserve(&self.fresh, &mut again)?;
            match inserted.is_some() || place + 1 < self.sampling.params.min_tokens {
                true => self.stops.pass(&self.fresh, &mut again),
                false => drop(self.stops.push(&self.fresh, &mut again)),
            }
        }
        if self.is_cumulative() {
            self.accumulated.text = again;
        }
        Ok(())
    }

    /// Appends tokens of the host. They count as generated tokens.
    pub fn append(&mut self, tokens: &[u32], text: Option<&Text>) -> Result<()> {
        self.sampling_history.reserve(&self.sampling, tokens.len())?;
        self.inserted.try_reserve(1)?;
        self.history.try_reserve(tokens.len())?;
        if let Some(constraint) = &mut self.constraint {
            // An error of the grammar is reported when a mask is needed.
            let _ = constraint.append(tokens);
        }
        self.sampling_history.extend(&self.sampling, tokens)?;
        self.inserted.push(InsertedRange { from: self.generated, to: self.generated + tokens.len(), hidden: false });
        self.generated += tokens.len();
        self.history.resize(self.history.len() + tokens.len(), 0.0);
        let mut appended = Output::default();
        if let Some(text) = text {
            self.fresh.clear();
            for &token in tokens {
                self.detokenizer.push(text, token, &mut self.fresh)?;
            }
            self.stops.reserve(&self.fresh, &mut appended.text)?;
            self.stops.pass(&self.fresh, &mut appended.text);
        }
        if self.is_cumulative() {
            (appended.tokens, appended.logprobs) = (try_copy(tokens)?, self.unscored(tokens)?);
            self.accumulated.add(appended.view())?;
        }
        Ok(())
    }

    /// Returns log probabilities of 0 for appended tokens, so that each token has one.
    fn unscored(&self, tokens: &[u32]) -> Result<Logprobs> {
        let Some(k) = self.sampling.params.logprobs else { return Ok(Logprobs::default()) };
        let mut unknown = Logprobs { tokens: try_vec(tokens.len(), 0.0)?, top: Vec::new() };
        unknown.top.try_reserve_exact(tokens.len() * k as usize)?;
        unknown.top.extend(tokens.iter().flat_map(|&token| std::iter::repeat_n((token, 0.0), k as usize)));
        Ok(unknown)
    }

    fn is_cumulative(&self) -> bool {
        self.sampling.params.output != OutputKind::Delta
    }

    /// Excludes the sequence from forks and from its best-of group.
    pub fn exclude_samples(&mut self) {
        (self.branches, self.ranked, self.echoed) = (1, false, None);
        self.unstarted_samples.clear();
    }

    /// Adds the state of the sequence to the header of an export.
    pub fn export<'a>(&'a self, header: Header<'a>) -> Result<Header<'a>> {
        Ok(Header {
            prompt_len: self.prompt_len,
            seed: self.seed,
            mirostat: self.sampling_history.mirostat().map(|(first, mus)| Ok::<_, Error>((first, bits(mus)?))).transpose()?,
            params: Cow::Borrowed(&self.sampling.params),
            skip_special: self.detokenizer.skips_special(),
            history: bits(&self.history)?,
            inserted: Cow::Borrowed(&self.inserted),
            logprobs: SerializedLogprobs::new(&self.accumulated.logprobs)?,
            prompt_logprobs: SerializedLogprobs::new(&self.accumulated.prompt_logprobs)?,
            ..header
        })
    }

    /// Creates a sequence with the state of an exported one.
    pub fn restore(id: SeqId, generation: Generation, header: &Header, text: Option<&Text>) -> Result<ActiveSequence> {
        let (prompt, generated) = header.tokens.split_at(header.prompt_len);
        let mut sequence = ActiveSequence::new(generation, prompt, generated.len())?;
        (sequence.request, sequence.sequence) = (id.own_request(), id);
        if let Some(constraint) = &mut sequence.constraint {
            constraint.append(generated)?;
        }
        let mirostat = header.mirostat.as_ref().map(|(first, mus)| Ok::<_, Error>((*first, numbers(mus)?))).transpose()?;
        sequence.sampling_history = SamplingHistory::restore(&sequence.sampling, &header.tokens, header.prompt_len, mirostat)?;
        sequence.generated = generated.len();
        sequence.history = numbers(&header.history)?;
        sequence.inserted = try_copy(&header.inserted)?;
        sequence.score = sum(&sequence.history);
        (sequence.accumulated.logprobs, sequence.accumulated.prompt_logprobs) =
            (header.logprobs.logprobs()?, header.prompt_logprobs.logprobs()?);
        sequence.accumulate_again(&header.tokens)?;
        // Hosts read one log probability per token.
        let wanted = sequence.sampling.params.logprobs.map_or(0, |_| sequence.accumulated.tokens.len());
        if sequence.accumulated.logprobs.tokens.len() != wanted {
            return Err(Error::invalid("the sequence state is damaged: its log probabilities do not match its tokens"));
        }
        sequence.restore_text(&header.tokens, text)?;
        Ok(sequence)
    }

    fn accumulate_again(&mut self, tokens: &[u32]) -> Result<()> {
        if self.is_cumulative() {
            self.accumulated.tokens = try_copy(&tokens[if self.sampling.params.echo { 0 } else { self.prompt_len }..])?;
        }
        Ok(())
    }

    /// Returns whether the log probabilities of its tokens are needed.
    pub fn needs_logprobs(&self) -> bool {
        self.sampling.params.logprobs.is_some() || self.ranked
    }

    /// Returns whether the device may sample the next token: no hook reads the logits, and there is
    /// only one sample.
    pub fn allows_device_sampling(&self) -> bool {
        self.hook.is_none() && self.branches == 1
    }

    /// Returns an output without contents.
    pub fn output(&self) -> Output {
        self.output_reusing(Output::default())
    }

    /// Returns an output without contents that reuses the lists of `reusable`.
    fn output_reusing(&self, reusable: Output) -> Output {
        Output {
            request: self.request,
            sequence: self.sequence,
            index: self.index,
            user_data: self.user_data,
            prompt_tokens: self.prompt_len as u64,
            generated_tokens: self.generated as u64,
            score: self.score,
            ..reusable
        }
    }

    /// Returns the last output of a generation that ends without a new token, with the text that
    /// was held back. If the sequence stays, its detokenizer and stop-string state do not change,
    /// so that it can continue.
    pub fn close(&mut self, finish: FinishReason, stays: bool, text: Option<&Text>, reusable: Output) -> Output {
        let mut output = Output { finish: Some(finish), ..self.output_reusing(reusable) };
        self.fresh.clear();
        if let Some(text) = text.filter(|_| !stays) {
            // Errors are ignored, since an end is never refused.
            let _ = self.detokenizer.finish(text, &mut self.fresh);
        }
        match self.stops.reserve(&self.fresh, &mut output.text) {
            Ok(()) if stays => self.stops.tell_held(&mut output.text),
            Ok(()) => self.stops.pass(&self.fresh, &mut output.text),
            Err(error) => output = output.failed(error),
        }
        self.emit(output)
    }

    /// Returns the prompt as an output, for a request with `echo`.
    pub fn echo(&mut self, prompt: &[u32], text: Option<&Text>) -> Result<Option<Output>> {
        let output = self.echo_output(prompt, text)?;
        self.echoed = (self.branches > 1).then(|| output.try_echo().map(Box::new)).transpose()?;
        self.try_emit(output)
    }

    fn echo_output(&self, prompt: &[u32], text: Option<&Text>) -> Result<Output> {
        let mut output = self.output();
        (output.tokens, output.logprobs) = (try_copy(prompt)?, self.unscored(prompt)?);
        if let Some(text) = text {
            output.text = text.decode(prompt, self.detokenizer.skips_special())?;
        }
        Ok(output)
    }

    /// Returns the echoed prompt for a sample that was just forked, if outputs are deltas.
    /// Otherwise it has the prompt from its parent.
    pub fn repeat_echo(&mut self) -> Option<Output> {
        let Output { tokens, logprobs, text, .. } = *self.echoed.take()?;
        (!self.is_cumulative()).then(|| Output { tokens, logprobs, text, ..self.output() })
    }

    /// Returns an output with log probabilities of prompt tokens.
    pub fn emit_prompt(&mut self, logprobs: &[f32], top: &[(u32, f32)], reusable: Output) -> Result<Option<Output>> {
        let mut output = self.output_reusing(reusable);
        output.set_view(OutputView { prompt_logprobs: logprobs, prompt_top: top, ..OutputView::default() })?;
        self.try_emit(output)
    }

    /// Returns a result of a beam search as an output.
    pub fn hypothesis(&self, index: u32, hypothesis: &Hypothesis, text: Option<&Text>) -> Result<Output> {
        let finish = match hypothesis.ended {
            Ended::AtEos => FinishReason::Stop,
            Ended::AtLength => FinishReason::Length,
        };
        let mut output = Output { finish: Some(finish), timing: self.timing, ..self.output().for_sample(index) };
        let shown = match hypothesis.ended {
            Ended::AtEos if !self.sampling.params.include_stop => &hypothesis.tokens[..hypothesis.tokens.len() - 1],
            _ => &hypothesis.tokens[..],
        };
        if let Some(text) = text {
            let mut detokenizer = self.detokenizer.clone();
            shown.iter().try_for_each(|&token| detokenizer.push(text, token, &mut output.text))?;
            detokenizer.finish(text, &mut output.text)?;
        }
        output.generated_tokens = hypothesis.tokens.len() as u64;
        output.tokens = try_copy(&hypothesis.tokens)?;
        if self.sampling.params.logprobs.is_some() {
            output.logprobs.tokens = try_copy(&hypothesis.logprobs)?;
        }
        output.score = hypothesis.score as f64;
        Ok(output)
    }

    /// Returns the output for a committed token, in the lists of `reusable`. `top` are its most
    /// probable alternatives. A stop string can end the sequence here.
    pub fn advance(
        &mut self,
        advance: &NewToken,
        top: &[(u32, f32)],
        finish: Option<FinishReason>,
        text: Option<&Text>,
        reusable: Output,
    ) -> Output {
        let token = advance.sample.token;
        self.echoed = None;
        self.generated += 1;
        self.score += advance.logprob as f64;
        let mut output = Output { finish, ..self.output_reusing(reusable) };
        let logprobs = if self.sampling.params.logprobs.is_some() { &[advance.logprob][..] } else { &[] };
        let result = output.set_view(OutputView { tokens: &[token], logprobs, top, ..OutputView::default() });
        let result = result.and_then(|()| self.update_sampling(advance));
        let result = result.and_then(|complete| text.map_or(Ok(()), |text| self.write(token, complete, text, &mut output)));
        match result {
            Ok(()) => self.emit(output),
            Err(error) => self.emit(output.failed(error)),
        }
    }

    /// Updates the sampling state. Returns true if the grammar is complete.
    fn update_sampling(&mut self, advance: &NewToken) -> Result<bool> {
        self.history.try_reserve(1)?;
        self.history.push(advance.logprob);
        self.sampling_history.advance(&self.sampling, &advance.sample)?;
        match &mut self.constraint {
            Some(constraint) => {
                constraint.advance(advance.sample.token)?;
                Ok(constraint.is_complete())
            }
            None => Ok(false),
        }
    }

    fn write(&mut self, token: u32, complete: bool, text: &Text, output: &mut Output) -> Result<()> {
        self.fresh.clear();
        let stopped = output.finish == Some(FinishReason::Stop);
        // The token that ends a sequence is reported. Its text is reported only with
        // `include_stop`.
        match stopped && !self.sampling.params.include_stop {
            true => self.inserted.push(InsertedRange { from: self.generated - 1, to: self.generated, hidden: true }),
            false => self.detokenizer.push(text, token, &mut self.fresh)?,
        }
        if complete {
            output.finish = Some(FinishReason::Stop);
        }
        if output.finish.is_some() {
            self.detokenizer.finish(text, &mut self.fresh)?;
        }
        self.stops.reserve(&self.fresh, &mut output.text)?;
        if self.generated < self.sampling.params.min_tokens {
            self.stops.pass(&self.fresh, &mut output.text);
        } else if self.stops.push(&self.fresh, &mut output.text) {
            output.finish = Some(FinishReason::Stop);
            return Ok(());
        }
        if output.finish.is_some() {
            self.stops.finish(&mut output.text);
        }
        Ok(())
    }

    /// Prepares an output that is not the last one. Returns `None` if the host does not get it.
    fn try_emit(&mut self, output: Output) -> Result<Option<Output>> {
        match self.emit(output) {
            Output { error: Some(error), .. } => Err(error),
            output => Ok(Some(output).filter(|output| self.is_delivered(output))),
        }
    }

    /// Converts an output to the requested kind: as it is, or with all contents so far. Without
    /// memory for the contents, it becomes the last output with an error.
    fn emit(&mut self, mut output: Output) -> Output {
        if output.finish.is_some() {
            output.timing = self.timing;
        }
        if !self.is_cumulative() {
            return output;
        }
        let added = self.accumulated.add(output.view());
        match added.and_then(|()| if self.is_delivered(&output) { output.set_view(self.accumulated.all()) } else { Ok(()) }) {
            Ok(()) => output,
            Err(error) => output.failed(error),
        }
    }

    /// Returns whether the host gets this output. With `OutputKind::Final` it gets only the last
    /// one.
    pub fn is_delivered(&self, output: &Output) -> bool {
        self.sampling.params.output != OutputKind::Final || output.finish.is_some()
    }
}

/// Sums from 0.0, since `Iterator::sum` of no values is -0.0.
fn sum(logprobs: &[f32]) -> f64 {
    logprobs.iter().fold(0.0, |sum, &logprob| sum + logprob as f64)
}
