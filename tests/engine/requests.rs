//! The engine over an executor with scripted logits, and over the bundled model.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support;
use pagedllm::backend::cpu::CpuBackend;
use pagedllm::engine::{
    Engine, Executor, Fork, InFlightStep, ModelExecutor, ModelInfo, Output, Prompt, Queue, Request, Resume, Stats, StepOutput,
};
use pagedllm::error::{Code, Error, Result};
use pagedllm::kv::{BlockManager, Paging};
use pagedllm::model::{BatchLimits, KvCache, KvPool, ModelFiles};
use pagedllm::scheduler::{Scheduler, SchedulerOptions};
use pagedllm::text::Text;
use pagedllm::types::batch::Batch;
use pagedllm::types::options::{BeamParams, EngineOptions, KvDtype, OutputKind, Preemption, SamplingParams};
use pagedllm::types::outputs::FinishReason;
use pagedllm::types::{RequestId, SeqId};

const EOS: u32 = 5;

/// Writes the logits of a sampled token from its id and position, or fails the step.
type Script = Box<dyn FnMut(u32, u32, &mut [f32]) -> Result<()> + Send>;

struct Scripted {
    vocab: usize,
    logits: Vec<f32>,
    script: Script,
}

impl Executor for Scripted {
    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        let rows = &batch.logit_rows;
        self.logits = vec![0.0; rows.len() * self.vocab];
        for (&row, logits) in rows.iter().zip(self.logits.chunks_mut(self.vocab)) {
            (self.script)(batch.tokens[row as usize], batch.positions[row as usize], logits)?;
        }
        Ok(InFlightStep::new(rows.len()))
    }

    fn wait(&mut self, _: InFlightStep) -> Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&self.logits))
    }
}

fn info(vocab_size: usize, blocks: usize) -> ModelInfo {
    support::model_info(vocab_size, blocks, 64, vec![EOS])
}

fn scripted(vocab: usize, script: impl FnMut(u32, u32, &mut [f32]) -> Result<()> + Send + 'static) -> Engine {
    let executor = Box::new(Scripted { vocab, logits: Vec::new(), script: Box::new(script) });
    Engine::with_executor(&EngineOptions::default(), info(vocab, 64), None, executor).unwrap()
}

#[test]
fn samples_that_would_copy_too_many_tokens_in_one_step_are_refused() {
    let executor = Box::new(Scripted { vocab: 10, logits: Vec::new(), script: Box::new(|_, _, _| Ok(())) });
    let options = EngineOptions { max_seqs: 256, ..EngineOptions::default() };
    let info = support::model_info(10, 1 << 20, 1 << 17, vec![EOS]);
    let engine = Engine::with_executor(&options, info, None, executor).unwrap();
    let add = |prompt: usize, n: u32, beam: Option<BeamParams>| {
        let sampling = SamplingParams { max_tokens: Some(1 << 15), ..SamplingParams::default() };
        engine.add_request(Request { n, beam, ..Request::new(Prompt::Tokens(vec![1; prompt]), sampling) })
    };
    let limit = "must be at most 4194304, so lower n, or the width of pllm_beam";
    // As many as the limit, and one token more.
    engine.abort(add(1 << 15, 128, None).unwrap()).unwrap();
    let error = add((1 << 15) + 1, 128, None).unwrap_err();
    assert_eq!(error.message(), format!("128 samples of a prompt of 32769 tokens copy 4194432 tokens in one step; {limit}"));
    let width = |width| Some(BeamParams { width, ..BeamParams::default() });
    engine.abort(add(1 << 15, 64, width(64)).unwrap()).unwrap();
    let error = add((1 << 15) + 1, 1, width(64)).unwrap_err();
    assert_eq!(error.message(), format!("64 beams of 65537 tokens copy 4194368 tokens in one step; {limit}"));
}

/// Creates an engine whose next token is the last one plus one.
fn counting() -> Engine {
    scripted(100, |token, _, logits| {
        logits[token as usize + 1] = 9.0;
        Ok(())
    })
}

fn request(tokens: &[u32], sampling: SamplingParams) -> Request {
    Request::new(Prompt::Tokens(tokens.to_vec()), sampling)
}

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::greedy() }
}

/// Steps until all requests have ended, and returns all outputs.
fn run(engine: &Engine) -> Vec<Output> {
    let mut outputs = Vec::new();
    for _ in 0..10_000 {
        let report = engine.step().unwrap();
        outputs.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
        if report.unfinished == 0 {
            return outputs;
        }
    }
    panic!("the requests do not end");
}

fn tokens(outputs: &[Output], request: RequestId) -> Vec<u32> {
    outputs.iter().filter(|output| output.request == request).flat_map(|output| output.tokens.clone()).collect()
}

fn text(outputs: &[Output], request: RequestId) -> String {
    outputs.iter().filter(|output| output.request == request).map(|output| output.text.as_str()).collect()
}

