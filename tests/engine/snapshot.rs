//! Snapshots of an engine to be displayed.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::telemetry::{engine, engine_with, request};
use crate::support;
use pagedllm::engine::{Engine, Executor, Fork, InFlightStep, LogitsHook, Prompt, Request, StepOutput};
use pagedllm::error::{Code, Result};
use pagedllm::types::batch::Batch;
use pagedllm::types::options::{EngineOptions, Preemption, SamplingParams};
use serde_json::{Value, json};

fn read(engine: &Engine) -> Value {
    let snapshot = serde_json::from_str(&engine.snapshot(1000, 1000).unwrap()).unwrap();
    check(&snapshot);
    snapshot
}

/// Checks that the parts of a snapshot agree.
fn check(snapshot: &Value) {
    for tier in ["pool", "host_tier"] {
        let tier = &snapshot[tier];
        let number = |name: &str| tier[name].as_u64().unwrap();
        let of_state = |state: &str| -> u64 {
            tier["runs"].as_array().unwrap().iter().filter(|run| run[1] == state).map(|run| run[0].as_u64().unwrap()).sum()
        };
        for state in ["free", "cached", "used"].into_iter().filter(|state| tier.get(state).is_some()) {
            assert_eq!(of_state(state), number(state), "{state} blocks of {tier}");
        }
        assert_eq!(number("free") + number("cached") + number("used"), number("blocks"));
    }
    let of_state = |state: &str| snapshot["sequences"].as_array().unwrap().iter().filter(|sequence| sequence["state"] == state).count();
    let count = |name: &str| snapshot["counts"][name].as_u64().unwrap() as usize;
    assert_eq!(of_state("running"), count("running"));
    assert_eq!(of_state("waiting") + of_state("paused"), count("waiting"));
}

#[test]
fn a_snapshot_shows_blocks_sequences_and_steps() {
    let (engine, _) = engine(EngineOptions { max_seqs: 1, ..Default::default() }, 8);
    let empty = read(&engine);
    assert_eq!(empty["pool"], json!({"blocks": 8, "free": 8, "cached": 0, "used": 0, "runs": [[8, "free"]]}));
    assert_eq!((&empty["sequences"], &empty["steps"]), (&json!([]), &json!([])));
    let requests = [20, 12].map(|end| engine.add_request(Request { keep: true, ..request(0..end, 3) }).unwrap().get());
    engine.step().unwrap();
    let snapshot = read(&engine);
    assert_eq!(snapshot["pool"]["runs"], json!([[3, "used", 1, requests[0]], [5, "free"]]));
    let mut running = json!({"sequence": requests[0], "request": requests[0], "state": "running", "tokens": 21, "max_len": 23,
        "computed_tokens": 20, "cached_tokens": 0, "generated_tokens": 1, "blocks": 3, "tier": "pool"});
    assert_eq!(snapshot["sequences"][0], running);
    assert_eq!((&snapshot["sequences"][1]["request"], &snapshot["sequences"][1]["state"]), (&json!(requests[1]), &json!("waiting")));
    // A step takes one millisecond per token.
    assert_eq!(snapshot["steps"], json!([{"start": 0.0, "seconds": 0.02, "prefill_tokens": 20, "decode_tokens": 0, "sequences": 1}]));
    assert_eq!((&snapshot["time"], &snapshot["block_size"], &snapshot["layer_groups"]), (&json!(0.02), &json!(8), &json!(1)));
    while engine.step().unwrap().sequences > 0 {}
    let snapshot = read(&engine);
    (running["state"], running["tokens"], running["computed_tokens"]) = (json!("idle"), json!(23), json!(22));
    running["generated_tokens"] = json!(3);
    let sequences = snapshot["sequences"].as_array().unwrap();
    assert!(sequences.contains(&running), "{snapshot}");
    // The second prompt began with a block of the first one.
    assert_eq!(sequences.iter().map(|sequence| sequence["cached_tokens"].as_u64().unwrap()).sum::<u64>(), 8);
    let shared = snapshot["pool"]["runs"].as_array().unwrap().iter().filter(|run| run[2] == 2).map(|run| run[0].as_u64().unwrap());
    assert_eq!(shared.sum::<u64>(), 1, "{snapshot}");
    let steps = snapshot["steps"].as_array().unwrap();
    assert_eq!((steps.len(), &steps[5]["decode_tokens"], &snapshot["counts"]["steps"]), (6, &json!(1), &json!(6)));
    let sequences = sequences.iter().map(|sequence| sequence["sequence"].as_u64().unwrap());
    sequences.for_each(|sequence| engine.free(pagedllm::types::SeqId::from_raw(sequence)).unwrap());
    engine.step().unwrap();
    let pool = &read(&engine)["pool"];
    assert_eq!((&pool["used"], &pool["cached"], &pool["free"]), (&json!(0), &json!(2), &json!(6)));
}

