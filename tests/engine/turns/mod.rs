//! Long random traces of what a host may do with sequences, over the bundled model, beside a ledger of what is owed to it and of
//! what it was told. Two engines of the same options exchange sequences.
//!
//! The ledger has two halves. `Turn`: a sequence that was asked to run owes one last output, in its queue, with its user data.
//! `Script`: what a sequence says at each length follows from its prompt, parameters and seed alone, so that all sequences that
//! share these (a request asked twice, forks, imports, a sequence and itself before it was rewound) say the same.

mod asks;
mod script;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::support::{Random, bundled_model};
use pagedllm::engine::{Engine, Output, Queue, Request};
use pagedllm::error::{Code, Result};
use pagedllm::options::{EngineOptions, SamplingParams};
use pagedllm::scheduler::FinishReason;
use script::{Script, length};

const TRACES: u64 = 200;
const ACTS: usize = 100;
const LONGEST: usize = 96;
/// The queue that states come to, and one that is seldom read; the others are read after every step.
const STATES: usize = 0;
const LAGGING: usize = 1;

/// A sequence: which engine, and its id there.
type Name = (usize, u64);

/// A last output that is owed.
#[derive(Debug, Clone)]
struct Turn {
    host: usize,
    request: u64,
    /// None: whichever of the request's samples.
    sequence: Option<u64>,
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
    /// Its result waits for the other samples' to be compared with.
    ranked: bool,
    /// It was told to end, which brought out text that was held back.
    ahead: bool,
}

/// A request, to be asked again and for the samples that it will branch into.
struct Asked {
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
    /// None: the host has freed it.
    queues: Vec<Option<Queue>>,
    exports: VecDeque<Export>,
    /// Since its last step: something may end of itself; these sequences have another length.
    restless: bool,
    changed: BTreeSet<u64>,
}

struct Trace {
    seed: u64,
    random: Random,
    hosts: Vec<Host>,
    scripts: Vec<Script>,
    sequences: BTreeMap<Name, Sequence>,
    asked: Vec<Asked>,
    turns: Vec<Turn>,
    /// Idle sequences that may turn out not to be made, with the queue that says so; those that no step has seen.
    unborn: BTreeMap<Name, usize>,
    unseen: BTreeSet<Name>,
    /// Those that were not made and have not said so yet.
    missing: BTreeSet<Name>,
    acts: Vec<String>,
    /// Texts and tokens that were compared with something.
    compared: usize,
}

fn poll(queue: &Queue) -> VecDeque<Output> {
    queue.poll(Some(Duration::ZERO)).unwrap()
}

