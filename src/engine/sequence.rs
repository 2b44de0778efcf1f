//! The sequences that the engine core owns, from their request or fork to their last output.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result, try_copy};
use crate::generation::SamplingState;
use crate::generation::beam::{Ended, Hypothesis};
use crate::generation::output_processor::{NewToken, OutputProcessor, is_cumulative, is_delivered, unscored};
use crate::output::queue::OutputSender;
use crate::text::Text;
use crate::types::options::SamplingParams;
use crate::types::outputs::{FinishReason, Output, OutputView};
use crate::types::sequence_state::{Header, bits, numbers};
use crate::types::timing::Timing;
use crate::types::{RequestId, SeqId};

/// A generation of a sequence, from its start or resume to its next end: where its outputs go, and
/// how its tokens are sampled. The thread of the caller creates it, and the sequence keeps it.
pub struct Generation {
    pub user_data: u64,
    /// Receiver of the outputs.
    pub sender: Arc<OutputSender>,
    /// Time at which the generation ends, on the clock of the engine.
    pub deadline: Option<Duration>,
    pub timing: Timing,
    /// Whether the text omits special tokens.
    pub skip_special: bool,
    pub sampling: SamplingState,
}

impl Generation {
    /// Returns a generation without tokens, which `copy` replaces.
    fn unstarted(&self) -> Generation {
        Generation { sender: self.sender.clone(), sampling: SamplingState::new(self.sampling.resolved.clone(), 0, None, None), ..*self }
    }

    /// Makes this a copy of `other`, in the existing memory if it suffices.
    fn copy(&mut self, other: &Generation) -> Result<()> {
        let Generation { user_data, sender, deadline, timing, skip_special, sampling } = other;
        (self.user_data, self.sender, self.deadline) = (*user_data, sender.clone(), *deadline);
        (self.timing, self.skip_special) = (*timing, *skip_special);
        self.sampling.copy(sampling)
    }
}

/// A sequence. The stepping thread owns it. The scheduler has its tokens and its KV blocks.
pub struct Sequence {
    pub request: RequestId,
    pub id: SeqId,
    pub index: u32,
    pub generation: Generation,
    pub samples: UnstartedSamples,
    /// Whether it is part of a best-of group.
    pub ranked: bool,
    /// Whether a part of its K and V comes from another instruction path.
    pub inexact: bool,
    /// The echoed prompt, until its log probabilities have been computed.
    echo: Option<Box<PendingEcho>>,
    processor: OutputProcessor,
}

/// An echoed prompt whose log probabilities are computed with the prompt.
struct PendingEcho {
    /// The prompt. Log probabilities that are not known are NaN.
    output: Output,
    /// Number of tokens whose log probabilities are known, or do not exist.
    scored: usize,
}

/// The samples of a request that the first token forks from their sequence.
pub struct UnstartedSamples {
    /// Number of samples, including the sequence itself.
    pub count: usize,
    /// Preallocated sequences for the others, so that no step allocates them.
    #[allow(clippy::vec_box)] // each becomes a live sequence, which has memory of its own
    pub preallocated: Vec<Box<Sequence>>,
    /// The echoed prompt, which the outputs of each sample begin with.
    echo: Option<Box<Output>>,
}

impl UnstartedSamples {
    /// Creates the state of a sequence that forks no samples.
    fn none() -> UnstartedSamples {
        UnstartedSamples { count: 1, preallocated: Vec::new(), echo: None }
    }

    /// Records that the first token has forked all samples.
    pub fn finish(&mut self) {
        (self.count, self.echo) = (1, None);
    }
}

impl Sequence {
    /// Creates a sequence without an id that generates at most `max_new_tokens` tokens after the
    /// prompt.
    pub fn new(mut generation: Generation, prompt: &[u32], max_new_tokens: usize) -> Result<Box<Sequence>> {
        generation.sampling.start(prompt)?;
        let mut sequence = Sequence::unstarted(generation);
        sequence.start(prompt, max_new_tokens)?;
        Ok(sequence)
    }

    fn unstarted(generation: Generation) -> Box<Sequence> {
        Box::new(Sequence {
            request: RequestId::default(),
            id: SeqId::default(),
            index: 0,
            generation,
            samples: UnstartedSamples::none(),
            ranked: false,
            inexact: false,
            echo: None,
            processor: OutputProcessor::default(),
        })
    }

    fn start(&mut self, prompt: &[u32], max_new_tokens: usize) -> Result<()> {
        let Generation { skip_special, sampling, .. } = &mut self.generation;
        self.processor.start(sampling, *skip_special, prompt);
        sampling.reserve(max_new_tokens)?;
        self.processor.reserve(sampling.params(), max_new_tokens)
    }