#[test]
fn a_snapshot_shows_the_host_tier() {
    let mut info = support::model_info(50, 10, 64, vec![]);
    info.memory.swap_blocks = 20;
    let options = EngineOptions { preemption: Preemption::Swap, swap_bytes: 1, prefix_cache: false, ..EngineOptions::default() };
    let (engine, _) = engine_with(options, info);
    let requests = [0, 1].map(|first| engine.add_request(request(first..first + 30, 20)).unwrap().get());
    while engine.stats().swap_blocks_used == 0 {
        engine.step().unwrap();
    }
    let (snapshot, used) = (read(&engine), engine.stats().swap_blocks_used);
    let swapped = snapshot["sequences"].as_array().unwrap().iter().find(|sequence| sequence["tier"] == "host").unwrap();
    assert_eq!((&swapped["sequence"], &swapped["state"], &swapped["blocks"]), (&json!(requests[1]), &json!("waiting"), &json!(used)));
    let expected =
        json!({"blocks": 20, "free": 20 - used, "cached": 0, "used": used, "runs": [[used, "used", 1, requests[1]], [20 - used, "free"]]});
    assert_eq!(snapshot["host_tier"], expected);
    assert_eq!(snapshot["counts"]["swapped"], json!(1));
}

#[test]
fn a_snapshot_shows_forks_and_pins() {
    let (engine, _) = engine(EngineOptions::default(), 12);
    let parent = engine.add_request(Request { keep: true, ..request(0..20, 3) }).unwrap().sequence(0);
    while engine.step().unwrap().sequences > 0 {}
    let children = engine.fork(parent, 2, &Fork { idle: true, ..Fork::default() }).unwrap();
    engine.pin(Prompt::Tokens((5..14).collect()), false, &[], 0, None).unwrap();
    for _ in 0..3 {
        engine.step().unwrap();
    }
    let snapshot = read(&engine);
    let sequences = snapshot["sequences"].as_array().unwrap();
    let state_of = |id: u64| &sequences.iter().find(|sequence| sequence["sequence"] == id).unwrap()["state"];
    assert!(children.iter().all(|child| state_of(child.get()) == "idle"));
    let pin = sequences.iter().find(|sequence| sequence["state"] == "pinned").unwrap();
    assert_eq!((&pin["request"], &pin["tokens"]), (&json!(0), &json!(9)));
    assert!(snapshot["pool"]["runs"].as_array().unwrap().iter().any(|run| run[2] == 3), "{snapshot}");
}

#[test]
fn a_snapshot_has_at_most_as_much_as_was_wanted() {
    let (engine, _) = engine(EngineOptions::default(), 8);
    for first in 0..3 {
        engine.add_request(request(first..first + 12, 3)).unwrap();
    }
    engine.step().unwrap();
    let limited = |blocks, sequences| -> Value { serde_json::from_str(&engine.snapshot(blocks, sequences).unwrap()).unwrap() };
    let snapshot = limited(5, 1);
    let runs = snapshot["pool"]["runs"].as_array().unwrap();
    assert_eq!(runs.iter().map(|run| run[0].as_u64().unwrap()).sum::<u64>(), 5);
    assert_eq!((snapshot["sequences"].as_array().unwrap().len(), &snapshot["sequences_omitted"]), (1, &json!(2)));
    // The blocks of a sequence that is not listed are used by an unknown one.
    assert!(runs.iter().any(|run| run[1] == "used" && run[3] == 0), "{snapshot}");
    assert_eq!((&snapshot["pool"]["used"], &snapshot["counts"]["running"]), (&json!(6), &json!(3)));
    let nothing = limited(0, 0);
    assert_eq!((&nothing["pool"]["runs"], &nothing["sequences"]), (&json!([]), &json!([])));
    limited(usize::MAX, usize::MAX);
}

