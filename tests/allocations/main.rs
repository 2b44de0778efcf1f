//! Memory that is not given: every large allocation of the library's own is refused once, in every operation. The operation
//! fails with an error or comes about, others never notice, and nothing is lost. What other crates allocate and cannot do
//! without is written down in docs/allocations.md.

mod outputs;
mod refusing;
mod steps;
#[path = "../support/mod.rs"]
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pagedllm::budget::{BudgetInfo, MemoryBudget};
use pagedllm::engine::{Engine, Fork, Output, Prompt, Request, Resume};
use pagedllm::error::{Code, Error, Result};
use pagedllm::options::{BeamParams, EngineOptions, Grammar, OutputKind, Preemption, SamplingParams, WeightFormat};
use pagedllm::scheduler::FinishReason;
use refusing::{Refusing, Site, census, live, refusing};
use support::{bundled_model, on_deep_stack};

#[global_allocator]
static ALLOCATOR: Refusing = Refusing;

/// Tokens of a long prompt: more bytes than a small allocation has.
const LONG: u32 = 520;

fn options() -> EngineOptions {
    EngineOptions { model_dir: bundled_model(), threads: Some(1), max_seqs: 16, kv_bytes: Some(4 << 20), ..Default::default() }
}

fn long_prompt(seed: u32) -> Prompt {
    Prompt::Tokens((0..LONG).map(|i| 10 + (i * 7 + seed * 131) % 900).collect())
}

fn long_text() -> String {
    "What is 7 + 5? The capital of France is Paris. ".repeat(38)
}

