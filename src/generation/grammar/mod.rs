//! Structured output: the tokens that a grammar allows next. The crate llguidance runs the
//! grammars, and this module handles its failures.
//!
//! A panic in the crate is an error of one request. Limits bound its time and memory, and it prints
//! nothing. Grammars are compiled on a thread with a deep stack.

mod cache;
mod compile;
mod failure;
mod lark;
mod masker;
mod pattern;
mod pending;
mod schema;
mod vocabulary;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::StopReason;
use llguidance::{ParserFactory, TokenParser};

pub use masker::{MaskId, Masked, Masker};
pub use pending::GrammarPace;
pub use vocabulary::Vocabulary;

use crate::error::{Code, Error, Result};
use crate::sys::quiet::no_panic;
use crate::types::options::Grammar;
use cache::Cache;
use compile::CompilePermit;
use pending::Change;

/// Compiles grammars for one vocabulary. Sync: each thread that adds a request compiles its
/// grammar.
pub struct Grammars {
    shared: Arc<Shared>,
    cache: Mutex<Cache>,
}

/// State that all constraints of an engine share.
struct Shared {
    factory: ParserFactory,
    /// Set of the tokens that a grammar may allow, one bit per token. Rows without a token are
    /// excluded.
    known: Vec<u32>,
    /// The set of the tokens that end a sequence.
    ends: Vec<u32>,
}

/// A compiled grammar, before the first token.
struct Compiled {
    /// Not advanced, so that its lexer has only its first states.
    pristine: Mutex<TokenParser>,
    /// Requests start with copies of this parser. The copies share its lexer and all states that it
    /// has computed.
    common: Mutex<TokenParser>,
    pace: Arc<GrammarPace>,
}

/// Maximum number of states of a lexer that new requests may share. With more states, it may soon
/// reach the limit of 50,000.
const MAX_SHARED_STATES: usize = 10_000;

impl Compiled {
    fn new(parser: TokenParser) -> Compiled {
        Compiled { common: Mutex::new(parser.deep_clone()), pristine: Mutex::new(parser), pace: Arc::default() }
    }

    /// Returns a parser at the beginning of the grammar that shares its lexer.
    fn with_shared_lexer(&self) -> std::result::Result<Box<TokenParser>, String> {
        let mut common = self.common.lock().unwrap_or_else(PoisonError::into_inner);
        let stats = no_panic(|| common.parser.lexer_stats());
        if stats.map_or(true, |stats| stats.error || stats.num_states > MAX_SHARED_STATES) {
            *common = *self.with_own_lexer()?;
        }
        no_panic(|| Box::new(common.clone()))
    }

    /// Returns a parser at the beginning of the grammar with its own lexer.
    fn with_own_lexer(&self) -> std::result::Result<Box<TokenParser>, String> {
        no_panic(|| Box::new(self.pristine.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()))
    }
}

impl Grammars {
    /// Takes milliseconds to a second, depending on the vocabulary. The first request with a
    /// grammar calls it.
    pub fn new(vocabulary: Vocabulary) -> Result<Grammars> {
        let (known, ends) = (vocabulary.known()?, vocabulary.ends()?);
        let factory = no_panic(|| vocabulary::factory(vocabulary)).flatten();
        let factory = factory.map_err(|why| Error::model(format!("the model's vocabulary does not support grammars: {why}")))?;
        Ok(Grammars { shared: Arc::new(Shared { factory, known, ends }), cache: Mutex::default() })
    }

