//! Long random traces of API calls, compared with a naive model: dense token lists, where every
//! next token is computed from all earlier ones. The executor reads KV slots through the block
//! tables, so a wrong table gives wrong tokens. The pool is too small and the host tier often
//! fails.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::support;
use pagedllm::engine::{Engine, Executor, Fork, InFlightStep, Output, Prompt, Request, Resume, StepOutput};
use pagedllm::error::{Error, Result};
use pagedllm::generation::beam::{BeamScratch, BeamSearch, BeamStep, Ended, Hypothesis};
use pagedllm::generation::sampler::{Context, ResolvedSampling, Sampler, SamplingHistory, log_softmax, logprob_and_top};
use pagedllm::types::batch::{Batch, BlockMove};
use pagedllm::types::options::{BeamParams, EngineOptions, OutputKind, Preemption, SamplingParams};
use pagedllm::types::outputs::FinishReason;
use pagedllm::types::{PinId, RequestId, SeqId};

const VOCAB: usize = 24;
const EOS: u32 = 5;
const BLOCK: usize = 8;

/// Returns the content of a slot: a hash of all tokens up to the slot.
fn content(before: u64, token: u32) -> u64 {
    (before ^ (token as u64 + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
}

/// Computes the logits of the next token from all contents that attention reads.
fn logits_after(contents: impl Iterator<Item = u64>, logits: &mut [f32]) {
    let all = contents.fold(1, |all: u64, content| (all ^ content).wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_left(31));
    for (token, logit) in logits.iter_mut().enumerate() {
        let hash = (all ^ token as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23).wrapping_mul(0xA076_1D64_78BD_642F);
        *logit = (hash >> 40) as f32 / (1 << 24) as f32 * 6.0;
    }
}

fn dense_logits(tokens: &[u32]) -> Vec<f32> {
    let mut logits = vec![0.0; VOCAB];
    let contents = tokens.iter().scan(0, |before, &token| {
        *before = content(*before, token);
        Some(*before)
    });
    logits_after(contents, &mut logits);
    logits
}

/// An executor with paged storage of slot contents.
struct Paged {
    slots: Vec<u64>,
    host: Vec<u64>,
    logits: Vec<f32>,
    /// Bits for the operations that fail: a step before or after its writes, and swaps in each
    /// direction.
    failing: Arc<AtomicU32>,
}

const BEFORE_WRITE: u32 = 1;
const AFTER_WRITE: u32 = 2;
const STEP: u32 = BEFORE_WRITE | AFTER_WRITE;
const SWAP_OUT: u32 = 4;
const SWAP_IN: u32 = 8;

impl Paged {
    /// Copies blocks from one tier to the other. A failed copy leaves invalid contents.
    fn swap(from: &[u64], to: &mut [u64], moves: impl Iterator<Item = (u32, u32)>, fails: bool) -> Result<()> {
        let place = |block: u32| block as usize * BLOCK..(block as usize + 1) * BLOCK;
        for (from_block, to_block) in moves {
            match fails {
                true => to[place(to_block)].fill(13),
                false => to[place(to_block)].copy_from_slice(&from[place(from_block)]),
            }
        }
        if fails { Err(Error::out_of_memory()) } else { Ok(()) }
    }
}

impl Executor for Paged {
    fn swap_out(&mut self, moves: &[BlockMove]) -> Result<()> {
        let fails = self.failing.load(Ordering::Relaxed) & SWAP_OUT > 0;
        Paged::swap(&self.slots, &mut self.host, moves.iter().map(|out| (out.device, out.host)), fails)
    }

    fn swap_in(&mut self, moves: &[BlockMove]) -> Result<()> {
        let fails = self.failing.load(Ordering::Relaxed) & SWAP_IN > 0;
        Paged::swap(&self.host, &mut self.slots, moves.iter().map(|back| (back.host, back.device)), fails)
    }

    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        let failing = self.failing.load(Ordering::Relaxed) & STEP;
        if failing == BEFORE_WRITE {
            return Err(Error::out_of_memory());
        }
        for copy in &batch.copies {
            self.slots.copy_within(copy.from as usize * BLOCK..(copy.from as usize + 1) * BLOCK, copy.to as usize * BLOCK);
        }
        self.logits.clear();
        for span in &batch.spans {
            let slot = |position: usize| batch.tables[span.table as usize + position / BLOCK] as usize * BLOCK + position % BLOCK;
            for row in span.first_token as usize..(span.first_token + span.tokens) as usize {
                let position = batch.positions[row] as usize;
                let before = if position == 0 { 0 } else { self.slots[slot(position - 1)] };
                assert_eq!(slot(position), batch.slots[row] as usize);
                self.slots[slot(position)] = if failing == AFTER_WRITE { 13 } else { content(before, batch.tokens[row]) };
                if batch.logit_rows.contains(&(row as u32)) {
                    let end = self.logits.len();
                    self.logits.resize(end + VOCAB, 0.0);
                    logits_after((0..=position).map(|position| self.slots[slot(position)]), &mut self.logits[end..]);
                }
            }
        }
        if failing == AFTER_WRITE { Err(Error::out_of_memory()) } else { Ok(InFlightStep::new(batch.logit_rows.len())) }
    }

    fn wait(&mut self, _: InFlightStep) -> Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&self.logits))
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// Returns the seed that the engine gives to sample or fork `i`.
fn branch_seed(seed: u64, i: usize) -> u64 {
    seed.wrapping_add((i as u64).wrapping_mul(0xA076_1D64_78BD_642F))
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Running,
    /// Aborted, and ends in the next step.
    Aborting,
    /// Ended, and waits for the other samples of its best-of group.
    Waiting,
    Idle,
    Freed,
}