fn chat() -> String {
    format!(r#"[{{"role": "user", "content": "{}"}}]"#, long_text())
}

/// What was told of one sequence.
#[derive(Debug, Default, Clone, PartialEq)]
struct Told {
    tokens: Vec<u32>,
    logprobs: Vec<u32>,
    text: String,
    finish: Option<FinishReason>,
    error: Option<Code>,
    ends: usize,
}

/// An engine, two requests that have nothing to do with what is tried, and what was told so far.
struct World {
    engine: Engine,
    told: BTreeMap<u64, Told>,
    state: Vec<u8>,
}

const BYSTANDERS: [u64; 2] = [1, 2];

impl World {
    fn new() -> World {
        World::of(&options())
    }

    fn of(options: &EngineOptions) -> World {
        let mut world = World { engine: Engine::create(options).unwrap(), told: BTreeMap::new(), state: Vec::new() };
        for seed in BYSTANDERS {
            let sampling = SamplingParams { temperature: 0.8, logprobs: Some(2), ..lasting(60, seed) };
            // Short: what they hold is too small to be refused, and computing it takes its time.
            world.engine.add_request(Request::new(Prompt::Tokens((10..50).collect()), sampling)).unwrap();
        }
        world.steps(3).unwrap();
        world
    }

    fn steps(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            self.engine.step()?;
            self.poll()?;
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<()> {
        for output in self.engine.queue().poll(Some(Duration::ZERO))? {
            self.hear(output);
        }
        Ok(())
    }

    fn hear(&mut self, output: Output) {
        if !output.sequence_state.is_empty() {
            self.state = output.sequence_state;
            return;
        }
        let told = self.told.entry(output.sequence).or_default();
        told.tokens.extend(output.tokens);
        told.logprobs.extend(output.logprobs.tokens.iter().map(|logprob| logprob.to_bits()));
        told.text.push_str(&output.text);
        told.finish = output.finish.or(told.finish);
        told.error = output.error.as_ref().map(Error::code).or(told.error);
        told.ends += output.finish.is_some() as usize;
    }

    /// Until all have ended. A step that was refused memory is tried again by the next one.
    fn drain(&mut self) {
        for _ in 0..2000 {
            let report = match self.engine.step() {
                Ok(report) => report,
                Err(error) => panic!("with all the memory there is: {error}"),
            };
            self.poll().unwrap();
            if report.unfinished == 0 {
                return;
            }
        }
        panic!("requests never end");
    }

    /// Without sequences and pins no block is used.
    fn empty(&mut self) {
        for id in 0..100 {
            let _ = self.engine.free(id);
            let _ = self.engine.unpin(id);
        }
        self.steps(1).unwrap();
        self.engine.check_invariants();
        let stats = self.engine.stats();
        assert_eq!((stats.blocks_used, stats.idle, stats.running, stats.waiting), (0, 0, 0, 0));
    }

    /// A sequence that was kept: the subject of what follows.
    fn kept(&mut self) -> u64 {
        let sampling = SamplingParams { repetition_penalty: 1.1, ..lasting(20, 3) };
        let id = self.engine.add_request(Request { keep: true, ..Request::new(long_prompt(3), sampling) }).unwrap();
        while !self.engine.sequence(id).is_ok_and(|sequence| sequence.idle) {
            self.steps(1).unwrap();
        }
        id
    }
}

/// So many tokens, whatever they are.
fn lasting(tokens: usize, seed: u64) -> SamplingParams {
    SamplingParams { max_tokens: Some(tokens), ignore_eos: true, seed: Some(seed), ..Default::default() }
}

/// Everything a request can ask for that makes the engine remember something of its size.
fn demanding() -> SamplingParams {
    SamplingParams {
        temperature: 0.9,
        top_p: 0.9,
        logprobs: Some(20),
        prompt_logprobs: Some(5),
        repetition_penalty: 1.1,
        presence_penalty: 0.1,
        stop: (0..40).map(|i| format!("a text that never comes, number {i}, and is somewhat long")).collect(),
        bad_words: (0..10).map(|i| format!("never said {i}")).collect(),
        logit_bias: (0..300).map(|i| (20 + i, 0.1)).collect(),
        echo: true,
        output: OutputKind::Cumulative,
        ..lasting(12, 4)
    }
}

/// What is tried: with all that comes before, and then what is watched.
struct Operation {
    name: &'static str,
    before: fn(&mut World) -> u64,
    watched: fn(&mut World, u64) -> Result<()>,
}

const fn nothing(_: &mut World) -> u64 {
    0
}

fn add(world: &mut World, request: Request) -> Result<()> {
    world.engine.add_request(request)?;
    world.steps(20)
}

const OPERATIONS: &[Operation] = &[
    Operation { name: "tokenize", before: nothing, watched: |world, _| world.engine.text()?.encode(&long_text(), true).map(drop) },
    Operation { name: "render a chat", before: nothing, watched: |world, _| world.engine.text()?.render_chat(&chat()).map(drop) },
    Operation {
        name: "a text prompt",
        before: nothing,
        watched: |world, _| add(world, Request::new(Prompt::Text(long_text()), lasting(5, 3))),
    },
    Operation {
        name: "four samples of a demanding request",
        before: nothing,
        watched: |world, _| add(world, Request { n: 4, ..Request::new(long_prompt(3), demanding()) }),
    },
    Operation {
        name: "beams",
        before: nothing,
        watched: |world, _| {
            let sampling = SamplingParams { repetition_penalty: 1.1, max_tokens: Some(12), ..SamplingParams::default() };
            add(world, Request { n: 2, beam: Some(BeamParams::default()), ..Request::new(long_prompt(3), sampling) })
        },
    },
    Operation { name: "steps and polls", before: nothing, watched: |world, _| world.steps(10) },
    Operation {
        name: "fork",
        before: World::kept,
        watched: |world, seq| {
            world.engine.fork(seq, 3, &Fork { at: Some(LONG as usize), ..Fork::default() })?;
            world.steps(3)
        },
    },
    Operation {
        name: "append",
        before: World::kept,
        watched: |world, seq| {
            world.engine.append(seq, vec![50; 200])?;
            world.steps(3)
        },
    },
    Operation {
        name: "rewind",
        before: World::kept,
        watched: |world, seq| {
            world.engine.rewind(seq, LONG as usize - 50)?;
            world.steps(3)
        },
    },
    Operation {
        name: "resume",
        before: World::kept,
        watched: |world, seq| {
            let sampling = SamplingParams { prompt_logprobs: None, echo: false, ..demanding() };
            world.engine.resume(seq, Resume::new(sampling))?;
            world.steps(20)
        },
    },
    Operation {
        name: "export",
        before: World::kept,
        watched: |world, seq| {
            world.engine.export(seq, None)?;
            world.steps(2)
        },
    },
    Operation {
        name: "import",
        before: |world| {
            let seq = world.kept();
            world.engine.export(seq, None).unwrap();
            world.steps(2).unwrap();
            assert!(world.state.len() > 100_000);
            seq
        },
        watched: |world, _| {
            let state = std::mem::take(&mut world.state);
            let id = world.engine.import(world.engine.queue(), &state)?;
            world.steps(2)?;
            if let Some(told) = world.told.get(&id) {
                // It was refused, and says so.
                assert_eq!(told.error, Some(Code::OutOfMemory));
                return Ok(());
            }
            world.engine.resume(id, Resume::new(lasting(5, 3)))?;
            world.steps(6)
        },
    },
    Operation {
        name: "admit",
        before: |world| {
            // Enough that listing them is large.
            for seed in 0..120 {
                world.engine.add_request(Request::new(Prompt::Tokens(vec![5; 3]), lasting(2, seed))).unwrap();
            }
            0
        },
        watched: |world, _| {
            world.engine.predict_admission(world.engine.queue(), Request { n: 4, ..Request::new(long_prompt(3), demanding()) })?;
            world.engine.predict_admission(world.engine.queue(), Request::new(Prompt::Text(long_text()), lasting(5, 3))).map(drop)
        },
    },
    Operation { name: "metrics", before: nothing, watched: |world, _| world.engine.metrics().map(drop) },
    Operation {
        name: "resize the budget",
        before: World::kept,
        watched: |world, _| {
            let budget = world.engine.budget().clone();
            let BudgetInfo { bytes, min_bytes, .. } = budget.info();
            budget.resize(min_bytes)?;
            world.steps(2)?;
            budget.resize(bytes)?;
            world.steps(2)
        },
    },
    Operation {
        name: "swap",
        before: |world| {
            let swapping = EngineOptions { preemption: Preemption::Swap, swap_bytes: 4 << 20, ..options() };
            *world = World::of(&swapping);
            let kept = world.kept();
            add(world, Request::new(long_prompt(4), lasting(60, 4))).unwrap();
            kept
        },
        watched: |world, kept| {
            let budget = world.engine.budget().clone();
            let BudgetInfo { bytes, min_bytes, .. } = budget.info();
            budget.resize(min_bytes)?;
            world.steps(2)?;
            budget.resize(bytes)?;
            world.engine.resume(kept, Resume::new(lasting(5, 3)))?;
            world.steps(10)?;
            let stats = world.engine.stats();
            // Who was refused memory on the way back has nothing to bring.
            assert!(stats.blocks_swapped_out > 0 && (stats.blocks_swapped_in > 0 || stats.finished_error > 0), "{stats:?}");
            Ok(())
        },
    },
    Operation {
        name: "journal and trace",
        before: |world| {
            let nowhere = || Some("/dev/null".into());
            *world = World::of(&EngineOptions { journal_path: nowhere(), trace_path: nowhere(), ..options() });
            let seq = world.kept();
            // A small one, whose children are many.
            world.engine.add_request(Request { keep: true, ..Request::new(Prompt::Tokens(vec![5; 3]), lasting(2, 5)) }).unwrap();
            world.steps(5).unwrap();
            seq
        },
        watched: |world, seq| {
            world.engine.fork(seq + 1, 80, &Fork { idle: true, ..Fork::default() })?;
            world.engine.append(seq, vec![50; 200])?;
            let sampling = SamplingParams { prompt_logprobs: None, echo: false, ..demanding() };
            world.engine.resume(seq, Resume::new(sampling))?;
            world.engine.pin(long_prompt(9), false, &[7; 3000], 1, None)?;
            world.engine.export(seq, None)?;
            add(world, Request { n: 4, salt: vec![7; 3000], ..Request::new(long_prompt(3), demanding()) })?;
            let state = std::mem::take(&mut world.state);
            if !state.is_empty() {
                world.engine.import(world.engine.queue(), &state)?;
            }
            world.steps(2)
        },
    },
    Operation {
        name: "pin",
        before: nothing,
        watched: |world, _| {
            world.engine.pin(long_prompt(9), false, &[7; 3000], 1, None)?;
            world.steps(4)
        },
    },
];

/// The operation with one allocation refused: what the others were told, what came of it, and whether there was one to refuse.
fn attempt(operation: &Operation, passed: usize) -> (Vec<Told>, Result<()>, bool) {
    let mut world = World::new();
    let subject = (operation.before)(&mut world);
    let (result, refused) = refusing(passed, || (operation.watched)(&mut world, subject));
    world.engine.check_invariants();
    world.drain();
    world.empty();
    let others = BYSTANDERS.iter().map(|id| world.told.remove(id).unwrap_or_default()).collect();
    for (id, told) in &world.told {
        let ends_well = matches!(told.error, None | Some(Code::OutOfMemory)) && (told.finish.is_some() || told.error.is_some());
        assert!(ends_well, "{}, after {passed}: sequence {id} is told {told:?}", operation.name);
    }
    (others, result, refused)
}

fn refuse_each(operation: &Operation) -> usize {
    let expected = attempt(operation, usize::MAX);
    expected.1.as_ref().unwrap_or_else(|error| panic!("{}: {error}", operation.name));
    assert!(expected.0.iter().all(|told| told.ends == 1 && told.tokens.len() == 60), "{:?}", expected.0);
    for passed in 0.. {
        let before = live();
        let (others, result, refused) = attempt(operation, passed);
        if !refused {
            return passed;
        }
        if let Err(error) = result {
            assert_eq!(error.code(), Code::OutOfMemory, "{}, after {passed}: {error}", operation.name);
        }
        assert_eq!(others, expected.0, "{}, after {passed}: others noticed", operation.name);
        drop((others, expected.1.clone()));
        assert_eq!(live(), before, "{}, after {passed}: bytes are lost", operation.name);
    }
    unreachable!()
}

#[test]
fn whatever_allocation_is_refused_only_its_own_request_can_fail() {
    on_deep_stack(|| {
        for operation in OPERATIONS {
            let refused = refuse_each(operation);
            println!("{}: {refused} allocations were refused, one by one", operation.name);
        }
    });
}

/// As the model's files have them, and in whole numbers: the embedding and the head in 8 bits, the rest in 4.
const WEIGHTS: [Option<WeightFormat>; 2] = [None, Some(WeightFormat::Int4 { group: 32, offsets: true })];

/// An engine of a new budget, which keeps a journal and a trace.
fn make_one(weight_format: Option<WeightFormat>) -> Result<()> {
    let (budget, nowhere) = (MemoryBudget::new(3 << 20, 4 << 20)?, || Some("/dev/null".into()));
    let options =
        EngineOptions { budget: Some(budget), kv_bytes: None, weight_format, journal_path: nowhere(), trace_path: nowhere(), ..options() };
    Engine::plan(&options).and_then(|_| Engine::create(&options)).map(drop)
}

#[test]
fn an_engine_that_cannot_be_made_leaves_nothing_behind() {
    on_deep_stack(|| {
        for weights in WEIGHTS {
            make_one(weights).unwrap();
            let mut refusals = 0;
            for passed in 0.. {
                let before = live();
                let (result, refused) = refusing(passed, || make_one(weights));
                if !refused {
                    break;
                }
                refusals += 1;
                assert!(matches!(&result, Err(error) if error.code() == Code::OutOfMemory), "{weights:?}, after {passed}: {result:?}");
                drop(result);
                assert_eq!(live(), before, "{weights:?}, after {passed}: bytes are lost");
            }
            println!("{weights:?}: {refusals} allocations were refused, one by one");
            assert!(refusals > 5);
        }
    });
}

/// The first column of the tables in docs/allocations.md.
fn listed() -> BTreeSet<String> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/allocations.md")).unwrap();
    text.lines().filter_map(|line| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_string())).collect()
}