/// Returns the finish reason of a request, which must end exactly once, with its last output.
fn finish(outputs: &[Output], request: RequestId) -> FinishReason {
    let mine: Vec<_> = outputs.iter().filter(|output| output.request == request).collect();
    assert_eq!(mine.iter().filter(|output| output.finish.is_some()).count(), 1);
    mine.last().unwrap().finish.unwrap()
}

#[test]
fn a_sequence_ends_at_max_tokens_at_eos_and_at_a_stop_token() {
    let engine = counting();
    let by_length = engine.add_request(request(&[10], greedy(3))).unwrap();
    let by_eos = engine.add_request(request(&[2], greedy(30))).unwrap();
    let by_stop = engine.add_request(request(&[40], SamplingParams { stop_token_ids: vec![42], ..greedy(30) })).unwrap();
    let past_eos = engine.add_request(request(&[2], SamplingParams { ignore_eos: true, ..greedy(5) })).unwrap();
    let outputs = run(&engine);
    assert_eq!((tokens(&outputs, by_length), finish(&outputs, by_length)), (vec![11, 12, 13], FinishReason::Length));
    assert_eq!((tokens(&outputs, by_eos), finish(&outputs, by_eos)), (vec![3, 4, 5], FinishReason::Stop));
    assert_eq!((tokens(&outputs, by_stop), finish(&outputs, by_stop)), (vec![41, 42], FinishReason::Stop));
    assert_eq!((tokens(&outputs, past_eos), finish(&outputs, past_eos)), (vec![3, 4, 5, 6, 7], FinishReason::Length));
}

#[test]
fn a_sequence_ends_at_max_model_len() {
    let engine = counting();
    let id = engine.add_request(request(&[0; 60], SamplingParams { ignore_eos: true, ..SamplingParams::greedy() })).unwrap();
    let outputs = run(&engine);
    assert_eq!((tokens(&outputs, id).len(), finish(&outputs, id)), (4, FinishReason::Length));
}

/// Returns the progress that the outputs of a request report.
fn progress(outputs: &[Output], request: RequestId) -> Vec<u64> {
    let progress: Vec<&Output> = outputs.iter().filter(|output| output.request == request && output.computed_tokens > 0).collect();
    assert!(progress.iter().all(|output| output.index == 0 && output.tokens.is_empty() && output.finish.is_none()), "{progress:?}");
    progress.iter().map(|output| output.computed_tokens).collect()
}

#[test]
fn a_long_prompt_reports_its_progress_if_it_is_wanted() {
    let options = EngineOptions { prefill_chunk: Some(16), max_batch_tokens: 24, ..EngineOptions::default() };
    let executor = Box::new(Scripted { vocab: 60, logits: Vec::new(), script: Box::new(|_, _, _| Ok(())) });
    let engine = Engine::with_executor(&options, info(60, 64), None, executor).unwrap();
    let prompt: Vec<u32> = (0..50).collect();
    let sampling = SamplingParams { prefill_progress: true, ignore_eos: true, ..greedy(3) };
    let add = |prompt: &[u32], sampling: &SamplingParams| engine.add_request(request(prompt, sampling.clone())).unwrap();
    let id = add(&prompt, &sampling);
    let outputs = run(&engine);
    assert_eq!((progress(&outputs, id), tokens(&outputs, id).len()), (vec![16, 32, 48], 3));
    assert!(outputs[..3].iter().all(|output| output.computed_tokens > 0), "progress precedes the tokens");
    // The prefix cache has 48 tokens. A short prompt has no progress, and others do not want it.
    let (cached, short) = (add(&prompt, &sampling), add(&[59; 16], &sampling));
    let silent = add(&[58; 50], &SamplingParams { prefill_progress: false, ..sampling.clone() });
    // The kind of the other outputs does not matter.
    let last = add(&[57; 40], &SamplingParams { output: OutputKind::Final, ..sampling.clone() });
    let samples = engine.add_request(Request { n: 3, ..request(&[56; 20], sampling.clone()) }).unwrap();
    let beam = Some(BeamParams { width: 2, ..BeamParams::default() });
    let beams = engine.add_request(Request { n: 2, beam, ..request(&[55; 20], SamplingParams { ignore_eos: false, ..sampling }) }).unwrap();
    let outputs = run(&engine);
    for request in [cached, short, silent] {
        assert!(progress(&outputs, request).is_empty());
    }
    for (request, len) in [(last, 40), (samples, 20), (beams, 20)] {
        let found = progress(&outputs, request);
        assert!(!found.is_empty() && found.is_sorted_by(|one, next| one < next) && found.iter().all(|&tokens| tokens < len), "{found:?}");
    }
    assert_eq!(outputs.iter().filter(|output| output.request == last && output.computed_tokens == 0).count(), 1);
}

