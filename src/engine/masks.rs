//! Masks of grammars during the steps: their start, the wait for them, and the sequences whose mask
//! is late.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::command::Command;
use super::deferred_commands::DeferredCommands;
use super::live_requests::LiveRequests;
use super::step_inputs::Inputs;
use crate::error::{Error, Result};
use crate::generation::ConstraintState;
use crate::generation::grammar::{GrammarPace, MaskId, Masked, Masker};
use crate::generation::output_processor::NewToken;
use crate::output::wakeup::Wakeup;
use crate::scheduler::{Scheduler, StepPlan};
use crate::types::id_map::IdMap;
use crate::types::outputs::FinishReason;
use crate::types::timing::SequenceStats;
use crate::types::{RequestId, SeqId};

/// Time that a commit spends on the tokens of grammars. Those of the other sequences are consumed
/// by another thread, so that many grammars delay the step by little more.
const MAX_ADVANCE_TIME: Duration = Duration::from_millis(2);

/// The masks of the steps. A sequence whose mask is late takes no part in the steps until the mask
/// has come. Its tokens are the same.
pub struct Masks {
    /// Created by the first mask.
    masker: Option<Masker>,
    wakeup: Arc<Wakeup>,
    max_seqs: usize,
    last_id: u64,
    /// Masks that the current step waits for, and their sequences.
    ids: Vec<MaskId>,
    awaited: Vec<(SeqId, Arc<GrammarPace>)>,
    /// Buffer for the ids of masks that the current step does not wait for.
    late_ids: Vec<MaskId>,
    late: Vec<LateMask>,
    /// Number of late masks by request.
    late_requests: IdMap<RequestId, usize>,
    /// Commands that have waited for a mask, an import or a fork, in the order in which they are
    /// applied.
    pub released: VecDeque<Command>,
    /// Number of them that this step may still apply.
    pub may_apply: usize,
    /// Masks of sequences that have ended. Their threads may still use the lexer of the grammar.
    cancelled: Vec<(MaskId, Arc<GrammarPace>)>,
    /// Time that the current commit has spent on the tokens of grammars.
    advance_time: Duration,
}

/// A mask for which no step waits.
pub struct LateMask {
    pub id: MaskId,
    pub seq: SeqId,
    request: RequestId,
    /// A committed token that the grammar consumes before the mask. It has no output yet.
    pub token: Option<PendingToken>,
    /// Commands for the sequence, which need its grammar.
    pub deferred: DeferredCommands,
    pace: Arc<GrammarPace>,
}

/// A committed token without an output.
pub struct PendingToken {
    pub new: NewToken,
    /// Its most probable alternatives.
    pub top: Vec<(u32, f32)>,
    pub finish: Option<FinishReason>,
    pub stats: SequenceStats,
}

/// What the grammar of a sequence has done with a token.
pub enum Advance {
    /// The result is whether the grammar is complete.
    Known(Result<bool>),
    /// The token is pending until the mask.
    Pending(MaskId),
}

impl Masks {
    /// Creates the state for steps of at most `max_seqs` sequences. Late masks wake the stepping
    /// thread by `wakeup`.
    pub fn new(max_seqs: usize, wakeup: Arc<Wakeup>) -> Masks {
        Masks {
            masker: None,
            wakeup,
            max_seqs,
            last_id: 0,
            ids: Vec::new(),
            awaited: Vec::new(),
            late_ids: Vec::new(),
            late: Vec::new(),
            late_requests: IdMap::default(),
            released: VecDeque::new(),
            may_apply: 0,
            cancelled: Vec::new(),
            advance_time: Duration::ZERO,
        }
    }

    /// Starts the computation of the masks of a plan, in parallel with the forward pass.
    pub fn start(&mut self, plan: &StepPlan, live: &mut LiveRequests) {
        for part in plan.sampled() {
            let Some(sequence) = live.sequences.get_mut(&part.seq) else { continue };
            let sampling = &mut sequence.generation.sampling;
            let ConstraintState::Present(constraint) = &sampling.constraint else { continue };
            if constraint.has_mask() || sampling.params().is_prompt_only() || self.reserve().is_err() {
                continue; // without memory, the sampling computes the mask
            }
            self.awaited.push((part.seq, constraint.pace()));
            let id = self.next_id();
            self.ids.push(id);
            self.submit(id, part.seq, &mut sampling.constraint);
        }
    }

