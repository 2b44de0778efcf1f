//! The ids of requests, sequences, prefix pins and queues, and the counter that allocates them.
//!
//! The header promises that sample i of a request has the id request + i. Only this file knows
//! that. All other code converts between the ids with the functions below.

use std::fmt::{Display, Formatter, Result};

use serde::{Deserialize, Serialize};

/// Defines the type of an id. Journals contain the bare number.
macro_rules! id_type {
    ($(#[$attribute:meta])* $name:ident) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
        #[serde(transparent)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// Creates the id from its number in the C API.
            #[inline]
            pub const fn from_raw(raw: u64) -> $name {
                $name(raw)
            }

            /// Returns the number of the id in the C API.
            #[inline]
            pub const fn get(self) -> u64 {
                self.0
            }
        }

        impl Display for $name {
            fn fmt(&self, f: &mut Formatter) -> Result {
                self.0.fmt(f)
            }
        }
    };
}

id_type! {
    /// The id of a request. Ids are never reused. The default is the id of no request.
    #[derive(Default)]
    RequestId
}

id_type! {
    /// The id of a sequence. Ids are never reused. The default is the id of no sequence.
    #[derive(Default)]
    SeqId
}

id_type! {
    /// The id of a prefix pin. Ids are never reused.
    PinId
}

id_type! {
    /// The number of an output queue of an engine, in order of creation. The C API does not show it.
    #[derive(Default)]
    QueueId
}

impl RequestId {
    /// Returns the id of sample `sample`, or of the beam in slot `sample`. Counted from 0.
    #[inline]
    pub fn sequence(self, sample: u32) -> SeqId {
        SeqId(self.0 + u64::from(sample))
    }

    /// Returns the ids of the first `n` samples or beams.
    pub fn sequences(self, n: u32) -> impl DoubleEndedIterator<Item = SeqId> {
        (0..n).map(move |sample| self.sequence(sample))
    }

    /// Returns the sample index of a sequence, or `None` if the sequence cannot belong to this
    /// request. The caller compares the index with the number of samples.
    pub fn sample_of(self, seq: SeqId) -> Option<u32> {
        seq.0.checked_sub(self.0).and_then(|sample| sample.try_into().ok())
    }
}

impl SeqId {
    /// Returns the id of the request whose sample 0 is this sequence. Forks and imported sequences
    /// have a request of their own. A request with a larger id cannot have this sequence.
    pub fn own_request(self) -> RequestId {
        RequestId(self.0)
    }
}

impl PinId {
    /// Returns the id of the sequence that holds the blocks of the pin.
    pub fn sequence(self) -> SeqId {
        SeqId(self.0)
    }
}

impl QueueId {
    /// Returns the id of the next queue.
    pub fn next(self) -> QueueId {
        QueueId(self.0 + 1)
    }
}

/// The counter of an engine from which all its ids come, except those of queues. The first id is 1.
#[derive(Debug, Clone, Default)]
pub struct IdAllocator {
    last: u64,
}

impl IdAllocator {
    /// Allocates the ids of a request and of its `n` sequences.
    pub fn request(&mut self, n: u32) -> RequestId {
        let id = RequestId(self.last + 1);
        self.last += u64::from(n);
        id
    }

    /// Allocates the id of a fork or of an imported sequence.
    pub fn sequence(&mut self) -> SeqId {
        self.request(1).sequence(0)
    }

    /// Allocates the id of a prefix pin.
    pub fn pin(&mut self) -> PinId {
        PinId(self.request(1).0)
    }

    /// Continues after `seq`, which a replay takes from its journal.
    pub fn continue_after(&mut self, seq: SeqId) {
        self.last = seq.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_i_of_a_request_has_the_id_request_plus_i() {
        let request = RequestId::from_raw(7);
        assert_eq!([0, 1, 9].map(|sample| request.sequence(sample).get()), [7, 8, 16]);
        assert_eq!(request.sequences(3).map(SeqId::get).collect::<Vec<_>>(), [7, 8, 9]);
        assert_eq!(request.sequences(0).count(), 0);
    }

    #[test]
    fn the_sample_index_is_found_from_the_ids_of_a_sequence_and_its_request() {
        let request = RequestId::from_raw(7);
        for sample in [0, 1, u32::MAX] {
            assert_eq!(request.sample_of(request.sequence(sample)), Some(sample));
        }
        assert_eq!(request.sample_of(SeqId::from_raw(6)), None, "an older sequence");
        assert_eq!(request.sample_of(SeqId::from_raw(8 + u64::from(u32::MAX))), None, "no request has so many samples");
    }

    #[test]
    fn a_fork_is_sample_0_of_its_own_request() {
        let fork = SeqId::from_raw(12);
        assert_eq!(fork.own_request().sequence(0), fork);
    }

    #[test]
    fn allocated_ids_do_not_overlap() {
        let mut ids = IdAllocator::default();
        let (request, fork, pin, next) = (ids.request(4), ids.sequence(), ids.pin(), ids.request(1));
        assert_eq!(request.sequences(4).map(SeqId::get).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!((fork.get(), pin.sequence().get(), next.get()), (5, 6, 7));
    }

    #[test]
    fn a_replay_continues_after_the_last_recorded_id() {
        let mut ids = IdAllocator::default();
        ids.continue_after(SeqId::from_raw(20));
        assert_eq!(ids.sequence().get(), 21);
    }

    #[test]
    fn a_dropped_copy_of_the_allocator_uses_no_ids() {
        let ids = IdAllocator::default();
        assert_eq!(ids.clone().request(3), ids.clone().request(1));
    }

    #[test]
    fn the_serialized_form_of_an_id_is_the_bare_number() {
        let number = 300_u64;
        let (request, seq, pin) = (RequestId::from_raw(number), SeqId::from_raw(number), PinId::from_raw(number));
        let json = serde_json::to_string(&(request, seq, pin)).unwrap();
        assert_eq!(json, "[300,300,300]");
        assert_eq!(serde_json::from_str::<(RequestId, SeqId, PinId)>(&json).unwrap(), (request, seq, pin));
        let bytes = postcard::to_allocvec(&(request, seq, pin)).unwrap();
        assert_eq!(bytes, postcard::to_allocvec(&(number, number, number)).unwrap());
        assert_eq!(postcard::from_bytes::<(RequestId, SeqId, PinId)>(&bytes).unwrap(), (request, seq, pin));
    }

    #[test]
    fn an_id_is_displayed_as_its_number() {
        assert_eq!(format!("{} {} {:>3}", RequestId::from_raw(1), SeqId::from_raw(2), PinId::from_raw(3)), "1 2   3");
    }
}