#[test]
fn large_allocations_that_cannot_fail_are_listed() {
    on_deep_stack(|| {
        let mut found: BTreeSet<Site> = census(|| {
            WEIGHTS.into_iter().for_each(|weights| make_one(weights).unwrap());
        });
        for operation in OPERATIONS {
            let mut world = World::new();
            let subject = (operation.before)(&mut world);
            found.append(&mut census(|| (operation.watched)(&mut world, subject).unwrap()));
            found.append(&mut census(|| world.drain()));
        }
        let mut world = World::new();
        found.append(&mut census(|| {
            let grammar = Some(Grammar::JsonSchema(r#"{"type": "object", "properties": {"name": {"type": "string"}}}"#.into()));
            let sampling = SamplingParams { grammar, ..SamplingParams::default() };
            add(&mut world, Request::new(long_prompt(3), sampling)).unwrap();
            world.drain();
        }));
        let listed = listed();
        let unlisted: Vec<&Site> = found.iter().filter(|site| !listed.contains(&site.name())).collect();
        assert!(unlisted.is_empty(), "make them fallible, or list them in docs/allocations.md: {unlisted:#?}");
        let found: BTreeSet<String> = found.iter().map(Site::name).collect();
        assert_eq!(found, listed, "docs/allocations.md lists what is there no more");
    });
}