    /// Returns a constraint at the beginning of the grammar. A grammar in the cache is copied
    /// instead of compiled.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint> {
        grammar.validate()?;
        if let Some(compiled) = self.cache().get(grammar) {
            return Constraint::new(self.shared.clone(), compiled);
        }
        let permit = CompilePermit::wait();
        // Another thread may have compiled the grammar meanwhile.
        if let Some(compiled) = self.cache().get(grammar) {
            return Constraint::new(self.shared.clone(), compiled);
        }
        let compiled = Arc::new(compile::on_deep_stack(self.shared.clone(), grammar, &permit)?);
        let constraint = Constraint::new(self.shared.clone(), compiled.clone())?;
        // If there is no memory for a copy, the next request compiles the grammar, too.
        if let Ok(grammar) = grammar.try_clone() {
            self.cache().insert(grammar, compiled);
        }
        Ok(constraint)
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The state of one sequence in its grammar. After an error of `mask` or `advance`, all later calls
/// return that error.
pub struct Constraint {
    shared: Arc<Shared>,
    compiled: Arc<Compiled>,
    parser: Box<TokenParser>,
    /// True if at most forks share the lexer.
    owns_lexer: bool,
    /// All tokens so far.
    tokens: Vec<u32>,
    /// True if the last token was an end-of-sequence token. The parser has not seen it.
    ended: bool,
    /// Further tokens that the grammar does not allow.
    strayed: Option<Box<Violation>>,
    mask: Vec<u32>,
    /// True if the mask belongs to the current state.
    fresh: bool,
    failure: Option<Error>,
    /// Changes that the parser has not seen, in their order.
    pending: VecDeque<Change>,
    /// True if the parser has consumed a part of a token.
    needs_replay: bool,
}

/// Tokens that the grammar does not allow, or that follow its end. The parser has not seen them, so
/// that `rewind` can remove them.
#[derive(Clone)]
struct Violation {
    tokens: usize,
    why: Error,
}

impl Constraint {
    fn new(shared: Arc<Shared>, compiled: Arc<Compiled>) -> Result<Constraint> {
        let parser = compiled.with_shared_lexer().map_err(broken)?;
        let mut constraint = Constraint {
            shared,
            compiled,
            parser,
            owns_lexer: false,
            tokens: Vec::new(),
            ended: false,
            strayed: None,
            mask: Vec::new(),
            fresh: false,
            failure: None,
            pending: VecDeque::new(),
            needs_replay: false,
        };
        constraint.mask.try_reserve_exact(constraint.shared.known.len())?;
        Ok(constraint)
    }

    /// Returns an independent copy.
    pub fn fork(&self) -> Result<Constraint> {
        self.check()?;
        let mut tokens = Vec::new();
        tokens.try_reserve(self.tokens.len() + 1)?;
        tokens.extend_from_slice(&self.tokens);
        let mut mask = Vec::new();
        mask.try_reserve_exact(self.shared.known.len())?;
        mask.extend_from_slice(&self.mask);
        Ok(Constraint {
            shared: self.shared.clone(),
            compiled: self.compiled.clone(),
            parser: no_panic(|| self.parser.clone()).map_err(broken)?,
            owns_lexer: self.owns_lexer,
            tokens,
            ended: self.ended,
            strayed: self.strayed.clone(),
            mask,
            fresh: self.fresh,
            failure: None,
            pending: pending::try_copy_changes(&self.pending)?,
            needs_replay: self.needs_replay,
        })
    }

    /// Returns the set of the tokens that the grammar allows next: bit t % 32 of word t / 32 for
    /// token t. It is kept until the state changes. If the grammar can end here, the set contains
    /// the end-of-sequence tokens. If it must end, the set contains no others.
    pub fn mask(&mut self) -> Result<&[u32]> {
        self.catch_up()?;
        if let Some(strayed) = &self.strayed {
            return Err(strayed.why.clone());
        }
        if !self.fresh {
            self.try_twice(Constraint::compute)?;
            self.fresh = true;
        }
        Ok(&self.mask)
    }

    /// Repeats the work with a separate lexer if the shared lexer fails, because another request
    /// may have caused the error.
    fn try_twice(&mut self, work: impl Fn(&mut Constraint) -> Result<()>) -> Result<()> {
        let mut outcome = work(self);
        if outcome.is_err() && !self.owns_lexer {
            outcome = self.replay(self.tokens.len()).and_then(|()| work(self));
        }
        outcome.inspect_err(|error| self.failure = Some(error.clone()))
    }

