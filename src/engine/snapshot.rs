//! Snapshots of an engine to be displayed: which sequence has which blocks, and what the last steps
//! computed.
//!
//! The stepping thread only copies numbers, between two steps, into memory that the reader has
//! allocated. The reader formats them.

use std::cell::Cell;
use std::fmt::{self, Write};
use std::ptr::{self, null};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::observability::stats::{Stats, StepRecord};
use crate::scheduler::{MappedBlock, MappedSequence, PoolMap, SequenceState, TierMap};

/// Interval at which a reader tries to read an engine that is not stepping.
const RETRY_AFTER: Duration = Duration::from_millis(5);

/// The state of an engine between two steps.
#[derive(Debug)]
pub struct EngineSnapshot {
    /// Time on the clock of the engine.
    pub time: Duration,
    pub block_size: usize,
    pub layer_groups: usize,
    pub stats: Stats,
    pub map: PoolMap,
    pub steps: Vec<StepRecord>, // the oldest first
}

/// Hands an empty snapshot to the stepping thread and a filled one back.
#[derive(Default)]
pub struct SnapshotExchange {
    /// Whether a reader waits, so that a step without readers takes no lock.
    is_wanted: AtomicBool,
    /// Number of readers that read the core themselves.
    readers_of_core: AtomicUsize,
    /// Held by the one reader that waits.
    reader: Mutex<()>,
    snapshot: Mutex<Option<Exchanged>>,
    has_answer: Condvar,
}

struct Exchanged {
    snapshot: EngineSnapshot,
    is_filled: bool,
}

thread_local! {
    /// The exchange of the engine that this thread is stepping.
    static STEPPING: Cell<*const SnapshotExchange> = const { Cell::new(null()) };
}

/// Marks a thread as stepping until it is dropped.
pub struct Stepping(*const SnapshotExchange);

impl Drop for Stepping {
    fn drop(&mut self) {
        STEPPING.set(self.0);
    }
}

impl SnapshotExchange {
    /// Marks this thread as stepping. A hook that it calls must not wait for the end of its step.
    pub fn begin_step(&self) -> Stepping {
        Stepping(STEPPING.replace(self))
    }

    /// Returns whether a reader waits for the end of the step.
    pub fn is_wanted(&self) -> bool {
        self.is_wanted.load(SeqCst)
    }

    /// Returns whether a reader holds the core and releases it soon.
    pub fn reads_core(&self) -> bool {
        self.readers_of_core.load(SeqCst) > 0
    }

    /// Runs something that holds the core for a short time.
    pub fn with_core<T>(&self, act: impl FnOnce() -> T) -> T {
        self.readers_of_core.fetch_add(1, SeqCst);
        let _over = CoreReader(&self.readers_of_core);
        act()
    }

    /// Fills the snapshot of a waiting reader. Called by the stepping thread between two steps.
    pub fn answer(&self, fill: impl FnOnce(&mut EngineSnapshot)) {
        self.is_wanted.store(false, SeqCst);
        if let Some(exchanged) = &mut *lock(&self.snapshot) {
            fill(&mut exchanged.snapshot);
            exchanged.is_filled = true;
            self.has_answer.notify_all();
        }
    }

    /// Returns the filled snapshot. `try_fill` fills it if no thread steps, and otherwise wakes the
    /// stepping thread and returns false.
    pub fn read(
        &self,
        mut snapshot: EngineSnapshot,
        try_fill: impl Fn(&mut EngineSnapshot) -> Result<bool>,
        wake: impl Fn(),
    ) -> Result<EngineSnapshot> {
        if ptr::eq(STEPPING.get(), self) {
            return Err(Error::busy());
        }
        let _reader = lock(&self.reader);
        while !try_fill(&mut snapshot)? {
            let mut exchanged = lock(&self.snapshot);
            *exchanged = Some(Exchanged { snapshot, is_filled: false });
            self.is_wanted.store(true, SeqCst);
            wake();
            let is_missing = |exchanged: &mut Option<Exchanged>| exchanged.as_ref().is_some_and(|exchanged| !exchanged.is_filled);
            let waited = self.has_answer.wait_timeout_while(exchanged, RETRY_AFTER, is_missing);
            (exchanged, _) = waited.unwrap_or_else(PoisonError::into_inner);
            self.is_wanted.store(false, SeqCst);
            let answer = exchanged.take().expect("only the reader takes the snapshot");
            snapshot = answer.snapshot;
            if answer.is_filled {
                break;
            }
        }
        Ok(snapshot)
    }
}

