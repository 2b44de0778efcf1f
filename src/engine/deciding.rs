//! Sampling: from the logits of a step to its choices. Changes no lengths.

use std::collections::BTreeMap;

use super::beams::{Beams, request_of_beam};
use super::request::branch_seed;
use super::stream::{Advance, Stream};
use crate::batch::draws::{Drawn, Draws};
use crate::decode::{self, Chosen, Constraint, Context, Masker, NoChoice, Sampler, logprob_and_top, logprob_of};
use crate::error::{Error, Result};
use crate::sched::{Choice, IdMap, Part, Scheduler, StepPlan, Verdict};

/// The result for one row, delivered after the commit.
pub type Decision = Result<Advance>;

/// The most probable tokens for all sampled rows, one list after the other.
#[derive(Default)]
pub struct Tops {
    pub all: Vec<(u32, f32)>,
    /// Buffer for one row.
    row: Vec<(u32, f32)>,
}

impl Tops {
    /// Returns the log probability of `token`, and appends those of the `k` most probable tokens.
    fn add(&mut self, logits: &[f32], token: u32, k: usize) -> Result<f32> {
        let logprob = logprob_and_top(logits, token, k, &mut self.row)?;
        self.all.try_reserve(self.row.len())?;
        self.all.extend_from_slice(&self.row);
        Ok(logprob)
    }

    /// Does the same for a token that the device has sampled.
    fn add_drawn(&mut self, drawn: &Drawn, k: usize) -> Result<f32> {
        let tops = drawn.tops.get(..k).ok_or_else(|| Error::internal(format!("{k} tokens were to be told of a draw")))?;
        self.all.try_reserve(k)?;
        self.all.extend(tops.iter().map(|top| (top.token, logprob_of(drawn, top.logit))));
        Ok(logprob_of(drawn, drawn.logit))
    }
}

/// The log probabilities of prompt tokens that this step computed.
#[derive(Default)]
pub struct Prompts {
    logprobs: Vec<f32>,
    tops: Tops,
    /// The end of each sequence in both lists: (sequence, log probabilities, top tokens).
    ends: Vec<(u64, usize, usize)>,
}

impl Prompts {
    pub fn clear(&mut self) {
        self.logprobs.clear();
        self.tops.all.clear();
        self.ends.clear();
    }

    /// Returns the log probabilities and the top tokens of each sequence.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &[f32], &[(u32, f32)])> {
        let starts = std::iter::once((0, 0)).chain(self.ends.iter().map(|&(_, logprobs, top)| (logprobs, top)));
        self.ends.iter().zip(starts).map(|(end, start)| (end.0, &self.logprobs[start.0..end.1], &self.tops.all[start.1..end.2]))
    }
}

/// The state of one sampling pass, while the logits of the runner are borrowed.
pub struct Deciding<'a> {
    pub scheduler: &'a Scheduler,
    pub streams: &'a mut IdMap<u64, Stream>,
    pub lost: &'a [(u64, Error)],
    pub beams: &'a mut BTreeMap<u64, Box<Beams>>,
    pub sampler: &'a mut Sampler,
    pub edited: &'a mut Vec<f32>,
    pub choices: &'a mut Vec<Choice>,
    pub decisions: &'a mut Vec<Decision>,
    pub tops: &'a mut Tops,
    pub prompts: &'a mut Prompts,
    pub stuck: &'a mut Vec<(u64, Error)>,
}

