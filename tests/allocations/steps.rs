//! After warm-up, the library's own code allocates nothing in a step.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use pagedllm::engine::{Engine, KvEventKind, Prompt, Request};
use pagedllm::types::RequestId;
use pagedllm::types::options::{EngineOptions, Grammar, Preemption, SamplingParams};
use pagedllm::types::outputs::FinishReason;

use super::failing_allocator::{Site, alone, count_allocations};
use crate::support::{TempDir, bundled_model, configs, write_random_model};

const WARM_UP: usize = 2000;
const STEPS: usize = 1000;
/// Number of windows of `STEPS` steps, one of which must be free of allocations. On a busy machine,
/// masks of grammars are late in some steps, and a later step can be larger than all before it.
const WINDOWS: usize = 4;
/// Files that allocate lists as arguments of other crates.
const FOR_OTHER_CRATES: &[&str] = &["src/text/tokenizer.rs"];
/// Number of unfinished requests. Not all of them can run at once, so some always wait.
const UNFINISHED: u64 = 14;

/// Creates an engine whose pool is so small that requests are preempted. With a host tier, it
/// records events of the prefix cache.
fn engine(preemption: Preemption, trace: Option<PathBuf>) -> Engine {
    Engine::create(&EngineOptions {
        model_dir: bundled_model(),
        threads: Some(1),
        max_seqs: 12,
        max_model_len: Some(192),
        kv_bytes: Some(1 << 20),
        swap_bytes: if preemption == Preemption::Recompute { 0 } else { 1 << 20 },
        preemption,
        trace_path: trace,
        kv_events_capacity: if preemption == Preemption::Recompute { 0 } else { 100 },
        ..Default::default()
    })
    .unwrap()
}

/// Returns request `i`. The requests cycle through all common kinds.
fn request(i: u32) -> Request {
    let sampling =
        SamplingParams { seed: Some(i as u64), ignore_eos: true, max_tokens: Some(20 + (i as usize * 7) % 60), ..Default::default() };
    let sampling = match i % 6 {
        0 => SamplingParams { temperature: 0.8, top_p: 0.9, logprobs: Some(5), ..sampling },
        1 => SamplingParams { temperature: 1.0, stop: vec!["the".into(), "never generated".into()], ignore_eos: false, ..sampling },
        2 => SamplingParams { temperature: 0.9, repetition_penalty: 1.1, presence_penalty: 0.2, top_k: 40, logprobs: Some(0), ..sampling },
        3 => SamplingParams { prompt_logprobs: Some(2), ..sampling },
        4 => SamplingParams { grammar: Some(Grammar::Regex("[a-z ]{10,30}\\.".into())), ignore_eos: false, ..sampling },
        _ => SamplingParams { temperature: 1.0, top_p: 0.95, logprobs: Some(2), ..sampling },
    };
    let prompt = Prompt::Tokens((0..10 + (i * 13) % 50).map(|place| 10 + (place * 7 + i * 131) % 900).collect());
    let deadline = i.is_multiple_of(7).then(|| Duration::from_secs(1000));
    Request { n: if i % 6 == 5 { 4 } else { 1 }, deadline, ..Request::new(prompt, sampling) }
}

/// A host that keeps the engine busy.
struct Host {
    engine: Engine,
    added: u32,
    last: RequestId,
    ends: HashMap<FinishReason, usize>,
    text: usize,
    /// Number of events of the prefix cache, and of snapshots in their place.
    events: usize,
    snapshots: usize,
}

impl Host {
    /// Adds missing requests, aborts a request at times, and reads the outputs.
    fn act(&mut self, step: usize) {
        while self.engine.stats().waiting + self.engine.stats().running < UNFINISHED {
            self.last = self.engine.add_request(request(self.added)).unwrap();
            self.added += 1;
            if u64::from(self.added).is_multiple_of(UNFINISHED) {
                break;
            }
        }
        if step % 50 == 49 {
            let _ = self.engine.abort(self.last);
        }
        if step.is_multiple_of(13)
            && let Ok(events) = self.engine.poll_kv_events(Duration::ZERO, |_| Ok(()))
        {
            self.events += events.len();
            self.snapshots += events.iter().filter(|event| event.kind == KvEventKind::Cleared).count();
        }
        let outputs = self.engine.queue().poll_batch(Some(Duration::ZERO), |_| Ok(())).unwrap();
        for (output, view) in outputs.iter() {
            self.text += view.text.len();
            output.finish.into_iter().for_each(|finish| *self.ends.entry(finish).or_default() += 1);
        }
    }
}

/// The sites of allocations, and their number.
type Allocations = Vec<(Site, usize)>;