/// What a host may be refused, but never with a defect.
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
            max_model_len: Some(LONGEST),
            prefix_cache: random.below(4) > 0,
            ..EngineOptions::default()
        };
        let bytes = Engine::plan(&options).unwrap().block_bytes * (14 + random.below(40)) as u64;
        let engine = Engine::create(&EngineOptions { kv_bytes: Some(bytes), ..options }).unwrap();
        let queues = [64, 2, 64, 64].map(|capacity| Some(engine.create_queue(capacity).unwrap())).into();
        Host { engine, queues, exports: VecDeque::new(), restless: false, changed: BTreeSet::new() }
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
            asked: Vec::new(),
            turns: Vec::new(),
            unborn: BTreeMap::new(),
            unseen: BTreeSet::new(),
            missing: BTreeSet::new(),
            acts: Vec::new(),
            compared: 0,
        }
    }

    fn act(&mut self) {
        let host = self.random.below(2);
        let Some((name, info)) = self.someone() else { return self.add(host) };
        let few = self.sequences.len() < 60;
        let ranked = self.is_ranked(name);
        match self.random.below(40) {
            0..3 if few => self.add(host),
            3 if few => self.ask_again(host),
            4..6 => self.resume(name, info),
            6..9 => self.go_on(name, info),
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
        self.meet(host);
        let mut lens = BTreeMap::new();
        for queue in 0..self.hosts[host].queues.len() {
            if queue != LAGGING || self.one_in(4) {
                lens.extend(self.read(host, queue));
            }
        }
        let Host { engine, changed, restless, .. } = &mut self.hosts[host];
        for (id, len) in lens.into_iter().filter(|(id, _)| !changed.contains(id)) {
            if let Ok(info) = engine.sequence(id) {
                assert_eq!(info.len, len, "sequence {:?} has the length of its last output", (host, id));
            }
        }
        changed.clear();
        *restless = false;
        report.unfinished
    }

    fn is_ranked(&self, name: Name) -> bool {
        self.sequences.get(&name).is_some_and(|sequence| sequence.ranked)
    }

    /// Returns the lengths that the newest outputs tell of.
    fn read(&mut self, host: usize, queue: usize) -> BTreeMap<u64, usize> {
        let outputs = self.hosts[host].queues[queue].as_ref().map(poll).unwrap_or_default();
        let lens = outputs
            .iter()
            .filter(|output| queue > LAGGING && !self.is_ranked((host, output.sequence)))
            .map(|output| (output.sequence, length(output)))
            .collect();
        outputs.into_iter().for_each(|output| self.hear(host, queue, output));
        lens
    }

    /// Samples that have come into being, and children that have not.
    fn meet(&mut self, host: usize) {
        for asked in self.asked.iter().filter(|asked| asked.name.0 == host) {
            for id in asked.name.1 + 1..asked.name.1 + asked.samples as u64 {
                let Ok(info) = self.hosts[host].engine.sequence(id) else { continue };
                let script = Script::new(info.len - 1, asked.request.sampling.echo);
                if !self.sequences.contains_key(&(host, id)) {
                    self.scripts.push(script);
                    self.sequences.insert((host, id), Sequence { script: self.scripts.len() - 1, ..asked.sequence.clone() });
                }
            }
        }
        for name in std::mem::take(&mut self.unseen) {
            let resumed = self.turns.iter().any(|turn| (turn.host, turn.sequence) == (name.0, Some(name.1)));
            let there = self.hosts[name.0].engine.sequence(name.1).is_ok();
            match name.0 == host {
                false => drop(self.unseen.insert(name)),
                true if there || resumed || !self.sequences.contains_key(&name) || !self.unborn.contains_key(&name) => {}
                true => drop(self.missing.insert(name)),
            }
        }
    }

    fn hear(&mut self, host: usize, queue: usize, output: Output) {
        let name = (host, output.sequence);
        if let Some(error) = &output.error {
            assert_ne!(error.code(), Code::Internal, "{output:?}");
            self.log(format!("{name:?}: {error}"));
        }
        if queue == STATES {
            return self.hear_state(host, output);
        }
        let unmade = output.error.as_ref().is_some_and(|error| error.code() == Code::NotFound);
        if unmade && self.unborn.get(&name) == Some(&queue) {
            self.unborn.remove(&name);
            self.missing.remove(&name);
            return;
        }
        let here = |turn: &Turn| (turn.host, turn.queue) == (host, queue);
        let told = |turn: &Turn| match turn.sequence {
            Some(sequence) => sequence == output.sequence,
            None => (turn.request, turn.index) == (output.request, output.index),
        };
        let turn = self.turns.iter().position(|turn| here(turn) && told(turn));
        let turn = turn.unwrap_or_else(|| panic!("nothing is owed in queue {queue} of {host}: {output:?}"));
        let Turn { request, index, user_data, .. } = self.turns[turn];
        assert_eq!((output.request, output.index, output.user_data), (request, index, user_data), "{output:?}");
        if output.finish.is_some() {
            self.turns.remove(turn);
            self.log(format!("{name:?}: {:?} at {}", output.finish, length(&output)));
        }
        if let Some(Sequence { script, params, ahead, .. }) = self.sequences.get_mut(&name) {
            self.compared += self.scripts[*script].hear(&output, params, *ahead);
            *ahead |= matches!(output.finish, Some(FinishReason::Abort | FinishReason::Error));
        }
    }

    fn hear_state(&mut self, host: usize, output: Output) {
        let export = self.hosts[host].exports.pop_front().expect("a state that nobody asked for");
        assert_eq!((host, output.sequence, output.finish), (export.name.0, export.name.1, None));
        match output.error {
            Some(error) => assert_eq!(error.code(), Code::NotFound, "{error}"),
            None => self.import(export, &output.sequence_state),
        }
    }

    /// Everything ends, everything is freed, and nothing is left.
    fn drain(&mut self) {
        let mut steps = 0;
        while (0..2).map(|host| self.step(host)).sum::<u64>() > 0 {
            steps += 1;
            assert!(steps < 2000, "these do not end: {:?}", self.turns);
        }
        (0..50).for_each(|_| {
            (0..2).for_each(|host| {
                self.step(host);
            })
        });
        assert!(self.turns.is_empty(), "these have ended without a last output: {:?}", self.turns);
        assert!(self.missing.is_empty(), "these were not made and have not said so: {:?}", self.missing);
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
