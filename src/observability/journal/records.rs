//! The records of a journal.

use std::borrow::Cow;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Code, Error, Result};
use crate::types::hex::Hex;
use crate::types::kv_store::LookupProgress;
use crate::types::options::{BeamParams, EngineOptions, SamplingParams};
use crate::types::{PinId, QueueId, RequestId, SeqId};

pub const MAGIC: &[u8; 8] = b"PLLMJRNL";
/// Version of the format. Release 0.3.0 began version 2. Version 3 has the full queues of a step
/// instead of the groups that were not ready, and the finished transfers. Version 4 has the late
/// masks. Version 5 has the blocks that a KV store returned. Version 6 has the transfers of the
/// swap file. Version 7 has the progress of prefills. Version 8 has lookups that wait for blocks.
pub const VERSION: u32 = 8;

/// The engine that wrote the journal. The header is JSON, so that other versions can read it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Header {
    /// Version of the library.
    pub library: String,
    pub options: EngineOptions,
    /// Fingerprint of the model.
    pub model: [u8; 32],
    /// Instruction path. Empty for an executor without one.
    pub isa: String,
    pub threads: usize,
    /// Storage layout of K and V.
    pub layout: String,
    /// Maximum number of blocks of the pool, and bytes per block.
    pub blocks: usize,
    pub block_bytes: u64,
    pub block_size: usize,
    pub max_model_len: usize,
}

impl Header {
    /// Checks whether the engine with the header `here` computes the same as the recorded one.
    pub fn check(&self, here: &Header) -> Result<()> {
        if self.model != here.model {
            return Err(Error::invalid(format!(
                "the journal has another model ({}..., this is {}...); pass the directory of the model that it was written with",
                Hex(&self.model[..4]),
                Hex(&here.model[..4])
            )));
        }
        if self.isa != here.isa {
            return Err(Error::unsupported(format!(
                "the journal was written on another instruction path ({:?}, this engine computes on {:?}); replay it on a \
                 machine that has the first",
                self.isa, here.isa
            )));
        }
        let kv = |header: &Header| (header.blocks, header.block_size, header.max_model_len, header.layout.clone());
        if kv(self) != kv(here) {
            return Err(Error::invalid(format!(
                "the journal has another KV cache (blocks, block_size, max_model_len, layout: {:?}, this engine: {:?}); use the same options",
                kv(self),
                kv(here)
            )));
        }
        Ok(())
    }
}

/// A record of a journal.
#[derive(Serialize, Deserialize)]
pub enum Record {
    Command(RecordedCommand<'static>),
    End(RecordedEnd),
    /// A step. The commands and ended sequences since the previous step belong to it.
    Step(Box<Step>),
    /// The engine was freed.
    Closed,
    /// Blocks that a KV store returned. They belong to the next step.
    Lookup(LookupProgress),
}

/// The inputs of a step except its commands, and the digest of its outputs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Number of the step, from 1. Steps that are not written do not count.
    pub number: u64,
    pub now: Duration,
    /// Queues whose requests paused, in ascending order.
    pub full_queues: Vec<QueueId>,
    /// Transfers that other threads had completed.
    pub finished_transfers: Vec<u64>,
    /// Reads and writes of the swap file that had ended, and whether they succeeded.
    pub disk_transfers: Vec<(u64, bool)>,
    /// Number of bytes that the KV store could take.
    pub store_room: u64,
    /// Masks for which the step did not wait, and earlier ones that had been computed.
    pub late_masks: Vec<u64>,
    pub finished_masks: Vec<u64>,
    /// Failed launches of plans, and waits for launched steps whose results could not be used.
    pub failed_launches: Vec<Failure>,
    pub failed_waits: Vec<Failure>,
    pub resized: Vec<Resized>,
    /// Numbers of the failed transfers between the tiers since the last step, from 1.
    pub failed_moves: Vec<u32>,
    /// Failed transfers of K and V for exports and imports.
    pub failed_exchanges: Vec<Failure>,
    /// Costs of swapping and recomputation as the bits of seconds, if they were set.
    pub costs: Option<(u64, u64)>,
    /// Digest of all outputs of the step, independent of their order.
    pub digest: u64,
}

/// A resize of the pool, or a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Resized {
    pub blocks: usize,
    /// Whether it happened before the step began.
    pub between: bool,
    pub succeeded: bool,
}

/// A failed attempt to compute a plan, to export or to import.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// Number of the attempt in the step, from 1.
    pub number: u32,
    pub code: i32,
    pub message: String,
}

impl Failure {
    pub fn new(number: u32, error: &Error) -> Failure {
        Failure { number, code: error.code() as i32, message: error.message().into() }
    }

    pub fn error(&self) -> Error {
        Error::new(Code::from_number(self.code).unwrap_or(Code::Internal), self.message.clone())
    }
}

/// The end of a generation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedEnd {
    pub request: RequestId,
    pub sequence: SeqId,
    pub finish: Cow<'static, str>,
    pub generated: u64,
    pub score: u64,
    /// Digest of all outputs of the generation.
    pub digest: [u8; 32],
}

/// A command of the host, in the form in which it is repeated. Large contents are borrowed when a
/// command is recorded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum RecordedCommand<'a> {
    Add {
        id: RequestId,
        at: Duration,
        queue: QueueId,
        request: Cow<'a, Box<RecordedRequest>>,
    },
    Abort {
        request: RequestId,
    },
    End {
        seq: SeqId,
    },
    Fork {
        parent: SeqId,
        len: Option<usize>,
        children: Vec<RecordedFork>,
        idle: bool,
    },
    Append {
        seq: SeqId,
        tokens: Cow<'a, [u32]>,
    },
    Rewind {
        seq: SeqId,
        len: usize,
    },
    Resume {
        seq: SeqId,
        at: Duration,
        queue: QueueId,
        resume: Box<RecordedResume<'a>>,
    },
    Continue {
        seq: SeqId,
        at: Duration,
        queue: QueueId,
        deadline: Option<Duration>,
        keep: bool,
        user_data: u64,
        hooked: bool,
    },
    Free {
        seq: SeqId,
    },
    Export {
        seq: SeqId,
        queue: QueueId,
    },
    Import {
        id: SeqId,
        at: Duration,
        queue: QueueId,
        sequence_state: Cow<'a, [u8]>,
    },
    Pin {
        id: PinId,
        tokens: Cow<'a, [u32]>,
        priority: u32,
        salt: Cow<'a, [u8]>,
    },
    Unpin {
        id: PinId,
    },
    /// A command that could not be recorded.
    Lost {
        why: String,
    },
}

/// A request in the form that a journal stores: with its prompt as tokens, and without its hook.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RecordedRequest {
    pub prompt: Vec<u32>,
    pub sampling: SamplingParams,
    pub n: u32,
    pub best_of: Option<u32>,
    pub beam: Option<BeamParams>,
    pub keep: bool,
    pub salt: Vec<u8>,
    /// Whether a logits hook edited its logits. The hook cannot be recorded.
    pub hooked: bool,
    pub user_data: u64,
    pub priority: i32,
    pub deadline: Option<Duration>,
    pub store_wait: Duration,
    pub skip_special: bool,
}

/// The parameters of the next generation of an idle sequence.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RecordedResume<'a> {
    pub sampling: Cow<'a, SamplingParams>,
    pub keep: bool,
    pub hooked: bool,
    pub user_data: u64,
    pub deadline: Option<Duration>,
    pub skip_special: bool,
}

/// A child of a fork.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RecordedFork {
    pub id: SeqId,
    pub seed: Option<u64>,
    pub user_data: u64,
    pub at: Duration,
    pub queue: QueueId,
}
