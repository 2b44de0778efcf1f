//! Beam search: several continuations of one prompt in parallel. It follows `generate` of Hugging
//! Face transformers: release 5 for one group of beams, release 4 for several groups, which release
//! 5 does not support.
//!
//! Beams have slots, so that the scheduler can keep one sequence per slot. A step returns
//! the change of each slot.

mod beams;
mod candidates;
#[cfg(test)]
mod tests;

pub use beams::Beams;
use candidates::{Best, Candidate};

use super::sampler::{penalties, rows};
use crate::error::{Error, Result, try_copy};
use crate::types::options::{BeamParams, EarlyStopping};

/// A running beam.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Beam {
    pub slot: usize,
    /// Sum of the log probabilities after the logits processors.
    pub score: f32,
    /// Node of the last token. None: no token has been generated.
    node: Option<u32>,
}

/// A token of a running beam, and its predecessor. Beams share the nodes of their common prefix.
#[derive(Debug, Clone, Copy)]
struct Node {
    token: u32,
    logprob: f32,
    parent: Option<u32>,
}

/// A beam of the next step: `token` appended to the beam in slot `parent`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Next {
    /// Slot of the beam. The first child of a parent keeps the parent's slot. If `slot` differs
    /// from `parent`, the slot was free or is in `dropped`, and the parent's sequence, without this
    /// step's token, must be forked into it.
    pub slot: usize,
    pub parent: usize,
    pub token: u32,
    /// Log probability of the token under the model.
    pub logprob: f32,
    /// Sum of the log probabilities after the logits processors.
    pub score: f32,
    group: usize,
    parent_node: Option<u32>,
}

/// The reason why a hypothesis ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    AtEos,
    AtLength,
}

/// A beam that ends with `token` appended to the beam in slot `parent`. It is a result if it stays
/// among the best.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ending {
    pub parent: usize,
    pub token: u32,
    pub logprob: f32,
    /// Score after the length penalty.
    pub score: f32,
    pub ended: Ended,
    group: usize,
    parent_node: Option<u32>,
}

/// The result of one step. Its buffers are reusable.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BeamStep {
    /// Beams of the next step, by group, best first. There are fewer than the width if tokens are
    /// excluded.
    pub next: Vec<Next>,
    /// Slots of beams without a child. `next` may reuse them.
    pub dropped: Vec<usize>,
    pub finished: Vec<Ending>,
    /// True if the search has ended. `next` is then empty.
    pub done: bool,
}

/// Working memory of `decide`, which several searches can use in turn.
#[derive(Default)]
pub struct BeamScratch {
    /// Candidates that continue.
    best: Best,
    /// Candidates with an end token.
    best_ends: Best,
    /// Tokens that beams of the preceding groups chose in this step, with their diversity penalty.
    diversity: Vec<(u32, f32)>,
    /// `[vocab]` Log probabilities of one beam after the processors.
    row: Vec<f32>,
    scores: Vec<f32>,
}

/// A result: the generated tokens, including the one that ended it.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    pub tokens: Vec<u32>,
    /// Log probability of each token under the model.
    pub logprobs: Vec<f32>,
    /// Sum of the log probabilities after the length penalty.
    pub score: f32,
    pub ended: Ended,
}

/// The model's log probabilities.
struct LogitRows<'a> {
    all: &'a [f32], // [width, vocab]
    vocab: usize,
}

impl LogitRows<'_> {
    fn after(&self, beam: &Beam) -> &[f32] {
        &self.all[beam.slot * self.vocab..][..self.vocab]
    }
}

#[derive(Debug, Default)]
struct BeamGroup {
    /// Running beams, best first. Empty if the group is done.
    running: Vec<Beam>,
    /// Finished beams, best first, at most as many as the group has beams.
    finished: Vec<Ending>,
}

/// A function that applies the logits processors to the log probabilities of all continuations of
/// the beam in a slot. Minus infinity excludes a token.
pub type Process<'a> = dyn FnMut(usize, &mut [f32]) -> Result<()> + 'a;

/// The beams of one request, as plain data. `decide` computes a step, and `commit` applies it.
#[derive(Debug)]
pub struct BeamSearch {
    params: BeamParams,
    n: usize,
    /// End tokens in order, for lookups.
    eos: Vec<u32>,
    /// The end token that pads groups that are done.
    padding: Option<u32>,
    max_new_tokens: usize,
    generated: usize,
    groups: Vec<BeamGroup>,
    nodes: Vec<Node>,
}