#[test]
fn a_resumed_sequence_reports_the_progress_of_appended_tokens() {
    let options = EngineOptions { prefill_chunk: Some(16), ..EngineOptions::default() };
    let executor = Box::new(Scripted { vocab: 60, logits: Vec::new(), script: Box::new(|_, _, _| Ok(())) });
    let engine = Engine::with_executor(&options, info(60, 64), None, executor).unwrap();
    let id = engine.add_request(Request { keep: true, ..request(&[1; 8], SamplingParams { ignore_eos: true, ..greedy(1) }) }).unwrap();
    run(&engine);
    engine.append(id.sequence(0), vec![2; 40]).unwrap();
    let sampling = SamplingParams { prefill_progress: true, ignore_eos: true, ..greedy(1) };
    engine.resume(id.sequence(0), Resume::new(sampling)).unwrap();
    // 8 tokens are computed, and the generated one is not.
    assert_eq!(progress(&run(&engine), id), [24, 40]);
}

#[test]
fn min_tokens_delays_the_end_of_sequence_token() {
    // The end-of-sequence token is the most likely token, and token 7 is the second.
    let engine = scripted(10, |_, _, logits| {
        (logits[EOS as usize], logits[7]) = (9.0, 8.0);
        Ok(())
    });
    let id = engine.add_request(request(&[1], SamplingParams { min_tokens: 3, ..greedy(30) })).unwrap();
    assert_eq!(tokens(&run(&engine), id), [7, 7, 7, EOS]);
}

#[test]
fn an_abort_takes_effect_at_the_next_step_and_stale_ids_are_errors() {
    let engine = counting();
    let first = engine.add_request(request(&[10], greedy(50))).unwrap();
    let second = engine.add_request(request(&[20], greedy(2))).unwrap();
    engine.step().unwrap();
    engine.abort(first).unwrap();
    engine.abort(first).unwrap(); // the request has not ended yet, so this is no error
    let outputs = run(&engine);
    assert_eq!((finish(&outputs, first), finish(&outputs, second)), (FinishReason::Abort, FinishReason::Length));
    for id in [first, second, RequestId::from_raw(999)] {
        assert_eq!(engine.abort(id).unwrap_err().code(), Code::NotFound);
    }
    let Stats { blocks_used, blocks_free, blocks_cached, finished_abort, finished_length, .. } = engine.stats();
    assert_eq!((blocks_used, blocks_free, blocks_cached, finished_abort, finished_length), (0, 64, 0, 1, 1));
}

#[test]
fn a_request_aborted_before_its_first_step_never_runs() {
    let engine = counting();
    let id = engine.add_request(request(&[10], greedy(50))).unwrap();
    engine.abort(id).unwrap();
    let outputs = run(&engine);
    assert_eq!((outputs.len(), finish(&outputs, id), engine.stats().steps), (1, FinishReason::Abort, 0));
}

#[test]
fn nan_logits_end_only_their_own_request() {
    let engine = scripted(100, |token, position, logits| {
        logits[token as usize + 1] = if token < 20 && position == 2 { f32::NAN } else { 9.0 };
        Ok(())
    });
    let failing = engine.add_request(request(&[10], greedy(6))).unwrap();
    let healthy = engine.add_request(request(&[30], greedy(6))).unwrap();
    let outputs = run(&engine);
    assert_eq!((finish(&outputs, failing), tokens(&outputs, failing)), (FinishReason::Error, vec![11, 12]));
    assert_eq!((finish(&outputs, healthy), tokens(&outputs, healthy).len()), (FinishReason::Length, 6));
    assert!(outputs.iter().any(|output| output.error.as_ref().is_some_and(|error| error.message().contains("NaN"))));
    assert_eq!(engine.stats().blocks_used, 0);
}

#[test]
fn a_failed_step_loses_no_tokens() {
    let broken = Arc::new(AtomicBool::new(false));
    let switch = broken.clone();
    let engine = scripted(100, move |token, _, logits| {
        logits[token as usize + 1] = 9.0;
        if switch.load(Ordering::Relaxed) { Err(Error::out_of_memory()) } else { Ok(()) }
    });
    let id = engine.add_request(request(&[10], greedy(3))).unwrap();
    engine.step().unwrap();
    broken.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        assert_eq!(engine.step().unwrap_err().code(), Code::OutOfMemory);
    }
    broken.store(false, Ordering::Relaxed);
    assert_eq!(tokens(&run(&engine), id), [11, 12, 13]);
    assert_eq!((engine.stats().blocks_used, engine.stats().steps), (0, 3));
}

#[test]
fn a_defect_ends_every_request_once_and_fails_every_later_call() {
    let engine = scripted(100, |_, _, _| panic!("on purpose"));
    let ids = [engine.add_request(request(&[10], greedy(3))).unwrap(), engine.add_request(request(&[20], greedy(3))).unwrap()];
    let error = engine.step().unwrap_err();
    assert!(error.code() == Code::Internal && error.message().contains("on purpose"), "{error}");
    let outputs: Vec<Output> = engine.queue().poll(Some(Duration::ZERO)).unwrap().into();
    ids.iter().for_each(|&id| assert_eq!(finish(&outputs, id), FinishReason::Error));
    assert_eq!(engine.step().unwrap_err(), error);
    assert_eq!(engine.add_request(request(&[10], greedy(3))).unwrap_err(), error);
    assert_eq!(engine.abort(ids[0]).unwrap_err(), error);
    assert_eq!(engine.queue().poll(None).unwrap_err(), error, "a poll without a timeout returns the error instead of blocking");
}

