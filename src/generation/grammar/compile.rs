//! Compiles the grammar of a request into a parser.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use llguidance::TokenParser;
use llguidance::api::{GrammarInit, ParserLimits, StopReason, TopLevelGrammar};
use serde_json::Value as Json;

use super::has;
use super::pattern::Flags;
use super::schema::{Patterns, Prepared, WorkLimit};
use super::{Compiled, Shared, failure, lark, pattern, schema};
use crate::error::{Error, Result};
use crate::sys::quiet::no_panic;
use crate::sys::threads;
use crate::types::options::Grammar;

/// Stack size of the compiler, which recurses into nested grammars. The system commits pages of
/// this stack only when they are used.
const STACK_BYTES: usize = 64 << 20;

/// Limits of one grammar: about 20 ms to compile its lexer, 100 MB of lexer states. An ambiguous
/// grammar needs up to 20 us for an item, so that a mask takes up to 200 ms.
pub(super) fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 10_000,
        max_lexer_states: 50_000,
        max_grammar_size: 500_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// The compilations that run at the same time, in all engines of the process. More of them would
/// take the CPUs from the steps.
pub(super) struct Compilations {
    running: Mutex<usize>,
    ended: Condvar,
}

/// The right to compile, until it is dropped.
pub(super) struct CompilePermit(());

/// Maximum number of compilations that have run at the same time.
#[cfg(test)]
pub(super) static PEAK: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

static COMPILATIONS: Compilations = Compilations { running: Mutex::new(0), ended: Condvar::new() };

impl Compilations {
    fn running(&self) -> MutexGuard<'_, usize> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the maximum number: one for four CPUs, at most four.
    pub(super) fn max() -> usize {
        std::thread::available_parallelism().map_or(1, |cpus| (cpus.get() / 4).clamp(1, 4))
    }
}

impl CompilePermit {
    /// Waits until few enough other threads compile.
    pub(super) fn wait() -> CompilePermit {
        let running = COMPILATIONS.running();
        let mut running =
            COMPILATIONS.ended.wait_while(running, |running| *running >= Compilations::max()).unwrap_or_else(PoisonError::into_inner);
        *running += 1;
        #[cfg(test)]
        PEAK.fetch_max(*running, std::sync::atomic::Ordering::SeqCst);
        CompilePermit(())
    }
}

impl Drop for CompilePermit {
    fn drop(&mut self) {
        *COMPILATIONS.running() -= 1;
        COMPILATIONS.ended.notify_one();
    }
}

/// Compiles on a separate thread, since the caller's stack may be small.
pub(super) fn on_deep_stack(shared: Arc<Shared>, grammar: &Grammar, _permit: &CompilePermit) -> Result<Compiled> {
    let grammar = grammar.clone();
    let (answer, question) = crossbeam::channel::bounded(1);
    let work = move || {
        threads::lower_priority();
        // The send fails only if the thread that waits has ended.
        let _ = answer.send(no_panic(|| parser(&shared, grammar)));
    };
    let thread = threads::spawn_deep("pagedllm-grammar".into(), STACK_BYTES, work).map_err(|e| {
        Error::capacity(format!("cannot start the thread that compiles grammars: {e}; free memory or raise the limit of threads"))
    })?;
    let answer = question.recv();
    // The answer has arrived, or the thread has ended without one.
    let _ = thread.join();
    match answer {
        Ok(Ok(parser)) => Ok(Compiled::new(parser?)),
        Ok(Err(panic)) => Err(cannot(&panic)),
        Err(_) => Err(cannot(&"the compiler ended without a result")),
    }
}

fn cannot(why: &impl Display) -> Error {
    Error::invalid(format!("the grammar cannot be compiled: {}", reason(why)))
}

