//! What stands in a journal.

use std::borrow::Cow;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::ModelInfo;
use crate::engine::registry::Command;
use crate::engine::request::Request;
use crate::error::{Code, Error, Result, try_copy};
use crate::options::{BeamParams, EngineOptions, SamplingParams};

pub const MAGIC: &[u8; 8] = b"PLLMJRNL";
pub const VERSION: u32 = 1;

/// With what kind of engine it was written. In JSON, so that other versions can say at least this much of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Header {
    /// The library's version.
    pub library: String,
    pub options: EngineOptions,
    /// The model's fingerprint.
    pub model: [u8; 32],
    /// The instruction path; empty for a runner without one.
    pub isa: String,
    pub threads: usize,
    /// How K and V are stored.
    pub layout: String,
    /// The most that the pool could have, and the bytes of one.
    pub blocks: usize,
    pub block_bytes: u64,
    pub block_size: usize,
    pub max_model_len: usize,
}

impl Header {
    pub fn new(options: &EngineOptions, info: &ModelInfo, layout: &str) -> Header {
        Header {
            library: env!("CARGO_PKG_VERSION").into(),
            options: options.clone(),
            model: info.fingerprint,
            isa: info.isa_name().into(),
            threads: info.threads,
            layout: layout.into(),
            blocks: info.memory.most_blocks,
            block_bytes: info.memory.block_bytes,
            block_size: info.memory.block_size,
            max_model_len: info.memory.max_model_len,
        }
    }

    /// Ok where an engine of this kind computes what the recorded one did.
    pub fn check(&self, info: &ModelInfo, layout: &str) -> Result<()> {
        let here = Header::new(&self.options, info, layout);
        let hex = |hash: &[u8; 32]| hash[..4].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        if self.model != here.model {
            return Err(Error::invalid(format!(
                "the journal is of model {}..., this is {}...: name the directory of the one it was written with",
                hex(&self.model),
                hex(&here.model)
            )));
        }
        if self.isa != here.isa {
            return Err(Error::unsupported(format!(
                "the journal was written on the instruction path {:?}, this engine computes on {:?}, whose bits are others: replay it \
                 on a machine that has the first",
                self.isa, here.isa
            )));
        }
        let kv = |header: &Header| (header.blocks, header.block_size, header.max_model_len, header.layout.clone());
        if kv(self) != kv(&here) {
            return Err(Error::invalid(format!(
                "the journal is of a KV cache of (blocks, block size, max_model_len, layout) {:?}, this engine's is {:?}: make it alike",
                kv(self),
                kv(&here)
            )));
        }
        Ok(())
    }
}

#[derive(Serialize, Deserialize)]
pub enum Record {
    Asked(Asked<'static>),
    Ended(Ended),
    /// What was asked and what ended since the one before belongs to it.
    Step(Step),
    /// The engine was freed.
    Closed,
}

/// What a step learned from outside, commands aside, and what tells whether it said the same.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// From 1; those in which nothing happened do not count.
    pub number: u64,
    pub now: Duration,
    /// Which of the groups that were asked for, in order, were not ready since their queue was full.
    pub refused: Vec<u32>,
    pub faults: Vec<Fault>,
    pub resized: Vec<Resized>,
    /// Moves between the tiers that failed.
    pub stuck: Vec<Stuck>,
    /// Sequences whose K and V the device did not give, or take.
    pub unmoved: Vec<Fault>,
    /// What moving and computing cost, in the bits of seconds, where the scheduler was told.
    pub costs: Option<(u64, u64)>,
    /// Over all outputs of the step, in any order.
    pub said: u64,
}

/// The pool was made larger or smaller, or should have been.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Resized {
    pub blocks: usize,
    /// Before the step began.
    pub between: bool,
    pub worked: bool,
}

/// Blocks could not be moved to the host tier, or back.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Stuck {
    /// Which moves since the last step, from 1.
    pub number: u32,
    pub out: bool,
    pub back: bool,
}

/// An attempt to compute a plan failed, or one to export or import.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// Which of the step's, from 1.
    pub attempt: u32,
    pub code: i32,
    pub message: String,
}

impl Fault {
    pub fn new(attempt: u32, error: &Error) -> Fault {
        Fault { attempt, code: error.code() as i32, message: error.message().into() }
    }

    pub fn error(&self) -> Error {
        Error::new(Code::from_number(self.code).unwrap_or(Code::Internal), self.message.clone())
    }
}

/// A sequence had its last output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    pub request: u64,
    pub sequence: u64,
    pub finish: Cow<'static, str>,
    pub generated: u64,
    pub score: u64,
    /// Over all that was said of it.
    pub digest: [u8; 32],
}