#[test]
fn a_concurrent_step_returns_busy() {
    let (entered, released) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (has_entered, is_released) = (entered.clone(), released.clone());
    let engine = scripted(100, move |token, _, logits| {
        has_entered.store(true, Ordering::SeqCst);
        while !is_released.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        logits[token as usize + 1] = 9.0;
        Ok(())
    });
    let id = engine.add_request(request(&[10], greedy(1))).unwrap();
    std::thread::scope(|scope| {
        let stepping = scope.spawn(|| engine.step());
        while !entered.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        assert_eq!(engine.step().unwrap_err().code(), Code::Busy);
        // All other calls work while the step runs.
        let other = engine.add_request(request(&[20], greedy(1))).unwrap();
        engine.abort(other).unwrap();
        engine.stats();
        released.store(true, Ordering::SeqCst);
        stepping.join().unwrap().unwrap();
    });
    assert_eq!(finish(&run(&engine), id), FinishReason::Length);
}

#[test]
fn a_poll_waits_for_an_output_and_times_out() {
    let engine = counting();
    assert!(engine.queue().poll(Some(Duration::from_millis(5))).unwrap().is_empty());
    engine.add_request(request(&[10], greedy(1))).unwrap();
    let polled = Mutex::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| *polled.lock().unwrap() = engine.queue().poll(None).unwrap().len());
        std::thread::sleep(Duration::from_millis(5));
        engine.step().unwrap();
    });
    assert_eq!(*polled.lock().unwrap(), 1);
}

/// Polls until the given number of requests have ended, and returns all outputs.
fn read(queue: &Queue, requests: usize) -> Vec<Output> {
    let mut outputs = Vec::new();
    while outputs.iter().filter(|output: &&Output| output.finish.is_some()).count() < requests {
        let batch = queue.poll(Some(Duration::from_secs(300))).unwrap();
        assert!(!batch.is_empty(), "no output arrived for 300 s");
        outputs.extend(batch);
    }
    outputs
}

#[test]
fn a_started_engine_serves_many_threads_with_one_queue_each() {
    let engine = counting();
    engine.start().unwrap();
    std::thread::scope(|scope| {
        for start in 10..26 {
            let engine = &engine;
            scope.spawn(move || {
                let queue = engine.create_queue(4).unwrap();
                let ids = [0, 1, 2].map(|_| engine.add_request_to(&queue, request(&[start], greedy(20))).unwrap());
                let outputs = read(&queue, 3);
                let expected: Vec<u32> = (start + 1..=start + 20).collect();
                ids.iter().for_each(|&id| assert_eq!(tokens(&outputs, id), expected));
            });
        }
    });
    assert_eq!((engine.stats().finished_length, engine.stats().blocks_used), (48, 0));
}

#[test]
fn a_started_engine_refuses_steps_until_it_is_stopped() {
    let engine = counting();
    engine.stop();
    engine.start().unwrap();
    assert_eq!(engine.step().unwrap_err().code(), Code::Busy, "the engine is busy immediately after start");
    assert_eq!(engine.start().unwrap_err().code(), Code::Busy);
    let first = engine.add_request(request(&[10], greedy(3))).unwrap();
    assert_eq!(finish(&read(engine.queue(), 1), first), FinishReason::Length);
    assert_eq!(engine.step().unwrap_err().code(), Code::Busy);
    engine.stop();
    let second = engine.add_request(request(&[20], greedy(3))).unwrap();
    assert_eq!(engine.queue().poll(Some(Duration::from_millis(30))).unwrap().len(), 0);
    assert_eq!(tokens(&run(&engine), second), [21, 22, 23]);
    engine.start().unwrap();
    engine.add_request(request(&[10], greedy(3))).unwrap();
    read(engine.queue(), 1);
}

#[test]
fn a_full_queue_pauses_only_its_own_requests_and_loses_no_output() {
    let engine = counting();
    let (slow, quick) = (engine.create_queue(3).unwrap(), engine.create_queue(1000).unwrap());
    let held = [30, 31].map(|token| engine.add_request_to(&slow, request(&[token], greedy(20))).unwrap());
    let free = [32, 33].map(|token| engine.add_request_to(&quick, request(&[token], greedy(20))).unwrap());
    let mut paused = 0;
    while engine.stats().finished_length < 2 {
        paused = paused.max(engine.step().unwrap().paused);
    }
    assert_eq!((paused, engine.stats().paused, engine.step().unwrap().sequences), (2, 2, 0));
    let outputs = read_now(&quick);
    free.iter().for_each(|&id| assert_eq!(tokens(&outputs, id).len(), 20));
    let mut outputs = Vec::new();
    while engine.step().unwrap().unfinished > 0 {
        let batch = read_now(&slow);
        assert!(batch.len() <= 3 + held.len(), "{} outputs", batch.len());
        outputs.extend(batch);
    }
    outputs.extend(read_now(&slow));
    assert_eq!(tokens(&outputs, held[0]), (31..=50).collect::<Vec<_>>());
    assert_eq!(tokens(&outputs, held[1]), (32..=51).collect::<Vec<_>>());
}

