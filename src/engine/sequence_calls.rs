//! Operations of the host on sequences.

use std::time::Duration;

use super::command::{ForkedSequence, ImportedSequence};
use super::request::Prompt;
use super::sequence::Sequence;
use super::sequence_view::SequenceView;
use super::{Engine, LogitsHook};
use crate::error::{Error, Result, try_copy};
use crate::generation::sampler::branch_seed;
use crate::kv::BlockHash;
use crate::output::queue::Queue;
use crate::scheduler::NewGroup;
use crate::types::hex::Hex;
use crate::types::options::SamplingParams;
use crate::types::sequence_state::{Header, SequenceState};
use crate::types::{PinId, RequestId, SeqId};

/// The parameters of a fork.
#[derive(Clone, Default)]
pub struct Fork<'a> {
    /// Number of tokens that the children share with the parent. `None` selects all tokens at the
    /// time of the step.
    pub at: Option<usize>,
    /// Whether the children stay idle until they are resumed, even if the parent runs.
    pub idle: bool,
    /// Seed from which each child gets random numbers of its own. `None` selects those of the
    /// parent.
    pub seed: Option<u64>,
    /// Queue of the children. `None` selects the queue of the parent.
    pub queue: Option<&'a Queue>,
    /// User data of the children. `None` selects those of the parent.
    pub user_data: Option<u64>,
}

/// The parameters of the next generation of an idle sequence.
#[derive(Clone)]
pub struct Resume<'a> {
    /// Sampling parameters of the generation.
    pub sampling: SamplingParams,
    /// Whether the sequence stays idle again when it ends.
    pub keep: bool,
    /// Queue of the generation. `None` selects the previous one.
    pub queue: Option<&'a Queue>,
    /// User data. `None` selects the previous ones.
    pub user_data: Option<u64>,
    /// Whether the text of the output omits special tokens.
    pub skip_special: bool,
    /// Logits hook of the generation.
    pub hook: Option<LogitsHook>,
    /// Time after which the generation ends with the tokens it has.
    pub deadline: Option<Duration>,
}

/// The parameters that can change when an idle sequence continues with its previous ones.
#[derive(Clone, Default)]
pub struct Continue<'a> {
    /// Whether the sequence stays idle again when it ends.
    pub keep: bool,
    /// Queue. `None` selects the previous one.
    pub queue: Option<&'a Queue>,
    /// User data. `None` selects the previous ones.
    pub user_data: Option<u64>,
    /// Logits hook. `None` selects the previous one.
    pub hook: Option<LogitsHook>,
    /// Time after which the generation ends with the tokens it has.
    pub deadline: Option<Duration>,
}

impl Resume<'_> {
    /// Creates the parameters of a generation. The sequence stays idle when it ends.
    pub fn new(sampling: SamplingParams) -> Self {
        Resume { sampling, keep: true, queue: None, user_data: None, skip_special: true, hook: None, deadline: None }
    }
}

/// The state of a sequence after the last step and the calls since then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceInfo {
    /// Id of the request.
    pub request: RequestId,
    /// Index of the result within the request, from 0.
    pub index: u32,
    /// Number of tokens.
    pub len: usize,
    /// Whether it waits to be resumed or freed.
    pub idle: bool,
    /// Whether K and V come from another instruction path. The sequence works, but its results are
    /// not bit-identical.
    pub inexact: bool,
}

impl Engine {
    /// Creates `n` sequences that share the blocks of the parent. Each is a request whose id is
    /// that of the sequence.
    pub fn fork(&self, seq: SeqId, n: usize, how: &Fork) -> Result<Vec<SeqId>> {
        if n == 0 {
            return Err(Error::invalid("n is 0; must be at least 1"));
        }
        let max_children = self.info.memory.blocks;
        if n > max_children {
            return Err(Error::capacity(format!("too many children ({n}, the pool has {max_children} blocks); lower n")));
        }
        if let Some(queue) = how.queue {
            self.check_queue(queue)?;
        }
        let child = |i, id, view: &SequenceView| {
            let sender = how.queue.map_or(&view.sender, |queue| queue.sender()).clone();
            sender.check_open()?;
            let requested_at = self.shared.clock.now();
            Ok(ForkedSequence {
                id,
                seed: how.seed.map(|seed| branch_seed(seed, i)),
                user_data: how.user_data.unwrap_or(view.user_data),
                sender,
                requested_at,
            })
        };
        self.shared.table.fork(seq, how.at, how.idle, n, child)
    }

    /// Appends tokens. A running sequence continues after them.
    pub fn append(&self, seq: SeqId, tokens: Vec<u32>) -> Result<()> {
        self.check_tokens("appended", &tokens)?;
        self.shared.table.append(seq, tokens)
    }

    /// Truncates the sequence to its first `len` tokens. A running sequence continues from there.
    pub fn rewind(&self, seq: SeqId, len: usize) -> Result<()> {
        self.shared.table.rewind(seq, len)
    }

    /// Resumes an idle sequence with new parameters.
    pub fn resume(&self, seq: SeqId, mut how: Resume) -> Result<()> {
        self.check()?;
        self.prepare_sampling(&mut how.sampling)?;
        if how.sampling.prompt_logprobs.is_some() || how.sampling.echo {
            return Err(Error::invalid("prompt_logprobs and echo are not possible for a resumed sequence; clear both flags"));
        }
        if let Some(queue) = how.queue {
            self.check_queue(queue)?;
        }
        let view = self.shared.table.sequence(seq)?;
        let sender = how.queue.map_or(&view.sender, |queue| queue.sender()).clone();
        let user_data = how.user_data.unwrap_or(view.user_data);
        let mut generation = self.generation(how.sampling, sender, how.hook, user_data, how.skip_special)?;
        generation.deadline = self.deadline(generation.timing.requested_at, how.deadline)?;
        let seed = self.seed_of(seq);
        self.shared.table.resume(seq, how.keep, |view| {
            self.max_len(view.len, generation.sampling.params())?;
            generation.sampling.seed = generation.sampling.params().seed.unwrap_or(seed);
            Ok(generation)
        })
    }

