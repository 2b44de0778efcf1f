//! Requests, and the checks that prepare them for the scheduler.

use std::sync::Arc;
use std::time::Duration;

use super::sequence::{Generation, Sequence};
use super::{Engine, LogitsHook};
use crate::error::{Error, PromptLength, Result, try_copy};
use crate::generation::SamplingState;
use crate::generation::beam::Beams;
use crate::generation::sampler::{ResolvedSampling, TokenTexts};
use crate::kv::BlockHash;
use crate::memory::budget::Reservation;
use crate::observability::journal::records::RecordedRequest;
use crate::output::queue::{OutputSender, Queue};
use crate::scheduler::{Branching, NewGroup, PreparedGroup};
use crate::types::options::{BeamParams, Dry, MAX_PRIORITY, OutputKind, SamplingParams};
use crate::types::timing::Timing;
use crate::types::{RequestId, SeqId};

/// Maximum number of tokens that the sequences of one request copy in one step, with the hashes of
/// their blocks. It takes about 1 ms for each million.
const MAX_COPIED_TOKENS: usize = 4 << 20;

/// The parameters of a request. It owns its data, since the host may free those of the C struct
/// after the call.
#[derive(Clone)]
pub struct Request {
    /// Prompt.
    pub prompt: Prompt,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Number of results: samples, or the best beams.
    pub n: u32,
    /// Number of samples, of which the `n` with the highest log probability are returned. `None`
    /// selects `n`.
    pub best_of: Option<u32>,
    /// Parameters of beam search, which replaces sampling.
    pub beam: Option<BeamParams>,
    /// Priority for order policies that use it, -100 to 100. Higher values rank first.
    pub priority: i32,
    /// Whether its sequences stay idle when they end, so that they can be resumed.
    pub keep: bool,
    /// Number of last prompt tokens to keep.
    pub truncate_prompt_tokens: Option<usize>,
    /// Salt of the prefix cache. Only requests with the same salt share prefixes.
    pub salt: Vec<u8>,
    /// Hook that edits the logits before all other processing.
    pub hook: Option<LogitsHook>,
    /// Time after which the request ends with the tokens it has.
    pub deadline: Option<Duration>,
    /// Time to wait for each next block of the prompt that the KV store does not have yet, because
    /// another engine computes it.
    pub store_wait: Duration,
    /// Number that each output returns.
    pub user_data: u64,
    /// Whether the tokenizer adds its special tokens (such as BOS) to a text prompt.
    pub add_special: bool,
    /// Whether the text of the output omits special tokens.
    pub skip_special: bool,
}

/// The prompt of a request, as text or as tokens.
#[derive(Debug, Clone)]
pub enum Prompt {
    /// Text, which the tokenizer encodes.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

impl Request {
    /// Creates a request for one result, with defaults for all other parameters.
    pub fn new(prompt: Prompt, sampling: SamplingParams) -> Request {
        Request {
            prompt,
            sampling,
            n: 1,
            best_of: None,
            beam: None,
            priority: 0,
            keep: false,
            truncate_prompt_tokens: None,
            salt: Vec::new(),
            hook: None,
            deadline: None,
            store_wait: Duration::ZERO,
            user_data: 0,
            add_special: true,
            skip_special: true,
        }
    }

    /// Returns the number of samples to draw.
    fn samples(&self) -> u32 {
        self.best_of.unwrap_or(self.n)
    }
}

impl RecordedRequest {
    /// Copies the request without its prompt, whose tokens are set later. The omitted parameters
    /// only affect the prompt.
    fn from_request(request: &Request) -> Result<RecordedRequest> {
        let Request {
            sampling,
            n,
            best_of,
            beam,
            keep,
            salt,
            hook,
            priority,
            deadline,
            store_wait,
            user_data,
            skip_special,
            prompt: _,
            truncate_prompt_tokens: _,
            add_special: _,
        } = request;
        Ok(RecordedRequest {
            prompt: Vec::new(),
            sampling: sampling.try_clone()?,
            n: *n,
            best_of: *best_of,
            beam: beam.clone(),
            keep: *keep,
            salt: try_copy(salt)?,
            hooked: hook.is_some(),
            user_data: *user_data,
            priority: *priority,
            deadline: *deadline,
            store_wait: *store_wait,
            skip_special: *skip_special,
        })
    }
}

/// A checked request with all memory that it needs. The thread of the caller creates it, and the
/// stepping thread moves its parts to the scheduler and to the live requests.
pub struct PreparedRequest {
    /// The sequences with all memory that they need.
    pub group: PreparedGroup,
    /// Number of results that the host expects.
    pub returned: usize,
    pub sequence: Box<Sequence>,
    pub beams: Option<Box<Beams>>,
    /// Reservation of KV blocks, if the sequences can need more than one sequence of maximum
    /// length.
    pub reservation: Option<Reservation>,
    /// As in `Request`.
    pub store_wait: Duration,
    /// The request in the form that a journal records.
    pub recorded: Option<Box<RecordedRequest>>,
}

impl PreparedRequest {
    /// Assigns the id. `seed` applies if the request has no seed of its own.
    pub fn set_id(&mut self, id: RequestId, seed: u64) {
        let sequence = &mut self.sequence;
        (sequence.request, sequence.id) = (id, id.sequence(0));
        sequence.generation.sampling.seed = sequence.params().seed.unwrap_or(seed);
    }
}

impl Engine {
    /// Checks a request and queues it for the next step. A request that can never run is refused.
    pub fn add_request(&self, request: Request) -> Result<RequestId> {
        self.add_request_to(&self.queue, request)
    }

