//! Replay: runs the steps of a journal again and compares their outputs.

use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::recording::Recording;
use super::replayed::Replayed;
use crate::engine::clock::Clock;
use crate::engine::command::{Command, ForkedSequence};
use crate::engine::request::{Prompt, Request};
use crate::engine::sequence_calls::{Continue, Resume};
use crate::engine::{Engine, EngineParts, ModelInfo};
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::observability::journal::reader::{Ending, JournalFile, Recorded};
use crate::observability::journal::records::{Header, RecordedCommand, RecordedEnd, RecordedFork, RecordedRequest, Step};
use crate::output::queue::Queue;
use crate::text::Text;
use crate::types::hex::Hex;
use crate::types::options::{EngineOptions, Isa};
use crate::types::{QueueId, SeqId};

/// The result of a replay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    pub steps: u64,
    pub requests: u64,
    /// Number of sequences that ended and were compared with the journal.
    pub sequences: u64,
    pub tokens: u64,
    /// The first difference. `None` if all outputs were bit-identical.
    pub difference: Option<Difference>,
    /// First sequences of the requests with a logits hook, and the sequences that were resumed with
    /// one. Hooks are not in the journal, so a difference after the first of them proves nothing.
    pub hooked: Vec<SeqId>,
    /// End of the journal. `None` if the replay stopped before it.
    pub ending: Option<Ending>,
}

/// The first difference of a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    pub step: u64,
    pub what: String,
}

/// A clock that shows the times of the journal.
#[derive(Default)]
struct Written(AtomicU64);

impl Written {
    fn set(&self, now: Duration) {
        self.0.store(now.as_nanos() as u64, SeqCst);
    }
}

impl Clock for Written {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(SeqCst))
    }
}

/// A replay of a journal on an engine of its own.
pub struct Replay {
    engine: Engine,
    /// Queues that stand for those of the host. They are never full.
    queues: HashMap<QueueId, Queue>,
    file: JournalFile,
    clock: Arc<Written>,
    /// The recorded step that is repeated, and the record of its repetition.
    replayed: Replayed,
    recording: Recording,
    summary: Summary,
}

impl Replay {
    /// Loads the model with which the journal was written.
    pub fn load(file: JournalFile, model_dir: &Path) -> Result<Replay> {
        let options = EngineOptions { model_dir: model_dir.into(), ..file.options()? };
        let parts = EngineParts::load_on_device(&options, &mut |_, _| true)?;
        parts.create(|info, text, executor| Replay::with_executor(file, info, text, executor))
    }

    /// Creates a replay with any executor.
    pub fn with_executor(file: JournalFile, info: ModelInfo, text: Option<Text>, executor: Box<dyn Executor>) -> Result<Replay> {
        file.header.check(&super::header(&file.header.options, &info, &executor.layout()))?;
        let clock = Arc::new(Written::default());
        let (options, replayed) = (file.options()?, Replayed::default());
        let recording = Recording::new(options.max_seqs)?;
        let (repeat, record) = (replayed.clone(), recording.clone());
        let decorate = |inputs, executor| record.around_replay(inputs, executor, repeat);
        let engine = Engine::build(&options, info, text, executor, clock.clone(), Some(Box::new(decorate)))?;
        engine.shared.table.keep_order();
        Ok(Replay { engine, queues: HashMap::new(), file, clock, replayed, recording, summary: Summary::default() })
    }

    /// Runs all steps, or until the first difference.
    pub fn run(mut self) -> Result<Summary> {
        while let Some(recorded) = self.file.next_step() {
            if let Err(what) = self.step(recorded) {
                self.summary.difference = Some(Difference { step: self.summary.steps, what });
                break;
            }
        }
        self.summary.ending = self.file.ending().cloned();
        Ok(self.summary)
    }