/// Returns the message of the crate without its debugging output. If it is long, the middle is cut,
/// because the reason is at the end.
pub(super) fn reason(why: &impl Display) -> String {
    const MAX_BYTES: usize = 600;
    let why = format!("{why:#}");
    let ends = ["\n<backtrace>", "\n<non-verbose", "\n<state>", "\n   1 | start: /"];
    let end = ends.iter().filter_map(|mark| why.find(mark)).min();
    let why = why[..end.unwrap_or(why.len())].trim_end();
    // The library has written the grammar around the expression, so its position says nothing to
    // the host.
    let why = why.strip_prefix("at 1(8): invalid regex ").and_then(|why| why.split_once(" (in regex): ")).map_or(why, |(_, why)| why);
    if why.len() <= MAX_BYTES {
        return why.to_string();
    }
    let boundary = |from: usize| (from..=why.len()).find(|&i| why.is_char_boundary(i)).unwrap_or(why.len());
    format!("{} ... {}", &why[..boundary(MAX_BYTES / 2)], &why[boundary(why.len() - MAX_BYTES / 2)..])
}

fn parser(shared: &Shared, grammar: Grammar) -> Result<TokenParser> {
    let (init, patterns) = match grammar {
        Grammar::JsonSchema(schema) => json_schema(&schema)?,
        Grammar::JsonObject => json_schema(r#"{"type": "object"}"#)?,
        Grammar::Regex(text) => (regex(&text)?, Patterns::default()),
        Grammar::Choice(texts) => (translated_regex(&alternatives(&texts)), Patterns::default()),
        Grammar::Lark(text) => lark(&text)?,
    };
    let cannot = |why: &dyn Display| cannot(&patterns.restore(&format!("{why:#}")));
    let mut parser = shared.factory.create_parser_from_init_default(init).map_err(|e| cannot(&e))?;
    parser.start_without_prompt();
    // A grammar of the empty text is complete from the start. A grammar without any text is refused
    // here.
    if !parser.check_stop().map_err(|e| cannot(&e))? {
        parser.compute_mask().map_err(|e| match parser.stop_reason() {
            StopReason::NoExtensionBias => cannot(&failure::no_token(shared, &mut parser)),
            _ => cannot(&e),
        })?;
    }
    check_first_tokens(shared, &parser)?;
    Ok(parser)
}

/// Refuses a grammar that exceeds a limit with its first token, whatever this token is. Consumes
/// some of the allowed tokens, each on a copy.
fn check_first_tokens(shared: &Shared, parser: &TokenParser) -> Result<()> {
    const MAX_TOKENS: usize = 8;
    let cannot = |panic| cannot(&panic);
    let allowed = no_panic(|| parser.deep_clone().compute_mask()).map_err(cannot)?;
    let Ok(allowed) = allowed else { return Ok(()) }; // the grammar is complete
    let trie = shared.factory.tok_env().tok_trie();
    let mut firsts = BTreeSet::new();
    let mut exceeded = None;
    for token in (0..trie.vocab_size() as u32).filter(|&token| allowed.is_allowed(token) && has(&shared.known, token)) {
        // Tokens with the same first byte often lead to the same state.
        if has(&shared.ends, token) || firsts.len() == MAX_TOKENS || !firsts.insert(trie.token(token).first().copied()) {
            continue;
        }
        let mut next = parser.deep_clone();
        let consumed = no_panic(|| next.compute_mask().and_then(|_| next.consume_token(token)).and_then(|_| next.check_stop()));
        match consumed.map_err(cannot)? {
            Ok(_) => return Ok(()),
            Err(why) => exceeded = Some(failure::too_much(shared, &[token], &reason(&why))),
        }
    }
    exceeded.map_or(Ok(()), |error| Err(Error::invalid(error.message().to_string())))
}

/// Returns the grammar of texts that a pattern of Python's `re` matches as a whole.
fn regex(text: &str) -> Result<GrammarInit> {
    let language = pattern::python_full_match(text, Flags::default()).map_err(|error| cannot(&error))?;
    Ok(translated_regex(&language.to_regex()))
}

/// Returns the grammar of a regular expression in the dialect of llguidance, without a slash.
fn translated_regex(regex: &str) -> GrammarInit {
    GrammarInit::Serialized(TopLevelGrammar::from_lark(format!("start: /{regex}/")))
}

/// Maximum number of brackets. The compiler recurses for each rule of a chain and for each bracket
/// around it. `STACK_BYTES` suffices for this number.
const MAX_BRACKETS: usize = 10_000;

fn lark(text: &str) -> Result<(GrammarInit, Patterns)> {
    if text.contains("allow_invalid_utf8") {
        return Err(cannot(&"allow_invalid_utf8 is not supported, since the output is text; leave it out"));
    }
    let brackets = text.bytes().filter(|byte| matches!(byte, b':' | b'(' | b'[' | b'{')).count();
    if brackets > MAX_BRACKETS {
        return Err(cannot(&format!("too many rules and brackets ({brackets}, limit {MAX_BRACKETS}); simplify the grammar")));
    }
    let (text, patterns) = lark::prepare(text, check_divisors).map_err(|why| cannot(&why))?;
    Ok((GrammarInit::Serialized(TopLevelGrammar::from_lark(text)), patterns))
}

fn json_schema(text: &str) -> Result<(GrammarInit, Patterns)> {
    let schema: Json = serde_json::from_str(text).map_err(|e| cannot(&format!("the schema is not valid JSON: {e}")))?;
    check_divisors(&schema).map_err(|why| cannot(&why))?;
    let Prepared { schema, patterns } = schema::prepare(schema, &mut WorkLimit::new()).map_err(|why| cannot(&why))?;
    Ok((GrammarInit::Serialized(TopLevelGrammar::from_json_schema(schema)), patterns))
}

/// Bounds the divisors. A lexer for multiples of n has at least n states, and the crate bounds
/// neither their time nor their memory.
fn check_divisors(schema: &Json) -> std::result::Result<(), String> {
    const MAX_STEPS: u64 = 10_000;
    let mut divisors = BTreeSet::new();
    collect_divisors(schema, &mut divisors);
    // The divisors of schemas that apply to one value are multiplied.
    let product = divisors.iter().fold(1u64, |product, &divisor| product.saturating_mul(divisor));
    let together = ["allOf", "anyOf", "oneOf", "$ref"].iter().any(|word| mentions(schema, word));
    let largest = if together { product } else { divisors.last().copied().unwrap_or(1) };
    if largest > MAX_STEPS {
        return Err(format!("\"multipleOf\" is too large ({largest} steps, limit {MAX_STEPS}); choose a smaller one"));
    }
    Ok(())
}

/// Collects the digits of every "multipleOf" without the decimal point and trailing zeros.
fn collect_divisors(schema: &Json, divisors: &mut BTreeSet<u64>) {
    match schema {
        Json::Object(members) => {
            if let Some(Json::Number(number)) = members.get("multipleOf") {
                let number = number.to_string();
                let digits: String = number.split(['e', 'E']).next().unwrap_or("").chars().filter(char::is_ascii_digit).collect();
                divisors.insert(digits.trim_end_matches('0').parse().unwrap_or(if digits.len() > 9 { u64::MAX } else { 1 }));
            }
            members.values().for_each(|schema| collect_divisors(schema, divisors));
        }
        Json::Array(schemas) => schemas.iter().for_each(|schema| collect_divisors(schema, divisors)),
        _ => {}
    }
}

fn mentions(schema: &Json, word: &str) -> bool {
    match schema {
        Json::Object(members) => members.contains_key(word) || members.values().any(|schema| mentions(schema, word)),
        Json::Array(schemas) => schemas.iter().any(|schema| mentions(schema, word)),
        _ => false,
    }
}

/// Returns a regular expression that matches these texts only.
fn alternatives(texts: &[String]) -> String {
    texts.iter().map(|text| literal(text)).collect::<Vec<_>>().join("|")
}

fn literal(text: &str) -> String {
    let escaped = |c: char| if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\x{{{:x}}}", c as u32) };
    text.chars().map(escaped).collect()
}