    /// Adds a request whose outputs go to `queue`.
    pub fn add_request_to(&self, queue: &Queue, mut request: Request) -> Result<RequestId> {
        let (prompt, max_len, branching) = self.checked(queue, &mut request)?;
        let mut recorded = if self.journals { Some(Box::new(RecordedRequest::from_request(&request)?)) } else { None };
        let reservation = self.lease.reserve(self.max_blocks(prompt.len(), max_len, branching))?;
        let beams = request.beam.as_ref().map(|params| self.beams(params, request.n, &request.sampling, max_len - prompt.len()));
        let beams = beams.transpose()?.map(Box::new);
        let root = BlockHash::root(&self.info.fingerprint, &request.salt);
        let Request { keep, priority, store_wait, .. } = request;
        let returned = request.n as usize;
        let mut sampling = request.sampling;
        // The log probability of a token comes from the row before it.
        let logits_from = sampling.prompt_alternatives().map(|_| sampling.first_scored() - 1);
        let prompt_only = sampling.is_prompt_only();
        let group = NewGroup { prompt, max_len, branching, priority, keep, logits_from, prompt_only, root }.prepare(&self.info.paging)?;
        let ranked = request.best_of.is_some_and(|samples| samples > request.n);
        if ranked {
            // The results and their order are known only at the end.
            sampling.output = OutputKind::Final;
        }
        let generation = self.generation(sampling, queue.sender().clone(), request.hook, request.user_data, request.skip_special)?;
        let deadline = self.deadline(generation.timing.requested_at, request.deadline)?;
        let max_new_tokens = max_len - group.prompt().len();
        let mut sequence = Sequence::new(Generation { deadline, ..generation }, group.prompt(), max_new_tokens)?;
        sequence.reserve_samples(if beams.is_some() { 1 } else { branching.max_members() }, max_new_tokens)?;
        sequence.ranked = ranked;
        if let Some(recorded) = &mut recorded {
            recorded.prompt = try_copy(group.prompt())?;
        }
        let prepared = Box::new(PreparedRequest { group, returned, sequence, beams, reservation, store_wait, recorded });
        self.shared.table.add(prepared, |id| self.seed_of(id.sequence(0)))
    }

    /// Checks a request. Returns the prompt tokens, the maximum length and the branching. A request
    /// that can never run is refused.
    pub(super) fn checked(&self, queue: &Queue, request: &mut Request) -> Result<(Vec<u32>, usize, Branching)> {
        self.check()?;
        self.check_queue(queue)?;
        request.sampling.model_defaults &= request.beam.is_none();
        self.prepare_sampling(&mut request.sampling)?;
        check_priority(request.priority)?;
        self.check_store_wait(request.store_wait)?;
        let branching = self.branching(request)?;
        let prompt = std::mem::replace(&mut request.prompt, Prompt::Tokens(Vec::new()));
        let prompt = self.prompt_tokens(prompt, request.add_special, request.truncate_prompt_tokens)?;
        let max_len = self.max_len(prompt.len(), &request.sampling)?;
        let start = request.sampling.prompt_logprobs_start;
        if start >= prompt.len() && start > 0 {
            return Err(Error::invalid(format!("prompt_logprobs_start is {start} and the prompt has {} tokens; lower it", prompt.len())));
        }
        check_copies(prompt.len(), max_len, branching)?;
        self.check_space(prompt.len(), max_len, branching)?;
        Ok((prompt, max_len, branching))
    }

