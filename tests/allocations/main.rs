//! Allocation failures: in every operation, each large allocation of the library's own code fails
//! once. The operation then succeeds or fails with an error, other requests are not affected, and
//! no memory leaks. docs/allocations.md lists the allocations of other crates that cannot fail.

mod failing_allocator;
mod outputs;
mod steps;
#[path = "../support/mod.rs"]
mod support;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};
use std::time::Duration;

use failing_allocator::{FailingAllocator, Site, alone, fail_allocation, live_bytes, record_infallible};
use pagedllm::engine::{Engine, Fork, Output, Prompt, Request, Resume};
use pagedllm::error::{Code, Error, Result};
use pagedllm::memory::budget::{BudgetInfo, MemoryBudget};
use pagedllm::types::options::{BeamParams, EngineOptions, Grammar, OutputKind, Preemption, SamplingParams, WeightFormat};
use pagedllm::types::outputs::FinishReason;
use pagedllm::types::{PinId, SeqId};
use support::{bundled_model, on_deep_stack};

#[global_allocator]
static ALLOCATOR: FailingAllocator = FailingAllocator;

/// Tokens of a long prompt. Its token list is a large allocation.
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

/// The accumulated outputs of one sequence.
#[derive(Debug, Default, Clone, PartialEq)]
struct SequenceOutput {
    tokens: Vec<u32>,
    logprobs: Vec<u32>,
    text: String,
    finish: Option<FinishReason>,
    error: Option<Code>,
    ends: usize,
}

/// An engine, two requests that an operation must not affect, and the outputs so far.
struct Fixture {
    engine: Engine,
    outputs: BTreeMap<SeqId, SequenceOutput>,
    state: Vec<u8>,
}

const OTHERS: [SeqId; 2] = [SeqId::from_raw(1), SeqId::from_raw(2)];

impl Fixture {
    fn new() -> Fixture {
        Fixture::with_options(&options())
    }

    fn with_options(options: &EngineOptions) -> Fixture {
        let mut fixture = Fixture { engine: Engine::create(options).unwrap(), outputs: BTreeMap::new(), state: Vec::new() };
        for other in OTHERS {
            let sampling = SamplingParams { temperature: 0.8, logprobs: Some(2), ..sampling_for(60, other.get()) };
            // The prompts are short, so the allocations of these requests are too small to fail.
            fixture.engine.add_request(Request::new(Prompt::Tokens((10..50).collect()), sampling)).unwrap();
        }
        fixture.steps(3).unwrap();
        fixture
    }