/// What a host asked for, as it is asked again. What is large is borrowed where it is written down.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Asked<'a> {
    Add {
        id: u64,
        at: Duration,
        request: Cow<'a, Box<Wanted>>,
    },
    Abort {
        request: u64,
    },
    End {
        seq: u64,
    },
    Fork {
        parent: u64,
        len: Option<usize>,
        children: Vec<Forked>,
        idle: bool,
    },
    Append {
        seq: u64,
        tokens: Cow<'a, [u32]>,
    },
    Rewind {
        seq: u64,
        len: usize,
    },
    Resume {
        seq: u64,
        at: Duration,
        turn: Box<WantedTurn<'a>>,
    },
    GoOn {
        seq: u64,
        at: Duration,
        deadline: Option<Duration>,
        keep: bool,
        user_data: u64,
        hooked: bool,
    },
    Free {
        seq: u64,
    },
    Export {
        seq: u64,
    },
    Import {
        id: u64,
        at: Duration,
        blob: Vec<u8>,
    },
    Pin {
        id: u64,
        tokens: Cow<'a, [u32]>,
        priority: u32,
        salt: Cow<'a, [u8]>,
        until: Option<Duration>,
    },
    Unpin {
        id: u64,
    },
    /// A command that could not be written down.
    Lost {
        why: String,
    },
}

/// A request, its prompt as tokens.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Wanted {
    pub prompt: Vec<u32>,
    pub sampling: SamplingParams,
    pub n: u32,
    pub best_of: Option<u32>,
    pub beam: Option<BeamParams>,
    pub keep: bool,
    pub salt: Vec<u8>,
    /// The host edited its logits, which cannot be written down.
    pub hooked: bool,
    pub user_data: u64,
    pub priority: i32,
    pub deadline: Option<Duration>,
    pub skip_special: bool,
}

/// A turn of an idle sequence.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WantedTurn<'a> {
    pub sampling: Cow<'a, SamplingParams>,
    pub keep: bool,
    pub hooked: bool,
    pub user_data: u64,
    pub deadline: Option<Duration>,
    pub skip_special: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Forked {
    pub id: u64,
    pub seed: Option<u64>,
    pub user_data: u64,
    pub at: Duration,
}

impl Wanted {
    /// But for the tokens, which are known later; what is left out here becomes part of them.
    pub fn of(request: &Request) -> Result<Wanted> {
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
            user_data,
            skip_special,
            prompt: _,
            truncate_prompt_tokens: _,
            add_special: _,
        } = request;
        Ok(Wanted {
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
            skip_special: *skip_special,
        })
    }
}

impl Asked<'_> {
    pub fn of(command: &Command) -> Asked<'_> {
        match command {
            Command::Add { id, work } => match &work.again {
                Some(wanted) => Asked::Add { id: *id, at: work.stream.timing.asked, request: Cow::Borrowed(wanted) },
                None => Asked::Lost { why: format!("request {id} was added before there was a journal") },
            },
            Command::Abort { request } => Asked::Abort { request: *request },
            Command::End { seq } => Asked::End { seq: *seq },
            Command::Fork { parent, len, children, idle } => {
                let mut forked = Vec::new();
                if forked.try_reserve_exact(children.len()).is_err() {
                    return Asked::Lost { why: format!("sequence {parent} was forked, and there was no memory to write it down") };
                }
                forked.extend(children.iter().map(|child| Forked {
                    id: child.id,
                    seed: child.seed,
                    user_data: child.user_data,
                    at: child.asked,
                }));
                Asked::Fork { parent: *parent, len: *len, children: forked, idle: *idle }
            }
            Command::Append { seq, tokens } => Asked::Append { seq: *seq, tokens: tokens.into() },
            Command::Rewind { seq, len } => Asked::Rewind { seq: *seq, len: *len },
            Command::Resume { seq, turn, .. } => {
                let (sampling, deadline) = (Cow::Borrowed(&turn.rules.params), turn.deadline.map(|at| at.saturating_sub(turn.asked)));
                let (keep, hooked, user_data, skip_special) = (turn.keep, turn.hook.is_some(), turn.user_data, turn.skip_special);
                Asked::Resume {
                    seq: *seq,
                    at: turn.asked,
                    turn: Box::new(WantedTurn { sampling, keep, hooked, user_data, deadline, skip_special }),
                }
            }
            Command::GoOn { seq, keep, hook, deadline, open, asked } => {
                let deadline = deadline.map(|at| at.saturating_sub(*asked));
                Asked::GoOn { seq: *seq, at: *asked, deadline, keep: *keep, user_data: open.last.user_data, hooked: hook.is_some() }
            }
            Command::Free { seq } => Asked::Free { seq: *seq },
            Command::Export { seq, .. } => Asked::Export { seq: *seq },
            Command::Import { id, turn, blob } => match blob.encode() {
                Ok(blob) => Asked::Import { id: *id, at: turn.asked, blob },
                Err(error) => Asked::Lost { why: format!("sequence {id} was imported: {error}") },
            },
            Command::Pin { id, newcomer, priority, salt, until } => {
                Asked::Pin { id: *id, tokens: newcomer.prompt().into(), priority: *priority, salt: salt.into(), until: *until }
            }
            Command::Unpin { id } => Asked::Unpin { id: *id },
        }
    }
}