    /// Preallocates the sequences of `count` samples, so that no step allocates them.
    pub fn reserve_samples(&mut self, count: usize, max_new_tokens: usize) -> Result<()> {
        self.samples.count = count;
        self.samples.preallocated.try_reserve_exact(count - 1)?;
        for _ in 1..count {
            let mut sample = Sequence::unstarted(self.generation.unstarted());
            sample.generation.sampling.reserve_copy(&self.generation.sampling, max_new_tokens)?;
            sample.processor.reserve(self.params(), max_new_tokens)?;
            self.samples.preallocated.push(sample);
        }
        Ok(())
    }

    pub fn params(&self) -> &SamplingParams {
        self.generation.sampling.params()
    }

    /// Starts a generation of at most `max_new_tokens` tokens after `tokens`.
    pub fn resume(&mut self, mut generation: Generation, tokens: &[u32], max_new_tokens: usize) -> Result<()> {
        // If there is no memory, the sequence is unchanged and can be exported.
        generation.sampling.start(tokens)?;
        self.generation = generation;
        self.echo = None;
        self.exclude_samples();
        self.start(tokens, max_new_tokens)
    }

    /// Returns a copy for a fork, which forks no samples.
    pub fn fork(&self) -> Result<Box<Sequence>> {
        let mut fork = Sequence::unstarted(self.generation.unstarted());
        fork.copy(self)?;
        Ok(fork)
    }

    /// Makes this a copy of `other` that forks no samples.
    pub fn copy(&mut self, other: &Sequence) -> Result<()> {
        (self.request, self.id, self.index) = (other.request, other.id, other.index);
        (self.ranked, self.inexact) = (other.ranked, other.inexact);
        // The fork of a sequence with deltas does not repeat its prompt.
        let echo = other.echo.as_ref().filter(|_| is_cumulative(other.params()));
        let copied = |echo: &PendingEcho| Ok::<_, Error>(Box::new(PendingEcho { output: echo.output.try_echo()?, ..*echo }));
        self.echo = echo.map(|echo| copied(echo)).transpose()?;
        self.generation.copy(&other.generation)?;
        self.processor.copy(&other.processor)
    }

    /// Excludes the sequence from forks and from its best-of group.
    pub fn exclude_samples(&mut self) {
        (self.samples, self.ranked) = (UnstartedSamples::none(), false);
    }

    /// Restores the state that the sequence had after `tokens`, to which the sequence was
    /// truncated.
    pub fn rewind(&mut self, tokens: &[u32], text: Option<&Text>) -> Result<()> {
        self.generation.sampling.rewind(tokens)?;
        self.processor.rewind(&self.generation.sampling, tokens)?;
        let prompt = &tokens[..self.generation.sampling.prompt_len()];
        if let Some(echo) = &self.samples.echo {
            self.samples.echo = Some(Box::new(self.echo_again(echo, prompt, text)?));
        }
        if let Some(echo) = self.echo.take() {
            let output = self.echo_again(&echo.output, prompt, text)?;
            self.echo = Some(Box::new(PendingEcho { output, scored: echo.scored.min(prompt.len()) }));
        }
        self.processor.restore_text(&self.generation.sampling, tokens, text)
    }

    /// Appends tokens of the host. They count as generated tokens.
    pub fn append(&mut self, tokens: &[u32], text: Option<&Text>) -> Result<()> {
        self.processor.reserve_append(tokens.len())?;
        self.generation.sampling.append(tokens)?;
        self.processor.append(&self.generation.sampling, tokens, text)
    }

    /// Adds the state of the sequence to the header of an export.
    pub fn export<'a>(&'a self, header: Header<'a>) -> Result<Header<'a>> {
        let sampling = &self.generation.sampling;
        let mirostat = sampling.mirostat().map(|(first, mus)| Ok::<_, Error>((first, bits(mus)?))).transpose()?;
        let (prompt_len, seed, params) = (sampling.prompt_len(), sampling.seed, Cow::Borrowed(sampling.params()));
        self.processor.export(Header { prompt_len, seed, mirostat, params, ..header })
    }