fn read_now(queue: &Queue) -> Vec<Output> {
    queue.poll(Some(Duration::ZERO)).unwrap().into()
}

#[test]
fn polling_a_full_queue_wakes_the_driver() {
    let steps = Arc::new(AtomicU64::new(0));
    let counted = steps.clone();
    let engine = scripted(100, move |token, _, logits| {
        counted.fetch_add(1, Ordering::SeqCst);
        logits[token as usize + 1] = 9.0;
        Ok(())
    });
    engine.start().unwrap();
    let queue = engine.create_queue(1).unwrap();
    let id = engine.add_request_to(&queue, request(&[10], greedy(40))).unwrap();
    let outputs = read(&queue, 1);
    assert_eq!((tokens(&outputs, id).len(), steps.load(Ordering::SeqCst)), (40, 40));
}

#[test]
fn dropping_a_queue_aborts_only_the_requests_that_write_to_it() {
    let engine = counting();
    let queue = engine.create_queue(100).unwrap();
    engine.add_request_to(&queue, request(&[10], greedy(40))).unwrap();
    let other = engine.add_request(request(&[20], greedy(5))).unwrap();
    engine.step().unwrap();
    drop(queue);
    let outputs = run(&engine);
    assert_eq!((tokens(&outputs, other).len(), outputs.iter().all(|output| output.request == other)), (5, true));
    assert_eq!((engine.stats().finished_abort, engine.stats().blocks_used), (1, 0));
}

#[test]
fn a_queue_outlives_its_engine_and_reports_closed() {
    let engine = counting();
    let queue = engine.create_queue(100).unwrap();
    let running = engine.add_request_to(&queue, request(&[10], greedy(40))).unwrap();
    engine.step().unwrap();
    let waiting = engine.add_request_to(&queue, request(&[20], greedy(40))).unwrap();
    drop(engine);
    let outputs = read_now(&queue);
    assert_eq!((finish(&outputs, running), finish(&outputs, waiting)), (FinishReason::Abort, FinishReason::Abort));
    assert_eq!(tokens(&outputs, running), [11]);
    let last = |id| outputs.iter().rfind(|output| output.request == id).unwrap();
    for id in [running, waiting] {
        assert_eq!(last(id).error.as_ref().unwrap().code(), Code::Closed);
        assert_eq!(last(id).prompt_tokens, 1);
    }
    assert_eq!(queue.poll(None).unwrap_err().code(), Code::Closed);
}

#[test]
fn an_unread_queue_eventually_refuses_requests() {
    let engine = counting();
    let queue = engine.create_queue(1).unwrap();
    let mut added = 0;
    let error = loop {
        match engine.add_request_to(&queue, request(&[10], greedy(40))) {
            Ok(id) => engine.abort(id).unwrap(),
            Err(error) => break error,
        }
        engine.step().unwrap();
        added += 1;
        assert!(added < 1000, "memory would grow without bound");
    };
    assert_eq!((error.code(), added), (Code::Capacity, 1 + EngineOptions::default().max_seqs));
    assert_eq!(read_now(&queue).len(), added);
    engine.add_request_to(&queue, request(&[10], greedy(40))).unwrap();
}

/// A reader that lags at times competes with younger requests for a single sequence slot. Its
/// request is never delayed for long.
#[test]
fn a_request_with_a_slow_reader_keeps_its_scheduling_rank() {
    let executor = Box::new(Scripted {
        vocab: 100,
        logits: Vec::new(),
        script: Box::new(|_, _, logits| {
            logits[7] = 9.0;
            Ok(())
        }),
    });
    let engine = Engine::with_executor(&EngineOptions { max_seqs: 1, ..Default::default() }, info(100, 64), None, executor).unwrap();
    let slow = engine.create_queue(4).unwrap();
    let id = engine.add_request_to(&slow, request(&[10], greedy(40))).unwrap();
    (0..50).for_each(|_| {
        engine.add_request(request(&[20], greedy(40))).unwrap();
    });
    let (mut outputs, mut steps) = (Vec::new(), 0);
    while outputs.iter().all(|output: &Output| output.finish.is_none()) {
        engine.step().unwrap();
        steps += 1;
        if steps % 6 == 0 {
            outputs.extend(read_now(&slow));
        }
    }
    assert_eq!(tokens(&outputs, id).len(), 40);
    assert!(steps <= 40 * 6 / 4 + 6, "{steps} steps for 40 tokens, four at a time every six steps");
}