/// Ends the access of a reader to the core, also by a panic.
struct CoreReader<'a>(&'a AtomicUsize);

impl Drop for CoreReader<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Formats the snapshot as JSON.
impl fmt::Display for EngineSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let EngineSnapshot { time, block_size, layer_groups, stats, map, steps } = self;
        let seconds = time.as_secs_f64();
        write!(f, r#"{{"time":{seconds:.6},"block_size":{block_size},"layer_groups":{layer_groups},"counts":{{"#)?;
        let Stats { waiting, running, paused, idle, swapped, steps: computed_steps, generated_tokens, .. } = stats;
        write!(f, r#""waiting":{waiting},"running":{running},"paused":{paused},"idle":{idle},"swapped":{swapped},"#)?;
        write!(f, r#""steps":{computed_steps},"generated_tokens":{generated_tokens},"#)?;
        let Stats { prompt_tokens, prompt_tokens_cached, prefix_queries, prefix_hits, preemptions, .. } = stats;
        write!(f, r#""prompt_tokens":{prompt_tokens},"prompt_tokens_cached":{prompt_tokens_cached},"#)?;
        write!(f, r#""prefix_queries":{prefix_queries},"prefix_hits":{prefix_hits},"preemptions":{preemptions}}},"#)?;
        f.write_str(r#""pool":"#)?;
        write_tier(f, &map.device)?;
        f.write_str(r#","host_tier":"#)?;
        write_tier(f, &map.host)?;
        f.write_str(r#","sequences":["#)?;
        write_list(f, map.sequences.iter(), write_sequence)?;
        write!(f, r#"],"sequences_omitted":{},"steps":["#, map.sequences_omitted)?;
        write_list(f, steps.iter(), |f, step| {
            let (start, duration) = (step.start.as_secs_f64(), step.duration.as_secs_f64());
            write!(f, r#"{{"start":{start:.6},"seconds":{duration:.6},"prefill_tokens":{},"#, step.prefill_tokens)?;
            write!(f, r#""decode_tokens":{},"sequences":{}}}"#, step.decode_tokens, step.sequences)
        })?;
        f.write_str("]}")
    }
}

/// Writes the elements with commas between them.
fn write_list<T>(
    f: &mut fmt::Formatter,
    elements: impl Iterator<Item = T>,
    write: impl Fn(&mut fmt::Formatter, T) -> fmt::Result,
) -> fmt::Result {
    for (i, element) in elements.enumerate() {
        if i > 0 {
            f.write_char(',')?;
        }
        write(f, element)?;
    }
    Ok(())
}

/// Writes a tier. Consecutive blocks with the same use are one run.
fn write_tier(f: &mut fmt::Formatter, tier: &TierMap) -> fmt::Result {
    let TierMap { total, cached, free, blocks } = tier;
    let used = total - cached - free;
    write!(f, r#"{{"blocks":{total},"free":{free},"cached":{cached},"used":{used},"runs":["#)?;
    write_list(f, blocks.chunk_by(|one, next| one == next), |f, run| match run[0] {
        MappedBlock { users: 0, is_cached: true, .. } => write!(f, r#"[{},"cached"]"#, run.len()),
        MappedBlock { users: 0, .. } => write!(f, r#"[{},"free"]"#, run.len()),
        MappedBlock { users, sequence, .. } => {
            write!(f, r#"[{},"used",{users},{}]"#, run.len(), sequence.map_or(0, |sequence| sequence.get()))
        }
    })?;
    f.write_str("]}")
}

fn write_sequence(f: &mut fmt::Formatter, sequence: &MappedSequence) -> fmt::Result {
    let MappedSequence { id, request, state, tokens, max_len, computed, cached, generated, blocks, is_swapped } = *sequence;
    let state = match state {
        SequenceState::Running => "running",
        SequenceState::Waiting => "waiting",
        SequenceState::Paused => "paused",
        SequenceState::Idle => "idle",
        SequenceState::Pinned => "pinned",
    };
    let tier = if is_swapped { "host" } else { "pool" };
    let request = request.map_or(0, |request| request.get());
    write!(f, r#"{{"sequence":{},"request":{request},"state":"{state}","tokens":{tokens},"max_len":{max_len},"#, id.get())?;
    write!(f, r#""computed_tokens":{computed},"cached_tokens":{cached},"generated_tokens":{generated},"blocks":{blocks},"tier":"{tier}"}}"#)
}
