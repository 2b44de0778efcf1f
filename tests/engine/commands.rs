//! Many calls of the host between two steps: the steps apply them in bounded portions, and running
//! requests get a token in each.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support;
use pagedllm::engine::{Engine, Executor, Fork, InFlightStep, Output, Prompt, Request, StepOutput};
use pagedllm::error::Result;
use pagedllm::types::batch::Batch;
use pagedllm::types::options::{EngineOptions, SamplingParams};
use pagedllm::types::outputs::FinishReason;
use pagedllm::types::{RequestId, SeqId};

const VOCAB: usize = 8;
const EOS: u32 = 5;
/// Maximum number of commands that a step applies.
const STEP_COMMANDS: usize = 1024;

/// An executor whose rows of logits are 0, so that each token is 0.
struct Zeros(Vec<f32>);

impl Executor for Zeros {
    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        self.0.resize(batch.logit_rows.len() * VOCAB, 0.0);
        Ok(InFlightStep::new(batch.logit_rows.len()))
    }

    fn wait(&mut self, step: InFlightStep) -> Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&self.0[..step.logits * VOCAB]))
    }
}

/// Creates an engine that runs one request at a time, so that all others wait.
fn engine() -> Engine {
    let options = EngineOptions { max_seqs: 1, ..EngineOptions::default() };
    Engine::with_executor(&options, support::model_info(VOCAB, 512, 4096, vec![EOS]), None, Box::new(Zeros(Vec::new()))).unwrap()
}

fn add(engine: &Engine) -> RequestId {
    let sampling = SamplingParams { max_tokens: Some(1000), ..SamplingParams::greedy() };
    engine.add_request(Request::new(Prompt::Tokens(vec![1, 2, 3]), sampling)).unwrap()
}

fn step(engine: &Engine) -> (u64, Vec<Output>) {
    let unfinished = engine.step().unwrap().unfinished;
    (unfinished, engine.queue().poll(Some(Duration::ZERO)).unwrap().into())
}

fn tokens(outputs: &[Output], request: RequestId) -> usize {
    outputs.iter().filter(|output| output.request == request).map(|output| output.tokens.len()).sum()
}

fn ended(outputs: &[Output], request: RequestId) -> Option<FinishReason> {
    outputs.iter().filter(|output| output.request == request).find_map(|output| output.finish)
}

#[test]
fn a_step_applies_a_bounded_number_of_commands_and_a_running_request_gets_a_token_in_each() {
    let engine = engine();
    let running = add(&engine);
    assert_eq!(tokens(&step(&engine).1, running), 1);
    for _ in 0..5 * STEP_COMMANDS {
        engine.abort(add(&engine)).unwrap();
    }
    let (mut steps, mut aborted) = (0, 0);
    while aborted < 5 * STEP_COMMANDS {
        let (_, outputs) = step(&engine);
        assert_eq!(tokens(&outputs, running), 1, "step {steps}");
        let ends = outputs.iter().filter(|output| output.finish == Some(FinishReason::Abort)).count();
        assert!(ends <= STEP_COMMANDS, "a step aborted {ends} requests");
        (steps, aborted) = (steps + 1, aborted + ends);
    }
    assert!((10..=11).contains(&steps), "{steps} steps for {} commands", 10 * STEP_COMMANDS);
}

#[test]
fn an_abort_of_a_running_request_precedes_the_commands_that_wait() {
    let engine = engine();
    let running = add(&engine);
    step(&engine);
    let others: Vec<_> = (0..3 * STEP_COMMANDS).map(|_| add(&engine)).collect();
    engine.abort(running).unwrap();
    let (_, outputs) = step(&engine);
    assert_eq!((ended(&outputs, running), tokens(&outputs, running)), (Some(FinishReason::Abort), 0));
    // A request whose command waits ends when it is reached.
    let last = *others.last().unwrap();
    engine.abort(last).unwrap();
    let end = (0..10).find_map(|steps| ended(&step(&engine).1, last).map(|finish| (steps, finish)));
    assert_eq!(end, Some((2, FinishReason::Abort)));
}