    fn check_store_wait(&self, wait: Duration) -> Result<()> {
        let (wait, limit) = (wait.as_millis(), u32::MAX);
        if wait > 0 && !self.external.has_store {
            return Err(Error::invalid(format!("kv_store_wait_ms is {wait} and the engine has no kv_store; set kv_store or leave it 0")));
        }
        match wait <= limit.into() {
            true => Ok(()),
            false => Err(Error::invalid(format!("kv_store_wait_ms is {wait}; must be at most {limit}"))),
        }
    }

    fn beams(&self, params: &BeamParams, n: u32, sampling: &SamplingParams, max_new_tokens: usize) -> Result<Beams> {
        let (eos, stops) = (self.eos_of(sampling), &sampling.stop_token_ids);
        let mut ends = Vec::new();
        ends.try_reserve_exact(eos.len() + stops.len())?;
        ends.extend(eos.iter().chain(stops));
        Beams::new(params, n as usize, &ends, max_new_tokens)
    }

    pub(super) fn check_queue(&self, queue: &Queue) -> Result<()> {
        match queue.belongs_to(&self.shared.table) {
            true => Ok(()),
            false => Err(Error::invalid("the queue belongs to another engine; create one on this engine")),
        }
    }

    /// Applies the defaults of the model if they are wanted, and checks the parameters.
    pub(super) fn prepare_sampling(&self, sampling: &mut SamplingParams) -> Result<()> {
        if std::mem::take(&mut sampling.model_defaults) {
            self.info.sampling_defaults.as_ref().map_err(Error::clone)?.apply(sampling);
        }
        self.check_sampling(sampling)?;
        for alternatives in [&mut sampling.logprobs, &mut sampling.prompt_logprobs] {
            *alternatives = alternatives.map(|count| count.min(self.info.vocab_size as u32));
        }
        Ok(())
    }

    pub(super) fn check_sampling(&self, sampling: &SamplingParams) -> Result<()> {
        sampling.validate(self.info.vocab_size)?;
        if self.shared.text.is_some() {
            return Ok(());
        }
        let needs_text = [
            (!sampling.stop.is_empty(), "stop strings need a tokenizer", "use stop_token_ids"),
            (!sampling.bad_words.is_empty(), "bad words need a tokenizer", "use bad_words_ids"),
            (
                sampling.dry.iter().flat_map(|dry| &dry.sequence_breakers).any(|breakers| !breakers.is_empty()),
                "sequence_breakers need a tokenizer",
                "unset sequence_breakers",
            ),
            (sampling.grammar.is_some(), "structured output needs a tokenizer", "unset grammar"),
        ];
        match needs_text.into_iter().find(|(needed, ..)| *needed) {
            Some((_, what, remedy)) => {
                Err(Error::unsupported(format!("{what}, and the engine has no tokenizer (skip_tokenizer); {remedy}")))
            }
            None => Ok(()),
        }
    }

    /// Returns the number of sequences of the request. Contradictory parameters are refused.
    fn branching(&self, request: &Request) -> Result<Branching> {
        let (n, samples) = (request.n, request.samples());
        if n == 0 {
            return Err(Error::invalid("n is 0; must be at least 1"));
        }
        if request.sampling.is_prompt_only() && (samples > 1 || request.beam.is_some()) {
            return Err(Error::invalid(format!(
                "max_tokens is 0, and the request is for {}; raise max_tokens or request one sample",
                if request.beam.is_some() { "beams".into() } else { format!("{samples} samples") }
            )));
        }
        let branching = match &request.beam {
            Some(beam) => {
                beam.validate(n as usize)?;
                no_sampling_with_beams(request)?;
                Branching::Beams(beam.width as usize)
            }
            None if samples < n => return Err(Error::invalid(format!("best_of is {samples} and n is {n}; best_of must be at least n"))),
            None if samples == 1 => Branching::One,
            None => Branching::Samples(samples as usize),
        };
        if branching.max_members() > self.capacity.seqs {
            return Err(Error::invalid(format!(
                "the request needs {} sequences at once and max_seqs is {}; raise max_seqs or lower n",
                branching.max_members(),
                self.capacity.seqs
            )));
        }
        Ok(branching)
    }

