//! The longest step and the longest wait for a token while other requests and host threads attack
//! the engine.
//!
//! usage: fairness [--seconds N] [NAME]...     part of a name selects attacks, each of N seconds

mod attacks;
#[path = "../../tests/support/cpu_time.rs"]
#[allow(dead_code)]
mod cpu_time;
mod setup;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use attacks::{ATTACKS, Attack, Kind};
use pagedllm::engine::{Engine, Output, Prompt, Queue, Request};
use pagedllm::error::{Code, Error};
use pagedllm::types::options::{EngineOptions, Grammar, SamplingParams};

type Result<T> = std::result::Result<T, Error>;

/// Requests that decode all the time, and those that do so with a grammar.
const VICTIMS: usize = 4;
const GRAMMAR_VICTIMS: usize = 1;
const BASELINE_STEPS: usize = 500;
const MAX_STEPS: usize = 20_000;
/// Time of the attackers for their preparation, such as the prompt of a sequence to export.
const PREPARATION: Duration = Duration::from_secs(60);
/// A step is late if it takes this much longer than the longest one without an attack.
const LATE: Duration = Duration::from_millis(10);
/// Steps between two actions of an attack that acts between steps.
const STEPS_BETWEEN: usize = 50;

fn main() -> Result<()> {
    let (seconds, names) = arguments();
    let options = setup::options();
    println!(
        "| attack | size | median ms | longest ms | longest CPU ms | late steps | longest wait ms | longest wait with a grammar ms | longest call ms | calls | remarks |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let state = setup::long_state(&options)?;
    for attack in ATTACKS.iter().filter(|attack| names.is_empty() || names.iter().any(|name| attack.name.contains(name))) {
        let row = run(&options, attack, &state, Duration::from_secs(seconds)).unwrap_or_else(|error| format!("{error} |"));
        println!("| {} | {row}", attack.name);
    }
    Ok(())
}

/// Returns the seconds per attack, and parts of the names of the selected attacks.
fn arguments() -> (u64, Vec<String>) {
    let mut names: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let Some(at) = names.iter().position(|name| name == "--seconds") else { return (10, names) };
    let seconds = names.get(at + 1).and_then(|seconds| seconds.parse().ok()).expect("usage: fairness [--seconds N] [NAME]...");
    names.drain(at..at + 2);
    (seconds, names)
}

/// Times of steps, and between two tokens of a victim.
#[derive(Default)]
struct Times {
    steps: Vec<Duration>,
    /// CPU time of the stepping thread in each step. Other processes do not change it.
    cpu: Vec<Duration>,
    waits: Vec<Duration>,
    /// Those of the victims with a grammar.
    grammar_waits: Vec<Duration>,
}

fn longest(times: &[Duration]) -> Duration {
    times.iter().copied().max().unwrap_or_default()
}

impl Times {
    fn median(&self) -> Duration {
        let mut sorted = self.steps.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied().unwrap_or_default()
    }
}

/// The victims of one engine.
struct Victims<'a> {
    engine: &'a Engine,
    all: Vec<Victim>,
}

struct Victim {
    queue: Queue,
    has_grammar: bool,
    /// Time of its last token. `None` before the first token.
    last: Option<Instant>,
}