    fn step(&mut self, recorded: Recorded) -> std::result::Result<(), String> {
        let Recorded { commands, ended, lookups, step } = recorded;
        self.summary.steps = step.number;
        self.replayed.set_step(step.clone(), lookups);
        for _ in step.resized.iter().filter(|resized| resized.between) {
            self.engine.core.lock().unwrap_or_else(PoisonError::into_inner).resize_pool(false);
        }
        for command in commands {
            self.repeat(command).map_err(|error| format!("a recorded command cannot be repeated: {error}"))?;
        }
        self.clock.set(step.now);
        let result = self.engine.step();
        // The outputs are compared when they are created, so the queues are only emptied.
        for queue in self.queues.values().chain([&**self.engine.queue()]) {
            let _ = queue.poll(Some(Duration::ZERO));
        }
        self.compare(&step, &ended).map_err(|what| match result {
            Err(error) if step.failed_launches.is_empty() && step.failed_waits.is_empty() => format!("{what}; the step failed: {error}"),
            _ => what,
        })
    }

    /// Returns the queue that stands for a queue of the host.
    fn queue(&mut self, id: QueueId) -> Result<&Queue> {
        if !self.queues.contains_key(&id) {
            let table = &self.engine.shared.table;
            self.queues.insert(id, Queue::new(table.replay_sender(id)?, table));
        }
        Ok(&self.queues[&id])
    }

    fn compare(&mut self, step: &Step, ended: &[RecordedEnd]) -> std::result::Result<(), String> {
        let (here, ends) = {
            let recorder = self.recording.lock();
            let (step, ended) = recorder.last_step();
            (step.clone(), ended.to_vec())
        };
        self.summary.sequences += ended.len() as u64;
        self.summary.tokens += ended.iter().map(|ended| ended.generated).sum::<u64>();
        let name = |ended: Option<&RecordedEnd>| match ended {
            Some(RecordedEnd { request, sequence, finish, generated, digest, .. }) => {
                format!(
                    "sequence {sequence} of request {request} ends here by {finish} after {generated} tokens, digest {}",
                    Hex(&digest[..8])
                )
            }
            None => "no further sequence ends here".into(),
        };
        for place in 0..ended.len().max(ends.len()) {
            if ended.get(place) != ends.get(place) {
                return Err(format!("recorded: {}; replayed: {}", name(ended.get(place)), name(ends.get(place))));
            }
        }
        let outside = |step: &Step| Step { number: 0, digest: 0, ..step.clone() };
        if outside(&here) != outside(step) {
            return Err(format!("recorded: {:?}; replayed: {:?}", outside(step), outside(&here)));
        }
        if here.digest != step.digest {
            return Err("the outputs of the sequences that continue differ".into());
        }
        Ok(())
    }

