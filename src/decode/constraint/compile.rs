//! From a request's grammar to a parser that stands at its beginning.

use std::fmt::Display;
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use serde_json::{Value as Json, json};

use super::{Compiled, Shared};
use crate::error::{Error, Result};
use crate::options::Grammar;
use crate::sys::quiet::no_panic;
use crate::sys::threads;

/// The compiler recurses into what a grammar nests. The system lends pages of it as they are touched.
const STACK_BYTES: usize = 64 << 20;

/// Between the parts of a JSON text: one space or tab, or a line break and its indentation. Without a limit a model that is
/// unsure of what comes next may write spaces until its tokens run out.
const WHITESPACE: &str = r"[ \t]|\r?\n[ \t]{0,40}";

/// Bounds on what one grammar may cost: about 20 ms to compile its lexer, 5 ms per mask, 100 MB of lexer states per request.
pub(super) fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 50_000,
        max_grammar_size: 500_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Compiles on a thread of its own: the caller's stack may be as small as its host made it.
pub(super) fn on_deep_stack(shared: Arc<Shared>, grammar: &Grammar) -> Result<Compiled> {
    grammar.validate()?;
    let grammar = grammar.clone();
    let (answer, question) = crossbeam::channel::bounded(1);
    let work = move || {
        // Nobody hears of it only if the asking thread is gone.
        let _ = answer.send(no_panic(|| parser(&shared, grammar)));
    };
    let thread = threads::spawn_deep("pagedllm-grammar".into(), STACK_BYTES, work)
        .map_err(|e| Error::capacity(format!("could not start the thread that compiles grammars: {e}")))?;
    let answer = question.recv();
    // It has said all it had to say.
    let _ = thread.join();
    match answer {
        Ok(Ok(parser)) => Ok(Compiled { start: parser?.into() }),
        Ok(Err(panic)) => Err(cannot(&panic)),
        Err(_) => Err(cannot(&"the compiler gave up")),
    }
}

fn cannot(why: &impl Display) -> Error {
    Error::invalid(format!("the grammar cannot be compiled: {}", reason(why)))
}

/// The crate's own words, without what it adds for its authors.
pub(super) fn reason(why: &impl Display) -> String {
    let why = format!("{why:#}");
    let end = ["\n<backtrace>", "\n<non-verbose", "\n<state>"].iter().filter_map(|mark| why.find(mark)).min();
    why[..end.unwrap_or(why.len())].trim_end().to_string()
}

fn parser(shared: &Shared, grammar: Grammar) -> Result<TokenParser> {
    let init = match grammar {
        Grammar::JsonSchema(schema) => json_schema(&schema)?,
        Grammar::JsonObject => json_schema(r#"{"type": "object"}"#)?,
        Grammar::Regex(regex) => GrammarInit::Serialized(TopLevelGrammar::from_regex(&regex)),
        Grammar::Lark(lark) => GrammarInit::Serialized(TopLevelGrammar::from_lark(lark)),
        Grammar::Choice(texts) => GrammarInit::Serialized(TopLevelGrammar::from_regex(&alternatives(&texts))),
    };
    let mut parser = shared.factory.create_parser_from_init_default(init).map_err(|e| cannot(&e))?;
    parser.start_without_prompt();
    // A grammar that wants nothing is complete from the start.
    parser.check_stop().map_err(|e| cannot(&e))?;
    Ok(parser)
}

/// The schema with our whitespace. What its own "x-guidance" says goes first.
fn json_schema(text: &str) -> Result<GrammarInit> {
    let mut schema: Json = serde_json::from_str(text).map_err(|e| cannot(&format!("the schema is not valid JSON: {e}")))?;
    if let Some(members) = schema.as_object_mut() {
        let options = members.entry("x-guidance").or_insert_with(|| json!({}));
        if let Some(options) = options.as_object_mut()
            && options.get("whitespace_flexible") != Some(&Json::Bool(false))
        {
            options.entry("whitespace_pattern").or_insert_with(|| WHITESPACE.into());
        }
    }
    Ok(GrammarInit::Serialized(TopLevelGrammar::from_json_schema(schema)))
}

/// A regular expression that matches these texts and no others.
fn alternatives(texts: &[String]) -> String {
    texts.iter().map(|text| literal(text)).collect::<Vec<_>>().join("|")
}

fn literal(text: &str) -> String {
    let escaped = |c: char| if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\x{{{:x}}}", c as u32) };
    text.chars().map(escaped).collect()
}