#[test]
fn a_queue_of_another_engine_and_a_zero_capacity_are_refused() {
    let (engine, other) = (counting(), counting());
    let queue = other.create_queue(1).unwrap();
    let error = engine.add_request_to(&queue, request(&[10], greedy(1))).unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("another engine"), "{error}");
    assert_eq!(engine.create_queue(0).err().unwrap().code(), Code::InvalidArgument);
}

#[test]
fn the_driver_ends_failing_requests_and_serves_later_requests() {
    let engine = scripted(100, |token, _, logits| {
        logits[token as usize + 1] = 9.0;
        if token == 13 { Err(Error::out_of_memory()) } else { Ok(()) }
    });
    engine.start().unwrap();
    let failing = engine.add_request(request(&[10], greedy(30))).unwrap();
    let outputs = read(engine.queue(), 1);
    assert_eq!((tokens(&outputs, failing), finish(&outputs, failing)), (vec![11, 12, 13], FinishReason::Error));
    let error = outputs.last().unwrap().error.as_ref().unwrap();
    assert_eq!(error.code(), Code::OutOfMemory);
    assert!(
        error.message().contains("no step with this request could be computed") && error.message().contains("lower the budgets"),
        "{error}"
    );
    let healthy = engine.add_request(request(&[50], greedy(3))).unwrap();
    assert_eq!(finish(&read(engine.queue(), 1), healthy), FinishReason::Length);
}

#[test]
fn a_defect_in_the_driver_is_reported_by_every_queue() {
    let engine = scripted(100, |_, _, _| panic!("on purpose"));
    let (queue, idle) = (engine.create_queue(10).unwrap(), engine.create_queue(10).unwrap());
    engine.start().unwrap();
    let id = engine.add_request_to(&queue, request(&[10], greedy(3))).unwrap();
    assert_eq!(finish(&read(&queue, 1), id), FinishReason::Error);
    for queue in [&queue, &idle, engine.queue()] {
        assert_eq!(queue.poll(None).unwrap_err().code(), Code::Internal);
    }
    engine.stop();
    assert_eq!(engine.start().unwrap_err().code(), Code::Internal);
}

#[test]
fn loading_reports_progress_and_can_be_cancelled() {
    let options = EngineOptions { model_dir: support::bundled_model(), ..Default::default() };
    let mut progress = Vec::new();
    Engine::load(&options, &mut |done, total| {
        progress.push((done, total));
        true
    })
    .unwrap();
    let total = progress[0].1;
    assert!(progress.is_sorted() && progress.len() > 10 && progress.iter().all(|(_, all)| *all == total), "{progress:?}");
    assert_eq!((progress[0].0, progress.last().unwrap().0), (0, total));
    for stop_at in [0, progress.len() / 2, progress.len() - 1] {
        let mut calls = 0;
        let error = Engine::load(&options, &mut |_, _| {
            calls += 1;
            calls <= stop_at
        });
        let error = error.err().unwrap();
        assert!(error.code() == Code::Cancelled && error.message().contains(&format!("of {total} bytes")), "{error}");
        assert_eq!(calls, stop_at + 1);
    }
}

#[test]
fn slot_utilization_is_the_share_of_used_slots_that_hold_tokens() {
    let engine = counting();
    assert_eq!(engine.stats().slot_utilization, 1.0);
    engine.add_request(request(&[10; 11], greedy(30))).unwrap();
    engine.step().unwrap();
    // 11 tokens in 2 blocks of 8.
    let Stats { blocks_used, blocks_free, slot_utilization, .. } = engine.stats();
    assert_eq!((blocks_used, blocks_free, slot_utilization), (2, 62, 11.0 / 16.0));
}

#[test]
fn request_ids_are_ordered_across_threads() {
    let engine = counting();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..50).for_each(|_| drop(engine.add_request(request(&[10], greedy(2))))));
        }
    });
    // The scheduler's queues are sorted by age. If ids were out of order, the scheduler would panic
    // and the engine fail.
    let outputs = run(&engine);
    assert!((1..=200).all(|id| finish(&outputs, RequestId::from_raw(id)) == FinishReason::Length));
}

#[test]
fn a_step_runs_one_matmul_per_weight_for_any_number_of_sequences() {
    let files = ModelFiles::open(&support::goldens().join("llama")).unwrap();
    let backend = CpuBackend::new(2, None).unwrap();
    let kv = KvCache::new(&backend, &files.spec, KvPool { blocks: 64, block_size: 16, dtype: KvDtype::F32 }).unwrap();
    let decoder = files.load(backend, BatchLimits { tokens: 64, logits: 32 }, &mut |_, _| true).unwrap();
    let mut executor = ModelExecutor::new(decoder, kv);
    let options = SchedulerOptions { max_batch_tokens: 64, max_seqs: 32, prefill_chunk: 64, preemption: Preemption::Recompute };
    let mut scheduler = Scheduler::new(options, BlockManager::new(64, Paging::without_windows(16), false).unwrap()).unwrap();
    for id in 1..=24 {
        let arrival = support::new_group(vec![id as u32; 2], 20);
        scheduler.add(SeqId::from_raw(id), arrival.prepare(&Paging::without_windows(16)).unwrap()).unwrap();
    }
    let before = executor.backend().matmuls();
    let plan = scheduler.schedule(|_| true).unwrap();
    assert_eq!(plan.sequences.len(), 24);
    let ticket = executor.submit(&plan.batch).unwrap();
    executor.wait(ticket).unwrap();
    let per_layer = 4; // qkv, attention output, gate and up, down
    assert_eq!(executor.backend().matmuls() - before, (files.spec.layers.len() * per_layer + 1) as u64);
    scheduler.rollback(plan);
}