    fn steps(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            self.engine.step()?;
            self.poll()?;
        }
        Ok(())
    }

    /// Exports a sequence and steps until its state or an error arrives.
    fn export(&mut self, seq: SeqId) -> Result<()> {
        self.state.clear();
        self.engine.export(seq, None)?;
        let failed = |fixture: &Fixture| fixture.outputs.get(&seq).is_some_and(|all| all.error.is_some());
        while self.state.is_empty() && !failed(self) {
            self.steps(1)?;
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<()> {
        for output in self.engine.queue().poll(Some(Duration::ZERO))? {
            self.collect(output);
        }
        Ok(())
    }

    fn collect(&mut self, output: Output) {
        if !output.sequence_state.is_empty() {
            self.state = output.sequence_state;
            return;
        }
        let all = self.outputs.entry(output.sequence).or_default();
        all.tokens.extend(output.tokens);
        all.logprobs.extend(output.logprobs.tokens.iter().map(|logprob| logprob.to_bits()));
        all.text.push_str(&output.text);
        all.finish = output.finish.or(all.finish);
        all.error = output.error.as_ref().map(Error::code).or(all.error);
        all.ends += output.finish.is_some() as usize;
    }

    /// Steps until all requests have ended. The engine retries a step that failed for lack of
    /// memory.
    fn drain(&mut self) {
        for _ in 0..2000 {
            let report = match self.engine.step() {
                Ok(report) => report,
                Err(error) => panic!("a step failed without an injected failure: {error}"),
            };
            self.poll().unwrap();
            if report.unfinished == 0 {
                return;
            }
        }
        panic!("the requests do not end");
    }

    /// Frees all sequences and pins, and checks that no block is in use.
    fn free_all(&mut self) {
        for id in 0..100 {
            let _ = self.engine.free(SeqId::from_raw(id));
            let _ = self.engine.unpin(PinId::from_raw(id));
        }
        self.steps(1).unwrap();
        self.engine.check_invariants();
        let stats = self.engine.stats();
        assert_eq!((stats.blocks_used, stats.idle, stats.running, stats.waiting), (0, 0, 0, 0));
    }

    /// Returns an idle sequence that the operation uses.
    fn kept_sequence(&mut self) -> SeqId {
        let sampling = SamplingParams { repetition_penalty: 1.1, ..sampling_for(20, 3) };
        let id = self.engine.add_request(Request { keep: true, ..Request::new(long_prompt(3), sampling) }).unwrap().sequence(0);
        while !self.engine.sequence(id).is_ok_and(|sequence| sequence.idle) {
            self.steps(1).unwrap();
        }
        id
    }
}

/// Returns parameters that generate exactly the given number of tokens.
fn sampling_for(tokens: usize, seed: u64) -> SamplingParams {
    SamplingParams { max_tokens: Some(tokens), ignore_eos: true, seed: Some(seed), ..Default::default() }
}

/// Returns parameters whose options all make the engine allocate memory.
fn memory_intensive() -> SamplingParams {
    SamplingParams {
        temperature: 0.9,
        top_p: 0.9,
        logprobs: Some(20),
        prompt_logprobs: Some(5),
        repetition_penalty: 1.1,
        presence_penalty: 0.1,
        stop: (0..40).map(|i| format!("a long stop string that the model never generates, number {i}")).collect(),
        bad_words: (0..10).map(|i| format!("never generated {i}")).collect(),
        logit_bias: (0..300).map(|i| (20 + i, 0.1)).collect(),
        echo: true,
        output: OutputKind::Cumulative,
        ..sampling_for(12, 4)
    }
}

/// An operation: its preparation, and the part in which allocations fail.
struct Operation {
    name: &'static str,
    prepare: fn(&mut Fixture) -> SeqId,
    run: fn(&mut Fixture, SeqId) -> Result<()>,
}

const fn nothing(_: &mut Fixture) -> SeqId {
    SeqId::from_raw(0)
}

fn add(fixture: &mut Fixture, request: Request) -> Result<()> {
    fixture.engine.add_request(request)?;
    fixture.steps(20)
}

const OPERATIONS: &[Operation] = &[
    Operation { name: "tokenize", prepare: nothing, run: |fixture, _| fixture.engine.text()?.encode(&long_text(), true).map(drop) },
    Operation { name: "render a chat", prepare: nothing, run: |fixture, _| fixture.engine.text()?.render_chat(&chat()).map(drop) },
    Operation {
        name: "a text prompt",
        prepare: nothing,
        run: |fixture, _| add(fixture, Request::new(Prompt::Text(long_text()), sampling_for(5, 3))),
    },
    Operation {
        name: "four samples of a demanding request",
        prepare: nothing,
        run: |fixture, _| add(fixture, Request { n: 4, ..Request::new(long_prompt(3), memory_intensive()) }),
    },
    Operation {
        name: "beams",
        prepare: nothing,
        run: |fixture, _| {
            let sampling = SamplingParams { repetition_penalty: 1.1, max_tokens: Some(12), ..SamplingParams::default() };
            add(fixture, Request { n: 2, beam: Some(BeamParams::default()), ..Request::new(long_prompt(3), sampling) })
        },
    },
    Operation { name: "steps and polls", prepare: nothing, run: |fixture, _| fixture.steps(10) },
    Operation {
        name: "fork",
        prepare: Fixture::kept_sequence,
        run: |fixture, seq| {
            fixture.engine.fork(seq, 3, &Fork { at: Some(LONG as usize), ..Fork::default() })?;
            fixture.steps(3)
        },
    },
    Operation {
        name: "append",
        prepare: Fixture::kept_sequence,
        run: |fixture, seq| {
            fixture.engine.append(seq, vec![50; 200])?;
            fixture.steps(3)
        },
    },
    Operation {
        name: "rewind",
        prepare: Fixture::kept_sequence,
        run: |fixture, seq| {
            fixture.engine.rewind(seq, LONG as usize - 50)?;
            fixture.steps(3)
        },
    },
    Operation {
        name: "resume",
        prepare: Fixture::kept_sequence,
        run: |fixture, seq| {
            let sampling = SamplingParams { prompt_logprobs: None, echo: false, ..memory_intensive() };
            fixture.engine.resume(seq, Resume::new(sampling))?;
            fixture.steps(20)
        },
    },
    Operation { name: "export", prepare: Fixture::kept_sequence, run: |fixture, seq| fixture.export(seq) },
    Operation {
        name: "import",
        prepare: |fixture| {
            let seq = fixture.kept_sequence();
            fixture.export(seq).unwrap();
            assert!(fixture.state.len() > 100_000);
            seq
        },
        run: |fixture, _| {
            let state = std::mem::take(&mut fixture.state);
            let id = fixture.engine.import(fixture.engine.queue(), &state)?;
            fixture.steps(2)?;
            if let Some(output) = fixture.outputs.get(&id) {
                // The import failed.
                assert_eq!(output.error, Some(Code::OutOfMemory));
                return Ok(());
            }
            fixture.engine.resume(id, Resume::new(sampling_for(5, 3)))?;
            fixture.steps(6)
        },
    },
    Operation {
        name: "admit",
        prepare: |fixture| {
            // A list of so many requests is a large allocation.
            for seed in 0..120 {
                fixture.engine.add_request(Request::new(Prompt::Tokens(vec![5; 3]), sampling_for(2, seed))).unwrap();
            }
            SeqId::default()
        },
        run: |fixture, _| {
            fixture
                .engine
                .predict_admission(fixture.engine.queue(), Request { n: 4, ..Request::new(long_prompt(3), memory_intensive()) })?;
            fixture.engine.predict_admission(fixture.engine.queue(), Request::new(Prompt::Text(long_text()), sampling_for(5, 3))).map(drop)
        },
    },
    Operation { name: "metrics", prepare: nothing, run: |fixture, _| fixture.engine.metrics().map(drop) },
    Operation { name: "snapshot", prepare: Fixture::kept_sequence, run: |fixture, _| fixture.engine.snapshot(100, 100).map(drop) },
    Operation {
        name: "resize the budget",
        prepare: Fixture::kept_sequence,
        run: |fixture, _| {
            let budget = fixture.engine.budget().clone();
            let BudgetInfo { bytes, min_bytes, .. } = budget.info();
            budget.resize(min_bytes)?;
            fixture.steps(2)?;
            budget.resize(bytes)?;
            fixture.steps(2)
        },
    },
    Operation {
        name: "swap",
        prepare: |fixture| {
            let swapping = EngineOptions { preemption: Preemption::Swap, swap_bytes: 4 << 20, ..options() };
            *fixture = Fixture::with_options(&swapping);
            let kept = fixture.kept_sequence();
            add(fixture, Request::new(long_prompt(4), sampling_for(60, 4))).unwrap();
            kept
        },
        run: |fixture, kept| {
            let budget = fixture.engine.budget().clone();
            let BudgetInfo { bytes, min_bytes, .. } = budget.info();
            budget.resize(min_bytes)?;
            fixture.steps(2)?;
            budget.resize(bytes)?;
            fixture.engine.resume(kept, Resume::new(sampling_for(5, 3)))?;
            fixture.steps(10)?;
            let stats = fixture.engine.stats();
            // If an allocation fails at the swap-in, the request ends with an error.
            assert!(stats.blocks_swapped_out > 0 && (stats.blocks_swapped_in > 0 || stats.finished_error > 0), "{stats:?}");
            Ok(())
        },
    },
    Operation {
        name: "journal and trace",
        prepare: |fixture| {
            let nowhere = || Some("/dev/null".into());
            *fixture = Fixture::with_options(&EngineOptions { journal_path: nowhere(), trace_path: nowhere(), ..options() });
            let seq = fixture.kept_sequence();
            // The operation forks this short sequence many times.
            fixture.engine.add_request(Request { keep: true, ..Request::new(Prompt::Tokens(vec![5; 3]), sampling_for(2, 5)) }).unwrap();
            fixture.steps(5).unwrap();
            seq
        },
        run: |fixture, seq| {
            fixture.engine.fork(seq.own_request().sequence(1), 80, &Fork { idle: true, ..Fork::default() })?;
            fixture.engine.append(seq, vec![50; 200])?;
            let sampling = SamplingParams { prompt_logprobs: None, echo: false, ..memory_intensive() };
            fixture.engine.resume(seq, Resume::new(sampling))?;
            fixture.engine.pin(long_prompt(9), false, &[7; 3000], 1, None)?;
            fixture.engine.export(seq, None)?;
            add(fixture, Request { n: 4, salt: vec![7; 3000], ..Request::new(long_prompt(3), memory_intensive()) })?;
            let state = std::mem::take(&mut fixture.state);
            if !state.is_empty() {
                fixture.engine.import(fixture.engine.queue(), &state)?;
            }
            fixture.steps(2)
        },
    },
    Operation {
        name: "pin",
        prepare: nothing,
        run: |fixture, _| {
            fixture.engine.pin(long_prompt(9), false, &[7; 3000], 1, None)?;
            fixture.steps(4)
        },
    },
];

/// Runs an operation in which one allocation fails. Returns the outputs of the other requests, the
/// result of the operation, and whether an allocation has failed.
fn run_operation(operation: &Operation, passed: usize) -> (Vec<SequenceOutput>, Result<()>, bool) {
    let mut fixture = Fixture::new();
    let subject = (operation.prepare)(&mut fixture);
    let (result, injected) = fail_allocation(passed, || (operation.run)(&mut fixture, subject));
    fixture.engine.check_invariants();
    fixture.drain();
    fixture.free_all();
    let others = OTHERS.iter().map(|id| fixture.outputs.remove(id).unwrap_or_default()).collect();
    for (id, output) in &fixture.outputs {
        let is_valid = matches!(output.error, None | Some(Code::OutOfMemory)) && (output.finish.is_some() || output.error.is_some());
        assert!(is_valid, "{}, after {passed}: sequence {id} has the output {output:?}", operation.name);
    }
    (others, result, injected)
}

fn fail_each_allocation(operation: &Operation) -> usize {
    let expected = run_operation(operation, usize::MAX);
    expected.1.as_ref().unwrap_or_else(|error| panic!("{}: {error}", operation.name));
    assert!(expected.0.iter().all(|output| output.ends == 1 && output.tokens.len() == 60), "{:?}", expected.0);
    for passed in 0.. {
        let before = live_bytes();
        let (others, result, injected) = run_operation(operation, passed);
        if !injected {
            return passed;
        }
        if let Err(error) = result {
            assert_eq!(error.code(), Code::OutOfMemory, "{}, after {passed}: {error}", operation.name);
        }
        assert_eq!(others, expected.0, "{}, after {passed}: other requests are affected", operation.name);
        drop((others, expected.1.clone()));
        assert_eq!(live_bytes(), before, "{}, after {passed}: memory leaks", operation.name);
    }
    unreachable!()
}

/// Environment variable with the share of the operations that a process tests.
const SHARE: &str = "PAGEDLLM_ALLOCATIONS_SHARE";
/// Processes that share the operations, since a process counts its memory for one test at a time.
const SHARES: usize = 2;

#[test]
fn a_failed_allocation_affects_only_its_own_request() {
    if std::env::var(SHARE).is_ok() {
        return on_deep_stack(test_own_share);
    }
    let test = ["--exact", "a_failed_allocation_affects_only_its_own_request", "--nocapture"];
    let start = |share: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(test).env(SHARE, share.to_string()).stdout(Stdio::piped()).spawn().unwrap()
    };
    for process in std::array::from_fn::<_, SHARES, _>(start) {
        let output = process.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", output.status);
        print!("{text}");
    }
}