impl<'a> Victims<'a> {
    fn new(engine: &'a Engine) -> Result<Victims<'a>> {
        let add = |i| {
            let (queue, has_grammar) = (engine.create_queue(1 << 16)?, i >= VICTIMS);
            engine.add_request_to(&queue, Self::request(has_grammar))?;
            Ok(Victim { queue, has_grammar, last: None })
        };
        Ok(Victims { engine, all: (0..VICTIMS + GRAMMAR_VICTIMS).map(add).collect::<Result<_>>()? })
    }

    fn request(has_grammar: bool) -> Request {
        let grammar = has_grammar.then(|| Grammar::Regex("[a-z ,.]{2000,4000}".into()));
        let sampling = SamplingParams { max_tokens: Some(200), ignore_eos: true, grammar, ..SamplingParams::greedy() };
        Request::new(Prompt::Text("Tell me a short story.".into()), sampling)
    }

    /// Makes one step and records it. A victim that has ended is added again.
    fn step(&mut self, times: &mut Times) -> Result<()> {
        let (start, cpu) = (Instant::now(), cpu_time::of_thread());
        self.engine.step()?;
        times.steps.push(start.elapsed());
        times.cpu.push(cpu_time::of_thread() - cpu);
        for Victim { queue, has_grammar, last } in &mut self.all {
            let outputs = queue.poll(Some(Duration::ZERO))?;
            if outputs.iter().any(|output| !output.tokens.is_empty()) {
                let waits = if *has_grammar { &mut times.grammar_waits } else { &mut times.waits };
                waits.extend(last.map(|last| last.elapsed()));
                *last = Some(Instant::now());
            }
            if outputs.iter().any(|output| output.finish.is_some()) {
                self.engine.add_request_to(queue, Self::request(*has_grammar))?;
                *last = None;
            }
        }
        Ok(())
    }
}

/// What the threads of an attack share with the stepping thread.
pub struct Attackers<'a> {
    pub engine: &'a Engine,
    pub size: usize,
    stop: AtomicBool,
    ready: AtomicUsize,
    calls: AtomicUsize,
    longest_call: std::sync::Mutex<Duration>,
    remark: std::sync::Mutex<String>,
}

impl Attackers<'_> {
    pub fn stopped(&self) -> bool {
        self.stop.load(SeqCst)
    }

    /// Measures a call that ends in the calling thread. An error becomes a remark.
    pub fn call<T>(&self, call: impl FnOnce() -> Result<T>) -> Option<T> {
        let start = Instant::now();
        let result = call();
        let mut longest = self.longest_call.lock().unwrap();
        *longest = start.elapsed().max(*longest);
        self.calls.fetch_add(1, SeqCst);
        result.map_err(|error| self.remark(&error)).ok()
    }

    /// Records the first error.
    pub fn remark(&self, error: &Error) {
        let mut remark = self.remark.lock().unwrap();
        if remark.is_empty() {
            *remark = brief(error);
        }
    }

    /// Waits for outputs and returns them. Records the first error of a request.
    pub fn read(&self, queue: &Queue) -> Vec<Output> {
        let outputs = queue.poll(Some(Duration::from_millis(2))).map(Vec::from).unwrap_or_default();
        outputs.iter().filter_map(|output| output.error.as_ref()).for_each(|error| self.remark(error));
        outputs
    }
}

/// Returns an error as a cell of the table.
fn brief(error: &Error) -> String {
    error.to_string().chars().map(|c| if c == '|' || c.is_control() { ' ' } else { c }).take(120).collect()
}

/// Runs one attack on a new engine and returns its row, except for the name.
fn run(options: &EngineOptions, attack: &Attack, state: &[u8], time: Duration) -> Result<String> {
    let options = &EngineOptions { kv_bytes: attack.kv_bytes.or(options.kv_bytes), ..options.clone() };
    let (size, refusal) = accepted_size(&Engine::create(options)?, attack)?;
    let engine = &Engine::create(options)?;
    setup::touch_pool(engine, state)?;
    let attackers = &Attackers {
        engine,
        size,
        stop: AtomicBool::new(false),
        ready: AtomicUsize::new(0),
        calls: AtomicUsize::new(0),
        longest_call: Default::default(),
        remark: Default::default(),
    };
    let mut victims = Victims::new(engine)?;
    let (mut before, mut during) = (Times::default(), Times::default());
    (0..50).try_for_each(|_| victims.step(&mut Times::default()))?;
    (0..BASELINE_STEPS).try_for_each(|_| victims.step(&mut before))?;
    let result = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..attack.threads).map(|thread| scope.spawn(move || attack_until_stopped(attackers, attack, thread))).collect();
        let result = prepare_and_measure(attackers, attack, &mut victims, &mut during, time);
        attackers.stop.store(true, SeqCst);
        // A thread may wait for a step.
        while result.is_ok() && threads.iter().any(|thread| !thread.is_finished()) && engine.step().is_ok() {}
        result
    });
    result?;
    Ok(row(attackers, &refusal, &before, &during))
}

