//! The attacks. Each is a request or a call that a host may make.

use std::cell::RefCell;
use std::time::Duration;

use pagedllm::engine::{Engine, Prompt, Queue, Request, Resume};
use pagedllm::types::options::{BeamParams, Dry, Grammar, SamplingParams};

use crate::Attackers;
use crate::setup::MAX_MODEL_LEN;

pub struct Attack {
    pub name: &'static str,
    pub kind: Kind,
    /// First size to try. It is halved until the engine accepts the request.
    pub size: usize,
    pub threads: usize,
    /// Size of the KV pool, if it differs from that of the other attacks.
    pub kv_bytes: Option<u64>,
}

pub enum Kind {
    /// Each thread keeps a number of requests in flight. If `prepared`, their prompts are computed
    /// before the measurement. `make` has the engine, the size and the number of the request.
    Requests { in_flight: usize, prepared: bool, make: fn(&Engine, usize, usize) -> Request },
    /// Threads that act until they are stopped. They call the last argument when they are prepared.
    Threads(fn(&Attackers, usize, &dyn Fn())),
    /// The stepping thread acts between two steps.
    Between(fn(&Attackers)),
}

const fn attack(name: &'static str, size: usize, threads: usize, kind: Kind) -> Attack {
    Attack { name, kind, size, threads, kv_bytes: None }
}

const fn requests(name: &'static str, size: usize, in_flight: usize, make: fn(&Engine, usize, usize) -> Request) -> Attack {
    attack(name, size, 1, Kind::Requests { in_flight, prepared: false, make })
}

/// Two requests with long prompts, of which only the generation is measured.
const fn prepared(name: &'static str, size: usize, make: fn(&Engine, usize, usize) -> Request) -> Attack {
    attack(name, size, 1, Kind::Requests { in_flight: 2, prepared: true, make })
}

const fn by_eight(name: &'static str, size: usize, make: fn(&Engine, usize, usize) -> Request) -> Attack {
    attack(name, size, 8, Kind::Requests { in_flight: 1, prepared: false, make })
}

pub const ATTACKS: &[Attack] = &[
    attack("control: none", 0, 0, Kind::Between(|_| {})),
    attack("control: 8 threads that spin", 8, 8, Kind::Threads(spin)),
    requests("control: 60 short requests", 60, 60, |_, _, i| Request::new(tokens(20, i), long(400))),
    requests("control: prompts of this many tokens", 12_000, 2, |_, size, i| Request::new(tokens(size, i), long(300))),
    prepared("control: generation after this many tokens", 12_000, |_, size, i| Request::new(tokens(size, i), long(2_000))),
    prepared("DRY, 64 breakers of this many bytes, 4,000 tokens", 40_000, dry),
    requests("1,000 stop strings of this many bytes in total", 24_000_000, 4, stop_strings),
    requests("bad_words", 1 << 16, 4, bad_words),
    requests("bad_words_ids", 1 << 20, 4, bad_words_ids),
    requests("logit_bias", 1 << 20, 4, logit_bias),
    requests("allowed_token_ids", 1 << 20, 4, allowed_token_ids),
    requests("stop_token_ids", 1 << 20, 4, stop_token_ids),
    prepared("no_repeat_ngram_size 2 at this many tokens", 12_000, |_, size, i| ngram(2, size, i)),
    prepared("no_repeat_ngram_size 16 at this many tokens", 12_000, |_, size, i| ngram(16, size, i)),
    requests("60 requests with an ambiguous Lark grammar", 60, 60, ambiguous),
    requests("60 requests with different ambiguous Lark grammars", 60, 60, different_ambiguous),
    attack("this many aborts of requests with ambiguous grammars", 60, 0, Kind::Between(abort_ambiguous)),
    requests("JSON schema with this many anyOf branches", 2_000, 4, any_of),
    attack("export and import of this many tokens", MAX_MODEL_LEN - 400, 2, Kind::Threads(transfer)),
    Attack { kv_bytes: Some(40 << 20), ..attack("swap of sequences with this many tokens", 12_000, 1, Kind::Threads(swap)) },
    attack("this many adds and aborts between two steps", 100_000, 0, Kind::Between(add_and_abort)),
    by_eight("8 threads compile JSON schemas of this many properties", 1_000, schemas),
    by_eight("8 threads compile regular expressions of this many bytes", 20_000, regexes),
    by_eight("8 threads tokenize prompts of this many bytes", 1 << 20, long_text),
    by_eight("8 threads tokenize one word of this many bytes", 1 << 20, long_word),
    attack("8 threads render chats of this many messages", 2_000, 8, Kind::Threads(render_chats)),
    requests("n, with 128 logprobs", 1 << 16, 1, |_, size, i| Request { n: size as u32, ..Request::new(tokens(20, i), with_logprobs(50)) }),
    requests("best_of, with 128 logprobs", 1 << 16, 1, |_, size, i| Request {
        best_of: Some(size as u32),
        ..Request::new(tokens(20, i), with_logprobs(50))
    }),
    requests("beams", 1 << 16, 1, beams),
    requests("prompt_logprobs of this many tokens", 12_000, 2, prompt_logprobs),
    requests("echo of this many tokens", 12_000, 2, echo),
];