    fn compute(&mut self) -> Result<()> {
        self.mask.clear();
        if self.is_complete() {
            self.mask.extend_from_slice(&self.shared.ends);
            return Ok(());
        }
        let allowed = no_panic(|| self.parser.compute_mask()).map_err(broken)?.map_err(|e| self.stuck(&e))?;
        self.mask.extend(allowed.as_slice().iter().zip(&self.shared.known).map(|(allowed, known)| allowed & known));
        Ok(())
    }

    /// Reserves memory for `tokens` more tokens.
    pub fn reserve(&mut self, tokens: usize) -> Result<()> {
        Ok(self.tokens.try_reserve_exact(tokens)?)
    }

    /// Appends a token of the output.
    pub fn advance(&mut self, token: u32) -> Result<()> {
        self.catch_up()?;
        self.take(token)
    }

    fn take(&mut self, token: u32) -> Result<()> {
        if self.ended {
            let why = failure::after_end(&self.shared, &self.tokens, token);
            self.stray(1, why.clone());
            return Err(why);
        }
        self.tokens.try_reserve(1)?;
        self.try_twice(|constraint| constraint.consume(token)).map_err(|error| self.explained(error, token))?;
        self.tokens.push(token);
        self.fresh = false;
        Ok(())
    }

    /// Appends tokens of the host. If the grammar does not allow them, `mask` is an error until
    /// `rewind` removes them.
    pub fn append(&mut self, tokens: &[u32]) -> Result<()> {
        self.catch_up()?;
        self.append_now(tokens)
    }

    fn append_now(&mut self, tokens: &[u32]) -> Result<()> {
        for (place, &token) in tokens.iter().enumerate() {
            if self.strayed.is_none() && self.allows(token)? {
                self.take(token)?;
                continue;
            }
            if self.strayed.is_none() {
                let why = failure::refused(&self.shared, &mut self.parser, &self.tokens, token, Some("the host added it"));
                self.stray(tokens.len() - place, why);
            } else {
                self.stray(
                    tokens.len() - place,
                    Error::invalid("the host appended tokens that the grammar does not allow; remove them first"),
                );
            }
            break;
        }
        Ok(())
    }

    fn stray(&mut self, tokens: usize, why: Error) {
        self.strayed.get_or_insert_with(|| Box::new(Violation { tokens: 0, why })).tokens += tokens;
    }

    /// Returns true if the grammar allows the token next. Does not change the state.
    fn allows(&mut self, token: u32) -> Result<bool> {
        self.check()?;
        if self.ended || !has(&self.shared.known, token) {
            return Ok(false);
        }
        if has(&self.shared.ends, token) {
            return no_panic(|| self.parser.is_accepting()).map_err(broken);
        }
        let valid = no_panic(|| self.parser.validate_tokens_raw(&[token])).map_err(broken)?;
        Ok(valid.is_ok_and(|valid| valid == 1))
    }

    /// Adds the cause to the error. The parser has consumed a part of the token, so its previous
    /// state is restored first.
    fn explained(&mut self, error: Error, token: u32) -> Error {
        if error.code() != Code::InvalidArgument || self.replay(self.tokens.len()).is_err() {
            return error;
        }
        let error = match failure::fits(&self.shared, &mut self.parser, token) {
            true => failure::too_much(&self.shared, &self.tokens, error.message()),
            false => failure::refused(&self.shared, &mut self.parser, &self.tokens, token, None),
        };
        self.failure = Some(error.clone());
        error
    }

    fn consume(&mut self, token: u32) -> Result<()> {
        if has(&self.shared.ends, token) && no_panic(|| self.parser.is_accepting()).map_err(broken)? {
            self.ended = true;
            return Ok(());
        }
        let step = || {
            self.parser.consume_token(token)?;
            self.parser.check_stop()
        };
        let Err(why) = no_panic(step).map_err(broken)? else { return Ok(()) };
        match no_panic(|| self.parser.parser.get_error()).map_err(broken)? {
            Some(limit) => Err(failure::too_much(&self.shared, &self.tokens, &limit.message())),
            None => Err(Error::invalid(format!("the grammar does not allow token {token}: {}", compile::reason(&why)))),
        }
    }