#[test]
fn beams_are_output_only_when_the_search_is_done() {
    let engine = counting();
    let beam = Some(BeamParams { width: 3, ..BeamParams::default() });
    let id = engine.add_request(Request { n: 2, beam, ..request(&[10], greedy(4)) }).unwrap();
    let outputs = run(&engine);
    assert_eq!(outputs.iter().map(|output| (output.request, output.index)).collect::<Vec<_>>(), [(id, 0), (id, 1)]);
    assert!(outputs[0].tokens == [11, 12, 13, 14] && outputs.iter().all(|output| output.finish == Some(FinishReason::Length)));
    assert!(id.sequences(2).all(|seq| engine.sequence(seq).is_err()));
    assert_eq!(engine.stats().blocks_used, 0);
}

#[test]
fn a_fork_of_a_parent_that_ended_in_the_same_step_ends_too() {
    let engine = counting();
    let parent = engine.add_request(Request { keep: true, ..request(&[10], greedy(9)) }).unwrap();
    engine.step().unwrap();
    engine.abort(parent).unwrap();
    let child = engine.fork(parent.sequence(0), 1, &Fork::default()).unwrap()[0];
    engine.append(parent.sequence(0), vec![20, 21]).unwrap();
    let outputs = run(&engine);
    assert_eq!((finish(&outputs, parent), finish(&outputs, child.own_request())), (FinishReason::Abort, FinishReason::Abort));
    let infos = [parent.sequence(0), child].map(|id| engine.sequence(id).unwrap()).map(|info| (info.idle, info.len));
    assert_eq!(infos, [(true, 4), (true, 2)]);
}

#[test]
fn a_request_aborted_before_its_samples_exist_keeps_the_first_sequence() {
    let engine = counting();
    let id = engine.add_request(Request { n: 3, keep: true, ..request(&[10], greedy(9)) }).unwrap();
    engine.abort(id).unwrap();
    let outputs = run(&engine);
    assert_eq!(outputs.iter().map(|output| output.finish).collect::<Vec<_>>(), [Some(FinishReason::Abort); 3]);
    assert!(engine.sequence(id.sequence(0)).unwrap().idle && engine.sequence(id.sequence(1)).is_err());
    engine.free(id.sequence(0)).unwrap();
    engine.step().unwrap();
    assert_eq!((engine.stats().idle, engine.stats().blocks_used), (0, 0));
}

// The bundled model: text in, text out.

fn bundled(options: EngineOptions) -> Engine {
    Engine::create(&EngineOptions { model_dir: support::bundled_model(), ..options }).unwrap()
}

fn expected() -> Vec<serde_json::Value> {
    let json = std::fs::read(support::bundled_model().join("expected.json")).unwrap();
    serde_json::from_slice(&json).unwrap()
}

fn chat(engine: &Engine, messages: &serde_json::Value, sampling: SamplingParams) -> RequestId {
    let prompt = engine.text().unwrap().render_chat(&messages.to_string()).unwrap();
    engine.add_request(Request { add_special: false, ..Request::new(Prompt::Text(prompt), sampling) }).unwrap()
}