/// Sampling for a number of tokens.
fn long(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::greedy() }
}

fn with_logprobs(max_tokens: usize) -> SamplingParams {
    SamplingParams { temperature: 1.0, logprobs: Some(SamplingParams::MAX_LOGPROBS), ..long(max_tokens) }
}

/// Returns a prompt that differs from others in its first token.
fn tokens(len: usize, seed: usize) -> Prompt {
    Prompt::Tokens((0..len).map(|i| 10 + ((i * 7919 + (seed % 1000) * 131 + i * i) % 1000) as u32).collect())
}

/// Returns the token of the letter a.
fn letter(engine: &Engine) -> u32 {
    *engine.text().unwrap().encode("a", false).unwrap().last().unwrap()
}

/// The history is a long run of one letter, and each breaker ends with a run of it.
fn dry(engine: &Engine, size: usize, _: usize) -> Request {
    let breaker = |i: usize| format!("{i:02}{}", "a".repeat(size - 2));
    let dry = Dry { sequence_breakers: Some((0..64).map(breaker).collect()), ..Dry::default() };
    let prompt = Prompt::Tokens(vec![letter(engine); 4_000]);
    Request::new(prompt, SamplingParams { dry: Some(dry), allowed_token_ids: vec![letter(engine)], ..long(4_000) })
}

/// The output is a long run of one letter, and each stop string begins with a longer one.
fn stop_strings(engine: &Engine, size: usize, i: usize) -> Request {
    let stop = (0..1_000).map(|k| format!("{}{k}", "a".repeat(size / 1_000))).collect();
    Request::new(tokens(8, i), SamplingParams { stop, allowed_token_ids: vec![letter(engine)], ..long(1_000) })
}

fn bad_words(_: &Engine, size: usize, i: usize) -> Request {
    let bad_words = (0..size).map(|k| format!("word {k} and more")).collect();
    Request::new(tokens(20, i), SamplingParams { bad_words, ..long(300) })
}

fn bad_words_ids(engine: &Engine, size: usize, i: usize) -> Request {
    let letter = letter(engine);
    let bad_words_ids = (0..size).map(|k| vec![letter, letter, letter, letter, (k % 1024) as u32]).collect();
    Request::new(tokens(20, i), SamplingParams { bad_words_ids, ..long(300) })
}

fn logit_bias(_: &Engine, size: usize, i: usize) -> Request {
    let logit_bias = (0..size).map(|k| ((k % 1024) as u32, 0.5)).collect();
    Request::new(tokens(20, i), SamplingParams { logit_bias, ..long(300) })
}

fn allowed_token_ids(_: &Engine, size: usize, i: usize) -> Request {
    let allowed_token_ids = (0..size).map(|k| (k % 1024) as u32).collect();
    Request::new(tokens(20, i), SamplingParams { allowed_token_ids, ..long(300) })
}