fn test_own_share() {
    let share = std::env::var(SHARE).unwrap().parse().unwrap();
    for operation in OPERATIONS.iter().skip(share).step_by(SHARES) {
        let failures = fail_each_allocation(operation);
        println!("{}: {failures} allocations failed, one per run", operation.name);
    }
}

/// The weight format of the model files, and integer weights: 8 bits for the embedding and the
/// head, 4 bits for all others.
const WEIGHTS: [Option<WeightFormat>; 2] = [None, Some(WeightFormat::Int4 { group: 32, offsets: true })];

/// Creates an engine with a new budget, a journal and a trace.
fn create_engine(weight_format: Option<WeightFormat>) -> Result<()> {
    let (budget, nowhere) = (MemoryBudget::new(3 << 20, 4 << 20)?, || Some("/dev/null".into()));
    let options =
        EngineOptions { budget: Some(budget), kv_bytes: None, weight_format, journal_path: nowhere(), trace_path: nowhere(), ..options() };
    Engine::plan(&options).and_then(|_| Engine::create(&options)).map(drop)
}

#[test]
fn a_failed_engine_creation_leaks_no_memory() {
    let _alone = alone();
    on_deep_stack(|| {
        for weights in WEIGHTS {
            create_engine(weights).unwrap();
            let mut failures = 0;
            for passed in 0.. {
                let before = live_bytes();
                let (result, injected) = fail_allocation(passed, || create_engine(weights));
                if !injected {
                    break;
                }
                failures += 1;
                assert!(matches!(&result, Err(error) if error.code() == Code::OutOfMemory), "{weights:?}, after {passed}: {result:?}");
                drop(result);
                assert_eq!(live_bytes(), before, "{weights:?}, after {passed}: memory leaks");
            }
            println!("{weights:?}: {failures} allocations failed, one per run");
            assert!(failures > 5);
        }
    });
}