#[test]
fn a_batch_on_the_bundled_model_matches_the_answers_of_transformers() {
    let engine = bundled(EngineOptions { kv_dtype: Some(KvDtype::F32), ..Default::default() });
    let cases = expected();
    let ids: Vec<RequestId> = cases.iter().map(|case| chat(&engine, &case["messages"], SamplingParams::greedy())).collect();
    let outputs = run(&engine);
    for (case, id) in cases.iter().zip(ids) {
        let expected: Vec<u32> = case["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(tokens(&outputs, id), expected, "{}", case["prompt"]);
        assert_eq!(text(&outputs, id), case["answer"].as_str().unwrap());
        assert_eq!(finish(&outputs, id), FinishReason::Stop);
        assert_eq!(engine.text().unwrap().render_chat(&case["messages"].to_string()).unwrap(), case["prompt"].as_str().unwrap());
    }
}

#[test]
fn text_ends_before_a_stop_string_that_spans_tokens() {
    let engine = bundled(EngineOptions::default());
    let messages = serde_json::json!([{"role": "user", "content": "What are the days of the week?"}]);
    let stop = |stop: &str| SamplingParams { stop: vec![stop.into()], ..SamplingParams::greedy() };
    let spanning = chat(&engine, &messages, stop("y, Wed"));
    let late = chat(&engine, &messages, SamplingParams { min_tokens: 9, ..stop(",") });
    let outputs = run(&engine);
    assert_eq!((text(&outputs, spanning).as_str(), finish(&outputs, spanning)), ("Monday, Tuesda", FinishReason::Stop));
    let seen = text(&outputs, late);
    assert!(seen.starts_with("Monday, Tuesday, ") && !seen.ends_with(','), "{seen}");
}

#[test]
fn streamed_text_has_whole_characters_and_concatenates_to_the_full_text() {
    let engine = bundled(EngineOptions { seed: 3, ..Default::default() });
    let hot = SamplingParams { temperature: 3.0, max_tokens: Some(200), ignore_eos: true, ..Default::default() };
    let ids: Vec<RequestId> = (0..8).map(|_| chat(&engine, &serde_json::json!([{"role": "user", "content": "Hi"}]), hot.clone())).collect();
    let outputs = run(&engine);
    for id in ids {
        let whole = engine.text().unwrap().decode(&tokens(&outputs, id), true).unwrap();
        assert_eq!(text(&outputs, id), whole);
    }
}

/// The host may set any rounding mode and flush subnormals. The answers stay the same.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_floating_point_mode_of_the_host_changes_no_output() {
    let mode = |mode: u32| {
        // SAFETY: loads the SSE control register with a valid value.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, preserves_flags)) };
    };
    let answer = || {
        let engine = bundled(EngineOptions { threads: Some(2), ..Default::default() });
        let messages = serde_json::json!([{"role": "user", "content": "Tell me a story about a dog."}]);
        chat(&engine, &messages, SamplingParams { logprobs: Some(0), max_tokens: Some(40), ..SamplingParams::greedy() });
        run(&engine).iter().flat_map(|output| output.logprobs.tokens.iter().map(|p| p.to_bits()).collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    let expected = answer();
    mode(0x1F80 | 0x8040 | 0x4000); // flush subnormals, round up
    let found = answer();
    mode(0x1F80);
    assert_eq!((expected.len(), expected), (40, found));
}

#[test]
fn tokens_missing_from_the_tokenizer_have_no_text_and_stay_in_the_output() {
    let dir = support::TempDir::new();
    for entry in std::fs::read_dir(support::bundled_model()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.0.join(path.file_name().unwrap())).unwrap();
    }
    // A tokenizer of 16 KB and some 300 tokens for a model of 1024.
    std::fs::copy(support::goldens().join("tokenizers/byte_level/tokenizer.json"), dir.0.join("tokenizer.json")).unwrap();
    let engine = Engine::create(&EngineOptions { model_dir: dir.0.clone(), ..Default::default() }).unwrap();
    let known = engine.text().unwrap().vocab_size() as u32;
    let hot = SamplingParams { temperature: 5.0, max_tokens: Some(100), ignore_eos: true, ..Default::default() };
    let id = engine.add_request(request(&[1, 2], hot)).unwrap();
    let outputs = run(&engine);
    let tokens = tokens(&outputs, id);
    assert!(tokens.len() == 100 && tokens.iter().any(|&token| token >= known), "{tokens:?}");
    assert_eq!(finish(&outputs, id), FinishReason::Length);
}

#[test]
fn an_abort_emits_the_text_held_back_for_a_stop_string() {
    let engine = bundled(EngineOptions::default());
    let messages = serde_json::json!([{"role": "user", "content": "What are the days of the week?"}]);
    let id = chat(&engine, &messages, SamplingParams { stop: vec!["Monday, Tuesday, never".into()], ..SamplingParams::greedy() });
    engine.step().unwrap();
    engine.step().unwrap();
    engine.abort(id).unwrap();
    let outputs = run(&engine);
    assert_eq!((text(&outputs, id).as_str(), finish(&outputs, id)), ("Monday,", FinishReason::Abort));
}

/// The vocabularies of the tokenizer and of the model have the same size.
#[test]
fn the_bundled_model_is_consistent_and_small() {
    let text = Text::load(&support::bundled_model()).unwrap();
    let engine = bundled(EngineOptions::default());
    assert_eq!(text.vocab_size(), engine.info().vocab_size);
    let size = std::fs::metadata(support::bundled_model().join("model.safetensors")).unwrap().len();
    assert!(size <= 6_000_000, "{size} bytes");
}

#[test]
fn an_engine_uses_exactly_its_planned_memory() {
    let options = EngineOptions { model_dir: support::bundled_model(), kv_bytes: Some(10 << 20), ..Default::default() };
    let plan = Engine::plan(&options).unwrap();
    assert_eq!(Engine::create(&options).unwrap().info().memory, plan);
    assert_eq!(plan.kv_bytes, plan.blocks as u64 * plan.block_bytes);
    assert!(plan.kv_bytes <= 10 << 20 && plan.kv_bytes > (10 << 20) - plan.block_bytes);
    // 2,623,744 parameters in bf16, the norms in f32; tied embeddings count once.
    assert!((5_247_488..5_300_000).contains(&plan.weight_bytes), "{}", plan.weight_bytes);
}
