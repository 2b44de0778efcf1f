//! Long random traces of API calls on sequences of the bundled model. A ledger records the expected
//! and the received outputs. Two engines with the same options exchange sequences.
//!
//! The ledger has two parts. `ExpectedEnd`: each run of a sequence has one last output, in its
//! queue, with its user data. `Script`: the outputs at each length depend only on prompt,
//! parameters and seed. All sequences that share these have the same outputs: repeated requests,
//! forks, imports, and rewound sequences.

mod calls;
mod script;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::support::{Random, bundled_model};
use pagedllm::engine::{Engine, Output, Queue, Request};
use pagedllm::error::{Code, Result};
use pagedllm::types::options::{EngineOptions, SamplingParams};
use pagedllm::types::outputs::FinishReason;
use pagedllm::types::{RequestId, SeqId};
use script::{Script, length};

const TRACES: u64 = 200;
const ACTS: usize = 100;
const MAX_LEN: usize = 96;
/// The queue for exported states, and a queue that is rarely read. All other queues are read after
/// every step.
const STATES: usize = 0;
const LAGGING: usize = 1;

/// The host and the id of a sequence.
type Name = (usize, SeqId);

/// The last output of a run that has not ended yet.
#[derive(Debug, Clone)]
struct ExpectedEnd {
    host: usize,
    request: RequestId,
    /// None: any sample of the request.
    sequence: Option<SeqId>,
    index: u32,
    queue: usize,
    user_data: u64,
}

#[derive(Debug, Clone)]
struct Sequence {
    script: usize,
    params: SamplingParams,
    hooked: bool,
    queue: usize,
    user_data: u64,
    /// The sample belongs to a best-of group, whose results are ranked when all samples have ended.
    ranked: bool,
    /// An abort or error has emitted text that was held back.
    text_flushed: bool,
}

/// A request that was added: it can be repeated, and it determines the expected samples.
struct AddedRequest {
    name: Name,
    request: Request,
    samples: u32,
    sequence: Sequence,
}

struct Export {
    name: Name,
    len: usize,
    sequence: Sequence,
}

struct Host {
    engine: Engine,
    /// None: the queue is freed.
    queues: Vec<Option<Queue>>,
    exports: VecDeque<Export>,
    /// Calls since the last step: whether a sequence may end by itself, and the sequences whose
    /// length changed.
    has_pending_calls: bool,
    changed: BTreeSet<SeqId>,
}

struct Trace {
    seed: u64,
    random: Random,
    hosts: Vec<Host>,
    scripts: Vec<Script>,
    sequences: BTreeMap<Name, Sequence>,
    added: Vec<AddedRequest>,
    expected_ends: Vec<ExpectedEnd>,
    /// Idle forks that may fail, with the queue for the error, and the forks that no step has
    /// applied.
    pending_forks: BTreeMap<Name, usize>,
    unseen: BTreeSet<Name>,
    /// Failed forks whose error output is still expected.
    missing: BTreeSet<Name>,
    acts: Vec<String>,
    /// Length of each sequence according to its newest output.
    lengths: BTreeMap<Name, usize>,
    /// Number of tokens, finish reasons and texts that were compared.
    compared: usize,
}

fn poll(queue: &Queue) -> VecDeque<Output> {
    queue.poll(Some(Duration::ZERO)).unwrap()
}

/// Returns the value of a call that may be refused, but never with an internal error.
fn refused<T>(result: Result<T>) -> Option<T> {
    result.inspect_err(|error| assert_ne!(error.code(), Code::Internal, "{error}")).ok()
}

impl Host {
    fn new(random: &mut Random) -> Host {
        let options = EngineOptions {
            model_dir: bundled_model(),
            block_size: 8,
            threads: Some(1),
            max_seqs: 6,
            max_batch_tokens: 6 + random.below(40),
            max_model_len: Some(MAX_LEN),
            prefix_cache: random.below(4) > 0,
            ..EngineOptions::default()
        };
        let bytes = Engine::plan(&options).unwrap().block_bytes * (14 + random.below(40)) as u64;
        let engine = Engine::create(&EngineOptions { kv_bytes: Some(bytes), ..options }).unwrap();
        let queues = [64, 2, 64, 64].map(|capacity| Some(engine.create_queue(capacity).unwrap())).into();
        Host { engine, queues, exports: VecDeque::new(), has_pending_calls: false, changed: BTreeSet::new() }
    }
}