fn stop_token_ids(_: &Engine, size: usize, i: usize) -> Request {
    let stop_token_ids = (0..size).map(|k| (k % 1024) as u32).collect();
    Request::new(tokens(20, i), SamplingParams { stop_token_ids, min_tokens: 300, ..long(300) })
}

fn ngram(no_repeat_ngram_size: u32, size: usize, i: usize) -> Request {
    Request::new(tokens(size, i), SamplingParams { no_repeat_ngram_size, ..long(2_000) })
}

/// A text of n letters has exponentially many derivations. `min_tokens` prevents an early end.
fn ambiguous(_: &Engine, _: usize, i: usize) -> Request {
    let grammar = "start: a\na: a a | a a a | \"x\" | \"xx\" | \"xxx\"\n".into();
    Request::new(tokens(20, i), SamplingParams { grammar: Some(Grammar::Lark(grammar)), min_tokens: 400, ignore_eos: false, ..long(400) })
}

fn different_ambiguous(engine: &Engine, size: usize, i: usize) -> Request {
    let grammar = format!("start: a\na: a a | a a a | \"x\" | \"xx\" | \"{i}\"\n");
    let request = ambiguous(engine, size, i);
    Request { sampling: SamplingParams { grammar: Some(Grammar::Lark(grammar)), ..request.sampling }, ..request }
}