    /// Creates a sequence with the state of an exported one. It has no ids yet.
    pub fn restore(generation: Generation, header: &Header, text: Option<&Text>) -> Result<Box<Sequence>> {
        let (prompt, generated) = header.tokens.split_at(header.prompt_len);
        let mut sequence = Sequence::new(generation, prompt, generated.len())?;
        let mirostat = header.mirostat.as_ref().map(|(first, mus)| Ok::<_, Error>((*first, numbers(mus)?))).transpose()?;
        sequence.generation.sampling.restore(&header.tokens, header.prompt_len, mirostat)?;
        sequence.processor.restore(&sequence.generation.sampling, header, text)?;
        // The rest of an echoed prompt is computed here. Deltas do not repeat the prompt.
        let params = sequence.params();
        let echoes = params.echoed_logprobs().is_some() && is_cumulative(params);
        if let Some(from) = header.logits_from.filter(|from| echoes && from + 1 < prompt.len()) {
            sequence.echo = Some(Box::new(PendingEcho { output: sequence.echo_output(prompt, text)?, scored: from + 1 }));
        }
        Ok(sequence)
    }

    /// Returns whether the log probabilities of its tokens are needed.
    pub fn needs_logprobs(&self) -> bool {
        self.params().logprobs.is_some() || self.ranked
    }

    /// Returns whether the device may sample the next token: the request generates tokens, no hook
    /// reads the logits, and there is only one sample.
    pub fn allows_device_sampling(&self) -> bool {
        self.generation.sampling.hook.is_none() && self.samples.count == 1 && !self.params().is_prompt_only()
    }

    /// Returns whether the host gets this output.
    pub fn is_delivered(&self, output: &Output) -> bool {
        is_delivered(self.params(), output)
    }

    /// Returns an output without contents.
    pub fn output(&self) -> Output {
        self.output_reusing(Output::default())
    }

    /// Returns an output without contents that reuses the lists of `reusable`.
    fn output_reusing(&self, reusable: Output) -> Output {
        let Generation { user_data, sampling, .. } = &self.generation;
        Output {
            request: self.request,
            sequence: self.id,
            index: self.index,
            user_data: *user_data,
            prompt_tokens: sampling.prompt_len() as u64,
            generated_tokens: sampling.generated() as u64,
            score: self.processor.score(),
            ..reusable
        }
    }

    /// Returns the last output of a generation that ends without a new token, with the text that
    /// was held back. If the sequence stays, it can continue.
    pub fn close(&mut self, finish: FinishReason, stays: bool, text: Option<&Text>, reusable: Output) -> Output {
        let mut output = Output { finish: Some(finish), ..self.output_reusing(reusable) };
        self.echo = None;
        let closed = self.processor.close(stays, text, &mut output);
        self.emit_result(closed, output)
    }

    /// Returns the output for a committed token, in the lists of `reusable`. `top` are its most
    /// probable alternatives. `complete` is whether the grammar has ended with it. A stop string
    /// can end the sequence here, too.
    pub fn advance(
        &mut self,
        new: &NewToken,
        top: &[(u32, f32)],
        complete: Result<bool>,
        finish: Option<FinishReason>,
        text: Option<&Text>,
        reusable: Output,
    ) -> Output {
        let complete = self.generation.sampling.advance(&new.sample).and(complete);
        let mut output = Output { finish, ..self.output_reusing(reusable) };
        let advanced = self.processor.advance(&self.generation.sampling, new, top, complete, text, &mut output);
        self.emit_result(advanced, output)
    }

    /// Returns the prompt as an output, for a request with `echo`. With log probabilities, the
    /// output follows when they have been computed.
    pub fn echo(&mut self, prompt: &[u32], text: Option<&Text>) -> Result<Option<Output>> {
        let output = self.echo_output(prompt, text)?;
        if self.params().logprobs.is_none() || prompt.len() == 1 {
            return self.finish_echo(output);
        }
        if is_cumulative(self.params()) {
            self.try_emit(output.try_echo()?)?;
        }
        self.echo = Some(Box::new(PendingEcho { output, scored: self.params().first_scored() }));
        Ok(None)
    }

    /// Returns the output of an echo whose log probabilities are complete.
    fn finish_echo(&mut self, output: Output) -> Result<Option<Output>> {
        self.samples.echo = (self.samples.count > 1).then(|| output.try_echo().map(Box::new)).transpose()?;
        self.try_emit(output)
    }

    /// Adds log probabilities of the next prompt tokens to the echo, with `k` alternatives each.
    /// Returns the echo if they are complete.
    fn score_echo(&mut self, logprobs: &[f32], top: &[(u32, f32)], k: usize) -> Result<Option<Output>> {
        let wanted = self.params().logprobs.unwrap_or(0) as usize;
        let Some(echo) = &mut self.echo else { return Ok(None) };
        let place = echo.scored;
        let accumulated = self.processor.accumulated_logprobs(self.generation.sampling.params());
        for list in [Some(&mut echo.output.logprobs), accumulated].into_iter().flatten() {
            list.set(place, wanted, logprobs, top, k);
        }
        echo.scored = (place + logprobs.len()).min(echo.output.tokens.len());
        match echo.scored == echo.output.tokens.len() {
            true => self.take_echo(),
            false => Ok(None),
        }
    }