impl Trace {
    fn new(seed: u64) -> Trace {
        let mut random = Random(seed);
        let hosts = vec![Host::new(&mut Random(seed)), Host::new(&mut Random(seed))];
        random.next();
        Trace {
            seed,
            random,
            hosts,
            scripts: Vec::new(),
            sequences: BTreeMap::new(),
            added: Vec::new(),
            expected_ends: Vec::new(),
            pending_forks: BTreeMap::new(),
            unseen: BTreeSet::new(),
            missing: BTreeSet::new(),
            acts: Vec::new(),
            lengths: BTreeMap::new(),
            compared: 0,
        }
    }

    fn act(&mut self) {
        let host = self.random.below(2);
        let Some((name, info)) = self.some_sequence() else { return self.add(host) };
        let few = self.sequences.len() < 60;
        let ranked = self.is_ranked(name);
        match self.random.below(40) {
            0..3 if few => self.add(host),
            3 if few => self.repeat_request(host),
            4..6 => self.resume(name, info),
            6..9 => self.continue_sequence(name, info),
            9..11 if few => self.fork(name, info),
            11 if !ranked => self.append(name),
            12..15 if !ranked => self.rewind(name, info),
            15..17 if few => self.export(name, info),
            17 => self.abort(name, info),
            18 => self.free(name),
            19 if self.random.below(4) == 0 => self.free_queue(host),
            _ => drop(self.step(host)),
        }
    }

    fn log(&mut self, act: String) {
        self.acts.push(act);
    }

    /// Returns how many requests have not ended.
    fn step(&mut self, host: usize) -> u64 {
        self.log(format!("{host}: step"));
        let report = self.hosts[host].engine.step().unwrap();
        self.update_sequences(host);
        let mut lens = BTreeMap::new();
        for queue in 0..self.hosts[host].queues.len() {
            if queue != LAGGING || self.one_in(4) {
                lens.extend(self.read(host, queue));
            }
        }
        let Host { engine, changed, has_pending_calls, .. } = &mut self.hosts[host];
        let has_grammar = |id| self.sequences.get(&(host, id)).is_some_and(|sequence| sequence.params.grammar.is_some());
        for (id, len) in lens.into_iter().filter(|(id, _)| !changed.contains(id)) {
            if let Ok(info) = engine.sequence(id) {
                // The output of a token may wait for the next mask of its grammar.
                let held = has_grammar(id) as usize;
                assert!((len..=len + held).contains(&info.len), "sequence {:?} has {} tokens, its outputs {len}", (host, id), info.len);
            }
        }
        // Calls for the others may wait for a mask.
        changed.retain(|&id| has_grammar(id));
        *has_pending_calls = false;
        report.unfinished
    }

    fn is_ranked(&self, name: Name) -> bool {
        self.sequences.get(&name).is_some_and(|sequence| sequence.ranked)
    }

    /// Reads a queue and returns the sequence lengths according to the newest outputs.
    fn read(&mut self, host: usize, queue: usize) -> BTreeMap<SeqId, usize> {
        let outputs = self.hosts[host].queues[queue].as_ref().map(poll).unwrap_or_default();
        let lens = outputs
            .iter()
            // An echo can come after tokens that the host appended.
            .filter(|output| queue > LAGGING && output.generated_tokens > 0 && !self.is_ranked((host, output.sequence)))
            .map(|output| (output.sequence, length(output)))
            .collect();
        outputs.into_iter().for_each(|output| self.check_output(host, queue, output));
        lens
    }

    /// Adds new samples to the ledger, and finds the forks that failed.
    fn update_sequences(&mut self, host: usize) {
        for added in self.added.iter().filter(|added| added.name.0 == host) {
            for id in added.name.1.own_request().sequences(added.samples).skip(1) {
                let Ok(info) = self.hosts[host].engine.sequence(id) else { continue };
                let script = Script::new(info.len - 1, added.request.sampling.echo);
                if !self.sequences.contains_key(&(host, id)) {
                    self.scripts.push(script);
                    self.sequences.insert((host, id), Sequence { script: self.scripts.len() - 1, ..added.sequence.clone() });
                }
            }
        }
        for name in std::mem::take(&mut self.unseen) {
            let resumed = self.expected_ends.iter().any(|expected| (expected.host, expected.sequence) == (name.0, Some(name.1)));
            let there = self.hosts[name.0].engine.sequence(name.1).is_ok();
            match name.0 == host {
                false => drop(self.unseen.insert(name)),
                true if there || resumed || !self.sequences.contains_key(&name) || !self.pending_forks.contains_key(&name) => {}
                true => drop(self.missing.insert(name)),
            }
        }
    }