    /// Checks whether the sequences of the request fit the empty pool at full length.
    fn check_space(&self, prompt: usize, max_len: usize, branching: Branching) -> Result<()> {
        let memory = &self.info.memory;
        let max_blocks = self.max_blocks(prompt, max_len, branching);
        if max_blocks <= memory.max_blocks {
            return Ok(());
        }
        Err(Error::capacity(format!(
            "{} sequences of {max_len} tokens with a shared prompt of {prompt} need {max_blocks} KV blocks and the pool has {}; lower max_tokens or n, or raise kv_bytes",
            branching.max_members(),
            memory.max_blocks
        )))
    }

    /// Returns the number of blocks of the sequences of a request at full length.
    pub(super) fn max_blocks(&self, prompt: usize, max_len: usize, branching: Branching) -> usize {
        self.info.paging.max_blocks_of(branching.max_members(), prompt, max_len, self.capacity.chunk)
    }

    /// Returns the prompt as tokens, truncated to the last `max_tokens`.
    pub(super) fn prompt_tokens(&self, prompt: Prompt, add_special: bool, max_tokens: Option<usize>) -> Result<Vec<u32>> {
        let mut tokens = match prompt {
            Prompt::Text(text) if text.is_empty() => Vec::new(),
            Prompt::Text(text) => self.text()?.encode(&text, add_special)?,
            Prompt::Tokens(tokens) => tokens,
        };
        self.check_tokens("prompt", &tokens)?;
        match max_tokens {
            Some(0) => return Err(Error::invalid("truncate_prompt_tokens is 0; must be at least 1")),
            Some(max_tokens) => drop(tokens.drain(..tokens.len().saturating_sub(max_tokens))),
            None => {}
        }
        Ok(tokens)
    }

    pub(super) fn check_tokens(&self, what: &str, tokens: &[u32]) -> Result<()> {
        let vocab = self.info.vocab_size;
        match tokens.iter().position(|&token| token as usize >= vocab) {
            Some(i) => {
                Err(Error::invalid(format!("{what} token {i} is {}, beyond the vocabulary of {vocab} tokens; use a smaller id", tokens[i])))
            }
            None => Ok(()),
        }
    }

    /// Returns the length at which a sequence of `len` tokens ends.
    pub(super) fn max_len(&self, len: usize, sampling: &SamplingParams) -> Result<usize> {
        let max_model_len = self.info.memory.max_model_len;
        if len == 0 {
            return Err(Error::invalid("the prompt is empty; pass at least one token"));
        }
        let longest = max_model_len - !sampling.is_prompt_only() as usize;
        if len > longest {
            let pool = match max_model_len < self.info.max_positions {
                true => format!(
                    " (the model's own limit is {}, the KV pool holds {})",
                    self.info.max_positions,
                    self.info.paging.max_len_in(self.info.memory.blocks, self.info.max_positions, self.capacity.chunk)
                ),
                false => String::new(),
            };
            return Err(Error::invalid(format!(
                "prompt is {len} tokens, max_model_len is {max_model_len}{pool}; raise it or shorten the prompt to {longest}"
            ))
            .with_prompt(PromptLength { tokens: len, max_model_len }));
        }
        Ok(sampling.max_tokens.map_or(max_model_len, |tokens| len.saturating_add(tokens).min(max_model_len)))
    }

    /// Builds the parameters of a generation. Its seed is that of the sampling parameters, or 0.
    pub(super) fn generation(
        &self,
        params: SamplingParams,
        sender: Arc<OutputSender>,
        hook: Option<LogitsHook>,
        user_data: u64,
        skip_special: bool,
    ) -> Result<Generation> {
        let timing = Timing::new(self.shared.clock.now());
        let constraint = params.grammar.as_ref().map(|grammar| self.grammars()?.compile(grammar)).transpose()?;
        let seed = params.seed.unwrap_or_default();
        let sampling = SamplingState::new(Arc::new(self.resolve_sampling(params)?), seed, hook, constraint);
        Ok(Generation { user_data, sender, deadline: None, timing, skip_special, sampling })
    }

    /// Returns the deadline after `time`. `None` if the time cannot be represented.
    pub(super) fn deadline(&self, requested_at: Duration, time: Option<Duration>) -> Result<Option<Duration>> {
        match time {
            Some(Duration::ZERO) => Err(Error::invalid("the deadline has passed; pass the time that is left, or 0 for no deadline")),
            time => Ok(time.and_then(|time| requested_at.checked_add(time))),
        }
    }

    fn eos_of(&self, params: &SamplingParams) -> Arc<[u32]> {
        if params.ignore_eos { Arc::new([]) } else { self.vocabulary.eos.clone() }
    }