    pub fn has_echo(&self) -> bool {
        self.echo.is_some()
    }

    /// Returns the echo that is pending.
    pub fn take_echo(&mut self) -> Result<Option<Output>> {
        let Some(echo) = self.echo.take() else { return Ok(None) };
        if is_cumulative(self.params()) {
            // The contents have been accumulated already.
            return self.try_emit(self.output());
        }
        let Output { tokens, logprobs, text, .. } = echo.output;
        self.finish_echo(Output { tokens, logprobs, text, generated_tokens: 0, ..self.output() })
    }

    /// Returns the echo of a prompt that has become shorter.
    fn echo_again(&self, echo: &Output, prompt: &[u32], text: Option<&Text>) -> Result<Output> {
        let mut logprobs = echo.logprobs.try_clone()?;
        logprobs.truncate(prompt.len());
        Ok(Output { logprobs, ..self.echo_output(prompt, text)? })
    }

    fn echo_output(&self, prompt: &[u32], text: Option<&Text>) -> Result<Output> {
        let mut output = self.output();
        (output.tokens, output.logprobs) = (try_copy(prompt)?, unscored(self.params(), prompt)?);
        if let Some(text) = text {
            output.text = text.decode(prompt, self.generation.skip_special)?;
        }
        Ok(output)
    }

    /// Returns the echoed prompt for `sample`, which was just forked from this sequence, if outputs
    /// are deltas. Otherwise `copy` has copied it.
    pub fn repeat_echo(&self, sample: &Sequence) -> Result<Option<Output>> {
        let Some(echo) = self.samples.echo.as_ref().filter(|_| !is_cumulative(self.params())) else { return Ok(None) };
        let Output { tokens, logprobs, text, .. } = echo.try_echo()?;
        Ok(Some(Output { tokens, logprobs, text, ..sample.output() }))
    }

    /// Returns outputs with log probabilities of prompt tokens, which have as many alternatives as
    /// `SamplingParams::prompt_alternatives` says: one for `prompt_logprobs`, and the echo when it
    /// is complete.
    pub fn emit_prompt(&mut self, logprobs: &[f32], top: &[(u32, f32)], reusable: Output) -> Result<[Option<Output>; 2]> {
        let k = self.params().prompt_alternatives().unwrap_or(0) as usize;
        let echo = self.score_echo(logprobs, top, k)?;
        let Some(wanted) = self.params().prompt_logprobs else { return Ok([None, echo]) };
        let mut output = self.output_reusing(reusable);
        output.set_view(OutputView { prompt_logprobs: logprobs, ..OutputView::default() })?;
        output.prompt_logprobs.push_top(top, k, wanted as usize)?;
        Ok([self.try_emit(output)?, echo])
    }

    /// Returns whether a step that computes a part of the prompt has an output.
    pub fn reports_progress(&self) -> bool {
        self.params().prefill_progress && self.generation.sampling.generated() == 0
    }

    /// Returns the output for a step after which `computed` tokens of the prompt are computed.
    pub fn prefill_progress(&self, computed: usize, reusable: Output) -> Output {
        Output { computed_tokens: computed as u64, ..self.output_reusing(reusable) }
    }

    /// Returns a result of a beam search as an output.
    pub fn hypothesis(&self, index: u32, hypothesis: &Hypothesis, text: Option<&Text>) -> Result<Output> {
        let finish = match hypothesis.ended {
            Ended::AtEos => FinishReason::Stop,
            Ended::AtLength => FinishReason::Length,
        };
        let mut output = Output { finish: Some(finish), timing: self.generation.timing, ..self.output().for_sample(index) };
        self.processor.write_hypothesis(&self.generation.sampling.resolved, hypothesis, text, &mut output)?;
        Ok(output)
    }

    /// Prepares an output that is not the last one. Returns `None` if the host does not get it.
    fn try_emit(&mut self, output: Output) -> Result<Option<Output>> {
        match self.emit(output) {
            Output { error: Some(error), .. } => Err(error),
            output => Ok(Some(output).filter(|output| self.is_delivered(output))),
        }
    }

    /// Prepares an output, which becomes the last one if its contents could not be added.
    fn emit_result(&mut self, result: Result<()>, output: Output) -> Output {
        match result {
            Ok(()) => self.emit(output),
            Err(error) => self.emit(output.failed(error)),
        }
    }

    fn emit(&mut self, mut output: Output) -> Output {
        if output.finish.is_some() {
            output.timing = self.generation.timing;
        }
        self.processor.emit(self.generation.sampling.params(), output)
    }
}