impl BeamSearch {
    /// Creates a search for the `n` best continuations of up to `max_new_tokens` tokens, which end
    /// with a token of `eos` or at that length. It starts with one beam, the prompt, in slot 0.
    pub fn new(params: &BeamParams, n: usize, eos: &[u32], max_new_tokens: usize) -> Result<BeamSearch> {
        params.validate(n)?;
        if max_new_tokens == 0 {
            return Err(Error::invalid("max_tokens is 0; give at least 1"));
        }
        let width = params.width as usize;
        let max_nodes = width.saturating_mul(max_new_tokens);
        if max_nodes > u32::MAX as usize {
            return Err(Error::invalid(format!(
                "too many tokens in the beams ({width} beams of {max_new_tokens}, limit {} in all); lower max_tokens or width",
                u32::MAX
            )));
        }
        let mut search = BeamSearch {
            params: params.clone(),
            n,
            eos: try_copy(eos)?,
            padding: eos.first().copied(),
            max_new_tokens,
            generated: 0,
            groups: Vec::new(),
            nodes: Vec::new(),
        };
        search.eos.sort_unstable();
        search.eos.dedup();
        search.groups.try_reserve_exact(params.groups as usize)?;
        for _ in 0..params.groups {
            search.groups.push(BeamGroup::new(search.group_size())?);
        }
        Ok(search)
    }

    /// Returns the number of tokens that every running beam has generated.
    pub fn generated(&self) -> usize {
        self.generated
    }

    pub fn is_done(&self) -> bool {
        self.groups.iter().all(|group| group.running.is_empty())
    }

    /// Returns the beams that need a row in the next step.
    pub fn running(&self) -> impl Iterator<Item = &Beam> {
        let beams = self.groups.iter().flat_map(|group| &group.running);
        // Before the first step, all groups share the prompt.
        beams.take(if self.generated == 0 { 1 } else { usize::MAX })
    }

    /// Writes the generated tokens of a running beam to `tokens`, in order.
    pub fn tokens_of(&self, beam: &Beam, tokens: &mut Vec<u32>) -> Result<()> {
        tokens.clear();
        tokens.try_reserve(self.generated)?;
        tokens.extend(self.backwards(beam.node).map(|node| node.token));
        tokens.reverse();
        Ok(())
    }

    /// Computes one step without changing the search. `rows` are the model's log probabilities of
    /// all continuations of the beam in each slot, [width, vocab]. Rows of unused slots are not
    /// read.
    pub fn decide(&self, rows: &[f32], process: &mut Process, scratch: &mut BeamScratch, step: &mut BeamStep) -> Result<()> {
        let rows = self.check(rows)?;
        step.reserve(self.params.width as usize)?;
        scratch.reserve(self.params.width as usize, rows.vocab)?;
        for group in 0..self.groups.len() {
            self.decide_group(group, &rows, process, scratch, step)?;
        }
        assign_slots(&mut step.next);
        let has_child = |beam: &Beam| step.next.iter().any(|next| next.parent == beam.slot);
        step.dropped.extend(self.running().filter(|beam| !has_child(beam)).map(|beam| beam.slot));
        step.done = step.next.is_empty();
        Ok(())
    }

    /// Applies a step that `decide` computed for the current state. If memory runs out, nothing
    /// changes.
    pub fn commit(&mut self, step: &BeamStep) -> Result<()> {
        self.nodes.try_reserve(step.next.len())?;
        self.generated += 1;
        self.groups.iter_mut().for_each(|group| group.running.clear());
        let size = self.group_size();
        for ending in &step.finished {
            let finished = &mut self.groups[ending.group].finished;
            insert_by_score(finished, ending);
            finished.truncate(size);
        }
        for next in &step.next {
            let node = Some(self.nodes.len() as u32);
            self.nodes.push(Node { token: next.token, logprob: next.logprob, parent: next.parent_node });
            self.groups[next.group].running.push(Beam { slot: next.slot, score: next.score, node });
        }
        Ok(())
    }

    /// Returns the n best finished hypotheses, best first: the results once the search is done.
    /// There are fewer than n if exclusions left beams without continuations.
    pub fn best(&self) -> Result<Vec<Hypothesis>> {
        let mut finished = Vec::new();
        finished.try_reserve_exact(self.params.width as usize)?;
        for ending in self.groups.iter().flat_map(|group| &group.finished) {
            insert_by_score(&mut finished, ending);
        }
        let mut best = Vec::new();
        best.try_reserve_exact(self.n)?;
        for ending in finished.iter().take(self.n) {
            best.push(self.hypothesis(ending)?);
        }
        Ok(best)
    }