/// Returns the allocations in a window of steps: those of this crate, and those of others.
fn allocations_in_steps(preemption: Preemption, trace: Option<PathBuf>) -> (Allocations, Allocations) {
    let is_own = |(site, _): &(Site, usize)| site.name().starts_with("src/") && !FOR_OTHER_CRATES.contains(&site.name().as_str());
    let engine = engine(preemption, trace);
    let mut host = Host { engine, added: 0, last: RequestId::default(), ends: HashMap::new(), text: 0, events: 0, snapshots: 0 };
    for step in 0..WARM_UP {
        host.act(step);
        host.engine.step().unwrap();
    }
    let before = host.engine.stats();
    host.ends.clear();
    let (mut own, mut others) = (Vec::new(), Vec::new());
    for _ in 0..WINDOWS {
        let mut found = BTreeMap::new();
        for step in 0..STEPS {
            host.act(step);
            count_allocations(&mut found, || host.engine.step()).unwrap();
        }
        (own, others) = found.into_iter().partition(is_own);
        if own.is_empty() {
            break;
        }
    }
    let after = host.engine.stats();
    println!(
        "{preemption:?}: {} preemptions, {} of them swapped, {:?}, {} bytes of text, {} events, {} snapshots",
        after.preemptions - before.preemptions,
        after.preemptions_swapped - before.preemptions_swapped,
        host.ends,
        host.text,
        host.events,
        host.snapshots
    );
    assert_eq!(host.events > 1000, preemption != Preemption::Recompute);
    assert!(after.preemptions - before.preemptions > 20);
    assert_eq!(after.preemptions_swapped > before.preemptions_swapped, preemption == Preemption::Swap);
    for finish in [FinishReason::Stop, FinishReason::Length, FinishReason::Abort] {
        assert!(host.ends.get(&finish).is_some_and(|&ends| ends > 5), "{:?}", host.ends);
    }
    (own, others)
}

/// Tests a host that creates one queue per request.
#[test]
fn a_warm_step_allocates_nothing_for_created_and_freed_queues() {
    let (engine, mut queues, mut found) = (engine(Preemption::Recompute, None), Vec::new(), BTreeMap::new());
    for step in 0..1500 {
        if step % 6 == 0 {
            let queue = engine.create_queue(64).unwrap();
            let sampling = SamplingParams { seed: Some(3), ignore_eos: true, max_tokens: Some(18), ..Default::default() };
            engine.add_request_to(&queue, Request::new(Prompt::Tokens(vec![5 + step % 50; 20]), sampling)).unwrap();
            queues.push(queue);
        }
        match step < 500 {
            true => engine.step().unwrap(),
            false => count_allocations(&mut found, || engine.step()).unwrap(),
        };
        queues.iter().for_each(|queue| drop(queue.poll_batch(Some(Duration::ZERO), |_| Ok(())).unwrap()));
        if queues.len() > 8 {
            queues.remove(0);
        }
    }
    found.retain(|site, _| site.name().starts_with("src/") && !FOR_OTHER_CRATES.contains(&site.name().as_str()));
    assert!(found.is_empty(), "{found:#?}");
}

/// Tests windows, experts, sinks and latents in a pool that is so small that requests are
/// preempted.
#[test]
fn a_warm_step_allocates_nothing_for_any_model_family() {
    for (family, config) in configs(192) {
        let dir = TempDir::new();
        write_random_model(&dir.0, &config, true, 5);
        let whole =
            EngineOptions { model_dir: dir.0.clone(), skip_tokenizer: true, max_seqs: 12, max_batch_tokens: 64, ..Default::default() };
        let plan = Engine::plan(&EngineOptions { max_model_len: Some(192), ..whole.clone() }).unwrap();
        let kv_bytes = Some(plan.block_bytes * (20 + 9 * (plan.groups as u64 - 1)));
        let engine = Engine::create(&EngineOptions { kv_bytes, max_model_len: Some(192), ..whole }).unwrap();
        let mut found = BTreeMap::new();
        for step in 0..600 {
            if engine.stats().waiting + engine.stats().running < UNFINISHED {
                let sampling = SamplingParams { ignore_eos: true, max_tokens: Some(30 + step % 80), ..Default::default() };
                let prompt = (0..20 + step % 60).map(|place| (place * 7 + step * 11) as u32 % 120).collect();
                engine.add_request(Request::new(Prompt::Tokens(prompt), sampling)).unwrap();
            }
            match step < 300 {
                true => engine.step().unwrap(),
                false => count_allocations(&mut found, || engine.step()).unwrap(),
            };
            drop(engine.queue().poll_batch(Some(Duration::ZERO), |_| Ok(())).unwrap());
        }
        found.retain(|site, _| site.name().starts_with("src/"));
        assert!(found.is_empty(), "{family}: {found:#?}");
        assert!(engine.stats().preemptions > 10, "{family}: {:?}", engine.stats());
    }
}

#[test]
fn a_warm_step_allocates_nothing() {
    let _alone = alone();
    let trace = std::env::temp_dir().join(format!("pagedllm-steps-{}.json", std::process::id()));
    for (preemption, trace) in [(Preemption::Recompute, None), (Preemption::Swap, Some(trace.clone()))] {
        let (own, others) = allocations_in_steps(preemption, trace);
        for (site, count) in others {
            println!("{count:8} by {} {}", site.package, site.place);
        }
        assert!(own.is_empty(), "in {STEPS} steps, after {WINDOWS} windows: {own:#?}");
    }
    std::fs::remove_file(trace).unwrap();
}