/// A sequence of the naive model.
#[derive(Debug, Clone)]
struct Dense {
    request: RequestId,
    index: u32,
    params: SamplingParams,
    tokens: Vec<u32>,
    prompt_len: usize,
    max_len: usize,
    /// Positions of appended tokens, each of which raised `max_len` by one.
    raised: Vec<usize>,
    seed: u64,
    keep: bool,
    freed: bool,
    state: State,
    /// Number of samples that the sequence branches into at its first token.
    branches: usize,
    /// Log probabilities of the generated tokens.
    history: Vec<f32>,
    /// Tokens that no delta output has contained yet.
    unreported: Vec<u32>,
    /// Number of prompt log probabilities that outputs have contained so far. None: they are not
    /// compared.
    prompt_logprobs: Option<usize>,
}

impl Dense {
    fn sampling(&self) -> ResolvedSampling {
        let eos: &[u32] = if self.params.ignore_eos { &[] } else { &[EOS] };
        ResolvedSampling { eos: eos.into(), params: self.params.clone(), ..ResolvedSampling::default() }
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    fn advance(&mut self) -> Option<FinishReason> {
        if self.params.is_prompt_only() {
            return Some(FinishReason::Length);
        }
        let (sampling, logits) = (self.sampling(), dense_logits(&self.tokens));
        let history = SamplingHistory::new(&sampling, &self.tokens, self.prompt_len).unwrap();
        let (prompt_len, generated) = (self.prompt_len, self.generated());
        let context = Context { tokens: &self.tokens, prompt_len, generated, seed: self.seed, history: &history, allowed: None };
        let token = Sampler::new(VOCAB).unwrap().choose(&logits, &sampling, &context).unwrap().token;
        let stops = sampling.stops_at(token) && !sampling.must_go_on(generated);
        self.history.push(logprob_and_top(&logits, token, 0, &mut Vec::new()).unwrap());
        self.tokens.push(token);
        self.unreported.push(token);
        match stops {
            true => Some(FinishReason::Stop),
            false => (self.tokens.len() >= self.max_len).then_some(FinishReason::Length),
        }
    }

    fn rewind(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.max_len -= self.raised.iter().filter(|&&at| at >= len).count();
        self.raised.retain(|&at| at < len);
        self.prompt_len = self.prompt_len.min(len);
        self.history.truncate(self.generated());
        self.prompt_logprobs = None;
        if self.scores_echo() {
            self.unreported.truncate(self.prompt_len);
        }
    }

    /// Returns whether the prompt comes as an output with log probabilities, once they have been
    /// computed.
    fn scores_echo(&self) -> bool {
        self.params.echo && self.params.logprobs.is_some() && self.params.output == OutputKind::Delta
    }

    /// Returns whether that output has not come.
    fn awaits_echo(&self) -> bool {
        self.scores_echo() && self.unreported == self.tokens[..self.prompt_len]
    }

    fn score(&self) -> f64 {
        self.history.iter().map(|&logprob| logprob as f64).sum()
    }

    /// Returns the tokens of a cumulative or final output.
    fn all(&self) -> &[u32] {
        &self.tokens[if self.params.echo { 0 } else { self.prompt_len }..]
    }
}

struct BestOfGroup {
    result_count: usize,
    unfinished: usize,
    /// Sequence, reason, score, tokens.
    ends: Vec<(SeqId, FinishReason, f64, Vec<u32>)>,
}

struct Beams {
    n: u32,
    hypotheses: Vec<Hypothesis>,
    aborted: bool,
}

struct Trace {
    engine: Engine,
    failing: Arc<AtomicU32>,
    random: Random,
    max_model_len: usize,
    max_seqs: usize,
    sequences: BTreeMap<SeqId, Dense>,
    groups: BTreeMap<RequestId, BestOfGroup>,
    beams: BTreeMap<RequestId, Beams>,
    pins: Vec<PinId>,
    /// Results that have no last output yet, by request and index.
    unfinished_results: HashSet<(RequestId, u32)>,
    /// Last outputs that the next step must emit: sequence, request, index, finish reason.
    expected_ends: Vec<(SeqId, RequestId, u32, FinishReason)>,
    /// Forks whose parent is freed before the engine applies them.
    failed_forks: HashSet<SeqId>,
    /// Number of last outputs so far.
    ends: u64,
}

impl Trace {
    fn new(seed: u64) -> Trace {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) + 1);
        let blocks = 6 + random.below(30);
        let max_seqs = 2 + random.below(8);
        let max_model_len = (blocks * BLOCK).min(48);
        let options = EngineOptions {
            max_seqs,
            max_batch_tokens: max_seqs + random.below(40),
            prefill_chunk: Some(1 + random.below(20)),
            prefix_cache: random.below(3) > 0,
            queue_capacity: 100_000,
            preemption: [Preemption::Recompute, Preemption::Swap, Preemption::Auto][random.below(3)],
            ..EngineOptions::default()
        };
        let mut info = support::model_info(VOCAB, blocks, max_model_len, vec![EOS]);
        info.memory.swap_blocks = 1 + random.below(2 * blocks);
        let failing = Arc::new(AtomicU32::new(0));
        let (slots, host) = (vec![7; blocks * BLOCK], vec![11; info.memory.swap_blocks * BLOCK]);
        let executor = Box::new(Paged { slots, host, logits: Vec::new(), failing: failing.clone() });
        Trace {
            engine: Engine::with_executor(&options, info, None, executor).unwrap(),
            failing,
            max_model_len,
            max_seqs,
            sequences: BTreeMap::new(),
            groups: BTreeMap::new(),
            beams: BTreeMap::new(),
            pins: Vec::new(),
            unfinished_results: HashSet::new(),
            expected_ends: Vec::new(),
            failed_forks: HashSet::new(),
            ends: 0,
            random,
        }
    }

    fn act(&mut self) {
        let few = self.sequences.len() < 25;
        match self.random.below(40) {
            0..4 if few => self.add(),
            4..7 if few => self.fork(),
            7..9 => self.append(),
            9..12 => self.rewind(),
            12..15 => self.resume(),
            15..17 => self.free(),
            17 => self.abort(),
            18 => self.pin(),
            19 => self.unpin(),
            20 => self.refused(),
            _ => self.step(),
        }
    }

    // --- API calls ---

    /// Returns tokens with few different prefixes, so that prefixes are shared.
    fn some_tokens(&mut self, n: usize) -> Vec<u32> {
        let varied = self.random.one_in(3);
        (0..n).map(|i| if varied && self.random.one_in(12) { 9 } else { (i % 7) as u32 }).collect()
    }

    fn some_params(&mut self) -> SamplingParams {
        let random = &mut self.random;
        SamplingParams {
            temperature: [0.0, 0.7, 1.0][random.below(3)],
            top_k: [0, 5][random.below(2)],
            top_p: [1.0, 0.9][random.below(2)],
            repetition_penalty: [1.0, 1.0, 1.3][random.below(3)],
            presence_penalty: [0.0, 0.0, 0.8][random.below(3)],
            frequency_penalty: [0.0, 0.0, 0.4][random.below(3)],
            logit_bias: if random.one_in(4) { vec![(EOS, 1.0)] } else { vec![] },
            bad_words_ids: if random.one_in(4) { vec![vec![3, 4], vec![11]] } else { vec![] },
            seed: Some(random.below(1000) as u64),
            max_tokens: if random.one_in(5) { None } else { Some([0, 1 + random.below(20)][!random.one_in(10) as usize]) },
            ignore_eos: random.one_in(3),
            stop_token_ids: if random.one_in(3) { vec![17] } else { vec![] },
            output: [OutputKind::Delta, OutputKind::Delta, OutputKind::Cumulative, OutputKind::Final][random.below(4)],
            logprobs: if random.one_in(4) { Some(2) } else { None },
            prefill_progress: random.one_in(4),
            ..SamplingParams::default()
        }
    }

    fn max_len(&self, len: usize, params: &SamplingParams) -> usize {
        params.max_tokens.map_or(self.max_model_len, |tokens| (len + tokens).min(self.max_model_len))
    }

    fn add(&mut self) {
        let len = 1 + self.random.below(self.max_model_len);
        let (tokens, mut params) = (self.some_tokens(len), self.some_params());
        let mut request = Request::new(Prompt::Tokens(tokens.clone()), params.clone());
        request.keep = self.random.one_in(2);
        match self.random.below(6) {
            0 => return self.add_beams(tokens),
            1 => request.n = 1 + self.random.below(self.max_seqs.min(4)) as u32,
            2 => {
                request.n = 1 + self.random.below(2) as u32;
                request.best_of = Some(request.n + self.random.below(3) as u32);
            }
            3 => (request.sampling.prompt_logprobs, request.sampling.prompt_logprobs_start) = (Some(1), self.random.below(len)),
            4 => request.sampling.echo = true,
            _ => {}
        }
        let samples = request.best_of.unwrap_or(request.n) as usize;
        let result_count = request.n as usize;
        let ranked = samples > result_count;
        if ranked {
            request.sampling.output = OutputKind::Final;
        }
        params = request.sampling.clone();
        let keep = request.keep;
        let Ok(id) = self.engine.add_request(request) else { return };
        if ranked {
            self.groups.insert(id, BestOfGroup { result_count, unfinished: samples, ends: Vec::new() });
        }
        self.unfinished_results.extend((0..result_count as u32).map(|index| (id, index)));
        let dense = Dense {
            request: id,
            index: 0,
            prompt_len: len,
            max_len: self.max_len(len, &params),
            raised: Vec::new(),
            seed: params.seed.unwrap(),
            keep,
            freed: false,
            state: State::Running,
            branches: samples,
            history: Vec::new(),
            unreported: if params.echo { tokens.clone() } else { Vec::new() },
            prompt_logprobs: params.prompt_logprobs.map(|_| 0),
            params,
            tokens,
        };
        self.sequences.insert(id.sequence(0), dense);
    }

    fn add_beams(&mut self, tokens: Vec<u32>) {
        let n = 1 + self.random.below(2) as u32;
        let beam = BeamParams { width: 2 + self.random.below(3) as u32, ..BeamParams::default() };
        let max_tokens = Some(1 + self.random.below(12));
        let presence_penalty = [0.0, 0.5][self.random.below(2)];
        let prefill_progress = self.random.one_in(2);
        let params = SamplingParams { max_tokens, presence_penalty, logprobs: Some(0), prefill_progress, ..SamplingParams::greedy() };
        let max_tokens = self.max_len(tokens.len(), &params) - tokens.len();
        let request = Request { n, beam: Some(beam.clone()), ..Request::new(Prompt::Tokens(tokens.clone()), params.clone()) };
        let Ok(id) = self.engine.add_request(request) else { return };
        self.unfinished_results.extend((0..n).map(|index| (id, index)));
        let sampling = ResolvedSampling { eos: [EOS].into(), params, ..ResolvedSampling::default() };
        self.beams.insert(id, Beams { n, hypotheses: search(&beam, n as usize, &sampling, &tokens, max_tokens), aborted: false });
    }

    fn some_sequence(&mut self, states: &[State]) -> Option<SeqId> {
        let expected_ends = |id: &SeqId| self.expected_ends.iter().any(|&(sequence, ..)| sequence == *id);
        let fits = |id: &SeqId, dense: &Dense| states.contains(&dense.state) && !dense.freed && !expected_ends(id);
        let fit: Vec<SeqId> = self.sequences.iter().filter(|(id, dense)| fits(id, dense)).map(|(&id, _)| id).collect();
        if fit.is_empty() { None } else { Some(fit[self.random.below(fit.len())]) }
    }

    fn fork(&mut self) {
        let Some(parent) = self.some_sequence(&[State::Running, State::Idle, State::Aborting]) else { return };
        let dense = self.sequences[&parent].clone();
        if dense.state == State::Aborting && self.groups.contains_key(&dense.request) {
            return; // the best samples are known only when all have ended
        }
        let (len, n) = (dense.tokens.len(), 1 + self.random.below(2));
        let at = if self.random.one_in(2) { None } else { Some(1 + self.random.below(len)) };
        let idle = self.random.one_in(2);
        let seed = if self.random.one_in(2) { None } else { Some(self.random.below(1000) as u64) };
        assert!(self.engine.fork(parent, 1, &Fork { at: Some(len + 1), ..Fork::default() }).is_err());
        let ids = self.engine.fork(parent, n, &Fork { at, idle, seed, ..Fork::default() }).unwrap();
        for (i, id) in ids.into_iter().enumerate() {
            let mut child =
                Dense { request: id.own_request(), index: 0, branches: 1, unreported: Vec::new(), prompt_logprobs: None, ..dense.clone() };
            child.rewind(at.unwrap_or(len));
            child.seed = seed.map_or(dense.seed, |seed| branch_seed(seed, i));
            let runs = dense.state != State::Idle && !idle;
            if runs {
                self.unfinished_results.insert((id.own_request(), 0));
            }
            // An aborted parent ends before the engine applies the fork. The fork ends, too, or
            // fails.
            let parent_stays = dense.state != State::Aborting || dense.keep;
            if !parent_stays {
                self.failed_forks.insert(id);
                continue;
            }
            child.state = match dense.state {
                State::Running if runs => State::Running,
                _ => State::Idle,
            };
            if runs && dense.state == State::Aborting {
                self.expected_ends.push((id, id.own_request(), 0, FinishReason::Abort));
            }
            self.sequences.insert(id, child);
        }
    }

    fn append(&mut self) {
        let Some(id) = self.some_sequence(&[State::Running, State::Idle]) else { return };
        let more = 1 + self.random.below(12);
        let more = self.some_tokens(more);
        let max_model_len = self.max_model_len;
        let dense = self.sequences.get_mut(&id).unwrap();
        let len = dense.tokens.len() + more.len();
        let fits = len < max_model_len || (len == max_model_len && (dense.state == State::Idle || dense.params.is_prompt_only()));
        assert_eq!(self.engine.append(id, more.clone()).is_ok(), fits);
        if fits {
            dense.history.resize(dense.history.len() + more.len(), 0.0);
            let raised = (dense.max_len + more.len()).clamp(len, max_model_len) - dense.max_len;
            dense.raised.extend(dense.tokens.len()..dense.tokens.len() + raised);
            dense.max_len += raised;
            dense.tokens.extend(more.iter());
        }
    }

    fn rewind(&mut self) {
        let Some(id) = self.some_sequence(&[State::Running, State::Idle]) else { return };
        let dense = self.sequences.get_mut(&id).unwrap();
        let len = 1 + self.random.below(dense.tokens.len());
        assert!(self.engine.rewind(id, dense.tokens.len() + 1).is_err());
        self.engine.rewind(id, len).unwrap();
        dense.rewind(len);
    }

    fn resume(&mut self) {
        let Some(id) = self.some_sequence(&[State::Idle]) else { return };
        let (params, keep) = (self.some_params(), self.random.one_in(2));
        let len = self.sequences[&id].tokens.len();
        let max_len = self.max_len(len, &params);
        let resumed = self.engine.resume(id, Resume { keep, ..Resume::new(params.clone()) });
        assert_eq!(resumed.is_ok(), len < self.max_model_len || params.is_prompt_only());
        if resumed.is_err() {
            return;
        }
        let dense = self.sequences.get_mut(&id).unwrap();
        (dense.keep, dense.max_len, dense.prompt_len, dense.state) = (keep, max_len, len, State::Running);
        (dense.seed, dense.params) = (params.seed.unwrap(), params);
        (dense.history, dense.unreported, dense.prompt_logprobs) = (Vec::new(), Vec::new(), None);
        assert!(self.unfinished_results.insert((dense.request, dense.index)));
    }

    fn free(&mut self) {
        let Some(id) = self.some_sequence(&[State::Running, State::Idle, State::Waiting, State::Aborting]) else { return };
        let dense = &self.sequences[&id];
        if dense.state == State::Waiting && !dense.keep {
            assert!(self.engine.free(id).is_err(), "the sequence is freed already");
            return;
        }
        self.engine.free(id).unwrap();
        assert!(self.engine.sequence(id).is_err() && self.engine.free(id).is_err());
        let dense = self.sequences.get_mut(&id).unwrap();
        dense.freed = true;
        match dense.state {
            State::Running => dense.state = State::Aborting,
            State::Idle => dense.state = State::Freed,
            _ => {}
        }
    }

    fn abort(&mut self) {
        let requests: Vec<RequestId> =
            self.unfinished_results.iter().map(|&(request, _)| request).collect::<std::collections::BTreeSet<_>>().into_iter().collect();
        if requests.is_empty() {
            return;
        }
        let request = requests[self.random.below(requests.len())];
        if self.failed_forks.contains(&request.sequence(0)) || self.expected_ends.iter().any(|expected_ends| expected_ends.1 == request) {
            return;
        }
        self.engine.abort(request).unwrap();
        if let Some(beams) = self.beams.get_mut(&request) {
            beams.aborted = true;
        }
        let mine = self.sequences.values_mut().filter(|dense| dense.request == request && dense.state == State::Running);
        mine.for_each(|dense| dense.state = State::Aborting);
    }

    fn pin(&mut self) {
        let len = 1 + self.random.below(self.max_model_len - 1);
        let tokens = self.some_tokens(len);
        let priority = self.random.below(3) as u32;
        self.pins.extend(self.engine.pin(Prompt::Tokens(tokens), true, b"", priority, None));
    }

    fn unpin(&mut self) {
        if !self.pins.is_empty() {
            // The pin may have been evicted.
            let _ = self.engine.unpin(self.pins.swap_remove(self.random.below(self.pins.len())));
        }
    }

    /// Makes calls that beams and running sequences refuse.
    fn refused(&mut self) {
        if let Some(id) = self.beams.keys().next().map(|request| request.sequence(0)) {
            assert!(self.engine.fork(id, 1, &Fork::default()).is_err() && self.engine.rewind(id, 1).is_err());
            assert!(self.engine.append(id, vec![1]).is_err() && self.engine.free(id).is_err());
        }
        if let Some(id) = self.some_sequence(&[State::Running]) {
            assert!(self.engine.resume(id, Resume::new(SamplingParams::greedy())).is_err());
        }
    }

    // --- one step and its checks ---

    fn step(&mut self) {
        let step = if self.random.one_in(8) { [BEFORE_WRITE, AFTER_WRITE][self.random.below(2)] } else { 0 };
        let swap = if self.random.one_in(8) { [SWAP_OUT, SWAP_IN, SWAP_OUT | SWAP_IN][self.random.below(3)] } else { 0 };
        self.failing.store(step | swap, Ordering::Relaxed);
        let result = self.engine.step();
        let outputs: Vec<Output> = self.engine.queue().poll(Some(Duration::ZERO)).unwrap().into();
        self.end_aborted(&outputs);
        self.expect_beams(&outputs);
        let ids: Vec<SeqId> = self.sequences.keys().copied().collect();
        ids.into_iter().for_each(|id| self.branch(id));
        let ids: Vec<SeqId> = self.sequences.keys().copied().collect();
        ids.into_iter().for_each(|id| self.advance_to_engine(id, &outputs));
        self.finish_groups(&outputs);
        for output in &outputs {
            if output.finish.is_some() {
                self.ends += 1;
                let was_expected = self.unfinished_results.remove(&(output.request, output.index));
                assert!(was_expected || self.failed_forks.contains(&output.sequence), "ends twice: {output:?}");
            }
        }
        self.failed_forks.clear();
        self.sequences.retain(|_, dense| dense.state != State::Freed);
        self.check();
        match result {
            Ok(report) => assert_eq!(report.unfinished as usize, self.unfinished()),
            Err(_) => assert!(self.failing.load(Ordering::Relaxed) & STEP > 0),
        }
    }

    fn unfinished(&self) -> usize {
        self.unfinished_results.iter().map(|(request, _)| request).collect::<HashSet<_>>().len()
    }

    fn end_aborted(&mut self, outputs: &[Output]) {
        for (sequence, request, index, reason) in std::mem::take(&mut self.expected_ends) {
            let found: Vec<&Output> = outputs.iter().filter(|output| output.sequence == sequence).collect();
            assert!(
                found.len() == 1 && found[0].finish == Some(reason) && (found[0].request, found[0].index) == (request, index),
                "{found:?}"
            );
        }
        for &id in &self.failed_forks {
            assert!(outputs.iter().any(|output| output.sequence == id && output.finish == Some(FinishReason::Error)), "{id}");
        }
        let aborted: Vec<SeqId> = self.sequences.iter().filter(|(_, dense)| dense.state == State::Aborting).map(|(&id, _)| id).collect();
        for id in aborted {
            let dense = self.sequences.get_mut(&id).unwrap();
            if dense.branches > 1 {
                let branches = std::mem::replace(&mut dense.branches, 1);
                dense.state = if dense.keep && !dense.freed { State::Idle } else { State::Freed };
                let result_count = self.groups.remove(&dense.request).map_or(branches, |group| group.result_count) as u32;
                let request = dense.request;
                let ends =
                    |index| outputs.iter().any(|o| o.request == request && o.index == index && o.finish == Some(FinishReason::Abort));
                assert!((0..result_count).all(ends), "every sample of {id} has a last output");
            } else {
                self.end(id, FinishReason::Abort, outputs);
            }
        }
    }

    /// Ends a sequence of the model.
    fn end(&mut self, id: SeqId, reason: FinishReason, outputs: &[Output]) {
        let dense = self.sequences.get_mut(&id).unwrap();
        let stays = dense.keep && !dense.freed;
        if let Some(group) = self.groups.get_mut(&dense.request) {
            group.ends.push((id, reason, dense.score(), dense.all().to_vec()));
            group.unfinished -= 1;
            dense.state = State::Waiting;
            return;
        }
        let dense = dense.clone();
        self.compare(id, &dense, Some(reason), outputs);
        let state = if stays { State::Idle } else { State::Freed };
        let dense = self.sequences.get_mut(&id).unwrap();
        (dense.state, dense.unreported) = (state, Vec::new());
    }

    /// Branches the sequence into its samples if the engine has generated the first token.
    fn branch(&mut self, id: SeqId) {
        let dense = &self.sequences[&id];
        let has_first_token = self.engine.sequence(id).is_ok_and(|info| info.len > dense.tokens.len());
        let is_unknown = self.engine.sequence(id).is_err();
        if dense.state != State::Running || dense.branches == 1 || !(has_first_token || is_unknown) {
            return;
        }
        let parent = Dense { branches: 1, ..dense.clone() };
        for i in 0..dense.branches {
            let seed = branch_seed(parent.seed, i);
            // If echo is set, each sample starts with the prompt.
            let unreported =
                if i > 0 && parent.params.echo { parent.tokens[..parent.prompt_len].to_vec() } else { parent.unreported.clone() };
            self.sequences.insert(parent.request.sequence(i as u32), Dense { index: i as u32, seed, unreported, ..parent.clone() });
        }
    }

    /// Advances the model to the length that the sequence has in the engine.
    fn advance_to_engine(&mut self, id: SeqId, outputs: &[Output]) {
        if self.sequences[&id].state != State::Running {
            return;
        }
        let group = self.groups.contains_key(&self.sequences[&id].request);
        loop {
            let dense = self.sequences.get_mut(&id).unwrap();
            let has_more = match self.engine.sequence(id) {
                Ok(info) => info.len > dense.tokens.len() || (info.idle && dense.params.is_prompt_only()),
                Err(_) => true,
            };
            if !has_more {
                break;
            }
            if let Some(reason) = dense.advance() {
                return self.end(id, reason, outputs);
            }
        }
        if !group {
            let dense = self.sequences[&id].clone();
            self.compare(id, &dense, None, outputs);
        }
        let dense = self.sequences.get_mut(&id).unwrap();
        if !(dense.awaits_echo() && outputs.iter().all(|output| output.sequence != id || output.tokens.is_empty())) {
            dense.unreported.clear();
        }
    }

    /// Compares the outputs of a sequence with the model.
    fn compare(&mut self, id: SeqId, dense: &Dense, finish: Option<FinishReason>, outputs: &[Output]) {
        let mine = outputs.iter().filter(|output| output.sequence == id);
        let (progress, mine): (Vec<&Output>, Vec<&Output>) = mine.partition(|output| output.computed_tokens > 0);
        for output in progress {
            assert!(
                dense.params.prefill_progress && output.view().tokens.is_empty() && output.view().prompt_logprobs.is_empty(),
                "{output:?}"
            );
            assert!(output.finish.is_none() && output.generated_tokens == 0, "{output:?}");
        }
        let (last, before) = mine.split_last().map_or((None, &[][..]), |(last, before)| (Some(*last), before));
        assert!(before.iter().all(|output| output.finish.is_none()), "no output follows the last one: {mine:?}");
        assert_eq!(last.and_then(|last| last.finish), finish, "sequence {id}: {mine:?} {dense:?}");
        // An echo contains the prompt as it was when the request started.
        let echo = |last: &Output| dense.params.echo && last.generated_tokens == 0 && last.finish.is_none();
        match dense.params.output {
            OutputKind::Delta => {
                let found: Vec<u32> = mine.iter().flat_map(|output| output.tokens.clone()).collect();
                let is_early = found.is_empty() && finish.is_none() && dense.awaits_echo();
                assert!(found == dense.unreported || is_early, "sequence {id}: {found:?}, expected {dense:?}: {mine:?}");
                let logprobs: Vec<f32> = mine.iter().flat_map(|output| output.logprobs.tokens.clone()).collect();
                let echoed: usize = mine.iter().filter(|output| echo(output)).map(|output| output.tokens.len()).sum();
                let chosen = || &dense.history[dense.history.len() - (found.len() - echoed)..];
                let expected = dense.params.logprobs.map_or(&[][..], |_| chosen());
                assert_eq!(&logprobs[echoed.min(logprobs.len())..], expected, "sequence {id}");
                for (at, logprob) in logprobs.iter().take(echoed).enumerate() {
                    // The first tokens have none. Others are missing if the sequence ended before.
                    let scored = || logprob_and_top(&dense_logits(&found[..at]), found[at], 0, &mut Vec::new()).unwrap();
                    let is_cut = finish.is_some_and(|finish| finish != FinishReason::Length || !dense.params.is_prompt_only());
                    assert!(
                        if logprob.is_nan() { at < dense.params.first_scored() || is_cut } else { *logprob == scored() },
                        "the echo of {id} at {at}"
                    );
                }
            }
            OutputKind::Cumulative => {
                assert!(last.is_none_or(|last| echo(last) || last.tokens == dense.all()), "sequence {id}: {last:?} {dense:?}")
            }
            OutputKind::Final => {
                assert_eq!(mine.len(), finish.is_some() as usize);
                assert!(last.is_none_or(|last| last.tokens == dense.all()), "sequence {id}: {last:?} {dense:?}");
            }
        }
        if let Some(last) = last.filter(|last| !echo(last)) {
            assert_eq!((last.request, last.index, last.prompt_tokens), (dense.request, dense.index, dense.prompt_len as u64));
            assert!(finish.is_none() || last.generated_tokens as usize == dense.generated(), "{last:?} {dense:?}");
        }
        self.compare_prompt(id, dense, finish, &mine);
    }

    fn compare_prompt(&mut self, id: SeqId, dense: &Dense, finish: Option<FinishReason>, mine: &[&Output]) {
        let Some(known) = dense.prompt_logprobs.filter(|_| dense.params.output == OutputKind::Delta) else { return };
        let found: Vec<f32> = mine.iter().flat_map(|output| output.prompt_logprobs.tokens.clone()).collect();
        for (i, logprob) in found.iter().enumerate() {
            let at = known + i + dense.params.first_scored();
            let expected = logprob_and_top(&dense_logits(&dense.tokens[..at]), dense.tokens[at], 0, &mut Vec::new()).unwrap();
            assert_eq!(*logprob, expected, "the prompt of {id} at {at}");
        }
        let known = known + found.len();
        let is_scored = dense.params.is_prompt_only() && finish == Some(FinishReason::Length);
        assert!(
            (!is_scored && (dense.unreported.is_empty() || dense.generated() == 0))
                || known + dense.params.first_scored() == dense.prompt_len,
            "outputs contain all prompt logprobs: {known} {dense:?} {mine:?}"
        );
        self.sequences.get_mut(&id).unwrap().prompt_logprobs = Some(known);
    }

    fn finish_groups(&mut self, outputs: &[Output]) {
        let finished: Vec<RequestId> = self.groups.iter().filter(|(_, group)| group.unfinished == 0).map(|(&id, _)| id).collect();
        for request in finished {
            let BestOfGroup { result_count, mut ends, .. } = self.groups.remove(&request).unwrap();
            ends.sort_by(|a, b| b.2.total_cmp(&a.2));
            let found: Vec<&Output> = outputs.iter().filter(|output| output.request == request && output.finish.is_some()).collect();
            assert_eq!(found.len(), result_count, "{found:?}");
            for (rank, (output, end)) in found.iter().zip(&ends).enumerate() {
                assert_eq!((output.index as usize, output.finish, &output.tokens), (rank, Some(end.1), &end.3), "{output:?}");
                assert_eq!(output.score, end.2);
            }
            for (rank, (id, ..)) in ends.iter().enumerate() {
                let dense = self.sequences.get_mut(id).unwrap();
                dense.unreported.clear();
                dense.state = if dense.keep && !dense.freed && self.engine.sequence(*id).is_ok() { State::Idle } else { State::Freed };
                assert!(rank < result_count || dense.state == State::Freed, "samples that are not among the best are freed");
                assert!(rank >= result_count || !dense.keep || dense.freed || dense.state == State::Idle, "the best samples are kept");
            }
        }
    }

    fn expect_beams(&mut self, outputs: &[Output]) {
        let is_progress = |output: &&Output| output.computed_tokens > 0;
        for output in outputs.iter().filter(is_progress) {
            // A search that was preempted computes its tokens again, and reports no progress.
            let is_search = self.beams.contains_key(&output.request);
            assert!(!is_search || output.computed_tokens < output.prompt_tokens, "{output:?}");
        }
        let outputs: Vec<&Output> = outputs.iter().filter(|output| !is_progress(output)).collect();
        let ended: Vec<RequestId> = self.beams.keys().copied().filter(|id| outputs.iter().any(|output| output.request == *id)).collect();
        for id in ended {
            let Beams { n, hypotheses, aborted } = self.beams.remove(&id).unwrap();
            let found: Vec<&Output> = outputs.iter().copied().filter(|output| output.request == id).collect();
            assert_eq!(found.len(), n as usize);
            if aborted {
                assert!(found.iter().all(|output| output.finish == Some(FinishReason::Abort)));
                continue;
            }
            for (output, hypothesis) in found.iter().zip(&hypotheses) {
                let reason = if hypothesis.ended == Ended::AtEos { FinishReason::Stop } else { FinishReason::Length };
                assert_eq!((&output.tokens, output.finish, output.score), (&hypothesis.tokens, Some(reason), hypothesis.score as f64));
                assert_eq!(output.logprobs.tokens, hypothesis.logprobs);
            }
        }
    }

    fn check(&self) {
        for (&id, dense) in &self.sequences {
            if dense.freed || dense.state == State::Waiting {
                continue;
            }
            let info = self.engine.sequence(id).unwrap_or_else(|error| panic!("{error}: {dense:?}"));
            let expected = (dense.request, dense.index, dense.tokens.len(), dense.state == State::Idle);
            assert_eq!((info.request, info.index, info.len, info.idle), expected, "sequence {id}: {dense:?}");
        }
        let stats = self.engine.stats();
        let idle = self.sequences.values().filter(|dense| dense.state == State::Idle && !dense.freed).count();
        let waiting = self.sequences.values().filter(|dense| dense.state == State::Waiting && dense.keep).count();
        assert!((idle..=idle + waiting).contains(&(stats.idle as usize)), "{} idle, not {idle}", stats.idle);
        let finished = stats.finished_abort + stats.finished_error + stats.finished_length + stats.finished_stop;
        assert_eq!(finished, self.ends, "every last output is counted once");
    }

    /// Runs all requests to their end, frees all sequences, and checks that no block is in use.
    fn drain(&mut self) {
        let mut steps = 0;
        while !self.unfinished_results.is_empty() {
            self.step();
            steps += 1;
            assert!(steps < 20_000, "{} requests do not end", self.unfinished());
        }
        for (&id, dense) in &self.sequences {
            assert!(dense.freed || self.engine.free(id).is_ok());
        }
        self.pins.iter().for_each(|&pin| drop(self.engine.unpin(pin)));
        self.sequences.clear();
        self.failing.store(0, Ordering::Relaxed);
        self.engine.step().unwrap();
        let stats = self.engine.stats();
        assert_eq!((stats.blocks_used, stats.idle, stats.waiting, stats.running), (0, 0, 0, 0));
        assert_eq!((stats.swapped, stats.swap_blocks_used), (0, 0));
        assert_eq!(stats.blocks_free + stats.blocks_cached, stats.blocks_total);
    }
}