/// Returns the first column of the tables in docs/allocations.md.
fn documented() -> BTreeSet<String> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/allocations.md")).unwrap();
    text.lines().filter_map(|line| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_string())).collect()
}

#[test]
fn large_infallible_allocations_are_documented() {
    let _alone = alone();
    on_deep_stack(|| {
        let mut found: BTreeSet<Site> = record_infallible(|| {
            WEIGHTS.into_iter().for_each(|weights| create_engine(weights).unwrap());
        });
        for operation in OPERATIONS {
            let mut fixture = Fixture::new();
            let subject = (operation.prepare)(&mut fixture);
            found.append(&mut record_infallible(|| (operation.run)(&mut fixture, subject).unwrap()));
            found.append(&mut record_infallible(|| fixture.drain()));
        }
        let mut fixture = Fixture::new();
        found.append(&mut record_infallible(|| {
            let grammar = Some(Grammar::JsonSchema(r#"{"type": "object", "properties": {"name": {"type": "string"}}}"#.into()));
            let sampling = SamplingParams { grammar, ..SamplingParams::default() };
            add(&mut fixture, Request::new(long_prompt(3), sampling)).unwrap();
            fixture.drain();
        }));
        let documented = documented();
        let undocumented: Vec<&Site> = found.iter().filter(|site| !documented.contains(&site.name())).collect();
        assert!(undocumented.is_empty(), "make them fallible, or list them in docs/allocations.md: {undocumented:#?}");
        let found: BTreeSet<String> = found.iter().map(Site::name).collect();
        assert_eq!(found, documented, "docs/allocations.md lists allocations that no longer exist");
    });
}