    fn group_size(&self) -> usize {
        (self.params.width / self.params.groups) as usize
    }

    fn check<'a>(&self, rows: &'a [f32]) -> Result<LogitRows<'a>> {
        if self.is_done() {
            return Err(Error::internal("step of a finished beam search"));
        }
        let width = self.params.width as usize;
        if rows.is_empty() || !rows.len().is_multiple_of(width) {
            return Err(Error::internal(format!("{} log probabilities do not form a row for each of {width} beams", rows.len())));
        }
        let rows = LogitRows { all: rows, vocab: rows.len() / width };
        if !self.running().all(|beam| rows::are_logits(rows.after(beam))) {
            return Err(Error::model(
                "no beam can continue: the logits are not finite; check the model's weights for NaN, infinity and overflow",
            ));
        }
        Ok(rows)
    }

    fn decide_group(
        &self,
        group: usize,
        rows: &LogitRows,
        process: &mut Process,
        scratch: &mut BeamScratch,
        step: &mut BeamStep,
    ) -> Result<()> {
        let running = &self.groups[group].running;
        let taken_off = |token| (token, -self.params.diversity_penalty);
        if running.is_empty() {
            // transformers continues to fill a group that is done with padding: by default the
            // first end token.
            scratch.diversity.extend(self.padding.into_iter().cycle().take(self.group_size()).map(taken_off));
            return Ok(());
        }
        // Of the candidates with an end token, only those among the best of all matter.
        scratch.best.start(self.group_size())?;
        scratch.best_ends.start(self.group_size())?;
        for (place, beam) in running.iter().enumerate() {
            scratch.row.clear();
            scratch.row.extend_from_slice(rows.after(beam));
            // Before the processors, in the order that sampler.rs documents.
            penalties::apply_bias(&mut scratch.row, &scratch.diversity);
            process(beam.slot, &mut scratch.row)?;
            for &token in &self.eos {
                let Some(logprob) = scratch.row.get_mut(token as usize) else { continue };
                scratch.best_ends.add(Candidate { beam: place, token, score: beam.score + *logprob });
                *logprob = f32::NEG_INFINITY;
            }
            scratch.best.offer(place, beam.score, &scratch.row);
        }
        let candidates = scratch.best.ranked_with(&mut scratch.best_ends);
        let (first_next, first_ending) = (step.next.len(), step.finished.len());
        self.divide(group, candidates, rows, step);
        scratch.diversity.extend(step.next[first_next..].iter().map(|next| taken_off(next.token)));
        let enough = match self.best_hope(candidates, &step.next[first_next..]) {
            Some(hope) => self.has_enough(group, &step.finished[first_ending..], hope, &mut scratch.scores),
            None => true,
        };
        let last = self.generated + 1 == self.max_new_tokens;
        // At the last step, release 5 turns running beams into results. Release 4 does too, unless
        // the group has enough results.
        if last && !(enough && self.params.groups > 1) {
            let BeamStep { next, finished, .. } = step;
            finished.extend(next[first_next..].iter().map(|next| self.ending(next, Ended::AtLength)));
        }
        if last || enough {
            step.next.truncate(first_next);
        }
        Ok(())
    }

    /// Candidates with an end token finish if they rank among the best. The best other candidates
    /// continue.
    fn divide(&self, group: usize, candidates: &[Candidate], rows: &LogitRows, step: &mut BeamStep) {
        let (size, first_next) = (self.group_size(), step.next.len());
        for (rank, candidate) in candidates.iter().enumerate() {
            let parent = &self.groups[group].running[candidate.beam];
            let next = Next {
                slot: parent.slot,
                parent: parent.slot,
                token: candidate.token,
                logprob: rows.after(parent)[candidate.token as usize],
                score: candidate.score,
                group,
                parent_node: parent.node,
            };
            if self.eos.binary_search(&candidate.token).is_err() {
                step.next.push(next);
            } else if rank < size {
                step.finished.push(self.ending(&next, Ended::AtEos));
            }
            if step.next.len() - first_next == size {
                break;
            }
        }
    }

    fn ending(&self, last: &Next, ended: Ended) -> Ending {
        let Next { parent, token, logprob, group, parent_node, .. } = *last;
        Ending { parent, token, logprob, score: self.normalized(last.score, self.generated + 1), ended, group, parent_node }
    }

    fn normalized(&self, score: f32, length: usize) -> f32 {
        (score as f64 / libm::pow(length as f64, self.params.length_penalty as f64)) as f32
    }

    /// Returns the sum that determines whether a running beam can still become a result. Release 4
    /// also considers candidates that have just finished.
    fn best_hope(&self, candidates: &[Candidate], next: &[Next]) -> Option<f32> {
        let running = next.first()?.score;
        Some(if self.params.groups > 1 { candidates[0].score } else { running })
    }

    /// Returns true if the group can stop: `hope` cannot displace the worst of its finished
    /// hypotheses, and there are as many as the group has beams.
    fn has_enough(&self, group: usize, endings: &[Ending], hope: f32, scores: &mut Vec<f32>) -> bool {
        scores.clear();
        scores.extend(self.groups[group].finished.iter().chain(endings).map(|ending| ending.score));
        scores.sort_unstable_by(|a, b| b.total_cmp(a));
        let Some(&worst) = scores.get(self.group_size() - 1) else { return false };
        let length = match self.params.early_stopping {
            EarlyStopping::Yes => return true,
            EarlyStopping::Never if self.params.length_penalty > 0.0 => self.max_new_tokens,
            EarlyStopping::Never | EarlyStopping::No => self.generated + 1,
        };
        worst >= self.normalized(hope, length)
    }

    /// Iterates over the tokens up to `node`, in reverse order.
    fn backwards(&self, node: Option<u32>) -> impl Iterator<Item = &Node> {
        let at = |node: Option<u32>| self.nodes.get(node? as usize);
        std::iter::successors(at(node), move |node| at(node.parent))
    }

    fn hypothesis(&self, ending: &Ending) -> Result<Hypothesis> {
        let length = 1 + self.backwards(ending.parent_node).count();
        let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
        tokens.try_reserve_exact(length)?;
        logprobs.try_reserve_exact(length)?;
        tokens.push(ending.token);
        logprobs.push(ending.logprob);
        for node in self.backwards(ending.parent_node) {
            tokens.push(node.token);
            logprobs.push(node.logprob);
        }
        tokens.reverse();
        logprobs.reverse();
        Ok(Hypothesis { tokens, logprobs, score: ending.score, ended: ending.ended })
    }
}

