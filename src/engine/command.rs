//! Commands: what calls of the host change at the beginning of the next step.

use std::sync::Arc;
use std::time::Duration;

use super::LogitsHook;
use super::request::PreparedRequest;
use super::sequence::{Generation, Sequence};
use super::wait_queue::Ticket;
use crate::output::queue::OutputSender;
use crate::scheduler::PreparedGroup;
use crate::types::outputs::Output;
use crate::types::sequence_state::Header;
use crate::types::{PinId, RequestId, SeqId};

/// A command that the next step applies.
pub enum Command {
    Add {
        id: RequestId,
        prepared: Box<PreparedRequest>,
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
        children: Vec<ForkedSequence>,
        idle: bool,
    },
    Append {
        seq: SeqId,
        tokens: Vec<u32>,
    },
    Rewind {
        seq: SeqId,
        len: usize,
    },
    Resume {
        seq: SeqId,
        keep: bool,
        generation: Box<Generation>,
        pending: Box<PendingOutput>,
    },
    Free {
        seq: SeqId,
    },
    Continue {
        seq: SeqId,
        keep: bool,
        hook: Option<LogitsHook>,
        deadline: Option<Duration>,
        pending: Box<PendingOutput>,
        requested_at: Duration,
    },
    Export {
        seq: SeqId,
        pending: Box<PendingOutput>,
    },
    Import {
        id: SeqId,
        imported: Box<ImportedSequence>,
    },
    Pin {
        id: PinId,
        group: Box<PreparedGroup>,
        priority: u32,
        salt: Vec<u8>,
    },
    Unpin {
        id: PinId,
    },
}

impl Command {
    /// Returns the sequence that must exist before the command. `None` if it needs none.
    pub fn target(&self) -> Option<SeqId> {
        match *self {
            Command::Abort { request } => Some(request.sequence(0)),
            Command::Fork { parent, .. } => Some(parent),
            Command::End { seq }
            | Command::Append { seq, .. }
            | Command::Rewind { seq, .. }
            | Command::Resume { seq, .. }
            | Command::Free { seq }
            | Command::Continue { seq, .. }
            | Command::Export { seq, .. } => Some(seq),
            Command::Add { .. } | Command::Import { .. } | Command::Pin { .. } | Command::Unpin { .. } => None,
        }
    }
}

/// A sequence that a fork creates.
pub struct ForkedSequence {
    pub id: SeqId,
    /// Seed of the child. `None` selects the random numbers of the parent.
    pub seed: Option<u64>,
    pub user_data: u64,
    pub sender: Arc<OutputSender>,
    /// Time of the call.
    pub requested_at: Duration,
}

/// A sequence that an import creates. The calling thread has decoded its state.
pub struct ImportedSequence {
    pub sequence: Box<Sequence>,
    pub header: Header<'static>,
    pub kv: Vec<u8>,
    /// The bytes of the call, if a journal records them.
    pub recorded: Option<Vec<u8>>,
}

/// A generation whose last output is pending. Its sequence may be missing when it ends, because the
/// sequence could not be created, or because the stepping thread has failed.
#[derive(Clone)]
pub struct PendingOutput {
    /// Receiver of the last output.
    pub sender: Arc<OutputSender>,
    /// The last output if the generation ends before it starts.
    pub last: Output,
    /// Ticket in the waiting queue. `None` after its first step, and for samples that start with
    /// another one.
    pub ticket: Option<Ticket>,
}
