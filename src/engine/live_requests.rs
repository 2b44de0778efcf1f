//! The requests that the engine core knows, with all that ends with them.

use std::collections::BTreeMap;
use std::time::Duration;

use super::deadlines::Deadlines;
use super::sequence::Sequence;
use crate::error::{Error, Result};
use crate::generation::beam::Beams;
use crate::types::id_map::IdMap;
use crate::types::outputs::Output;
use crate::types::{PinId, RequestId, SeqId};

/// The sequences, searches, pins and deadlines of an engine.
#[derive(Default)]
pub struct LiveRequests {
    /// Sequences with outputs, each in memory of its own, so that no step moves all of them when
    /// the map grows. A beam search has one, for all its beams, with the id of sample 0.
    pub sequences: IdMap<SeqId, Box<Sequence>>,
    /// Beam searches by request. The beam in slot i has the id of sample i.
    pub beams: BTreeMap<RequestId, Box<Beams>>,
    /// Best-of groups by request.
    pub best_of: IdMap<RequestId, BestOfGroup>,
    pub pins: Vec<PinId>,
    pub deadlines: Deadlines,
}

/// A best-of group: samples of which the best are returned when all have ended.
pub struct BestOfGroup {
    pub returned: usize,
    /// Number of samples that have not ended.
    pub running: usize,
    pub outputs: Vec<Output>,
}

impl LiveRequests {
    /// Adds the deadline of a generation of the request.
    pub fn watch(&mut self, request: RequestId, deadline: Option<Duration>) -> Result<()> {
        let Some(deadline) = deadline else { return Ok(()) };
        if self.deadlines.has_many_stale(self.sequences.len()) {
            let live = self.sequences.values().filter_map(|sequence| Some((sequence.generation.deadline?, sequence.request)));
            self.deadlines.replace(live);
        }
        self.deadlines.add(deadline, request)
    }

    /// Returns the sequence that delivers the outputs of `seq`. `None` for a pin, which has no
    /// outputs.
    pub fn deliverer_of(&self, seq: SeqId) -> Option<&Sequence> {
        let sequence = self.sequences.get(&seq).or_else(|| self.sequences.get(&self.request_of_beam(seq)?.sequence(0)));
        sequence.map(|sequence| &**sequence)
    }

    /// As `deliverer_of`.
    pub fn deliverer_of_mut(&mut self, seq: SeqId) -> Option<&mut Sequence> {
        let deliverer = if self.sequences.contains_key(&seq) { seq } else { self.request_of_beam(seq)?.sequence(0) };
        self.sequences.get_mut(&deliverer).map(|sequence| &mut **sequence)
    }

    /// Returns a sequence for which a token is sampled.
    pub fn sampled(&mut self, seq: SeqId) -> Result<&mut Sequence> {
        self.sequences
            .get_mut(&seq)
            .map(|sequence| &mut **sequence)
            .ok_or_else(|| Error::internal("a sequence that the engine does not know was sampled"))
    }

    /// Returns the request of the beam `seq`, or `None` if `seq` is not a beam.
    pub fn request_of_beam(&self, seq: SeqId) -> Option<RequestId> {
        let (&request, beams) = self.beams.range(..=seq.own_request()).next_back()?;
        request.sample_of(seq).filter(|&slot| (slot as usize) < beams.width()).map(|_| request)
    }
}