impl BeamGroup {
    fn new(size: usize) -> Result<BeamGroup> {
        let (mut running, mut finished) = (Vec::new(), Vec::new());
        running.try_reserve_exact(size)?;
        finished.try_reserve_exact(size + 1)?;
        running.push(Beam { slot: 0, score: 0.0, node: None });
        Ok(BeamGroup { running, finished })
    }
}

/// Inserts an ending after those with an equal or better score, so that the order of equals is
/// stable.
fn insert_by_score(finished: &mut Vec<Ending>, ending: &Ending) {
    let place = finished.partition_point(|other| other.score >= ending.score);
    finished.insert(place, *ending);
}

/// Assigns a slot to each beam of the next step. A parent's first child keeps its slot; the others
/// take the lowest free slots.
fn assign_slots(next: &mut [Next]) {
    let mut taken = 0u64; // one bit per slot, at most 64
    let mut moving = 0u64; // one bit per index in `next`
    for (place, next) in next.iter_mut().enumerate() {
        next.slot = next.parent;
        match taken & 1 << next.parent {
            0 => taken |= 1 << next.parent,
            _ => moving |= 1 << place,
        }
    }
    for (place, next) in next.iter_mut().enumerate() {
        if moving & 1 << place != 0 {
            next.slot = taken.trailing_ones() as usize;
            taken |= 1 << next.slot;
        }
    }
}

const _: () = assert!(BeamParams::MAX_BEAMS <= u64::BITS);

impl BeamStep {
    fn reserve(&mut self, width: usize) -> Result<()> {
        self.next.clear();
        self.dropped.clear();
        self.finished.clear();
        self.next.try_reserve(width)?;
        self.dropped.try_reserve(width)?;
        Ok(self.finished.try_reserve(2 * width)?) // at the last step, endings by token and by length
    }
}

impl BeamScratch {
    fn reserve(&mut self, width: usize, vocab: usize) -> Result<()> {
        self.diversity.clear();
        self.diversity.try_reserve(width)?;
        self.row.clear();
        self.row.try_reserve_exact(vocab)?;
        Ok(self.scores.try_reserve(3 * width)?)
    }
}