impl Deciding<'_> {
    /// Samples one part. `rows` are the logits of its last rows. They are undefined if the device
    /// has sampled the token.
    pub fn part(&mut self, part: &Part, rows: &[f32], vocab: usize, drawn: Option<&Drawn>) -> Result<()> {
        if let Some(drawn) = drawn {
            return self.drawn(part, drawn);
        }
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

    /// Computes the log probabilities of prompt tokens, each from the logits of the previous row.
    fn prompt(&mut self, part: &Part, rows: &[f32], vocab: usize) -> Result<()> {
        let Some(stream) = self.streams.get(&part.seq) else { return Ok(()) };
        let Some(k) = stream.rules.params.prompt_logprobs else { return Ok(()) };
        let tokens = &self.scheduler.get(part.seq)?.tokens[..stream.prompt_len];
        let first = part.first + part.rows - part.logits + 1;
        let told = tokens.get(first..).unwrap_or_default();
        let count = told.len().min(rows.len() / vocab);
        let Prompts { logprobs, tops, ends } = &mut *self.prompts;
        logprobs.try_reserve(count)?;
        ends.try_reserve(1)?;
        for (&token, logits) in told.iter().zip(rows.chunks_exact(vocab)) {
            logprobs.push(tops.add(logits, token, k as usize)?);
        }
        if count > 0 {
            ends.push((part.seq, logprobs.len(), tops.all.len()));
        }
        Ok(())
    }

    /// Samples one token, or one per sample at the end of a prompt.
    fn samples(&mut self, part: &Part, logits: &[f32]) -> Result<()> {
        let tokens = &self.scheduler.get(part.seq)?.tokens;
        let stream = self.streams.get_mut(&part.seq).ok_or_else(|| Error::internal("a sequence without a stream was sampled"))?;
        let edited = edit(stream, tokens, logits, self.edited)?;
        let lost = self.lost.iter().find(|(seq, _)| *seq == part.seq).map(|(_, error)| error.clone());
        // The mask has been computed before the logits.
        let mut constraint = stream.constraint.take();
        let allowed = lost.map_or(Ok(()), Err).and_then(|()| constraint.as_mut().map(Constraint::mask).transpose());
        for i in 0..stream.branches {
            let Stream { rules, memory, prompt_len, generated, .. } = &*stream;
            let seed = branch_seed(stream.seed, i);
            let decision = allowed.clone().and_then(|allowed| {
                let context = Context { tokens, prompt_len: *prompt_len, generated: *generated, seed, memory, allowed };
                let chosen = self.sampler.choose(edited, rules, &context);
                advance(stream, logits, chosen.map_err(|why| blame(why, stream))?, self.tops)
            });
            self.choices.push(Choice { parent: part.seq, child: part.seq + i as u64, verdict: verdict(stream, &decision) });
            self.decisions.push(decision);
        }
        stream.constraint = constraint;
        Ok(())
    }

    /// Takes the token that the device has sampled.
    fn drawn(&mut self, part: &Part, drawn: &Drawn) -> Result<()> {
        let stream = self.streams.get(&part.seq).ok_or_else(|| Error::internal("a sequence without a stream was sampled"))?;
        let decision = match decode::chosen(drawn) {
            Err(why) => Err(blame(why, stream)),
            Ok(chosen) => {
                let first = self.tops.all.len();
                let k = stream.rules.params.logprobs.unwrap_or(0) as usize;
                let logprob = if stream.scores() { self.tops.add_drawn(drawn, k)? } else { 0.0 };
                Ok(Advance { chosen, logprob, top: first..self.tops.all.len() })
            }
        };
        self.choices.push(Choice { parent: part.seq, child: part.seq, verdict: verdict(stream, &decision) });
        self.decisions.push(decision);
        Ok(())
    }

    /// Stores the row of a beam. After the last beam, the search decides. An error ends only this
    /// request.
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
        if self.scheduler.members(seq).next_back() != Some(seq) {
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

/// Plans sampling on the device for sequences that need one token and whose logits are not used
/// otherwise.
pub fn plan_draws(
    draws: &mut Draws,
    plan: &StepPlan,
    vocab: usize,
    scheduler: &Scheduler,
    streams: &mut IdMap<u64, Stream>,
    beams: &BTreeMap<u64, Box<Beams>>,
    lost: &[(u64, Error)],
) -> Result<()> {
    let mut row = 0;
    for part in plan.parts.iter().filter(|part| part.logits > 0) {
        row += part.logits;
        let is_lost = lost.iter().any(|(seq, _)| *seq == part.seq);
        let is_one = part.samples && part.logits == 1 && !is_lost && request_of_beam(beams, part.seq).is_none();
        let Some(stream) = streams.get_mut(&part.seq).filter(|stream| is_one && stream.draws_alone()) else { continue };
        let tokens = &scheduler.get(part.seq)?.tokens;
        let mut constraint = stream.constraint.take();
        // If the mask fails here, it fails again in `samples`, which reports the error.
        if let Ok(allowed) = constraint.as_mut().map(Constraint::mask).transpose() {
            let Stream { rules, memory, prompt_len, generated, seed, .. } = &*stream;
            let seed = branch_seed(*seed, 0);
            let context = Context { tokens, prompt_len: *prompt_len, generated: *generated, seed, memory, allowed };
            let logprobs = stream.scores().then(|| rules.params.logprobs.unwrap_or(0));
            decode::plan_draw(draws, row as u32 - 1, vocab, logprobs, rules, &context);
        }
        stream.constraint = constraint;
    }
    Ok(())
}

pub fn collect_masks(masker: &mut Option<Masker>, streams: &mut IdMap<u64, Stream>, lost: &mut Vec<(u64, Error)>) {
    // A sequence whose step is retried still has no grammar, so its error stays.
    lost.retain(|(seq, _)| streams.contains_key(seq));
    while let Some(masked) = masker.as_mut().and_then(Masker::collect) {
        match masked.constraint {
            Ok(constraint) => streams.get_mut(&masked.seq).expect("its mask was asked for").constraint = Some(constraint),
            Err(error) => lost.push((masked.seq, error)),
        }
    }
}

fn verdict(stream: &Stream, decision: &Decision) -> Verdict {
    match decision {
        Err(_) => Verdict::Fail,
        Ok(Advance { chosen, .. }) if stream.rules.stops_at(chosen.token) && !stream.rules.must_go_on(stream.generated) => {
            Verdict::Stop(chosen.token)
        }
        Ok(Advance { chosen, .. }) => Verdict::Token(chosen.token),
    }
}

/// Attributes non-finite logits to the logits hook if there is one.
fn blame(why: NoChoice, stream: &Stream) -> Error {
    match why {
        NoChoice::NotFinite if stream.hook.is_some() => {
            Error::invalid("no token can be chosen: after the logits hook some logits are NaN or infinite")
        }
        _ => why.into(),
    }
}

/// Returns the logits after the logits hook.
fn edit<'a>(stream: &Stream, tokens: &[u32], logits: &'a [f32], edited: &'a mut Vec<f32>) -> Result<&'a [f32]> {
    let Some(hook) = &stream.hook else { return Ok(logits) };
    edited.clear();
    edited.try_reserve(logits.len())?;
    edited.extend_from_slice(logits);
    hook(stream.sequence, tokens, edited);
    Ok(edited)
}

fn advance(stream: &Stream, logits: &[f32], chosen: Chosen, tops: &mut Tops) -> Result<Advance> {
    let first = tops.all.len();
    let k = stream.rules.params.logprobs.unwrap_or(0) as usize;
    let logprob = if stream.scores() { tops.add(logits, chosen.token, k)? } else { 0.0 };
    Ok(Advance { chosen, logprob, top: first..tops.all.len() })
}
