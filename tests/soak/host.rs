//! A host thread: it makes random API calls, reads the outputs, and tracks the last outputs that it
//! expects.

use std::collections::HashMap;
use std::ops::AddAssign;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use pagedllm::engine::{Continue, Engine, Fork, Output, Prompt, Queue, Request, Resume};
use pagedllm::error::{Code, Error, Result};
use pagedllm::types::options::{BeamParams, SamplingParams};
use pagedllm::types::outputs::FinishReason;
use pagedllm::types::{PinId, RequestId, SeqId};

use crate::support::Random;
use crate::support::faulty::POISON;
use crate::support::progress::Progress;

/// Counts of one host or of all hosts.
#[derive(Debug, Default)]
pub struct Tally {
    pub calls: u64,
    pub refused: u64,
    pub ended: u64,
    pub failed: u64,
    pub overdue: u64,
    pub aborted: u64,
    pub moved: u64,
    pub failed_steps: u64,
    pub preemptions: u64,
    pub swapped_in: u64,
    pub failed_moves: u64,
    pub rejections: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.calls += other.calls;
        self.refused += other.refused;
        self.ended += other.ended;
        self.failed += other.failed;
        self.overdue += other.overdue;
        self.aborted += other.aborted;
        self.moved += other.moved;
        self.failed_steps += other.failed_steps;
        self.preemptions += other.preemptions;
        self.swapped_in += other.swapped_in;
        self.failed_moves += other.failed_moves;
        self.rejections += other.rejections;
    }
}

pub struct Host<'a> {
    engine: &'a Engine,
    queue: Queue,
    random: Random,
    /// Last outputs that are still to come, by request.
    expected: HashMap<RequestId, u32>,
    /// Last outputs that may come: forks and imported sequences run, are idle, or fail.
    possible: HashMap<RequestId, u32>,
    /// Sequences that calls may use. Some of them may have ended.
    sequences: Vec<SeqId>,
    pins: Vec<PinId>,
    /// Exported sequences that any host may import.
    exported_states: &'a Mutex<Vec<Vec<u8>>>,
    /// Outputs so far.
    outputs: u64,
    tally: Tally,
}