#[test]
fn an_abort_follows_earlier_commands_for_its_request() {
    let engine = engine();
    let running = add(&engine);
    step(&engine);
    let waiting: Vec<_> = (0..STEP_COMMANDS).map(|_| add(&engine)).collect();
    let children = engine.fork(running.sequence(0), 1, &Fork::default()).unwrap();
    engine.abort(running).unwrap();
    for _ in 0..3 {
        step(&engine);
    }
    waiting.iter().for_each(|&request| engine.abort(request).unwrap());
    let outputs = (0..5).flat_map(|_| step(&engine).1).collect::<Vec<_>>();
    let child = children[0];
    assert!(outputs.iter().any(|output| output.sequence == child && !output.tokens.is_empty()), "the fork precedes the abort");
}

#[test]
fn steps_continue_until_no_command_is_left() {
    let engine = engine();
    for _ in 0..STEP_COMMANDS {
        let pin = engine.pin(Prompt::Tokens(vec![1; 20]), false, &[], 0, None).unwrap();
        engine.unpin(pin).unwrap();
    }
    let unfinished: Vec<_> = (0..4).map(|_| step(&engine).0).collect();
    assert!(unfinished[0] >= STEP_COMMANDS as u64 && unfinished[3] == 0, "{unfinished:?}");
}

#[test]
fn deadlines_that_pass_together_end_in_bounded_portions() {
    let engine = engine();
    let running = add(&engine);
    step(&engine);
    for _ in 0..2 * STEP_COMMANDS {
        let sampling = SamplingParams { max_tokens: Some(1000), ..SamplingParams::greedy() };
        let deadline = Some(Duration::from_nanos(1));
        engine.add_request(Request { deadline, ..Request::new(Prompt::Tokens(vec![1, 2, 3]), sampling) }).unwrap();
    }
    let mut ends = Vec::new();
    while ends.iter().sum::<usize>() < 2 * STEP_COMMANDS {
        let (_, outputs) = step(&engine);
        assert_eq!(tokens(&outputs, running), 1);
        ends.push(outputs.iter().filter(|output| output.finish == Some(FinishReason::Deadline)).count());
    }
    assert!(ends.iter().all(|&ends| ends <= STEP_COMMANDS), "{ends:?}");
}

/// Number of children whose fork takes several steps, and the length of their parent in tokens.
const CHILDREN: usize = 500;
const LONG: usize = 3500;

/// Starts a request with a long prompt and forks it once it runs.
fn fork_long(engine: &Engine, idle: bool) -> (RequestId, Vec<SeqId>) {
    let sampling = SamplingParams { max_tokens: Some(100), ..SamplingParams::greedy() };
    let parent = engine.add_request(Request::new(Prompt::Tokens(vec![1; LONG]), sampling)).unwrap();
    while tokens(&step(engine).1, parent) == 0 {}
    let children = engine.fork(parent.sequence(0), CHILDREN, &Fork { idle, ..Fork::default() }).unwrap();
    (parent, children)
}

#[test]
fn a_fork_with_many_children_takes_several_steps_while_its_parent_runs() {
    let engine = engine();
    let (parent, children) = fork_long(&engine, true);
    let mut idle = Vec::new();
    loop {
        let (_, outputs) = step(&engine);
        assert_eq!(tokens(&outputs, parent), 1, "after {idle:?}");
        idle.push(engine.stats().idle as usize);
        if idle.ends_with(&[CHILDREN; 2]) {
            break;
        }
    }
    let created: Vec<_> = std::iter::once(&0).chain(&idle).zip(&idle).map(|(before, after)| after.saturating_sub(*before)).collect();
    // A child costs 1,024 units and one for each token, and a step does 1,024 * 1,024.
    assert_eq!(created, [232, 232, 36, 0], "children of each step");
    for child in children {
        assert_eq!(engine.sequence(child).unwrap().len, LONG + 1, "the parent had this length at the call");
        engine.free(child).unwrap();
    }
    engine.abort(parent).unwrap();
    assert_eq!(step(&engine).0, 0);
    assert_eq!(engine.stats().idle, 0);
}