/// Runs a beam search whose logits are computed from all tokens.
fn search(beam: &BeamParams, n: usize, sampling: &ResolvedSampling, prompt: &[u32], max_tokens: usize) -> Vec<Hypothesis> {
    let mut search = BeamSearch::new(beam, n, &sampling.eos, max_tokens).unwrap();
    let width = beam.width as usize;
    let (mut scratch, mut step, mut sampler) = (BeamScratch::default(), BeamStep::default(), Sampler::new(VOCAB).unwrap());
    while !search.is_done() {
        let (mut rows, mut slots) = (vec![0.0; width * VOCAB], vec![prompt.to_vec(); width]);
        for beam in search.running() {
            let mut generated = Vec::new();
            search.tokens_of(beam, &mut generated).unwrap();
            slots[beam.slot].extend(&generated);
            log_softmax(&dense_logits(&slots[beam.slot]), &mut rows[beam.slot * VOCAB..][..VOCAB]);
        }
        let mut process = |slot: usize, row: &mut [f32]| {
            let (tokens, prompt_len) = (&slots[slot], prompt.len());
            let history = SamplingHistory::new(sampling, tokens, prompt_len)?;
            let context = Context { tokens, prompt_len, generated: tokens.len() - prompt_len, seed: 0, history: &history, allowed: None };
            Ok(sampler.process(row, sampling, &context)?)
        };
        search.decide(&rows, &mut process, &mut scratch, &mut step).unwrap();
        search.commit(&step).unwrap();
    }
    search.best().unwrap()
}

#[test]
fn every_sequence_has_the_tokens_of_the_dense_model() {
    for seed in 0..60 {
        let mut trace = Trace::new(seed);
        (0..1000).for_each(|_| trace.act());
        trace.drain();
    }
}
