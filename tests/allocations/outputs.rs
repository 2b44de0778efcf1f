//! Where there is no memory for what is to be told: nobody waits for ever, and the process lives.

use std::time::Duration;

use pagedllm::engine::{Continue, Engine, Output, Prompt, Request};
use pagedllm::error::Code;

use super::refusing::{refusing, refusing_all};
use super::{World, lasting, options};

fn poll(engine: &Engine) -> Vec<Output> {
    engine.queue().poll(Some(Duration::ZERO)).unwrap().into()
}

/// An engine, and a short sequence that was kept.
fn idle() -> (Engine, u64) {
    let engine = Engine::create(&options()).unwrap();
    let id = engine.add_request(Request { keep: true, ..Request::new(Prompt::Tokens(vec![5; 20]), lasting(3, 3)) }).unwrap();
    while !engine.sequence(id).is_ok_and(|sequence| sequence.idle) {
        engine.step().unwrap();
    }
    poll(&engine);
    (engine, id)
}

#[test]
fn an_export_is_answered_when_there_is_memory_again() {
    let (engine, id) = idle();
    (0..200).for_each(|_| engine.export(id, None).unwrap());
    refusing_all(|| engine.step()).0.unwrap();
    engine.step().unwrap();
    let outputs = poll(&engine);
    assert_eq!(outputs.len(), 200, "each is answered once");
    assert!(outputs.iter().all(|output| output.finish.is_none() && output.error.is_some() == output.sequence_state.is_empty()));
}

#[test]
fn every_end_is_told_without_memory_for_anything() {
    let engine = Engine::create(&options()).unwrap();
    let ids: Vec<u64> =
        (0..200).map(|i| engine.add_request(Request::new(Prompt::Tokens(vec![5 + i; 20]), lasting(8, 3))).unwrap()).collect();
    // Nobody reads meanwhile.
    for _ in 0..400 {
        let (_, found) = refusing_all(|| engine.step());
        assert!(found.iter().all(|site| !site.name().starts_with("src/engine/")), "it would have ended the process: {found:?}");
    }
    let mut ended: Vec<u64> = poll(&engine).iter().filter(|output| output.finish.is_some()).map(|output| output.request).collect();
    ended.sort();
    assert_eq!(ended, ids, "each ended once");
}

#[test]
fn what_could_not_be_appended_is_not_there() {
    for passed in 0.. {
        let mut world = World::new();
        let id = world.kept();
        let before = world.engine.sequence(id).unwrap().len;
        world.engine.append(id, vec![50; 200]).unwrap();
        let (_, refused) = refusing(passed, || world.engine.step());
        let failed = poll(&world.engine).iter().any(|output| output.sequence == id && output.error.is_some());
        let len = world.engine.sequence(id).unwrap().len;
        assert_eq!(len, if failed { before } else { before + 200 }, "after {passed}");
        if !refused {
            assert!(passed > 0);
            break;
        }
    }
}

#[test]
fn a_turn_that_was_refused_is_nobodys_request() {
    for passed in 0.. {
        let mut world = World::new();
        let id = world.kept();
        // Where the lists of those that wait are full to the brim, too.
        for _ in 0..64 {
            world.engine.add_request(Request::new(Prompt::Tokens(vec![5; 4]), lasting(1, 3))).unwrap();
        }
        let (result, refused) = refusing(passed, || world.engine.continue_sequence(id, Continue { keep: true, ..Continue::default() }));
        assert!(result.is_ok() || result.is_err_and(|error| error.code() == Code::OutOfMemory));
        world.drain();
        if !refused {
            break;
        }
    }
}