    /// Continues an idle sequence with its previous parameters, counts and grammar.
    pub fn continue_sequence(&self, seq: SeqId, how: Continue) -> Result<()> {
        how.queue.map_or(Ok(()), |queue| self.check_queue(queue))?;
        let requested_at = self.shared.clock.now();
        let deadline = self.deadline(requested_at, how.deadline)?;
        let Continue { keep, queue, user_data, hook, .. } = how;
        self.shared.table.continue_sequence(seq, keep, queue.map(Queue::sender), user_data, hook, (requested_at, deadline))
    }

    /// Exports a sequence. Its state, or an error, follows as an output in `queue` (`None`: the
    /// queue of the sequence).
    pub fn export(&self, seq: SeqId, queue: Option<&Queue>) -> Result<()> {
        queue.map_or(Ok(()), |queue| self.check_queue(queue))?;
        self.shared.table.export(seq, queue.map(Queue::sender))
    }

    /// Imports a sequence that this or another process has exported. It is idle, and its outputs go
    /// to `queue`.
    pub fn import(&self, queue: &Queue, bytes: &[u8]) -> Result<SeqId> {
        self.check()?;
        self.check_queue(queue)?;
        let sequence_state = SequenceState::decode(bytes)?;
        self.check_state(&sequence_state.header, sequence_state.kv.len())?;
        let SequenceState { header, kv } = sequence_state;
        let mut generation = self.generation(header.params.try_clone()?, queue.sender().clone(), None, 0, header.skip_special)?;
        generation.sampling.seed = header.seed;
        let mut sequence = Sequence::restore(generation, &header, self.shared.text.as_deref())?;
        sequence.inexact = header.isa != self.info.isa_name();
        let recorded = self.journals.then(|| try_copy(bytes)).transpose()?;
        self.shared.table.import(Box::new(ImportedSequence { sequence, header, kv, recorded }))
    }

    fn check_state(&self, header: &Header, kv: usize) -> Result<()> {
        let memory = &self.info.memory;
        if header.model != self.info.fingerprint {
            let (theirs, ours) = (Hex(&header.model[..4]), Hex(&self.info.fingerprint[..4]));
            return Err(Error::invalid(format!(
                "the sequence state has another model ({theirs}..., this engine serves {ours}...); import it into an engine of that model"
            )));
        }
        if (&header.layout, header.block_size) != (&self.layout, memory.block_size) {
            return Err(Error::invalid(format!(
                "the sequence state has other blocks ({} tokens as {:?}, this engine has blocks of {} as {:?}); use the same block_size and kv_dtype",
                header.block_size, header.layout, memory.block_size, self.layout
            )));
        }
        self.check_tokens("imported", &header.tokens)?;
        let len = header.tokens.len();
        if len.max(header.max_len) > memory.max_model_len {
            return Err(Error::invalid(format!(
                "the sequence state is too long ({len} tokens of up to {}, max_model_len is {}); raise max_model_len",
                header.max_len, memory.max_model_len
            )));
        }
        let expected = self.info.paging.visible_blocks(header.computed) * self.external.format.block_bytes();
        if kv != expected {
            return Err(Error::invalid(format!("the sequence state is damaged: it has {kv} bytes of K and V instead of {expected}")));
        }
        self.check_sampling(&header.params)
    }

    /// Frees a sequence in any state. A running sequence ends with `Abort`.
    pub fn free(&self, seq: SeqId) -> Result<()> {
        self.shared.table.free(seq)
    }

    /// Returns the state of a sequence.
    pub fn sequence(&self, seq: SeqId) -> Result<SequenceInfo> {
        let view = self.shared.table.sequence(seq)?;
        Ok(SequenceInfo { request: view.request, index: view.index, len: view.len, idle: view.idle, inexact: view.inexact })
    }

    /// Computes a prompt and keeps its blocks until it is unpinned or `time` has passed. If a
    /// sequence cannot continue otherwise, the pin with the lowest priority is removed.
    pub fn pin(&self, prompt: Prompt, add_special: bool, salt: &[u8], priority: u32, time: Option<Duration>) -> Result<PinId> {
        self.check()?;
        if !self.keeps_prefixes {
            return Err(Error::unsupported(
                "the engine has no prefix cache, so prompts cannot be pinned; create it without PLLM_ENGINE_NO_PREFIX_CACHE",
            ));
        }
        let tokens = self.prompt_tokens(prompt, add_special, None)?;
        self.max_len(tokens.len(), &SamplingParams::default())?;
        let until = time.and_then(|time| self.shared.clock.now().checked_add(time));
        self.pin_tokens(tokens, priority, try_copy(salt)?, until)
    }

    pub(super) fn pin_tokens(&self, tokens: Vec<u32>, priority: u32, salt: Vec<u8>, until: Option<Duration>) -> Result<PinId> {
        let root = BlockHash::root(&self.info.fingerprint, &salt);
        let group = NewGroup::pin(tokens, root).prepare(&self.info.paging)?;
        self.shared.table.pin(Box::new(group), priority, salt, until)
    }

    /// Removes a pin.
    pub fn unpin(&self, pin: PinId) -> Result<()> {
        self.shared.table.unpin(pin)
    }
}