    fn check_output(&mut self, host: usize, queue: usize, output: Output) {
        let name = (host, output.sequence);
        if let Some(error) = &output.error {
            assert_ne!(error.code(), Code::Internal, "{output:?}");
            self.log(format!("{name:?}: {error}"));
        }
        if queue == STATES {
            return self.check_state(host, output);
        }
        self.lengths.insert(name, length(&output));
        let failed = output.error.as_ref().is_some_and(|error| error.code() == Code::NotFound);
        if failed && self.pending_forks.get(&name) == Some(&queue) {
            self.pending_forks.remove(&name);
            self.missing.remove(&name);
            return;
        }
        let in_queue = |expected: &ExpectedEnd| (expected.host, expected.queue) == (host, queue);
        let matches_output = |expected: &ExpectedEnd| match expected.sequence {
            Some(sequence) => sequence == output.sequence,
            None => (expected.request, expected.index) == (output.request, output.index),
        };
        let expected = self.expected_ends.iter().position(|expected| in_queue(expected) && matches_output(expected));
        let expected = expected.unwrap_or_else(|| panic!("unexpected output in queue {queue} of {host}: {output:?}"));
        let ExpectedEnd { request, index, user_data, .. } = self.expected_ends[expected];
        assert_eq!((output.request, output.index, output.user_data), (request, index, user_data), "{output:?}");
        if output.finish.is_some() {
            self.expected_ends.remove(expected);
            self.log(format!("{name:?}: {:?} at {}", output.finish, length(&output)));
        }
        if let Some(Sequence { script, params, text_flushed, .. }) = self.sequences.get_mut(&name) {
            self.compared += self.scripts[*script].record(&output, params, *text_flushed);
            *text_flushed |= matches!(output.finish, Some(FinishReason::Abort | FinishReason::Error));
        }
    }

    fn check_state(&mut self, host: usize, output: Output) {
        // The exports of one sequence come in their order. Others may wait for the mask of a grammar.
        let exports = &mut self.hosts[host].exports;
        let place = exports.iter().position(|export| export.name == (host, output.sequence)).expect("a state without an export");
        let export = exports.remove(place).unwrap();
        assert_eq!(output.finish, None);
        match output.error {
            Some(error) => assert_eq!(error.code(), Code::NotFound, "{error}"),
            None => self.import(export, &output.sequence_state),
        }
    }

    /// Runs all requests to their end, frees all sequences, and checks that no block is in use.
    fn drain(&mut self) {
        let mut steps = 0;
        while (0..2).map(|host| self.step(host)).sum::<u64>() > 0 {
            steps += 1;
            assert!(steps < 2000, "these runs do not end: {:?}", self.expected_ends);
        }
        (0..50).for_each(|_| {
            (0..2).for_each(|host| {
                self.step(host);
            })
        });
        assert!(self.expected_ends.is_empty(), "these runs have ended without a last output: {:?}", self.expected_ends);
        assert!(self.missing.is_empty(), "these forks failed without an error output: {:?}", self.missing);
        for &(host, id) in self.sequences.keys() {
            refused(self.hosts[host].engine.free(id));
        }
        for Host { engine, .. } in &self.hosts {
            engine.step().unwrap();
            engine.check().unwrap();
            let stats = engine.stats();
            assert_eq!((stats.waiting, stats.running, stats.idle, stats.blocks_used), (0, 0, 0, 0), "{stats:?}");
        }
        self.compared += self.scripts.iter().map(Script::check).sum::<usize>();
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}, and before that:\n{}", self.seed, self.acts.join("\n"));
        }
    }
}

fn trace(seed: u64) -> usize {
    let mut trace = Trace::new(seed);
    (0..ACTS).for_each(|_| trace.act());
    trace.drain();
    trace.compared
}

#[test]
fn every_run_ends_once_and_equal_requests_give_equal_outputs() {
    let next = AtomicU64::new(0);
    let some = || std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&seed| seed < TRACES)).map(trace).sum::<usize>();
    let compared: usize = std::thread::scope(|scope| {
        let workers = [scope.spawn(some), scope.spawn(some)];
        workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).sum()
    });
    assert!(compared > 200 * TRACES as usize, "only {compared} tokens, ends and texts were compared");
}