/// The threads read while the host steps, while the thread of the engine steps, and while that
/// thread sleeps.
#[test]
fn threads_read_snapshots_while_the_engine_steps() {
    let (engine, _) = engine(EngineOptions::default(), 8);
    let ends = AtomicBool::new(false);
    let add = || engine.add_request(request(0..20, 40)).unwrap();
    thread::scope(|scope| {
        let readers = [0, 1].map(|_| {
            scope.spawn(|| {
                for _ in 0..40 {
                    read(&engine);
                    // Calls without pauses meet the moments between two steps.
                    (0..50).for_each(|_| drop(engine.snapshot(1000, 1000).unwrap()));
                }
            })
        });
        scope.spawn(|| {
            while !ends.load(SeqCst) {
                // With a full queue, a step has no sequence.
                engine.queue().poll(Some(Duration::ZERO)).unwrap();
                if engine.step().expect("a reader must not make the engine busy").unfinished == 0 {
                    add();
                }
            }
        });
        // The thread that steps ends with a failed reader, too.
        let results = readers.map(|reader| reader.join());
        ends.store(true, SeqCst);
        results.into_iter().for_each(|result| result.unwrap());
    });
    engine.start().unwrap();
    for round in 0..50 {
        if round % 2 == 0 {
            add();
        }
        read(&engine);
    }
    engine.stop();
    read(&engine);
}

/// A hook runs in the middle of a step, so it would wait for itself.
#[test]
fn a_hook_gets_no_snapshot_of_its_own_engine() {
    let (other, _) = engine(EngineOptions::default(), 8);
    let (engine, _) = engine(EngineOptions::default(), 8);
    let (engine, results) = (Arc::new(engine), Arc::new(Mutex::new(Vec::new())));
    let (inner, found) = (Arc::downgrade(&engine), results.clone());
    let hook: LogitsHook = Arc::new(move |_, _, _| {
        let own = inner.upgrade().unwrap().snapshot(10, 10).map(drop).map_err(|error| error.code());
        found.lock().unwrap().push((own, other.snapshot(10, 10).is_ok()));
    });
    engine.add_request(Request { hook: Some(hook), ..request(0..5, 1) }).unwrap();
    engine.step().unwrap();
    assert_eq!(*results.lock().unwrap(), [(Err(Code::Busy), true)]);
    read(&engine);
}

/// A reader holds an engine for a moment. A change of the budget takes effect nevertheless before
/// its call returns.
#[test]
fn a_budget_is_resized_while_threads_read_snapshots() {
    let mut info = support::model_info(50, 64, 64, vec![]);
    info.memory.block_bytes = 1;
    let (engine, _) = engine_with(EngineOptions::default(), info);
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !ends.load(SeqCst) {
                    engine.snapshot(1000, 1000).unwrap();
                }
            });
        }
        for blocks in (20..60).cycle().take(2000) {
            engine.budget().resize(blocks).unwrap();
            let total = engine.stats().blocks_total;
            if total > blocks {
                ends.store(true, SeqCst);
            }
            assert!(total <= blocks, "{total} blocks, {blocks} are allowed");
        }
        ends.store(true, SeqCst);
    });
}

/// An executor with a defect, which shows after a while.
struct Defective;

impl Executor for Defective {
    fn submit(&mut self, _: &Batch) -> Result<InFlightStep> {
        thread::sleep(Duration::from_millis(50));
        panic!("a defect")
    }

    fn wait(&mut self, _: InFlightStep) -> Result<StepOutput<'_>> {
        unreachable!()
    }
}

#[test]
fn a_failed_engine_has_no_snapshot() {
    let engine =
        Engine::with_executor(&EngineOptions::default(), support::model_info(50, 8, 64, vec![]), None, Box::new(Defective)).unwrap();
    engine.add_request(Request::new(Prompt::Tokens(vec![1; 5]), SamplingParams::greedy())).unwrap();
    thread::scope(|scope| {
        let step = scope.spawn(|| engine.step().unwrap_err().code());
        // Before the step, there are snapshots. A reader that waits for it gets the error.
        let error = loop {
            if let Err(error) = engine.snapshot(10, 10) {
                break error;
            }
        };
        assert_eq!((error.code(), step.join().unwrap()), (Code::Internal, Code::Internal));
    });
    assert_eq!(engine.snapshot(10, 10).unwrap_err().code(), Code::Internal);
}