    /// Reserves memory for one more mask of a step.
    fn reserve(&mut self) -> Result<()> {
        if self.masker.is_none() {
            let wakeup = self.wakeup.clone();
            self.masker = Some(Masker::new(self.max_seqs, move || wakeup.wake())?);
        }
        let more = if self.ids.is_empty() { self.max_seqs.max(1) } else { 1 };
        self.ids.try_reserve(more)?;
        self.awaited.try_reserve(more)?;
        self.late_ids.try_reserve(self.late.len() + more)?;
        self.late_requests.try_reserve(self.ids.len() + more)?;
        Ok(self.late.try_reserve(self.ids.len() + more)?)
    }

    fn submit(&mut self, id: MaskId, seq: SeqId, state: &mut ConstraintState) {
        if let (Some(masker), Some(constraint)) = (&mut self.masker, state.take(id)) {
            masker.submit(id, seq, constraint);
        }
    }

    pub fn next_id(&mut self) -> MaskId {
        self.last_id += 1;
        MaskId(self.last_id)
    }

    /// Waits for the masks that `start` has started, as long as `source` allows. The rows of
    /// sequences with late masks become stale. Returns whether there are any.
    pub fn collect(&mut self, source: &mut dyn Inputs, live: &mut LiveRequests, scheduler: &mut Scheduler) -> bool {
        let Some(masker) = self.masker.as_mut().filter(|_| !self.ids.is_empty()) else { return false };
        self.late_ids.clear();
        source.await_masks(masker, &self.ids, &mut self.late_ids);
        for (id, (seq, pace)) in self.ids.drain(..).zip(self.awaited.drain(..)) {
            let sequence = live.sequences.get_mut(&seq).expect("a sequence stays until its mask is collected");
            if self.late_ids.contains(&id) {
                scheduler.invalidate(seq);
                pace.begin_late();
                let (request, deferred) = (sequence.request, DeferredCommands::default());
                self.late.push(LateMask { id, seq, request, token: None, deferred, pace });
                *self.late_requests.entry(request).or_default() += 1;
            } else if let Some(Masked { constraint, .. }) = masker.take(id) {
                sequence.generation.sampling.constraint.put_back(id, constraint);
            }
        }
        masker.set_wakes(!self.late.is_empty());
        !self.late_ids.is_empty()
    }

    /// Starts a commit, which advances grammars.
    pub fn begin_commit(&mut self) {
        self.advance_time = Duration::ZERO;
    }

    /// Advances the grammar of a sequence by a token. If this takes long, the token stays pending,
    /// and the caller calls `hold`.
    pub fn advance(&mut self, state: &mut ConstraintState, token: u32, source: &mut dyn Inputs) -> Advance {
        let constraint = match state.get() {
            Ok(Some(constraint)) => constraint,
            Ok(None) => return Advance::Known(Ok(false)),
            Err(error) => return Advance::Known(Err(error)),
        };
        let id = self.next_id();
        let takes_long = constraint.is_slow_or_late() || self.advance_time > MAX_ADVANCE_TIME;
        if source.is_late(id, takes_long) {
            return constraint.advance_later(token).map_or_else(|error| Advance::Known(Err(error)), |()| Advance::Pending(id));
        }
        let start = Instant::now();
        let advanced = constraint.try_advance(token);
        self.advance_time += start.elapsed();
        match advanced {
            Ok(true) => Advance::Known(Ok(constraint.is_complete())),
            Ok(false) if source.is_late(id, true) => Advance::Pending(id),
            // A replay of a journal, in which the grammar did not fail here.
            Ok(false) => Advance::Known(constraint.catch_up()),
            Err(error) => Advance::Known(Err(error)),
        }
    }

    /// Starts the computation of the mask `id`, whose sequence has a pending token.
    pub fn hold(&mut self, id: MaskId, (request, seq): (RequestId, SeqId), state: &mut ConstraintState, token: PendingToken) -> Result<()> {
        let ConstraintState::Present(constraint) = state else {
            return Err(Error::internal("the grammar of a pending token is missing"));
        };
        let pace = constraint.pace();
        self.reserve()?;
        pace.begin_late();
        self.late.push(LateMask { id, seq, request, token: Some(token), deferred: DeferredCommands::default(), pace });
        *self.late_requests.entry(request).or_default() += 1;
        // The wake-ups start before the thread does.
        self.masker.iter().for_each(|masker| masker.set_wakes(true));
        self.submit(id, seq, state);
        Ok(())
    }