    fn resolve_sampling(&self, mut params: SamplingParams) -> Result<ResolvedSampling> {
        let mut bad_words = Vec::new();
        for word in &params.bad_words {
            let spellings = self.text()?.spellings(word)?;
            bad_words.try_reserve(spellings.len())?;
            bad_words.extend(spellings);
        }
        let token_texts = params.dry.as_mut().map_or(Ok(Arc::default()), |dry| self.resolve_breakers(dry))?;
        let eos = self.eos_of(&params);
        ResolvedSampling::new(params, eos, bad_words, token_texts)
    }

    /// Sets the default sequence breakers if none are given and there is a tokenizer. Returns the
    /// texts of all tokens if breakers are used.
    fn resolve_breakers(&self, dry: &mut Dry) -> Result<Arc<TokenTexts>> {
        let defaults: &[&str] = if self.shared.text.is_some() { &Dry::DEFAULT_BREAKERS } else { &[] };
        let breakers = dry.sequence_breakers.get_or_insert_with(|| defaults.iter().map(|&text| text.into()).collect());
        if breakers.is_empty() || !dry.is_on() { Ok(Arc::default()) } else { self.token_texts().cloned() }
    }

    /// Derives the seed of a request from its first sequence. Odd multipliers separate neighbouring
    /// ids and seeds.
    pub(super) fn seed_of(&self, first: SeqId) -> u64 {
        self.seed.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ first.get().wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }
}

fn check_priority(priority: i32) -> Result<()> {
    match (-MAX_PRIORITY..=MAX_PRIORITY).contains(&priority) {
        true => Ok(()),
        false => Err(Error::invalid(format!("priority is {priority}; must be -{MAX_PRIORITY} to {MAX_PRIORITY}"))),
    }
}

/// Checks the tokens that the sequences of a request copy in one step. Samples copy the prompt when
/// it is complete. Beams copy each other at any length.
fn check_copies(prompt: usize, max_len: usize, branching: Branching) -> Result<()> {
    let (what, len) = match branching {
        Branching::Samples(_) => ("samples of a prompt", prompt),
        Branching::Beams(_) => ("beams", max_len),
        Branching::One | Branching::Pin => return Ok(()),
    };
    let count = branching.max_members();
    match count.saturating_mul(len) {
        0..=MAX_COPIED_TOKENS => Ok(()),
        copied => Err(Error::invalid(format!(
            "{count} {what} of {len} tokens copy {copied} tokens in one step; must be at most {MAX_COPIED_TOKENS}, so lower n, or the \
             width of pllm_beam"
        ))),
    }
}

fn no_sampling_with_beams(request: &Request) -> Result<()> {
    let sampling = &request.sampling;
    let default = SamplingParams::default();
    let contradictions = [
        (request.best_of.is_some(), "best_of"),
        (request.keep, "keep"),
        (request.hook.is_some(), "a logits hook"),
        (sampling.temperature != default.temperature && sampling.temperature != 0.0, "temperature"),
        (sampling.top_k != 0, "top_k"),
        (sampling.top_p != 1.0, "top_p"),
        (sampling.min_p != 0.0, "min_p"),
        (sampling.typical_p != 1.0, "typical_p"),
        (sampling.top_n_sigma != 0.0, "top_n_sigma"),
        (sampling.xtc_probability != 0.0, "xtc_probability"),
        (sampling.mirostat.is_some(), "mirostat"),
        (sampling.seed.is_some(), "seed"),
        (!sampling.stop.is_empty(), "stop strings"),
        (sampling.prompt_logprobs.is_some(), "prompt_logprobs"),
        (sampling.logprobs.is_some_and(|top| top > 0), "top_logprobs"),
        (sampling.echo, "echo"),
        (sampling.grammar.is_some(), "a grammar"),
    ];
    match contradictions.into_iter().find(|(given, _)| *given) {
        Some((_, what)) => Err(Error::invalid(format!("beam search excludes {what}; unset one of them"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_priority_out_of_range_is_refused_with_the_limits() {
        [-MAX_PRIORITY, 0, MAX_PRIORITY].into_iter().for_each(|priority| check_priority(priority).unwrap());
        for priority in [-101, 101, i32::MIN, i32::MAX] {
            let error = check_priority(priority).unwrap_err();
            assert!(error.message().contains(&format!("priority is {priority}")) && error.message().contains("-100 to 100"), "{error}");
        }
    }
}