impl<'a> Host<'a> {
    pub fn new(engine: &'a Engine, exported_states: &'a Mutex<Vec<Vec<u8>>>, seed: u64) -> Host<'a> {
        Host {
            engine,
            queue: engine.create_queue(50).unwrap(),
            random: Random(seed.wrapping_mul(7919).wrapping_add(3)),
            expected: HashMap::new(),
            possible: HashMap::new(),
            sequences: Vec::new(),
            pins: Vec::new(),
            exported_states,
            outputs: 0,
            tally: Tally::default(),
        }
    }

    pub fn run(mut self, stop: &AtomicBool) -> Tally {
        while !stop.load(SeqCst) {
            self.act();
            if self.sequences.len() > 40 {
                let oldest = self.sequences.remove(0);
                self.free(oldest);
            }
        }
        self.finish();
        self.tally
    }

    fn act(&mut self) {
        match self.random.below(24) {
            0..5 => self.add(),
            5 => self.abort(),
            6..8 => self.fork(),
            8 => self.append(),
            9 => self.rewind(),
            10..12 => self.resume(),
            12 => self.export(),
            13 => self.import(),
            14 => self.pin(),
            15 => self.drop_queue(),
            16 => self.free_any(),
            _ => self.read(Duration::from_millis(3)),
        }
    }

    /// Counts a call and returns its value. A refused call must have one of the expected codes.
    fn check<T>(&mut self, result: Result<T>) -> Option<T> {
        self.tally.calls += 1;
        let is_expected =
            |error: &Error| matches!(error.code(), Code::Capacity | Code::NotFound | Code::InvalidArgument | Code::Unsupported);
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                assert!(is_expected(&error), "{error}");
                self.tally.refused += 1;
                None
            }
        }
    }

    fn some_tokens(&mut self, max_len: usize) -> Vec<u32> {
        let (len, first) = (1 + self.random.below(max_len), self.random.below(3) as u32);
        let mut tokens: Vec<u32> = (0..len as u32).map(|i| (first + i * 7) % 120).collect();
        if self.random.below(150) == 0 {
            tokens[len / 2] = POISON;
        }
        tokens
    }

    fn sampling(&mut self) -> SamplingParams {
        let logprobs = (self.random.below(3) == 0).then_some(2);
        let max_tokens = Some(1 + self.random.below(40));
        SamplingParams { max_tokens, top_p: 0.9, logprobs, ignore_eos: true, ..SamplingParams::default() }
    }

    fn deadline(&mut self) -> Option<Duration> {
        (self.random.below(8) == 0).then(|| Duration::from_millis(1 + self.random.below(60) as u64))
    }

    fn add(&mut self) {
        let (sampling, prompt) = (self.sampling(), self.some_tokens(70));
        let mut request = Request { deadline: self.deadline(), ..Request::new(Prompt::Tokens(prompt), sampling) };
        request.priority = self.random.below(5) as i32;
        match self.random.below(8) {
            0 => request.n = 4,
            1 => (request.n, request.best_of) = (2, Some(3)),
            2 => {
                request.sampling = SamplingParams { max_tokens: Some(12), ..SamplingParams::greedy() };
                request.beam = Some(BeamParams { width: 3, ..BeamParams::default() });
            }
            3..6 => request.keep = true,
            _ => {}
        }
        let (n, keep) = (request.n, request.keep);
        if let Some(id) = self.check(self.engine.add_request_to(&self.queue, request)) {
            self.expected.insert(id, n);
            if keep {
                self.sequences.push(id.sequence(0));
            }
        }
    }

    fn any(&mut self) -> Option<SeqId> {
        let n = self.sequences.len();
        (n > 0).then(|| self.sequences[self.random.below(n)])
    }

    fn abort(&mut self) {
        let mut running: Vec<RequestId> = self.expected.iter().filter(|(_, count)| **count > 0).map(|(id, _)| *id).collect();
        running.sort_unstable();
        if !running.is_empty() {
            let id = running[self.random.below(running.len())];
            self.check(self.engine.abort(id));
        }
    }

    fn fork(&mut self) {
        let Some(parent) = self.any() else { return };
        let idle = self.random.below(2) == 0;
        let at = (self.random.below(3) == 0).then(|| 1 + self.random.below(20));
        let n = 1 + self.random.below(3);
        let how = Fork { at, idle, seed: Some(5), queue: Some(&self.queue), user_data: None };
        // If the parent ends before the fork is applied, the forks may be idle or fail.
        let children = self.engine.fork(parent, n, &how);
        for child in self.check(children).unwrap_or_default() {
            self.possible.insert(child.own_request(), 1);
            self.sequences.push(child);
        }
    }

    fn append(&mut self) {
        let Some(seq) = self.any() else { return };
        let tokens = self.some_tokens(20);
        self.check(self.engine.append(seq, tokens));
    }

    fn rewind(&mut self) {
        let Some(seq) = self.any() else { return };
        let len = 1 + self.random.below(60);
        self.check(self.engine.rewind(seq, len));
    }

    fn resume(&mut self) {
        let Some(seq) = self.any() else { return };
        let Ok(info) = self.engine.sequence(seq) else { return };
        let keep = self.random.below(4) > 0;
        let result = match self.random.below(4) {
            0 => self.engine.continue_sequence(seq, Continue { keep, queue: Some(&self.queue), ..Continue::default() }),
            _ => {
                let (sampling, deadline) = (self.sampling(), self.deadline());
                self.engine.resume(seq, Resume { keep, deadline, queue: Some(&self.queue), ..Resume::new(sampling) })
            }
        };
        if self.check(result).is_some() {
            *self.expected.entry(info.request).or_default() += 1;
        }
    }

    fn export(&mut self) {
        let Some(seq) = self.any() else { return };
        self.check(self.engine.export(seq, Some(&self.queue)));
    }

    fn import(&mut self) {
        let Some(state) = self.exported_states.lock().unwrap().pop() else { return };
        if let Some(id) = self.check(self.engine.import(&self.queue, &state)) {
            self.tally.moved += 1;
            self.possible.insert(id.own_request(), 1);
            self.sequences.push(id);
        }
    }

    fn pin(&mut self) {
        if let Some(pin) = self.pins.pop() {
            self.check(self.engine.unpin(pin));
            return;
        }
        let (tokens, time) = (self.some_tokens(40), Duration::from_millis(50));
        let pin = self.engine.pin(Prompt::Tokens(tokens), false, b"", 1, Some(time));
        let pin = self.check(pin);
        self.pins.extend(pin);
    }

    /// Replaces the queue as if a client disconnected. The requests of the old queue end without an
    /// output.
    fn drop_queue(&mut self) {
        if self.random.below(20) > 0 {
            return;
        }
        self.queue = self.engine.create_queue(50).unwrap();
        self.expected.clear();
        self.possible.clear();
        std::mem::take(&mut self.sequences).into_iter().for_each(|seq| self.free(seq));
    }

    fn free_any(&mut self) {
        if !self.sequences.is_empty() {
            let place = self.random.below(self.sequences.len());
            let seq = self.sequences.swap_remove(place);
            self.free(seq);
        }
    }

    fn free(&mut self, seq: SeqId) {
        self.check(self.engine.free(seq));
    }

    fn read(&mut self, timeout: Duration) {
        for output in self.queue.poll(Some(timeout)).unwrap() {
            self.handle(output);
        }
    }

    fn handle(&mut self, output: Output) {
        self.outputs += 1;
        if !output.sequence_state.is_empty() {
            let mut states = self.exported_states.lock().unwrap();
            states.truncate(3);
            return states.push(output.sequence_state);
        }
        let Some(finish) = output.finish else { return };
        self.tally.ended += 1;
        self.tally.failed += (finish == FinishReason::Error) as u64;
        self.tally.overdue += (finish == FinishReason::Deadline) as u64;
        self.tally.aborted += (finish == FinishReason::Abort) as u64;
        if finish == FinishReason::Error && output.error.is_none() {
            panic!("an error without a reason: {output:?}");
        }
        let count =
            |ends: &mut HashMap<RequestId, u32>| ends.get_mut(&output.request).filter(|left| **left > 0).map(|left| *left -= 1).is_some();
        assert!(count(&mut self.expected) || count(&mut self.possible), "an unexpected last output: {output:?}");
    }

    /// Waits until all requests have ended once, and frees all sequences.
    fn finish(&mut self) {
        std::mem::take(&mut self.pins).into_iter().for_each(|pin| {
            self.check(self.engine.unpin(pin));
        });
        let mut progress = Progress::new();
        while self.expected.values().any(|&count| count > 0) {
            progress.check(self.outputs, format_args!("these requests do not end: {:?}", self.expected));
            self.read(Duration::from_millis(50));
        }
        std::mem::take(&mut self.sequences).into_iter().for_each(|seq| self.free(seq));
        // Checks that no unexpected output follows.
        self.read(Duration::from_millis(50));
    }
}