    /// Reads which late masks have been computed, as an input of the step.
    pub fn read_finished(&mut self, source: &mut dyn Inputs, finished: &mut Vec<MaskId>) {
        finished.clear();
        let Some(masker) = &mut self.masker else { return };
        self.late_ids.clear();
        self.late_ids.extend(self.late.iter().map(|late| late.id));
        source.finished_masks(masker, &self.late_ids, finished);
        // Masks of sequences that have ended.
        self.cancelled.retain(|(id, pace)| {
            let is_done = masker.has(*id);
            if is_done {
                pace.end_late();
            }
            !is_done
        });
        masker.retain(|id| self.late_ids.contains(&id));
    }

    /// Removes a late mask that has been computed.
    pub fn finish(&mut self, id: MaskId) -> Option<(LateMask, Masked)> {
        let masked = self.masker.as_mut()?.take(id)?;
        let place = self.late.iter().position(|late| late.id == id)?;
        let late = self.remove(place);
        late.pace.end_late();
        Some((late, masked))
    }

    /// Removes a late mask. The order of the others stays.
    fn remove(&mut self, place: usize) -> LateMask {
        let late = self.late.remove(place);
        if let Some(count) = self.late_requests.get_mut(&late.request) {
            *count -= 1;
            if *count == 0 {
                self.late_requests.remove(&late.request);
            }
        }
        if self.late.is_empty() {
            self.masker.iter().for_each(|masker| masker.set_wakes(false));
        }
        late
    }

    /// Removes a late mask that nothing needs.
    fn cancel(&mut self, place: usize) {
        let late = self.remove(place);
        let Some(masker) = &mut self.masker else { return };
        masker.cancel(late.id);
        match self.cancelled.try_reserve(1) {
            Ok(()) => self.cancelled.push((late.id, late.pace)),
            Err(_) => late.pace.end_late(),
        }
    }

    /// Returns whether a sequence of the request has a late mask.
    pub fn is_late(&self, request: RequestId) -> bool {
        self.late_requests.contains_key(&request)
    }

    /// Returns whether the sequence has a late mask.
    pub fn has(&self, seq: SeqId) -> bool {
        self.late.iter().any(|late| late.seq == seq)
    }

    /// Releases commands that have waited. Without memory, returns them.
    pub fn release(&mut self, deferred: DeferredCommands) -> Option<DeferredCommands> {
        if self.released.try_reserve(deferred.len()).is_err() {
            return Some(deferred);
        }
        // They are older than the commands for the same sequence that have been released before.
        deferred.into_iter().rev().for_each(|command| self.released.push_front(command));
        None
    }

    /// Returns the number of sequences whose commands wait for a late mask, and of released
    /// commands.
    pub fn deferring(&self) -> usize {
        self.late.iter().filter(|late| !late.deferred.is_empty()).count() + self.released.len()
    }

    /// Returns whether a running sequence, an output or a command waits for a late mask.
    pub fn has_waiting(&self, scheduler: &Scheduler) -> bool {
        let runs = |seq| scheduler.find(seq).is_some_and(|sequence| sequence.group.is_some());
        self.late.iter().any(|late| late.token.is_some() || !late.deferred.is_empty() || runs(late.seq))
    }

    /// Takes the pending token of a sequence.
    pub fn take_token(&mut self, seq: SeqId) -> Option<PendingToken> {
        self.late.iter_mut().find(|late| late.seq == seq)?.token.take()
    }

    /// Removes the late mask of a sequence that has been removed, unless commands wait for it.
    pub fn forget(&mut self, seq: SeqId) {
        if let Some(place) = self.late.iter().position(|late| late.seq == seq && late.deferred.is_empty()) {
            self.cancel(place);
        }
    }

    /// Removes all late masks, and the commands that have waited for them.
    pub fn clear(&mut self) {
        self.released.clear();
        while !self.late.is_empty() {
            self.cancel(self.late.len() - 1);
        }
    }

    /// Returns the commands after which this one must wait. `None` if it need not wait: only
    /// commands that need the grammar wait, and the end of a generation after others that wait.
    pub fn commands_before(&mut self, command: &Command) -> Option<&mut DeferredCommands> {
        if self.late.is_empty() {
            return None;
        }
        let target = command.target()?;
        let late = match *command {
            Command::Abort { request } => {
                self.late.iter_mut().find(|late| !late.deferred.is_empty() && (late.request == request || late.deferred.creates(target)))
            }
            Command::End { .. } | Command::Free { .. } => {
                self.late.iter_mut().find(|late| !late.deferred.is_empty() && (late.seq == target || late.deferred.creates(target)))
            }
            _ => self.late.iter_mut().find(|late| late.seq == target || late.deferred.creates(target)),
        };
        late.map(|late| &mut late.deferred)
    }
}