    fn repeat(&mut self, command: RecordedCommand) -> Result<()> {
        match command {
            RecordedCommand::Add { id, at, queue, request } => {
                self.summary.requests += 1;
                self.clock.set(at);
                self.restore_hook(id.sequence(0), request.hooked);
                self.queue(queue)?;
                check_id(id, self.engine.add_request_to(&self.queues[&queue], request_of(*request.into_owned()))?)
            }
            RecordedCommand::Resume { seq, at, queue, resume: generation } => {
                self.clock.set(at);
                self.restore_hook(seq, generation.hooked);
                let sender = self.queue(queue)?.sender().clone();
                self.engine.shared.table.replay_idle(seq, &sender)?;
                let (keep, user_data, skip_special) = (generation.keep, Some(generation.user_data), generation.skip_special);
                let (queue, deadline) = (self.queues.get(&queue), generation.deadline);
                let resume = Resume { keep, queue, user_data, skip_special, deadline, ..Resume::new(generation.sampling.into_owned()) };
                self.engine.resume(seq, resume)
            }
            RecordedCommand::Continue { seq, at, queue, deadline, keep, user_data, hooked } => {
                self.clock.set(at);
                self.restore_hook(seq, hooked);
                let sender = self.queue(queue)?.sender().clone();
                self.engine.shared.table.replay_idle(seq, &sender)?;
                let (queue, user_data) = (self.queues.get(&queue), Some(user_data));
                self.engine.continue_sequence(seq, Continue { keep, queue, user_data, deadline, ..Continue::default() })
            }
            RecordedCommand::Import { id, at, queue, sequence_state } => {
                self.clock.set(at);
                self.queue(queue)?;
                check_id(id, self.engine.import(&self.queues[&queue], &sequence_state)?)
            }
            // A pin that expires has a command of its own.
            RecordedCommand::Pin { id, tokens, priority, salt } => {
                check_id(id, self.engine.pin_tokens(tokens.into_owned(), priority, salt.into_owned(), None)?)
            }
            RecordedCommand::Fork { parent, len, children, idle } => {
                let mut forked = Vec::new();
                for RecordedFork { id, seed, user_data, at, queue } in children {
                    let sender = self.queue(queue)?.sender().clone();
                    forked.push(ForkedSequence { id, seed, user_data, sender, requested_at: at });
                }
                self.engine.shared.table.replay_fork(parent, len, forked, idle)
            }
            RecordedCommand::Export { seq, queue } => {
                let sender = self.queue(queue)?.sender().clone();
                self.engine.shared.table.replay_export(seq, &sender)
            }
            RecordedCommand::Unpin { id } => {
                self.engine.shared.table.remove_pin(id);
                self.replay(Command::Unpin { id })
            }
            RecordedCommand::Abort { request } => self.replay(Command::Abort { request }),
            RecordedCommand::End { seq } => self.replay(Command::End { seq }),
            RecordedCommand::Append { seq, tokens } => self.replay(Command::Append { seq, tokens: tokens.into_owned() }),
            RecordedCommand::Rewind { seq, len } => self.replay(Command::Rewind { seq, len }),
            RecordedCommand::Free { seq } => self.replay(Command::Free { seq }),
            RecordedCommand::Lost { why } => Err(Error::unsupported(format!("the command is not in the journal: {why}"))),
        }
    }

    fn replay(&self, command: Command) -> Result<()> {
        self.engine.shared.table.replay(command)
    }

    fn restore_hook(&mut self, seq: SeqId, hooked: bool) {
        self.summary.hooked.extend(hooked.then_some(seq));
    }
}

impl JournalFile {
    /// Returns the options of the recorded engine, without those that concern only its host.
    fn options(&self) -> Result<EngineOptions> {
        let Header { isa, threads, blocks, block_bytes, max_model_len, .. } = &self.header;
        let path = Isa::ALL.into_iter().find(|path| path.name() == isa);
        if let Some(path) = path.filter(|path| !path.is_present()) {
            let here: Vec<_> = Isa::ALL.into_iter().filter(|isa| isa.is_present()).map(Isa::name).collect();
            return Err(Error::unsupported(format!(
                "the journal was written on another instruction path ({:?}, this machine: {here:?}); replay it on a machine that has it",
                path.name()
            )));
        }
        Ok(EngineOptions {
            isa: path,
            threads: Some(*threads),
            kv_bytes: Some(*blocks as u64 * block_bytes),
            memory_fraction: None,
            max_model_len: Some(*max_model_len),
            queue_capacity: usize::MAX,
            max_waiting_requests: None,
            max_waiting_tokens: None,
            ..self.header.options.clone()
        })
    }
}

/// Builds the request from its record.
fn request_of(recorded: RecordedRequest) -> Request {
    let RecordedRequest {
        prompt,
        sampling,
        n,
        best_of,
        beam,
        keep,
        salt,
        hooked: _,
        user_data,
        priority,
        deadline,
        store_wait,
        skip_special,
    } = recorded;
    Request {
        n,
        best_of,
        beam,
        keep,
        salt,
        user_data,
        priority,
        deadline,
        store_wait,
        skip_special,
        ..Request::new(Prompt::Tokens(prompt), sampling)
    }
}

fn check_id<T: PartialEq + Display>(recorded: T, replayed: T) -> Result<()> {
    match recorded == replayed {
        true => Ok(()),
        false => Err(Error::internal(format!("the id was {recorded} and is {replayed}"))),
    }
}