fn any_of(_: &Engine, size: usize, i: usize) -> Request {
    let branch = |k: usize| {
        format!(r#"{{"type":"object","properties":{{"k{k}":{{"type":"string"}},"x":{{"type":"integer"}}}},"required":["k{k}"]}}"#)
    };
    let branches: Vec<String> = (0..size).map(branch).collect();
    let schema = format!(r#"{{"anyOf":[{}]}}"#, branches.join(","));
    Request::new(tokens(20, i), SamplingParams { grammar: Some(Grammar::JsonSchema(schema)), ..long(300) })
}

/// Each request has another grammar.
fn schemas(_: &Engine, size: usize, i: usize) -> Request {
    let property = |k: usize| format!(r#""p{i}_{k}":{{"type":"string","maxLength":{}}}"#, 10 + k % 50);
    let properties: Vec<String> = (0..size).map(property).collect();
    let schema = format!(r#"{{"type":"object","properties":{{{}}}}}"#, properties.join(","));
    Request::new(tokens(20, i), SamplingParams { grammar: Some(Grammar::JsonSchema(schema)), ..long(2) })
}

fn regexes(_: &Engine, size: usize, i: usize) -> Request {
    let pattern = format!("({i}|{})*", "(ab|cd?|[e-g]{1,9})".repeat(size / 19));
    Request::new(tokens(20, i), SamplingParams { grammar: Some(Grammar::Regex(pattern)), ..long(2) })
}

fn long_text(_: &Engine, size: usize, i: usize) -> Request {
    let text = Prompt::Text(format!("{i} {}", "What is the capital of France? ".repeat(size / 31).split_at(size - size % 31 - 31).0));
    Request { truncate_prompt_tokens: Some(8), ..Request::new(text, long(2)) }
}

fn long_word(_: &Engine, size: usize, _: usize) -> Request {
    let text = Prompt::Text("abcdefghijklmnop".repeat(size / 16));
    Request { truncate_prompt_tokens: Some(8), ..Request::new(text, long(2)) }
}

fn beams(_: &Engine, size: usize, i: usize) -> Request {
    let beam = Some(BeamParams { width: size as u32, ..BeamParams::default() });
    Request { beam, ..Request::new(tokens(20, i), long(200)) }
}

fn prompt_logprobs(_: &Engine, size: usize, i: usize) -> Request {
    Request::new(tokens(size, i), SamplingParams { prompt_logprobs: Some(SamplingParams::MAX_LOGPROBS), ..with_logprobs(10) })
}

fn echo(_: &Engine, size: usize, i: usize) -> Request {
    Request::new(tokens(size, i), SamplingParams { echo: true, ..long(10) })
}

fn spin(attackers: &Attackers, _: usize, ready: &dyn Fn()) {
    ready();
    while !attackers.stopped() {
        std::hint::black_box((0..10_000_u64).sum::<u64>());
    }
}

/// Exports a long sequence and imports its state, again and again.
fn transfer(attackers: &Attackers, thread: usize, ready: &dyn Fn()) {
    let (engine, queue) = (attackers.engine, attackers.engine.create_queue(1 << 10).unwrap());
    let request = Request { keep: true, ..Request::new(tokens(attackers.size, thread), long(1)) };
    let mut sequence = None;
    if attackers.call(|| engine.add_request_to(&queue, request)).is_some() {
        while sequence.is_none() && !attackers.stopped() {
            sequence = attackers.read(&queue).into_iter().find(|output| output.finish.is_some()).map(|output| output.sequence);
        }
    }
    ready();
    while let (Some(sequence), false) = (sequence, attackers.stopped()) {
        attackers.call(|| engine.export(sequence, Some(&queue)));
        let mut state = Vec::new();
        while state.is_empty() && !attackers.stopped() {
            state =
                attackers.read(&queue).into_iter().map(|output| output.sequence_state).find(|state| !state.is_empty()).unwrap_or_default();
        }
        if state.is_empty() {
            return;
        }
        if let Some(imported) = attackers.call(|| engine.import(&queue, &state)) {
            std::thread::sleep(Duration::from_millis(20));
            attackers.call(|| engine.free(imported));
        }
    }
}

/// Resumes two idle sequences in turn. Only one of them fits the pool.
fn swap(attackers: &Attackers, thread: usize, ready: &dyn Fn()) {
    let (engine, queue) = (attackers.engine, attackers.engine.create_queue(1 << 10).unwrap());
    let wait = || {
        while !attackers.stopped() {
            if attackers.read(&queue).iter().any(|output| output.finish.is_some()) {
                return;
            }
        }
    };
    let mut sequences = Vec::new();
    for i in 0..2 {
        let request = Request { keep: true, ..Request::new(tokens(attackers.size, 2 * thread + i), long(1)) };
        sequences.extend(attackers.call(|| engine.add_request_to(&queue, request)).map(|id| id.sequence(0)));
        wait();
    }
    ready();
    for &sequence in sequences.iter().cycle().take_while(|_| !attackers.stopped()) {
        attackers.call(|| engine.resume(sequence, Resume { keep: true, ..Resume::new(long(2)) }));
        wait();
    }
}

/// The requests of one gap between two steps are aborted in the next gap, when their masks may be
/// late.
fn abort_ambiguous(attackers: &Attackers) {
    thread_local!(static PREVIOUS: RefCell<Option<Queue>> = const { RefCell::new(None) });
    let queue = attackers.engine.create_queue(usize::MAX / 2).unwrap();
    for i in 0..attackers.size {
        if attackers.call(|| attackers.engine.add_request_to(&queue, ambiguous(attackers.engine, 0, i))).is_none() {
            return;
        }
    }
    // The drop of a queue aborts its requests.
    PREVIOUS.set(Some(queue));
}

fn add_and_abort(attackers: &Attackers) {
    let queue = attackers.engine.create_queue(usize::MAX / 2).unwrap();
    for i in 0..attackers.size {
        let Some(id) = attackers.call(|| attackers.engine.add_request_to(&queue, Request::new(tokens(4, i), long(2)))) else { return };
        attackers.call(|| attackers.engine.abort(id));
    }
}

fn render_chats(attackers: &Attackers, thread: usize, ready: &dyn Fn()) {
    ready();
    let message = |i: usize| format!(r#"{{"role":"{}","content":"message {i} of {thread}"}}"#, ["user", "assistant"][i % 2]);
    let chat = format!("[{}]", (0..attackers.size | 1).map(message).collect::<Vec<_>>().join(","));
    while !attackers.stopped() {
        attackers.call(|| attackers.engine.text()?.render_chat(&chat));
    }
}
