//! From a step's logits to its choices. Changes no lengths.

use std::collections::{BTreeMap, HashMap};

use super::beams::{Beams, request_of_beam};
use super::outputs::Logprobs;
use super::request::branch_seed;
use super::stream::{Advance, Stream};
use crate::decode::{Chosen, Constraint, Context, Masker, NoChoice, Sampler, logprob_and_top};
use crate::error::{Error, Result};
use crate::sched::{Choice, Part, Scheduler, Verdict};

/// What is to be told of a choice once it is committed.
pub type Decision = Result<Advance>;

/// What decides, while the runner's logits are borrowed.
pub struct Deciding<'a> {
    pub scheduler: &'a Scheduler,
    pub streams: &'a mut HashMap<u64, Stream>,
    pub lost: &'a [(u64, Error)],
    pub beams: &'a mut BTreeMap<u64, Box<Beams>>,
    pub sampler: &'a mut Sampler,
    pub edited: &'a mut Vec<f32>,
    pub choices: &'a mut Vec<Choice>,
    pub decisions: &'a mut Vec<Decision>,
    pub prompt_logprobs: &'a mut Vec<(u64, Logprobs)>,
    pub stuck: &'a mut Vec<(u64, Error)>,
}

impl Deciding<'_> {
    /// `rows` are the logits of the part's last rows.
    pub fn part(&mut self, part: &Part, rows: &[f32], vocab: usize) -> Result<()> {
        self.prompt(part, rows, vocab)?;
        if !part.samples {
            return Ok(());
        }
        let logits = &rows[rows.len() - vocab..];
        match request_of_beam(self.beams, part.seq) {
            Some(request) => {
                self.beam(request, part.seq, logits);
                Ok(())
            }
            None => self.samples(part, logits),
        }
    }

    /// Log probabilities of the prompt's tokens, each from the logits of the row before it.
    fn prompt(&mut self, part: &Part, rows: &[f32], vocab: usize) -> Result<()> {
        let Some(stream) = self.streams.get(&part.seq) else { return Ok(()) };
        let Some(k) = stream.rules.params.prompt_logprobs else { return Ok(()) };
        let tokens = &self.scheduler.get(part.seq)?.tokens[..stream.prompt_len];
        let first = part.first + part.rows - part.logits + 1;
        let (mut logprobs, mut top) = (Logprobs::default(), Vec::new());
        let told = tokens.get(first..).unwrap_or_default();
        let count = told.len().min(rows.len() / vocab);
        logprobs.tokens.try_reserve_exact(count)?;
        logprobs.top.try_reserve_exact(count * (k as usize).min(vocab))?;
        self.prompt_logprobs.try_reserve(1)?;
        for (&token, logits) in told.iter().zip(rows.chunks_exact(vocab)) {
            logprobs.tokens.push(logprob_and_top(logits, token, k as usize, &mut top)?);
            logprobs.top.extend_from_slice(&top);
        }
        if !logprobs.tokens.is_empty() {
            self.prompt_logprobs.push((part.seq, logprobs));
        }
        Ok(())
    }

    /// A token, or, at the end of a prompt, one for each sample.
    fn samples(&mut self, part: &Part, logits: &[f32]) -> Result<()> {
        let tokens = &self.scheduler.get(part.seq)?.tokens;
        let stream = self.streams.get_mut(&part.seq).ok_or_else(|| Error::internal("a sequence without a stream was sampled"))?;
        let edited = edit(stream, tokens, logits, self.edited)?;
        let lost = self.lost.iter().find(|(seq, _)| *seq == part.seq).map(|(_, error)| error.clone());
        // Its mask is there already.
        let mut constraint = stream.constraint.take();
        let allowed = lost.map_or(Ok(()), Err).and_then(|()| constraint.as_mut().map(Constraint::mask).transpose());
        for i in 0..stream.branches {
            let Stream { rules, memory, prompt_len, generated, .. } = &*stream;
            let seed = branch_seed(stream.seed, i);
            let decision = allowed.clone().and_then(|allowed| {
                let context = Context { tokens, prompt_len: *prompt_len, generated: *generated, seed, memory, allowed };
                let chosen = self.sampler.choose(edited, rules, &context);
                advance(stream, logits, chosen.map_err(|why| blame(why, stream))?)
            });
            let verdict = match &decision {
                Err(_) => Verdict::Fail,
                Ok(Advance { chosen, .. }) if rules.stops_at(chosen.token) && !rules.must_go_on(*generated) => Verdict::Stop(chosen.token),
                Ok(Advance { chosen, .. }) => Verdict::Token(chosen.token),
            };
            self.choices.push(Choice { parent: part.seq, child: part.seq + i as u64, verdict });
            self.decisions.push(decision);
        }
        stream.constraint = constraint;
        Ok(())
    }

    /// A beam's row; with the last of them, the search decides. What fails here ends this request alone.
    fn beam(&mut self, request: u64, seq: u64, logits: &[f32]) {
        if self.stuck.iter().any(|(stuck, _)| *stuck == request) {
            return;
        }
        if let Err(error) = self.try_beam(request, seq, logits) {
            self.stuck.push((request, error));
        }
    }

    fn try_beam(&mut self, request: u64, seq: u64, logits: &[f32]) -> Result<()> {
        let stream = &self.streams[&request];
        let beams = self.beams.get_mut(&request).expect("it was just found");
        beams.read((seq - request) as usize, logits)?;
        if self.scheduler.members(seq).last() != Some(&seq) {
            return Ok(());
        }
        let tokens_in = |slot: usize| Ok(self.scheduler.get(request + slot as u64)?.tokens.as_slice());
        for next in &beams.decide(self.sampler, &stream.rules, stream.prompt_len, tokens_in)?.next {
            let (parent, child) = (request + next.parent as u64, request + next.slot as u64);
            self.choices.push(Choice { parent, child, verdict: Verdict::Token(next.token) });
            self.decisions.push(Ok(Advance::default()));
        }
        Ok(())
    }
}

pub fn collect_masks(masker: &mut Option<Masker>, streams: &mut HashMap<u64, Stream>, lost: &mut Vec<(u64, Error)>) {
    lost.clear();
    while let Some(masked) = masker.as_mut().and_then(Masker::collect) {
        match masked.constraint {
            Ok(constraint) => streams.get_mut(&masked.seq).expect("its mask was asked for").constraint = Some(constraint),
            Err(error) => lost.push((masked.seq, error)),
        }
    }
}

/// Where a hook edits the logits, it is the hook that made them what they are.
fn blame(why: NoChoice, stream: &Stream) -> Error {
    match why {
        NoChoice::NotFinite if stream.hook.is_some() => {
            Error::invalid("no token can be chosen: after the logits hook some logits are NaN or infinite")
        }
        _ => why.into(),
    }
}

/// The logits as the host's hook leaves them.
fn edit<'a>(stream: &Stream, tokens: &[u32], logits: &'a [f32], edited: &'a mut Vec<f32>) -> Result<&'a [f32]> {
    let Some(hook) = &stream.hook else { return Ok(logits) };
    edited.clear();
    edited.try_reserve(logits.len())?;
    edited.extend_from_slice(logits);
    hook(stream.sequence, tokens, edited);
    Ok(edited)
}

fn advance(stream: &Stream, logits: &[f32], chosen: Chosen) -> Result<Advance> {
    let mut advance = Advance { chosen, ..Advance::default() };
    if stream.scores() {
        let k = stream.rules.params.logprobs.unwrap_or(0) as usize;
        advance.logprob = logprob_and_top(logits, advance.chosen.token, k, &mut advance.top)?;
    }
    Ok(advance)
}