fn prepare_and_measure(attackers: &Attackers, attack: &Attack, victims: &mut Victims, times: &mut Times, time: Duration) -> Result<()> {
    let start = Instant::now();
    while attackers.ready.load(SeqCst) < attack.threads && start.elapsed() < PREPARATION {
        victims.step(&mut Times::default())?;
    }
    let start = Instant::now();
    while start.elapsed() < time && times.steps.len() < MAX_STEPS {
        if let (Kind::Between(act), 0) = (&attack.kind, times.steps.len() % STEPS_BETWEEN) {
            act(attackers);
            victims.all.iter_mut().for_each(|victim| victim.last = None); // the host itself did not step
        }
        victims.step(times)?;
    }
    Ok(())
}

fn attack_until_stopped(attackers: &Attackers, attack: &Attack, thread: usize) {
    match &attack.kind {
        Kind::Requests { in_flight, prepared, make } => {
            let make = |round| make(attackers.engine, attackers.size, round * attack.threads + thread);
            keep_in_flight(attackers, *in_flight, *prepared, make);
        }
        Kind::Threads(act) => act(attackers, thread, &|| {
            attackers.ready.fetch_add(1, SeqCst);
        }),
        Kind::Between(_) => {}
    }
}

/// Adds a request whenever fewer than `in_flight` run. If `prepared`, the measurement begins when
/// that many have generated tokens.
fn keep_in_flight(attackers: &Attackers, in_flight: usize, prepared: bool, make: impl Fn(usize) -> Request) {
    let queue = attackers.engine.create_queue(1 << 20).unwrap();
    let (mut live, mut round) = (0, 0);
    let (mut started, mut ready) = (HashSet::new(), false);
    while !attackers.stopped() {
        if !ready && (!prepared || started.len() >= in_flight) {
            attackers.ready.fetch_add(1, SeqCst);
            ready = true;
        }
        if live < in_flight {
            let request = make(round);
            let results = request.n as usize;
            round += 1;
            match attackers.call(|| attackers.engine.add_request_to(&queue, request)) {
                Some(_) => live += results,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
            continue;
        }
        let outputs = attackers.read(&queue);
        live -= outputs.iter().filter(|output| output.finish.is_some()).count();
        started.extend(outputs.iter().map(|output| output.request).take_while(|_| !ready));
    }
}

/// Halves the size of an attack until the engine accepts its request. Returns the refusal of the
/// smallest size that was refused.
fn accepted_size(engine: &Engine, attack: &Attack) -> Result<(usize, String)> {
    let (mut size, mut refusal) = (attack.size, String::new());
    let Kind::Requests { make, .. } = &attack.kind else { return Ok((size, refusal)) };
    loop {
        match engine.add_request(make(engine, size, usize::MAX / 2)) {
            Ok(_) => return Ok((size, refusal)),
            Err(error) if size > 2 && matches!(error.code(), Code::InvalidArgument | Code::Capacity | Code::Unsupported) => {
                refusal = format!("{size} refused: {}", brief(&error));
                size /= 2;
            }
            Err(error) => return Err(error),
        }
    }
}

fn row(attackers: &Attackers, refusal: &str, before: &Times, during: &Times) -> String {
    let ms = |time: Duration| format!("{:.2}", time.as_secs_f64() * 1e3);
    let late = during.steps.iter().filter(|&&step| step > longest(&before.steps) + LATE).count();
    let pair = |during: Duration, before: Duration| format!("{} ({})", ms(during), ms(before));
    let remark = attackers.remark.lock().unwrap();
    let remarks: Vec<&str> = [refusal, remark.as_str()].into_iter().filter(|text| !text.is_empty()).collect();
    [
        attackers.size.to_string(),
        pair(during.median(), before.median()),
        pair(longest(&during.steps), longest(&before.steps)),
        pair(longest(&during.cpu), longest(&before.cpu)),
        format!("{late} of {}", during.steps.len()),
        pair(longest(&during.waits), longest(&before.waits)),
        pair(longest(&during.grammar_waits), longest(&before.grammar_waits)),
        ms(*attackers.longest_call.lock().unwrap()),
        attackers.calls.load(SeqCst).to_string(),
        remarks.join("; "),
    ]
    .join(" | ")
        + " |"
}