#[test]
fn the_parent_of_many_children_ends_at_once_and_the_children_run() {
    let engine = engine();
    let (parent, children) = fork_long(&engine, false);
    let (_, mut outputs) = step(&engine);
    engine.abort(parent).unwrap();
    let (mut unfinished, next) = step(&engine);
    assert_eq!(ended(&next, parent), Some(FinishReason::Abort));
    outputs.extend(next);
    while unfinished > 0 {
        let (left, next) = step(&engine);
        unfinished = left;
        outputs.extend(next);
    }
    let mut lengths = BTreeMap::new();
    for output in outputs.iter().filter(|output| output.request != parent) {
        *lengths.entry(output.sequence).or_insert(0) += output.tokens.len();
    }
    assert_eq!(lengths.keys().copied().collect::<Vec<_>>(), children);
    assert!(lengths.values().all(|&len| len == 99), "{lengths:?}");
}

#[test]
fn commands_for_a_child_follow_its_creation() {
    let engine = engine();
    let (parent, children) = fork_long(&engine, true);
    let [first, .., freed, last] = children[..] else { unreachable!() };
    step(&engine);
    engine.append(first, vec![1]).unwrap();
    engine.append(children[250], vec![1; 9]).unwrap();
    engine.append(last, vec![1, 2]).unwrap();
    let of_last = engine.fork(last, 1, &Fork { idle: true, ..Fork::default() }).unwrap()[0];
    engine.free(freed).unwrap();
    engine.append(of_last, vec![3]).unwrap();
    engine.abort(parent).unwrap();
    step(&engine);
    // This child exists now. The command follows the one that has waited for it.
    let middle = children[250];
    engine.append(middle, vec![6, 7]).unwrap();
    engine.rewind(middle, LONG + 2).unwrap();
    while step(&engine).0 > 0 {}
    assert_eq!(engine.sequence(middle).unwrap().len, LONG + 2);
    let len = |seq| engine.sequence(seq).map(|sequence| sequence.len).ok();
    assert_eq!([first, last, of_last, freed].map(len), [Some(LONG + 2), Some(LONG + 3), Some(LONG + 4), None]);
    assert_eq!(engine.stats().idle, CHILDREN as u64);
}

#[test]
fn the_engines_thread_creates_all_children_without_further_calls() {
    let engine = engine();
    let (parent, children) = fork_long(&engine, true);
    engine.abort(parent).unwrap();
    engine.start().unwrap();
    let fence = engine.create_queue(4).unwrap();
    engine.export(*children.last().unwrap(), Some(&fence)).unwrap();
    let outputs = fence.poll(None).unwrap();
    assert!(outputs[0].error.is_none(), "{outputs:?}");
    engine.stop();
}

#[test]
fn more_alternatives_than_the_vocabulary_has_are_all_of_it() {
    let engine = engine();
    for prompt_logprobs in [None, Some(100)] {
        let sampling = SamplingParams { echo: true, logprobs: Some(20), prompt_logprobs, max_tokens: Some(2), ..SamplingParams::greedy() };
        engine.add_request(Request::new(Prompt::Tokens(vec![1; 30]), sampling)).unwrap();
        let mut outputs = Vec::new();
        loop {
            let (unfinished, next) = step(&engine);
            outputs.extend(next);
            if unfinished == 0 {
                break;
            }
        }
        let alternatives: usize = outputs.iter().map(|output| output.logprobs.top.len()).sum();
        let of_prompt: usize = outputs.iter().map(|output| output.prompt_logprobs.top.len()).sum();
        assert_eq!((alternatives, of_prompt), (32 * VOCAB, if prompt_logprobs.is_some() { 29 * VOCAB } else { 0 }));
    }
}