    /// Removes the last tokens.
    pub fn rewind(&mut self, tokens: usize) -> Result<()> {
        self.catch_up()?;
        self.remove(tokens)
    }

    fn remove(&mut self, tokens: usize) -> Result<()> {
        let tokens = self.rewind_strayed(tokens);
        if tokens == 0 || self.rolls_back(tokens) {
            return Ok(());
        }
        let Some(left) = self.tokens.len().checked_sub(tokens) else {
            return Err(Error::invalid(format!(
                "too many tokens to remove ({tokens}, the sequence has {}); remove fewer",
                self.tokens.len()
            )));
        };
        self.replay(left).inspect_err(|error| self.failure = Some(error.clone()))?;
        self.tokens.truncate(left);
        (self.ended, self.fresh) = (false, false);
        Ok(())
    }

    /// Removes the last tokens if the parser can roll back. Otherwise returns false and changes
    /// nothing that `remove` needs.
    fn rolls_back(&mut self, tokens: usize) -> bool {
        let unseen = self.strayed.as_ref().map_or(0, |strayed| strayed.tokens);
        let Some(left) = self.tokens.len().checked_sub(tokens.saturating_sub(unseen)) else { return false };
        // The parser has not seen the end-of-sequence token.
        let seen = (self.tokens.len() - left).saturating_sub(usize::from(self.ended));
        if seen > 0 && !no_panic(|| self.parser.rollback(seen)).is_ok_and(|done| done.is_ok()) {
            return false;
        }
        self.rewind_strayed(tokens);
        if left < self.tokens.len() {
            self.parser.invalidate_bias_cache();
            self.tokens.truncate(left);
            (self.ended, self.fresh) = (false, false);
        }
        true
    }

    /// Removes tokens that the parser has not seen. Returns how many are left to remove.
    fn rewind_strayed(&mut self, tokens: usize) -> usize {
        let Some(strayed) = &mut self.strayed else { return tokens };
        let back = tokens.min(strayed.tokens);
        strayed.tokens -= back;
        if strayed.tokens == 0 {
            self.strayed = None;
        }
        tokens - back
    }

    /// Parses the first tokens again with a separate lexer. Some grammars, such as those with an
    /// inner stop string, have no rollback.
    fn replay(&mut self, tokens: usize) -> Result<()> {
        self.parser = self.compiled.with_own_lexer().map_err(broken)?;
        (self.owns_lexer, self.ended) = (true, false);
        (0..tokens).try_for_each(|i| {
            self.refuel()?;
            self.consume(self.tokens[i])
        })?;
        self.refuel()
    }

    /// Computes an empty mask, because llguidance counts the work of a step from the last mask on.
    fn refuel(&mut self) -> Result<()> {
        let nothing = vocabulary::Nothing(self.shared.factory.tok_env().clone());
        no_panic(|| self.parser.parser.compute_bias(&nothing, b" ")).map(drop).map_err(broken)
    }

    /// Returns true if only an end-of-sequence token can follow.
    pub fn is_complete(&self) -> bool {
        self.ended || self.parser.stop_reason() == StopReason::NoExtension
    }

    fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn stuck(&mut self, why: &impl std::fmt::Display) -> Error {
        if self.parser.stop_reason() == StopReason::NoExtensionBias {
            return failure::stuck(&self.shared, &mut self.parser, &self.tokens);
        }
        failure::too_much(&self.shared, &self.tokens, &compile::reason(why))
    }
}

fn has(set: &[u32], token: u32) -> bool {
    set.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// Returns the error for a panic of the crate, which ends only this constraint.
fn broken(panic: String) -> Error {
    Error::internal(format!("panic in the grammar of this request: {}", compile::reason(&panic)))
}

#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod time_test;
