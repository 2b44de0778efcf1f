//! If the memory for an output is missing, every request still ends and the process continues.

use std::time::Duration;

use pagedllm::engine::{Continue, Engine, Output, Prompt, Request};
use pagedllm::error::Code;
use pagedllm::types::{RequestId, SeqId};

use super::failing_allocator::{alone, fail_all_allocations, fail_allocation, live_bytes};
use super::{Fixture, options, sampling_for};

fn poll(engine: &Engine) -> Vec<Output> {
    engine.queue().poll(Some(Duration::ZERO)).unwrap().into()
}

/// Creates an engine with a short idle sequence.
fn idle() -> (Engine, SeqId) {
    let engine = Engine::create(&options()).unwrap();
    let id =
        engine.add_request(Request { keep: true, ..Request::new(Prompt::Tokens(vec![5; 20]), sampling_for(3, 3)) }).unwrap().sequence(0);
    while !engine.sequence(id).is_ok_and(|sequence| sequence.idle) {
        engine.step().unwrap();
    }
    poll(&engine);
    (engine, id)
}

#[test]
fn an_export_without_memory_is_delivered_when_memory_is_available() {
    let _alone = alone();
    let (engine, id) = idle();
    (0..200).for_each(|_| engine.export(id, None).unwrap());
    fail_all_allocations(|| engine.step()).0.unwrap();
    engine.step().unwrap();
    let outputs = poll(&engine);
    assert_eq!(outputs.len(), 200, "each export has one output");
    assert!(outputs.iter().all(|output| output.finish.is_none() && output.error.is_some() == output.sequence_state.is_empty()));
}

#[test]
fn every_request_ends_once_without_memory_for_outputs() {
    let engine = Engine::create(&options()).unwrap();
    let ids: Vec<RequestId> =
        (0..200).map(|i| engine.add_request(Request::new(Prompt::Tokens(vec![5 + i; 20]), sampling_for(8, 3))).unwrap()).collect();
    // The queue is not read during these steps.
    for _ in 0..400 {
        let (_, found) = fail_all_allocations(|| engine.step());
        assert!(
            found.iter().all(|site| !site.name().starts_with("src/engine/")),
            "these infallible allocations would abort the process: {found:?}"
        );
    }
    let mut ended: Vec<RequestId> = poll(&engine).iter().filter(|output| output.finish.is_some()).map(|output| output.request).collect();
    ended.sort();
    assert_eq!(ended, ids, "each request ended once");
}

#[test]
fn a_failed_append_adds_no_tokens() {
    for passed in 0.. {
        let mut fixture = Fixture::new();
        let id = fixture.kept_sequence();
        let before = fixture.engine.sequence(id).unwrap().len;
        fixture.engine.append(id, vec![50; 200]).unwrap();
        let (_, injected) = fail_allocation(passed, || fixture.engine.step());
        let failed = poll(&fixture.engine).iter().any(|output| output.sequence == id && output.error.is_some());
        let len = fixture.engine.sequence(id).unwrap().len;
        assert_eq!(len, if failed { before } else { before + 200 }, "after {passed}");
        if !injected {
            assert!(passed > 0);
            break;
        }
    }
}

#[test]
fn a_failed_continue_call_leaves_no_request() {
    for passed in 0.. {
        let mut fixture = Fixture::new();
        let id = fixture.kept_sequence();
        // Fills the waiting lists, so that a further request makes them grow.
        for _ in 0..64 {
            fixture.engine.add_request(Request::new(Prompt::Tokens(vec![5; 4]), sampling_for(1, 3))).unwrap();
        }
        let (result, injected) =
            fail_allocation(passed, || fixture.engine.continue_sequence(id, Continue { keep: true, ..Continue::default() }));
        assert!(result.is_ok() || result.is_err_and(|error| error.code() == Code::OutOfMemory));
        fixture.drain();
        if !injected {
            break;
        }
    }
}

#[test]
fn an_idle_queue_takes_few_bytes() {
    let _alone = alone();
    const QUEUES: isize = 1000;
    let engine = Engine::create(&options()).unwrap();
    let run = || {
        let queue = engine.create_queue(64).unwrap();
        engine.add_request_to(&queue, Request::new(Prompt::Tokens(vec![5; 20]), sampling_for(9, 3))).unwrap();
        while queue.poll_batch(Some(Duration::ZERO), |_| Ok(())).unwrap().iter().all(|(output, _)| output.finish.is_none()) {
            engine.step().unwrap();
        }
        queue
    };
    run();
    let before = live_bytes();
    let queues: Vec<_> = (0..QUEUES).map(|_| run()).collect();
    let bytes = (live_bytes() - before) / QUEUES;
    assert!(bytes < 2048, "each of {} idle queues takes {bytes} bytes", queues.len());
}
